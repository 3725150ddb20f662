"""What the agent needs of a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from torch import Tensor

from gpu_agent.core.layers import LayerGroup
from gpu_agent.core.link import LinkSample
from gpu_agent.device.memory import HostSlots
from gpu_agent.device.paged import PagedBlocks
from gpu_agent.device.sharing import PoolHandle

CallerRows: TypeAlias = Tensor | PagedBlocks
"""The caller's end of a copy: rows of its own, or pages of an engine's cache."""


class Event(Protocol):
    """A point on the copy stream."""

    def wait(self) -> None:
        """Blocks this thread, and nothing else, until every copy before this point has retired.

        Raises `InternalError` when the copy that this event belongs to failed.
        """

    def is_over(self) -> bool:
        """Whether `wait` would return, or raise, at once."""


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

    def share_pool(self, pool: Tensor) -> PoolHandle:
        """What lets other processes of this node open a pool of a device that shares its pools.

        Raises `CapacityError` when the driver does not allow it.
        """

    def allocate_staging(self, *, row_count: int, block_bytes: int) -> Tensor:
        """Host memory that the device reaches by DMA; raises `CapacityError`."""

    def allocate_scratch(self, *, row_count: int, block_bytes: int) -> Tensor:
        """Memory beside the pool for work of the copy stream, never shared; raises `CapacityError`."""

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

    def copy_layers(
        self,
        *,
        source: Tensor,
        source_rows: Sequence[int],
        target: Tensor,
        target_rows: Sequence[int],
        groups: Sequence[LayerGroup],
    ) -> Sequence[Event]:
        """As `copy_rows`, one group of layers of all rows after the other; one event per group.

        After `wait` on the last event nothing of these copies goes on; each event tells of its own group's failure.
        """

    def offload_to_slots(self, pool: Tensor, pool_rows: Sequence[int], *, slots: HostSlots) -> Event | None:
        """As `copy_rows`, from the pool into all of these slots by DMA.

        None, and nothing is queued, when not all of them lie in memory that is registered for writing.
        """

    def load_from_slots(
        self, slots: HostSlots, slot_rows: Sequence[int], *, pool: Tensor, pool_rows: Sequence[int]
    ) -> Event | None:
        """As `copy_rows`, from slots into the pool by DMA; None when not all of these lie in registered memory."""

    def load_layers_from_slots(
        self,
        slots: HostSlots,
        slot_rows: Sequence[int],
        *,
        pool: Tensor,
        pool_rows: Sequence[int],
        groups: Sequence[LayerGroup],
    ) -> Sequence[Event] | None:
        """As `load_from_slots`, in the order of `copy_layers`."""

    def copy_rows_for_caller(
        self, *, source: CallerRows, source_rows: Sequence[int], target: CallerRows, target_rows: Sequence[int]
    ) -> Event:
        """Queues copies of which one end is the caller's, and closes both halves of the race.

        The copies come after all work that the caller's current stream has queued, so nothing is read before
        it was computed; and whatever the caller does with its end after the return, on the host or on that
        stream, comes after the copies. Raises `InternalError` when a copy failed.
        """

    def compute(self, work: Callable[[], None]) -> Event:
        """Queues what torch does to the pool and to scratch on the copy stream; `work` itself waits for nothing.

        All that it touches must last until the event.
        """

    def before_caller(self, event: Event) -> None:
        """What the caller's current stream is given from now on starts after this event of this device.

        Where callers have no stream, this is `event.wait()`.
        """

    def follow_caller(self) -> None:
        """What is queued from now on comes after all work that the caller's current stream has queued until now."""

    def link(self) -> LinkSample:
        """What has crossed the link until now, apart from copies for the caller; waits for nothing."""

    def close(self) -> None:
        """Waits for what is queued; nothing may be submitted afterwards."""
