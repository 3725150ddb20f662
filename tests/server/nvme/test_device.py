"""Segment files, as they are made, moved and counted; and the device that fails on purpose, which later tests use."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvstore_server.nvme import device as device_module
from kvstore_server.nvme.device import Device, FileDevice, aligned_buffer
from kvstore_server.nvme.format import PAGE_BYTES
from tests.server.nvme.faulty import FaultyDevice

SEGMENT_BYTES = 64 * PAGE_BYTES


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileDevice]:
    device = FileDevice(tmp_path / "tier", may_be_direct=request.param)
    if request.param and not device.is_direct:
        pytest.skip("the file system of temporary files takes no O_DIRECT")
    yield device
    device.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    mount = tmp_path / "mount"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount], check=False, capture_output=True)
    if made.returncode:
        pytest.skip(f"this user cannot mount: {made.stderr.decode().strip()}")
    yield mount
    subprocess.run(["umount", mount], check=True)


def pages_of(count: int, *, seed: int) -> memoryview:
    pages = aligned_buffer(count * PAGE_BYTES)
    pages[:] = random.Random(seed).randbytes(len(pages))
    return pages


def path_of(device: FileDevice, index: int) -> Path:
    return device._segments / f"{index:08}.seg"


def errno_of(call: Callable[[], None]) -> int | None:
    try:
        call()
    except OSError as error:
        return error.errno
    return None


# --- writing and reading


def test_what_was_written_is_read(device: FileDevice) -> None:
    device.create(0, SEGMENT_BYTES)
    head, rest = pages_of(1, seed=1), pages_of(6, seed=2)
    device.write(0, 5 * PAGE_BYTES, [head, rest])
    device.sync([0])
    there, rest_there = aligned_buffer(2 * PAGE_BYTES), aligned_buffer(5 * PAGE_BYTES)
    device.read(0, 5 * PAGE_BYTES, [there, rest_there])
    assert bytes(there) + bytes(rest_there) == bytes(head) + bytes(rest)
    assert path_of(device, 0).read_bytes()[5 * PAGE_BYTES : 12 * PAGE_BYTES] == bytes(head) + bytes(rest)


def test_what_was_synced_is_read_by_the_next_device(device: FileDevice, tmp_path: Path) -> None:
    device.create(3, SEGMENT_BYTES)
    page = pages_of(1, seed=3)
    device.write(3, 0, [page])
    device.sync([3, 3])
    device.close()
    again = FileDevice(tmp_path / "tier", may_be_direct=device.is_direct)
    there = aligned_buffer(PAGE_BYTES)
    again.read(3, 0, [there])
    assert there == page
    again.close()


def test_read_only_memory_can_be_written(device: FileDevice) -> None:
    device.create(0, SEGMENT_BYTES)
    page = pages_of(1, seed=4)
    device.write(0, 0, [page.toreadonly()])
    there = aligned_buffer(PAGE_BYTES)
    device.read(0, 0, [there])
    assert there == page


def test_more_buffers_than_one_call_takes_are_all_moved(device: FileDevice) -> None:
    count = 1_500
    device.create(0, count * PAGE_BYTES)
    source, target = pages_of(count, seed=5), aligned_buffer(count * PAGE_BYTES)
    split = [slice(at, at + PAGE_BYTES) for at in range(0, len(source), PAGE_BYTES)]
    device.write(0, 0, [source[part] for part in split])
    device.read(0, 0, [target[part] for part in split])
    assert target == source


@pytest.mark.parametrize("call_bytes", [3 * PAGE_BYTES, 3 * PAGE_BYTES + 100])
def test_transfers_that_stop_early_go_on(device: FileDevice, monkeypatch: pytest.MonkeyPatch, call_bytes: int) -> None:
    """As the kernel stops them at 2 GiB, at a signal, or at a sector."""
    device.create(0, SEGMENT_BYTES)
    source = pages_of(16, seed=6)
    target = aligned_buffer(len(source))
    call_count = 0

    def at_most(transfer: Callable[[int, Sequence[memoryview], int], int]) -> Callable[..., int]:
        def limited(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            nonlocal call_count
            call_count += 1
            moved_bytes = transfer(fd, [buffers[0][: 4 * PAGE_BYTES]], offset)
            return min(moved_bytes, call_bytes)

        return limited

    monkeypatch.setattr(os, "pwritev", at_most(os.pwritev))
    monkeypatch.setattr(os, "preadv", at_most(os.preadv))
    device.write(0, PAGE_BYTES, [source[: 7 * PAGE_BYTES], source[7 * PAGE_BYTES :]])
    device.read(0, PAGE_BYTES, [target[: 2 * PAGE_BYTES], target[2 * PAGE_BYTES :]])
    assert target == source
    assert call_count > 10


def test_a_read_past_the_end_fails(device: FileDevice) -> None:
    device.create(0, SEGMENT_BYTES)
    assert errno_of(lambda: device.read(0, SEGMENT_BYTES - PAGE_BYTES, [aligned_buffer(2 * PAGE_BYTES)])) == errno.EIO


def test_a_read_of_a_segment_that_was_cut_off_in_a_page_fails(device: FileDevice) -> None:
    device.create(0, SEGMENT_BYTES)
    os.truncate(path_of(device, 0), PAGE_BYTES + 100)
    device.read(0, 0, [aligned_buffer(PAGE_BYTES)])
    assert errno_of(lambda: device.read(0, 0, [aligned_buffer(2 * PAGE_BYTES)])) == errno.EIO


def test_a_write_past_the_end_fails_and_makes_the_segment_no_longer(device: FileDevice) -> None:
    device.create(0, SEGMENT_BYTES)
    assert errno_of(lambda: device.write(0, SEGMENT_BYTES - PAGE_BYTES, [pages_of(2, seed=7)])) == errno.EIO
    assert device.segments() == {0: SEGMENT_BYTES}


def test_what_is_no_whole_page_is_a_bug_whether_direct_or_not(device: FileDevice) -> None:
    device.create(0, SEGMENT_BYTES)
    pages = aligned_buffer(4 * PAGE_BYTES)
    for call in (device.write, device.read):
        with pytest.raises(AssertionError, match="offset is 512"):
            call(0, 512, [pages])
        with pytest.raises(AssertionError, match="offset is -4096"):
            call(0, -PAGE_BYTES, [pages])
        with pytest.raises(AssertionError, match="length of a buffer is 4097"):
            call(0, 0, [pages[: PAGE_BYTES + 1]])
        with pytest.raises(AssertionError, match="length of a buffer is 0"):
            call(0, 0, [pages[:0]])
        with pytest.raises(AssertionError, match="address of a buffer is 0x"):
            call(0, 0, [pages[64 : 64 + PAGE_BYTES]])
        with pytest.raises(AssertionError, match="no buffers"):
            call(0, 0, [])
    with pytest.raises(AssertionError, match="size_bytes is 5000"):
        device.create(1, 5_000)
    with pytest.raises(AssertionError, match="segment index is 100000000"):
        device.create(10**8, PAGE_BYTES)


def test_an_aligned_buffer_starts_at_a_page_and_is_zero() -> None:
    for size_bytes in (1, PAGE_BYTES, 5 * PAGE_BYTES):
        buffer = aligned_buffer(size_bytes)
        assert not buffer.readonly
        assert bytes(buffer) == bytes(size_bytes)
        assert np.frombuffer(buffer, np.uint8).ctypes.data % PAGE_BYTES == 0


def test_threads_share_a_device(device: FileDevice) -> None:
    device.create(0, SEGMENT_BYTES)
    device.create(1, SEGMENT_BYTES)

    def write_and_read(number: int) -> bool:
        page, there = pages_of(1, seed=number), aligned_buffer(PAGE_BYTES)
        index, offset = number % 2, number // 2 * PAGE_BYTES
        device.write(index, offset, [page])
        device.sync([index])
        device.read(index, offset, [there])
        return there == page

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(write_and_read, range(128)))


def test_what_was_synced_or_read_takes_no_page_cache(device: FileDevice) -> None:
    device.create(0, SEGMENT_BYTES)
    pages = pages_of(16, seed=15)
    device.write(0, 0, [pages])
    device.sync([0])
    assert cached_pages(path_of(device, 0)) == 0
    device.read(0, 0, [pages])
    assert cached_pages(path_of(device, 0)) == 0


def cached_pages(path: Path) -> int:
    kind = subprocess.run(["stat", "-f", "-c", "%T", path], check=True, capture_output=True, text=True).stdout.strip()
    if kind == "tmpfs":
        pytest.skip("temporary files are in memory here")
    size_bytes = path.stat().st_size
    states = (ctypes.c_ubyte * (size_bytes // PAGE_BYTES))()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size_bytes) as mapping:
        libc = ctypes.CDLL(None, use_errno=True)
        start = ctypes.c_char.from_buffer(mapping)
        failed = libc.mincore(ctypes.byref(start), ctypes.c_size_t(size_bytes), states)
        del start
        assert not failed, os.strerror(ctypes.get_errno())
    return sum(state & 1 for state in states)


def test_each_segment_is_synced_once(device: FileDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fdatasync

    def noted(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", noted)
    for index in range(3):
        device.create(index, SEGMENT_BYTES)
    device.sync([2, 0, 2])
    assert synced == ["00000002.seg", "00000000.seg"]


# --- files


def test_a_segment_is_there_in_full_from_the_start_and_reads_as_zeros(device: FileDevice) -> None:
    before_bytes = device.used_bytes()
    device.create(7, SEGMENT_BYTES)
    assert device.segments() == {7: SEGMENT_BYTES}
    assert device.used_bytes() - before_bytes >= SEGMENT_BYTES
    there = aligned_buffer(SEGMENT_BYTES)
    there[:] = b"\1" * SEGMENT_BYTES
    device.read(7, 0, [there])
    assert bytes(there) == bytes(SEGMENT_BYTES)


def test_files_and_folders_are_their_owners_alone(device: FileDevice, tmp_path: Path) -> None:
    device.create(0, SEGMENT_BYTES)
    for path in (tmp_path / "tier", tmp_path / "tier" / "segments"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(path_of(device, 0).stat().st_mode) == 0o600


def test_nothing_is_left_of_the_trial_at_the_start(device: FileDevice, tmp_path: Path) -> None:
    (tmp_path / "tier" / "segments" / "probe.tmp").write_bytes(b"left when a daemon was killed")
    again = FileDevice(tmp_path / "tier")
    again.close()
    assert list((tmp_path / "tier" / "segments").iterdir()) == []


def test_a_folder_whose_parent_is_missing_is_not_made(tmp_path: Path) -> None:
    """The disk that should be mounted there is not: the root file system must not be filled instead."""
    with pytest.raises(FileNotFoundError):
        FileDevice(tmp_path / "unmounted" / "tier")
    assert list(tmp_path.iterdir()) == []


def test_a_segment_that_is_there_is_not_made_again(device: FileDevice) -> None:
    device.create(0, SEGMENT_BYTES)
    page = pages_of(1, seed=8)
    device.write(0, 0, [page])
    with pytest.raises(FileExistsError):
        device.create(0, PAGE_BYTES)
    there = aligned_buffer(PAGE_BYTES)
    device.read(0, 0, [there])
    assert there == page


def test_a_segment_that_cannot_be_made_leaves_nothing_behind(device: FileDevice, tmp_path: Path) -> None:
    assert errno_of(lambda: device.create(0, 1 << 60)) in (errno.EFBIG, errno.ENOSPC)
    assert list((tmp_path / "tier" / "segments").iterdir()) == []


def test_a_segment_whose_folder_cannot_be_synced_leaves_nothing_behind(
    device: FileDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    assert errno_of(lambda: device.create(0, SEGMENT_BYTES)) == errno.EIO
    assert list((tmp_path / "tier" / "segments").iterdir()) == []


def test_a_segment_is_removed_and_made_anew(device: FileDevice) -> None:
    device.create(0, SEGMENT_BYTES)
    device.write(0, 0, [pages_of(1, seed=9)])
    before_bytes = device.used_bytes()
    device.remove(0)
    assert device.segments() == {}
    assert before_bytes - device.used_bytes() >= SEGMENT_BYTES
    there = aligned_buffer(PAGE_BYTES)
    with pytest.raises(FileNotFoundError):
        device.read(0, 0, [there])
    with pytest.raises(FileNotFoundError):
        device.remove(0)
    device.create(0, SEGMENT_BYTES)
    there[:] = b"\1" * PAGE_BYTES
    device.read(0, 0, [there])
    assert bytes(there) == bytes(PAGE_BYTES)


def test_a_removed_segment_keeps_no_room_through_a_descriptor(device: FileDevice) -> None:
    device.create(0, SEGMENT_BYTES)
    page = pages_of(1, seed=9)
    device.write(0, 0, [page])
    device.read(0, 0, [page])
    device.remove(0)
    assert not [link for link in open_files() if "00000000.seg" in link]


def open_files() -> list[str]:
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            found.append(str(path.readlink()))
    return found


def test_more_segments_than_are_kept_open_can_be_used(device: FileDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "_IDLE_FILES_MAX", 4)
    for index in range(12):
        device.create(index, PAGE_BYTES)
        device.write(index, 0, [pages_of(1, seed=index)])
    there = aligned_buffer(PAGE_BYTES)
    for index in range(12):
        device.read(index, 0, [there])
        assert there == pages_of(1, seed=index)
    assert len([link for link in open_files() if link.endswith(".seg")]) == 4
    device.close()
    assert not [link for link in open_files() if link.endswith(".seg")]


@pytest.mark.parametrize(
    "end", [lambda device: device.close(), lambda device: device.remove(0)], ids=["close", "remove"]
)
def test_a_file_stays_open_while_a_read_is_under_way(
    device: FileDevice, monkeypatch: pytest.MonkeyPatch, end: Callable[[FileDevice], None]
) -> None:
    """Or its number could be that of another file by the time the read gets to it."""
    device.create(0, SEGMENT_BYTES)
    page = pages_of(1, seed=14)
    device.write(0, 0, [page])
    real, has_begun, may_go_on = os.preadv, threading.Event(), threading.Event()

    def held(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        has_begun.set()
        assert may_go_on.wait(30)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", held)
    there = aligned_buffer(PAGE_BYTES)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(device.read, 0, 0, [there])
        assert has_begun.wait(30)
        end(device)
        may_go_on.set()
        read.result()
    assert there == page
    assert not [link for link in open_files() if "00000000.seg" in link]


def test_a_closed_device_is_not_used(device: FileDevice) -> None:
    device.create(0, SEGMENT_BYTES)
    device.close()
    with pytest.raises(AssertionError, match="segment 0 is used after the device was closed"):
        device.sync([0])


def test_a_segment_is_no_link(device: FileDevice, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(PAGE_BYTES))
    path_of(device, 0).symlink_to(victim)
    assert device.segments() == {}
    assert errno_of(lambda: device.write(0, 0, [pages_of(1, seed=10)])) == errno.ELOOP
    assert victim.read_bytes() == bytes(PAGE_BYTES)
    with pytest.raises(FileExistsError):
        device.create(0, SEGMENT_BYTES)


def test_other_files_are_no_segments_but_count(device: FileDevice, tmp_path: Path) -> None:
    device.create(12, SEGMENT_BYTES)
    before_bytes = device.used_bytes()
    index = tmp_path / "tier" / "index"
    index.mkdir()
    others = [index / "data.mdb", *(tmp_path / "tier" / "segments" / name for name in ("1.seg", "00000001.seg.bak"))]
    for path in others:
        path.write_bytes(bytes(5 * PAGE_BYTES))
    (tmp_path / "tier" / "segments" / "00000002.seg").mkdir()
    assert device.segments() == {12: SEGMENT_BYTES}
    assert device.used_bytes() - before_bytes >= len(others) * 5 * PAGE_BYTES


def test_what_is_used_is_what_du_says(device: FileDevice, tmp_path: Path) -> None:
    device.create(0, SEGMENT_BYTES)
    with (tmp_path / "tier" / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    (tmp_path / "tier" / "link").symlink_to("/")
    said = subprocess.run(
        ["du", "--summarize", "--block-size=1", tmp_path / "tier"], check=True, capture_output=True, text=True
    )
    assert device.used_bytes() == int(said.stdout.split()[0])


def test_the_free_bytes_are_those_of_the_file_system(device: FileDevice, small_disk: Path) -> None:
    about = os.statvfs(small_disk)
    small = FileDevice(small_disk / "tier", may_be_direct=device.is_direct)
    assert 0 < small.free_bytes() <= about.f_bavail * about.f_frsize <= 1 << 20
    before_bytes = small.free_bytes()
    small.create(0, SEGMENT_BYTES)
    assert before_bytes - small.free_bytes() >= SEGMENT_BYTES
    small.close()


# --- real faults


def test_a_full_disk_makes_no_segment_and_stays_as_it_was(device: FileDevice, small_disk: Path) -> None:
    small = FileDevice(small_disk / "tier", may_be_direct=device.is_direct)
    before_bytes = small.free_bytes()
    assert errno_of(lambda: small.create(0, 2 << 20)) == errno.ENOSPC
    assert small.segments() == {}
    assert small.free_bytes() == before_bytes
    small.close()


def test_what_is_on_a_full_disk_can_be_read_after_a_restart(device: FileDevice, small_disk: Path) -> None:
    small = FileDevice(small_disk / "tier", may_be_direct=device.is_direct)
    small.create(0, SEGMENT_BYTES)
    page = pages_of(1, seed=11)
    small.write(0, 0, [page])
    small.close()
    (small_disk / "others").write_bytes(bytes(small.free_bytes()))
    assert small.free_bytes() == 0
    again = FileDevice(small_disk / "tier", may_be_direct=device.is_direct)
    assert again.is_direct == device.is_direct
    there = aligned_buffer(PAGE_BYTES)
    again.read(0, 0, [there])
    assert there == page
    again.write(0, PAGE_BYTES, [page])  # the room was set aside
    again.close()


def test_a_disk_that_became_read_only_is_read_and_not_written(device: FileDevice, small_disk: Path) -> None:
    small = FileDevice(small_disk / "tier", may_be_direct=device.is_direct)
    small.create(0, SEGMENT_BYTES)
    page = pages_of(1, seed=12)
    small.write(0, 0, [page])
    small.close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    again = FileDevice(small_disk / "tier", may_be_direct=device.is_direct)
    there = aligned_buffer(PAGE_BYTES)
    again.read(0, 0, [there])
    assert there == page
    assert errno_of(lambda: again.write(0, 0, [page])) == errno.EROFS
    assert errno_of(lambda: again.create(1, SEGMENT_BYTES)) == errno.EROFS
    assert errno_of(lambda: again.remove(0)) == errno.EROFS
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    again.write(0, PAGE_BYTES, [page])
    again.close()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_direct_pages_is_used_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.pwritev

    def refuse(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if flags_of(fd) & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", refuse)
    device = FileDevice(tmp_path / "tier")
    assert not device.is_direct
    device.create(0, SEGMENT_BYTES)
    page, there = pages_of(1, seed=13), aligned_buffer(PAGE_BYTES)
    device.write(0, 0, [page])
    device.read(0, 0, [there])
    assert there == page
    device.close()


def flags_of(fd: int) -> int:
    return int(Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:")[1].split()[0], 8)


# --- the device that fails on purpose


@pytest.fixture
def faulty(device: FileDevice) -> FaultyDevice:
    faulty = FaultyDevice(device)
    faulty.create(0, SEGMENT_BYTES)
    faulty.create(1, SEGMENT_BYTES)
    return faulty


def test_without_faults_it_is_the_device_behind_it(faulty: FaultyDevice) -> None:
    device: Device = faulty
    page, there = pages_of(2, seed=20), aligned_buffer(2 * PAGE_BYTES)
    device.write(0, 0, [page])
    device.sync([0, 1])
    device.read(0, 0, [there])
    assert there == page
    assert device.segments() == {0: SEGMENT_BYTES, 1: SEGMENT_BYTES}
    assert device.used_bytes() == faulty.inner.used_bytes()
    assert faulty.calls == {"create": 2, "write": 1, "sync": 2, "read": 1}
    assert (faulty.written_bytes, faulty.read_bytes) == (2 * PAGE_BYTES, 2 * PAGE_BYTES)


def test_a_fault_strikes_the_calls_it_is_for(faulty: FaultyDevice) -> None:
    page = pages_of(1, seed=21)
    faulty.fail("write", errno.EIO, nth=2)
    assert [errno_of(lambda: faulty.write(0, 0, [page])) for _ in range(3)] == [None, errno.EIO, None]
    faulty.fail("read", errno.EIO, segment=1, span=range(PAGE_BYTES + 7, PAGE_BYTES + 8))
    assert errno_of(lambda: faulty.read(0, PAGE_BYTES, [page])) is None
    assert errno_of(lambda: faulty.read(1, 0, [page])) is None
    assert errno_of(lambda: faulty.read(1, 2 * PAGE_BYTES, [page])) is None
    assert errno_of(lambda: faulty.read(1, PAGE_BYTES, [page])) == errno.EIO
    faulty.fail("sync", errno.EIO)
    assert errno_of(lambda: faulty.sync([0])) == errno.EIO
    faulty.heal()
    assert errno_of(lambda: faulty.read(1, PAGE_BYTES, [page])) is None
    assert errno_of(lambda: faulty.sync([0])) is None


def test_a_full_a_read_only_and_a_lost_device(faulty: FaultyDevice) -> None:
    page = pages_of(1, seed=22)
    for switch, number in ((faulty.fill_up, errno.ENOSPC), (faulty.make_read_only, errno.EROFS)):
        switch()
        assert errno_of(lambda: faulty.write(0, 0, [page])) == number
        assert errno_of(lambda: faulty.create(2, SEGMENT_BYTES)) == number
        assert errno_of(lambda: faulty.read(0, 0, [page])) is None
        faulty.heal()
    assert faulty.segments().keys() == {0, 1}
    faulty.lose(1)
    assert faulty.segments().keys() == {0}
    with pytest.raises(FileNotFoundError):
        faulty.read(1, 0, [page])
    faulty.fill_up()
    assert faulty.free_bytes() == 0
    faulty.heal()
    assert faulty.free_bytes() > 0


def test_a_torn_write_changes_the_first_bytes_only(faulty: FaultyDevice) -> None:
    old, new, there = pages_of(3, seed=23), pages_of(3, seed=24), aligned_buffer(3 * PAGE_BYTES)
    for after_bytes in (0, 100, PAGE_BYTES, PAGE_BYTES + 1):
        faulty.write(0, 0, [old])
        faulty.tear_next_write(after_bytes)
        assert errno_of(lambda: faulty.write(0, 0, [new[:PAGE_BYTES], new[PAGE_BYTES:]])) == errno.EIO
        faulty.read(0, 0, [there])
        assert there == bytes(new[:after_bytes]) + bytes(old[after_bytes:])


def test_a_flipped_bit_is_in_what_is_read_only(faulty: FaultyDevice) -> None:
    pages, there = pages_of(3, seed=25), aligned_buffer(3 * PAGE_BYTES)
    faulty.write(0, PAGE_BYTES, [pages])
    at = 2 * PAGE_BYTES + 5
    faulty.flip(0, PAGE_BYTES + at, 3)
    faulty.read(0, PAGE_BYTES, [there[:PAGE_BYTES], there[PAGE_BYTES:]])
    assert [index for index in range(len(pages)) if pages[index] != there[index]] == [at]
    assert pages[at] ^ there[at] == 1 << 3
    faulty.heal()
    faulty.read(0, PAGE_BYTES, [there])
    assert there == pages


def test_a_slow_device_makes_its_callers_wait_as_long_as_it_is_told_to(device: FileDevice) -> None:
    waited_s: list[float] = []
    faulty = FaultyDevice(device, clock=lambda: 100.0, sleep=waited_s.append)
    faulty.create(0, SEGMENT_BYTES)
    assert waited_s == []
    faulty.slow_down(bytes_per_s=2 * PAGE_BYTES, latency_s=0.25)
    faulty.write(0, 0, [pages_of(1, seed=26)])
    faulty.read(0, 0, [aligned_buffer(3 * PAGE_BYTES)])  # behind the write, as time stands still here
    faulty.sync([0])
    assert waited_s == pytest.approx([0.25 + 0.5, 0.25 + 0.5 + 1.5, 0.25])


def test_a_call_hangs_until_it_is_let_go(faulty: FaultyDevice) -> None:
    page, there = pages_of(1, seed=27), aligned_buffer(PAGE_BYTES)
    faulty.write(0, 0, [page])
    faulty.hang("read")
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(faulty.read, 0, 0, [there])
        faulty.wait_until_hung()
        faulty.write(0, PAGE_BYTES, [page])
        assert not read.done()
        faulty.heal()
        read.result(30)
    assert there == page
