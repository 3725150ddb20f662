"""The parts of `kvstore bench agent`, and the command itself on a few short sessions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_agent.bench.clairvoyant import clairvoyant_moves
from gpu_agent.bench.content import Content, block_hash
from gpu_agent.bench.loop import Loop
from gpu_agent.bench.measure import TARGETS, missed_targets, read_sessions
from gpu_agent.bench.pools import WholePool
from gpu_agent.bench.record import record
from gpu_agent.bench.serving import Batching, Step, peak_count, serve, while_busy
from gpu_agent.bench.sessions import FORMAT, Session, Turn, parse_sessions, to_json
from gpu_agent.device.cpu import CpuDevice
from kvstore.errors import CorruptBlockError, InvalidArgumentError
from kvstore.slots import SlotId

BLOCK_BYTES = 4096
TOKENS_PER_BLOCK = 4

turns = st.builds(
    Turn,
    pause_steps=st.integers(0, 30),
    input_tokens=st.integers(1, 20),
    output_tokens=st.integers(1, 10),
)
many_sessions = st.lists(st.lists(turns, min_size=1, max_size=4), min_size=1, max_size=6).map(
    lambda found: [Session(name=f"s{number}", turns=tuple(each)) for number, each in enumerate(found)]
)
batchings = st.builds(
    Batching, batch_count=st.integers(1, 3), slice_steps=st.integers(1, 12), prefill_tokens=st.integers(1, 8)
)


def _sessions(*sessions: Sequence[tuple[int, int, int]]) -> list[Session]:
    return [
        Session(
            name=f"s{number}",
            turns=tuple(Turn(pause_steps=one[0], input_tokens=one[1], output_tokens=one[2]) for one in session),
        )
        for number, session in enumerate(sessions)
    ]


@given(many_sessions, batchings)
def test_all_tokens_are_computed_once_and_nobody_starts_unannounced(
    sessions: list[Session], batching: Batching
) -> None:
    done = {session.name: 0 for session in sessions}
    running: set[str] = set()
    queued: set[str] = set()
    number = -1
    for step in serve(sessions, batching):
        assert step.number > number
        number = step.number
        assert set(step.starts) <= queued
        running |= set(step.starts)
        assert {work.sequence for work in step.works} == running
        assert len(running) <= batching.batch_count
        for work in step.works:
            assert work.token_count == done[work.sequence]
            done[work.sequence] += work.new_count
        running -= set(step.ends)
        queued = {name for name, _ in step.queue}
        expected = [at for _, at in step.queue]
        assert expected == sorted(expected)
        assert all(at > step.number for at in expected)
    assert done == {session.name: session.token_count for session in sessions}
    assert not running


def test_a_sequence_whose_slice_is_over_lets_others_go_first() -> None:
    steps = list(serve(_sessions([(0, 1, 8)], [(0, 1, 8)]), Batching(batch_count=1, slice_steps=3, prefill_tokens=4)))
    assert [step.starts for step in steps if step.starts] == [(name,) for name in ["s0", "s1"] * 3]


def _moves(steps: Sequence[Step], slot_count: int) -> tuple[int, int]:
    moves = clairvoyant_moves(steps, tokens_per_block=TOKENS_PER_BLOCK, slot_count=slot_count)
    return moves.loaded_count, moves.offloaded_count


def test_a_clairvoyant_moves_what_does_not_fit_and_nothing_when_all_does() -> None:
    # Two sequences of two full blocks each, which take turns, one at a time, twice.
    steps = list(
        serve(
            _sessions([(0, 6, 2), (1, 1, 1)], [(0, 6, 2), (1, 1, 1)]),
            Batching(batch_count=1, slice_steps=99, prefill_tokens=8),
        )
    )
    peak = peak_count(steps, tokens_per_block=TOKENS_PER_BLOCK)
    assert peak == 5
    assert _moves(steps, peak) == (0, 0)
    # One slot too few when the first comes back and opens a third block: one of the other's leaves, and comes back for
    # one of the first's, which is not needed any more and yet not lost.
    assert _moves(steps, 4) == (1, 2)
    with pytest.raises(InvalidArgumentError, match="slot_count"):
        _moves(steps, 2)


@settings(max_examples=40)
@given(many_sessions, batchings)
def test_a_clairvoyant_with_more_room_never_moves_more(sessions: list[Session], batching: Batching) -> None:
    steps = list(serve(sessions, batching))
    peak = peak_count(steps, tokens_per_block=TOKENS_PER_BLOCK)
    moved = []
    for slot_count in range(1, peak + 1):
        try:
            moved.append(sum(_moves(steps, slot_count)))
        except InvalidArgumentError:
            assert not moved
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] == 0


def test_every_block_has_its_own_bytes_and_a_changed_one_is_found() -> None:
    content, memory = Content(block_bytes=BLOCK_BYTES), torch.zeros((3, BLOCK_BYTES), dtype=torch.uint8)
    slots = [SlotId(number) for number in range(3)]
    blocks = [block_hash("s", number) for number in range(3)]
    for slot, block in zip(slots, blocks, strict=True):
        content.write(memory, slot, block)
    assert content.wrong(memory, slots, blocks) == []
    assert content.wrong(memory, slots[::-1], blocks) == [blocks[0], blocks[2]]
    memory[1, BLOCK_BYTES - 1] ^= 1
    assert content.wrong(memory, slots, blocks) == [blocks[1]]


def _loop(pool: WholePool) -> Loop:
    return Loop(
        pool,
        Content(block_bytes=BLOCK_BYTES),
        tokens_per_block=TOKENS_PER_BLOCK,
        prefill_tokens=8,
        step_s=0.0,
    )


def spoil(pool: WholePool) -> None:
    pool.memory.fill_(7)


def test_the_loop_uses_as_many_slots_as_planned_and_finds_a_block_that_was_overwritten() -> None:
    steps = list(
        serve(
            _sessions([(0, 9, 3), (2, 5, 2)], [(1, 7, 4), (0, 2, 2)]),
            Batching(batch_count=2, slice_steps=3, prefill_tokens=8),
        )
    )
    device = CpuDevice()
    try:
        pool = WholePool(device, slot_count=20, block_bytes=BLOCK_BYTES)
        run = _loop(pool).run(steps)
        assert run.token_count == 3 + 2 + 4 + 2
        assert run.checked_count > 0
        assert pool.peak_count == peak_count(steps, tokens_per_block=TOKENS_PER_BLOCK)

        broken = WholePool(device, slot_count=20, block_bytes=BLOCK_BYTES)
        with pytest.raises(CorruptBlockError, match="not what was written"):
            _loop(broken).run(steps, progress=lambda _: spoil(broken))
    finally:
        device.close()


def test_recorded_sessions_survive_json_and_are_refused_by_name() -> None:
    recorded = read_sessions(None)
    assert parse_sessions(json.loads(json.dumps(to_json(recorded)))) == recorded
    with pytest.raises(InvalidArgumentError, match="format"):
        parse_sessions({"format": "other"})
    with pytest.raises(InvalidArgumentError, match="turn"):
        parse_sessions(to_json(recorded) | {"format": FORMAT, "sessions": [[[0, 0, 1]]]})


def test_the_recorded_schedule_is_busy_and_does_not_fit() -> None:
    recorded = read_sessions(None)
    batching = Batching(batch_count=4, slice_steps=64, prefill_tokens=128)
    steps = while_busy(list(serve(recorded.sessions, batching)))
    peak = peak_count(steps, tokens_per_block=recorded.tokens_per_block)
    assert sum(len(step.works) for step in steps) > 3.8 * len(steps)
    assert clairvoyant_moves(steps, tokens_per_block=recorded.tokens_per_block, slot_count=peak // 2).count > peak


def test_a_trace_becomes_sessions_in_proportion() -> None:
    requests = [
        {"session_id": 1, "timestamp": 0, "input_length": 800, "output_length": 80},
        {"session_id": 2, "timestamp": 5, "input_length": 900, "output_length": 80},
        {"session_id": 1, "timestamp": 4000, "input_length": 1600, "output_length": 40},
        {"session_id": 2, "timestamp": 9, "input_length": 100, "output_length": 80},
    ]
    recorded = record(
        {"source": "here", "licence": "none"},
        requests,
        session_count=1,
        turn_count=2,
        tokens_max=2000,
        compress=8,
        start_gap_steps=3,
    )
    # 4 s are 200 steps of 20 ms, an eighth of which is 25, ten of them the answer's.
    assert recorded.sessions[0].turns == (
        Turn(pause_steps=0, input_tokens=100, output_tokens=10),
        Turn(pause_steps=15, input_tokens=90, output_tokens=5),
    )


def test_a_missed_target_is_named_with_what_it_should_be() -> None:
    good = {"peak_vs_baseline": 0.5, "throughput_vs_baseline": 0.9, "prefetch_hit_rate": 0.9, "stall_fraction": 0.05}
    assert missed_targets(good) == []
    assert missed_targets(good | {"stall_fraction": 0.2}) == ["stall_fraction is 0.2, which should be at most 0.05"]
    assert good.keys() == TARGETS.keys()


def test_the_command_serves_the_same_sessions_from_three_pools(tmp_path: Path) -> None:
    sessions = {
        "format": FORMAT,
        "source": "a test",
        "licence": "none",
        "compress": 8,
        "tokens_per_block": 16,
        "sessions": [[[number, 160, 8], [4, 16, 8], [4, 16, 8]] for number in range(8)],
    }
    file = tmp_path / "sessions.json"
    file.write_text(json.dumps(sessions))
    command = [sys.executable, "-m", "kvstore_client.cli", "bench", "agent", "--json", "--rounds", "1"]
    command += ["--block-size", "16KiB", "--batch", "2", "--step-ms", "5", "--sessions", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert ended.returncode in (0, 1), ended.stderr
    figures = json.loads(ended.stdout)
    assert figures.keys() >= TARGETS.keys()
    assert figures["peak_vs_baseline"] <= 0.5
    assert figures["checked_blocks"] > 0
    assert figures["loaded_bytes"] > 0
    assert (ended.returncode == 1) == any(name in ended.stderr for name in TARGETS)
