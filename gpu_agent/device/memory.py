"""Rows of bytes by their addresses: what all devices need to plan copies and to know what they may touch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from gpu_agent.core.host_ranges import HostRange, HostRanges
from gpu_agent.core.layers import LayerGroup
from gpu_agent.core.transfers import Move, Part, Transfer, plan_parts
from kvstore.errors import CapacityError


@dataclass(frozen=True, slots=True)
class HostSlots:
    """Blocks in host memory of somebody else, such as slots of the store: one view per row, wherever it lies."""

    views: Sequence[memoryview]


class Registered:
    """The ranges that a device has registered.

    A copy is planned and queued with the lock held, and a range is removed with it before the device waits for what
    is queued: so no copy is ever queued for memory that is being unregistered.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._ranges = HostRanges()

    def add(self, added: HostRange) -> None:
        """Raises `CapacityError` when part of it is registered already."""
        with self.lock:
            if not self._ranges.add(added):
                raise CapacityError(f"some of the {added.size_bytes} bytes at {added.address:#x} is registered already")

    def remove(self, removed: HostRange) -> None:
        with self.lock:
            self._ranges.remove(removed)

    @property
    def size_bytes(self) -> int:
        with self.lock:
            return self._ranges.size_bytes

    def plan(
        self,
        slots: HostSlots,
        slot_rows: Sequence[int],
        *,
        pool: Tensor,
        pool_rows: Sequence[int],
        is_offload: bool,
        groups: Sequence[Sequence[Part]],
    ) -> list[list[Transfer]] | None:
        """Copies from the pool into slots, or from slots into the pool; None when not all slots are registered for it.

        Wants the lock held until the copies are queued.
        """
        moves = []
        for row, pool_address in zip(slot_rows, _addresses(pool, pool_rows), strict=True):
            slot = slots.views[row]
            assert len(slot) == pool.shape[1], f"a slot of {len(slot)} bytes for rows of {pool.shape[1]}"
            address = address_of(slot)
            found = self._ranges.find(address, len(slot), is_written=is_offload)
            if found is None:
                return None
            source, target = (pool_address, address) if is_offload else (address, pool_address)
            moves.append(Move(source, target, found.address))
        return plan_parts(moves, groups, block_bytes=pool.shape[1])


def whole_rows(rows: Tensor) -> list[list[Part]]:
    """All of every row, as one group."""
    return [[Part(0, rows.shape[1])]]


def parts_of(groups: Sequence[LayerGroup]) -> list[Sequence[Part]]:
    return [group.parts for group in groups]


def plan_rows(
    *,
    source: Tensor,
    source_rows: Sequence[int],
    target: Tensor,
    target_rows: Sequence[int],
    groups: Sequence[Sequence[Part]],
) -> list[list[Transfer]]:
    """Copies of these parts of rows as transfers; rows that do not fit each other are a bug."""
    assert len(source_rows) == len(target_rows), f"{len(source_rows)} rows into {len(target_rows)}"
    assert source.shape[1] == target.shape[1], f"rows of {source.shape[1]} bytes into {target.shape[1]}"
    addresses = zip(_addresses(source, source_rows), _addresses(target, target_rows), strict=True)
    return plan_parts([Move(*pair) for pair in addresses], groups, block_bytes=source.shape[1])


def address_of(view: memoryview) -> int:
    """Of the first byte, also of memory that may only be read."""
    address: int = np.frombuffer(view, dtype=np.uint8).ctypes.data
    return address


def _addresses(rows: Tensor, indices: Sequence[int]) -> list[int]:
    row_count, pitch_bytes, base = rows.shape[0], rows.stride(0), rows.data_ptr()
    assert rows.element_size() == rows.stride(1) == 1, f"rows of {rows.dtype}, {rows.stride(1)} apart"
    assert all(0 <= index < row_count for index in indices), f"rows {indices} of {row_count}"
    return [base + index * pitch_bytes for index in indices]
