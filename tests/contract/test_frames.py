from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvstore import frames
from kvstore.errors import ProtocolError
from kvstore.frames import ReadFrame, StoreFrame, WriteFrame, cut
from kvstore.messages import FRAME_DATA_BYTES_MAX, BlockState, ReservationId
from kvstore.v1 import agent_pb2, store_pb2
from tests.contract.strategies import hashes, owner_ids, u32, u64

views = st.binary(max_size=300).map(memoryview)
read_frames = st.builds(
    ReadFrame,
    block_index=u32,
    block_state=st.sampled_from(BlockState),
    offset_bytes=u64,
    size_bytes=u64,
    data=views,
)
write_frames = st.builds(
    WriteFrame,
    reservation_id=u64.map(ReservationId),
    owner_id=st.none() | owner_ids,
    offset_bytes=u64,
    data=views,
)
store_frames = st.builds(
    StoreFrame,
    block_hash=st.none() | hashes,
    parent_hash=st.none() | hashes,
    offset_bytes=u64,
    data=views,
)
DECODERS: list[Callable[[bytes], Any]] = [
    frames.decode_read_frame,
    frames.decode_write_frame,
    frames.decode_store_frame,
]
# Fields that no version of a frame has yet, of every wire type that proto3 writes.
unknown_fields = st.sampled_from(
    [b"\x80\x01\x05", b"\x81\x01" + bytes(8), b"\x82\x01\x03abc", b"\x85\x01" + bytes(4), b"\x82\x01\x00"]
)


def read_message(frame: ReadFrame, kind: Any = store_pb2.ReadBlocksResponse) -> Any:
    return kind(
        block_index=frame.block_index,
        block_state=int(frame.block_state),
        offset_bytes=frame.offset_bytes,
        size_bytes=frame.size_bytes,
        data=bytes(frame.data),
    )


def write_message(frame: WriteFrame) -> Any:
    return store_pb2.WriteBlocksRequest(
        reservation_id=frame.reservation_id,
        owner_id=frame.owner_id or b"",
        offset_bytes=frame.offset_bytes,
        data=bytes(frame.data),
    )


def store_message(frame: StoreFrame) -> Any:
    return agent_pb2.StoreBlocksRequest(
        block_hash=frame.block_hash or b"",
        parent_hash=frame.parent_hash or b"",
        offset_bytes=frame.offset_bytes,
        data=bytes(frame.data),
    )


@given(read_frames)
def test_a_read_frame_is_the_protobuf_message_byte_for_byte(frame: ReadFrame) -> None:
    encoded = frames.encode_read_frame(frame)
    assert encoded == read_message(frame).SerializeToString()
    assert encoded == read_message(frame, agent_pb2.LoadBlocksResponse).SerializeToString()
    assert frames.decode_read_frame(encoded) == frame


@given(write_frames)
def test_a_write_frame_is_the_protobuf_message_byte_for_byte(frame: WriteFrame) -> None:
    encoded = frames.encode_write_frame(frame)
    assert encoded == write_message(frame).SerializeToString()
    assert frames.decode_write_frame(encoded) == frame


@given(store_frames)
def test_a_store_frame_is_the_protobuf_message_byte_for_byte(frame: StoreFrame) -> None:
    encoded = frames.encode_store_frame(frame)
    assert encoded == store_message(frame).SerializeToString()
    assert frames.decode_store_frame(encoded) == frame


@given(write_frames, st.binary(min_size=1, max_size=140))
def test_an_envelope_in_front_of_the_data_arrives_in_it(frame: WriteFrame, envelope: bytes) -> None:
    arrived = frames.decode_write_frame(frames.encode_write_frame(replace(frame, envelope=envelope)))
    assert arrived == replace(frame, data=memoryview(envelope + bytes(frame.data)))


def single_fields(frame: ReadFrame) -> list[bytes]:
    message = read_message(frame)
    parts = []
    for field, value in message.ListFields():
        parts.append(store_pb2.ReadBlocksResponse(**{field.name: value}).SerializeToString())
    return parts


@given(read_frames, st.data())
def test_fields_may_come_in_any_order_with_unknown_ones_between(frame: ReadFrame, data: st.DataObject) -> None:
    parts = data.draw(st.permutations(single_fields(frame) + data.draw(st.lists(unknown_fields, max_size=4))))
    message = b"".join(parts)
    assert read_message(frames.decode_read_frame(message)) == read_message(frame)
    assert store_pb2.ReadBlocksResponse.FromString(message).block_index == frame.block_index


@given(read_frames, read_frames)
def test_of_a_field_that_comes_twice_the_last_counts_as_in_protobuf(first: ReadFrame, second: ReadFrame) -> None:
    message = frames.encode_read_frame(first) + frames.encode_read_frame(second)
    assert read_message(frames.decode_read_frame(message)) == store_pb2.ReadBlocksResponse.FromString(message)


@given(st.sampled_from(DECODERS), st.binary(max_size=100))
def test_garbage_is_a_protocol_error_and_nothing_else(decode: Callable[[bytes], Any], garbage: bytes) -> None:
    try:
        decode(garbage)
    except ProtocolError:
        return


@given(st.sampled_from(DECODERS), read_frames, st.data())
def test_a_damaged_frame_is_a_protocol_error_and_nothing_else(
    decode: Callable[[bytes], Any], frame: ReadFrame, data: st.DataObject
) -> None:
    message = bytearray(frames.encode_read_frame(frame))
    message[data.draw(st.integers(0, len(message) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decode(bytes(message))
    except ProtocolError:
        return


@given(read_frames, st.data())
def test_a_frame_that_protobuf_takes_reads_the_same_here(frame: ReadFrame, data: st.DataObject) -> None:
    """Cut off anywhere: either both refuse the frame, or both read the same fields."""
    message = frames.encode_read_frame(frame)
    message = message[: data.draw(st.integers(0, len(message)))]
    try:
        expected = store_pb2.ReadBlocksResponse.FromString(message)
    except DecodeError:
        expected = None
    if expected is None or expected.block_state == 0:
        with pytest.raises(ProtocolError):
            frames.decode_read_frame(message)
    else:
        assert read_message(frames.decode_read_frame(message)) == expected


@pytest.mark.parametrize("state", [0, 5, 127])
def test_a_block_state_that_is_not_known_is_refused(state: int) -> None:
    with pytest.raises(ProtocolError, match="block_state"):
        frames.decode_read_frame(store_pb2.ReadBlocksResponse(block_index=1, block_state=state).SerializeToString())


@pytest.mark.parametrize("decode", DECODERS)
def test_a_frame_carries_the_largest_allowed_data_but_not_a_byte_more(decode: Callable[[bytes], Any]) -> None:
    largest = store_pb2.ReadBlocksResponse(block_state=1, data=bytes(FRAME_DATA_BYTES_MAX)).SerializeToString()
    too_large = store_pb2.ReadBlocksResponse(block_state=1, data=bytes(FRAME_DATA_BYTES_MAX + 1)).SerializeToString()
    assert len(decode(largest).data) == FRAME_DATA_BYTES_MAX
    with pytest.raises(ProtocolError, match="carries"):
        decode(too_large)


@pytest.mark.parametrize(
    "message",
    [
        b"\x80",
        b"\x08",
        b"\x08" + b"\xff" * 10,
        b"\xff" * 20,
        b"\x00\x01",
        b"\x02\x00",
        b"\x0b",
        b"\x0c",
        b"\x0e",
        b"\x0f",
        b"\x7a\x05abcd",
        b"\x7a" + b"\xff" * 9 + b"\x01",
        b"\x11" + bytes(7),
        b"\x15" + bytes(3),
    ],
    ids=bytes.hex,
)
@pytest.mark.parametrize("decode", DECODERS)
def test_broken_encodings_are_refused(decode: Callable[[bytes], Any], message: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(message)


def test_data_is_read_in_place() -> None:
    message = frames.encode_read_frame(ReadFrame(block_index=0, block_state=BlockState.HIT, data=memoryview(b"abc")))
    assert frames.decode_read_frame(message).data.obj is message


def test_a_view_of_wider_elements_travels_whole() -> None:
    wide = memoryview(bytes(range(8))).cast("I")
    message = frames.encode_read_frame(ReadFrame(block_index=0, block_state=BlockState.HIT, data=wide))
    assert frames.decode_read_frame(message).data == bytes(range(8))


@given(st.integers(0, 5 * FRAME_DATA_BYTES_MAX))
def test_a_block_is_cut_into_frames_that_cover_it_once_and_in_order(block_bytes: int) -> None:
    position = 0
    for offset, length in cut(block_bytes):
        assert offset == position
        assert 0 < length <= FRAME_DATA_BYTES_MAX
        position += length
    assert position == block_bytes


def test_a_block_of_two_mib_travels_in_one_frame() -> None:
    assert list(cut((2 << 20) + 128)) == [(0, (2 << 20) + 128)]
