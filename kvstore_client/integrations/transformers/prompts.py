"""Prompts of different lengths as rows of equal ones, padded on the left, and how to compute them in few forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvstore.errors import InvalidArgumentError

TokenIds = torch.Tensor | Sequence[int]
"""One prompt: a list of ids, or a tensor [tokens] or [1, tokens]."""

PromptIds = torch.Tensor | Sequence[int] | Sequence[Sequence[int] | torch.Tensor]
"""Several: a tensor [prompts, tokens], padded on the left where there is a mask, or one list or tensor for each."""

FORWARD_COST_TOKENS = 64
"""What a forward costs however little it computes, in tokens: it reads all weights, which takes about as long as
computing some dozens of tokens on a CPU, and more on a GPU. Only speed depends on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The prompts of a batch, each without padding in `rows` and behind its padding in a row of `input_ids`."""

    rows: tuple[torch.Tensor, ...]
    input_ids: torch.Tensor
    attention_mask: torch.Tensor

    @property
    def column_count(self) -> int:
        return int(self.input_ids.shape[1])

    @property
    def pad_counts(self) -> tuple[int, ...]:
        return tuple(self.column_count - len(row) for row in self.rows)


def one_prompt(input_ids: TokenIds) -> torch.Tensor:
    """The ids as a tensor [tokens]; raises `InvalidArgumentError` for what is not one prompt."""
    ids = input_ids if isinstance(input_ids, torch.Tensor) else torch.tensor(list(input_ids), dtype=torch.long)
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1:
        raise InvalidArgumentError.of("input_ids", f"shape {tuple(ids.shape)}", "one prompt: [tokens] or [1, tokens]")
    return ids


def read_prompts(input_ids: PromptIds, attention_mask: torch.Tensor | None, *, pad_token_id: int | None) -> Prompts:
    """The prompts of a batch; raises `InvalidArgumentError` where it is not sure which tokens are padding.

    A tensor of several prompts that begin with `pad_token_id` needs its mask.
    """
    if not isinstance(input_ids, torch.Tensor):
        if attention_mask is not None:
            raise InvalidArgumentError.of("attention_mask", "a mask for lists", "None: lists have no padding")
        return _pad(_read_rows(input_ids), pad_token_id=pad_token_id)
    ids = input_ids[None] if input_ids.dim() == 1 else input_ids
    if ids.dim() != 2 or 0 in ids.shape:
        raise InvalidArgumentError.of("input_ids", f"shape {tuple(ids.shape)}", "[prompts, tokens], at least one each")
    if attention_mask is None:
        if pad_token_id is not None and len(ids) > 1 and bool((ids[:, 0] == pad_token_id).any()):
            raise InvalidArgumentError.of(
                "attention_mask", None, f"the tokenizer's, as rows begin with the padding token {pad_token_id}"
            )
        mask = torch.ones_like(ids)
    else:
        mask = _check_mask(attention_mask[None] if attention_mask.dim() == 1 else attention_mask, ids)
    pad_counts = (mask == 0).sum(dim=1).tolist()
    rows = tuple(row[count:] for row, count in zip(ids, pad_counts, strict=True))
    return Prompts(rows=rows, input_ids=ids, attention_mask=mask)


def plan_groups(new_counts: Sequence[int], *, forward_cost_tokens: int = FORWARD_COST_TOKENS) -> list[list[int]]:
    """Which prompts to compute together: those with alike many new tokens, as all of a group are padded to the longest.

    The cheapest grouping of all, where a forward costs its tokens, padding included, and `forward_cost_tokens`.
    A prompt with nothing to compute costs nothing.
    """
    order = sorted(range(len(new_counts)), key=lambda index: new_counts[index])
    # In order of length, groups are runs: swapping members between two groups never shortens either's longest.
    costs, starts = [0], [0]
    for stop in range(1, len(order) + 1):
        longest = new_counts[order[stop - 1]]
        forward = forward_cost_tokens if longest else 0
        options = [costs[start] + forward + (stop - start) * longest for start in range(stop)]
        costs.append(min(options))
        starts.append(options.index(costs[-1]))
    groups: list[list[int]] = []
    stop = len(order)
    while stop:
        groups.append(sorted(order[starts[stop] : stop]))
        stop = starts[stop]
    return groups[::-1]


def cost_tokens(
    groups: Sequence[Sequence[int]], new_counts: Sequence[int], *, forward_cost_tokens: int = FORWARD_COST_TOKENS
) -> int:
    """What computing prompts in these groups costs, as `plan_groups` counts."""
    longest = [max(new_counts[index] for index in group) for group in groups]
    return sum(
        len(group) * count + (forward_cost_tokens if count else 0) for group, count in zip(groups, longest, strict=True)
    )


def _read_rows(input_ids: Sequence[int] | Sequence[Sequence[int] | torch.Tensor]) -> tuple[torch.Tensor, ...]:
    items: list[Any] = list(input_ids)
    if items and all(isinstance(item, int) for item in items):
        items = [items]
    rows = tuple(
        item if isinstance(item, torch.Tensor) else torch.tensor(list(item), dtype=torch.long) for item in items
    )
    for index, row in enumerate(rows):
        if row.dim() != 1 or not len(row):
            raise InvalidArgumentError.of(f"input_ids[{index}]", f"shape {tuple(row.shape)}", "[tokens], at least one")
    if not rows:
        raise InvalidArgumentError.of("input_ids", "no prompts", "at least one")
    return rows


def _pad(rows: tuple[torch.Tensor, ...], *, pad_token_id: int | None) -> Prompts:
    column_count = max(len(row) for row in rows)
    ids = rows[0].new_full((len(rows), column_count), pad_token_id or 0)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, column_count - len(row) :] = row
        mask[index, column_count - len(row) :] = 1
    return Prompts(rows=rows, input_ids=ids, attention_mask=mask)


def _check_mask(mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    if mask.shape != ids.shape:
        raise InvalidArgumentError.of(
            "attention_mask", f"shape {tuple(mask.shape)}", f"as input_ids: {tuple(ids.shape)}"
        )
    mask = (mask != 0).to(torch.long)
    if bool((mask[:, -1] == 0).any()) or bool((mask.diff(dim=1) < 0).any()):
        raise InvalidArgumentError.of(
            "attention_mask", "zeros behind ones", "padding on the left only: padding_side='left'"
        )
    return mask.to(ids.device)
