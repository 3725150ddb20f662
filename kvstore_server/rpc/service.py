"""The store service: what each RPC means. Knows no transport.

All decisions are `StoreCore`'s and happen on the loop; copies and checksums of large buffers run in a
bounded pool of threads on places that are retained meanwhile.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from kvstore import PROTOCOL_VERSION, __version__
from kvstore import messages as m
from kvstore.envelope import ENVELOPE_BYTES, PayloadChecksum
from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore.eviction import NO_HINT, Request
from kvstore.frames import ReadFrame, WriteFrame, cut
from kvstore.keys import HASH_BYTES, BlockHash, split_hashes
from kvstore.messages import (
    BlockState,
    CommitState,
    CutReason,
    Epoch,
    LeaseId,
    NvmeState,
    NvmeStats,
    OwnerId,
    ReservationId,
    Ticket,
    Tier,
    TransferPath,
)
from kvstore.slab import encode_slot_header, encode_slot_records
from kvstore_server.core.accesses import AccessLog
from kvstore_server.core.hints import SECRET_BYTES, request_of
from kvstore_server.core.in_flight import InFlight
from kvstore_server.core.space import Place
from kvstore_server.core.store import BlockKey, Found, Reservation, StoreCore, StoredBlock, with_lower_tier
from kvstore_server.core.tenants import ScopedId, namespace_of, scoped
from kvstore_server.core.verdict import is_cut_off, verdict
from kvstore_server.nvme.figures import NvmeFigures
from kvstore_server.nvme.promotion import Prefetched
from kvstore_server.nvme.tier import NvmeTier
from kvstore_server.rpc.caller import Caller, client_of
from kvstore_server.shm.arenas import Arenas

INLINE_BYTES_MAX = 32 << 10
"""Up to here a copy on the loop is cheaper than handing it to a thread."""
READ_AHEAD_BYTES = 32 << 20
"""Of slots of a stream that are brought from a slower tier at a time, while as many before them are sent."""


_NOBODY = OwnerId(b"")
"""Holds nothing."""

# Of a byte that says in which tier a block is: whether it has to be brought into memory first.
_IS_SLOW = bytes(tier == Tier.NVME for tier in range(256))

_Result = TypeVar("_Result")


class _Prefix(NamedTuple):
    """What an answer says of the leading hits."""

    matched_count: int
    left_out_count: int = 0
    cut_reason: CutReason = CutReason.NONE


class TicketIssuer(Protocol):
    """Lets transfers over the data port happen; what a ticket stands for is the issuer's to end."""

    def issue_read(
        self, *, lease_id: LeaseId, owner_id: OwnerId, namespace_id: ScopedId, hashes: Sequence[BlockHash]
    ) -> Ticket:
        """For leased blocks."""

    def issue_write(self, *, owner_id: OwnerId, reservation_ids: Sequence[ReservationId]) -> Ticket:
        """For reservations of one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Where the other paths are, as `GetStoreInfo` tells it; empty: there is none."""

    slab_socket: str = ""
    bulk_port: int = 0
    is_nixl_enabled: bool = False
    nixl_metadata: bytes = b""
    """Empty while nobody serves NIXL, even where it is enabled."""


class StoreService:
    """Handlers of `kvstore.v1.BlockStoreService`, as plain values: the request and who sent it, and the response.

    `endpoints` is set once the daemon listens.
    """

    def __init__(
        self,
        *,
        core: StoreCore,
        arenas: Arenas,
        epoch: Epoch,
        copy_pool: Executor,
        clock: Callable[[], float],
        in_flight: InFlight,
        transfers: TicketIssuer | None = None,
        inline_bytes_max: int = INLINE_BYTES_MAX,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
    ) -> None:
        self.endpoints = Endpoints()
        self.nvme: NvmeTier | None = None
        """What is below memory, once it is open."""
        self.closed_nvme: NvmeFigures | None = None
        """What there is to say of it as long as it should be, and is not."""
        self._core = core
        core.reuse.used_bytes = self._used_bytes
        self._session_secret = secrets.token_bytes(SECRET_BYTES)
        self._accesses = AccessLog(secret=secrets.token_bytes(SECRET_BYTES), tenant_count=core.space.tenant_count)
        self._arenas = arenas
        self._in_flight = in_flight
        self._transfers = transfers
        self._epoch = epoch
        self._copy_pool = copy_pool
        self._inline_bytes_max = inline_bytes_max
        self._read_ahead_bytes = read_ahead_bytes
        self._clock = clock
        self._started_s = clock()
        self._unbroken_tasks: set[asyncio.Task[object]] = set()
        self._sessions: set[OwnerId] = set()
        # Replaced and set whenever a pending block has become something else.
        self._settled = asyncio.Event()

    # --- information

    def nvme_figures(self) -> NvmeFigures | None:
        """None: there is to be no such tier."""
        return self.closed_nvme if self.nvme is None else self.nvme.figures()

    async def get_store_info(self, _: m.GetStoreInfoRequest, caller: Caller) -> m.StoreInfo:
        return m.StoreInfo(
            version=__version__,
            protocol_version=PROTOCOL_VERSION,
            epoch=self._epoch,
            uptime_s=self._clock() - self._started_s,
            draining=self._core.is_draining,
            batch_count_max=m.BATCH_COUNT_MAX,
            frame_data_bytes_max=m.FRAME_DATA_BYTES_MAX,
            slab_socket=self.endpoints.slab_socket,
            bulk_port=self.endpoints.bulk_port,
            nixl_metadata=self.endpoints.nixl_metadata,
        )

    async def get_store_stats(self, _: m.GetStoreStatsRequest, caller: Caller) -> m.StoreStats:
        core, counters = self._core, self._core.counters
        core.reuse.tick(now_s=self._clock())
        namespaces = core.namespace_stats(caller.tenant)
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
            refused_count=counters.refused_full_count
            + counters.refused_draining_count
            + counters.refused_overloaded_count,
            uptime_s=self._clock() - self._started_s,
            namespaces=namespaces,
            nvme=None if (figures := self.nvme_figures()) is None else _nvme_stats(figures),
            reuse=core.reuse.total,
            recent_reuse=core.reuse.recent,
            policy=_policy_text(core.policy, core.policy_in_force),
        )

    async def describe_namespaces(self, _: m.DescribeNamespacesRequest, caller: Caller) -> m.DescribeNamespacesResponse:
        known = sorted(self._core.namespaces_of(caller.tenant), key=lambda one: -one.block_count)
        shown: list[m.DescribedNamespace] = []
        room_bytes = m.DESCRIBED_BYTES_MAX
        for one in known:
            room_bytes -= len(one.namespace.encode())
            if room_bytes < 0:
                break
            shown.append(one)
        return m.DescribeNamespacesResponse(namespaces=tuple(shown), left_out_count=len(known) - len(shown))

    async def open_namespace(self, request: m.OpenNamespaceRequest, caller: Caller) -> m.OpenNamespaceResponse:
        slot_bytes = self._core.open_namespace(
            request.namespace, payload_bytes=request.payload_bytes, tenant=caller.tenant
        )
        if self.nvme is not None:
            self.nvme.open(scoped(caller.tenant, request.namespace.id))
        return m.OpenNamespaceResponse(namespace_id=request.namespace.id, epoch=self._epoch, slot_bytes=slot_bytes)

    # --- reading

    async def lookup_blocks(self, request: m.LookupBlocksRequest, caller: Caller) -> m.LookupBlocksResponse:
        namespace_id = scoped(caller.tenant, request.namespace_id)
        hashes = _hashes(request.block_hashes)
        recompute_s = _recompute(request.recompute_s_per_block)
        hinted = self._request(request.hint, namespace_id)
        found = await self._find(namespace_id, hashes, packed=request.block_hashes, wait_s=request.wait_s)
        self._note_access(namespace_id, m.AccessKind.LOOKUP, hashes, request.hint, matched_count=found.matched_count)
        self._note_asked(namespace_id, hinted)
        self._describe(namespace_id, hashes[: found.matched_count], hinted)
        prefix = self._prefix(namespace_id, hashes, found, recompute_s_per_block=recompute_s)
        return m.LookupBlocksResponse(
            matched_count=prefix.matched_count,
            block_states=found.states,
            tiers=found.tiers,
            epoch=self._epoch,
            left_out_count=prefix.left_out_count,
            cut_reason=prefix.cut_reason,
        )

    async def acquire_prefix(self, request: m.AcquirePrefixRequest, caller: Caller) -> m.AcquirePrefixResponse:
        namespace_id = scoped(caller.tenant, request.namespace_id)
        hashes = _hashes(request.block_hashes)
        owner_id = self._new_holder(request.owner_id, caller)
        lease_s = _duration("lease_duration", request.lease_s, max_s=m.LEASE_S_MAX)
        recompute_s = _recompute(request.recompute_s_per_block)
        hinted = self._request(request.hint, namespace_id)
        found = await self._find(namespace_id, hashes, packed=request.block_hashes, wait_s=request.wait_s)
        self._note_access(namespace_id, m.AccessKind.LOOKUP, hashes, request.hint, matched_count=found.matched_count)
        self._note_asked(namespace_id, hinted)
        prefix = self._prefix(namespace_id, hashes, found, recompute_s_per_block=recompute_s)
        if Tier.NVME in found.tiers[: prefix.matched_count]:
            prefix = await self._bring_prefix(namespace_id, hashes, prefix)
        # No await between finding and leasing: nothing can leave in between.
        lease_id = self._core.lease(
            namespace_id,
            hashes[: prefix.matched_count],
            owner_id=owner_id,
            now_s=self._clock(),
            duration_s=lease_s,
            request=hinted,
        )
        return m.AcquirePrefixResponse(
            matched_count=prefix.matched_count,
            block_states=found.states,
            tiers=found.tiers,
            epoch=self._epoch,
            lease_id=lease_id,
            left_out_count=prefix.left_out_count,
            cut_reason=prefix.cut_reason,
        )

    async def prefetch_blocks(self, request: m.PrefetchBlocksRequest, caller: Caller) -> m.PrefetchBlocksResponse:
        namespace_id = scoped(caller.tenant, request.namespace_id)
        hashes = _hashes(request.block_hashes)
        self._describe(namespace_id, hashes, self._request(request.hint, namespace_id))
        if self.nvme is not None:
            begun = self.nvme.prefetch(namespace_id, hashes, budget_bytes=request.budget_bytes)
        else:
            in_memory_count = self._core.lookup(namespace_id, hashes).states.count(BlockState.HIT)
            begun = Prefetched(in_memory_count, 0, 0, len(hashes) - in_memory_count)
        return m.PrefetchBlocksResponse(
            in_memory_count=begun.in_memory_count,
            started_count=begun.started_count,
            refused_count=begun.refused_count,
            missing_count=begun.missing_count,
            epoch=self._epoch,
        )

    async def renew_leases(self, request: m.RenewLeasesRequest, caller: Caller) -> m.RenewLeasesResponse:
        owner_id = self._holder(request.owner_id, caller)
        _count("lease_ids", len(request.lease_ids), count_max=m.LEASE_IDS_MAX)
        lease_s = _duration("lease_duration", request.lease_s, max_s=m.LEASE_S_MAX)
        now_s = self._clock()
        return m.RenewLeasesResponse(
            renewed=tuple(
                self._core.renew_lease(lease, owner_id=owner_id, now_s=now_s, duration_s=lease_s)
                for lease in request.lease_ids
            )
        )

    async def release_leases(self, request: m.ReleaseLeasesRequest, caller: Caller) -> m.ReleaseLeasesResponse:
        owner_id = self._holder(request.owner_id, caller)
        _count("lease_ids", len(request.lease_ids), count_max=m.LEASE_IDS_MAX)
        return m.ReleaseLeasesResponse(
            released=tuple(self._core.release_lease(lease, owner_id=owner_id) for lease in request.lease_ids)
        )

    async def lease_blocks(self, request: m.LeaseBlocksRequest, caller: Caller) -> m.LeaseBlocksResponse:
        namespace_id = scoped(caller.tenant, request.namespace_id)
        hashes = _hashes(request.block_hashes)
        owner_id = self._new_holder(request.owner_id, caller)
        lease_s = _duration("lease_duration", request.lease_s, max_s=m.LEASE_S_MAX)
        if request.path is TransferPath.STREAM:
            raise InvalidArgumentError.of("path", "STREAM", "SLAB, BULK or NIXL; ReadBlocks needs no lease")
        self._check_path(request.path, owner_id, caller, is_write=False)
        hinted = self._request(request.hint, namespace_id)
        self._note_asked(namespace_id, hinted)
        if self.nvme is not None:
            await self.nvme.bring(namespace_id, hashes, request=hinted)
        leased = self._core.lease_stored(
            namespace_id, hashes, owner_id=owner_id, now_s=self._clock(), duration_s=lease_s, request=hinted
        )
        slots = ticket = b""
        if request.path is not TransferPath.BULK:
            self._core.count_read(leased.blocks)
            slots = encode_slot_records([(block.place, block.generation, block.size_bytes) for block in leased.blocks])
        elif leased.lease_id is not None:
            assert self._transfers is not None, "a path that was refused"
            hits = [hashes[index] for index, state in enumerate(leased.states) if state == BlockState.HIT]
            ticket = self._transfers.issue_read(
                lease_id=leased.lease_id, owner_id=owner_id, namespace_id=namespace_id, hashes=hits
            )
        return m.LeaseBlocksResponse(
            block_states=leased.states, epoch=self._epoch, lease_id=leased.lease_id, slots=slots, ticket=ticket
        )

    async def read_blocks(self, request: m.ReadBlocksRequest, caller: Caller) -> AsyncGenerator[ReadFrame, None]:
        namespace_id = scoped(caller.tenant, request.namespace_id)
        hashes = _hashes(request.block_hashes)
        hinted = self._request(request.hint, namespace_id)
        self._note_asked(namespace_id, hinted)
        self._core.touch(namespace_id, hashes, request=hinted)
        window_count = max(self._read_ahead_bytes // self._core.space.slot_bytes(namespace_id), 1)
        held: deque[StoredBlock | None] = deque()
        try:
            for index, block_hash in enumerate(hashes):
                if self.nvme is None:
                    held.append(self._core.begin_read(namespace_id, block_hash))
                elif index % window_count == 0:
                    window = hashes[index : index + window_count]
                    await self.nvme.bring(namespace_id, window, request=hinted)
                    held += [self._core.begin_read(namespace_id, one) for one in window]
                    # Those behind them come while these are sent.
                    self.nvme.start(namespace_id, hashes[index + window_count : index + 2 * window_count])
                async with aclosing(self._read_block(index, held.popleft())) as frames:
                    async for frame in frames:
                        yield frame
        finally:
            for block in held:
                if block is not None:
                    self._core.end_read(block, sent_bytes=0)

    async def _read_block(self, index: int, block: StoredBlock | None) -> AsyncGenerator[ReadFrame, None]:
        """The frames of a block that is held, until here and no longer; None: it is not there."""
        if block is None:
            self._core.counters.unsent_count += 1
            yield ReadFrame(block_index=index, block_state=BlockState.MISS)
            return
        self._core.counters.sent_count += 1
        sent_bytes = 0
        try:
            view = self._arenas.view(block.place, block.size_bytes)
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

    def load_bytes_max(self, request: m.ReadBlocksRequest, caller: Caller) -> int:
        """What `read_blocks` sends if all is there."""
        block_bytes = ENVELOPE_BYTES + self._core.payload_bytes(scoped(caller.tenant, request.namespace_id))
        return len(request.block_hashes) // HASH_BYTES * block_bytes

    async def count_reads(self, request: m.CountReadsRequest, caller: Caller) -> m.CountReadsResponse:
        _count("hit_count", request.hit_count, count_max=m.HIT_COUNT_MAX)
        namespace_id = scoped(caller.tenant, request.namespace_id)
        hashes = _hashes(request.block_hashes)
        hinted = self._request(request.hint, namespace_id)
        self._note_asked(namespace_id, hinted)
        self._core.count_unseen_reads(namespace_id, hashes, hit_count=request.hit_count, request=hinted)
        self._core.reuse.found_unseen(request.hit_count)
        if hashes:
            self._note_access(namespace_id, m.AccessKind.READ, hashes, request.hint, matched_count=len(hashes))
        return m.CountReadsResponse()

    async def hint_blocks(self, request: m.HintBlocksRequest, caller: Caller) -> m.HintBlocksResponse:
        namespace_id = scoped(caller.tenant, request.namespace_id)
        hashes = _hashes(request.block_hashes)
        hinted = self._request(request.hint, namespace_id)
        self._core.describe(namespace_id, hashes, hinted, now_s=self._clock())
        self._note_access(namespace_id, m.AccessKind.HINT, hashes, request.hint, matched_count=0)
        self._note_ended(namespace_id, hashes, hinted)
        return m.HintBlocksResponse()

    async def take_accesses(self, request: m.TakeAccessesRequest, caller: Caller) -> m.TakeAccessesResponse:
        namespace_id = scoped(caller.tenant, request.namespace_id)
        self._core.stored(namespace_id)
        taken = self._accesses.take(namespace_id, after_number=request.after_number, uptime_s=self._uptime_s())
        return m.TakeAccessesResponse(
            accesses=taken.accesses,
            last_number=taken.last_number,
            dropped_count=taken.dropped_count,
            epoch=self._epoch,
        )

    async def verify_blocks(self, request: m.VerifyBlocksRequest, caller: Caller) -> m.VerifyBlocksResponse:
        namespace_id = scoped(caller.tenant, request.namespace_id)
        states = [
            await self._unbroken(self._verify_stored(namespace_id, block_hash))
            for block_hash in _hashes(request.block_hashes)
        ]
        return m.VerifyBlocksResponse(block_states=bytes(states))

    # --- writing

    async def reserve_blocks(self, request: m.ReserveBlocksRequest, caller: Caller) -> m.ReserveBlocksResponse:
        namespace_id = scoped(caller.tenant, request.namespace_id)
        hashes = _hashes(request.block_hashes)
        owner_id = self._new_holder(request.owner_id, caller)
        if len(set(hashes)) != len(hashes):
            raise InvalidArgumentError.of("block_hashes", "the same block twice", "each block once")
        if len(request.parent_hash) not in (0, HASH_BYTES):
            raise InvalidArgumentError.of("parent_hash", f"{len(request.parent_hash)} bytes", "32 bytes, or none")
        self._check_path(request.path, owner_id, caller, is_write=True)
        hinted = self._request(request.hint, namespace_id)
        states, reservations = self._core.reserve(
            namespace_id,
            hashes,
            parent_hash=BlockHash(request.parent_hash) if request.parent_hash else None,
            owner_id=owner_id,
            now_s=self._clock(),
            duration_s=_duration("reservation_duration", request.reservation_s, max_s=m.RESERVATION_S_MAX),
            path=request.path,
            is_overloaded=self._is_overloaded(request.path, owner_id, caller),
            request=hinted,
        )
        parent = [BlockHash(request.parent_hash)] if request.parent_hash else []
        self._note_access(namespace_id, m.AccessKind.WRITE, [*parent, *hashes], request.hint, matched_count=len(parent))
        self._note_ended(namespace_id, hashes, hinted)
        if self.nvme is not None:
            self.nvme.wake()
        reserved = [reservation for reservation in reservations if reservation is not None]
        slots = ticket = b""
        if request.path in (TransferPath.SLAB, TransferPath.NIXL):
            slots = encode_slot_records([(one.place, one.generation, one.block_bytes_max) for one in reserved])
        elif request.path is TransferPath.BULK and reserved:
            assert self._transfers is not None, "a path that was refused"
            ticket = self._transfers.issue_write(
                owner_id=owner_id, reservation_ids=[reservation.id for reservation in reserved]
            )
        return m.ReserveBlocksResponse(
            reserve_states=states,
            reservation_ids=tuple(None if reservation is None else reservation.id for reservation in reservations),
            epoch=self._epoch,
            slots=slots,
            ticket=ticket,
        )

    async def write_blocks(self, frames: AsyncIterator[WriteFrame], caller: Caller) -> m.WriteBlocksResponse:
        owner_id: OwnerId | None = None
        touched: set[ReservationId] = set()
        landed_bytes = 0
        is_whole = False
        landing: Awaitable[None] | None = None
        try:
            async for frame in frames:
                owner_id = owner_id or self._holder(frame.owner_id or b"", caller)
                touched.add(frame.reservation_id)
                # One frame lands while the next one comes, and no more.
                if landing is not None:
                    await landing
                landing, size_bytes = self._land(frame, owner_id)
                landed_bytes += size_bytes
            if landing is not None:
                await landing
            for reservation_id in touched:
                self._refuse_cut_off(reservation_id, owner_id=owner_id)
            is_whole = True
        finally:
            if not is_whole and owner_id is not None:
                self._core.abort_siblings(touched, owner_id=owner_id)
                self.wake_waiters()
        return m.WriteBlocksResponse(landed_bytes=landed_bytes)

    def store_bytes_max(self, frame: WriteFrame) -> int:
        """What a stream that begins with this frame may bring: all that was reserved with its block."""
        reservation = self._core.reservation(frame.reservation_id, owner_id=_owner(frame.owner_id or b""))
        return 0 if reservation is None else len(reservation.siblings) * reservation.block_bytes_max

    async def commit_blocks(self, request: m.CommitBlocksRequest, caller: Caller) -> m.CommitBlocksResponse:
        owner_id = self._holder(request.owner_id, caller)
        _count("reservation_ids", len(request.reservation_ids), count_max=m.BATCH_COUNT_MAX)
        reservations = [self._core.begin_commit(number, owner_id=owner_id) for number in request.reservation_ids]
        settled = [
            self._verdict_without_payload(reservation) if reservation else CommitState.EXPIRED
            for reservation in reservations
        ]
        if None in settled:
            settled = await self._unbroken(self._commit_after_hashing(reservations, settled))
        else:  # as usual when the client has written into the slots: then this takes no task, and no turn of the loop
            self._end_commits(reservations, settled, is_verified=False)
        return m.CommitBlocksResponse(commit_states=bytes(cast("list[CommitState]", settled)))

    async def abort_reservations(
        self, request: m.AbortReservationsRequest, caller: Caller
    ) -> m.AbortReservationsResponse:
        owner_id = self._holder(request.owner_id, caller)
        _count("reservation_ids", len(request.reservation_ids), count_max=m.BATCH_COUNT_MAX)
        aborted = [self._core.abort(reservation, owner_id=owner_id) for reservation in request.reservation_ids]
        self.wake_waiters()
        return m.AbortReservationsResponse(aborted_count=sum(aborted))

    # --- what ends

    def begin_session(self, session_id: OwnerId) -> None:
        """A session of the slab socket has begun: until it ends, what it holds is for its own calls alone."""
        self._sessions.add(session_id)

    def end_session(self, session_id: OwnerId) -> None:
        """A session of the slab socket is over: nobody is left who could use, or spoil, what it held."""
        self._sessions.discard(session_id)
        if self._core.end_owner(session_id):
            self.wake_waiters()

    def wake_waiters(self) -> None:
        """To be called whenever a pending block has become something else."""
        self._settled.set()
        self._settled = asyncio.Event()
        # Later, when whoever has committed it has his answer: evicting takes as long as committing.
        asyncio.get_running_loop().call_soon(self._evict)

    def sweep(self) -> None:
        """Ends what has expired; to be called every so often."""
        now_s = self._clock()
        if self._core.expire(now_s=now_s):
            self.wake_waiters()
        self._evict()
        self._core.reuse.tick(now_s=now_s)
        if self.nvme is not None:
            self.nvme.expectations.tick()

    # --- inside

    def _evict(self) -> None:
        self._core.evict_to_low_watermark()
        if self.nvme is not None:
            self.nvme.wake()

    def _look(self, namespace_id: ScopedId, hashes: list[BlockHash]) -> Found:
        """What is in memory or can be brought there."""
        found = self._core.lookup(namespace_id, hashes)
        if self.nvme is None or found.matched_count == len(hashes):
            return found
        on_disk = self.nvme.stored(namespace_id)
        return with_lower_tier(found, bytes(map(on_disk.__contains__, hashes))) if on_disk else found

    async def _find(self, namespace_id: ScopedId, hashes: list[BlockHash], *, packed: bytes, wait_s: float) -> Found:
        """A lookup that waits, for so long, while the block behind its matched prefix is pending."""
        if not 0.0 <= wait_s <= m.WAIT_S_MAX:
            raise InvalidArgumentError.of("wait_duration", f"{wait_s:g} s", f"0 to {m.WAIT_S_MAX:g} s")
        deadline_s = self._clock() + wait_s
        while True:
            settled = self._settled
            found = self._look(namespace_id, hashes)
            left_s = deadline_s - self._clock()
            is_blocked = found.matched_count < len(hashes) and found.states[found.matched_count] == BlockState.PENDING
            if not is_blocked or left_s <= 0:
                self._core.count_lookup(found)
                self._count_reuse(namespace_id, hashes, packed, found)
                if self.nvme is not None:
                    self.nvme.count_hits(found.tiers.count(Tier.NVME))
                return found
            try:
                async with asyncio.timeout(left_s):
                    await settled.wait()
                    # All waiters wake for every block that settles: look at one's own before at the whole prompt.
                    while self._core.is_pending(namespace_id, hashes[found.matched_count]):
                        await self._settled.wait()
            except TimeoutError:
                continue  # one last look

    def _request(self, hint: m.Hint | None, namespace_id: ScopedId) -> Request:
        return request_of(hint, namespace_id=namespace_id, secret=self._session_secret)

    def _describe(self, namespace_id: ScopedId, hashes: Sequence[BlockHash], hinted: Request) -> None:
        if hinted is not NO_HINT:
            self._core.describe(namespace_id, hashes, hinted, now_s=self._clock())

    def _note_asked(self, namespace_id: ScopedId, hinted: Request) -> None:
        """A session is back, if it is known which."""
        if self.nvme is not None and hinted is not NO_HINT:
            self.nvme.expectations.asked(namespace_id, hinted)

    def _note_ended(self, namespace_id: ScopedId, hashes: Sequence[BlockHash], hinted: Request) -> None:
        """A session's request has brought what is new, or told more: it may be away now."""
        if self.nvme is not None and hinted is not NO_HINT:
            self.nvme.expectations.ended(namespace_id, hashes, hinted)

    def _uptime_s(self) -> float:
        return self._clock() - self._started_s

    def _note_access(
        self,
        namespace_id: ScopedId,
        kind: m.AccessKind,
        hashes: Sequence[BlockHash],
        hint: m.Hint | None,
        *,
        matched_count: int,
    ) -> None:
        """For who records what is asked, if anybody does."""
        if not self._accesses.is_watched(namespace_id):
            return
        if hint is not None:
            hint = replace(hint, session_hash=self._request(hint, namespace_id).session_id or 0)
        self._accesses.note(
            namespace_id, kind, hashes, matched_count=matched_count, hint=hint, uptime_s=self._uptime_s()
        )

    def _used_bytes(self) -> int:
        return self._core.space.used_bytes + (0 if self.nvme is None else self.nvme.used_bytes)

    def _count_reuse(self, namespace_id: ScopedId, hashes: list[BlockHash], packed: bytes, found: Found) -> None:
        """What could have been hits of this lookup."""
        elsewhere_count = unreadable_count = 0
        first_miss = found.states.find(BlockState.MISS)
        if first_miss >= 0:
            behind, states = hashes[first_miss:], found.states[first_miss:]
            run_count = max(map(partial(self._run_count, behind), self._core.siblings(namespace_id)), default=0)
            elsewhere_count = states[:run_count].count(BlockState.MISS)
            if self.nvme is not None and not self.nvme.may_read():
                run_count = self.nvme.unreadable_count(namespace_id, behind)
                unreadable_count = states[:run_count].count(BlockState.MISS)
        self._core.reuse.looked_up(
            namespace_id,
            packed,
            found.states,
            block_bytes=self._core.space.slot_bytes(namespace_id),
            now_s=self._clock(),
            elsewhere_count=elsewhere_count,
            unreadable_count=unreadable_count,
        )

    def _run_count(self, hashes: list[BlockHash], namespace_id: ScopedId) -> int:
        """How many leading ones of these blocks a namespace has."""
        in_memory = self._core.stored(namespace_id)
        on_disk = {} if self.nvme is None else self.nvme.stored(namespace_id)
        return sum(1 for _ in takewhile(lambda one: one in in_memory or one in on_disk, hashes))

    def _prefix(
        self, namespace_id: ScopedId, hashes: list[BlockHash], found: Found, *, recompute_s_per_block: float
    ) -> _Prefix:
        """Leaves out what comes later than recomputing it takes, and what is on a disk that is not to be read."""
        matched_count = found.matched_count
        if self.nvme is None:
            return _Prefix(matched_count)
        if not self.nvme.may_read():
            left_out_count = self.nvme.unreadable_count(namespace_id, hashes[matched_count:])
            reason = CutReason.TIER_UNAVAILABLE if left_out_count else CutReason.NONE
            return _Prefix(matched_count, left_out_count, reason)
        is_slow = found.tiers[:matched_count].translate(_IS_SLOW)
        if not recompute_s_per_block or 1 not in is_slow:
            return _Prefix(matched_count)
        worth_count = self.nvme.worth(
            is_slow,
            block_bytes=self._core.space.slot_bytes(namespace_id),
            recompute_s_per_block=recompute_s_per_block,
        )
        left_out_count = matched_count - worth_count
        return _Prefix(worth_count, left_out_count, CutReason.TOO_SLOW if left_out_count else CutReason.NONE)

    async def _bring_prefix(self, namespace_id: ScopedId, hashes: list[BlockHash], prefix: _Prefix) -> _Prefix:
        """Brings what of it is only on the disk, as far as that can be, and leaves out the rest."""
        assert self.nvme is not None, "nobody else finds a block on a disk"
        wanted = hashes[: prefix.matched_count]
        await self.nvme.bring(namespace_id, wanted)
        missing_count = len(wanted) - self._core.lookup(namespace_id, wanted).matched_count
        if not missing_count:
            return prefix
        return _Prefix(len(wanted) - missing_count, prefix.left_out_count + missing_count, CutReason.TIER_UNAVAILABLE)

    def _refuse_cut_off(self, reservation_id: ReservationId, *, owner_id: OwnerId | None) -> None:
        """Raises when a stream ended within this block: a transport may end a broken stream like a finished one."""
        reservation = self._core.reservation(reservation_id, owner_id=owner_id) if owner_id else None
        if reservation is None or not reservation.landed_bytes:
            return
        if is_cut_off(self._arenas.view(reservation.place, reservation.landed_bytes)):
            raise InvalidArgumentError.of(
                "stream", f"at its end after {reservation.landed_bytes} bytes of a block", "whole blocks"
            )

    def _land(self, frame: WriteFrame, owner_id: OwnerId) -> tuple[Awaitable[None] | None, int]:
        """Begins to land a frame: when it will have landed, unless it has, and how many bytes have a place to go."""
        size_bytes = len(frame.data)
        reservation = self._core.begin_landing(
            frame.reservation_id, owner_id=owner_id, offset_bytes=frame.offset_bytes, size_bytes=size_bytes
        )
        if reservation is None:
            return None, 0
        reservation.checksum = reservation.checksum or PayloadChecksum()
        land = partial(self._copy_in, frame, reservation.place, reservation.checksum)
        if size_bytes <= self._inline_bytes_max:
            land()
            self._core.end_landing(reservation, size_bytes=size_bytes)
            return None, size_bytes
        landing = asyncio.get_running_loop().run_in_executor(self._copy_pool, land)
        # Even if the caller goes away: the thread uses the place until it has done.
        landing.add_done_callback(lambda _: self._core.end_landing(reservation, size_bytes=size_bytes))
        return asyncio.shield(landing), size_bytes

    def _copy_in(self, frame: WriteFrame, place: Place, checksum: PayloadChecksum) -> None:
        """Copies a frame into its slot and takes the checksum of what is there then, while it is in the cache."""
        self._arenas.land(place, frame.offset_bytes, frame.data)
        if checksum.block_bytes == frame.offset_bytes:
            checksum.update(self._arenas.view(place, frame.offset_bytes + len(frame.data))[frame.offset_bytes :])

    def _check_path(self, path: TransferPath, owner_id: OwnerId, caller: Caller, *, is_write: bool) -> None:
        """Raises when a caller may not move blocks on this path."""
        match path:
            case TransferPath.SLAB:
                if caller.session_id is None:
                    raise InvalidArgumentError.of("path", "SLAB", "that only on the slab socket")
                if owner_id != caller.session_id:
                    raise InvalidArgumentError.of("owner_id", owner_id.hex(), "on path SLAB the id of the session")
                if is_write and not caller.may_write:
                    raise InvalidArgumentError.of("path", "SLAB", "that only in a session with access WRITE")
            case TransferPath.BULK:
                if self._transfers is None:
                    raise InvalidArgumentError("path is BULK, and this daemon has no data port: bulk.enabled is false")
            case TransferPath.NIXL:
                if self.endpoints.is_nixl_enabled and not self.endpoints.nixl_metadata:
                    raise UnavailableError("NIXL is restarting; try again")
                if not self.endpoints.nixl_metadata:
                    raise InvalidArgumentError("path is NIXL, and this daemon has none: nixl.enabled is false")
            case TransferPath.STREAM:
                pass

    def _holder(self, owner_id: bytes, caller: Caller) -> OwnerId:
        """In whose name something held is used; nobody's, when it is another's session: its id alone opens nothing."""
        owner = _owner(owner_id)
        return _NOBODY if owner != caller.session_id and owner in self._sessions else owner

    def _new_holder(self, owner_id: bytes, caller: Caller) -> OwnerId:
        """In whose name something is to be held."""
        owner = self._holder(owner_id, caller)
        if owner == _NOBODY:
            raise InvalidArgumentError.of("owner_id", owner_id.hex(), "one that is no other session's")
        return owner

    def _is_overloaded(self, path: TransferPath, owner_id: OwnerId, caller: Caller) -> bool:
        """Whether a store is one too many; one into the slot itself moves nothing through the daemon."""
        match path:
            case TransferPath.STREAM:
                return not self._in_flight.admits_store(caller.client_id)
            case TransferPath.BULK:
                return not self._in_flight.admits_store(client_of(owner_id))
            case TransferPath.SLAB | TransferPath.NIXL:
                return False

    async def _commit_after_hashing(
        self, reservations: Sequence[Reservation | None], settled: Sequence[CommitState | None]
    ) -> list[CommitState | None]:
        landed = [hold for hold, known in zip(reservations, settled, strict=True) if hold and known is None]
        checks = [
            self._check(hold.key, hold.place, hold.landed_bytes, payload_checksum=hold.known_checksum)
            for hold in landed
        ]
        if all(hold.known_checksum is not None for hold in landed):
            checked = iter([check() for check in checks])
        else:
            checked = iter(await self._in_thread(lambda: [check() for check in checks]))
        states = [next(checked) if known is None else known for known in settled]
        is_hashed = [known is None for known in settled]
        for is_verified in (True, False):
            self._end_commits(
                [hold if hashed is is_verified else None for hold, hashed in zip(reservations, is_hashed, strict=True)],
                states,
                is_verified=is_verified,
            )
        return list(states)

    def _end_commits(
        self,
        reservations: Sequence[Reservation | None],
        states: Sequence[CommitState | None],
        *,
        is_verified: bool,
    ) -> None:
        outcomes = [(hold, state) for hold, state in zip(reservations, states, strict=True) if hold and state]
        self._core.end_commits(outcomes, is_verified=is_verified)
        self.wake_waiters()

    def _verdict_without_payload(self, reservation: Reservation) -> CommitState | None:
        """What can be said of a block before its payload is hashed; None when that decides.

        Who writes over the slab has hashed while it copied, and every reader hashes what it copies: once more here
        would be for nothing. What came in any other way is not readable before we have seen that it is right.
        """
        if not reservation.is_in_slot:
            return CommitState.INCOMPLETE if not reservation.landed_bytes or reservation.landing_count else None
        being_written = encode_slot_header(reservation.generation, is_readable=False, is_verified=False)
        if self._arenas.header(reservation.place) != being_written:
            return CommitState.CORRUPT
        namespace_id, block_hash = reservation.key
        envelope = bytes(self._arenas.view(reservation.place, ENVELOPE_BYTES))
        # Blocks are stored bit for bit, so all of an envelope but the checksum is known.
        if not self._core.envelopes(namespace_id).has_made(envelope, block_hash):
            return CommitState.CORRUPT if any(envelope) else CommitState.INCOMPLETE
        self._core.land_in_slot(reservation, size_bytes=ENVELOPE_BYTES + self._core.payload_bytes(namespace_id))
        return CommitState.COMMITTED if reservation.path is TransferPath.SLAB else None

    async def _verify_stored(self, namespace_id: ScopedId, block_hash: BlockHash) -> BlockState:
        block = self._core.begin_read(namespace_id, block_hash)
        if block is None:
            return BlockState.MISS
        try:
            check = self._check(BlockKey(namespace_id, block_hash), block.place, block.size_bytes)
            if await self._in_thread(check) is CommitState.COMMITTED:
                return BlockState.HIT
            self._core.quarantine(namespace_id, block_hash, block)
            return BlockState.CORRUPT
        finally:
            self._core.end_read(block, sent_bytes=0)

    def _check(
        self, key: BlockKey, place: Place, size_bytes: int, *, payload_checksum: int | None = None
    ) -> Callable[[], CommitState]:
        """A test of the bytes at a retained place, to be run in a thread unless the checksum is known."""
        return partial(
            verdict,
            self._arenas.view(place, size_bytes),
            namespace_id=namespace_of(key.namespace_id),
            block_hash=key.block_hash,
            payload_bytes=self._core.payload_bytes(key.namespace_id),
            payload_checksum=payload_checksum,
        )

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._copy_pool, work)

    async def _unbroken(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Runs work to its end even if the caller goes away: a thread may be using the place it holds."""
        task = asyncio.ensure_future(work)
        self._unbroken_tasks.add(task)
        task.add_done_callback(self._unbroken_tasks.discard)
        return await asyncio.shield(task)


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


def _recompute(seconds: float) -> float:
    if not 0.0 <= seconds <= m.RECOMPUTE_S_MAX:
        raise InvalidArgumentError.of(
            "recompute_us_per_block", f"{seconds * 1e6:g}", f"0 to {m.RECOMPUTE_S_MAX * 1e6:g}"
        )
    return seconds


def _nvme_stats(figures: NvmeFigures) -> NvmeStats:
    return NvmeStats(
        state=NvmeState.OK if figures.state == "ok" else NvmeState.DEGRADED,
        reason=figures.reason,
        capacity_bytes=figures.capacity_bytes,
        used_bytes=figures.used_bytes,
        block_count=figures.block_count,
        segment_count=figures.segment_count,
        demoted_count=figures.demoted_count,
        promoted_count=figures.promoted_count,
        hit_count=figures.hit_count,
        written_bytes=figures.device_written_bytes,
        read_bytes=figures.device_read_bytes,
        evicted_count=figures.evicted_count,
        dropped_count=sum(figures.dropped_counts.values()),
        corrupt_count=figures.corrupt_count,
        undemoted_count=figures.undemoted_count,
        policy=_policy_text(figures.policy, figures.policy_in_force),
        admission=figures.admission,
        prefetch_started_count=figures.prefetch_started_count,
        prefetch_refused_count=figures.prefetch_refused_count,
        prefetch_useful_count=figures.prefetch_useful_count,
        prefetch_late_count=figures.prefetch_late_count,
        prefetch_wasted_count=figures.prefetch_wasted_count,
    )


def _policy_text(configured: str, in_force: str) -> str:
    return configured if in_force == configured else f"{configured}, which follows {in_force} at present"
