"""Hypothesis strategies for the contract's values."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hypothesis import strategies as st

from kvstore.errors import InvalidArgumentError
from kvstore.keys import BlockHash, NamespaceId
from kvstore.layout import DTYPE_BYTES
from kvstore.messages import OwnerId
from kvstore.namespace import Namespace, Shard
from kvstore.precision import PRECISIONS

text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
hashes = st.binary(min_size=32, max_size=32).map(BlockHash)
namespace_ids = st.binary(min_size=32, max_size=32).map(NamespaceId)
owner_ids = st.binary(min_size=16, max_size=16).map(OwnerId)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)


@st.composite
def shards(draw: st.DrawFn) -> Shard:
    ranks: dict[str, int] = {}
    for kind in ("tp", "pp", "dcp"):
        size = draw(st.integers(1, 65536))
        ranks |= {f"{kind}_size": size, f"{kind}_rank": draw(st.integers(0, size - 1))}
    return Shard(**ranks)


NAMESPACE_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": text,
    "weights_revision": text,
    "tokenizer": text,
    "rope": text,
    "dtype": st.sampled_from(sorted(DTYPE_BYTES)),
    "num_layers": st.integers(1, 200),
    "num_kv_heads": st.integers(1, 200),
    "head_dim": st.integers(1, 1024),
    "v_head_dim": st.integers(0, 1024),
    "tokens_per_block": st.integers(1, 1024),
    "layout": st.sampled_from(["HND", "NHD", "opaque:engine.LBHNC.x86_64"]),
    "shard": st.none() | shards(),
    "lora": text,
    "tenant_salt": st.binary(max_size=40),
    "k_precision": st.sampled_from(PRECISIONS),
    "v_precision": st.sampled_from(PRECISIONS),
}
assert list(NAMESPACE_FIELDS) == [field.name for field in fields(Namespace)]


def _made(**values: Any) -> Namespace:
    """Exact where the rest of it cannot be stored in fewer bits."""
    try:
        return Namespace(**values)
    except InvalidArgumentError:
        return Namespace(**values | {"k_precision": "exact", "v_precision": "exact"})


namespaces = st.builds(_made, **NAMESPACE_FIELDS)
