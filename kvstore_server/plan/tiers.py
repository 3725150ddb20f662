"""How many tokens of each sequence a tier holds, and how large it must be: numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.eviction import Watermarks
from kvstore.slab import PAYLOAD_OFFSET_BYTES
from kvstore_server.core.space import SLOT_ALIGNMENT_BYTES
from kvstore_server.nvme.format import SEGMENT_HEADER_BYTES
from kvstore_server.plan.shape import CacheShape

BATCH_COUNT = 16
"""Blocks that leave a tier together: `batch_count_max` of the agent, `nvme.demote_batch` of the daemon."""
VRAM_HIGH_MAX = 0.85
MEMORY_HIGH_MAX = 0.95
"""Where eviction starts by default; a suggestion is never above."""
GAP_MIN, GAP_MAX = 0.05, 0.15
"""Of the daemon's and of the agent's default watermarks: a wider gap costs more hits than it saves evictions."""
HIGH_MIN = 0.60
"""A tier that needs more headroom than this is too small for its batches."""
NVME_BYTES_MIN = 64 << 20
"""Two of the smallest segments and the smallest index, rounded up."""
MEMORY_BYTES_MIN = 1 << 20

_GROWTH = 64
"""A capacity is found to within a 64th, 1.6 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierNeed:
    """What one tier holds of each sequence, and of all of them."""

    window_tokens: int
    window_bytes: int
    """Of one sequence; bytes that several GPUs have alike counted once."""
    needed_bytes: int
    """Of all sequences; in VRAM with those copies, on all GPUs together."""
    capacity_bytes: int | None
    """As given, or what to configure to hold `needed_bytes`; None: VRAM whose room is not known."""


NO_NEED = TierNeed(window_tokens=0, window_bytes=0, needed_bytes=0, capacity_bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """How blocks lie in slabs of the memory tier, and in segments of the same slots on disk."""

    slab_bytes: int
    slot_bytes: int
    count_per_slab: int
    """0: no block fits into a slab; `slot_bytes` is then what one would take."""
    waste: float
    """Share of a slab that holds nothing of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSizes:
    """What the daemon makes of a capacity by default."""

    slab_bytes: Callable[[int], int]
    """Of a slab, for a capacity of the memory tier."""
    segments: Callable[[int], tuple[int, int]]
    """Bytes and count of the segments, for a capacity of the NVMe tier from `NVME_BYTES_MIN`."""


def sequence_part_bytes(shape: CacheShape, *, above_tokens: int, tokens: int) -> int:
    """What `tokens` of a sequence take below a tier that has `above_tokens`; its states are with its first tokens."""
    above_bytes = shape.sequence_bytes(above_tokens) if above_tokens else 0
    return shape.sequence_bytes(above_tokens + tokens) - above_bytes if tokens else 0


def tokens_that_fit(
    part_bytes: Callable[[int], int], *, tokens_max: int, block_tokens: int, budget_bytes: float
) -> int:
    """The most tokens, in whole blocks or all of them, whose bytes are within the budget. `part_bytes` never falls."""
    if part_bytes(tokens_max) <= budget_bytes:
        return tokens_max
    fitting, too_many = 0, tokens_max // block_tokens + 1
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if part_bytes(min(middle * block_tokens, tokens_max)) <= budget_bytes:
            fitting = middle
        else:
            too_many = middle
    return fitting * block_tokens


def slots_for(block_bytes: int, *, slab_bytes: int) -> Slots:
    """Slots share out a whole slab, in whole pages."""
    needed = -(-(block_bytes + PAYLOAD_OFFSET_BYTES) // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
    count = slab_bytes // needed
    if not count:
        return Slots(slab_bytes=slab_bytes, slot_bytes=needed, count_per_slab=0, waste=1.0)
    slot_bytes = slab_bytes // count // SLOT_ALIGNMENT_BYTES * SLOT_ALIGNMENT_BYTES
    count = slab_bytes // slot_bytes
    waste = 1.0 - count * block_bytes / slab_bytes
    return Slots(slab_bytes=slab_bytes, slot_bytes=slot_bytes, count_per_slab=count, waste=waste)


def suggest_watermarks(
    *,
    capacity_bytes: int,
    high_max: float,
    batch_bytes: int,
    sequence_bytes: int,
    arrival_bytes_per_s: float,
    drain_bytes_per_s: float,
) -> Watermarks:
    """Above the high mark there is room for the batch that is leaving and for what comes while it does; between the
    marks for a whole sequence, within bounds, so that one that comes causes one run of eviction."""
    headroom_bytes = batch_bytes * (1.0 + arrival_bytes_per_s / drain_bytes_per_s)
    gap = max(sequence_bytes, batch_bytes) / capacity_bytes
    high = min(max(1.0 - headroom_bytes / capacity_bytes, HIGH_MIN), high_max)
    low = high - min(max(gap, GAP_MIN), GAP_MAX)
    return Watermarks(high=_down(high), low=_down(low))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTier:
    """The memory tier for blocks of one size: what a capacity of it holds."""

    sizes: DaemonSizes
    block_bytes: int
    sequence_bytes: int

    def slots(self, capacity_bytes: int) -> Slots:
        return slots_for(self.block_bytes, slab_bytes=self.sizes.slab_bytes(capacity_bytes))

    def watermarks(self, capacity_bytes: int) -> Watermarks:
        # A block that memory drops, or that waits for the disk in the queue for it, makes room at once.
        return suggest_watermarks(
            capacity_bytes=capacity_bytes,
            high_max=MEMORY_HIGH_MAX,
            batch_bytes=BATCH_COUNT * self.block_bytes,
            sequence_bytes=self.sequence_bytes,
            arrival_bytes_per_s=0.0,
            drain_bytes_per_s=1.0,
        )

    def held_bytes(self, capacity_bytes: int) -> int:
        """Payload that is there at any time: what eviction leaves at its low mark."""
        slots = self.slots(capacity_bytes)
        slab_count = capacity_bytes // slots.slab_bytes
        if not slots.count_per_slab:
            # As if slabs were as large as they must be, which is what the plan then asks for.
            slots = slots_for(self.block_bytes, slab_bytes=slots.slot_bytes)
            slab_count = capacity_bytes // slots.slab_bytes
        payload_bytes = slab_count * slots.count_per_slab * self.block_bytes
        return int(payload_bytes * self.watermarks(capacity_bytes).low)

    def capacity_for(self, needed_bytes: int) -> int:
        return _grow(needed_bytes, at_least=MEMORY_BYTES_MIN, held_bytes=self.held_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeTier:
    """The NVMe tier for blocks of one size: what a capacity of it holds."""

    sizes: DaemonSizes
    block_bytes: int
    slot_bytes: int

    def held_bytes(self, capacity_bytes: int) -> int:
        segment_bytes, segment_count = self.sizes.segments(capacity_bytes)
        least_bytes = self.slot_bytes + SEGMENT_HEADER_BYTES
        if segment_bytes < least_bytes:
            # As if segments were as large as they must be, which is what the plan then asks for.
            segment_bytes, segment_count = least_bytes, segment_bytes * segment_count // least_bytes
        return segment_count * ((segment_bytes - SEGMENT_HEADER_BYTES) // self.slot_bytes) * self.block_bytes

    def capacity_for(self, needed_bytes: int) -> int:
        return _grow(needed_bytes, at_least=NVME_BYTES_MIN, held_bytes=self.held_bytes)


def _grow(needed_bytes: int, *, at_least: int, held_bytes: Callable[[int], int]) -> int:
    """The first capacity, in steps, that holds so much, in whole MiB; 0 for nothing."""
    if not needed_bytes:
        return 0
    capacity_bytes = max(_whole_mib(needed_bytes), at_least)
    while held_bytes(capacity_bytes) < needed_bytes:
        capacity_bytes = _whole_mib(capacity_bytes + max(capacity_bytes // _GROWTH, 1))
    return capacity_bytes


def _whole_mib(size_bytes: int) -> int:
    return -(-size_bytes >> 20) << 20


def _down(share: float) -> float:
    return int(share * 100 + 1e-9) / 100
