"""When a disk that fails is left alone, and when it is tried again. Knows neither disk nor clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import Enum, StrEnum
from types import MappingProxyType

READ_ERRORS_IN_A_ROW_MAX = 3
"""Single sectors go bad; a disk that gives nothing back is another matter."""
PAUSE_INITIAL_S = 1.0
PAUSE_MAX_S = 60.0


class DiskFault(StrEnum):
    """What can be wrong with the NVMe tier; names of metrics, so none is ever renamed."""

    ENOSPC = "enospc"
    """The file system is full, or fuller than `nvme.free_reserve` allows."""
    EIO_WRITE = "eio_write"
    EIO_READ = "eio_read"
    READ_ONLY = "read_only"
    UNREADABLE = "unreadable"
    """A file of ours is missing or may not be opened."""
    TRUNCATED = "truncated"
    """A file of ours is shorter than it was made."""
    SLOW = "slow"
    """A read or write has taken longer than `nvme.load_timeout_s`."""
    INDEX_FULL = "index_full"
    INDEX_DAMAGED = "index_damaged"
    UNEXPECTED = "unexpected"
    """An error that nothing is known about here: a bug."""


class DiskWork(Enum):
    """What a fault was met at, and keeps from being done."""

    READING = "reading"
    """Also stops writing: what cannot be read need not be written."""
    WRITING = "writing"
    """What is on the disk is still read."""
    GROWING = "growing"
    """Segments that are there are still written."""


HINTS: Mapping[DiskFault, str] = MappingProxyType(
    {
        DiskFault.ENOSPC: "free space on the file system, or lower nvme.capacity or nvme.free_reserve",
        DiskFault.EIO_WRITE: "look at the kernel's log and the device's SMART figures; the device may be dying",
        DiskFault.EIO_READ: "look at the kernel's log and the device's SMART figures; the device may be dying",
        DiskFault.READ_ONLY: "the file system is mounted read-only: see the kernel's log for why, and remount it",
        DiskFault.UNREADABLE: "somebody has changed the folder: give its files back to the daemon's user",
        DiskFault.TRUNCATED: "somebody has changed the folder; `kvstore nvme verify` tells what is left",
        DiskFault.SLOW: "the device is busy or throttled; blocks are recomputed until it answers in time",
        DiskFault.INDEX_FULL: "the index has no room for more blocks: raise nvme.capacity, which sizes it",
        DiskFault.UNEXPECTED: "this is a bug; please report it with the traceback in the log",
        DiskFault.INDEX_DAMAGED: "the index is built anew from the segments; nothing needs to be done",
    }
)


class DiskHealth:
    """A pause for each kind of work, twice as long as the one before while its faults go on."""

    def __init__(self) -> None:
        self.fault_counts: Counter[DiskFault] = Counter()
        self._pauses = {work: _Pause() for work in DiskWork}
        self._read_errors_in_a_row = 0
        self._is_writing_stopped_by_reading = False

    def note_fault(self, fault: DiskFault, *, at: DiskWork, now_s: float, detail: str) -> bool:
        """Counts it; True when something that went on until now does not any more."""
        self.fault_counts[fault] += 1
        if fault is DiskFault.EIO_READ:
            self._read_errors_in_a_row += 1
            if self._read_errors_in_a_row < READ_ERRORS_IN_A_ROW_MAX:
                return False
        is_new = self._pauses[at].begin(fault, now_s=now_s, detail=detail)
        writes = self._pauses[DiskWork.WRITING]
        if at is DiskWork.WRITING:
            self._is_writing_stopped_by_reading = False
        elif at is DiskWork.READING and (writes.fault is None or self._is_writing_stopped_by_reading):
            writes.begin(fault, now_s=now_s, detail=detail)
            self._is_writing_stopped_by_reading = True
        return is_new

    def count(self, fault: DiskFault) -> None:
        """Counts one that is over, or keeps nothing from being done."""
        self.fault_counts[fault] += 1

    def note_done(self, work: DiskWork) -> bool:
        """Something was done, and in time; True when that ends a pause."""
        if work is DiskWork.READING:
            self._read_errors_in_a_row = 0
            if self._is_writing_stopped_by_reading:
                self._pauses[DiskWork.WRITING].end()
        if work is not DiskWork.GROWING:
            self._is_writing_stopped_by_reading = False
        return self._pauses[work].end()

    def may(self, work: DiskWork, *, now_s: float) -> bool:
        return self._pauses[work].is_over(now_s=now_s)

    def may_read(self, *, now_s: float) -> bool:
        return self.may(DiskWork.READING, now_s=now_s)

    def may_write(self, *, now_s: float) -> bool:
        return self.may(DiskWork.WRITING, now_s=now_s)

    @property
    def is_reading_doubtful(self) -> bool:
        """Whether nothing has been read since a fault stopped that, be its pause over or not."""
        return self._pauses[DiskWork.READING].fault is not None

    @property
    def reason(self) -> str:
        """Why the tier does less than it should; empty when it does all."""
        reads, writes, growth = self._pauses.values()
        if reads.fault is not None:
            return reads.describe("nothing is read" if writes.fault is None else "nothing is read or written")
        if writes.fault is not None:
            return writes.describe("nothing is written")
        return growth.describe("no segment is made")


class _Pause:
    """After it has passed, tries are let through; what comes of them ends the pause or begins a longer one."""

    def __init__(self) -> None:
        self.fault: DiskFault | None = None
        self._detail = ""
        self._until_s = 0.0
        self._length_s = 0.0

    def begin(self, fault: DiskFault, *, now_s: float, detail: str) -> bool:
        is_new = self.fault is None
        if not is_new and now_s < self._until_s:
            return False  # one of several that were under way
        self._length_s = PAUSE_INITIAL_S if is_new else min(2 * self._length_s, PAUSE_MAX_S)
        self.fault, self._detail, self._until_s = fault, detail, now_s + self._length_s
        return is_new

    def end(self) -> bool:
        was_on = self.fault is not None
        self.fault, self._detail = None, ""
        return was_on

    def is_over(self, *, now_s: float) -> bool:
        return self.fault is None or now_s >= self._until_s

    def describe(self, what: str) -> str:
        return "" if self.fault is None else f"{self.fault}: {self._detail}; {what} meanwhile: {HINTS[self.fault]}"
