"""Arithmetic of measurements; pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that at least `percent` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def gb_per_s(size_bytes: int, times_s: Sequence[float]) -> float:
    """10^9 bytes per second at the median time."""
    return size_bytes / median(times_s) / 1e9


def rounded(value: float) -> float:
    """Four significant digits: more than the measurements have."""
    return float(f"{value:.4g}")
