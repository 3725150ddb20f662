"""Candidates in order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic

from kvstore.eviction.run import Run
from kvstore.eviction.use import Key

_STALE_ENTRIES_MAX = 1024


class RunQueue(Generic[Key]):
    """Runs in the order of a number that each is added with; of equal numbers, in that of being added.

    A run is in one queue at a time. What is discarded leaves its entry behind, which goes when it surfaces, or
    when there are more such entries than live ones.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Run[Key]]] = []
        self._count = 0
        self._pushes = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Run[Key]]:
        """In no order."""
        return (entry[2] for entry in self._heap if entry[2].entry is entry)

    def add(self, run: Run[Key], *, order: int) -> None:
        assert run.entry is None, f"{run.keys} is in a queue already"
        self._pushes += 1
        run.entry = entry = (order, self._pushes, run)
        self._count += 1
        heapq.heappush(self._heap, entry)

    def discard(self, run: Run[Key]) -> None:
        assert run.entry is not None, f"{run.keys} is in no queue"
        run.entry = None
        self._count -= 1
        if len(self._heap) > 2 * self._count + _STALE_ENTRIES_MAX:
            self._heap = [entry for entry in self._heap if entry[2].entry is entry]
            heapq.heapify(self._heap)

    def first(self) -> Run[Key] | None:
        heap = self._heap
        while heap:
            entry = heap[0]
            if entry[2].entry is entry:
                return entry[2]
            heapq.heappop(heap)
        return None

    def clear(self) -> list[Run[Key]]:
        """Takes all out."""
        runs = list(self)
        for run in runs:
            run.entry = None
        self._heap.clear()
        self._count = 0
        return runs
