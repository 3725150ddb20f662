"""The segment files of the NVMe tier: made one by one as they are needed, and given to namespaces."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Mapping, Sequence
from functools import partial

import structlog

from kvstore_server.core.disk import DiskWrite
from kvstore_server.core.disk_health import DiskWork
from kvstore_server.core.space import SlabId
from kvstore_server.core.tenants import ScopedId
from kvstore_server.nvme.crash import crash_point
from kvstore_server.nvme.device import aligned_buffer
from kvstore_server.nvme.format import SEGMENT_HEADER_BYTES, SegmentHeader
from kvstore_server.nvme.parts import Parts

_log = structlog.get_logger("kvstore.nvme")


class Segments:
    """Never more files than the capacity allows, and none that would take what is to stay free on the file system."""

    def __init__(self, parts: Parts, *, assignments: Mapping[int, SegmentHeader]) -> None:
        self._parts = parts
        self._assigned = {index: (header.scoped_id, header.slot_bytes) for index, header in assignments.items()}
        self._made = set(parts.device.segments())
        self._lock = asyncio.Lock()

    @property
    def count(self) -> int:
        return len(self._made)

    async def grow(self, counts: Mapping[ScopedId, int]) -> None:
        """Makes segments until so many blocks of each namespace have room; does with what there is where it cannot."""
        parts = self._parts
        async with self._lock:
            while parts.may_grow() and parts.disk.space.missing_slab_count(counts):
                index = next(number for number in range(len(self._made) + 1) if number not in self._made)
                if index >= parts.settings.segment_count_max:
                    return
                try:
                    await parts.in_io_thread(partial(self._make, index))
                except OSError as error:
                    parts.note_error(error, at=DiskWork.GROWING)
                    return
                crash_point("nvme.after_create")
                self._made.add(index)
                parts.disk.space.add_slab(SlabId(index))
                parts.note_done(DiskWork.GROWING)
                _log.info("nvme_segment_made", segment=index, size_bytes=parts.settings.segment_bytes)

    async def mend(self) -> None:
        """Makes segments anew that were lost, as soon as nobody reads or writes there. Raises `OSError`."""
        parts = self._parts
        if not parts.lost_segments:
            return
        async with self._lock:
            in_use = {slab for _, slab, _ in parts.disk.space.slabs_of_others(None)}
            for segment in sorted(parts.lost_segments - in_use):
                self._assigned.pop(segment, None)
                await parts.in_io_thread(partial(self._make, segment))
                parts.lost_segments.discard(segment)
                _log.info("nvme_segment_made", segment=segment, size_bytes=parts.settings.segment_bytes)

    async def assign(self, writes: Sequence[DiskWrite]) -> None:
        """Writes down which namespace the segments of these writes belong to, before anything of it is in them."""
        parts = self._parts
        async with self._lock:
            for segment, write in {parts.segment_of(write.place): write for write in reversed(writes)}.items():
                owner = bytes(write.key.namespace_id), write.slot_bytes
                if self._assigned.get(segment) == owner:
                    continue
                header = SegmentHeader(
                    store_id=parts.index.store_id,
                    index=segment,
                    segment_bytes=parts.settings.segment_bytes,
                    slot_bytes=write.slot_bytes,
                    # The first of the batch in there: what has a smaller number was somebody else's.
                    assignment=min(one.sequence for one in writes if parts.segment_of(one.place) == segment),
                    scoped_id=owner[0],
                )
                # Until it is written, nobody knows what is there, least of all when writing it fails.
                self._assigned.pop(segment, None)
                crash_point("nvme.before_segment_header")
                await parts.in_io_thread(partial(self._write, header))
                crash_point("nvme.after_segment_header")
                self._assigned[segment] = owner
                parts.counts.device_written_bytes += SEGMENT_HEADER_BYTES

    def _make(self, index: int) -> None:
        """Runs in a thread."""
        device, settings = self._parts.device, self._parts.settings
        if index in device.segments():
            device.remove(index)  # cut off, or left over where making it could not be undone
        free_bytes = device.free_bytes()
        if free_bytes - settings.segment_bytes < settings.free_reserve_bytes:
            raise OSError(
                errno.ENOSPC,
                f"{free_bytes} bytes are free on the file system: too few for a segment of {settings.segment_bytes} "
                f"and the {settings.free_reserve_bytes} that are to stay",
            )
        device.create(index, settings.segment_bytes)

    def _write(self, header: SegmentHeader) -> None:
        """Runs in a thread."""
        page = aligned_buffer(SEGMENT_HEADER_BYTES)
        page[:] = header.encode()
        try:
            self._parts.device.write(header.index, 0, [page])
            self._parts.device.sync([header.index])
        except OSError as error:
            raise self._parts.explained(error, segment=header.index) from error
