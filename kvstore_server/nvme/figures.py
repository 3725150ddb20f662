"""What the NVMe tier tells about itself, for metrics and people: plain numbers, taken at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

State = Literal["ok", "degraded", "recovering"]
STATES: tuple[State, ...] = ("ok", "degraded", "recovering")


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeFigures:
    """Counts are since the daemon's start; bytes of blocks are bytes as stored, envelopes included.

    While the folder cannot be opened all are 0 that say something of what is in it.
    """

    state: State
    reason: str
    """Of a state that is not ok, for people; empty when it is."""
    is_direct: bool = False
    """Whether blocks bypass the page cache (O_DIRECT)."""

    capacity_bytes: int
    """Cap of the whole folder; `disk_bytes` never passes it."""
    disk_bytes: int = 0
    """What segments and index take on disk."""
    used_bytes: int = 0
    """Of slots that hold blocks or are being written."""
    segment_count: int = 0
    segment_count_max: int = 0
    block_count: int = 0
    queue_bytes: int = 0
    """Memory of blocks that are on their way to the disk."""

    demoted_count: int = 0
    demoted_bytes: int = 0
    promoted_count: int = 0
    promoted_bytes: int = 0
    hit_count: int = 0
    """Blocks that were looked up, not in memory, and here."""
    undemoted_count: int = 0
    """Blocks that were to go to the disk and were dropped: too many were under way, or writing was not possible."""
    evicted_count: int = 0
    expired_count: int = 0
    """Blocks that were unused for as long as their clients had said that they were worth keeping."""
    dropped_counts: Mapping[str, int] = field(default_factory=dict)
    """Blocks that memory evicted and this tier did not take, by reason; a queue that was full is none of them."""
    corrupt_count: int = 0
    """Blocks that did not verify when read, and were dropped."""
    fault_counts: Mapping[str, int] = field(default_factory=dict)
    """By `DiskFault`; docs/nvme.md says of each what to do."""

    device_written_bytes: int = 0
    """Blocks, their padding to whole pages, and segment headers; without what LMDB writes for the index."""
    payload_written_bytes: int = 0
    """Blocks as stored, compressed or not."""
    device_read_bytes: int = 0
    read_latency_s: float = 0.0
    """What a read is taken to cost whatever its size, by those so far; `read_bytes_per_s` has the rest."""
    read_bytes_per_s: float = 0.0

    policy: str = ""
    policy_in_force: str = ""
    admission: str = ""
    """Who leaves and who may enter; empty while the tier is closed."""

    prefetch_started_count: int = 0
    prefetch_refused_count: int = 0
    prefetch_useful_count: int = 0
    prefetch_late_count: int = 0
    prefetch_wasted_count: int = 0

    recovery_s: float = 0.0
    """From the start of the tier until its blocks could be found."""
    recovered_count: int = 0
    refused_record_count: int = 0
    """Records of the index that named no place where a block can be."""

    @property
    def write_amplification(self) -> float:
        """Bytes written to the device for each byte of a block; 1 when nothing was written."""
        if not self.payload_written_bytes:
            return 1.0
        return self.device_written_bytes / self.payload_written_bytes
