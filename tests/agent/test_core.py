from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpu_agent.core.pause import Pause
from gpu_agent.core.planner import Run, cut_runs, into_runs, plan_copies, plan_migration
from gpu_agent.core.table import Resident
from kvstore.keys import BlockHash


def _hash(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def _chain(*numbers: int) -> list[Resident]:
    parents = (None, *numbers)
    return [
        Resident(_hash(number), None if parent is None else _hash(parent))
        for number, parent in zip(numbers, parents, strict=False)
    ]


def test_batches_are_full_and_their_runs_go_head_first() -> None:
    victims = list(reversed(_chain(*range(1, 8))))
    batches = plan_migration(victims, batch_count_max=3)
    assert [batch.runs for batch in batches] == [
        (Run(parent_hash=_hash(4), block_hashes=(_hash(5), _hash(6), _hash(7))),),
        (Run(parent_hash=_hash(1), block_hashes=(_hash(2), _hash(3), _hash(4))),),
        (Run(parent_hash=None, block_hashes=(_hash(1),)),),
    ]


def test_copies_go_down_heads_first() -> None:
    batches = plan_copies(reversed(_chain(*range(1, 6))), batch_count_max=2)
    assert [block for batch in batches for block in batch.block_hashes] == [_hash(n) for n in range(1, 6)]
    assert all(batch.keeps_resident for batch in batches)


@given(st.dictionaries(st.integers(0, 12), st.none() | st.integers(0, 12), max_size=13))
def test_runs_hold_every_block_once_after_its_parent_whatever_the_parents_are(parents: dict[int, int | None]) -> None:
    blocks = [Resident(_hash(block), None if parent is None else _hash(parent)) for block, parent in parents.items()]
    runs = into_runs(blocks)
    order = [block for run in runs for block in run.block_hashes]
    assert sorted(order) == sorted(block.block_hash for block in blocks)
    for run in runs:
        for parent, child in zip((run.parent_hash, *run.block_hashes), run.block_hashes, strict=False):
            assert parent == next(block.parent_hash for block in blocks if block.block_hash == child)
    if not _has_ring(parents):
        for block in blocks:
            if block.parent_hash in order:
                assert order.index(block.parent_hash) < order.index(block.block_hash)


@given(
    lengths=st.lists(st.integers(1, 6), max_size=5), skip=st.frozensets(st.integers(1, 30)), count_max=st.integers(1, 5)
)
def test_cut_runs_lose_nothing_but_what_is_skipped_and_keep_their_parents(
    lengths: list[int], skip: frozenset[int], count_max: int
) -> None:
    number, runs = 0, []
    for length in lengths:
        numbers = range(number + 1, number + 1 + length)
        runs.append(Run(parent_hash=None, block_hashes=tuple(map(_hash, numbers))))
        number += length
    parents = {b: p for run in runs for p, b in zip((None, *run.block_hashes), run.block_hashes, strict=False)}
    parts = list(cut_runs(runs, skip={_hash(n) for n in skip}, block_count_max=count_max))
    assert all(1 <= sum(len(run.block_hashes) for run in part) <= count_max for part in parts)
    kept = [block for part in parts for run in part for block in run.block_hashes]
    assert kept == [_hash(n) for n in range(1, number + 1) if n not in skip]
    for part in parts:
        for run in part:
            for parent, block in zip((run.parent_hash, *run.block_hashes), run.block_hashes, strict=False):
                assert parents[block] == parent


def test_a_pause_doubles_up_to_its_maximum_and_success_ends_it() -> None:
    pause = Pause(min_s=1.0, max_s=3.0)
    assert pause.is_over(now_s=0.0)
    assert [pause.fail(now_s=10.0) for _ in range(3)] == [1.0, 2.0, 3.0]
    assert not pause.is_over(now_s=12.9)
    assert pause.is_over(now_s=13.0)
    pause.succeed()
    assert pause.fail(now_s=20.0) == 1.0


def _has_ring(parents: dict[int, int | None]) -> bool:
    for start in parents:
        seen, block = set[int](), parents.get(start)
        while block is not None and block not in seen:
            if block == start:
                return True
            seen.add(block)
            block = parents.get(block)
    return False
