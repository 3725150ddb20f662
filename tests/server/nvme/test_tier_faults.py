"""Whatever the disk does: misses and never wrong bytes, a named count, a log line with a hint, a state that is true,
nothing that leaks or hangs, and a tier that recovers by itself."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from kvstore.envelope import ENVELOPE_BYTES
from kvstore.keys import BlockHash
from kvstore.messages import BlockState, LeaseId
from kvstore_server.core.disk_health import HINTS, PAUSE_INITIAL_S, READ_ERRORS_IN_A_ROW_MAX, DiskFault
from kvstore_server.nvme.device import Device
from kvstore_server.nvme.format import DISK_HEADER_BYTES, StoredCodec
from kvstore_server.nvme.index import IndexRecord
from kvstore_server.nvme.recovery import INDEX_FOLDER
from tests.server.builders import ALICE, LARGE, MIDDLE, SMALL, block_hash
from tests.server.nvme.faulty import FaultyDevice
from tests.server.nvme.rig import SEGMENT_BYTES, Clock, Rig, settled

OpenRig = Callable[..., Awaitable[Rig]]

SLOTS = 3
"""Of `LARGE` in a segment, and in a slab of memory."""
BOUND_S = 20.0
"""Nothing waits for a hung device: it hangs until the test heals it."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def open_rig(tmp_path: Path, clock: Clock) -> AsyncIterator[OpenRig]:
    rigs: list[Rig] = []

    async def open_one(**options: Any) -> Rig:
        rig = await Rig(**{"folder": tmp_path / "nvme", "clock": clock, "slab_count": 5, **options}).open()
        rigs.append(rig)
        return rig

    yield open_one
    for rig in rigs:
        rig.disk.heal()
        await rig.check_nothing_leaks()
        await rig.close()


@contextmanager
def said(rig: Rig, fault: DiskFault, *, event: str = "nvme_degraded") -> Iterator[None]:
    """The fault is counted under its name, and the log says what to do."""
    before = rig.tier.figures().fault_counts[fault]
    with capture_logs() as logs:
        yield
    assert rig.tier.figures().fault_counts[fault] > before, rig.fault_counts
    lines = [line for line in logs if line["event"] == event and line["fault"] == fault.value]
    assert lines, logs
    assert lines[0]["hint"] == HINTS[fault]
    assert lines[0]["reason"]


def is_degraded(rig: Rig, fault: DiskFault, what: str) -> bool:
    figures = rig.tier.figures()
    return figures.state == "degraded" and figures.reason.startswith(f"{fault}: ") and what in figures.reason


@contextmanager
def impatient(rig: Rig) -> Iterator[None]:
    """Only where something is to take too long: a busy machine makes everything slow now and then."""
    parts = rig.tier._parts
    patient = parts.settings
    parts.settings = replace(patient, load_timeout_s=0.1)
    yield
    parts.settings = patient


async def happens(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not condition():  # noqa: ASYNC110 (of a part that tells nobody)
            await asyncio.sleep(0.01)


async def demote(rig: Rig, numbers: Iterable[int], namespace: Any = LARGE) -> None:
    rig.put(numbers, namespace)
    await rig.demote_all()


async def recovers(rig: Rig, clock: Clock, numbers: Sequence[int], namespace: Any = LARGE) -> None:
    """After its pause, the tier takes and gives blocks, and says that all is well."""
    rig.disk.heal()
    clock.skip(60.0)
    with capture_logs() as logs:
        await demote(rig, numbers, namespace)
        assert None not in await rig.get(numbers, namespace)
    assert (rig.tier.figures().state, rig.tier.figures().reason) == ("ok", "")
    assert "nvme_restored" in [line["event"] for line in logs]


# --- full


async def test_enospc_on_creating_the_first_segment(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    rig.disk.fail("create", errno.ENOSPC)
    with said(rig, DiskFault.ENOSPC):
        await demote(rig, range(4))
    assert rig.on_disk(LARGE) == set()
    assert await rig.get(range(4), LARGE) == [None] * 4
    assert is_degraded(rig, DiskFault.ENOSPC, "no segment is made")
    assert list((rig.folder / "segments").glob("*.seg")) == []
    await recovers(rig, clock, range(4))


async def test_enospc_on_creating_another_segment_leaves_those_that_are_there_in_use(
    open_rig: OpenRig, clock: Clock
) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, range(SLOTS))
    rig.disk.fail("create", errno.ENOSPC)
    with said(rig, DiskFault.ENOSPC):
        await demote(rig, range(10, 12))
    assert rig.on_disk(LARGE) >= {block_hash(10), block_hash(11)}, "colder blocks make room"
    assert None not in await rig.get([10, 11], LARGE)
    assert is_degraded(rig, DiskFault.ENOSPC, "no segment is made")
    await recovers(rig, clock, range(20, 24))
    assert rig.tier.figures().segment_count > 1


async def test_enospc_on_write(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, range(2))
    rig.disk.fail("write", errno.ENOSPC)
    with said(rig, DiskFault.ENOSPC):
        await demote(rig, range(10, 13))
    assert await rig.get(range(10, 13), LARGE) == [None] * 3
    assert None not in await rig.get(range(2), LARGE), "what is there is still read"
    assert is_degraded(rig, DiskFault.ENOSPC, "nothing is written")
    await recovers(rig, clock, range(10, 13))


async def test_while_it_rests_blocks_stay_in_memory_and_are_not_lost(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    rig.disk.fail("write", errno.EIO)
    await demote(rig, [1])
    rig.put([2], LARGE)
    await rig.demote_all()
    assert None not in await rig.get([2], LARGE)
    await recovers(rig, clock, [3])


async def test_free_reserve_reached(open_rig: OpenRig, clock: Clock) -> None:
    reserve_bytes = 10 << 20
    rig = await open_rig(namespaces=(LARGE,), free_reserve_bytes=reserve_bytes)
    rig.disk.set_free_bytes(reserve_bytes + SEGMENT_BYTES)
    await demote(rig, range(SLOTS))
    assert rig.tier.figures().segment_count == 1
    rig.disk.set_free_bytes(reserve_bytes + SEGMENT_BYTES - 1)
    with said(rig, DiskFault.ENOSPC):
        await demote(rig, range(10, 12))
    assert rig.tier.figures().segment_count == 1
    assert is_degraded(rig, DiskFault.ENOSPC, "no segment is made")
    assert str(reserve_bytes) in rig.tier.figures().reason
    assert None not in await rig.get([10, 11], LARGE)
    await recovers(rig, clock, range(20, 24))
    assert rig.tier.figures().segment_count > 1


async def test_a_tier_that_may_not_grow_does_not_fill_the_log(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, range(SLOTS))
    rig.disk.set_free_bytes(0)
    with capture_logs() as logs:
        for round_ in range(20):
            await demote(rig, [100 + round_])
            clock.skip(1.0)
    events = [line["event"] for line in logs if line["log_level"] != "info"]
    assert events == ["nvme_degraded"]
    assert "nvme_restored" not in [line["event"] for line in logs]
    assert rig.fault_counts[DiskFault.ENOSPC] < 10, "tries are further and further apart"
    await recovers(rig, clock, range(20, 24))


async def test_a_segment_that_was_left_half_made_is_made_again(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    rig.segment_path(0).write_bytes(b"half")
    await demote(rig, range(2))
    assert None not in await rig.get(range(2), LARGE)
    assert rig.fault_counts == {}


# --- errors of writing


@pytest.mark.parametrize("nth", [1, 2, 3, 4], ids=["header", "first", "middle", "last"])
async def test_eio_on_one_write_of_a_batch(open_rig: OpenRig, clock: Clock, nth: int) -> None:
    """Nothing of the batch is found, now or after a restart."""
    rig = await open_rig(namespaces=(LARGE,))
    rig.disk.fail("write", errno.EIO, nth=nth)
    with said(rig, DiskFault.EIO_WRITE):
        await demote(rig, range(SLOTS))
    assert rig.on_disk(LARGE) == set()
    assert await rig.get(range(SLOTS), LARGE) == [None] * SLOTS
    assert is_degraded(rig, DiskFault.EIO_WRITE, "nothing is written")
    assert rig.tier.figures().dropped_counts["failed"] == SLOTS
    await recovers(rig, clock, range(10, 12))
    await rig.reopen()
    assert rig.on_disk(LARGE) == {block_hash(10), block_hash(11)}
    assert None not in await rig.get([10, 11], LARGE)


async def test_a_segment_header_that_could_not_be_written_is_written_again(open_rig: OpenRig, clock: Clock) -> None:
    """Else the next start would not know whose the segment is, and lose all that is in it."""
    rig = await open_rig(namespaces=(LARGE, SMALL), segment_count=2)
    await demote(rig, range(2 * SLOTS), LARGE)
    rig.disk.tear_next_write(100)
    await demote(rig, range(3), SMALL)  # takes a segment over, and spoils its header
    assert rig.fault_counts[DiskFault.EIO_WRITE] == 1
    clock.skip(60.0)
    await demote(rig, range(20, 20 + SLOTS), LARGE)
    there = rig.on_disk(LARGE)
    assert {block_hash(number) for number in range(20, 20 + SLOTS)} <= there
    await rig.reopen()
    assert rig.on_disk(LARGE) == there


async def test_eio_on_sync(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, [1])
    rig.disk.fail("sync", errno.EIO)
    with said(rig, DiskFault.EIO_WRITE):
        await demote(rig, [2])
    assert await rig.get([2], LARGE) == [None], "what is not durable is not found"
    await recovers(rig, clock, [2])


async def test_erofs(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, [1])
    rig.disk.make_read_only()
    with said(rig, DiskFault.READ_ONLY):
        await demote(rig, [2])
    assert is_degraded(rig, DiskFault.READ_ONLY, "nothing is written")
    assert None not in await rig.get([1], LARGE), "a disk that is read-only can be read"
    assert await rig.get([2], LARGE) == [None]
    await recovers(rig, clock, [2])


async def test_erofs_before_there_is_a_segment(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    rig.disk.make_read_only()
    with said(rig, DiskFault.READ_ONLY):
        await demote(rig, [2])
    assert is_degraded(rig, DiskFault.READ_ONLY, "no segment is made")
    await recovers(rig, clock, [2])


# --- errors of reading


async def test_eio_on_reading_one_block(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, range(4))
    segment, offset = rig.place_of(1, LARGE)
    rig.disk.fail("read", errno.EIO, segment=segment, span=range(offset + 8192, offset + 8193))
    with said(rig, DiskFault.EIO_READ, event="nvme_fault"):
        found = await rig.get(range(4), LARGE)
    assert [payload is None for payload in found] == [False, True, False, False]
    assert block_hash(1) not in rig.on_disk(LARGE), "a bad sector does not become good"
    assert rig.tier.figures().state == "ok", "single sectors go bad"
    rig.disk.heal()
    await demote(rig, [1])
    assert None not in await rig.get([1], LARGE)


async def test_eio_on_reading_anything(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(SMALL,))
    await demote(rig, range(20), SMALL)
    rig.disk.fail("read", errno.EIO)
    with said(rig, DiskFault.EIO_READ):
        assert await rig.get(range(READ_ERRORS_IN_A_ROW_MAX)) == [None] * READ_ERRORS_IN_A_ROW_MAX
    assert is_degraded(rig, DiskFault.EIO_READ, "nothing is read or written")
    assert rig.on_disk() == set(), "nothing is offered that would not come"
    reads = rig.disk.calls["read"]
    assert await rig.get(range(10, 20)) == [None] * 10
    assert rig.disk.calls["read"] == reads, "it is left alone"
    rig.disk.heal()
    clock.skip(PAUSE_INITIAL_S)
    assert None not in await rig.get(range(10, 20)), "most of it was not tried, and is still there"
    assert rig.tier.figures().state == "ok"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
async def test_a_segment_that_may_not_be_opened(open_rig: OpenRig, clock: Clock, number: int) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, range(2))
    rig.disk.fail("read", number)
    rig.disk.fail("write", number)
    with said(rig, DiskFault.UNREADABLE):
        assert await rig.get(range(2), LARGE) == [None, None]
    assert is_degraded(rig, DiskFault.UNREADABLE, "nothing is read or written")
    rig.disk.heal()
    clock.skip(PAUSE_INITIAL_S)
    assert None not in await rig.get(range(2), LARGE), "it was there all the time"
    assert rig.tier.figures().state == "ok"
    rig.disk.fail("write", number)
    with said(rig, DiskFault.UNREADABLE):
        await demote(rig, [5])
    assert is_degraded(rig, DiskFault.UNREADABLE, "nothing is written")
    await recovers(rig, clock, [5])


async def test_a_segment_without_permissions(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, range(2))
    path = rig.segment_path(rig.place_of(0, LARGE)[0])
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("root may open everything")
    await rig.reopen()
    assert await rig.get(range(2), LARGE) == [None, None]
    path.chmod(0o600)
    await rig.reopen()
    assert None not in await rig.get(range(2), LARGE)


async def test_a_segment_that_cannot_be_read_at_the_start_is_kept_for_one_when_it_can(
    open_rig: OpenRig, clock: Clock
) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, range(2 * SLOTS))
    by_segment = {number: rig.place_of(number, LARGE)[0] for number in range(2 * SLOTS)}
    lost = [number for number, segment in by_segment.items() if segment == 0]
    rig.before_open = lambda device: device.fail("read", errno.EACCES, segment=0)
    with capture_logs() as logs:
        await rig.reopen()
    line = next(line for line in logs if line["event"] == "nvme_segment_unreadable")
    assert line["hint"]
    assert rig.fault_counts == {DiskFault.UNREADABLE: 1}
    found = await rig.get(range(2 * SLOTS), LARGE)
    assert {number for number, payload in enumerate(found) if payload is None} == set(lost)
    await demote(rig, range(20, 20 + 4 * SLOTS))  # more than the rest holds: what cannot be read is not written over
    rig.before_open = lambda device: None
    rig.disk.heal()
    await rig.reopen()
    assert None not in await rig.get(lost, LARGE)


async def test_a_segment_that_is_missing(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, range(2 * SLOTS))
    gone = [number for number in range(2 * SLOTS) if rig.place_of(number, LARGE)[0] == 0]
    rig.disk.inner.remove(0)
    with said(rig, DiskFault.UNREADABLE):
        found = await rig.get(range(2 * SLOTS), LARGE)
    assert [number for number, payload in enumerate(found) if payload is None] == gone
    assert not rig.on_disk(LARGE) & {block_hash(number) for number in gone}, "they will not come back"
    assert is_degraded(rig, DiskFault.UNREADABLE, "nothing is written")
    await recovers(rig, clock, range(20, 20 + 2 * SLOTS))
    assert rig.segment_path(0).stat().st_size == SEGMENT_BYTES, "it was made anew"
    await rig.reopen()
    assert None not in await rig.get(range(20, 20 + 2 * SLOTS), LARGE)


async def test_a_segment_that_turns_out_to_be_missing_when_it_is_written(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, [1])
    rig.disk.inner.remove(0)
    with said(rig, DiskFault.UNREADABLE):
        await demote(rig, [2])
    assert await rig.get([1, 2], LARGE) == [None, None]
    await recovers(rig, clock, [2])


async def test_a_folder_that_is_not_mounted_for_a_while_loses_nothing(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, range(2))
    segments = rig.folder / "segments"
    await rig.close()
    await rig.open()
    rig.disk.fail("read", errno.ENOENT)
    away = segments.rename(rig.folder / "away")
    with said(rig, DiskFault.UNREADABLE):
        assert await rig.get(range(2), LARGE) == [None, None]
    assert is_degraded(rig, DiskFault.UNREADABLE, "nothing is read or written")
    away.rename(segments)
    rig.disk.heal()
    clock.skip(PAUSE_INITIAL_S)
    assert None not in await rig.get(range(2), LARGE)


# --- truncated


async def test_a_segment_that_was_truncated_while_closed(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, range(2 * SLOTS))
    gone = [number for number in range(2 * SLOTS) if rig.place_of(number, LARGE)[0] == 0]
    await rig.close()
    os.truncate(rig.segment_path(0), 8192)
    with capture_logs() as logs:
        await rig.open()
    assert next(line for line in logs if line["event"] == "nvme_segment_removed")["hint"]
    assert rig.fault_counts == {DiskFault.TRUNCATED: 1}
    assert rig.tier.figures().refused_record_count == len(gone)
    found = await rig.get(range(2 * SLOTS), LARGE)
    assert [number for number, payload in enumerate(found) if payload is None] == gone
    await demote(rig, range(20, 20 + 2 * SLOTS))
    assert None not in await rig.get(range(20, 20 + 2 * SLOTS), LARGE)
    assert rig.tier.figures().state == "ok"


async def test_a_segment_that_is_truncated_while_open(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, range(2 * SLOTS))
    gone = [number for number in range(2 * SLOTS) if rig.place_of(number, LARGE)[0] == 0]
    os.truncate(rig.segment_path(0), 8192)
    with said(rig, DiskFault.TRUNCATED):
        found = await rig.get(range(2 * SLOTS), LARGE)
    assert [number for number, payload in enumerate(found) if payload is None] == gone
    assert is_degraded(rig, DiskFault.TRUNCATED, "nothing is written")
    await recovers(rig, clock, range(20, 20 + 2 * SLOTS))
    assert rig.segment_path(0).stat().st_size == SEGMENT_BYTES, "it was made anew"
    await rig.reopen()
    assert None not in await rig.get(range(20, 20 + 2 * SLOTS), LARGE)


# --- slow


async def test_a_hung_read(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, range(4))
    with impatient(rig):
        rig.disk.hang("read")
        with said(rig, DiskFault.SLOW):
            assert await asyncio.wait_for(rig.get([0, 1], LARGE), BOUND_S) == [None, None]
        assert is_degraded(rig, DiskFault.SLOW, "nothing is read or written")
        reads = rig.disk.calls["read"]
        clock.skip(60.0)
        assert await asyncio.wait_for(rig.get(range(4), LARGE), BOUND_S) == [None] * 4
        assert rig.disk.calls["read"] == reads, "nobody else waits for a disk that hangs"
        assert rig.fault_counts == {DiskFault.SLOW: 1}
        assert rig.on_disk(LARGE) == set(), "nothing is offered that would not come"
        assert rig.states([0, 1], LARGE) == [BlockState.PENDING] * 2
        rig.disk.heal()
        await rig.check_nothing_leaks()
    assert rig.states([0, 1], LARGE) == [BlockState.HIT] * 2, "what came late is whole, and used"
    assert rig.tier.figures().state == "degraded", "late is not in time"
    assert None not in await rig.get(range(4), LARGE)
    assert rig.tier.figures().state == "ok"


async def test_a_hung_write(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, [1])
    with impatient(rig):
        rig.disk.hang("write")
        rig.put([2], LARGE)
        rig.core.depart_all(now_s=clock())
        running = asyncio.create_task(rig.tier.run())
        with said(rig, DiskFault.SLOW):
            rig.tier.wake()
            await asyncio.to_thread(rig.disk.wait_until_hung)
            await happens(lambda: DiskFault.SLOW in rig.fault_counts)
        assert is_degraded(rig, DiskFault.SLOW, "nothing is written")
        assert not await rig.tier.close(timeout_s=0.05), "it is still in use"
        rig.disk.heal()
        running.cancel()
        await rig.check_nothing_leaks()
    assert rig.tier.figures().state == "degraded", "late is not in time"
    assert None not in await rig.get([1, 2], LARGE), "what was written late is there"
    await recovers(rig, clock, [3])


async def test_what_departs_can_be_read_while_the_disk_hangs(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, [1])
    rig.disk.hang("write")
    rig.put([2], LARGE)
    flushing = asyncio.create_task(rig.tier.flush())
    await asyncio.to_thread(rig.disk.wait_until_hung)
    assert None not in await asyncio.wait_for(rig.get([1, 2], LARGE), BOUND_S)
    rig.disk.heal()
    await asyncio.wait_for(flushing, BOUND_S)


async def test_slow_reads(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, range(3))
    with impatient(rig):
        rig.disk.slow_down(latency_s=0.4)
        with said(rig, DiskFault.SLOW):
            assert await rig.get([0], LARGE) == [None]
        before = rig.tier.figures()
        await rig.check_nothing_leaks()
    figures = rig.tier.figures()
    assert figures.state == "degraded", "a read that came late does not end the pause"
    assert figures.read_latency_s > before.read_latency_s, "what it costs is learned"
    rig.disk.heal()
    clock.skip(PAUSE_INITIAL_S)
    assert None not in await rig.get(range(3), LARGE)
    assert rig.tier.figures().state == "ok"


async def test_slow_writes(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    with impatient(rig):
        rig.disk.slow_down(latency_s=0.2)
        with said(rig, DiskFault.SLOW):
            await demote(rig, range(2))
    assert is_degraded(rig, DiskFault.SLOW, "nothing is written")
    rig.disk.heal()
    assert None not in await rig.get(range(2), LARGE), "they were written all the same"
    await recovers(rig, clock, [3])


async def test_creating_a_segment_that_hangs(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, [1])
    with impatient(rig):
        rig.disk.hang("create")
        rig.put(range(10, 10 + SLOTS), LARGE)
        flushing = asyncio.create_task(rig.tier.flush())
        with said(rig, DiskFault.SLOW):
            await asyncio.to_thread(rig.disk.wait_until_hung)
            await happens(lambda: DiskFault.SLOW in rig.fault_counts)
        rig.disk.heal()
        await asyncio.wait_for(flushing, BOUND_S)
    assert None not in await rig.get([1, *range(10, 10 + SLOTS)], LARGE)
    await recovers(rig, clock, [20])


async def test_pauses_grow_while_a_disk_goes_on_hanging_up(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, range(4))
    with impatient(rig):
        for pause_s in (1.0, 2.0, 4.0):
            rig.disk.hang("read")
            assert await asyncio.wait_for(rig.get([0], LARGE), BOUND_S) == [None]
            rig.disk.heal()
            await rig.check_nothing_leaks()
            drop_from_memory(rig, 0, LARGE)
            clock.skip(pause_s - 0.1)
            assert not rig.tier.may_read()
            clock.skip(0.1)
            assert rig.tier.may_read()


async def test_a_disk_that_is_left_out_as_too_slow_is_found_to_be_well_again(open_rig: OpenRig, clock: Clock) -> None:
    """Nobody reads what is not worth it, so nothing else would end the state."""
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, range(2))
    await rig.get([0], LARGE)
    with impatient(rig):
        rig.disk.slow_down(latency_s=0.3)
        assert await rig.get([1], LARGE) == [None]
        await rig.check_nothing_leaks()
    drop_from_memory(rig, 1, LARGE)
    rig.disk.heal()
    reads = rig.disk.calls["read"]
    assert rig.tier.worth(b"\1", block_bytes=1 << 18, recompute_s_per_block=1e-9) == 0
    await rig.check_nothing_leaks()
    assert rig.disk.calls["read"] == reads, "while it rests, it is let alone"
    clock.skip(PAUSE_INITIAL_S)
    assert rig.tier.worth(b"\1", block_bytes=1 << 18, recompute_s_per_block=1e-9) == 0
    await rig.check_nothing_leaks()
    assert rig.disk.calls["read"] == reads + 1
    assert rig.tier.figures().state == "ok"


# --- flipped bits, torn writes


def sampled_bits(rig: Rig, number: int, namespace: Any, *, count: int) -> list[tuple[int, int]]:
    """All of a slot that is checked: every byte of header and envelope once, and some of the payload."""
    block = rig.tier._parts.disk.stored(rig.id_of(namespace))[block_hash(number)]
    rng = random.Random(1)
    head = DISK_HEADER_BYTES + ENVELOPE_BYTES
    payload = rng.sample(range(head, DISK_HEADER_BYTES + block.stored_bytes), count)
    return [(at, rng.randrange(8)) for at in [*range(head), *payload, DISK_HEADER_BYTES + block.stored_bytes - 1]]


@pytest.mark.parametrize(
    ("namespace", "codec"),
    [(SMALL, None), (MIDDLE, None), (MIDDLE, StoredCodec.ZSTD)],
    ids=["one-page", "raw", "zstd"],
)
async def test_a_bit_that_flips_on_the_disk(
    open_rig: OpenRig, clock: Clock, namespace: Any, codec: StoredCodec | None
) -> None:
    rig = await open_rig(namespaces=(namespace,), forced_codec=codec)
    await demote(rig, [1, 2], namespace)
    count = 40 if codec is None else 10
    for at, bit in sampled_bits(rig, 1, namespace, count=count):
        corrupt = rig.tier.figures().corrupt_count
        segment, offset = rig.place_of(1, namespace)
        flip_in_file(rig.segment_path(segment), offset + at, bit)
        found = await rig.get([1], namespace)
        assert found == [None], f"bit {bit} of byte {at} was not noticed"
        assert block_hash(1) not in rig.on_disk(namespace)
        assert rig.tier.figures().corrupt_count == corrupt + 1
        await demote(rig, [1], namespace)
        assert None not in await rig.get([1], namespace), "written anew, it is back"
        drop_from_memory(rig, 1, namespace)
    assert None not in await rig.get([2], namespace)
    assert rig.tier.figures().state == "ok", "a bad block is no fault of the rest"


def flip_in_file(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def drop_from_memory(rig: Rig, number: int, namespace: Any) -> None:
    stored = rig.core.stored(rig.id_of(namespace))
    rig.core.quarantine(rig.id_of(namespace), block_hash(number), stored[block_hash(number)])


@pytest.mark.parametrize("after_bytes", [0, 100, 4096, 100_000])
@pytest.mark.parametrize("is_index_lost", [False, True], ids=["index", "rebuilt"])
async def test_a_torn_write_and_a_crash(
    open_rig: OpenRig, clock: Clock, after_bytes: int, *, is_index_lost: bool
) -> None:
    rig = await open_rig(namespaces=(LARGE,), batch_count=1)
    await demote(rig, [1])
    rig.disk.tear_next_write(after_bytes)
    with said(rig, DiskFault.EIO_WRITE):
        await demote(rig, [2])
    await rig.crash()
    if is_index_lost:
        shutil.rmtree(rig.folder / INDEX_FOLDER)
    await rig.open()
    assert None not in await rig.get([1], LARGE)
    assert await rig.get([2], LARGE) == [None]
    await demote(rig, [2])
    assert None not in await rig.get([2], LARGE)


async def test_a_block_that_was_overwritten_by_a_torn_write_is_a_miss(open_rig: OpenRig, clock: Clock) -> None:
    """Its record is in the index until the next batch; the bytes are another block's, or nobody's."""
    rig = await open_rig(namespaces=(LARGE,), segment_count=1, batch_count=1)
    await demote(rig, range(SLOTS))
    rig.disk.tear_next_write(100_000)
    await demote(rig, [10])
    await rig.crash()
    await rig.open()
    found = await rig.get([*range(SLOTS), 10], LARGE)
    assert found.count(None) == 2, "the new one, and the one that made room for it"
    assert found[-1] is None


# --- the index


async def test_the_index_map_is_full(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(SMALL,), index_map_bytes=64 << 10, batch_count=64, slab_count=6)
    with said(rig, DiskFault.INDEX_FULL):
        for start in range(0, 1000, 100):
            await demote(rig, range(start, start + 100), SMALL)
    there = rig.on_disk()
    assert is_degraded(rig, DiskFault.INDEX_FULL, "nothing is written")
    assert there, "what had room is there"
    assert len(there) < 1000
    numbers = [int.from_bytes(one, "big") for one in there][:50]
    assert None not in await rig.get(numbers)
    rig.index_map_bytes = 16 << 20
    await rig.reopen()
    assert rig.on_disk() >= there
    await demote(rig, range(2000, 2100), SMALL)
    assert None not in await rig.get(range(2000, 2100))


async def test_for_what_an_index_has_no_room_for_the_coldest_blocks_leave_tails_first(
    open_rig: OpenRig, clock: Clock
) -> None:
    rig = await open_rig(namespaces=(SMALL,), index_map_bytes=512 << 10, batch_count=8, slab_count=6, segment_count=16)
    starts = range(0, 3600, 400)
    with said(rig, DiskFault.INDEX_FULL, event="nvme_fault"):
        for start in starts:
            await demote(rig, range(start, start + 400), SMALL)
    assert rig.fault_counts[DiskFault.INDEX_FULL] < 20, "it is said of every batch"
    assert rig.tier.figures().state == "ok"
    there = {int.from_bytes(one, "big") for one in rig.on_disk()}
    assert len(there) < 3600 < rig.tier.figures().segment_count_max * 255, "the segments have room for all"
    counts = [len(there & set(range(start, start + 400))) for start in starts]
    assert counts[0] == 0
    assert counts[-1] == 400
    assert there == {start + number for start, count in zip(starts, counts, strict=True) for number in range(count)}
    await rig.reopen()
    assert {int.from_bytes(one, "big") for one in rig.on_disk()} == there
    assert None not in await rig.get(range(3500, 3600))


@pytest.mark.parametrize("damage", ["garbage", "deleted", "emptied"])
async def test_a_damaged_index_is_built_anew(open_rig: OpenRig, clock: Clock, damage: str) -> None:
    rig = await open_rig(namespaces=(LARGE, SMALL))
    await demote(rig, range(4), LARGE)
    await demote(rig, range(30), SMALL)
    await rig.close()
    folder = rig.folder / INDEX_FOLDER
    match damage:
        case "garbage":
            path = folder / "data.mdb"
            path.write_bytes(random.Random(2).randbytes(path.stat().st_size))
        case "emptied":
            (folder / "data.mdb").write_bytes(b"")
        case _:
            shutil.rmtree(folder)
    with capture_logs() as logs:
        await rig.open()
    assert next(line for line in logs if line["event"] == "nvme_index_damaged")["hint"]
    assert rig.fault_counts == {DiskFault.INDEX_DAMAGED: 1}
    assert rig.tier.figures().state == "ok", "it is over"
    assert None not in await rig.get(range(4), LARGE)
    assert None not in await rig.get(range(30), SMALL)


class BrokenIndex:
    """An index that fails once, as LMDB does when a commit fails half-way, and can be closed only."""

    def __init__(self, inner: Any, number: int) -> None:
        self.inner, self.number = inner, number
        self.store_id, self.size_bytes, self.fill_share = inner.store_id, inner.size_bytes, inner.fill_share

    def apply(self, puts: Sequence[IndexRecord], deletes: Sequence[tuple[bytes, BlockHash]]) -> None:
        raise OSError(self.number, os.strerror(self.number))

    def close(self) -> None:
        self.inner.close()


@pytest.mark.parametrize("becomes", ["sound", "garbage", "gone"])
async def test_an_index_that_failed_while_running_is_opened_again(
    open_rig: OpenRig, clock: Clock, becomes: str
) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, range(2))
    index = rig.tier._parts.index
    index._index = BrokenIndex(index._index, errno.EIO)  # type: ignore[assignment]
    with said(rig, DiskFault.EIO_WRITE):
        await demote(rig, [5])
    assert await rig.get([5], LARGE) == [None]
    path = rig.folder / INDEX_FOLDER / "data.mdb"
    match becomes:
        case "garbage":
            path.write_bytes(random.Random(3).randbytes(path.stat().st_size))
        case "gone":
            path.unlink()
    await recovers(rig, clock, [6])
    await rig.reopen()
    assert rig.on_disk(LARGE) == {block_hash(number) for number in (0, 1, 6)}
    assert None not in await rig.get([0, 1, 6], LARGE)
    assert rig.fault_counts == {}, "nothing had to be built anew"


async def test_what_was_evicted_for_a_batch_that_failed_is_deleted_with_the_next(
    open_rig: OpenRig, clock: Clock
) -> None:
    rig = await open_rig(namespaces=(LARGE,), segment_count=1, batch_count=1)
    await demote(rig, range(SLOTS))
    index = rig.tier._parts.index
    index._index = BrokenIndex(index._index, errno.EIO)  # type: ignore[assignment]
    await demote(rig, [10])
    assert len(rig.on_disk(LARGE)) == SLOTS - 1
    await recovers(rig, clock, [11])
    there = rig.on_disk(LARGE)
    await rig.crash()
    await rig.open()
    assert rig.on_disk(LARGE) == there
    assert rig.tier.figures().refused_record_count == 0, "nothing in the index is of a block that has gone"


async def test_figures_can_be_told_when_the_index_was_deleted_by_hand(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, range(2))
    shutil.rmtree(rig.folder / INDEX_FOLDER)
    assert rig.tier.figures().disk_bytes >= SEGMENT_BYTES
    await demote(rig, [3])
    assert None not in await rig.get([0, 1, 3], LARGE)
    await rig.reopen()
    assert None not in await rig.get([0, 1, 3], LARGE)


# --- what nobody has foreseen


class Surprising:
    """A device, of which one call ends in a way that no device should have."""

    def __init__(self, inner: Device, call: str) -> None:
        self._inner = inner
        self.call = call

    def __getattr__(self, name: str) -> Any:
        if name == self.call:
            self.call = ""
            raise RuntimeError("nobody has thought of this")
        return getattr(self._inner, name)


def check_bug_is_said(rig: Rig, logs: Sequence[Any], what: str) -> None:
    with_traceback, degraded = [line for line in logs if line["event"] in ("nvme_unexpected", "nvme_degraded")]
    assert with_traceback["exc_info"]
    assert with_traceback["what"] == what
    assert degraded["hint"] == HINTS[DiskFault.UNEXPECTED]
    assert "nobody has thought of this" in degraded["reason"]
    assert rig.fault_counts[DiskFault.UNEXPECTED] == 1


@pytest.mark.parametrize("call", ["write", "sync"])
async def test_a_bug_in_writing_is_logged_and_the_tier_says_so_and_goes_on(
    open_rig: OpenRig, clock: Clock, call: str
) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, range(2))
    rig.disk.inner = cast("Device", Surprising(rig.disk.inner, call))
    with capture_logs() as logs:
        await demote(rig, [5])
    check_bug_is_said(rig, logs, "writing")
    assert is_degraded(rig, DiskFault.UNEXPECTED, "nothing is written")
    await recovers(rig, clock, [6])
    assert rig.on_disk(LARGE) == {block_hash(number) for number in (0, 1, 6)}


async def test_a_bug_in_reading_is_a_miss_and_logged_and_the_tier_says_so_and_goes_on(
    open_rig: OpenRig, clock: Clock
) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, range(2))
    rig.disk.inner = cast("Device", Surprising(rig.disk.inner, "read"))
    with capture_logs() as logs:
        assert await rig.get([0], LARGE) == [None]
    check_bug_is_said(rig, logs, "reading")
    assert is_degraded(rig, DiskFault.UNEXPECTED, "nothing is read")
    await recovers(rig, clock, [6])
    assert None not in await rig.get([0, 1], LARGE)


# --- a folder that somebody has changed


async def test_segments_deleted_while_closed(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, range(3 * SLOTS))
    gone = [number for number in range(3 * SLOTS) if rig.place_of(number, LARGE)[0] == 1]
    await rig.close()
    rig.segment_path(1).unlink()
    await rig.open()
    found = await rig.get(range(3 * SLOTS), LARGE)
    assert [number for number, payload in enumerate(found) if payload is None] == gone
    assert rig.tier.figures().refused_record_count == len(gone)
    await demote(rig, range(50, 50 + SLOTS))
    assert None not in await rig.get(range(50, 50 + SLOTS), LARGE)


async def test_all_segments_deleted_while_closed(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, range(2))
    await rig.close()
    shutil.rmtree(rig.folder / "segments")
    await rig.open()
    assert await rig.get(range(2), LARGE) == [None, None]
    await demote(rig, range(2))
    assert None not in await rig.get(range(2), LARGE)


@pytest.mark.parametrize("other_segment_bytes", [SEGMENT_BYTES, SEGMENT_BYTES // 2], ids=["same-size", "other-size"])
async def test_foreign_segments(open_rig: OpenRig, clock: Clock, tmp_path: Path, other_segment_bytes: int) -> None:
    rig = await open_rig(namespaces=(LARGE,), is_segment_bytes_given=False)
    other = await open_rig(
        folder=tmp_path / "other", namespaces=(LARGE,), segment_bytes=other_segment_bytes, is_segment_bytes_given=False
    )
    await demote(rig, range(3 * SLOTS))
    await demote(other, range(100, 101))
    gone = [number for number in range(3 * SLOTS) if rig.place_of(number, LARGE)[0] == 0]
    await rig.close()
    shutil.copy(other.segment_path(0), rig.segment_path(0))
    await rig.open()
    assert rig.tier._parts.settings.segment_bytes == SEGMENT_BYTES, "one foreign file does not decide"
    found = await rig.get([*range(3 * SLOTS), 100], LARGE)
    assert [number for number, payload in zip([*range(3 * SLOTS), 100], found, strict=True) if payload is None] == [
        *gone,
        100,
    ]
    await demote(rig, range(50, 50 + 2 * SLOTS))
    await rig.reopen()
    assert None not in await rig.get(range(50, 50 + 2 * SLOTS), LARGE), "its place is used"


async def test_capacity_lowered_between_starts(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,), slab_count=6)
    await demote(rig, range(4 * SLOTS))
    assert rig.tier.figures().segment_count == 4
    kept = [number for number in range(4 * SLOTS) if rig.place_of(number, LARGE)[0] < 2]
    rig.segment_count = 2
    await rig.reopen()
    assert sorted((rig.folder / "segments").glob("*.seg")) == [rig.segment_path(0), rig.segment_path(1)]
    found = await rig.get(range(4 * SLOTS), LARGE)
    assert [number for number, payload in enumerate(found) if payload is not None] == kept
    await demote(rig, range(50, 50 + 3 * SLOTS))
    assert rig.tier.figures().segment_count == 2
    assert rig.disk.used_bytes() <= 2 * SEGMENT_BYTES + (1 << 20)


async def test_a_changed_default_segment_size_leaves_the_folder_with_its_own(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,), is_segment_bytes_given=False)
    await demote(rig, range(2 * SLOTS))
    rig.segment_bytes = SEGMENT_BYTES // 2
    await rig.reopen()
    assert None not in await rig.get(range(2 * SLOTS), LARGE)
    await demote(rig, range(20, 20 + 2 * SLOTS))
    assert {path.stat().st_size for path in (rig.folder / "segments").glob("*.seg")} == {SEGMENT_BYTES}


async def test_a_segment_size_of_its_own_that_no_longer_fits_gives_way(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,), is_segment_bytes_given=False)
    await demote(rig, range(2))
    rig.segment_bytes, rig.segment_count = SEGMENT_BYTES // 2, 1
    await rig.reopen()
    assert rig.on_disk(LARGE) == set()
    await demote(rig, range(2))
    assert None not in await rig.get(range(2), LARGE)
    assert rig.tier.figures().segment_count_max == 2


# --- memory, callers, and what goes on at the same time


def lease_all(rig: Rig, numbers: Iterable[int], clock: Clock) -> LeaseId:
    lease = rig.core.lease(
        rig.id_of(LARGE), [block_hash(number) for number in numbers], owner_id=ALICE, now_s=clock(), duration_s=1e6
    )
    assert lease is not None
    return lease


async def test_memory_that_is_full_lets_a_promotion_find_no_place(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,), slab_count=2)
    await demote(rig, range(2))
    assert rig.put(range(10, 10 + 2 * SLOTS), LARGE) == 2 * SLOTS
    lease = lease_all(rig, range(10, 10 + 2 * SLOTS), clock)
    reads = rig.disk.calls["read"]
    assert await rig.get(range(2), LARGE) == [None, None]
    assert rig.disk.calls["read"] == reads
    assert rig.on_disk(LARGE) >= {block_hash(0), block_hash(1)}, "they are still there"
    assert rig.fault_counts == {}
    rig.core.release_lease(lease, owner_id=ALICE)
    await rig.demote_all()
    assert None not in await rig.get(range(2), LARGE)


async def test_a_block_that_twenty_callers_want_is_read_once(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, [1])
    reads = rig.disk.calls["read"]
    rig.disk.hang("read")
    callers = [asyncio.create_task(rig.get([1], LARGE)) for _ in range(20)]
    await asyncio.to_thread(rig.disk.wait_until_hung)
    rig.disk.heal()
    assert all(None not in found for found in await asyncio.gather(*callers))
    assert rig.disk.calls["read"] == reads + 1
    assert rig.tier.figures().promoted_count == 1


async def test_callers_that_go_away_meanwhile_leave_nothing_behind(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, range(4))
    rig.disk.hang("read")
    callers = [asyncio.create_task(rig.get(range(4), LARGE)) for _ in range(5)]
    await asyncio.to_thread(rig.disk.wait_until_hung)
    for caller in callers[:4]:
        caller.cancel()
    await settled()
    rig.disk.heal()
    assert None not in await callers[4], "the one who stayed gets it"
    for caller in callers[:4]:
        with suppress(asyncio.CancelledError):
            await caller
        assert caller.cancelled()
    await rig.check_nothing_leaks()


async def test_closing_waits_for_reads_that_are_under_way(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    await demote(rig, range(4))
    rig.disk.hang("read")
    reader = asyncio.create_task(rig.get(range(4), LARGE))
    await asyncio.to_thread(rig.disk.wait_until_hung)
    assert not await rig.tier.close(timeout_s=0.05), "the memory that is read into must not go away"
    closing = asyncio.create_task(rig.tier.close(timeout_s=BOUND_S))
    await settled()
    assert not closing.done()
    rig.disk.heal()
    assert await closing
    assert None not in await reader
    rig.arenas.close()
    await rig.open()
    assert None not in await rig.get(range(4), LARGE)


async def test_what_had_departed_when_the_writer_was_stopped_is_written_at_the_end(
    open_rig: OpenRig, clock: Clock
) -> None:
    rig = await open_rig(namespaces=(LARGE,), batch_count=1)
    rig.put(range(8), LARGE)
    rig.core.depart_all(now_s=clock())
    rig.disk.hang("write")
    running = asyncio.create_task(rig.tier.run())
    rig.tier.wake()
    await asyncio.to_thread(rig.disk.wait_until_hung)
    running.cancel()
    await settled()
    rig.disk.heal()
    await asyncio.wait_for(rig.tier.flush(), BOUND_S)
    await rig.check_nothing_leaks()
    assert rig.on_disk(LARGE) == {block_hash(number) for number in range(8)}


async def test_a_block_that_is_quarantined_while_it_departs_is_not_kept(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    rig.put(range(3), LARGE)
    rig.disk.hang("write")
    flushing = asyncio.create_task(rig.tier.flush())
    await asyncio.to_thread(rig.disk.wait_until_hung)
    drop_from_memory(rig, 1, LARGE)
    rig.disk.heal()
    await flushing
    await rig.check_nothing_leaks()
    assert rig.on_disk(LARGE) == {block_hash(0), block_hash(2)}, "what was in memory is not to be trusted"
    assert await rig.get([1], LARGE) == [None]
    await demote(rig, [5])
    await rig.reopen()
    assert await rig.get([1], LARGE) == [None]


async def test_a_block_that_is_leased_while_it_departs_stays_readable(open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(namespaces=(LARGE,))
    rig.put(range(3), LARGE)
    rig.disk.hang("write")
    flushing = asyncio.create_task(rig.tier.flush())
    await asyncio.to_thread(rig.disk.wait_until_hung)
    block = rig.core.stored(rig.id_of(LARGE))[block_hash(1)]
    before = bytes(rig.arenas.view(block.place, block.size_bytes))
    lease = lease_all(rig, [1], clock)
    rig.disk.heal()
    await flushing
    rig.put(range(20, 30), LARGE)
    assert bytes(rig.arenas.view(block.place, block.size_bytes)) == before, "its slot is not given to others"
    rig.core.release_lease(lease, owner_id=ALICE)
    assert None not in await rig.get(range(3), LARGE)
    await rig.demote_all()


async def test_mixed_faults_leave_nothing_behind(open_rig: OpenRig, clock: Clock) -> None:
    """Whatever happens in whatever order: right bytes or none, and all is well in the end."""
    rig = await open_rig(namespaces=(LARGE, SMALL), slab_count=3)
    rng = random.Random(7)
    numbers = {LARGE: range(12), SMALL: range(40)}
    switches: list[Callable[[FaultyDevice], None]] = [
        lambda device: device.fill_up(),
        lambda device: device.make_read_only(),
        lambda device: device.fail("write", errno.EIO, nth=rng.randrange(1, 6)),
        lambda device: device.fail("read", errno.EIO, nth=rng.randrange(1, 4)),
        lambda device: device.fail("sync", errno.EIO, nth=1),
        lambda device: device.fail("read", errno.EACCES),
        lambda device: device.tear_next_write(rng.choice([10, 5000])),
        lambda device: device.lose(rng.randrange(4)),
        lambda device: device.flip(rng.randrange(4), rng.randrange(4096, SEGMENT_BYTES), rng.randrange(8)),
        lambda device: device.heal(),
        lambda device: None,
    ]
    for _ in range(60):
        rng.choice(switches)(rig.disk)
        namespace = rng.choice([LARGE, SMALL])
        chosen = rng.sample(numbers[namespace], 5)
        rig.put(chosen, namespace)
        if rng.random() < 0.5:
            await rig.demote_all()
        await rig.get(rng.sample(numbers[namespace], 5), namespace)
        clock.skip(rng.choice([0.0, 1.0, 60.0]))
        await rig.check_nothing_leaks()
        if rng.random() < 0.1:
            await rig.reopen()
    rig.disk.heal()
    clock.skip(60.0)
    await demote(rig, [100, 101], LARGE)
    clock.skip(60.0)
    await demote(rig, [102], LARGE)
    assert None not in await rig.get([102], LARGE)
    assert rig.tier.figures().state == "ok"


# --- for real


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB of its own."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    mount = tmp_path / "mount"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


async def test_a_real_file_system_that_is_full(small_mount: Path, open_rig: OpenRig, clock: Clock) -> None:
    rig = await open_rig(folder=small_mount / "nvme", namespaces=(LARGE,))
    await demote(rig, range(SLOTS))
    filler = small_mount / "filler"
    fill(filler)
    with said(rig, DiskFault.ENOSPC):
        await demote(rig, range(10, 10 + SLOTS))
    assert rig.tier.figures().state == "degraded"
    await rig.get([*range(SLOTS), *range(10, 10 + SLOTS)], LARGE)
    assert [path.name for path in (rig.folder / "segments").iterdir()] == ["00000000.seg"]
    filler.unlink()
    await recovers(rig, clock, range(20, 20 + 2 * SLOTS))
    await rig.check_nothing_leaks()
    await rig.reopen()
    assert None not in await rig.get(range(20, 20 + 2 * SLOTS), LARGE)


async def test_an_index_that_finds_no_room_on_a_real_file_system(
    small_mount: Path, open_rig: OpenRig, clock: Clock
) -> None:
    """There is room in the segments, but LMDB cannot make its file longer."""
    rig = await open_rig(folder=small_mount / "nvme", namespaces=(SMALL,), batch_count=64)
    await demote(rig, range(4), SMALL)
    filler = small_mount / "filler"
    fill(filler)
    with said(rig, DiskFault.ENOSPC):
        for start in range(10, 240, 10):
            await demote(rig, range(start, start + 10), SMALL)
    assert is_degraded(rig, DiskFault.ENOSPC, "nothing is written")
    there = rig.on_disk()
    assert None not in await rig.get(range(4))
    filler.unlink()
    await recovers(rig, clock, range(300, 310), SMALL)
    await rig.reopen()
    assert rig.on_disk() >= there
    assert None not in await rig.get([*range(4), *range(300, 310)])
