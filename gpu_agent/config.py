"""How large the VRAM tier is and when its blocks move."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import InvalidArgumentError
from kvstore.eviction import Watermarks


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Settings of one agent; only the capacity has no default, because the engine decides what it leaves."""

    vram_capacity_bytes: int
    """Bytes of the block pool, a hard cap: as many whole blocks as fit, allocated once when their size is known.
    That is when `GpuAgent` is made, and in a sidecar when the first engine opens its namespace."""
    device: str = "cpu"
    """`cuda:N`, or `cpu` for the same tier in host memory."""
    high_watermark: float = 0.85
    """Migration starts above this share of the pool. The rest takes what the engine stores meanwhile."""
    low_watermark: float = 0.70
    """Migration stops at this share; the gap makes it come in batches, one plan per 15 % of the pool."""
    batch_count_max: int = 16
    """Most blocks copied and sent together. 8 to 16 blocks of 2 MiB fill PCIe and amortise a round trip; more only
    delays the first free slot. Never more than half of the pool's slots, so that one stuck batch is not all of it."""
    window_steps: int = 64
    """Engine steps over which uses are counted."""
    cooldown_steps: int = 64
    """Engine steps for which a block that was loaded back, or that the daemon refused, is not moved again, unless
    room is needed and nothing else is left."""
    staging_capacity_bytes: int = 64 << 20
    """Bytes of each of the two page-locked buffers, offload and load; at least one block. Batches that are larger
    go through in parts, also where the device reaches the daemon's memory and needs no buffer."""
    room_wait_s: float = 1.0
    """Longest wait of one `store` or `load` for migration to make room, beside the time that its bytes take at
    `offload_rate_min_bytes_per_s`; then the coldest blocks are dropped."""
    offload_rate_min_bytes_per_s: int = 64 << 20
    """Bytes per second below which the engine no longer waits for offloading. 64 MiB/s is 2 MiB blocks of 16 tokens
    at 512 tokens/s: slower than any GPU recomputes them."""
    retry_pause_initial_s: float = 0.25
    """Seconds without migration after the daemon failed; doubles with each failure in a row."""
    retry_pause_max_s: float = 5.0
    """Seconds that this pause grows to, so also the longest time until offloading goes on after an outage."""
    offloaded_count_max: int = 65_536
    """Blocks remembered after they left. Only hints (16 MiB of them at most): a forgotten block is still found."""
    close_wait_s: float = 5.0
    """Longest wait of `close` for the batch under way, a little above the client's longest put."""

    def __post_init__(self) -> None:
        _ = self.watermarks
        for name in (
            "vram_capacity_bytes",
            "batch_count_max",
            "window_steps",
            "staging_capacity_bytes",
            "offload_rate_min_bytes_per_s",
        ):
            if getattr(self, name) < 1:
                raise InvalidArgumentError.of(name, getattr(self, name), "at least 1")
        for name in ("cooldown_steps", "room_wait_s", "offloaded_count_max", "close_wait_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidArgumentError.of(name, getattr(self, name), "a finite number of at least 0")
        if not 0 < self.retry_pause_initial_s <= self.retry_pause_max_s < float("inf"):
            raise InvalidArgumentError.of(
                "retry_pause_initial_s", self.retry_pause_initial_s, f"above 0, up to {self.retry_pause_max_s}"
            )

    @property
    def watermarks(self) -> Watermarks:
        return Watermarks(high=self.high_watermark, low=self.low_watermark)
