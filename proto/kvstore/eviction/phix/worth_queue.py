"""Candidates in the order of what they are worth, which changes with their age."""

from __future__ import annotations

import heapq
from collections import deque
from typing import Generic

import numpy as np

from kvstore.eviction.phix.learner import Learner
from kvstore.eviction.run import Run
from kvstore.eviction.use import Key

_RUNS_PER_REQUEST = 8
"""Valued anew: an eighth of the candidates leaves at most until all have been, so what is known of them is young."""
_BATCH_MIN = 256
_BATCH_MAX = 4096
"""At once: some 5 ms."""
_STALE_ENTRIES_MAX = 1024

_Entry = tuple[float, int, int, Run[Key]]


class WorthQueue(Generic[Key]):
    """Runs by worth, then by the number of their use.

    All are valued again and again, some with each request, in the order in which they came; in between they are placed
    by their worth of then. What is discarded leaves its entries behind, which are known by not being the run's own.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._heap: list[_Entry[Key]] = []
        self._fresh: deque[_Entry[Key]] = deque()  # their worth is not known yet; the one that came first, first
        self._ring: deque[_Entry[Key]] = deque()  # those of the heap, the one that was valued longest ago first
        self._count = 0
        self._pushes = 0
        self._due = 0
        """Runs that are to be valued anew."""
        self._is_lru = False

    def __len__(self) -> int:
        return self._count

    def note_request(self) -> None:
        self._due += _RUNS_PER_REQUEST

    def follow_lru(self, is_lru: bool) -> None:
        """True: all are worth the same."""
        if is_lru != self._is_lru:
            self._is_lru = is_lru
            self._due = max(self._due, self._count)

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
        if len(self._fresh) > 2 * self._count + _STALE_ENTRIES_MAX:
            self._fresh = deque(entry for entry in self._fresh if entry[3].entry is entry)

    def first(self, *, now_s: float) -> Run[Key] | None:
        while self._fresh:
            self._place([self._fresh.popleft() for _ in range(min(len(self._fresh), _BATCH_MAX))], now_s)
            if self._heap:  # of many that come at once, those that came first are enough to choose from
                break
        if self._due >= min(self._count, _BATCH_MIN):
            self._value_some(now_s)
        heap = self._heap
        while heap and heap[0][3].entry is not heap[0]:
            heapq.heappop(heap)
        return heap[0][3] if heap else None

    def _value_some(self, now_s: float) -> None:
        wanted = min(self._due, self._count, _BATCH_MAX)
        self._due = min(self._due - wanted, self._count)
        ring = self._ring
        oldest: list[_Entry[Key]] = []
        while ring and len(oldest) < wanted:
            entry = ring.popleft()
            if entry[3].entry is entry:
                oldest.append(entry)
        self._place(oldest, now_s)

    def _place(self, entries: list[_Entry[Key]], now_s: float) -> None:
        """Puts runs where they belong by what they are worth now."""
        entries = [entry for entry in entries if entry[3].entry is entry]
        if self._is_lru:
            worths = [0.0] * len(entries)
        elif len(entries) < 8:  # where numpy costs more than it saves
            worths = [self._learner.worth(entry[3].mark, now_s=now_s) for entry in entries]
        else:
            slots = np.array([entry[3].mark.slot for entry in entries], dtype=np.intp)
            worths = self._learner.worths(slots, now_s=now_s).tolist()
        heap, ring = self._heap, self._ring
        for worth, (_, number, push, run) in zip(worths, entries, strict=True):
            run.entry = placed = (worth, number, push, run)
            heapq.heappush(heap, placed)
            ring.append(placed)
        if len(heap) > 2 * self._count + _STALE_ENTRIES_MAX:
            self._heap = [entry for entry in heap if entry[3].entry is entry]
            heapq.heapify(self._heap)
        if len(ring) > 2 * self._count + _STALE_ENTRIES_MAX:
            self._ring = deque(entry for entry in ring if entry[3].entry is entry)
