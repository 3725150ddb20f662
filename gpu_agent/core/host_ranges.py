"""Which host memory a device reaches by DMA."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple


class HostRange(NamedTuple):
    """Memory that was registered as one piece."""

    address: int
    size_bytes: int
    is_read_only: bool
    """The device may read it and not write to it."""


class HostRanges:
    """Registered ranges by address. They never overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: list[HostRange] = []

    def add(self, added: HostRange) -> bool:
        """False, and nothing changes, when part of it is registered already."""
        index = bisect_right(self._starts, added.address)
        if index and self._end(index - 1) > added.address:
            return False
        if index < len(self._ranges) and added.address + added.size_bytes > self._starts[index]:
            return False
        self._starts.insert(index, added.address)
        self._ranges.insert(index, added)
        return True

    def remove(self, removed: HostRange) -> None:
        index = bisect_right(self._starts, removed.address) - 1
        assert index >= 0, f"nothing is registered at {removed.address:#x}"
        assert self._ranges[index] == removed, f"{self._ranges[index]} is registered, not {removed}"
        del self._starts[index], self._ranges[index]

    def find(self, address: int, size_bytes: int, *, is_written: bool) -> HostRange | None:
        """The range that holds all of these bytes and allows what is meant with them."""
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address + size_bytes > self._end(index):
            return None
        found = self._ranges[index]
        return None if is_written and found.is_read_only else found

    @property
    def size_bytes(self) -> int:
        return sum(known.size_bytes for known in self._ranges)

    def _end(self, index: int) -> int:
        return self._ranges[index].address + self._ranges[index].size_bytes
