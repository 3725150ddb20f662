"""Blocks between the pool, which has them as the engine does, and what is stored below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpu_agent.precision.packed import pack, plane_view, unpack
from gpu_agent.precision.reference import decode, encode
from kvstore.errors import InvalidArgumentError
from kvstore.layout import Plane
from kvstore.namespace import Namespace
from kvstore.precision import BLOCK_PRECISIONS, EncodedPlane

if TYPE_CHECKING:
    from gpu_agent.precision.kernels import PlaneKernels


def stored_namespaces(namespace: Namespace, precision: str, *, under_pressure: str | None = None) -> list[Namespace]:
    """Where blocks of an engine's namespace are stored: in a precision of `BLOCK_PRECISIONS`, and under pressure.

    Raises `InvalidArgumentError` when they cannot be, are not as the engine has them, or take no fewer bytes then.
    """
    namespace.check_exact()
    wanted = [precision] if under_pressure is None else [precision, under_pressure]
    pairs = [BLOCK_PRECISIONS[name] for name in wanted]
    found = [replace(namespace, k_precision=k_precision, v_precision=v_precision) for k_precision, v_precision in pairs]
    if found[-1].stored_bytes >= found[0].stored_bytes and under_pressure is not None:
        raise InvalidArgumentError.of(
            "precision_under_pressure", under_pressure, f"one that takes fewer bytes than {precision}"
        )
    return found


class BlockCodec:
    """Encodes and decodes blocks where they are; queues its work on the current stream and waits for nothing.

    By kernels on a GPU with triton, else in plain torch: the bytes are the same.
    """

    def __init__(self, namespace: Namespace, *, device: torch.device) -> None:
        """Of a namespace that stores its planes in whatever precision."""
        self._layout = namespace.block_layout
        self._planes = tuple(zip(self._layout.planes, namespace.encoded_layout.planes, strict=True))
        self._kernels = {encoded.kind: self._open(plane, encoded, device) for plane, encoded in self._planes}

    def encode_rows(self, pool: Tensor, rows: Sequence[int], *, out: Tensor, kept: Tensor) -> None:
        """Blocks of the pool into the leading rows of `out`; `kept` of those becomes 1 where the bound holds, else 0.

        `kept` is uint8 on the pool's device. Of what is not kept the stored bytes mean nothing.
        """
        target, kept = out[: len(rows)], kept[: len(rows)]
        indices = _indices(rows, pool)
        target.zero_()
        kept.fill_(1)
        for plane, encoded in self._planes:
            kernels = self._kernels[encoded.kind]
            if encoded.is_exact:
                blocks = pool[:, plane.offset_bytes : plane.offset_bytes + plane.size_bytes]
                torch.index_select(blocks, 0, indices, out=_place(target, plane, encoded))
            elif kernels is not None:
                kernels.encode(pool, indices, out=target, kept=kept)
            else:
                blocks = plane_view(pool[indices], plane, self._layout)
                coded = encode(blocks, encoded.precision, kind=encoded.kind)
                pack(coded, encoded, self._layout, target)
                kept.logical_and_(coded.is_kept.flatten(1).all(dim=1))

    def decode_rows(self, stored: Tensor, *, pool: Tensor, rows: Sequence[int], layers: range | None = None) -> None:
        """Row i of encoded blocks into block `rows[i]` of the pool; all layers, or some that follow each other."""
        if not rows:
            return
        layers = range(self._layout.num_layers) if layers is None else layers
        source, indices = stored[: len(rows)], _indices(rows, pool)
        for plane, encoded in self._planes:
            kernels = self._kernels[encoded.kind]
            if encoded.is_exact:
                start_bytes, end_bytes = (layer * plane.strides_bytes[0] for layer in (layers.start, layers.stop))
                came = source[:, encoded.offset_bytes + start_bytes : encoded.offset_bytes + end_bytes]
                blocks = pool[:, plane.offset_bytes + start_bytes : plane.offset_bytes + end_bytes]
                blocks.index_copy_(0, indices, came)
            elif kernels is not None:
                kernels.decode(source, indices, pool=pool, layers=layers)
            else:
                coded = unpack(source, encoded, self._layout, layers=layers)
                blocks = plane_view(pool, plane, self._layout)[:, layers.start : layers.stop]
                blocks.index_copy_(0, indices, decode(coded, blocks.dtype))

    def _open(self, plane: Plane, encoded: EncodedPlane, device: torch.device) -> PlaneKernels | None:
        if device.type != "cuda" or encoded.is_exact:
            return None
        try:
            from gpu_agent.precision.kernels import PlaneKernels
        except ModuleNotFoundError:
            return None
        return PlaneKernels(plane, encoded, self._layout)


def _place(rows: Tensor, plane: Plane, encoded: EncodedPlane) -> Tensor:
    return rows[:, encoded.offset_bytes : encoded.offset_bytes + plane.size_bytes]


def _indices(rows: Sequence[int], tensor: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).to(tensor.device, non_blocking=True)
