"""What a client makes of the envelopes that it is sent."""

from __future__ import annotations

from kvstore.envelope import Envelope
from kvstore.errors import CorruptBlockError
from kvstore.keys import BlockHash
from kvstore.messages import BlockState
from kvstore.namespace import Namespace


def enveloped_state(
    envelope: memoryview, *, namespace: Namespace, block_hash: BlockHash, payload_bytes: int, payload_checksum: int
) -> BlockState:
    """HIT when a payload of this size and checksum is, by its envelope, the block that was asked for; else CORRUPT."""
    try:
        told = Envelope.decode(envelope)
    except CorruptBlockError:
        return BlockState.CORRUPT
    is_asked_for = told.namespace_id == namespace.id and told.block_hash == block_hash
    is_sound = is_asked_for and told.payload_bytes == payload_bytes and told.payload_checksum == payload_checksum
    return BlockState.HIT if is_sound else BlockState.CORRUPT
