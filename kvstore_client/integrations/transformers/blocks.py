"""Between a transformers cache and blocks: [rows, heads, columns, dim] per layer ↔ [K plane][V plane] per block.

The bytes of all blocks lie in one buffer, block after block; a plane of that buffer is a strided view with
axes (block, layer, head, token, dim), so a whole layer of a row moves in one copy. A row's tokens are neighbours,
and what precedes them is padding.
"""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRow:
    """Where a prompt is in a cache: in row `index` of `row_count`, its first token in column `first_column`."""

    index: int = 0
    row_count: int = 1
    first_column: int = 0


ONLY_ROW = CacheRow()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRow:
    """The first `token_count` tokens of a row, and in which blocks of a buffer they are, in order."""

    blocks: Sequence[int]
    token_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """`token_count` tokens of one row of a cache, from a column on."""

    cache: DynamicCache
    row: int
    first_column: int
    token_count: int


def shape_of(cache: Any, *, row_count: int = 1) -> CacheShape:
    """The shape that all layers of a filled cache share; raises `InvalidArgumentError` naming those that differ.

    Every layer must be a plain `DynamicLayer` that holds K and V of each token since the first, of `row_count` rows.
    """
    odd = [
        f"layer {index} ({_describe(layer)})"
        for index, layer in enumerate(cache.layers)
        if not _holds_all(layer, row_count=row_count)
    ]
    if odd or not cache.layers:
        raise InvalidArgumentError.of(
            "cache",
            ", ".join(odd) or "no layers",
            f"layers that keep K and V of all tokens, as in `DynamicCache()` without a config, of {row_count} rows",
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


def gather_blocks(
    cache: Any, layout: BlockLayout, *, first_block: int, block_count: int, row: CacheRow = ONLY_ROW
) -> torch.Tensor:
    """Blocks copied out of a cache: a CPU tensor of bytes, [block_count, payload_bytes], sharing nothing with it."""
    shape = shape_of(cache, row_count=row.row_count)
    check_shape(shape, layout)
    tokens = layout.tokens_per_block
    start, stop = first_block * tokens, (first_block + block_count) * tokens
    held_count = cache.get_seq_length() - row.first_column
    if held_count < stop:
        raise InvalidArgumentError.of("cache", f"{held_count} tokens", f"at least the {stop} tokens asked for")
    columns = slice(row.first_column + start, row.first_column + stop)
    # Sharded over devices: gather straight into host memory. On one device: there, then one transfer.
    target = shape.devices[0] if len(set(shape.devices)) == 1 else torch.device("cpu")
    buffer = torch.empty((block_count, layout.payload_bytes), dtype=torch.uint8, device=target)
    planes = plane_views(buffer, layout, shape.dtype)
    with torch.no_grad():
        for index, layer in enumerate(cache.layers):
            for plane, source in zip(planes, (layer.keys, layer.values), strict=True):
                by_block = source[row.index, :, columns].unflatten(1, (block_count, tokens)).transpose(0, 1)
                plane[:, index].copy_(by_block)
    return buffer.cpu()


def scatter_rows(
    buffer: torch.Tensor, layout: BlockLayout, shape: CacheShape, *, rows: Sequence[StoredRow], column_count: int
) -> DynamicCache:
    """A fresh cache of `column_count` columns whose rows end with the tokens that a buffer's blocks hold of them."""
    check_shape(shape, layout)
    cache = DynamicCache()
    if column_count == 0:
        return cache
    staged = buffer.to(shape.devices[0]) if len(set(shape.devices)) == 1 else buffer
    planes = plane_views(staged, layout, shape.dtype)
    for index, device in enumerate(shape.devices):
        k, v = (_layer_rows(plane[:, index], rows=rows, column_count=column_count) for plane in planes)
        cache.update(k.to(device), v.to(device), index)
    return cache


def pack_rows(segments: Sequence[Segment], *, column_count: int) -> DynamicCache:
    """A cache whose row r ends with the tokens of `segments[r]`; other caches that they came from are emptied.

    At least one of the segments has a token.
    """
    sources = list({id(segment.cache): segment.cache for segment in segments if segment.token_count}.values())
    if len(sources) == 1 and _is_packed(segments, column_count=column_count):
        return sources[0]
    cache = DynamicCache()
    for index in range(len(sources[0].layers)):
        planes = []
        for plane in ("keys", "values"):
            first = getattr(sources[0].layers[index], plane)
            # Zeros: the padding is masked, yet multiplied with, and a NaN would come through.
            packed = first.new_zeros((len(segments), first.shape[1], column_count, first.shape[3]))
            for target, segment in zip(packed, segments, strict=True):
                if segment.token_count:
                    stop = segment.first_column + segment.token_count
                    source = getattr(segment.cache.layers[index], plane)[segment.row]
                    target[:, column_count - segment.token_count :].copy_(source[:, segment.first_column : stop])
            planes.append(packed)
        # Layer by layer, so that both never are in memory whole.
        for source in sources:
            layer: Any = source.layers[index]
            layer.keys, layer.values = layer.keys.new_empty(0), layer.values.new_empty(0)
        cache.update(*planes, index)
    return cache


def plane_views(buffer: torch.Tensor, layout: BlockLayout, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Views of a [block_count, payload_bytes] buffer, one per plane: [block, layer, head, token, dim]."""
    assert layout.order is LayoutOrder.HND, layout.order
    elements = buffer.view(dtype)
    size = dtype.itemsize
    spans = ((plane.offset_bytes // size, plane.size_bytes // size, plane.shape) for plane in layout.planes)
    return tuple(elements[:, start : start + count].view(-1, *shape) for start, count, shape in spans)


def _is_packed(segments: Sequence[Segment], *, column_count: int) -> bool:
    """Whether the segments, all of one cache, already are what they would be packed to."""
    return segments[0].cache.get_seq_length() == column_count and all(
        segment.row == index and segment.first_column + segment.token_count == column_count
        for index, segment in enumerate(segments)
    )


def _layer_rows(plane: torch.Tensor, *, rows: Sequence[StoredRow], column_count: int) -> torch.Tensor:
    """[block, head, token, dim] -> [row, head, column, dim], each row's tokens in its last columns."""
    shape = (len(rows), plane.shape[1], column_count, plane.shape[3])
    is_padded = any(row.token_count < column_count for row in rows)
    # Zeros: padding is masked, yet multiplied with, and a NaN would come through.
    packed = plane.new_zeros(shape) if is_padded else plane.new_empty(shape)
    for target, row in zip(packed, rows, strict=True):
        if row.token_count:
            tokens = _select(plane, row.blocks).transpose(0, 1).flatten(1, 2)
            target[:, column_count - row.token_count :].copy_(tokens[:, : row.token_count])
    return packed


def _select(plane: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    first, count = blocks[0], len(blocks)
    if list(blocks) == list(range(first, first + count)):
        return plane[first : first + count]
    return plane[torch.tensor(blocks, device=plane.device)]


def _holds_all(layer: Any, *, row_count: int) -> bool:
    # Subclasses keep a window, quantised planes or extra state; a window would pass for the first tokens.
    is_plain = type(layer) is DynamicLayer and layer.keys is not None and layer.keys.dim() == 4
    return is_plain and layer.keys.shape[0] == row_count


def _describe(layer: Any) -> str:
    keys = getattr(layer, "keys", None)
    return type(layer).__name__ if keys is None else f"{type(layer).__name__} {tuple(keys.shape)}"


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
