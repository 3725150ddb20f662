"""What a prefix cache needs of a store, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import DynamicCache

from kvstore.errors import KvstoreError
from kvstore.keys import BlockHash
from kvstore.messages import BlockState
from kvstore.namespace import Namespace
from kvstore_client.hints import Hint
from kvstore_client.results import GetResult, LookupResult, PutResult, PutState


class BlockStore(Protocol):
    """What a prefix cache needs of a `kvstore_client.Client`."""

    def lookup(
        self, namespace: Namespace, hashes: Sequence[BlockHash], *, wait_s: float = 0.0, hint: Hint | None = None
    ) -> LookupResult: ...
    def get(
        self, namespace: Namespace, hashes: Sequence[BlockHash], into: Any, *, hint: Hint | None = None
    ) -> GetResult: ...
    def put(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        blocks: Any,
        *,
        parent_hash: BlockHash | None = None,
        hint: Hint | None = None,
    ) -> PutResult: ...
    def hint(self, namespace: Namespace, hashes: Sequence[BlockHash], hint: Hint) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A cache that holds the first `token_count` tokens of a prompt, maybe none; always fewer than the prompt has."""

    cache: DynamicCache
    token_count: int
    states: tuple[BlockState, ...]
    """Per full block that was asked for; only the leading hits are in the cache."""
    error: KvstoreError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reused:
    """What one prompt of a batch took from the store: `token_count` of its tokens were not computed."""

    token_count: int
    states: tuple[BlockState, ...]
    """Per full block that was asked for; the leading hits were loaded."""
    error: KvstoreError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offloaded:
    """What became of the blocks of one offload, from `first_block` on."""

    first_block: int
    states: tuple[PutState, ...]
    error: KvstoreError | None

    @property
    def stored_count(self) -> int:
        return sum(state in (PutState.STORED, PutState.ALREADY_STORED) for state in self.states)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """A computed prompt: go on decoding with `cache`, starting from `logits` of the last token, [1, vocabulary]."""

    logits: torch.Tensor
    cache: DynamicCache
    tokens_reused: int
    restored: Restored
    offloaded: Future[Offloaded]
    """Done once the new full blocks are stored, or dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPrefill:
    """Computed prompts: go on decoding with `cache`, starting from `logits` of the last tokens, [prompts, vocabulary].

    `cache` has the columns of `input_ids` and `attention_mask`: each prompt fills its row to the last column, behind
    padding. Give the next calls the mask with one more column per new token, and, outside of `generate`, position ids.
    """

    logits: torch.Tensor
    cache: DynamicCache
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    reused: tuple[Reused, ...]
    offloaded: tuple[Future[Offloaded], ...]
    """Per prompt: done once its new full blocks are stored, or dropped. Blocks that several share are the first's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What `generate` of the model returned, and what the store had to do with it."""

    sequences: torch.Tensor
    """Prompts and what was generated, [rows, columns]."""
    output: Any
    """As the model returned it: `sequences`, or with `return_dict_in_generate` an object that has them."""
    reused: tuple[Reused, ...]
    """Per prompt."""
    offloaded: tuple[Future[Offloaded], ...]
    """Per prompt: done once its new full blocks are stored, or dropped. Blocks that several share are the first's."""
    offloaded_generated: tuple[Future[Offloaded], ...]
    """Per row of `sequences`, from the first block on that has a generated token; empty unless asked for."""
