"""What the agent needs of a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from torch import Tensor

from gpu_agent.device.memory import HostSlots
from gpu_agent.device.paged import PagedBlocks

CallerRows: TypeAlias = Tensor | PagedBlocks
"""The caller's end of a copy: rows of its own, or pages of an engine's cache."""


class Event(Protocol):
    """A point on the copy stream."""

    def wait(self) -> None:
        """Blocks this thread, and nothing else, until every copy before this point has retired.

        Raises `InternalError` when the copy that this event belongs to failed.
        """


class Registration(Protocol):
    """Host memory that the device reaches by DMA until `unregister`; the memory stays mapped that long."""

    def unregister(self) -> None:
        """Waits for the copies that are queued; doing so twice changes nothing. Raises `InternalError`."""


class Device(Protocol):
    """Memory for a pool, and one copy stream on which everything that touches the pool moves, in order.

    Tensors are two-dimensional, uint8, one block per row, rows contiguous. Because there is one stream, a slot of the
    pool may be handed on as soon as the copy that reads it was submitted: what overwrites it queues behind. Host
    memory has no such order: staging, and slots of the store, may be read, or filled again, only after `wait` on the
    event of the last copy that touched them. Never synchronises the whole device.
    """

    @property
    def name(self) -> str: ...

    @property
    def memory_bytes(self) -> int:
        """All that the device has, used or not; no pool can be larger."""

    def allocate_pool(self, *, slot_count: int, block_bytes: int) -> Tensor:
        """One allocation, made once; raises `CapacityError` when the device has no room for it."""

    def allocate_staging(self, *, row_count: int, block_bytes: int) -> Tensor:
        """Host memory that the device reaches by DMA; raises `CapacityError`."""

    def register_host(self, memory: memoryview, *, is_read_only: bool) -> Registration:
        """Makes host memory of somebody else reachable by DMA: takes about as long as touching every page of it.

        Raises `CapacityError` when the device, the driver or a limit does not allow it.
        """

    def copy_rows(
        self, *, source: Tensor, source_rows: Sequence[int], target: Tensor, target_rows: Sequence[int]
    ) -> Event:
        """Queues copies between the pool and staging, in either direction; returns at once.

        Neighbouring rows travel as one DMA. Both ends belong to the agent, so this waits for nothing that the engine
        computes.
        """

    def offload_to_slots(self, pool: Tensor, pool_rows: Sequence[int], *, slots: HostSlots) -> Event | None:
        """As `copy_rows`, from the pool into all of these slots by DMA.

        None, and nothing is queued, when not all of them lie in memory that is registered for writing.
        """

    def load_from_slots(
        self, slots: HostSlots, slot_rows: Sequence[int], *, pool: Tensor, pool_rows: Sequence[int]
    ) -> Event | None:
        """As `copy_rows`, from slots into the pool by DMA; None when not all of these lie in registered memory."""

    def copy_rows_for_caller(
        self, *, source: CallerRows, source_rows: Sequence[int], target: CallerRows, target_rows: Sequence[int]
    ) -> Event:
        """Queues copies of which one end is the caller's, and closes both halves of the race.

        The copies come after all work that the caller's current stream has queued, so nothing is read before
        it was computed; and whatever the caller does with its end after the return, on the host or on that
        stream, comes after the copies. Raises `InternalError` when a copy failed.
        """

    def close(self) -> None:
        """Waits for what is queued; nothing may be submitted afterwards."""
