"""PHIX's candidates by worth: each is valued in batches, so that no request waits for all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from kvstore.eviction import NO_HINT, Use
from kvstore.eviction.phix.learner import Learner
from kvstore.eviction.phix.worth_queue import WorthQueue
from kvstore.eviction.run import Run

BATCH_MAX = 4096


class Mark(NamedTuple):
    slot: int


class FakeLearner:
    """A run is worth what a test says, and how many were asked about at once is remembered."""

    def __init__(self) -> None:
        self.worth_of: dict[int, float] = {}
        self.batches: list[int] = []

    def worth(self, mark: Mark, *, now_s: float) -> float:
        self.batches.append(1)
        return self.worth_of.get(mark.slot, 1.0)

    def worths(self, slots: npt.NDArray[np.intp], *, now_s: float) -> npt.NDArray[np.float64]:
        self.batches.append(len(slots))
        return np.array([self.worth_of.get(slot, 1.0) for slot in slots.tolist()])


class Queue:
    """The queue, and runs by their numbers."""

    def __init__(self) -> None:
        self.learner = FakeLearner()
        self.queue: WorthQueue[int] = WorthQueue(cast("Learner", self.learner))
        self.runs: dict[int, Run[int]] = {}

    def add(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            use = Use(number, NO_HINT, now_s=0.0, chain_blocks=1, matched_blocks=0)
            run = Run([number], parent=None, use=use, mark=Mark(number), use_counts=[0])
            self.runs[number] = run
            self.queue.add(run)

    def discard(self, number: int) -> None:
        self.queue.discard(self.runs.pop(number))

    def first(self) -> int | None:
        run = self.queue.first(now_s=0.0)
        return None if run is None else run.tail

    def asked(self) -> int:
        """How many runs have been valued since this was asked last."""
        count, self.learner.batches = sum(self.learner.batches), []
        return count


def test_the_one_that_is_worth_least_is_first_and_of_equals_the_one_used_longest_ago() -> None:
    queue = Queue()
    queue.learner.worth_of = {3: 0.5, 5: 0.5}
    queue.add(range(1, 8))
    found = []
    while (number := queue.first()) is not None:
        found.append(number)
        queue.discard(number)
    assert found == [3, 5, 1, 2, 4, 6, 7]
    assert len(queue.queue) == 0


def test_of_many_that_come_at_once_a_batch_is_valued_and_the_rest_when_it_is_their_turn() -> None:
    queue = Queue()
    queue.learner.worth_of = {9_999: 0.1}
    queue.add(range(10_000))
    assert queue.first() == 0, "those that came first are enough to choose from"
    assert queue.asked() == BATCH_MAX
    assert queue.first() == 0
    assert queue.asked() == BATCH_MAX
    assert queue.first() == 9_999
    assert queue.asked() == 10_000 - 2 * BATCH_MAX
    queue.first()
    assert queue.asked() == 0


def test_values_are_renewed_some_with_each_request_until_all_are_and_never_more_than_a_batch() -> None:
    queue = Queue()
    count = 10_000
    queue.add(range(count))
    for _ in range(3):
        queue.first()
    queue.asked()
    queue.learner.worth_of = {7_777: 0.0}
    request_count, first = 0, queue.first()
    while first != 7_777:
        queue.queue.note_request()
        request_count += 1
        first = queue.first()
        assert sum(queue.learner.batches) <= BATCH_MAX
        assert queue.asked() in (0, 256), "in batches, as one by one costs more"
        assert request_count <= count / 8, "an eighth of the candidates as requests, and all are known anew"
    assert request_count == 31 * 256 // 8, "it is in the 31st batch of 256"


def test_after_many_requests_without_an_eviction_no_more_than_a_batch_is_renewed_at_once() -> None:
    queue = Queue()
    queue.add(range(10_000))
    for _ in range(3):
        queue.first()
    queue.asked()
    for _ in range(100_000):
        queue.queue.note_request()
    asked = []
    for _ in range(5):
        queue.first()
        asked.append(queue.asked())
    assert asked == [BATCH_MAX] * 3 + [10_000 - 2 * BATCH_MAX, 0], "and once more all of them, not eighty times"


def test_few_candidates_are_renewed_all_together() -> None:
    queue = Queue()
    queue.add(range(20))
    assert queue.first() == 0
    queue.learner.worth_of = {13: 0.0}
    queue.queue.note_request()
    queue.queue.note_request()
    assert queue.first() == 0, "16 of 20 are due"
    queue.queue.note_request()
    assert queue.first() == 13


def test_while_it_follows_lru_all_are_worth_the_same_and_then_again_what_they_are() -> None:
    queue = Queue()
    queue.learner.worth_of = {4: 0.1}
    queue.add(range(10))
    assert queue.first() == 4
    queue.queue.follow_lru(True)
    assert queue.first() == 0
    queue.queue.follow_lru(False)
    assert queue.first() == 4


def test_what_is_discarded_leaves_a_bounded_number_of_entries() -> None:
    queue = Queue()
    queue.add(range(50))
    for number in range(50, 20_000):
        queue.add([number])
        if number % 3:
            queue.first()
        queue.discard(number)
        queue.queue.note_request()
    inner = queue.queue
    assert len(inner) == 50
    assert max(len(inner._heap), len(inner._fresh), len(inner._ring)) <= 2 * 50 + 1024 + 1
    assert queue.first() == 0


@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "first", "request"]), st.integers(0, 30)), max_size=80))
def test_the_first_is_one_that_is_there_and_with_fixed_worths_the_least(events: list[tuple[str, int]]) -> None:
    queue = Queue()
    queue.learner.worth_of = {number: float(number * 7 % 5) for number in range(31)}
    for what, number in events:
        if what == "add" and number not in queue.runs:
            queue.add([number])
        elif what == "discard" and number in queue.runs:
            queue.discard(number)
        elif what == "request":
            queue.queue.note_request()
        assert len(queue.queue) == len(queue.runs)
        expected = min(queue.runs, key=lambda one: (queue.learner.worth_of[one], one), default=None)
        if what == "first":
            assert queue.first() == expected
