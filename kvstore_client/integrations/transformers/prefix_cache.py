"""Prefix reuse for any Hugging Face decoder: restore what the store has, compute the rest, offload what is new."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from copy import copy
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from transformers import DynamicCache, LogitsProcessorList

from kvstore.errors import InvalidArgumentError
from kvstore.keys import BlockHash, hash_blocks
from kvstore.namespace import Namespace
from kvstore_client.hints import Hint
from kvstore_client.integrations.transformers.blocks import CacheRow, StoredRow, check_shape
from kvstore_client.integrations.transformers.forward import Forward, Row
from kvstore_client.integrations.transformers.generate import (
    AfterPrompt,
    GenerateSettings,
    read_settings,
    without_padding_behind,
)
from kvstore_client.integrations.transformers.hints import tell_ends
from kvstore_client.integrations.transformers.identity import (
    autocast_error,
    check_not_training,
    namespace_for,
    probe,
    weights_stamp,
)
from kvstore_client.integrations.transformers.load import Loaded, load_prefixes, nothing_loaded
from kvstore_client.integrations.transformers.offload import Offloader, dropped
from kvstore_client.integrations.transformers.prompts import (
    PromptIds,
    Prompts,
    TokenIds,
    cost_tokens,
    one_prompt,
    read_prompts,
)
from kvstore_client.integrations.transformers.results import (
    BatchPrefill,
    BlockStore,
    Generation,
    Offloaded,
    Prefill,
    Restored,
    Reused,
)
from kvstore_client.integrations.transformers.said import ReuseLog


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
        self._model = model
        self._client = client
        self._namespace = namespace or namespace_for(model)
        self._namespace.check_exact()
        self._layout = self._namespace.block_layout
        self._shape = probe(model)
        check_shape(self._shape, self._layout)
        self._stamp = weights_stamp(model)
        self._wait_s = wait_s
        self._hint: Hint | None = None
        self._forward = Forward(model, self._layout, self._shape)
        self._log = ReuseLog(tokens_per_block=self._layout.tokens_per_block)
        self._offloader = Offloader(
            client, self._namespace, self._log, blocks_per_put=blocks_per_put, pending_bytes_max=pending_bytes_max
        )

    @property
    def namespace(self) -> Namespace:
        return self._namespace

    def hinted(self, hint: Hint) -> Self:
        """The same cache, which tells the store this with all that it looks up, loads and stores: for one request."""
        other = copy(self)
        vars(other)["_hint"] = hint
        return other

    @property
    def cache_argument(self) -> str:
        """What this version of transformers calls the cache in `forward` and `generate`."""
        return self._forward.cache_argument

    def restore(self, input_ids: TokenIds) -> Restored:
        """Loads the longest stored prefix of a prompt, leaving at least its last token to compute."""
        ids = one_prompt(input_ids)
        self._check_unchanged()
        loaded = self._load([ids])
        (stored,) = self._stored(loaded)
        cache = self._forward.restore([stored], loaded.buffer, column_count=stored.token_count)
        return _restored(loaded, cache, token_count=stored.token_count)

    def offload(self, input_ids: TokenIds, cache: DynamicCache, *, first_block: int = 0) -> Offloaded:
        """Stores the full blocks of a prompt from `first_block` on, and returns when that is done."""
        return self.offload_later(input_ids, cache, first_block=first_block).result()

    def offload_later(self, input_ids: TokenIds, cache: DynamicCache, *, first_block: int = 0) -> Future[Offloaded]:
        """Copies the full blocks of a prompt from `first_block` on and stores the copies in the background.

        `cache` must hold the K and V of all those tokens, in order and since the first one, computed by this model
        as it is now and not under autocast.
        """
        ids = one_prompt(input_ids)
        self._check_unchanged()
        unfit = autocast_error(self._shape.devices)
        if unfit is not None:
            raise unfit
        hashes = self._hash(ids)
        if not 0 <= first_block <= len(hashes):
            raise InvalidArgumentError.of("first_block", first_block, f"0 to the prompt's {len(hashes)} full blocks")
        return self._offloader.offload(hashes, cache, first_block=first_block, hint=self._hint)

    def prefill(self, input_ids: TokenIds) -> Prefill:
        """Restores what is stored of a prompt, computes the rest, and offloads new full blocks in the background.

        Once it has begun to compute, only the model itself can raise: blocks that must not be stored are DROPPED.
        """
        ids = one_prompt(input_ids)
        if len(ids) == 0:
            raise InvalidArgumentError.of("input_ids", "no tokens", "at least one token")
        batch, loaded = self._prefill(read_prompts(ids, None, pad_token_id=None))
        restored = _restored(loaded, batch.cache, token_count=batch.reused[0].token_count)
        return Prefill(
            logits=batch.logits,
            cache=batch.cache,
            tokens_reused=restored.token_count,
            restored=restored,
            offloaded=batch.offloaded[0],
        )

    def prefill_batch(self, input_ids: PromptIds, attention_mask: torch.Tensor | None = None) -> BatchPrefill:
        """As `prefill`, for several prompts of any lengths; each reuses all that is stored of it.

        Lists of ids need no mask. In a tensor prompts are padded on the left, as `attention_mask` says.
        """
        return self._prefill(self._read(input_ids, attention_mask))[0]

    def generate(
        self,
        input_ids: PromptIds,
        attention_mask: torch.Tensor | None = None,
        *,
        offload_generated: bool = False,
        **arguments: Any,
    ) -> Generation:
        """`model.generate` with the same arguments, which computes only what is not stored of the prompts.

        The prompts' new full blocks are offloaded as soon as they are computed; `offload_generated` also stores those
        of what was generated, when all is. Raises `InvalidArgumentError` for inputs other than token ids, and for
        caches and recipes of the caller's own.
        """
        prompts = self._read(input_ids, attention_mask)
        settings = read_settings(self._model, arguments, offload_generated=offload_generated)
        self._check_unchanged()
        loaded = self._load(prompts.rows)
        cache, reused_counts = self._begin(prompts, loaded, settings)
        if settings.rows_per_prompt > 1:
            cache.batch_repeat_interleave(settings.rows_per_prompt)
        row_count = len(prompts.rows) * settings.rows_per_prompt
        offloads = _Offloads()

        def offload_prompts() -> None:
            self._offload_prompts(prompts, loaded, cache, into=offloads, row_count=row_count)

        processors = [*(arguments.pop("logits_processor", None) or ()), AfterPrompt(offload_prompts)]
        output = self._model.generate(
            input_ids=prompts.input_ids.to(self._model.device),
            attention_mask=prompts.attention_mask.to(self._model.device),
            logits_processor=LogitsProcessorList(processors),
            **{self._forward.cache_argument: cache},
            **(arguments | settings.overrides),
        )
        sequences: torch.Tensor = output if isinstance(output, torch.Tensor) else output.sequences
        generated: list[Future[Offloaded]] = []
        if offload_generated:
            generated = self._offload_generated(prompts, sequences, cache, behind=offloads, settings=settings)
        if settings.rows_per_prompt == 1:
            tell = partial(self._client.hint, self._namespace)
            tell_ends(prompts, sequences, settings, hint=self._hint, hash_blocks=self._hash, tell=tell)
        return Generation(
            sequences=sequences,
            output=output,
            reused=_reused(loaded, reused_counts),
            offloaded=tuple(offloads.futures),
            offloaded_generated=tuple(generated),
        )

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for all offloads begun so far; False when `timeout_s` passed first."""
        return self._offloader.wait(timeout_s)

    def close(self) -> None:
        """Finishes the offloads that are waiting; later ones are DROPPED. The client stays open."""
        self._offloader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _hash(self, ids: torch.Tensor) -> list[BlockHash]:
        array: Any = ids.cpu().numpy()
        return hash_blocks(array, tokens_per_block=self._layout.tokens_per_block)

    def _read(self, input_ids: PromptIds, attention_mask: torch.Tensor | None) -> Prompts:
        pad_token_id = getattr(self._model.generation_config, "pad_token_id", None)
        return read_prompts(input_ids, attention_mask, pad_token_id=pad_token_id)

    def _load(self, prompts: Sequence[torch.Tensor]) -> Loaded:
        """What is stored of each prompt, its last token left out."""
        chains = [self._hash(ids[: max(len(ids) - 1, 0)]) for ids in prompts]
        for ids, chain in zip(prompts, chains, strict=True):
            if not chain:
                self._log.too_short(len(ids))
        unfit = autocast_error(self._shape.devices)
        if unfit is None:
            loaded = load_prefixes(self._client, self._namespace, chains, wait_s=self._wait_s, hint=self._hint)
        else:
            loaded = nothing_loaded(chains, payload_bytes=self._layout.payload_bytes, error=unfit)
        if any(chains):
            self._log.answered(loaded.error)
        return loaded

    def _stored(self, loaded: Loaded) -> list[StoredRow]:
        tokens = self._layout.tokens_per_block
        return [StoredRow(blocks=row.blocks, token_count=len(row.blocks) * tokens) for row in loaded.rows]

    def _prefill(self, prompts: Prompts) -> tuple[BatchPrefill, Loaded]:
        self._check_unchanged()
        loaded = self._load(prompts.rows)
        stored = self._stored(loaded)
        rows = [Row(ids=ids, stored=found) for ids, found in zip(prompts.rows, stored, strict=True)]
        computed = self._forward.compute(rows, loaded.buffer, column_count=prompts.column_count)
        assert computed.logits is not None, "every prompt has a last token to compute"
        offloads = _Offloads()
        self._offload_prompts(prompts, loaded, computed.cache, into=offloads, row_count=len(rows))
        batch = BatchPrefill(
            logits=computed.logits,
            cache=computed.cache,
            input_ids=prompts.input_ids,
            attention_mask=prompts.attention_mask,
            reused=_reused(loaded, [found.token_count for found in stored]),
            offloaded=tuple(offloads.futures),
        )
        return batch, loaded

    def _begin(self, prompts: Prompts, loaded: Loaded, settings: GenerateSettings) -> tuple[DynamicCache, list[int]]:
        """A cache for `generate` to go on from, which leaves it a column at least, and how many tokens of each row are
        restored in it.

        Either the columns that all rows have restored, and `generate` computes the others of all. Or, where rows
        differ so much that it is cheaper, all but the last column, computed here. So it is with chunks: not every
        version of transformers cuts them right behind what a cache holds.
        """
        stored = self._stored(loaded)
        is_chunked = settings.chunk_columns is not None and max(map(len, prompts.rows)) > 1
        if not is_chunked and not any(found.token_count for found in stored):
            return DynamicCache(), [0] * len(stored)
        rows = [Row(ids=ids[:-1], stored=found) for ids, found in zip(prompts.rows, stored, strict=True)]
        pad_counts, last = prompts.pad_counts, prompts.column_count - 1
        shared = min(pad + found.token_count for pad, found in zip(pad_counts, stored, strict=True))
        left_cost = len(rows) * settings.rows_per_prompt * (last - shared)
        groups = self._forward.groups(rows)
        if not is_chunked and left_cost <= cost_tokens(groups, [row.new_count for row in rows]):
            stored = [
                StoredRow(blocks=found.blocks, token_count=max(0, shared - pad))
                for pad, found in zip(pad_counts, stored, strict=True)
            ]
            cache = self._forward.restore(stored, loaded.buffer, column_count=shared)
        else:
            chunk = settings.chunk_columns
            cache = self._forward.compute(rows, loaded.buffer, column_count=last, chunk_columns=chunk).cache
        return cache, [found.token_count for found in stored]

    def _offload_prompts(
        self, prompts: Prompts, loaded: Loaded, cache: DynamicCache, *, into: _Offloads, row_count: int
    ) -> None:
        """Each prompt's new full blocks, from its first row in the cache; what prompts share goes with the first."""
        rows_per_prompt = row_count // len(prompts.rows)
        for index, (ids, found) in enumerate(zip(prompts.rows, loaded.rows, strict=True)):
            hashes = self._hash(ids)
            first_block = len(found.blocks)
            while first_block < len(hashes) and hashes[first_block] in into.by_block:
                first_block += 1
            row = CacheRow(
                index=index * rows_per_prompt, row_count=row_count, first_column=prompts.column_count - len(ids)
            )
            future = self._offload_computed(hashes, cache, first_block=first_block, row=row, behind=into)
            into.add(hashes, future, first_block=first_block)

    def _offload_generated(
        self,
        prompts: Prompts,
        sequences: torch.Tensor,
        cache: DynamicCache,
        *,
        behind: _Offloads,
        settings: GenerateSettings,
    ) -> list[Future[Offloaded]]:
        futures = []
        for index, sequence in enumerate(sequences):
            ids = prompts.rows[index // settings.rows_per_prompt]
            first_column = prompts.column_count - len(ids)
            said = without_padding_behind(sequence[prompts.column_count :], settings.eos_token_ids)
            # The last token was not fed to the model any more.
            held_count = cache.get_seq_length() - first_column
            hashes = self._hash(torch.cat([ids.cpu(), said.cpu()])[:held_count])
            futures.append(
                self._offload_computed(
                    hashes,
                    cache,
                    first_block=len(ids) // self._layout.tokens_per_block,
                    row=CacheRow(index=index, row_count=len(sequences), first_column=first_column),
                    behind=behind,
                )
            )
        return futures

    def _offload_computed(
        self, hashes: list[BlockHash], cache: DynamicCache, *, first_block: int, row: CacheRow, behind: _Offloads
    ) -> Future[Offloaded]:
        """For a caller who has what it asked for already: K and V that must not be stored are no error of its own."""
        error = autocast_error(self._shape.devices)
        try:
            if error is None:
                before = behind.by_block.get(hashes[first_block - 1]) if first_block else None
                return self._offloader.offload(
                    hashes, cache, first_block=first_block, row=row, behind=before, hint=self._hint
                )
        except InvalidArgumentError as failure:
            error = failure
        self._log.not_stored(error)
        return dropped(first_block=first_block, count=len(hashes) - first_block, error=error)

    def _check_unchanged(self) -> None:
        check_not_training(self._model)
        if weights_stamp(self._model) != self._stamp:
            raise InvalidArgumentError.of(
                "model",
                "changed since this PrefixCache was made",
                "the same weights and adapters; make a new PrefixCache",
            )


class _Offloads:
    """The offloads of one call, and which of them each block goes with."""

    def __init__(self) -> None:
        self.futures: list[Future[Offloaded]] = []
        self.by_block: dict[BlockHash, Future[Offloaded]] = {}

    def add(self, hashes: Sequence[BlockHash], future: Future[Offloaded], *, first_block: int) -> None:
        self.futures.append(future)
        self.by_block |= dict.fromkeys(hashes[first_block:], future)


def _restored(loaded: Loaded, cache: DynamicCache, *, token_count: int) -> Restored:
    (row,) = loaded.rows
    return Restored(cache=cache, token_count=token_count, states=row.states, error=row.error)


def _reused(loaded: Loaded, token_counts: Sequence[int]) -> tuple[Reused, ...]:
    return tuple(
        Reused(token_count=token_count, states=row.states, error=row.error)
        for row, token_count in zip(loaded.rows, token_counts, strict=True)
    )
