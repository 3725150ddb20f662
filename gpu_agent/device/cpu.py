"""A device in host memory: the same asynchrony as a GPU's copy engine, on every machine."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from gpu_agent.core.host_ranges import HostRange
from gpu_agent.core.transfers import Transfer
from gpu_agent.device.base import CallerRows
from gpu_agent.device.memory import HostSlots, Registered, address_of, plan_rows
from gpu_agent.device.paged import move_pages
from kvstore.errors import CapacityError, InternalError


@dataclass(slots=True)
class _CpuEvent:
    _retired: threading.Event = field(default_factory=threading.Event)
    _failure: str | None = None

    def wait(self) -> None:
        self.wait_retired()
        if self._failure is not None:
            raise InternalError(f"copy failed: {self._failure}")

    def wait_retired(self) -> None:
        self._retired.wait()

    def retire(self, failure: str | None = None) -> None:
        self._failure = failure
        self._retired.set()


@dataclass(frozen=True, slots=True)
class _Copy:
    """Transfers, or pages to gather or scatter; `ends` keeps the memory of both ends alive until then."""

    ends: tuple[object, ...]
    event: _CpuEvent
    transfers: Sequence[Transfer] = ()
    block_bytes: int = 0
    move_pages: Callable[[], None] | None = None


class CpuDevice:
    """A worker thread is the copy stream: copies happen later and in order, and read their source only then.

    `latency_s` before each submission's copies and `link_bytes_per_s` between its blocks imitate a slow link,
    so that whoever does not wait for an event is caught reading too early or overwriting too soon. It reaches host
    memory of others only after `register_host`, of which it takes `registered_bytes_max`, as a GPU would.
    """

    def __init__(
        self,
        *,
        latency_s: float = 0.0,
        link_bytes_per_s: float | None = None,
        registered_bytes_max: int | None = None,
    ) -> None:
        self._latency_s = latency_s
        self._link_bytes_per_s = link_bytes_per_s
        self._registered_bytes_max = registered_bytes_max
        self.registered = Registered()
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
        return _allocate(slot_count, block_bytes)

    def allocate_staging(self, *, row_count: int, block_bytes: int) -> Tensor:
        return _allocate(row_count, block_bytes)

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
        transfers = plan_rows(source=source, source_rows=source_rows, target=target, target_rows=target_rows)
        return self._queue_transfers(transfers, source, target, block_bytes=source.shape[1])

    def offload_to_slots(self, pool: Tensor, pool_rows: Sequence[int], *, slots: HostSlots) -> _CpuEvent | None:
        return self._copy_slots(slots, range(len(slots.views)), pool=pool, pool_rows=pool_rows, is_offload=True)

    def load_from_slots(
        self, slots: HostSlots, slot_rows: Sequence[int], *, pool: Tensor, pool_rows: Sequence[int]
    ) -> _CpuEvent | None:
        return self._copy_slots(slots, slot_rows, pool=pool, pool_rows=pool_rows, is_offload=False)

    def _copy_slots(
        self, slots: HostSlots, slot_rows: Sequence[int], *, pool: Tensor, pool_rows: Sequence[int], is_offload: bool
    ) -> _CpuEvent | None:
        with self.registered.lock:
            transfers = self.registered.plan(slots, slot_rows, pool=pool, pool_rows=pool_rows, is_offload=is_offload)
            if transfers is None:
                return None
            return self._queue_transfers(transfers, slots, pool, block_bytes=pool.shape[1])

    def copy_rows_for_caller(
        self, *, source: CallerRows, source_rows: Sequence[int], target: CallerRows, target_rows: Sequence[int]
    ) -> _CpuEvent:
        if isinstance(source, Tensor) and isinstance(target, Tensor):
            event = self.copy_rows(source=source, source_rows=source_rows, target=target, target_rows=target_rows)
        else:
            pages = partial(move_pages, source=source, source_rows=source_rows, target=target, target_rows=target_rows)
            event = self._queue(_Copy(ends=(source, target), event=_CpuEvent(), move_pages=pages))
        event.wait()
        return event

    def wait_idle(self) -> None:
        """Until everything that was queued has retired, however it ended; at once when the device is closed."""
        if self._worker.is_alive():
            self._queue(_Copy(ends=(), event=_CpuEvent())).wait_retired()

    def close(self) -> None:
        self._copies.put(None)
        self._worker.join()

    def _queue_transfers(self, transfers: Sequence[Transfer], *ends: object, block_bytes: int) -> _CpuEvent:
        return self._queue(_Copy(ends=ends, event=_CpuEvent(), transfers=transfers, block_bytes=block_bytes))

    def _queue(self, copy: _Copy) -> _CpuEvent:
        self._copies.put(copy)
        return copy.event

    def _run(self) -> None:
        while (copy := self._copies.get()) is not None:
            try:
                self._copy(copy)
            except RuntimeError as error:  # what torch raises for tensors that do not fit each other
                copy.event.retire(str(error))
            else:
                copy.event.retire()

    def _copy(self, copy: _Copy) -> None:
        if self._latency_s:
            time.sleep(self._latency_s)
        if copy.move_pages is not None:
            copy.move_pages()
        for transfer in copy.transfers:
            for row in range(transfer.row_count):
                source = transfer.source + row * transfer.source_pitch_bytes
                target = transfer.target + row * transfer.target_pitch_bytes
                for offset in range(0, transfer.row_bytes, copy.block_bytes):
                    if self._link_bytes_per_s is not None:
                        time.sleep(copy.block_bytes / self._link_bytes_per_s)
                    ctypes.memmove(target + offset, source + offset, copy.block_bytes)


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


def _allocate(row_count: int, block_bytes: int) -> Tensor:
    try:
        return torch.empty((row_count, block_bytes), dtype=torch.uint8)
    except RuntimeError as error:
        raise CapacityError(f"no {row_count * block_bytes} bytes of host memory: {error}") from error
