from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpu_agent.core.access import COLD, AccessWindow, Heat
from gpu_agent.core.pause import Pause
from gpu_agent.core.planner import Run, choose_victims, cut_runs, into_runs, plan_copies, plan_migration
from gpu_agent.core.table import Resident
from kvstore.keys import BlockHash


def _hash(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def _chain(*numbers: int, held: frozenset[int] = frozenset(), cool_until_step: int = 0) -> list[Resident]:
    return [
        Resident(
            _hash(number),
            _hash(numbers[index - 1]) if index else None,
            int(index < len(numbers) - 1),
            cool_until_step,
            number in held,
        )
        for index, number in enumerate(numbers)
    ]


class _Table:
    def __init__(self, residents: list[Resident]) -> None:
        self._residents = {resident.block_hash: resident for resident in residents}

    def leaves(self) -> list[Resident]:
        return [resident for resident in self.residents() if resident.child_count == 0]

    def find(self, block_hash: BlockHash) -> Resident | None:
        return self._residents.get(block_hash)

    def residents(self) -> list[Resident]:
        return list(self._residents.values())


def _victims(residents: list[Resident], *, goal_count: int, required_count: int = 0, step: int = 0,
             heat: dict[int, Heat] | None = None) -> list[int]:  # fmt: skip
    heats = {_hash(number): value for number, value in (heat or {}).items()}
    chosen = choose_victims(
        _Table(residents),
        heat_of=lambda block_hash: heats.get(block_hash, COLD),
        step=step,
        goal_count=goal_count,
        required_count=required_count,
    )
    return [int.from_bytes(victim.block_hash, "big") for victim in chosen]


@given(
    window_steps=st.integers(1, 12),
    touches=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=60),
    ahead=st.integers(0, 20),
)
def test_a_use_counts_for_at_least_half_the_window_and_never_longer(
    window_steps: int, touches: list[tuple[int, int]], ahead: int
) -> None:
    window, half = AccessWindow(window_steps=window_steps), max(1, window_steps // 2)
    used: list[tuple[int, int]] = []
    step = 0
    for block, steps in touches:
        step += steps
        window.touch(_hash(block), step=step)
        used.append((block, step))
    step += ahead
    for block in range(4):
        counted = sum(b == block and s // half >= step // half - 1 for b, s in used)
        last_step = max((s for b, s in used if b == block), default=-1)
        assert window.heat(_hash(block), step=step) == Heat(counted, last_step)


def test_the_coldest_chain_goes_first_and_from_its_tail() -> None:
    residents = _chain(1, 2, 3) + _chain(11, 12, 13)
    heat = {number: Heat(2, 5) for number in (1, 2, 3)} | {number: Heat(1, 9) for number in (11, 12, 13)}
    assert _victims(residents, goal_count=4, heat=heat) == [13, 12, 11, 3]


def test_equally_cold_chains_go_one_after_the_other() -> None:
    victims = _victims(_chain(1, 2, 3) + _chain(11, 12, 13), goal_count=3)
    assert victims in ([3, 2, 1], [13, 12, 11])


def test_a_held_block_stays_and_so_do_its_ancestors() -> None:
    assert _victims(_chain(1, 2, 3, held=frozenset({2})), goal_count=3) == [3]


def test_a_parent_of_a_block_that_is_loading_stays() -> None:
    assert _victims([Resident(_hash(1), None, 1, 0, False)], goal_count=1) == []


def test_blocks_in_their_cool_down_go_only_when_room_is_needed_and_nothing_else_is_left() -> None:
    residents = _chain(1, 2, cool_until_step=10) + _chain(11, 12)
    assert sorted(_victims(residents, goal_count=4, step=9)) == [11, 12]
    assert _victims(residents, goal_count=2, required_count=3, step=9)[2:] == [2]
    assert len(_victims(residents, goal_count=4, step=10)) == 4


def test_needed_room_is_found_even_where_no_leaf_is_left() -> None:
    held_tail = _chain(1, 2, 3, held=frozenset({3}))
    assert _victims(held_tail, goal_count=1) == []
    assert len(_victims(held_tail, goal_count=1, required_count=2)) == 2
    ring = [Resident(_hash(1), _hash(2), 1, 0, False), Resident(_hash(2), _hash(1), 1, 0, False)]
    assert len(_victims(ring, goal_count=2, required_count=2)) == 2


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
    blocks = [
        Resident(_hash(block), None if parent is None else _hash(parent), 0, 0, False)
        for block, parent in parents.items()
    ]
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
