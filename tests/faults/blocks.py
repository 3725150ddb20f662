"""Blocks whose right bytes follow from their hash, so that anybody can tell a wrong one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.envelope import Codec, Envelope, checksum
from kvstore.keys import BlockHash, hash_blocks
from kvstore.namespace import NONE, Namespace

CHAIN_COUNT = 24
CHAIN_BLOCKS = 6


def namespace(name: str, *, head_dim: int) -> Namespace:
    return Namespace(
        model=name,
        weights_revision="1",
        tokenizer="none: token ids only",
        rope=NONE,
        dtype="float16",
        num_layers=8,
        num_kv_heads=4,
        head_dim=head_dim,
        v_head_dim=head_dim,
        tokens_per_block=16,
        layout="HND",
        shard=None,
        lora=NONE,
        tenant_salt=b"",
        k_precision="exact",
        v_precision="exact",
    )


SMALL = namespace("small", head_dim=16)
"""32 KiB a block: lands on the loop."""
LARGE = namespace("large", head_dim=1536)
"""3 MiB a block: two frames, copied and verified in threads."""
NAMESPACES = (SMALL, LARGE)


def chain(number: int) -> list[BlockHash]:
    return hash_blocks([number] * (CHAIN_BLOCKS * 16), tokens_per_block=16)


def right_bytes(space: Namespace, block_hash: BlockHash) -> npt.NDArray[np.uint8]:
    """Every 8 bytes differ from every other 8 bytes of this and, but for chance, of any other block."""
    words = np.arange(space.block_layout.payload_bytes // 8, dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words ^= np.frombuffer(block_hash[:8], dtype=np.uint64)
    return words.view(np.uint8)


def enveloped(space: Namespace, block_hash: BlockHash) -> bytes:
    """The right bytes as they lie in a slot, behind its header."""
    payload = right_bytes(space, block_hash).tobytes()
    k_bytes, v_bytes = (plane.size_bytes for plane in space.block_layout.planes)
    envelope = Envelope(
        namespace_id=space.id,
        block_hash=block_hash,
        k_codec=Codec.EXACT,
        v_codec=Codec.EXACT,
        tokens=space.tokens_per_block,
        k_bytes=k_bytes,
        v_bytes=v_bytes,
        decoded_bytes=space.block_layout.payload_bytes,
        payload_checksum=checksum(payload),
    )
    return envelope.encode() + payload
