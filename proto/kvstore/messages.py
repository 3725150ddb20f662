"""Requests and responses as plain values; `wire` turns them into `kvstore.v1` messages and back.

Hashes and per-block states stay packed as they travel: one `bytes` of 8192 hashes costs nothing to pass
on, 8192 objects do. Limits and meanings are in `v1/store.proto`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NewType

from kvstore.keys import NamespaceId
from kvstore.namespace import Namespace

OwnerId = NewType("OwnerId", bytes)
"""16 random bytes by which a client's leases and reservations are known."""

LeaseId = NewType("LeaseId", int)
ReservationId = NewType("ReservationId", int)

Epoch = NewType("Epoch", bytes)
"""16 random bytes, new at every start of a daemon."""

Ticket = NewType("Ticket", bytes)
"""16 unguessable bytes that let exactly one transfer over the data port happen."""

OWNER_ID_BYTES = 16
TICKET_BYTES = 16
BATCH_COUNT_MAX = 65_536
"""Block hashes in one request: a million tokens at 16 tokens per block."""
LEASE_IDS_MAX = 4_096
HIT_COUNT_MAX = 1 << 32
"""Hits in one report: more than any client finds between two."""
WAIT_S_MAX = 60.0
RECOMPUTE_S_MAX = 60.0
"""Seconds that recomputing one block may be said to take."""
LEASE_S_MAX = 600.0
RESERVATION_S_MAX = 300.0
PRIORITY_MAX = 2
"""Of a hint; the lowest is its negative."""
ACCESS_NUMBER_BYTES = 8
ACCESS_BLOCKS_MAX = 65_536
"""In one answer of accesses, unless a single one has more."""
HINT_S_MAX = 30 * 86_400.0
"""Most that a hint may look ahead."""
HINT_COUNT_MAX = (1 << 32) - 1
"""Of turns and tokens in a hint."""
FRAME_DATA_BYTES_MAX = (2 << 20) + 4096
"""A 2 MiB block with its envelope travels in one frame, under gRPC's default 4 MiB limit."""


class BlockState(IntEnum):
    HIT = 1
    PENDING = 2
    MISS = 3
    CORRUPT = 4


class Tier(IntEnum):
    VRAM = 1
    MEMORY = 2
    NVME = 3
    PEER = 4


class CutReason(IntEnum):
    """Why a matched prefix ends before its run of hits does."""

    NONE = 0
    """It does not, or for a reason that is not known here."""
    TOO_SLOW = 1
    TIER_UNAVAILABLE = 2


class NvmeState(IntEnum):
    OK = 1
    DEGRADED = 2
    RECOVERING = 3


class TransferPath(IntEnum):
    """How the bytes of blocks travel; `v1/store.proto` says what each one is."""

    STREAM = 1
    SLAB = 2
    BULK = 3
    NIXL = 4


class ReserveState(IntEnum):
    RESERVED = 1
    STORED = 2
    PENDING = 3
    FULL = 4
    DRAINING = 5
    ORPHAN = 6
    OVERLOADED = 7


class CommitState(IntEnum):
    COMMITTED = 1
    EXPIRED = 2
    INCOMPLETE = 3
    CORRUPT = 4


class FinishReason(IntEnum):
    """How the answer to a prompt ended."""

    UNKNOWN = 0
    """Or not yet, or in a way that is not known here."""
    TOOL_USE = 1
    END_TURN = 2
    OTHER = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """What a caller knows of the request for which it uses blocks, as it travels; zero or None: not known."""

    session_hash: int = 0
    turn: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    finish_reason: FinishReason = FinishReason.UNKNOWN
    expected_return_s: float | None = None
    is_done: bool = False
    priority: int = 0
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GetStoreInfoRequest:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreInfo:
    version: str
    protocol_version: int
    epoch: Epoch
    uptime_s: float
    draining: bool
    batch_count_max: int
    frame_data_bytes_max: int
    slab_socket: str = ""
    bulk_port: int = 0
    nixl_metadata: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetStoreStatsRequest:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceStats:
    namespace_id: NamespaceId
    model: str
    slot_bytes: int
    block_count: int
    used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeStats:
    state: NvmeState
    reason: str
    capacity_bytes: int
    used_bytes: int
    block_count: int
    segment_count: int
    demoted_count: int
    promoted_count: int
    hit_count: int
    written_bytes: int
    read_bytes: int
    evicted_count: int
    dropped_count: int
    corrupt_count: int
    undemoted_count: int
    policy: str = ""
    admission: str = ""
    """Empty from a daemon that does not tell."""
    prefetch_started_count: int = 0
    prefetch_refused_count: int = 0
    prefetch_useful_count: int = 0
    prefetch_late_count: int = 0
    prefetch_wasted_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseStats:
    """What could have been hits in a span of time, and why it was not; `v1/store.proto` says what each count is."""

    window_s: float
    hit_count: int
    miss_count: int
    new_count: int
    capacity_count: int
    policy_count: int
    admission_count: int
    identity_count: int
    failure_count: int
    unoffered_count: int

    @property
    def hit_ratio(self) -> float:
        """Of the blocks that lookups asked for; 0 where they asked for none."""
        return self.hit_count / max(self.hit_count + self.miss_count, 1)

    @property
    def ceiling_ratio(self) -> float:
        """What `hit_ratio` would have been with room for everything, and nothing in the way."""
        return self.hit_ratio + (self.miss_count - self.new_count) / max(self.hit_count + self.miss_count, 1)

    def gap_ratios(self) -> dict[str, float]:
        """What lies between these two, by cause."""
        looked_up_count = max(self.hit_count + self.miss_count, 1)
        return {
            "capacity": self.capacity_count / looked_up_count,
            "policy": self.policy_count / looked_up_count,
            "admission": self.admission_count / looked_up_count,
            "identity": self.identity_count / looked_up_count,
            "failure": self.failure_count / looked_up_count,
            "unoffered": self.unoffered_count / looked_up_count,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    capacity_bytes: int
    ready_bytes: int
    used_bytes: int
    block_count: int
    reservation_count: int
    lease_count: int
    namespace_count: int
    hit_count: int
    miss_count: int
    pending_count: int
    committed_count: int
    evicted_count: int
    read_bytes: int
    written_bytes: int
    corrupt_count: int
    sent_count: int
    unsent_count: int
    refused_count: int
    uptime_s: float
    namespaces: tuple[NamespaceStats, ...]
    nvme: NvmeStats | None = None
    """None where there is no such tier."""
    reuse: ReuseStats | None = None
    """Since the start; None from a daemon that does not tell."""
    recent_reuse: ReuseStats | None = None
    policy: str = ""
    """By which blocks leave memory; empty from a daemon that does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeNamespacesRequest:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedNamespace:
    namespace: Namespace
    block_count: int


DESCRIBED_BYTES_MAX = 2 << 20
"""Of encoded namespaces in one answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeNamespacesResponse:
    namespaces: tuple[DescribedNamespace, ...]
    left_out_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenNamespaceRequest:
    namespace: Namespace
    payload_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenNamespaceResponse:
    namespace_id: NamespaceId
    epoch: Epoch
    slot_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupBlocksRequest:
    namespace_id: NamespaceId
    block_hashes: bytes
    wait_s: float = 0.0
    recompute_s_per_block: float = 0.0
    hint: Hint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupBlocksResponse:
    matched_count: int
    block_states: bytes
    tiers: bytes
    epoch: Epoch
    left_out_count: int = 0
    cut_reason: CutReason = CutReason.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquirePrefixRequest:
    namespace_id: NamespaceId
    owner_id: OwnerId
    block_hashes: bytes
    lease_s: float
    wait_s: float = 0.0
    recompute_s_per_block: float = 0.0
    hint: Hint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquirePrefixResponse:
    matched_count: int
    block_states: bytes
    tiers: bytes
    epoch: Epoch
    lease_id: LeaseId | None
    left_out_count: int = 0
    cut_reason: CutReason = CutReason.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewLeasesRequest:
    owner_id: OwnerId
    lease_ids: tuple[LeaseId, ...]
    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewLeasesResponse:
    renewed: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLeasesRequest:
    owner_id: OwnerId
    lease_ids: tuple[LeaseId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLeasesResponse:
    released: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBlocksRequest:
    namespace_id: NamespaceId
    block_hashes: bytes
    hint: Hint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseBlocksRequest:
    namespace_id: NamespaceId
    owner_id: OwnerId
    block_hashes: bytes
    lease_s: float
    path: TransferPath
    hint: Hint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseBlocksResponse:
    block_states: bytes
    epoch: Epoch
    lease_id: LeaseId | None
    slots: bytes = b""
    ticket: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveBlocksRequest:
    namespace_id: NamespaceId
    owner_id: OwnerId
    block_hashes: bytes
    reservation_s: float
    parent_hash: bytes = b""
    path: TransferPath = TransferPath.STREAM
    hint: Hint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveBlocksResponse:
    reserve_states: bytes
    reservation_ids: tuple[ReservationId | None, ...]
    epoch: Epoch
    slots: bytes = b""
    ticket: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteBlocksResponse:
    landed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitBlocksRequest:
    owner_id: OwnerId
    reservation_ids: tuple[ReservationId, ...]
    in_slots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitBlocksResponse:
    commit_states: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortReservationsRequest:
    owner_id: OwnerId
    reservation_ids: tuple[ReservationId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortReservationsResponse:
    aborted_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CountReadsRequest:
    namespace_id: NamespaceId
    block_hashes: bytes
    hit_count: int = 0
    hint: Hint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CountReadsResponse:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchBlocksRequest:
    namespace_id: NamespaceId
    block_hashes: bytes
    budget_bytes: int = 0
    hint: Hint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchBlocksResponse:
    in_memory_count: int
    started_count: int
    refused_count: int
    missing_count: int
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class HintBlocksRequest:
    namespace_id: NamespaceId
    block_hashes: bytes
    hint: Hint


@dataclass(frozen=True, slots=True, kw_only=True)
class HintBlocksResponse:
    pass


class AccessKind(IntEnum):
    """What was asked of blocks."""

    UNKNOWN = 0
    LOOKUP = 1
    READ = 2
    HINT = 3
    WRITE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One thing that was asked of the daemon; blocks and sessions are salted hashes."""

    kind: AccessKind
    uptime_s: float
    block_numbers: bytes
    """`ACCESS_NUMBER_BYTES` for each block."""
    matched_count: int = 0
    """Leading blocks that were there; of a write 1 if its first is the one before those that are written."""
    hint: Hint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeAccessesRequest:
    namespace_id: NamespaceId
    after_number: int = 0
    """0: begin now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeAccessesResponse:
    accesses: tuple[Access, ...]
    last_number: int
    dropped_count: int
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyBlocksRequest:
    namespace_id: NamespaceId
    block_hashes: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyBlocksResponse:
    block_states: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GetAgentStatusRequest:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentNamespaceStatus:
    namespace_id: NamespaceId
    model: str
    capacity_bytes: int
    used_bytes: int
    resident_count: int
    session_count: int
    granted_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStatus:
    version: str
    device: str
    capacity_bytes: int
    used_bytes: int
    peak_bytes: int
    resident_count: int
    migrated_count: int
    migration_batch_count: int
    reloaded_count: int
    lost_count: int
    step: int
    uptime_s: float
    namespaces: tuple[AgentNamespaceStatus, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAgentNamespaceRequest:
    namespace: Namespace
    quota_bytes: int = 0
    further_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAgentNamespaceResponse:
    namespace_id: NamespaceId
    slot_count: int
    block_bytes: int
    batch_count_max: int
    attach_socket: str
    lease_s: float
    cuda_ipc_handle: bytes = b""
    device_uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBlocksResponse:
    stored: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBlocksRequest:
    block_hashes: bytes
    namespace_id: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class TouchBlocksRequest:
    block_hashes: bytes
    step_count: int = field(default=1)
    namespace_id: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class TouchBlocksResponse:
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FindBlocksRequest:
    namespace_id: NamespaceId
    block_hashes: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FindBlocksResponse:
    block_states: bytes


class SlotGrant(IntEnum):
    UNSPECIFIED = 0
    RESERVED = 1
    PRESENT = 2
    REFUSED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveSlotsRequest:
    session_id: OwnerId
    block_hashes: bytes
    parent_hash: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveSlotsResponse:
    slot_grants: bytes
    slots: tuple[int, ...] = ()
    reservation_number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitSlotsRequest:
    session_id: OwnerId
    reservation_number: int
    written: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitSlotsResponse:
    stored: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquireSlotsRequest:
    session_id: OwnerId
    block_hashes: bytes
    parent_hash: bytes = b""
    wait_s: float = 0.0
    released_lease_numbers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquireSlotsResponse:
    block_states: bytes
    slots: tuple[int, ...] = ()
    lease_number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseSlotsRequest:
    session_id: OwnerId
    lease_numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseSlotsResponse:
    pass
