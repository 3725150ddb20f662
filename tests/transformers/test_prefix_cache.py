"""The ladder on tiny models: no store, cold, warm in the same process; bit for bit the same K, V and tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore.messages import BlockState
from kvstore_client.integrations.transformers import PrefixCache, namespace_for
from kvstore_client.integrations.transformers.identity import cache_argument
from kvstore_client.results import PutState

BLOCK = 16
TOKENS = 8


def decode(model: Any, logits: torch.Tensor, cache: DynamicCache) -> list[int]:
    tokens = [int(logits.argmax())]
    with torch.no_grad():
        while len(tokens) < TOKENS:
            step = model(input_ids=torch.tensor([[tokens[-1]]]), use_cache=True, **{cache_argument(model): cache})
            tokens.append(int(step.logits[0, -1].argmax()))
    return tokens


def compute(model: Any, ids: torch.Tensor, *, first_chunk: int = 0) -> tuple[DynamicCache, list[int]]:
    """What the model says without any store, computing the same chunks; the cache as it was after the prompt."""
    cache = DynamicCache()
    with torch.no_grad():
        for chunk in (ids[:first_chunk], ids[first_chunk:]):
            if len(chunk):
                logits = model(input_ids=chunk[None], use_cache=True, **{cache_argument(model): cache}).logits[:, -1]
    kept = DynamicCache()
    for index, layer in enumerate(cache.layers):
        kept.update(layer.keys.clone(), layer.values.clone(), index)
    return kept, decode(model, logits, cache)


def assert_same_kv(left: DynamicCache, right: DynamicCache, *, token_count: int) -> None:
    for ours, theirs in zip(left.layers, right.layers, strict=True):
        assert torch.equal(ours.keys[:, :, :token_count], theirs.keys[:, :, :token_count])
        assert torch.equal(ours.values[:, :, :token_count], theirs.values[:, :, :token_count])


def test_off_cold_and_warm_say_the_same(model: Any, store: Any, prompt: Callable[..., Any]) -> None:
    document, question = prompt(100), prompt(9, seed=2)
    other = torch.cat([document, question])
    with PrefixCache(model, store) as prefixes:
        kept, without_store = compute(model, document)
        cold = prefixes.prefill(document)
        assert cold.tokens_reused == 0
        assert cold.offloaded.result().states == (PutState.STORED,) * 6
        assert decode(model, cold.logits, cold.cache) == without_store

        warm = prefixes.prefill(other)
        assert warm.tokens_reused == 96
        assert_same_kv(warm.cache, kept, token_count=96)
        _, same_chunks = compute(model, other, first_chunk=96)
        assert decode(model, warm.logits, warm.cache) == same_chunks


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_the_last_token_is_always_computed(llama: Any, store: Any, prompt: Callable[..., Any], offset: int) -> None:
    ids = prompt(3 * BLOCK + offset)
    with PrefixCache(llama, store) as prefixes:
        stored = prefixes.prefill(ids).offloaded.result()
        warm = prefixes.prefill(ids)
    assert len(stored.states) == (2 if offset < 0 else 3)
    assert warm.tokens_reused == (3 if offset > 0 else 2) * BLOCK
    assert warm.restored.token_count < len(ids)
    _, same_chunks = compute(llama, ids, first_chunk=warm.tokens_reused)
    assert decode(llama, warm.logits, warm.cache) == same_chunks


def test_a_prompt_shorter_than_a_block_works_stores_nothing_and_says_so_once(
    llama: Any, store: Any, prompt: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with PrefixCache(llama, store) as prefixes:
        prefill = prefixes.prefill(prompt(5))
        prefixes.prefill(prompt(6))
    assert prefill.offloaded.result().states == ()
    assert store.blocks == {}
    assert [record.getMessage() for record in caplog.records] == [
        "a prompt of 5 tokens has no full block of 16 before its last token, so it can never hit"
    ]


def test_a_hole_ends_the_prefix_and_is_filled_again(llama: Any, store: Any, prompt: Callable[..., Any]) -> None:
    ids = prompt(6 * BLOCK + 1)
    with PrefixCache(llama, store) as prefixes:
        prefixes.prefill(ids).offloaded.result()
        kept = dict(store.blocks)
        hole = list(kept)[3]
        del store.blocks[hole]
        partial = prefixes.prefill(ids)
        assert partial.tokens_reused == 3 * BLOCK
        assert partial.restored.states == (BlockState.HIT,) * 3 + (BlockState.MISS,) + (BlockState.HIT,) * 2
        assert partial.offloaded.result().states == (PutState.STORED,) + (PutState.ALREADY_STORED,) * 2
    _, same_chunks = compute(llama, ids, first_chunk=3 * BLOCK)
    assert decode(llama, partial.logits, partial.cache) == same_chunks


def test_a_store_that_is_gone_costs_nothing_but_reuse(llama: Any, store: Any, prompt: Callable[..., Any]) -> None:
    ids = prompt(70)
    _, without_store = compute(llama, ids)
    with PrefixCache(llama, store) as prefixes:
        store.is_gone = True
        while_gone = prefixes.prefill(ids)
        assert while_gone.tokens_reused == 0
        assert while_gone.restored.error is not None
        assert while_gone.offloaded.result().states == (PutState.DROPPED,) * 4
        assert decode(llama, while_gone.logits, while_gone.cache) == without_store

        store.is_gone = False
        assert prefixes.prefill(ids).offloaded.result().stored_count == 4
        assert prefixes.prefill(ids).tokens_reused == 64


def test_a_store_that_goes_while_loading_leaves_the_blocks_it_had_sent(
    llama: Any, store: Any, prompt: Callable[..., Any]
) -> None:
    ids = prompt(6 * BLOCK + 1)
    with PrefixCache(llama, store) as prefixes:
        prefixes.prefill(ids).offloaded.result()
        store.blocks_until_gone = 2
        partial = prefixes.prefill(ids)
    assert partial.tokens_reused == 2 * BLOCK
    _, same_chunks = compute(llama, ids, first_chunk=2 * BLOCK)
    assert decode(llama, partial.logits, partial.cache) == same_chunks


def test_a_store_that_goes_while_offloading_keeps_a_usable_head(
    llama: Any, store: Any, prompt: Callable[..., Any]
) -> None:
    ids = prompt(6 * BLOCK + 1)
    with PrefixCache(llama, store, blocks_per_put=2) as prefixes:
        store.blocks_until_gone = 3
        offloaded = prefixes.prefill(ids).offloaded.result()
        assert offloaded.states == (PutState.STORED,) * 3 + (PutState.DROPPED,) * 3
        assert offloaded.error is not None
        store.blocks_until_gone, store.is_gone = None, False
        assert prefixes.prefill(ids).tokens_reused == 3 * BLOCK


def test_overwriting_the_cache_right_after_an_offload_cannot_poison_the_store(
    llama: Any, store: Any, prompt: Callable[..., Any]
) -> None:
    overwritten = threading.Event()
    store.before_put = overwritten.wait
    ids = prompt(4 * BLOCK + 1)
    kept, _ = compute(llama, ids)
    with PrefixCache(llama, store) as prefixes:
        cold = prefixes.prefill(ids)
        for layer in cold.cache.layers:
            layer.keys.fill_(7.0)
            layer.values.fill_(7.0)
        overwritten.set()
        assert cold.offloaded.result().stored_count == 4
        assert_same_kv(prefixes.restore(ids).cache, kept, token_count=4 * BLOCK)


def test_offloads_beyond_the_bound_are_dropped_and_never_wait(
    llama: Any, store: Any, prompt: Callable[..., Any]
) -> None:
    may_put = threading.Event()
    store.before_put = may_put.wait
    ids = prompt(4 * BLOCK)
    size = namespace_for(llama).block_layout.payload_bytes
    with PrefixCache(llama, store, pending_bytes_max=6 * size) as prefixes:
        cache, _ = compute(llama, ids)
        first = prefixes.offload_later(ids, cache)
        second = prefixes.offload_later(ids, cache)
        assert second.result(timeout=0).states == (PutState.DROPPED,) * 4
        assert not prefixes.wait(timeout_s=0.0)
        may_put.set()
        assert first.result().stored_count == 4
        assert prefixes.wait(timeout_s=10.0)
        assert prefixes.offload(ids, cache).states == (PutState.ALREADY_STORED,) * 4


def test_generated_tokens_can_be_offloaded_too(llama: Any, store: Any, prompt: Callable[..., Any]) -> None:
    ids = prompt(3 * BLOCK - TOKENS + 1)
    with PrefixCache(llama, store) as prefixes:
        prefill = prefixes.prefill(ids)
        said = torch.tensor(decode(llama, prefill.logits, prefill.cache))
        assert prefixes.offload(torch.cat([ids, said[:-1]]), prefill.cache).stored_count == 3
        assert prefixes.restore(torch.cat([ids, said])).token_count == 3 * BLOCK


def test_a_list_of_ids_and_a_batch_of_one_are_the_same_prompt(
    llama: Any, store: Any, prompt: Callable[..., Any]
) -> None:
    ids = prompt(2 * BLOCK + 1)
    with PrefixCache(llama, store) as prefixes:
        prefixes.prefill(ids[None]).offloaded.result()
        assert prefixes.restore(ids.tolist()).token_count == 2 * BLOCK


@pytest.mark.parametrize("shape", [(2, 20), (1, 1, 20)])
def test_more_than_one_prompt_is_refused_by_name(llama: Any, store: Any, shape: tuple[int, ...]) -> None:
    with PrefixCache(llama, store) as prefixes, pytest.raises(InvalidArgumentError, match="one prompt"):
        prefixes.prefill(torch.zeros(shape, dtype=torch.long))


def test_a_cache_that_keeps_only_a_window_is_refused(
    make_model: Callable[..., Any], store: Any, prompt: Callable[..., Any]
) -> None:
    model, ids = make_model("gemma3"), prompt(3 * BLOCK)
    window = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[None], use_cache=True, **{cache_argument(model): window})
    with PrefixCache(model, store) as prefixes, pytest.raises(InvalidArgumentError, match=r"layer 0 \(DynamicSliding"):
        prefixes.offload(ids, window)


def test_a_cache_that_is_shorter_than_the_prompt_is_refused(llama: Any, store: Any, prompt: Callable[..., Any]) -> None:
    ids = prompt(3 * BLOCK)
    cache, _ = compute(llama, ids[: 2 * BLOCK])
    with PrefixCache(llama, store) as prefixes, pytest.raises(InvalidArgumentError, match="32 tokens"):
        prefixes.offload(ids, cache)


def test_a_namespace_of_another_shape_is_refused_before_anything_is_stored(
    llama: Any, make_model: Callable[..., Any], store: Any
) -> None:
    other = namespace_for(make_model("llama", num_key_value_heads=4))
    with pytest.raises(InvalidArgumentError, match="layers, heads"):
        PrefixCache(llama, store, namespace=other)


def test_bfloat16_blocks_come_back_bit_for_bit(
    make_model: Callable[..., Any], store: Any, prompt: Callable[..., Any]
) -> None:
    model, ids = make_model("gemma3").to(torch.bfloat16), prompt(5 * BLOCK + 1)
    kept, _ = compute(model, ids)
    with PrefixCache(model, store) as prefixes:
        prefixes.prefill(ids).offloaded.result()
        restored = prefixes.restore(ids)
    assert restored.token_count == 5 * BLOCK
    assert_same_kv(restored.cache, kept, token_count=5 * BLOCK)


def test_the_log_names_why_reuse_stopped_once_and_when_it_is_back(
    llama: Any, store: Any, prompt: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    ids = prompt(2 * BLOCK)
    with PrefixCache(llama, store) as prefixes:
        store.is_gone = True
        for _ in range(3):
            prefixes.prefill(ids).offloaded.result()
        store.is_gone = False
        prefixes.prefill(ids).offloaded.result()
    assert [record.getMessage() for record in caplog.records] == [
        "prompts are computed without the store: UNAVAILABLE: gone",
        "the store answers again",
    ]


def test_after_close_offloads_are_dropped_and_prompts_still_computed(
    llama: Any, store: Any, prompt: Callable[..., Any]
) -> None:
    ids = prompt(3 * BLOCK + 1)
    _, without_store = compute(llama, ids)
    with PrefixCache(llama, store) as prefixes:
        pass
    late = prefixes.prefill(ids)
    assert late.offloaded.result(timeout=0).states == (PutState.DROPPED,) * 3
    assert isinstance(late.offloaded.result().error, UnavailableError)
    assert decode(llama, late.logits, late.cache) == without_store
    assert prefixes.offload(ids, late.cache).states == (PutState.DROPPED,) * 3
    assert prefixes.wait(timeout_s=0.0)
    assert store.blocks == {}


def test_under_autocast_prompts_are_computed_without_the_store(
    llama: Any, store: Any, prompt: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Other K and V, and once they follow restored ones not even of another dtype."""
    ids = prompt(3 * BLOCK + 1)
    with PrefixCache(llama, store) as prefixes:
        prefixes.prefill(ids[: 2 * BLOCK]).offloaded.result()
        kept = dict(store.blocks)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, without_store = compute(llama, ids)
            prefill = prefixes.prefill(ids)
            assert decode(llama, prefill.logits, prefill.cache) == without_store
            with pytest.raises(InvalidArgumentError, match="autocast"):
                prefixes.offload(ids, prefill.cache)
        assert (prefill.tokens_reused, store.blocks) == (0, kept)
        assert prefill.offloaded.result(timeout=0).states == (PutState.DROPPED,) * 3
        for error in (prefill.restored.error, prefill.offloaded.result().error):
            assert isinstance(error, InvalidArgumentError)
        assert "autocast" in caplog.text
        assert prefixes.prefill(ids).tokens_reused == 2 * BLOCK


def test_computed_blocks_that_do_not_fit_the_namespace_are_dropped_not_raised(
    make_model: Callable[..., Any],
    store: Any,
    prompt: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, ids = make_model("llama"), prompt(3 * BLOCK)
    with PrefixCache(model, store) as prefixes:
        # Where nobody sees it from outside, as wrappers for mixed precision do it.
        monkeypatch.setattr(model, "forward", torch.autocast("cpu", dtype=torch.bfloat16)(model.forward))
        for _ in range(2):
            offloaded = prefixes.prefill(ids).offloaded.result(timeout=0)
            assert offloaded.states == (PutState.DROPPED,) * 3
            assert isinstance(offloaded.error, InvalidArgumentError)
    assert store.blocks == {}
    assert caplog.text.count("computed blocks are not stored") == 1
