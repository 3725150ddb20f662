"""The store service without a transport: real threads and a small arena, time by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import pytest

from kvstore import messages as m
from kvstore.envelope import ENVELOPE_BYTES, Codec, checksum
from kvstore.errors import InvalidArgumentError, KvstoreError, NamespaceUnknownError
from kvstore.frames import ReadFrame, WriteFrame
from kvstore.keys import NamespaceId
from kvstore.messages import BlockState, CommitState, Epoch, OwnerId, ReservationId, ReserveState, Tier
from kvstore.namespace import Namespace
from kvstore_server.core.store import StoreCore
from kvstore_server.rpc.caller import LOOPBACK
from kvstore_server.rpc.service import StoreService
from tests.server.builders import (
    ALICE,
    BOB,
    HUGE,
    LARGE,
    SMALL,
    block_hash,
    envelope_of,
    enveloped,
    enveloped_bytes,
    make_arenas,
    make_core,
    make_in_flight,
    packed,
    payload_of,
    states_of,
    stream,
    write_frames,
)

SLAB_BYTES = 8 << 20
LONG_S = 20.0  # what a test waits at most for something that is about to happen


class Store:
    """A service with everything in reach, one copy thread, and a clock that stands still."""

    def __init__(self, *, slab_count: int = 2, clock: Callable[[], float] | None = None) -> None:
        self.now_s = 100.0
        self.arenas = make_arenas(slab_count=slab_count, slab_bytes=SLAB_BYTES)
        self.core: StoreCore = make_core(
            slab_count=slab_count, slab_bytes=SLAB_BYTES, namespaces=[SMALL, LARGE, HUGE], headers=self.arenas
        )
        self.in_flight = make_in_flight()
        self.pool = ThreadPoolExecutor(1)
        self.gates: list[threading.Event] = []
        self.service = StoreService(
            core=self.core,
            arenas=self.arenas,
            epoch=Epoch(b"e" * 16),
            copy_pool=self.pool,
            clock=clock or (lambda: self.now_s),
            in_flight=self.in_flight,
        )

    def stop_copies(self) -> threading.Event:
        """Nothing is copied or verified in the thread before the returned gate is set."""
        gate = threading.Event()
        self.gates.append(gate)
        self.pool.submit(gate.wait)
        return gate

    def close(self) -> None:
        for gate in self.gates:
            gate.set()
        self.pool.shutdown()
        self.arenas.close()

    async def reserve(
        self, *numbers: int, namespace: Namespace = SMALL, owner_id: OwnerId = ALICE, reservation_s: float = 30.0
    ) -> list[ReservationId]:
        response = await self.service.reserve_blocks(
            m.ReserveBlocksRequest(
                namespace_id=namespace.id,
                owner_id=owner_id,
                block_hashes=packed(*numbers),
                reservation_s=reservation_s,
            ),
            LOOPBACK,
        )
        assert set(response.reserve_states) == {ReserveState.RESERVED}
        return [reservation for reservation in response.reservation_ids if reservation]

    async def write(self, *blocks: tuple[ReservationId, bytes], owner_id: OwnerId = ALICE) -> int:
        frames = write_frames(blocks, owner_id=owner_id)
        return (await self.service.write_blocks(stream(frames), LOOPBACK)).landed_bytes

    async def commit(self, *reservations: ReservationId, owner_id: OwnerId = ALICE) -> list[CommitState]:
        request = m.CommitBlocksRequest(owner_id=owner_id, reservation_ids=reservations)
        return [CommitState(state) for state in (await self.service.commit_blocks(request, LOOPBACK)).commit_states]

    async def put(self, *numbers: int, namespace: Namespace = SMALL) -> None:
        reservations = await self.reserve(*numbers, namespace=namespace)
        blocks = [(hold, enveloped(number, namespace)) for hold, number in zip(reservations, numbers, strict=True)]
        await self.write(*blocks)
        assert set(await self.commit(*reservations)) == {CommitState.COMMITTED}

    async def lookup(self, *numbers: int, namespace: Namespace = SMALL, wait_s: float = 0.0) -> list[BlockState]:
        request = m.LookupBlocksRequest(namespace_id=namespace.id, block_hashes=packed(*numbers), wait_s=wait_s)
        return [BlockState(state) for state in (await self.service.lookup_blocks(request, LOOPBACK)).block_states]

    async def acquire(
        self, *numbers: int, owner_id: OwnerId = ALICE, lease_s: float = 30.0, wait_s: float = 0.0
    ) -> m.AcquirePrefixResponse:
        return await self.service.acquire_prefix(
            m.AcquirePrefixRequest(
                namespace_id=SMALL.id,
                owner_id=owner_id,
                block_hashes=packed(*numbers),
                lease_s=lease_s,
                wait_s=wait_s,
            ),
            LOOPBACK,
        )

    async def read(self, *numbers: int, namespace: Namespace = SMALL) -> list[bytes | None]:
        """Whole enveloped blocks; None for a miss."""
        request = m.ReadBlocksRequest(namespace_id=namespace.id, block_hashes=packed(*numbers))
        blocks: list[bytearray | None] = [None] * len(numbers)
        async for frame in self.service.read_blocks(request, LOOPBACK):
            if frame.block_state is BlockState.HIT:
                block = blocks[frame.block_index] or bytearray()
                assert frame.offset_bytes == len(block)
                blocks[frame.block_index] = block + frame.data
        return [None if block is None else bytes(block) for block in blocks]

    async def verify(self, *numbers: int, namespace: Namespace = SMALL) -> list[BlockState]:
        request = m.VerifyBlocksRequest(namespace_id=namespace.id, block_hashes=packed(*numbers))
        return [BlockState(state) for state in (await self.service.verify_blocks(request, LOOPBACK)).block_states]

    def flip(self, number: int, *, offset_bytes: int, namespace: Namespace = SMALL) -> None:
        """One bit goes wrong in the arena."""
        block = self.core.begin_read(namespace.id, block_hash(number))
        assert block is not None
        self.arenas.view(block.place, block.size_bytes)[offset_bytes] ^= 0x10
        self.core.end_read(block, sent_bytes=0)


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.close()
    store.core.check_invariants()


async def is_soon(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():  # noqa: ASYNC110  (what is waited for has no event)
            await asyncio.sleep(0.001)


# --- the way of a block


@pytest.mark.parametrize("namespace", [SMALL, LARGE, HUGE], ids=lambda namespace: namespace.model)
async def test_a_block_comes_back_as_it_was_written(store: Store, namespace: Namespace) -> None:
    await store.put(1, 2, namespace=namespace)
    assert await store.read(1, 9, 2, namespace=namespace) == [enveloped(1, namespace), None, enveloped(2, namespace)]
    stats = await store.service.get_store_stats(m.GetStoreStatsRequest(), LOOPBACK)
    assert stats.written_bytes == stats.read_bytes == 2 * enveloped_bytes(namespace)
    assert (stats.committed_count, stats.block_count, stats.reservation_count) == (2, 2, 0)


async def test_a_lookup_names_the_tier_and_counts_the_leading_hits(store: Store) -> None:
    await store.put(1, 2)
    await store.put(4)
    response = await store.service.lookup_blocks(
        m.LookupBlocksRequest(namespace_id=SMALL.id, block_hashes=packed(1, 2, 3, 4)), LOOPBACK
    )
    assert response.matched_count == 2
    assert list(response.block_states) == [BlockState.HIT, BlockState.HIT, BlockState.MISS, BlockState.HIT]
    assert list(response.tiers) == [Tier.MEMORY, Tier.MEMORY, 0, Tier.MEMORY]
    assert response.epoch == b"e" * 16


async def test_nothing_is_leased_when_nothing_matches(store: Store) -> None:
    await store.put(2)
    response = await store.acquire(1, 2)
    assert (response.matched_count, response.lease_id) == (0, None)
    assert store.core.lease_count == 0


async def test_only_the_matched_prefix_is_leased(store: Store) -> None:
    await store.put(1, 2)
    await store.put(4)
    assert (await store.acquire(1, 2, 3, 4)).matched_count == 2
    stored = store.core._namespaces[SMALL.id].stored
    assert [store.core.space.ref_count(stored[block_hash(number)].place) for number in (1, 2, 4)] == [2, 2, 1]


# --- waiting for somebody else's block


async def test_a_waiting_lookup_ends_when_the_block_is_committed(store: Store) -> None:
    (reservation,) = await store.reserve(1)
    waiting = asyncio.create_task(store.lookup(1, wait_s=60.0))
    await store.write((reservation, enveloped(1)))
    await asyncio.sleep(0)
    assert not waiting.done()
    await store.commit(reservation)
    assert await asyncio.wait_for(waiting, LONG_S) == [BlockState.HIT]


async def test_a_waiting_acquire_leases_what_was_committed_meanwhile(store: Store) -> None:
    await store.put(1)
    (reservation,) = await store.reserve(2)
    waiting = asyncio.create_task(store.acquire(1, 2, wait_s=60.0))
    await store.write((reservation, enveloped(2)))
    await store.commit(reservation)
    response = await asyncio.wait_for(waiting, LONG_S)
    assert response.matched_count == 2
    assert store.core.lease_count == 1


async def test_a_waiting_lookup_ends_when_the_reservation_is_aborted(store: Store) -> None:
    (reservation,) = await store.reserve(1)
    waiting = asyncio.create_task(store.lookup(1, wait_s=60.0))
    await asyncio.sleep(0)
    await store.service.abort_reservations(
        m.AbortReservationsRequest(owner_id=ALICE, reservation_ids=(reservation,)), LOOPBACK
    )
    assert await asyncio.wait_for(waiting, LONG_S) == [BlockState.MISS]


async def test_a_waiting_lookup_ends_when_the_reservation_expires(store: Store) -> None:
    await store.reserve(1, reservation_s=5.0)
    waiting = asyncio.create_task(store.lookup(1, wait_s=60.0))
    await asyncio.sleep(0)
    store.now_s += 5.0
    store.service.sweep()
    assert await asyncio.wait_for(waiting, LONG_S) == [BlockState.MISS]


async def test_a_waiting_lookup_ends_when_the_writer_sends_nonsense(store: Store) -> None:
    (reservation,) = await store.reserve(1)
    waiting = asyncio.create_task(store.lookup(1, wait_s=60.0))
    await store.write((reservation, b"x" * enveloped_bytes(SMALL)))
    await store.commit(reservation)
    assert await asyncio.wait_for(waiting, LONG_S) == [BlockState.MISS]


async def test_a_lookup_waits_no_longer_than_it_said() -> None:
    store = Store(clock=time.monotonic)
    try:
        await store.reserve(1)
        started_s = time.monotonic()
        assert await store.lookup(1, wait_s=0.05) == [BlockState.PENDING]
        assert time.monotonic() - started_s >= 0.05
        assert store.core.counters.pending_count == 1
    finally:
        store.close()


async def test_a_lookup_does_not_wait_for_a_block_behind_a_miss(store: Store) -> None:
    await store.reserve(2)
    async with asyncio.timeout(LONG_S):
        assert await store.lookup(1, 2, wait_s=60.0) == [BlockState.MISS, BlockState.PENDING]


async def test_a_cancelled_wait_leaves_nothing_behind(store: Store) -> None:
    await store.reserve(1)
    waiting = asyncio.create_task(store.acquire(1, wait_s=60.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert store.core.lease_count == 0


# --- landing


async def test_bytes_for_a_reservation_that_ended_are_dropped(store: Store) -> None:
    first, second = await store.reserve(1, 2)
    await store.service.abort_reservations(
        m.AbortReservationsRequest(owner_id=ALICE, reservation_ids=(first,)), LOOPBACK
    )
    landed_bytes = await store.write((first, enveloped(1)), (second, enveloped(2)))
    assert landed_bytes == enveloped_bytes(SMALL)
    assert await store.commit(first, second) == [CommitState.EXPIRED, CommitState.COMMITTED]
    assert await store.lookup(1, 2) == [BlockState.MISS, BlockState.HIT]


async def test_bytes_for_another_owners_reservation_are_dropped_and_do_not_end_it(store: Store) -> None:
    (reservation,) = await store.reserve(1)
    assert await store.write((reservation, b"evil"), owner_id=BOB) == 0
    assert await store.commit(reservation, owner_id=BOB) == [CommitState.EXPIRED]
    with pytest.raises(InvalidArgumentError):  # a stream that breaks, which gives up what it named
        await store.service.write_blocks(broken_after(write_frames([(reservation, b"evil")], owner_id=BOB)), LOOPBACK)
    await store.write((reservation, enveloped(1)))
    assert await store.commit(reservation) == [CommitState.COMMITTED]


async def broken_after(frames: Sequence[WriteFrame]) -> AsyncIterator[WriteFrame]:
    for frame in frames:
        yield frame
    raise InvalidArgumentError("the stream broke")


async def test_bytes_that_do_not_fit_the_slot_are_dropped(store: Store) -> None:
    first, second = await store.reserve(1, 2)
    await store.write((second, enveloped(2)))
    assert await store.write((first, b"x" * 4097)) == 0
    assert await store.commit(first, second) == [CommitState.INCOMPLETE, CommitState.COMMITTED]
    assert await store.read(2) == [enveloped(2)]


async def test_frames_out_of_order_are_dropped_and_their_block_with_them(store: Store) -> None:
    (reservation,) = await store.reserve(1, namespace=HUGE)
    frames = write_frames([(reservation, enveloped(1, HUGE))])
    assert len(frames) > 1
    swapped = [dataclasses.replace(frames[1], owner_id=ALICE), frames[0]]
    with pytest.raises(InvalidArgumentError, match=r"at its end after \d+ bytes of a block"):
        await store.service.write_blocks(stream(swapped), LOOPBACK)
    assert await store.commit(reservation) == [CommitState.EXPIRED]
    assert await store.lookup(1, namespace=HUGE) == [BlockState.MISS]


async def test_a_reservation_without_bytes_is_incomplete(store: Store) -> None:
    (reservation,) = await store.reserve(1)
    assert await store.commit(reservation) == [CommitState.INCOMPLETE]
    assert await store.lookup(1) == [BlockState.MISS]
    assert store.core.space.used_bytes == 0


@pytest.mark.parametrize("sent_bytes", [1, ENVELOPE_BYTES - 1, ENVELOPE_BYTES, 1151])
async def test_a_stream_that_ends_within_a_block_has_broken(store: Store, sent_bytes: int) -> None:
    """gRPC ends the stream of a client that died like one that is finished; nobody should wait for that block."""
    first, second = await store.reserve(1, 2)
    with pytest.raises(InvalidArgumentError, match=f"stream is 'at its end after {sent_bytes} bytes of a block'"):
        await store.write((first, enveloped(1)), (second, enveloped(2)[:sent_bytes]))
    assert await store.lookup(1, 2) == [BlockState.MISS, BlockState.MISS]
    assert store.core.space.used_bytes == 0


async def test_a_block_committed_before_its_stream_ended_is_incomplete(store: Store) -> None:
    (reservation,) = await store.reserve(1)

    async def frames() -> AsyncIterator[WriteFrame]:
        yield WriteFrame(reservation_id=reservation, owner_id=ALICE, data=memoryview(enveloped(1)[:500]))
        assert await store.commit(reservation) == [CommitState.INCOMPLETE]

    await store.service.write_blocks(frames(), LOOPBACK)
    assert await store.lookup(1) == [BlockState.MISS]
    assert store.core.counters.corrupt_on_commit_count == 0


async def test_a_commit_while_frames_still_land_is_incomplete_and_frees_the_slot_later(store: Store) -> None:
    (reservation,) = await store.reserve(1, namespace=LARGE)
    gate = store.stop_copies()
    writing = asyncio.create_task(store.write((reservation, enveloped(1, LARGE))))
    await is_soon(lambda: store.core._reservations.get(reservation, owner_id=ALICE).landing_count == 1)  # type: ignore[union-attr]
    assert await store.commit(reservation) == [CommitState.INCOMPLETE]
    assert await store.lookup(1, namespace=LARGE) == [BlockState.MISS]
    assert store.core.space.used_bytes > 0, "the slot was free while a thread was to write into it"
    gate.set()
    await asyncio.wait_for(writing, LONG_S)
    assert store.core.space.used_bytes == 0


async def test_a_broken_stream_gives_its_reservations_up_at_once(store: Store) -> None:
    first, second, unsent = await store.reserve(1, 2, 4)
    (other,) = await store.reserve(3)
    frames = write_frames([(first, enveloped(1)), (second, enveloped(2)[:50])])
    with pytest.raises(InvalidArgumentError):
        await store.service.write_blocks(broken_after(frames), LOOPBACK)
    assert await store.lookup(1, 2, 4, 3) == [BlockState.MISS] * 3 + [BlockState.PENDING]
    assert await store.commit(first, second, unsent) == [CommitState.EXPIRED] * 3
    await store.write((other, enveloped(3)))
    assert await store.commit(other) == [CommitState.COMMITTED]


async def test_a_cancelled_stream_frees_its_slots_only_after_the_copy(store: Store) -> None:
    """Both halves of the race: nothing is readable before it is whole, no slot is reused while a thread writes it."""
    (reservation,) = await store.reserve(1, namespace=LARGE)
    gate = store.stop_copies()
    writing = asyncio.create_task(store.write((reservation, enveloped(1, LARGE))))
    await is_soon(lambda: store.core._reservations.get(reservation, owner_id=ALICE).landing_count == 1)  # type: ignore[union-attr]
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert await store.lookup(1, namespace=LARGE) == [BlockState.MISS]
    assert store.core.reservation_count == 0
    assert store.core.space.used_bytes > 0
    gate.set()
    await is_soon(lambda: store.core.space.used_bytes == 0)


async def test_a_block_that_was_hashed_as_it_landed_is_committed_without_another_look(store: Store) -> None:
    (reservation,) = await store.reserve(1, namespace=LARGE)
    await store.write((reservation, enveloped(1, LARGE)))
    gate = store.stop_copies()
    assert await store.commit(reservation) == [CommitState.COMMITTED]
    gate.set()


async def test_a_cancelled_commit_is_carried_out_all_the_same(store: Store) -> None:
    (reservation,) = await store.reserve(1)
    await store.write((reservation, enveloped(1)))
    store.core.reservation(reservation, owner_id=ALICE).checksum = None  # type: ignore[union-attr]  # as if it had come another way
    gate = store.stop_copies()
    committing = asyncio.create_task(store.commit(reservation))
    await is_soon(lambda: len(store.core._reservations) == 0)
    committing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await committing
    assert await store.lookup(1) == [BlockState.PENDING]
    assert store.core.reservation_count == 1
    gate.set()
    await is_soon(lambda: store.core.reservation_count == 0)
    assert await store.lookup(1) == [BlockState.HIT]


# --- what commit refuses


def _wrong(number: int, **changes: object) -> bytes:
    return dataclasses.replace(envelope_of(number), **changes).encode() + payload_of(number)  # type: ignore[arg-type]


def _flipped(offset_bytes: int) -> bytes:
    block = bytearray(enveloped(1))
    block[offset_bytes] ^= 1
    return bytes(block)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(_flipped(0), id="magic"),
        pytest.param(_flipped(20), id="envelope"),
        pytest.param(_flipped(ENVELOPE_BYTES - 1), id="envelope checksum"),
        pytest.param(_flipped(ENVELOPE_BYTES), id="first payload byte"),
        pytest.param(_flipped(enveloped_bytes(SMALL) - 1), id="last payload byte"),
        pytest.param(_wrong(1, block_hash=block_hash(2)), id="another block"),
        pytest.param(_wrong(1, namespace_id=LARGE.id), id="another namespace"),
        pytest.param(_wrong(1, k_bytes=256, v_bytes=256, decoded_bytes=512), id="another layout"),
        pytest.param(_wrong(1, payload_checksum=checksum(b"")), id="checksum"),
        pytest.param(enveloped(1) + b"behind", id="bytes behind the payload"),
        pytest.param(b"\0" * 1152, id="zeros"),
        pytest.param(b"garbage " * 144, id="garbage"),
    ],
)
async def test_a_block_that_is_not_what_was_reserved_is_corrupt_and_absent(store: Store, block: bytes) -> None:
    (reservation,) = await store.reserve(1)
    await store.write((reservation, block))
    assert await store.commit(reservation) == [CommitState.CORRUPT]
    assert await store.lookup(1) == [BlockState.MISS]
    assert await store.read(1) == [None]
    assert store.core.space.used_bytes == 0
    assert store.core.counters.corrupt_on_commit_count == 1


async def test_an_absent_plane_with_the_right_total_is_accepted(store: Store) -> None:
    """The daemon checks bytes, not meaning: planes are the client's business."""
    envelope = dataclasses.replace(envelope_of(1), v_codec=Codec.NONE, k_bytes=1024, v_bytes=0)
    (reservation,) = await store.reserve(1)
    await store.write((reservation, envelope.encode() + payload_of(1)))
    assert await store.commit(reservation) == [CommitState.COMMITTED]


async def test_a_bad_block_does_not_spoil_its_batch(store: Store) -> None:
    first, second, third = await store.reserve(1, 2, 3)
    await store.write((first, enveloped(1)), (second, enveloped(1)), (third, enveloped(3)))
    unknown = ReservationId(10**6)
    assert await store.commit(third, second, unknown, first, first) == [
        CommitState.COMMITTED,
        CommitState.CORRUPT,
        CommitState.EXPIRED,
        CommitState.COMMITTED,
        CommitState.EXPIRED,
    ]


# --- damage


@pytest.mark.parametrize("offset_bytes", [0, 8, 40, 96, 120, ENVELOPE_BYTES, 600, 640, 1151])
async def test_a_block_damaged_in_memory_is_dropped_when_a_reader_complains(store: Store, offset_bytes: int) -> None:
    """Magic, namespace, hash, lengths, checksum, K plane, V plane: wherever the bit is."""
    await store.put(1, 2, 3)
    store.flip(2, offset_bytes=offset_bytes)
    assert await store.verify(1, 2, 3, 4) == [BlockState.HIT, BlockState.CORRUPT, BlockState.HIT, BlockState.MISS]
    assert await store.lookup(1, 2, 3) == [BlockState.HIT, BlockState.MISS, BlockState.HIT]
    assert store.core.counters.corrupt_in_memory_count == 1
    await store.put(2)
    assert await store.read(2) == [enveloped(2)]


async def test_verifying_is_no_use_of_a_block_and_leaves_no_hold(store: Store) -> None:
    await store.put(1)
    assert await store.verify(1) == [BlockState.HIT]
    assert store.core.counters.read_bytes == 0
    place = store.core._namespaces[SMALL.id].stored[block_hash(1)].place
    assert store.core.space.ref_count(place) == 1
    store.core.check_invariants()


async def test_two_readers_that_complain_at_once_count_one_damaged_block(store: Store) -> None:
    await store.put(1)
    store.flip(1, offset_bytes=500)
    gate = store.stop_copies()
    complaints = [asyncio.create_task(store.verify(1)) for _ in range(2)]
    await asyncio.sleep(0.01)
    gate.set()
    assert [await complaint for complaint in complaints] == [[BlockState.CORRUPT]] * 2
    assert store.core.counters.corrupt_in_memory_count == 1


# --- reading


async def test_a_block_is_held_while_its_frames_are_sent_and_freed_when_the_reader_goes(store: Store) -> None:
    await store.put(1, 2, namespace=HUGE)
    request = m.ReadBlocksRequest(namespace_id=HUGE.id, block_hashes=packed(1, 2))
    place = store.core._namespaces[HUGE.id].stored[block_hash(1)].place
    async with aclosing(store.service.read_blocks(request, LOOPBACK)) as frames:
        frame = await anext(frames)
        assert store.core.space.ref_count(place) == 2
        assert bytes(frame.data) == enveloped(1, HUGE)[: len(frame.data)]
    assert store.core.space.ref_count(place) == 1
    assert store.core.counters.read_bytes == 0


async def test_a_block_dropped_while_it_is_sent_is_sent_whole(store: Store) -> None:
    await store.put(1, namespace=HUGE)
    request = m.ReadBlocksRequest(namespace_id=HUGE.id, block_hashes=packed(1, 2))
    received = bytearray()
    last: ReadFrame | None = None
    async for frame in store.service.read_blocks(request, LOOPBACK):
        if not received:
            stored = store.core._namespaces[HUGE.id].stored[block_hash(1)]
            store.core.quarantine(HUGE.id, block_hash(1), stored)
            await store.put(2, namespace=HUGE)
        if frame.block_index == 0:
            received += frame.data
        last = frame
    assert bytes(received) == enveloped(1, HUGE)
    assert last is not None
    assert last.block_index == 1


# --- limits and owners


def hash_batch(count: int) -> bytes:
    return b"".join(number.to_bytes(32, "big") for number in range(count))


def reserve_request(**changes: object) -> m.ReserveBlocksRequest:
    request = m.ReserveBlocksRequest(namespace_id=SMALL.id, owner_id=ALICE, block_hashes=packed(1), reservation_s=30.0)
    return dataclasses.replace(request, **changes)  # type: ignore[arg-type]


def acquire_request(**changes: object) -> m.AcquirePrefixRequest:
    request = m.AcquirePrefixRequest(namespace_id=SMALL.id, owner_id=ALICE, block_hashes=packed(1), lease_s=30.0)
    return dataclasses.replace(request, **changes)  # type: ignore[arg-type]


SHORT_OWNER = OwnerId(b"short")
TOO_MANY_LEASES = tuple(m.LeaseId(number) for number in range(4097))
TOO_MANY_RESERVATIONS = tuple(ReservationId(number) for number in range(65_537))


@pytest.mark.parametrize(
    ("call", "request_", "message"),
    [
        (
            "lookup_blocks",
            m.LookupBlocksRequest(namespace_id=SMALL.id, block_hashes=hash_batch(65_537)),
            "block_hashes is '65537 of them'; allowed: at most 65536",
        ),
        (
            "lookup_blocks",
            m.LookupBlocksRequest(namespace_id=SMALL.id, block_hashes=b"x" * 33),
            "block_hashes is '33 bytes'; allowed: a multiple of 32 bytes",
        ),
        (
            "lookup_blocks",
            m.LookupBlocksRequest(namespace_id=SMALL.id, block_hashes=packed(1), wait_s=60.5),
            "wait_duration is '60.5 s'; allowed: 0 to 60 s",
        ),
        (
            "lookup_blocks",
            m.LookupBlocksRequest(namespace_id=SMALL.id, block_hashes=packed(1), wait_s=-1.0),
            "wait_duration is '-1 s'; allowed: 0 to 60 s",
        ),
        ("acquire_prefix", acquire_request(owner_id=SHORT_OWNER), "owner_id is '5 bytes'; allowed: 16 bytes"),
        (
            "acquire_prefix",
            acquire_request(lease_s=0.0),
            "lease_duration is '0 s'; allowed: above 0 and at most 600 s",
        ),
        (
            "acquire_prefix",
            acquire_request(lease_s=601.0),
            "lease_duration is '601 s'; allowed: above 0 and at most 600 s",
        ),
        (
            "renew_leases",
            m.RenewLeasesRequest(owner_id=ALICE, lease_ids=TOO_MANY_LEASES, lease_s=1.0),
            "lease_ids is '4097 of them'; allowed: at most 4096",
        ),
        (
            "release_leases",
            m.ReleaseLeasesRequest(owner_id=ALICE, lease_ids=TOO_MANY_LEASES),
            "lease_ids is '4097 of them'; allowed: at most 4096",
        ),
        ("reserve_blocks", reserve_request(owner_id=OwnerId(b"")), "owner_id is '0 bytes'; allowed: 16 bytes"),
        (
            "reserve_blocks",
            reserve_request(parent_hash=b"x" * 31),
            "parent_hash is '31 bytes'; allowed: 32 bytes, or none",
        ),
        (
            "reserve_blocks",
            reserve_request(block_hashes=packed(1, 2, 1)),
            "block_hashes is 'the same block twice'; allowed: each block once",
        ),
        (
            "reserve_blocks",
            reserve_request(reservation_s=300.5),
            "reservation_duration is '300.5 s'; allowed: above 0 and at most 300 s",
        ),
        (
            "commit_blocks",
            m.CommitBlocksRequest(owner_id=ALICE, reservation_ids=TOO_MANY_RESERVATIONS),
            "reservation_ids is '65537 of them'; allowed: at most 65536",
        ),
        (
            "abort_reservations",
            m.AbortReservationsRequest(owner_id=SHORT_OWNER, reservation_ids=()),
            "owner_id is '5 bytes'; allowed: 16 bytes",
        ),
        (
            "verify_blocks",
            m.VerifyBlocksRequest(namespace_id=SMALL.id, block_hashes=hash_batch(65_537)),
            "block_hashes is '65537 of them'; allowed: at most 65536",
        ),
    ],
)
async def test_wrong_input_is_refused_with_field_value_and_what_is_allowed(
    store: Store, call: str, request_: object, message: str
) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        await getattr(store.service, call)(request_, LOOPBACK)
    assert str(refused.value) == message
    assert store.core.reservation_count == store.core.lease_count == 0


async def test_a_write_stream_without_an_owner_is_refused(store: Store) -> None:
    (reservation,) = await store.reserve(1)
    frame = WriteFrame(reservation_id=reservation, data=memoryview(b"x"))
    with pytest.raises(InvalidArgumentError, match="owner_id is '0 bytes'; allowed: 16 bytes"):
        await store.service.write_blocks(stream([frame]), LOOPBACK)


@pytest.mark.parametrize("namespace_id", [NamespaceId(b"u" * 32), NamespaceId(b"")])
async def test_an_unknown_namespace_is_an_error_everywhere(store: Store, namespace_id: NamespaceId) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.service.lookup_blocks(
            m.LookupBlocksRequest(namespace_id=namespace_id, block_hashes=packed(1), wait_s=60.0), LOOPBACK
        ),
        lambda: store.service.acquire_prefix(acquire_request(namespace_id=namespace_id), LOOPBACK),
        lambda: store.service.reserve_blocks(reserve_request(namespace_id=namespace_id), LOOPBACK),
        lambda: store.service.verify_blocks(
            m.VerifyBlocksRequest(namespace_id=namespace_id, block_hashes=packed(1)), LOOPBACK
        ),
        lambda: anext(
            store.service.read_blocks(m.ReadBlocksRequest(namespace_id=namespace_id, block_hashes=packed(1)), LOOPBACK)
        ),
    ]
    for call in calls:
        with pytest.raises(NamespaceUnknownError):
            await call()  # type: ignore[misc]


async def test_a_batch_of_the_allowed_size_is_answered(store: Store) -> None:
    response = await store.service.lookup_blocks(
        m.LookupBlocksRequest(namespace_id=SMALL.id, block_hashes=hash_batch(65_536)), LOOPBACK
    )
    assert len(response.block_states) == 65_536


async def test_an_owner_cannot_touch_what_is_anothers(store: Store) -> None:
    """faults.md, leaks: "one owner can't release another's lease"."""
    await store.put(1)
    lease = (await store.acquire(1)).lease_id
    assert lease is not None
    (reservation,) = await store.reserve(2)
    renew = m.RenewLeasesRequest(owner_id=BOB, lease_ids=(lease,), lease_s=600.0)
    assert (await store.service.renew_leases(renew, LOOPBACK)).renewed == (False,)
    release = m.ReleaseLeasesRequest(owner_id=BOB, lease_ids=(lease,))
    assert (await store.service.release_leases(release, LOOPBACK)).released == (False,)
    abort = m.AbortReservationsRequest(owner_id=BOB, reservation_ids=(reservation,))
    assert (await store.service.abort_reservations(abort, LOOPBACK)).aborted_count == 0
    assert (store.core.lease_count, store.core.reservation_count) == (1, 1)
    release = dataclasses.replace(release, owner_id=ALICE)
    assert (await store.service.release_leases(release, LOOPBACK)).released == (True,)


async def test_a_lease_released_twice_changes_nothing_the_second_time(store: Store) -> None:
    """faults.md, leaks: "a timeout double-unpins"."""
    await store.put(1)
    first = (await store.acquire(1)).lease_id
    second = (await store.acquire(1)).lease_id
    assert first is not None
    assert second is not None
    release = m.ReleaseLeasesRequest(owner_id=ALICE, lease_ids=(first, first))
    assert (await store.service.release_leases(release, LOOPBACK)).released == (True, False)
    assert (await store.service.release_leases(release, LOOPBACK)).released == (False, False)
    assert store.core.lease_count == 1
    assert store.core.space.ref_count(store.core._namespaces[SMALL.id].stored[block_hash(1)].place) == 2


async def test_an_expired_lease_stays_expired(store: Store) -> None:
    await store.put(1)
    lease = (await store.acquire(1, lease_s=10.0)).lease_id
    assert lease is not None
    store.now_s += 10.0
    renew = m.RenewLeasesRequest(owner_id=ALICE, lease_ids=(lease,), lease_s=600.0)
    assert (await store.service.renew_leases(renew, LOOPBACK)).renewed == (False,)
    store.service.sweep()
    assert store.core.lease_count == 0
    assert store.core.counters.expired_lease_count == 1


async def test_ten_thousand_abandoned_prefixes_leave_no_lease_behind(store: Store) -> None:
    """faults.md, leaks: "Lookup pins of requests that never load stay; hit rate decays to zero"."""
    await store.put(1, 2, 3)
    (pending,) = await store.reserve(4)
    for _ in range(2_500):  # of four kinds: answered and forgotten, cancelled early, cancelled in waiting, released
        await store.acquire(1, 2, 3, lease_s=1.0)
        early = asyncio.ensure_future(store.acquire(1, 2, 3))
        early.cancel()
        late = asyncio.ensure_future(store.acquire(1, 2, 3, 4, wait_s=60.0))
        await asyncio.sleep(0)
        late.cancel()
        await asyncio.gather(early, late, return_exceptions=True)
        response = await store.acquire(1, 2, 3)
        assert response.lease_id is not None
        await store.service.release_leases(
            m.ReleaseLeasesRequest(owner_id=ALICE, lease_ids=(response.lease_id,)), LOOPBACK
        )
    store.now_s += 1.0
    store.service.sweep()
    assert store.core.lease_count == 0
    await store.service.abort_reservations(
        m.AbortReservationsRequest(owner_id=ALICE, reservation_ids=(pending,)), LOOPBACK
    )
    assert store.core._evict(1 << 30) == 3


async def test_a_draining_daemon_says_so_and_finishes_what_it_had_admitted(store: Store) -> None:
    (reservation,) = await store.reserve(1)
    store.core.is_draining = True
    assert (await store.service.get_store_info(m.GetStoreInfoRequest(), LOOPBACK)).draining
    response = await store.service.reserve_blocks(reserve_request(block_hashes=packed(1, 2)), LOOPBACK)
    assert list(response.reserve_states) == [ReserveState.PENDING, ReserveState.DRAINING]
    assert response.reservation_ids == (None, None)
    await store.write((reservation, enveloped(1)))
    assert await store.commit(reservation) == [CommitState.COMMITTED]
    assert await store.read(1) == [enveloped(1)]


async def test_a_damaged_client_never_breaks_an_invariant(store: Store) -> None:
    """Every state a batch can end in, mixed, and every byte is free at the end."""
    reservations = await store.reserve(*range(40))
    blocks = [(hold, enveloped(number - number % 5 // 4)) for number, hold in enumerate(reservations)]
    await store.write(*blocks[::3], *blocks[1::3])
    await store.service.abort_reservations(
        m.AbortReservationsRequest(owner_id=ALICE, reservation_ids=tuple(reservations[::7])), LOOPBACK
    )
    await store.commit(*reservations[::2])
    store.now_s += 31.0
    store.service.sweep()
    store.core.check_invariants()
    hits = states_of(store.core, *range(40)).count(BlockState.HIT)
    assert store.core.reservation_count == 0
    assert hits == store.core.block_count > 0
    store.core._evict(1 << 30)
    assert store.core.space.used_bytes == 0


async def test_errors_carry_a_status_and_a_reason(store: Store) -> None:
    with pytest.raises(KvstoreError) as unknown:
        await store.service.lookup_blocks(
            m.LookupBlocksRequest(namespace_id=NamespaceId(b"u" * 32), block_hashes=packed(1)), LOOPBACK
        )
    assert (unknown.value.reason, unknown.value.grpc_status) == ("NAMESPACE_UNKNOWN", "FAILED_PRECONDITION")


async def test_hits_that_a_client_found_by_itself_are_counted_and_absurd_numbers_of_them_are_not(store: Store) -> None:
    def seen(hit_count: int, namespace_id: NamespaceId = SMALL.id) -> m.CountReadsRequest:
        return m.CountReadsRequest(namespace_id=namespace_id, block_hashes=b"", hit_count=hit_count)

    await store.service.count_reads(seen(300), LOOPBACK)
    assert (store.core.counters.hit_count, store.core.counters.sent_count) == (300, 0)
    with pytest.raises(InvalidArgumentError, match=r"hit_count.*at most 4294967296"):
        await store.service.count_reads(seen(m.HIT_COUNT_MAX + 1), LOOPBACK)
    with pytest.raises(NamespaceUnknownError):
        await store.service.count_reads(seen(300, NamespaceId(b"u" * 32)), LOOPBACK)
    assert store.core.counters.hit_count == 300
