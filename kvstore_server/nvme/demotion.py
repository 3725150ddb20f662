"""From memory to the disk, in batches: bytes first, then the index, and found only then."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from itertools import chain
from math import ceil
from typing import Any, NamedTuple, TypeVar

from kvstore.errors import CorruptBlockError, KvstoreError
from kvstore_server.core.disk import DiskBlock, DiskWrite
from kvstore_server.core.disk_health import DiskFault, DiskWork
from kvstore_server.core.store import BlockKey, Departure
from kvstore_server.core.worth import TierCost
from kvstore_server.nvme.coding import Coding, Codings
from kvstore_server.nvme.crash import crash_point
from kvstore_server.nvme.format import DISK_HEADER_BYTES, padded
from kvstore_server.nvme.images import Stored
from kvstore_server.nvme.index import IndexFullError, IndexRecord
from kvstore_server.nvme.parts import Parts
from kvstore_server.nvme.segments import Segments

_BATCHES_AT_ONCE = 3
"""While one batch is made durable, the next ones are written."""

_INDEX_FILL_HIGH, _INDEX_FILL_LOW = 0.75, 0.70
"""Of its map: above the one it is full, and below the other no more.

A transaction copies every page that it changes, and frees the old ones for later transactions only.
"""
_EVICTED_PER_PUT = 1.25
"""While the index is full. More than one: pages become emptier where records come and go, and must not become more."""

_Result = TypeVar("_Result")


class _Write(NamedTuple):
    departure: Departure
    disk: DiskWrite
    coding: Coding


class _Written(NamedTuple):
    write: _Write
    stored: Stored


class Demotion:
    """Writes what departs from memory, and lets it go whatever became of that."""

    def __init__(
        self, parts: Parts, segments: Segments, codings: Codings, *, read_cost: Callable[[], TierCost]
    ) -> None:
        self._read_cost = read_cost
        self._parts = parts
        self._segments = segments
        self._codings = codings
        self._wake = asyncio.Event()
        self._batches = asyncio.Semaphore(_BATCHES_AT_ONCE)
        self._queue: deque[Departure] = deque()
        self._last_batch: asyncio.Task[None] | None = None
        self._is_index_full = False
        # Not yet deleted from the index; it may say what is not so, for what is read is verified.
        self._evicted: list[BlockKey] = []

    def wake(self) -> None:
        """To be called when something may have departed."""
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self.write_departures()

    async def write_departures(self) -> None:
        """Starts on all that has departed, and returns when the last batch has begun.

        What it has not come to when it is cancelled is for the next call.
        """
        queue, size = self._queue, self._parts.settings.batch_count
        queue.extend(self._parts.store.take_departures())
        while queue:
            await self._batches.acquire()
            batch = [queue.popleft() for _ in range(min(size, len(queue)))]
            self._last_batch = self._parts.spawn(self._demote(batch, after=self._last_batch), at=DiskWork.WRITING)

    async def forget_evicted(self) -> None:
        """Deletes from the index what is not on the disk any more, as the next batch does. Raises as `Index.apply`."""
        await self._apply([])

    # --- one batch

    async def _demote(self, batch: Sequence[Departure], *, after: asyncio.Task[None] | None) -> None:
        written: Sequence[DiskWrite] = ()
        try:
            written = await self._watched(
                self._write(batch, after=after), f"a batch of {len(batch)} blocks was not written"
            )
        finally:
            self._batches.release()
            store, disk = self._parts.store, self._parts.disk
            untrusted = {departure.key for departure in batch if not store.end_departure(departure)}
            for write in written:
                block = disk.find(write.key) if write.key in untrusted else None
                if block is not None and block.sequence == write.sequence:
                    disk.drop(write.key, block)
            self._parts.note_departed()

    async def _write(self, batch: Sequence[Departure], *, after: asyncio.Task[None] | None) -> Sequence[DiskWrite]:
        """Returns what is on the disk now, if anything."""
        parts = self._parts
        if not parts.may_write():
            parts.counts.lost["degraded"] += len(batch)
            return ()
        writes: list[_Write] = []
        started_s = time.monotonic()
        try:
            await self._segments.mend()
            namespaces = (departure.key.namespace_id for departure in batch)
            await self._segments.grow(Counter(one for one in namespaces if parts.disk.is_open(one)))
            writes = self._begin(batch)
            if not writes:
                return ()
            await self._segments.assign([write.disk for write in writes])
            await self._write_all(writes, after=after)
        except (OSError, KvstoreError) as error:
            self._give_up(writes, batch)
            parts.note_error(error, at=DiskWork.WRITING)
            return ()
        except BaseException:
            self._give_up(writes, batch)
            raise
        if time.monotonic() - started_s <= parts.settings.load_timeout_s:
            parts.note_done(DiskWork.WRITING)
        return [write.disk for write in writes]

    def _give_up(self, writes: Sequence[_Write], batch: Sequence[Departure]) -> None:
        # Ended in `_write_all` are only those that are in the index.
        for write in writes:
            if self._parts.disk.is_writing(write.disk):
                self._parts.disk.end_write(write.disk, stored_bytes=None)
        self._parts.counts.lost["failed"] += len(writes) or len(batch)

    def _begin(self, batch: Sequence[Departure]) -> list[_Write]:
        parts, now_s = self._parts, self._parts.clock()
        writes = []
        for departure in batch:
            disk = parts.disk.begin_write(
                departure.key, parent_hash=departure.parent_hash, use=departure.use, now_s=now_s
            )
            if disk is None:
                parts.counts.lost["no_room"] += 1
            else:
                writes.append(_Write(departure, disk, self._codings.next(departure.key.namespace_id)))
        return writes

    async def _write_all(self, writes: Sequence[_Write], *, after: asyncio.Task[None] | None) -> None:
        """Raises when anything was wrong with the disk; then no block of the batch is found."""
        parts = self._parts
        crash_point("nvme.before_data")
        started_s = time.perf_counter()
        written, corrupt = await self._write_images(writes)
        crash_point("nvme.after_data")
        if parts.settings.is_synced:
            touched = sorted({parts.segment_of(one.write.disk.place) for one in written})
            # Not behind the writes of the next batch, which it need not wait for.
            await parts.in_index_thread(lambda: parts.device.sync(touched))
        crash_point("nvme.after_sync")
        elapsed_s = time.perf_counter() - started_s
        if after is not None:
            # Parents come in earlier batches, and no block is to be found without them.
            await asyncio.wait([after])
        started_s = time.perf_counter()
        await self._apply(written)
        crash_point("nvme.after_index")
        elapsed_s += time.perf_counter() - started_s
        device_bytes = 0
        for one in written:
            stored_bytes = one.stored.size_bytes
            parts.disk.end_write(one.write.disk, stored_bytes=stored_bytes)
            device_bytes += padded(DISK_HEADER_BYTES + stored_bytes)
            parts.counts.demoted += 1
            parts.counts.demoted_bytes += one.write.departure.block.size_bytes
            parts.counts.payload_written_bytes += stored_bytes
            if one.stored.sample is not None:
                self._codings.note_sample(one.write.disk.key.namespace_id, one.write.coding.codec, one.stored.sample)
        parts.counts.device_written_bytes += device_bytes
        if device_bytes:
            self._codings.note_written(
                size_bytes=device_bytes, elapsed_s=elapsed_s, read_bytes_per_s=self._read_cost().bytes_per_s
            )
        for write in corrupt:
            parts.disk.end_write(write.disk, stored_bytes=None)
            parts.counts.corrupt += 1

    async def _write_images(self, writes: Sequence[_Write]) -> tuple[list[_Written], list[_Write]]:
        """What is on the disk now, and what had not been right in memory; raises the first `OSError`."""
        size = -(-len(writes) // self._parts.settings.io_threads)
        jobs = [writes[start : start + size] for start in range(0, len(writes), size)]
        # One call per thread, not per block: handing work to threads costs the loop as much as all else here. All of
        # them end before any slot is given up, for threads write into these.
        results = await asyncio.gather(
            *(self._parts.in_io_thread(partial(self._write_job, job, is_first=job is jobs[0])) for job in jobs)
        )
        written: list[_Written] = []
        corrupt: list[_Write] = []
        for write, result in zip(writes, chain.from_iterable(results), strict=True):
            match result:
                case Stored():
                    written.append(_Written(write, result))
                case CorruptBlockError():
                    corrupt.append(write)
                case OSError():
                    raise result
        return written, corrupt

    def _write_job(self, job: Sequence[_Write], *, is_first: bool) -> list[Stored | CorruptBlockError | OSError]:
        """Runs in a thread: what became of each."""
        results: list[Stored | CorruptBlockError | OSError] = []
        for write in job:
            try:
                results.append(self._write_image(write))
            except (CorruptBlockError, OSError) as error:
                results.append(error)
            if is_first and len(results) == 1:
                crash_point("nvme.mid_data")
        return results

    def _write_image(self, write: _Write) -> Stored:
        block = write.departure.block
        try:
            return self._parts.images.write(
                write.disk.place,
                memory_place=block.place,
                block_bytes=block.size_bytes,
                sequence=write.disk.sequence,
                parent_hash=write.disk.parent_hash,
                coding=write.coding,
                is_verified=block.is_verified,
            )
        except OSError as error:
            raise self._parts.explained(error, segment=self._parts.segment_of(write.disk.place)) from error

    async def _apply(self, written: Sequence[_Written]) -> None:
        parts = self._parts
        if parts.index.is_closed:
            await parts.in_index_thread(parts.index.open_again)
        self._make_room_in_index(len(written))
        self._evicted += parts.disk.take_evicted()
        deletes, self._evicted = self._evicted, []
        is_all = parts.index.is_behind
        puts = self._all_records() if is_all else []
        puts += [
            _record(
                one.write.disk.key,
                DiskBlock(
                    one.write.disk.place, one.write.disk.sequence, one.stored.size_bytes, one.write.disk.parent_hash
                ),
            )
            for one in written
        ]
        # What was evicted has perhaps been written again since.
        kept = {one.write.disk.key for one in written}
        records = [
            (bytes(key.namespace_id), key.block_hash)
            for key in deletes
            if key not in kept and parts.disk.find(key) is None
        ]
        try:
            await parts.in_index_thread(lambda: parts.index.apply(puts, records, is_all=is_all))
        except BaseException as error:
            self._evicted += deletes
            if isinstance(error, IndexFullError):
                parts.disk.evict_coldest(2 * len(puts))  # so that there is room when it is tried again
            raise

    def _make_room_in_index(self, put_count: int) -> None:
        """Before it is full, for then it could not even delete."""
        parts = self._parts
        is_full = parts.index.fill_share > (_INDEX_FILL_LOW if self._is_index_full else _INDEX_FILL_HIGH)
        if is_full:
            parts.disk.evict_coldest(ceil(put_count * _EVICTED_PER_PUT))
            if not self._is_index_full:
                parts.note_passing_fault(DiskFault.INDEX_FULL, "the coldest blocks leave for those that come")
        self._is_index_full = is_full

    def _all_records(self) -> list[IndexRecord]:
        """Of what is on the disk already."""
        disk = self._parts.disk
        owners = {namespace_id for namespace_id, _, _ in disk.space.slabs_of_others(None)}
        return [
            _record(BlockKey(namespace_id, block_hash), block)
            for namespace_id in owners
            for block_hash, block in disk.stored(namespace_id).items()
        ]

    async def _watched(self, work: Coroutine[Any, Any, _Result], what: str) -> _Result:
        """Waits as long as it takes, for threads use the memory; says so when that is too long."""
        parts, timeout_s = self._parts, self._parts.settings.load_timeout_s
        task = asyncio.ensure_future(work)
        _, late = await asyncio.wait([task], timeout=timeout_s)
        if late:
            parts.note_fault(DiskFault.SLOW, f"{what} within {timeout_s:g} s", at=DiskWork.WRITING)
        return await task


def _record(key: BlockKey, block: DiskBlock) -> IndexRecord:
    return IndexRecord(
        scoped_id=key.namespace_id,
        block_hash=key.block_hash,
        place=block.place,
        sequence=block.sequence,
        stored_bytes=block.stored_bytes,
        parent_hash=block.parent_hash,
    )
