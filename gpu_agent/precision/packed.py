"""Planes as the bytes that are stored, both ways, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_agent.precision.reference import Encoded
from kvstore.layout import BlockLayout, LayoutOrder, Plane
from kvstore.precision import EncodedPlane


def plane_view(rows: Tensor, plane: Plane, layout: BlockLayout) -> Tensor:
    """A plane of blocks `[row, block_bytes]` as `[row, layer, head, token, dim]` of its dtype, sharing their bytes."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    flat = rows[:, plane.offset_bytes : plane.offset_bytes + plane.size_bytes].view(dtype)
    return _in_hnd(flat.view(len(rows), *plane.shape), layout)


def pack(encoded: Encoded, plane: EncodedPlane, layout: BlockLayout, out: Tensor) -> None:
    """Writes planes `[row, layer, head, token, dim]` into their place in encoded blocks `[row, stored_bytes]`."""
    assert encoded.scales is not None, encoded.precision
    parts = _parts(out, plane)
    codes = _in_hnd(encoded.codes, layout).flatten(2).view(torch.uint8)
    parts.zero_()
    parts[:, :, : codes.shape[2]] = codes
    if encoded.minimums is not None:
        minimums = encoded.minimums.flatten(2).contiguous().view(torch.uint8)
        parts[:, :, plane.minimums_offset_bytes : plane.scales_offset_bytes] = minimums
    scales = encoded.scales.flatten(2).contiguous().view(torch.uint8)
    parts[:, :, plane.scales_offset_bytes : plane.scales_offset_bytes + scales.shape[2]] = scales


def unpack(rows: Tensor, plane: EncodedPlane, layout: BlockLayout, *, layers: range) -> Encoded:
    """The opposite of `pack`, of some layers that follow each other."""
    parts = _parts(rows, plane)[:, layers.start : layers.stop]
    heads, tokens, dim = _shape(plane, layout)
    is_packed = plane.precision == "int4"
    codes = parts[:, :, : heads * tokens * dim // (2 if is_packed else 1)]
    if plane.precision == "fp8":
        codes = codes.view(torch.float8_e4m3fn)
    middle = (heads, tokens) if layout.order is LayoutOrder.HND else (tokens, heads)
    codes = _in_hnd(codes.view(*parts.shape[:2], *middle, dim // 2 if is_packed else dim), layout)
    groups = (heads, tokens // plane.group_tokens, dim // plane.group_dim)
    scales_end = plane.scales_offset_bytes + groups[0] * groups[1] * groups[2] * torch.bfloat16.itemsize
    scales = parts[:, :, plane.scales_offset_bytes : scales_end].contiguous().view(torch.bfloat16)
    minimums = None
    if plane.precision != "fp8":
        bits = parts[:, :, plane.minimums_offset_bytes : plane.scales_offset_bytes].contiguous()
        minimums = bits.view(getattr(torch, layout.dtype)).view(*parts.shape[:2], *groups)
    is_kept = torch.ones(codes.shape[:-2], dtype=torch.bool, device=rows.device)
    return Encoded(plane.precision, plane.kind, codes, scales.view(*parts.shape[:2], *groups), minimums, is_kept)


def _parts(rows: Tensor, plane: EncodedPlane) -> Tensor:
    """`[row, layer, byte]`, sharing the bytes."""
    end_bytes = plane.offset_bytes + plane.layer_count * plane.layer_bytes
    return rows[:, plane.offset_bytes : end_bytes].view(len(rows), plane.layer_count, plane.layer_bytes)


def _shape(plane: EncodedPlane, layout: BlockLayout) -> tuple[int, int, int]:
    dim = layout.head_dim if plane.kind == "K" else layout.v_head_dim
    return layout.num_kv_heads, layout.tokens_per_block, dim


def _in_hnd(planes: Tensor, layout: BlockLayout) -> Tensor:
    """Swaps heads and tokens where the layout has tokens first, in either direction."""
    return planes.transpose(2, 3) if layout.order is LayoutOrder.NHD else planes
