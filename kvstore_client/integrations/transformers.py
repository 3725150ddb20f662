"""Prefix reuse for any Hugging Face decoder: restore what the store has, compute the rest, offload what is new.

    cache = PrefixCache(model, Client())
    prefill = cache.prefill(input_ids)          # prefill.logits, prefill.cache, prefill.tokens_reused

Works with transformers 5 and models whose layers are full or sliding-window attention with the standard cache.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from transformers import DynamicCache

from kvstore.errors import InvalidArgumentError, KvstoreError, UnavailableError
from kvstore.keys import BlockHash, hash_blocks
from kvstore.messages import BlockState
from kvstore.namespace import Namespace
from kvstore_client.integrations.transformers_blocks import check_shape, gather_blocks, scatter_blocks
from kvstore_client.integrations.transformers_identity import (
    autocast_error,
    cache_argument,
    check_not_training,
    forward_arguments,
    namespace_for,
    probe,
    weights_stamp,
)
from kvstore_client.results import GetResult, LookupResult, PutResult, PutState

__all__ = ["BlockStore", "Offloaded", "Prefill", "PrefixCache", "Restored", "namespace_for"]

_LOG = logging.getLogger("kvstore.transformers")

TokenIds = torch.Tensor | Sequence[int]
"""One prompt: a list of ids, or a tensor [tokens] or [1, tokens]."""


class BlockStore(Protocol):
    """What a prefix cache needs of a `kvstore_client.Client`."""

    def lookup(self, namespace: Namespace, hashes: Sequence[BlockHash], *, wait_s: float = 0.0) -> LookupResult: ...
    def get(self, namespace: Namespace, hashes: Sequence[BlockHash], into: Any) -> GetResult: ...
    def put(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        blocks: Any,
        *,
        parent_hash: BlockHash | None = None,
    ) -> PutResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A cache that holds the first `token_count` tokens of a prompt, maybe none; always fewer than the prompt has."""

    cache: DynamicCache
    token_count: int
    states: tuple[BlockState, ...]
    """Per full block that was asked for; only the leading hits are in the cache."""
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


class PrefixCache:
    """Ties one model to a store; safe to use from several threads.

    A store that is slow, gone or full costs reuse, never correctness: everything that goes wrong there is a miss,
    and the model computes. Offloads run on one background thread from private copies, so a cache may be changed,
    even in place, as soon as a call has returned; beyond `pending_bytes_max` of waiting copies, offloads are dropped.
    `namespace` defaults to `namespace_for(model)`, which hashes all weights. Changing the model afterwards (weights,
    adapters) is an `InvalidArgumentError` in the next call: make a new `PrefixCache`. Changes that leave no trace
    are on the caller: writes through `.data` or a pointer, and any change in place to weights that were made under
    `torch.inference_mode()`. A model in training mode is refused in every call; under `torch.autocast` prompts are
    computed without the store.
    """

    def __init__(
        self,
        model: Any,
        client: BlockStore,
        *,
        namespace: Namespace | None = None,
        wait_s: float = 0.0,
        blocks_per_put: int = 16,
        pending_bytes_max: int = 1 << 30,
    ) -> None:
        if blocks_per_put < 1:
            raise InvalidArgumentError.of("blocks_per_put", blocks_per_put, "at least 1")
        self._model = model
        self._client = client
        self._namespace = namespace or namespace_for(model)
        self._layout = self._namespace.block_layout
        self._shape = probe(model)
        check_shape(self._shape, self._layout)
        self._stamp = weights_stamp(model)
        self._wait_s = wait_s
        self._blocks_per_put = blocks_per_put
        self._pending_bytes_max = pending_bytes_max
        self._pending_bytes = 0
        self._pending: set[Future[Offloaded]] = set()
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvstore-offload")
        self._last_error: type[KvstoreError] | type[None] = type(None)
        self._has_said_too_short = False
        self._has_said_unfit = False
        self._cache_argument = cache_argument(model)
        self._limits_logits = "logits_to_keep" in forward_arguments(model)

    @property
    def namespace(self) -> Namespace:
        return self._namespace

    @property
    def cache_argument(self) -> str:
        """What this version of transformers calls the cache in `forward` and `generate`."""
        return self._cache_argument

    def restore(self, input_ids: TokenIds) -> Restored:
        """Loads the longest stored prefix of a prompt, leaving at least its last token to compute."""
        ids = _one_prompt(input_ids)
        self._check_unchanged()
        usable_count = max(len(ids) - 1, 0) // self._layout.tokens_per_block
        return self._restore(self._hash(ids)[:usable_count], token_count=len(ids))

    def offload(self, input_ids: TokenIds, cache: DynamicCache, *, first_block: int = 0) -> Offloaded:
        """Stores the full blocks of a prompt from `first_block` on, and returns when that is done."""
        return self.offload_later(input_ids, cache, first_block=first_block).result()

    def offload_later(self, input_ids: TokenIds, cache: DynamicCache, *, first_block: int = 0) -> Future[Offloaded]:
        """Copies the full blocks of a prompt from `first_block` on and stores the copies in the background.

        `cache` must hold the K and V of all those tokens, in order and since the first one, computed by this model
        as it is now and not under autocast.
        """
        ids = _one_prompt(input_ids)
        self._check_unchanged()
        unfit = autocast_error(self._shape.devices)
        if unfit is not None:
            raise unfit
        hashes = self._hash(ids)
        if not 0 <= first_block <= len(hashes):
            raise InvalidArgumentError.of("first_block", first_block, f"0 to the prompt's {len(hashes)} full blocks")
        return self._offload_later(hashes, cache, first_block=first_block)

    def prefill(self, input_ids: TokenIds) -> Prefill:
        """Restores what is stored of a prompt, computes the rest, and offloads new full blocks in the background.

        Once it has begun to compute, only the model itself can raise: blocks that must not be stored are DROPPED.
        """
        ids = _one_prompt(input_ids)
        if len(ids) == 0:
            raise InvalidArgumentError.of("input_ids", "no tokens", "at least one token")
        self._check_unchanged()
        hashes = self._hash(ids)
        usable_count = (len(ids) - 1) // self._layout.tokens_per_block
        restored = self._restore(hashes[:usable_count], token_count=len(ids))
        logits = self._compute(ids[restored.token_count :], restored.cache)
        first_block = restored.token_count // self._layout.tokens_per_block
        return Prefill(
            logits=logits,
            cache=restored.cache,
            tokens_reused=restored.token_count,
            restored=restored,
            offloaded=self._offload_computed(hashes, restored.cache, first_block=first_block),
        )

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for all offloads begun so far; False when `timeout_s` passed first."""
        with self._lock:
            pending = set(self._pending)
        return not wait(pending, timeout=timeout_s).not_done

    def close(self) -> None:
        """Finishes the offloads that are waiting; later ones are DROPPED. The client stays open."""
        self._worker.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _hash(self, ids: torch.Tensor) -> list[BlockHash]:
        array: Any = ids.cpu().numpy()
        return hash_blocks(array, tokens_per_block=self._layout.tokens_per_block)

    def _say_too_short(self, token_count: int) -> None:
        """Says once why such prompts never hit: 0 % without a reason is what users search longest for."""
        if not self._has_said_too_short:
            self._has_said_too_short = True
            _LOG.warning(
                "a prompt of %d tokens has no full block of %d before its last token, so it can never hit",
                token_count,
                self._layout.tokens_per_block,
            )

    def _restore(self, hashes: list[BlockHash], *, token_count: int) -> Restored:
        states: tuple[BlockState, ...] = (BlockState.MISS,) * len(hashes)
        buffer = torch.empty((0, self._layout.payload_bytes), dtype=torch.uint8)
        error: KvstoreError | None = None
        try:
            unfit = autocast_error(self._shape.devices)
            if unfit is not None:
                raise unfit
            if hashes:
                found = self._client.lookup(self._namespace, hashes, wait_s=self._wait_s)
                states, error = found.states, found.error
                if found.matched_count:
                    buffer = torch.empty((found.matched_count, self._layout.payload_bytes), dtype=torch.uint8)
                    loaded = self._client.get(self._namespace, hashes[: found.matched_count], buffer)
                    states = loaded.states + states[found.matched_count :]
                    error = loaded.error or error
                    buffer = buffer[: loaded.matched_count]
        except KvstoreError as failure:
            buffer, error = buffer[:0], failure
        if hashes:
            self._log_change(error)
        else:
            self._say_too_short(token_count)
        return Restored(
            cache=scatter_blocks(buffer, self._layout, self._shape),
            token_count=buffer.shape[0] * self._layout.tokens_per_block,
            states=states,
            error=error,
        )

    def _compute(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        limit = {"logits_to_keep": 1} if self._limits_logits else {}
        inputs = ids.unsqueeze(0).to(self._model.device)
        with torch.no_grad():
            output = self._model(input_ids=inputs, use_cache=True, **{self._cache_argument: cache}, **limit)
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _offload_computed(self, hashes: list[BlockHash], cache: DynamicCache, *, first_block: int) -> Future[Offloaded]:
        """For a caller who has what it asked for already: K and V that must not be stored are no error of its own."""
        error = autocast_error(self._shape.devices)
        try:
            if error is None:
                return self._offload_later(hashes, cache, first_block=first_block)
        except InvalidArgumentError as failure:
            error = failure
        if not self._has_said_unfit:
            self._has_said_unfit = True
            _LOG.warning("computed blocks are not stored: %s", error)
        return _dropped(first_block=first_block, count=len(hashes) - first_block, error=error)

    def _offload_later(self, hashes: list[BlockHash], cache: DynamicCache, *, first_block: int) -> Future[Offloaded]:
        count = len(hashes) - first_block
        size_bytes = count * self._layout.payload_bytes
        with self._lock:
            fits = self._pending_bytes + size_bytes <= self._pending_bytes_max
            if count and fits:
                self._pending_bytes += size_bytes
        if not count or not fits:
            return _dropped(first_block=first_block, count=count, error=None)
        future: Future[Offloaded] | None = None
        try:
            blocks = gather_blocks(cache, self._layout, first_block=first_block, block_count=count)
            try:
                future = self._worker.submit(self._put, hashes, blocks, first_block)
            except RuntimeError as error:  # closed, or the interpreter is on its way out
                return _dropped(
                    first_block=first_block, count=count, error=UnavailableError(f"offloads have ended: {error}")
                )
            with self._lock:
                self._pending.add(future)
        finally:
            if future is None:
                self._forget(size_bytes)
        future.add_done_callback(lambda done: self._forget(size_bytes, done))
        return future

    def _forget(self, size_bytes: int, future: Future[Offloaded] | None = None) -> None:
        with self._lock:
            self._pending_bytes -= size_bytes
            if future is not None:
                self._pending.discard(future)

    def _put(self, hashes: list[BlockHash], blocks: torch.Tensor, first_block: int) -> Offloaded:
        states: list[PutState] = []
        error: KvstoreError | None = None
        # In small puts: the first blocks are readable while later ones travel, and a kill loses only the rest.
        for start in range(0, blocks.shape[0], self._blocks_per_put):
            part = blocks[start : start + self._blocks_per_put]
            position = first_block + start
            try:
                result = self._client.put(
                    self._namespace,
                    hashes[position : position + part.shape[0]],
                    part,
                    parent_hash=hashes[position - 1] if position else None,
                )
            except KvstoreError as failure:
                error = failure
                break
            states += result.states
            if result.error is not None or PutState.DROPPED in result.states:
                # What comes after a block without a place could not be found either.
                error = result.error
                break
        states += [PutState.DROPPED] * (blocks.shape[0] - len(states))
        self._log_change(error)
        return Offloaded(first_block=first_block, states=tuple(states), error=error)

    def _log_change(self, error: KvstoreError | None) -> None:
        """Names the reason for lost reuse in the log when it begins, and says when it is over."""
        before, self._last_error = self._last_error, type(error)
        if error is not None and before is not type(error):
            _LOG.warning("prompts are computed without the store: %s: %s", error.reason, error)
        elif error is None and before is not type(None):
            _LOG.warning("the store answers again")

    def _check_unchanged(self) -> None:
        check_not_training(self._model)
        if weights_stamp(self._model) != self._stamp:
            raise InvalidArgumentError.of(
                "model",
                "changed since this PrefixCache was made",
                "the same weights and adapters; make a new PrefixCache",
            )


def _dropped(*, first_block: int, count: int, error: KvstoreError | None) -> Future[Offloaded]:
    done: Future[Offloaded] = Future()
    done.set_result(Offloaded(first_block=first_block, states=(PutState.DROPPED,) * count, error=error))
    return done


def _one_prompt(input_ids: TokenIds) -> torch.Tensor:
    ids = input_ids if isinstance(input_ids, torch.Tensor) else torch.tensor(list(input_ids), dtype=torch.long)
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1:
        raise InvalidArgumentError.of("input_ids", f"shape {tuple(ids.shape)}", "one prompt: [tokens] or [1, tokens]")
    return ids
