"""Both tiers together: what leaves memory is found on the disk, comes back whole, and is there after a restart."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore_server.core.tenants import DEFAULT_TENANT, Tenant
from kvstore_server.nvme.device import Device
from kvstore_server.nvme.format import SEGMENT_HEADER_BYTES, StoredCodec
from tests.server.builders import LARGE, MIDDLE, SMALL, block_hash
from tests.server.nvme.faulty import FaultyDevice
from tests.server.nvme.rig import Rig
from tests.server.test_service import is_soon

OpenRig = Callable[..., Awaitable[Rig]]


@pytest.fixture
async def open_rig(tmp_path: Path) -> AsyncIterator[OpenRig]:
    rigs: list[Rig] = []

    async def open_one(**options: Any) -> Rig:
        rigs.append(await Rig(folder=tmp_path / "nvme", **options).open())
        return rigs[-1]

    yield open_one
    for rig in rigs:
        await rig.close()


async def test_what_leaves_memory_is_on_the_disk_and_comes_back_whole(open_rig: OpenRig) -> None:
    rig = await open_rig()
    assert rig.put(range(10)) == 10
    await rig.demote_all()
    assert rig.core.block_count == 0
    assert rig.on_disk() == {block_hash(number) for number in range(10)}
    assert None not in await rig.get(range(10))
    assert rig.on_disk() == {block_hash(number) for number in range(10)}, "a block that comes back stays on the disk"


@pytest.mark.parametrize("codec", [None, StoredCodec.ZSTD], ids=["raw", "zstd"])
async def test_after_a_restart_all_is_there(open_rig: OpenRig, codec: StoredCodec | None) -> None:
    rig = await open_rig(namespaces=(SMALL, MIDDLE, LARGE), slab_count=4, forced_codec=codec)
    for namespace in (SMALL, MIDDLE, LARGE):
        assert rig.put(range(3), namespace) == 3
    await rig.demote_all()
    await rig.reopen()
    for namespace in (SMALL, MIDDLE, LARGE):
        assert None not in await rig.get(range(3), namespace)


async def test_blocks_of_a_tenant_that_is_no_more_make_room_for_others(open_rig: OpenRig) -> None:
    rig = await open_rig()
    assert rig.put(range(5)) == 5
    await rig.demote_all()
    rig.tenants = frozenset({Tenant("alice")})
    await rig.reopen()
    assert rig.on_disk() == set()
    assert rig.tier.figures().refused_record_count == 5
    rig.tenants = frozenset({DEFAULT_TENANT})
    await rig.reopen()
    assert rig.on_disk() == set(), "they were deleted from the index"


async def test_a_load_waits_for_room_that_is_on_its_way_and_costs_no_block_that_only_memory_has(
    open_rig: OpenRig,
) -> None:
    rig = await open_rig(slab_count=1, namespaces=(LARGE,))
    assert rig.put([0], LARGE) == 1
    await rig.demote_all()
    assert rig.put([1, 2, 3], LARGE) == 3  # all that there is room for
    writing = asyncio.ensure_future(rig.tier.run())
    assert None not in await rig.get([0], LARGE)
    writing.cancel()
    assert rig.core.counters.dropped_undemoted_count == 0
    await rig.demote_all()
    assert None not in await rig.get([0], LARGE)
    assert len(rig.on_disk(LARGE)) == 4


async def test_a_load_that_finds_no_room_in_time_is_a_miss_and_no_fault_of_the_disk(open_rig: OpenRig) -> None:
    rig = await open_rig(slab_count=1, namespaces=(LARGE,), load_timeout_s=0.2)
    assert rig.put([0], LARGE) == 1
    await rig.demote_all()
    assert rig.put([1, 2, 3], LARGE) == 3
    # What departs for it is never written, for nobody is told to.
    assert await rig.get([0], LARGE) == [None]
    assert rig.tier.may_read()
    assert not any(rig.tier.figures().fault_counts.values())
    assert rig.core.counters.dropped_undemoted_count == 0


class FirstWriteHeld:
    """A device of which the first slot is not written before a test says so."""

    def __init__(self, inner: Device) -> None:
        self._inner = inner
        self.may_go_on = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, index: int, offset: int, buffers: Sequence[memoryview]) -> None:
        if (index, offset) == (0, SEGMENT_HEADER_BYTES):
            assert self.may_go_on.wait(30.0)
        self._inner.write(index, offset, buffers)


async def test_blocks_are_found_only_once_those_before_them_are_however_long_these_take(open_rig: OpenRig) -> None:
    held: list[FirstWriteHeld] = []

    def hold(device: FaultyDevice) -> None:
        held.append(FirstWriteHeld(device.inner))
        device.inner = cast("Device", held[-1])

    rig = await open_rig(batch_count=2, before_open=hold)
    assert rig.put(range(6)) == 6
    flushing = asyncio.ensure_future(rig.demote_all())
    # Of the segment's header, and of two batches behind the one that is held.
    await is_soon(lambda: rig.disk.calls["sync"] == 3)
    assert rig.on_disk() == set()
    held[0].may_go_on.set()
    await flushing
    assert rig.on_disk() == {block_hash(number) for number in range(6)}


async def test_wherever_writing_ends_every_block_on_the_disk_has_those_before_it(open_rig: OpenRig) -> None:
    rig = await open_rig(namespaces=(LARGE,), slab_count=4, segment_count=4, batch_count=1)
    for step in range(12):
        rig.put([step], LARGE, parent=step - 1 if step else None)
    assert rig.core.demoting_bytes, "memory is fuller than it should be"
    writing = asyncio.ensure_future(rig.tier.run())
    rig.tier.wake()
    seen: set[int] = set()
    async with asyncio.timeout(30.0):
        while rig.core.demoting_bytes:
            there = rig.on_disk(LARGE)
            assert there == {block_hash(number) for number in range(len(there))}
            seen.add(len(there))
            await asyncio.sleep(0)
    writing.cancel()
    assert len(seen) > 3
    await rig.crash()
    await rig.open()
    there = rig.on_disk(LARGE)
    assert there == {block_hash(number) for number in range(len(there))}
    assert rig.tier.figures().write_amplification < 1.1
