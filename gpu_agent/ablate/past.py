"""One text in several rows of a cache, each row's full blocks as a tier would give them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from gpu_agent.ablate.settings import Plane, Setting
from gpu_agent.precision.reference import decode, encode

_ATTRIBUTES: dict[Plane, str] = {"K": "keys", "V": "values"}


class Past:
    """The K and V that each setting's model has of the same tokens.

    A block is exact until it is full, then has the bits of the dtype it is stored in, and is encoded and decoded
    when its setting's tier gets it. What is not a full block stays as it was computed.
    """

    def __init__(self, settings: Sequence[Setting], *, tokens_per_block: int, stored_dtype: torch.dtype) -> None:
        self.cache = DynamicCache()
        self.refused_counts = [0] * len(settings)
        self._settings = settings
        self._tokens_per_block = tokens_per_block
        self._stored_dtype = stored_dtype

    def block_filled(self) -> None:
        """To be called when the last tokens have filled a block, and not more than one."""
        token_count = self.cache.get_seq_length()
        assert token_count % self._tokens_per_block == 0, token_count
        for layer in self.cache.layers:
            for attribute in _ATTRIBUTES.values():
                block = getattr(layer, attribute)[:, :, token_count - self._tokens_per_block :]
                block.copy_(block.to(self._stored_dtype))
        for row, setting in enumerate(self._settings):
            stop = token_count - _rounded_up(setting.tier.age_tokens, self._tokens_per_block)
            if stop > 0:
                self._lower(row, setting, slice(stop - self._tokens_per_block, stop))

    def _lower(self, row: int, setting: Setting, tokens: slice) -> None:
        layers: list[Any] = list(self.cache.layers)
        if setting.group is not None:
            layers = [layers[index] for index in setting.group.layers]
        for plane, precision in setting.lowered:
            parts = [getattr(layer, _ATTRIBUTES[plane])[row, :, tokens] for layer in layers]
            encoded = encode(torch.stack(parts).to(self._stored_dtype), precision, kind=plane)
            if not bool(encoded.is_kept.all()):
                self.refused_counts[row] += 1
                continue
            for part, lowered in zip(parts, decode(encoded, self._stored_dtype), strict=True):
                part.copy_(lowered)


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
