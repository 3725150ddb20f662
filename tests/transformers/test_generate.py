"""`generate` with a store says what `model.generate` says without one, for one prompt and for batches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore.messages import FinishReason
from kvstore_client.hints import Hint
from kvstore_client.integrations.transformers import Generation, PrefixCache
from kvstore_client.results import PutState
from tests.transformers.conftest import FakeStore
from tests.transformers.test_prefix_cache import BLOCK, compute

NEW = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}


def said(generation: Generation) -> list[list[int]]:
    """Without the prompts, which are of one width however long they are."""
    return generation.sequences[:, generation.sequences.shape[1] - NEW["max_new_tokens"] :].tolist()


def alone(model: Any, ids: torch.Tensor, **arguments: Any) -> list[int]:
    """What the model says to one prompt without any store."""
    row: list[int] = model.generate(ids[None], **NEW | arguments)[0, len(ids) :].tolist()
    return row


def reused(generation: Generation) -> list[int]:
    return [row.token_count for row in generation.reused]


def test_off_cold_and_warm_say_the_same(model: Any, store: Any, prompt: Callable[..., Any]) -> None:
    document = prompt(5 * BLOCK)
    prompts = [
        torch.cat([document, prompt(9, seed=2)]),
        torch.cat([document[: 2 * BLOCK], prompt(3, seed=3)]),
        prompt(4 * BLOCK + 5, seed=4),
        document[: BLOCK - 2],
    ]
    expected = [alone(model, ids) for ids in prompts]
    with PrefixCache(model, store) as prefixes:
        cold = prefixes.generate(prompts, **NEW)
        assert (said(cold), reused(cold)) == (expected, [0] * 4)
        store.blocks.clear()
        prefixes.offload(document, compute(model, document)[0])
        warm = prefixes.generate(prompts, **NEW)
        assert (said(warm), reused(warm)) == (expected, [5 * BLOCK, 2 * BLOCK, 0, 0])
        prefixes.wait()
        for ids, expected_row in zip(prompts, expected, strict=True):
            single = prefixes.generate(ids, **NEW)
            assert (said(single), reused(single)) == ([expected_row], [(len(ids) - 1) // BLOCK * BLOCK])


def test_without_anything_stored_it_is_what_the_model_itself_returns(
    llama: Any, store: Any, prompt: Callable[..., Any]
) -> None:
    padded = torch.stack([prompt(20), prompt(20, seed=2)])
    padded[0, :7] = 0
    mask = (torch.arange(20) >= torch.tensor([[7], [0]])).long()
    options = {"max_new_tokens": 5, "return_dict_in_generate": True, "output_logits": True, "do_sample": False}
    ours = PrefixCache(llama, store).generate(padded, mask, **options)
    theirs = llama.generate(padded, attention_mask=mask, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert ours.output.sequences is ours.sequences
    assert all(torch.equal(left, right) for left, right in zip(ours.output.logits, theirs.logits, strict=True))


def test_sampling_draws_the_same_tokens(llama: Any, store: Any, prompt: Callable[..., Any]) -> None:
    prompts = [prompt(50), prompt(33, seed=2)]
    options = NEW | {"do_sample": True, "temperature": 1.3, "top_k": 20}
    with PrefixCache(llama, store) as prefixes:
        torch.manual_seed(5)
        cold = prefixes.generate(prompts, **options)
        prefixes.wait()
        torch.manual_seed(5)
        warm = prefixes.generate(prompts, **options)
        torch.manual_seed(6)
        other = prefixes.generate(prompts, **options)
    # 48 columns of both are restored: the shorter prompt is there from column 17 on, and computes one token again.
    assert (reused(cold), reused(warm)) == ([0, 0], [48, 31])
    assert said(warm) == said(cold) != said(other)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 3, "num_beams": 3}])
def test_beams_start_from_what_is_restored(
    llama: Any, store: Any, prompt: Callable[..., Any], options: dict[str, int]
) -> None:
    prompts = [prompt(50), prompt(33, seed=2)]
    with PrefixCache(llama, store) as prefixes:
        cold = prefixes.generate(prompts, **NEW, **options)
        assert [future.result().stored_count for future in cold.offloaded] == [3, 2]
        warm = prefixes.generate(prompts, **NEW, **options)
    assert reused(warm) == [48, 31]
    assert said(warm) == said(cold)
    assert said(warm)[:: options.get("num_return_sequences", 1)] == [alone(llama, ids, num_beams=3) for ids in prompts]


def test_several_samples_of_one_prompt_compute_it_once_and_can_all_be_stored(
    llama: Any, store: Any, prompt: Callable[..., Any]
) -> None:
    ids = prompt(5 * BLOCK)
    options = NEW | {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": BLOCK + 1}
    with PrefixCache(llama, store) as prefixes:
        prefixes.prefill(ids[: BLOCK + 1]).offloaded.result()
        generation = prefixes.generate(ids, offload_generated=True, **options)
        prefixes.wait()
        assert reused(generation) == [BLOCK]
        assert generation.offloaded[0].result().stored_count == 4
        assert [future.result().states for future in generation.offloaded_generated] == [(PutState.STORED,)] * 3
        for sequence in generation.sequences:
            restored = prefixes.restore(sequence)
            assert restored.token_count == 6 * BLOCK
            assert_close(restored.cache, compute(llama, sequence[:-1])[0], token_count=6 * BLOCK)


def test_the_streamer_sees_prompt_and_tokens_as_they_come(llama: Any, store: Any, prompt: Callable[..., Any]) -> None:
    class Seen:
        def __init__(self) -> None:
            self.parts: list[list[int]] = []
            self.has_ended = False

        def put(self, tokens: torch.Tensor) -> None:
            self.parts.append(tokens.reshape(-1).tolist())

        def end(self) -> None:
            self.has_ended = True

    ids = prompt(50)
    with PrefixCache(llama, store) as prefixes:
        prefixes.generate(ids, **NEW)
        prefixes.wait()
        seen = Seen()
        generation = prefixes.generate(ids, streamer=seen, **NEW)
    assert reused(generation) == [48]
    assert seen.parts == [ids.tolist(), *([token] for token in said(generation)[0])]
    assert seen.has_ended


@pytest.mark.parametrize("size", [7, 1000])
def test_a_prompt_may_be_computed_in_chunks(windowed: Any, store: Any, prompt: Callable[..., Any], size: int) -> None:
    prompts = [prompt(100), prompt(90, seed=2), prompt(1, seed=3)]
    expected = [alone(windowed, ids) for ids in prompts]
    widths: list[int] = []

    def note_width(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        widths.append(inputs["input_ids"].shape[1])

    with PrefixCache(windowed, store) as prefixes:
        for counts in ([0, 0, 0], [64, 0, 0]):
            with windowed.register_forward_pre_hook(note_width, with_kwargs=True):
                generation = prefixes.generate(prompts, prefill_chunk_size=size, **NEW)
            assert (said(generation), reused(generation)) == (expected, counts)
            assert max(widths) <= size
            prefixes.wait()
            store.blocks.clear()
            prefixes.prefill(prompts[0][:65]).offloaded.result()


def test_one_token_is_a_prompt_too(windowed: Any, store: Any) -> None:
    expected = [alone(windowed, torch.tensor([5]))]
    with PrefixCache(windowed, store) as prefixes:
        assert said(prefixes.generate([5], **NEW)) == expected
        assert said(prefixes.generate([5], prefill_chunk_size=1, **NEW)) == expected


def test_the_prompt_is_stored_while_tokens_are_still_generated(
    llama: Any, store: Any, prompt: Callable[..., Any]
) -> None:
    stored = threading.Event()
    ids = prompt(3 * BLOCK + 1)
    found: list[int] = []

    def look(input_ids: torch.Tensor, scores: torch.Tensor) -> bool:
        prefixes.wait()
        found.append(prefixes.restore(ids).token_count)
        stored.set()
        return False

    with PrefixCache(llama, store) as prefixes:
        prefixes.generate(ids, stopping_criteria=[look], **NEW)
    assert found[0] == 3 * BLOCK


def test_the_next_turn_reuses_prompts_and_answers(windowed: Any, store: Any) -> None:
    """With windows, and rows that end at different tokens: what pads a finished row is nobody's answer."""
    model = windowed
    prompts = [torch.arange(3, 3 + count) for count in (BLOCK, 2 * BLOCK + 3)]
    plain = [alone(model, ids, max_new_tokens=3 * BLOCK) for ids in prompts]
    ends = plain[0][BLOCK + 2]
    lengths = [row.index(ends) + 1 if ends in row else len(row) for row in plain]
    options = NEW | {"max_new_tokens": 3 * BLOCK, "eos_token_id": ends, "pad_token_id": 0}
    with PrefixCache(model, store) as prefixes:
        first = prefixes.generate(prompts, offload_generated=True, **options)
        prefixes.wait()
        turns = []
        for ids, row, length, future in zip(prompts, plain, lengths, first.offloaded_generated, strict=True):
            # The last token of the longest row was never fed to the model.
            held = len(ids) + (length if length < max(lengths) else length - 1)
            assert future.result().stored_count == held // BLOCK - len(ids) // BLOCK
            turns.append(torch.cat([ids, torch.tensor(row[:length]), torch.arange(100, 105)]))
            assert prefixes.restore(turns[-1]).token_count == held // BLOCK * BLOCK
        second = prefixes.generate(turns, **NEW)
        assert said(second) == [alone(model, ids) for ids in turns]


def test_a_store_that_is_gone_leaves_a_plain_generate(llama: Any, store: Any, prompt: Callable[..., Any]) -> None:
    prompts = [prompt(50), prompt(33, seed=2)]
    with PrefixCache(llama, store) as prefixes:
        store.is_gone = True
        generation = prefixes.generate(prompts, offload_generated=True, **NEW)
        prefixes.wait()
    assert said(generation) == [alone(llama, ids) for ids in prompts]
    assert all(isinstance(row.error, UnavailableError) for row in generation.reused)
    assert {state for future in generation.offloaded for state in future.result().states} == {PutState.DROPPED}


def test_under_autocast_it_is_a_plain_generate_that_stores_nothing(
    llama: Any, store: Any, prompt: Callable[..., Any]
) -> None:
    ids = prompt(50)
    with PrefixCache(llama, store) as prefixes, torch.autocast("cpu", dtype=torch.bfloat16):
        assert said(prefixes.generate(ids, **NEW)) == [alone(llama, ids)]
    assert store.blocks == {}


def test_what_the_models_own_generation_config_says_of_caches_does_not_matter(
    make_model: Callable[..., Any], store: Any, prompt: Callable[..., Any]
) -> None:
    model, ids = make_model("mistral", hidden_size=64, intermediate_size=64), prompt(50)
    expected = [alone(model, ids)]
    model.generation_config.cache_implementation = "static"
    with PrefixCache(model, store) as prefixes:
        assert said(prefixes.generate(ids, **NEW)) == expected
        model.generation_config.cache_implementation = None
        model.generation_config.use_cache = False
        prefixes.wait()
        warm = prefixes.generate(ids, **NEW)
    assert (said(warm), reused(warm)) == (expected, [48])


def test_settings_may_come_in_a_generation_config(llama: Any, store: Any, prompt: Callable[..., Any]) -> None:
    ids = prompt(50)
    config = transformers.GenerationConfig(num_beams=2, num_return_sequences=2, max_new_tokens=8)
    with PrefixCache(llama, store) as prefixes:
        cold = prefixes.generate(ids, generation_config=config)
        prefixes.wait()
        warm = prefixes.generate(ids, generation_config=config)
    assert reused(warm) == [48]
    assert warm.sequences.tolist() == cold.sequences.tolist()
    assert len(warm.sequences) == 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"cache": object()}, "cache"),
        ({"past_key_values": object()}, "past_key_values"),
        ({"cache_implementation": "static"}, "cache_implementation.*'static'"),
        ({"generation_config": transformers.GenerationConfig(cache_implementation="static")}, "cache_implementation"),
        ({"use_cache": False}, "use_cache"),
        ({"custom_generate": "somebody/recipe"}, "custom_generate"),
        ({"token_healing": True}, "token_healing"),
        ({"inputs": torch.ones(1, 3)}, "inputs"),
        ({"inputs_embeds": torch.ones(1, 3, 8)}, "inputs_embeds.*no block's hash"),
        ({"pixel_values": torch.ones(1, 3, 8)}, "pixel_values.*no block's hash"),
        ({"position_ids": torch.ones(1, 3)}, "position_ids.*no block's hash"),
        ({"num_beams": 2, "offload_generated": True}, "offload_generated"),
        ({"prompt_lookup_num_tokens": 3}, "mode.*assisted_generation.*greedy_search"),
        ({"generation_config": transformers.GenerationConfig(prompt_lookup_num_tokens=3)}, "assisted_generation"),
        ({"assistant_model": object()}, "assisted_generation"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search"),
    ],
)
def test_what_hashes_cannot_tell_or_needs_another_cache_is_refused_by_name(
    llama: Any, store: Any, options: dict[str, Any], named: str
) -> None:
    with PrefixCache(llama, store) as prefixes, pytest.raises(InvalidArgumentError, match=named):
        prefixes.generate([3, 4, 5], **options)


def assert_close(left: Any, right: Any, *, token_count: int) -> None:
    for ours, theirs in zip(left.layers, right.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys[:, :, :token_count], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.values, theirs.values[:, :, :token_count], rtol=1e-4, atol=1e-4)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 5)), min_size=1, max_size=5),
    is_padded_more=st.booleans(),
)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_batch_over_any_stored_parts_says_what_its_prompts_say_alone(
    windowed: Any, lengths: list[tuple[int, int]], is_padded_more: bool
) -> None:
    """Prompts of one document, of each of which some blocks are stored, on a model whose window is about a block."""
    document = torch.randint(3, 256, (96,), generator=torch.Generator().manual_seed(1))
    prompts = [
        torch.cat([document[: length - 1], torch.tensor([seed + 3])]) for seed, (length, _) in enumerate(lengths)
    ]
    options = NEW | {"max_new_tokens": 4}
    with PrefixCache(windowed, FakeStore()) as prefixes:
        for ids, (_, block_count) in zip(prompts, lengths, strict=True):
            prefixes.prefill(ids[: block_count * BLOCK + 1])
        prefixes.wait()
        width = max(map(len, prompts)) + 3 * is_padded_more
        padded = torch.stack([torch.cat([torch.zeros(width - len(ids), dtype=torch.long), ids]) for ids in prompts])
        mask = (torch.arange(width) >= torch.tensor([[width - len(ids)] for ids in prompts])).long()
        generation = prefixes.generate(padded, mask, **options)
    assert generation.sequences[:, width:].tolist() == [alone(windowed, ids, max_new_tokens=4) for ids in prompts]


def test_hints_go_with_all_that_a_request_does_and_how_its_answer_ended_is_told(
    llama: Any, store: Any, prompt: Callable[..., Any]
) -> None:
    ids = prompt(3 * BLOCK + 2)
    answer = alone(llama, ids)
    hint = Hint(session="a chat", turn=2)
    with PrefixCache(llama, store) as prefixes:
        prefixes.hinted(hint).generate(ids, **NEW)
        prefixes.wait()
        cut = replace(hint, input_tokens=len(ids), output_tokens=8, finish=FinishReason.OTHER)
        assert store.hints[0] == ("lookup", hint)
        assert sorted(store.hints[1:], key=str) == sorted([("hint", cut), ("put", hint)], key=str)
        store.hints.clear()
        prefixes.generate([ids, ids], **NEW | {"eos_token_id": answer[0], "pad_token_id": 0})
        ended = Hint(input_tokens=len(ids), output_tokens=1, finish=FinishReason.END_TURN)
        assert store.hints == [("lookup", None), ("lookup", None), ("get", None), ("hint", ended), ("hint", ended)]


def test_of_beams_nothing_is_told_as_no_answer_is_the_one(llama: Any, store: Any, prompt: Callable[..., Any]) -> None:
    with PrefixCache(llama, store) as prefixes:
        prefixes.generate(prompt(2 * BLOCK), num_beams=2, **NEW)
    assert "hint" not in [name for name, _ in store.hints]
