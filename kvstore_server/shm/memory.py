"""The best memory for arenas that this machine gives: huge pages if there are any, and always a descriptor.

Copies run several times slower on 4 KiB pages once memory is fragmented, so the kinds are tried best first.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import stat
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from kvstore.errors import InvalidArgumentError
from kvstore_client.sizes import format_size

SMALL_PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20

_MFD_NOEXEC_SEAL = 0x8  # Linux 6.3; where the administrator demands it, memory without it is refused
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MLOCK_ONFAULT = 1
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_OWNER_ONLY = stat.S_IRUSR | stat.S_IWUSR

_HUGE_OPTIONS = ("huge=always", "huge=within_size", "huge=advise")
_HUGE_TMPFS = "a tmpfs that is mounted with huge=always, huge=within_size or huge=advise"
_HOW_TO_MOUNT = "mount -t tmpfs -o huge=always,size=65G,mode=0700,uid=USER tmpfs /mnt/kvstore"
_TMPFS_MAGIC = 0x01021994  # linux/magic.h

_libc = ctypes.CDLL(None, use_errno=True)  # its calls release the interpreter


class PageKind(StrEnum):
    HUGETLB = "hugetlb"
    """Huge pages that were set aside when the machine started, or by vm.nr_hugepages."""
    HUGE_TMPFS = "huge-tmpfs"
    """A file on a tmpfs mounted with `huge=`: the kernel gives huge pages as long as it has some."""
    PLAIN = "plain"
    """A memfd: small pages, unless /sys/kernel/mm/transparent_hugepage/shmem_enabled says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySource:
    """Where the memory of arenas comes from.

    Whoever holds a writable descriptor of memory that `is_sealed` can neither shrink nor grow it, only spoil what is
    in it, be it by holes, which read as zeros. A file on a tmpfs has no seals: who can write to it can cut it off
    under our feet, and the daemon would die of the next access.
    """

    kind: PageKind
    mount: Path | None = None

    def __str__(self) -> str:
        return str(self.kind) if self.mount is None else f"{self.kind} on {self.mount}"

    @property
    def is_sealed(self) -> bool:
        return self.kind is not PageKind.HUGE_TMPFS

    def create(self, size_bytes: int) -> int:
        """A descriptor of so many bytes of zeros, which no other user can open anew; raises `OSError`."""
        match self.kind:
            case PageKind.HUGETLB:
                if size_bytes % HUGE_PAGE_BYTES:
                    raise OSError(errno.EINVAL, f"{size_bytes} bytes are no multiple of 2 MiB; set memory.slab_size")
                return _create_memfd(size_bytes, flags=os.MFD_HUGETLB | os.MFD_HUGE_2MB)
            case PageKind.HUGE_TMPFS:
                assert self.mount is not None, "a tmpfs without its mount"
                return _create_file(self.mount, size_bytes)
            case PageKind.PLAIN:
                return _create_memfd(size_bytes, flags=0)

    def check_room(self, size_bytes: int) -> None:
        """Raises `OSError` when there is not so much of it; what is there may still be gone a moment later."""
        if self.kind is PageKind.HUGETLB:
            free_bytes = _free_huge_pages() * HUGE_PAGE_BYTES
            hint = f"; vm.nr_hugepages must be at least {-(-size_bytes // HUGE_PAGE_BYTES)} more than others use"
        elif self.mount is not None:
            about = os.statvfs(self.mount)
            free_bytes = about.f_bavail * about.f_frsize
            hint = "; mount it larger"
        else:
            return
        if free_bytes < size_bytes:
            wanted, free = (format_size(count) for count in (size_bytes, free_bytes))
            raise OSError(errno.ENOSPC, f"{wanted} are wanted and {free} free{hint}")


class Candidates(NamedTuple):
    sources: list[MemorySource]
    """What to try, best first."""
    left_out: list[str]
    """Why what is better than the last of them is not among them."""


def find_candidates(
    *,
    pages: PageKind | None,
    huge_mount: Path | None,
    must_be_sealed: bool,
    mountinfo: Path = Path("/proc/self/mountinfo"),
) -> Candidates:
    """The one kind that `pages` names, or all; then only what can be sealed if it must be.

    Raises `InvalidArgumentError` for a `huge_mount` that gives no huge pages, whether it is needed or not, and for
    `pages` that cannot be had.
    """
    if huge_mount is not None:
        _check_huge_mount(huge_mount, mountinfo)
    mounts = [huge_mount] if huge_mount is not None else find_huge_mounts(mountinfo)
    tmpfs = [MemorySource(kind=PageKind.HUGE_TMPFS, mount=mount) for mount in mounts]
    match pages:
        case PageKind.HUGE_TMPFS if must_be_sealed:
            allowed = "with tenants that may write: auto, hugetlb or plain, since a file on a tmpfs cannot be sealed"
            raise InvalidArgumentError.of("memory.pages", str(pages), allowed)
        case PageKind.HUGE_TMPFS if not tmpfs:
            allowed = f"that only where this user can write to {_HUGE_TMPFS}, which none is; as root: {_HOW_TO_MOUNT}"
            raise InvalidArgumentError.of("memory.pages", str(pages), allowed)
        case PageKind.HUGE_TMPFS:
            return Candidates(tmpfs, [])
        case PageKind():
            return Candidates([MemorySource(kind=pages)], [f"memory.pages is {pages}"])
    left_out = []
    if must_be_sealed:
        tmpfs, left_out = [], [f"{PageKind.HUGE_TMPFS}: not with tenants that may write, since it cannot be sealed"]
    elif not tmpfs:
        left_out = [f"{PageKind.HUGE_TMPFS}: none is mounted that this user can write to"]
    return Candidates([MemorySource(kind=PageKind.HUGETLB), *tmpfs, MemorySource(kind=PageKind.PLAIN)], left_out)


def find_huge_mounts(mountinfo: Path) -> list[Path]:
    """Writable tmpfs mounts that give huge pages."""
    return [
        mount.path
        for mount in _read_mounts(mountinfo)
        if mount.is_tmpfs and mount.gives_huge_pages and os.access(mount.path, os.W_OK | os.X_OK)
    ]


class _Mount(NamedTuple):
    device: str
    path: Path
    kind: str
    options: frozenset[str]

    @property
    def is_tmpfs(self) -> bool:
        return self.kind == "tmpfs"

    @property
    def gives_huge_pages(self) -> bool:
        return not self.options.isdisjoint(_HUGE_OPTIONS)


def _read_mounts(mountinfo: Path) -> list[_Mount]:
    """Format: proc_pid_mountinfo(5)."""
    try:
        lines = mountinfo.read_text().splitlines()
    except OSError:
        return []
    mounts = []
    for line in lines:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        fields = before.split(" ")
        path = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4]))
        mounts.append(_Mount(fields[2], path, kind, frozenset(options.rpartition(" ")[2].split(","))))
    return mounts


def _check_huge_mount(folder: Path, mountinfo: Path) -> None:
    allowed = f"a folder, which this user can write to, on {_HUGE_TMPFS}"
    try:
        number = folder.stat().st_dev
    except OSError as error:
        problem = error.strerror
    else:
        # By device, since a folder can be deep in a mount, behind a link, or below a newer mount.
        device = f"{os.major(number)}:{os.minor(number)}"
        mounts = [mount for mount in _read_mounts(mountinfo) if mount.device == device]
        if not any(mount.is_tmpfs for mount in mounts):
            problem = f"it is on {mounts[0].kind}" if mounts else "it is on no tmpfs"
        elif not any(mount.gives_huge_pages for mount in mounts):
            problem = f"it is on a tmpfs without huge=; as root: {_HOW_TO_MOUNT}"
        elif not folder.is_dir():
            problem = "it is a file"
        elif not os.access(folder, os.W_OK | os.X_OK):
            problem = "this user cannot write to it"
        else:
            return
    raise InvalidArgumentError.of("memory.huge_mount", str(folder), f"{allowed}; {problem}")


def advise_huge(address: int, size_bytes: int) -> None:
    """Asks for huge pages where they are given on request; a kernel that knows none says no, and that is all."""
    _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), _MADV_HUGEPAGE)


def populate(fd: int, address: int, *, offset_bytes: int, size_bytes: int) -> None:
    """Faults pages in that were never written to; raises `OSError` when memory has run out, rather than die of it.

    Blocks for about a second per GiB and releases the interpreter.
    """
    try:
        _check(_libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), _MADV_POPULATE_WRITE))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # An older kernel: take the pages first, since that can fail, and then touch them, which cannot any more.
        os.posix_fallocate(fd, offset_bytes, size_bytes)
        ctypes.memset(address, 0, size_bytes)


def lock(address: int, size_bytes: int) -> None:
    """Keeps pages from being swapped out, from when each is faulted in; raises `OSError` when that is not allowed."""
    _check(_libc.mlock2(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), _MLOCK_ONFAULT))


def give_back(fd: int, size_bytes: int) -> None:
    """Frees all pages at once, even if other processes still map them; they see zeros."""
    flags = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
    _check(_libc.fallocate(fd, flags, ctypes.c_int64(0), ctypes.c_int64(size_bytes)))


def reopen_read_only(fd: int) -> int:
    """A new descriptor of the same memory that can neither be written through nor mapped writable."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def mapped_page_bytes(address: int, smaps: Path = Path("/proc/self/smaps")) -> int:
    """The page size that a mapping, of which some is faulted in, really has: 2 MiB if most of that is in huge pages."""
    kib: dict[str, int] = {}
    is_inside = False
    for line in smaps.read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in line.split(" ", 1)[0]:
            if is_inside:
                break
            is_inside = line.startswith((f"{address:x}-", f"{address:08x}-"))
        elif is_inside and value.strip().endswith("kB"):
            kib[name] = int(value.split()[0])
    huge_kib = kib.get("ShmemPmdMapped", 0) + kib.get("FilePmdMapped", 0)
    if kib.get("KernelPageSize", 4) >= HUGE_PAGE_BYTES >> 10 or (huge_kib and 2 * huge_kib >= kib.get("Rss", 0)):
        return HUGE_PAGE_BYTES
    return kib.get("KernelPageSize", SMALL_PAGE_BYTES >> 10) << 10


def _create_memfd(size_bytes: int, *, flags: int) -> int:
    flags |= os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create("kvstore-arena", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create("kvstore-arena", flags)
    try:
        os.fchmod(fd, _OWNER_ONLY)
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


def _create_file(folder: Path, size_bytes: int) -> int:
    fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, _OWNER_ONLY)
    try:
        _check_tmpfs(fd)
        os.ftruncate(fd, size_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def _check_tmpfs(fd: int) -> None:
    """Raises `OSError` for a file on a disk, which a mount that has gone since may have hidden."""
    about = (ctypes.c_long * 32)()  # struct statfs has 120 bytes, and begins with the type
    _check(_libc.fstatfs(fd, about))
    if about[0] != _TMPFS_MAGIC:
        raise OSError(errno.EINVAL, "there is no tmpfs any more")


def _free_huge_pages() -> int:
    folder = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
    try:
        return int((folder / "free_hugepages").read_text()) - int((folder / "resv_hugepages").read_text())
    except OSError:
        return 0


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
