"""Which memory arenas are made of, and what holders of its descriptors can and cannot do."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import InvalidArgumentError
from kvstore_server.shm import memory
from kvstore_server.shm.arenas import Arenas
from kvstore_server.shm.memory import HUGE_PAGE_BYTES, MemorySource, PageKind, find_candidates, find_huge_mounts

SIZE_BYTES = 2 * HUGE_PAGE_BYTES
MOUNTS = find_huge_mounts(Path("/proc/self/mountinfo"))
KINDS = [
    MemorySource(kind=PageKind.HUGETLB),
    MemorySource(kind=PageKind.HUGE_TMPFS, mount=MOUNTS[0] if MOUNTS else Path("/nowhere")),
    MemorySource(kind=PageKind.PLAIN),
]


@pytest.fixture(params=KINDS, ids=lambda source: source.kind)
def source(request: pytest.FixtureRequest) -> MemorySource:
    source: MemorySource = request.param
    try:
        source.check_room(SIZE_BYTES)
    except OSError as error:
        pytest.skip(f"no {source.kind} here: {error.strerror}")
    return source


@pytest.fixture
def fd(source: MemorySource) -> Iterator[int]:
    fd = source.create(SIZE_BYTES)
    yield fd
    os.close(fd)


def address_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


# --- what there is


def mountinfo_of(folder: Path, *, kind: str, options: str) -> Path:
    """A table in which the file system of `folder` is what the test says."""
    number = folder.stat().st_dev
    table = folder.parent / f"{folder.name}.mountinfo"
    table.write_text(f"1 2 {os.major(number)}:{os.minor(number)} / /somewhere rw - {kind} {kind} rw,{options}\n")
    return table


@pytest.fixture
def huge(tmp_path: Path) -> tuple[Path, Path]:
    """A folder and a table of mounts that calls it one with huge pages."""
    folder = tmp_path / "huge"
    folder.mkdir()
    return folder, mountinfo_of(folder, kind="tmpfs", options="size=1k,huge=always")


def test_the_kinds_are_tried_best_first(huge: tuple[Path, Path]) -> None:
    folder, mountinfo = huge
    sources, left_out = find_candidates(pages=None, huge_mount=folder, must_be_sealed=False, mountinfo=mountinfo)
    assert [source.kind for source in sources] == [PageKind.HUGETLB, PageKind.HUGE_TMPFS, PageKind.PLAIN]
    assert sources[1].mount == folder
    assert left_out == []


def test_a_file_that_others_could_cut_off_is_not_taken_when_others_write(huge: tuple[Path, Path]) -> None:
    folder, mountinfo = huge
    sources, left_out = find_candidates(pages=None, huge_mount=folder, must_be_sealed=True, mountinfo=mountinfo)
    assert [source.kind for source in sources] == [PageKind.HUGETLB, PageKind.PLAIN]
    assert left_out == ["huge-tmpfs: not with tenants that may write, since it cannot be sealed"]
    with pytest.raises(
        InvalidArgumentError, match=r"memory\.pages is 'huge-tmpfs'; allowed: with tenants that may write"
    ):
        find_candidates(pages=PageKind.HUGE_TMPFS, huge_mount=folder, must_be_sealed=True, mountinfo=mountinfo)


@pytest.mark.parametrize("kind", PageKind)
def test_a_kind_that_was_asked_for_is_the_only_one(kind: PageKind, huge: tuple[Path, Path]) -> None:
    folder, mountinfo = huge
    sources, _ = find_candidates(pages=kind, huge_mount=folder, must_be_sealed=False, mountinfo=mountinfo)
    assert [source.kind for source in sources] == [kind]


def test_where_no_tmpfs_gives_huge_pages_it_is_said_with_how_to_mount_one(tmp_path: Path) -> None:
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text("1 2 0:9 / /dev/shm rw - tmpfs tmpfs rw,size=1k\n")
    sources, left_out = find_candidates(pages=None, huge_mount=None, must_be_sealed=False, mountinfo=mountinfo)
    assert [source.kind for source in sources] == [PageKind.HUGETLB, PageKind.PLAIN]
    assert left_out == ["huge-tmpfs: none is mounted that this user can write to"]
    with pytest.raises(InvalidArgumentError, match=r"memory\.pages is 'huge-tmpfs'.*mount -t tmpfs -o huge=always"):
        find_candidates(pages=PageKind.HUGE_TMPFS, huge_mount=None, must_be_sealed=False, mountinfo=mountinfo)


@pytest.mark.parametrize("pages", [None, *PageKind])
@pytest.mark.parametrize(
    ("kind", "options", "problem"),
    [
        ("ext4", "huge=always", "it is on ext4"),
        ("tmpfs", "size=1k", "it is on a tmpfs without huge=; as root: mount -t tmpfs"),
        ("tmpfs", "huge=never", "it is on a tmpfs without huge="),
    ],
)
def test_a_huge_mount_without_huge_pages_is_refused_whatever_pages_there_are_to_be(
    pages: PageKind | None, kind: str, options: str, problem: str, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    mountinfo = mountinfo_of(folder, kind=kind, options=options)
    with pytest.raises(InvalidArgumentError) as refused:
        find_candidates(pages=pages, huge_mount=folder, must_be_sealed=False, mountinfo=mountinfo)
    assert str(refused.value).startswith(f"memory.huge_mount is '{folder}'; allowed: a folder, ")
    assert problem in str(refused.value)


def test_a_huge_mount_that_is_absent_or_a_file_is_refused(huge: tuple[Path, Path]) -> None:
    folder, mountinfo = huge
    (folder / "file").touch()
    for name, problem in (("absent", "No such file or directory"), ("file", "it is a file")):
        with pytest.raises(InvalidArgumentError, match=problem):
            find_candidates(pages=None, huge_mount=folder / name, must_be_sealed=False, mountinfo=mountinfo)


def test_no_arena_is_made_on_a_file_system_that_is_no_tmpfs() -> None:
    """Somebody can unmount the tmpfs while the daemon runs, and the folder below it is on a disk."""
    with pytest.raises(OSError, match=r"there is no tmpfs any more|not supported"):
        MemorySource(kind=PageKind.HUGE_TMPFS, mount=Path(__file__).parent).create(4096)


def test_huge_mounts_are_found_by_their_options(tmp_path: Path) -> None:
    huge, spaced = tmp_path / "huge", tmp_path / "with space"
    huge.mkdir()
    spaced.mkdir()
    shown = str(spaced).replace(" ", "\\040")
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(
        f"24 27 0:6 / {tmp_path} rw,relatime - tmpfs tmpfs rw,size=1k\n"
        f"25 27 0:7 / {huge} rw,relatime shared:1 - tmpfs tmpfs rw,huge=always\n"
        f"26 27 0:8 / {shown} rw - tmpfs tmpfs rw,huge=within_size,size=1k\n"
        f"27 27 0:9 / {tmp_path} rw - tmpfs tmpfs rw,huge=never\n"
        f"28 27 0:9 / {tmp_path} rw - ext4 /dev/sda rw,huge=always\n"
        f"29 27 0:9 / {tmp_path}/gone rw - tmpfs tmpfs rw,huge=always\n"
    )
    assert find_huge_mounts(mountinfo) == [huge, spaced]
    assert find_huge_mounts(tmp_path / "absent") == []


def test_forced_memory_that_is_not_there_is_refused_with_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"no memory for 1\.0PiB .*hugetlb: 1\.0PiB are wanted and .*vm\.nr_hugepages"
    ):
        Arenas(sources=[MemorySource(kind=PageKind.HUGETLB)], arena_count=1, arena_bytes=1 << 50, slab_bytes=1 << 50)
    with pytest.raises(InvalidArgumentError, match=rf"huge-tmpfs on {tmp_path}/absent: No such .*memory\.pages"):
        Arenas(
            sources=[MemorySource(kind=PageKind.HUGE_TMPFS, mount=tmp_path / "absent")],
            arena_count=1,
            arena_bytes=4096,
            slab_bytes=4096,
        )


def test_a_slab_that_is_not_made_of_whole_huge_pages_is_named(source: MemorySource) -> None:
    if source.kind is not PageKind.HUGETLB:
        pytest.skip("other memory comes in pages of 4 KiB")
    with pytest.raises(InvalidArgumentError, match=r"12288 bytes are no multiple of 2 MiB; set memory\.slab_size"):
        Arenas(sources=[source], arena_count=1, arena_bytes=12288, slab_bytes=12288)


def test_the_next_kind_is_taken_when_the_best_does_not_suffice() -> None:
    sources = [MemorySource(kind=PageKind.HUGETLB), MemorySource(kind=PageKind.PLAIN)]
    arenas = Arenas(sources=sources, arena_count=1, arena_bytes=3 * 4096, slab_bytes=4096)
    assert arenas.kind is PageKind.PLAIN
    assert [reason.partition(":")[0] for reason in arenas.passed_over] == ["hugetlb"]
    arenas.close()


# --- what it is like


def test_fresh_memory_is_zero_and_says_how_large_its_pages_are(source: MemorySource, fd: int) -> None:
    with mmap.mmap(fd, SIZE_BYTES) as mapping:
        address = address_of(mapping)
        memory.populate(fd, address, offset_bytes=0, size_bytes=SIZE_BYTES)
        assert not any(mapping[:4096])
        page_bytes = memory.mapped_page_bytes(address)
        assert page_bytes in (4096, HUGE_PAGE_BYTES)
        assert page_bytes == HUGE_PAGE_BYTES or source.kind is not PageKind.HUGETLB


def test_memory_given_back_is_zero_for_whoever_still_maps_it(fd: int) -> None:
    with mmap.mmap(fd, SIZE_BYTES) as mapping:
        mapping[:5] = b"bytes"
        memory.give_back(fd, SIZE_BYTES)
        assert os.stat(fd).st_blocks == 0
        assert mapping[:5] == bytes(5)


def test_memory_that_has_run_out_is_an_error_and_not_a_signal() -> None:
    """A tmpfs or a pool of huge pages that others have filled: touching it would end the daemon with SIGBUS."""
    fd = MemorySource(kind=PageKind.HUGE_TMPFS, mount=Path("/dev/shm")).create(8192)
    try:
        with mmap.mmap(fd, 8192) as mapping:
            os.ftruncate(fd, 4096)
            with pytest.raises(OSError, match=os.strerror(errno.EFAULT)):
                memory.populate(fd, address_of(mapping), offset_bytes=0, size_bytes=8192)
    finally:
        os.close(fd)


# --- who may do what with it


def test_a_read_only_descriptor_can_neither_be_mapped_writable_nor_written_nor_truncated(fd: int) -> None:
    read_only = memory.reopen_read_only(fd)
    try:
        with mmap.mmap(read_only, SIZE_BYTES, prot=mmap.PROT_READ) as mapping:
            assert mapping[:1] == b"\0"
        with pytest.raises(PermissionError):
            mmap.mmap(read_only, SIZE_BYTES, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(read_only, b"x")
        with pytest.raises(OSError, match=f"{os.strerror(errno.EINVAL)}|{os.strerror(errno.EBADF)}"):
            os.ftruncate(read_only, 0)
    finally:
        os.close(read_only)


def test_sealed_memory_cannot_be_taken_away_by_who_may_write(source: MemorySource, fd: int) -> None:
    if not source.is_sealed:
        pytest.skip("a file has no seals; other users get no writable descriptor of it")
    for size_bytes in (0, SIZE_BYTES // 2, 2 * SIZE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size_bytes)


def test_another_user_cannot_open_a_descriptor_again_for_writing(fd: int) -> None:
    """The kernel lets whoever holds a descriptor open its file anew through /proc, by the file's own mode."""
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    read_only = memory.reopen_read_only(fd)
    code = (
        "import os\nos.setgroups([])\nos.setgid(65534)\nos.setuid(65534)\n"
        f"try:\n    os.open('/proc/self/fd/{read_only}', os.O_RDWR)\n"
        "except PermissionError:\n    print('refused')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], pass_fds=[read_only], capture_output=True, text=True, check=False
    )
    os.close(read_only)
    assert result.stdout == "refused\n", result.stderr


def test_memory_that_may_not_be_locked_is_refused_with_what_to_raise() -> None:
    """In a process of its own, which gives up the right to lock more than it may."""
    code = (
        "import os, resource\n"
        "from kvstore_server.shm.arenas import Arenas\n"
        "from kvstore_server.shm.memory import MemorySource, PageKind\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "os.geteuid() == 0 and (os.setgid(65534), os.setuid(65534))\n"
        "Arenas(sources=[MemorySource(kind=PageKind.PLAIN)], arena_count=1, arena_bytes=1 << 20,\n"
        "       slab_bytes=1 << 20, is_locked=True)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "raise RLIMIT_MEMLOCK" in result.stderr, result.stderr
