"""How long it takes until what an index names can be found again, however large the blocks are."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvstore.envelope import ENVELOPE_BYTES
from kvstore.errors import CorruptBlockError
from kvstore.keys import HASH_BYTES, BlockHash
from kvstore.slab import PAYLOAD_OFFSET_BYTES
from kvstore_client.bench import blocks
from kvstore_server.core.admission import Admission
from kvstore_server.core.space import SlabId, SlabSpace
from kvstore_server.core.tenants import DEFAULT_TENANT, ScopedId, scoped
from kvstore_server.nvme.device import FileDevice, aligned_buffer
from kvstore_server.nvme.format import SEGMENT_HEADER_BYTES, SegmentHeader, padded, segment_offset
from kvstore_server.nvme.index import Index, IndexRecord
from kvstore_server.nvme.recovery import INDEX_FOLDER, Geometry, open_folder

_CHAIN_COUNT = 32
_APPLY_COUNT = 4096
_CAPACITY_SHARE = 0.8
"""Of the capacity that the blocks take."""
_CAPACITY_BYTES_MIN = 64 << 20
_RECORD_BYTES_MAX = 1024
"""What a record takes in the index at most."""


def recovery_times_s(
    folder: Path, *, geometry_of: Callable[[int], Geometry], block_bytes: int, record_count: int, round_count: int
) -> list[float]:
    """Seconds from a closed folder with so many blocks until all can be found, once per round.

    `geometry_of` is given bytes of capacity. Segments hold nothing besides their headers: an opening reads no more of
    them. The index is not in the page cache.
    """
    slot_bytes = padded(PAYLOAD_OFFSET_BYTES + block_bytes)
    geometry = geometry_of(max(int(record_count * slot_bytes / _CAPACITY_SHARE), _CAPACITY_BYTES_MIN))
    # For blocks below 256 KiB, as many as there are to be are more than an index has room for by default.
    geometry = replace(geometry, index_map_bytes=max(geometry.index_map_bytes, record_count * _RECORD_BYTES_MAX))
    scoped_id = _make_folder(folder, geometry, block_bytes=block_bytes, record_count=record_count)
    times_s = []
    for _ in range(round_count):
        _forget_cached(folder / INDEX_FOLDER / "data.mdb")
        gc.collect()  # a daemon that starts has nothing else in memory
        started_s = time.perf_counter()
        opened = open_folder(
            folder,
            geometry=geometry,
            admission=Admission(policy="all", write_budget_bytes_per_day=None),
            policy="phix",
        )
        found_count = len(opened.disk.stored(scoped_id))
        times_s.append(time.perf_counter() - started_s)
        opened.index.close()
        opened.device.close()
        del opened
        if found_count != record_count:
            raise CorruptBlockError(f"of {record_count} blocks in the index {found_count} were found again")
    return times_s


def _make_folder(folder: Path, geometry: Geometry, *, block_bytes: int, record_count: int) -> ScopedId:
    """Returns whose the blocks are."""
    scoped_id = scoped(DEFAULT_TENANT, blocks.namespace(block_bytes, revision=blocks.new_revision()).id)
    slab_bytes = geometry.segment_bytes - SEGMENT_HEADER_BYTES
    segment_count = geometry.room_bytes // geometry.segment_bytes
    space = SlabSpace(slab_count=segment_count, slab_bytes=slab_bytes)
    for number in range(segment_count):
        space.add_slab(SlabId(number))
    slot_bytes = space.open(scoped_id, block_bytes=PAYLOAD_OFFSET_BYTES + block_bytes)
    records = _records(scoped_id, space, record_count=record_count, stored_bytes=ENVELOPE_BYTES + block_bytes)
    device = FileDevice(folder)
    index = Index(folder / INDEX_FOLDER, map_bytes=geometry.index_map_bytes)
    try:
        first_in: dict[int, int] = {}
        for record in records:
            first_in.setdefault(segment_offset(record.place, slab_bytes=slab_bytes)[0], record.sequence)
        page = aligned_buffer(SEGMENT_HEADER_BYTES)
        for number, sequence in first_in.items():
            with (folder / "segments" / f"{number:08}.seg").open("xb") as file:
                file.truncate(geometry.segment_bytes)
            header = SegmentHeader(
                store_id=index.store_id,
                index=number,
                segment_bytes=geometry.segment_bytes,
                slot_bytes=slot_bytes,
                assignment=sequence,
                scoped_id=scoped_id,
            )
            page[:] = header.encode()
            device.write(number, 0, [page])
        for start in range(0, record_count, _APPLY_COUNT):
            index.apply(records[start : start + _APPLY_COUNT], ())
    finally:
        index.close()
        device.close()
    return scoped_id


def _records(scoped_id: ScopedId, space: SlabSpace, *, record_count: int, stored_bytes: int) -> list[IndexRecord]:
    """Of chains as they are written: one after the other, into the places that are free next."""
    numbers = random.Random(0)
    records = []
    parent_hash: BlockHash | None = None
    for sequence in range(1, record_count + 1):
        place = space.allocate(scoped_id)
        assert place is not None, f"{sequence} blocks do not fit into {space.capacity_bytes} bytes"
        block_hash = BlockHash(numbers.randbytes(HASH_BYTES))
        records.append(IndexRecord(scoped_id, block_hash, place, sequence, stored_bytes, parent_hash))
        parent_hash = block_hash if sequence % _CHAIN_COUNT else None
    return records


def _forget_cached(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
