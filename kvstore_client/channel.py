"""How gRPC is set up, and how its failures read. Shared by both drivers."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import grpc

from kvstore import wire
from kvstore.errors import REASON_METADATA_KEY, KvstoreError, error_from_status
from kvstore.frames import WriteFrame
from kvstore.messages import FRAME_DATA_BYTES_MAX

_MESSAGE_BYTES_MAX = FRAME_DATA_BYTES_MAX + (2 << 20)
"""A frame, or 65,536 hashes (2 MiB), with room for its header."""
STREAM_WINDOW_BYTES = 8 << 20
"""What gRPC sends ahead of the reader, and takes from the writer ahead of the network: four blocks of 2 MiB."""

STREAM_OPTIONS: list[tuple[str, Any]] = [
    # Measured, each a few per cent (docs/adr/0005-grpc-streams.md). One HTTP/2 frame for a whole frame of ours ...
    ("grpc.http2.max_frame_size", (1 << 24) - 1),
    # ... a window of several blocks from the start, instead of one that is found out by probing ...
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES),
    # ... and the next block is made ready while the last ones are sent.
    ("grpc.http2.write_buffer_size", STREAM_WINDOW_BYTES),
]
"""For both ends of a connection that blocks travel on."""

_IDEMPOTENT = (
    wire.GET_STORE_INFO,
    wire.GET_STORE_STATS,
    wire.OPEN_NAMESPACE,
    wire.LOOKUP_BLOCKS,
    wire.RELEASE_LEASES,
    wire.VERIFY_BLOCKS,
    wire.PREFETCH_BLOCKS,
    wire.DESCRIBE_NAMESPACES,
)
"""Calls that gRPC may send again. A repeated AcquirePrefix or ReserveBlocks would hold blocks twice."""

_RETRY_POLICY = {
    # 2 more attempts, ~50 and ~100 ms later with gRPC's own jitter: bridges a reconnect, not an outage.
    "maxAttempts": 3,
    "initialBackoff": "0.05s",
    "maxBackoff": "0.2s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}

_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{"service": method.service, "method": method.name} for method in _IDEMPOTENT],
                "retryPolicy": _RETRY_POLICY,
            }
        ]
    }
)

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *STREAM_OPTIONS,
    ("grpc.max_send_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.service_config", _SERVICE_CONFIG),
    # A daemon's restart takes under a second; gRPC's own 20 s to connect and 120 s between attempts do not fit.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Finds out that a machine vanished without a word. Three pings a minute with a call open are within what any
    # gRPC server tolerates.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Pods often carry http_proxy for the internet; the node's daemon is not there.
    ("grpc.enable_http_proxy", 0),
    # One connection per client: two clients of a process neither share a window nor a fate.
    ("grpc.use_local_subchannel_pool", 1),
]


class FailedCall(Protocol):
    """What the errors of gRPC's sync and asyncio stacks have in common."""

    def code(self) -> grpc.StatusCode: ...

    def details(self) -> str | None: ...

    def trailing_metadata(self) -> Any: ...


def translate(failed: FailedCall, *, method_name: str) -> KvstoreError:
    """The error of the one tree that a failed call stands for."""
    reason: str | None = None
    for key, value in failed.trailing_metadata() or ():
        if key == REASON_METADATA_KEY:
            reason = value if isinstance(value, str) else value.decode("ascii", "replace")
    details = failed.details() or "no details"
    return error_from_status(
        status=failed.code().name,
        reason=reason,
        # Where the daemon named its reason, its message is for people already.
        message=details if reason else f"{method_name}: {details}",
    )


def client_metadata() -> tuple[tuple[str, str], ...]:
    """What all calls of one client carry: the name it takes among the daemon's clients."""
    return ((wire.CLIENT_METADATA_KEY, secrets.token_hex(8)),)


def encode_frames(frames: Iterable[WriteFrame]) -> Iterator[bytes]:
    return map(wire.WRITE_BLOCKS.encode_request, frames)
