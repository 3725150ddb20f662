"""Prefix reuse for any Hugging Face decoder: restore what the store has, compute the rest, offload what is new.

    prefixes = PrefixCache(model, Client())
    prefixes.generate(input_ids, max_new_tokens=32).sequences   # as model.generate, one prompt or a batch
    prefill = prefixes.prefill(input_ids)                       # prefill.logits, prefill.cache, prefill.tokens_reused
    batch = prefixes.prefill_batch([first_ids, second_ids])     # batch.logits, batch.cache, batch.attention_mask

Works with transformers 5 and models whose layers are full or sliding-window attention with the standard cache.
"""

from __future__ import annotations

from kvstore_client.integrations.transformers.identity import namespace_for
from kvstore_client.integrations.transformers.prefix_cache import PrefixCache
from kvstore_client.integrations.transformers.results import (
    BatchPrefill,
    BlockStore,
    Generation,
    Offloaded,
    Prefill,
    Restored,
    Reused,
)

__all__ = [
    "BatchPrefill",
    "BlockStore",
    "Generation",
    "Offloaded",
    "Prefill",
    "PrefixCache",
    "Restored",
    "Reused",
    "namespace_for",
]
