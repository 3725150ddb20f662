"""ARC (Megiddo and Modha, FAST 2003), on leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from kvstore.eviction.ghosts import Ghosts
from kvstore.eviction.ranking import Ranking
from kvstore.eviction.run import Run
from kvstore.eviction.run_queue import RunQueue
from kvstore.eviction.use import Key, Use

_ONCE, _OFTEN = 0, 1
"""Marks of blocks that were used once or more often since they came: T1 and T2 of the paper."""


class Arc(Ranking[Key]):
    """Shares the tier between blocks used once and more often, as the ghosts of either come back.

    Of the part that is too large the least recently used leaf leaves; where that part has none, of the other.
    """

    def __init__(self, *, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._queues: tuple[RunQueue[Key], RunQueue[Key]] = (RunQueue(), RunQueue())
        self._counts = [0, 0]  # of blocks, leaves or not
        self._ghosts: tuple[Ghosts[Key], Ghosts[Key]] = (Ghosts(), Ghosts())
        self._once_goal = 0.0  # p of the paper

    def admit(self, keys: Sequence[Key], *, parent: Run[Key] | None, use: Use) -> Iterable[tuple[int, Any]]:
        parts: list[tuple[int, Any]] = []
        for mark, group in groupby(map(self._mark_of_new, keys)):
            count = len(list(group))
            self._counts[mark] += count
            parts.append((count, mark))
        self._trim_ghosts()
        return parts

    def reused(self, run: Run[Key], *, use: Use) -> None:
        self._counts[run.mark] -= len(run.keys)
        self._counts[_OFTEN] += len(run.keys)
        run.mark = _OFTEN

    def add(self, run: Run[Key]) -> None:
        self._queues[run.mark].add(run, order=run.use.number)

    def discard(self, run: Run[Key]) -> None:
        self._queues[run.mark].discard(run)

    def coldest(self, *, now_s: float) -> Run[Key] | None:
        first = _ONCE if self._counts[_ONCE] > self._once_goal else _OFTEN
        return self._queues[first].first() or self._queues[1 - first].first()

    def evicted(self, keys: Sequence[Key], run: Run[Key], *, now_s: float) -> None:
        for key in keys:
            self._counts[run.mark] -= 1
            self._ghosts[run.mark].add(key)
        self._trim_ghosts()

    def removed(self, key: Key, run: Run[Key]) -> None:
        self._counts[run.mark] -= 1

    def figures(self) -> Mapping[str, float]:
        return {"ghost_count": sum(map(len, self._ghosts)), "used_once_goal_blocks": self._once_goal}

    def _mark_of_new(self, key: Key) -> int:
        once, often = self._ghosts
        if once.discard(key):
            self._once_goal = min(self._once_goal + max(len(often) / (len(once) + 1), 1.0), self.capacity_blocks)
            return _OFTEN
        if often.discard(key):
            self._once_goal = max(self._once_goal - max(len(once) / (len(often) + 1), 1.0), 0.0)
            return _OFTEN
        return _ONCE

    def _trim_ghosts(self) -> None:
        once, often = self._ghosts
        once.trim(max(self.capacity_blocks - self._counts[_ONCE], 0))
        often.trim(max(self.capacity_blocks - len(once), 0))
