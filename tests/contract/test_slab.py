"""Slots and the slab socket, byte by byte; the golden vectors are in test_golden.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import messages as m
from kvstore import slab, wire
from kvstore.errors import ProtocolError
from kvstore.keys import NamespaceId
from kvstore.messages import Epoch
from kvstore.slab import (
    Access,
    ArenaReply,
    CallHeader,
    ConnectionKind,
    Generation,
    Hello,
    SlotRecord,
    SlotState,
    Welcome,
)
from tests.contract.strategies import owner_ids, u32, u64

generations = st.integers(1, 2**63 - 2).map(Generation)
hellos = st.builds(Hello, kind=st.sampled_from(ConnectionKind), access=st.sampled_from(Access), session_id=owner_ids)
welcomes = st.builds(
    Welcome,
    epoch=st.binary(min_size=16, max_size=16).map(Epoch),
    arena_count=u32,
    arena_bytes=u64,
    access=st.sampled_from(Access),
    refusal_bytes=st.integers(0, 2**16 - 1),
)
arena_replies = st.builds(
    ArenaReply, index=u32, is_granted=st.booleans(), incarnation=u32, size_bytes=u64, page_bytes=u64
)
call_headers = st.builds(
    CallHeader,
    body_bytes=st.integers(0, slab.CALL_BODY_BYTES_MAX),
    code=st.integers(0, 2**16 - 1),
    is_one_way=st.booleans(),
    call_number=u64,
)


@given(st.one_of(hellos, welcomes, arena_replies))
def test_what_is_encoded_decodes_to_the_same(message: Any) -> None:
    assert type(message).decode(message.encode()) == message


@given(call_headers)
def test_call_headers_come_back_as_they_were(header: CallHeader) -> None:
    assert CallHeader.decode(header.encode()) == header


@given(st.lists(st.builds(SlotRecord, place=u64, generation=generations, size_bytes=u64), max_size=20))
def test_slot_records_come_back_in_order(records: list[SlotRecord]) -> None:
    assert slab.decode_slot_records(slab.encode_slot_records(records)) == records


@given(st.binary(max_size=200).filter(lambda data: len(data) % slab.SLOT_RECORD_BYTES))
def test_a_torn_list_of_slot_records_is_refused(packed: bytes) -> None:
    with pytest.raises(ProtocolError, match="slot records"):
        slab.decode_slot_records(packed)


@given(
    generations,
    st.booleans(),
    st.integers(0, slab.SLOT_HEADER_BYTES * 8 - 1),
)
def test_a_header_with_any_bit_flipped_is_readable_as_nothing(
    generation: Generation, is_verified: bool, bit: int
) -> None:
    header = bytearray(slab.encode_slot_header(generation, is_readable=True, is_verified=is_verified))
    expected = SlotState.VERIFIED if is_verified else SlotState.READABLE
    assert slab.slot_state(header, generation) is expected
    header[bit // 8] ^= 1 << bit % 8
    assert slab.slot_state(header, generation) is SlotState.GONE


@given(generations, generations, st.booleans())
def test_a_slot_is_readable_as_its_own_generation_only(
    generation: Generation, other: Generation, is_verified: bool
) -> None:
    header = slab.encode_slot_header(generation, is_readable=True, is_verified=is_verified)
    assert (slab.slot_state(header, other) is SlotState.GONE) == (generation != other)
    being_written = slab.encode_slot_header(generation, is_readable=False, is_verified=False)
    assert slab.slot_state(being_written, generation) is SlotState.GONE
    assert slab.slot_state(slab.EMPTY_SLOT_HEADER, generation) is SlotState.GONE


@given(st.binary(min_size=slab.HELLO_BYTES, max_size=slab.HELLO_BYTES))
def test_garbage_is_no_hello(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Hello.decode(data)


@given(
    hellos,
    st.sampled_from([(4, 2), (5, 1), (6, 3), (7, 3), (6, 0), (7, 0)]),
)
def test_a_hello_of_another_version_kind_or_access_is_refused(hello: Hello, change: tuple[int, int]) -> None:
    data = bytearray(hello.encode())
    data[change[0]] = change[1]
    with pytest.raises(ProtocolError, match="hello"):
        Hello.decode(data)


@given(st.integers(slab.CALL_BODY_BYTES_MAX + 1, 2**32 - 1))
def test_a_call_that_is_too_large_is_refused_by_its_header(body_bytes: int) -> None:
    with pytest.raises(ProtocolError, match=f"a call of {body_bytes} bytes; allowed: {slab.CALL_BODY_BYTES_MAX}"):
        CallHeader.decode(CallHeader(body_bytes, 4, False, 1).encode())


def test_the_largest_request_fits_into_a_call() -> None:
    request = m.LeaseBlocksRequest(
        namespace_id=NamespaceId(bytes(32)),
        owner_id=m.OwnerId(bytes(16)),
        block_hashes=bytes(32) * m.BATCH_COUNT_MAX,
        lease_s=600.0,
        path=m.TransferPath.SLAB,
    )
    assert len(wire.LEASE_BLOCKS.encode_request(request)) < slab.CALL_BODY_BYTES_MAX


def test_the_page_numbers_the_methods_as_they_are() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "formats" / "slab.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|$", page, flags=re.MULTILINE)
    assert rows == [(method.name, str(code)) for code, method in enumerate(wire.UNARY_STORE_METHODS, start=1)]
