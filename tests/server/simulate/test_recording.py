from __future__ import annotations

import json
import struct
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore.eviction.use import Finish
from kvstore.messages import Access, AccessKind, FinishReason
from kvstore.messages import Hint as HintMessage
from kvstore_client import Client, Hint
from kvstore_client.cli import cli
from kvstore_server.simulate.recording import SAME_REQUEST_S, Recording
from kvstore_server.simulate.trace import Trace
from kvstore_server.simulate.traces import read_trace
from tests.client.builders import chain, namespace
from tests.conftest import DaemonProcess


def access(
    *numbers: int, at_s: float = 0.0, kind: AccessKind = AccessKind.LOOKUP, hint: HintMessage | None = None
) -> Access:
    return Access(kind=kind, uptime_s=at_s, block_numbers=struct.pack(f"<{len(numbers)}Q", *numbers), hint=hint)


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
