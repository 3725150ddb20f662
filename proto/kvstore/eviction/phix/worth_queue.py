"""Candidates in the order of what they are worth, which changes with their age."""

from __future__ import annotations

import heapq
from typing import Generic

import numpy as np

from kvstore.eviction.phix.learner import Learner
from kvstore.eviction.run import Run
from kvstore.eviction.use import Key

_PAUSE_REQUESTS_MIN = 8
_RUNS_PER_REQUEST = 8
"""Sorting costs 5 µs per request. Meanwhile an eighth of the candidates leaves at most, so orders are young."""
_STALE_ENTRIES_MAX = 1024


class WorthQueue(Generic[Key]):
    """Runs by worth, then by the number of their use.

    All are sorted anew after a number of requests; those that come in between are placed by their worth of then. What
    is discarded leaves its entry behind, which is known by not being the run's own any more.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._sorted: list[tuple[float, int, int, Run[Key]]] = []  # the first one last
        self._heap: list[tuple[float, int, int, Run[Key]]] = []
        self._fresh: list[tuple[float, int, int, Run[Key]]] = []  # their worth is not known yet
        self._count = 0
        self._pushes = 0
        self._requests = 0
        self._pause = 0
        self._is_lru = False

    def __len__(self) -> int:
        return self._count

    def note_request(self) -> None:
        self._requests += 1

    def follow_lru(self, is_lru: bool) -> None:
        """True: all are worth the same."""
        if is_lru != self._is_lru:
            self._is_lru = is_lru
            self._requests = self._pause

    def add(self, run: Run[Key]) -> None:
        assert run.entry is None, f"{run.keys} is in a queue already"
        self._pushes += 1
        run.entry = entry = (0.0, run.use.number, self._pushes, run)
        self._count += 1
        self._fresh.append(entry)

    def discard(self, run: Run[Key]) -> None:
        assert run.entry is not None, f"{run.keys} is in no queue"
        run.entry = None
        self._count -= 1
        if len(self._fresh) + len(self._heap) + len(self._sorted) > 2 * self._count + _STALE_ENTRIES_MAX:
            self._fresh = [entry for entry in self._fresh if entry[3].entry is entry]
            self._sorted = [entry for entry in self._sorted if entry[3].entry is entry]
            self._heap = [entry for entry in self._heap if entry[3].entry is entry]
            heapq.heapify(self._heap)

    def first(self, *, now_s: float) -> Run[Key] | None:
        if self._requests >= self._pause:
            self._sort(now_s)
        elif self._fresh:
            self._place_fresh(now_s)
        ordered, heap = self._sorted, self._heap
        while ordered and ordered[-1][3].entry is not ordered[-1]:
            ordered.pop()
        while heap and heap[0][3].entry is not heap[0]:
            heapq.heappop(heap)
        if ordered and (not heap or ordered[-1] < heap[0]):
            return ordered[-1][3]
        return heap[0][3] if heap else None

    def _place_fresh(self, now_s: float) -> None:
        for entry in self._fresh:
            _, number, push, run = entry
            if run.entry is entry:
                worth = 0.0 if self._is_lru else self._learner.worth(run.mark, now_s=now_s)
                run.entry = placed = (worth, number, push, run)
                heapq.heappush(self._heap, placed)
        self._fresh.clear()

    def _sort(self, now_s: float) -> None:
        entries = [
            entry for part in (self._sorted, self._heap, self._fresh) for entry in part if entry[3].entry is entry
        ]
        self._heap.clear()
        self._fresh.clear()
        self._requests, self._pause = 0, max(_PAUSE_REQUESTS_MIN, len(entries) // _RUNS_PER_REQUEST)
        if self._is_lru:
            worths = [0.0] * len(entries)
        else:
            slots = np.array([entry[3].mark.slot for entry in entries], dtype=np.intp)
            worths = self._learner.worths(slots, now_s=now_s).tolist()
        self._sorted = [
            (worth, number, push, run) for worth, (_, number, push, run) in zip(worths, entries, strict=True)
        ]
        self._sorted.sort(reverse=True)
        for entry in self._sorted:
            entry[3].entry = entry
