"""What is lost when planes are stored in fewer bits: no more than is said."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpu_agent.precision.reference import Encoded, decode, encode
from kvstore.precision import CODE_MAX, PRECISIONS, group_shape

Kind = Literal["K", "V"]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOSSY = PRECISIONS[1:]
KINDS: tuple[Kind, ...] = ("K", "V")
HEADS, TOKENS, DIM = 2, 16, 32


def planes_of(values: Any, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).to(dtype).reshape(HEADS, TOKENS, DIM)


@st.composite
def adversarial_planes(draw: st.DrawFn) -> Tensor:
    """Any finite numbers of a dtype, huge beside subnormal; or noise around means that differ by channel and token."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = (HEADS, TOKENS, DIM)
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        word = np.int32 if dtype == torch.float32 else np.int16
        plane = torch.from_numpy(random.integers(np.iinfo(word).min, np.iinfo(word).max, shape, word)).view(dtype)
        return torch.where(plane.isfinite() & (plane.abs() < 10.0 ** draw(st.integers(-38, 38))), plane, 0.0)
    magnitude = 10.0 ** draw(st.integers(-30 if dtype != torch.float16 else -6, 4 if dtype == torch.float16 else 30))
    channels = random.normal(size=(HEADS, 1, DIM)) * 10.0 ** draw(st.integers(-3, 3))
    return planes_of((random.normal(size=shape) + channels) * magnitude, dtype).clamp(
        torch.finfo(dtype).min / 4, torch.finfo(dtype).max / 4
    )


def spread(parameters: Tensor, precision: str, kind: Kind) -> Tensor:
    group = group_shape(precision, kind, tokens=TOKENS, dim=DIM)
    return parameters.double().repeat_interleave(group[0], dim=-2).repeat_interleave(group[1], dim=-1)


def bound(plane: Tensor, encoded: Encoded, kind: Kind) -> Tensor:
    """As docs/precision.md says, and half a step of the dtype for writing the number down."""
    assert encoded.scales is not None
    scales, size = spread(encoded.scales, encoded.precision, kind), plane.double().abs()
    limits = torch.finfo(plane.dtype)
    lost = torch.maximum(size / 16, scales / 1024) if encoded.precision == "fp8" else 0.501 * scales
    return lost + 0.51 * limits.eps * (size + lost) + limits.smallest_normal * limits.eps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", LOSSY)
@given(plane=adversarial_planes())
@settings(max_examples=60)
def test_no_element_is_further_off_than_the_stated_bound(plane: Tensor, precision: str, kind: Kind) -> None:
    encoded = encode(plane, precision, kind=kind)
    decoded = decode(encoded, plane.dtype)
    assert bool(decoded.isfinite().all())
    error = (decoded.double() - plane.double()).abs()
    too_far = (error > bound(plane, encoded, kind)).any(dim=-1).any(dim=-1)
    assert not bool((too_far & encoded.is_kept).any())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["int8", "int4"])
@given(plane=adversarial_planes())
@settings(max_examples=60)
def test_a_step_is_the_span_of_its_group_by_the_codes_there_are(plane: Tensor, precision: str, kind: Kind) -> None:
    encoded = encode(plane, precision, kind=kind)
    assert encoded.scales is not None
    group = group_shape(precision, kind, tokens=TOKENS, dim=DIM)
    grouped = plane.double().reshape(HEADS, TOKENS // group[0], group[0], DIM // group[1], group[1])
    spans = grouped.amax(dim=(2, 4)) - grouped.amin(dim=(2, 4))
    most = (spans / CODE_MAX[precision] * (1 + 2.0**-6)).clamp(min=2.0**-126)
    kept = encoded.is_kept[:, None, None].expand_as(spans)
    assert bool((encoded.scales.double() <= most)[kept].all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_zeros_and_constant_groups_come_back_exactly(precision: str, kind: Kind, dtype: torch.dtype) -> None:
    along = torch.linspace(-7.3, 3e4, DIM if kind == "K" else TOKENS).to(dtype)
    plane = (along if kind == "K" else along[:, None]).expand(HEADS, TOKENS, DIM).clone()
    plane[0] = 0.0
    assert torch.equal(decode(encode(plane, precision, kind=kind), dtype), plane)


@pytest.mark.parametrize("precision", LOSSY)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_a_number_is_not_kept_and_concerns_no_other_head(precision: str, wrong: float) -> None:
    plane = torch.ones(HEADS, TOKENS, DIM)
    plane[1, 3, 5] = wrong
    encoded = encode(plane, precision, kind="V")
    assert encoded.is_kept.tolist() == [True, False]
    assert torch.allclose(decode(encoded, torch.float32)[0], plane[0])


def test_elements_too_far_apart_to_subtract_are_not_kept() -> None:
    plane = torch.zeros(HEADS, TOKENS, DIM)
    plane[0, :2, 0] = torch.tensor([3e38, -3e38])
    assert encode(plane, "int8", kind="K").is_kept.tolist() == [False, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", LOSSY)
def test_the_largest_numbers_of_a_dtype_stay_finite(precision: str, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    plane = torch.full((HEADS, TOKENS, DIM), largest, dtype=dtype)
    plane[:, ::2] = largest / 2
    encoded = encode(plane, precision, kind="K")
    assert bool(encoded.is_kept.all())
    assert bool(decode(encoded, dtype).isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", LOSSY)
def test_planes_with_tokens_first_give_the_same_numbers(precision: str, kind: Kind) -> None:
    plane = torch.randn(3, TOKENS, HEADS, DIM).transpose(1, 2)
    ours, dense = (decode(encode(given, precision, kind=kind), torch.float32) for given in (plane, plane.contiguous()))
    assert torch.equal(ours, dense)


def test_exact_is_the_plane_itself() -> None:
    plane = torch.full((HEADS, TOKENS, DIM), float("nan"))
    encoded = encode(plane, "exact", kind="K")
    assert bool(encoded.is_kept.all())
    assert torch.equal(decode(encoded, torch.float32).view(torch.int32), plane.view(torch.int32))


def test_more_bits_lose_less() -> None:
    plane = torch.randn(HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(7))
    errors = [
        float((decode(encode(plane, precision, kind="V"), torch.float32) - plane).square().mean())
        for precision in ("exact", "int8", "fp8", "int4")
    ]
    assert errors == sorted(errors)
    assert errors[0] == 0.0
