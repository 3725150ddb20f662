"""Batches of prompts: what is read as padding, and which prompts are computed together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgumentError
from kvstore_client.integrations.transformers.prompts import cost_tokens, plan_groups, read_prompts

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=6)


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    first, *rest = items
    for partition in partitions(rest):
        yield [[first], *partition]
        for index, group in enumerate(partition):
            yield [*partition[:index], [first, *group], *partition[index + 1 :]]


@given(COUNTS, st.integers(0, 50))
def test_no_other_grouping_is_cheaper(new_counts: list[int], forward_cost_tokens: int) -> None:
    groups = plan_groups(new_counts, forward_cost_tokens=forward_cost_tokens)
    assert sorted(index for group in groups for index in group) == list(range(len(new_counts)))
    assert cost_tokens(groups, new_counts, forward_cost_tokens=forward_cost_tokens) == min(
        cost_tokens(partition, new_counts, forward_cost_tokens=forward_cost_tokens)
        for partition in partitions(list(range(len(new_counts))))
    )


def test_alike_prompts_are_computed_in_one_forward_and_a_long_one_beside_short_ones_alone() -> None:
    assert plan_groups([20, 19, 20, 18]) == [[0, 1, 2, 3]]
    assert plan_groups([20, 2000, 21]) == [[0, 2], [1]]


def test_a_prompt_with_nothing_to_compute_joins_no_forward() -> None:
    assert plan_groups([0, 5, 0]) == [[0, 2], [1]]


@given(st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=5), min_size=1, max_size=4))
def test_lists_become_rows_behind_padding_and_come_back_from_their_mask(prompts: list[list[int]]) -> None:
    batch = read_prompts(prompts, None, pad_token_id=7)
    assert [row.tolist() for row in batch.rows] == prompts
    assert batch.input_ids[batch.attention_mask == 0].unique().tolist() in ([], [7])
    again = read_prompts(batch.input_ids, batch.attention_mask.bool(), pad_token_id=7)
    assert [row.tolist() for row in again.rows] == prompts
    assert torch.equal(again.attention_mask, batch.attention_mask)
    assert again.pad_counts == tuple(batch.column_count - len(prompt) for prompt in prompts)


def test_one_prompt_is_a_batch_of_one_however_it_is_written() -> None:
    for written in (
        [3, 4, 5],
        [[3, 4, 5]],
        torch.tensor([3, 4, 5]),
        torch.tensor([[3, 4, 5]]),
        [torch.tensor([3, 4, 5])],
    ):
        assert [row.tolist() for row in read_prompts(written, None, pad_token_id=3).rows] == [[3, 4, 5]]


@pytest.mark.parametrize(
    ("input_ids", "mask", "named"),
    [
        ([], None, "no prompts"),
        ([[1], []], None, r"input_ids\[1\].*at least one"),
        ([torch.zeros(1, 2)], None, r"input_ids\[0\]"),
        (torch.zeros((2, 0)), None, "at least one each"),
        (torch.zeros((1, 2, 3)), None, r"\(1, 2, 3\)"),
        ([[1, 2]], torch.ones(1, 2), "attention_mask"),
        (torch.ones(2, 3), torch.ones(2, 2), r"attention_mask.*\(2, 3\)"),
        (torch.ones(1, 3), torch.tensor([[1, 1, 0]]), "padding_side='left'"),
        (torch.ones(1, 3), torch.tensor([[1, 0, 1]]), "padding on the left"),
        (torch.ones(1, 3), torch.tensor([[0, 0, 0]]), "padding on the left"),
        (torch.tensor([[7, 1], [1, 2]]), None, "attention_mask.*padding token 7"),
    ],
)
def test_what_may_be_padding_or_not_is_refused(input_ids: Any, mask: Any, named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        read_prompts(input_ids, mask, pad_token_id=7)
