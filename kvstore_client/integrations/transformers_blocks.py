"""Between a transformers cache and block payloads: [1, heads, tokens, dim] per layer ↔ [K plane][V plane] per block.

The bytes of all blocks lie in one buffer, block after block; a plane of that buffer is a strided view with
axes (block, layer, head, token, dim), so a whole layer moves in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvstore.errors import InvalidArgumentError
from kvstore.layout import BlockLayout, LayoutOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What one token's K and V look like in every layer of a model, and on which device each layer's are."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    devices: tuple[torch.device, ...]

    @property
    def dtype_name(self) -> str:
        """The dtype's name in `kvstore.layout`."""
        return str(self.dtype).removeprefix("torch.")


def shape_of(cache: Any) -> CacheShape:
    """The shape that all layers of a filled cache share; raises `InvalidArgumentError` naming those that differ.

    Every layer must be a plain `DynamicLayer` that holds K and V of each token since the first.
    """
    odd = [
        f"layer {index} ({type(layer).__name__})" for index, layer in enumerate(cache.layers) if not _holds_all(layer)
    ]
    if odd or not cache.layers:
        raise InvalidArgumentError.of(
            "cache",
            ", ".join(odd) or "no layers",
            "layers that keep K and V of all tokens, as in `DynamicCache()` without a config",
        )
    first = _layer_shape(cache.layers[0])
    for index, layer in enumerate(cache.layers):
        if _layer_shape(layer) != first:
            raise InvalidArgumentError.of(
                f"cache.layers[{index}]",
                _layer_shape(layer),
                f"as in layer 0: {first}",
            )
    _, heads, k_dim, v_dim, dtype, v_dtype = first
    if dtype != v_dtype:
        raise InvalidArgumentError.of("cache", f"K in {dtype}, V in {v_dtype}", "one dtype for both planes")
    return CacheShape(
        num_layers=len(cache.layers),
        num_kv_heads=heads,
        head_dim=k_dim,
        v_head_dim=v_dim,
        dtype=dtype,
        devices=tuple(layer.keys.device for layer in cache.layers),
    )


def gather_blocks(cache: Any, layout: BlockLayout, *, first_block: int, block_count: int) -> torch.Tensor:
    """Blocks copied out of a cache: a CPU tensor of bytes, [block_count, payload_bytes], sharing nothing with it."""
    shape = shape_of(cache)
    check_shape(shape, layout)
    tokens = layout.tokens_per_block
    start, stop = first_block * tokens, (first_block + block_count) * tokens
    if cache.get_seq_length() < stop:
        raise InvalidArgumentError.of(
            "cache", f"{cache.get_seq_length()} tokens", f"at least the {stop} tokens asked for"
        )
    # Sharded over devices: gather straight into host memory. On one device: there, then one transfer.
    target = shape.devices[0] if len(set(shape.devices)) == 1 else torch.device("cpu")
    buffer = torch.empty((block_count, layout.payload_bytes), dtype=torch.uint8, device=target)
    planes = plane_views(buffer, layout, shape.dtype)
    with torch.no_grad():
        for index, layer in enumerate(cache.layers):
            for plane, source in zip(planes, (layer.keys, layer.values), strict=True):
                by_block = source[0, :, start:stop].unflatten(1, (block_count, tokens)).transpose(0, 1)
                plane[:, index].copy_(by_block)
    return buffer.cpu()


def scatter_blocks(buffer: torch.Tensor, layout: BlockLayout, shape: CacheShape) -> DynamicCache:
    """A fresh cache holding the blocks of a [block_count, payload_bytes] buffer as its first tokens."""
    check_shape(shape, layout)
    cache = DynamicCache()
    block_count = buffer.shape[0]
    if block_count == 0:
        return cache
    staged = buffer.to(shape.devices[0]) if len(set(shape.devices)) == 1 else buffer
    planes = plane_views(staged, layout, shape.dtype)
    for index, device in enumerate(shape.devices):
        k, v = (_merge_blocks(plane[:, index]).to(device) for plane in planes)
        cache.update(k, v, index)
    return cache


def plane_views(buffer: torch.Tensor, layout: BlockLayout, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Views of a [block_count, payload_bytes] buffer, one per plane: [block, layer, head, token, dim]."""
    assert layout.order is LayoutOrder.HND, layout.order
    elements = buffer.view(dtype)
    size = dtype.itemsize
    spans = ((plane.offset_bytes // size, plane.size_bytes // size, plane.shape) for plane in layout.planes)
    return tuple(elements[:, start : start + count].view(-1, *shape) for start, count, shape in spans)


def _merge_blocks(plane: torch.Tensor) -> torch.Tensor:
    """[block, head, token, dim] -> [1, head, all tokens, dim]."""
    return plane.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def _holds_all(layer: Any) -> bool:
    # Subclasses keep a window, quantised planes or extra state; a window would pass for the first tokens.
    return type(layer) is DynamicLayer and layer.keys is not None and layer.keys.dim() == 4 and layer.keys.shape[0] == 1


def _layer_shape(layer: Any) -> tuple[int, int, int, int, torch.dtype, torch.dtype]:
    keys, values = layer.keys, layer.values
    return keys.shape[2], keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, values.dtype


def check_shape(shape: CacheShape, layout: BlockLayout) -> None:
    """Raises `InvalidArgumentError` when a cache's blocks are not those of the layout."""
    found = (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.v_head_dim, shape.dtype_name)
    wanted = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.v_head_dim, layout.dtype)
    if found != wanted:
        raise InvalidArgumentError.of(
            "(layers, heads, K dim, V dim, dtype) of the cache", found, f"the namespace's {wanted}"
        )
