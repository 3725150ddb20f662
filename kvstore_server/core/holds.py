"""What owners hold until they give it back or time takes it: leases and reservations."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvstore.messages import OwnerId

Value = TypeVar("Value")


@dataclass(slots=True, kw_only=True)
class _Hold(Generic[Value]):
    owner_id: OwnerId
    value: Value
    deadline_s: float


class HoldTable(Generic[Value]):
    """Numbered holds with an owner and a deadline.

    A hold ends exactly once: whoever gets its value back, by `release` or `expire`, frees what it stands
    for. Only its owner can renew or release it. Numbers are never used again.
    """

    def __init__(self) -> None:
        self._holds: dict[int, _Hold[Value]] = {}
        self._numbers_of: dict[OwnerId, set[int]] = {}
        # Each hold has one entry here, maybe with an old deadline, which is put right when it surfaces.
        self._deadlines: list[tuple[float, int]] = []
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._holds)

    def values(self) -> list[Value]:
        return [hold.value for hold in self._holds.values()]

    def grant(self, *, owner_id: OwnerId, value: Value, now_s: float, duration_s: float) -> int:
        number = self.next_number
        self.adopt(number, owner_id=owner_id, value=value, deadline_s=now_s + duration_s)
        return number

    @property
    def next_number(self) -> int:
        """What `grant` would return."""
        return self._last_number + 1

    def adopt(self, number: int, *, owner_id: OwnerId, value: Value, deadline_s: float) -> None:
        """Takes a hold in under a number that its owner knows, such as from another table; `inf`: no deadline."""
        assert number not in self._holds, f"hold {number} is here already"
        self._last_number = max(self._last_number, number)
        self._holds[number] = _Hold(owner_id=owner_id, value=value, deadline_s=deadline_s)
        self._numbers_of.setdefault(owner_id, set()).add(number)
        if deadline_s < math.inf:
            self._queue(deadline_s, number)

    def get(self, number: int, *, owner_id: OwnerId) -> Value | None:
        hold = self._holds.get(number)
        return hold.value if hold is not None and hold.owner_id == owner_id else None

    def renew(self, number: int, *, owner_id: OwnerId, now_s: float, duration_s: float) -> bool:
        """Moves the deadline to `duration_s` from now; False when the hold has ended or belongs to another."""
        hold = self._holds.get(number)
        if hold is None or hold.owner_id != owner_id or hold.deadline_s <= now_s:
            return False
        # The queue entry only ever moves later by surfacing, so an earlier deadline needs its own.
        is_earlier = now_s + duration_s < hold.deadline_s
        hold.deadline_s = now_s + duration_s
        if is_earlier:
            self._queue(hold.deadline_s, number)
        return True

    def release(self, number: int, *, owner_id: OwnerId) -> Value | None:
        """Ends a hold of this owner and returns what it stood for, or None."""
        hold = self._holds.get(number)
        if hold is None or hold.owner_id != owner_id:
            return None
        return self._end(number)

    def release_all(self, *, owner_id: OwnerId) -> list[Value]:
        """Ends all holds of an owner, oldest first, and returns what they stood for."""
        return [self._end(number) for number in sorted(self._numbers_of.get(owner_id, ()))]

    def expire(self, *, now_s: float) -> list[Value]:
        """Ends all holds whose deadline has come and returns what they stood for."""
        ended: list[Value] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, number = heapq.heappop(self._deadlines)
            hold = self._holds.get(number)
            if hold is None:
                continue
            if hold.deadline_s > now_s:
                heapq.heappush(self._deadlines, (hold.deadline_s, number))
                continue
            ended.append(self._end(number))
        return ended

    def _end(self, number: int) -> Value:
        hold = self._holds.pop(number)
        numbers = self._numbers_of[hold.owner_id]
        numbers.discard(number)
        if not numbers:
            del self._numbers_of[hold.owner_id]
        return hold.value

    def _queue(self, deadline_s: float, number: int) -> None:
        # Entries of holds that ended early stay behind; swept here, so that the queue is bounded by the table.
        if len(self._deadlines) > 2 * len(self._holds) + 64:
            self._deadlines = [
                (hold.deadline_s, other)
                for other, hold in self._holds.items()
                if other != number and hold.deadline_s < math.inf
            ]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline_s, number))
