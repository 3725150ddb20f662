"""How large the VRAM tier is and when its blocks move."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import InvalidArgumentError
from kvstore.eviction import POLICIES, Watermarks
from kvstore.precision import BLOCK_PRECISIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Settings of one agent; only the capacity has no default, because the engine decides what it leaves."""

    vram_capacity_bytes: int
    """Bytes of the block pool, a hard cap: as many whole blocks as fit, allocated once when their size is known.
    That is when `GpuAgent` is made, and in a sidecar when the first engine opens its namespace."""
    device: str = "cpu"
    """`cuda:N`, or `cpu` for the same tier in host memory."""
    precision: str = "exact"
    """In how many bits blocks are stored below the pool: `exact`, `k16v8`, ... (docs/precision.md)."""
    precision_under_pressure: str | None = None
    """The same while the link is busy and larger batches are not enough; it must take fewer bytes. None: as ever."""
    high_watermark: float = 0.85
    """Migration starts above this share of the pool. The rest takes what the engine stores meanwhile."""
    low_watermark: float = 0.70
    """Migration stops at this share; the gap makes it come in batches, one plan per 15 % of the pool."""
    batch_count_max: int = 16
    """Most blocks copied and sent together. 8 to 16 blocks of 2 MiB fill PCIe and amortise a round trip; more only
    delays the first free slot. Never more than half of the pool's slots, so that one stuck batch is not all of it."""
    policy: str = "phix"
    """Which blocks leave first: `phix`, `lru`, `arc`, `s3fifo` or `window-lfu` (docs/policy.md)."""
    layer_group_count: int = 4
    """Parts in which the layers of blocks arrive that are pinned by layer, so that the first are computed on while the
    others still come. More parts are smaller transfers."""
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
        if self.precision not in BLOCK_PRECISIONS:
            raise InvalidArgumentError.of("precision", self.precision, ", ".join(BLOCK_PRECISIONS))
        if self.precision_under_pressure not in (None, *BLOCK_PRECISIONS):
            raise InvalidArgumentError.of(
                "precision_under_pressure", self.precision_under_pressure, f"None, {', '.join(BLOCK_PRECISIONS)}"
            )
        if self.policy not in POLICIES:
            raise InvalidArgumentError.of("policy", self.policy, ", ".join(POLICIES))
        for name in (
            "vram_capacity_bytes",
            "batch_count_max",
            "layer_group_count",
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
