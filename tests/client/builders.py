"""Small namespaces, chains and blocks."""

from __future__ import annotations

import itertools
import random

import pytest

from kvstore.envelope import Codec, Envelope, checksum
from kvstore.errors import InvalidArgumentError
from kvstore.keys import BlockHash, hash_blocks
from kvstore.layout import DTYPE_BYTES
from kvstore.namespace import NONE, Namespace
from kvstore_client import ClientConfig

_fresh = itertools.count()

FAST = ClientConfig(
    attach_timeout_s=2.0,
    control_timeout_s=2.0,
    data_timeout_base_s=2.0,
    breaker_cooldown_initial_s=0.05,
    breaker_cooldown_max_s=0.2,
)
"""Patient enough for a busy machine, and soon back after a failure."""


def namespace(*, model: str | None = None, payload_bytes: int = 256, layout: str = "HND") -> Namespace:
    """A namespace of its own, unless `model` is given, whose blocks have `payload_bytes`."""
    element_bytes = DTYPE_BYTES["float16"]
    assert payload_bytes % (2 * 4 * element_bytes) == 0, payload_bytes
    head_dim = payload_bytes // (2 * 4 * element_bytes)
    return Namespace(
        model=f"model {next(_fresh)}" if model is None else model,
        weights_revision="1",
        tokenizer="none",
        rope=NONE,
        dtype="float16",
        num_layers=1,
        num_kv_heads=1,
        head_dim=head_dim,
        v_head_dim=head_dim,
        tokens_per_block=4,
        layout=layout,
        shard=None,
        lora=NONE,
        tenant_salt=b"",
        k_precision="exact",
        v_precision="exact",
    )


def chain(block_count: int, *, seed: int = 0) -> list[BlockHash]:
    return hash_blocks([seed] * (4 * block_count), tokens_per_block=4)


def payloads(space: Namespace, block_count: int, *, seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(space.block_layout.payload_bytes) for _ in range(block_count)]


def enveloped(space: Namespace, block_hash: BlockHash, payload: bytes) -> bytes:
    k_bytes = space.block_layout.planes[0].size_bytes
    envelope = Envelope(
        namespace_id=space.id,
        block_hash=block_hash,
        k_codec=Codec.EXACT,
        v_codec=Codec.EXACT,
        tokens=space.tokens_per_block,
        k_bytes=k_bytes,
        v_bytes=len(payload) - k_bytes,
        decoded_bytes=len(payload),
        payload_checksum=checksum(payload),
    )
    return envelope.encode() + payload


def refuses(field: str) -> pytest.RaisesExc[Exception]:
    """Expects an `InvalidArgumentError` that names the field."""
    return pytest.raises(InvalidArgumentError, match=f"^{field}")
