"""Why blocks that were known are not here: what became last of each, in a table of fixed size."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvstore_server.core.distinct import Keys

_TABLE_BITS = 20
"""9 MiB at most: the last million of blocks that left, less those that fell into one place."""


_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
"""2^64 by the golden ratio (Knuth): every bit of a key has a say in its place."""


class Fate(IntEnum):
    """Numbers of at most a byte; 0: not known."""

    EVICTED = 1
    """It made room for others."""
    REFUSED = 2
    """It was offered and not taken, or not taken on by the tier below when it left."""
    FAILED = 3
    """It was damaged, lost to a fault, or never finished."""


class Fates:
    """What became last of blocks. Newer ones push older ones out of the table, wherever they fall."""

    def __init__(self, *, table_bits: int = _TABLE_BITS) -> None:
        self._shift = np.uint64(64 - table_bits)
        # Written to at once, so that all memory that it will ever take is there from the start.
        self._keys: NDArray[np.uint64] = np.full(1 << table_bits, 0, dtype=np.uint64)
        self._fates: NDArray[np.uint8] = np.full(1 << table_bits, 0, dtype=np.uint8)

    def note(self, keys: Keys, fate: Fate) -> None:
        places = self._places(keys)
        self._keys[places] = keys
        self._fates[places] = fate

    def find(self, keys: Keys) -> NDArray[np.uint8] | None:
        """A `Fate` per block, or 0; None: of none of them anything is known."""
        places = self._places(keys)
        is_known = self._keys[places] == keys
        if not is_known.any():
            return None
        found: NDArray[np.uint8] = self._fates[places] * is_known
        return found

    def _places(self, keys: Keys) -> Keys:
        places: Keys = (keys * _MULTIPLIER) >> self._shift
        return places
