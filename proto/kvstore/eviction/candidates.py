"""Which leaves may leave, and which of them first: holds and hints, above whatever the policy says."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Generic

from kvstore.eviction.ranking import Ranking
from kvstore.eviction.run import Run
from kvstore.eviction.run_queue import RunQueue
from kvstore.eviction.use import NO_HINT, PRIORITY_MAX, Key, Request, Use

# Levels are twice the priorities, so that there is one between blocks without a priority and those with the lowest.
_DONE_LEVEL = -2 * PRIORITY_MAX - 1
_GRACE_LEVEL = 1
_PRIORITY_LASTS_S = 3600.0
"""A priority above 0 counts for so long without use: longer than nearly all pauses in a session (p90: half an hour)."""
_LAPSES_MAX = 1024
"""Per search: some 5 ms. The oldest come first, so that there is enough to choose from."""
_STALE_ENTRIES_MAX = 1024


class Candidates(Generic[Key]):
    """Leaves by level. Those of a lower level leave first, whatever the policy says.

    Lowest are blocks whose last use was a session's that is over, unless the policy learns for itself what that means.
    Then come negative priorities, all blocks without one, and positive ones, which lapse when unused for an hour. The
    policy orders the middle level, time of use the others. What was used just now is above that one, for as long as the
    policy says: its request may still be at it, and what a lookup has found should not leave before it is read. A leaf
    whose last block is held is found out when it surfaces, and comes back when it is held no more: so holds cost a
    search nothing but once.
    """

    def __init__(self, ranking: Ranking[Key]) -> None:
        self.ranking = ranking
        self._queues: dict[int, RunQueue[Key]] = {}  # of levels other than 0, lowest first
        self._hold_counts: Counter[Key] = Counter()
        self._parked: set[Key] = set()  # held blocks on whose account runs may not be candidates
        self._deadlines: list[tuple[float, int, Run[Key], Use]] = []
        self._deadline_count_max = _STALE_ENTRIES_MAX
        self._pushes = 0
        self.now_s = float("-inf")
        """The newest time that anybody has told."""

    # --- leaves come and go

    def offer(self, run: Run[Key]) -> None:
        """A leaf; it may be among the candidates already."""
        if run.level is not None or (self._parked and run.keys[-1] in self._parked):
            return
        request = run.use.request
        if request is NO_HINT:
            level = 0
        else:
            if request.ttl_s is not None:
                self._watch(run, run.use.now_s + request.ttl_s)
            level = self._level_of(request)
        if level == 0 and run.use.now_s + self.ranking.grace_s > self.now_s:
            level = _GRACE_LEVEL
        run.level = level
        if level == 0:
            self.ranking.add(run)
        else:
            self._queue(level).add(run, order=run.use.number)

    def withdraw(self, run: Run[Key]) -> None:
        level, run.level = run.level, None
        if level == 0:
            self.ranking.discard(run)
        elif level is not None:
            self._queues[level].discard(run)

    # --- holds

    def hold(self, keys: Sequence[Key]) -> None:
        if len(keys) == 1:  # half a microsecond less than `update`
            self._hold_counts[keys[0]] = self._hold_counts.get(keys[0], 0) + 1
        else:
            self._hold_counts.update(keys)

    def unhold(self, keys: Iterable[Key]) -> list[Key]:
        """Blocks that nobody holds now, and whose runs are to be offered again if they end with them."""
        counts, parked = self._hold_counts, self._parked
        back: list[Key] = []
        for key in keys:
            count = counts.pop(key, 0)
            assert count > 0, f"{key!r} is not held"
            if count > 1:
                counts[key] = count - 1
            elif parked and key in parked:
                parked.remove(key)
                back.append(key)
        return back

    def is_held(self, key: Key) -> bool:
        return key in self._hold_counts

    def forget(self, key: Key) -> None:
        """The block is here no more, held or not."""
        if self._hold_counts:
            self._hold_counts.pop(key, None)
            self._parked.discard(key)

    # --- choosing

    def coldest(self, *, now_s: float) -> Run[Key] | None:
        """The candidate whose last block is to leave first, and is not held."""
        while (run := self._first(now_s)) is not None:
            if run.keys[-1] not in self._hold_counts:
                return run
            self._park(run)
        return None

    def admits(self, use: Use, *, keys: Sequence[Key], gain_min: float) -> bool:
        """False: a block of this use is not worth `gain_min` times what would leave."""
        victim = self.coldest(now_s=use.now_s)
        if victim is None:
            return True
        level = self._level_of(use.request)
        victim_level = 0 if victim.level == _GRACE_LEVEL else victim.level
        if victim_level != level:
            return victim_level is None or victim_level < level
        return level != 0 or self.ranking.admits(use, victim=victim, keys=keys, gain_min=gain_min)

    def first_expired(self, *, now_s: float) -> Run[Key] | None:
        """A candidate that is past its time."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now_s:
            _, _, run, use = deadlines[0]
            if run.level is None or run.use is not use:
                heapq.heappop(deadlines)
                if run.watched is use:
                    run.watched = None
            elif run.keys[-1] in self._hold_counts:
                self._park(run)
            else:
                return run
        return None

    def check_invariants(self, leaves: Iterable[Run[Key]]) -> None:
        for run in leaves:
            assert run.level is not None or run.keys[-1] in self._parked, f"leaf {run.keys} is no candidate"
            levels = (None, 0, _GRACE_LEVEL, self._level_of(run.use.request))
            assert run.level in levels, f"{run.keys} is at level {run.level}"
        assert self._parked <= self._hold_counts.keys(), "what is parked must be held"
        assert all(count > 0 for count in self._hold_counts.values()), "a hold count of 0 is remembered"

    # --- inside

    def _first(self, now_s: float) -> Run[Key] | None:
        self.now_s = max(self.now_s, now_s)
        if not self._queues:
            return self.ranking.coldest(now_s=now_s)
        self._let_levels_lapse(now_s)
        for level, queue in self._queues.items():
            if level < 0 and (run := queue.first()) is not None:
                return run
        run = self.ranking.coldest(now_s=now_s)
        if run is not None:
            return run
        return next(filter(None, (queue.first() for queue in self._queues.values())), None)

    def _let_levels_lapse(self, now_s: float) -> None:
        for level, queue in self._queues.items():
            lasts_s = self.ranking.grace_s if level == _GRACE_LEVEL else _PRIORITY_LASTS_S
            for _ in range(_LAPSES_MAX if level > 0 else 0):
                run = queue.first()
                if run is None or run.use.now_s + lasts_s > now_s:
                    break
                queue.discard(run)
                run.level = 0
                self.ranking.add(run)

    def _queue(self, level: int) -> RunQueue[Key]:
        if level not in self._queues:
            self._queues[level] = RunQueue()
            self._queues = dict(sorted(self._queues.items()))
        return self._queues[level]

    def _park(self, run: Run[Key]) -> None:
        self.withdraw(run)
        self._parked.add(run.keys[-1])

    def _watch(self, run: Run[Key], deadline_s: float) -> None:
        if run.watched is run.use:
            return
        run.watched = run.use
        self._pushes += 1
        heapq.heappush(self._deadlines, (deadline_s, self._pushes, run, run.use))
        if len(self._deadlines) > self._deadline_count_max:
            self._deadlines = [one for one in self._deadlines if one[2].keys and one[2].use is one[3]]
            heapq.heapify(self._deadlines)
            self._deadline_count_max = 2 * len(self._deadlines) + _STALE_ENTRIES_MAX

    def _level_of(self, request: Request) -> int:
        if request.is_done and not self.ranking.learns_done:
            return _DONE_LEVEL
        return 2 * request.priority
