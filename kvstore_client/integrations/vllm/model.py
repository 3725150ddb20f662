"""What vLLM's configuration says of the model, its ranks, and how it holds blocks."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from typing import Any

import torch

from kvstore.layout import DTYPE_BYTES
from kvstore.namespace import Shard
from kvstore_client.integrations._blocks import BlockShape, EngineModel
from kvstore_client.integrations._identity import model_label, settings_digest, weights_revision
from kvstore_client.integrations.vllm.matching import GroupShape
from kvstore_client.integrations.vllm.messages import RankKey, RankLayout
from kvstore_client.integrations.vllm.regions import Mover, make_mover, merged, placements, region
from kvstore_client.integrations.vllm.settings import ConnectorSettings


def why_unsupported(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """What of the engine's settings keeps its blocks from being found again; None when they can be."""
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):  # gone since vLLM 0.32
        return "calculate_kv_scales gives every process other scales: its fp8 blocks mean something else elsewhere"
    if vllm_config.parallel_config.prefill_context_parallel_size > 1:
        return "prefill context parallelism is not supported"
    if vllm_config.model_config.is_encoder_decoder:
        return "encoder-decoder models are not supported"
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if group.enable_kv_transfer and _group_shape(group, 1, is_dropping=False) is None:
            return f"KV cache group {index} is {type(group.kv_cache_spec).__name__}: only attention is supported"
    return None


def group_shapes(vllm_config: Any, kv_cache_config: Any) -> tuple[GroupShape | None, ...]:
    """What each KV cache group looks back at; None for those that nothing is loaded for."""
    speculative = vllm_config.speculative_config
    is_dropping = speculative is not None and speculative.use_eagle_block_drop()
    dcp_size = vllm_config.parallel_config.decode_context_parallel_size
    return tuple(
        _group_shape(group, dcp_size, is_dropping=is_dropping) if group.enable_kv_transfer else None
        for group in kv_cache_config.kv_cache_groups
    )


def group_settings(kv_cache_config: Any) -> list[Mapping[str, object]]:
    """Per group what belongs to the identity of its blocks alone."""
    found: list[Mapping[str, object]] = []
    for group in kv_cache_config.kv_cache_groups:
        shape = _group_shape(group, 1, is_dropping=False)
        tokens = group.kv_cache_spec.block_size
        found.append({"attention": f"{shape.kind}:{shape.reach_tokens}" if shape else "none", "block_tokens": tokens})
    return found


def block_sizes(vllm_config: Any, kv_cache_config: Any) -> tuple[int, int]:
    """(tokens that a hit is a multiple of, tokens per hash)."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    align_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return align_tokens, hash_tokens


def read_model(vllm_config: Any, *, settings: ConnectorSettings) -> EngineModel:
    """Raises `KvstoreError` or `OSError` where the weights cannot be told; reads them where they must be."""
    config = vllm_config.model_config
    revision = settings.weights_revision or _weights(config, vllm_config.load_config)
    speculative = vllm_config.speculative_config
    draft: object = "none"
    if speculative is not None:
        own = speculative.draft_model_config
        draft = [speculative.method, None if own is None else _weights(own, vllm_config.load_config)]
    return EngineModel(
        model=model_label(config.model),
        weights_revision=revision,
        settings={
            "engine": "vllm",
            "config_blake3": settings_digest(config.hf_config.to_dict()),
            "dtype": str(config.dtype),
            "quantization": str(config.quantization),
            "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
            "draft": draft,
        },
        tenant_salt=settings.tenant_salt,
    )


def hash_settings(vllm_config: Any, *, hash_tokens: int) -> Mapping[str, object]:
    """How the engine hashes: what the first hash is chained to is random where hashes are not cryptographic."""
    from vllm.v1.core import kv_cache_utils

    root = bytes(kv_cache_utils.NONE_HASH).hex()
    return {"hashes": [vllm_config.cache_config.prefix_caching_hash_algo, root, hash_tokens]}


def rank_layout(vllm_config: Any, kv_cache_config: Any, *, rank: RankKey) -> RankLayout:
    """How this worker, that has its memory, holds blocks."""
    parallel = vllm_config.parallel_config
    replicas = kv_cache_config.kv_tp_replicas
    dcp_size = parallel.decode_context_parallel_size
    shapes: list[BlockShape | None] = []
    layers: list[tuple[str, ...]] = []
    for group in kv_cache_config.kv_cache_groups:
        layers.append(tuple(group.layer_names))
        is_cached = group.enable_kv_transfer and group.layer_names
        shapes.append(_block_shape(group, _layout_name(vllm_config, kv_cache_config, group)) if is_cached else None)
    return RankLayout(
        shapes=tuple(shapes),
        layers=tuple(layers),
        shard=Shard(
            tp_rank=rank[1] // replicas,
            tp_size=parallel.tensor_parallel_size // replicas,
            pp_rank=rank[0],
            pp_size=parallel.pipeline_parallel_size,
            dcp_rank=rank[1] % dcp_size,
            dcp_size=dcp_size,
        ),
    )


def movers(kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> list[Mover | None]:
    """Per group the copier of its blocks, from the memory that the engine has registered."""
    found: list[Mover | None] = []
    for group in kv_cache_config.kv_cache_groups:
        if not group.enable_kv_transfer or not group.layer_names:
            found.append(None)
            continue
        parts = []
        storage = None
        for name in group.layer_names:
            tensor = next(entry for entry in kv_cache_config.kv_cache_tensors if name in entry.layers)
            cache = kv_caches[name]
            storage = cache[0] if isinstance(cache, list | tuple) else cache
            parts += placements(
                offset_bytes=tensor.offset,
                layer_index=tensor.layers.index(name),
                layer_stride_bytes=tensor.layer_stride,
                block_stride_bytes=tensor.block_stride,
                block_count=kv_cache_config.num_blocks,
                page_bytes=_layer_spec(group.kv_cache_spec, name).page_size_bytes,
            )
        assert storage is not None, group.layer_names
        found.append(
            make_mover([region(storage, part, block_count=kv_cache_config.num_blocks) for part in merged(parts)])
        )
    return found


def _group_shape(group: Any, dcp_size: int, *, is_dropping: bool) -> GroupShape | None:
    from vllm.v1.kv_cache_interface import KVCacheSpecKind, get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

    spec = group.kv_cache_spec
    if not spec.prefix_cacheable or spec.prefix_replay_tokens:
        return None
    tokens = spec.block_size * (dcp_size if spec.dcp_sharded else 1)
    is_last_block_dropped = is_dropping and group.is_eagle_group
    match get_kv_cache_spec_kind(spec):
        case KVCacheSpecKind.FULL_ATTENTION | KVCacheSpecKind.MLA_ATTENTION:
            return GroupShape(kind="full", block_tokens=tokens, is_last_block_dropped=is_last_block_dropped)
        case KVCacheSpecKind.SLIDING_WINDOW | KVCacheSpecKind.SLIDING_WINDOW_MLA:
            reach_tokens = get_kv_cache_spec_sliding_window(spec) or getattr(spec, "sliding_window", None)
            if reach_tokens is None:
                return None
            return GroupShape(
                kind="window",
                block_tokens=tokens,
                reach_tokens=reach_tokens,
                is_last_block_dropped=is_last_block_dropped,
            )
        case KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION:
            return GroupShape(kind="chunk", block_tokens=tokens, reach_tokens=spec.attention_chunk_size)
        case _:
            return None


def _layer_spec(spec: Any, layer: str) -> Any:
    """A group may hold one spec for all its layers, or one for each."""
    per_layer = getattr(spec, "kv_cache_specs", None)
    return spec if per_layer is None else per_layer[layer]


def _block_shape(group: Any, layout: str) -> BlockShape:
    specs = [_layer_spec(group.kv_cache_spec, layer) for layer in group.layer_names]
    first = specs[0]
    dtype = str(getattr(first, "dtype", None)).removeprefix("torch.")
    page_bytes = [spec.page_size_bytes for spec in specs]
    if len({repr(spec) for spec in specs}) == 1 and dtype in DTYPE_BYTES:
        plain = BlockShape(
            layout=layout,
            dtype=dtype,
            num_layers=len(specs),
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_size,
            v_head_dim=first.head_size_v,
            tokens_per_block=first.block_size,
        )
        if plain.payload_bytes == sum(page_bytes):
            return plain
    # Scales, padding, other heads in other layers: bytes that only this engine understands.
    is_even = len(set(page_bytes)) == 1
    return BlockShape.of_bytes(
        layout=layout,
        num_layers=len(specs) if is_even else 1,
        tokens_per_block=first.block_size,
        layer_bytes=page_bytes[0] if is_even else sum(page_bytes),
    )


def _layout_name(vllm_config: Any, kv_cache_config: Any, group: Any) -> str:
    """All that the order of bytes inside a page depends on: vLLM's version, its layout, kernels, the kind of CPU."""
    from vllm import __version__
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    backends = get_current_attn_backends(vllm_config, list(group.layer_names))
    parts = [
        "vllm",
        ".".join(__version__.split(".")[:2]),
        str(kv_cache_config.kv_cache_layout),
        *sorted(backend.get_name() for backend in backends),
    ]
    if vllm_config.device_config.device_type == "cpu":
        parts += [platform.machine(), torch.backends.cpu.get_cpu_capability()]
        parts += ["amx"] if torch.cpu._is_amx_tile_supported() else []  # noqa: SLF001  (torch has no public name)
    return "opaque:" + re.sub(r"[^A-Za-z0-9._+-]", "_", "-".join(parts))


def _weights(config: Any, load_config: Any) -> str:
    if load_config.load_format == "dummy":
        return f"dummy:{config.seed}"
    return weights_revision(config.model, revision=config.revision)
