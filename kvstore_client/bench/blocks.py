"""The namespace of benchmark blocks, and how much room in a daemon they need."""

from __future__ import annotations

import secrets

from kvstore.errors import InvalidArgumentError
from kvstore.keys import HASH_BYTES, BlockHash
from kvstore.layout import DTYPE_BYTES
from kvstore.namespace import NONE, Namespace
from kvstore.slab import PAYLOAD_OFFSET_BYTES

_TOKENS_PER_BLOCK = 16
_LAYER_COUNT = 32
_DTYPE = "float16"
_SMALLEST_BYTES = 2 * _TOKENS_PER_BLOCK * DTYPE_BYTES[_DTYPE]  # K and V, one head of one element: 64
_SLOT_STEP_BYTES = 4096
_SLAB_SLOTS = 32
# Eviction goes down to 0.90 of the capacity and takes what was used longest ago, which a batch that was just replaced
# is not: twice what is in use, and a slab of each client that is not full.
_ROOM = 2.5


def new_revision() -> str:
    """What keeps the namespace of one benchmark apart from that of another, on a daemon that both use."""
    return secrets.token_hex(8)


def namespace(block_bytes: int, *, revision: str) -> Namespace:
    """The namespace that all clients of a benchmark share."""
    if block_bytes < _SMALLEST_BYTES or block_bytes % _SMALLEST_BYTES:
        raise InvalidArgumentError.of("--block-size", f"{block_bytes} bytes", f"a multiple of {_SMALLEST_BYTES} bytes")
    layer_count = _LAYER_COUNT if block_bytes % (_SMALLEST_BYTES * _LAYER_COUNT) == 0 else 1
    head_dim = block_bytes // _SMALLEST_BYTES // layer_count
    return Namespace(
        model="kvstore bench",
        weights_revision=revision,
        tokenizer="none",
        rope=NONE,
        dtype=_DTYPE,
        num_layers=layer_count,
        num_kv_heads=1,
        head_dim=head_dim,
        v_head_dim=head_dim,
        tokens_per_block=_TOKENS_PER_BLOCK,
        layout="HND",
        shard=None,
        lora=NONE,
        tenant_salt=b"",
        k_precision="exact",
        v_precision="exact",
    )


def new_hashes(block_count: int) -> list[BlockHash]:
    """Hashes that no store has seen, so that a put has to store every block."""
    packed = secrets.token_bytes(block_count * HASH_BYTES)
    return [BlockHash(packed[start : start + HASH_BYTES]) for start in range(0, len(packed), HASH_BYTES)]


def slot_bytes(block_bytes: int) -> int:
    return -(-(PAYLOAD_OFFSET_BYTES + block_bytes) // _SLOT_STEP_BYTES) * _SLOT_STEP_BYTES


def slab_bytes(block_bytes: int) -> int:
    return _SLAB_SLOTS * slot_bytes(block_bytes)


def capacity_bytes(*, block_count: int, block_bytes: int) -> int:
    """What a daemon needs so that the newest `block_count` blocks are never evicted; whole slabs, 4 at least."""
    slab_count = -(-int(block_count * _ROOM) // _SLAB_SLOTS)
    return max(4, slab_count) * slab_bytes(block_bytes)
