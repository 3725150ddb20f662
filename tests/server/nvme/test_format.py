"""What is in segment files: as docs/formats/nvme_segment.md describes it, and refused when a bit of it is wrong."""

from __future__ import annotations

import json
import random
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import CorruptBlockError
from kvstore.keys import BlockHash
from kvstore_server.nvme.format import (
    DISK_HEADER_BYTES,
    PAGE_BYTES,
    SEGMENT_HEADER_BYTES,
    DiskHeader,
    SegmentHeader,
    StoredCodec,
    padded,
    segment_offset,
)
from kvstore_server.nvme.index import Index, IndexRecord

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "contract" / "golden" / "nvme_segment.json"
PAGE = ROOT / "docs" / "formats" / "nvme_segment.md"

SEGMENT = SegmentHeader(
    store_id=bytes(range(16)),
    index=3,
    segment_bytes=1 << 30,
    slot_bytes=513 * PAGE_BYTES,
    assignment=77,
    scoped_id=b"tenant-a" + bytes(range(32)),
)
BLOCK = DiskHeader(sequence=78, stored_bytes=2_097_280, codec=StoredCodec.RAW, parent_hash=BlockHash(bytes(range(32))))


# --- the page, implemented again from its text alone


def vectors(kind: str) -> list[Any]:
    loaded: list[Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))[kind]
    assert loaded
    return loaded


def checksum(data: bytes) -> bytes:
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(data, seed=0))


def encode_segment_header(fields: dict[str, Any]) -> bytes:
    scoped_id = bytes.fromhex(fields["scoped_id"])
    page = b"KVNS" + struct.pack("<HH", 1, 0) + bytes.fromhex(fields["store_id"])
    page += struct.pack("<IIQQ", fields["index"], 0, fields["segment_bytes"], fields["slot_bytes"])
    page += struct.pack("<QH", fields["assignment"], len(scoped_id)) + scoped_id
    page += bytes(4088 - len(page))
    return page + checksum(page)


def encode_slot_header(fields: dict[str, Any]) -> bytes:
    head = b"KVNB" + struct.pack("<HHQQ", 1, fields["codec"], fields["sequence"], fields["stored_bytes"])
    head += bytes.fromhex(fields["parent_hash"] or "00" * 32)
    return head + checksum(head)


def encode_record(fields: dict[str, Any]) -> tuple[bytes, bytes]:
    value = struct.pack("<QQQ", fields["place"], fields["sequence"], fields["stored_bytes"])
    value += bytes.fromhex(fields["parent_hash"] or "00" * 32)
    return bytes.fromhex(fields["scoped_id"] + fields["block_hash"]), value


def test_the_page_gives_the_golden_vectors() -> None:
    for vector in vectors("segment_headers"):
        encoded = encode_segment_header(vector["fields"])
        assert len(encoded) == 4096
        # Shown without the zeros between the scoped id and the checksum.
        assert encoded.startswith(bytes.fromhex(vector["encoded_start"]))
        assert encoded[-8:].hex() == vector["checksum"]
        assert not any(encoded[len(vector["encoded_start"]) // 2 : -8])
    for vector in vectors("slot_headers"):
        assert encode_slot_header(vector["fields"]).hex() == vector["encoded"]
    for vector in vectors("index_records"):
        key, value = encode_record(vector["fields"])
        assert (key.hex(), value.hex()) == (vector["key"], vector["value"])


def test_the_page_shows_exactly_its_golden_vectors() -> None:
    shown = re.findall(r"^```json\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert shown == [GOLDEN.read_text(encoding="utf-8")]


# --- the package gives the golden vectors, and reads them back


@pytest.mark.parametrize("vector", vectors("segment_headers"))
def test_segment_headers(vector: dict[str, Any]) -> None:
    fields = vector["fields"]
    header = SegmentHeader(
        **{**fields, "store_id": bytes.fromhex(fields["store_id"]), "scoped_id": bytes.fromhex(fields["scoped_id"])}
    )
    start = bytes.fromhex(vector["encoded_start"])
    encoded = start.ljust(SEGMENT_HEADER_BYTES - 8, b"\0") + bytes.fromhex(vector["checksum"])
    assert header.encode() == encoded
    assert SegmentHeader.decode(encoded) == header


@pytest.mark.parametrize("vector", vectors("slot_headers"))
def test_slot_headers(vector: dict[str, Any]) -> None:
    fields, encoded = vector["fields"], bytes.fromhex(vector["encoded"])
    header = DiskHeader(
        sequence=fields["sequence"],
        stored_bytes=fields["stored_bytes"],
        codec=StoredCodec(fields["codec"]),
        parent_hash=BlockHash(bytes.fromhex(fields["parent_hash"])) if fields["parent_hash"] else None,
    )
    assert header.encode() == encoded
    assert DiskHeader.decode(encoded) == header


def test_index_records(tmp_path: Path) -> None:
    index = Index(tmp_path / "index", map_bytes=1 << 20)
    records = [
        IndexRecord(
            scoped_id=bytes.fromhex(fields["scoped_id"]),
            block_hash=BlockHash(bytes.fromhex(fields["block_hash"])),
            place=fields["place"],
            sequence=fields["sequence"],
            stored_bytes=fields["stored_bytes"],
            parent_hash=BlockHash(bytes.fromhex(fields["parent_hash"])) if fields["parent_hash"] else None,
        )
        for fields in (vector["fields"] for vector in vectors("index_records"))
    ]
    index.apply(records, ())
    store_id = index.store_id
    index.close()
    with lmdb.open(str(tmp_path / "index"), max_dbs=2, readonly=True) as environment, environment.begin() as reading:
        blocks = environment.open_db(b"blocks", reading, create=False)
        meta = environment.open_db(b"meta", reading, create=False)
        found = {(key.hex(), value.hex()) for key, value in reading.cursor(db=blocks)}
        store = reading.get(b"store", db=meta)
    assert found == {(vector["key"], vector["value"]) for vector in vectors("index_records")}
    head = b"KVNI" + struct.pack("<HH", 1, 0) + store_id
    assert store == head + checksum(head)


# --- what comes back, and what is refused


@given(
    sequence=st.integers(0, 2**64 - 1),
    stored_bytes=st.integers(128, 2**64 - 1),
    codec=st.sampled_from(StoredCodec),
    parent_hash=st.none() | st.binary(min_size=32, max_size=32).filter(any),
)
def test_every_slot_header_is_read_as_it_was_written(
    sequence: int, stored_bytes: int, codec: StoredCodec, parent_hash: bytes | None
) -> None:
    parent = None if parent_hash is None else BlockHash(parent_hash)
    header = DiskHeader(sequence=sequence, stored_bytes=stored_bytes, codec=codec, parent_hash=parent)
    encoded = header.encode()
    assert len(encoded) == DISK_HEADER_BYTES
    assert DiskHeader.decode(memoryview(encoded + b"envelope")) == header


@given(
    index=st.integers(0, 2**32 - 1),
    page_count=st.integers(2, 1 << 40),
    share=st.floats(0, 1),
    assignment=st.integers(0, 2**64 - 1),
    scoped_id=st.binary(min_size=1, max_size=256),
)
def test_every_segment_header_is_read_as_it_was_written(
    index: int, page_count: int, share: float, assignment: int, scoped_id: bytes
) -> None:
    slot_pages = min(int(share * page_count), page_count - 1)
    header = SegmentHeader(
        store_id=bytes(range(16)),
        index=index,
        segment_bytes=page_count * PAGE_BYTES,
        slot_bytes=slot_pages * PAGE_BYTES,
        assignment=assignment,
        scoped_id=scoped_id if slot_pages else b"",
    )
    encoded = header.encode()
    assert len(encoded) == SEGMENT_HEADER_BYTES
    assert SegmentHeader.decode(bytearray(encoded + b"a slot")) == header


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("header", [BLOCK, BLOCK._replace(codec=StoredCodec.LZ4, parent_hash=None)])
def test_a_slot_header_with_any_bit_flipped_is_refused(header: DiskHeader) -> None:
    encoded = header.encode()
    for bit in range(8 * DISK_HEADER_BYTES):
        with pytest.raises(CorruptBlockError):
            DiskHeader.decode(flipped(encoded, bit))


def test_a_segment_header_with_any_bit_flipped_is_refused() -> None:
    encoded = SEGMENT.encode()
    used_bits = 8 * (58 + len(SEGMENT.scoped_id))
    bits = {*range(used_bits), *range(8 * 4088, 8 * 4096), *random.Random(4).sample(range(8 * 4096), 2_000)}
    for bit in bits:
        with pytest.raises(CorruptBlockError):
            SegmentHeader.decode(flipped(encoded, bit))


def test_what_is_cut_off_or_was_never_written_is_refused() -> None:
    for size_bytes in (0, 63):
        with pytest.raises(CorruptBlockError, match=f"cut off after {size_bytes} bytes"):
            DiskHeader.decode(BLOCK.encode()[:size_bytes])
        with pytest.raises(CorruptBlockError, match=f"cut off after {size_bytes} bytes"):
            SegmentHeader.decode(SEGMENT.encode()[:size_bytes])
    with pytest.raises(CorruptBlockError):
        DiskHeader.decode(bytes(DISK_HEADER_BYTES))
    with pytest.raises(CorruptBlockError):
        SegmentHeader.decode(bytes(SEGMENT_HEADER_BYTES))


def patched(encoded: bytes, offset: int, new: bytes) -> bytes:
    """Changed, with a checksum that matches."""
    head = encoded[:offset] + new + encoded[offset + len(new) : -8]
    return head + checksum(head)


@pytest.mark.parametrize(
    ("offset", "new", "says"),
    [
        (0, b"KVNS", "magic b'KVNS'"),
        (4, b"\2", "version 2"),
        (6, b"\3", r"codec is 3; allowed: \[0, 1, 2\]"),
        (16, struct.pack("<Q", 127), "stored_bytes is 127; allowed: 128 or more"),
    ],
)
def test_a_slot_header_that_says_what_cannot_be_is_refused_by_name(offset: int, new: bytes, says: str) -> None:
    with pytest.raises(CorruptBlockError, match=says):
        DiskHeader.decode(patched(BLOCK.encode(), offset, new))


@pytest.mark.parametrize(
    ("offset", "new", "says"),
    [
        (0, b"KVNB", "magic b'KVNB'"),
        (4, b"\2", "version 2"),
        (6, b"\1", "must be zero"),
        (28, b"\1", "must be zero"),
        (4_000, b"\1", "must be zero"),
        (32, struct.pack("<Q", 4_096), "segment_bytes is 4096"),
        (32, struct.pack("<Q", (1 << 30) + 1), "segment_bytes is 1073741825"),
        (40, struct.pack("<Q", 1 << 30), "slot_bytes is 1073741824; allowed: a multiple of 4096 up to 1073737728"),
        (40, struct.pack("<Q", 5_000), "slot_bytes is 5000"),
        (40, bytes(8), "slot_bytes is 0 with a scoped_id of 40 bytes"),
        (56, struct.pack("<H", 39), "must be zero"),
        (56, struct.pack("<H", 257), "scoped_id has 257 bytes; allowed: up to 256"),
        (56, struct.pack("<H", 65_535), "scoped_id has 4030 bytes"),
    ],
)
def test_a_segment_header_that_says_what_cannot_be_is_refused_by_name(offset: int, new: bytes, says: str) -> None:
    with pytest.raises(CorruptBlockError, match=says):
        SegmentHeader.decode(patched(SEGMENT.encode(), offset, new))


def test_a_segment_header_that_says_what_cannot_be_is_not_written() -> None:
    for header in (
        replace(SEGMENT, store_id=b"short"),
        replace(SEGMENT, scoped_id=bytes(257)),
        replace(SEGMENT, scoped_id=b""),
        replace(SEGMENT, slot_bytes=0),
        replace(SEGMENT, segment_bytes=PAGE_BYTES),
    ):
        with pytest.raises(AssertionError, match="allowed"):
            header.encode()


# --- where things are


def test_places_follow_each_other_without_the_headers() -> None:
    slab_bytes = 255 * PAGE_BYTES
    assert segment_offset(0, slab_bytes=slab_bytes) == (0, PAGE_BYTES)
    assert segment_offset(slab_bytes - PAGE_BYTES, slab_bytes=slab_bytes) == (0, 255 * PAGE_BYTES)
    assert segment_offset(slab_bytes, slab_bytes=slab_bytes) == (1, PAGE_BYTES)
    assert segment_offset(7 * slab_bytes + 5 * PAGE_BYTES, slab_bytes=slab_bytes) == (7, 6 * PAGE_BYTES)


def test_padding_is_to_the_next_page() -> None:
    assert [padded(size) for size in (0, 1, 4_095, 4_096, 4_097)] == [0, 4_096, 4_096, 4_096, 8_192]
