"""What an agent counts; status and metrics are read from here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What has happened since the start; only ever grows."""

    stored_count: int = 0
    refused_count: int = 0
    """Blocks for which `store` found no room."""
    hit_count: int = 0
    """Blocks that `load` found in the pool."""
    reloaded_count: int = 0
    missed_count: int = 0
    corrupt_count: int = 0
    """Blocks that came from the store and did not verify; misses, too."""
    migrated_count: int = 0
    """Blocks that left for the daemon."""
    offloaded_bytes: int = 0
    """Bytes that crossed the link downwards; a block that the daemon still has moves none."""
    loaded_bytes: int = 0
    direct_offloaded_bytes: int = 0
    """Of `offloaded_bytes`, those that the device wrote into the store's slots itself."""
    direct_loaded_bytes: int = 0
    migration_batch_count: int = 0
    migration_refused_count: int = 0
    """Blocks that the daemon did not take, or not within its deadline."""
    lost_count: int = 0
    """Blocks dropped under pressure without a known lower copy."""
    stall_count: int = 0
    """Calls that waited for room."""
    stall_s: float = 0.0
    pin_stall_count: int = 0
    """Pins that waited for blocks."""
    pin_stall_s: float = 0.0
    prefetch_hit_count: int = 0
    """Blocks that were brought ahead and were there when they were needed."""
    prefetch_late_count: int = 0
    """Blocks that were on their way when they were needed."""
    prefetch_wasted_count: int = 0
    """Blocks that were brought ahead and left before anybody needed them."""
    fetched_on_demand_count: int = 0
    """Blocks that a pin needed and that nobody had begun to fetch."""
    remigrated_count: int = 0
    """Blocks that left in the cool-down after they came back."""
    daemon_error_count: int = 0
