from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.errors import InvalidArgumentError
from kvstore.eviction import LeafLru, Watermarks

# --- LeafLru

# One small universe of keys, so that chains meet, break, and come back.
keys = st.integers(0, 9)


@dataclass
class ModelBlock:
    key: int
    parent: int | None
    use_count: int


class LeafLruModel:
    """Blocks in a list, coldest first. Slow and plain."""

    def __init__(self) -> None:
        self.blocks: list[ModelBlock] = []

    def find(self, key: int) -> ModelBlock | None:
        return next((block for block in self.blocks if block.key == key), None)

    def is_ancestor_of_itself(self, key: int, parent: int | None) -> bool:
        seen: set[int] = set()
        while parent is not None and parent not in seen:
            if parent == key:
                return True
            seen.add(parent)
            block = self.find(parent)
            parent = block.parent if block else None
        return False

    def insert(self, key: int, parent: int | None, use_count: int) -> None:
        self.blocks.append(ModelBlock(key, None if self.is_ancestor_of_itself(key, parent) else parent, use_count))

    def touch_chain(self, chain: list[int]) -> None:
        for key in reversed(chain):
            block = self.find(key)
            if block is not None:
                self.blocks.remove(block)
                self.blocks.append(block)
                block.use_count += 1

    def remove(self, key: int) -> None:
        self.blocks = [block for block in self.blocks if block.key != key]

    def coldest(self, spared: set[int]) -> int | None:
        parents = {block.parent for block in self.blocks}
        return next((b.key for b in self.blocks if b.key not in parents and b.key not in spared), None)


class LeafLruMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.lru: LeafLru[int] = LeafLru()
        self.model = LeafLruModel()

    @rule(key=keys, parent=st.none() | keys, use_count=st.integers(0, 2))
    def insert(self, key: int, parent: int | None, use_count: int = 0) -> None:
        if self.model.find(key) is None:
            self.lru.insert(key, parent=parent, use_count=use_count)
            self.model.insert(key, parent, use_count)

    @rule(start=keys, count=st.integers(1, 6))
    def insert_chain(self, start: int, count: int) -> None:
        parent = None
        for key in range(start, min(start + count, 10)):
            self.insert(key, parent)
            parent = key

    @rule(chain=st.lists(keys, max_size=6))
    def touch_chain(self, chain: list[int]) -> None:
        self.lru.touch_chain(iter(chain))
        self.model.touch_chain(chain)

    @precondition(lambda self: self.model.blocks)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([block.key for block in self.model.blocks]))
        self.lru.remove(key)
        self.model.remove(key)

    @rule(goal_bytes=st.integers(0, 12), spared=st.sets(keys, max_size=4))
    def pop_coldest(self, goal_bytes: int, spared: set[int]) -> None:
        expected: list[int] = []
        freed_bytes = 0
        while freed_bytes < goal_bytes and (key := self.model.coldest(spared)) is not None:
            self.model.remove(key)
            expected.append(key)
            freed_bytes += key + 1
        assert expected == self.lru.pop_coldest(
            goal_bytes=goal_bytes, size_bytes_of=lambda key: key + 1, may_evict=lambda key: key not in spared
        )

    @rule(spared=st.sets(keys, max_size=4))
    def peek_coldest(self, spared: set[int]) -> None:
        assert self.lru.peek_coldest(may_evict=lambda key: key not in spared) == self.model.coldest(spared)

    @invariant()
    def same_blocks(self) -> None:
        self.lru.check_invariants()
        assert len(self.lru) == len(self.model.blocks)
        assert all((key in self.lru) == (self.model.find(key) is not None) for key in range(10))
        for block in self.model.blocks:
            assert self.lru.parent_of(block.key) == block.parent
            assert self.lru.use_count(block.key) == block.use_count


TestLeafLru = LeafLruMachine.TestCase


def pop_all(lru: LeafLru[str]) -> list[str]:
    return lru.pop_coldest(goal_bytes=1 << 30, size_bytes_of=lambda _: 1, may_evict=lambda _: True)


def inserted(*chain: str) -> LeafLru[str]:
    lru: LeafLru[str] = LeafLru()
    for key, parent in zip(chain, (None, *chain), strict=False):
        lru.insert(key, parent=parent)
    return lru


def test_a_chain_leaves_from_its_tail() -> None:
    assert pop_all(inserted("a", "b", "c")) == ["c", "b", "a"]


def test_a_touched_block_outlives_what_came_after_it() -> None:
    lru: LeafLru[str] = LeafLru()
    for key in "abc":
        lru.insert(key, parent=None)
    lru.touch_chain(["a"])
    assert pop_all(lru) == ["b", "c", "a"]


def test_the_head_of_a_touched_chain_outlives_its_tail() -> None:
    lru = inserted("a", "b")
    lru.insert("other", parent=None)
    lru.touch_chain(["a", "b"])
    assert pop_all(lru) == ["other", "b", "a"]


def test_no_more_is_taken_than_the_goal_needs() -> None:
    lru = inserted("a", "b", "c")
    assert lru.pop_coldest(goal_bytes=15, size_bytes_of=lambda _: 10, may_evict=lambda _: True) == ["c", "b"]
    assert lru.pop_coldest(goal_bytes=0, size_bytes_of=lambda _: 10, may_evict=lambda _: True) == []


def test_a_refused_tail_keeps_its_whole_chain() -> None:
    lru = inserted("a", "b")
    assert lru.pop_coldest(goal_bytes=9, size_bytes_of=lambda _: 1, may_evict=lambda key: key != "b") == []
    assert pop_all(lru) == ["b", "a"]


def test_a_removed_middle_that_comes_back_holds_its_children_again() -> None:
    lru = inserted("a", "b", "c")
    lru.remove("b")
    lru.insert("b", parent="a")
    assert pop_all(lru) == ["c", "b", "a"]


def test_blocks_that_claim_each_other_as_parents_can_still_leave() -> None:
    lru: LeafLru[str] = LeafLru()
    for key, parent in (("self", "self"), ("a", "c"), ("b", "a"), ("c", "b")):
        lru.insert(key, parent=parent)
        lru.check_invariants()
    assert sorted(pop_all(lru)) == ["a", "b", "c", "self"]


def test_blocks_that_others_remove_leave_nothing_behind() -> None:
    """With nothing evicted, entries of removed blocks would otherwise pile up for ever."""
    lru: LeafLru[int] = LeafLru()
    for key in range(20_000):
        lru.insert(key, parent=None)
        lru.remove(key)
    assert len(lru._queue) < 2_000


def test_inserting_what_is_here_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="twice"):
        inserted("a", "a")


# --- Watermarks

shares = st.floats(min_value=0.001, max_value=1.0)


@given(shares, shares, st.integers(0, 2**50), st.integers(0, 2**50))
def test_evicting_the_excess_brings_usage_from_above_high_to_low(
    one: float, other: float, used_bytes: int, capacity_bytes: int
) -> None:
    marks = Watermarks(high=max(one, other), low=min(one, other))
    excess_bytes = marks.excess_bytes(used_bytes=used_bytes, capacity_bytes=capacity_bytes)
    if used_bytes <= marks.high * capacity_bytes:
        assert excess_bytes == 0
    else:
        assert 0 < excess_bytes <= used_bytes
        assert used_bytes - excess_bytes <= marks.low * capacity_bytes


def test_the_high_mark_itself_is_not_yet_too_much() -> None:
    marks = Watermarks(high=0.9, low=0.5)
    assert marks.excess_bytes(used_bytes=900, capacity_bytes=1000) == 0
    assert marks.excess_bytes(used_bytes=901, capacity_bytes=1000) == 401


def test_marks_at_the_capacity_let_it_fill_to_the_last_byte() -> None:
    marks = Watermarks(high=1.0, low=1.0)
    assert marks.excess_bytes(used_bytes=1000, capacity_bytes=1000) == 0
    assert marks.excess_bytes(used_bytes=1001, capacity_bytes=1000) == 1


@pytest.mark.parametrize(
    ("high", "low"), [(0.5, 0.6), (1.1, 0.5), (0.5, 0.0), (0.5, -0.1), (0.0, 0.0), (math.nan, 0.5), (0.5, math.nan)]
)
def test_marks_that_make_no_sense_are_refused(high: float, low: float) -> None:
    with pytest.raises(InvalidArgumentError, match="watermarks"):
        Watermarks(high=high, low=low)


def test_a_search_among_held_blocks_ends_after_its_limit_and_keeps_their_order() -> None:
    lru: LeafLru[int] = LeafLru(refusal_count_max=3)
    for key in range(6):
        lru.insert(key, parent=None)
    asked: list[int] = []

    def may_evict(key: int) -> bool:
        asked.append(key)
        return key >= 4

    assert lru.pop_coldest(goal_bytes=1, size_bytes_of=lambda _: 1, may_evict=may_evict) == []
    assert asked == [0, 1, 2]
    assert lru.pop_coldest(goal_bytes=1, size_bytes_of=lambda _: 1, may_evict=lambda _: True) == [0]
    lru.check_invariants()


def test_a_search_that_is_called_off_ends_there_and_keeps_all_that_it_refused() -> None:
    lru: LeafLru[int] = LeafLru()
    for key in range(6):
        lru.insert(key, parent=None)
    verdicts = {0: False, 1: True, 2: None}
    assert lru.pop_coldest(goal_bytes=9, size_bytes_of=lambda _: 1, may_evict=lambda key: verdicts[key]) == [1]
    assert lru.peek_coldest(may_evict=lambda key: {0: False, 2: None}[key]) is None
    lru.check_invariants()
    assert lru.pop_coldest(goal_bytes=9, size_bytes_of=lambda _: 1) == [0, 2, 3, 4, 5]


def test_a_block_is_still_here_when_it_is_asked_whether_it_may_leave() -> None:
    lru = inserted("a", "b")
    seen: list[tuple[str, str | None, int]] = []

    def may_evict(key: str) -> bool:
        seen.append((key, lru.parent_of(key), lru.use_count(key)))
        return True

    lru.touch_chain(["a", "b"])
    lru.touch_chain(["b"])
    assert lru.pop_coldest(goal_bytes=9, size_bytes_of=lambda _: 1, may_evict=may_evict) == ["b", "a"]
    assert seen == [("b", "a", 2), ("a", None, 1)]


def test_held_blocks_are_no_candidates_and_cost_a_search_nothing() -> None:
    lru: LeafLru[int] = LeafLru(refusal_count_max=1)
    for key in range(1000):
        lru.insert(key, parent=None)
        lru.hold([key])
    lru.insert(1000, parent=None)
    lru.check_invariants()
    assert lru.pop_coldest(goal_bytes=10, size_bytes_of=lambda _: 1) == [1000]
    lru.hold([7])
    lru.unhold([7])
    assert lru.is_held(7)
    lru.unhold([7])
    lru.check_invariants()
    assert lru.pop_coldest(goal_bytes=10, size_bytes_of=lambda _: 1) == [7]


def test_no_more_blocks_leave_in_one_call_than_allowed() -> None:
    lru: LeafLru[int] = LeafLru()
    for key in range(5):
        lru.insert(key, parent=None)
    assert lru.pop_coldest(goal_bytes=100, size_bytes_of=lambda _: 1, count_max=2) == [0, 1]
    assert lru.peek_coldest() == 2


def test_an_eviction_that_was_begun_goes_on_below_the_high_mark() -> None:
    marks = Watermarks(high=0.9, low=0.5)
    assert marks.excess_bytes(used_bytes=80, capacity_bytes=100) == 0
    assert marks.excess_bytes(used_bytes=80, capacity_bytes=100, is_evicting=True) == 30
    assert marks.excess_bytes(used_bytes=40, capacity_bytes=100, is_evicting=True) == 0


@given(st.lists(st.tuples(keys, st.none() | keys), unique_by=lambda block: block[0]))
def test_restoring_blocks_is_inserting_them_one_after_the_other(blocks: list[tuple[int, int | None]]) -> None:
    restored: LeafLru[int] = LeafLru()
    restored.restore([key for key, _ in blocks], [parent for _, parent in blocks])
    restored.check_invariants()
    inserted: LeafLru[int] = LeafLru()
    for key, parent in blocks:
        inserted.insert(key, parent=parent)
    assert {key: restored.parent_of(key) for key, _ in blocks} == {key: inserted.parent_of(key) for key, _ in blocks}
    for lru in (restored, inserted):
        lru.insert(100, parent=None)  # the newest of all
    assert all(
        restored.pop_coldest(goal_bytes=1, size_bytes_of=lambda _: 1)
        == inserted.pop_coldest(goal_bytes=1, size_bytes_of=lambda _: 1)
        for _ in range(len(blocks) + 1)
    )
