"""A CUDA device: pool in VRAM, page-locked staging, an own stream and events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gpu_agent.core.host_ranges import HostRange
from gpu_agent.core.transfers import Transfer
from gpu_agent.device.base import CallerRows
from gpu_agent.device.cudart import load_cudart
from gpu_agent.device.memory import HostSlots, Registered, address_of, plan_rows
from gpu_agent.device.paged import PagedBlocks, PagedCache, move_pages
from kvstore.errors import CapacityError, InternalError, InvalidArgumentError

if TYPE_CHECKING:
    from gpu_agent.device.paged_kernel import PageMover


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
    """Copies run on one stream of their own, through the copy engines: neighbouring rows as one DMA, using no SM.

    Pages of an engine's cache are gathered and scattered by one kernel per batch, on that same stream.
    """

    def __init__(self, *, index: int) -> None:
        count = torch.cuda.device_count()
        if index >= count:
            raise InvalidArgumentError.of("device", f"cuda:{index}", _allowed(count))
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(device=self._device)  # type: ignore[no-untyped-call]
        self._cudart = load_cudart()
        self._registered = Registered()
        self._page_movers: WeakKeyDictionary[PagedCache, PageMover | None] = WeakKeyDictionary()

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

    def register_host(self, memory: memoryview, *, is_read_only: bool) -> _CudaRegistration:
        if self._cudart is None:
            raise CapacityError("no CUDA runtime library was found beside torch, so host memory cannot be registered")
        added = HostRange(address_of(memory), len(memory), is_read_only)
        with torch.cuda.device(self._device):
            is_ours = self._cudart.register(added.address, added.size_bytes, is_read_only=is_read_only)
        self._registered.add(added)
        return _CudaRegistration(self, added, memory, is_ours=is_ours)

    def unregister_host(self, removed: HostRange, *, is_ours: bool) -> None:
        assert self._cudart is not None, f"{removed} was registered without a CUDA runtime"
        self._registered.remove(removed)
        self._drain()
        if is_ours:
            with torch.cuda.device(self._device):
                self._cudart.unregister(removed.address)

    def copy_rows(
        self, *, source: Tensor, source_rows: Sequence[int], target: Tensor, target_rows: Sequence[int]
    ) -> _CudaEvent:
        transfers = plan_rows(source=source, source_rows=source_rows, target=target, target_rows=target_rows)
        if self._cudart is not None:
            return self._queue(transfers)
        # Row by row: torch knows no copy with two pitches between host and device that does not wait.
        try:
            with torch.cuda.stream(self._stream):
                for source_row, target_row in zip(source_rows, target_rows, strict=True):
                    target[target_row].copy_(source[source_row], non_blocking=True)
                return _CudaEvent(self._stream)
        except RuntimeError as error:
            raise InternalError(f"copy failed: {error}") from error

    def offload_to_slots(self, pool: Tensor, pool_rows: Sequence[int], *, slots: HostSlots) -> _CudaEvent | None:
        return self._copy_slots(slots, range(len(slots.views)), pool=pool, pool_rows=pool_rows, is_offload=True)

    def load_from_slots(
        self, slots: HostSlots, slot_rows: Sequence[int], *, pool: Tensor, pool_rows: Sequence[int]
    ) -> _CudaEvent | None:
        return self._copy_slots(slots, slot_rows, pool=pool, pool_rows=pool_rows, is_offload=False)

    def _copy_slots(
        self, slots: HostSlots, slot_rows: Sequence[int], *, pool: Tensor, pool_rows: Sequence[int], is_offload: bool
    ) -> _CudaEvent | None:
        with self._registered.lock:
            transfers = self._registered.plan(slots, slot_rows, pool=pool, pool_rows=pool_rows, is_offload=is_offload)
            return None if transfers is None else self._queue(transfers)

    def _queue(self, transfers: Sequence[Transfer]) -> _CudaEvent:
        assert self._cudart is not None, "only a CUDA runtime registers memory and plans for it"
        try:
            with torch.cuda.stream(self._stream):
                for transfer in transfers:
                    self._cudart.copy(transfer, stream=self._stream.cuda_stream)
                return _CudaEvent(self._stream)
        except InternalError:
            # The caller takes its memory back now, so what was queued before must have ended.
            self._drain()
            raise
        except RuntimeError as error:
            raise InternalError(f"copy failed: {error}") from error

    def copy_rows_for_caller(
        self, *, source: CallerRows, source_rows: Sequence[int], target: CallerRows, target_rows: Sequence[int]
    ) -> _CudaEvent:
        callers_stream = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(callers_stream)
        if isinstance(source, Tensor) and isinstance(target, Tensor):
            event = self.copy_rows(source=source, source_rows=source_rows, target=target, target_rows=target_rows)
        else:
            event = self._move_pages(source, source_rows, target, target_rows)
        tensors = [*_tensors(source), *_tensors(target)]
        if all(tensor.is_cuda for tensor in tensors):
            event.hold_back(callers_stream)
            for tensor in tensors:
                # The caching allocator must not give the caller's memory away while this stream uses it.
                tensor.record_stream(self._stream)
        else:
            # One end is in host memory, and host code heeds no stream.
            event.wait()
        return event

    def close(self) -> None:
        self._stream.synchronize()

    def _drain(self) -> None:
        try:
            self._stream.synchronize()
        except RuntimeError as error:
            raise InternalError(f"copy failed: {error}") from error

    def _move_pages(
        self, source: CallerRows, source_rows: Sequence[int], target: CallerRows, target_rows: Sequence[int]
    ) -> _CudaEvent:
        paged, rows, is_gather = (source, target, True) if isinstance(source, PagedBlocks) else (target, source, False)
        assert isinstance(paged, PagedBlocks), "neither end has pages"
        assert isinstance(rows, Tensor), "pages into pages"
        try:
            with torch.cuda.stream(self._stream):
                mover = self._page_mover(paged.cache)
                if mover is None:
                    move_pages(source=source, source_rows=source_rows, target=target, target_rows=target_rows)
                else:
                    row_indices, indices = (target_rows, source_rows) if is_gather else (source_rows, target_rows)
                    payloads = [rows.data_ptr() + row * rows.stride(0) for row in row_indices]
                    mover.move(paged, indices, payloads=payloads, is_gather=is_gather)
                return _CudaEvent(self._stream)
        except RuntimeError as error:
            raise InternalError(f"copy failed: {error}") from error

    def _page_mover(self, cache: PagedCache) -> PageMover | None:
        """The kernel for this cache; None where there is no triton, or the cache is in host memory."""
        if cache not in self._page_movers:
            self._page_movers[cache] = _open_page_mover(cache)
        return self._page_movers[cache]


class _CudaRegistration:
    def __init__(self, device: CudaDevice, registered: HostRange, memory: memoryview, *, is_ours: bool) -> None:
        self._is_ours = is_ours
        self._device = device
        self._registered = registered
        self._memory: memoryview | None = memory

    def unregister(self) -> None:
        if self._memory is not None:
            self._device.unregister_host(self._registered, is_ours=self._is_ours)
            self._memory = None


def _open_page_mover(cache: PagedCache) -> PageMover | None:
    if cache.device.type != "cuda":
        return None
    try:
        from gpu_agent.device.paged_kernel import PageMover
    except ModuleNotFoundError:
        return None
    return PageMover(cache.pieces, device=cache.device)


def _tensors(rows: CallerRows) -> list[Tensor]:
    return [rows] if isinstance(rows, Tensor) else [tensor for layer in rows.cache.layers for tensor in layer]


def _allowed(device_count: int) -> str:
    if device_count == 0:
        why = "torch sees no CUDA device here" if torch.version.cuda else "this build of torch is without CUDA"
        return f"cpu; there is no CUDA device: {why}"
    return ", ".join(("cpu", *(f"cuda:{index}" for index in range(device_count))))
