"""When sessions are expected back, and which of their prompts should be in memory by then. Pure.

A client may say when it comes back. Where it does not, the gaps between turns tell: agents come back from a tool within
seconds, people after minutes or never (`gaps`: one distribution per way in which the last answer ended).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.eviction import Finish
from kvstore.keys import BlockHash
from kvstore_server.core.tenants import ScopedId

_BIN_COUNT = 32
_FIRST_BIN_S = 0.5
_GROWTH = 1.5
"""Bins end at 0.5 s, 1.25 s, 2.4 s … 100 h."""
_DECAY = 0.999
"""Per turn of the same kind: the last thousand count."""
_TURNS_MIN = 20
"""Fewer say nothing of their kind."""
_SESSION_COUNT_MAX = 65_536
_LOOKS_MAX = 512
"""At once: some 5 ms; the rest have their turn with the next call."""
_FORGET_AFTER_S = 3_600.0
"""Who has not come back by then is taken to be gone for good."""


class SessionKey(NamedTuple):
    """Sessions of one tenant are never another's."""

    namespace_id: ScopedId
    session_id: int


class Due(NamedTuple):
    """A prompt that should be in memory now: the last of its blocks, from which the chain leads up."""

    key: SessionKey
    tail: BlockHash


class GapModel:
    """How long turns of one kind are apart, and how many never come: geometric bins, the past decaying.

    A turn that has not come within an hour counts as one that never comes.
    """

    def __init__(self) -> None:
        self._returned = [0.0] * _BIN_COUNT
        self._gone = 0.0

    def note(self, gap_s: float | None) -> None:
        """None: it did not come."""
        self._returned = [count * _DECAY for count in self._returned]
        self._gone *= _DECAY
        if gap_s is None:
            self._gone += 1
        else:
            self._returned[_bin_of(gap_s)] += 1

    @property
    def turn_count(self) -> float:
        """Of those that still count."""
        return sum(self._returned) + self._gone

    def share_within(self, horizon_s: float, *, age_s: float) -> float:
        """P(it comes within the horizon | it has not come by `age_s`); 0 while too little is known.

        Within a bin turns are taken to be spread evenly.
        """
        if self.turn_count < _TURNS_MIN:
            return 0.0
        before, by_then = self._count_by(age_s), self._count_by(age_s + horizon_s)
        left = self.turn_count - before
        return (by_then - before) / left if left > 0 else 0.0

    def _count_by(self, age_s: float) -> float:
        index = _bin_of(age_s)
        start_s, end_s = _bin_end_s(index - 1), _bin_end_s(index)
        inside = self._returned[index] * min(max((age_s - start_s) / (end_s - start_s), 0.0), 1.0)
        return sum(self._returned[:index]) + inside


@dataclass(slots=True, kw_only=True)
class _Session:
    tail: BlockHash
    turn: int | None
    ended_s: float
    finish: Finish
    expected_s: float | None
    """When it said it would be back."""
    check: int
    """Number of its entry in the queue."""
    is_brought: bool = False


class Returns:
    """Sessions that are away. All state is bounded; whatever is forgotten is only not prefetched."""

    def __init__(self, *, share_min: float = 0.5, horizon_s: float = 30.0, recheck_s: float = 5.0) -> None:
        """A prompt is due while its session is back within `horizon_s` with a probability of at least `share_min`; it
        is looked at every `recheck_s`."""
        self._share_min = share_min
        self._horizon_s = horizon_s
        self._recheck_s = recheck_s
        self._sessions: dict[SessionKey, _Session] = {}
        self._queue: list[tuple[float, int, SessionKey]] = []
        self._check_count = 0
        self.gaps: dict[Finish, GapModel] = {finish: GapModel() for finish in Finish}

    def __len__(self) -> int:
        return len(self._sessions)

    def leave(
        self,
        key: SessionKey,
        tail: BlockHash,
        *,
        turn: int | None = None,
        finish: Finish = Finish.UNKNOWN,
        expected_return_s: float | None = None,
        now_s: float,
    ) -> None:
        """A turn has ended, or more has become known of it: the session is away from now on."""
        self._sessions.pop(key, None)
        if len(self._sessions) >= _SESSION_COUNT_MAX:
            del self._sessions[next(iter(self._sessions))]
        expected_s = None if expected_return_s is None else now_s + expected_return_s
        session = _Session(tail=tail, turn=turn, ended_s=now_s, finish=finish, expected_s=expected_s, check=0)
        self._sessions[key] = session
        first_s = now_s + self._recheck_s
        if expected_s is not None:
            first_s = max(first_s, expected_s - self._horizon_s)
        self._check_at(key, session, first_s)

    def come(self, key: SessionKey, *, turn: int | None = None, now_s: float) -> None:
        """The session is back, unless this is still the turn that it left after; its gap is learned from."""
        session = self._sessions.get(key)
        if session is not None and (turn is None or turn != session.turn):
            del self._sessions[key]
            self.gaps[session.finish].note(max(now_s - session.ended_s, 0.0))

    def end(self, key: SessionKey) -> None:
        """It will not be back, as it says itself: nothing to learn."""
        self._sessions.pop(key, None)

    def rest(self, key: SessionKey) -> None:
        """Its prompt is being brought: once per absence, or what leaves unused would be brought again for ever."""
        session = self._sessions.get(key)
        if session is not None:
            session.is_brought = True

    def due(self, *, now_s: float, count_max: int) -> list[Due]:
        """Up to so many prompts that are worth having in memory now; each is named again until it `rest`s."""
        found: list[Due] = []
        for _ in range(_LOOKS_MAX):
            if not self._queue or self._queue[0][0] > now_s or len(found) == count_max:
                break
            _, check, key = heapq.heappop(self._queue)
            session = self._sessions.get(key)
            if session is None or session.check != check:
                continue
            age_s = now_s - session.ended_s
            if age_s >= _FORGET_AFTER_S and (
                session.expected_s is None or now_s > session.expected_s + self._horizon_s
            ):
                del self._sessions[key]
                self.gaps[session.finish].note(None)
                continue
            if self._is_due(session, now_s=now_s):
                found.append(Due(key, session.tail))
            # Later looks are further apart: what is likely changes with the logarithm of the time.
            self._check_at(key, session, now_s + max(self._recheck_s, age_s / 8))
        return found

    def _is_due(self, session: _Session, *, now_s: float) -> bool:
        if session.is_brought:
            return False
        if session.expected_s is not None:
            return abs(now_s - session.expected_s) <= self._horizon_s
        gaps = self.gaps[session.finish]
        return gaps.share_within(self._horizon_s, age_s=now_s - session.ended_s) >= self._share_min

    def _check_at(self, key: SessionKey, session: _Session, at_s: float) -> None:
        self._check_count += 1
        session.check = self._check_count
        heapq.heappush(self._queue, (at_s, session.check, key))
        if len(self._queue) > 2 * len(self._sessions) + 1024:
            self._queue = [entry for entry in self._queue if self._is_current(entry)]
            heapq.heapify(self._queue)

    def _is_current(self, entry: tuple[float, int, SessionKey]) -> bool:
        session = self._sessions.get(entry[2])
        return session is not None and session.check == entry[1]


def _bin_end_s(index: int) -> float:
    return _FIRST_BIN_S * (_GROWTH ** (index + 1) - 1) / (_GROWTH - 1)


_BIN_ENDS_S = tuple(_bin_end_s(index) for index in range(_BIN_COUNT))


def _bin_of(gap_s: float) -> int:
    return min(bisect_left(_BIN_ENDS_S, gap_s), _BIN_COUNT - 1)
