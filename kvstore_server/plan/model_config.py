"""A model's layers from its Hugging Face `config.json`. What would be counted wrongly is refused, and named."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvstore.errors import InvalidArgumentError
from kvstore_server.plan.dtypes import element_bytes, parse_dtype
from kvstore_server.plan.models import Model, gated_delta
from kvstore_server.plan.shape import AttentionLayer, Layer, StateLayer

_NESTED = ("text_config", "llm_config", "language_config")
"""Where models that also see or hear keep what their language part is."""

_DTYPE = "bfloat16"
"""Where a configuration names none; what nearly all models are published in."""
_LAYERS_MAX = 1 << 12
_VALUE_MAX = 1 << 30

_SPELLINGS = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
}

_DEFAULTS: dict[str, dict[str, int]] = {
    "gemma3": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
}
"""What published configurations of a model type leave out, as transformers fills it in."""

_FULL_EVERY = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "gemma3": 6, "gemma3_text": 6, "gemma3n_text": 5}
"""Model types whose older configurations do not say that only each n-th layer keeps all tokens."""

_REFUSED = {
    "is_encoder_decoder": "encoder-decoder models also keep the encoder's K and V",
    "cross_attention_layers": "layers that look at images keep K and V of those",
    "compress_ratios": "layers that compress their K and V are not counted",
    "compress_rates": "layers that compress their K and V are not counted",
    "block_configs": "layers that differ one by one are not counted",
    "block_types": "layers of a recurrence of their own are not counted",
}
_REFUSED_TYPES = {
    "falcon_h1": "layers that are attention and Mamba at once are not counted",
    "mllama": _REFUSED["cross_attention_layers"],
    "deepseek_v4": _REFUSED["compress_ratios"],
}

_FULL = frozenset({"full_attention", "attention", "global_attention", "indexed_attention", "self_attention"})
_WINDOW = frozenset({"sliding_attention", "local_attention", "sliding_window"})
_CHUNK = frozenset({"chunked_attention"})
_STATE = frozenset({"linear_attention", "mamba", "mamba2", "kda"})
_NOTHING = frozenset({"mlp", "moe"})
_PATTERN = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Nemotron-H's `hybrid_override_pattern`."""

_MAMBA_1 = ("mamba_d_state", "mamba_d_conv", "mamba_expand")
_INDEX_GROUP = 128
"""Elements of a sparse attention's index that share a scale of 4 bytes; each is one byte."""


def read_model(config: object, *, name: str) -> Model:
    """The model that the content of a `config.json` describes; `name` is for people.

    Its weights are unknown: a configuration does not say how they are stored.
    """
    if not isinstance(config, dict):
        raise InvalidArgumentError.of("--config", name, "a JSON object, such as a model's config.json")
    nested = next((config[key] for key in _NESTED if isinstance(config.get(key), dict)), None)
    fields = _Fields({**config, **(nested or {})}, file=name)
    _refuse(fields)
    layers = tuple(_layers(fields))
    if not layers:
        raise InvalidArgumentError.of(f"{name}: layer_types", "no layer that keeps anything", "at least one")
    return Model(name=name, layers=layers, num_heads=fields.whole_or_none("num_attention_heads"), dtype=_dtype(fields))


def _dtype(fields: _Fields) -> str:
    given = fields.text("dtype") or fields.text("torch_dtype")
    return _DTYPE if given in (None, "auto") else parse_dtype(given, field=fields.named("dtype"))


class _Fields:
    """The fields of a configuration, under any of their spellings; what is wrong is named with its file."""

    def __init__(self, values: Mapping[str, Any], *, file: str) -> None:
        self._values = values
        self._file = file
        self.model_type = str(values.get("model_type", ""))

    def changed(self, values: Mapping[str, Any]) -> _Fields:
        return _Fields({**self._values, **values}, file=self._file)

    def named(self, field: str) -> str:
        return f"{self._file}: {field}"

    def get(self, field: str) -> Any:
        """None: it is not there, or null."""
        for spelling in _SPELLINGS.get(field, (field,)):
            if self._values.get(spelling) is not None:
                return self._values[spelling]
        return _DEFAULTS.get(self.model_type, {}).get(field)

    def text(self, field: str) -> str | None:
        value = self.get(field)
        return None if value is None else str(value)

    def whole(self, field: str, *, at_least: int = 1, at_most: int = _VALUE_MAX) -> int:
        value = self.get(field)
        allowed = f"a whole number from {at_least} to {at_most}"
        if value is None:
            raise InvalidArgumentError(f"{self.named(field)} is missing; allowed: {allowed}")
        if not isinstance(value, int) or isinstance(value, bool) or not at_least <= value <= at_most:
            raise InvalidArgumentError.of(self.named(field), value, allowed)
        return value

    def whole_or_none(self, field: str, *, at_least: int = 1) -> int | None:
        return None if self.get(field) is None else self.whole(field, at_least=at_least)

    def numbers(self, field: str) -> Sequence[int] | None:
        value = self.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(one, int) for one in value):
            raise InvalidArgumentError.of(self.named(field), value, "a list of whole numbers")
        return value


def _refuse(fields: _Fields) -> None:
    if fields.model_type in _REFUSED_TYPES:
        allowed = f"another; {_REFUSED_TYPES[fields.model_type]}"
        raise InvalidArgumentError.of(fields.named("model_type"), fields.model_type, allowed)
    for field, why in _REFUSED.items():
        if fields.get(field):
            raise InvalidArgumentError.of(fields.named(field), fields.get(field), f"none; {why}")


def _layers(fields: _Fields) -> Iterator[Layer]:
    kinds = _kinds(fields)
    shared_count = fields.whole_or_none("num_kv_shared_layers", at_least=0) or 0
    own_count = len(kinds) - shared_count
    if own_count < 1:
        raise InvalidArgumentError.of(
            fields.named("num_kv_shared_layers"), shared_count, f"less than the {len(kinds)} layers"
        )
    own_fields = _own_fields(fields)
    for number, kind in enumerate(kinds[:own_count]):
        of_layer = own_fields.get(number, fields)
        if kind in _NOTHING:
            continue
        if kind in _STATE:
            yield _state(of_layer)
        elif kind in _WINDOW:
            yield _attention(of_layer, window_tokens=of_layer.whole("sliding_window"))
        elif kind in _CHUNK:
            yield _attention(of_layer, window_tokens=of_layer.whole("attention_chunk_size"))
        else:
            yield _attention(of_layer, window_tokens=None)


def _own_fields(fields: _Fields) -> dict[int, _Fields]:
    """Of the layers for which transformers 5 writes down what is different in them."""
    different = fields.get("per_layer_config") or {}
    allowed = "an object with an object for each number of a layer"
    if not isinstance(different, dict):
        raise InvalidArgumentError.of(fields.named("per_layer_config"), different, allowed)
    found = {}
    for number, values in different.items():
        if not re.fullmatch(r"\d{1,5}", number, re.ASCII) or not isinstance(values, dict):
            raise InvalidArgumentError.of(fields.named("per_layer_config"), {number: values}, allowed)
        found[int(number)] = fields.changed(values)
    return found


def _kinds(fields: _Fields) -> list[str]:
    """Of each layer, what it is."""
    pattern = fields.text("hybrid_override_pattern")
    if pattern is not None:
        unknown = next((mark for mark in pattern if mark not in _PATTERN), None)
        if unknown is not None:
            allowed = ", ".join(_PATTERN)
            raise InvalidArgumentError.of(fields.named("hybrid_override_pattern"), unknown, allowed)
        return [_PATTERN[mark] for mark in pattern]
    for field in ("layer_types", "layers_block_type"):
        if fields.get(field) is not None:
            return _listed_kinds(fields, field)
    count = fields.whole("num_hidden_layers", at_most=_LAYERS_MAX)
    return _hybrid_kinds(fields, count=count) or _window_kinds(fields, count=count)


def _listed_kinds(fields: _Fields, field: str) -> list[str]:
    listed = fields.get(field)
    count = fields.whole_or_none("num_hidden_layers")
    if not isinstance(listed, list) or len(listed) != (count or len(listed)):
        raise InvalidArgumentError.of(
            fields.named(field), listed, f"a list with one entry for each of {count or 'the'} layers"
        )
    known = _FULL | _WINDOW | _CHUNK | _STATE | _NOTHING
    for kind in listed:
        if not isinstance(kind, str) or kind not in known:
            raise InvalidArgumentError.of(fields.named(field), kind, ", ".join(sorted(known)))
    return listed


def _hybrid_kinds(fields: _Fields, *, count: int) -> list[str] | None:
    """Of models with layers that keep a state; None: all layers are attention."""
    attention = None
    linear = fields.get("linear_attn_config")
    if isinstance(linear, dict):  # Kimi Linear counts its layers from 1
        kda = _Fields(linear, file=fields.named("linear_attn_config"))
        attention = {number - 1 for number in kda.numbers("full_attn_layers") or ()}
    elif fields.get("attn_layer_indices") is not None:
        attention = set(fields.numbers("attn_layer_indices") or ())
    elif fields.get("attn_layer_period") is not None:
        period, offset = fields.whole("attn_layer_period"), fields.whole("attn_layer_offset", at_least=0)
        attention = {number for number in range(count) if number % period == offset}
    elif fields.get("linear_num_value_heads") is not None:
        every = fields.whole_or_none("full_attention_interval") or 4
        attention = {number for number in range(count) if (number + 1) % every == 0}
    elif fields.get("mamba_d_state") is not None or fields.get("ssm_state_size") is not None:
        raise InvalidArgumentError(
            f"{fields.named('layer_types')} is missing; allowed: one entry for each layer, as some are Mamba layers"
        )
    if attention is None:
        return None
    return ["full_attention" if number in attention else "linear_attention" for number in range(count)]


def _window_kinds(fields: _Fields, *, count: int) -> list[str]:
    chunk_kinds = _chunk_kinds(fields, count=count)
    if chunk_kinds is not None:
        return chunk_kinds
    if fields.get("sliding_window") is None or fields.get("use_sliding_window") is False:
        return ["full_attention"] * count
    every = fields.whole_or_none("sliding_window_pattern") or fields.whole_or_none("_sliding_window_pattern")
    every = every or _FULL_EVERY.get(fields.model_type)
    if every is not None:
        return ["sliding_attention" if (number + 1) % every else "full_attention" for number in range(count)]
    first = 0
    if fields.get("use_sliding_window"):
        first = fields.whole_or_none("max_window_layers", at_least=0) or 0
    return ["sliding_attention" if number >= first else "full_attention" for number in range(count)]


def _chunk_kinds(fields: _Fields, *, count: int) -> list[str] | None:
    """Of Llama 4: layers with RoPE look at their own chunk alone."""
    if fields.get("attention_chunk_size") is None or not fields.model_type.startswith("llama4"):
        return None
    with_rope = fields.numbers("no_rope_layers")
    if not with_rope:
        every = fields.whole_or_none("no_rope_layer_interval") or 4
        with_rope = [(number + 1) % every for number in range(count)]
    if len(with_rope) != count:
        raise InvalidArgumentError.of(fields.named("no_rope_layers"), list(with_rope), f"one of each of {count} layers")
    return ["chunked_attention" if one else "full_attention" for one in with_rope]


def _attention(fields: _Fields, *, window_tokens: int | None) -> AttentionLayer:
    if fields.get("kv_lora_rank") is not None:
        latent_dim = fields.whole("kv_lora_rank") + fields.whole("qk_rope_head_dim")
        return AttentionLayer(
            num_kv_heads=1,
            head_dim=latent_dim,
            v_head_dim=0,
            window_tokens=window_tokens,
            index_bytes=_index_bytes(fields),
        )
    num_heads = fields.whole("num_attention_heads")
    num_kv_heads = fields.whole_or_none("num_key_value_heads") or num_heads
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):  # Falcon, GPT-BigCode
        num_kv_heads = 1
    if num_heads % num_kv_heads:
        raise InvalidArgumentError.of(
            fields.named("num_key_value_heads"), num_kv_heads, f"a divisor of num_attention_heads, {num_heads}"
        )
    head_dim = _head_dim(fields, num_heads=num_heads)
    if window_tokens is None and fields.get("global_head_dim") is not None:  # Gemma 4
        head_dim = fields.whole("global_head_dim")
        if fields.get("attention_k_eq_v"):
            num_kv_heads = fields.whole_or_none("num_global_key_value_heads") or num_kv_heads
    v_head_dim = fields.whole_or_none("v_head_dim") or head_dim
    return AttentionLayer(
        num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim, window_tokens=window_tokens
    )


def _head_dim(fields: _Fields, *, num_heads: int) -> int:
    for field in ("head_dim", "attention_head_dim"):
        if fields.get(field) is not None:
            return fields.whole(field)
    hidden_size = fields.whole("hidden_size")
    if hidden_size % num_heads:
        raise InvalidArgumentError(
            f"{fields.named('head_dim')} is missing; allowed: a whole number, "
            f"as hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}"
        )
    return hidden_size // num_heads


def _index_bytes(fields: _Fields) -> int:
    """Of a token, for the index of DeepSeek's sparse attention."""
    index_dim = fields.whole_or_none("index_head_dim")
    return 0 if index_dim is None else index_dim + index_dim // _INDEX_GROUP * 4


def _state(fields: _Fields) -> StateLayer:
    kept_as = fields.text("mamba_ssm_cache_dtype") or fields.text("mamba_ssm_dtype")
    linear = fields.get("linear_attn_config")
    if isinstance(linear, dict):
        kda = _Fields(linear, file=fields.named("linear_attn_config"))
        return _kda(kda.whole("num_heads"), kda.whole("head_dim"), kda.whole("short_conv_kernel_size"))
    if fields.get("linear_num_heads") is not None:
        sizes = (fields.whole(field) for field in ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"))
        return _kda(*sizes)
    state_dtype = parse_dtype(kept_as, field=fields.named("mamba_ssm_dtype")) if kept_as else _dtype(fields)
    state_element_bytes = element_bytes(state_dtype)
    if fields.get("linear_num_value_heads") is not None:
        return gated_delta(
            key_heads=fields.whole("linear_num_key_heads"),
            value_heads=fields.whole("linear_num_value_heads"),
            key_dim=fields.whole("linear_key_head_dim"),
            value_dim=fields.whole("linear_value_head_dim"),
            conv_kernel=fields.whole("linear_conv_kernel_dim"),
            state_element_bytes=state_element_bytes,
        )
    return _mamba(fields, state_element_bytes=state_element_bytes)


def _kda(heads: int, head_dim: int, conv_kernel: int) -> StateLayer:
    """Kimi Delta Attention keeps its matrices in fp32."""
    return StateLayer(
        recurrent_elements=heads * head_dim * head_dim,
        recurrent_element_bytes=4,
        conv_elements=3 * heads * head_dim * (conv_kernel - 1),
    )


def _mamba(fields: _Fields, *, state_element_bytes: int) -> StateLayer:
    if fields.get("mamba_n_heads") is not None:
        heads, state_dim = fields.whole("mamba_n_heads"), fields.whole("mamba_d_state")
        groups, kernel = fields.whole("mamba_n_groups"), fields.whole("mamba_d_conv")
        if fields.text("mamba_d_head") in (None, "auto"):
            head_dim = fields.whole("mamba_expand") * fields.whole("hidden_size") // heads
        else:
            head_dim = fields.whole("mamba_d_head")
    elif fields.get("mamba_num_heads") is not None:
        heads, state_dim = fields.whole("mamba_num_heads"), fields.whole("ssm_state_size")
        groups, kernel = fields.whole("n_groups"), fields.whole("conv_kernel")
        head_dim = fields.whole("mamba_head_dim")
    elif all(fields.get(field) is not None for field in _MAMBA_1):
        inner = fields.whole("mamba_expand") * fields.whole("hidden_size")
        return StateLayer(
            recurrent_elements=inner * fields.whole("mamba_d_state"),
            recurrent_element_bytes=state_element_bytes,
            conv_elements=inner * (fields.whole("mamba_d_conv") - 1),
        )
    else:
        raise InvalidArgumentError(
            f"{fields.named('layer_types')} names layers that keep a state, and nothing says how large it is; "
            f"allowed: linear_num_value_heads, mamba_n_heads, mamba_num_heads or {', '.join(_MAMBA_1)} beside them"
        )
    return StateLayer(
        recurrent_elements=heads * head_dim * state_dim,
        recurrent_element_bytes=state_element_bytes,
        conv_elements=(heads * head_dim + 2 * groups * state_dim) * (kernel - 1),
    )
