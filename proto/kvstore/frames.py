"""Data frames: protobuf on the wire, without protobuf's copies.

`ReadBlocksResponse`, `WriteBlocksRequest` and their agent twins are ordinary messages for every other
language. Their `data` field comes last, so here a frame is built by putting a few header bytes before the
payload, and read by scanning those and slicing the rest: one copy to send, none to receive. Format:
docs/formats/frames.md; wire encoding: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.envelope import Buffer
from kvstore.errors import ProtocolError
from kvstore.keys import BlockHash, NamespaceId
from kvstore.messages import FRAME_DATA_BYTES_MAX, BlockState, OwnerId, ReservationId

_VARINT = 0
_FIXED64 = 1
_LENGTH = 2
_FIXED32 = 5
_DATA_FIELD = 15
_EMPTY = memoryview(b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFrame:
    """Part of a block on its way to a reader (`ReadBlocksResponse`, `LoadBlocksResponse`)."""

    block_index: int
    block_state: BlockState
    offset_bytes: int = 0
    size_bytes: int = 0
    data: memoryview = _EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteFrame:
    """Part of a block on its way into a reserved slot (`WriteBlocksRequest`)."""

    reservation_id: ReservationId
    owner_id: OwnerId | None = None
    offset_bytes: int = 0
    envelope: bytes = b""
    """Only when encoding: bytes to put before `data`, so that a sender need not join them; they arrive in `data`."""
    data: memoryview = _EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFrame:
    """Part of a block on its way into an agent's pool (`StoreBlocksRequest`)."""

    block_hash: BlockHash | None = None
    parent_hash: BlockHash | None = None
    offset_bytes: int = 0
    namespace_id: NamespaceId | None = None
    data: memoryview = _EMPTY


def encode_read_frame(frame: ReadFrame) -> bytes:
    return _encode(
        ((1, frame.block_index), (2, int(frame.block_state)), (3, frame.offset_bytes), (4, frame.size_bytes)),
        frame.data,
    )


def decode_read_frame(message: bytes) -> ReadFrame:
    numbers, _, data = _decode(message)
    state = numbers.get(2, 0)
    if state not in _BLOCK_STATES:
        raise ProtocolError(f"frame has block_state {state}")
    return ReadFrame(
        block_index=numbers.get(1, 0),
        block_state=BlockState(state),
        offset_bytes=numbers.get(3, 0),
        size_bytes=numbers.get(4, 0),
        data=data,
    )


def encode_write_frame(frame: WriteFrame) -> bytes:
    fields = ((1, frame.reservation_id), (2, frame.owner_id or b""), (3, frame.offset_bytes))
    return _encode(fields, frame.data, prefix=frame.envelope)


def decode_write_frame(message: bytes) -> WriteFrame:
    numbers, strings, data = _decode(message)
    owner_id = strings.get(2)
    return WriteFrame(
        reservation_id=ReservationId(numbers.get(1, 0)),
        owner_id=OwnerId(owner_id) if owner_id else None,
        offset_bytes=numbers.get(3, 0),
        data=data,
    )


def encode_store_frame(frame: StoreFrame) -> bytes:
    fields = (
        (1, frame.block_hash or b""),
        (2, frame.parent_hash or b""),
        (3, frame.offset_bytes),
        (4, frame.namespace_id or b""),
    )
    return _encode(fields, frame.data)


def decode_store_frame(message: bytes) -> StoreFrame:
    numbers, strings, data = _decode(message)
    block_hash, parent_hash, namespace_id = strings.get(1), strings.get(2), strings.get(4)
    return StoreFrame(
        block_hash=BlockHash(block_hash) if block_hash else None,
        parent_hash=BlockHash(parent_hash) if parent_hash else None,
        offset_bytes=numbers.get(3, 0),
        namespace_id=NamespaceId(namespace_id) if namespace_id else None,
        data=data,
    )


def cut(block_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of each frame that an enveloped block of this many bytes travels in."""
    for offset in range(0, block_bytes, FRAME_DATA_BYTES_MAX):
        yield offset, min(FRAME_DATA_BYTES_MAX, block_bytes - offset)


_BLOCK_STATES = frozenset(int(state) for state in BlockState)


def _encode(fields: tuple[tuple[int, int | bytes], ...], data: Buffer, *, prefix: bytes = b"") -> bytes:
    head = bytearray()
    for number, value in fields:
        if not value:
            continue  # proto3 leaves defaults out
        if isinstance(value, int):
            head.append(number << 3 | _VARINT)
            _append_varint(head, value)
        else:
            head.append(number << 3 | _LENGTH)
            _append_varint(head, len(value))
            head += value
    size_bytes = len(prefix) + memoryview(data).nbytes  # of a view of wider elements, len() counts those
    if not size_bytes:
        return bytes(head)
    head.append(_DATA_FIELD << 3 | _LENGTH)
    _append_varint(head, size_bytes)
    return b"".join((head, prefix, data))


def _append_varint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _decode(message: bytes) -> tuple[dict[int, int], dict[int, bytes], memoryview]:
    """Integer fields, short byte fields, and `data` as a view; fields of later versions are passed over."""
    numbers: dict[int, int] = {}
    strings: dict[int, bytes] = {}
    data = _EMPTY
    view = memoryview(message)
    position, end = 0, len(message)
    while position < end:
        tag, position = _read_varint(message, position)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            numbers[number], position = _read_varint(message, position)
        elif kind == _LENGTH:
            length, position = _read_varint(message, position)
            if length > end - position:
                raise ProtocolError(f"frame field {number} claims {length} bytes, {end - position} are left")
            if number == _DATA_FIELD:
                data = view[position : position + length]
            else:
                strings[number] = message[position : position + length]
            position += length
        elif kind in (_FIXED64, _FIXED32):
            position += 8 if kind == _FIXED64 else 4
            if position > end:
                raise ProtocolError(f"frame field {number} is cut off")
        else:
            raise ProtocolError(f"frame field {number} has unknown wire type {kind}")
        if number == 0:
            raise ProtocolError("frame field 0")
    if len(data) > FRAME_DATA_BYTES_MAX:
        raise ProtocolError(f"frame carries {len(data)} bytes; allowed: {FRAME_DATA_BYTES_MAX}")
    return numbers, strings, data


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(message) or shift > 63:
            raise ProtocolError("frame header has a broken varint")
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, position
        shift += 7
