"""Which blocks have left, or never came: 16 bytes for two of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from zlib import crc32

WEIGHT = 2
"""Blocks that a ghost stands for: every second key leaves one."""
_MIX = 0x9E3779B97F4A7C15  # 2^64 by the golden ratio
_MASK_64 = 0xFFFFFFFFFFFFFFFF
_SLOT_BITS = 24
_SLOT_MASK = (1 << _SLOT_BITS) - 1
_PRINT_SHIFT = _SLOT_BITS - 1
_PRINT_MASK = _MASK_64 & ~_SLOT_MASK  # for bits 1 to 40 of the hash
_TABLE_SHIFT = 40


class GhostTable:
    """Remembers a small number for every second key, until another key takes its place.

    A key has one place. Of 40 bits of its hash another key there may have the same once in a trillion times, and is
    then taken for it: that costs a wrong guess, and no more.
    """

    def __init__(self, *, size_min: int) -> None:
        self._entries = array("Q", bytes(8 << (size_min - 1).bit_length()))  # print | number + 1; 0: free
        self._mask = len(self._entries) - 1
        self._count = 0
        self._hand = 0

    def __len__(self) -> int:
        return self._count

    def put(self, keys: Sequence[object], number: int) -> tuple[int, list[int]]:
        """Remembers every second key; returns how many, and the numbers of those whose places they took."""
        entries, mask, value = self._entries, self._mask, number + 1
        count, displaced = 0, []
        for key in keys:
            mixed = hash_of(key)
            if mixed & 1:
                continue
            place = (mixed >> _TABLE_SHIFT) & mask
            before = entries[place]
            if before:
                displaced.append((before & _SLOT_MASK) - 1)
            entries[place] = (mixed << _PRINT_SHIFT & _PRINT_MASK) | value
            count += 1
        self._count += count - len(displaced)
        return count, displaced

    def sweep(self, count: int) -> list[int]:
        """Frees so many places, which come round in turn; returns the numbers that were there."""
        start = self._hand
        self._hand = stop = min(start + count, len(self._entries))
        swept = [(entry & _SLOT_MASK) - 1 for entry in self._entries[start:stop] if entry]
        self._entries[start:stop] = array("Q", bytes(8 * (stop - start)))
        self._hand %= len(self._entries)
        self._count -= len(swept)
        return swept

    def take(self, keys: Sequence[object]) -> list[tuple[int, int]]:
        """Forgets those of these keys that are remembered: the index and the number of each."""
        if not self._count:
            return []
        entries, mask = self._entries, self._mask
        found = []
        for index, key in enumerate(keys):
            mixed = hash_of(key)
            if mixed & 1:
                continue
            place = (mixed >> _TABLE_SHIFT) & mask
            entry = entries[place]
            if entry and entry & _PRINT_MASK == mixed << _PRINT_SHIFT & _PRINT_MASK:
                entries[place] = 0
                found.append((index, (entry & _SLOT_MASK) - 1))
        self._count -= len(found)
        return found

    def first(self, keys: Sequence[object]) -> int | None:
        """The number of the first of these keys that is remembered."""
        for key in keys:
            mixed = hash_of(key)
            entry = 0 if mixed & 1 else self._entries[(mixed >> _TABLE_SHIFT) & self._mask]
            if entry and entry & _PRINT_MASK == mixed << _PRINT_SHIFT & _PRINT_MASK:
                return (entry & _SLOT_MASK) - 1
        return None


def hash_of(key: object) -> int:
    """64 bits, the same in each process; of numbers that are given in turn every second one is even."""
    if type(key) is int:
        return key * _MIX & _MASK_64
    if isinstance(key, tuple):
        key = key[-1]
    if isinstance(key, bytes) and len(key) >= 8:
        return int.from_bytes(key[-8:], "little")
    return crc32(repr(key).encode()) * _MIX & _MASK_64


def is_one_of(count: int, number: int) -> bool:
    """Every so-manyth number, in no order that callers would give."""
    return (number * _MIX >> 40) & 0xFFFF < 0x10000 // count
