"""Which namespace a transformers model's blocks belong to: everything that changes the K and V of a token.

Fail-closed: shapes come from a probe of the model itself, the whole config and all weights enter by digest, and
a model whose K and V depend on more than the tokens before them is refused by name.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from blake3 import blake3
from torch import nn
from transformers import DynamicCache

from kvstore.errors import InvalidArgumentError
from kvstore.layout import LayoutOrder
from kvstore.namespace import NONE, Namespace
from kvstore_client.integrations._blocks import TOKEN_IDS_ONLY
from kvstore_client.integrations._identity import canonical_json, model_label, position_settings, settings_digest
from kvstore_client.integrations.transformers.blocks import CacheShape, shape_of

_LAYER_TYPES = ("full_attention", "sliding_attention")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_ROPE_FIELDS = ("rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")
_weights_digests: WeakKeyDictionary[nn.Module, tuple[bytes, str]] = WeakKeyDictionary()


def namespace_for(
    model: Any,
    *,
    tokens_per_block: int = 16,
    weights_revision: str | None = None,
    tokenizer: Any = None,
    tenant_salt: bytes = b"",
    model_name: str | None = None,
) -> Namespace:
    """The identity of this model's KV blocks; raises `InvalidArgumentError` for a model that has none.

    Runs the model on one token to learn its shapes. Without `weights_revision` all parameters are hashed, at
    about 2 GB/s per core; the digest is kept per model object until a parameter is seen to change.
    `tokenizer` is a tokenizer, or a name for it; without one the caller vouches for the ids.
    """
    config = _text_config(model)
    _check_model(model, config)
    shape = probe(model)
    return Namespace(
        model=model_name or _name_of(config),
        weights_revision=weights_revision or weights_digest(model),
        tokenizer=_tokenizer_digest(tokenizer),
        rope=_positions(config),
        dtype=shape.dtype_name,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        v_head_dim=shape.v_head_dim,
        tokens_per_block=tokens_per_block,
        layout=LayoutOrder.HND,
        shard=None,
        lora=adapter_digest(model),
        tenant_salt=tenant_salt,
        k_precision="exact",
        v_precision="exact",
    )


def probe(model: Any) -> CacheShape:
    """What the model caches for one token; raises `InvalidArgumentError` naming the layers that do not fit.

    Also refuses modes in which a namespace does not tell what K and V are: training, and autocast.
    """
    check_not_training(model)
    unfit = autocast_error({parameter.device for parameter in model.parameters()})
    if unfit is not None:
        raise unfit
    cache = DynamicCache()
    ids = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.no_grad():
        try:
            model(input_ids=ids, use_cache=True, **{cache_argument(model): cache})
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            # Layers with other state than K and V fail in as many ways as there are architectures.
            raise InvalidArgumentError.of(
                "model", type(model).__name__, f"a decoder that runs with the standard cache; it raised {error!r}"
            ) from error
    expected, found = _text_config(model).num_hidden_layers, len(cache.layers)
    if found != expected:
        raise InvalidArgumentError.of(
            "model", f"layers {list(range(found, expected))} without K and V of their own", "K and V in every layer"
        )
    return shape_of(cache)


def cache_argument(model: Any) -> str:
    """What this version of transformers calls the cache in a model's `forward`."""
    for name in ("cache", "past_key_values"):
        if name in forward_arguments(model):
            return name
    raise InvalidArgumentError.of("model", type(model).__name__, "a decoder whose forward takes the standard cache")


def forward_arguments(model: Any) -> frozenset[str]:
    """Names that the model's `forward` takes, also under a PEFT wrapper, whose own takes anything."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return frozenset(inspect.signature(base.forward).parameters)


def weights_digest(model: nn.Module) -> str:
    """BLAKE3 over the names, shapes, dtypes and bytes of all parameters and buffers, computed once per model object."""
    stamp = weights_stamp(model)
    known = _weights_digests.get(model)
    if known is None or known[0] != stamp:
        known = (stamp, _digest_tensors(_tensors(model)))
        _weights_digests[model] = known
    return known[1]


def weights_stamp(model: nn.Module) -> bytes:
    """Changes when parameters are replaced, changed in place by torch operations, or adapters switched.

    Costs microseconds per parameter and reads none. It cannot see writes through `.data` or through a pointer, nor,
    for want of a version counter, changes in place to parameters that were made under `torch.inference_mode()`.
    """
    hasher = blake3(_adapter_state(model))
    for name, tensor in _tensors(model):
        version = 0 if tensor.is_inference() else tensor._version  # noqa: SLF001  (autograd's documented counter)
        hasher.update(f"{name}:{tensor.data_ptr()}:{version};".encode())
    return hasher.digest()


def check_not_training(model: nn.Module) -> None:
    """Raises `InvalidArgumentError` naming the first module in training mode; costs microseconds per module."""
    for path, module in model.named_modules():
        if module.training:
            raise InvalidArgumentError.of(
                f"{path}.training" if path else "model.training",
                True,
                "False: dropout would be stored; call model.eval()",
            )


def autocast_error(devices: Iterable[torch.device]) -> InvalidArgumentError | None:
    """What is wrong with computing on these devices under the autocast that is in force; None without one.

    Autocast changes K and V, sometimes without changing their dtype, and no namespace says so.
    """
    for device_type in {device.type for device in devices}:
        if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
            return InvalidArgumentError.of(
                "torch.autocast", f"on for {device_type}", "off: load the model in the dtype that it is to compute in"
            )
    return None


def adapter_digest(model: nn.Module) -> str:
    """BLAKE3 over the content of LoRA and other PEFT adapters, their scaling and which are active, or `none`."""
    tensors = {name: tensor for name, tensor in _tensors(model) if "lora_" in name}
    for path, module in _adapter_modules(model):
        for part in module.adapter_layer_names:
            inner = getattr(module, part, None)
            if isinstance(inner, nn.Module):
                tensors |= {f"{path}.{part}.{name}": tensor for name, tensor in _tensors(inner)}
    if tensors:
        return _digest_tensors(tensors.items(), seed=_adapter_state(model))
    if getattr(model, "peft_config", None):
        raise InvalidArgumentError.of("model", "PEFT adapters, but none in its layers", "LoRA-like adapters, or none")
    return NONE


def _adapter_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Layers that PEFT has wrapped: it marks each with the names of its adapter's parts."""
    return ((path, module) for path, module in model.named_modules() if hasattr(module, "adapter_layer_names"))


def _adapter_state(model: nn.Module) -> bytes:
    fields = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
    state = {
        path: {field: getattr(module, field, None) for field in fields} for path, module in _adapter_modules(model)
    }
    return canonical_json(state).encode() if state else b""


def _check_model(model: Any, config: Any) -> None:
    if model.config.is_encoder_decoder:
        raise InvalidArgumentError.of("model", "layers with cross attention", "decoders only")
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise InvalidArgumentError.of(
            "model", "bidirectional attention", "causal: K and V must not depend on later tokens"
        )
    types = getattr(config, "layer_types", None)
    if types is None and getattr(config, "attention_chunk_size", None):
        types = ["chunked_attention"] * config.num_hidden_layers
    odd = [f"layer {index}: {kind}" for index, kind in enumerate(types or ()) if kind not in _LAYER_TYPES]
    if odd:
        raise InvalidArgumentError.of("model", ", ".join(odd), f"only layers of type {' or '.join(_LAYER_TYPES)}")
    for rope_type in _rope_types(config):
        if rope_type in _LENGTH_DEPENDENT_ROPE:
            raise InvalidArgumentError.of(
                "rope_type", rope_type, "one under which K does not depend on how long the prompt is"
            )


def _text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _rope_types(config: Any) -> Iterator[str]:
    """Rope types anywhere in the settings: one set for the model, or one per layer type."""
    for field in ("rope_parameters", "rope_scaling"):
        settings = getattr(config, field, None) or {}
        for part in (settings, *settings.values()):
            if isinstance(part, dict):
                yield str(part.get("rope_type") or part.get("type") or "default")


def _positions(config: Any) -> str:
    """Rope settings as canonical JSON, with a digest of the whole config: windows and norms shape K and V too."""
    settings = {field: value for field in _ROPE_FIELDS if (value := getattr(config, field, None)) is not None}
    if settings.get("rope_scaling") == settings.get("rope_parameters"):
        settings.pop("rope_scaling", None)
    settings["config_blake3"] = settings_digest(config.to_dict())
    return position_settings(settings)


def _name_of(config: Any) -> str:
    name = str(config._name_or_path or "")  # noqa: SLF001  (where transformers keeps it)
    return (model_label(name) if name else "") or str(config.model_type)


def _tokenizer_digest(tokenizer: Any) -> str:
    if tokenizer is None:
        return TOKEN_IDS_ONLY
    if isinstance(tokenizer, str):
        return tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else canonical_json(tokenizer.get_vocab())
    return f"blake3:{blake3(text.encode()).hexdigest()}"


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _digest_tensors(tensors: Iterable[tuple[str, torch.Tensor]], *, seed: bytes = b"") -> str:
    hasher = blake3(seed, max_threads=blake3.AUTO)
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        if tensor.is_meta:
            raise InvalidArgumentError.of(
                "model", f"{name} on the meta device", "weights in memory, or a weights_revision"
            )
        header = f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}".encode()
        raw = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
        hasher.update(struct.pack("<IQ", len(header), raw.nbytes) + header)
        hasher.update(raw.data)
    return f"blake3:{hasher.hexdigest()}"
