"""A device that fails as it is told to, in front of a real one."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvstore_server.nvme.device import Device, aligned_buffer
from kvstore_server.nvme.format import PAGE_BYTES

Call = Literal["create", "remove", "write", "read", "sync"]
CALLS: tuple[Call, ...] = ("create", "remove", "write", "read", "sync")


@dataclass(slots=True)
class _Fault:
    call: Call
    number: int
    segment: int | None
    span: range | None
    nth: int | None
    met_count: int = 0

    def strikes(self, call: Call, segment: int, span: range | None) -> bool:
        if call != self.call or self.segment not in (None, segment):
            return False
        if self.span is not None and (span is None or span.stop <= self.span.start or self.span.stop <= span.start):
            return False
        self.met_count += 1
        return self.nth in (None, self.met_count)


class FaultyDevice:
    """Any `Device` with faults that tests switch on and off while others use it; `heal` switches all off.

    Threads may share it. A fault strikes before the inner device is asked, unless its method says otherwise.
    """

    def __init__(
        self,
        inner: Device,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.inner = inner
        self.calls: Counter[Call] = Counter()
        """Asked of us, whatever became of them."""
        self.written_bytes = 0
        self.read_bytes = 0
        """Moved by the inner device."""
        self._clock = clock
        self._sleep = sleep
        self._changed = threading.Condition()
        self._faults: list[_Fault] = []
        self._flips: set[tuple[int, int, int]] = set()
        self._lost: set[int] = set()
        self._torn_after_bytes: int | None = None
        self._bytes_per_s: float | None = None
        self._latency_s = 0.0
        self._busy_until_s = 0.0
        self._hung_calls: frozenset[Call] = frozenset()
        self._hung_count = 0
        self._free_bytes: int | None = None

    # --- switches

    def fail(
        self, call: Call, number: int, *, segment: int | None = None, span: range | None = None, nth: int | None = None
    ) -> None:
        """An errno for these calls: of one segment, where they touch some of its bytes, the n-th from now on only."""
        with self._changed:
            self._faults.append(_Fault(call, number, segment, span, nth))

    def fill_up(self) -> None:
        """ENOSPC for what needs room, and none free."""
        self.fail("create", errno.ENOSPC)
        self.fail("write", errno.ENOSPC)
        self.set_free_bytes(0)

    def make_read_only(self) -> None:
        self.fail("create", errno.EROFS)
        self.fail("remove", errno.EROFS)
        self.fail("write", errno.EROFS)

    def set_free_bytes(self, free_bytes: int | None) -> None:
        """What `free_bytes` says, whatever is true; None: the truth."""
        self._free_bytes = free_bytes

    def lose(self, segment: int) -> None:
        """The file of a segment is gone: FileNotFoundError."""
        with self._changed:
            self._lost.add(segment)

    def flip(self, segment: int, offset: int, bit: int) -> None:
        """Reads of that byte find one bit of it flipped; the file stays as it is."""
        with self._changed:
            self._flips.add((segment, offset, bit))

    def tear_next_write(self, after_bytes: int) -> None:
        """The next write puts so many bytes on the disk, not all whole pages, and raises EIO."""
        with self._changed:
            self._torn_after_bytes = after_bytes

    def slow_down(self, *, bytes_per_s: float | None = None, latency_s: float = 0.0) -> None:
        """A disk that moves so many bytes in a second, for all threads together, and answers each call that late."""
        with self._changed:
            self._bytes_per_s, self._latency_s = bytes_per_s, latency_s
            self._busy_until_s = 0.0

    def hang(self, *calls: Call) -> None:
        """These calls, or all, do not come back before `heal`."""
        with self._changed:
            self._hung_calls = frozenset(calls or CALLS)

    def wait_until_hung(self, count: int = 1, *, timeout_s: float = 30.0) -> None:
        """Until so many calls hang at once."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._hung_count >= count, timeout_s), f"{self._hung_count} hang"

    def heal(self) -> None:
        with self._changed:
            self._faults.clear()
            self._flips.clear()
            self._lost.clear()
            self._torn_after_bytes, self._free_bytes = None, None
            self._bytes_per_s, self._latency_s = None, 0.0
            self._hung_calls = frozenset()
            self._changed.notify_all()

    # --- Device

    @property
    def is_direct(self) -> bool:
        return self.inner.is_direct

    def segments(self) -> dict[int, int]:
        with self._changed:
            return {index: size for index, size in self.inner.segments().items() if index not in self._lost}

    def create(self, index: int, size_bytes: int) -> None:
        self._enter("create", index)
        self.inner.create(index, size_bytes)

    def remove(self, index: int) -> None:
        self._enter("remove", index)
        self.inner.remove(index)

    def write(self, index: int, offset: int, buffers: Sequence[memoryview]) -> None:
        size_bytes = sum(buffer.nbytes for buffer in buffers)
        self._enter("write", index, range(offset, offset + size_bytes))
        with self._changed:
            torn_after_bytes, self._torn_after_bytes = self._torn_after_bytes, None
        if torn_after_bytes is not None:
            self._tear(index, offset, b"".join(buffers)[:torn_after_bytes])
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.inner.write(index, offset, buffers)
        with self._changed:
            self.written_bytes += size_bytes

    def read(self, index: int, offset: int, buffers: Sequence[memoryview]) -> None:
        size_bytes = sum(buffer.nbytes for buffer in buffers)
        self._enter("read", index, range(offset, offset + size_bytes))
        self.inner.read(index, offset, buffers)
        with self._changed:
            self.read_bytes += size_bytes
            flips = [(at, bit) for segment, at, bit in self._flips if segment == index]
        for buffer in buffers:
            for at, bit in flips:
                if offset <= at < offset + len(buffer):
                    buffer[at - offset] ^= 1 << bit
            offset += len(buffer)

    def sync(self, indexes: Iterable[int]) -> None:
        indexes = list(indexes)
        for index in indexes:
            self._enter("sync", index)
        self.inner.sync(indexes)

    def free_bytes(self) -> int:
        return self.inner.free_bytes() if self._free_bytes is None else self._free_bytes

    def used_bytes(self) -> int:
        return self.inner.used_bytes()

    def close(self) -> None:
        self.inner.close()

    def _enter(self, call: Call, index: int, span: range | None = None) -> None:
        with self._changed:
            self.calls[call] += 1
            if call in self._hung_calls:
                self._hung_count += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: call not in self._hung_calls)
                self._hung_count -= 1
            wait_s = self._wait_s(len(span) if span else 0)
        if wait_s > 0:
            self._sleep(wait_s)
        with self._changed:
            if index in self._lost and call != "create":
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"segment {index}")
            # All are asked, so that each counts what it meets.
            numbers = [fault.number for fault in self._faults if fault.strikes(call, index, span)]
        if numbers:
            raise OSError(numbers[0], os.strerror(numbers[0]))

    def _wait_s(self, size_bytes: int) -> float:
        """Until when the disk is busy with this and with what came before."""
        if self._bytes_per_s is None or not size_bytes:
            return self._latency_s
        now_s = self._clock()
        self._busy_until_s = max(self._busy_until_s, now_s) + size_bytes / self._bytes_per_s
        return self._latency_s + self._busy_until_s - now_s

    def _tear(self, index: int, offset: int, data: bytes) -> None:
        if not data:
            return
        pages = aligned_buffer(-(-len(data) // PAGE_BYTES) * PAGE_BYTES)
        self.inner.read(index, offset, [pages])
        pages[: len(data)] = data
        self.inner.write(index, offset, [pages])
