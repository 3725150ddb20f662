"""The table of models: published figures, and nothing without a source."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgumentError
from kvstore_server.plan.dtypes import element_bytes, parse_dtype
from kvstore_server.plan.models import MODELS, find_model, similar_names
from kvstore_server.plan.shape import CacheShape

KIB = 1024


def shape_of(name: str) -> CacheShape:
    model = find_model(name)
    return CacheShape(layers=model.layers, element_bytes=element_bytes(model.dtype))


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("llama-2-7b", 512 * KIB),
        ("llama-3-8b", 128 * KIB),
        ("llama-3-70b", 320 * KIB),
        ("llama-3.1-405b", 504 * KIB),
        ("mistral-7b", 128 * KIB),
        ("mixtral-8x7b", 128 * KIB),
        ("qwen2.5-7b", 56 * KIB),
        ("qwen2.5-72b", 320 * KIB),
        ("qwen3-30b-a3b", 96 * KIB),
        ("qwen3-235b-a22b", 188 * KIB),
        ("qwen3-next-80b-a3b", 24 * KIB),
        ("deepseek-v2-lite", 27 * 576 * 2),
        ("deepseek-v2", 60 * 576 * 2),
        ("deepseek-v3", 70_272),
        ("deepseek-r1", 70_272),
        ("kimi-k2", 70_272),
        ("glm-4.5", 368 * KIB),
        ("phi-3-mini-128k", 384 * KIB),
        ("gpt-oss-120b", 72 * KIB),
    ],
)
def test_bytes_of_a_token_are_what_is_known_of_the_model(name: str, bytes_per_token: int) -> None:
    assert shape_of(name).token_bytes == bytes_per_token


@pytest.mark.parametrize(
    ("name", "full_layers", "window_layers", "window_tokens", "layer_bytes"),
    [
        ("gemma-3-270m", 3, 15, 512, 1024),
        ("gemma-3-1b", 4, 22, 512, 1024),
        ("gemma-3-27b", 10, 52, 1024, 8192),
        ("gemma-2-9b", 21, 21, 4096, 8192),
        ("gpt-oss-20b", 12, 12, 128, 2048),
        ("llama-4-scout", 12, 36, 8192, 4096),
    ],
)
def test_layers_with_windows_are_counted_apart(
    name: str, full_layers: int, window_layers: int, window_tokens: int, layer_bytes: int
) -> None:
    shape = shape_of(name)
    assert shape.full_token_bytes == full_layers * layer_bytes
    assert shape.window_token_bytes == window_layers * layer_bytes
    assert shape.window_tokens == window_tokens
    long = window_tokens * 3 + 5
    assert shape.sequence_bytes(long) == layer_bytes * (full_layers * long + window_layers * window_tokens)


def test_a_hybrid_models_states_do_not_grow() -> None:
    shape = shape_of("qwen3-next-80b-a3b")
    # 36 layers, each 32 heads of 128 * 128, and a convolution that looks back 3 steps over 8192 channels; bf16
    assert shape.state_bytes == 36 * 2 * (32 * 128 * 128 + 8192 * 3)


def test_every_model_says_where_its_row_comes_from_and_how_large_it_is() -> None:
    for name, model in MODELS.items():
        assert name == model.name == name.lower()
        assert model.source, f"{name} has no source"
        assert model.params, f"{name} has no size"
        assert model.active_params, f"{name} has no size"
        assert model.active_params <= model.params
        assert model.weights_bytes, f"{name} has no weights"
        assert 0.5 <= model.weights_bytes / model.params <= 2.001


def test_a_model_is_found_in_any_case_and_an_unknown_one_names_all() -> None:
    assert find_model(" Llama-3-8B ") is MODELS["llama-3-8b"]
    with pytest.raises(InvalidArgumentError, match=r"--model is 'gpt-4'; allowed: llama-2-7b, .*, glm-4.5"):
        find_model("gpt-4")


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("llama3-8b", "llama-3-8b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("qwen3_8b", "qwen3-8b"),
        ("DeepSeek-V3-0324", "deepseek-v3"),
        ("gpt-oss", "gpt-oss-20b"),
        ("lama-3-8b", "llama-3-8b"),
        ("gemma3-27b-it", "gemma-3-27b"),
        ("phi4", "phi-4"),
        ("mixtral", "mixtral-8x7b"),
        ("Kimi", "kimi-k2"),
    ],
)
def test_an_unknown_name_is_answered_with_the_one_that_is_meant(asked: str, meant: str) -> None:
    assert similar_names(asked)[0] == meant
    with pytest.raises(InvalidArgumentError, match=rf"did you mean {re.escape(meant)}[ ?]"):
        find_model(asked)


@given(name=st.sampled_from(sorted(MODELS)), data=st.data())
def test_a_known_name_is_meant_however_its_parts_are_joined(name: str, data: st.DataObject) -> None:
    spelled = "".join(data.draw(st.sampled_from(["", "-", "_", " "])) if one == "-" else one for one in name)
    assert similar_names(f"somebody/{spelled.title()}")[0] == name


def test_a_name_like_no_other_means_none() -> None:
    assert similar_names("xyz") == similar_names("") == similar_names("somebody/") == []


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("fp16", "float16"), ("bf16", "bfloat16"), ("torch.bfloat16", "bfloat16"), ("FP8", "float8_e4m3fn")],
)
def test_element_types_go_by_all_their_names(text: str, dtype: str) -> None:
    assert parse_dtype(text, field="--dtype") == dtype


def test_an_unknown_element_type_names_those_that_there_are() -> None:
    with pytest.raises(InvalidArgumentError, match=r"--dtype is 'fp12'; allowed: float32, .*bf16"):
        parse_dtype("fp12", field="--dtype")
