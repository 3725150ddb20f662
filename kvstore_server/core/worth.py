"""Whether bringing blocks from a slow tier beats recomputing them, and what a read from it costs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class TierCost(NamedTuple):
    """A read of n bytes takes `latency_s` + n / `bytes_per_s`. Both are above 0."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bytes_per_s


def worth_fetching(
    is_slow: Sequence[bool] | bytes,
    *,
    block_bytes: int,
    cost: TierCost,
    queued_bytes: int,
    recompute_s_per_block: float,
) -> int:
    """How many leading blocks of a matched prefix to take, so that most time is saved over recomputing them.

    One flag per block (0 or 1 in `bytes`): whether it has to be read, behind `queued_bytes` that are being read
    already; others cost nothing. What is taken is never there later than recomputing it would take. The blocks ahead
    of the first slow one are always taken, and of answers that save the same it is the longest.
    """
    assert recompute_s_per_block > 0, f"nothing is compared with {recompute_s_per_block} s per block"
    flags = is_slow if isinstance(is_slow, bytes) else bytes(is_slow)
    free_count = flags.find(1)
    if free_count < 0:
        return len(flags)

    def saved_s(count: int, slow_count: int) -> float:
        return count * recompute_s_per_block - cost.seconds(queued_bytes + slow_count * block_bytes)

    best, best_saved_s = free_count, free_count * recompute_s_per_block
    slow_total = flags.count(1)
    if block_bytes / cost.bytes_per_s <= recompute_s_per_block:
        # Each further block saves something, so once the first read pays off, all do.
        return len(flags) if saved_s(len(flags), slow_total) >= best_saved_s else best
    # A slow block loses time, and only blocks in memory behind it can make up for that: look at the end of each run of
    # these, and no further than where taking all that are left would not be enough.
    memory_left = len(flags) - slow_total - free_count
    position, slow_count = free_count, 0
    while memory_left:
        run_start = flags.find(0, position)
        slow_count += run_start - position
        if saved_s(run_start + memory_left, slow_count) < best_saved_s:
            break
        next_slow = flags.find(1, run_start)
        position = next_slow if next_slow >= 0 else len(flags)
        memory_left -= position - run_start
        now_saved_s = saved_s(position, slow_count)
        if now_saved_s >= best_saved_s:
            best, best_saved_s = position, now_saved_s
    return best


_WEIGHT = 1 / 3
"""Of the newest sample. A device that became 100 times slower is 90 % of that after (2/3)^n = ln(1/0.9)/ln(100), n = 10
samples; the noise that is left is that of a mean over 2 / weight - 1 = 5."""
_WINDOW_COUNT = 3
"""Samples of which the middle one counts: a single hiccup, however long, is never it."""
_ELAPSED_S_MIN = 1e-7


class CostMeter:
    """What reads cost lately, from their sizes and durations. `first` is believed until there is a sample.

    What took most of the time, latency or bytes, is corrected most. So reads of one size alone tell what
    such a read takes, and reads of several sizes tell the two apart.
    """

    def __init__(self, *, first: TierCost) -> None:
        self.cost = first
        self._window: deque[tuple[int, float]] = deque(maxlen=_WINDOW_COUNT)
        self._sample_count = 0

    def note(self, *, size_bytes: int, elapsed_s: float) -> None:
        """One batch that was read together: its bytes, and the time from its start to the last of them."""
        assert size_bytes > 0, f"a read of {size_bytes} bytes"
        self._window.append((size_bytes, max(elapsed_s, _ELAPSED_S_MIN)))
        self._sample_count += 1
        by_slowness = sorted(self._window, key=lambda sample: sample[1] / self.cost.seconds(sample[0]))
        self._learn(*by_slowness[len(by_slowness) // 2], weight=max(_WEIGHT, 1 / self._sample_count))

    def _learn(self, size_bytes: int, elapsed_s: float, *, weight: float) -> None:
        """Moves the logarithm of what such a read takes by `weight` of the error: twice as slow is as far as twice as
        fast, and nothing becomes negative."""
        expected_s = self.cost.seconds(size_bytes)
        step = weight * math.log(elapsed_s / expected_s)
        latency_share = self.cost.latency_s / expected_s
        bytes_share = 1.0 - latency_share
        larger = max(latency_share, bytes_share)
        self.cost = TierCost(
            latency_s=self.cost.latency_s * math.exp(step * latency_share / larger),
            bytes_per_s=self.cost.bytes_per_s * math.exp(-step * bytes_share / larger),
        )
