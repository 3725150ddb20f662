"""Segment files on a disk: blocking calls that move whole pages, and nothing that decides.

Bytes go past the page cache (O_DIRECT) where the file system has that, since a cache would take the memory that slabs
need and make writes several times slower. Calls that a signal interrupts are taken up again by Python (PEP 475).
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np

from kvstore_server.nvme.format import PAGE_BYTES

_SEGMENTS_FOLDER = "segments"
_SEGMENT_NAME = re.compile(r"(\d{8})\.seg", re.ASCII)
_PROBE_NAME = "probe.tmp"
_OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
_OWNER_ONLY = stat.S_IRUSR | stat.S_IWUSR
_FOLDER_OWNER_ONLY = stat.S_IRWXU
_BUFFERS_PER_CALL = 1024  # IOV_MAX
_IDLE_FILES_MAX = 256
"""Kept open; a quarter of the descriptors that a process may have by default."""
_STAT_BLOCK_BYTES = 512  # of st_blocks, whatever the file system's are

_Transfer: TypeAlias = Callable[[int, Sequence[memoryview], int], int]


class Device(Protocol):
    """Segments by their number. Threads may share it; every call blocks.

    What fails raises `OSError` with its errno. Offsets, and lengths and addresses of buffers, are whole pages of
    `PAGE_BYTES`: anything else is a bug of the caller. Nobody uses a segment while it is being created or removed.
    """

    @property
    def is_direct(self) -> bool:
        """Whether bytes go past the page cache."""
        ...

    def segments(self) -> dict[int, int]:
        """Those that are there and their sizes in bytes, as found."""
        ...

    def create(self, index: int, size_bytes: int) -> None:
        """Makes a segment of zeros that is all there and durable; FileExistsError where there is one.

        Leaves nothing behind when it fails.
        """
        ...

    def remove(self, index: int) -> None: ...

    def write(self, index: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Writes all of them, one after the other; when it fails, any part of it may be on the disk."""
        ...

    def read(self, index: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fills all of them, or raises: EIO when the segment ends before."""
        ...

    def sync(self, indexes: Iterable[int]) -> None:
        """What was written to these outlives a loss of power once this returns."""
        ...

    def free_bytes(self) -> int:
        """Of the file system, as a user without privileges may use it; quotas aside."""
        ...

    def used_bytes(self) -> int:
        """What the whole folder of the tier takes on the disk, as `du` counts it."""
        ...

    def close(self) -> None: ...


class FileDevice:
    """A `Device` of files in a folder, which are this user's alone. Nothing is locked: one owner is the caller's care.

    Makes the folder if only that is missing: without the one above it, a disk is probably not mounted. Files are
    opened when they are needed.
    """

    def __init__(self, folder: Path, *, may_be_direct: bool = True) -> None:
        self._folder = folder
        self._segments = folder / _SEGMENTS_FOLDER
        _make_folder(folder)
        _make_folder(self._segments)
        self._lock = threading.Lock()
        self._files: dict[tuple[int, int], _OpenFile] = {}  # by segment and access; longest unused first
        self._is_closed = False
        self.is_direct = may_be_direct and self._takes_direct()

    def segments(self) -> dict[int, int]:
        found = {}
        with os.scandir(self._segments) as entries:
            for entry in entries:
                name = _SEGMENT_NAME.fullmatch(entry.name)
                if name and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):  # removed meanwhile
                        found[int(name[1])] = entry.stat(follow_symlinks=False).st_size
        return found

    def create(self, index: int, size_bytes: int) -> None:
        _check_pages("size_bytes", size_bytes)
        path = self._path(index)
        # Without O_DIRECT: where the file system cannot preallocate, the C library writes single bytes instead.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS, _OWNER_ONLY)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            os.fsync(fd)
            _sync_folder(self._segments)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(fd)

    def remove(self, index: int) -> None:
        with self._lock:
            for key in [key for key in self._files if key[0] == index]:
                self._files.pop(key).retire()
        self._path(index).unlink()

    def write(self, index: int, offset: int, buffers: Sequence[memoryview]) -> None:
        size_bytes = _check_request(offset, buffers)
        with self._using(index, os.O_RDWR) as file:
            # A write past the end would make the file longer than what was set aside for it.
            if offset + size_bytes > file.size_bytes:
                raise OSError(errno.EIO, f"segment {index} ends at {file.size_bytes}, not {offset + size_bytes}")
            _move(os.pwritev, file.fd, buffers, offset)

    def read(self, index: int, offset: int, buffers: Sequence[memoryview]) -> None:
        size_bytes = _check_request(offset, buffers)
        with self._using(index, os.O_RDONLY) as file:
            _move(os.preadv, file.fd, buffers, offset)
            if not self.is_direct:
                os.posix_fadvise(file.fd, offset, size_bytes, os.POSIX_FADV_DONTNEED)

    def sync(self, indexes: Iterable[int]) -> None:
        for index in dict.fromkeys(indexes):
            with self._using(index, os.O_RDWR) as file:
                os.fdatasync(file.fd)
                if not self.is_direct:
                    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def free_bytes(self) -> int:
        about = os.statvfs(self._segments)
        return about.f_bavail * about.f_frsize

    def used_bytes(self) -> int:
        return _used_bytes(self._folder)

    def close(self) -> None:
        """Whatever is under way ends first; nothing may be asked afterwards."""
        with self._lock:
            self._is_closed = True
            for file in self._files.values():
                file.retire()
            self._files.clear()

    def _path(self, index: int) -> Path:
        assert 0 <= index < 10**8, f"segment index is {index}; allowed: 0 to 99999999"
        return self._segments / f"{index:08}.seg"

    @contextmanager
    def _using(self, index: int, access: int) -> Iterator[_OpenFile]:
        """The open file, which nobody closes meanwhile: its number could be another file's by then."""
        key = (index, access)
        with self._lock:
            assert not self._is_closed, f"segment {index} is used after the device was closed"
            file = self._files.pop(key, None) or _OpenFile(self._path(index), access | self._direct_flag)
            self._files[key] = file
            file.user_count += 1
            self._close_idle()
        try:
            yield file
        finally:
            with self._lock:
                file.user_count -= 1
                file.close_if_done()

    def _close_idle(self) -> None:
        surplus = len(self._files) - _IDLE_FILES_MAX
        if surplus > 0:
            for key in list(islice((key for key, file in self._files.items() if not file.user_count), surplus)):
                self._files.pop(key).retire()

    @property
    def _direct_flag(self) -> int:
        return os.O_DIRECT if self.is_direct else 0

    def _takes_direct(self) -> bool:
        """Tries it with a page, since file systems may take the flag and then refuse to move bytes.

        Raises `OSError` when that cannot be found out. A disk that is full, or read-only, is asked by reading.
        """
        probe = self._segments / _PROBE_NAME
        try:
            probe.unlink(missing_ok=True)
            return _moves_direct(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except OSError as error:
            segments = self.segments()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS) or not segments:
                raise
            return _moves_direct(self._path(min(segments)), os.O_RDONLY)
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)


def aligned_buffer(size_bytes: int) -> memoryview:
    """Writable memory that starts at a page, zero at first."""
    # Shared, as mmap makes it: pages of private memory could be copied by a fork while the disk writes to them.
    return memoryview(mmap.mmap(-1, size_bytes))


class _OpenFile:
    """Used under the device's lock, but for its descriptor."""

    __slots__ = ("fd", "is_retired", "size_bytes", "user_count")

    def __init__(self, path: Path, flags: int) -> None:
        self.fd = os.open(path, flags | _OPEN_FLAGS)
        if not flags & os.O_DIRECT:
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)  # what is read ahead would stay in the cache
        self.size_bytes = os.fstat(self.fd).st_size
        self.user_count = 0
        self.is_retired = False

    def retire(self) -> None:
        """Closes it as soon as nobody uses it."""
        self.is_retired = True
        self.close_if_done()

    def close_if_done(self) -> None:
        if self.is_retired and not self.user_count:
            os.close(self.fd)


def _move(transfer: _Transfer, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Goes on until all is moved. What ends within a page is taken up from the start of that page."""
    left = [buffer.cast("B") for buffer in buffers]
    while left:
        moved_bytes = transfer(fd, left[:_BUFFERS_PER_CALL], offset) // PAGE_BYTES * PAGE_BYTES
        if not moved_bytes:
            raise OSError(errno.EIO, f"{sum(map(len, left))} bytes are missing from {offset} on")
        offset += moved_bytes
        while left and moved_bytes >= len(left[0]):
            moved_bytes -= len(left.pop(0))
        if moved_bytes:
            left[0] = left[0][moved_bytes:]


def _check_request(offset: int, buffers: Sequence[memoryview]) -> int:
    """The bytes in all."""
    assert offset >= 0, f"offset is {offset}; allowed: 0 or more"
    assert offset % PAGE_BYTES == 0, f"offset is {offset}; allowed: multiples of {PAGE_BYTES}"
    assert buffers, "there are no buffers; allowed: one or more"
    for buffer in buffers:
        _check_pages("length of a buffer", buffer.nbytes)
        address = np.frombuffer(buffer, np.uint8).ctypes.data
        assert address % PAGE_BYTES == 0, f"address of a buffer is {address:#x}; allowed: multiples of {PAGE_BYTES}"
    return sum(buffer.nbytes for buffer in buffers)


def _check_pages(name: str, size_bytes: int) -> None:
    assert size_bytes > 0, f"{name} is {size_bytes}; allowed: {PAGE_BYTES} or more"
    assert size_bytes % PAGE_BYTES == 0, f"{name} is {size_bytes}; allowed: multiples of {PAGE_BYTES}"


def _moves_direct(path: Path, flags: int) -> bool:
    """Whether a page moves past the page cache: out and back again, or in only where `flags` allow no writing."""
    page = aligned_buffer(PAGE_BYTES)
    try:
        fd = os.open(path, flags | os.O_DIRECT | _OPEN_FLAGS, _OWNER_ONLY)
        try:
            if flags & os.O_RDWR:
                os.pwritev(fd, [page], 0)
            os.preadv(fd, [page], 0)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    return True


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=_FOLDER_OWNER_ONLY)
    except FileExistsError:
        if not folder.is_dir():
            raise
    else:
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _used_bytes(path: Path) -> int:
    """Of a file or folder and what is in it; links are not followed, and what goes meanwhile is not counted."""
    try:
        about = path.lstat()
        entries = list(path.iterdir()) if stat.S_ISDIR(about.st_mode) else []
    except FileNotFoundError:
        return 0
    return about.st_blocks * _STAT_BLOCK_BYTES + sum(map(_used_bytes, entries))
