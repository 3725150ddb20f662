"""Greedy decoding, with and without a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from kvstore_client.integrations.transformers.identity import cache_argument, forward_arguments


def greedy(model: Any, logits: torch.Tensor, cache: DynamicCache, *, token_count: int) -> list[int]:
    """The `token_count` likeliest tokens one after another, whatever they are; grows `cache`."""
    tokens = [int(logits.argmax())]
    while len(tokens) < token_count:
        logits = forward(model, [tokens[-1]], cache)
        tokens.append(int(logits.argmax()))
    return tokens


def answer_without_store(model: Any, ids: Sequence[int], *, first_chunk: int, token_count: int) -> list[int]:
    """What the model says by itself, computing a first chunk of the prompt and then the rest."""
    cache = DynamicCache()
    if first_chunk:
        forward(model, ids[:first_chunk], cache)
    return greedy(model, forward(model, ids[first_chunk:], cache), cache, token_count=token_count)


def forward(model: Any, ids: Sequence[int], cache: DynamicCache) -> torch.Tensor:
    """Logits after the last of `ids`, which are appended to `cache`."""
    inputs = torch.tensor([list(ids)], device=model.device)
    # Gemma's logits for a whole prompt are a gigabyte and more.
    limit = {"logits_to_keep": 1} if "logits_to_keep" in forward_arguments(model) else {}
    with torch.no_grad():
        output = model(input_ids=inputs, use_cache=True, **{cache_argument(model): cache}, **limit)
    logits: torch.Tensor = output.logits[0, -1]
    return logits
