"""The one tree of operating errors, and the gRPC status each one travels as.

Outcomes (a miss, a full tier) are return values and never appear here; bugs are `assert`s.
The mapping is part of the contract and documented in docs/formats/errors.md.
"""

from __future__ import annotations

from typing import ClassVar

REASON_METADATA_KEY = "kvstore-reason"
"""Trailing metadata that names the exact error where several share one gRPC status."""


class KvstoreError(Exception):
    """Base of all operating errors; `reason` and `grpc_status` are stable and may be scripted against."""

    reason: ClassVar[str] = "INTERNAL"
    grpc_status: ClassVar[str] = "INTERNAL"


class InvalidArgumentError(KvstoreError, ValueError):
    """The caller's input is wrong; names the field, its value and what is allowed."""

    reason = "INVALID_ARGUMENT"
    grpc_status = "INVALID_ARGUMENT"

    @classmethod
    def of(cls, field: str, value: object, allowed: str) -> InvalidArgumentError:
        shown = repr(value)
        if len(shown) > 120:
            shown = f"{shown[:117]}..."
        return cls(f"{field} is {shown}; allowed: {allowed}")


class NamespaceUnknownError(KvstoreError):
    """The daemon has not seen this namespace since it started; open it and try again."""

    reason = "NAMESPACE_UNKNOWN"
    grpc_status = "FAILED_PRECONDITION"


class LayoutMismatchError(KvstoreError):
    """The client's block size disagrees with what the namespace gives."""

    reason = "LAYOUT_MISMATCH"
    grpc_status = "FAILED_PRECONDITION"


class CapacityError(KvstoreError):
    """The request can never fit: a block larger than a slab, too many namespaces."""

    reason = "CAPACITY"
    grpc_status = "RESOURCE_EXHAUSTED"


class UnavailableError(KvstoreError):
    """The daemon cannot be reached, is draining, or the path to it broke."""

    reason = "UNAVAILABLE"
    grpc_status = "UNAVAILABLE"


class DeadlineExceededError(KvstoreError):
    """The answer did not come in time; the call may or may not have taken effect."""

    reason = "DEADLINE_EXCEEDED"
    grpc_status = "DEADLINE_EXCEEDED"


class CorruptBlockError(KvstoreError):
    """Bytes do not match their envelope: magic, key echo, length or checksum."""

    reason = "CORRUPT_BLOCK"
    grpc_status = "DATA_LOSS"


class ProtocolError(KvstoreError):
    """The peer sent something that the contract does not allow."""

    reason = "PROTOCOL"
    grpc_status = "INTERNAL"


class InternalError(KvstoreError):
    """The peer failed in a way it could not name."""


_TREE: tuple[type[KvstoreError], ...] = (
    InvalidArgumentError,
    NamespaceUnknownError,
    LayoutMismatchError,
    CapacityError,
    UnavailableError,
    DeadlineExceededError,
    CorruptBlockError,
    InternalError,
    ProtocolError,
)
_BY_REASON = {error.reason: error for error in _TREE}
_BY_STATUS = {error.grpc_status: error for error in reversed(_TREE)}


def error_from_status(*, status: str, reason: str | None, message: str) -> KvstoreError:
    """The error that a peer's gRPC status stands for; an unknown one becomes `InternalError`.

    `CANCELLED` and `UNKNOWN` come from broken connections and middleboxes and read as unavailable.
    """
    if reason in _BY_REASON:
        return _BY_REASON[reason](message)
    if status in ("CANCELLED", "UNKNOWN"):
        return UnavailableError(message)
    return _BY_STATUS.get(status, InternalError)(f"{status}: {message}" if status not in _BY_STATUS else message)
