"""S3-FIFO (Yang et al., SOSP 2023), on leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from kvstore.eviction.ghosts import Ghosts
from kvstore.eviction.ranking import Ranking
from kvstore.eviction.run import Run
from kvstore.eviction.run_queue import RunQueue
from kvstore.eviction.use import Key, Use

_SMALL, _MAIN = 0, 1
_SMALL_SHARE = 0.1
_USE_COUNT_MAX = 3


class _Mark(NamedTuple):
    queue: int
    order: int
    """Of entering the queue."""
    use_count: int
    """Since it entered the main queue, at most 3, less its second chances."""


class S3Fifo(Ranking[Key]):
    """A small queue in which new blocks must prove themselves, a main one that gives second chances, and ghosts.

    A block that is used again enters the main queue at once: one that is no leaf would else never be looked at, and
    fill the small one.
    """

    def __init__(self, *, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._queues: tuple[RunQueue[Key], RunQueue[Key]] = (RunQueue(), RunQueue())
        self._counts = [0, 0]  # of blocks, leaves or not
        self._ghosts: Ghosts[Key] = Ghosts()
        self._entries = 0

    def admit(self, keys: Sequence[Key], *, parent: Run[Key] | None, use: Use) -> Iterable[tuple[int, Any]]:
        parts: list[tuple[int, Any]] = []
        for was_ghost, group in groupby(map(self._ghosts.discard, keys)):
            count = len(list(group))
            queue = _MAIN if was_ghost else _SMALL
            self._counts[queue] += count
            self._entries += 1
            parts.append((count, _Mark(queue, self._entries, 0)))
        return parts

    def reused(self, run: Run[Key], *, use: Use) -> None:
        mark: _Mark = run.mark
        if mark.queue == _SMALL:
            self._enter_main(run, use_count=0)
        elif mark.use_count < _USE_COUNT_MAX:
            run.mark = mark._replace(use_count=mark.use_count + 1)

    def add(self, run: Run[Key]) -> None:
        mark: _Mark = run.mark
        self._queues[mark.queue].add(run, order=mark.order)

    def discard(self, run: Run[Key]) -> None:
        self._queues[run.mark.queue].discard(run)

    def coldest(self, *, now_s: float) -> Run[Key] | None:
        small = self._queues[_SMALL].first()
        if small is not None and self._counts[_SMALL] >= _SMALL_SHARE * self.capacity_blocks:
            return small
        return self._coldest_of_main() or small

    def evicted(self, keys: Sequence[Key], run: Run[Key], *, now_s: float) -> None:
        self._counts[run.mark.queue] -= len(keys)
        if run.mark.queue == _SMALL:
            for key in keys:
                self._ghosts.add(key)
            self._ghosts.trim(int((1.0 - _SMALL_SHARE) * self.capacity_blocks))

    def removed(self, key: Key, run: Run[Key]) -> None:
        self._counts[run.mark.queue] -= 1

    def figures(self) -> Mapping[str, float]:
        return {"ghost_count": len(self._ghosts), "small_queue_blocks": self._counts[_SMALL]}

    def _coldest_of_main(self) -> Run[Key] | None:
        while (run := self._queues[_MAIN].first()) is not None:
            mark: _Mark = run.mark
            if not mark.use_count:
                return run
            self.discard(run)
            self._enter_main(run, use_count=mark.use_count - 1)
            self.add(run)
        return None

    def _enter_main(self, run: Run[Key], *, use_count: int) -> None:
        self._entries += 1
        self._counts[run.mark.queue] -= len(run.keys)
        self._counts[_MAIN] += len(run.keys)
        run.mark = _Mark(_MAIN, self._entries, use_count)
