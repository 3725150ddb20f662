"""What `generate` of a transformers model is told and asked, so that it goes on from restored tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from kvstore.errors import InvalidArgumentError

_TOKENIZERS = frozenset({"tokenizer", "assistant_tokenizer"})
"""What `generate` takes beside its signature and a generation config, and is no input of the model."""

_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
"""Speculation begins with the whole prompt whatever is in the cache, and others keep state of their own."""

_REFUSED = {
    "cache": "None: the cache is what is restored",
    "past_key_values": "None: the cache is what is restored",
    "cache_implementation": "None: blocks are restored into the standard cache",
    "custom_generate": "None: a recipe of its own may not go on from a cache",
    "token_healing": "None: it changes the prompt",
    "inputs": "None: name them input_ids",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateSettings:
    """What matters here of the arguments of one `generate`."""

    rows_per_prompt: int
    """Beams, or sequences that are returned."""
    eos_token_ids: frozenset[int]
    chunk_columns: int | None
    """At most so many tokens of a prompt are to be computed at once."""
    overrides: dict[str, Any]
    """What of the settings would keep `generate` from going on from a cache."""


def read_settings(model: Any, arguments: Mapping[str, Any], *, offload_generated: bool) -> GenerateSettings:
    """Settles arguments as transformers does: the argument, else the config given, else the model's.

    Raises `InvalidArgumentError` for those under which K and V would depend on more than token ids, or which need a
    cache of their own.
    """
    given, own = arguments.get("generation_config"), model.generation_config

    def setting(name: str) -> Any:
        if name in arguments:
            return arguments[name]
        chosen = getattr(given, name, None)
        return getattr(own, name, None) if chosen is None else chosen

    for name, allowed in _REFUSED.items():
        for value in (arguments.get(name), getattr(given, name, None)):
            if value is not None and value is not False:
                raise InvalidArgumentError.of(name, _brief(value), allowed)
    if False in (arguments.get("use_cache"), getattr(given, "use_cache", None)):
        raise InvalidArgumentError.of("use_cache", False, "True: without a cache nothing can be restored")
    _check_inputs(model, arguments)
    config = _new_config()
    for name in vars(config):
        if not name.startswith("_") and (value := setting(name)) is not None:
            setattr(config, name, value)
    mode = config.get_generation_mode(arguments.get("assistant_model")).value
    if mode not in _MODES:
        raise InvalidArgumentError.of("the mode of the generation", mode, f"one of {', '.join(_MODES)}")
    if offload_generated and (setting("num_beams") or 1) > 1:
        raise InvalidArgumentError.of("offload_generated", True, "False with beams: they swap their rows as they go")
    overrides: dict[str, Any] = {}
    if setting("cache_implementation") is not None:
        overrides["cache_implementation"] = None
    if setting("use_cache") is False:
        overrides["use_cache"] = True
    if setting("prefill_chunk_size") is not None:
        overrides["prefill_chunk_size"] = None
    return GenerateSettings(
        rows_per_prompt=max(setting("num_beams") or 1, setting("num_return_sequences") or 1),
        eos_token_ids=_token_ids(setting("eos_token_id")),
        chunk_columns=setting("prefill_chunk_size"),
        overrides=overrides,
    )


class AfterPrompt:
    """A logits processor that changes nothing: calls back in the first step, when the prompt has just been computed."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        call, self._call = self._call, None
        if call is not None:
            call()
        return scores


def without_padding_behind(said: torch.Tensor, eos_token_ids: frozenset[int]) -> torch.Tensor:
    """What a row of an output says: up to its first end-of-sequence token, as only padding follows."""
    for position, token in enumerate(said.tolist()):
        if token in eos_token_ids:
            return said[: position + 1]
    return said


def _check_inputs(model: Any, arguments: Mapping[str, Any]) -> None:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    known = _TOKENIZERS | inspect.signature(base.generate).parameters.keys()
    settings = (_new_config(), model.generation_config)
    for name, value in arguments.items():
        if name not in known and value is not None and not any(hasattr(config, name) for config in settings):
            raise InvalidArgumentError.of(
                name, _brief(value), "token ids and settings of the generation only: no block's hash tells other inputs"
            )


def _new_config() -> Any:
    untyped: Any = GenerationConfig
    return untyped()


def _token_ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(torch.as_tensor(value).reshape(-1).tolist())


def _brief(value: Any) -> str:
    return repr(value) if isinstance(value, str | int | float | bool) else type(value).__name__
