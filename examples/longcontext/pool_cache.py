"""A transformers cache whose K and V lie in a pool of blocks: no tensor grows, and sequences share one allocation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from kvstore.layout import BlockLayout
from kvstore_client.integrations.transformers.blocks import plane_views


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence in a forward: the slots of all its blocks, those to be written included, and its tokens until now."""

    slots: Sequence[int]
    token_count: int


class _PoolLayer(DynamicLayer):
    """One layer. What is new is written into the pool, and what attention needs is gathered from it."""

    def __init__(self, planes: tuple[Tensor, ...], rows: Sequence[Row], *, tokens_per_block: int) -> None:
        super().__init__()
        self._planes = planes  # K and V of this layer, [slot, head, token, dim]
        self._rows = rows
        self._tokens_per_block = tokens_per_block
        self._past_count = max(row.token_count for row in rows)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        del args, kwargs
        for plane, states in zip(self._planes, (key_states, value_states), strict=True):
            self._write(plane, states)
        k, v = (self._gather(plane, new_count=key_states.shape[2]) for plane in self._planes)
        return k, v

    def get_seq_length(self) -> int:
        return self._past_count

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._past_count + query_length, 0

    def _write(self, plane: Tensor, states: Tensor) -> None:
        for row, new in zip(self._rows, states, strict=True):
            positions = torch.arange(row.token_count, row.token_count + new.shape[1])
            slots = torch.tensor(row.slots)[positions // self._tokens_per_block]
            plane[slots, :, positions % self._tokens_per_block] = new.transpose(0, 1)

    def _gather(self, plane: Tensor, *, new_count: int) -> Tensor:
        """[row, head, token, dim], each row's tokens last; the padding before them is masked."""
        _, heads, _, dim = plane.shape
        gathered = plane.new_zeros((len(self._rows), heads, self._past_count + new_count, dim))
        for row, target in zip(self._rows, gathered, strict=True):
            count = row.token_count + new_count
            tokens = plane[torch.tensor(row.slots)].transpose(0, 1).flatten(1, 2)
            target[:, target.shape[1] - count :] = tokens[:, :count]
        return gathered


def pool_cache(memory: Tensor, layout: BlockLayout, dtype: torch.dtype, rows: Sequence[Row]) -> Cache:
    """For one forward, which appends as many tokens to every row; its K and V are in the pool afterwards."""
    planes = plane_views(memory, layout, dtype)
    return Cache(
        layers=[
            _PoolLayer(tuple(plane[:, index] for plane in planes), rows, tokens_per_block=layout.tokens_per_block)
            for index in range(layout.num_layers)
        ]
    )
