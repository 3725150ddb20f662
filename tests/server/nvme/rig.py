"""A memory tier and an NVMe tier in one process: real arenas, files and index, a device that can be made to fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.envelope import ENVELOPE_BYTES
from kvstore.eviction import Watermarks
from kvstore.keys import BlockHash
from kvstore.messages import BlockState, CommitState
from kvstore.namespace import Namespace
from kvstore_server.core.admission import Admission
from kvstore_server.core.space import Place, SlabId, SlabSpace
from kvstore_server.core.store import StoreCore
from kvstore_server.core.tenants import DEFAULT_TENANT, ScopedId, Tenant, scoped
from kvstore_server.nvme.device import FileDevice
from kvstore_server.nvme.format import StoredCodec, segment_offset
from kvstore_server.nvme.opening import NvmeSettings, open_tier
from kvstore_server.nvme.recovery import Geometry
from kvstore_server.nvme.tier import NvmeTier
from tests.server.builders import ALICE, SMALL, block_hash, enveloped, make_arenas, payload_of
from tests.server.nvme.faulty import FaultyDevice

SEGMENT_BYTES = 1 << 20
SLAB_BYTES = 1 << 20


class Clock:
    """Pauses pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def skip(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass(kw_only=True)
class Rig:
    """`put` and `get` are what the service does, without its transports. Nothing expires, whatever the clock says."""

    folder: Path
    clock: Callable[[], float] = time.monotonic
    segment_bytes: int = SEGMENT_BYTES
    is_segment_bytes_given: bool = True
    index_map_bytes: int = 16 << 20
    segment_count: int = 4
    slab_count: int = 2
    namespaces: Sequence[Namespace] = (SMALL,)
    load_timeout_s: float = 5.0
    admission: str = "all"
    codecs: tuple[StoredCodec, ...] = ()
    forced_codec: StoredCodec | None = None
    free_reserve_bytes: int = 0
    tenants: frozenset[Tenant] = frozenset({DEFAULT_TENANT})
    prefetch_bytes_max: int = 64 << 20
    batch_count: int = 4
    before_open: Callable[[FaultyDevice], None] = lambda device: None
    device: FaultyDevice | None = None
    tier: NvmeTier = field(init=False)
    core: StoreCore = field(init=False)

    async def open(self) -> Rig:
        self.arenas = make_arenas(slab_count=self.slab_count, slab_bytes=SLAB_BYTES)
        self.core = StoreCore(
            space=SlabSpace(slab_count=self.slab_count, slab_bytes=SLAB_BYTES),
            watermarks=Watermarks(high=0.9, low=0.8),
            headers=self.arenas,
        )
        for slab in range(self.slab_count):
            self.core.space.add_slab(SlabId(slab))
        for namespace in self.namespaces:
            self.core.open_namespace(namespace, payload_bytes=namespace.block_layout.payload_bytes)
        self.folder.mkdir(exist_ok=True)
        self.tier = await open_tier(
            NvmeSettings(
                folder=self.folder,
                capacity_bytes=self.segment_count * SEGMENT_BYTES + (32 << 20),
                geometry=Geometry(
                    segment_bytes=self.segment_bytes,
                    is_segment_bytes_given=self.is_segment_bytes_given,
                    room_bytes=self.segment_count * SEGMENT_BYTES,
                    index_map_bytes=self.index_map_bytes,
                    tenants=self.tenants,
                ),
                free_reserve_bytes=lambda _: self.free_reserve_bytes,
                admission=Admission(policy=self.admission, write_budget_bytes_per_day=None),
                policy="lru",
                batch_count=self.batch_count,
                io_threads=4,
                is_synced=True,
                load_timeout_s=self.load_timeout_s,
                prefetch_bytes_max=self.prefetch_bytes_max,
                codecs=self.codecs,
                forced_codec=self.forced_codec,
            ),
            store=self.core,
            slot_view=self.arenas.slot,
            clock=self.clock,
            on_settled=lambda: None,
            make_device=self._make_device,
        )
        for namespace_id in self.core.namespace_ids():
            self.tier.open(namespace_id)
        self.core.lower = self.tier
        return self

    def _make_device(self, folder: Path) -> FaultyDevice:
        self.device = FaultyDevice(FileDevice(folder))
        self.before_open(self.device)
        return self.device

    @property
    def disk(self) -> FaultyDevice:
        assert self.device is not None, "the rig is open"
        return self.device

    def id_of(self, namespace: Namespace = SMALL) -> ScopedId:
        return scoped(DEFAULT_TENANT, namespace.id)

    def put(self, numbers: Iterable[int], namespace: Namespace = SMALL, *, parent: int | None = None) -> int:
        """Stores blocks that follow each other; returns how many found room."""
        hashes = [block_hash(number) for number in numbers]
        states, reservations = self.core.reserve(
            self.id_of(namespace),
            hashes,
            parent_hash=None if parent is None else block_hash(parent),
            owner_id=ALICE,
            now_s=self.clock(),
            duration_s=30.0,
        )
        del states
        stored = 0
        for reservation in reservations:
            if reservation is None:
                continue
            data = enveloped(int.from_bytes(reservation.key.block_hash, "big"), namespace)
            begun = self.core.begin_landing(reservation.id, owner_id=ALICE, offset_bytes=0, size_bytes=len(data))
            assert begun is not None
            self.arenas.land(reservation.place, 0, data)
            self.core.end_landing(reservation, size_bytes=len(data))
            assert self.core.begin_commit(reservation.id, owner_id=ALICE) is reservation
            self.core.end_commits([(reservation, CommitState.COMMITTED)])
            stored += 1
        self.core.evict_to_low_watermark()
        return stored

    async def demote_all(self) -> None:
        """All of memory goes to the disk and leaves memory."""
        await self.tier.flush()

    async def get(self, numbers: Iterable[int], namespace: Namespace = SMALL) -> list[bytes | None]:
        """What a reader gets, after what is only on the disk was brought; every byte is compared with what was put."""
        numbers = list(numbers)
        hashes = [block_hash(number) for number in numbers]
        await self.tier.bring(self.id_of(namespace), hashes)
        found: list[bytes | None] = []
        for number, one in zip(numbers, hashes, strict=True):
            block = self.core.stored(self.id_of(namespace)).get(one)
            if block is None:
                found.append(None)
                continue
            payload = bytes(self.arenas.view(block.place, block.size_bytes)[ENVELOPE_BYTES:])
            assert payload == payload_of(number, namespace), f"wrong bytes for block {number}"
            found.append(payload)
        return found

    def on_disk(self, namespace: Namespace = SMALL) -> set[BlockHash]:
        return set(self.tier.stored(self.id_of(namespace)))

    def states(self, numbers: Iterable[int], namespace: Namespace = SMALL) -> list[BlockState]:
        found = self.core.lookup(self.id_of(namespace), [block_hash(number) for number in numbers])
        return [BlockState(state) for state in found.states]

    async def close(self) -> None:
        assert await self.tier.close(timeout_s=10.0), "the tier is still at work"
        self.core.check_invariants()
        self.arenas.close()

    async def crash(self) -> None:
        """As if the process had been killed: nothing more is written. Only what threads had begun ends."""
        parts = self.tier._parts
        await parts.wait_idle()
        parts.index.close()
        parts.device.close()
        parts.shut_down()
        self.arenas.close()

    async def check_nothing_leaks(self) -> None:
        """Once all that is under way has ended: no slot, no task and no queue holds anything that it should not."""
        parts = self.tier._parts
        await asyncio.wait_for(self.tier._demotion.write_departures(), 30.0)
        await asyncio.wait_for(parts.wait_idle(), 30.0)
        await settled()
        self.core.check_invariants()
        parts.disk.check_invariants()
        assert self.core.demoting_bytes == 0, f"{self.core.demoting_bytes} bytes depart for ever"
        assert self.core.reservation_count == 0, f"{self.core.reservation_count} blocks are pending for ever"
        assert not self.tier._promotion._loading, "something is being read for ever"
        assert self.tier._promotion.queued_bytes == 0, "bytes are queued for ever"
        assert parts.reads_under_way == 0, "a read is under way for ever"
        assert not self.tier._demotion._queue, "something waits to be written for ever"
        held = [place for place in self._places_on_disk() if parts.disk.space.ref_count(place) != 1]
        assert not held, f"slots {held} are held"
        assert parts.disk.space.used_bytes == sum(
            parts.disk.space.slot_bytes(namespace_id) * len(parts.disk.stored(namespace_id))
            for namespace_id in self.core.namespace_ids()
        ), "a slot on the disk holds nothing"

    def _places_on_disk(self) -> list[Place]:
        disk = self.tier._parts.disk
        return [
            block.place for namespace_id in self.core.namespace_ids() for block in disk.stored(namespace_id).values()
        ]

    def place_of(self, number: int, namespace: Namespace = SMALL) -> tuple[int, int]:
        """Segment and offset in its file of a block on the disk."""
        block = self.tier._parts.disk.stored(self.id_of(namespace))[block_hash(number)]
        return segment_offset(block.place, slab_bytes=self.tier._parts.settings.slab_bytes)

    def segment_path(self, segment: int) -> Path:
        return self.folder / "segments" / f"{segment:08}.seg"

    @property
    def fault_counts(self) -> dict[str, int]:
        """Faults that were counted at all."""
        return {name: count for name, count in self.tier.figures().fault_counts.items() if count}

    async def reopen(self) -> None:
        await self.close()
        await self.open()


async def settled() -> None:
    """Lets callbacks run that are due."""
    for _ in range(5):
        await asyncio.sleep(0)
