"""Envelopes of blocks whose planes are stored bit for bit, which a namespace says all of but the checksum."""

from __future__ import annotations

from kvstore.envelope import Codec, Envelope, EnvelopeTemplate
from kvstore.keys import HASH_BYTES, BlockHash
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
