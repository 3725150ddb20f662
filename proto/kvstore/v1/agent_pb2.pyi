import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from kvstore.v1 import store_pb2 as _store_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetAgentStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetAgentStatusResponse(_message.Message):
    __slots__ = ("version", "device", "capacity_bytes", "used_bytes", "peak_bytes", "resident_count", "migrated_count", "migration_batch_count", "reloaded_count", "lost_count", "step", "uptime_duration")
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
    def __init__(self, version: _Optional[str] = ..., device: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., peak_bytes: _Optional[int] = ..., resident_count: _Optional[int] = ..., migrated_count: _Optional[int] = ..., migration_batch_count: _Optional[int] = ..., reloaded_count: _Optional[int] = ..., lost_count: _Optional[int] = ..., step: _Optional[int] = ..., uptime_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class OpenAgentNamespaceRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: _store_pb2.Namespace
    def __init__(self, namespace: _Optional[_Union[_store_pb2.Namespace, _Mapping]] = ...) -> None: ...

class OpenAgentNamespaceResponse(_message.Message):
    __slots__ = ("namespace_id", "slot_count")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    slot_count: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., slot_count: _Optional[int] = ...) -> None: ...

class StoreBlocksRequest(_message.Message):
    __slots__ = ("block_hash", "parent_hash", "offset_bytes", "data")
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    block_hash: bytes
    parent_hash: bytes
    offset_bytes: int
    data: bytes
    def __init__(self, block_hash: _Optional[bytes] = ..., parent_hash: _Optional[bytes] = ..., offset_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class StoreBlocksResponse(_message.Message):
    __slots__ = ("stored",)
    STORED_FIELD_NUMBER: _ClassVar[int]
    stored: bytes
    def __init__(self, stored: _Optional[bytes] = ...) -> None: ...

class LoadBlocksRequest(_message.Message):
    __slots__ = ("block_hashes",)
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    block_hashes: bytes
    def __init__(self, block_hashes: _Optional[bytes] = ...) -> None: ...

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
    __slots__ = ("block_hashes", "step_count")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    block_hashes: bytes
    step_count: int
    def __init__(self, block_hashes: _Optional[bytes] = ..., step_count: _Optional[int] = ...) -> None: ...

class TouchBlocksResponse(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...
