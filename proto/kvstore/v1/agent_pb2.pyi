import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from kvstore.v1 import store_pb2 as _store_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SlotGrant(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SLOT_GRANT_UNSPECIFIED: _ClassVar[SlotGrant]
    SLOT_GRANT_RESERVED: _ClassVar[SlotGrant]
    SLOT_GRANT_PRESENT: _ClassVar[SlotGrant]
    SLOT_GRANT_REFUSED: _ClassVar[SlotGrant]
SLOT_GRANT_UNSPECIFIED: SlotGrant
SLOT_GRANT_RESERVED: SlotGrant
SLOT_GRANT_PRESENT: SlotGrant
SLOT_GRANT_REFUSED: SlotGrant

class GetAgentStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetAgentStatusResponse(_message.Message):
    __slots__ = ("version", "device", "capacity_bytes", "used_bytes", "peak_bytes", "resident_count", "migrated_count", "migration_batch_count", "reloaded_count", "lost_count", "step", "uptime_duration", "namespaces")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    MIGRATED_COUNT_FIELD_NUMBER: _ClassVar[int]
    MIGRATION_BATCH_COUNT_FIELD_NUMBER: _ClassVar[int]
    RELOADED_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOST_COUNT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    UPTIME_DURATION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
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
    uptime_duration: _duration_pb2.Duration
    namespaces: _containers.RepeatedCompositeFieldContainer[AgentNamespaceStatus]
    def __init__(self, version: _Optional[str] = ..., device: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., peak_bytes: _Optional[int] = ..., resident_count: _Optional[int] = ..., migrated_count: _Optional[int] = ..., migration_batch_count: _Optional[int] = ..., reloaded_count: _Optional[int] = ..., lost_count: _Optional[int] = ..., step: _Optional[int] = ..., uptime_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., namespaces: _Optional[_Iterable[_Union[AgentNamespaceStatus, _Mapping]]] = ...) -> None: ...

class AgentNamespaceStatus(_message.Message):
    __slots__ = ("namespace_id", "model", "capacity_bytes", "used_bytes", "resident_count", "session_count", "granted_count")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    SESSION_COUNT_FIELD_NUMBER: _ClassVar[int]
    GRANTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    model: str
    capacity_bytes: int
    used_bytes: int
    resident_count: int
    session_count: int
    granted_count: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., model: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., resident_count: _Optional[int] = ..., session_count: _Optional[int] = ..., granted_count: _Optional[int] = ...) -> None: ...

class OpenAgentNamespaceRequest(_message.Message):
    __slots__ = ("namespace", "quota_bytes", "further_count")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    FURTHER_COUNT_FIELD_NUMBER: _ClassVar[int]
    namespace: _store_pb2.Namespace
    quota_bytes: int
    further_count: int
    def __init__(self, namespace: _Optional[_Union[_store_pb2.Namespace, _Mapping]] = ..., quota_bytes: _Optional[int] = ..., further_count: _Optional[int] = ...) -> None: ...

class OpenAgentNamespaceResponse(_message.Message):
    __slots__ = ("namespace_id", "slot_count", "block_bytes", "batch_count_max", "attach_socket", "lease_duration", "cuda_ipc_handle", "device_uuid")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    BATCH_COUNT_MAX_FIELD_NUMBER: _ClassVar[int]
    ATTACH_SOCKET_FIELD_NUMBER: _ClassVar[int]
    LEASE_DURATION_FIELD_NUMBER: _ClassVar[int]
    CUDA_IPC_HANDLE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    slot_count: int
    block_bytes: int
    batch_count_max: int
    attach_socket: str
    lease_duration: _duration_pb2.Duration
    cuda_ipc_handle: bytes
    device_uuid: str
    def __init__(self, namespace_id: _Optional[bytes] = ..., slot_count: _Optional[int] = ..., block_bytes: _Optional[int] = ..., batch_count_max: _Optional[int] = ..., attach_socket: _Optional[str] = ..., lease_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., cuda_ipc_handle: _Optional[bytes] = ..., device_uuid: _Optional[str] = ...) -> None: ...

class StoreBlocksRequest(_message.Message):
    __slots__ = ("block_hash", "parent_hash", "offset_bytes", "namespace_id", "data")
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    block_hash: bytes
    parent_hash: bytes
    offset_bytes: int
    namespace_id: bytes
    data: bytes
    def __init__(self, block_hash: _Optional[bytes] = ..., parent_hash: _Optional[bytes] = ..., offset_bytes: _Optional[int] = ..., namespace_id: _Optional[bytes] = ..., data: _Optional[bytes] = ...) -> None: ...

class StoreBlocksResponse(_message.Message):
    __slots__ = ("stored",)
    STORED_FIELD_NUMBER: _ClassVar[int]
    stored: bytes
    def __init__(self, stored: _Optional[bytes] = ...) -> None: ...

class LoadBlocksRequest(_message.Message):
    __slots__ = ("block_hashes", "namespace_id")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    block_hashes: bytes
    namespace_id: bytes
    def __init__(self, block_hashes: _Optional[bytes] = ..., namespace_id: _Optional[bytes] = ...) -> None: ...

class LoadBlocksResponse(_message.Message):
    __slots__ = ("block_index", "block_state", "offset_bytes", "size_bytes", "data")
    BLOCK_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STATE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    block_index: int
    block_state: _store_pb2.BlockState
    offset_bytes: int
    size_bytes: int
    data: bytes
    def __init__(self, block_index: _Optional[int] = ..., block_state: _Optional[_Union[_store_pb2.BlockState, str]] = ..., offset_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class TouchBlocksRequest(_message.Message):
    __slots__ = ("block_hashes", "step_count", "namespace_id")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    block_hashes: bytes
    step_count: int
    namespace_id: bytes
    def __init__(self, block_hashes: _Optional[bytes] = ..., step_count: _Optional[int] = ..., namespace_id: _Optional[bytes] = ...) -> None: ...

class TouchBlocksResponse(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class FindBlocksRequest(_message.Message):
    __slots__ = ("namespace_id", "block_hashes")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    block_hashes: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ..., block_hashes: _Optional[bytes] = ...) -> None: ...

class FindBlocksResponse(_message.Message):
    __slots__ = ("block_states",)
    BLOCK_STATES_FIELD_NUMBER: _ClassVar[int]
    block_states: bytes
    def __init__(self, block_states: _Optional[bytes] = ...) -> None: ...

class ReserveSlotsRequest(_message.Message):
    __slots__ = ("session_id", "block_hashes", "parent_hash")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    block_hashes: bytes
    parent_hash: bytes
    def __init__(self, session_id: _Optional[bytes] = ..., block_hashes: _Optional[bytes] = ..., parent_hash: _Optional[bytes] = ...) -> None: ...

class ReserveSlotsResponse(_message.Message):
    __slots__ = ("slot_grants", "slots", "reservation_number")
    SLOT_GRANTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_NUMBER_FIELD_NUMBER: _ClassVar[int]
    slot_grants: bytes
    slots: _containers.RepeatedScalarFieldContainer[int]
    reservation_number: int
    def __init__(self, slot_grants: _Optional[bytes] = ..., slots: _Optional[_Iterable[int]] = ..., reservation_number: _Optional[int] = ...) -> None: ...

class CommitSlotsRequest(_message.Message):
    __slots__ = ("session_id", "reservation_number", "written")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_NUMBER_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    reservation_number: int
    written: bytes
    def __init__(self, session_id: _Optional[bytes] = ..., reservation_number: _Optional[int] = ..., written: _Optional[bytes] = ...) -> None: ...

class CommitSlotsResponse(_message.Message):
    __slots__ = ("stored",)
    STORED_FIELD_NUMBER: _ClassVar[int]
    stored: bytes
    def __init__(self, stored: _Optional[bytes] = ...) -> None: ...

class AcquireSlotsRequest(_message.Message):
    __slots__ = ("session_id", "block_hashes", "parent_hash", "wait_duration", "released_lease_numbers")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    WAIT_DURATION_FIELD_NUMBER: _ClassVar[int]
    RELEASED_LEASE_NUMBERS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    block_hashes: bytes
    parent_hash: bytes
    wait_duration: _duration_pb2.Duration
    released_lease_numbers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[bytes] = ..., block_hashes: _Optional[bytes] = ..., parent_hash: _Optional[bytes] = ..., wait_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., released_lease_numbers: _Optional[_Iterable[int]] = ...) -> None: ...

class AcquireSlotsResponse(_message.Message):
    __slots__ = ("block_states", "slots", "lease_number")
    BLOCK_STATES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    block_states: bytes
    slots: _containers.RepeatedScalarFieldContainer[int]
    lease_number: int
    def __init__(self, block_states: _Optional[bytes] = ..., slots: _Optional[_Iterable[int]] = ..., lease_number: _Optional[int] = ...) -> None: ...

class ReleaseSlotsRequest(_message.Message):
    __slots__ = ("session_id", "lease_numbers")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_NUMBERS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    lease_numbers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[bytes] = ..., lease_numbers: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseSlotsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
