"""What attached engines hold of one pool: slots that they copy blocks into, and slots that they copy from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from kvstore.keys import BlockHash
from kvstore.messages import OwnerId
from kvstore.slots import SlotId

Hold = TypeVar("Hold")
"""What keeps the slots of a lease where they are; given back with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Slots that an engine writes; blocks of one chain with gaps, each with its parent."""

    hashes: tuple[BlockHash, ...]
    parents: tuple[BlockHash | None, ...]
    slots: tuple[SlotId, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lease(Generic[Hold]):
    hold: Hold
    slot_count: int
    deadline_s: float


@dataclass(slots=True)
class _Session(Generic[Hold]):
    held_count: int = 0
    last_number: int = 0
    reservations: dict[int, Reservation] = field(default_factory=dict)
    leases: dict[int, _Lease[Hold]] = field(default_factory=dict)


class Ended(NamedTuple, Generic[Hold]):
    """What a session held when it ended."""

    written_slots: list[SlotId]
    """Given to nobody until nothing of the engine's can write to them any more."""
    holds: list[Hold]


class Expired(NamedTuple, Generic[Hold]):
    """Leases of one session that are over; none of its leases up to `last_number` is good any more."""

    session_id: OwnerId
    last_number: int
    holds: list[Hold]


class Holdings(Generic[Hold]):
    """Who holds what, and until when; time is an argument. Knows neither pools nor connections.

    A lease ends when it is given back, when it expires, or with its session. A reservation ends with its commit or
    with its session, and in no other way: an engine that was stopped may go on to write where it was told to. All that
    expires is that its commit makes blocks of it.

    No more than `count_max` slots are held in all, and `session_count_max` by one session, those it has only been
    promised included.
    """

    def __init__(self, *, count_max: int, session_count_max: int) -> None:
        self._count_max = count_max
        self._session_count_max = session_count_max
        self._sessions: dict[OwnerId, _Session[Hold]] = {}

    @property
    def session_count(self) -> int:
        return len(self._sessions)

    @property
    def held_count(self) -> int:
        return sum(session.held_count for session in self._sessions.values())

    def __contains__(self, session_id: OwnerId) -> bool:
        return session_id in self._sessions

    def open(self, session_id: OwnerId) -> None:
        assert session_id not in self._sessions, "a session twice"
        self._sessions[session_id] = _Session()

    def close(self, session_id: OwnerId) -> Ended[Hold]:
        session = self._sessions.pop(session_id)
        return Ended(
            written_slots=[slot for one in session.reservations.values() for slot in one.slots],
            holds=[lease.hold for lease in session.leases.values()],
        )

    def promise(self, session_id: OwnerId, count: int) -> int:
        """How many of so many slots it may have; they count as held until `settle`."""
        session = self._sessions[session_id]
        promised_count = min(count, self._session_count_max - session.held_count, self._count_max - self.held_count)
        promised_count = max(0, promised_count)
        session.held_count += promised_count
        return promised_count

    def settle(self, session_id: OwnerId, *, promised_count: int, count: int) -> bool:
        """So many of the promised slots were to be had; False: the session has ended, and takes none."""
        assert count <= promised_count, f"{count} slots of {promised_count}"
        session = self._sessions.get(session_id)
        if session is None:
            return False
        session.held_count -= promised_count - count
        return True

    def reserve(self, session_id: OwnerId, reservation: Reservation) -> int:
        """Its number. The slots were promised and settled."""
        session = self._sessions[session_id]
        session.last_number += 1
        session.reservations[session.last_number] = reservation
        return session.last_number

    def commit(self, session_id: OwnerId, number: int) -> Reservation | None:
        """Ends a reservation; None: there is none of that number."""
        session = self._sessions[session_id]
        reservation = session.reservations.pop(number, None)
        if reservation is not None:
            session.held_count -= len(reservation.slots)
        return reservation

    def lease(self, session_id: OwnerId, hold: Hold, *, slot_count: int, deadline_s: float) -> int:
        """Its number, above those of all earlier leases. The slots were promised and settled."""
        session = self._sessions[session_id]
        session.last_number += 1
        session.leases[session.last_number] = _Lease(hold=hold, slot_count=slot_count, deadline_s=deadline_s)
        return session.last_number

    def release(self, session_id: OwnerId, numbers: Sequence[int]) -> list[Hold]:
        """What kept these leases; those that are over by now have none."""
        session = self._sessions[session_id]
        return [self._end(session, number) for number in numbers if number in session.leases]

    def expire(self, *, now_s: float) -> list[Expired[Hold]]:
        expired: list[Expired[Hold]] = []
        for session_id, session in self._sessions.items():
            late = [number for number, lease in session.leases.items() if lease.deadline_s <= now_s]
            if late:
                last_number = max(late)
                # An earlier one that is not late yet, which only another duration could bring about, goes with it.
                numbers = [number for number in session.leases if number <= last_number]
                holds = [self._end(session, number) for number in numbers]
                expired.append(Expired(session_id, last_number, holds))
        return expired

    def check_invariants(self) -> None:
        assert self.held_count <= self._count_max, f"{self.held_count} slots held, {self._count_max} at most"
        for session in self._sessions.values():
            granted_count = sum(len(one.slots) for one in session.reservations.values())
            granted_count += sum(one.slot_count for one in session.leases.values())
            assert granted_count <= session.held_count <= self._session_count_max, f"{granted_count} of {session}"

    def _end(self, session: _Session[Hold], number: int) -> Hold:
        lease = session.leases.pop(number)
        session.held_count -= lease.slot_count
        return lease.hold
