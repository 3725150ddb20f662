"""How long a client waits, how much it moves at once and which way, and when it stops asking."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import InvalidArgumentError
from kvstore.messages import BATCH_COUNT_MAX, LEASE_S_MAX, RESERVATION_S_MAX

TRANSPORTS = ("auto", "slab", "bulk", "grpc", "nixl")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Settings of one client; the defaults suit a daemon on the same node and need no change there."""

    attach_timeout_s: float = 1.0
    """Seconds for the first call to a daemon, connecting included. Short, because it is also the probe of a
    daemon that has just failed: a hung one costs this much per cool-down and no more."""
    control_timeout_s: float = 2.0
    """Seconds for a call that moves no blocks. Far above the usual millisecond, so that a busy machine does
    not read as a dead daemon."""
    data_timeout_base_s: float = 2.0
    """Seconds that a batch of blocks may take beside its bytes: queueing, disk, scheduling."""
    data_rate_min_bytes_per_s: int = 32 << 20
    """Bytes per second below which a transfer is given up. 32 MiB/s is 2 MiB blocks of 16 tokens at 256
    tokens/s: slower than any GPU recomputes them."""
    batch_bytes_max: int = 64 << 20
    """Bytes of blocks in one transfer. Bounds what a hung daemon can cost (2 s + 64 MiB / 32 MiB/s = 4 s) and what
    a broken stream loses; at 1 GiB/s the round trip per batch is 2 % of it."""
    batch_count_max: int = BATCH_COUNT_MAX
    """Block hashes in one request; the contract's own limit."""
    lease_s: float = 30.0
    """Seconds that `acquire` holds blocks when the call does not say. Outlasts queueing in an engine and is over
    soon after one dies."""
    reservation_s: float = 30.0
    """Seconds after which the daemon gives up a write that was never finished. Several times the longest batch
    (writing and committing 64 MiB: 2 x 4 s)."""
    transport: str = "auto"
    """How blocks travel: `auto` takes mapped memory on the daemon's own node, else the data port, else gRPC streams;
    `slab`, `bulk`, `grpc` and `nixl` insist on one. With `auto`, `$KVSTORE_TRANSPORT` says."""
    copy_thread_count_max: int = 2
    """Threads that share the copying of one call, the calling one included, while cores are idle. Two reach what
    the memory gives on most machines."""
    breaker_failure_count: int = 3
    """Refused connections in a row that stop further calls. A passed deadline stops them at once: it has
    already cost the caller seconds."""
    breaker_cooldown_initial_s: float = 0.25
    """Seconds without calls after the first stop; doubles with each one that follows soon."""
    breaker_cooldown_max_s: float = 5.0
    """Seconds that the cool-down grows to, so also the longest time to notice that the daemon is back."""

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            # `not >` rather than `<=`: NaN must fail, too.
            if not value > 0 or value == float("inf"):
                raise InvalidArgumentError.of(name, value, "a finite number above 0")
        if self.transport not in TRANSPORTS:
            raise InvalidArgumentError.of("transport", self.transport, ", ".join(TRANSPORTS))
        if not self.batch_count_max <= BATCH_COUNT_MAX:
            raise InvalidArgumentError.of("batch_count_max", self.batch_count_max, f"1 to {BATCH_COUNT_MAX}")
        if not self.lease_s <= LEASE_S_MAX:
            raise InvalidArgumentError.of("lease_s", self.lease_s, f"above 0, up to {LEASE_S_MAX:g}")
        if not self.reservation_s <= RESERVATION_S_MAX:
            raise InvalidArgumentError.of("reservation_s", self.reservation_s, f"above 0, up to {RESERVATION_S_MAX:g}")
        if self.breaker_cooldown_max_s < self.breaker_cooldown_initial_s:
            raise InvalidArgumentError.of(
                "breaker_cooldown_max_s", self.breaker_cooldown_max_s, "at least breaker_cooldown_initial_s"
            )

    def data_timeout_s(self, transfer_bytes: int) -> float:
        """Seconds that moving this many bytes may take."""
        return self.data_timeout_base_s + transfer_bytes / self.data_rate_min_bytes_per_s


_POSITIVE = tuple(set(ClientConfig.__dataclass_fields__) - {"transport"})
