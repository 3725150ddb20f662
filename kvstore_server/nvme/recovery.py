"""Opening the folder of the NVMe tier: what is there is found again, without reading a block.

Records of the index are hints, for whoever reads a block verifies it; so the start takes as long as there are records
and segments, however many bytes they hold. An index that is damaged or gone is built anew from the segments.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress, repeat
from operator import itemgetter
from pathlib import Path

import structlog

from kvstore.errors import CorruptBlockError
from kvstore_server.core.admission import Admission
from kvstore_server.core.disk import DiskBlock, DiskCore
from kvstore_server.core.disk_health import DiskFault
from kvstore_server.core.space import SlabId, SlabSpace
from kvstore_server.core.store import BlockKey
from kvstore_server.core.tenants import DEFAULT_TENANT, ScopedId, Tenant, tenant_of
from kvstore_server.nvme.device import Device, FileDevice, aligned_buffer
from kvstore_server.nvme.format import SEGMENT_HEADER_BYTES, SegmentHeader
from kvstore_server.nvme.index import Index, IndexDamagedError, IndexFullError, remove_index
from kvstore_server.nvme.lasting_index import LastingIndex
from kvstore_server.nvme.parts import Recovered
from kvstore_server.nvme.rebuild import scan

INDEX_FOLDER = "index"
_APPLY_COUNT = 4096
"""Records in one transaction of a rebuild."""
_SEQUENCE_END = 1 << 63
"""Beyond all writes of a device's life."""
_READERS = 8
_SEGMENT_COUNT_MIN = 2
"""As in the configuration: with one segment, a single namespace would have all."""
_WRITES_PER_S_LOG2 = 24
"""A start's writes are numbered from its time in seconds on; no device writes 16 million blocks in one."""

_log = structlog.get_logger("kvstore.nvme")


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How the folder is divided, as it is configured."""

    segment_bytes: int
    is_segment_bytes_given: bool
    """Whether the operator chose it; else segments that are there already are taken as they are."""
    room_bytes: int
    """What all segments together may take."""
    index_map_bytes: int
    tenants: frozenset[Tenant] = frozenset({DEFAULT_TENANT})
    """Among whom the space is divided; blocks of others are of no use any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    device: Device
    index: LastingIndex
    disk: DiskCore
    recovered: Recovered
    segment_bytes: int
    segment_count_max: int


def open_folder(
    folder: Path,
    *,
    geometry: Geometry,
    admission: Admission,
    policy: str = "lru",
    make_device: Callable[[Path], Device] = FileDevice,
) -> Opened:
    """Blocks for as long as it takes. Whoever calls owns the folder. Raises `OSError` or a `KvstoreError`."""
    # All that is made here stays: the collector would go through it over and over, for a third of the time.
    with _without_collector():
        return _open_folder(folder, geometry=geometry, admission=admission, policy=policy, make_device=make_device)


@contextmanager
def _without_collector() -> Iterator[None]:
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


def _open_folder(
    folder: Path, *, geometry: Geometry, admission: Admission, policy: str, make_device: Callable[[Path], Device]
) -> Opened:
    started_s = time.perf_counter()
    device = make_device(folder)
    try:
        headers, unreadable = _read_headers(device)
        sizes = device.segments()
        truncated = [number for number, header in headers.items() if header and sizes[number] < header.segment_bytes]
        segment_bytes = _segment_bytes(headers, geometry)
        count_max = geometry.room_bytes // segment_bytes
        headers = _without_useless(device, headers, segment_bytes=segment_bytes, count_max=count_max)
        index, was_rebuilt = _open_index(folder / INDEX_FOLDER, device, headers, geometry, segment_bytes=segment_bytes)
    except BaseException:
        device.close()
        raise
    try:
        assignments = {
            number: header for number, header in headers.items() if header and header.store_id == index.store_id
        }
        disk, record_count, refused = _restore(
            index,
            assignments,
            usable=headers.keys() - unreadable,
            unreadable=unreadable,
            segment_bytes=segment_bytes,
            count_max=count_max,
            admission=admission,
            policy=policy,
            tenants=geometry.tenants,
        )
        if refused:
            with suppress(IndexFullError):  # they are refused again, then
                index.apply((), [(bytes(key.namespace_id), key.block_hash) for key in refused])
    except BaseException:
        index.close()
        device.close()
        raise
    recovered = Recovered(
        record_count=record_count - len(refused),
        refused_count=len(refused) + index.skipped_count,
        took_s=time.perf_counter() - started_s,
        was_rebuilt=was_rebuilt,
        assignments=assignments,
        faults=[DiskFault.UNREADABLE] * len(unreadable) + [DiskFault.TRUNCATED] * len(truncated),
    )
    _log.info(
        "nvme_opened",
        folder=str(folder),
        blocks=recovered.record_count,
        refused_records=recovered.refused_count,
        segments=len(headers),
        is_direct=device.is_direct,
        was_rebuilt=was_rebuilt,
        took_s=round(recovered.took_s, 3),
    )
    return Opened(
        device=device,
        index=LastingIndex(
            index,
            reopen=partial(
                Index, folder / INDEX_FOLDER, map_bytes=geometry.index_map_bytes, new_store_id=index.store_id
            ),
            remove=partial(remove_index, folder / INDEX_FOLDER),
            was_rebuilt=was_rebuilt,
        ),
        disk=disk,
        recovered=recovered,
        segment_bytes=segment_bytes,
        segment_count_max=count_max,
    )


def _read_headers(device: Device) -> tuple[dict[int, SegmentHeader | None], set[int]]:
    """What each segment says of itself, and those that cannot be read.

    None: nothing that can be understood, as when it was just being made.
    """
    numbers = sorted(device.segments())
    with ThreadPoolExecutor(_READERS, thread_name_prefix="kvstore-nvme-open") as readers:
        shares = [numbers[start::_READERS] for start in range(_READERS)]
        parts = readers.map(partial(_read_some_headers, device), shares)
        found = dict(sorted(chain.from_iterable(parts), key=itemgetter(0)))
    unreadable = set()
    for number, header in found.items():
        if isinstance(header, OSError):
            unreadable.add(number)
            _log.error(
                "nvme_segment_unreadable",
                segment=number,
                reason=str(header),
                hint="it is not used; its blocks are back when it can be read at a start of the daemon",
            )
    return {number: None if isinstance(header, OSError) else header for number, header in found.items()}, unreadable


def _read_some_headers(device: Device, numbers: Sequence[int]) -> list[tuple[int, SegmentHeader | OSError | None]]:
    """Runs in a thread."""
    page = aligned_buffer(SEGMENT_HEADER_BYTES)
    return [(number, _read_header(device, number, page)) for number in numbers]


def _read_header(device: Device, number: int, page: memoryview) -> SegmentHeader | OSError | None:
    try:
        device.read(number, 0, [page])
        header = SegmentHeader.decode(page)
    except OSError as error:
        return error
    except CorruptBlockError:
        return None
    return header if header.index == number else None


def _segment_bytes(headers: Mapping[int, SegmentHeader | None], geometry: Geometry) -> int:
    """What the operator chose, or what most segments have, if enough of these fit into the capacity."""
    sizes = Counter(header.segment_bytes for header in headers.values() if header is not None)
    if geometry.is_segment_bytes_given or not sizes:
        return geometry.segment_bytes
    own_bytes = sizes.most_common(1)[0][0]
    return own_bytes if own_bytes * _SEGMENT_COUNT_MIN <= geometry.room_bytes else geometry.segment_bytes


def _without_useless(
    device: Device, headers: dict[int, SegmentHeader | None], *, segment_bytes: int, count_max: int
) -> dict[int, SegmentHeader | None]:
    """Removes segments beyond the capacity and of another size: the first would pass it, the others cannot be used."""
    sizes = device.segments()
    useless = [number for number in headers if number >= count_max or sizes[number] != segment_bytes]
    for number in useless:
        _log.warning(
            "nvme_segment_removed",
            segment=number,
            size_bytes=sizes[number],
            wanted_bytes=segment_bytes,
            hint="nvme.capacity or nvme.segment_size was changed, or somebody has changed the folder",
        )
        device.remove(number)
    return {number: header for number, header in headers.items() if number not in set(useless)}


def _open_index(
    folder: Path,
    device: Device,
    headers: Mapping[int, SegmentHeader | None],
    geometry: Geometry,
    *,
    segment_bytes: int,
) -> tuple[Index, bool]:
    """The index, and whether it had to be built anew."""
    store_ids = [header.store_id for header in headers.values() if header is not None]
    try:
        index = Index(folder, map_bytes=geometry.index_map_bytes)
        if not store_ids or index.store_id in store_ids:
            return index, False
        index.close()
        reason = "it is not that of the segments, or is gone"
    except IndexDamagedError as error:
        reason = str(error)
    _log.error("nvme_index_damaged", reason=reason, hint="it is built anew from the segments; nothing needs to be done")
    remove_index(folder)
    store_id = max(set(store_ids), key=store_ids.count) if store_ids else None
    index = Index(folder, map_bytes=geometry.index_map_bytes, new_store_id=store_id)
    try:
        if store_id is not None:
            found = scan(device, segment_bytes=segment_bytes, store_id=store_id)
            newest_first = sorted(found.records, key=lambda record: record.sequence, reverse=True)
            with suppress(IndexFullError):  # the oldest blocks find no room
                for start in range(0, len(newest_first), _APPLY_COUNT):
                    index.apply(newest_first[start : start + _APPLY_COUNT], ())
            _log.info(
                "nvme_index_rebuilt",
                blocks=len(found.records),
                damaged_slots=found.damaged_count,
                dropped_segments=found.dropped_segment_count,
            )
    except BaseException:
        index.close()
        raise
    return index, True


def _restore(
    index: Index,
    assignments: Mapping[int, SegmentHeader],
    *,
    usable: Set[int],
    unreadable: Set[int],
    segment_bytes: int,
    count_max: int,
    admission: Admission,
    policy: str,
    tenants: frozenset[Tenant],
) -> tuple[DiskCore, int, Sequence[BlockKey]]:
    """The core with all that the index knows, how many records there were, and the keys of those that cannot be.

    What is in unreadable segments is neither: it is left for a start that can read them.
    """
    slab_bytes = segment_bytes - SEGMENT_HEADER_BYTES
    space = SlabSpace(slab_count=max(count_max, 1), slab_bytes=slab_bytes, tenant_count=len(tenants))
    for number in sorted(usable):
        space.add_slab(SlabId(number))
    disk = DiskCore(space=space, admission=admission, policy=policy)
    columns = index.columns()
    segments, sequences = (columns.places // slab_bytes).tolist(), columns.sequences.tolist()
    # Whose each segment is, and from which write on: what was written before is of no use.
    owners = {number: (header.scoped_id, header.assignment) for number, header in assignments.items()}
    nobody = (b"", 0)
    is_known = [
        owner_id == scoped_id and sequence >= assignment
        for scoped_id, sequence, (owner_id, assignment) in zip(
            columns.scoped_ids, sequences, map(owners.get, segments, repeat(nobody)), strict=True
        )
    ]
    keys = list(map(BlockKey._make, zip(columns.scoped_ids, columns.block_hashes, strict=True)))
    numbers = columns.places.tolist(), sequences, columns.stored_bytes.tolist()
    blocks = map(DiskBlock._make, zip(*numbers, columns.parent_hashes, strict=True))
    known = list(compress(zip(keys, blocks, strict=True), is_known))
    refused = [keys[row] for row, is_one in enumerate(is_known) if not is_one and segments[row] not in unreadable]
    # Above the numbers of writes that never came to be in the index, too: what they left behind must look old.
    disk.skip_to(int(time.time()) << _WRITES_PER_S_LOG2)
    disk.skip_to(max((header.assignment for header in assignments.values()), default=0))
    # Also above those of blocks that are not restored now; a larger one is damaged.
    disk.skip_to(int(columns.sequences[columns.sequences < _SEQUENCE_END].max(initial=0)))
    slot_bytes_of = {
        ScopedId(header.scoped_id): header.slot_bytes
        for header in assignments.values()
        if header.slot_bytes and tenant_of(ScopedId(header.scoped_id)) in tenants
    }
    refused_count = len(refused)
    refused += disk.restore(known, slot_bytes_of=slot_bytes_of, now_s=time.monotonic())
    return disk, len(known) + refused_count, refused
