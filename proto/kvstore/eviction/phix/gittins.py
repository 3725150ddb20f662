"""What a block is worth: the best rate of reuse per time in the tier that any horizon gives (Gittins 1979)."""

from __future__ import annotations

import numpy as np

from kvstore.eviction.phix.ages import Floats


def gittins_index(hazards: Floats, widths_s: Floats) -> Floats:
    """Per class and age bin: max over horizons of P(reuse before the horizon) / E[time until reuse or horizon].

    `hazards` are constant within a bin: one row per class, above zero. Horizons are ends of bins, and a block is taken
    to be at the beginning of its bin.
    """
    survival = np.exp(-hazards * widths_s)
    stay_s = (1.0 - survival) / hazards  # expected time in the bin of what is alive at its beginning
    best = np.zeros_like(hazards)
    alive = np.ones_like(hazards)  # by start of the horizon: what is alive at the present bin
    spent_s = np.zeros_like(hazards)
    for end in range(hazards.shape[1]):
        starts = slice(0, end + 1)
        spent_s[:, starts] += alive[:, starts] * stay_s[:, end : end + 1]
        alive[:, starts] *= survival[:, end : end + 1]
        np.maximum(best[:, starts], (1.0 - alive[:, starts]) / spent_s[:, starts], out=best[:, starts])
    return best
