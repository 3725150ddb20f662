"""What the parts of the NVMe tier share: settings, counts, threads, and what becomes of errors."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import structlog

from kvstore_server.core.disk import DiskCore
from kvstore_server.core.disk_health import HINTS, DiskFault, DiskHealth, DiskWork
from kvstore_server.core.space import Place
from kvstore_server.core.store import BlockKey, StoreCore
from kvstore_server.nvme.device import Device
from kvstore_server.nvme.format import SEGMENT_HEADER_BYTES, SegmentHeader, StoredCodec
from kvstore_server.nvme.images import Images
from kvstore_server.nvme.index import IndexDamagedError, IndexFullError
from kvstore_server.nvme.lasting_index import LastingIndex

_FAULT_OF_ERRNO = {
    errno.ENOSPC: DiskFault.ENOSPC,
    errno.EDQUOT: DiskFault.ENOSPC,
    errno.EFBIG: DiskFault.ENOSPC,
    errno.EROFS: DiskFault.READ_ONLY,
    errno.EACCES: DiskFault.UNREADABLE,
    errno.EPERM: DiskFault.UNREADABLE,
    errno.ENOENT: DiskFault.UNREADABLE,
    errno.ELOOP: DiskFault.UNREADABLE,
}

_PERHAPS_LOST = frozenset({errno.EIO, errno.ENOENT})
"""What a device answers, among other things, when a file is missing or ends too early."""

_log = structlog.get_logger("kvstore.nvme")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    capacity_bytes: int
    segment_bytes: int
    segment_count_max: int
    free_reserve_bytes: int
    batch_count: int
    """Blocks that are written together."""
    io_threads: int
    """Calls to the device under way at once."""
    is_synced: bool
    """Whether a block's bytes are on the device before the block is found."""
    load_timeout_s: float
    prefetch_bytes_max: int
    codecs: tuple[StoredCodec, ...] = ()
    """Those that are tried, and used for the namespaces where they pay."""
    forced_codec: StoredCodec | None = None
    """The one that is used for all, whatever it costs."""

    @property
    def slab_bytes(self) -> int:
        """What the slots of a segment have."""
        return self.segment_bytes - SEGMENT_HEADER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What was found at the start."""

    record_count: int = 0
    refused_count: int = 0
    took_s: float = 0.0
    was_rebuilt: bool = False
    assignments: Mapping[int, SegmentHeader] = field(default_factory=dict)
    """What each segment on the disk says that it is for."""
    faults: Sequence[DiskFault] = ()
    """One for each segment that could not be used as it was."""


LOSSES = ("no_room", "degraded", "failed")
"""Why blocks that had departed were not written."""


@dataclass(slots=True, kw_only=True)
class Counts:
    """What happened since the start, as far as the cores do not count it."""

    demoted: int = 0
    demoted_bytes: int = 0
    promoted: int = 0
    promoted_bytes: int = 0
    hits: int = 0
    corrupt: int = 0
    payload_written_bytes: int = 0
    device_written_bytes: int = 0
    device_read_bytes: int = 0
    prefetch_started: int = 0
    prefetch_refused: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    """Blocks that left memory and were not written although they might have been, by reason."""


class SegmentLostError(OSError):
    """A segment's file is missing, or shorter than it was made."""

    def __init__(self, segment: int, size_bytes: int | None, *, wanted_bytes: int) -> None:
        is_missing = size_bytes is None
        has = "is missing" if is_missing else f"has {size_bytes} of {wanted_bytes} bytes"
        super().__init__(errno.ENOENT if is_missing else errno.ENODATA, f"segment {segment} {has}")
        self.segment = segment
        self.fault = DiskFault.UNREADABLE if is_missing else DiskFault.TRUNCATED


class Parts:
    """One tier's parts, and the ways to have work done by them. Used on the loop only."""

    def __init__(
        self,
        *,
        disk: DiskCore,
        store: StoreCore,
        device: Device,
        index: LastingIndex,
        images: Images,
        io_threads: Executor,
        index_thread: Executor,
        settings: TierSettings,
        clock: Callable[[], float],
        on_settled: Callable[[], None],
    ) -> None:
        """`index_thread` does one thing at a time. `on_settled` is told when pending blocks are pending no more."""
        self.disk = disk
        self.store = store
        self.device = device
        self.index = index
        self.images = images
        self.settings = settings
        self.clock = clock
        self.on_settled = on_settled
        self.health = DiskHealth()
        if index.was_rebuilt:
            self.health.count(DiskFault.INDEX_DAMAGED)
        self.counts = Counts()
        self.reads_under_way = 0
        self.lost_segments: set[int] = set()
        """Nothing is stored in these, and nothing can be written before their files were made anew."""
        self.departed = asyncio.Event()
        """Replaced and set whenever blocks have departed from memory."""
        self._io_threads = io_threads
        self._index_thread = index_thread
        self._tasks: set[asyncio.Task[None]] = set()

    def segment_of(self, place: Place) -> int:
        return int(place) // self.settings.slab_bytes

    def may_read(self) -> bool:
        """While it is not known whether the disk works again, one at a time may try: others would wait in vain."""
        if self.health.is_reading_doubtful and self.reads_under_way:
            return False
        return self.health.may_read(now_s=self.clock())

    def may_write(self) -> bool:
        return self.health.may_write(now_s=self.clock())

    def may_grow(self) -> bool:
        return self.health.may(DiskWork.GROWING, now_s=self.clock())

    def note_departed(self) -> None:
        """To be told of each batch, whatever became of it."""
        self.departed.set()
        self.departed = asyncio.Event()
        self.on_settled()

    # --- threads and tasks

    async def in_io_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._io_threads, work)

    async def in_index_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._index_thread, work)

    def spawn(self, work: Coroutine[Any, Any, None], *, at: DiskWork) -> asyncio.Task[None]:
        """Runs it to its end, whoever goes away meanwhile: a thread may be using the places that it holds.

        What nobody has foreseen, and so nobody handles, rests the tier at this work like a fault of the disk; but a
        failed assertion goes on to the loop, and ends the daemon.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, at=at))
        return task

    def _ended(self, task: asyncio.Task[None], *, at: DiskWork) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, AssertionError):
            task.get_loop().call_exception_handler({"message": "a task failed", "exception": error, "task": task})
        elif error is not None:
            # Nobody waits for it: it would be logged at most, and be met again and again.
            _log.error("nvme_unexpected", what=at.value, exc_info=error)
            self.note_fault(DiskFault.UNEXPECTED, f"{type(error).__name__}: {error}", at=at)

    async def wait_idle(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    def shut_down(self) -> None:
        """To be called when idle, after the last call of anything else."""
        self._io_threads.shutdown(wait=False)
        self._index_thread.shutdown(wait=False)

    # --- faults

    def explained(self, error: OSError, *, segment: int) -> OSError:
        """The same, or what is wrong with that segment; for threads."""
        if error.errno not in _PERHAPS_LOST:
            return error
        try:
            size_bytes = self.device.segments().get(segment)
        except OSError:
            return error
        if size_bytes is None or size_bytes < self.settings.segment_bytes:
            return SegmentLostError(segment, size_bytes, wanted_bytes=self.settings.segment_bytes)
        return error

    def note_error(self, error: BaseException, *, at: DiskWork) -> None:
        """Counts what the device or the index answered, and rests what does not work."""
        match error:
            case IndexFullError():
                fault = DiskFault.INDEX_FULL
            case IndexDamagedError():
                fault = DiskFault.INDEX_DAMAGED
            case SegmentLostError():
                fault = error.fault
                self._drop_segment(error.segment)
                at = DiskWork.WRITING  # what is left can be read, and a write makes the segment anew
            case OSError():
                default = DiskFault.EIO_READ if at is DiskWork.READING else DiskFault.EIO_WRITE
                fault = _FAULT_OF_ERRNO.get(error.errno or 0, default)
            case _:
                raise error
        self.note_fault(fault, str(error), at=at)

    def note_fault(self, fault: DiskFault, detail: str, *, at: DiskWork) -> None:
        if self.health.note_fault(fault, at=at, now_s=self.clock(), detail=detail):
            _log.error("nvme_degraded", fault=fault.value, reason=detail, hint=HINTS[fault])
        else:
            _log.info("nvme_fault", fault=fault.value, reason=detail, hint=HINTS[fault])

    def note_passing_fault(self, fault: DiskFault, detail: str) -> None:
        """Of one that keeps nothing from being done."""
        self.health.count(fault)
        _log.info("nvme_fault", fault=fault.value, reason=detail, hint=HINTS[fault])

    def note_done(self, work: DiskWork) -> None:
        """To be told of what was done, and did not take longer than `load_timeout_s`."""
        if self.health.note_done(work):
            _log.info("nvme_restored", what=work.value)

    def _drop_segment(self, segment: int) -> None:
        """Of a segment whose file is not what it was; whoever still reads there finds out."""
        self.lost_segments.add(segment)
        for namespace_id, slab, _ in self.disk.space.slabs_of_others(None):
            if slab != segment:
                continue
            for block_hash, block in list(self.disk.stored(namespace_id).items()):
                if self.segment_of(block.place) == segment:
                    self.disk.drop(BlockKey(namespace_id, block_hash), block)
