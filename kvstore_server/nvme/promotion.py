"""From the disk to memory: on use, or ahead of it within a budget. Verified in its slot before anybody sees it."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from kvstore.envelope import ENVELOPE_BYTES
from kvstore.errors import CorruptBlockError, KvstoreError
from kvstore.eviction import NO_HINT, Request
from kvstore.keys import BlockHash
from kvstore_server.core.disk import DiskBlock
from kvstore_server.core.disk_health import DiskFault, DiskWork
from kvstore_server.core.store import BlockKey, Reservation, StoredBlock
from kvstore_server.core.tenants import ScopedId
from kvstore_server.core.worth import CostMeter, TierCost
from kvstore_server.nvme.coding import Codings
from kvstore_server.nvme.format import DISK_HEADER_BYTES, padded
from kvstore_server.nvme.parts import Parts

_JOB_BYTES = 2 << 20
"""Smaller blocks are read by one thread one after the other, up to about this."""
_LOSSES = frozenset({errno.EIO, errno.ENODATA})
"""What a device answers for a sector that it cannot read."""
_PROBE_EVERY_S = 1.0
_FIRST_COST = TierCost(latency_s=2e-3, bytes_per_s=200e6)
"""What a read is taken to cost before the first was measured: that of a slow SSD."""


class Prefetched(NamedTuple):
    in_memory_count: int
    started_count: int
    refused_count: int
    missing_count: int


class _Load(NamedTuple):
    block: DiskBlock
    reservation: Reservation


class _Reading:
    """What was asked of the disk at once."""

    def __init__(self, *, job_count: int) -> None:
        self.started_s = time.monotonic()
        self.left_count = job_count
        self.read_bytes = 0


class Loading:
    """Blocks that one thread reads one after the other, and who waits for them."""

    def __init__(self, reading: _Reading) -> None:
        self.reading = reading
        self.task: asyncio.Task[None]
        self.waiter_count = 0
        self.held: list[StoredBlock | None] = []
        """What has come, while somebody waits for more."""


class Promotion:
    """Each block is read once, however many wait for it."""

    def __init__(self, parts: Parts, codings: Codings, *, wake_demotion: Callable[[], None]) -> None:
        self._wake_demotion = wake_demotion
        self._parts = parts
        self._codings = codings
        self._loading: dict[BlockKey, Loading] = {}
        self._loading_bytes = 0
        self._prefetching_bytes = 0
        self._meter = CostMeter(first=_FIRST_COST)
        self._last_read: DiskBlock | None = None
        self._probed_s = 0.0

    @property
    def cost(self) -> TierCost:
        return self._meter.cost

    @property
    def queued_bytes(self) -> int:
        return self._loading_bytes

    def probe(self) -> None:
        """To be called when a block was left out as too slow: reads something to no end every so often, so that a disk
        that has become fast again is found out."""
        parts, now_s = self._parts, self._parts.clock()
        is_due = now_s >= self._probed_s + _PROBE_EVERY_S
        block = self._last_read or parts.disk.some_block()
        if block is None or not is_due or parts.reads_under_way or not parts.may_read():
            return
        self._probed_s = now_s
        parts.spawn(self._probe(block), at=DiskWork.READING)

    async def _probe(self, block: DiskBlock) -> None:
        parts = self._parts
        size_bytes = padded(DISK_HEADER_BYTES + block.stored_bytes)
        parts.reads_under_way += 1
        try:
            elapsed_s = await parts.in_io_thread(partial(self._touch, block, size_bytes))
        except OSError as error:
            parts.note_error(error, at=DiskWork.READING)
            return
        finally:
            parts.reads_under_way -= 1
        parts.counts.device_read_bytes += size_bytes
        self._meter.note(size_bytes=size_bytes, elapsed_s=elapsed_s)
        if elapsed_s <= parts.settings.load_timeout_s:
            parts.note_done(DiskWork.READING)

    async def bring(self, namespace_id: ScopedId, hashes: Sequence[BlockHash], *, request: Request = NO_HINT) -> None:
        """Brings what is only on the disk; never fails, and ends in time. What could not be brought is a miss.

        What has been brought, or was in memory when this was called, is there when this returns: whoever waits holds it
        until then, and must take his own hold before he waits for anything else.
        """
        parts = self._parts
        deadline_s = time.monotonic() + parts.settings.load_timeout_s
        parts.store.prefetches.ask([BlockKey(namespace_id, one) for one in hashes])
        if not self._is_needed(namespace_id, hashes):
            return
        in_memory = parts.store.stored(namespace_id)
        held = [parts.store.begin_read(namespace_id, one) for one in hashes if one in in_memory]
        try:
            while True:
                departed = parts.departed
                loads = set(self.start(namespace_id, hashes, may_lose=False, request=request))
                is_room_missing = self._is_needed(namespace_id, hashes, but_not_loading=True)
                if not await self._wait(loads, held, deadline_s=deadline_s) or not is_room_missing:
                    return
                if not parts.store.demoting_bytes:
                    break
                # Room is on its way: blocks that only memory has are not to be lost for these.
                self._wake_demotion()
                try:
                    await asyncio.wait_for(departed.wait(), max(deadline_s - time.monotonic(), 0.0))
                except TimeoutError:
                    return
            loads = set(self.start(namespace_id, hashes, may_lose=True, request=request))
            await self._wait(loads, held, deadline_s=deadline_s)
        finally:
            for block in held:
                if block is not None:
                    parts.store.end_read(block, sent_bytes=0)

    def _is_needed(self, namespace_id: ScopedId, hashes: Sequence[BlockHash], *, but_not_loading: bool = False) -> bool:
        """Whether some of these can be brought, and are not on their way if that is asked for."""
        parts = self._parts
        if not parts.may_read():
            return False
        on_disk, in_memory = parts.disk.stored(namespace_id), parts.store.stored(namespace_id)
        loading = self._loading if but_not_loading else {}
        return any(
            one in on_disk and one not in in_memory and BlockKey(namespace_id, one) not in loading for one in hashes
        )

    async def _wait(self, loads: Collection[Loading], held: list[StoredBlock | None], *, deadline_s: float) -> bool:
        """False: some were late. What has come is added to `held`."""
        if not loads:
            return True
        for load in loads:
            load.waiter_count += 1
        try:
            timeout_s = max(deadline_s - time.monotonic(), 0.0)
            _, late = await asyncio.wait([load.task for load in loads], timeout=timeout_s)
        finally:
            for load in loads:
                load.waiter_count -= 1
                if not load.waiter_count:
                    held += load.held
                    load.held = []
        # Some of the time may have gone into waiting for room in memory, which is no fault of the disk.
        timeout_s, now_s = self._parts.settings.load_timeout_s, time.monotonic()
        slow = [load for load in loads if load.task in late and now_s >= load.reading.started_s + timeout_s]
        if slow:
            self._parts.note_fault(
                DiskFault.SLOW, f"{len(slow)} reads were not done within {timeout_s:g} s", at=DiskWork.READING
            )
        return not late

    def prefetch(
        self, namespace_id: ScopedId, hashes: Sequence[BlockHash], *, budget_bytes: int, is_expected: bool = False
    ) -> Prefetched:
        """Begins to bring blocks, head first, as far as the budgets go; 0: only our own budget.

        `is_expected`: nobody has asked for it, but a session is expected to use them.
        Those that are on their way already count as started, and cost nothing.
        """
        parts = self._parts
        on_disk = parts.disk.stored(namespace_id) if parts.may_read() else {}
        in_memory = parts.store.stored(namespace_id)
        block_bytes = parts.store.space.slot_bytes(namespace_id)
        room_bytes = max(parts.settings.prefetch_bytes_max - self._prefetching_bytes, 0)
        room_bytes = min(room_bytes, budget_bytes or room_bytes)
        known_count = sum(block_hash in in_memory for block_hash in hashes)
        only_there = [block_hash for block_hash in hashes if block_hash in on_disk and block_hash not in in_memory]
        to_begin = [one for one in only_there if BlockKey(namespace_id, one) not in self._loading]
        chosen = to_begin[: room_bytes // block_bytes]
        refused_count = len(to_begin) - len(chosen)
        if chosen:
            size_bytes = len(chosen) * block_bytes
            self._prefetching_bytes += size_bytes
            begun = self.start(namespace_id, chosen, may_lose=False, request=None)
            keys = [BlockKey(namespace_id, one) for one in chosen]
            parts.store.prefetches.begin([key for key in keys if key in self._loading], is_expected=is_expected)
            parts.spawn(self._prefetched(begun, size_bytes), at=DiskWork.READING)
        parts.counts.prefetch_started += len(chosen)
        parts.counts.prefetch_refused += refused_count
        return Prefetched(
            in_memory_count=known_count,
            started_count=len(only_there) - refused_count,
            refused_count=refused_count,
            missing_count=len(hashes) - known_count - len(only_there),
        )

    # --- inside

    async def _prefetched(self, loads: Collection[Loading], size_bytes: int) -> None:
        """Gives the budget back when these have ended, in time or not."""
        if loads:
            await asyncio.wait([load.task for load in loads])
        self._prefetching_bytes -= size_bytes

    def start(
        self, namespace_id: ScopedId, hashes: Sequence[BlockHash], *, may_lose: bool, request: Request | None = NO_HINT
    ) -> list[Loading]:
        """Begins to read what is only on the disk; returns what there is to wait for."""
        parts = self._parts
        if not parts.may_read():
            return []
        in_memory, on_disk = parts.store.stored(namespace_id), parts.disk.stored(namespace_id)
        waited_for: list[Loading] = []
        wanted: list[BlockHash] = []
        for block_hash in hashes:
            if block_hash in in_memory:
                continue
            loading = self._loading.get(BlockKey(namespace_id, block_hash))
            if loading is not None:
                waited_for.append(loading)
            elif block_hash in on_disk:
                wanted.append(block_hash)
        if wanted:
            waited_for += self._begin(namespace_id, wanted, may_lose=may_lose, request=request)
        return waited_for

    def _begin(
        self, namespace_id: ScopedId, hashes: Sequence[BlockHash], *, may_lose: bool, request: Request | None
    ) -> list[Loading]:
        parts = self._parts
        held = [parts.disk.begin_read(BlockKey(namespace_id, block_hash)) for block_hash in hashes]
        blocks = [block for block in held if block is not None]
        assert len(blocks) == len(hashes), "what is stored can be read"
        reservations = parts.store.begin_promotion(
            namespace_id,
            hashes,
            parent_hashes=[block.parent_hash for block in blocks],
            now_s=parts.clock(),
            may_lose=may_lose,
            request=request,
        )
        loads: list[_Load] = []
        for block, reservation, block_hash in zip(blocks, reservations, hashes, strict=True):
            if reservation is None:  # no room in memory, or somebody is writing it
                parts.disk.end_read(BlockKey(namespace_id, block_hash), block)
            else:
                loads.append(_Load(block, reservation))
        begun = []
        jobs = _jobs(loads)
        reading = _Reading(job_count=len(jobs))
        for job in jobs:
            loading = Loading(reading)
            loading.task = parts.spawn(self._load(namespace_id, job, loading), at=DiskWork.READING)
            begun.append(loading)
            parts.reads_under_way += 1
            for load in job:
                self._loading[load.reservation.key] = loading
                self._loading_bytes += load.block.stored_bytes
        return begun

    async def _load(self, namespace_id: ScopedId, job: Sequence[_Load], loading: Loading) -> None:
        parts = self._parts
        payload_bytes = parts.store.payload_bytes(namespace_id)
        element_bytes = self._codings.element_bytes(namespace_id)
        read = partial(self._read, job, payload_bytes=payload_bytes, element_bytes=element_bytes)
        outcomes: list[KvstoreError | OSError | None] = []
        started_s = time.monotonic()
        try:
            outcomes = await parts.in_io_thread(read)
        finally:
            outcomes = outcomes or [OSError("not read")] * len(job)
            block_bytes = ENVELOPE_BYTES + payload_bytes
            parts.store.end_promotion(
                [
                    (load.reservation, block_bytes if outcome is None else None)
                    for load, outcome in zip(job, outcomes, strict=True)
                ]
            )
            if loading.waiter_count:
                loading.held = [parts.store.begin_read(namespace_id, load.reservation.key.block_hash) for load in job]
            parts.reads_under_way -= 1
            is_late = time.monotonic() - started_s > parts.settings.load_timeout_s
            for load, outcome in zip(job, outcomes, strict=True):
                del self._loading[load.reservation.key]
                self._loading_bytes -= load.block.stored_bytes
                self._settle(load, outcome, is_late=is_late)
            parts.on_settled()
        # What failed says nothing of what a read costs.
        reading = loading.reading
        reading.left_count -= 1
        reading.read_bytes += sum(
            padded(DISK_HEADER_BYTES + load.block.stored_bytes)
            for load, outcome in zip(job, outcomes, strict=True)
            if not isinstance(outcome, OSError)
        )
        if not reading.left_count and reading.read_bytes:
            # All that was read side by side, as whoever waits for it sees it.
            parts.counts.device_read_bytes += reading.read_bytes
            self._meter.note(size_bytes=reading.read_bytes, elapsed_s=time.monotonic() - reading.started_s)

    def _settle(self, load: _Load, outcome: KvstoreError | OSError | None, *, is_late: bool) -> None:
        parts, key = self._parts, load.reservation.key
        if outcome is None:
            self._last_read = load.block
            parts.counts.promoted += 1
            parts.counts.promoted_bytes += load.block.stored_bytes
        elif isinstance(outcome, CorruptBlockError):
            parts.counts.corrupt += 1
            parts.disk.drop(key, load.block)
        elif isinstance(outcome, OSError):
            # A bad sector is this block's own; whatever else it is may pass, and the block with it is back.
            if outcome.errno in _LOSSES:
                parts.disk.drop(key, load.block)
            parts.note_error(outcome, at=DiskWork.READING)
        else:
            raise outcome
        if not isinstance(outcome, OSError) and not is_late:
            parts.note_done(DiskWork.READING)
        parts.disk.end_read(key, load.block)

    def _touch(self, block: DiskBlock, size_bytes: int) -> float:
        """Runs in a thread."""
        try:
            return self._parts.images.touch(block.place, size_bytes=size_bytes)
        except OSError as error:
            raise self._parts.explained(error, segment=self._parts.segment_of(block.place)) from error

    def _read(
        self, job: Sequence[_Load], *, payload_bytes: int, element_bytes: int
    ) -> list[KvstoreError | OSError | None]:
        """Runs in a thread: what was wrong with each block."""
        outcomes: list[KvstoreError | OSError | None] = []
        for load in job:
            try:
                self._parts.images.read(
                    load.reservation.key,
                    load.block,
                    memory_place=load.reservation.place,
                    payload_bytes=payload_bytes,
                    element_bytes=element_bytes,
                )
            except CorruptBlockError as error:
                outcomes.append(error)
            except OSError as error:
                segment = self._parts.segment_of(load.block.place)
                outcomes.append(self._parts.explained(error, segment=segment))
            else:
                outcomes.append(None)
        return outcomes


def _jobs(loads: Sequence[_Load]) -> list[list[_Load]]:
    jobs: list[list[_Load]] = []
    job_bytes = _JOB_BYTES
    for load in loads:
        if job_bytes >= _JOB_BYTES:
            jobs.append([])
            job_bytes = 0
        jobs[-1].append(load)
        job_bytes += load.block.stored_bytes
    return jobs
