"""The 128 bytes in front of every stored or sent block, by which a reader knows what it got.

Format (docs/formats/envelope.md), little-endian:

    0  magic "KVB1"            72  u8 K codec, u8 V codec, u16 zero     104  u64 payload checksum
    4  u16 version             76  u32 tokens                           112  u64 zero
    6  u16 envelope bytes      80  u64 K plane bytes, encoded           120  u64 envelope checksum
    8  namespace id, 32        88  u64 V plane bytes, encoded
    40 block hash, 32          96  u64 payload bytes, decoded

Checksums are XXH3-64 with seed 0 (github.com/Cyan4973/xxHash): the payload's over the encoded planes, the
envelope's over its own first 120 bytes. They catch accidents, not forgers; identity is the keys' job.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import xxhash

from kvstore.errors import CorruptBlockError
from kvstore.keys import BlockHash, NamespaceId

ENVELOPE_BYTES = 128
_MAGIC = b"KVB1"
_VERSION = 1
_HEADER = struct.Struct("<4sHH32s32sBBHIQQQQQ")
_CHECKSUM = struct.Struct("<Q")
_VARIABLE_END = struct.Struct("<QQ")
_ZERO_WORD = bytes(8)
_CHECKED_BYTES = ENVELOPE_BYTES - _CHECKSUM.size

Buffer: TypeAlias = bytes | bytearray | memoryview


class Codec(IntEnum):
    """How a plane's bytes are encoded; travels in the envelope, so values are never reused."""

    NONE = 0
    """The plane is absent."""
    EXACT = 1
    """The plane's elements as the layout says, bit for bit."""
    FP8 = 2
    """From here on as docs/formats/precision.md says."""
    INT8 = 3
    INT4 = 4


_CODECS = {int(codec): codec for codec in Codec}
_SIZE_KEEPING_CODECS = frozenset({int(Codec.NONE), int(Codec.EXACT)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    namespace_id: NamespaceId
    block_hash: BlockHash
    k_codec: Codec
    v_codec: Codec
    tokens: int
    k_bytes: int
    v_bytes: int
    decoded_bytes: int
    payload_checksum: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of the encoded payload that follows the envelope."""
        return self.k_bytes + self.v_bytes

    def encode(self) -> bytes:
        head = _HEADER.pack(
            _MAGIC,
            _VERSION,
            ENVELOPE_BYTES,
            self.namespace_id,
            self.block_hash,
            self.k_codec,
            self.v_codec,
            0,
            self.tokens,
            self.k_bytes,
            self.v_bytes,
            self.decoded_bytes,
            self.payload_checksum,
            0,
        )
        return head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))

    @classmethod
    def decode(cls, data: Buffer) -> Envelope:
        """Reads an envelope and checks it against itself; raises `CorruptBlockError`."""
        head = bytes(data[:_CHECKED_BYTES])
        tail = bytes(data[_CHECKED_BYTES:ENVELOPE_BYTES])
        if len(tail) < _CHECKSUM.size:
            raise CorruptBlockError(f"envelope cut off after {len(data)} bytes")
        if _CHECKSUM.unpack(tail)[0] != xxhash.xxh3_64_intdigest(head):
            raise CorruptBlockError("envelope checksum does not match")
        magic, version, size, namespace_id, block_hash, k_codec, v_codec, zero, *numbers, reserved = _HEADER.unpack(
            head
        )
        if magic != _MAGIC or version != _VERSION or size != ENVELOPE_BYTES or zero or reserved:
            raise CorruptBlockError(f"not a version {_VERSION} envelope: magic {magic!r}, version {version}")
        if k_codec not in _CODECS or v_codec not in _CODECS:
            raise CorruptBlockError(f"unknown codecs {k_codec}, {v_codec}")
        tokens, k_bytes, v_bytes, decoded_bytes, payload_checksum = numbers
        if (k_codec == Codec.NONE and k_bytes) or (v_codec == Codec.NONE and v_bytes):
            raise CorruptBlockError(f"an absent plane has bytes: {k_bytes} of K, {v_bytes} of V")
        if {k_codec, v_codec} <= _SIZE_KEEPING_CODECS and k_bytes + v_bytes != decoded_bytes:
            raise CorruptBlockError(f"{k_bytes} + {v_bytes} exact bytes cannot decode to {decoded_bytes}")
        return cls(
            namespace_id=NamespaceId(namespace_id),
            block_hash=BlockHash(block_hash),
            k_codec=_CODECS[k_codec],
            v_codec=_CODECS[v_codec],
            tokens=tokens,
            k_bytes=k_bytes,
            v_bytes=v_bytes,
            decoded_bytes=decoded_bytes,
            payload_checksum=payload_checksum,
        )


class EnvelopeTemplate:
    """Encodes envelopes that differ in their block and its checksum only, without packing the rest each time."""

    def __init__(self, envelope: Envelope) -> None:
        encoded = envelope.encode()
        self._before_hash = encoded[:40]
        self._behind_hash = encoded[72:104]

    def encode(self, block_hash: BlockHash, *, payload_checksum: int) -> bytes:
        head = self._before_hash + block_hash + self._behind_hash + _VARIABLE_END.pack(payload_checksum, 0)
        return head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))

    def has_made(self, envelope: bytes, block_hash: BlockHash) -> bool:
        """Whether this is the envelope of that block, with whatever checksum of its payload."""
        head = envelope[:_CHECKED_BYTES]
        return (
            head[:104] == self._before_hash + block_hash + self._behind_hash
            and head[112:] == _ZERO_WORD
            and envelope[_CHECKED_BYTES:] == _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))
        )


def checksum(payload: Buffer) -> int:
    """XXH3-64; releases the GIL on large buffers, so it may run beside other work."""
    return xxhash.xxh3_64_intdigest(payload)


class RunningChecksum:
    """`checksum` of bytes that are taken piece by piece."""

    __slots__ = ("_state", "add")

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()
        self.add: Callable[[Any], None] = self._state.update

    def value(self) -> int:
        return self._state.intdigest()


class PayloadChecksum:
    """The checksum of the payload in an enveloped block, taken piece by piece as the block comes."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self.block_bytes = 0
        """How much of the block, envelope included, has been taken in."""

    def update(self, piece: Buffer) -> None:
        """Takes in the bytes that follow; releases the GIL on large ones."""
        self._hash.update(memoryview(piece)[max(ENVELOPE_BYTES - self.block_bytes, 0) :])
        self.block_bytes += len(piece)

    @property
    def value(self) -> int:
        return self._hash.intdigest()


def verify_block(
    block: Buffer,
    *,
    namespace_id: NamespaceId,
    block_hash: BlockHash,
    payload_bytes: int,
    payload_checksum: int | None = None,
) -> memoryview:
    """The payload of an enveloped block, proved to be the block that was asked for.

    `payload_bytes` is what the namespace stores, `payload_checksum` that of these very bytes where it is known
    already. Raises `CorruptBlockError` when the magic, the key echo, a length or a checksum is wrong; bytes behind the
    payload are not looked at.
    """
    view = memoryview(block)
    envelope = Envelope.decode(view)
    if envelope.namespace_id != namespace_id or envelope.block_hash != block_hash:
        raise CorruptBlockError(
            f"asked for block {block_hash.hex()[:16]}, got {envelope.block_hash.hex()[:16]} "
            f"of namespace {envelope.namespace_id.hex()[:16]}"
        )
    if envelope.payload_bytes != payload_bytes:
        raise CorruptBlockError(f"payload of {envelope.payload_bytes} bytes, the namespace stores {payload_bytes}")
    payload = view[ENVELOPE_BYTES : ENVELOPE_BYTES + envelope.payload_bytes]
    if len(payload) != envelope.payload_bytes:
        raise CorruptBlockError(f"payload has {len(payload)} of {envelope.payload_bytes} bytes")
    if (checksum(payload) if payload_checksum is None else payload_checksum) != envelope.payload_checksum:
        raise CorruptBlockError("payload checksum does not match")
    return payload
