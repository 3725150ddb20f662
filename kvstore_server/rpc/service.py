"""The store service: what each RPC means. Knows no transport.

All decisions are `StoreCore`'s and happen on the loop; copies and checksums of large buffers run in a
bounded pool of threads on places that are retained meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

from kvstore import PROTOCOL_VERSION, __version__
from kvstore import messages as m
from kvstore.envelope import ENVELOPE_BYTES, Envelope, verify_block
from kvstore.errors import CorruptBlockError, InvalidArgumentError
from kvstore.frames import ReadFrame, WriteFrame, cut
from kvstore.keys import HASH_BYTES, BlockHash, NamespaceId, split_hashes
from kvstore.messages import BlockState, CommitState, Epoch, OwnerId, ReservationId
from kvstore_server.core.store import BlockKey, Found, Reservation, StoreCore, StoredBlock
from kvstore_server.tiers.arena import Arena

_INLINE_BYTES_MAX = 32 << 10
"""Below this a copy on the loop is cheaper than handing it to a thread."""


_Result = TypeVar("_Result")


class StoreService:
    """Handlers of `kvstore.v1.BlockStoreService`; each takes a request and returns a response as plain values."""

    def __init__(
        self,
        *,
        core: StoreCore,
        arena: Arena,
        epoch: Epoch,
        copy_pool: Executor,
        clock: Callable[[], float],
    ) -> None:
        self._core = core
        self._arena = arena
        self._epoch = epoch
        self._copy_pool = copy_pool
        self._clock = clock
        self._started_s = clock()
        self._unbroken_tasks: set[asyncio.Task[object]] = set()
        # Replaced and set whenever a pending block has become something else.
        self._settled = asyncio.Event()

    # --- information

    async def get_store_info(self, _: m.GetStoreInfoRequest) -> m.StoreInfo:
        return m.StoreInfo(
            version=__version__,
            protocol_version=PROTOCOL_VERSION,
            epoch=self._epoch,
            uptime_s=self._clock() - self._started_s,
            draining=self._core.is_draining,
            batch_count_max=m.BATCH_COUNT_MAX,
            frame_data_bytes_max=m.FRAME_DATA_BYTES_MAX,
        )

    async def get_store_stats(self, _: m.GetStoreStatsRequest) -> m.StoreStats:
        core, counters = self._core, self._core.counters
        namespaces = core.namespace_stats()
        return m.StoreStats(
            capacity_bytes=core.space.capacity_bytes,
            ready_bytes=core.space.ready_bytes,
            used_bytes=core.space.used_bytes,
            block_count=core.block_count,
            reservation_count=core.reservation_count,
            lease_count=core.lease_count,
            namespace_count=len(namespaces),
            hit_count=counters.hit_count,
            miss_count=counters.miss_count,
            pending_count=counters.pending_count,
            committed_count=counters.committed_count,
            evicted_count=counters.evicted_count,
            read_bytes=counters.read_bytes,
            written_bytes=counters.written_bytes,
            corrupt_count=counters.corrupt_on_commit_count + counters.corrupt_in_memory_count,
            sent_count=counters.sent_count,
            unsent_count=counters.unsent_count,
            refused_count=counters.refused_full_count + counters.refused_draining_count,
            uptime_s=self._clock() - self._started_s,
            namespaces=namespaces,
        )

    async def open_namespace(self, request: m.OpenNamespaceRequest) -> m.OpenNamespaceResponse:
        slot_bytes = self._core.open_namespace(request.namespace, payload_bytes=request.payload_bytes)
        return m.OpenNamespaceResponse(namespace_id=request.namespace.id, epoch=self._epoch, slot_bytes=slot_bytes)

    # --- reading

    async def lookup_blocks(self, request: m.LookupBlocksRequest) -> m.LookupBlocksResponse:
        hashes = _hashes(request.block_hashes)
        found = await self._find(request.namespace_id, hashes, wait_s=request.wait_s)
        return m.LookupBlocksResponse(
            matched_count=found.matched_count, block_states=found.states, tiers=found.tiers, epoch=self._epoch
        )

    async def acquire_prefix(self, request: m.AcquirePrefixRequest) -> m.AcquirePrefixResponse:
        hashes = _hashes(request.block_hashes)
        owner_id = _owner(request.owner_id)
        lease_s = _duration("lease_duration", request.lease_s, max_s=m.LEASE_S_MAX)
        found = await self._find(request.namespace_id, hashes, wait_s=request.wait_s)
        # No await between finding and leasing: nothing can leave in between.
        lease_id = self._core.lease(
            request.namespace_id,
            hashes[: found.matched_count],
            owner_id=owner_id,
            now_s=self._clock(),
            duration_s=lease_s,
        )
        return m.AcquirePrefixResponse(
            matched_count=found.matched_count,
            block_states=found.states,
            tiers=found.tiers,
            epoch=self._epoch,
            lease_id=lease_id,
        )

    async def renew_leases(self, request: m.RenewLeasesRequest) -> m.RenewLeasesResponse:
        owner_id = _owner(request.owner_id)
        _count("lease_ids", len(request.lease_ids), count_max=m.LEASE_IDS_MAX)
        lease_s = _duration("lease_duration", request.lease_s, max_s=m.LEASE_S_MAX)
        now_s = self._clock()
        return m.RenewLeasesResponse(
            renewed=tuple(
                self._core.renew_lease(lease, owner_id=owner_id, now_s=now_s, duration_s=lease_s)
                for lease in request.lease_ids
            )
        )

    async def release_leases(self, request: m.ReleaseLeasesRequest) -> m.ReleaseLeasesResponse:
        owner_id = _owner(request.owner_id)
        _count("lease_ids", len(request.lease_ids), count_max=m.LEASE_IDS_MAX)
        return m.ReleaseLeasesResponse(
            released=tuple(self._core.release_lease(lease, owner_id=owner_id) for lease in request.lease_ids)
        )

    async def read_blocks(self, request: m.ReadBlocksRequest) -> AsyncGenerator[ReadFrame, None]:
        hashes = _hashes(request.block_hashes)
        self._core.touch(request.namespace_id, hashes)
        for index, block_hash in enumerate(hashes):
            block = self._core.begin_read(request.namespace_id, block_hash)
            if block is None:
                self._core.counters.unsent_count += 1
                yield ReadFrame(block_index=index, block_state=BlockState.MISS)
                continue
            self._core.counters.sent_count += 1
            sent_bytes = 0
            try:
                view = self._arena.view(block.place, block.size_bytes)
                for offset, length in cut(block.size_bytes):
                    yield ReadFrame(
                        block_index=index,
                        block_state=BlockState.HIT,
                        offset_bytes=offset,
                        size_bytes=block.size_bytes,
                        data=view[offset : offset + length],
                    )
                    sent_bytes += length
            finally:
                self._core.end_read(block, sent_bytes=sent_bytes)

    async def verify_blocks(self, request: m.VerifyBlocksRequest) -> m.VerifyBlocksResponse:
        states = [
            await self._unbroken(self._verify_stored(request.namespace_id, block_hash))
            for block_hash in _hashes(request.block_hashes)
        ]
        return m.VerifyBlocksResponse(block_states=bytes(states))

    # --- writing

    async def reserve_blocks(self, request: m.ReserveBlocksRequest) -> m.ReserveBlocksResponse:
        hashes = _hashes(request.block_hashes)
        if len(set(hashes)) != len(hashes):
            raise InvalidArgumentError.of("block_hashes", "the same block twice", "each block once")
        if len(request.parent_hash) not in (0, HASH_BYTES):
            raise InvalidArgumentError.of("parent_hash", f"{len(request.parent_hash)} bytes", "32 bytes, or none")
        states, reservation_ids = self._core.reserve(
            request.namespace_id,
            hashes,
            parent_hash=BlockHash(request.parent_hash) if request.parent_hash else None,
            owner_id=_owner(request.owner_id),
            now_s=self._clock(),
            duration_s=_duration("reservation_duration", request.reservation_s, max_s=m.RESERVATION_S_MAX),
        )
        return m.ReserveBlocksResponse(reserve_states=states, reservation_ids=tuple(reservation_ids), epoch=self._epoch)

    async def write_blocks(self, frames: AsyncIterator[WriteFrame]) -> m.WriteBlocksResponse:
        owner_id: OwnerId | None = None
        touched: set[ReservationId] = set()
        landed_bytes = 0
        is_whole = False
        try:
            async for frame in frames:
                owner_id = owner_id or _owner(frame.owner_id or b"")
                touched.add(frame.reservation_id)
                landed_bytes += await self._land(frame, owner_id)
            for reservation_id in touched:
                self._refuse_cut_off(reservation_id, owner_id=owner_id)
            is_whole = True
        finally:
            if not is_whole and owner_id is not None:
                self._core.abort_siblings(touched, owner_id=owner_id)
                self._wake_waiters()
        return m.WriteBlocksResponse(landed_bytes=landed_bytes)

    async def commit_blocks(self, request: m.CommitBlocksRequest) -> m.CommitBlocksResponse:
        owner_id = _owner(request.owner_id)
        _count("reservation_ids", len(request.reservation_ids), count_max=m.BATCH_COUNT_MAX)
        states = await self._unbroken(self._commit(request.reservation_ids, owner_id=owner_id))
        return m.CommitBlocksResponse(commit_states=bytes(states))

    async def abort_reservations(self, request: m.AbortReservationsRequest) -> m.AbortReservationsResponse:
        owner_id = _owner(request.owner_id)
        _count("reservation_ids", len(request.reservation_ids), count_max=m.BATCH_COUNT_MAX)
        aborted = [self._core.abort(reservation, owner_id=owner_id) for reservation in request.reservation_ids]
        self._wake_waiters()
        return m.AbortReservationsResponse(aborted_count=sum(aborted))

    # --- time

    def sweep(self) -> None:
        """Ends what has expired; to be called every so often."""
        if self._core.expire(now_s=self._clock()):
            self._wake_waiters()
        self._core.evict_to_low_watermark()

    # --- inside

    async def _find(self, namespace_id: NamespaceId, hashes: list[BlockHash], *, wait_s: float) -> Found:
        """A lookup that waits, for so long, while the block behind its matched prefix is pending."""
        if not 0.0 <= wait_s <= m.WAIT_S_MAX:
            raise InvalidArgumentError.of("wait_duration", f"{wait_s:g} s", f"0 to {m.WAIT_S_MAX:g} s")
        deadline_s = self._clock() + wait_s
        while True:
            settled = self._settled
            found = self._core.lookup(namespace_id, hashes)
            left_s = deadline_s - self._clock()
            is_blocked = found.matched_count < len(hashes) and found.states[found.matched_count] == BlockState.PENDING
            if not is_blocked or left_s <= 0:
                self._core.count_lookup(found)
                return found
            try:
                async with asyncio.timeout(left_s):
                    await settled.wait()
                    # All waiters wake for every block that settles: look at one's own before at the whole prompt.
                    while self._core.is_pending(namespace_id, hashes[found.matched_count]):
                        await self._settled.wait()
            except TimeoutError:
                continue  # one last look

    def _refuse_cut_off(self, reservation_id: ReservationId, *, owner_id: OwnerId | None) -> None:
        """Raises when a stream ended within this block: a transport may end a broken stream like a finished one."""
        reservation = self._core.reservation(reservation_id, owner_id=owner_id) if owner_id else None
        if reservation is None or not reservation.landed_bytes:
            return
        if _is_cut_off(self._arena.view(reservation.place, reservation.landed_bytes)):
            raise InvalidArgumentError.of(
                "stream", f"at its end after {reservation.landed_bytes} bytes of a block", "whole blocks"
            )

    async def _land(self, frame: WriteFrame, owner_id: OwnerId) -> int:
        size_bytes = len(frame.data)
        reservation = self._core.begin_landing(
            frame.reservation_id, owner_id=owner_id, offset_bytes=frame.offset_bytes, size_bytes=size_bytes
        )
        if reservation is None:
            return 0
        land = partial(self._arena.land, reservation.place, frame.offset_bytes, frame.data)
        if size_bytes <= _INLINE_BYTES_MAX:
            land()
            self._core.end_landing(reservation, size_bytes=size_bytes)
        else:
            await self._unbroken(self._land_in_thread(land, reservation, size_bytes=size_bytes))
        return size_bytes

    async def _land_in_thread(self, land: Callable[[], None], reservation: Reservation, *, size_bytes: int) -> None:
        try:
            await self._in_thread(land)
        finally:
            self._core.end_landing(reservation, size_bytes=size_bytes)

    async def _commit(self, reservation_ids: Sequence[ReservationId], *, owner_id: OwnerId) -> list[CommitState]:
        reservations = [self._core.begin_commit(number, owner_id=owner_id) for number in reservation_ids]
        verdicts = [
            self._verdict_without_bytes(reservation) if reservation else CommitState.EXPIRED
            for reservation in reservations
        ]
        landed = [hold for hold, verdict in zip(reservations, verdicts, strict=True) if hold and not verdict]
        checks = [self._check(hold.key, StoredBlock(hold.place, hold.landed_bytes)) for hold in landed]
        checked = iter(await self._in_thread(lambda: [check() for check in checks]) if checks else [])
        states: list[CommitState] = []
        for reservation, verdict in zip(reservations, verdicts, strict=True):
            state = verdict or next(checked)
            if reservation is not None:
                self._core.end_commit(reservation, state=state)
            states.append(state)
        self._wake_waiters()
        return states

    @staticmethod
    def _verdict_without_bytes(reservation: Reservation) -> CommitState | None:
        """INCOMPLETE when there is nothing to verify yet; None when the bytes decide."""
        return CommitState.INCOMPLETE if not reservation.landed_bytes or reservation.landing_count else None

    async def _verify_stored(self, namespace_id: NamespaceId, block_hash: BlockHash) -> BlockState:
        block = self._core.begin_read(namespace_id, block_hash)
        if block is None:
            return BlockState.MISS
        try:
            check = self._check(BlockKey(namespace_id, block_hash), block)
            if await self._in_thread(check) is CommitState.COMMITTED:
                return BlockState.HIT
            self._core.quarantine(namespace_id, block_hash, block)
            return BlockState.CORRUPT
        finally:
            self._core.end_read(block, sent_bytes=0)

    def _check(self, key: BlockKey, block: StoredBlock) -> Callable[[], CommitState]:
        """A test of the bytes at a retained place, to be run in a thread."""
        return partial(
            _verdict,
            self._arena.view(block.place, block.size_bytes),
            key,
            payload_bytes=self._core.payload_bytes(key.namespace_id),
        )

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._copy_pool, work)

    async def _unbroken(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Runs work to its end even if the caller goes away: a thread may be using the place it holds."""
        task = asyncio.ensure_future(work)
        self._unbroken_tasks.add(task)
        task.add_done_callback(self._unbroken_tasks.discard)
        return await asyncio.shield(task)

    def _wake_waiters(self) -> None:
        self._settled.set()
        self._settled = asyncio.Event()


def _verdict(block: memoryview, key: BlockKey, *, payload_bytes: int) -> CommitState:
    """COMMITTED when these bytes are the block, no byte more; INCOMPLETE when its end is missing; else CORRUPT."""
    try:
        payload = verify_block(
            block, namespace_id=key.namespace_id, block_hash=key.block_hash, payload_bytes=payload_bytes
        )
    except CorruptBlockError:
        return CommitState.INCOMPLETE if _is_cut_off(block) else CommitState.CORRUPT
    return CommitState.COMMITTED if len(block) == ENVELOPE_BYTES + len(payload) else CommitState.CORRUPT


def _is_cut_off(block: memoryview) -> bool:
    if len(block) < ENVELOPE_BYTES:
        return True
    try:
        return len(block) < ENVELOPE_BYTES + Envelope.decode(block).payload_bytes
    except CorruptBlockError:
        return False


def _hashes(packed: bytes) -> list[BlockHash]:
    _count("block_hashes", len(packed) // HASH_BYTES, count_max=m.BATCH_COUNT_MAX)
    return split_hashes(packed)


def _count(field: str, count: int, *, count_max: int) -> None:
    if count > count_max:
        raise InvalidArgumentError.of(field, f"{count} of them", f"at most {count_max}")


def _owner(owner_id: bytes) -> OwnerId:
    if len(owner_id) != m.OWNER_ID_BYTES:
        raise InvalidArgumentError.of("owner_id", f"{len(owner_id)} bytes", f"{m.OWNER_ID_BYTES} bytes")
    return OwnerId(owner_id)


def _duration(field: str, seconds: float, *, max_s: float) -> float:
    if not 0.0 < seconds <= max_s:
        raise InvalidArgumentError.of(field, f"{seconds:g} s", f"above 0 and at most {max_s:g} s")
    return seconds
