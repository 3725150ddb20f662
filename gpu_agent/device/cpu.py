"""A device in host memory: the same asynchrony as a GPU's copy engine, on every machine."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from gpu_agent.core.host_ranges import HostRange
from gpu_agent.core.layers import LayerGroup
from gpu_agent.core.link import Direction, LinkSample
from gpu_agent.core.transfers import Part, Transfer
from gpu_agent.device.base import CallerRows, Event
from gpu_agent.device.memory import HostSlots, Registered, address_of, parts_of, plan_rows, whole_rows
from gpu_agent.device.meter import LinkMeter
from gpu_agent.device.paged import move_pages
from gpu_agent.device.sharing import HostPool, PoolHandle
from kvstore.errors import CapacityError, InternalError


@dataclass(slots=True)
class _CpuEvent:
    _retired: threading.Event = field(default_factory=threading.Event)
    _failure: str | None = None

    def wait(self) -> None:
        self.wait_retired()
        if self._failure is not None:
            raise InternalError(f"copy failed: {self._failure}")

    def is_over(self) -> bool:
        return self._retired.is_set()

    def wait_retired(self) -> None:
        self._retired.wait()

    def retire(self, failure: str | None = None) -> None:
        self._failure = failure
        self._retired.set()


@dataclass(frozen=True, slots=True)
class _Copy:
    """Transfers, or work such as pages to gather; `ends` keeps the memory of both ends alive until then."""

    ends: tuple[object, ...]
    event: _CpuEvent
    not_before_s: float
    direction: Direction | None = None
    """None: it does not cross the link."""
    transfers: Sequence[Transfer] = ()
    work: Callable[[], None] | None = None

    @property
    def size_bytes(self) -> int:
        return sum(transfer.size_bytes for transfer in self.transfers)


class CpuDevice:
    """A worker thread is the copy stream: copies happen later and in order, and read their source only then.

    So whoever does not wait for an event is caught reading too early or overwriting too soon. `latency_s` is the least
    time from a submission to its first byte. `link_bytes_per_s` is how fast pieces of blocks arrive between the pool
    and host memory, on the average exactly; either direction may have a rate of its own. Copies from and to the
    caller's memory are within the device and have no rate. `delay` is called before every piece, and says how many
    seconds it comes later. Memory of others is reached only after `register_host`, of which the device takes
    `registered_bytes_max`, as a GPU would.
    """

    def __init__(
        self,
        *,
        latency_s: float = 0.0,
        link_bytes_per_s: float | None = None,
        h2d_bytes_per_s: float | None = None,
        d2h_bytes_per_s: float | None = None,
        delay: Callable[[], float] | None = None,
        registered_bytes_max: int | None = None,
        shares_pools: bool = False,
    ) -> None:
        self._latency_s = latency_s
        self._bytes_per_s = {
            Direction.H2D: h2d_bytes_per_s or link_bytes_per_s,
            Direction.D2H: d2h_bytes_per_s or link_bytes_per_s,
        }
        self._delay = delay
        self._registered_bytes_max = registered_bytes_max
        self.registered = Registered()
        self._shares_pools = shares_pools
        self._shared: dict[int, HostPool] = {}
        self._pools: set[int] = set()
        self._meter = LinkMeter()
        self._link_free_s = 0.0
        self._copies: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._run, name="kvstore-agent-copies", daemon=True)
        self._worker.start()

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def memory_bytes(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def allocate_pool(self, *, slot_count: int, block_bytes: int) -> Tensor:
        if self._shares_pools:
            shared = HostPool(slot_count=slot_count, block_bytes=block_bytes, memory_bytes=self.memory_bytes)
            pool = shared.memory
            self._shared[_memory_of(pool)] = shared
        else:
            pool = _allocate(slot_count, block_bytes)
        self._pools.add(_memory_of(pool))
        return pool

    def share_pool(self, pool: Tensor) -> PoolHandle:
        shared = self._shared.get(_memory_of(pool))
        assert shared is not None, "not a pool that this device has allocated to be shared"
        return PoolHandle(slot_count=pool.shape[0], block_bytes=pool.shape[1], descriptor=shared.descriptor)

    def allocate_staging(self, *, row_count: int, block_bytes: int) -> Tensor:
        staging = _allocate(row_count, block_bytes)
        self._pools.discard(_memory_of(staging))
        return staging

    def allocate_scratch(self, *, row_count: int, block_bytes: int) -> Tensor:
        scratch = _allocate(row_count, block_bytes)
        self._pools.add(_memory_of(scratch))
        return scratch

    def register_host(self, memory: memoryview, *, is_read_only: bool) -> _CpuRegistration:
        limit_bytes = self._registered_bytes_max
        if limit_bytes is not None and self.registered.size_bytes + len(memory) > limit_bytes:
            raise CapacityError(f"no {len(memory)} bytes more can be registered; the limit is {limit_bytes}")
        added = HostRange(address_of(memory), len(memory), is_read_only)
        self.registered.add(added)
        return _CpuRegistration(self, added, memory)

    def copy_rows(
        self, *, source: Tensor, source_rows: Sequence[int], target: Tensor, target_rows: Sequence[int]
    ) -> _CpuEvent:
        (event,) = self._copy_parts(
            source, source_rows, target, target_rows, whole_rows(source), direction=self._direction(target)
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
    ) -> Sequence[_CpuEvent]:
        return self._copy_parts(
            source, source_rows, target, target_rows, parts_of(groups), direction=self._direction(target)
        )

    def offload_to_slots(self, pool: Tensor, pool_rows: Sequence[int], *, slots: HostSlots) -> _CpuEvent | None:
        events = self._copy_slots(
            slots, range(len(slots.views)), pool, pool_rows, whole_rows(pool), direction=Direction.D2H
        )
        return None if events is None else events[0]

    def load_from_slots(
        self, slots: HostSlots, slot_rows: Sequence[int], *, pool: Tensor, pool_rows: Sequence[int]
    ) -> _CpuEvent | None:
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
    ) -> Sequence[_CpuEvent] | None:
        return self._copy_slots(slots, slot_rows, pool, pool_rows, parts_of(groups), direction=Direction.H2D)

    def copy_rows_for_caller(
        self, *, source: CallerRows, source_rows: Sequence[int], target: CallerRows, target_rows: Sequence[int]
    ) -> _CpuEvent:
        if isinstance(source, Tensor) and isinstance(target, Tensor):
            (event,) = self._copy_parts(source, source_rows, target, target_rows, whole_rows(source), direction=None)
        else:
            pages = partial(move_pages, source=source, source_rows=source_rows, target=target, target_rows=target_rows)
            event = self._queue(self._copy_of(source, target, work=pages))
        event.wait()
        return event

    def compute(self, work: Callable[[], None]) -> _CpuEvent:
        return self._queue(self._copy_of(work=work))

    def before_caller(self, event: Event) -> None:
        """Host code has no stream, so the host waits."""
        event.wait()

    def follow_caller(self) -> None:
        """Host code has no stream: what it has done is done."""

    def link(self) -> LinkSample:
        return self._meter.sample()

    def wait_idle(self) -> None:
        """Until everything that was queued has retired, however it ended; at once when the device is closed."""
        if self._worker.is_alive():
            self._queue(_Copy(ends=(), event=_CpuEvent(), not_before_s=0.0)).wait_retired()

    def close(self) -> None:
        self._copies.put(None)
        self._worker.join()
        while self._shared:
            self._shared.popitem()[1].close()

    def _copy_parts(
        self,
        source: Tensor,
        source_rows: Sequence[int],
        target: Tensor,
        target_rows: Sequence[int],
        groups: Sequence[Sequence[Part]],
        *,
        direction: Direction | None,
    ) -> list[_CpuEvent]:
        planned = plan_rows(
            source=source, source_rows=source_rows, target=target, target_rows=target_rows, groups=groups
        )
        return self._queue_transfers(planned, source, target, direction=direction)

    def _copy_slots(
        self,
        slots: HostSlots,
        slot_rows: Sequence[int],
        pool: Tensor,
        pool_rows: Sequence[int],
        groups: Sequence[Sequence[Part]],
        *,
        direction: Direction,
    ) -> list[_CpuEvent] | None:
        is_offload = direction is Direction.D2H
        with self.registered.lock:
            planned = self.registered.plan(
                slots, slot_rows, pool=pool, pool_rows=pool_rows, is_offload=is_offload, groups=groups
            )
            return None if planned is None else self._queue_transfers(planned, slots, pool, direction=direction)

    def _direction(self, target: Tensor) -> Direction:
        return Direction.H2D if _memory_of(target) in self._pools else Direction.D2H

    def _queue_transfers(
        self, planned: Sequence[Sequence[Transfer]], *ends: object, direction: Direction | None
    ) -> list[_CpuEvent]:
        return [self._queue(self._copy_of(*ends, transfers=transfers, direction=direction)) for transfers in planned]

    def _copy_of(
        self,
        *ends: object,
        transfers: Sequence[Transfer] = (),
        direction: Direction | None = None,
        work: Callable[[], None] | None = None,
    ) -> _Copy:
        return _Copy(
            ends=ends,
            event=_CpuEvent(),
            not_before_s=time.monotonic() + self._latency_s,
            direction=direction,
            transfers=transfers,
            work=work,
        )

    def _queue(self, copy: _Copy) -> _CpuEvent:
        if copy.direction is not None:
            self._meter.queue(copy.direction, copy.size_bytes)
        self._copies.put(copy)
        return copy.event

    def _run(self) -> None:
        while (copy := self._copies.get()) is not None:
            _sleep_until(copy.not_before_s)
            try:
                busy_s = self._copy(copy)
            except RuntimeError as error:  # what torch raises for tensors that do not fit each other
                if copy.direction is not None:
                    self._meter.fail(copy.direction, copy.size_bytes)
                copy.event.retire(str(error))
            else:
                if copy.direction is not None:
                    self._meter.retire(copy.direction, copy.size_bytes, busy_s=busy_s)
                copy.event.retire()

    def _copy(self, copy: _Copy) -> float:
        """Returns for how many seconds it has kept the link busy."""
        bytes_per_s = None if copy.direction is None else self._bytes_per_s[copy.direction]
        began_s = time.monotonic()
        # By what the link would have done, not by when this thread got to run: so its lateness does not add up.
        self._link_free_s = max(self._link_free_s, copy.not_before_s)
        if copy.work is not None:
            self._wait_delay()
            copy.work()
        for source, target, size_bytes in _pieces(copy.transfers):
            self._wait_delay()
            if bytes_per_s is not None:
                self._link_free_s += size_bytes / bytes_per_s
                _sleep_until(self._link_free_s)
            ctypes.memmove(target, source, size_bytes)
        if bytes_per_s is not None:
            return copy.size_bytes / bytes_per_s
        ended_s = time.monotonic()
        self._link_free_s = max(self._link_free_s, ended_s)
        return ended_s - began_s

    def _wait_delay(self) -> None:
        if self._delay is not None:
            time.sleep(self._delay())


class _CpuRegistration:
    def __init__(self, device: CpuDevice, registered: HostRange, memory: memoryview) -> None:
        self._device = device
        self._registered = registered
        self._memory: memoryview | None = memory

    def unregister(self) -> None:
        if self._memory is None:
            return
        self._device.registered.remove(self._registered)
        self._device.wait_idle()
        self._memory = None


def _pieces(transfers: Sequence[Transfer]) -> Iterator[tuple[int, int, int]]:
    """Source, target and size of every piece of a block."""
    for transfer in transfers:
        for row in range(transfer.row_count):
            source = transfer.source + row * transfer.source_pitch_bytes
            target = transfer.target + row * transfer.target_pitch_bytes
            for offset in range(0, transfer.row_bytes, transfer.piece_bytes):
                yield source + offset, target + offset, transfer.piece_bytes


def _sleep_until(when_s: float) -> None:
    left_s = when_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)


def _memory_of(rows: Tensor) -> int:
    return rows.untyped_storage().data_ptr()


def _allocate(row_count: int, block_bytes: int) -> Tensor:
    try:
        return torch.empty((row_count, block_bytes), dtype=torch.uint8)
    except RuntimeError as error:
        raise CapacityError(f"no {row_count * block_bytes} bytes of host memory: {error}") from error
