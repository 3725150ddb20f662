"""The store service for clients that reach slots themselves, or come with a ticket; and for several tenants."""

from __future__ import annotations

import dataclasses
import mmap
import os
from collections.abc import Iterator, Sequence

import pytest

from kvstore import messages as m
from kvstore.envelope import ENVELOPE_BYTES
from kvstore.errors import InvalidArgumentError, NamespaceUnknownError, UnavailableError
from kvstore.keys import BlockHash
from kvstore.messages import (
    BlockState,
    CommitState,
    LeaseId,
    OwnerId,
    ReservationId,
    ReserveState,
    Ticket,
    TransferPath,
)
from kvstore.namespace import Namespace
from kvstore.slab import (
    EMPTY_SLOT_HEADER,
    SLOT_HEADER_BYTES,
    Access,
    SlotRecord,
    SlotState,
    decode_slot_records,
    slot_state,
)
from kvstore_server.core.in_flight import ClientId
from kvstore_server.core.tenants import ScopedId, Tenant, scoped
from kvstore_server.rpc.caller import LOOPBACK, Caller, client_of
from kvstore_server.rpc.service import Endpoints
from tests.server.builders import (
    ALICE,
    BOB,
    LARGE,
    SMALL,
    block_hash,
    envelope_of,
    enveloped,
    enveloped_bytes,
    packed,
    payload_of,
)
from tests.server.test_service import SLAB_BYTES, Store

SESSION = OwnerId(b"s" * 16)
ATTACHED = dataclasses.replace(LOOPBACK, session_id=SESSION)
READER = dataclasses.replace(ATTACHED, may_write=False)
ACME = Caller(tenant=Tenant("acme"))


class Tickets:
    """Issues tickets and remembers what for."""

    def __init__(self) -> None:
        self.reads: list[tuple[LeaseId, ScopedId, list[BlockHash]]] = []
        self.writes: list[list[ReservationId]] = []

    def issue_read(
        self, *, lease_id: LeaseId, owner_id: OwnerId, namespace_id: ScopedId, hashes: Sequence[BlockHash]
    ) -> Ticket:
        assert owner_id == ALICE
        self.reads.append((lease_id, namespace_id, list(hashes)))
        return Ticket(b"r" * 16)

    def issue_write(self, *, owner_id: OwnerId, reservation_ids: Sequence[ReservationId]) -> Ticket:
        assert owner_id == ALICE
        self.writes.append(list(reservation_ids))
        return Ticket(b"w" * 16)


class Mapped(Store):
    """A service, and its arena as an attached client maps it."""

    def __init__(self) -> None:
        super().__init__()
        descriptor = self.arenas.descriptor(0, Access.WRITE)
        self.map = mmap.mmap(descriptor, 2 * SLAB_BYTES)
        os.close(descriptor)

    def close(self) -> None:
        self.map.close()
        super().close()

    async def reserve_slots(
        self,
        *numbers: int,
        namespace: Namespace = SMALL,
        path: TransferPath = TransferPath.SLAB,
        reservation_s: float = 30.0,
    ) -> list[tuple[ReservationId, SlotRecord]]:
        request = m.ReserveBlocksRequest(
            namespace_id=namespace.id,
            owner_id=SESSION,
            block_hashes=packed(*numbers),
            reservation_s=reservation_s,
            path=path,
        )
        response = await self.service.reserve_blocks(request, ATTACHED)
        assert set(response.reserve_states) == {ReserveState.RESERVED}
        numbers_of = [reservation for reservation in response.reservation_ids if reservation]
        return list(zip(numbers_of, decode_slot_records(response.slots), strict=True))

    def fill(self, slot: SlotRecord, block: bytes) -> None:
        start = slot.place + SLOT_HEADER_BYTES
        self.map[start : start + len(block)] = block

    def state_of(self, slot: SlotRecord) -> SlotState:
        return slot_state(self.map[slot.place : slot.place + SLOT_HEADER_BYTES], slot.generation)

    async def commit_slots(self, *reservations: ReservationId) -> list[CommitState]:
        request = m.CommitBlocksRequest(owner_id=SESSION, reservation_ids=reservations, in_slots=True)
        return [CommitState(state) for state in (await self.service.commit_blocks(request, ATTACHED)).commit_states]

    async def lease_slots(
        self, *numbers: int, namespace: Namespace = SMALL, lease_s: float = 30.0
    ) -> tuple[m.LeaseBlocksResponse, list[SlotRecord]]:
        response = await self.service.lease_blocks(
            lease_request(*numbers, namespace=namespace, lease_s=lease_s), READER
        )
        return response, decode_slot_records(response.slots)


def lease_request(*numbers: int, namespace: Namespace = SMALL, **changes: object) -> m.LeaseBlocksRequest:
    request = m.LeaseBlocksRequest(
        namespace_id=namespace.id,
        owner_id=SESSION,
        block_hashes=packed(*numbers),
        lease_s=30.0,
        path=TransferPath.SLAB,
    )
    return dataclasses.replace(request, **changes)  # type: ignore[arg-type]


def reserve_request(*numbers: int, **changes: object) -> m.ReserveBlocksRequest:
    request = m.ReserveBlocksRequest(
        namespace_id=SMALL.id, owner_id=SESSION, block_hashes=packed(*numbers), reservation_s=30.0
    )
    return dataclasses.replace(request, **changes)  # type: ignore[arg-type]


@pytest.fixture
def store() -> Iterator[Mapped]:
    store = Mapped()
    yield store
    store.close()
    store.core.check_invariants()


# --- the way of a block through the slab


@pytest.mark.parametrize("namespace", [SMALL, LARGE], ids=lambda namespace: namespace.model)
async def test_a_block_written_into_its_slot_is_read_from_there_and_over_streams(
    store: Mapped, namespace: Namespace
) -> None:
    ((reservation, slot),) = await store.reserve_slots(1, namespace=namespace)
    assert slot.size_bytes >= enveloped_bytes(namespace)
    assert store.state_of(slot) is SlotState.GONE
    store.fill(slot, enveloped(1, namespace))
    assert await store.commit_slots(reservation) == [CommitState.COMMITTED]
    assert store.state_of(slot) is SlotState.READABLE

    response, (leased,) = await store.lease_slots(9, 1, namespace=namespace)
    assert list(response.block_states) == [BlockState.MISS, BlockState.HIT]
    assert (leased.place, leased.generation, leased.size_bytes) == (*slot[:2], enveloped_bytes(namespace))
    start = leased.place + SLOT_HEADER_BYTES
    assert store.map[start : start + leased.size_bytes] == enveloped(1, namespace)
    assert await store.read(1, namespace=namespace) == [enveloped(1, namespace)]
    counters = store.core.counters
    assert counters.written_bytes == enveloped_bytes(namespace)
    assert counters.read_bytes == 2 * enveloped_bytes(namespace)
    assert (counters.sent_count, counters.unsent_count) == (2, 1)


async def test_only_what_the_daemon_has_hashed_itself_says_so_in_its_slot(store: Mapped) -> None:
    store.service.endpoints = Endpoints(nixl_metadata=b"x")
    await store.put(1)
    for number, path in ((2, TransferPath.SLAB), (3, TransferPath.NIXL)):
        ((reservation, slot),) = await store.reserve_slots(number, path=path)
        store.fill(slot, enveloped(number))
        assert await store.commit_slots(reservation) == [CommitState.COMMITTED]
    _, slots = await store.lease_slots(1, 2, 3)
    assert [store.state_of(slot) for slot in slots] == [SlotState.VERIFIED, SlotState.READABLE, SlotState.VERIFIED]


async def test_a_slot_is_not_readable_any_more_once_its_block_has_left(store: Mapped) -> None:
    """The lease is over and the slot is another block's: a reader that was stopped finds out by its header."""
    await store.put(1)
    response, (slot,) = await store.lease_slots(1, lease_s=10.0)
    assert response.lease_id is not None
    store.now_s += 10.0
    store.service.sweep()
    store.core._evict(1 << 30)
    assert store.map[slot.place : slot.place + SLOT_HEADER_BYTES] == EMPTY_SLOT_HEADER
    await store.put(2)
    _, (other,) = await store.lease_slots(2)
    assert other.place == slot.place
    assert store.state_of(slot) is SlotState.GONE
    assert store.state_of(other) is SlotState.VERIFIED


async def test_a_block_that_is_dropped_as_damaged_is_gone_for_those_who_lease_it(store: Mapped) -> None:
    await store.put(1)
    _, (slot,) = await store.lease_slots(1)
    store.flip(1, offset_bytes=700)
    assert await store.verify(1) == [BlockState.CORRUPT]
    assert store.state_of(slot) is SlotState.GONE


# --- what a writer may get wrong


def _other_envelope() -> bytes:
    return envelope_of(2).encode() + payload_of(1)


@pytest.mark.parametrize(
    ("block", "state"),
    [
        pytest.param(b"", CommitState.INCOMPLETE, id="nothing"),
        pytest.param(b"\0" * 128 + payload_of(1), CommitState.INCOMPLETE, id="no envelope"),
        pytest.param(_other_envelope(), CommitState.CORRUPT, id="another block"),
        pytest.param(enveloped(1, LARGE), CommitState.CORRUPT, id="another namespace"),
        pytest.param(b"\1" + enveloped(1)[1:], CommitState.CORRUPT, id="damaged envelope"),
        pytest.param(
            dataclasses.replace(envelope_of(1), k_bytes=256, v_bytes=256, decoded_bytes=512).encode(),
            CommitState.CORRUPT,
            id="another layout",
        ),
    ],
)
async def test_a_slot_that_does_not_hold_what_was_reserved_is_not_committed(
    store: Mapped, block: bytes, state: CommitState
) -> None:
    ((reservation, slot),) = await store.reserve_slots(1)
    store.fill(slot, block[: slot.size_bytes])
    assert await store.commit_slots(reservation) == [state]
    assert await store.lookup(1) == [BlockState.MISS]
    assert store.state_of(slot) is SlotState.GONE
    assert store.core.space.used_bytes == 0


async def test_a_header_that_a_client_has_written_over_is_corrupt(store: Mapped) -> None:
    """The daemon alone writes the first 64 bytes; whoever does it all the same harms its own block."""
    ((reservation, slot),) = await store.reserve_slots(1)
    store.fill(slot, enveloped(1))
    store.map[slot.place + 20] ^= 1
    assert await store.commit_slots(reservation) == [CommitState.CORRUPT]


async def test_a_remote_writers_damaged_payload_is_found_at_commit(store: Mapped) -> None:
    store.service.endpoints = Endpoints(nixl_metadata=b"x")
    ((reservation, slot),) = await store.reserve_slots(1, path=TransferPath.NIXL)
    store.fill(slot, enveloped(1)[:-1] + b"!")
    assert await store.commit_slots(reservation) == [CommitState.CORRUPT]


async def test_a_slot_is_committed_by_who_wrote_it_only_where_it_was_reserved_for_that(store: Mapped) -> None:
    """`in_slots` does not make the daemon trust what came over a stream."""
    (reservation,) = await store.reserve(1, owner_id=SESSION)
    await store.write((reservation, enveloped(1)[:-1] + b"!"), owner_id=SESSION)
    assert await store.commit_slots(reservation) == [CommitState.CORRUPT]


async def test_a_writer_that_is_too_late_is_told_so_and_its_slot_is_free_then(store: Mapped) -> None:
    ((reservation, slot),) = await store.reserve_slots(1, reservation_s=5.0)
    store.now_s += 5.0
    store.service.sweep()
    assert await store.lookup(1) == [BlockState.MISS]
    (others,) = await store.reserve(1)
    store.fill(slot, enveloped(1))  # it was stopped for so long, and goes on
    await store.write((others, enveloped(1)))
    assert await store.commit(others) == [CommitState.COMMITTED]
    assert store.core.stranded_count == 1
    assert await store.commit_slots(reservation) == [CommitState.EXPIRED]
    assert store.core.stranded_count == 0
    assert await store.read(1) == [enveloped(1)]


# --- sessions


async def test_all_that_a_session_held_is_free_when_it_ends(store: Mapped) -> None:
    """faults.md, leaks: a client killed at any point leaks nothing."""
    await store.put(1, 2)
    await store.lease_slots(1, 2)
    await store.acquire(1, owner_id=SESSION)
    await store.reserve_slots(11, reservation_s=5.0)
    store.now_s += 5.0
    store.service.sweep()
    await store.reserve_slots(12, 13)
    kept = await store.acquire(2, owner_id=BOB)
    store.service.end_session(SESSION)
    stats = await store.service.get_store_stats(m.GetStoreStatsRequest(), LOOPBACK)
    assert (stats.lease_count, stats.reservation_count, store.core.stranded_count) == (1, 0, 0)
    assert kept.lease_id is not None
    assert await store.lookup(12, 13) == [BlockState.MISS, BlockState.MISS]
    assert store.core.space.used_bytes == 2 * 4096


@pytest.mark.parametrize(
    ("call", "request_", "caller", "message"),
    [
        (
            "lease_blocks",
            lease_request(1),
            LOOPBACK,
            "path is 'SLAB'; allowed: that only on the slab socket",
        ),
        (
            "lease_blocks",
            lease_request(1, owner_id=ALICE),
            ATTACHED,
            f"owner_id is '{ALICE.hex()}'; allowed: on path SLAB the id of the session",
        ),
        (
            "reserve_blocks",
            reserve_request(1, path=TransferPath.SLAB),
            READER,
            "path is 'SLAB'; allowed: that only in a session with access WRITE",
        ),
        (
            "lease_blocks",
            lease_request(1, path=TransferPath.STREAM),
            ATTACHED,
            "path is 'STREAM'; allowed: SLAB, BULK or NIXL; ReadBlocks needs no lease",
        ),
        (
            "lease_blocks",
            lease_request(1, path=TransferPath.BULK),
            ATTACHED,
            "path is BULK, and this daemon has no data port: bulk.enabled is false",
        ),
        (
            "reserve_blocks",
            reserve_request(1, path=TransferPath.NIXL),
            ATTACHED,
            "path is NIXL, and this daemon has none: nixl.enabled is false",
        ),
        (
            "lease_blocks",
            lease_request(1, lease_s=601.0),
            ATTACHED,
            "lease_duration is '601 s'; allowed: above 0 and at most 600 s",
        ),
    ],
)
async def test_a_path_that_a_caller_may_not_take_is_refused(
    store: Mapped, call: str, request_: object, caller: Caller, message: str
) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        await getattr(store.service, call)(request_, caller)
    assert str(refused.value) == message
    assert store.core.reservation_count == store.core.lease_count == 0


async def test_what_is_written_in_the_name_of_anothers_session_lands_nowhere(store: Mapped) -> None:
    (reservation,) = await store.reserve(1, owner_id=SESSION)
    store.service.begin_session(SESSION)
    assert await store.write((reservation, enveloped(1)), owner_id=SESSION) == 0
    store.service.end_session(SESSION)
    (reservation,) = await store.reserve(1, owner_id=SESSION)
    assert await store.write((reservation, enveloped(1)), owner_id=SESSION) == enveloped_bytes(SMALL)
    assert await store.commit(reservation, owner_id=SESSION) == [CommitState.COMMITTED]


async def test_while_nixl_restarts_a_caller_is_told_to_try_again(store: Mapped) -> None:
    await store.put(1)
    store.service.endpoints = Endpoints(is_nixl_enabled=True)
    with pytest.raises(UnavailableError, match="NIXL is restarting; try again"):
        await store.service.reserve_blocks(reserve_request(2, path=TransferPath.NIXL), LOOPBACK)
    with pytest.raises(UnavailableError, match="NIXL is restarting; try again"):
        await store.service.lease_blocks(lease_request(1, path=TransferPath.NIXL), LOOPBACK)
    assert store.core.reservation_count == store.core.lease_count == 0


# --- tickets


@pytest.fixture
def ticketed() -> Iterator[tuple[Store, Tickets]]:
    store, tickets = Store(), Tickets()
    store.service._transfers = tickets
    yield store, tickets
    store.close()


async def test_a_ticket_is_issued_for_exactly_the_leased_blocks(ticketed: tuple[Store, Tickets]) -> None:
    store, tickets = ticketed
    await store.put(1, 2)
    request = lease_request(1, 9, 2, owner_id=ALICE, path=TransferPath.BULK)
    response = await store.service.lease_blocks(request, LOOPBACK)
    assert (response.ticket, response.slots) == (b"r" * 16, b"")
    assert tickets.reads == [(response.lease_id, scoped(Tenant(""), SMALL.id), [block_hash(1), block_hash(2)])]
    missed = await store.service.lease_blocks(dataclasses.replace(request, block_hashes=packed(9)), LOOPBACK)
    assert (missed.ticket, missed.lease_id) == (b"", None)
    assert len(tickets.reads) == 1


async def test_a_ticket_is_issued_for_exactly_the_reserved_blocks(ticketed: tuple[Store, Tickets]) -> None:
    store, tickets = ticketed
    await store.put(1)
    request = reserve_request(1, 2, 3, owner_id=ALICE, path=TransferPath.BULK)
    response = await store.service.reserve_blocks(request, LOOPBACK)
    assert response.ticket == b"w" * 16
    assert tickets.writes == [list(response.reservation_ids[1:])]
    again = await store.service.reserve_blocks(request, LOOPBACK)
    assert (again.ticket, len(tickets.writes)) == (b"", 1)


async def test_a_client_with_too_much_moving_over_the_data_port_gets_no_ticket(
    ticketed: tuple[Store, Tickets],
) -> None:
    """Its transfers are counted by their owner, who may call over any connection."""
    store, tickets = ticketed
    store.in_flight.begin_store(client_of(ALICE), 32 << 20)
    request = reserve_request(1, owner_id=ALICE, path=TransferPath.BULK)
    response = await store.service.reserve_blocks(request, LOOPBACK)
    assert list(response.reserve_states) == [ReserveState.OVERLOADED]
    assert tickets.writes == []


# --- overload


async def test_stores_over_the_wire_are_refused_with_the_reason_while_too_much_is_moving(store: Mapped) -> None:
    """Loads are not: they wait for their turn."""
    greedy = dataclasses.replace(LOOPBACK, client_id=ClientId("greedy"))
    store.in_flight.begin_store(ClientId("greedy"), 32 << 20)
    refused = await store.service.reserve_blocks(reserve_request(1), greedy)
    assert list(refused.reserve_states) == [ReserveState.OVERLOADED]
    other = await store.service.reserve_blocks(reserve_request(2), LOOPBACK)
    assert list(other.reserve_states) == [ReserveState.RESERVED]
    store.in_flight.begin_store(ClientId("other"), 32 << 20)
    assert list((await store.service.reserve_blocks(reserve_request(3), LOOPBACK)).reserve_states) == [
        ReserveState.OVERLOADED
    ]
    await store.reserve_slots(4)  # its bytes do not come through the daemon
    stats = await store.service.get_store_stats(m.GetStoreStatsRequest(), LOOPBACK)
    assert stats.refused_count == store.core.counters.refused_overloaded_count == 2


# --- tenants


async def test_a_namespace_is_of_the_tenant_that_opened_it(store: Mapped) -> None:
    lookup = m.LookupBlocksRequest(namespace_id=SMALL.id, block_hashes=packed(1))
    await store.put(1)
    with pytest.raises(NamespaceUnknownError):
        await store.service.lookup_blocks(lookup, ACME)
    opened = await store.service.open_namespace(
        m.OpenNamespaceRequest(namespace=SMALL, payload_bytes=SMALL.block_layout.payload_bytes), ACME
    )
    assert opened.namespace_id == SMALL.id
    assert list((await store.service.lookup_blocks(lookup, ACME)).block_states) == [BlockState.MISS]
    stats = await store.service.get_store_stats(m.GetStoreStatsRequest(), ACME)
    assert [(one.namespace_id, one.block_count) for one in stats.namespaces] == [(SMALL.id, 0)]


async def test_a_block_of_a_tenant_is_verified_under_the_id_that_its_envelope_has(store: Mapped) -> None:
    payload_bytes = SMALL.block_layout.payload_bytes
    await store.service.open_namespace(m.OpenNamespaceRequest(namespace=SMALL, payload_bytes=payload_bytes), ACME)
    reserved = await store.service.reserve_blocks(reserve_request(1, owner_id=ALICE), ACME)
    (reservation,) = reserved.reservation_ids
    assert reservation is not None
    await store.write((reservation, enveloped(1)))
    assert await store.commit(reservation) == [CommitState.COMMITTED]
    request = m.VerifyBlocksRequest(namespace_id=SMALL.id, block_hashes=packed(1))
    assert list((await store.service.verify_blocks(request, ACME)).block_states) == [BlockState.HIT]
    assert await store.lookup(1) == [BlockState.MISS]
    assert ENVELOPE_BYTES + payload_bytes == store.core.counters.written_bytes


async def test_the_daemon_says_where_its_other_paths_are(store: Mapped) -> None:
    store.service.endpoints = Endpoints(slab_socket="/run/s.slab", bulk_port=7452, nixl_metadata=b"n")
    info = await store.service.get_store_info(m.GetStoreInfoRequest(), LOOPBACK)
    assert (info.slab_socket, info.bulk_port, info.nixl_metadata) == ("/run/s.slab", 7452, b"n")
