"""One pool as attached engines use it: slots that they copy into and from themselves."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from gpu_agent.agent import GpuAgent
from gpu_agent.attach.word import Word
from gpu_agent.core.holdings import Holdings, Reservation
from gpu_agent.device import PoolHandle
from gpu_agent.pins import Pinned
from gpu_agent.rows import check_parent_hash
from kvstore import messages as m
from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore.keys import BlockHash, split_hashes
from kvstore.messages import BlockState, OwnerId, SlotGrant
from kvstore.slots import SlotId

LEASE_S = 30.0
"""How long slots are held for an engine that says nothing: outlasts any copy, and any hiccup of a machine."""
_WAIT_S_MAX = 60.0


class Share:
    """Grants slots of one agent's pool to the sessions of attached engines. For many threads.

    At most half of the pool is granted at a time and a quarter to one session, so that one that hangs leaves room for
    the others and for migration. A slot that was reserved is given to nobody else while its engine may still write
    to it: until it was committed, or given back, or `free`d after the engine's end.
    """

    def __init__(
        self,
        agent: GpuAgent,
        handle: PoolHandle,
        *,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.agent = agent
        self.handle = handle
        self.lease_s = lease_s
        self._clock = clock
        # So that an engine may store one batch and load another at a time.
        self.batch_count_max = max(1, agent.slot_count // 8)
        self._holdings: Holdings[Pinned] = Holdings(
            count_max=max(1, agent.slot_count // 2), session_count_max=max(1, agent.slot_count // 4)
        )
        self._words: dict[OwnerId, Word] = {}
        self._lock = threading.Lock()
        self._names = itertools.count()
        self._orphaned_count = 0

    def __contains__(self, session_id: OwnerId) -> bool:
        return session_id in self._holdings

    @property
    def session_count(self) -> int:
        return self._holdings.session_count

    @property
    def granted_count(self) -> int:
        """Slots that engines may be copying into or from, those of engines that are ending included."""
        with self._lock:
            return self._holdings.held_count + self._orphaned_count

    def begin(self, session_id: OwnerId, word: Word) -> None:
        """An engine has attached; `word` is what it finds its expired leases in."""
        with self._lock:
            self._holdings.open(session_id)
            self._words[session_id] = word

    def end(self, session_id: OwnerId) -> list[SlotId]:
        """Its connection is closed. Returns the slots that it was writing, to be given to `free`."""
        with self._lock:
            del self._words[session_id]
            ended = self._holdings.close(session_id)
            self._orphaned_count += len(ended.written_slots)
        for pinned in ended.holds:
            pinned.release()
        return ended.written_slots

    def free(self, slots: Sequence[SlotId]) -> None:
        """Nothing can write to these slots of an ended session any more."""
        self.agent.discard(slots)
        with self._lock:
            self._orphaned_count -= len(slots)

    def expire(self) -> None:
        """Takes back leases whose time is over; to be called now and then."""
        with self._lock:
            expired = self._holdings.expire(now_s=self._clock())
            for session_id, last_number, _ in expired:
                # Before any slot is given to another block: who copies from it looks here afterwards.
                self._words[session_id].set(last_number)
        for _, _, holds in expired:
            for pinned in holds:
                pinned.release()

    # --- what engines ask for

    def reserve(self, request: m.ReserveSlotsRequest) -> m.ReserveSlotsResponse:
        session_id, hashes = request.session_id, self._checked(request.block_hashes)
        parent_hash = BlockHash(request.parent_hash) if request.parent_hash else None
        check_parent_hash(parent_hash)
        is_here = self.agent.contains(hashes)
        self.agent.touch([block_hash for block_hash, here in zip(hashes, is_here, strict=True) if here])
        new = [block_hash for block_hash, here in zip(hashes, is_here, strict=True) if not here]
        slots = self._reserved(session_id, len(new)) if new else []
        taken = new[: len(slots)]
        states = dict.fromkeys(new, SlotGrant.REFUSED) | dict.fromkeys(taken, SlotGrant.RESERVED)
        number = 0
        if taken:
            parent_of = dict(zip(hashes, (parent_hash, *hashes[:-1]), strict=True))
            reservation = Reservation(
                hashes=tuple(taken),
                parents=tuple(parent_of[block_hash] for block_hash in taken),
                slots=tuple(slots),
                deadline_s=self._clock() + self.lease_s,
            )
            number = self._noted(session_id, reservation)
        grants = bytes(states.get(block_hash, SlotGrant.PRESENT) for block_hash in hashes)
        return m.ReserveSlotsResponse(slot_grants=grants, slots=tuple(slots), reservation_number=number)

    def commit(self, request: m.CommitSlotsRequest) -> m.CommitSlotsResponse:
        with self._lock:
            self._check_session(request.session_id)
            reservation = self._holdings.commit(request.session_id, request.reservation_number)
        if reservation is None:
            raise InvalidArgumentError.of(
                "reservation_number", request.reservation_number, "one of this session that was not committed yet"
            )
        slots = reservation.slots
        is_written = [bool(flag) for flag in request.written] if len(request.written) == len(slots) else None
        if is_written is None or reservation.deadline_s <= self._clock():
            self.agent.discard(slots)
            if is_written is None:
                raise InvalidArgumentError.of("written", f"{len(request.written)} bytes", f"{len(slots)}, one per slot")
            return m.CommitSlotsResponse(stored=bytes(len(slots)))
        self.agent.discard([slot for slot, written in zip(slots, is_written, strict=True) if not written])
        for run in _runs(reservation, is_written):
            self.agent.seal_all(run.slots, run.hashes, parent_hash=run.parent_hash)
        return m.CommitSlotsResponse(stored=bytes(is_written))

    def acquire(self, request: m.AcquireSlotsRequest) -> m.AcquireSlotsResponse:
        session_id, hashes = request.session_id, self._checked(request.block_hashes)
        parent_hash = BlockHash(request.parent_hash) if request.parent_hash else None
        self._release(session_id, request.released_lease_numbers)
        promised_count = self._promised(session_id, len(hashes))
        pinned: Pinned | None = None
        try:
            wanted = hashes[:promised_count]
            if wanted:
                pinned = self._pin(wanted, parent_hash=parent_hash, wait_s=min(request.wait_s, _WAIT_S_MAX))
        finally:
            count = len(pinned.held) if pinned is not None else 0
            with self._lock:
                is_open = self._holdings.settle(session_id, promised_count=promised_count, count=count)
                number = 0
                if pinned is not None and is_open and count:
                    deadline_s = self._clock() + self.lease_s
                    number = self._holdings.lease(session_id, pinned, slot_count=count, deadline_s=deadline_s)
            if pinned is not None and not number:
                pinned.release()
        if not is_open:
            raise session_ended()
        held = pinned.held if number and pinned is not None else {}
        return m.AcquireSlotsResponse(
            block_states=bytes(BlockState.HIT if block_hash in held else BlockState.MISS for block_hash in hashes),
            slots=tuple(held[block_hash] for block_hash in hashes if block_hash in held),
            lease_number=number,
        )

    def release(self, request: m.ReleaseSlotsRequest) -> m.ReleaseSlotsResponse:
        self._release(request.session_id, request.lease_numbers)
        return m.ReleaseSlotsResponse()

    def check_invariants(self) -> None:
        with self._lock:
            self._holdings.check_invariants()
            assert len(self._words) == self._holdings.session_count, "a session without its word"
        self.agent.check_invariants()

    # --- inside

    def _checked(self, packed: bytes) -> list[BlockHash]:
        hashes = split_hashes(packed)
        if len(hashes) > self.batch_count_max:
            raise InvalidArgumentError.of("block_hashes", f"{len(hashes)} hashes", f"up to {self.batch_count_max}")
        if len(set(hashes)) != len(hashes):
            raise InvalidArgumentError.of("block_hashes", "a hash twice", "distinct ones")
        return hashes

    def _check_session(self, session_id: OwnerId) -> None:
        if session_id not in self._holdings:
            raise session_ended()

    def _release(self, session_id: OwnerId, numbers: Sequence[int]) -> None:
        with self._lock:
            self._check_session(session_id)
            holds = self._holdings.release(session_id, numbers)
        for pinned in holds:
            pinned.release()

    def _promised(self, session_id: OwnerId, count: int) -> int:
        with self._lock:
            self._check_session(session_id)
            return self._holdings.promise(session_id, count)

    def _reserved(self, session_id: OwnerId, count: int) -> list[SlotId]:
        """Slots, settled; waits for room."""
        promised_count = self._promised(session_id, count)
        slots: list[SlotId] = []
        try:
            if promised_count:
                slots = self.agent.reserve(promised_count)
        finally:
            with self._lock:
                is_open = self._holdings.settle(session_id, promised_count=promised_count, count=len(slots))
        if not is_open:
            self.agent.discard(slots)
            raise session_ended()
        return slots

    def _noted(self, session_id: OwnerId, reservation: Reservation) -> int:
        with self._lock:
            if session_id in self._holdings:
                return self._holdings.reserve(session_id, reservation)
        # Nobody has been told of these slots.
        self.agent.discard(reservation.slots)
        raise session_ended()

    def _pin(self, hashes: Sequence[BlockHash], *, parent_hash: BlockHash | None, wait_s: float) -> Pinned:
        sequence = f"attached-{next(self._names)}"
        self.agent.bind(sequence, hashes, parent_hash=parent_hash)
        try:
            return self.agent.pin(sequence, timeout_s=wait_s)
        finally:
            self.agent.unbind(sequence)


@dataclass(slots=True)
class _Run:
    """Blocks of one chain without gaps."""

    parent_hash: BlockHash | None
    hashes: list[BlockHash] = field(default_factory=list)
    slots: list[SlotId] = field(default_factory=list)


def _runs(reservation: Reservation, is_written: Sequence[bool]) -> Iterator[_Run]:
    run: _Run | None = None
    for block_hash, parent_hash, slot, written in zip(
        reservation.hashes, reservation.parents, reservation.slots, is_written, strict=True
    ):
        if not written:
            continue
        if run is None or run.hashes[-1] != parent_hash:
            if run is not None:
                yield run
            run = _Run(parent_hash)
        run.hashes.append(block_hash)
        run.slots.append(slot)
    if run is not None:
        yield run


def session_ended() -> UnavailableError:
    """What a call is told whose session is no more."""
    return UnavailableError("this session has ended; attach again")
