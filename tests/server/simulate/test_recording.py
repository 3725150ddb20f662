from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore.eviction.use import Finish
from kvstore.messages import Access, AccessKind, FinishReason
from kvstore.messages import Hint as HintMessage
from kvstore_client import Client, Hint
from kvstore_client.cli import cli
from kvstore_server.simulate.bounds import clairvoyant, foresee, infinite
from kvstore_server.simulate.record import Progress
from kvstore_server.simulate.recording import SAME_REQUEST_S, Recording
from kvstore_server.simulate.replay import replay
from kvstore_server.simulate.tiers import TierPlan
from kvstore_server.simulate.trace import Trace
from kvstore_server.simulate.traces import read_trace, write_trace
from tests.client.builders import chain, namespace, payloads
from tests.conftest import DaemonProcess
from tests.server.simulate.builders import SMOKE


def access(
    *numbers: int,
    at_s: float = 0.0,
    kind: AccessKind = AccessKind.LOOKUP,
    hint: HintMessage | None = None,
    matched_count: int = 0,
) -> Access:
    packed = struct.pack(f"<{len(numbers)}Q", *numbers)
    return Access(kind=kind, uptime_s=at_s, block_numbers=packed, hint=hint, matched_count=matched_count)


def write(*numbers: int, parent: int | None = None, at_s: float = 1.0, hint: HintMessage | None = None) -> Access:
    before = () if parent is None else (parent,)
    return access(*before, *numbers, at_s=at_s, kind=AccessKind.WRITE, hint=hint, matched_count=len(before))


def recorded(*accesses: Access) -> Trace:
    recording = Recording(tokens_per_block=16)
    for one in accesses:
        recording.add(one)
    return recording.trace(name="made", source="made")


def test_a_lookup_is_a_request_and_prefixes_are_shared() -> None:
    trace = recorded(access(71, 72, 73, at_s=1.0), access(71, 72, 99, at_s=2.5))
    assert [trace.chain(request) for request in trace.requests] == [[0, 1, 2], [0, 1, 3]]
    assert [request.input_tokens for request in trace.requests] == [48, 48]
    assert [request.time_s for request in trace.requests] == [1.0, 2.5]


def test_a_prompt_that_waits_for_its_turn_is_one_request_however_often_it_is_looked_up() -> None:
    again = [access(1, 2, at_s=at_s) for at_s in (0.0, 0.1, SAME_REQUEST_S)]
    assert len(recorded(*again).requests) == 1
    assert len(recorded(*again, access(1, 2, at_s=3 * SAME_REQUEST_S)).requests) == 2


def test_what_is_read_belongs_to_the_lookup_before_it_and_else_is_a_request() -> None:
    read = access(1, 2, at_s=1.0, kind=AccessKind.READ)
    assert len(recorded(access(1, 2, 3), read).requests) == 1
    assert len(recorded(read).requests) == 1
    assert len(recorded(access(1, 2, 3), access(1, 2, at_s=1.0)).requests) == 2, "a lookup of less is another prompt"


def test_equal_prompts_of_different_sessions_or_turns_are_different_requests() -> None:
    hints = [HintMessage(session_hash=1, turn=1), HintMessage(session_hash=2), HintMessage(session_hash=1, turn=2)]
    trace = recorded(*[access(1, 2, hint=hint) for hint in hints])
    assert [(request.session_id, request.turn) for request in trace.requests] == [(0, 1), (1, None), (0, 2)]


def test_what_is_told_later_is_added_to_the_request() -> None:
    first = HintMessage(session_hash=5, input_tokens=40, priority=1)
    later = HintMessage(finish_reason=FinishReason.TOOL_USE, output_tokens=7, expected_return_s=20.0)
    [request] = recorded(
        access(1, 2, hint=first),
        access(1, 2, at_s=60.0, kind=AccessKind.HINT, hint=later),
        access(kind=AccessKind.HINT),
    ).requests
    assert (request.input_tokens, request.priority, request.session_id) == (40, 1, 0)
    assert (request.finish, request.output_tokens, request.expected_return_s) == (Finish.TOOL_USE, 7, 20.0)


def test_what_is_written_behind_a_prompt_is_there_for_the_next_one() -> None:
    """It was new when it first came in a prompt, and the ceiling too low by all answers."""
    turn = (access(1, 2, 3), write(2, 3, parent=1), write(4, parent=3, at_s=5.0), write(5, 6, parent=4, at_s=9.0))
    trace = recorded(*turn, access(1, 2, 3, 4, 5, 6, 7, at_s=60.0))
    first, second = trace.requests
    assert trace.chain(first) == [0, 1, 2, 3, 4, 5]
    assert (first.added_blocks, first.prompt_blocks, first.input_tokens) == (3, 3, 48)
    assert (trace.chain(second), second.added_blocks) == ([0, 1, 2, 3, 4, 5, 6], 0)
    assert infinite(trace).hit_tokens == 6 * 16
    assert clairvoyant(foresee(trace), capacity_blocks=6).hit_tokens == 6 * 16
    plan = TierPlan(name="memory", capacity_blocks=6, policy="lru")
    assert replay(trace, [plan]).hit_tokens == 6 * 16


def test_writing_a_prompt_itself_or_the_same_answer_again_adds_nothing() -> None:
    trace = recorded(access(1, 2, 3), write(1, 2, 3), write(4, parent=3), write(3, 4, parent=2), write(4, parent=3))
    [request] = trace.requests
    assert (trace.chain(request), request.added_blocks) == ([0, 1, 2, 3], 1)


def test_an_answer_belongs_to_the_prompt_that_it_goes_on_and_not_to_one_that_goes_on_otherwise() -> None:
    trace = recorded(access(1, 2), access(1, 9), write(5, parent=2), write(6, parent=5), write(7, parent=9))
    assert [trace.chain(request) for request in trace.requests] == [[0, 1, 2, 3], [0, 4, 5]]
    assert [request.added_blocks for request in trace.requests] == [2, 1]


def test_two_answers_to_one_prompt_are_two_requests_once_each_was_asked_for() -> None:
    trace = recorded(
        access(1, 2), write(3, parent=2), access(1, 2, at_s=50.0), write(4, parent=2, at_s=51.0), write(5, parent=4)
    )
    assert [trace.chain(request) for request in trace.requests] == [[0, 1, 2], [0, 1, 3, 4]]


def test_what_is_stored_and_was_never_asked_for_is_there_all_the_same() -> None:
    trace = recorded(write(1, 2, at_s=0.0), write(3, parent=2), access(1, 2, 3, at_s=60.0))
    first, second = trace.requests
    assert (first.input_tokens, first.added_blocks, second.added_blocks) == (0, 3, 0)
    assert infinite(trace).hit_tokens == 48
    assert len(recorded(write(8, parent=7)).requests) == 0, "nobody knows where it belongs"


def test_numbers_are_by_first_appearance_though_answers_come_later_than_other_prompts(tmp_path: Path) -> None:
    trace = recorded(access(1, 2), access(8, 9), write(3, parent=2), write(10, parent=9), access(8, 9, 10, at_s=60.0))
    assert [trace.chain(request) for request in trace.requests] == [[0, 1, 2], [3, 4, 5], [3, 4, 5]]
    write_trace(trace, tmp_path / "trace.jsonl", real="nothing")
    again = read_trace(tmp_path / "trace.jsonl")
    # Of input lengths, as of all else, nothing is lost.
    assert [replace(one, time_s=0.0) for one in again.requests] == [replace(one, time_s=0.0) for one in trace.requests]


@pytest.mark.parametrize(
    "numbers",
    [(1, 2, 3), (1, 2, 3, 4, 5), (1, 2), (4, 5), (3, 4), (5,), (1, 2, 3, 4, 5, 6)],
    ids=["the prompt", "with the answer", "its head", "the answer alone", "across", "the last block", "and more"],
)
def test_a_hint_is_of_the_request_that_has_some_of_its_blocks(numbers: tuple[int, ...]) -> None:
    later = HintMessage(finish_reason=FinishReason.END_TURN, output_tokens=9)
    trace = recorded(
        access(1, 2, 3),
        write(4, 5, parent=3),
        access(77, 78),
        access(*numbers, at_s=60.0, kind=AccessKind.HINT, hint=later),
    )
    assert [request.output_tokens for request in trace.requests] == [9, None]


def test_a_hint_that_names_its_session_is_of_that_sessions_turn_whatever_blocks_it_names() -> None:
    hint = HintMessage(session_hash=5, turn=1)
    told = HintMessage(session_hash=5, turn=1, is_done=True)
    asked = (access(1, 2, hint=hint), access(1, 2, 3, hint=HintMessage(session_hash=5, turn=2)), access(1, 2, at_s=1.0))
    trace = recorded(*asked, access(99, kind=AccessKind.HINT, hint=told))
    assert [request.is_done for request in trace.requests] == [True, False, False]


def test_what_a_write_tells_is_of_its_request() -> None:
    trace = recorded(access(1), write(2, parent=1, hint=HintMessage(session_hash=7, output_tokens=3)))
    assert (trace.requests[0].session_id, trace.requests[0].output_tokens) == (0, 3)


def test_progress_is_said_every_so_often_and_names_what_was_lost() -> None:
    progress, recording = Progress(every_s=60.0), Recording(tokens_per_block=16)
    recording.add(access(1, 2))
    said = [progress.text(recording, dropped_count=0, now_s=now_s) for now_s in (0.0, 59.0, 60.0, 61.0)]
    assert said == [None, None, "1 requests, 2 unique blocks", None]
    assert progress.text(recording, dropped_count=4, now_s=120.0) == "1 requests, 2 unique blocks, 4 accesses lost"


def recording_of(daemon: DaemonProcess, out: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvstore_client.cli", "trace", "record", "--address", daemon.unix_address]
    return subprocess.Popen(
        [*command, "--out", str(out), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_recording_that_is_told_to_end_begins_with_the_namespace_and_is_written_with_its_answers(
    daemon: DaemonProcess, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "trace.jsonl"
    space, hashes = namespace(), chain(5)
    with recording_of(daemon, out, "--namespace", space.id.hex()[:12]) as recorder:
        try:
            assert recorder.stderr is not None
            assert "waiting for a client to open a namespace whose id begins with" in recorder.stderr.readline()
            with Client(daemon.unix_address) as client:
                client.lookup(space, hashes[:3])
                assert "recording" in recorder.stderr.readline()
                client.lookup(space, hashes[:3])
                client.put(space, hashes, payloads(space, 5))
                client.hint(space, hashes, Hint(output_tokens=8))
            recorder.send_signal(number)
            assert recorder.wait(30) == 0, recorder.stderr.read()
        finally:
            recorder.kill()
    [request] = read_trace(out).requests
    assert (request.prompt_blocks, request.added_blocks, request.output_tokens) == (3, 2, 8)
    assert [one.name for one in tmp_path.iterdir()] == ["trace.jsonl"], "nothing else is left"


def test_where_a_trace_cannot_be_written_is_said_before_anything_is_recorded(tmp_path: Path) -> None:
    there = tmp_path / "there.jsonl"
    there.write_text("precious", encoding="utf-8")
    nowhere = "unix:/nowhere.sock"
    for out, named in (
        (there, "there.jsonl'; allowed: a file that is not there yet, or any with --force"),
        (tmp_path / "missing" / "out.jsonl", "allowed: a file in a folder that can be written to (No such file"),
    ):
        said = CliRunner().invoke(cli, ["trace", "record", "--address", nowhere, "--out", str(out)])
        assert isinstance(said.exception, InvalidArgumentError)
        assert named in str(said.exception)
        converted = CliRunner().invoke(cli, ["trace", "convert", str(SMOKE), "--out", str(out)])
        assert named in str(converted.exception)
    assert there.read_text(encoding="utf-8") == "precious"
    assert CliRunner().invoke(cli, ["trace", "convert", str(SMOKE), "--out", str(there), "--force"]).exit_code == 0
    assert len(read_trace(there).requests) == 300


def test_a_recording_without_anything_asked_or_without_a_daemon_leaves_no_file(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    out, space = tmp_path / "out.jsonl", namespace()
    with Client(daemon.unix_address) as client:
        client.lookup(space, chain(1))
    arguments = ["trace", "record", "--out", str(out), "--for", "0.2", "--address"]
    for address, prefix, said in (
        (daemon.unix_address, space.id.hex()[:12], "nothing was asked of this namespace"),
        (daemon.unix_address, "00000000", "no client has opened a namespace whose id begins with 00000000"),
        ("unix:/nowhere.sock", "", "no daemon answers"),
    ):
        found = CliRunner().invoke(cli, [*arguments, address, "--namespace", prefix])
        assert isinstance(found.exception, UnavailableError)
        assert said in str(found.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("transport", ["grpc", "slab"])
def test_a_daemon_tells_what_was_looked_up_and_never_hashes_or_names(daemon: DaemonProcess, transport: str) -> None:
    address = daemon.address if transport == "grpc" else daemon.unix_address
    space, hashes = namespace(), chain(4)
    with Client(address) as client:
        client.lookup(space, hashes)
        start = client.accesses(space)
        assert start.accesses == ()
        client.lookup(space, hashes, hint=Hint(session="alice", turn=2))
        client.lookup(space, hashes[:2])
        taken = client.accesses(space, after_number=start.last_number)
    first, second = taken.accesses
    assert first.block_numbers[: len(second.block_numbers)] == second.block_numbers
    assert first.hint is not None
    assert (first.hint.turn, len(first.block_numbers)) == (2, 4 * 8)
    assert not any(one[:8] in first.block_numbers for one in hashes)


def test_a_live_daemons_requests_are_recorded_as_a_trace(daemon: DaemonProcess, tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl.gz"
    space, hashes = namespace(), chain(5)
    with Client(daemon.unix_address) as client:
        client.lookup(space, hashes)
        results = []
        arguments = [
            "trace",
            "record",
            "--address",
            daemon.unix_address,
            "--out",
            str(out),
            "--requests",
            "2",
            "--json",
        ]
        recorder = threading.Thread(target=lambda: results.append(CliRunner().invoke(cli, arguments)))
        recorder.start()
        deadline_s = time.monotonic() + 30
        while recorder.is_alive() and time.monotonic() < deadline_s:
            client.lookup(space, hashes)
            client.lookup(space, hashes[:3])
            recorder.join(0.05)
    assert results[0].exit_code == 0, results[0].output
    shown = json.loads(results[0].stdout)
    assert (shown["requests"], shown["unique_blocks"], shown["dropped_count"]) == (2, 5, 0)
    trace = read_trace(out)
    assert trace.tokens_per_block == space.tokens_per_block
    assert sorted(request.block_count for request in trace.requests) == [3, 5]


def test_a_daemon_with_several_namespaces_is_recorded_by_name(daemon: DaemonProcess, tmp_path: Path) -> None:
    with Client(daemon.unix_address) as client:
        for _ in range(2):
            client.lookup(namespace(), chain(1))
    arguments = ["trace", "record", "--address", daemon.unix_address, "--out", str(tmp_path / "out.jsonl")]
    said = CliRunner().invoke(cli, arguments)
    assert "--namespace is ''; allowed: the start of the id of exactly one of" in str(said.exception)
