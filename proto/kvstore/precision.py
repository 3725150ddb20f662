"""In how many bits the planes of a block are stored: the names, and where everything lies in the encoded payload.

Format (docs/formats/precision.md), little-endian. The payload is the encoded K plane, then the encoded V plane. An
`exact` plane is as the layout says. Any other is one part per layer, so that layers still move one by one:

    codes     in the order of the layout; one byte per element, for int4 one for two neighbours along the head's dim
    minimums  one per group, in the dtype of the layout; none for fp8
    scales    one per group, bfloat16

Codes and parts are filled up with zeros to a multiple of 16 bytes, and so is an exact plane beside one that is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvstore.envelope import Codec
from kvstore.errors import InvalidArgumentError
from kvstore.layout import DTYPE_BYTES, BlockLayout, LayoutOrder, Plane

Kind: TypeAlias = Literal["K", "V"]

PRECISIONS = ("exact", "fp8", "int8", "int4")
"""What a namespace may say of a plane; all but the first lose bits."""

BLOCK_PRECISIONS = {
    "exact": ("exact", "exact"),
    "k16v8": ("exact", "int8"),
    "k16v4": ("exact", "int4"),
    "k8v8": ("int8", "int8"),
    "k8v4": ("int8", "int4"),
    "k4v4": ("int4", "int4"),
    "fp8": ("fp8", "fp8"),
}
"""Names for the precisions of K and V together, as settings say them."""

CODECS = {"exact": Codec.EXACT, "fp8": Codec.FP8, "int8": Codec.INT8, "int4": Codec.INT4}

CODE_MAX = {"int8": 255, "int4": 15}
"""Largest code of those that count in steps above a minimum."""

LOSSY_DTYPES = ("float32", "float16", "bfloat16")
"""Element types that can be stored in fewer bits; the others have few enough."""

_SCALE_BYTES = 2
_ALIGNMENT_BYTES = 16
"""What one thread of a GPU reads at once."""
_INT4_GROUP_MAX = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPlane:
    """Where a plane lies in the encoded payload, and the parts of a layer within it; offsets and sizes in bytes."""

    kind: Kind
    precision: str
    offset_bytes: int
    layer_count: int
    layer_bytes: int
    """From one layer to the next."""
    minimums_offset_bytes: int
    """In a layer; that of the codes is 0."""
    scales_offset_bytes: int
    group_tokens: int
    """Elements that share a scale: so many tokens of one head, by so many elements of each."""
    group_dim: int
    size_bytes: int

    @property
    def is_exact(self) -> bool:
        return self.precision == "exact"


@dataclass(frozen=True, slots=True)
class EncodedLayout:
    """The arrangement of one block as it is stored."""

    planes: tuple[EncodedPlane, ...]

    @property
    def payload_bytes(self) -> int:
        """Bytes of one encoded block, without its envelope."""
        return sum(plane.size_bytes for plane in self.planes)

    @property
    def is_exact(self) -> bool:
        """Whether the encoded payload is the payload itself."""
        return all(plane.is_exact for plane in self.planes)


def encoded_layout(layout: BlockLayout, *, k_precision: str, v_precision: str) -> EncodedLayout:
    """How blocks of this layout are stored; raises `InvalidArgumentError` naming the plane that cannot be so."""
    is_exact = k_precision == v_precision == "exact"
    alignment_bytes = 1 if is_exact else _ALIGNMENT_BYTES
    encoded: list[EncodedPlane] = []
    offset_bytes = 0
    for kind, precision, plane in _pair(layout, k_precision, v_precision):
        _check(kind, precision, plane, layout)
        if plane is not None:
            made = _encode(
                kind, precision, plane, layout=layout, offset_bytes=offset_bytes, alignment_bytes=alignment_bytes
            )
            if precision != "exact" and made.size_bytes >= plane.size_bytes:
                raise InvalidArgumentError.of(
                    _field(kind),
                    precision,
                    f"exact; {precision} would take {made.size_bytes} of {plane.size_bytes} bytes",
                )
            encoded.append(made)
            offset_bytes += made.size_bytes
    return EncodedLayout(tuple(encoded))


def group_shape(precision: str, kind: Kind, *, tokens: int, dim: int) -> tuple[int, int]:
    """Tokens and elements of a head that share a scale: so many divide a plane's evenly."""
    match precision, kind:
        case "fp8", _:
            return tokens, dim
        case "int8", "K":
            return tokens, 1
        case "int8", "V":
            return 1, dim
        case "int4", "K":
            return math.gcd(tokens, _INT4_GROUP_MAX), 1
        case _:
            assert precision == "int4", f"{precision} has no groups"
            return 1, math.gcd(dim, _INT4_GROUP_MAX)


def _pair(layout: BlockLayout, k_precision: str, v_precision: str) -> tuple[tuple[Kind, str, Plane | None], ...]:
    planes = layout.planes
    return ("K", k_precision, planes[0]), ("V", v_precision, planes[1] if len(planes) > 1 else None)


def _check(kind: Kind, precision: str, plane: Plane | None, layout: BlockLayout) -> None:
    field = _field(kind)
    if precision not in PRECISIONS:
        raise InvalidArgumentError.of(field, precision, ", ".join(PRECISIONS))
    if precision == "exact":
        return
    if not isinstance(layout.order, LayoutOrder):
        raise InvalidArgumentError.of(field, precision, f"exact; what {layout.order} holds is not known here")
    if plane is None:
        raise InvalidArgumentError.of(field, precision, "exact; there is no such plane")
    if layout.dtype not in LOSSY_DTYPES:
        raise InvalidArgumentError.of(
            field, precision, f"exact for {layout.dtype}; others for {', '.join(LOSSY_DTYPES)}"
        )
    if precision == "int4" and plane.shape[3] % 2:
        raise InvalidArgumentError.of(
            field, precision, f"exact, fp8 or int8 for heads of {plane.shape[3]}, which is odd"
        )


def _encode(
    kind: Kind, precision: str, plane: Plane, *, layout: BlockLayout, offset_bytes: int, alignment_bytes: int
) -> EncodedPlane:
    layer_count, dim = plane.shape[0], plane.shape[3]
    heads, tokens = layout.num_kv_heads, layout.tokens_per_block
    if precision == "exact":
        group_tokens, group_dim, minimums_at, scales_at = 1, 1, 0, 0
        layer_bytes = plane.strides_bytes[0]
    else:
        group_tokens, group_dim = group_shape(precision, kind, tokens=tokens, dim=dim)
        group_count = heads * (tokens // group_tokens) * (dim // group_dim)
        element_count = heads * tokens * dim
        minimums_at = _aligned(element_count // 2 if precision == "int4" else element_count, alignment_bytes)
        minimum_bytes = 0 if precision == "fp8" else DTYPE_BYTES[layout.dtype]
        scales_at = minimums_at + group_count * minimum_bytes
        layer_bytes = _aligned(scales_at + group_count * _SCALE_BYTES, alignment_bytes)
    return EncodedPlane(
        kind=kind,
        precision=precision,
        offset_bytes=offset_bytes,
        layer_count=layer_count,
        layer_bytes=layer_bytes,
        minimums_offset_bytes=minimums_at,
        scales_offset_bytes=scales_at,
        group_tokens=group_tokens,
        group_dim=group_dim,
        size_bytes=_aligned(layer_count * layer_bytes, alignment_bytes),
    )


def _aligned(size_bytes: int, alignment_bytes: int) -> int:
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def _field(kind: Kind) -> str:
    return f"{kind.lower()}_precision"
