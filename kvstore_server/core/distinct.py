"""How many different blocks there were, without keeping them: HyperLogLog with the HIP estimator.

Registers as in Flajolet, Fusy, Gandouet, Meunier, "HyperLogLog" (2007); the estimate as in Cohen, "All-distances
sketches, revisited" (2014): each time a register changes, the inverse of the probability of that is added. This is more
exact (0.83 / sqrt(registers)), and says of every batch how much of it was new.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Keys: TypeAlias = NDArray[np.uint64]
"""Blocks, each as 64 bits that look random and depend on nothing but the block."""

_INDEX_BITS = 14
"""16,384 registers of one byte: a standard error of 0.65 %."""
_REGISTER_COUNT = 1 << _INDEX_BITS
_KEY_BITS = 64


class DistinctCounter:
    """Counts different keys. Its registers only grow."""

    def __init__(self) -> None:
        self._registers = bytearray(_REGISTER_COUNT)
        self._view = np.frombuffer(self._registers, dtype=np.uint8)
        self._change_share = 1.0
        """Probability that a new key changes a register: the mean over all of 2 to the minus of what they hold."""
        self.count = 0.0

    def add(self, keys: Keys) -> float:
        """Returns how many of them were new, on average over all that there might have been."""
        indices = (keys >> np.uint64(_KEY_BITS - _INDEX_BITS)).astype(np.intp)
        # Where the first 1 behind the index is, by way of the exponent; a 1 is put behind the last bit.
        rest = (keys << np.uint64(_INDEX_BITS)) | np.uint64(1 << (_INDEX_BITS - 1))
        ranks = _KEY_BITS + 1 - np.frexp(rest.astype(np.float64))[1]
        growing = np.flatnonzero(ranks > self._view[indices])
        if not growing.size:
            return 0.0
        before = self.count
        registers = self._registers
        for index, rank in zip(indices[growing].tolist(), ranks[growing].tolist(), strict=True):
            held = registers[index]
            if rank > held:  # no key before it in this batch was as high
                self.count += 1 / self._change_share
                self._change_share -= (2.0**-held - 2.0**-rank) / _REGISTER_COUNT
                registers[index] = rank
        return self.count - before


class RecentDistinct:
    """Which keys are new against those since the rotation before the last one: a counter since then, and one since."""

    def __init__(self) -> None:
        self._older = DistinctCounter()
        self._newer = DistinctCounter()

    def rotate(self) -> None:
        """The newer counter becomes the older one, which is forgotten."""
        self._older, self._newer = self._newer, DistinctCounter()

    def add(self, keys: Keys) -> float:
        """Returns how many of them were new."""
        self._newer.add(keys)
        return self._older.add(keys)
