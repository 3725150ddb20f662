"""Configurations as they are published: counted rightly, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgumentError
from kvstore_server.plan.dtypes import element_bytes
from kvstore_server.plan.model_config import read_model
from kvstore_server.plan.models import find_model
from kvstore_server.plan.shape import CacheShape

LLAMA_3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
GEMMA_3_270M: dict[str, Any] = {
    "head_dim": 256,
    "hidden_size": 640,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "torch_dtype": "bfloat16",
}
GEMMA_3_4B: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 27},
}
GEMMA_2_9B: dict[str, Any] = {
    "head_dim": 256,
    "hidden_size": 3584,
    "model_type": "gemma2",
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
    "torch_dtype": "float32",
}
QWEN_2_5_7B: dict[str, Any] = {
    "hidden_size": 3584,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
GPT_OSS_20B: dict[str, Any] = {
    "head_dim": 64,
    "hidden_size": 2880,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "sliding_window": 128,
}
DEEPSEEK_V3: dict[str, Any] = {
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "model_type": "deepseek_v3",
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}
LLAMA_4_SCOUT: dict[str, Any] = {
    "model_type": "llama4",
    "text_config": {
        "attention_chunk_size": 8192,
        "head_dim": 128,
        "hidden_size": 5120,
        "model_type": "llama4_text",
        "no_rope_layers": [],
        "num_attention_heads": 40,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    },
}
QWEN_3_NEXT: dict[str, Any] = {
    "dtype": "bfloat16",
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "model_type": "qwen3_next",
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
}
GRANITE_HYBRID: dict[str, Any] = {
    "dtype": "float32",
    "hidden_size": 2048,
    "layer_types": ["mamba"] * 3 + ["attention"],
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 64,
    "model_type": "granitemoehybrid",
    "num_attention_heads": 32,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
}


def shape_of(config: dict[str, Any]) -> CacheShape:
    model = read_model(config, name="config.json")
    return CacheShape(layers=model.layers, element_bytes=element_bytes(model.dtype))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA_3, "llama-3-8b"),
        (GEMMA_3_270M, "gemma-3-270m"),
        (GEMMA_3_4B, "gemma-3-4b"),
        (GEMMA_2_9B, "gemma-2-9b"),
        (QWEN_2_5_7B, "qwen2.5-7b"),
        (GPT_OSS_20B, "gpt-oss-20b"),
        (DEEPSEEK_V3, "deepseek-v3"),
        (LLAMA_4_SCOUT, "llama-4-scout"),
        (QWEN_3_NEXT, "qwen3-next-80b-a3b"),
    ],
)
def test_a_published_configuration_gives_the_layers_of_the_table(config: dict[str, Any], name: str) -> None:
    read, known = read_model(config, name="config.json"), find_model(name)
    assert read.layers == known.layers
    assert read.num_heads == known.num_heads


def test_the_element_type_is_the_configurations_and_bf16_where_it_names_none() -> None:
    assert read_model(GEMMA_2_9B, name="x").dtype == "float32"
    assert read_model(GEMMA_3_4B, name="x").dtype == "bfloat16"
    assert read_model(GPT_OSS_20B, name="x").dtype == "bfloat16"
    assert read_model({**LLAMA_3, "torch_dtype": "auto"}, name="x").dtype == "bfloat16"


def test_heads_without_a_size_of_their_own_share_out_the_hidden_size() -> None:
    assert shape_of({**LLAMA_3, "num_key_value_heads": None}).token_bytes == 32 * 2 * 4096 * 2
    with pytest.raises(InvalidArgumentError, match=r"head_dim is missing; .* hidden_size 4095 is no multiple"):
        shape_of({**LLAMA_3, "hidden_size": 4095})


def test_a_window_of_all_layers_is_one() -> None:
    mistral = {**LLAMA_3, "model_type": "mistral", "sliding_window": 4096}
    shape = shape_of(mistral)
    assert (shape.full_token_bytes, shape.window_token_bytes) == (0, 128 * 1024)
    assert shape.sequence_bytes(100_000) == 4096 * 128 * 1024


def test_qwens_window_starts_at_its_layer() -> None:
    shape = shape_of({**QWEN_2_5_7B, "use_sliding_window": True, "max_window_layers": 21})
    assert shape.window_token_bytes * 3 == shape.full_token_bytes


def test_the_pattern_of_windows_is_read_under_both_its_names() -> None:
    config = {key: value for key, value in GEMMA_3_270M.items() if key != "layer_types"}
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        shape = shape_of({**config, name: 3})
        assert shape.full_token_bytes * 2 == shape.window_token_bytes
    assert shape_of(config) == shape_of(GEMMA_3_270M)


def test_layers_that_use_the_cache_of_others_keep_none() -> None:
    layers = ["sliding_attention"] * 4 + ["full_attention"]
    config = {**GEMMA_3_270M, "layer_types": layers * 3, "num_hidden_layers": 15, "num_kv_shared_layers": 5}
    assert len(shape_of(config).layers) == 10
    with pytest.raises(InvalidArgumentError, match="num_kv_shared_layers is 15; allowed: less than the 15 layers"):
        shape_of({**config, "num_kv_shared_layers": 15})


def test_full_layers_may_have_larger_heads_than_those_with_windows() -> None:
    shape = shape_of({**GEMMA_3_270M, "global_head_dim": 512})
    assert shape.full_token_bytes == 3 * 2 * 512 * 2
    assert shape.window_token_bytes == 15 * 2 * 256 * 2


def test_layers_may_have_sizes_of_their_own() -> None:
    larger = {number: {"head_dim": 512} for number in ("05", "11", "17")}
    assert shape_of({**GEMMA_3_270M, "per_layer_config": larger}) == shape_of({**GEMMA_3_270M, "global_head_dim": 512})
    for wrong in ([1], {"first": {}}, {"1": 5}):
        with pytest.raises(InvalidArgumentError, match=r"per_layer_config is .*; allowed: an object with an object"):
            shape_of({**GEMMA_3_270M, "per_layer_config": wrong})


def test_falcons_multi_query_attention_has_one_kv_head() -> None:
    falcon = {"hidden_size": 4544, "multi_query": True, "num_attention_heads": 71, "num_hidden_layers": 32,
              "num_kv_heads": 71, "torch_dtype": "bfloat16"}  # fmt: skip
    assert shape_of(falcon).token_bytes == 32 * 2 * 64 * 2
    newer = {**falcon, "num_kv_heads": 1, "new_decoder_architecture": True}
    assert shape_of(newer).token_bytes == 32 * 2 * 64 * 2
    assert shape_of({**newer, "num_kv_heads": 71}).token_bytes == 71 * 32 * 2 * 64 * 2


def test_the_index_of_a_sparse_attention_counts() -> None:
    shape = shape_of({**DEEPSEEK_V3, "model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64})
    assert shape.token_bytes == 70_272 + 61 * 132


def test_a_state_of_mamba_2_is_counted_for_each_sequence() -> None:
    shape = shape_of(GRANITE_HYBRID)
    each = 4 * (64 * 64 * 128 + (64 * 64 + 2 * 128) * 3)
    assert (shape.state_bytes, shape.token_bytes) == (3 * each, 2 * 8 * 64 * 4)
    automatic = {**GRANITE_HYBRID, "mamba_d_head": "auto"}
    assert shape_of(automatic) == shape


def test_nemotrons_pattern_names_its_layers() -> None:
    config = {
        "conv_kernel": 4, "head_dim": 128, "hybrid_override_pattern": "M-M*E", "mamba_head_dim": 64,
        "mamba_num_heads": 128, "mamba_ssm_cache_dtype": "float32", "n_groups": 8, "num_attention_heads": 40,
        "num_key_value_heads": 8, "ssm_state_size": 128, "torch_dtype": "bfloat16",
    }  # fmt: skip
    shape = shape_of(config)
    each = 4 * (128 * 64 * 128) + 2 * (128 * 64 + 2 * 8 * 128) * 3
    assert (shape.state_bytes, shape.token_bytes) == (2 * each, 2 * 8 * 128 * 2)
    with pytest.raises(InvalidArgumentError, match="hybrid_override_pattern is 'X'; allowed: M, "):
        shape_of({**config, "hybrid_override_pattern": "MX"})
    listed = {key: value for key, value in config.items() if key != "hybrid_override_pattern"}
    kinds = ["linear_attention", "mlp", "linear_attention", "full_attention", "moe"]
    assert shape_of({**listed, "layers_block_type": kinds}) == shape


def test_jambas_period_and_kimis_lists_say_which_layers_are_attention() -> None:
    jamba = {
        **LLAMA_3, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_conv": 4, "mamba_d_state": 16,
        "mamba_expand": 2,
    }  # fmt: skip
    shape = shape_of(jamba)
    assert shape.token_bytes == 4 * 2 * 8 * 128 * 2
    assert shape.state_bytes == 28 * 2 * 8192 * (16 + 3)
    kimi = {
        **DEEPSEEK_V3,
        "num_hidden_layers": 4,
        "linear_attn_config": {
            "full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 128, "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
    }  # fmt: skip
    shape = shape_of(kimi)
    del kimi["linear_attn_config"]
    listed = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    sizes = {"linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4}
    assert shape_of({**kimi, **listed, **sizes}) == shape
    assert shape.token_bytes == 576 * 2
    assert shape.state_bytes == 3 * (32 * 128 * 128 * 4 + 3 * 32 * 128 * 3 * 2)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing; allowed: a whole number from 1 to"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'; allowed: a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 1 << 40}, f"num_hidden_layers is {1 << 40}"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"num_key_value_heads": [8, 4]}, r"num_key_value_heads is \[8, 4\]"),
        ({"num_key_value_heads": 7}, "num_key_value_heads is 7; allowed: a divisor of num_attention_heads, 32"),
        ({"torch_dtype": "int3"}, "dtype is 'int3'; allowed: float32"),
        (
            {"layer_types": ["full_attention"]},
            "layer_types is .*; allowed: a list with one entry for each of 32 layers",
        ),
        ({"layer_types": ["warp"] * 32}, "layer_types is 'warp'; allowed: attention, "),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window is missing"),
        ({"layer_types": ["mamba"] * 32}, "layer_types names layers that keep a state, and nothing says how large"),
        ({"layer_types": ["mlp"] * 32}, "layer_types is 'no layer that keeps anything'"),
        ({"mamba_d_state": 16}, "layer_types is missing; .* some are Mamba layers"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True; allowed: none; encoder-decoder"),
        ({"cross_attention_layers": [3, 8]}, r"cross_attention_layers is \[3, 8\]; allowed: none; .* images"),
        ({"compress_ratios": [4, 128]}, r"compress_ratios is \[4, 128\]; allowed: none"),
        (
            {"model_type": "falcon_h1"},
            "model_type is 'falcon_h1'; allowed: another; layers that are attention and Mamba",
        ),
    ],
)
def test_what_is_wrong_or_cannot_be_counted_is_named(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^config.json: {named}"):
        shape_of({**LLAMA_3, **changed})


def test_what_is_no_object_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="--config is 'x'; allowed: a JSON object"):
        read_model([1, 2], name="x")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


KNOWN_FIELDS = sorted(
    {
        *(field for config in (LLAMA_3, QWEN_3_NEXT, GRANITE_HYBRID, DEEPSEEK_V3, LLAMA_4_SCOUT) for field in config),
        *(
            "per_layer_config",
            "sliding_window",
            "no_rope_layers",
            "linear_attn_config",
            "attn_layer_indices",
            "attention_chunk_size",
        ),
    }
)


@given(changed=st.dictionaries(st.sampled_from(KNOWN_FIELDS), json_values))
def test_any_configuration_is_counted_or_refused(changed: dict[str, Any]) -> None:
    try:
        shape = shape_of({**LLAMA_3, **changed})
    except InvalidArgumentError:
        return
    assert shape.sequence_bytes(100) > 0


@given(kinds=st.lists(json_values | st.sampled_from(["mamba", "attention", "mlp"]), min_size=4, max_size=4))
def test_any_list_of_layers_is_counted_or_refused(kinds: list[Any]) -> None:
    try:
        shape = shape_of({**GRANITE_HYBRID, "layer_types": kinds})
    except InvalidArgumentError:
        return
    assert len(shape.layers) <= 4
