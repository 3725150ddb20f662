"""How often blocks of a class are reused at an age: events per time at risk."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.eviction.phix.ages import BIN_COUNT, EDGES_S, WIDTHS_S, Floats, bins_of

_PRIOR_RETURN_SHARE = 0.4
_PRIOR_MEDIAN_S = 60.0
_PRIOR_SIGMA = 1.3
"""Before anything is known: 40 % come back, after a log-normal pause between agents' (17 s) and chats' (130 s)."""
_PRIOR_EVENTS = 20.0
"""About one request's blocks: what is learned outweighs the prior within a few returns."""
_POOL_EVENTS = 1.0
_CLASS_EVENTS = 3.0
"""Weight of what is known of the larger group, in events per bin; small, as one return brings tens of blocks."""


class Hazards:
    """Events and block-seconds at risk per class and age bin, both fading.

    A class without data of its own is taken to be as its pool, a pool as all blocks times its scale, and all as the
    prior.
    """

    def __init__(self, pool_of: Sequence[int], *, pool_scales: Sequence[float]) -> None:
        self._pool_of = np.asarray(pool_of, dtype=np.intp)
        self._pool_scales: Floats = np.asarray(pool_scales)[:, None]
        shape = (len(pool_of), BIN_COUNT)
        self.events: Floats = np.zeros(shape)
        self.at_risk_s: Floats = np.zeros(shape)

    def count_events(self, classes: NDArray[np.intp], ages_s: Floats, counts: Floats) -> None:
        """So many blocks were reused at these ages."""
        cells = classes * BIN_COUNT + bins_of(ages_s)
        self.events += np.bincount(cells, weights=counts, minlength=self.events.size).reshape(self.events.shape)

    def count_time(self, classes: NDArray[np.intp], since_s: Floats, until_s: Floats, counts: Floats) -> None:
        """So many blocks went from one age to the other without being reused."""
        bins, last = bins_of(since_s), bins_of(until_s)
        size, shape = self.at_risk_s.size, self.at_risk_s.shape
        since_s = since_s.copy()
        while len(bins):
            ends_s = np.where(bins == last, until_s, EDGES_S[bins + 1])
            weights = counts * np.maximum(ends_s - since_s, 0.0)
            self.at_risk_s += np.bincount(classes * BIN_COUNT + bins, weights=weights, minlength=size).reshape(shape)
            more = np.flatnonzero(bins < last)
            classes, since_s, until_s, counts = classes[more], ends_s[more], until_s[more], counts[more]
            bins, last = bins[more] + 1, last[more]

    def fade(self, factor: float) -> None:
        self.events *= factor
        self.at_risk_s *= factor

    def of(self, classes: NDArray[np.intp]) -> Floats:
        """Reuses per block-second: a row per class."""
        events, at_risk_s = self.events, self.at_risk_s
        overall = _shrunk(events.sum(axis=0), at_risk_s.sum(axis=0), _PRIOR_HAZARD, _PRIOR_EVENTS)
        pools = (len(self._pool_scales), BIN_COUNT)
        pool_events, pool_at_risk_s = np.zeros(pools), np.zeros(pools)
        np.add.at(pool_events, self._pool_of, events)
        np.add.at(pool_at_risk_s, self._pool_of, at_risk_s)
        pooled = _shrunk(pool_events, pool_at_risk_s, overall * self._pool_scales, _POOL_EVENTS)
        return _shrunk(events[classes], at_risk_s[classes], pooled[self._pool_of[classes]], _CLASS_EVENTS)


def _shrunk(events: Floats, at_risk_s: Floats, towards: Floats, weight_events: float) -> Floats:
    hazard: Floats = (events + weight_events) / (at_risk_s + weight_events / towards)
    return hazard


def _prior_hazard() -> Floats:
    def returned(age_s: float) -> float:
        if age_s <= 0:
            return 0.0
        deviation = math.log(age_s / _PRIOR_MEDIAN_S) / _PRIOR_SIGMA
        return _PRIOR_RETURN_SHARE * 0.5 * math.erfc(-deviation / math.sqrt(2.0))

    shares = np.array([returned(float(edge)) for edge in EDGES_S])
    hazard: Floats = np.diff(shares) / ((1.0 - shares[:-1]) * WIDTHS_S) + 1e-9
    return hazard


_PRIOR_HAZARD = _prior_hazard()
