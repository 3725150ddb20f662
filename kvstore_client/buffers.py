"""Callers' memory as flat byte views, one per block. Nothing here copies, and nothing imports torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from kvstore.errors import InvalidArgumentError


class SupportsBuffer(Protocol):
    """bytes, bytearray, memoryview, array, mmap, numpy arrays, …"""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class CpuTensor(Protocol):
    """A torch tensor in host memory, of any dtype."""

    def data_ptr(self) -> int: ...

    def element_size(self) -> int: ...


BlockBuffer: TypeAlias = SupportsBuffer | CpuTensor
Buffers: TypeAlias = BlockBuffer | Sequence[BlockBuffer]
"""One contiguous buffer that holds all blocks back to back, or a sequence of one buffer per block."""

_KINDS = "bytes, bytearray, memoryview, a numpy array or a torch CPU tensor"


def block_views(
    buffers: Buffers, *, block_count: int, block_bytes: int, field: str, is_writable: bool
) -> list[memoryview]:
    """One view of exactly `block_bytes` bytes per block, checked; `field` is named in errors.

    The views keep their buffers alive and share their memory.
    """
    whole = _flat_view(buffers, field=field, is_writable=is_writable)
    if whole is not None:
        if len(whole) != block_count * block_bytes:
            raise InvalidArgumentError.of(
                field,
                f"one buffer of {len(whole)} bytes",
                f"{block_count * block_bytes} bytes ({block_count} blocks of {block_bytes})",
            )
        return [whole[start : start + block_bytes] for start in range(0, len(whole), block_bytes)]
    if not isinstance(buffers, Sequence):
        raise InvalidArgumentError.of(field, type(buffers).__name__, f"{_KINDS}, or a sequence of them")
    if len(buffers) != block_count:
        raise InvalidArgumentError.of(field, f"{len(buffers)} buffers", f"{block_count}, one per block hash")
    views = []
    for index, buffer in enumerate(buffers):
        view = _flat_view(buffer, field=f"{field}[{index}]", is_writable=is_writable)
        if view is None:
            raise InvalidArgumentError.of(f"{field}[{index}]", type(buffer).__name__, _KINDS)
        if len(view) != block_bytes:
            raise InvalidArgumentError.of(f"{field}[{index}]", f"{len(view)} bytes", f"{block_bytes} bytes, one block")
        views.append(view)
    return views


def _flat_view(buffer: object, *, field: str, is_writable: bool) -> memoryview | None:
    """The buffer's bytes in order, or None when it is no buffer at all."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(buffer, torch.Tensor):
        view = memoryview(_tensor_bytes(buffer, torch=torch, field=field))
    elif numpy is not None and isinstance(buffer, numpy.ndarray):
        if not buffer.flags.c_contiguous:
            raise InvalidArgumentError.of(field, "a strided array", "a C-contiguous array")
        if buffer.dtype.hasobject:
            raise InvalidArgumentError.of(field, "an array of Python objects", "an array of numbers")
        # Through bytes: dtypes such as bfloat16 have no buffer format of their own.
        view = memoryview(buffer.reshape(-1).view(numpy.uint8))
    else:
        try:
            view = memoryview(buffer)  # type: ignore[arg-type]  # the TypeError is the answer
        except TypeError:
            return None
        if not view.c_contiguous:
            raise InvalidArgumentError.of(field, "a strided buffer", "a C-contiguous buffer")
        view = view.cast("B")
    if is_writable and view.readonly:
        raise InvalidArgumentError.of(field, f"a read-only {type(buffer).__name__}", "a writable buffer")
    return view


def _tensor_bytes(tensor: Any, *, torch: Any, field: str) -> Any:
    if tensor.device.type != "cpu":
        raise InvalidArgumentError.of(field, f"a tensor on {tensor.device}", "a tensor in host memory")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise InvalidArgumentError.of(field, "a strided or sparse tensor", "a contiguous tensor")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
