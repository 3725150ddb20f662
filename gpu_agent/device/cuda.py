"""A CUDA device: pool in VRAM, page-locked staging, an own stream and events."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvstore.errors import CapacityError, InternalError, InvalidArgumentError


class _CudaEvent:
    """Waits by sleeping in the driver, not by spinning: the engine needs this core."""

    __slots__ = ("_event",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        try:
            self._event.synchronize()
        except RuntimeError as error:  # torch.AcceleratorError is one; the CUDA context is lost after it
            raise InternalError(f"copy failed: {error}") from error

    def hold_back(self, stream: torch.cuda.Stream) -> None:
        """What is queued on `stream` from now on starts after this event; the host does not wait."""
        stream.wait_event(self._event)


class CudaDevice:
    """Copies run on one stream of their own, row by row through the copy engines, using no SM and no VRAM."""

    def __init__(self, *, index: int) -> None:
        count = torch.cuda.device_count()
        if index >= count:
            raise InvalidArgumentError.of("device", f"cuda:{index}", _allowed(count))
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(device=self._device)  # type: ignore[no-untyped-call]

    @property
    def name(self) -> str:
        return str(self._device)

    @property
    def memory_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self._device).total_memory)

    def allocate_pool(self, *, slot_count: int, block_bytes: int) -> Tensor:
        try:
            pool = torch.empty((slot_count, block_bytes), dtype=torch.uint8, device=self._device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            raise CapacityError(f"no {slot_count * block_bytes} bytes on {self.name}: {error}") from error
        # The allocator may hand out memory that work on the current stream is still using.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return pool

    def allocate_staging(self, *, row_count: int, block_bytes: int) -> Tensor:
        try:
            return torch.empty((row_count, block_bytes), dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise CapacityError(f"no {row_count * block_bytes} bytes of page-locked memory: {error}") from error

    def copy_rows(
        self, *, source: Tensor, source_rows: Sequence[int], target: Tensor, target_rows: Sequence[int]
    ) -> _CudaEvent:
        assert len(source_rows) == len(target_rows), f"{len(source_rows)} rows into {len(target_rows)}"
        try:
            with torch.cuda.stream(self._stream):
                for source_row, target_row in zip(source_rows, target_rows, strict=True):
                    target[target_row].copy_(source[source_row], non_blocking=True)
                return _CudaEvent(self._stream)
        except RuntimeError as error:
            raise InternalError(f"copy failed: {error}") from error

    def copy_rows_for_caller(
        self, *, source: Tensor, source_rows: Sequence[int], target: Tensor, target_rows: Sequence[int]
    ) -> _CudaEvent:
        callers_stream = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(callers_stream)
        event = self.copy_rows(source=source, source_rows=source_rows, target=target, target_rows=target_rows)
        if source.is_cuda and target.is_cuda:
            event.hold_back(callers_stream)
            for tensor in (source, target):
                # The caching allocator must not give the caller's memory away while this stream uses it.
                tensor.record_stream(self._stream)
        else:
            # The caller's end is in host memory, and host code heeds no stream.
            event.wait()
        return event

    def close(self) -> None:
        self._stream.synchronize()


def _allowed(device_count: int) -> str:
    if device_count == 0:
        why = "torch sees no CUDA device here" if torch.version.cuda else "this build of torch is without CUDA"
        return f"cpu; there is no CUDA device: {why}"
    return ", ".join(("cpu", *(f"cuda:{index}" for index in range(device_count))))
