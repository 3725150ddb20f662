"""Planes in fewer bits, in plain torch: what the kernels must do, on every device, bit for bit.

A plane here is `[..., heads, tokens, dim]`; NHD planes come as transposed views. What each precision is, and why, is
in docs/precision.md; how it lies in a block, in docs/formats/precision.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvstore.precision import CODE_MAX, Kind, group_shape

_SCALE_MIN = 2.0**-126
"""Smallest normal number of bfloat16: no scale is subnormal, so none is flushed to zero, and no reciprocal is inf."""
_E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Encoded:
    """A plane as codes with what they are multiplied by and added to.

    `codes` has the plane's shape: uint8 numbers, two to a byte along `dim` for int4, e4m3 for fp8, and the elements
    themselves for `exact`. `scales` and `minimums` have the plane's shape with each group's elements as one.
    """

    precision: str
    kind: Kind
    codes: Tensor
    scales: Tensor | None
    """bfloat16: rounded up, never to nearest, so that the largest element stays within reach of the codes."""
    minimums: Tensor | None
    """In the plane's dtype, where a minimum of its elements is exact; None for fp8."""
    is_kept: Tensor
    """Per plane of one head, whether the stated bound holds; where it is False the codes mean nothing."""


def encode(plane: Tensor, precision: str, *, kind: Kind) -> Encoded:
    """Codes of a plane of float32, float16 or bfloat16; the whole of `tokens` is one block.

    Nothing waits for the device. What holds an infinity, a NaN, or elements too far apart for float32 is not kept.
    """
    if precision == "exact":
        is_kept = torch.ones(plane.shape[:-2], dtype=torch.bool, device=plane.device)
        return Encoded(precision, kind, plane, None, None, is_kept)
    grouped = _grouped(plane, group_shape(precision, kind, tokens=plane.shape[-2], dim=plane.shape[-1]))
    if precision == "fp8":
        codes, scales, is_kept = _encode_fp8(grouped.float())
        return Encoded(precision, kind, codes.reshape(plane.shape), scales, None, is_kept)
    codes, scales, minimums, is_kept = _encode_integers(grouped.float(), code_max=CODE_MAX[precision])
    codes = codes.reshape(plane.shape)
    if precision == "int4":
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    return Encoded(precision, kind, codes, scales, minimums.to(plane.dtype), is_kept)


def decode(encoded: Encoded, dtype: torch.dtype) -> Tensor:
    """The plane again, dense, within the stated bound where `is_kept`; finite whatever the codes are."""
    if encoded.precision == "exact":
        return encoded.codes.to(dtype)
    assert encoded.scales is not None, encoded.precision
    codes = encoded.codes
    if encoded.precision == "int4":
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    shape = codes.shape
    group = group_shape(encoded.precision, encoded.kind, tokens=shape[-2], dim=shape[-1])
    values = _grouped(codes, group).float() * _spread(encoded.scales)
    if encoded.minimums is not None:
        values = values + _spread(encoded.minimums)
    # The largest element may come back half a scale larger, which must not make it infinite.
    largest = torch.finfo(dtype).max
    return values.reshape(shape).clamp(-largest, largest).to(dtype)


def _encode_integers(grouped: Tensor, *, code_max: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    minimums, maximums = grouped.amin(dim=(-3, -1)), grouped.amax(dim=(-3, -1))
    spans = maximums - minimums
    is_finite = spans.isfinite()
    spans, minimums = spans.where(is_finite, 0.0), minimums.where(is_finite, 0.0)
    # One zero, not two: which of them is the minimum depends on the order of comparing.
    minimums = minimums.where(minimums != 0, 0.0)
    scales = _rounded_up(spans * (1.0 / code_max)).clamp(min=_SCALE_MIN).where(spans > 0, 0.0)
    reciprocals = (1.0 / scales).where(spans > 0, 0.0)
    numbers = (grouped - _spread(minimums)) * _spread(reciprocals)
    codes = numbers.nan_to_num().round().clamp(0, code_max).to(torch.uint8)
    return codes, scales.to(torch.bfloat16), minimums, is_finite.all(dim=-1).all(dim=-1)


def _encode_fp8(grouped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    largest = grouped.abs().amax(dim=(-3, -1))
    is_finite = largest.isfinite()
    largest = largest.where(is_finite, 0.0)
    # A power of two: dividing by it and multiplying again loses nothing, and e4m3 gains nothing from another.
    scales = _power_of_two_above(largest * (1.0 / _E4M3_MAX)).clamp(min=_SCALE_MIN)
    numbers = (grouped * _spread(1.0 / scales)).nan_to_num().clamp(-_E4M3_MAX, _E4M3_MAX)
    codes = numbers.to(torch.float8_e4m3fn)
    return codes, scales.to(torch.bfloat16), is_finite.all(dim=-1).all(dim=-1)


def _grouped(plane: Tensor, group: tuple[int, int]) -> Tensor:
    """`[..., tokens, dim]` as `[..., token group, token in it, dim group, element in it]`."""
    tokens, dim = plane.shape[-2:]
    return plane.reshape(*plane.shape[:-2], tokens // group[0], group[0], dim // group[1], group[1])


def _spread(parameters: Tensor) -> Tensor:
    """One per group, as it multiplies or adds to what `_grouped` made."""
    return parameters.float()[..., :, None, :, None]


def _rounded_up(values: Tensor) -> Tensor:
    """Non-negative float32 to the next number that bfloat16 has."""
    return ((values.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)


def _power_of_two_above(values: Tensor) -> Tensor:
    """Of non-negative float32: the smallest power of two that is not smaller, with zero for those below 2⁻¹²⁶."""
    return ((values.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)
