"""How much of a prompt can be loaded, against a check of every token that any group looks back at."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore_client.integrations.vllm.matching import GroupShape, matched_tokens
from tests.integrations.vllm.fakes import seen_tokens

FULL = GroupShape(kind="full", block_tokens=4)
WINDOW = GroupShape(kind="window", block_tokens=4, reach_tokens=9)


def is_held(group: GroupShape, hits: Sequence[bool], *, tokens: int, local_tokens: int) -> bool:
    blocks = [position // group.block_tokens for position in seen_tokens(group, tokens)]
    return all(
        block < local_tokens // group.block_tokens or (block < len(hits) and bool(hits[block])) for block in blocks
    )


def may_end_the_prompt(group: GroupShape, *, prompt_tokens: int) -> bool:
    """Whether its last token, computed again, finds what it looks at where there is room for what the next one does."""
    last = prompt_tokens - 1
    positions = [*seen_tokens(group, last), last]
    room = {position // group.block_tokens for position in seen_tokens(group, prompt_tokens)}
    return {position // group.block_tokens for position in positions} <= room


def longest(
    groups: Sequence[GroupShape],
    hits: Sequence[Sequence[bool]],
    *,
    local_tokens: int,
    prompt_tokens: int,
    align_tokens: int,
) -> int:
    """By trying every length."""
    candidates = [
        tokens
        for tokens in range(0, prompt_tokens + 1, align_tokens)
        if tokens > local_tokens
        and all(
            is_held(group, found, tokens=tokens, local_tokens=local_tokens)
            for group, found in zip(groups, hits, strict=True)
        )
        and (tokens < prompt_tokens or all(may_end_the_prompt(group, prompt_tokens=tokens) for group in groups))
    ]
    if any(group.is_last_block_dropped for group in groups):
        # The last block of what is there is computed again; the rest must do without it.
        candidates = [tokens for tokens in candidates if tokens <= max(candidates) - align_tokens]
    return max(candidates, default=local_tokens)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[GroupShape], list[list[bool]], int, int, int]:
    groups = draw(
        st.lists(
            st.builds(
                GroupShape,
                kind=st.sampled_from(["full", "window", "chunk"]),
                block_tokens=st.sampled_from([2, 4, 8]),
                reach_tokens=st.integers(1, 40),
                is_last_block_dropped=st.sampled_from([False, False, False, True]),
            ),
            min_size=1,
            max_size=3,
        )
    )
    align_tokens = max(group.block_tokens for group in groups) * draw(st.integers(1, 2))
    local_tokens = draw(st.integers(0, 4)) * align_tokens
    prompt_tokens = draw(st.integers(0, 80))
    hits = []
    for group in groups:
        count = max(0, prompt_tokens // group.block_tokens + draw(st.integers(-1, 2)))
        # Few gaps, or no long prefix would ever be found.
        gaps = draw(st.sets(st.integers(0, count), max_size=3))
        hits.append([number not in gaps for number in range(count)])
    return groups, hits, local_tokens, prompt_tokens, align_tokens


@settings(max_examples=120)
@given(cases())
@example(([FULL, WINDOW], [[True] * 6, [False, True, True, True, False, True]], 0, 25, 4))
def test_it_is_the_longest_prefix_for_which_every_token_that_is_looked_at_is_there(
    case: tuple[list[GroupShape], list[list[bool]], int, int, int],
) -> None:
    groups, hits, local_tokens, prompt_tokens, align_tokens = case
    sizes = {"local_tokens": local_tokens, "prompt_tokens": prompt_tokens, "align_tokens": align_tokens}
    assert matched_tokens(groups, hits, **sizes) == longest(groups, hits, **sizes)


@pytest.mark.parametrize("kind", ["full", "window", "chunk"])
def test_the_first_block_is_that_of_the_first_token_that_is_looked_at(kind: Literal["full", "window", "chunk"]) -> None:
    for block_tokens, reach_tokens, tokens in itertools.product((2, 4, 8), range(1, 20), range(0, 41, 8)):
        group = GroupShape(kind=kind, block_tokens=block_tokens, reach_tokens=reach_tokens)
        seen = seen_tokens(group, tokens)
        expected = seen.start // block_tokens if seen else tokens // block_tokens
        assert group.first_block(tokens) == expected, (group, tokens)


def matched(
    groups: Sequence[GroupShape], hits: Sequence[str], *, local: int = 0, prompt: int = 25, align: int = 4
) -> int:
    found = [[mark == "x" for mark in marks] for marks in hits]
    return matched_tokens(groups, found, local_tokens=local, prompt_tokens=prompt, align_tokens=align)


@pytest.mark.parametrize(
    ("hits", "expected"), [("xxxxxx", 24), ("xxx.xx", 12), (".xxxxx", 0), ("", 0), ("xxxxxxxx", 24)]
)
def test_full_attention_ends_at_the_first_gap(hits: str, expected: int) -> None:
    assert matched([FULL], [hits]) == expected


def test_a_window_needs_only_the_blocks_that_it_covers() -> None:
    assert matched([FULL, WINDOW], ["xxxxxx", "....xx"]) == 24
    assert matched([FULL, WINDOW], ["xxxxxx", ".....x"]) == 0


def test_a_window_with_a_gap_falls_back_to_the_end_before_it() -> None:
    assert matched([FULL, WINDOW], ["xxxxxx", "xxx.xx"]) == 24
    assert matched([FULL, WINDOW], ["xxxxxx", "xxxx.x"]) == 16


def test_a_chunk_needs_nothing_before_its_own_start() -> None:
    chunk = GroupShape(kind="chunk", block_tokens=4, reach_tokens=16)
    assert matched([FULL, chunk], ["xxxxxx", "....xx"]) == 24
    assert matched([FULL, chunk], ["xxxxxx", ".....x"]) == 16  # where a chunk begins, nothing is looked at


def test_a_prompt_is_matched_whole() -> None:
    assert matched([FULL], ["xxxxxx"], prompt=24) == 24
    assert matched([FULL], ["xxxxx."], prompt=24) == 20


@pytest.mark.parametrize(("reach_tokens", "expected"), [(8, 24), (9, 20), (10, 24), (12, 24), (13, 20)])
def test_a_prompt_is_not_matched_whole_where_its_last_token_looks_at_a_block_that_has_no_room(
    reach_tokens: int, expected: int
) -> None:
    window = GroupShape(kind="window", block_tokens=4, reach_tokens=reach_tokens)
    assert matched([FULL, window], ["xxxxxx", "xxxxxx"], prompt=24) == expected


def test_a_prompt_that_fills_its_last_chunk_is_not_matched_whole() -> None:
    chunk = GroupShape(kind="chunk", block_tokens=4, reach_tokens=8)
    assert matched([FULL, chunk], ["xxxxxx", "xxxxxx"], prompt=24) == 20
    assert matched([FULL, chunk], ["xxxxxxx", "xxxxxxx"], prompt=28) == 28


def test_what_the_engine_has_counts_for_every_group() -> None:
    assert matched([FULL, WINDOW], ["..xxxx", "..xxxx"], local=8) == 24
    assert matched([FULL, WINDOW], ["......", "......"], local=8) == 8


def test_a_match_is_a_multiple_of_the_alignment() -> None:
    assert matched([FULL], ["xxxxx"], align=8) == 16
    assert matched([FULL], ["xxxxxx"], prompt=23, align=8) == 16


def test_speculative_layers_compute_the_last_block_again() -> None:
    drafted = GroupShape(kind="full", block_tokens=4, is_last_block_dropped=True)
    assert matched([drafted], ["xxxxxx"]) == 20
    assert matched([drafted], ["x....."]) == 0
    assert matched([drafted], ["xx...."], local=4) == 4


def test_a_shorter_prefix_is_loaded_only_where_the_window_before_the_dropped_block_is_there_too() -> None:
    drafted = GroupShape(kind="full", block_tokens=4, is_last_block_dropped=True)
    assert matched([drafted, WINDOW], ["xxxxxx", "....xx"]) == 0
    assert matched([drafted, WINDOW], ["xxxxxx", "...xxx"]) == 20
