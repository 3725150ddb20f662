"""The envelopes that clients put in front of blocks."""

from __future__ import annotations

from kvstore.envelope import Codec, Envelope, EnvelopeTemplate
from kvstore.errors import CorruptBlockError
from kvstore.keys import HASH_BYTES, BlockHash
from kvstore.messages import BlockState
from kvstore.namespace import Namespace


def exact_envelope(namespace: Namespace, block_hash: BlockHash, *, payload_checksum: int) -> bytes:
    """Of a block whose planes are stored bit for bit."""
    return exact_envelopes(namespace).encode(block_hash, payload_checksum=payload_checksum)


def exact_envelopes(namespace: Namespace) -> EnvelopeTemplate:
    """Of all blocks of a namespace whose planes are stored bit for bit."""
    layout = namespace.block_layout
    k_bytes = layout.planes[0].size_bytes
    v_bytes = layout.payload_bytes - k_bytes
    return EnvelopeTemplate(
        Envelope(
            namespace_id=namespace.id,
            block_hash=BlockHash(bytes(HASH_BYTES)),
            k_codec=Codec.EXACT,
            v_codec=Codec.EXACT if v_bytes else Codec.NONE,
            tokens=layout.tokens_per_block,
            k_bytes=k_bytes,
            v_bytes=v_bytes,
            decoded_bytes=layout.payload_bytes,
            payload_checksum=0,
        )
    )


def enveloped_state(
    envelope: memoryview, *, namespace: Namespace, block_hash: BlockHash, payload_bytes: int, payload_checksum: int
) -> BlockState:
    """HIT when a payload of this size and checksum is, by its envelope, the block that was asked for; else CORRUPT.

    In the layout's full precision, that is.
    """
    try:
        told = Envelope.decode(envelope)
    except CorruptBlockError:
        return BlockState.CORRUPT
    is_asked_for = told.namespace_id == namespace.id and told.block_hash == block_hash
    is_whole = told.payload_bytes == told.decoded_bytes == payload_bytes
    is_sound = is_asked_for and is_whole and told.payload_checksum == payload_checksum
    return BlockState.HIT if is_sound else BlockState.CORRUPT
