"""What the agent needs of a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Event(Protocol):
    """A point on the copy stream."""

    def wait(self) -> None:
        """Blocks this thread, and nothing else, until every copy before this point has retired.

        Raises `InternalError` when the copy that this event belongs to failed.
        """


class Device(Protocol):
    """Memory for a pool, and one copy stream on which everything that touches the pool moves, in order.

    All tensors here are two-dimensional, uint8, one block per row, rows contiguous. Because there is one
    stream, a slot may be handed on as soon as the copy that reads it was submitted: what overwrites it
    queues behind. Host memory has no such order: staging may be read, or filled again, only after `wait`
    on the event of the last copy that touched it. Never synchronises the whole device.
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

    def copy_rows(
        self, *, source: Tensor, source_rows: Sequence[int], target: Tensor, target_rows: Sequence[int]
    ) -> Event:
        """Queues copies between the pool and staging, in either direction; returns at once.

        Both ends belong to the agent, so this waits for nothing that the engine computes.
        """

    def copy_rows_for_caller(
        self, *, source: Tensor, source_rows: Sequence[int], target: Tensor, target_rows: Sequence[int]
    ) -> Event:
        """Queues copies of which one end is the caller's tensor, and closes both halves of the race.

        The copies come after all work that the caller's current stream has queued, so nothing is read before
        it was computed; and whatever the caller does with its tensor after the return, on the host or on that
        stream, comes after the copies. Raises `InternalError` when a copy failed.
        """

    def close(self) -> None:
        """Waits for what is queued; nothing may be submitted afterwards."""
