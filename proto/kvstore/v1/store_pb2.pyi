import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlockState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_STATE_UNSPECIFIED: _ClassVar[BlockState]
    BLOCK_STATE_HIT: _ClassVar[BlockState]
    BLOCK_STATE_PENDING: _ClassVar[BlockState]
    BLOCK_STATE_MISS: _ClassVar[BlockState]
    BLOCK_STATE_CORRUPT: _ClassVar[BlockState]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_VRAM: _ClassVar[Tier]
    TIER_MEMORY: _ClassVar[Tier]
    TIER_NVME: _ClassVar[Tier]
    TIER_PEER: _ClassVar[Tier]

class CutReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CUT_REASON_UNSPECIFIED: _ClassVar[CutReason]
    CUT_REASON_TOO_SLOW: _ClassVar[CutReason]
    CUT_REASON_TIER_UNAVAILABLE: _ClassVar[CutReason]

class NvmeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NVME_STATE_UNSPECIFIED: _ClassVar[NvmeState]
    NVME_STATE_OK: _ClassVar[NvmeState]
    NVME_STATE_DEGRADED: _ClassVar[NvmeState]
    NVME_STATE_RECOVERING: _ClassVar[NvmeState]

class TransferPath(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSFER_PATH_UNSPECIFIED: _ClassVar[TransferPath]
    TRANSFER_PATH_STREAM: _ClassVar[TransferPath]
    TRANSFER_PATH_SLAB: _ClassVar[TransferPath]
    TRANSFER_PATH_BULK: _ClassVar[TransferPath]
    TRANSFER_PATH_NIXL: _ClassVar[TransferPath]

class ReserveState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESERVE_STATE_UNSPECIFIED: _ClassVar[ReserveState]
    RESERVE_STATE_RESERVED: _ClassVar[ReserveState]
    RESERVE_STATE_STORED: _ClassVar[ReserveState]
    RESERVE_STATE_PENDING: _ClassVar[ReserveState]
    RESERVE_STATE_FULL: _ClassVar[ReserveState]
    RESERVE_STATE_DRAINING: _ClassVar[ReserveState]
    RESERVE_STATE_ORPHAN: _ClassVar[ReserveState]
    RESERVE_STATE_OVERLOADED: _ClassVar[ReserveState]

class CommitState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMMIT_STATE_UNSPECIFIED: _ClassVar[CommitState]
    COMMIT_STATE_COMMITTED: _ClassVar[CommitState]
    COMMIT_STATE_EXPIRED: _ClassVar[CommitState]
    COMMIT_STATE_INCOMPLETE: _ClassVar[CommitState]
    COMMIT_STATE_CORRUPT: _ClassVar[CommitState]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_USE: _ClassVar[FinishReason]
    FINISH_REASON_END_TURN: _ClassVar[FinishReason]
    FINISH_REASON_OTHER: _ClassVar[FinishReason]

class AccessKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACCESS_KIND_UNSPECIFIED: _ClassVar[AccessKind]
    ACCESS_KIND_LOOKUP: _ClassVar[AccessKind]
    ACCESS_KIND_READ: _ClassVar[AccessKind]
    ACCESS_KIND_HINT: _ClassVar[AccessKind]
    ACCESS_KIND_WRITE: _ClassVar[AccessKind]
BLOCK_STATE_UNSPECIFIED: BlockState
BLOCK_STATE_HIT: BlockState
BLOCK_STATE_PENDING: BlockState
BLOCK_STATE_MISS: BlockState
BLOCK_STATE_CORRUPT: BlockState
TIER_UNSPECIFIED: Tier
TIER_VRAM: Tier
TIER_MEMORY: Tier
TIER_NVME: Tier
TIER_PEER: Tier
CUT_REASON_UNSPECIFIED: CutReason
CUT_REASON_TOO_SLOW: CutReason
CUT_REASON_TIER_UNAVAILABLE: CutReason
NVME_STATE_UNSPECIFIED: NvmeState
NVME_STATE_OK: NvmeState
NVME_STATE_DEGRADED: NvmeState
NVME_STATE_RECOVERING: NvmeState
TRANSFER_PATH_UNSPECIFIED: TransferPath
TRANSFER_PATH_STREAM: TransferPath
TRANSFER_PATH_SLAB: TransferPath
TRANSFER_PATH_BULK: TransferPath
TRANSFER_PATH_NIXL: TransferPath
RESERVE_STATE_UNSPECIFIED: ReserveState
RESERVE_STATE_RESERVED: ReserveState
RESERVE_STATE_STORED: ReserveState
RESERVE_STATE_PENDING: ReserveState
RESERVE_STATE_FULL: ReserveState
RESERVE_STATE_DRAINING: ReserveState
RESERVE_STATE_ORPHAN: ReserveState
RESERVE_STATE_OVERLOADED: ReserveState
COMMIT_STATE_UNSPECIFIED: CommitState
COMMIT_STATE_COMMITTED: CommitState
COMMIT_STATE_EXPIRED: CommitState
COMMIT_STATE_INCOMPLETE: CommitState
COMMIT_STATE_CORRUPT: CommitState
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_TOOL_USE: FinishReason
FINISH_REASON_END_TURN: FinishReason
FINISH_REASON_OTHER: FinishReason
ACCESS_KIND_UNSPECIFIED: AccessKind
ACCESS_KIND_LOOKUP: AccessKind
ACCESS_KIND_READ: AccessKind
ACCESS_KIND_HINT: AccessKind
ACCESS_KIND_WRITE: AccessKind

class Hint(_message.Message):
    __slots__ = ("session_hash", "turn", "input_tokens", "output_tokens", "finish_reason", "expected_return_duration", "is_done", "priority", "ttl_duration")
    SESSION_HASH_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_RETURN_DURATION_FIELD_NUMBER: _ClassVar[int]
    IS_DONE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTL_DURATION_FIELD_NUMBER: _ClassVar[int]
    session_hash: int
    turn: int
    input_tokens: int
    output_tokens: int
    finish_reason: FinishReason
    expected_return_duration: _duration_pb2.Duration
    is_done: bool
    priority: int
    ttl_duration: _duration_pb2.Duration
    def __init__(self, session_hash: _Optional[int] = ..., turn: _Optional[int] = ..., input_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., expected_return_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., is_done: _Optional[bool] = ..., priority: _Optional[int] = ..., ttl_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("canonical",)
    CANONICAL_FIELD_NUMBER: _ClassVar[int]
    canonical: bytes
    def __init__(self, canonical: _Optional[bytes] = ...) -> None: ...

class GetStoreInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStoreInfoResponse(_message.Message):
    __slots__ = ("version", "protocol_version", "epoch", "uptime_duration", "draining", "batch_count_max", "frame_data_bytes_max", "slab_socket", "bulk_port", "nixl_metadata")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPTIME_DURATION_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    BATCH_COUNT_MAX_FIELD_NUMBER: _ClassVar[int]
    FRAME_DATA_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    SLAB_SOCKET_FIELD_NUMBER: _ClassVar[int]
    BULK_PORT_FIELD_NUMBER: _ClassVar[int]
    NIXL_METADATA_FIELD_NUMBER: _ClassVar[int]
    version: str
    protocol_version: int
    epoch: bytes
    uptime_duration: _duration_pb2.Duration
    draining: bool
    batch_count_max: int
    frame_data_bytes_max: int
    slab_socket: str
    bulk_port: int
    nixl_metadata: bytes
    def __init__(self, version: _Optional[str] = ..., protocol_version: _Optional[int] = ..., epoch: _Optional[bytes] = ..., uptime_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., draining: _Optional[bool] = ..., batch_count_max: _Optional[int] = ..., frame_data_bytes_max: _Optional[int] = ..., slab_socket: _Optional[str] = ..., bulk_port: _Optional[int] = ..., nixl_metadata: _Optional[bytes] = ...) -> None: ...

class GetStoreStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStoreStatsResponse(_message.Message):
    __slots__ = ("capacity_bytes", "ready_bytes", "used_bytes", "block_count", "reservation_count", "lease_count", "namespace_count", "hit_count", "miss_count", "pending_count", "committed_count", "evicted_count", "read_bytes", "written_bytes", "corrupt_count", "uptime_duration", "namespaces", "sent_count", "unsent_count", "refused_count", "nvme", "reuse", "recent_reuse", "policy")
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    READY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEASE_COUNT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_COUNT_FIELD_NUMBER: _ClassVar[int]
    HIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    MISS_COUNT_FIELD_NUMBER: _ClassVar[int]
    PENDING_COUNT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    EVICTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_COUNT_FIELD_NUMBER: _ClassVar[int]
    UPTIME_DURATION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    SENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    UNSENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_COUNT_FIELD_NUMBER: _ClassVar[int]
    NVME_FIELD_NUMBER: _ClassVar[int]
    REUSE_FIELD_NUMBER: _ClassVar[int]
    RECENT_REUSE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
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
    uptime_duration: _duration_pb2.Duration
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStats]
    sent_count: int
    unsent_count: int
    refused_count: int
    nvme: NvmeStats
    reuse: ReuseStats
    recent_reuse: ReuseStats
    policy: str
    def __init__(self, capacity_bytes: _Optional[int] = ..., ready_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., block_count: _Optional[int] = ..., reservation_count: _Optional[int] = ..., lease_count: _Optional[int] = ..., namespace_count: _Optional[int] = ..., hit_count: _Optional[int] = ..., miss_count: _Optional[int] = ..., pending_count: _Optional[int] = ..., committed_count: _Optional[int] = ..., evicted_count: _Optional[int] = ..., read_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ..., corrupt_count: _Optional[int] = ..., uptime_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceStats, _Mapping]]] = ..., sent_count: _Optional[int] = ..., unsent_count: _Optional[int] = ..., refused_count: _Optional[int] = ..., nvme: _Optional[_Union[NvmeStats, _Mapping]] = ..., reuse: _Optional[_Union[ReuseStats, _Mapping]] = ..., recent_reuse: _Optional[_Union[ReuseStats, _Mapping]] = ..., policy: _Optional[str] = ...) -> None: ...

class ReuseStats(_message.Message):
    __slots__ = ("window_duration", "hit_count", "miss_count", "new_count", "capacity_count", "policy_count", "admission_count", "identity_count", "failure_count", "unoffered_count")
    WINDOW_DURATION_FIELD_NUMBER: _ClassVar[int]
    HIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    MISS_COUNT_FIELD_NUMBER: _ClassVar[int]
    NEW_COUNT_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_COUNT_FIELD_NUMBER: _ClassVar[int]
    POLICY_COUNT_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_COUNT_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_COUNT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_COUNT_FIELD_NUMBER: _ClassVar[int]
    UNOFFERED_COUNT_FIELD_NUMBER: _ClassVar[int]
    window_duration: _duration_pb2.Duration
    hit_count: int
    miss_count: int
    new_count: int
    capacity_count: int
    policy_count: int
    admission_count: int
    identity_count: int
    failure_count: int
    unoffered_count: int
    def __init__(self, window_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., hit_count: _Optional[int] = ..., miss_count: _Optional[int] = ..., new_count: _Optional[int] = ..., capacity_count: _Optional[int] = ..., policy_count: _Optional[int] = ..., admission_count: _Optional[int] = ..., identity_count: _Optional[int] = ..., failure_count: _Optional[int] = ..., unoffered_count: _Optional[int] = ...) -> None: ...

class NvmeStats(_message.Message):
    __slots__ = ("state", "reason", "capacity_bytes", "used_bytes", "block_count", "segment_count", "demoted_count", "promoted_count", "hit_count", "written_bytes", "read_bytes", "evicted_count", "dropped_count", "corrupt_count", "undemoted_count", "policy", "admission", "prefetch_started_count", "prefetch_refused_count", "prefetch_useful_count", "prefetch_late_count", "prefetch_wasted_count")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    DEMOTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    HIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_COUNT_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_COUNT_FIELD_NUMBER: _ClassVar[int]
    UNDEMOTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_STARTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_REFUSED_COUNT_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_USEFUL_COUNT_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_LATE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_WASTED_COUNT_FIELD_NUMBER: _ClassVar[int]
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
    policy: str
    admission: str
    prefetch_started_count: int
    prefetch_refused_count: int
    prefetch_useful_count: int
    prefetch_late_count: int
    prefetch_wasted_count: int
    def __init__(self, state: _Optional[_Union[NvmeState, str]] = ..., reason: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., block_count: _Optional[int] = ..., segment_count: _Optional[int] = ..., demoted_count: _Optional[int] = ..., promoted_count: _Optional[int] = ..., hit_count: _Optional[int] = ..., written_bytes: _Optional[int] = ..., read_bytes: _Optional[int] = ..., evicted_count: _Optional[int] = ..., dropped_count: _Optional[int] = ..., corrupt_count: _Optional[int] = ..., undemoted_count: _Optional[int] = ..., policy: _Optional[str] = ..., admission: _Optional[str] = ..., prefetch_started_count: _Optional[int] = ..., prefetch_refused_count: _Optional[int] = ..., prefetch_useful_count: _Optional[int] = ..., prefetch_late_count: _Optional[int] = ..., prefetch_wasted_count: _Optional[int] = ...) -> None: ...

class NamespaceStats(_message.Message):
    __slots__ = ("namespace_id", "model", "slot_bytes", "block_count", "used_bytes")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    model: str
    slot_bytes: int
    block_count: int
    used_bytes: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., model: _Optional[str] = ..., slot_bytes: _Optional[int] = ..., block_count: _Optional[int] = ..., used_bytes: _Optional[int] = ...) -> None: ...

class DescribeNamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeNamespacesResponse(_message.Message):
    __slots__ = ("namespaces", "left_out_count")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_COUNT_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[DescribedNamespace]
    left_out_count: int
    def __init__(self, namespaces: _Optional[_Iterable[_Union[DescribedNamespace, _Mapping]]] = ..., left_out_count: _Optional[int] = ...) -> None: ...

class DescribedNamespace(_message.Message):
    __slots__ = ("namespace", "block_count")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    namespace: Namespace
    block_count: int
    def __init__(self, namespace: _Optional[_Union[Namespace, _Mapping]] = ..., block_count: _Optional[int] = ...) -> None: ...

class OpenNamespaceRequest(_message.Message):
    __slots__ = ("namespace", "payload_bytes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace: Namespace
    payload_bytes: int
    def __init__(self, namespace: _Optional[_Union[Namespace, _Mapping]] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class OpenNamespaceResponse(_message.Message):
    __slots__ = ("namespace_id", "epoch", "slot_bytes")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    epoch: bytes
    slot_bytes: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., epoch: _Optional[bytes] = ..., slot_bytes: _Optional[int] = ...) -> None: ...

class LookupBlocksRequest(_message.Message):
    __slots__ = ("namespace_id", "block_hashes", "wait_duration", "recompute_us_per_block", "hint")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    WAIT_DURATION_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_US_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    block_hashes: bytes
    wait_duration: _duration_pb2.Duration
    recompute_us_per_block: float
    hint: Hint
    def __init__(self, namespace_id: _Optional[bytes] = ..., block_hashes: _Optional[bytes] = ..., wait_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., recompute_us_per_block: _Optional[float] = ..., hint: _Optional[_Union[Hint, _Mapping]] = ...) -> None: ...

class LookupBlocksResponse(_message.Message):
    __slots__ = ("matched_count", "block_states", "tiers", "epoch", "left_out_count", "cut_reason")
    MATCHED_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STATES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_COUNT_FIELD_NUMBER: _ClassVar[int]
    CUT_REASON_FIELD_NUMBER: _ClassVar[int]
    matched_count: int
    block_states: bytes
    tiers: bytes
    epoch: bytes
    left_out_count: int
    cut_reason: CutReason
    def __init__(self, matched_count: _Optional[int] = ..., block_states: _Optional[bytes] = ..., tiers: _Optional[bytes] = ..., epoch: _Optional[bytes] = ..., left_out_count: _Optional[int] = ..., cut_reason: _Optional[_Union[CutReason, str]] = ...) -> None: ...

class AcquirePrefixRequest(_message.Message):
    __slots__ = ("namespace_id", "owner_id", "block_hashes", "lease_duration", "wait_duration", "recompute_us_per_block", "hint")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    WAIT_DURATION_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_US_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    owner_id: bytes
    block_hashes: bytes
    lease_duration: _duration_pb2.Duration
    wait_duration: _duration_pb2.Duration
    recompute_us_per_block: float
    hint: Hint
    def __init__(self, namespace_id: _Optional[bytes] = ..., owner_id: _Optional[bytes] = ..., block_hashes: _Optional[bytes] = ..., lease_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., wait_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., recompute_us_per_block: _Optional[float] = ..., hint: _Optional[_Union[Hint, _Mapping]] = ...) -> None: ...

class AcquirePrefixResponse(_message.Message):
    __slots__ = ("matched_count", "block_states", "tiers", "epoch", "lease_id", "left_out_count", "cut_reason")
    MATCHED_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STATES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_COUNT_FIELD_NUMBER: _ClassVar[int]
    CUT_REASON_FIELD_NUMBER: _ClassVar[int]
    matched_count: int
    block_states: bytes
    tiers: bytes
    epoch: bytes
    lease_id: int
    left_out_count: int
    cut_reason: CutReason
    def __init__(self, matched_count: _Optional[int] = ..., block_states: _Optional[bytes] = ..., tiers: _Optional[bytes] = ..., epoch: _Optional[bytes] = ..., lease_id: _Optional[int] = ..., left_out_count: _Optional[int] = ..., cut_reason: _Optional[_Union[CutReason, str]] = ...) -> None: ...

class RenewLeasesRequest(_message.Message):
    __slots__ = ("owner_id", "lease_ids", "lease_duration")
    OWNER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    owner_id: bytes
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    lease_duration: _duration_pb2.Duration
    def __init__(self, owner_id: _Optional[bytes] = ..., lease_ids: _Optional[_Iterable[int]] = ..., lease_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RenewLeasesResponse(_message.Message):
    __slots__ = ("renewed",)
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    renewed: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, renewed: _Optional[_Iterable[bool]] = ...) -> None: ...

class ReleaseLeasesRequest(_message.Message):
    __slots__ = ("owner_id", "lease_ids")
    OWNER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    owner_id: bytes
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, owner_id: _Optional[bytes] = ..., lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseLeasesResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, released: _Optional[_Iterable[bool]] = ...) -> None: ...

class ReadBlocksRequest(_message.Message):
    __slots__ = ("namespace_id", "block_hashes", "hint")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    block_hashes: bytes
    hint: Hint
    def __init__(self, namespace_id: _Optional[bytes] = ..., block_hashes: _Optional[bytes] = ..., hint: _Optional[_Union[Hint, _Mapping]] = ...) -> None: ...

class ReadBlocksResponse(_message.Message):
    __slots__ = ("block_index", "block_state", "offset_bytes", "size_bytes", "data")
    BLOCK_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STATE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    block_index: int
    block_state: BlockState
    offset_bytes: int
    size_bytes: int
    data: bytes
    def __init__(self, block_index: _Optional[int] = ..., block_state: _Optional[_Union[BlockState, str]] = ..., offset_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class LeaseBlocksRequest(_message.Message):
    __slots__ = ("namespace_id", "owner_id", "block_hashes", "lease_duration", "path", "hint")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    owner_id: bytes
    block_hashes: bytes
    lease_duration: _duration_pb2.Duration
    path: TransferPath
    hint: Hint
    def __init__(self, namespace_id: _Optional[bytes] = ..., owner_id: _Optional[bytes] = ..., block_hashes: _Optional[bytes] = ..., lease_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., path: _Optional[_Union[TransferPath, str]] = ..., hint: _Optional[_Union[Hint, _Mapping]] = ...) -> None: ...

class LeaseBlocksResponse(_message.Message):
    __slots__ = ("block_states", "epoch", "lease_id", "slots", "ticket")
    BLOCK_STATES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    block_states: bytes
    epoch: bytes
    lease_id: int
    slots: bytes
    ticket: bytes
    def __init__(self, block_states: _Optional[bytes] = ..., epoch: _Optional[bytes] = ..., lease_id: _Optional[int] = ..., slots: _Optional[bytes] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class ReserveBlocksRequest(_message.Message):
    __slots__ = ("namespace_id", "owner_id", "parent_hash", "block_hashes", "reservation_duration", "path", "hint")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_DURATION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    owner_id: bytes
    parent_hash: bytes
    block_hashes: bytes
    reservation_duration: _duration_pb2.Duration
    path: TransferPath
    hint: Hint
    def __init__(self, namespace_id: _Optional[bytes] = ..., owner_id: _Optional[bytes] = ..., parent_hash: _Optional[bytes] = ..., block_hashes: _Optional[bytes] = ..., reservation_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., path: _Optional[_Union[TransferPath, str]] = ..., hint: _Optional[_Union[Hint, _Mapping]] = ...) -> None: ...

class ReserveBlocksResponse(_message.Message):
    __slots__ = ("reserve_states", "reservation_ids", "epoch", "slots", "ticket")
    RESERVE_STATES_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_IDS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    reserve_states: bytes
    reservation_ids: _containers.RepeatedScalarFieldContainer[int]
    epoch: bytes
    slots: bytes
    ticket: bytes
    def __init__(self, reserve_states: _Optional[bytes] = ..., reservation_ids: _Optional[_Iterable[int]] = ..., epoch: _Optional[bytes] = ..., slots: _Optional[bytes] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class WriteBlocksRequest(_message.Message):
    __slots__ = ("reservation_id", "owner_id", "offset_bytes", "data")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    owner_id: bytes
    offset_bytes: int
    data: bytes
    def __init__(self, reservation_id: _Optional[int] = ..., owner_id: _Optional[bytes] = ..., offset_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class WriteBlocksResponse(_message.Message):
    __slots__ = ("landed_bytes",)
    LANDED_BYTES_FIELD_NUMBER: _ClassVar[int]
    landed_bytes: int
    def __init__(self, landed_bytes: _Optional[int] = ...) -> None: ...

class CommitBlocksRequest(_message.Message):
    __slots__ = ("owner_id", "reservation_ids", "in_slots")
    OWNER_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_IDS_FIELD_NUMBER: _ClassVar[int]
    IN_SLOTS_FIELD_NUMBER: _ClassVar[int]
    owner_id: bytes
    reservation_ids: _containers.RepeatedScalarFieldContainer[int]
    in_slots: bool
    def __init__(self, owner_id: _Optional[bytes] = ..., reservation_ids: _Optional[_Iterable[int]] = ..., in_slots: _Optional[bool] = ...) -> None: ...

class CommitBlocksResponse(_message.Message):
    __slots__ = ("commit_states",)
    COMMIT_STATES_FIELD_NUMBER: _ClassVar[int]
    commit_states: bytes
    def __init__(self, commit_states: _Optional[bytes] = ...) -> None: ...

class AbortReservationsRequest(_message.Message):
    __slots__ = ("owner_id", "reservation_ids")
    OWNER_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_IDS_FIELD_NUMBER: _ClassVar[int]
    owner_id: bytes
    reservation_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, owner_id: _Optional[bytes] = ..., reservation_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortReservationsResponse(_message.Message):
    __slots__ = ("aborted_count",)
    ABORTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    aborted_count: int
    def __init__(self, aborted_count: _Optional[int] = ...) -> None: ...

class CountReadsRequest(_message.Message):
    __slots__ = ("namespace_id", "block_hashes", "hit_count", "hint")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    HIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    block_hashes: bytes
    hit_count: int
    hint: Hint
    def __init__(self, namespace_id: _Optional[bytes] = ..., block_hashes: _Optional[bytes] = ..., hit_count: _Optional[int] = ..., hint: _Optional[_Union[Hint, _Mapping]] = ...) -> None: ...

class CountReadsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefetchBlocksRequest(_message.Message):
    __slots__ = ("namespace_id", "block_hashes", "budget_bytes", "hint")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    block_hashes: bytes
    budget_bytes: int
    hint: Hint
    def __init__(self, namespace_id: _Optional[bytes] = ..., block_hashes: _Optional[bytes] = ..., budget_bytes: _Optional[int] = ..., hint: _Optional[_Union[Hint, _Mapping]] = ...) -> None: ...

class PrefetchBlocksResponse(_message.Message):
    __slots__ = ("in_memory_count", "started_count", "refused_count", "missing_count", "epoch")
    IN_MEMORY_COUNT_FIELD_NUMBER: _ClassVar[int]
    STARTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_COUNT_FIELD_NUMBER: _ClassVar[int]
    MISSING_COUNT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    in_memory_count: int
    started_count: int
    refused_count: int
    missing_count: int
    epoch: bytes
    def __init__(self, in_memory_count: _Optional[int] = ..., started_count: _Optional[int] = ..., refused_count: _Optional[int] = ..., missing_count: _Optional[int] = ..., epoch: _Optional[bytes] = ...) -> None: ...

class VerifyBlocksRequest(_message.Message):
    __slots__ = ("namespace_id", "block_hashes")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    block_hashes: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ..., block_hashes: _Optional[bytes] = ...) -> None: ...

class VerifyBlocksResponse(_message.Message):
    __slots__ = ("block_states",)
    BLOCK_STATES_FIELD_NUMBER: _ClassVar[int]
    block_states: bytes
    def __init__(self, block_states: _Optional[bytes] = ...) -> None: ...

class HintBlocksRequest(_message.Message):
    __slots__ = ("namespace_id", "block_hashes", "hint")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    block_hashes: bytes
    hint: Hint
    def __init__(self, namespace_id: _Optional[bytes] = ..., block_hashes: _Optional[bytes] = ..., hint: _Optional[_Union[Hint, _Mapping]] = ...) -> None: ...

class HintBlocksResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Access(_message.Message):
    __slots__ = ("kind", "uptime_duration", "block_numbers", "matched_count", "hint")
    KIND_FIELD_NUMBER: _ClassVar[int]
    UPTIME_DURATION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NUMBERS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_COUNT_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    kind: AccessKind
    uptime_duration: _duration_pb2.Duration
    block_numbers: bytes
    matched_count: int
    hint: Hint
    def __init__(self, kind: _Optional[_Union[AccessKind, str]] = ..., uptime_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., block_numbers: _Optional[bytes] = ..., matched_count: _Optional[int] = ..., hint: _Optional[_Union[Hint, _Mapping]] = ...) -> None: ...

class TakeAccessesRequest(_message.Message):
    __slots__ = ("namespace_id", "after_number")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_NUMBER_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    after_number: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., after_number: _Optional[int] = ...) -> None: ...

class TakeAccessesResponse(_message.Message):
    __slots__ = ("accesses", "last_number", "dropped_count", "epoch")
    ACCESSES_FIELD_NUMBER: _ClassVar[int]
    LAST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    DROPPED_COUNT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    accesses: _containers.RepeatedCompositeFieldContainer[Access]
    last_number: int
    dropped_count: int
    epoch: bytes
    def __init__(self, accesses: _Optional[_Iterable[_Union[Access, _Mapping]]] = ..., last_number: _Optional[int] = ..., dropped_count: _Optional[int] = ..., epoch: _Optional[bytes] = ...) -> None: ...
