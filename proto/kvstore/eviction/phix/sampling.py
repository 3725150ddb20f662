"""Which keys are remembered after their blocks have left."""

from __future__ import annotations

from zlib import crc32

WEIGHT = 2
"""Blocks that a remembered one stands for: every second key is."""


def is_sampled(key: object) -> bool:
    """Every second key, the same ones in each process: ends of hashes, and numbers that are given in turn, alike."""
    kind = type(key)
    if kind is int:
        return not (key * 2654435761 >> 16) & 1  # type: ignore[operator]
    if isinstance(key, tuple):
        key = key[-1]
    if isinstance(key, bytes):
        return not key or not key[-1] & 1
    return not crc32(repr(key).encode()) & 1


def is_one_of(count: int, number: int) -> bool:
    """Every so-manyth number, in no order that callers would give."""
    return ((number * 0x9E3779B97F4A7C15) >> 40) & 0xFFFF < 0x10000 // count
