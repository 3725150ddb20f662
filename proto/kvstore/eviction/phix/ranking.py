"""PHIX as a ranking: blocks by what they are worth; see docs/policy.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from kvstore.eviction.guard import Guard, Shadow
from kvstore.eviction.phix import features
from kvstore.eviction.phix.features import Past
from kvstore.eviction.phix.ghost_table import WEIGHT, GhostTable, is_one_of
from kvstore.eviction.phix.learner import Learner
from kvstore.eviction.phix.visits import Cohort, Visit
from kvstore.eviction.phix.worth_queue import WorthQueue
from kvstore.eviction.ranking import Ranking
from kvstore.eviction.run import Run
from kvstore.eviction.use import Key, Use

_GHOSTS_MIN = 32_768
"""Places for blocks that have left: so many (256 KiB), or as many as there are blocks."""
_COHORTS_OF_GONE_MAX = 4096
"""Requests with few blocks have a cohort (0.5 KiB) for nearly every ghost: so many more than blocks, no more."""
_SWEPT_PER_GHOST = 8
_LOOK_AHEAD = 8
"""Of eight keys none leaves a ghost once in 256 times."""
_SESSIONS_MIN = 1024
_BLOCKS_PER_SESSION = 32
"""Sessions whose last request is remembered: at most so many, or one per so many blocks."""
_CONTINUES_SHARE = 0.8
"""Without a session's name: a chain that has so much of an earlier one is its next turn."""


class Phix(Ranking[Key]):
    """The leaf that is worth least leaves first; of equals the one that was used longest ago.

    What a block is worth depends on its class and its age alone. Its class says how likely its request's blocks are
    to be used again, in eight bands; how likely each class is to be used at an age is counted, also of blocks that have
    left or were never taken, as long as half of their keys (the ghosts) are remembered.
    """

    is_steady = True
    learns_done = True

    def __init__(self, *, capacity_blocks: int, make_lru: Callable[[int], Shadow[Key]]) -> None:
        self.capacity_blocks = capacity_blocks
        self._learner = Learner()
        self._queue: WorthQueue[Key] = WorthQueue(self._learner)
        self._ghosts = GhostTable(size_min=max(_GHOSTS_MIN, capacity_blocks))
        self._sessions: dict[int, Visit] = {}
        self._open: Visit | None = None
        self._guard: Guard[Key] = Guard(make_lru, capacity_blocks=capacity_blocks)
        self._chain: list[Key] = []  # of the present request, if it may be sampled
        self._is_collecting = False
        self._visit: Visit | None = None
        self._now_s = 0.0
        self._hit_blocks = 0

    # --- requests

    def begin(self, use: Use) -> None:
        self._close()
        self._end_sampling()
        request = use.request
        self._now_s = use.now_s
        visit = Visit(
            request,
            number=use.number,
            now_s=use.now_s,
            block_count=use.chain_blocks - request.is_last_partial,
        )
        visit.matched_blocks = min(use.matched_blocks, visit.block_count)
        use.mark = self._open = self._visit = visit
        self._learner.begin(visit)
        self._queue.note_request()
        if self._guard.note_request():
            self._queue.follow_lru(False)
        self._begin_sampling(visit)

    def describe(self, use: Use, *, was: Use) -> None:
        visit: Visit = use.mark
        visit.request = use.request
        if visit.is_placed:
            self._place(visit)

    def admits(self, use: Use, *, victim: Run[Key], keys: Sequence[Key], gain_min: float) -> bool:
        visit: Visit = use.mark
        ghost = self._nearest_ghost(keys)
        if not visit.is_placed:
            if ghost is not None:
                visit.source = ghost
            self._close()
        if ghost is None or visit.is_same_request(ghost.visit, age_s=visit.now_s - ghost.visit.now_s):
            gain = self._learner.worth_of_new(visit, now_s=self._now_s)
        else:
            past = features.past_of(
                features.next_uses_band(ghost.past.uses),
                features.gap_band(visit.now_s - ghost.visit.now_s),
                is_shared=ghost.past.is_shared,
                is_partial=False,
            )
            gain = self._learner.worth_of_return(visit, past, now_s=self._now_s)
        if self._guard.follows_lru:
            return True
        return self._learner.worth(victim.mark, now_s=self._now_s) * gain_min < gain

    # --- blocks

    def admit(self, keys: Sequence[Key], *, parent: Run[Key] | None, use: Use) -> Iterable[tuple[int, Any]]:
        visit: Visit = use.mark
        parts: list[tuple[int, Cohort]] = []
        start = 0
        for index, ghost in self._take_ghosts(keys):
            parts.append(
                (index + 1 - start, self._next_cohort(ghost, visit, WEIGHT, features.next_uses_band(ghost.past.uses)))
            )
            start = index + 1
        new = len(keys) - start
        visit.reached_count += len(keys)
        if self._is_collecting and visit is self._visit and self._chain[-1:] == (parent.keys[-1:] if parent else []):
            self._chain += keys
        if new:
            partial = int(visit.request.is_last_partial and visit.reached_count == use.chain_blocks)
            if new > partial:
                parts.append((new - partial, self._cohort(visit, features.NEW)))
            if partial:
                parts.append((1, self._cohort(visit, features.NEW_PARTIAL)))
        for count, cohort in parts:
            self._learner.wait(cohort, count)
        return parts

    def passed_over(self, keys: Sequence[Key], *, use: Use) -> None:
        visit: Visit = use.mark
        if self._is_collecting and visit is self._visit:
            self._chain += keys
        start = 0
        for index, ghost in self._take_ghosts(keys):
            again = self._next_cohort(ghost, visit, WEIGHT, features.next_uses_band(ghost.past.uses))
            self._haunt(keys[start : index + 1], again)
            start = index + 1
        if start < len(keys):
            self._haunt(keys[start:], self._cohort(visit, features.NEW))
        visit.left_count += len(keys)

    def reused(self, run: Run[Key], *, use: Use) -> None:
        cohort: Cohort = run.mark
        visit: Visit = use.mark
        count = len(run.keys)
        visit.reached_count += count
        if self._is_collecting and visit is self._visit:
            self._chain += run.keys
            self._hit_blocks += count
        # Counted from the use that brought it; that one and this one are two more.
        uses = features.uses_band(run.use_count(count - 1) + 2)
        run.mark = again = self._next_cohort(cohort, visit, count, max(uses, cohort.past.uses))
        self._learner.wait(again, count)

    def evicted(self, keys: Sequence[Key], run: Run[Key], *, now_s: float) -> None:
        cohort: Cohort = run.mark
        cohort.visit.left_count += len(keys)
        self._leave_ghosts(keys, cohort)

    def removed(self, key: Key, run: Run[Key]) -> None:
        self._learner.forget(run.mark, 1)

    # --- candidates

    def add(self, run: Run[Key]) -> None:
        self._queue.add(run)

    def discard(self, run: Run[Key]) -> None:
        self._queue.discard(run)

    def coldest(self, *, now_s: float) -> Run[Key] | None:
        if self._open is not None:
            self._close()
        return self._queue.first(now_s=now_s)

    def figures(self) -> Mapping[str, float]:
        return {
            "ghost_count": len(self._ghosts),
            "session_count": len(self._sessions),
            "cohort_count": self._learner.cohort_count,
            "class_count": self._learner.class_count,
            "returned_count": self._learner.returned_count,
            "guard_follows_lru": float(self._guard.follows_lru),
            "guard_trip_count": self._guard.trip_count,
            "guard_lead_of_lru": self._guard.lead,
        }

    # --- the guard

    def _begin_sampling(self, visit: Visit) -> None:
        session_id = visit.session_id
        if session_id is not None:
            visit.is_sampled = is_one_of(self._guard.sample, session_id)
        # Without a session it is known later on, when it is known whose turn this is.
        self._is_collecting = self._guard.is_watching and (session_id is None or visit.is_sampled)

    def _end_sampling(self) -> None:
        visit = self._visit
        if not self._is_collecting or visit is None:
            return
        chain, hit_blocks = list(dict.fromkeys(self._chain)), self._hit_blocks
        self._chain, self._hit_blocks, self._is_collecting = [], 0, False
        if visit.is_sampled and chain and self._guard.note_sampled(chain, hit_blocks=hit_blocks, now_s=visit.now_s):
            self._queue.follow_lru(True)

    # --- inside

    def _next_cohort(self, cohort: Cohort, visit: Visit, count: int, uses: int) -> Cohort:
        """So many blocks of a cohort are used again, by this request: what they are in then."""
        earlier = cohort.visit
        age_s = visit.now_s - earlier.now_s
        if not visit.is_placed:
            visit.source = cohort
        if visit.is_same_request(earlier, age_s=age_s):
            self._learner.forget(cohort, count)
            return self._cohort(visit, cohort.past)
        is_left = earlier.block_count - earlier.left_count > visit.matched_blocks
        self._learner.reuse(cohort, count, now_s=visit.now_s)
        past = cohort.past
        gap = features.gap_band(age_s)
        return self._cohort(
            visit,
            features.past_of(uses, gap, is_shared=past.is_shared or is_left, is_partial=past.is_partial),
        )

    def _cohort(self, visit: Visit, past: Past) -> Cohort:
        for cohort in visit.cohorts:
            if cohort.past is past:
                return cohort
        cohort = Cohort(visit, past)
        visit.cohorts += (cohort,)
        return cohort

    def _close(self) -> None:
        """No more will be known of the past of the present request."""
        visit, self._open = self._open, None
        if visit is not None and not visit.is_placed:
            self._place_in_session(visit)
            self._place(visit)
            visit.source = None

    def _place_in_session(self, visit: Visit) -> None:
        """Which turn this is, of what."""
        session_id = visit.session_id
        if session_id is None:
            before = self._earlier_turn(visit)
        else:
            before = self._sessions.pop(session_id, None)
            self._sessions[session_id] = visit
            _drop_oldest(self._sessions, max(_SESSIONS_MIN, self.capacity_blocks // _BLOCKS_PER_SESSION))
        if before is None:
            visit.growth_blocks, visit.growth_tokens = visit.block_count, visit.input_tokens
        else:
            age_s = visit.now_s - before.now_s
            if visit.is_same_request(before, age_s=age_s):
                visit.turn, visit.gap_s = before.turn, before.gap_s
                visit.growth_blocks, visit.growth_tokens = before.growth_blocks, before.growth_tokens
            else:
                visit.turn, visit.gap_s = before.turn + 1, age_s
                visit.growth_blocks = max(visit.block_count - before.block_count, 0)
                tokens, tokens_before = visit.input_tokens, before.input_tokens
                visit.growth_tokens = None if tokens is None or tokens_before is None else tokens - tokens_before
        visit.turn = max(visit.turn, visit.request.turn or 1)
        if session_id is None:
            visit.is_sampled = is_one_of(self._guard.sample, visit.number) if before is None else before.is_sampled

    def _earlier_turn(self, visit: Visit) -> Visit | None:
        """Without a session's name: whose chain this one continues."""
        if visit.source is None:
            return None
        earlier = visit.source.visit
        is_next = visit.matched_blocks >= max(_CONTINUES_SHARE * earlier.block_count, 2)
        return earlier if is_next else None

    def _place(self, visit: Visit) -> None:
        visit.features = features.of_request(
            visit.request,
            turn=visit.turn,
            gap_s=visit.gap_s,
            growth_tokens=visit.growth_tokens,
            growth_blocks=visit.growth_blocks,
            chain_blocks=visit.block_count,
            matched_blocks=visit.matched_blocks,
        )
        self._learner.place(visit)

    def _take_ghosts(self, keys: Sequence[Key]) -> list[tuple[int, Cohort]]:
        return [(index, self._learner.cohort_at(slot)) for index, slot in self._ghosts.take(keys)]

    def _nearest_ghost(self, keys: Sequence[Key]) -> Cohort | None:
        """Of the next block or, as that one's key may be none that is remembered, of one that follows."""
        slot = self._ghosts.first(keys[:_LOOK_AHEAD])
        return None if slot is None else self._learner.cohort_at(slot)

    def _haunt(self, keys: Sequence[Key], cohort: Cohort) -> None:
        self._learner.wait(cohort, len(keys))
        self._leave_ghosts(keys, cohort)

    def _leave_ghosts(self, keys: Sequence[Key], cohort: Cohort) -> None:
        count, displaced = self._ghosts.put(keys, cohort.slot)
        self._learner.change(cohort, WEIGHT * count - len(keys))
        self._forget(displaced)
        if self._learner.cohort_count > self.capacity_blocks + _COHORTS_OF_GONE_MAX:
            self._forget(self._ghosts.sweep(_SWEPT_PER_GHOST * count))

    def _forget(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._learner.forget(self._learner.cohort_at(slot), WEIGHT)


def _drop_oldest(entries: dict[int, Visit], count_max: int) -> None:
    """Makes room for a while: finding a dict's first entry costs as much as going over those that were before it."""
    if len(entries) > count_max:
        for key in list(islice(entries, len(entries) - count_max + count_max // 32)):
            del entries[key]
