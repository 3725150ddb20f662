"""What the NVMe tier tells about itself, for metrics and people: plain numbers, taken at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "degraded", "recovering"]
STATES: tuple[State, ...] = ("ok", "degraded", "recovering")


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeFigures:
    """Counts are since the daemon's start; bytes of blocks are bytes as stored, envelopes included."""

    state: State
    reason: str
    """Of a state that is not ok, for people; empty when it is."""
    is_direct: bool
    """Whether blocks bypass the page cache (O_DIRECT)."""

    capacity_bytes: int
    """Cap of the whole folder; `disk_bytes` never passes it."""
    disk_bytes: int
    """What segments and index take on disk."""
    used_bytes: int
    """Of slots that hold blocks or are being written."""
    segment_count: int
    segment_count_max: int
    block_count: int
    queue_bytes: int
    """Memory of blocks that are on their way to the disk."""

    demoted_count: int
    demoted_bytes: int
    promoted_count: int
    promoted_bytes: int
    hit_count: int
    """Blocks that were looked up, not in memory, and here."""
    undemoted_count: int
    """Blocks that were to go to the disk and were dropped: too many were under way, or writing was not possible."""
    evicted_count: int
    dropped_counts: Mapping[str, int]
    """Blocks that memory evicted and this tier did not take, by reason; a queue that was full is none of them."""
    corrupt_count: int
    """Blocks that did not verify when read, and were dropped."""
    fault_counts: Mapping[str, int]
    """By `DiskFault`; docs/nvme.md says of each what to do."""

    device_written_bytes: int
    """Blocks, their padding to whole pages, and segment headers; without what LMDB writes for the index."""
    payload_written_bytes: int
    """Blocks as stored, compressed or not."""
    device_read_bytes: int
    read_latency_s: float
    """What a read is taken to cost whatever its size, by those so far; `read_bytes_per_s` has the rest."""
    read_bytes_per_s: float

    prefetch_started_count: int
    prefetch_refused_count: int

    recovery_s: float
    """From the start of the tier until its blocks could be found."""
    recovered_count: int
    refused_record_count: int
    """Records of the index that named no place where a block can be."""

    @property
    def write_amplification(self) -> float:
        """Bytes written to the device for each byte of a block; 1 when nothing was written."""
        if not self.payload_written_bytes:
            return 1.0
        return self.device_written_bytes / self.payload_written_bytes
