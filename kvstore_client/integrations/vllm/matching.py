"""How much of a prompt can be loaded, where groups of layers need different parts of its prefix. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """What the attention of one group of layers looks back at.

    `full`: all tokens. `window`: the last `reach_tokens`, the token's own included. `chunk`: those since the last
    multiple of `reach_tokens`.
    """

    kind: Literal["full", "window", "chunk"]
    block_tokens: int
    reach_tokens: int = 0
    is_last_block_dropped: bool = False
    """Speculative layers compute the last matched block again, as their K and V depend on later tokens."""

    def first_block(self, token_count: int) -> int:
        """The first block that the token behind `token_count` ones looks at."""
        if self.kind == "window":
            return max(0, token_count - self.reach_tokens + 1) // self.block_tokens
        if self.kind == "chunk":
            return token_count // self.reach_tokens * self.reach_tokens // self.block_tokens
        return 0


def matched_tokens(
    groups: Sequence[GroupShape],
    hits: Sequence[Sequence[bool]],
    *,
    local_tokens: int,
    prompt_tokens: int,
    align_tokens: int,
) -> int:
    """Tokens of the longest prefix for which every group has, or the store holds, all that it looks back at.

    `hits` says per group which of its blocks the store holds; the first `local_tokens` are the engine's already, in
    every group. At least `local_tokens`, at most `prompt_tokens`, in steps of `align_tokens`, which every group's block
    size divides. Of a prompt that is matched whole the engine computes the last token again: it is not matched whole
    where that token looks at a block that the next one no longer looks at, as room is made for the next one only.
    """
    runs = [_hit_runs(group, found, local_tokens=local_tokens) for group, found in zip(groups, hits, strict=True)]

    def longest(tokens: int) -> int:
        while tokens > local_tokens:
            if all(_is_held(group, run, tokens=tokens) for group, run in zip(groups, runs, strict=True)):
                break
            tokens -= align_tokens
        return tokens

    limit_tokens = prompt_tokens
    if any(group.first_block(prompt_tokens - 1) != group.first_block(prompt_tokens) for group in groups):
        limit_tokens -= 1
    tokens = longest(limit_tokens // align_tokens * align_tokens)
    if any(group.is_last_block_dropped for group in groups):
        tokens = longest(tokens - align_tokens)
    return max(tokens, local_tokens)


def _hit_runs(group: GroupShape, hits: Sequence[bool], *, local_tokens: int) -> list[int]:
    """Per block: how many blocks up to and including it are there without a gap."""
    local_count = local_tokens // group.block_tokens
    runs: list[int] = []
    run = 0
    for index, hit in enumerate(hits):
        run = run + 1 if hit or index < local_count else 0
        runs.append(run)
    return runs


def _is_held(group: GroupShape, runs: Sequence[int], *, tokens: int) -> bool:
    end_block = tokens // group.block_tokens
    needed_count = end_block - group.first_block(tokens)
    if needed_count == 0:
        return True
    return end_block <= len(runs) and runs[end_block - 1] >= needed_count
