"""The engine's KV memory as rows of bytes, one per block and region, and their way to and from the store's slots.

A block of a group is what its layers hold of it, layer after layer. Where a layer holds it in several places (one per
head), or all layers in one, those are the regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore_client.integrations._store import Room

_STAGING_BYTES = 32 << 20


class Mover(Protocol):
    """Copies whole blocks of one group. For one thread at a time."""

    @property
    def payload_bytes(self) -> int: ...

    def mark(self) -> object:
        """A moment on the engine's own stream: what was computed until then is what `read` copies."""

    def read(self, block_ids: Sequence[int], targets: Sequence[Room], *, after: object) -> None:
        """From the engine's blocks into slots; returns when it is done."""

    def write(self, block_ids: Sequence[int], payloads: Sequence[Room]) -> None:
        """From slots into the engine's blocks; returns when it is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one layer's pages lie in a tensor's storage: page of block b at `offset + b * block_stride`, in bytes."""

    offset_bytes: int
    block_stride_bytes: int
    row_bytes: int


def placements(
    *,
    offset_bytes: int,
    layer_index: int,
    layer_stride_bytes: int,
    block_stride_bytes: int,
    block_count: int,
    page_bytes: int,
) -> list[Placement]:
    """The regions of one layer, as vLLM's `KVCacheTensor` describes them.

    Layers outermost: a run of blocks per layer, or per head of a layer. Blocks outermost: one page per layer inside a
    block.
    """
    start = offset_bytes + layer_index * layer_stride_bytes
    span_bytes = block_count * block_stride_bytes
    region_count = layer_stride_bytes // span_bytes if layer_stride_bytes >= span_bytes else 1
    row_bytes, rest = divmod(page_bytes, region_count)
    assert rest == 0, (page_bytes, region_count)
    assert row_bytes <= block_stride_bytes, (row_bytes, block_stride_bytes)
    return [
        Placement(offset_bytes=start + index * span_bytes, block_stride_bytes=block_stride_bytes, row_bytes=row_bytes)
        for index in range(region_count)
    ]


def merged(found: Sequence[Placement]) -> list[Placement]:
    """The same with rows joined that follow each other in memory, so that they are copied at once."""
    joined: list[Placement] = []
    for placement in found:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.block_stride_bytes == placement.block_stride_bytes
            and last.offset_bytes + last.row_bytes == placement.offset_bytes
            and last.row_bytes + placement.row_bytes <= placement.block_stride_bytes
        ):
            joined[-1] = Placement(
                offset_bytes=last.offset_bytes,
                block_stride_bytes=last.block_stride_bytes,
                row_bytes=last.row_bytes + placement.row_bytes,
            )
        else:
            joined.append(placement)
    return joined


def region(storage: Tensor, placement: Placement, *, block_count: int) -> Tensor:
    """[block_count, row_bytes] of the storage's bytes."""
    raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage.untyped_storage())
    shape, strides = (block_count, placement.row_bytes), (placement.block_stride_bytes, 1)
    return raw.as_strided(shape, strides, placement.offset_bytes)


def make_mover(regions: Sequence[Tensor]) -> Mover:
    device = regions[0].device
    return CpuMover(regions) if device.type == "cpu" else DeviceMover(regions)


class CpuMover:
    """Host memory to host memory: numpy's copies, which other threads run beside."""

    def __init__(self, regions: Sequence[Tensor]) -> None:
        self._rows = [tensor.numpy() for tensor in regions]
        self.payload_bytes = sum(rows.shape[1] for rows in self._rows)

    def mark(self) -> object:
        return None  # the engine computes in its own thread, and has returned

    def read(self, block_ids: Sequence[int], targets: Sequence[Room], *, after: object) -> None:
        for block_id, target in zip(block_ids, targets, strict=True):
            slot = _host(target)
            start = 0
            for rows in self._rows:
                row = rows[block_id]
                np.copyto(slot[start : start + len(row)], row)
                start += len(row)

    def write(self, block_ids: Sequence[int], payloads: Sequence[Room]) -> None:
        for block_id, payload in zip(block_ids, payloads, strict=True):
            slot = _host(payload)
            start = 0
            for rows in self._rows:
                row = rows[block_id]
                np.copyto(row, slot[start : start + len(row)])
                start += len(row)


class DeviceMover:
    """VRAM to host memory on a stream of its own: gathered on the device, moved through page-locked staging."""

    def __init__(self, regions: Sequence[Tensor]) -> None:
        self._regions = regions
        self._device = regions[0].device
        self.payload_bytes = sum(tensor.shape[1] for tensor in regions)
        self._row_count = max(1, _STAGING_BYTES // self.payload_bytes)
        self._stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        shape = (self._row_count, self.payload_bytes)
        self._gathered = torch.empty(shape, dtype=torch.uint8, device=self._device)
        self._staging = torch.empty(shape, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> object:
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, block_ids: Sequence[int], targets: Sequence[Room], *, after: object) -> None:
        assert isinstance(after, torch.cuda.Event), after
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            for start in range(0, len(block_ids), self._row_count):
                batch = slice(start, start + self._row_count)
                ids = torch.tensor(block_ids[batch], device=self._device)
                gathered = self._gathered[: len(ids)]
                offset = 0
                for tensor in self._regions:
                    end = offset + tensor.shape[1]
                    gathered[:, offset:end] = tensor.index_select(0, ids)
                    offset = end
                hosted = [row for row, target in enumerate(targets[batch]) if not isinstance(target, Tensor)]
                if hosted:
                    self._staging[: len(ids)].copy_(gathered, non_blocking=True)
                for row, target in enumerate(targets[batch]):
                    if isinstance(target, Tensor):
                        target.copy_(gathered[row], non_blocking=True)
                self._stream.synchronize()
                for row in hosted:
                    np.copyto(_host(targets[start + row]), self._staging[row].numpy())

    def write(self, block_ids: Sequence[int], payloads: Sequence[Room]) -> None:
        with torch.cuda.stream(self._stream):
            for start in range(0, len(block_ids), self._row_count):
                batch = slice(start, start + self._row_count)
                hosted = [row for row, payload in enumerate(payloads[batch]) if not isinstance(payload, Tensor)]
                for row in hosted:
                    np.copyto(self._staging[row].numpy(), _host(payloads[start + row]))
                ids = torch.tensor(block_ids[batch], device=self._device)
                gathered = self._gathered[: len(ids)]
                if hosted:
                    gathered.copy_(self._staging[: len(ids)], non_blocking=True)
                for row, payload in enumerate(payloads[batch]):
                    if isinstance(payload, Tensor):
                        gathered[row].copy_(payload, non_blocking=True)
                offset = 0
                for tensor in self._regions:
                    end = offset + tensor.shape[1]
                    tensor.index_copy_(0, ids, gathered[:, offset:end])
                    offset = end
                # Staging is filled again, and the engine told, only after the copies.
                self._stream.synchronize()


def _host(room: Room) -> npt.NDArray[np.uint8]:
    assert isinstance(room, memoryview), "a slot on a GPU, and blocks that are not"
    return np.frombuffer(room, np.uint8)
