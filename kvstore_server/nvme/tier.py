"""The NVMe tier: takes in what leaves memory, and brings back what is used. Lives on the loop; disks are for threads.

`DiskCore` decides what is on the disk, `StoreCore` what leaves memory, `DiskHealth` whether the disk is used at all. A
block is found here only once its bytes and its index entry are on the disk (docs/formats/nvme_segment.md has the
order), and served only after it was verified in memory. Whatever the disk does reads as a miss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile

import structlog

from kvstore.errors import KvstoreError
from kvstore.eviction import NO_HINT, Request, Use
from kvstore.keys import BlockHash
from kvstore_server.core.disk import DiskBlock
from kvstore_server.core.disk_health import DiskFault
from kvstore_server.core.store import BlockKey
from kvstore_server.core.tenants import ScopedId
from kvstore_server.core.worth import worth_fetching
from kvstore_server.nvme.coding import Codings
from kvstore_server.nvme.demotion import Demotion
from kvstore_server.nvme.expectations import Expectations
from kvstore_server.nvme.figures import NvmeFigures
from kvstore_server.nvme.parts import LOSSES, Parts, Recovered
from kvstore_server.nvme.promotion import Prefetched, Promotion
from kvstore_server.nvme.segments import Segments

_log = structlog.get_logger("kvstore.nvme")

_NOTHING: Mapping[BlockHash, DiskBlock] = {}


class NvmeTier:
    """Everything here is called on the loop. `run` writes until it is cancelled; `close` waits for the disk."""

    def __init__(self, parts: Parts, *, recovered: Recovered) -> None:
        self._parts = parts
        self._recovered = recovered
        parts.disk.on_left = parts.store.left_below
        for fault in recovered.faults:
            parts.health.count(fault)
        self._codings = Codings(
            parts.store.element_bytes, candidates=parts.settings.codecs, forced=parts.settings.forced_codec
        )
        self._segments = Segments(parts, assignments=recovered.assignments)
        self._promotion = Promotion(parts, self._codings, wake_demotion=self.wake)
        self._demotion = Demotion(parts, self._segments, self._codings, read_cost=lambda: self._promotion.cost)
        self.expectations = Expectations(parts, self._promotion)

    # --- what the memory tier asks and tells (LowerTier)

    def find(self, key: BlockKey) -> DiskBlock | None:
        return self._parts.disk.find(key)

    def wants(self, key: BlockKey, *, use_count: int, use: Use | None, now_s: float) -> bool:
        return self._parts.health.may_write(now_s=now_s) and self._parts.disk.wants(
            key, use_count=use_count, use=use, now_s=now_s
        )

    def begin_use(self, request: Request, *, now_s: float, chain_blocks: int, matched_blocks: int) -> Use:
        return self._parts.disk.begin_use(
            request, now_s=now_s, chain_blocks=chain_blocks, matched_blocks=matched_blocks
        )

    def touch(self, keys: Sequence[BlockKey], *, use: Use) -> None:
        self._parts.disk.touch(keys, use=use)

    def describe(self, keys: Sequence[BlockKey], request: Request, *, now_s: float) -> None:
        self._parts.disk.describe(keys, request, now_s=now_s)

    def retell(self, use: Use, request: Request) -> Use:
        return self._parts.disk.retell(use, request)

    def expire(self, *, now_s: float) -> None:
        self._parts.disk.expire(now_s=now_s)

    def last_use(self, key: BlockKey) -> Use | None:
        return self._parts.disk.last_use(key)

    # --- what the service asks

    def open(self, namespace_id: ScopedId) -> None:
        """To be told of each namespace that the memory tier knows, before anything of it can depart."""
        slot_bytes = self._parts.store.space.slot_bytes(namespace_id)
        if self._parts.disk.open(namespace_id, slot_bytes=slot_bytes) is None:
            _log.warning(
                "nvme_namespace_left_out",
                slot_bytes=slot_bytes,
                segment_bytes=self._parts.settings.segment_bytes,
                hint="its blocks stay in memory only; raise nvme.segment_size if they are larger than a segment",
            )

    def stored(self, namespace_id: ScopedId) -> Mapping[BlockHash, DiskBlock]:
        """What can be brought back; nothing while the disk is not to be read."""
        return self._parts.disk.stored(namespace_id) if self._parts.may_read() else _NOTHING

    @property
    def used_bytes(self) -> int:
        """Of slots that hold blocks, or are being written."""
        return self._parts.disk.used_bytes

    def may_read(self) -> bool:
        return self._parts.may_read()

    def worth(self, is_slow: bytes, *, block_bytes: int, recompute_s_per_block: float) -> int:
        """How many leading blocks will be there before they could be recomputed; `is_slow`: a byte per block, 1 when
        it is here and not in memory."""
        count = worth_fetching(
            is_slow,
            block_bytes=block_bytes,
            cost=self._promotion.cost,
            queued_bytes=self._promotion.queued_bytes,
            recompute_s_per_block=recompute_s_per_block,
        )
        if count < len(is_slow):
            self._promotion.probe()
        return count

    def unreadable_count(self, namespace_id: ScopedId, hashes: Sequence[BlockHash]) -> int:
        """Leading blocks that would be found, were the disk to be read."""
        on_disk, in_memory = self._parts.disk.stored(namespace_id), self._parts.store.stored(namespace_id)
        return len(list(takewhile(lambda one: one in on_disk or one in in_memory, hashes)))

    def start(self, namespace_id: ScopedId, hashes: Sequence[BlockHash]) -> None:
        """Begins to bring what is only here, and does not wait."""
        self._promotion.start(namespace_id, hashes, may_lose=False)

    async def bring(self, namespace_id: ScopedId, hashes: Sequence[BlockHash], *, request: Request = NO_HINT) -> None:
        """See `Promotion.bring`."""
        # Room for what comes is not to be made at the cost of those of them that are in memory.
        self._parts.store.touch(namespace_id, hashes, request=request)
        await self._promotion.bring(namespace_id, hashes, request=request)

    def prefetch(self, namespace_id: ScopedId, hashes: Sequence[BlockHash], *, budget_bytes: int) -> Prefetched:
        """See `Promotion.prefetch`."""
        return self._promotion.prefetch(namespace_id, hashes, budget_bytes=budget_bytes)

    def count_hits(self, count: int) -> None:
        """Blocks of an answered lookup that only this tier has."""
        self._parts.counts.hits += count

    def wake(self) -> None:
        """To be called when something may have departed from memory."""
        self._demotion.wake()

    # --- running

    async def run(self) -> None:
        """Writes what departs from memory for as long as it runs."""
        self._promotion.probe()  # so that the first lookups with a cost know what a read takes
        await self._demotion.run()

    async def flush(self) -> None:
        """Writes all of memory that may be written, before the daemon ends."""
        self._parts.store.depart_all(now_s=self._parts.clock())
        await self._demotion.write_departures()
        await self._parts.wait_idle()

    def unwritten_count(self) -> int:
        """Blocks that are in memory only."""
        store, disk = self._parts.store, self._parts.disk
        return sum(
            block_hash not in disk.stored(namespace_id)
            for namespace_id in store.namespace_ids()
            for block_hash in store.stored(namespace_id)
        )

    async def close(self, *, timeout_s: float) -> bool:
        """Waits for what is under way; the disk is let alone afterwards. False: it hangs, and is still in use."""
        parts = self._parts
        try:
            await asyncio.wait_for(parts.wait_idle(), timeout_s)
        except TimeoutError:
            return False
        try:
            await asyncio.wait_for(self._close_index(), timeout_s)
        except TimeoutError:
            return False
        parts.device.close()
        parts.shut_down()
        return True

    async def _close_index(self) -> None:
        with suppress(KvstoreError, OSError):  # what is not deleted is found out when it is read
            await self._demotion.forget_evicted()
        await self._parts.in_index_thread(self._parts.index.close)

    def figures(self) -> NvmeFigures:
        parts, settings, counts, disk = self._parts, self._parts.settings, self._parts.counts, self._parts.disk
        reason = parts.health.reason
        return NvmeFigures(
            state="degraded" if reason else "ok",
            reason=reason,
            capacity_bytes=settings.capacity_bytes,
            used_bytes=disk.used_bytes,
            disk_bytes=self._segments.count * settings.segment_bytes + parts.index.size_bytes,
            segment_count=self._segments.count,
            segment_count_max=settings.segment_count_max,
            block_count=disk.block_count,
            queue_bytes=parts.store.demoting_bytes,
            demoted_count=counts.demoted,
            demoted_bytes=counts.demoted_bytes,
            promoted_count=counts.promoted,
            promoted_bytes=counts.promoted_bytes,
            hit_count=counts.hits,
            undemoted_count=parts.store.counters.dropped_undemoted_count + counts.lost.total(),
            evicted_count=disk.counters.evicted_count,
            expired_count=disk.counters.expired_count,
            dropped_counts={**disk.counters.refused_counts, **dict.fromkeys(LOSSES, 0), **counts.lost},
            corrupt_count=counts.corrupt,
            fault_counts={fault.value: parts.health.fault_counts[fault] for fault in DiskFault},
            device_written_bytes=counts.device_written_bytes,
            payload_written_bytes=counts.payload_written_bytes,
            device_read_bytes=counts.device_read_bytes,
            read_latency_s=self._promotion.cost.latency_s,
            read_bytes_per_s=self._promotion.cost.bytes_per_s,
            policy=disk.policy,
            policy_in_force=disk.policy_in_force,
            admission=disk.admission_policy,
            prefetch_started_count=counts.prefetch_started,
            prefetch_refused_count=counts.prefetch_refused,
            prefetch_useful_count=parts.store.prefetches.useful_count,
            prefetch_late_count=parts.store.prefetches.late_count,
            prefetch_wasted_count=parts.store.prefetches.wasted_count,
            recovery_s=self._recovered.took_s,
            recovered_count=self._recovered.record_count,
            refused_record_count=self._recovered.refused_count,
            is_direct=parts.device.is_direct,
        )
