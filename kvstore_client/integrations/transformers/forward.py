"""Running a model on what is new of prompts, behind what was restored of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from kvstore.layout import BlockLayout
from kvstore_client.integrations.transformers.blocks import CacheShape, Segment, StoredRow, pack_rows, scatter_rows
from kvstore_client.integrations.transformers.identity import cache_argument, forward_arguments
from kvstore_client.integrations.transformers.prompts import plan_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The tokens of one prompt that a cache is to hold, and which of them are restored."""

    ids: torch.Tensor
    stored: StoredRow

    @property
    def new_count(self) -> int:
        return len(self.ids) - self.stored.token_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """A cache whose rows end in its last column, and the logits of their last tokens, [rows, vocabulary].

    Rows that had nothing to compute have no logits, and then nobody has.
    """

    cache: DynamicCache
    logits: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Rows that were computed together. Each begins in its `first_columns`, what is around it is padding."""

    cache: DynamicCache
    first_columns: list[int]
    logits: torch.Tensor | None


class Forward:
    """Runs one model on rows of different lengths, each restored to a different part, in as few forwards as pay."""

    def __init__(self, model: Any, layout: BlockLayout, shape: CacheShape) -> None:
        arguments = forward_arguments(model)
        self.cache_argument = cache_argument(model)
        self._model = model
        self._layout = layout
        self._shape = shape
        self._limits_logits = "logits_to_keep" in arguments
        self._takes_padding = {"attention_mask", "position_ids"} <= arguments

    def restore(self, stored: Sequence[StoredRow], buffer: torch.Tensor, *, column_count: int) -> DynamicCache:
        """What is restored of rows, and nothing else, as the ends of rows of `column_count` columns."""
        return scatter_rows(buffer, self._layout, self._shape, rows=stored, column_count=column_count)

    def groups(self, rows: Sequence[Row]) -> list[list[int]]:
        """Which rows are computed together: each alone where the model cannot be told about padding."""
        if not self._takes_padding:
            return [[index] for index in range(len(rows))]
        return plan_groups([row.new_count for row in rows])

    def compute(
        self, rows: Sequence[Row], buffer: torch.Tensor, *, column_count: int, chunk_columns: int | None = None
    ) -> Computed:
        """Restores and computes rows, at least one token in all, as the ends of rows of `column_count` columns.

        No forward is of more than `chunk_columns` tokens of a row.
        """
        places: dict[int, tuple[_Group, int]] = {}
        for indices in self.groups(rows):
            group = self._compute_group([rows[index] for index in indices], buffer, chunk_columns=chunk_columns)
            places |= {index: (group, position) for position, index in enumerate(indices)}
        order = [places[index] for index in range(len(rows))]
        all_logits = [group.logits[position] for group, position in order if group.logits is not None]
        segments = [
            Segment(
                cache=group.cache,
                row=position,
                first_column=group.first_columns[position],
                token_count=len(row.ids),
            )
            for row, (group, position) in zip(rows, order, strict=True)
        ]
        return Computed(
            cache=pack_rows(segments, column_count=column_count),
            logits=torch.stack(all_logits) if len(all_logits) == len(rows) else None,
        )

    def _compute_group(self, rows: Sequence[Row], buffer: torch.Tensor, *, chunk_columns: int | None) -> _Group:
        held_count = max(row.stored.token_count for row in rows)
        longest = max(row.new_count for row in rows)
        cache = self.restore([row.stored for row in rows], buffer, column_count=held_count)
        first_columns = [held_count - row.stored.token_count for row in rows]
        if longest == 0:
            return _Group(cache=cache, first_columns=first_columns, logits=None)
        # Padding behind each row, where no token of it looks: so a row's tokens stay neighbours, as windows need them.
        ids = torch.stack([_pad_behind(row.ids[row.stored.token_count :], count=longest) for row in rows])
        is_even = len({(row.new_count, row.stored.token_count) for row in rows}) == 1
        mask, positions = _padding(rows, first_columns, column_count=held_count + longest)
        logits: dict[int, torch.Tensor] = {}
        step = chunk_columns or longest
        for start in range(0, longest, step):
            stop = min(start + step, longest)
            padding = {"attention_mask": mask[:, : held_count + stop], "position_ids": positions[:, start:stop]}
            ends = {index: row.new_count - 1 - start for index, row in enumerate(rows) if start < row.new_count <= stop}
            logits |= self._run(ids[:, start:stop], cache, padding={} if is_even else padding, ends=ends)
        return _Group(
            cache=cache,
            first_columns=first_columns,
            logits=torch.stack([logits[index] for index in range(len(rows))]),
        )

    def _run(
        self, ids: torch.Tensor, cache: DynamicCache, *, padding: dict[str, torch.Tensor], ends: dict[int, int]
    ) -> dict[int, torch.Tensor]:
        """One forward; logits of the rows in `ends`, each at its own column."""
        device = self._model.device
        kept = sorted(set(ends.values()) or {ids.shape[1] - 1})
        limit: dict[str, Any] = {}
        if self._limits_logits:
            limit["logits_to_keep"] = 1 if kept == [ids.shape[1] - 1] else torch.tensor(kept, device=device)
            ends = {index: kept.index(end) for index, end in ends.items()}
        with torch.no_grad():
            output = self._model(
                input_ids=ids.to(device),
                use_cache=True,
                **{self.cache_argument: cache},
                **{name: value.to(device) for name, value in padding.items()},
                **limit,
            )
        return {index: output.logits[index, end] for index, end in ends.items()}


def _pad_behind(ids: torch.Tensor, *, count: int) -> torch.Tensor:
    return torch.cat([ids, ids[-1:].expand(count - len(ids))])


def _padding(
    rows: Sequence[Row], first_columns: Sequence[int], *, column_count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention mask of all columns, and the positions of those that are computed."""
    mask = torch.zeros((len(rows), column_count), dtype=torch.long)
    for row_mask, row, first_column in zip(mask, rows, first_columns, strict=True):
        row_mask[first_column : first_column + len(row.ids)] = 1
    longest = max(row.new_count for row in rows)
    starts = torch.tensor([row.stored.token_count for row in rows])
    lasts = torch.tensor([len(row.ids) - 1 for row in rows])
    # Not beyond a row's own end: there may be no embedding for such a position.
    positions = (starts[:, None] + torch.arange(longest)).minimum(lasts[:, None])
    return mask, positions
