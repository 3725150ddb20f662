"""Blocks between slots in memory and slots on the disk; runs in threads and blocks.

Format: docs/formats/nvme_segment.md. A slot on the disk is the slot in memory, but for its first 64 bytes: those in
memory are the daemon's and change while the disk is at work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from kvstore.envelope import ENVELOPE_BYTES, Envelope, checksum
from kvstore.errors import CorruptBlockError
from kvstore.keys import BlockHash
from kvstore.messages import CommitState
from kvstore_server.core.compress_choice import CompressionSample
from kvstore_server.core.disk import DiskBlock
from kvstore_server.core.space import Place
from kvstore_server.core.store import BlockKey
from kvstore_server.core.tenants import namespace_of
from kvstore_server.core.verdict import verdict
from kvstore_server.nvme.coding import Coding
from kvstore_server.nvme.compression import compress, decompress_into
from kvstore_server.nvme.device import Device, aligned_buffer
from kvstore_server.nvme.format import (
    DISK_HEADER_BYTES,
    PAGE_BYTES,
    DiskHeader,
    StoredCodec,
    padded,
    segment_offset,
)

SlotView = Callable[[Place, int], memoryview]
"""A slot in memory from its first byte on, its header included; page-aligned."""

_PAYLOAD_AT = DISK_HEADER_BYTES + ENVELOPE_BYTES


class Stored(NamedTuple):
    size_bytes: int
    """Of envelope and payload as they are on the disk."""
    sample: CompressionSample | None
    """What compressing the block cost, when it was a trial."""


class Images:
    """Writes and reads slots of one device. Threads may share it."""

    def __init__(self, device: Device, *, slot_view: SlotView, slab_bytes: int) -> None:
        self._device = device
        self._slot_view = slot_view
        self._slab_bytes = slab_bytes
        self._local = threading.local()

    def write(
        self,
        place: Place,
        *,
        memory_place: Place,
        block_bytes: int,
        sequence: int,
        parent_hash: BlockHash | None,
        coding: Coding,
        is_verified: bool,
    ) -> Stored:
        """Writes a block, `block_bytes` of envelope and payload in memory; returns what is stored.

        Raises `OSError`, and `CorruptBlockError` when nobody had verified it yet and it does not.
        """
        slot = self._slot_view(memory_place, padded(DISK_HEADER_BYTES + block_bytes))
        if not is_verified:
            _check_checksum(slot, block_bytes=block_bytes)
        codec, stored_bytes, rest, sample = StoredCodec.RAW, block_bytes, slot[PAGE_BYTES:], None
        page = self._page()
        page[DISK_HEADER_BYTES:] = slot[DISK_HEADER_BYTES:PAGE_BYTES]
        if coding.codec is not StoredCodec.RAW:
            payload = slot[_PAYLOAD_AT : DISK_HEADER_BYTES + block_bytes]
            packed, sample = _compressed(payload, coding)
            if packed is not None:
                codec, stored_bytes = coding.codec, ENVELOPE_BYTES + len(packed)
                whole = aligned_buffer(padded(DISK_HEADER_BYTES + stored_bytes))
                whole[_PAYLOAD_AT : _PAYLOAD_AT + len(packed)] = packed
                page[_PAYLOAD_AT:] = whole[_PAYLOAD_AT:PAGE_BYTES]
                rest = whole[PAGE_BYTES:]
        header = DiskHeader(sequence=sequence, stored_bytes=stored_bytes, codec=codec, parent_hash=parent_hash)
        page[:DISK_HEADER_BYTES] = header.encode()
        segment, offset = segment_offset(place, slab_bytes=self._slab_bytes)
        self._device.write(segment, offset, [page, rest] if len(rest) else [page])
        return Stored(stored_bytes, sample)

    def read(
        self, key: BlockKey, block: DiskBlock, *, memory_place: Place, payload_bytes: int, element_bytes: int
    ) -> int:
        """Reads a block into its slot in memory and verifies it there; returns the bytes of its envelope and payload.

        Raises `CorruptBlockError` when it is not what it should be, and `OSError`; the slot holds anything then.
        """
        block_bytes = ENVELOPE_BYTES + payload_bytes
        slot = self._slot_view(memory_place, padded(DISK_HEADER_BYTES + block_bytes))
        is_packed = block.stored_bytes != block_bytes
        if not 0 < block.stored_bytes <= block_bytes:
            raise CorruptBlockError(f"{block.stored_bytes} bytes are stored of a block of {block_bytes}")
        stored = aligned_buffer(padded(DISK_HEADER_BYTES + block.stored_bytes)) if is_packed else slot
        page = self._page()
        rest = stored[PAGE_BYTES : padded(DISK_HEADER_BYTES + block.stored_bytes)]
        segment, offset = segment_offset(block.place, slab_bytes=self._slab_bytes)
        self._device.read(segment, offset, [page, rest] if len(rest) else [page])
        header = DiskHeader.decode(page[:DISK_HEADER_BYTES])
        if (header.sequence, header.stored_bytes) != (block.sequence, block.stored_bytes):
            raise CorruptBlockError(
                f"the slot was written as number {header.sequence}, the index says {block.sequence}"
            )
        stored[DISK_HEADER_BYTES:PAGE_BYTES] = page[DISK_HEADER_BYTES:]
        if is_packed != (header.codec is not StoredCodec.RAW):
            raise CorruptBlockError(f"{header.stored_bytes} bytes cannot be a block of codec {header.codec.name}")
        if is_packed:
            slot[DISK_HEADER_BYTES:_PAYLOAD_AT] = stored[DISK_HEADER_BYTES:_PAYLOAD_AT]
            decompress_into(
                stored[_PAYLOAD_AT : DISK_HEADER_BYTES + block.stored_bytes],
                slot[_PAYLOAD_AT : _PAYLOAD_AT + payload_bytes],
                codec=header.codec,
                element_bytes=element_bytes,
            )
        found = verdict(
            slot[DISK_HEADER_BYTES : DISK_HEADER_BYTES + block_bytes],
            namespace_id=namespace_of(key.namespace_id),
            block_hash=key.block_hash,
            payload_bytes=payload_bytes,
            payload_checksum=None,
        )
        if found is not CommitState.COMMITTED:
            raise CorruptBlockError(f"block {key.block_hash.hex()[:16]} does not match its envelope")
        return block_bytes

    def touch(self, place: Place, *, size_bytes: int) -> float:
        """Reads whole pages from a slot for the sake of the time it takes, in seconds. Raises `OSError`."""
        segment, offset = segment_offset(place, slab_bytes=self._slab_bytes)
        started_s = time.perf_counter()
        self._device.read(segment, offset, [aligned_buffer(size_bytes)])
        return time.perf_counter() - started_s

    def _page(self) -> memoryview:
        """A page of this thread's own."""
        page: memoryview | None = getattr(self._local, "page", None)
        if page is None:
            page = self._local.page = aligned_buffer(PAGE_BYTES)
        return page


def _compressed(payload: memoryview, coding: Coding) -> tuple[bytes | None, CompressionSample | None]:
    started_s = time.perf_counter()
    packed = compress(payload, codec=coding.codec, element_bytes=coding.element_bytes)
    compress_s = time.perf_counter() - started_s
    if not coding.is_trial:
        return packed, None
    decompress_s = 0.0
    if packed is not None:
        scratch = memoryview(bytearray(len(payload)))
        started_s = time.perf_counter()
        decompress_into(memoryview(packed), scratch, codec=coding.codec, element_bytes=coding.element_bytes)
        decompress_s = time.perf_counter() - started_s
    stored_bytes = len(payload) if packed is None else len(packed)
    return packed, CompressionSample(len(payload), stored_bytes, compress_s, decompress_s)


def _check_checksum(slot: memoryview, *, block_bytes: int) -> None:
    envelope = Envelope.decode(slot[DISK_HEADER_BYTES:_PAYLOAD_AT])
    if checksum(slot[_PAYLOAD_AT : DISK_HEADER_BYTES + block_bytes]) != envelope.payload_checksum:
        raise CorruptBlockError(f"block {envelope.block_hash.hex()[:16]} does not match its envelope")
