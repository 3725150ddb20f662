"""The client alone, with numpy arrays in the place of a model's K and V.

kvstore serve                       # in another terminal
python examples/client.py           # twice: the second time everything is a hit
"""

from __future__ import annotations

import numpy as np

from kvstore.keys import hash_blocks
from kvstore.namespace import NONE, Namespace
from kvstore_client import Client

# Everything that must be equal before two engines may share a block. Nothing may be left out.
NAMESPACE = Namespace(
    model="example",
    weights_revision="1",
    tokenizer="example",
    rope=NONE,
    dtype="float16",
    num_layers=4,
    num_kv_heads=2,
    head_dim=64,
    v_head_dim=64,
    tokens_per_block=16,
    layout="HND",
    shard=None,
    lora=NONE,
    tenant_salt=b"",
    k_precision="exact",
    v_precision="exact",
)


def compute(token_ids: list[int]) -> np.ndarray:
    """Stands for a model: [blocks, K and V, layers, heads, tokens, head_dim] for full blocks of tokens."""
    planes = NAMESPACE.block_layout.planes
    block_count = len(token_ids) // NAMESPACE.tokens_per_block
    tokens = np.array(token_ids[: block_count * 16], dtype=np.float16).reshape(block_count, 1, 1, 1, 16, 1)
    return np.ascontiguousarray(np.broadcast_to(tokens, (block_count, len(planes), *planes[0].shape)))


def main() -> None:
    token_ids = [number % 1000 for number in range(500)]
    with Client() as client:
        hashes = hash_blocks(token_ids, tokens_per_block=NAMESPACE.tokens_per_block)
        blocks = np.empty((len(hashes), NAMESPACE.block_layout.payload_bytes), dtype=np.uint8)

        loaded = client.get(NAMESPACE, hashes, into=blocks)
        reused = loaded.matched_count  # 0 when no daemon answers: `loaded.error` says why
        print(f"{reused} of {len(hashes)} blocks were there" + (f" ({loaded.error})" if loaded.error else ""))

        if reused < len(hashes):
            new_blocks = compute(token_ids)[reused:]
            stored = client.put(
                NAMESPACE, hashes[reused:], new_blocks, parent_hash=hashes[reused - 1] if reused else None
            )
            print(f"{stored.stored_count} blocks stored" + (f" ({stored.error})" if stored.error else ""))


if __name__ == "__main__":
    main()
