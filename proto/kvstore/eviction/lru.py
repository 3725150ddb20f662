"""Least recently used: what everything else is measured by."""

from __future__ import annotations

from kvstore.eviction.ranking import Ranking
from kvstore.eviction.run import Run
from kvstore.eviction.run_queue import RunQueue
from kvstore.eviction.use import Key


class Lru(Ranking[Key]):
    is_steady = True
    grace_s = 0.0  # what was used just now leaves last anyway

    def __init__(self, *, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._queue: RunQueue[Key] = RunQueue()

    def add(self, run: Run[Key]) -> None:
        self._queue.add(run, order=run.use.number)

    def discard(self, run: Run[Key]) -> None:
        self._queue.discard(run)

    def coldest(self, *, now_s: float) -> Run[Key] | None:
        return self._queue.first()
