"""How much of a cap is kept for blocks on their way, where they are stored in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.errors import InvalidArgumentError

_POOL_SHARE = 16
"""One block in so many may be on its way down, and half of that on its way up: at most a tenth of a small pool."""


class ScratchPlan(NamedTuple):
    """Together within the cap."""

    pool_bytes: int
    offload_count: int
    load_count: int


def plan_scratch(*, capacity_bytes: int, block_bytes: int, encoded: Sequence[int], count_max: int) -> ScratchPlan:
    """At most `count_max` blocks in either direction; raises when none is left for the pool.

    `encoded` are bytes of a block in each of the forms that it may be encoded to; without one, blocks move as they are.
    """
    if not encoded:
        return ScratchPlan(capacity_bytes, count_max, 0)
    offload_count = max(1, min(count_max, capacity_bytes // block_bytes // _POOL_SHARE))
    load_count = max(1, offload_count // 2)
    pool_bytes = capacity_bytes - (offload_count + load_count) * sum(encoded)
    if pool_bytes < block_bytes:
        least_bytes = block_bytes + 2 * sum(encoded)
        raise InvalidArgumentError.of(
            "vram_capacity_bytes", capacity_bytes, f"at least {least_bytes}: a block, and two that are on their way"
        )
    return ScratchPlan(pool_bytes, offload_count, load_count)
