"""Messages of the data port, byte by byte."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.bulk import BlockHeader, BulkStatus, Direction, TransferReply, TransferRequest
from kvstore.errors import ProtocolError
from kvstore.messages import Ticket
from tests.contract.strategies import u32, u64
from tests.contract.test_documented_formats import vectors

tickets = st.binary(min_size=16, max_size=16).map(Ticket)
requests = st.builds(
    TransferRequest, direction=st.sampled_from(Direction), ticket=tickets, block_count=u32, following_bytes=u64
)
replies = st.builds(TransferReply, st.sampled_from(BulkStatus), u32, u64)
block_headers = st.builds(BlockHeader, u32, u64)


@given(st.one_of(requests, replies, block_headers))
def test_what_is_encoded_decodes_to_the_same(message: Any) -> None:
    assert type(message).decode(message.encode()) == message


@given(st.one_of(requests, replies, block_headers), st.data())
def test_no_changed_byte_decodes_to_the_same(message: Any, data: st.DataObject) -> None:
    encoded = bytearray(message.encode())
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decoded = type(message).decode(bytes(encoded))
    except ProtocolError:
        return
    assert decoded != message


@pytest.mark.parametrize("at", [0, 4, 6, 28])
def test_a_request_with_another_magic_version_or_direction_or_something_in_its_gap_is_refused(at: int) -> None:
    request = TransferRequest(direction=Direction.READ, ticket=Ticket(bytes(16)), block_count=1)
    encoded = bytearray(request.encode())
    encoded[at] ^= 0x80
    with pytest.raises(ProtocolError, match="transfer request"):
        TransferRequest.decode(bytes(encoded))


@pytest.mark.parametrize("at", [0, 4, 6, 12])
def test_a_reply_with_another_magic_version_or_status_or_something_in_its_gap_is_refused(at: int) -> None:
    encoded = bytearray(TransferReply(BulkStatus.OK, 1, 2).encode())
    encoded[at] ^= 0x80
    with pytest.raises(ProtocolError, match="transfer reply"):
        TransferReply.decode(bytes(encoded))


def test_golden_vectors() -> None:
    for vector in vectors("bulk", "requests"):
        fields, encoded = vector["fields"], bytes.fromhex(vector["encoded"])
        request = TransferRequest(
            direction=Direction(fields["direction"]),
            ticket=Ticket(bytes.fromhex(fields["ticket"])),
            block_count=fields["block_count"],
            following_bytes=fields["following_bytes"],
        )
        assert request.encode() == encoded
        assert TransferRequest.decode(encoded) == request
    for vector in vectors("bulk", "replies"):
        fields, encoded = vector["fields"], bytes.fromhex(vector["encoded"])
        reply = TransferReply(BulkStatus(fields["status"]), fields["block_count"], fields["following_bytes"])
        assert reply.encode() == encoded
        assert TransferReply.decode(encoded) == reply
    for vector in vectors("bulk", "block_headers"):
        header, encoded = BlockHeader(**vector["fields"]), bytes.fromhex(vector["encoded"])
        assert header.encode() == encoded
        assert BlockHeader.decode(encoded) == header
