"""What is loaded and saved for each request: decided from what the engine tells of it, without engine or store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.keys import BlockHash, hash_blocks

NO_PAGE = -1
"""A block that has no page, as it is outside its window."""

_NOT_TOLD_BY_TOKENS = (
    # What K and V depend on beside the token ids, and is known to us by nothing that names its content.
    "lora_task_id",
    "multimodal_hashes",
    "multimodal_embedding",
    "prompt_embedding_table",
    "mrope_rotary_cos_sin",
    "position_ids",
    "encoder_tokens",
)


@dataclass(frozen=True, kw_only=True)
class Save:
    """Blocks of one request that this step completes."""

    request_id: int
    block_ids: tuple[int, ...]
    hashes: tuple[BlockHash, ...]
    parent_hash: BlockHash | None


@dataclass(kw_only=True)
class Progress:
    """One request: its tokens and blocks so far, and how many leading blocks were saved, or are known to be stored."""

    tokens_per_block: int
    salt: str | None
    tokens: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    saved_count: int = 0
    is_saving: bool = False
    """True once anything was handed to the workers for saving."""

    def hash_to(self, tokens: Sequence[int]) -> None:
        """Takes the hashes of the full blocks of `tokens`, which begin as those did that were hashed before."""
        done = len(self.hashes)
        extra = {0: [self.salt.encode()]} if self.salt is not None and not done else None
        self.hashes += hash_blocks(
            tokens[done * self.tokens_per_block :],
            tokens_per_block=self.tokens_per_block,
            extra_keys=extra,
            parent_hash=self.hashes[-1] if done else None,
        )

    def advance(self, data: Any) -> None:
        """Takes the tokens and blocks that came since the last step."""
        self.tokens += data.new_tokens
        self.block_ids += data.new_block_ids

    def save(self, data: Any) -> Save | None:
        """The full blocks whose K and V are complete when this step has run.

        Where versions of the engine disagree on whether `computed_position` counts what a connector loads, it is taken
        as if it did: then a block is saved a step late at worst, and never before it was computed.
        """
        complete = min(data.computed_position + data.num_scheduled_tokens, len(self.tokens))
        first, last = self.saved_count, min(complete // self.tokens_per_block, len(self.block_ids))
        if last <= first:
            return None
        self.hash_to(self.tokens[: last * self.tokens_per_block])
        self.saved_count = last
        kept = [at for at in range(first, last) if self.block_ids[at] != NO_PAGE]
        if not kept:
            return None
        self.is_saving = True
        return Save(
            request_id=data.request_id,
            block_ids=tuple(self.block_ids[at] for at in kept),
            hashes=tuple(self.hashes[at] for at in kept),
            parent_hash=self.hashes[kept[0] - 1] if kept[0] else None,
        )


def untold_input(request: Any) -> str | None:
    """What the request's blocks depend on beside its tokens; then it is neither looked up nor saved."""
    return next((name for name in _NOT_TOLD_BY_TOKENS if getattr(request, name, None) is not None), None)


def salt_of(request: Any) -> str | None:
    salts = [getattr(request, name, None) for name in ("cache_salt", "cache_salt_id")]
    return next((str(value) for value in salts if value is not None), None)
