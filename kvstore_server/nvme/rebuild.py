"""Finds the blocks in segments without their index. Believes nothing that it cannot verify.

A deep scan reads all of every block and proves it. Otherwise a page per slot is read: enough to know what a slot
claims to hold, and whoever reads the block verifies it anyway.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeAlias

from kvstore.envelope import ENVELOPE_BYTES, Buffer, Envelope, checksum
from kvstore.errors import CorruptBlockError
from kvstore.keys import HASH_BYTES, BlockHash
from kvstore_server.core.tenants import ScopedId, namespace_of
from kvstore_server.nvme.device import Device, aligned_buffer
from kvstore_server.nvme.format import (
    DISK_HEADER_BYTES,
    PAGE_BYTES,
    SEGMENT_HEADER_BYTES,
    DiskHeader,
    SegmentHeader,
    StoredCodec,
    padded,
)
from kvstore_server.nvme.index import IndexRecord

Decode: TypeAlias = Callable[[DiskHeader, Envelope, memoryview], Buffer]
"""The payload of a compressed block from its stored bytes; raises `CorruptBlockError`. Called from several threads."""

DROPPED_MAX = 1000
"""How many of the things that were dropped a scan tells apart; counts have them all."""

_PAYLOAD_AT = DISK_HEADER_BYTES + ENVELOPE_BYTES
_BLOCK_MAGIC = b"KVNB"
_NO_HEADER = bytes(DISK_HEADER_BYTES)
_NO_PAGE = bytes(PAGE_BYTES)
_READS_IN_FLIGHT = 8
# Of slots that one thread reads in turn: few enough to show progress, enough not to be felt beside the reads.
_TURN_SLOTS_MAX = 64
_TURN_BYTES_MAX = 32 << 20


class Dropped(NamedTuple):
    """Something that is not in the records of a scan."""

    segment: int
    slot: int | None
    """None: the whole segment."""
    reason: str


@dataclass(slots=True, kw_only=True)
class Scan:
    """What segments hold. Each slot is counted once: as a block, or as what it is instead."""

    records: list[IndexRecord] = field(default_factory=list)
    """One for each block, its latest."""
    store_id: bytes | None = None
    """Whose segments were scanned; None: there were none."""
    last_sequence: int = 0
    """The highest number seen in any segment or slot of the store; what is written next needs a higher one."""
    segment_count: int = 0
    free_segment_count: int = 0
    """Segments that belong to no namespace."""
    dropped_segment_count: int = 0
    """Segments whose header is damaged, unreadable, of another store or another segment size."""
    slot_count: int = 0
    """Of all other segments."""
    empty_count: int = 0
    """Never written since the segment was made."""
    leftover_count: int = 0
    """Written before the segment was given to its namespace, or in the middle of what was."""
    damaged_count: int = 0
    unreadable_count: int = 0
    """The device failed to read them."""
    cut_off_count: int = 0
    """Behind the end of a segment file that is too short."""
    duplicate_count: int = 0
    """Blocks that are also in another slot, which was written later."""
    unchecked_count: int = 0
    """Of a deep scan: blocks kept without their checksum, since there is nothing to decompress them with."""
    dropped: list[Dropped] = field(default_factory=list)
    """The first `DROPPED_MAX` of whatever is damaged, unreadable, cut off or of others."""

    @property
    def block_count(self) -> int:
        return len(self.records)

    def note(self, segment: int, slot: int | None, reason: str) -> None:
        if len(self.dropped) < DROPPED_MAX:
            self.dropped.append(Dropped(segment, slot, reason))


class _Kind(Enum):
    BLOCK = "block"
    UNCHECKED = "unchecked"
    EMPTY = "empty"
    LEFTOVER = "leftover"
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"


class _Slot(NamedTuple):
    """What one slot turned out to be."""

    number: int
    kind: _Kind
    sequence: int = 0
    record: IndexRecord | None = None
    reason: str = ""


class _Turn(NamedTuple):
    """Slots of one segment that one thread reads."""

    header: SegmentHeader
    file_bytes: int
    slots: range

    @property
    def size_bytes(self) -> int:
        return len(self.slots) * self.header.slot_bytes


def scan(
    device: Device,
    *,
    segment_bytes: int,
    store_id: bytes | None = None,
    is_deep: bool = False,
    decode: Decode | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Scan:
    """Goes through all segments; blocks for as long as that takes.

    Segments of another store than `store_id` are left out; None: that of the most segments. Without `decode`, a deep
    scan does not check the payloads of compressed blocks. `on_progress` is told the bytes that are done and their
    total, in this thread; what it raises ends the scan. Raises `OSError` only when the segments cannot be listed.
    """
    sizes = device.segments()
    result = Scan(segment_count=len(sizes))
    progress = _Progress(sum(sizes.values()), on_progress)
    headers = _read_headers(device, sizes, result, segment_bytes=segment_bytes, store_id=store_id)
    for index in sizes.keys() - headers.keys():
        progress.add(sizes[index])
    reader = _Reader(device, is_deep=is_deep, decode=decode)
    best: dict[tuple[bytes, BlockHash], IndexRecord] = {}
    for turn, slots in _run(reader, _turns(headers, sizes, result), thread_count=_READS_IN_FLIGHT):
        for slot in slots:
            _count(slot, turn.header, result, best)
        progress.add(turn.size_bytes)
    progress.finish()
    result.records.extend(best.values())
    return result


class _Progress:
    def __init__(self, total_bytes: int, told: Callable[[int, int], None] | None) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._told = told

    def add(self, size_bytes: int) -> None:
        # A segment file may be shorter than the slots that should be in it.
        self._done_bytes = min(self._done_bytes + size_bytes, self._total_bytes)
        if self._told is not None:
            self._told(self._done_bytes, self._total_bytes)

    def finish(self) -> None:
        if self._done_bytes < self._total_bytes:
            self.add(self._total_bytes - self._done_bytes)


def _read_headers(
    device: Device, sizes: dict[int, int], result: Scan, *, segment_bytes: int, store_id: bytes | None
) -> dict[int, SegmentHeader]:
    """Of the segments that belong to the store and to a namespace; notes the others."""
    page = aligned_buffer(PAGE_BYTES)
    read: dict[int, SegmentHeader] = {}
    for index in sorted(sizes):
        try:
            device.read(index, 0, [page])
            if page == _NO_PAGE:
                result.free_segment_count += 1  # made, and never given out
                continue
            read[index] = SegmentHeader.decode(page)
        except (OSError, CorruptBlockError) as error:
            result.dropped_segment_count += 1
            result.note(index, None, _describe(error))
    if store_id is None and read:
        store_id = Counter(header.store_id for header in read.values()).most_common(1)[0][0]
    result.store_id = store_id
    kept: dict[int, SegmentHeader] = {}
    for index, header in read.items():
        problem = _problem(header, index=index, segment_bytes=segment_bytes, store_id=store_id)
        if problem is not None:
            result.dropped_segment_count += 1
            result.note(index, None, problem)
            continue
        result.last_sequence = max(result.last_sequence, header.assignment)
        if header.slot_bytes:
            kept[index] = header
        else:
            result.free_segment_count += 1
    return kept


def _problem(header: SegmentHeader, *, index: int, segment_bytes: int, store_id: bytes | None) -> str | None:
    """Why a sound header is of no use."""
    if header.store_id != store_id:
        return f"belongs to store {header.store_id.hex()}"
    if header.index != index:
        return f"was written as segment {header.index}"
    if header.segment_bytes != segment_bytes:
        return f"was made for segments of {header.segment_bytes} bytes, they have {segment_bytes}"
    if header.slot_bytes and len(header.scoped_id) < HASH_BYTES:
        return f"scoped_id has {len(header.scoped_id)} bytes; allowed: {HASH_BYTES} or more"
    return None


def _turns(headers: dict[int, SegmentHeader], sizes: dict[int, int], result: Scan) -> Iterator[_Turn]:
    for index, header in headers.items():
        slot_bytes = header.slot_bytes
        slot_count = (header.segment_bytes - SEGMENT_HEADER_BYTES) // slot_bytes
        # A slot of which only the end is missing may still hold a smaller block.
        room_bytes = min(sizes[index], header.segment_bytes) - SEGMENT_HEADER_BYTES
        readable_count = min(slot_count, max(room_bytes - PAGE_BYTES, -slot_bytes) // slot_bytes + 1)
        result.slot_count += slot_count
        if readable_count < slot_count:
            result.cut_off_count += slot_count - readable_count
            result.note(
                index,
                None,
                f"the file has {sizes[index]} of {header.segment_bytes} bytes; "
                f"{slot_count - readable_count} of {slot_count} slots are missing",
            )
        step = min(_TURN_SLOTS_MAX, max(_TURN_BYTES_MAX // slot_bytes, 1))
        for start in range(0, readable_count, step):
            yield _Turn(header, sizes[index], range(start, min(start + step, readable_count)))


def _run(reader: _Reader, turns: Iterator[_Turn], *, thread_count: int) -> Iterator[tuple[_Turn, list[_Slot]]]:
    """The slots of each turn, in order, with several being read at the same time."""
    in_flight: deque[tuple[_Turn, Future[list[_Slot]]]] = deque()
    with ThreadPoolExecutor(thread_count, thread_name_prefix="nvme-scan") as threads:
        try:
            for turn in turns:
                in_flight.append((turn, threads.submit(reader.read, turn)))
                if len(in_flight) > thread_count:
                    first, future = in_flight.popleft()
                    yield first, future.result()
            while in_flight:
                first, future = in_flight.popleft()
                yield first, future.result()
        finally:
            for _, future in in_flight:
                future.cancel()


def _count(slot: _Slot, header: SegmentHeader, result: Scan, best: dict[tuple[bytes, BlockHash], IndexRecord]) -> None:
    result.last_sequence = max(result.last_sequence, slot.sequence)
    match slot.kind:
        case _Kind.EMPTY:
            result.empty_count += 1
        case _Kind.LEFTOVER:
            result.leftover_count += 1
        case _Kind.DAMAGED:
            result.damaged_count += 1
            result.note(header.index, slot.number, slot.reason)
        case _Kind.UNREADABLE:
            result.unreadable_count += 1
            result.note(header.index, slot.number, slot.reason)
        case _Kind.BLOCK | _Kind.UNCHECKED:
            assert slot.record is not None, f"slot {slot.number} of segment {header.index} is a block without a record"
            result.unchecked_count += slot.kind is _Kind.UNCHECKED
            key = (slot.record.scoped_id, slot.record.block_hash)
            known = best.get(key)
            result.duplicate_count += known is not None
            if known is None or slot.record.sequence > known.sequence:
                best[key] = slot.record


class _Reader:
    """Reads slots and judges them. Threads share it."""

    def __init__(self, device: Device, *, is_deep: bool, decode: Decode | None) -> None:
        self._device = device
        self._is_deep = is_deep
        self._decode = decode
        self._local = threading.local()

    def read(self, turn: _Turn) -> list[_Slot]:
        return [self._read_slot(turn, number) for number in turn.slots]

    def _read_slot(self, turn: _Turn, number: int) -> _Slot:
        buffer = self._buffer(turn.header.slot_bytes if self._is_deep else PAGE_BYTES)
        page = buffer[:PAGE_BYTES]
        offset = SEGMENT_HEADER_BYTES + number * turn.header.slot_bytes
        sequence = 0
        try:
            self._device.read(turn.header.index, offset, [page])
            if page[: len(_BLOCK_MAGIC)] != _BLOCK_MAGIC:
                is_empty = page[:DISK_HEADER_BYTES] == _NO_HEADER
                return _Slot(number, _Kind.EMPTY if is_empty else _Kind.LEFTOVER)
            header = DiskHeader.decode(page)
            sequence = header.sequence
            if sequence < turn.header.assignment:
                return _Slot(number, _Kind.LEFTOVER, sequence)
            envelope = Envelope.decode(page[DISK_HEADER_BYTES:_PAYLOAD_AT])
            _check_claims(header, envelope, turn, offset)
            kind = _Kind.BLOCK
            if self._is_deep:
                rest = buffer[PAGE_BYTES : padded(DISK_HEADER_BYTES + header.stored_bytes)]
                if len(rest):
                    self._device.read(turn.header.index, offset + PAGE_BYTES, [rest])
                if not self._check_payload(header, envelope, buffer):
                    kind = _Kind.UNCHECKED
        except CorruptBlockError as error:
            return _Slot(number, _Kind.DAMAGED, sequence, reason=_describe(error))
        except OSError as error:
            return _Slot(number, _Kind.UNREADABLE, sequence, reason=_describe(error))
        record = IndexRecord(
            turn.header.scoped_id,
            envelope.block_hash,
            turn.header.index * (turn.header.segment_bytes - SEGMENT_HEADER_BYTES) + number * turn.header.slot_bytes,
            sequence,
            header.stored_bytes,
            header.parent_hash,
        )
        return _Slot(number, kind, sequence, record)

    def _check_payload(self, header: DiskHeader, envelope: Envelope, slot: memoryview) -> bool:
        """False: there is nothing to check it with."""
        payload: Buffer = slot[_PAYLOAD_AT : DISK_HEADER_BYTES + header.stored_bytes]
        if header.codec is not StoredCodec.RAW:
            if self._decode is None:
                return False
            payload = self._decode(header, envelope, memoryview(payload))
        if len(payload) != envelope.payload_bytes or checksum(payload) != envelope.payload_checksum:
            raise CorruptBlockError("payload checksum does not match")
        return True

    def _buffer(self, size_bytes: int) -> memoryview:
        """Of this thread's own; as large as the largest slot so far."""
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < size_bytes:
            buffer = self._local.buffer = aligned_buffer(size_bytes)
        return buffer


def _check_claims(header: DiskHeader, envelope: Envelope, turn: _Turn, offset: int) -> None:
    """Whether this block can be in this slot; raises `CorruptBlockError`."""
    if envelope.namespace_id != namespace_of(ScopedId(turn.header.scoped_id)):
        raise CorruptBlockError(f"holds a block of namespace {envelope.namespace_id.hex()[:16]}, not the segment's")
    size_bytes = DISK_HEADER_BYTES + header.stored_bytes
    if size_bytes > turn.header.slot_bytes:
        raise CorruptBlockError(f"claims {size_bytes} bytes in a slot of {turn.header.slot_bytes}")
    raw_bytes = ENVELOPE_BYTES + envelope.payload_bytes
    if header.codec is StoredCodec.RAW and header.stored_bytes != raw_bytes:
        raise CorruptBlockError(f"stores {header.stored_bytes} bytes of a raw block of {raw_bytes}")
    if offset + padded(size_bytes) > turn.file_bytes:
        raise CorruptBlockError(f"ends behind the segment file's {turn.file_bytes} bytes")


def _describe(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {os.strerror(error.errno) if error.errno else error}"
    return str(error)
