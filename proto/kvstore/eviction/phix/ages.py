"""Time since the last use, in bins that grow with it."""

from __future__ import annotations

from math import log, log1p

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BIN_COUNT = 22
"""The last one begins after 2.7 hours and is open."""
_FIRST_S = 0.5
_GROWTH = 1.6
_SCALE = 1 / log(_GROWTH)

EDGES_S: Floats = np.array([_FIRST_S * (_GROWTH**number - 1.0) for number in range(BIN_COUNT + 1)])
"""Where each bin begins, and where the last would end."""
WIDTHS_S: Floats = np.diff(EDGES_S)


def bin_of(age_s: float) -> int:
    if age_s <= 0:
        return 0
    return min(int(log1p(age_s / _FIRST_S) * _SCALE), BIN_COUNT - 1)


def bins_of(ages_s: Floats) -> NDArray[np.intp]:
    return np.minimum(np.log1p(np.maximum(ages_s, 0.0) / _FIRST_S) * _SCALE, BIN_COUNT - 1).astype(np.intp)
