"""From the configuration's values to a tier that runs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from kvstore_server.core.admission import Admission
from kvstore_server.core.store import StoreCore
from kvstore_server.nvme.device import Device, FileDevice
from kvstore_server.nvme.format import SEGMENT_HEADER_BYTES, StoredCodec
from kvstore_server.nvme.images import Images, SlotView
from kvstore_server.nvme.parts import Parts, TierSettings
from kvstore_server.nvme.recovery import Geometry, open_folder
from kvstore_server.nvme.tier import NvmeTier

_log = structlog.get_logger("kvstore.nvme")


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeSettings:
    """What the operator wants."""

    folder: Path
    capacity_bytes: int
    geometry: Geometry
    free_reserve_bytes: Callable[[int], int]
    """Of the size of the file system."""
    admission: Admission
    policy: str
    """Of eviction; see `Evictor`."""
    batch_count: int
    io_threads: int
    is_synced: bool
    load_timeout_s: float
    prefetch_bytes_max: int
    codecs: tuple[StoredCodec, ...]
    forced_codec: StoredCodec | None


async def open_tier(
    settings: NvmeSettings,
    *,
    store: StoreCore,
    slot_view: SlotView,
    clock: Callable[[], float],
    on_settled: Callable[[], None],
    make_device: Callable[[Path], Device] = FileDevice,
) -> NvmeTier:
    """Opens the folder, which the caller owns, in a thread. Raises `OSError` or a `KvstoreError`."""
    open_ = partial(
        open_folder,
        settings.folder,
        geometry=settings.geometry,
        admission=settings.admission,
        policy=settings.policy,
        make_device=make_device,
    )
    opened = await asyncio.to_thread(open_)
    try:
        filesystem = os.statvfs(settings.folder)
        used_bytes = opened.device.used_bytes()
    except BaseException:
        opened.index.close()
        opened.device.close()
        raise
    reserve_bytes = settings.free_reserve_bytes(filesystem.f_frsize * filesystem.f_blocks)
    room_bytes = filesystem.f_frsize * filesystem.f_bavail - reserve_bytes + used_bytes
    if room_bytes < settings.capacity_bytes:
        _log.warning(
            "nvme_capacity_beyond_disk",
            capacity_bytes=settings.capacity_bytes,
            room_bytes=room_bytes,
            hint="the file system has no room for nvme.capacity beside nvme.free_reserve; the tier ends there",
        )
    tier_settings = TierSettings(
        capacity_bytes=settings.capacity_bytes,
        segment_bytes=opened.segment_bytes,
        segment_count_max=opened.segment_count_max,
        free_reserve_bytes=reserve_bytes,
        batch_count=settings.batch_count,
        io_threads=settings.io_threads,
        is_synced=settings.is_synced,
        load_timeout_s=settings.load_timeout_s,
        prefetch_bytes_max=settings.prefetch_bytes_max,
        codecs=settings.codecs,
        forced_codec=settings.forced_codec,
    )
    parts = Parts(
        disk=opened.disk,
        store=store,
        device=opened.device,
        index=opened.index,
        images=Images(opened.device, slot_view=slot_view, slab_bytes=opened.segment_bytes - SEGMENT_HEADER_BYTES),
        io_threads=ThreadPoolExecutor(settings.io_threads, thread_name_prefix="kvstore-nvme"),
        index_thread=ThreadPoolExecutor(1, thread_name_prefix="kvstore-nvme-index"),
        settings=tier_settings,
        clock=clock,
        on_settled=on_settled,
    )
    return NvmeTier(parts, recovered=opened.recovered)
