"""The limit of `kvstore bench nvme`: the same transfers by the same threads, with nothing around them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from kvstore.errors import UnavailableError
from kvstore_server.nvme.device import FileDevice
from kvstore_server.nvme.format import PAGE_BYTES

_BATCHES_AT_ONCE = 2
"""As the tier does it: while one batch is made durable, the next is written."""
_FIRST_PASS_THREADS = 4
_FIRST_PASS_BYTES = 4 << 20

_Transfer = Callable[[int, Sequence[memoryview], int], int]


class _Place(NamedTuple):
    fd: int
    offset: int


class _Job(NamedTuple):
    place: _Place
    memory: memoryview


class PlainDisk:
    """Preallocated files, `pwritev` and `preadv` of one block each, and an `fdatasync` per batch.

    Past the page cache where the tier's bytes go past it too; else what was moved is dropped from it at once.
    """

    def __init__(
        self,
        files: Sequence[Path],
        *,
        memory: Sequence[memoryview],
        batch_count: int,
        thread_count: int,
        is_direct: bool,
    ) -> None:
        """Moves blocks from and to `memory`, which starts at pages and is one block each."""
        self._memory = memory
        self._batch_count = batch_count
        self._is_direct = is_direct
        self._random = random.Random(0)
        self._written_count = 0
        with ExitStack() as stack:
            self._places = [
                _Place(fd, offset) for fd in self._open(files, stack) for offset in self._offsets(os.fstat(fd).st_size)
            ]
            self._threads = stack.enter_context(ThreadPoolExecutor(thread_count, thread_name_prefix="plain-disk"))
            self._batches = stack.enter_context(ThreadPoolExecutor(_BATCHES_AT_ONCE, thread_name_prefix="plain-batch"))
            self._parts = stack.pop_all()

    def __enter__(self) -> PlainDisk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._parts.close()

    def write(self, block_count: int) -> float:
        """Seconds to write so many blocks, in batches, until the last one is durable."""
        first = self._written_count
        jobs = self._jobs([number % len(self._places) for number in range(first, first + block_count)])
        self._written_count += block_count
        batches = [jobs[start : start + self._batch_count] for start in range(0, block_count, self._batch_count)]
        started_s = time.perf_counter()
        list(self._batches.map(self._write_batch, batches))
        return time.perf_counter() - started_s

    def read(self, block_count: int) -> float:
        """Seconds to read so many of the blocks that `write` has written."""
        known_count = min(self._written_count, len(self._places))
        jobs = self._jobs(self._random.sample(range(known_count), block_count))
        started_s = time.perf_counter()
        self._move(os.preadv, jobs)
        elapsed_s = time.perf_counter() - started_s
        self._forget(jobs)
        return elapsed_s

    # --- inside

    def _open(self, files: Sequence[Path], stack: ExitStack) -> list[int]:
        fds = []
        for path in files:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if self._is_direct else 0))
            stack.callback(os.close, fd)
            fds.append(fd)
            if not self._is_direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return fds

    def _offsets(self, file_bytes: int) -> range:
        block_bytes = len(self._memory[0])
        return range(0, file_bytes - block_bytes + 1, block_bytes)

    def _jobs(self, numbers: Sequence[int]) -> list[_Job]:
        return [
            _Job(self._places[number], self._memory[position % len(self._memory)])
            for position, number in enumerate(numbers)
        ]

    def _write_batch(self, jobs: Sequence[_Job]) -> None:
        self._move(os.pwritev, jobs)
        for fd in {job.place.fd for job in jobs}:
            os.fdatasync(fd)
        self._forget(jobs)

    def _move(self, transfer: _Transfer, jobs: Sequence[_Job]) -> None:
        def move(job: _Job) -> None:
            moved_bytes = transfer(job.place.fd, [job.memory], job.place.offset)
            if moved_bytes != len(job.memory):
                raise UnavailableError(f"the disk moved {moved_bytes} of {len(job.memory)} bytes at once")

        list(self._threads.map(move, jobs))

    def _forget(self, jobs: Sequence[_Job]) -> None:
        if not self._is_direct:
            for fd in {job.place.fd for job in jobs}:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def make_files(folder: Path, *, file_count: int, file_bytes: int, source: memoryview) -> tuple[list[Path], bool]:
    """Segments that have been written once, and whether they can be reached past the page cache.

    Files that were only set aside are several times slower on their first pass. `source` starts at a page.
    """
    piece = source[: min(len(source), _FIRST_PASS_BYTES) // PAGE_BYTES * PAGE_BYTES]
    device = FileDevice(folder)

    def make(index: int) -> None:
        device.create(index, file_bytes)
        for offset in range(0, file_bytes, len(piece)):
            device.write(index, offset, [piece[: file_bytes - offset]])
        device.sync([index])

    try:
        with ThreadPoolExecutor(_FIRST_PASS_THREADS, thread_name_prefix="first-pass") as threads:
            list(threads.map(make, range(file_count)))
        return sorted((folder / "segments").glob("*.seg")), device.is_direct
    finally:
        device.close()
