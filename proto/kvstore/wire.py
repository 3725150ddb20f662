"""Plain messages to and from `kvstore.v1` protobuf. No other module sees a generated stub.

`Method` bundles what both ends of an RPC need, so that client, daemon and agent are built from the same
table, over gRPC and over any other transport that carries the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar, cast

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message

from kvstore import frames
from kvstore import messages as m
from kvstore.errors import InvalidArgumentError, ProtocolError
from kvstore.keys import NamespaceId
from kvstore.namespace import Namespace
from kvstore.v1 import agent_pb2, store_pb2

STORE_SERVICE = "kvstore.v1.BlockStoreService"
AGENT_SERVICE = "kvstore.v1.AgentService"

CLIENT_METADATA_KEY = "kvstore-client"
"""Metadata of any call: a name that all calls of one client share, so that clients get equal shares of the daemon."""

Request = TypeVar("Request")
Response = TypeVar("Response")
_Pb = TypeVar("_Pb", bound=Message)


class Streams(Enum):
    """Which side of an RPC is a stream."""

    NEITHER = "unary_unary"
    REQUEST = "stream_unary"
    RESPONSE = "unary_stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method(Generic[Request, Response]):
    service: str
    name: str
    encode_request: Callable[[Request], bytes]
    decode_request: Callable[[bytes], Request]
    encode_response: Callable[[Response], bytes]
    decode_response: Callable[[bytes], Response]
    streams: Streams = Streams.NEITHER

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"


def _parse(kind: type[_Pb], data: bytes) -> _Pb:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ProtocolError(f"not a {kind.DESCRIPTOR.full_name}: {error}") from error


def _duration(seconds: float) -> Duration:
    nanos = round(seconds * 1e9)
    return Duration(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _copy(source: Any, target: Any, names: tuple[str, ...]) -> Any:
    """Copies fields that have the same name and type on both sides onto `target`, a protobuf message."""
    for name in names:
        setattr(target, name, getattr(source, name))
    return target


def _fields(source: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


# --- hints

_HINT = ("session_hash", "turn", "input_tokens", "output_tokens", "is_done", "priority")
_FINISH_REASONS = {int(reason): reason for reason in m.FinishReason}


def _put_hint(value: m.Hint | None, pb: Any) -> Any:
    """Onto a request, if there is one; returns the request."""
    if value is not None:
        _copy(value, pb.hint, _HINT)
        pb.hint.finish_reason = int(value.finish_reason)
        if value.expected_return_s is not None:
            pb.hint.expected_return_duration.CopyFrom(_duration(value.expected_return_s))
        if value.ttl_s is not None:
            pb.hint.ttl_duration.CopyFrom(_duration(value.ttl_s))
        pb.hint.SetInParent()  # a hint that says nothing is one, too
    return pb


def _hint(pb: Any) -> m.Hint | None:
    """Of a request."""
    return _decode_hint(pb.hint) if pb.HasField("hint") else None


def _decode_hint(hint: store_pb2.Hint) -> m.Hint:
    return m.Hint(
        finish_reason=_FINISH_REASONS.get(hint.finish_reason, m.FinishReason.UNKNOWN),
        expected_return_s=_seconds(hint.expected_return_duration)
        if hint.HasField("expected_return_duration")
        else None,
        ttl_s=_seconds(hint.ttl_duration) if hint.HasField("ttl_duration") else None,
        **_fields(hint, _HINT),
    )


# --- GetStoreInfo, GetStoreStats

_INFO = (
    "version",
    "protocol_version",
    "epoch",
    "draining",
    "batch_count_max",
    "frame_data_bytes_max",
    "slab_socket",
    "bulk_port",
    "nixl_metadata",
)
_STATS = (
    "capacity_bytes",
    "ready_bytes",
    "used_bytes",
    "block_count",
    "reservation_count",
    "lease_count",
    "namespace_count",
    "hit_count",
    "miss_count",
    "pending_count",
    "committed_count",
    "evicted_count",
    "read_bytes",
    "written_bytes",
    "corrupt_count",
    "sent_count",
    "unsent_count",
    "refused_count",
    "policy",
)
_NVME_STATS = (
    "reason",
    "capacity_bytes",
    "used_bytes",
    "block_count",
    "segment_count",
    "demoted_count",
    "promoted_count",
    "hit_count",
    "written_bytes",
    "read_bytes",
    "evicted_count",
    "dropped_count",
    "corrupt_count",
    "undemoted_count",
    "policy",
    "admission",
    "prefetch_started_count",
    "prefetch_refused_count",
    "prefetch_useful_count",
    "prefetch_late_count",
    "prefetch_wasted_count",
)
_REUSE_STATS = (
    "hit_count",
    "miss_count",
    "new_count",
    "capacity_count",
    "policy_count",
    "admission_count",
    "identity_count",
    "failure_count",
    "unoffered_count",
)
_NAMESPACE_STATS = ("namespace_id", "model", "slot_bytes", "block_count", "used_bytes")


def _encode_info(value: m.StoreInfo) -> bytes:
    pb = store_pb2.GetStoreInfoResponse(uptime_duration=_duration(value.uptime_s))
    return bytes(_copy(value, pb, _INFO).SerializeToString())


def _decode_info(data: bytes) -> m.StoreInfo:
    pb = _parse(store_pb2.GetStoreInfoResponse, data)
    return m.StoreInfo(uptime_s=_seconds(pb.uptime_duration), **_fields(pb, _INFO))


def _encode_stats(value: m.StoreStats) -> bytes:
    pb = store_pb2.GetStoreStatsResponse(uptime_duration=_duration(value.uptime_s))
    for namespace in value.namespaces:
        _copy(namespace, pb.namespaces.add(), _NAMESPACE_STATS)
    if value.nvme is not None:
        pb.nvme.state = cast("Any", int(value.nvme.state))  # the stubs know only their own enum
        _copy(value.nvme, pb.nvme, _NVME_STATS)
    for name in ("reuse", "recent_reuse"):
        reuse = getattr(value, name)
        if reuse is not None:
            _copy(reuse, getattr(pb, name), _REUSE_STATS).window_duration.CopyFrom(_duration(reuse.window_s))
    return bytes(_copy(value, pb, _STATS).SerializeToString())


def _decode_stats(data: bytes) -> m.StoreStats:
    pb = _parse(store_pb2.GetStoreStatsResponse, data)
    namespaces = tuple(m.NamespaceStats(**_fields(namespace, _NAMESPACE_STATS)) for namespace in pb.namespaces)
    return m.StoreStats(
        uptime_s=_seconds(pb.uptime_duration),
        namespaces=namespaces,
        nvme=_nvme_stats(pb.nvme) if pb.HasField("nvme") else None,
        reuse=_reuse_stats(pb.reuse) if pb.HasField("reuse") else None,
        recent_reuse=_reuse_stats(pb.recent_reuse) if pb.HasField("recent_reuse") else None,
        **_fields(pb, _STATS),
    )


def _reuse_stats(pb: store_pb2.ReuseStats) -> m.ReuseStats:
    return m.ReuseStats(window_s=_seconds(pb.window_duration), **_fields(pb, _REUSE_STATS))


def _nvme_stats(pb: store_pb2.NvmeStats) -> m.NvmeStats:
    try:
        state = m.NvmeState(pb.state)
    except ValueError:
        raise ProtocolError(f"unknown state {pb.state} of the NVMe tier") from None
    return m.NvmeStats(state=state, **_fields(pb, _NVME_STATS))


GET_STORE_INFO: Method[m.GetStoreInfoRequest, m.StoreInfo] = Method(
    service=STORE_SERVICE,
    name="GetStoreInfo",
    encode_request=lambda _: b"",
    decode_request=lambda _: m.GetStoreInfoRequest(),
    encode_response=_encode_info,
    decode_response=_decode_info,
)
GET_STORE_STATS: Method[m.GetStoreStatsRequest, m.StoreStats] = Method(
    service=STORE_SERVICE,
    name="GetStoreStats",
    encode_request=lambda _: b"",
    decode_request=lambda _: m.GetStoreStatsRequest(),
    encode_response=_encode_stats,
    decode_response=_decode_stats,
)

# --- DescribeNamespaces


def _encode_described(value: m.DescribeNamespacesResponse) -> bytes:
    return store_pb2.DescribeNamespacesResponse(
        namespaces=[
            store_pb2.DescribedNamespace(
                namespace=store_pb2.Namespace(canonical=one.namespace.encode()), block_count=one.block_count
            )
            for one in value.namespaces
        ],
        left_out_count=value.left_out_count,
    ).SerializeToString()


def _decode_described(data: bytes) -> m.DescribeNamespacesResponse:
    pb = _parse(store_pb2.DescribeNamespacesResponse, data)
    return m.DescribeNamespacesResponse(
        namespaces=tuple(
            m.DescribedNamespace(namespace=Namespace.decode(one.namespace.canonical), block_count=one.block_count)
            for one in pb.namespaces
        ),
        left_out_count=pb.left_out_count,
    )


DESCRIBE_NAMESPACES: Method[m.DescribeNamespacesRequest, m.DescribeNamespacesResponse] = Method(
    service=STORE_SERVICE,
    name="DescribeNamespaces",
    encode_request=lambda _: b"",
    decode_request=lambda _: m.DescribeNamespacesRequest(),
    encode_response=_encode_described,
    decode_response=_decode_described,
)

# --- OpenNamespace


def _encode_open(value: m.OpenNamespaceRequest) -> bytes:
    return store_pb2.OpenNamespaceRequest(
        namespace=store_pb2.Namespace(canonical=value.namespace.encode()), payload_bytes=value.payload_bytes
    ).SerializeToString()


def _decode_open(data: bytes) -> m.OpenNamespaceRequest:
    pb = _parse(store_pb2.OpenNamespaceRequest, data)
    return m.OpenNamespaceRequest(namespace=Namespace.decode(pb.namespace.canonical), payload_bytes=pb.payload_bytes)


def _encode_opened(value: m.OpenNamespaceResponse) -> bytes:
    return store_pb2.OpenNamespaceResponse(
        namespace_id=value.namespace_id, epoch=value.epoch, slot_bytes=value.slot_bytes
    ).SerializeToString()


def _decode_opened(data: bytes) -> m.OpenNamespaceResponse:
    pb = _parse(store_pb2.OpenNamespaceResponse, data)
    return m.OpenNamespaceResponse(
        namespace_id=NamespaceId(pb.namespace_id), epoch=m.Epoch(pb.epoch), slot_bytes=pb.slot_bytes
    )


OPEN_NAMESPACE: Method[m.OpenNamespaceRequest, m.OpenNamespaceResponse] = Method(
    service=STORE_SERVICE,
    name="OpenNamespace",
    encode_request=_encode_open,
    decode_request=_decode_open,
    encode_response=_encode_opened,
    decode_response=_decode_opened,
)

# --- LookupBlocks, AcquirePrefix


_CUT_REASONS = {int(reason): reason for reason in m.CutReason}
_NOT_CUT = m.CutReason.NONE
"""Also for reasons that only later versions know: what is left out is left out all the same."""


def _encode_lookup(value: m.LookupBlocksRequest) -> bytes:
    pb = store_pb2.LookupBlocksRequest(namespace_id=value.namespace_id, block_hashes=value.block_hashes)
    if value.wait_s:
        pb.wait_duration.CopyFrom(_duration(value.wait_s))
    if value.recompute_s_per_block:
        pb.recompute_us_per_block = value.recompute_s_per_block * 1e6
    return bytes(_put_hint(value.hint, pb).SerializeToString())


def _decode_lookup(data: bytes) -> m.LookupBlocksRequest:
    pb = _parse(store_pb2.LookupBlocksRequest, data)
    return m.LookupBlocksRequest(
        namespace_id=NamespaceId(pb.namespace_id),
        block_hashes=pb.block_hashes,
        wait_s=_seconds(pb.wait_duration) if pb.HasField("wait_duration") else 0.0,
        recompute_s_per_block=pb.recompute_us_per_block / 1e6,
        hint=_hint(pb),
    )


def _encode_looked_up(value: m.LookupBlocksResponse) -> bytes:
    pb = store_pb2.LookupBlocksResponse(
        matched_count=value.matched_count, block_states=value.block_states, tiers=value.tiers, epoch=value.epoch
    )
    if value.left_out_count or value.cut_reason:
        _put_cut(value, pb)
    return pb.SerializeToString()


def _put_cut(
    value: m.LookupBlocksResponse | m.AcquirePrefixResponse,
    pb: store_pb2.LookupBlocksResponse | store_pb2.AcquirePrefixResponse,
) -> None:
    pb.left_out_count = value.left_out_count
    pb.cut_reason = cast("Any", int(value.cut_reason))  # the stubs know only their own enum


def _decode_looked_up(data: bytes) -> m.LookupBlocksResponse:
    pb = _parse(store_pb2.LookupBlocksResponse, data)
    return m.LookupBlocksResponse(
        matched_count=pb.matched_count,
        block_states=pb.block_states,
        tiers=pb.tiers,
        epoch=m.Epoch(pb.epoch),
        left_out_count=pb.left_out_count,
        cut_reason=_CUT_REASONS.get(pb.cut_reason, _NOT_CUT),
    )


def _encode_acquire(value: m.AcquirePrefixRequest) -> bytes:
    pb = store_pb2.AcquirePrefixRequest(
        namespace_id=value.namespace_id,
        owner_id=value.owner_id,
        block_hashes=value.block_hashes,
        lease_duration=_duration(value.lease_s),
        wait_duration=_duration(value.wait_s),
    )
    if value.recompute_s_per_block:
        pb.recompute_us_per_block = value.recompute_s_per_block * 1e6
    return bytes(_put_hint(value.hint, pb).SerializeToString())


def _decode_acquire(data: bytes) -> m.AcquirePrefixRequest:
    pb = _parse(store_pb2.AcquirePrefixRequest, data)
    return m.AcquirePrefixRequest(
        namespace_id=NamespaceId(pb.namespace_id),
        owner_id=m.OwnerId(pb.owner_id),
        block_hashes=pb.block_hashes,
        lease_s=_seconds(pb.lease_duration),
        wait_s=_seconds(pb.wait_duration),
        recompute_s_per_block=pb.recompute_us_per_block / 1e6,
        hint=_hint(pb),
    )


def _encode_acquired(value: m.AcquirePrefixResponse) -> bytes:
    pb = store_pb2.AcquirePrefixResponse(
        matched_count=value.matched_count,
        block_states=value.block_states,
        tiers=value.tiers,
        epoch=value.epoch,
        lease_id=value.lease_id or 0,
    )
    if value.left_out_count or value.cut_reason:
        _put_cut(value, pb)
    return pb.SerializeToString()


def _decode_acquired(data: bytes) -> m.AcquirePrefixResponse:
    pb = _parse(store_pb2.AcquirePrefixResponse, data)
    return m.AcquirePrefixResponse(
        matched_count=pb.matched_count,
        block_states=pb.block_states,
        tiers=pb.tiers,
        epoch=m.Epoch(pb.epoch),
        lease_id=m.LeaseId(pb.lease_id) if pb.lease_id else None,
        left_out_count=pb.left_out_count,
        cut_reason=_CUT_REASONS.get(pb.cut_reason, _NOT_CUT),
    )


LOOKUP_BLOCKS: Method[m.LookupBlocksRequest, m.LookupBlocksResponse] = Method(
    service=STORE_SERVICE,
    name="LookupBlocks",
    encode_request=_encode_lookup,
    decode_request=_decode_lookup,
    encode_response=_encode_looked_up,
    decode_response=_decode_looked_up,
)
ACQUIRE_PREFIX: Method[m.AcquirePrefixRequest, m.AcquirePrefixResponse] = Method(
    service=STORE_SERVICE,
    name="AcquirePrefix",
    encode_request=_encode_acquire,
    decode_request=_decode_acquire,
    encode_response=_encode_acquired,
    decode_response=_decode_acquired,
)

# --- RenewLeases, ReleaseLeases


def _encode_renew(value: m.RenewLeasesRequest) -> bytes:
    return store_pb2.RenewLeasesRequest(
        owner_id=value.owner_id, lease_ids=value.lease_ids, lease_duration=_duration(value.lease_s)
    ).SerializeToString()


def _decode_renew(data: bytes) -> m.RenewLeasesRequest:
    pb = _parse(store_pb2.RenewLeasesRequest, data)
    return m.RenewLeasesRequest(
        owner_id=m.OwnerId(pb.owner_id),
        lease_ids=tuple(m.LeaseId(lease) for lease in pb.lease_ids),
        lease_s=_seconds(pb.lease_duration),
    )


def _encode_release(value: m.ReleaseLeasesRequest) -> bytes:
    return store_pb2.ReleaseLeasesRequest(owner_id=value.owner_id, lease_ids=value.lease_ids).SerializeToString()


def _decode_release(data: bytes) -> m.ReleaseLeasesRequest:
    pb = _parse(store_pb2.ReleaseLeasesRequest, data)
    return m.ReleaseLeasesRequest(
        owner_id=m.OwnerId(pb.owner_id), lease_ids=tuple(m.LeaseId(lease) for lease in pb.lease_ids)
    )


RENEW_LEASES: Method[m.RenewLeasesRequest, m.RenewLeasesResponse] = Method(
    service=STORE_SERVICE,
    name="RenewLeases",
    encode_request=_encode_renew,
    decode_request=_decode_renew,
    encode_response=lambda value: store_pb2.RenewLeasesResponse(renewed=value.renewed).SerializeToString(),
    decode_response=lambda data: m.RenewLeasesResponse(
        renewed=tuple(_parse(store_pb2.RenewLeasesResponse, data).renewed)
    ),
)
RELEASE_LEASES: Method[m.ReleaseLeasesRequest, m.ReleaseLeasesResponse] = Method(
    service=STORE_SERVICE,
    name="ReleaseLeases",
    encode_request=_encode_release,
    decode_request=_decode_release,
    encode_response=lambda value: store_pb2.ReleaseLeasesResponse(released=value.released).SerializeToString(),
    decode_response=lambda data: m.ReleaseLeasesResponse(
        released=tuple(_parse(store_pb2.ReleaseLeasesResponse, data).released)
    ),
)

# --- LeaseBlocks, ReadBlocks, CountReads, PrefetchBlocks, HintBlocks, TakeAccesses, VerifyBlocks


def _decode_read(data: bytes) -> m.ReadBlocksRequest:
    pb = _parse(store_pb2.ReadBlocksRequest, data)
    return m.ReadBlocksRequest(namespace_id=NamespaceId(pb.namespace_id), block_hashes=pb.block_hashes, hint=_hint(pb))


def _path(number: int) -> m.TransferPath:
    try:
        return m.TransferPath(number)
    except ValueError:
        raise InvalidArgumentError.of("path", number, ", ".join(path.name for path in m.TransferPath)) from None


def _encode_lease_blocks(value: m.LeaseBlocksRequest) -> bytes:
    pb = store_pb2.LeaseBlocksRequest(
        namespace_id=value.namespace_id,
        owner_id=value.owner_id,
        block_hashes=value.block_hashes,
        lease_duration=_duration(value.lease_s),
        path=cast("Any", int(value.path)),  # the stubs know only their own enum
    )
    return bytes(_put_hint(value.hint, pb).SerializeToString())


def _decode_lease_blocks(data: bytes) -> m.LeaseBlocksRequest:
    pb = _parse(store_pb2.LeaseBlocksRequest, data)
    return m.LeaseBlocksRequest(
        namespace_id=NamespaceId(pb.namespace_id),
        owner_id=m.OwnerId(pb.owner_id),
        block_hashes=pb.block_hashes,
        lease_s=_seconds(pb.lease_duration),
        path=_path(pb.path),
        hint=_hint(pb),
    )


def _encode_leased_blocks(value: m.LeaseBlocksResponse) -> bytes:
    return store_pb2.LeaseBlocksResponse(
        block_states=value.block_states,
        epoch=value.epoch,
        lease_id=value.lease_id or 0,
        slots=value.slots,
        ticket=value.ticket,
    ).SerializeToString()


def _decode_leased_blocks(data: bytes) -> m.LeaseBlocksResponse:
    pb = _parse(store_pb2.LeaseBlocksResponse, data)
    return m.LeaseBlocksResponse(
        block_states=pb.block_states,
        epoch=m.Epoch(pb.epoch),
        lease_id=m.LeaseId(pb.lease_id) if pb.lease_id else None,
        slots=pb.slots,
        ticket=pb.ticket,
    )


LEASE_BLOCKS: Method[m.LeaseBlocksRequest, m.LeaseBlocksResponse] = Method(
    service=STORE_SERVICE,
    name="LeaseBlocks",
    encode_request=_encode_lease_blocks,
    decode_request=_decode_lease_blocks,
    encode_response=_encode_leased_blocks,
    decode_response=_decode_leased_blocks,
)


def _decode_verify(data: bytes) -> m.VerifyBlocksRequest:
    pb = _parse(store_pb2.VerifyBlocksRequest, data)
    return m.VerifyBlocksRequest(namespace_id=NamespaceId(pb.namespace_id), block_hashes=pb.block_hashes)


READ_BLOCKS: Method[m.ReadBlocksRequest, frames.ReadFrame] = Method(
    service=STORE_SERVICE,
    name="ReadBlocks",
    encode_request=lambda value: _put_hint(
        value.hint, store_pb2.ReadBlocksRequest(namespace_id=value.namespace_id, block_hashes=value.block_hashes)
    ).SerializeToString(),
    decode_request=_decode_read,
    encode_response=frames.encode_read_frame,
    decode_response=frames.decode_read_frame,
    streams=Streams.RESPONSE,
)


def _decode_count_reads(data: bytes) -> m.CountReadsRequest:
    pb = _parse(store_pb2.CountReadsRequest, data)
    return m.CountReadsRequest(
        namespace_id=NamespaceId(pb.namespace_id),
        block_hashes=pb.block_hashes,
        hit_count=pb.hit_count,
        hint=_hint(pb),
    )


COUNT_READS: Method[m.CountReadsRequest, m.CountReadsResponse] = Method(
    service=STORE_SERVICE,
    name="CountReads",
    encode_request=lambda value: _put_hint(
        value.hint,
        store_pb2.CountReadsRequest(
            namespace_id=value.namespace_id, block_hashes=value.block_hashes, hit_count=value.hit_count
        ),
    ).SerializeToString(),
    decode_request=_decode_count_reads,
    encode_response=lambda _: b"",
    decode_response=lambda _: m.CountReadsResponse(),
)
_PREFETCHED = ("in_memory_count", "started_count", "refused_count", "missing_count")


def _decode_prefetch(data: bytes) -> m.PrefetchBlocksRequest:
    pb = _parse(store_pb2.PrefetchBlocksRequest, data)
    return m.PrefetchBlocksRequest(
        namespace_id=NamespaceId(pb.namespace_id),
        block_hashes=pb.block_hashes,
        budget_bytes=pb.budget_bytes,
        hint=_hint(pb),
    )


def _encode_prefetched(value: m.PrefetchBlocksResponse) -> bytes:
    pb = store_pb2.PrefetchBlocksResponse(epoch=value.epoch)
    return bytes(_copy(value, pb, _PREFETCHED).SerializeToString())


def _decode_prefetched(data: bytes) -> m.PrefetchBlocksResponse:
    pb = _parse(store_pb2.PrefetchBlocksResponse, data)
    return m.PrefetchBlocksResponse(epoch=m.Epoch(pb.epoch), **_fields(pb, _PREFETCHED))


PREFETCH_BLOCKS: Method[m.PrefetchBlocksRequest, m.PrefetchBlocksResponse] = Method(
    service=STORE_SERVICE,
    name="PrefetchBlocks",
    encode_request=lambda value: _put_hint(
        value.hint,
        store_pb2.PrefetchBlocksRequest(
            namespace_id=value.namespace_id, block_hashes=value.block_hashes, budget_bytes=value.budget_bytes
        ),
    ).SerializeToString(),
    decode_request=_decode_prefetch,
    encode_response=_encode_prefetched,
    decode_response=_decode_prefetched,
)


def _decode_hint_blocks(data: bytes) -> m.HintBlocksRequest:
    pb = _parse(store_pb2.HintBlocksRequest, data)
    return m.HintBlocksRequest(
        namespace_id=NamespaceId(pb.namespace_id), block_hashes=pb.block_hashes, hint=_decode_hint(pb.hint)
    )


HINT_BLOCKS: Method[m.HintBlocksRequest, m.HintBlocksResponse] = Method(
    service=STORE_SERVICE,
    name="HintBlocks",
    encode_request=lambda value: _put_hint(
        value.hint, store_pb2.HintBlocksRequest(namespace_id=value.namespace_id, block_hashes=value.block_hashes)
    ).SerializeToString(),
    decode_request=_decode_hint_blocks,
    encode_response=lambda _: b"",
    decode_response=lambda _: m.HintBlocksResponse(),
)


def _encode_accesses(value: m.TakeAccessesResponse) -> bytes:
    pb = store_pb2.TakeAccessesResponse(
        last_number=value.last_number, dropped_count=value.dropped_count, epoch=value.epoch
    )
    for access in value.accesses:
        one = pb.accesses.add(
            kind=cast("Any", int(access.kind)),  # the stubs know only their own enum
            uptime_duration=_duration(access.uptime_s),
            block_numbers=access.block_numbers,
            matched_count=access.matched_count,
        )
        _put_hint(access.hint, one)
    return pb.SerializeToString()


def _decode_accesses(data: bytes) -> m.TakeAccessesResponse:
    pb = _parse(store_pb2.TakeAccessesResponse, data)
    return m.TakeAccessesResponse(
        accesses=tuple(
            m.Access(
                kind=_ACCESS_KINDS.get(one.kind, m.AccessKind.UNKNOWN),
                uptime_s=_seconds(one.uptime_duration),
                block_numbers=one.block_numbers,
                matched_count=one.matched_count,
                hint=_hint(one),
            )
            for one in pb.accesses
        ),
        last_number=pb.last_number,
        dropped_count=pb.dropped_count,
        epoch=m.Epoch(pb.epoch),
    )


def _decode_take_accesses(data: bytes) -> m.TakeAccessesRequest:
    pb = _parse(store_pb2.TakeAccessesRequest, data)
    return m.TakeAccessesRequest(namespace_id=NamespaceId(pb.namespace_id), after_number=pb.after_number)


_ACCESS_KINDS = {int(kind): kind for kind in m.AccessKind}
TAKE_ACCESSES: Method[m.TakeAccessesRequest, m.TakeAccessesResponse] = Method(
    service=STORE_SERVICE,
    name="TakeAccesses",
    encode_request=lambda value: store_pb2.TakeAccessesRequest(
        namespace_id=value.namespace_id, after_number=value.after_number
    ).SerializeToString(),
    decode_request=_decode_take_accesses,
    encode_response=_encode_accesses,
    decode_response=_decode_accesses,
)
VERIFY_BLOCKS: Method[m.VerifyBlocksRequest, m.VerifyBlocksResponse] = Method(
    service=STORE_SERVICE,
    name="VerifyBlocks",
    encode_request=lambda value: store_pb2.VerifyBlocksRequest(
        namespace_id=value.namespace_id, block_hashes=value.block_hashes
    ).SerializeToString(),
    decode_request=_decode_verify,
    encode_response=lambda value: store_pb2.VerifyBlocksResponse(block_states=value.block_states).SerializeToString(),
    decode_response=lambda data: m.VerifyBlocksResponse(
        block_states=_parse(store_pb2.VerifyBlocksResponse, data).block_states
    ),
)

# --- ReserveBlocks, WriteBlocks, CommitBlocks, AbortReservations


def _encode_reserve(value: m.ReserveBlocksRequest) -> bytes:
    pb = store_pb2.ReserveBlocksRequest(
        namespace_id=value.namespace_id,
        owner_id=value.owner_id,
        parent_hash=value.parent_hash,
        block_hashes=value.block_hashes,
        reservation_duration=_duration(value.reservation_s),
        path=cast("Any", int(value.path)),  # the stubs know only their own enum
    )
    return bytes(_put_hint(value.hint, pb).SerializeToString())


def _decode_reserve(data: bytes) -> m.ReserveBlocksRequest:
    pb = _parse(store_pb2.ReserveBlocksRequest, data)
    return m.ReserveBlocksRequest(
        namespace_id=NamespaceId(pb.namespace_id),
        owner_id=m.OwnerId(pb.owner_id),
        parent_hash=pb.parent_hash,
        block_hashes=pb.block_hashes,
        reservation_s=_seconds(pb.reservation_duration),
        path=_path(pb.path) if pb.path else m.TransferPath.STREAM,
        hint=_hint(pb),
    )


def _encode_reserved(value: m.ReserveBlocksResponse) -> bytes:
    return store_pb2.ReserveBlocksResponse(
        reserve_states=value.reserve_states,
        reservation_ids=[reservation or 0 for reservation in value.reservation_ids],
        epoch=value.epoch,
        slots=value.slots,
        ticket=value.ticket,
    ).SerializeToString()


def _decode_reserved(data: bytes) -> m.ReserveBlocksResponse:
    pb = _parse(store_pb2.ReserveBlocksResponse, data)
    return m.ReserveBlocksResponse(
        reserve_states=pb.reserve_states,
        reservation_ids=tuple(m.ReservationId(number) if number else None for number in pb.reservation_ids),
        epoch=m.Epoch(pb.epoch),
        slots=pb.slots,
        ticket=pb.ticket,
    )


def _decode_commit(data: bytes) -> m.CommitBlocksRequest:
    pb = _parse(store_pb2.CommitBlocksRequest, data)
    return m.CommitBlocksRequest(
        owner_id=m.OwnerId(pb.owner_id),
        reservation_ids=tuple(m.ReservationId(number) for number in pb.reservation_ids),
        in_slots=pb.in_slots,
    )


def _decode_abort(data: bytes) -> m.AbortReservationsRequest:
    pb = _parse(store_pb2.AbortReservationsRequest, data)
    return m.AbortReservationsRequest(
        owner_id=m.OwnerId(pb.owner_id), reservation_ids=tuple(m.ReservationId(number) for number in pb.reservation_ids)
    )


RESERVE_BLOCKS: Method[m.ReserveBlocksRequest, m.ReserveBlocksResponse] = Method(
    service=STORE_SERVICE,
    name="ReserveBlocks",
    encode_request=_encode_reserve,
    decode_request=_decode_reserve,
    encode_response=_encode_reserved,
    decode_response=_decode_reserved,
)
WRITE_BLOCKS: Method[frames.WriteFrame, m.WriteBlocksResponse] = Method(
    service=STORE_SERVICE,
    name="WriteBlocks",
    encode_request=frames.encode_write_frame,
    decode_request=frames.decode_write_frame,
    encode_response=lambda value: store_pb2.WriteBlocksResponse(landed_bytes=value.landed_bytes).SerializeToString(),
    decode_response=lambda data: m.WriteBlocksResponse(
        landed_bytes=_parse(store_pb2.WriteBlocksResponse, data).landed_bytes
    ),
    streams=Streams.REQUEST,
)
COMMIT_BLOCKS: Method[m.CommitBlocksRequest, m.CommitBlocksResponse] = Method(
    service=STORE_SERVICE,
    name="CommitBlocks",
    encode_request=lambda value: store_pb2.CommitBlocksRequest(
        owner_id=value.owner_id, reservation_ids=value.reservation_ids, in_slots=value.in_slots
    ).SerializeToString(),
    decode_request=_decode_commit,
    encode_response=lambda value: store_pb2.CommitBlocksResponse(commit_states=value.commit_states).SerializeToString(),
    decode_response=lambda data: m.CommitBlocksResponse(
        commit_states=_parse(store_pb2.CommitBlocksResponse, data).commit_states
    ),
)
ABORT_RESERVATIONS: Method[m.AbortReservationsRequest, m.AbortReservationsResponse] = Method(
    service=STORE_SERVICE,
    name="AbortReservations",
    encode_request=lambda value: store_pb2.AbortReservationsRequest(
        owner_id=value.owner_id, reservation_ids=value.reservation_ids
    ).SerializeToString(),
    decode_request=_decode_abort,
    encode_response=lambda value: store_pb2.AbortReservationsResponse(
        aborted_count=value.aborted_count
    ).SerializeToString(),
    decode_response=lambda data: m.AbortReservationsResponse(
        aborted_count=_parse(store_pb2.AbortReservationsResponse, data).aborted_count
    ),
)

UNARY_STORE_METHODS: tuple[Method[Any, Any], ...] = (
    GET_STORE_INFO,
    GET_STORE_STATS,
    OPEN_NAMESPACE,
    LOOKUP_BLOCKS,
    ACQUIRE_PREFIX,
    RENEW_LEASES,
    RELEASE_LEASES,
    VERIFY_BLOCKS,
    RESERVE_BLOCKS,
    COMMIT_BLOCKS,
    ABORT_RESERVATIONS,
    LEASE_BLOCKS,
    COUNT_READS,
    PREFETCH_BLOCKS,
    DESCRIBE_NAMESPACES,
    HINT_BLOCKS,
    TAKE_ACCESSES,
)
"""All unary RPCs of the store. On the slab socket a method is known by its place here, so new ones go to the end."""

# --- AgentService

_AGENT_STATUS = (
    "version",
    "device",
    "capacity_bytes",
    "used_bytes",
    "peak_bytes",
    "resident_count",
    "migrated_count",
    "migration_batch_count",
    "reloaded_count",
    "lost_count",
    "step",
)


_AGENT_NAMESPACE = (
    "namespace_id",
    "model",
    "capacity_bytes",
    "used_bytes",
    "resident_count",
    "session_count",
    "granted_count",
)
_AGENT_OPENED = (
    "namespace_id",
    "slot_count",
    "block_bytes",
    "batch_count_max",
    "attach_socket",
    "cuda_ipc_handle",
    "device_uuid",
)


def _encode_agent_status(value: m.AgentStatus) -> bytes:
    pb = agent_pb2.GetAgentStatusResponse(uptime_duration=_duration(value.uptime_s))
    for namespace in value.namespaces:
        _copy(namespace, pb.namespaces.add(), _AGENT_NAMESPACE)
    return bytes(_copy(value, pb, _AGENT_STATUS).SerializeToString())


def _decode_agent_status(data: bytes) -> m.AgentStatus:
    pb = _parse(agent_pb2.GetAgentStatusResponse, data)
    return m.AgentStatus(
        uptime_s=_seconds(pb.uptime_duration),
        namespaces=tuple(m.AgentNamespaceStatus(**_fields(one, _AGENT_NAMESPACE)) for one in pb.namespaces),
        **_fields(pb, _AGENT_STATUS),
    )


def _encode_agent_open(value: m.OpenAgentNamespaceRequest) -> bytes:
    return agent_pb2.OpenAgentNamespaceRequest(
        namespace=store_pb2.Namespace(canonical=value.namespace.encode()),
        quota_bytes=value.quota_bytes,
        further_count=value.further_count,
    ).SerializeToString()


def _decode_agent_open(data: bytes) -> m.OpenAgentNamespaceRequest:
    pb = _parse(agent_pb2.OpenAgentNamespaceRequest, data)
    return m.OpenAgentNamespaceRequest(
        namespace=Namespace.decode(pb.namespace.canonical),
        quota_bytes=pb.quota_bytes,
        further_count=pb.further_count,
    )


def _encode_agent_opened(value: m.OpenAgentNamespaceResponse) -> bytes:
    pb = agent_pb2.OpenAgentNamespaceResponse(lease_duration=_duration(value.lease_s))
    return bytes(_copy(value, pb, _AGENT_OPENED).SerializeToString())


def _decode_agent_opened(data: bytes) -> m.OpenAgentNamespaceResponse:
    pb = _parse(agent_pb2.OpenAgentNamespaceResponse, data)
    return m.OpenAgentNamespaceResponse(lease_s=_seconds(pb.lease_duration), **_fields(pb, _AGENT_OPENED))


_TOUCH = ("block_hashes", "step_count", "namespace_id")
_RESERVE_SLOTS = ("session_id", "block_hashes", "parent_hash")
_COMMIT_SLOTS = ("session_id", "reservation_number", "written")


def _encode_load(value: m.LoadBlocksRequest) -> bytes:
    pb = agent_pb2.LoadBlocksRequest()
    return bytes(_copy(value, pb, ("block_hashes", "namespace_id")).SerializeToString())


def _decode_load(data: bytes) -> m.LoadBlocksRequest:
    pb = _parse(agent_pb2.LoadBlocksRequest, data)
    return m.LoadBlocksRequest(**_fields(pb, ("block_hashes", "namespace_id")))


def _encode_touch(value: m.TouchBlocksRequest) -> bytes:
    return bytes(_copy(value, agent_pb2.TouchBlocksRequest(), _TOUCH).SerializeToString())


def _decode_touch(data: bytes) -> m.TouchBlocksRequest:
    return m.TouchBlocksRequest(**_fields(_parse(agent_pb2.TouchBlocksRequest, data), _TOUCH))


def _encode_find(value: m.FindBlocksRequest) -> bytes:
    pb = agent_pb2.FindBlocksRequest()
    return bytes(_copy(value, pb, ("namespace_id", "block_hashes")).SerializeToString())


def _decode_find(data: bytes) -> m.FindBlocksRequest:
    pb = _parse(agent_pb2.FindBlocksRequest, data)
    return m.FindBlocksRequest(namespace_id=NamespaceId(pb.namespace_id), block_hashes=pb.block_hashes)


def _encode_reserve_slots(value: m.ReserveSlotsRequest) -> bytes:
    return bytes(_copy(value, agent_pb2.ReserveSlotsRequest(), _RESERVE_SLOTS).SerializeToString())


def _decode_reserve_slots(data: bytes) -> m.ReserveSlotsRequest:
    return m.ReserveSlotsRequest(**_fields(_parse(agent_pb2.ReserveSlotsRequest, data), _RESERVE_SLOTS))


def _encode_reserved_slots(value: m.ReserveSlotsResponse) -> bytes:
    return agent_pb2.ReserveSlotsResponse(
        slot_grants=value.slot_grants, slots=value.slots, reservation_number=value.reservation_number
    ).SerializeToString()


def _decode_reserved_slots(data: bytes) -> m.ReserveSlotsResponse:
    pb = _parse(agent_pb2.ReserveSlotsResponse, data)
    return m.ReserveSlotsResponse(
        slot_grants=pb.slot_grants, slots=tuple(pb.slots), reservation_number=pb.reservation_number
    )


def _encode_commit_slots(value: m.CommitSlotsRequest) -> bytes:
    return bytes(_copy(value, agent_pb2.CommitSlotsRequest(), _COMMIT_SLOTS).SerializeToString())


def _decode_commit_slots(data: bytes) -> m.CommitSlotsRequest:
    return m.CommitSlotsRequest(**_fields(_parse(agent_pb2.CommitSlotsRequest, data), _COMMIT_SLOTS))


def _encode_acquire_slots(value: m.AcquireSlotsRequest) -> bytes:
    pb = agent_pb2.AcquireSlotsRequest(
        wait_duration=_duration(value.wait_s), released_lease_numbers=value.released_lease_numbers
    )
    return bytes(_copy(value, pb, _RESERVE_SLOTS).SerializeToString())


def _decode_acquire_slots(data: bytes) -> m.AcquireSlotsRequest:
    pb = _parse(agent_pb2.AcquireSlotsRequest, data)
    return m.AcquireSlotsRequest(
        wait_s=_seconds(pb.wait_duration),
        released_lease_numbers=tuple(pb.released_lease_numbers),
        **_fields(pb, _RESERVE_SLOTS),
    )


def _encode_acquired_slots(value: m.AcquireSlotsResponse) -> bytes:
    return agent_pb2.AcquireSlotsResponse(
        block_states=value.block_states, slots=value.slots, lease_number=value.lease_number
    ).SerializeToString()


def _decode_acquired_slots(data: bytes) -> m.AcquireSlotsResponse:
    pb = _parse(agent_pb2.AcquireSlotsResponse, data)
    return m.AcquireSlotsResponse(block_states=pb.block_states, slots=tuple(pb.slots), lease_number=pb.lease_number)


def _encode_release_slots(value: m.ReleaseSlotsRequest) -> bytes:
    return agent_pb2.ReleaseSlotsRequest(
        session_id=value.session_id, lease_numbers=value.lease_numbers
    ).SerializeToString()


def _decode_release_slots(data: bytes) -> m.ReleaseSlotsRequest:
    pb = _parse(agent_pb2.ReleaseSlotsRequest, data)
    return m.ReleaseSlotsRequest(session_id=m.OwnerId(pb.session_id), lease_numbers=tuple(pb.lease_numbers))


GET_AGENT_STATUS: Method[m.GetAgentStatusRequest, m.AgentStatus] = Method(
    service=AGENT_SERVICE,
    name="GetAgentStatus",
    encode_request=lambda _: b"",
    decode_request=lambda _: m.GetAgentStatusRequest(),
    encode_response=_encode_agent_status,
    decode_response=_decode_agent_status,
)
OPEN_AGENT_NAMESPACE: Method[m.OpenAgentNamespaceRequest, m.OpenAgentNamespaceResponse] = Method(
    service=AGENT_SERVICE,
    name="OpenAgentNamespace",
    encode_request=_encode_agent_open,
    decode_request=_decode_agent_open,
    encode_response=_encode_agent_opened,
    decode_response=_decode_agent_opened,
)
STORE_BLOCKS: Method[frames.StoreFrame, m.StoreBlocksResponse] = Method(
    service=AGENT_SERVICE,
    name="StoreBlocks",
    encode_request=frames.encode_store_frame,
    decode_request=frames.decode_store_frame,
    encode_response=lambda value: agent_pb2.StoreBlocksResponse(stored=value.stored).SerializeToString(),
    decode_response=lambda data: m.StoreBlocksResponse(stored=_parse(agent_pb2.StoreBlocksResponse, data).stored),
    streams=Streams.REQUEST,
)
LOAD_BLOCKS: Method[m.LoadBlocksRequest, frames.ReadFrame] = Method(
    service=AGENT_SERVICE,
    name="LoadBlocks",
    encode_request=_encode_load,
    decode_request=_decode_load,
    encode_response=frames.encode_read_frame,
    decode_response=frames.decode_read_frame,
    streams=Streams.RESPONSE,
)
TOUCH_BLOCKS: Method[m.TouchBlocksRequest, m.TouchBlocksResponse] = Method(
    service=AGENT_SERVICE,
    name="TouchBlocks",
    encode_request=_encode_touch,
    decode_request=_decode_touch,
    encode_response=lambda value: agent_pb2.TouchBlocksResponse(step=value.step).SerializeToString(),
    decode_response=lambda data: m.TouchBlocksResponse(step=_parse(agent_pb2.TouchBlocksResponse, data).step),
)
FIND_BLOCKS: Method[m.FindBlocksRequest, m.FindBlocksResponse] = Method(
    service=AGENT_SERVICE,
    name="FindBlocks",
    encode_request=_encode_find,
    decode_request=_decode_find,
    encode_response=lambda value: agent_pb2.FindBlocksResponse(block_states=value.block_states).SerializeToString(),
    decode_response=lambda data: m.FindBlocksResponse(
        block_states=_parse(agent_pb2.FindBlocksResponse, data).block_states
    ),
)
RESERVE_SLOTS: Method[m.ReserveSlotsRequest, m.ReserveSlotsResponse] = Method(
    service=AGENT_SERVICE,
    name="ReserveSlots",
    encode_request=_encode_reserve_slots,
    decode_request=_decode_reserve_slots,
    encode_response=_encode_reserved_slots,
    decode_response=_decode_reserved_slots,
)
COMMIT_SLOTS: Method[m.CommitSlotsRequest, m.CommitSlotsResponse] = Method(
    service=AGENT_SERVICE,
    name="CommitSlots",
    encode_request=_encode_commit_slots,
    decode_request=_decode_commit_slots,
    encode_response=lambda value: agent_pb2.CommitSlotsResponse(stored=value.stored).SerializeToString(),
    decode_response=lambda data: m.CommitSlotsResponse(stored=_parse(agent_pb2.CommitSlotsResponse, data).stored),
)
ACQUIRE_SLOTS: Method[m.AcquireSlotsRequest, m.AcquireSlotsResponse] = Method(
    service=AGENT_SERVICE,
    name="AcquireSlots",
    encode_request=_encode_acquire_slots,
    decode_request=_decode_acquire_slots,
    encode_response=_encode_acquired_slots,
    decode_response=_decode_acquired_slots,
)
RELEASE_SLOTS: Method[m.ReleaseSlotsRequest, m.ReleaseSlotsResponse] = Method(
    service=AGENT_SERVICE,
    name="ReleaseSlots",
    encode_request=_encode_release_slots,
    decode_request=_decode_release_slots,
    encode_response=lambda _: b"",
    decode_response=lambda _: m.ReleaseSlotsResponse(),
)
