"""What is in a segment file of the NVMe tier: a header of one page, then equal slots.

Format: docs/formats/nvme_segment.md. All integers are little-endian.

A segment header, 4096 bytes:

    0   magic "KVNS"               32  u64 segment bytes          58    scoped id
    4   u16 version, u16 zero      40  u64 slot bytes, 0: free    ...   zero
    8   store id, 16               48  u64 assignment             4088  u64 checksum of the first 4088 bytes
    24  u32 index, u32 zero        56  u16 length of scoped id

The header of a slot, 64 bytes, before the envelope:

    0   magic "KVNB"               16  u64 stored bytes
    4   u16 version, u16 codec     24  parent hash, 32, zero: none
    8   u64 sequence               56  u64 checksum of the first 56 bytes

Checksums are those of `kvstore.envelope`. Which block a slot holds, and the checksum of its payload, is in the
envelope.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from kvstore.envelope import ENVELOPE_BYTES, Buffer, checksum
from kvstore.errors import CorruptBlockError
from kvstore.keys import HASH_BYTES, BlockHash

PAGE_BYTES = 4096
"""What offsets, lengths and addresses are multiples of: the largest sector that O_DIRECT asks for."""
SEGMENT_HEADER_BYTES = PAGE_BYTES
DISK_HEADER_BYTES = 64
"""As long as the header of a slot in memory, so that all that follows lies as it does there."""
STORE_ID_BYTES = 16
SCOPED_ID_BYTES_MAX = 256

_VERSION = 1
_SEGMENT_MAGIC = b"KVNS"
_BLOCK_MAGIC = b"KVNB"
_SEGMENT_HEADER = struct.Struct("<4sHH16sIIQQQH")
_DISK_HEADER = struct.Struct("<4sHHQQ32s")
_CHECKSUM = struct.Struct("<Q")
_SCOPED_ID_AT = _SEGMENT_HEADER.size
_NO_PARENT = bytes(HASH_BYTES)


class StoredCodec(IntEnum):
    """How the payload of a block lies on the disk; the envelope in front of it is that of the block in memory."""

    RAW = 0
    ZSTD = 1
    """zstd of the byte-shuffled payload."""
    LZ4 = 2
    """lz4 of the byte-shuffled payload."""


_CODECS = {int(codec): codec for codec in StoredCodec}


class DiskHeader(NamedTuple):
    """The first 64 bytes of a slot."""

    sequence: int
    """Which write of the whole tier this was: higher than that of everything written before."""
    stored_bytes: int
    """Envelope and payload as they lie here."""
    codec: StoredCodec
    parent_hash: BlockHash | None
    """None: the block starts a prompt."""

    def encode(self) -> bytes:
        parent_hash = _NO_PARENT if self.parent_hash is None else self.parent_hash
        assert len(parent_hash) == HASH_BYTES, f"parent_hash has {len(parent_hash)} bytes"
        head = _DISK_HEADER.pack(_BLOCK_MAGIC, _VERSION, self.codec, self.sequence, self.stored_bytes, parent_hash)
        return head + _CHECKSUM.pack(checksum(head))

    @classmethod
    def decode(cls, buffer: Buffer) -> DiskHeader:
        """Reads the header and checks it against itself; raises `CorruptBlockError`. More bytes may follow."""
        head = _checked(buffer, size_bytes=DISK_HEADER_BYTES, what="header of a slot")
        magic, version, codec, sequence, stored_bytes, parent_hash = _DISK_HEADER.unpack(head)
        _check_kind("header of a slot", magic=magic, expected=_BLOCK_MAGIC, version=version)
        if codec not in _CODECS:
            raise CorruptBlockError(f"header of a slot: codec is {codec}; allowed: {sorted(_CODECS)}")
        if stored_bytes < ENVELOPE_BYTES:
            raise CorruptBlockError(
                f"header of a slot: stored_bytes is {stored_bytes}; allowed: {ENVELOPE_BYTES} or more"
            )
        return cls(
            sequence=sequence,
            stored_bytes=stored_bytes,
            codec=_CODECS[codec],
            parent_hash=None if parent_hash == _NO_PARENT else BlockHash(parent_hash),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """The first page of a segment: whose it is, and how it is divided."""

    store_id: bytes
    index: int
    segment_bytes: int
    """Of the file, this header included."""
    slot_bytes: int
    """0: the segment is free."""
    assignment: int
    """A sequence: blocks of this segment whose own is below it are left from an earlier use."""
    scoped_id: bytes
    """The only namespace, of one tenant, that has blocks here; empty where the segment is free."""

    def encode(self) -> bytes:
        problem = self._problem()
        assert problem is None, problem
        head = _SEGMENT_HEADER.pack(
            _SEGMENT_MAGIC,
            _VERSION,
            0,
            self.store_id,
            self.index,
            0,
            self.segment_bytes,
            self.slot_bytes,
            self.assignment,
            len(self.scoped_id),
        )
        page = (head + self.scoped_id).ljust(SEGMENT_HEADER_BYTES - _CHECKSUM.size, b"\0")
        return page + _CHECKSUM.pack(checksum(page))

    @classmethod
    def decode(cls, buffer: Buffer) -> SegmentHeader:
        """Reads the header and checks it against itself; raises `CorruptBlockError`. More bytes may follow."""
        page = _checked(buffer, size_bytes=SEGMENT_HEADER_BYTES, what="segment header")
        magic, version, zero, store_id, index, zero_2, *numbers, id_bytes = _SEGMENT_HEADER.unpack_from(page)
        _check_kind("segment header", magic=magic, expected=_SEGMENT_MAGIC, version=version)
        scoped_id_end = _SCOPED_ID_AT + id_bytes
        if zero or zero_2 or page[scoped_id_end:].strip(b"\0"):
            raise CorruptBlockError("segment header: what must be zero is not")
        segment_bytes, slot_bytes, assignment = numbers
        header = cls(
            store_id=store_id,
            index=index,
            segment_bytes=segment_bytes,
            slot_bytes=slot_bytes,
            assignment=assignment,
            scoped_id=page[_SCOPED_ID_AT:scoped_id_end],
        )
        problem = header._problem()
        if problem is not None:
            raise CorruptBlockError(f"segment header: {problem}")
        return header

    def _problem(self) -> str | None:
        """What is wrong with it, in words."""
        if len(self.store_id) != STORE_ID_BYTES:
            return f"store_id has {len(self.store_id)} bytes; allowed: {STORE_ID_BYTES}"
        if len(self.scoped_id) > SCOPED_ID_BYTES_MAX:
            return f"scoped_id has {len(self.scoped_id)} bytes; allowed: up to {SCOPED_ID_BYTES_MAX}"
        if self.segment_bytes % PAGE_BYTES or self.segment_bytes < SEGMENT_HEADER_BYTES + PAGE_BYTES:
            return f"segment_bytes is {self.segment_bytes}; allowed: a multiple of {PAGE_BYTES}, and at least two of it"
        room_bytes = self.segment_bytes - SEGMENT_HEADER_BYTES
        if self.slot_bytes % PAGE_BYTES or self.slot_bytes > room_bytes:
            return f"slot_bytes is {self.slot_bytes}; allowed: a multiple of {PAGE_BYTES} up to {room_bytes}"
        if bool(self.slot_bytes) != bool(self.scoped_id):
            id_bytes = len(self.scoped_id)
            return f"slot_bytes is {self.slot_bytes} with a scoped_id of {id_bytes} bytes; allowed: both, or both 0"
        return None


def segment_offset(place: int, *, slab_bytes: int) -> tuple[int, int]:
    """The segment that a place is in, and where in its file; `slab_bytes`: of a segment without its header."""
    segment, offset = divmod(place, slab_bytes)
    return segment, SEGMENT_HEADER_BYTES + offset


def padded(size_bytes: int) -> int:
    """So many bytes in whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _checked(buffer: Buffer, *, size_bytes: int, what: str) -> bytes:
    """The bytes in front of the checksum that ends what is `size_bytes` long."""
    whole = bytes(memoryview(buffer)[:size_bytes])
    if len(whole) < size_bytes:
        raise CorruptBlockError(f"{what} cut off after {len(whole)} bytes")
    head = whole[: -_CHECKSUM.size]
    if _CHECKSUM.unpack_from(whole, len(head))[0] != checksum(head):
        raise CorruptBlockError(f"{what}: checksum does not match")
    return head


def _check_kind(what: str, *, magic: bytes, expected: bytes, version: int) -> None:
    if magic != expected or version != _VERSION:
        raise CorruptBlockError(f"not a version {_VERSION} {what}: magic {magic!r}, version {version}")
