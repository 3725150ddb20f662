"""Batches of prompts that the store has different parts of: each says what it says alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore_client.integrations.transformers import BatchPrefill, PrefixCache
from kvstore_client.integrations.transformers.identity import cache_argument, forward_arguments
from kvstore_client.results import PutState
from tests.transformers.test_prefix_cache import BLOCK, TOKENS, compute


def decode_batch(model: Any, batch: BatchPrefill) -> list[list[int]]:
    """Greedy, as `generate` does it: one more column of the mask per token, and each row at its own position."""
    mask, tokens = batch.attention_mask, [batch.logits.argmax(-1)]
    takes_positions = "position_ids" in forward_arguments(model)
    with torch.no_grad():
        while len(tokens) < TOKENS:
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            positions = {"position_ids": mask.sum(dim=1, keepdim=True) - 1} if takes_positions else {}
            step = model(
                input_ids=tokens[-1][:, None],
                attention_mask=mask,
                use_cache=True,
                **positions,
                **{cache_argument(model): batch.cache},
            )
            tokens.append(step.logits[:, -1].argmax(-1))
    return torch.stack(tokens, dim=1).tolist()


def without_store(model: Any, prompts: Sequence[torch.Tensor]) -> list[list[int]]:
    return [compute(model, ids)[1] for ids in prompts]


def assert_row_is(cache: DynamicCache, row: int, kept: DynamicCache, *, pad_count: int, token_count: int) -> None:
    for ours, theirs in zip(cache.layers, kept.layers, strict=True):
        columns = slice(pad_count, pad_count + token_count)
        assert torch.equal(ours.keys[row, :, columns], theirs.keys[0, :, :token_count])
        assert torch.equal(ours.values[row, :, columns], theirs.values[0, :, :token_count])


def test_off_cold_and_warm_say_the_same_for_rows_that_match_different_lengths(
    model: Any, store: Any, prompt: Callable[..., Any]
) -> None:
    document = prompt(7 * BLOCK)
    prompts = [
        torch.cat([document[: 5 * BLOCK], prompt(9, seed=2)]),  # five blocks are stored
        torch.cat([document[: 2 * BLOCK], prompt(3, seed=3)]),  # two
        prompt(4 * BLOCK + 5, seed=4),  # none
        document[: BLOCK - 2],  # none, as it has none
        document[: 6 * BLOCK + 1],  # all of it but one token
    ]
    expected = without_store(model, prompts)
    with PrefixCache(model, store) as prefixes:
        cold = prefixes.prefill_batch(prompts)
        assert [reused.token_count for reused in cold.reused] == [0] * 5
        assert decode_batch(model, cold) == expected

        store.blocks.clear()
        kept, _ = compute(model, document[: 6 * BLOCK])
        assert prefixes.offload(document[: 6 * BLOCK], kept).stored_count == 6
        warm = prefixes.prefill_batch(prompts)
        matched = [5 * BLOCK, 2 * BLOCK, 0, 0, 6 * BLOCK]
        assert [reused.token_count for reused in warm.reused] == matched
        for row, (ids, count) in enumerate(zip(prompts, matched, strict=True)):
            pad_count = warm.input_ids.shape[1] - len(ids)
            assert_row_is(warm.cache, row, kept, pad_count=pad_count, token_count=count)
        assert decode_batch(model, warm) == expected
        prefixes.wait()

        assert [reused.token_count for reused in prefixes.prefill_batch(prompts).reused] == [
            (len(ids) - 1) // BLOCK * BLOCK for ids in prompts
        ]


def test_blocks_computed_in_a_batch_are_those_that_a_single_prompt_finds(
    make_model: Callable[..., Any], store: Any, prompt: Callable[..., Any]
) -> None:
    """On a model with windows, where padding inside a row would shift what they see."""
    model = make_model("gemma3")
    prompts = [prompt(count, seed=count) for count in (20, 75, 50, 49)]
    with PrefixCache(model, store) as prefixes:
        batch = prefixes.prefill_batch(prompts)
        assert [future.result().stored_count for future in batch.offloaded] == [1, 4, 3, 3]
        for ids in prompts:
            kept, _ = compute(model, ids)
            restored = prefixes.restore(ids)
            assert restored.token_count == (len(ids) - 1) // BLOCK * BLOCK
            for ours, theirs in zip(restored.cache.layers, kept.layers, strict=True):
                torch.testing.assert_close(ours.keys, theirs.keys[:, :, : restored.token_count], rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(
                    ours.values, theirs.values[:, :, : restored.token_count], rtol=1e-4, atol=1e-4
                )


def test_a_padded_tensor_is_the_same_as_its_prompts(llama: Any, store: Any, prompt: Callable[..., Any]) -> None:
    prompts = [prompt(20), prompt(35, seed=2)]
    padded = torch.zeros((2, 40), dtype=torch.long)
    for row, ids in zip(padded, prompts, strict=True):
        row[40 - len(ids) :] = ids
    mask = (torch.arange(40) >= torch.tensor([[20], [5]])).long()
    with PrefixCache(llama, store) as prefixes:
        prefixes.prefill_batch(prompts)
        prefixes.wait()
        batch = prefixes.prefill_batch(padded, mask)
        assert [reused.token_count for reused in batch.reused] == [16, 32]
        assert batch.cache.get_seq_length() == 40
        assert decode_batch(llama, batch) == without_store(llama, prompts)


def test_a_model_that_takes_no_positions_computes_each_prompt_alone(store: Any, prompt: Callable[..., Any]) -> None:
    config = transformers.BloomConfig(vocab_size=259, hidden_size=64, n_layer=2, n_head=4)
    torch.manual_seed(0)
    model = transformers.BloomForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)
    prompts = [prompt(20), prompt(35, seed=2), prompt(36, seed=3)]
    expected = without_store(model, prompts)
    with PrefixCache(model, store) as prefixes:
        assert decode_batch(model, prefixes.prefill_batch(prompts)) == expected
        prefixes.wait()
        warm = prefixes.prefill_batch(prompts)
        assert [reused.token_count for reused in warm.reused] == [16, 32, 32]
        assert decode_batch(model, warm) == expected


def test_blocks_that_prompts_share_are_loaded_once_and_stored_once(
    llama: Any, store: Any, prompt: Callable[..., Any]
) -> None:
    system = prompt(3 * BLOCK)
    prompts = [torch.cat([system, prompt(BLOCK + 1, seed=seed)]) for seed in (2, 3)]
    with PrefixCache(llama, store) as prefixes:
        first, second = (future.result() for future in prefixes.prefill_batch([*prompts]).offloaded)
        assert (first.first_block, first.states) == (0, (PutState.STORED,) * 4)
        assert (second.first_block, second.states) == (3, (PutState.STORED,))
        store.loaded_count = 0
        assert [reused.token_count for reused in prefixes.prefill_batch(prompts).reused] == [4 * BLOCK] * 2
        assert store.loaded_count == 5


def test_what_could_not_be_found_is_not_stored_when_what_it_follows_was_dropped(
    llama: Any, store: Any, prompt: Callable[..., Any]
) -> None:
    system = prompt(3 * BLOCK)
    prompts = [torch.cat([system, prompt(BLOCK + 1, seed=seed)]) for seed in (2, 3)]
    with PrefixCache(llama, store) as prefixes:
        store.blocks_until_gone = 2
        first, second = (future.result() for future in prefixes.prefill_batch(prompts).offloaded)
    assert first.states == (PutState.STORED,) * 2 + (PutState.DROPPED,) * 2
    assert second.states == (PutState.DROPPED,)
    assert len(store.blocks) == 2


def test_a_store_that_is_gone_is_asked_once_and_costs_nothing_but_reuse(
    llama: Any, store: Any, prompt: Callable[..., Any]
) -> None:
    prompts = [prompt(40), prompt(70, seed=2), prompt(5, seed=3)]
    with PrefixCache(llama, store) as prefixes:
        store.is_gone = True
        batch = prefixes.prefill_batch(prompts)
        assert store.lookup_count == 1
        assert all(isinstance(reused.error, UnavailableError) for reused in batch.reused)
        assert decode_batch(llama, batch) == without_store(llama, prompts)


def test_a_store_that_goes_while_loading_leaves_each_row_the_blocks_it_had_sent(
    llama: Any, store: Any, prompt: Callable[..., Any]
) -> None:
    prompts = [prompt(3 * BLOCK + 1), prompt(4 * BLOCK + 1, seed=2)]
    with PrefixCache(llama, store) as prefixes:
        prefixes.prefill_batch(prompts)
        prefixes.wait()
        store.blocks_until_gone = 4
        batch = prefixes.prefill_batch(prompts)
        assert [reused.token_count for reused in batch.reused] == [3 * BLOCK, BLOCK]
        assert decode_batch(llama, batch) == without_store(llama, prompts)


def test_under_autocast_a_batch_is_computed_without_the_store(
    llama: Any, store: Any, prompt: Callable[..., Any]
) -> None:
    prompts = [prompt(40), prompt(21, seed=2)]
    with PrefixCache(llama, store) as prefixes:
        prefixes.prefill_batch(prompts)
        prefixes.wait()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            batch = prefixes.prefill_batch(prompts)
    assert [reused.token_count for reused in batch.reused] == [0, 0]
    assert all(isinstance(reused.error, InvalidArgumentError) for reused in batch.reused)
    assert [set(future.result().states) for future in batch.offloaded] == [{PutState.DROPPED}] * 2
