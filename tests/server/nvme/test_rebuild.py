from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.envelope import ENVELOPE_BYTES, Codec, Envelope, checksum
from kvstore.errors import CorruptBlockError
from kvstore.keys import BlockHash, NamespaceId
from kvstore_server.core.tenants import DEFAULT_TENANT, Tenant, scoped
from kvstore_server.nvme.device import FileDevice, aligned_buffer
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
from kvstore_server.nvme.rebuild import DROPPED_MAX, Dropped, Scan, scan

_STORE = b"s" * 16
_NAMESPACE = NamespaceId(b"n" * 32)
_OTHER_NAMESPACE = NamespaceId(b"m" * 32)
_SCOPED = scoped(DEFAULT_TENANT, _NAMESPACE)
_ALICE = scoped(Tenant("alice"), _NAMESPACE)
_SLOT_BYTES = 3 * PAGE_BYTES
_SLOT_COUNT = 5
_SLAB_BYTES = _SLOT_COUNT * _SLOT_BYTES + PAGE_BYTES  # a page is left over
_SEGMENT_BYTES = SEGMENT_HEADER_BYTES + _SLAB_BYTES
_PAYLOAD_BYTES = 2 * PAGE_BYTES


class _Store:
    """Segments written by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.device = FileDevice(folder)

    def segment(
        self,
        index: int,
        *,
        scoped_id: bytes = _SCOPED,
        assignment: int = 1,
        store_id: bytes = _STORE,
        slot_bytes: int = _SLOT_BYTES,
        written_as: int | None = None,
        claimed_bytes: int = _SEGMENT_BYTES,
    ) -> None:
        header = SegmentHeader(
            store_id=store_id,
            index=index if written_as is None else written_as,
            segment_bytes=claimed_bytes,
            slot_bytes=slot_bytes,
            assignment=assignment,
            scoped_id=scoped_id,
        )
        if index not in self.device.segments():
            self.device.create(index, _SEGMENT_BYTES)
        self._write(index, 0, header.encode())

    def block(
        self,
        index: int,
        slot: int,
        number: int,
        *,
        sequence: int | None = None,
        namespace_id: NamespaceId = _NAMESPACE,
        parent: int | None = None,
        payload_bytes: int = _PAYLOAD_BYTES,
        codec: StoredCodec = StoredCodec.RAW,
        stored: bytes | None = None,
        stored_bytes: int | None = None,
    ) -> IndexRecord:
        """Writes a block; returns what a scan should find."""
        payload = random.Random(number).randbytes(payload_bytes)
        stored = payload if stored is None else stored
        envelope = Envelope(
            namespace_id=namespace_id,
            block_hash=_hash(number),
            k_codec=Codec.EXACT,
            v_codec=Codec.NONE,
            tokens=16,
            k_bytes=payload_bytes,
            v_bytes=0,
            decoded_bytes=payload_bytes,
            payload_checksum=checksum(payload),
        )
        header = DiskHeader(
            sequence=number if sequence is None else sequence,
            stored_bytes=ENVELOPE_BYTES + len(stored) if stored_bytes is None else stored_bytes,
            codec=codec,
            parent_hash=None if parent is None else _hash(parent),
        )
        self._write(index, _offset(slot), header.encode() + envelope.encode() + stored)
        return IndexRecord(
            _SCOPED,
            _hash(number),
            index * _SLAB_BYTES + slot * _SLOT_BYTES,
            header.sequence,
            header.stored_bytes,
            header.parent_hash,
        )

    def spoil(self, index: int, offset: int, data: bytes) -> None:
        with self.path(index).open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def path(self, index: int) -> Path:
        return self.folder / "segments" / f"{index:08d}.seg"

    def scan(self, *, is_deep: bool = False, store_id: bytes | None = _STORE) -> Scan:
        found = scan(self.device, segment_bytes=_SEGMENT_BYTES, store_id=store_id, is_deep=is_deep)
        _check(found)
        return found

    def _write(self, index: int, offset: int, data: bytes) -> None:
        buffer = aligned_buffer(padded(len(data)))
        buffer[: len(data)] = data
        self.device.write(index, offset, [buffer])


@pytest.fixture
def store(tmp_path: Path) -> _Store:
    return _Store(tmp_path)


def _hash(number: int) -> BlockHash:
    return BlockHash(random.Random(f"hash {number}").randbytes(32))


def _offset(slot: int) -> int:
    return SEGMENT_HEADER_BYTES + slot * _SLOT_BYTES


def _check(found: Scan) -> None:
    """Each slot is counted once."""
    assert found.slot_count == (
        found.block_count
        + found.empty_count
        + found.leftover_count
        + found.damaged_count
        + found.unreadable_count
        + found.cut_off_count
        + found.duplicate_count
    ), found


def _slots_dropped(found: Scan) -> list[tuple[int, int | None]]:
    return [(dropped.segment, dropped.slot) for dropped in found.dropped]


@pytest.mark.parametrize("is_deep", [False, True])
def test_every_block_is_found_where_it_lies_with_its_parent(store: _Store, *, is_deep: bool) -> None:
    store.segment(0)
    store.segment(2, scoped_id=_ALICE, assignment=7)
    written = [
        store.block(0, 0, 1),
        store.block(0, 4, 2, parent=1),
        store.block(0, 2, 3, payload_bytes=100),
        store.block(2, 1, 8)._replace(scoped_id=_ALICE),
    ]
    found = store.scan(is_deep=is_deep)
    assert sorted(found.records) == sorted(written)
    assert (found.segment_count, found.slot_count, found.block_count, found.empty_count) == (2, 10, 4, 6)
    assert found.store_id == _STORE
    assert found.last_sequence == 8
    assert found.dropped == []


def test_a_store_without_segments_has_nothing(store: _Store) -> None:
    found = store.scan(store_id=None)
    assert found == Scan()


def test_equal_blocks_of_two_tenants_are_two(store: _Store) -> None:
    store.segment(0)
    store.segment(1, scoped_id=_ALICE)
    written = [store.block(0, 0, 1), store.block(1, 0, 1)._replace(scoped_id=_ALICE)]
    assert sorted(store.scan().records) == sorted(written)


@pytest.mark.parametrize("latest_first", [True, False])
def test_of_a_block_that_is_there_twice_the_later_is_kept(store: _Store, *, latest_first: bool) -> None:
    store.segment(0)
    store.segment(1)
    sequences = (9, 5) if latest_first else (5, 9)
    both = [store.block(index, 1, 1, sequence=sequence) for index, sequence in enumerate(sequences)]
    found = store.scan()
    assert found.records == [max(both, key=lambda record: record.sequence)]
    assert found.duplicate_count == 1


def test_blocks_from_before_the_segment_was_given_away_are_leftovers(store: _Store) -> None:
    store.segment(0, assignment=50)
    store.block(0, 0, 1, sequence=49)
    store.block(0, 1, 2, sequence=40, namespace_id=_OTHER_NAMESPACE)
    kept = store.block(0, 2, 3, sequence=50)
    store.spoil(0, _offset(3), b"in the middle of what was a larger block")
    found = store.scan()
    assert found.records == [kept]
    assert (found.leftover_count, found.empty_count, found.damaged_count) == (3, 1, 0)


def test_a_block_of_another_namespace_is_damage(store: _Store) -> None:
    store.segment(0)
    store.block(0, 0, 1, namespace_id=_OTHER_NAMESPACE)
    found = store.scan()
    assert (found.records, found.damaged_count) == ([], 1)
    assert "namespace 6d6d6d6d" in found.dropped[0].reason


def test_each_bit_of_header_and_envelope_that_is_flipped_is_noticed(store: _Store) -> None:
    store.segment(0)
    store.block(0, 1, 1)
    whole = store.path(0).read_bytes()
    for bit in range(0, (DISK_HEADER_BYTES + ENVELOPE_BYTES) * 8, 5):
        at = _offset(1) + bit // 8
        store.spoil(0, at, bytes([whole[at] ^ 1 << bit % 8]))
        found = store.scan()
        assert found.records == [], f"bit {bit}"
        assert found.damaged_count == (1 if bit >= 32 else 0), f"bit {bit}"
        store.spoil(0, at, whole[at : at + 1])
    assert store.scan().block_count == 1


def test_a_damaged_payload_is_noticed_by_a_deep_scan_only(store: _Store) -> None:
    store.segment(0)
    kept = store.block(0, 0, 1)
    spoilt = store.block(0, 1, 2)
    for at in (DISK_HEADER_BYTES + ENVELOPE_BYTES, PAGE_BYTES, DISK_HEADER_BYTES + ENVELOPE_BYTES + _PAYLOAD_BYTES - 1):
        whole = store.path(0).read_bytes()
        store.spoil(0, _offset(1) + at, bytes([whole[_offset(1) + at] ^ 1]))
        assert store.scan().records == [kept, spoilt]
        found = store.scan(is_deep=True)
        assert found.records == [kept]
        assert found.dropped == [Dropped(0, 1, "payload checksum does not match")]
        store.spoil(0, 0, whole)
    store.spoil(0, _offset(1) + DISK_HEADER_BYTES + ENVELOPE_BYTES + _PAYLOAD_BYTES, b"behind the payload")
    assert store.scan(is_deep=True).records == [kept, spoilt]


@pytest.mark.parametrize("stored_bytes", [ENVELOPE_BYTES, ENVELOPE_BYTES + _PAYLOAD_BYTES + 1, _SLOT_BYTES, 1 << 60])
def test_a_block_that_claims_more_or_less_than_it_has_is_damage(store: _Store, stored_bytes: int) -> None:
    store.segment(0)
    store.block(0, 0, 1, stored_bytes=stored_bytes)
    for is_deep in (False, True):
        found = store.scan(is_deep=is_deep)
        assert (found.records, found.damaged_count) == ([], 1)


def test_a_segment_with_a_damaged_header_is_dropped_whole_and_the_others_are_not(store: _Store) -> None:
    store.segment(0)
    store.block(0, 0, 1)
    store.segment(1)
    kept = store.block(1, 0, 2)
    for at in (0, 9, 45, 70, 4000, 4090):
        whole = store.path(0).read_bytes()
        store.spoil(0, at, bytes([whole[at] ^ 4]))
        found = store.scan()
        assert found.records == [kept]
        assert (found.dropped_segment_count, found.slot_count) == (1, _SLOT_COUNT)
        assert _slots_dropped(found) == [(0, None)]
        store.spoil(0, 0, whole)
    assert store.scan().block_count == 2


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"store_id": b"f" * 16}, "belongs to store 6666"),
        ({"written_as": 4}, "was written as segment 4"),
        ({"claimed_bytes": 2 * _SEGMENT_BYTES}, f"was made for segments of {2 * _SEGMENT_BYTES} bytes"),
        ({"scoped_id": b"short"}, "scoped_id has 5 bytes"),
    ],
)
def test_a_segment_that_cannot_be_this_stores_is_dropped_with_the_reason(
    store: _Store, about: dict[str, bytes], reason: str
) -> None:
    store.segment(0, **about)  # type: ignore[arg-type]
    store.block(0, 0, 1, sequence=1000)
    found = store.scan()
    assert (found.records, found.dropped_segment_count, found.last_sequence) == ([], 1, 0)
    assert reason in found.dropped[0].reason


def test_without_a_store_id_that_of_the_most_segments_is_taken(store: _Store) -> None:
    store.segment(0, store_id=b"f" * 16)
    store.block(0, 0, 1)
    for index in (1, 2):
        store.segment(index)
    kept = store.block(1, 0, 2)
    found = store.scan(store_id=None)
    assert (found.store_id, found.records) == (_STORE, [kept])
    assert _slots_dropped(found) == [(0, None)]


def test_free_segments_have_no_slots_but_a_sequence(store: _Store) -> None:
    store.device.create(0, _SEGMENT_BYTES)  # made, and never given out
    store.segment(1, slot_bytes=0, scoped_id=b"", assignment=33)
    found = store.scan()
    assert (found.free_segment_count, found.slot_count, found.last_sequence) == (2, 0, 33)
    assert found.dropped == []


def test_numbers_of_leftovers_and_duplicates_count_as_used(store: _Store) -> None:
    store.segment(0, assignment=10)
    store.block(0, 0, 1, sequence=9)
    store.block(0, 1, 2, sequence=70, namespace_id=_OTHER_NAMESPACE)
    assert store.scan().last_sequence == 70


@pytest.mark.parametrize(
    ("size_bytes", "cut_off", "damaged"),
    [
        (_offset(3), 2, 0),
        (_offset(2) + PAGE_BYTES, 2, 1),  # the header of slot 2 is there, its payload is not
        (_offset(2) + PAGE_BYTES - 512, 3, 0),
        (_offset(2) + 1, 3, 0),
        (SEGMENT_HEADER_BYTES, 5, 0),
    ],
)
def test_of_a_segment_cut_off_the_blocks_before_the_end_are_found(
    store: _Store, size_bytes: int, cut_off: int, damaged: int
) -> None:
    store.segment(0)
    written = [store.block(0, slot, 1 + slot) for slot in range(_SLOT_COUNT)]
    with store.path(0).open("r+b") as file:
        file.truncate(size_bytes)
    for is_deep in (False, True):
        found = store.scan(is_deep=is_deep)
        assert found.records == written[: _SLOT_COUNT - cut_off - damaged]
        assert (found.cut_off_count, found.damaged_count, found.unreadable_count) == (cut_off, damaged, 0)
        assert f"the file has {size_bytes} of {_SEGMENT_BYTES} bytes" in found.dropped[0].reason


def test_a_segment_cut_off_in_its_header_is_dropped(store: _Store) -> None:
    store.segment(0)
    store.segment(1)
    kept = store.block(1, 0, 1)
    for size_bytes in (0, 100):
        with store.path(0).open("r+b") as file:
            file.truncate(size_bytes)
        found = store.scan()
        assert found.records == [kept]
        assert found.dropped[0].reason == "cannot be read: Input/output error"


def test_a_slot_that_cannot_be_read_costs_that_slot(store: _Store) -> None:
    class _BadSector(FileDevice):
        def read(self, index: int, offset: int, buffers: Sequence[memoryview]) -> None:
            if (index, offset) == (0, _offset(1)):
                raise OSError(5, "bad sector")
            super().read(index, offset, buffers)

    store.segment(0)
    written = [store.block(0, slot, 1 + slot) for slot in range(3)]
    store.device = _BadSector(store.folder)
    found = store.scan()
    assert found.records == [written[0], written[2]]
    assert found.unreadable_count == 1
    assert found.dropped == [Dropped(0, 1, "cannot be read: Input/output error")]


def test_compressed_blocks_are_checked_by_what_they_decode_to(store: _Store) -> None:
    store.segment(0)
    payloads = {number: random.Random(number).randbytes(_PAYLOAD_BYTES) for number in (1, 2, 3)}
    kept, wrong, spoilt = (
        store.block(0, slot, number, codec=StoredCodec.ZSTD, stored=b"%d" % number)
        for slot, number in enumerate(payloads)
    )

    def decode(header: DiskHeader, envelope: Envelope, stored: memoryview) -> bytes:
        assert (header.codec, envelope.payload_bytes) == (StoredCodec.ZSTD, _PAYLOAD_BYTES)
        if bytes(stored) == b"3":
            raise CorruptBlockError("not a zstd frame")
        return payloads[1]

    unchecked = store.scan(is_deep=True)
    assert unchecked.records == [kept, wrong, spoilt]
    assert unchecked.unchecked_count == 3
    found = scan(store.device, segment_bytes=_SEGMENT_BYTES, store_id=_STORE, is_deep=True, decode=decode)
    _check(found)
    assert found.records == [kept]
    assert [dropped.reason for dropped in found.dropped] == ["payload checksum does not match", "not a zstd frame"]
    assert found.unchecked_count == 0


def test_progress_ends_at_all_bytes_whatever_was_dropped(store: _Store) -> None:
    store.segment(0)
    store.segment(1, store_id=b"f" * 16)
    store.segment(2)
    with store.path(2).open("r+b") as file:
        file.truncate(_offset(1))
    told: list[tuple[int, int]] = []
    threads = set[str]()

    def note(done_bytes: int, total_bytes: int) -> None:
        told.append((done_bytes, total_bytes))
        threads.add(threading.current_thread().name)

    scan(store.device, segment_bytes=_SEGMENT_BYTES, store_id=_STORE, on_progress=note)
    total_bytes = 2 * _SEGMENT_BYTES + _offset(1)
    assert told == sorted(told)
    assert {total for _, total in told} == {total_bytes}
    assert told[-1][0] == total_bytes
    assert threads == {threading.current_thread().name}


def test_what_progress_raises_ends_the_scan_and_its_threads(store: _Store) -> None:
    store.segment(0)

    def stop(_done_bytes: int, _total_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scan(store.device, segment_bytes=_SEGMENT_BYTES, on_progress=stop)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nvme-scan")]


def test_many_slots_are_found_in_order_and_the_list_of_dropped_ones_is_bounded(tmp_path: Path) -> None:
    count = DROPPED_MAX + 500
    segment_bytes = SEGMENT_HEADER_BYTES + count * PAGE_BYTES
    header = SegmentHeader(
        store_id=_STORE,
        index=0,
        segment_bytes=segment_bytes,
        slot_bytes=PAGE_BYTES,
        assignment=0,
        scoped_id=_SCOPED,
    )
    device = FileDevice(tmp_path)
    device.create(0, segment_bytes)
    image = aligned_buffer(segment_bytes)
    image[:SEGMENT_HEADER_BYTES] = header.encode()
    envelope = Envelope(
        namespace_id=_NAMESPACE,
        block_hash=_hash(0),
        k_codec=Codec.EXACT,
        v_codec=Codec.NONE,
        tokens=1,
        k_bytes=1,
        v_bytes=0,
        decoded_bytes=1,
        payload_checksum=checksum(b"\0"),
    )
    for slot in range(count):
        at = SEGMENT_HEADER_BYTES + slot * PAGE_BYTES
        disk_header = DiskHeader(
            sequence=slot, stored_bytes=ENVELOPE_BYTES + 1, codec=StoredCodec.RAW, parent_hash=None
        )
        image[at : at + DISK_HEADER_BYTES] = disk_header.encode()
        if not slot % 100:  # the others have no envelope
            image[at + DISK_HEADER_BYTES :][:ENVELOPE_BYTES] = replace(envelope, block_hash=_hash(slot)).encode()
    device.write(0, 0, [image])
    found = scan(device, segment_bytes=segment_bytes, is_deep=True)
    _check(found)
    assert [record.sequence for record in found.records] == list(range(0, count, 100))
    assert found.damaged_count == count - found.block_count
    assert len(found.dropped) == DROPPED_MAX
