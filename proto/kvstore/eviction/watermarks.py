"""When eviction starts and where it stops."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermarks:
    """Two shares of a capacity: above `high` eviction starts, at `low` it stops.

    The gap between them is what makes evictions come in batches instead of one per write.
    """

    high: float
    low: float

    def __post_init__(self) -> None:
        if not 0.0 < self.low <= self.high <= 1.0:
            raise InvalidArgumentError.of("watermarks", f"low {self.low}, high {self.high}", "0 < low <= high <= 1")

    def excess_bytes(self, *, used_bytes: int, capacity_bytes: int, is_evicting: bool = False) -> int:
        """Bytes to evict now: 0 up to the high mark, else what brings usage down to the low one.

        An eviction that was begun (`is_evicting`) goes on below the high mark.
        """
        if not is_evicting and used_bytes <= self.high * capacity_bytes:
            return 0
        return max(used_bytes - int(self.low * capacity_bytes), 0)
