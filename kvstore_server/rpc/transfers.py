"""Transfers over the data port, from the ticket to what became of the blocks. Moves no bytes.

`Transfers` lives on the event loop with the store's core. The threads that move the bytes reach it through a `Desk`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, NewType, Protocol, TypeVar

from kvstore.bulk import Direction, TransferRequest
from kvstore.errors import InternalError, KvstoreError, UnavailableError
from kvstore.keys import BlockHash, NamespaceId
from kvstore.messages import TICKET_BYTES, CommitState, LeaseId, OwnerId, ReservationId, Ticket
from kvstore_server.core.in_flight import ClientId, LoadId
from kvstore_server.core.space import Place
from kvstore_server.core.store import Reservation, StoreCore, StoredBlock
from kvstore_server.core.tenants import ScopedId, namespace_of
from kvstore_server.core.tickets import TicketTable
from kvstore_server.rpc.caller import client_of
from kvstore_server.rpc.turns import Turns

TICKET_S = 10.0
"""Seconds between a ticket and its transfer: one connection's set-up, with room for a busy machine."""

TransferId = NewType("TransferId", int)

_Result = TypeVar("_Result")


class GrantedBlock(NamedTuple):
    block_hash: BlockHash
    place: Place
    size_bytes: int
    """Envelope and payload: of the stored block, or the most that fits; 0 when a block to be read has gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What may move now, and stays where it is until `finish_read` or `finish_write`, which is owed once."""

    transfer_id: TransferId
    namespace_id: NamespaceId
    payload_bytes: int
    blocks: Sequence[GrantedBlock]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    reason: str


class Landing(NamedTuple):
    """What came for one block."""

    size_bytes: int
    verdict: CommitState


class Desk(Protocol):
    """Where threads that move bytes turn to. Raises `UnavailableError` once the daemon is going down."""

    def redeem(self, request: TransferRequest) -> Transfer | Refusal:
        """Starts the transfer of a ticket, which is used up even when it is refused; may wait for its turn."""

    def finish_read(self, transfer_id: TransferId, *, sent_count: int) -> None:
        """Ends a transfer that has sent its first `sent_count` blocks."""

    def finish_write(self, transfer_id: TransferId, landings: Sequence[Landing] | None) -> bytes:
        """Makes readable what was verified; None, when the transfer broke, gives all up. A `CommitState` per block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadGrant:
    lease_id: LeaseId
    owner_id: OwnerId
    namespace_id: ScopedId
    hashes: Sequence[BlockHash]


@dataclass(frozen=True, slots=True, kw_only=True)
class _WriteGrant:
    owner_id: OwnerId
    reservation_ids: Sequence[ReservationId]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    blocks: Sequence[StoredBlock | None]
    load_id: LoadId


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    reservations: Sequence[Reservation]
    client_id: ClientId
    size_bytes: int


Answer = Callable[[Transfer | Refusal], None]


class Transfers:
    """Issues tickets, and holds what a transfer touches while it runs.

    Whatever happens, the lease or the reservations behind a ticket end with it: by its transfer, by its misuse, or
    when nobody has come for `TICKET_S`.
    """

    def __init__(
        self, *, core: StoreCore, turns: Turns, clock: Callable[[], float], on_settled: Callable[[], None]
    ) -> None:
        """`on_settled` is called whenever pending blocks have become something else."""
        self._core = core
        self._turns = turns
        self._clock = clock
        self._on_settled = on_settled
        self._tickets: TicketTable[_ReadGrant | _WriteGrant] = TicketTable(lifetime_s=TICKET_S)
        self._reads: dict[TransferId, _Read] = {}
        self._writes: dict[TransferId, _Write] = {}
        self._last_id = 0

    @property
    def running_count(self) -> int:
        return len(self._reads) + len(self._writes)

    @property
    def ticket_count(self) -> int:
        return len(self._tickets)

    def issue_read(
        self, *, lease_id: LeaseId, owner_id: OwnerId, namespace_id: ScopedId, hashes: Sequence[BlockHash]
    ) -> Ticket:
        """A ticket for leased blocks; the lease is the ticket's from now on."""
        return self._issue(
            _ReadGrant(lease_id=lease_id, owner_id=owner_id, namespace_id=namespace_id, hashes=tuple(hashes))
        )

    def issue_write(self, *, owner_id: OwnerId, reservation_ids: Sequence[ReservationId]) -> Ticket:
        """A ticket for reservations of one call, at least one."""
        assert reservation_ids, "a ticket for nothing"
        return self._issue(_WriteGrant(owner_id=owner_id, reservation_ids=tuple(reservation_ids)))

    def redeem(self, request: TransferRequest, answer: Answer) -> None:
        """Answers at once, or when it is a load's turn."""
        self.sweep()
        grant = self._tickets.redeem(request.ticket)
        if grant is None:
            answer(Refusal(reason=f"no such ticket: it was used, is older than {TICKET_S:g} s, or never was"))
            return
        held = len(grant.hashes) if isinstance(grant, _ReadGrant) else len(grant.reservation_ids)
        direction = Direction.READ if isinstance(grant, _ReadGrant) else Direction.WRITE
        if request.direction is not direction or request.block_count != held:
            self._give_up(grant)
            asked = f"a {request.direction.name} of {request.block_count}"
            answer(Refusal(reason=f"the ticket is for a {direction.name} of {held} blocks, not {asked}"))
        elif isinstance(grant, _ReadGrant):
            self._begin_read(grant, answer)
        else:
            answer(self._begin_write(grant))

    def finish_read(self, transfer_id: TransferId, *, sent_count: int) -> None:
        """See `Desk`."""
        read = self._reads.pop(transfer_id)
        for index, block in enumerate(read.blocks):
            if block is None:
                self._core.counters.unsent_count += 1
                continue
            is_sent = index < sent_count
            self._core.counters.sent_count += is_sent
            self._core.end_read(block, sent_bytes=block.size_bytes if is_sent else 0)
        self._turns.end_load(read.load_id)

    def finish_write(self, transfer_id: TransferId, landings: Sequence[Landing] | None) -> bytes:
        """See `Desk`."""
        write = self._writes.pop(transfer_id)
        if landings is None:
            landings = [Landing(0, CommitState.INCOMPLETE)] * len(write.reservations)
        for reservation, landing in zip(write.reservations, landings, strict=True):
            reservation.landed_bytes = landing.size_bytes
            self._core.counters.written_bytes += landing.size_bytes
        self._core.end_commits(
            [(reservation, landing.verdict) for reservation, landing in zip(write.reservations, landings, strict=True)]
        )
        self._turns.end_store(write.client_id, write.size_bytes)
        self._on_settled()
        return bytes([landing.verdict for landing in landings])

    def abandon(self, transfer_id: TransferId) -> None:
        """Ends a transfer of either kind whose thread is no more."""
        if transfer_id in self._reads:
            self.finish_read(transfer_id, sent_count=0)
        else:
            self.finish_write(transfer_id, None)

    def sweep(self) -> None:
        """Ends what nobody has come for; to be called every so often."""
        for grant in self._tickets.expire(now_s=self._clock()):
            self._give_up(grant)

    def _issue(self, grant: _ReadGrant | _WriteGrant) -> Ticket:
        ticket = Ticket(secrets.token_bytes(TICKET_BYTES))
        self._tickets.issue(ticket, grant, now_s=self._clock())
        return ticket

    def _give_up(self, grant: _ReadGrant | _WriteGrant) -> None:
        if isinstance(grant, _ReadGrant):
            self._core.release_lease(grant.lease_id, owner_id=grant.owner_id)
            return
        for reservation_id in grant.reservation_ids:
            self._core.abort(reservation_id, owner_id=grant.owner_id)
        self._on_settled()

    def _begin_read(self, grant: _ReadGrant, answer: Answer) -> None:
        # Held as being read from here on, which no clock and no owner can end while a thread sends them.
        held = [self._core.begin_read(grant.namespace_id, block_hash) for block_hash in grant.hashes]
        self._core.release_lease(grant.lease_id, owner_id=grant.owner_id)
        transfer = Transfer(
            transfer_id=self._next_id(),
            namespace_id=namespace_of(grant.namespace_id),
            payload_bytes=self._core.payload_bytes(grant.namespace_id),
            blocks=tuple(
                GrantedBlock(block_hash, block.place, block.size_bytes)
                if block is not None
                else GrantedBlock(block_hash, Place(0), 0)
                for block_hash, block in zip(grant.hashes, held, strict=True)
            ),
        )
        size_bytes = max(sum(block.size_bytes for block in transfer.blocks), 1)
        load_id = self._turns.ask_load(client_of(grant.owner_id), size_bytes, lambda: answer(transfer))
        self._reads[transfer.transfer_id] = _Read(blocks=held, load_id=load_id)

    def _begin_write(self, grant: _WriteGrant) -> Transfer | Refusal:
        # Off the clock from here on: their slots cannot become anybody else's while a thread writes into them.
        found = [self._core.begin_commit(number, owner_id=grant.owner_id) for number in grant.reservation_ids]
        held = [reservation for reservation in found if reservation is not None]
        if len(held) < len(found):
            for reservation in held:
                self._core.end_commits([(reservation, CommitState.EXPIRED)])
            self._on_settled()
            return Refusal(reason=f"{len(found) - len(held)} of {len(found)} reservations have ended")
        size_bytes = sum(reservation.block_bytes_max for reservation in held)
        write = _Write(reservations=held, client_id=client_of(grant.owner_id), size_bytes=size_bytes)
        self._turns.begin_store(write.client_id, size_bytes)
        transfer_id = self._next_id()
        self._writes[transfer_id] = write
        namespace_id = held[0].key.namespace_id
        return Transfer(
            transfer_id=transfer_id,
            namespace_id=namespace_of(namespace_id),
            payload_bytes=self._core.payload_bytes(namespace_id),
            blocks=tuple(GrantedBlock(hold.key.block_hash, hold.place, hold.block_bytes_max) for hold in held),
        )

    def _next_id(self) -> TransferId:
        self._last_id += 1
        return TransferId(self._last_id)


class LoopDesk:
    """A desk for threads of the loop's own process."""

    def __init__(
        self, transfers: Transfers, *, loop: asyncio.AbstractEventLoop, on_bug: Callable[[AssertionError], None]
    ) -> None:
        self._transfers = transfers
        self._loop = loop
        self._on_bug = on_bug

    def redeem(self, request: TransferRequest) -> Transfer | Refusal:
        answer: Future[Transfer | Refusal] = Future()
        self._on_loop(lambda: self._transfers.redeem(request, answer.set_result))
        return answer.result()

    def finish_read(self, transfer_id: TransferId, *, sent_count: int) -> None:
        self._on_loop(lambda: self._transfers.finish_read(transfer_id, sent_count=sent_count))

    def finish_write(self, transfer_id: TransferId, landings: Sequence[Landing] | None) -> bytes:
        return self._on_loop(lambda: self._transfers.finish_write(transfer_id, landings))

    def _on_loop(self, work: Callable[[], _Result]) -> _Result:
        answer: Future[_Result] = Future()

        def run() -> None:
            try:
                answer.set_result(work())
            except AssertionError as bug:
                answer.set_exception(UnavailableError(f"the daemon met a bug and stops: {bug}"))
                self._on_bug(bug)
            except KvstoreError as error:
                answer.set_exception(error)
            finally:
                if not answer.done():  # a thread waits; what it was is the loop's to report
                    answer.set_exception(InternalError("the transfer failed; see the daemon's log"))

        try:
            self._loop.call_soon_threadsafe(run)
        except RuntimeError as error:
            raise UnavailableError("the daemon has stopped") from error
        return answer.result()
