"""How the bytes of one block are arranged: planes, shapes, strides, offsets.

A block's payload is its K plane followed by its V plane, each one dense array in C order:
`HND` is [num_layers, num_kv_heads, tokens_per_block, head_dim],
`NHD` is [num_layers, tokens_per_block, num_kv_heads, head_dim].
Layers are outermost, so one layer's part of a plane is one contiguous run.
`opaque:NAME` is one plane KV of as many bytes, in an order that only the engines which say NAME know: those whose
kernels pack K and V together, or in the way of one CPU.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from kvstore.errors import InvalidArgumentError


class LayoutOrder(StrEnum):
    HND = "HND"
    NHD = "NHD"


@dataclass(frozen=True, slots=True)
class OpaqueOrder:
    """An engine's own order of a block's bytes. Blocks of two names are never the same, blocks of one always are."""

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _OPAQUE_NAME.fullmatch(self.name):
            raise InvalidArgumentError.of("layout", f"{_OPAQUE_PREFIX}{self.name}", LAYOUTS_ALLOWED)

    def __str__(self) -> str:
        return f"{_OPAQUE_PREFIX}{self.name}"


_OPAQUE_PREFIX = "opaque:"
_OPAQUE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")
LAYOUTS_ALLOWED = f"{', '.join(LayoutOrder)} or {_OPAQUE_PREFIX}NAME (NAME: up to 200 letters, digits, . _ + -)"


def parse_order(text: str) -> LayoutOrder | OpaqueOrder:
    """The inverse of `str`; raises `InvalidArgumentError` naming what is allowed."""
    if isinstance(text, str):
        if text in LayoutOrder.__members__:
            return LayoutOrder(text)
        if text.startswith(_OPAQUE_PREFIX):
            return OpaqueOrder(text.removeprefix(_OPAQUE_PREFIX))
    raise InvalidArgumentError.of("layout", text, LAYOUTS_ALLOWED)


DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
"""Element types a plane may hold, in bytes per element."""


PAYLOAD_BYTES_MAX = 1 << 40
"""Far above any real block; keeps every length within the wire's integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """K or V of one block inside the payload, or both; `shape` in elements, everything else in bytes."""

    name: str
    offset_bytes: int
    shape: tuple[int, int, int, int]
    strides_bytes: tuple[int, int, int, int]

    @property
    def size_bytes(self) -> int:
        return self.shape[0] * self.strides_bytes[0]


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """The arrangement of one block; `v_head_dim` 0 means there is no V plane (MLA's latent cache)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    tokens_per_block: int
    dtype: str
    order: LayoutOrder | OpaqueOrder

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise InvalidArgumentError.of("dtype", self.dtype, ", ".join(DTYPE_BYTES))
        for field in ("num_layers", "num_kv_heads", "head_dim", "tokens_per_block"):
            value = getattr(self, field)
            if not 1 <= value <= 1 << 20:
                raise InvalidArgumentError.of(field, value, "1 to 1048576")
        if not 0 <= self.v_head_dim <= 1 << 20:
            raise InvalidArgumentError.of("v_head_dim", self.v_head_dim, "0 (no V plane) to 1048576")
        if self.payload_bytes > PAYLOAD_BYTES_MAX:
            raise InvalidArgumentError.of("payload_bytes", self.payload_bytes, f"up to {PAYLOAD_BYTES_MAX}")

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        if isinstance(self.order, OpaqueOrder):
            return (self._plane("KV", head_dim=self.head_dim + self.v_head_dim, offset_bytes=0),)
        k = self._plane("K", head_dim=self.head_dim, offset_bytes=0)
        if self.v_head_dim == 0:
            return (k,)
        return (k, self._plane("V", head_dim=self.v_head_dim, offset_bytes=k.size_bytes))

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of one block in full precision, without its envelope."""
        return sum(plane.size_bytes for plane in self.planes)

    def _plane(self, name: str, *, head_dim: int, offset_bytes: int) -> Plane:
        if self.order is LayoutOrder.NHD:
            shape = (self.num_layers, self.tokens_per_block, self.num_kv_heads, head_dim)
        else:
            shape = (self.num_layers, self.num_kv_heads, self.tokens_per_block, head_dim)
        element = DTYPE_BYTES[self.dtype]
        strides = tuple(math.prod(shape[axis + 1 :]) * element for axis in range(4))
        return Plane(
            name=name,
            offset_bytes=offset_bytes,
            shape=shape,
            strides_bytes=(strides[0], strides[1], strides[2], strides[3]),
        )
