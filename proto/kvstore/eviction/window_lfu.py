"""Least frequently used within a window of requests, with a cool-down."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvstore.eviction.ranking import Ranking
from kvstore.eviction.run import Run
from kvstore.eviction.run_queue import RunQueue
from kvstore.eviction.use import Key, Use

_WINDOW_REQUESTS = 1000
_COOL_DOWN_REQUESTS = 100
_HALF_REQUESTS = _WINDOW_REQUESTS // 2


class _Mark(NamedTuple):
    """Uses by halves of the window, which slides by one: two numbers, and no work when a request passes."""

    half: int
    """In which the last use was."""
    current: int
    previous: int
    """In the half before that."""


class WindowLfu(Ranking[Key]):
    """The least used leaf in the window, the oldest of equals; those that the last 100 requests used only after others.

    Counts cover the running half of the window and the whole one before it.
    """

    def __init__(self, *, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._queues: dict[int, RunQueue[Key]] = {}  # by count, lowest first
        self._number = 0
        self._half = 0

    def begin(self, use: Use) -> None:
        self._number = use.number
        if use.number // _HALF_REQUESTS != self._half:
            self._half = use.number // _HALF_REQUESTS
            # Counts change when the window slides, but never those that are 0 already.
            for count in [count for count in self._queues if count]:
                for run in self._queues.pop(count).clear():
                    self.add(run)

    def admit(self, keys: Sequence[Key], *, parent: Run[Key] | None, use: Use) -> Iterable[tuple[int, Any]]:
        return ((len(keys), _Mark(self._half, 1, 0)),)

    def reused(self, run: Run[Key], *, use: Use) -> None:
        half, current, previous = run.mark
        if half == self._half:
            run.mark = _Mark(half, current + 1, previous)
        else:
            run.mark = _Mark(self._half, 1, current if half == self._half - 1 else 0)

    def add(self, run: Run[Key]) -> None:
        count = self._count_of(run)
        if count not in self._queues:
            self._queues[count] = RunQueue()
            self._queues = dict(sorted(self._queues.items()))
        self._queues[count].add(run, order=run.use.number)

    def discard(self, run: Run[Key]) -> None:
        queue = self._queues[self._count_of(run)]
        queue.discard(run)

    def coldest(self, *, now_s: float) -> Run[Key] | None:
        least_used: Run[Key] | None = None
        for queue in self._queues.values():
            run = queue.first()
            if run is not None and run.use.number <= self._number - _COOL_DOWN_REQUESTS:
                return run
            least_used = least_used or run
        return least_used

    def _count_of(self, run: Run[Key]) -> int:
        half, current, previous = run.mark
        if half == self._half:
            return int(current + previous)
        return int(current) if half == self._half - 1 else 0
