"""A CUDA device: pool in VRAM, page-locked staging, an own stream and events."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gpu_agent.core.host_ranges import HostRange
from gpu_agent.core.layers import LayerGroup
from gpu_agent.core.link import Direction, LinkSample
from gpu_agent.core.transfers import Part, Transfer
from gpu_agent.device.base import CallerRows, Event
from gpu_agent.device.cudart import load_cudart
from gpu_agent.device.memory import HostSlots, Registered, address_of, parts_of, plan_rows, whole_rows
from gpu_agent.device.meter import LinkMeter
from gpu_agent.device.paged import PagedBlocks, PagedCache, move_pages
from gpu_agent.device.sharing import PoolHandle, allocate_on
from kvstore.errors import CapacityError, InternalError, InvalidArgumentError
from kvstore_client.agent.cuda import uuid_of

if TYPE_CHECKING:
    from gpu_agent.device.paged_kernel import PageMover


class _CudaEvent:
    """Waits by sleeping in the driver, not by spinning: the engine needs this core."""

    __slots__ = ("_event",)

    def __init__(self, stream: torch.cuda.Stream, *, is_timed: bool = False) -> None:
        self._event = torch.cuda.Event(blocking=True, enable_timing=is_timed)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        try:
            self._event.synchronize()
        except RuntimeError as error:  # torch.AcceleratorError is one; the CUDA context is lost after it
            raise InternalError(f"copy failed: {error}") from error

    def is_over(self) -> bool:
        try:
            return bool(self._event.query())  # type: ignore[no-untyped-call]
        except RuntimeError:  # `wait` says why
            return True

    def hold_back(self, stream: torch.cuda.Stream) -> None:
        """What is queued on `stream` from now on starts after this event; the host does not wait."""
        stream.wait_event(self._event)

    def since_s(self, start: _CudaEvent) -> float | None:
        """Between two timed events that are over; None: a copy failed."""
        try:
            return float(start._event.elapsed_time(self._event)) / 1000
        except RuntimeError:
            return None


class _Submission(NamedTuple):
    """Copies that were queued as one, and what their start and end say when they are over."""

    direction: Direction
    size_bytes: int
    start: _CudaEvent
    end: _CudaEvent


class _Stopwatch:
    """How long submissions to one stream took, looked at when they are over: nobody ever waits for that."""

    def __init__(self) -> None:
        self._meter = LinkMeter()
        self._lock = threading.Lock()
        self._running: deque[_Submission] = deque()

    def started(self, submission: _Submission) -> None:
        self._meter.queue(submission.direction, submission.size_bytes)
        with self._lock:
            self._running.append(submission)
            self._harvest()

    def sample(self) -> LinkSample:
        with self._lock:
            self._harvest()
        return self._meter.sample()

    def _harvest(self) -> None:
        while self._running and self._running[0].end.is_over():
            over = self._running.popleft()
            busy_s = over.end.since_s(over.start)
            if busy_s is None:
                self._meter.fail(over.direction, over.size_bytes)
            else:
                self._meter.retire(over.direction, over.size_bytes, busy_s=busy_s)


class CudaDevice:
    """Copies run on one stream of their own, through the copy engines: neighbouring rows as one DMA, using no SM.

    Pages of an engine's cache are gathered and scattered by one kernel per batch, on that same stream.
    """

    def __init__(self, *, index: int, shares_pools: bool = False) -> None:
        count = torch.cuda.device_count()
        if index >= count:
            raise InvalidArgumentError.of("device", f"cuda:{index}", _allowed(count))
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(device=self._device)  # type: ignore[no-untyped-call]
        self._cudart = load_cudart()
        self._shares_pools = shares_pools
        self._registered = Registered()
        self._submitting = threading.Lock()
        self._stopwatch = _Stopwatch()
        self._page_movers: WeakKeyDictionary[PagedCache, PageMover | None] = WeakKeyDictionary()

    @property
    def name(self) -> str:
        return str(self._device)

    @property
    def memory_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self._device).total_memory)

    def allocate_pool(self, *, slot_count: int, block_bytes: int) -> Tensor:
        if self._shares_pools:
            return allocate_on(self._cudart, self._device, slot_count=slot_count, block_bytes=block_bytes)
        return self.allocate_scratch(row_count=slot_count, block_bytes=block_bytes)

    def share_pool(self, pool: Tensor) -> PoolHandle:
        assert self._shares_pools, "a pool that torch has allocated is part of a larger allocation"
        assert self._cudart is not None, "a shared pool was allocated without a CUDA runtime"
        with torch.cuda.device(self._device):
            ipc_handle = self._cudart.ipc_handle(pool.data_ptr())
        return PoolHandle(
            slot_count=pool.shape[0],
            block_bytes=pool.shape[1],
            device_uuid=uuid_of(self._device),
            ipc_handle=ipc_handle,
        )

    def allocate_staging(self, *, row_count: int, block_bytes: int) -> Tensor:
        try:
            return torch.empty((row_count, block_bytes), dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise CapacityError(f"no {row_count * block_bytes} bytes of page-locked memory: {error}") from error

    def allocate_scratch(self, *, row_count: int, block_bytes: int) -> Tensor:
        try:
            rows = torch.empty((row_count, block_bytes), dtype=torch.uint8, device=self._device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            raise CapacityError(f"no {row_count * block_bytes} bytes on {self.name}: {error}") from error
        # The allocator may hand out memory that work on the current stream is still using.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return rows

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
        (event,) = self._copy_parts(
            source, source_rows, target, target_rows, whole_rows(source), direction=_direction(target)
        )
        return event

    def copy_layers(
        self,
        *,
        source: Tensor,
        source_rows: Sequence[int],
        target: Tensor,
        target_rows: Sequence[int],
        groups: Sequence[LayerGroup],
    ) -> Sequence[_CudaEvent]:
        return self._copy_parts(
            source, source_rows, target, target_rows, parts_of(groups), direction=_direction(target)
        )

    def offload_to_slots(self, pool: Tensor, pool_rows: Sequence[int], *, slots: HostSlots) -> _CudaEvent | None:
        events = self._copy_slots(
            slots, range(len(slots.views)), pool, pool_rows, whole_rows(pool), direction=Direction.D2H
        )
        return None if events is None else events[0]

    def load_from_slots(
        self, slots: HostSlots, slot_rows: Sequence[int], *, pool: Tensor, pool_rows: Sequence[int]
    ) -> _CudaEvent | None:
        events = self._copy_slots(slots, slot_rows, pool, pool_rows, whole_rows(pool), direction=Direction.H2D)
        return None if events is None else events[0]

    def load_layers_from_slots(
        self,
        slots: HostSlots,
        slot_rows: Sequence[int],
        *,
        pool: Tensor,
        pool_rows: Sequence[int],
        groups: Sequence[LayerGroup],
    ) -> Sequence[_CudaEvent] | None:
        return self._copy_slots(slots, slot_rows, pool, pool_rows, parts_of(groups), direction=Direction.H2D)

    def _copy_slots(
        self,
        slots: HostSlots,
        slot_rows: Sequence[int],
        pool: Tensor,
        pool_rows: Sequence[int],
        groups: Sequence[Sequence[Part]],
        *,
        direction: Direction,
    ) -> list[_CudaEvent] | None:
        is_offload = direction is Direction.D2H
        with self._registered.lock:
            planned = self._registered.plan(
                slots, slot_rows, pool=pool, pool_rows=pool_rows, is_offload=is_offload, groups=groups
            )
            return None if planned is None else self._queue(planned, direction=direction)

    def _copy_parts(
        self,
        source: Tensor,
        source_rows: Sequence[int],
        target: Tensor,
        target_rows: Sequence[int],
        groups: Sequence[Sequence[Part]],
        *,
        direction: Direction | None,
    ) -> list[_CudaEvent]:
        if self._cudart is not None:
            planned = plan_rows(
                source=source, source_rows=source_rows, target=target, target_rows=target_rows, groups=groups
            )
            return self._queue(planned, direction=direction)
        # Row by row: torch knows no copy with two pitches between host and device that does not wait.
        pairs = list(zip(source_rows, target_rows, strict=True))

        def copy(group: Sequence[Part]) -> None:
            for offset_bytes, part_bytes in group:
                for source_row, target_row in pairs:
                    into = target[target_row].narrow(0, offset_bytes, part_bytes)
                    into.copy_(source[source_row].narrow(0, offset_bytes, part_bytes), non_blocking=True)

        size_bytes = len(pairs) * sum(part.size_bytes for group in groups for part in group)
        return self._submit([partial(copy, group) for group in groups], direction=direction, size_bytes=size_bytes)

    def _queue(self, planned: Sequence[Sequence[Transfer]], *, direction: Direction | None) -> list[_CudaEvent]:
        cudart, stream = self._cudart, self._stream.cuda_stream
        assert cudart is not None, "only a CUDA runtime registers memory and plans for it"

        def copy(transfers: Sequence[Transfer]) -> None:
            for transfer in transfers:
                cudart.copy(transfer, stream=stream)

        size_bytes = sum(transfer.size_bytes for transfers in planned for transfer in transfers)
        return self._submit(
            [partial(copy, transfers) for transfers in planned], direction=direction, size_bytes=size_bytes
        )

    def _submit(
        self, copies: Sequence[Callable[[], None]], *, direction: Direction | None, size_bytes: int
    ) -> list[_CudaEvent]:
        """Queues these one after the other, and nothing of others between them; one event behind each.

        Those of a direction are timed.
        """
        is_timed = direction is not None
        try:
            with self._submitting, torch.cuda.stream(self._stream):
                start = _CudaEvent(self._stream, is_timed=is_timed)
                events = []
                for copy in copies:
                    copy()
                    events.append(_CudaEvent(self._stream, is_timed=is_timed))
                if direction is not None:
                    self._stopwatch.started(_Submission(direction, size_bytes, start, events[-1]))
                return events
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
            (event,) = self._copy_parts(source, source_rows, target, target_rows, whole_rows(source), direction=None)
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

    def compute(self, work: Callable[[], None]) -> _CudaEvent:
        (event,) = self._submit([work], direction=None, size_bytes=0)
        return event

    def before_caller(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent), f"{event} is not of this device"
        event.hold_back(torch.cuda.current_stream(self._device))

    def follow_caller(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def link(self) -> LinkSample:
        return self._stopwatch.sample()

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


def _direction(target: Tensor) -> Direction:
    return Direction.H2D if target.is_cuda else Direction.D2H


def _tensors(rows: CallerRows) -> list[Tensor]:
    return [rows] if isinstance(rows, Tensor) else [tensor for layer in rows.cache.layers for tensor in layer]


def _allowed(device_count: int) -> str:
    if device_count == 0:
        why = "torch sees no CUDA device here" if torch.version.cuda else "this build of torch is without CUDA"
        return f"cpu; there is no CUDA device: {why}"
    return ", ".join(("cpu", *(f"cuda:{index}" for index in range(device_count))))
