"""What LRU would have kept in the same room, found out with a sample of the blocks.

By hash, as in Waldspurger, Park, Garthwaite, Ahmad, "Efficient MRC construction with SHARDS" (2015): one of 2^n blocks
is followed in room scaled down alike, and n grows when these are too many.
"""

from __future__ import annotations

import numpy as np

from kvstore_server.core.distinct import Keys

_SAMPLE_COUNT_MAX = 16_384
"""Some 2 MB. Twice what a sample is thinned to: then a share of 10 % of it is known to within 0.3 points."""
_SAMPLE_SHIFT = 24
"""Which bits of a key decide: others than those that counters go by."""


class ShadowLru:
    """A sample of the blocks that LRU would hold, least recently used first."""

    def __init__(self, *, sample_count_max: int = _SAMPLE_COUNT_MAX) -> None:
        self._sample_count_max = sample_count_max
        self._halving_count = 0
        self._sizes: dict[int, int] = {}
        self._used_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def sampled(self, keys: Keys) -> list[int]:
        """Those of them that are followed."""
        if self._halving_count:
            mask = np.uint64((1 << self._halving_count) - 1)
            keys = keys[(keys >> np.uint64(_SAMPLE_SHIFT)) & mask == 0]
        numbers: list[int] = keys.tolist()
        return numbers

    def __contains__(self, key: int) -> bool:
        return key in self._sizes

    def use(self, keys: Keys, *, block_bytes: int, room_bytes: int) -> None:
        """Uses of blocks of one size, the last one last; `room_bytes` is what all blocks together may take."""
        sizes = self._sizes
        for key in self.sampled(keys):
            self._used_bytes += block_bytes - sizes.pop(key, 0)
            sizes[key] = block_bytes
        if len(sizes) > self._sample_count_max:
            self._thin()
        self._shrink(room_bytes >> self._halving_count)

    def _thin(self) -> None:
        while len(self._sizes) > self._sample_count_max // 2:
            self._halving_count += 1
            kept = set(self.sampled(np.fromiter(self._sizes, dtype=np.uint64, count=len(self._sizes))))
            self._sizes = {key: size_bytes for key, size_bytes in self._sizes.items() if key in kept}
        self._used_bytes = sum(self._sizes.values())

    def _shrink(self, room_bytes: int) -> None:
        sizes = self._sizes
        while self._used_bytes > room_bytes and sizes:
            self._used_bytes -= sizes.pop(next(iter(sizes)))
