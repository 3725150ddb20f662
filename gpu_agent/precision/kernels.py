"""Gather and quantise, dequantise and scatter: one kernel per plane and batch, the same bits as `reference`.

Numbers are taken apart as integers where hardware differs: bfloat16 and e4m3 need no GPU that has them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvstore.layout import BlockLayout, LayoutOrder, Plane
from kvstore.precision import CODE_MAX, EncodedPlane

_TILE_ELEMENTS = 4096
"""Elements that one program has in its registers: 32 for each of 128 threads."""
_WARP_ELEMENTS = 1024
_WORDS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.int16}
"""How elements are handed to a kernel."""
_FP8_BITS, _INT4_BITS = tl.constexpr(0), tl.constexpr(4)
_BITS = {"fp8": 0, "int4": 4, "int8": 8}

_ROUNDING = tl.constexpr(12582912.0)
"""1.5 · 2²³: what is added to it, and has it taken away again, is a whole number then, ties to even."""
_SCALE_MIN = tl.constexpr(2.0**-126)
_E4M3_MAX = tl.constexpr(448.0)
_E4M3_MAX_INVERSE = tl.constexpr(1.0 / 448.0)
_E4M3_STEP = tl.constexpr(2.0**-9)
_E4M3_STEP_INVERSE = tl.constexpr(512.0)
_E4M3_NORMAL = tl.constexpr(121 << 23)
"""Bits of 2⁻⁶, the smallest normal number of e4m3, as float32."""
_E4M3_BIAS = tl.constexpr((127 - 7) << 3)
"""Between exponents of float32 and of e4m3, with three bits of fraction behind them."""
_NOT_FINITE = tl.constexpr(0x7F800000)


class PlaneKernels:
    """Encodes and decodes one plane of blocks, on the current stream."""

    def __init__(self, plane: Plane, encoded: EncodedPlane, layout: BlockLayout) -> None:
        element_bytes = plane.strides_bytes[3]
        heads, tokens, dim = layout.num_kv_heads, layout.tokens_per_block, plane.shape[3]
        is_hnd = layout.order is LayoutOrder.HND
        self._word = _WORDS[layout.dtype]
        self._layer_count, self._heads = plane.shape[0], heads
        self._plane_at = plane.offset_bytes // element_bytes
        self._encoded_at = encoded.offset_bytes
        group_tokens, group_dim = encoded.group_tokens, encoded.group_dim
        # Groups are not cut. Along the head's dim lies what a thread reads at once, so a tile has all of that it can.
        tile_group_dim, tile_group_tokens = _power_of_two(group_dim), _power_of_two(group_tokens)
        least = tile_group_dim * tile_group_tokens
        tile_dim_groups = min(_power_of_two(dim // group_dim), max(_TILE_ELEMENTS // least, 2))
        tile_token_groups = min(
            _power_of_two(tokens // group_tokens), max(_TILE_ELEMENTS // (least * tile_dim_groups), 1)
        )
        dim_tiles = -(-dim // (group_dim * tile_dim_groups))
        token_tiles = -(-tokens // (group_tokens * tile_token_groups))
        self._tile_count = dim_tiles * token_tiles
        tile_elements = least * tile_dim_groups * tile_token_groups
        self._constants: Mapping[str, object] = {
            "BITS": _BITS[encoded.precision],
            "CODE_MAX": float(CODE_MAX.get(encoded.precision, 0)),
            "CODE_MAX_INVERSE": 1.0 / CODE_MAX.get(encoded.precision, 1),
            "LARGEST": torch.finfo(getattr(torch, layout.dtype)).max,
            "HEADS": heads,
            "TOKENS": tokens,
            "DIM": dim,
            "GROUP_TOKENS": group_tokens,
            "GROUP_DIM": group_dim,
            "LAYER_STRIDE": plane.strides_bytes[0] // element_bytes,
            "HEAD_STRIDE": tokens * dim if is_hnd else dim,
            "TOKEN_STRIDE": dim if is_hnd else heads * dim,
            "LAYER_BYTES": encoded.layer_bytes,
            "MINIMUMS_AT": encoded.minimums_offset_bytes,
            "SCALES_AT": encoded.scales_offset_bytes,
            "DIM_TILES": dim_tiles,
            "TG": tile_token_groups,
            "GT": tile_group_tokens,
            "DG": tile_dim_groups,
            "GD": tile_group_dim,
            "num_warps": min(max(tile_elements // _WARP_ELEMENTS, 4), 32),
            # Else a product and a sum are rounded once instead of twice, and differ from the reference.
            "enable_fp_fusion": False,
        }

    def encode(self, pool: Tensor, rows: Tensor, *, out: Tensor, kept: Tensor) -> None:
        """Block `rows[i]` of the pool into row i of `out`; `kept[i]` becomes 0 where the bound does not hold.

        What is between the parts of `out` is left alone.
        """
        words = pool.view(self._word)
        grid = (len(rows), self._layer_count * self._heads, self._tile_count)
        _encode[grid](
            words, rows, out, kept, words.stride(0), out.stride(0), self._plane_at, self._encoded_at, **self._constants
        )

    def decode(self, encoded: Tensor, rows: Tensor, *, pool: Tensor, layers: range) -> None:
        """Row i of `encoded` into block `rows[i]` of the pool, of some layers that follow each other."""
        words = pool.view(self._word)
        grid = (len(rows), len(layers) * self._heads, self._tile_count)
        _decode[grid](
            encoded,
            rows,
            words,
            encoded.stride(0),
            words.stride(0),
            self._plane_at,
            self._encoded_at,
            layers.start,
            **self._constants,
        )


def _power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << math.ceil(math.log2(number))


@triton.jit  # type: ignore[untyped-decorator]
def _encode(  # type: ignore[no-untyped-def]  # triton evaluates annotations and wants its own
    pool,
    rows,
    out,
    kept,
    pool_pitch,
    out_pitch,
    plane_at,
    encoded_at,
    BITS: tl.constexpr,  # noqa: N803  # constants of a kernel
    CODE_MAX: tl.constexpr,  # noqa: N803
    CODE_MAX_INVERSE: tl.constexpr,  # noqa: N803
    LARGEST: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    GROUP_TOKENS: tl.constexpr,  # noqa: N803
    GROUP_DIM: tl.constexpr,  # noqa: N803
    LAYER_STRIDE: tl.constexpr,  # noqa: N803
    HEAD_STRIDE: tl.constexpr,  # noqa: N803
    TOKEN_STRIDE: tl.constexpr,  # noqa: N803
    LAYER_BYTES: tl.constexpr,  # noqa: N803
    MINIMUMS_AT: tl.constexpr,  # noqa: N803
    SCALES_AT: tl.constexpr,  # noqa: N803
    DIM_TILES: tl.constexpr,  # noqa: N803
    TG: tl.constexpr,  # noqa: N803
    GT: tl.constexpr,  # noqa: N803
    DG: tl.constexpr,  # noqa: N803
    GD: tl.constexpr,  # noqa: N803
):
    """A tile of one head of one layer of one block, [token group, token in it, dim group, element in it]."""
    block = tl.program_id(0).to(tl.int64)
    layer, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    token_group, token, dim_group, dim = _places(DIM_TILES, GROUP_TOKENS, GROUP_DIM, TG, GT, DG, GD)
    is_group = (token_group * GROUP_TOKENS < TOKENS) & (dim_group * GROUP_DIM < DIM)
    is_inside = (token < TOKENS) & (dim < DIM)
    if GT != GROUP_TOKENS or GD != GROUP_DIM:
        is_inside &= (token - token_group * GROUP_TOKENS < GROUP_TOKENS) & (dim - dim_group * GROUP_DIM < GROUP_DIM)
    source = pool + tl.load(rows + block) * pool_pitch + plane_at + layer * LAYER_STRIDE + head * HEAD_STRIDE
    numbers = _as_float(tl.load(source + token * TOKEN_STRIDE + dim, mask=is_inside, other=0))
    is_wrong = _is_not_finite(numbers)
    part = out + block * out_pitch + encoded_at + layer.to(tl.int64) * LAYER_BYTES
    if BITS == _FP8_BITS:
        largest = tl.max(tl.max(tl.abs(numbers), axis=3, keep_dims=True), axis=1, keep_dims=True)
        bits = (largest * _E4M3_MAX_INVERSE).to(tl.int32, bitcast=True)
        scales = tl.maximum(((bits + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True), _SCALE_MIN)
        codes = _as_e4m3(numbers * tl.div_rn(1.0, scales))
    else:
        lowest = tl.where(is_inside, numbers, float("inf"))
        lowest = tl.min(tl.min(lowest, axis=3, keep_dims=True), axis=1, keep_dims=True)
        highest = tl.where(is_inside, numbers, float("-inf"))
        highest = tl.max(tl.max(highest, axis=3, keep_dims=True), axis=1, keep_dims=True)
        lowest = tl.where((lowest == 0.0) | ~is_group, 0.0, lowest)
        spans = tl.where(is_group, highest, 0.0) - lowest
        is_wrong = is_wrong | _is_not_finite(spans)
        bits = (spans * CODE_MAX_INVERSE).to(tl.int32, bitcast=True)
        scales = tl.maximum(((bits + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True), _SCALE_MIN)
        steps = tl.where(spans > 0.0, tl.div_rn(1.0, scales), 0.0)
        scales = tl.where(spans > 0.0, scales, 0.0)
        rounded = ((numbers - lowest) * steps + _ROUNDING) - _ROUNDING
        codes = tl.minimum(tl.maximum(rounded, 0.0), CODE_MAX).to(tl.int32)
    wrong_count = tl.sum(tl.ravel((is_wrong & is_inside).to(tl.int32)))
    tl.store(kept + block, 0, mask=wrong_count > 0)
    if BITS == _INT4_BITS:
        pairs = tl.reshape(codes, (TG * GT, DG * GD // 2, 2))
        low, high = tl.split(pairs)
        token, pair = _pair_places(DIM_TILES, TG * GT, DG * GD // 2)
        target = part + (head * HEAD_STRIDE + token * TOKEN_STRIDE) // 2 + pair
        tl.store(target, (low | (high << 4)).to(tl.uint8), mask=(token < TOKENS) & (pair < DIM // 2))
    else:
        tl.store(part + head * HEAD_STRIDE + token * TOKEN_STRIDE + dim, codes.to(tl.uint8), mask=is_inside)
    group = (head * (TOKENS // GROUP_TOKENS) + token_group) * (DIM // GROUP_DIM) + dim_group
    half_words = tl.pointer_type(tl.int16)
    scale_bits = (scales.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    tl.store((part + SCALES_AT).to(half_words) + group, scale_bits, mask=is_group)
    if BITS != _FP8_BITS:
        words = pool.dtype.element_ty
        minimums = (part + MINIMUMS_AT).to(tl.pointer_type(words))
        tl.store(minimums + group, _as_word(lowest, words), mask=is_group)


@triton.jit  # type: ignore[untyped-decorator]
def _decode(  # type: ignore[no-untyped-def]
    encoded,
    rows,
    pool,
    encoded_pitch,
    pool_pitch,
    plane_at,
    encoded_at,
    first_layer,
    BITS: tl.constexpr,  # noqa: N803
    CODE_MAX: tl.constexpr,  # noqa: N803
    CODE_MAX_INVERSE: tl.constexpr,  # noqa: N803
    LARGEST: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    GROUP_TOKENS: tl.constexpr,  # noqa: N803
    GROUP_DIM: tl.constexpr,  # noqa: N803
    LAYER_STRIDE: tl.constexpr,  # noqa: N803
    HEAD_STRIDE: tl.constexpr,  # noqa: N803
    TOKEN_STRIDE: tl.constexpr,  # noqa: N803
    LAYER_BYTES: tl.constexpr,  # noqa: N803
    MINIMUMS_AT: tl.constexpr,  # noqa: N803
    SCALES_AT: tl.constexpr,  # noqa: N803
    DIM_TILES: tl.constexpr,  # noqa: N803
    TG: tl.constexpr,  # noqa: N803
    GT: tl.constexpr,  # noqa: N803
    DG: tl.constexpr,  # noqa: N803
    GD: tl.constexpr,  # noqa: N803
):
    """The opposite of `_encode`, tile by tile."""
    block = tl.program_id(0).to(tl.int64)
    layer, head = first_layer + tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    token_group, token, dim_group, dim = _places(DIM_TILES, GROUP_TOKENS, GROUP_DIM, TG, GT, DG, GD)
    is_group = (token_group * GROUP_TOKENS < TOKENS) & (dim_group * GROUP_DIM < DIM)
    is_inside = (token < TOKENS) & (dim < DIM)
    if GT != GROUP_TOKENS or GD != GROUP_DIM:
        is_inside &= (token - token_group * GROUP_TOKENS < GROUP_TOKENS) & (dim - dim_group * GROUP_DIM < GROUP_DIM)
    part = encoded + block * encoded_pitch + encoded_at + layer.to(tl.int64) * LAYER_BYTES
    group = (head * (TOKENS // GROUP_TOKENS) + token_group) * (DIM // GROUP_DIM) + dim_group
    scale_bits = tl.load((part + SCALES_AT).to(tl.pointer_type(tl.int16)) + group, mask=is_group, other=0)
    scales = (scale_bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    if BITS == _INT4_BITS:
        pair_token, pair = _pair_places(DIM_TILES, TG * GT, DG * GD // 2)
        source = part + (head * HEAD_STRIDE + pair_token * TOKEN_STRIDE) // 2 + pair
        pairs = tl.load(source, mask=(pair_token < TOKENS) & (pair < DIM // 2), other=0).to(tl.int32)
        codes = tl.reshape(tl.join(pairs & 15, pairs >> 4), (TG, GT, DG, GD))
    else:
        source = part + head * HEAD_STRIDE + token * TOKEN_STRIDE + dim
        codes = tl.load(source, mask=is_inside, other=0).to(tl.int32)
    words = pool.dtype.element_ty
    if BITS == _FP8_BITS:
        numbers = _from_e4m3(codes) * scales
    else:
        minimums = (part + MINIMUMS_AT).to(tl.pointer_type(words))
        numbers = codes.to(tl.float32) * scales + _as_float(tl.load(minimums + group, mask=is_group, other=0))
    numbers = tl.minimum(tl.maximum(numbers, -LARGEST), LARGEST)
    target = pool + tl.load(rows + block) * pool_pitch + plane_at + layer * LAYER_STRIDE + head * HEAD_STRIDE
    tl.store(target + token * TOKEN_STRIDE + dim, _as_word(numbers, words), mask=is_inside)


@triton.jit  # type: ignore[untyped-decorator]
def _places(  # type: ignore[no-untyped-def]
    DIM_TILES: tl.constexpr,  # noqa: N803
    GROUP_TOKENS: tl.constexpr,  # noqa: N803
    GROUP_DIM: tl.constexpr,  # noqa: N803
    TG: tl.constexpr,  # noqa: N803
    GT: tl.constexpr,  # noqa: N803
    DG: tl.constexpr,  # noqa: N803
    GD: tl.constexpr,  # noqa: N803
):
    """Which groups, tokens and elements of the head this tile has; each along axes of its own."""
    token_group = (tl.program_id(2) // DIM_TILES) * TG + tl.arange(0, TG)[:, None, None, None]
    dim_group = (tl.program_id(2) % DIM_TILES) * DG + tl.arange(0, DG)[None, None, :, None]
    token = token_group * GROUP_TOKENS + tl.arange(0, GT)[None, :, None, None]
    dim = dim_group * GROUP_DIM + tl.arange(0, GD)[None, None, None, :]
    return token_group, token, dim_group, dim


@triton.jit  # type: ignore[untyped-decorator]
def _pair_places(  # type: ignore[no-untyped-def]
    DIM_TILES: tl.constexpr,  # noqa: N803
    TILE_TOKENS: tl.constexpr,  # noqa: N803
    TILE_PAIRS: tl.constexpr,  # noqa: N803
):
    """The same where two elements share a byte, whose groups are powers of two, so that tiles have no gaps."""
    token = (tl.program_id(2) // DIM_TILES) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)[:, None]
    pair = (tl.program_id(2) % DIM_TILES) * TILE_PAIRS + tl.arange(0, TILE_PAIRS)[None, :]
    return token, pair


@triton.jit
def _as_float(words):  # type: ignore[no-untyped-def]
    if words.dtype == tl.int16:
        return (words.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return words.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _as_word(numbers, word: tl.constexpr):  # type: ignore[no-untyped-def]
    if word == tl.int16:
        bits = numbers.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    else:
        return numbers.to(word)


@triton.jit
def _is_not_finite(numbers):  # type: ignore[no-untyped-def]
    return (numbers.to(tl.int32, bitcast=True) & _NOT_FINITE) == _NOT_FINITE


@triton.jit
def _as_e4m3(numbers):  # type: ignore[no-untyped-def]
    bits = tl.minimum(tl.maximum(numbers, -_E4M3_MAX), _E4M3_MAX).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - _E4M3_BIAS
    step_count = (size.to(tl.float32, bitcast=True) * _E4M3_STEP_INVERSE + _ROUNDING) - _ROUNDING
    return tl.where(size < _E4M3_NORMAL, step_count.to(tl.int32), normal) | ((bits >> 24) & 0x80)


@triton.jit
def _from_e4m3(codes):  # type: ignore[no-untyped-def]
    size = codes & 0x7F
    normal = (size + _E4M3_BIAS) << 20
    subnormal = (size.to(tl.float32) * _E4M3_STEP).to(tl.int32, bitcast=True)
    bits = tl.where(size < 8, subnormal, normal) | ((codes & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True)
