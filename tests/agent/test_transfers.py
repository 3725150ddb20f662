"""Copies of blocks are joined where they lie next to each other, and nothing else about them changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpu_agent.core.host_ranges import HostRange, HostRanges
from gpu_agent.core.transfers import PITCH_BYTES_MAX, Move, Transfer, plan_transfers

BLOCK = 100

places = st.lists(st.integers(0, 12), unique=True, max_size=10)


@given(sources=places, targets=places, source_pitch=st.integers(BLOCK, 300), target_pitch=st.integers(BLOCK, 300))
def test_a_plan_moves_every_block_where_it_belongs_and_nothing_else(
    sources: list[int], targets: list[int], source_pitch: int, target_pitch: int
) -> None:
    moves = [
        Move(10_000 + source * source_pitch, 90_000 + target * target_pitch)
        for source, target in zip(sources, targets, strict=False)
    ]
    assert sorted(_moves(plan_transfers(moves, block_bytes=BLOCK))) == sorted(moves)


@given(count=st.integers(1, 20), source_gap=st.integers(0, 50), target_gap=st.integers(0, 50), seed=st.randoms())
def test_neighbours_are_one_transfer_in_whatever_order_they_are_given(
    count: int, source_gap: int, target_gap: int, seed: object
) -> None:
    moves = [Move(index * (BLOCK + source_gap), 9_000 + index * (BLOCK + target_gap)) for index in range(count)]
    seed.shuffle(moves)  # type: ignore[attr-defined]
    (transfer,) = plan_transfers(moves, block_bytes=BLOCK)
    is_whole = count == 1 or source_gap == target_gap == 0
    assert transfer.row_count == (1 if is_whole else count)
    assert transfer.row_count * transfer.row_bytes == count * BLOCK


def test_blocks_of_two_registrations_are_never_one_transfer() -> None:
    moves = [Move(index * BLOCK, index * BLOCK, group=index // 2) for index in range(4)]
    assert [transfer.row_bytes for transfer in plan_transfers(moves, block_bytes=BLOCK)] == [2 * BLOCK, 2 * BLOCK]


def test_rows_too_far_apart_for_the_hardware_are_transfers_of_their_own() -> None:
    moves = [Move(index * (PITCH_BYTES_MAX + 1), index * BLOCK) for index in range(3)]
    assert len(plan_transfers(moves, block_bytes=BLOCK)) == 3


def test_the_last_of_several_moves_to_one_target_is_carried_out_last() -> None:
    moves = [Move(500, 0), Move(100, 0), Move(300, 0)]
    assert [transfer.source for transfer in plan_transfers(moves, block_bytes=BLOCK)] == [500, 100, 300]


def test_nothing_to_move_is_an_empty_plan() -> None:
    assert plan_transfers([], block_bytes=BLOCK) == []


@given(
    ranges=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20), st.booleans()), max_size=6),
    asked=st.tuples(st.integers(0, 80), st.integers(1, 10), st.booleans()),
)
def test_memory_is_reached_only_within_one_range_that_allows_it(
    ranges: list[tuple[int, int, bool]], asked: tuple[int, int, bool]
) -> None:
    known, owner_of = HostRanges(), dict[int, HostRange]()
    for address, size_bytes, is_read_only in ranges:
        added = HostRange(address, size_bytes, is_read_only)
        taken = range(address, address + size_bytes)
        assert known.add(added) == (not any(byte in owner_of for byte in taken))
        for byte in taken:
            if known.find(byte, 1, is_written=False) == added:
                owner_of.setdefault(byte, added)
    address, size_bytes, is_written = asked
    owners = {owner_of.get(byte) for byte in range(address, address + size_bytes)}
    expected = owners.pop() if len(owners) == 1 else None
    if expected is not None and expected.is_read_only and is_written:
        expected = None
    assert known.find(address, size_bytes, is_written=is_written) == expected
    for added in set(owner_of.values()):
        known.remove(added)
    assert known.size_bytes == 0


def _moves(transfers: list[Transfer]) -> list[Move]:
    return [
        Move(
            transfer.source + row * transfer.source_pitch_bytes + offset,
            transfer.target + row * transfer.target_pitch_bytes + offset,
        )
        for transfer in transfers
        for row in range(transfer.row_count)
        for offset in range(0, transfer.row_bytes, BLOCK)
    ]
