from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterator
from dataclasses import fields
from enum import IntEnum
from typing import Any

import pytest
from google.protobuf import descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from kvstore import messages, wire
from kvstore.errors import InvalidArgumentError, KvstoreError, ProtocolError
from kvstore.frames import ReadFrame, StoreFrame, WriteFrame
from kvstore.namespace import Namespace
from kvstore.v1 import store_pb2
from kvstore.wire import Method, Streams
from tests.contract.strategies import namespaces

METHODS: dict[str, Method[Any, Any]] = {
    method.path: method for method in vars(wire).values() if isinstance(method, Method)
}
FRAMES = {
    "/kvstore.v1.BlockStoreService/WriteBlocks": WriteFrame,
    "/kvstore.v1.AgentService/StoreBlocks": StoreFrame,
}
# Fields that are uint32 in the protos, in some message at least; all other integers are uint64.
NARROW = {
    "aborted_count",
    "batch_count_max",
    "block_index",
    "bulk_port",
    "frame_data_bytes_max",
    "further_count",
    "in_memory_count",
    "input_tokens",
    "left_out_count",
    "matched_count",
    "missing_count",
    "output_tokens",
    "protocol_version",
    "refused_count",
    "slot_count",
    "slots",
    "started_count",
    "step_count",
    "turn",
}
# Fields that are below zero, too.
SIGNED = {"priority"}
# Arrives as part of `data`.
ENCODE_ONLY = {"envelope"}


def descriptors() -> dict[str, Any]:
    pool = descriptor_pool.Default()
    services = [pool.FindServiceByName(name) for name in (wire.STORE_SERVICE, wire.AGENT_SERVICE)]
    return {f"/{service.full_name}/{method.name}": method for service in services for method in service.methods}


def values_of(annotation: Any, *, name: str, filled: bool) -> st.SearchStrategy[Any]:
    """Values of one field; `filled` ones differ from proto3's default, so that they show on the wire."""
    while isinstance(annotation, typing.NewType):
        annotation = annotation.__supertype__
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        inner = values_of(arguments[0], name=name, filled=True)
        return inner if filled else st.none() | inner
    if typing.get_origin(annotation) is tuple:
        # Numbers in a list always show, but a message there may have fields that do not.
        items = values_of(arguments[0], name=name, filled=filled)
        return st.lists(items, min_size=int(filled), max_size=5).map(tuple)
    low = int(filled)
    if annotation is bool:
        return st.just(True) if filled else st.booleans()
    if annotation is int and name in SIGNED:
        return st.integers(-(2**31), 2**31 - 1).filter(lambda number: number or not filled)
    if annotation is int:
        return st.integers(low, 2**32 - 1 if name in NARROW else 2**64 - 1)
    if annotation is float:  # 1/512 s is a whole number of nanoseconds and an exact float
        return st.integers(low, 600 * 512).map(lambda ticks: ticks / 512)
    if annotation is str:
        return st.text(st.characters(exclude_categories=["Cs"]), min_size=low, max_size=10)
    if annotation is bytes:
        return st.binary(min_size=low, max_size=40)
    if annotation is memoryview:
        return st.binary(min_size=low, max_size=40).map(memoryview)
    if annotation is Namespace:
        return namespaces
    if issubclass(annotation, IntEnum):
        return st.sampled_from([member for member in annotation if member or not filled])
    return messages_of(annotation, filled=filled)


@functools.cache
def messages_of(kind: type, *, filled: bool = False) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    return st.builds(
        kind,
        **{
            field.name: values_of(hints[field.name], name=field.name, filled=filled)
            for field in fields(kind)
            if field.name not in ENCODE_ONLY
        },
    )


def request_kind(path: str) -> type:
    return FRAMES.get(path) or getattr(messages, f"{path.rpartition('/')[2]}Request")


def response_kind(path: str) -> type:
    name = path.rpartition("/")[2]
    if METHODS[path].streams is Streams.RESPONSE:
        return ReadFrame
    named = {
        "GetStoreInfo": messages.StoreInfo,
        "GetStoreStats": messages.StoreStats,
        "GetAgentStatus": messages.AgentStatus,
    }
    return named.get(name) or getattr(messages, f"{name}Response")


def unset_fields(message: Any, path: str = "") -> Iterator[str]:
    present = {field.name: value for field, value in message.ListFields()}
    for field in message.DESCRIPTOR.fields:
        if field.name not in present:
            yield f"{path}{field.name}"
        elif field.message_type is not None and field.message_type.full_name != "google.protobuf.Duration":
            nested = present[field.name]
            for item in nested if field.is_repeated else [nested]:
                yield from unset_fields(item, f"{path}{field.name}.")


every_method = pytest.mark.parametrize("path", sorted(METHODS))


def test_the_table_has_every_method_of_the_protos_and_its_streams() -> None:
    expected = {
        path: Streams.REQUEST
        if method.client_streaming
        else Streams.RESPONSE
        if method.server_streaming
        else Streams.NEITHER
        for path, method in descriptors().items()
    }
    assert {path: method.streams for path, method in METHODS.items()} == expected


@every_method
@given(data=st.data())
def test_a_request_survives_the_wire(path: str, data: st.DataObject) -> None:
    value = data.draw(messages_of(request_kind(path)))
    assert METHODS[path].decode_request(METHODS[path].encode_request(value)) == value


@every_method
@given(data=st.data())
def test_a_response_survives_the_wire(path: str, data: st.DataObject) -> None:
    value = data.draw(messages_of(response_kind(path)))
    assert METHODS[path].decode_response(METHODS[path].encode_response(value)) == value


@every_method
@given(data=st.data())
def test_every_field_of_the_proto_is_written(path: str, data: st.DataObject) -> None:
    method, descriptor = METHODS[path], descriptors()[path]
    for kind, encode, pb in (
        (request_kind(path), method.encode_request, descriptor.input_type),
        (response_kind(path), method.encode_response, descriptor.output_type),
    ):
        encoded = encode(data.draw(messages_of(kind, filled=True)))
        assert list(unset_fields(message_factory.GetMessageClass(pb).FromString(encoded))) == []


@every_method
@given(garbage=st.binary(max_size=60))
def test_garbage_is_an_operating_error_and_nothing_else(path: str, garbage: bytes) -> None:
    method = METHODS[path]
    for decode, allowed in (
        (method.decode_request, (ProtocolError, InvalidArgumentError)),
        (method.decode_response, (ProtocolError,)),
    ):
        try:
            decode(garbage)
        except KvstoreError as error:
            assert isinstance(error, allowed)  # noqa: PT017  (either outcome is right)


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (messages.BlockState, store_pb2.BlockState, "BLOCK_STATE_"),
        (messages.Tier, store_pb2.Tier, "TIER_"),
        (messages.ReserveState, store_pb2.ReserveState, "RESERVE_STATE_"),
        (messages.CommitState, store_pb2.CommitState, "COMMIT_STATE_"),
        (messages.CutReason, store_pb2.CutReason, "CUT_REASON_"),
        (messages.NvmeState, store_pb2.NvmeState, "NVME_STATE_"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_enums_have_the_numbers_of_the_protos(ours: type[IntEnum], theirs: Any, prefix: str) -> None:
    expected = {name.removeprefix(prefix): number for name, number in theirs.items()}
    assert expected.pop("UNSPECIFIED") == 0
    assert {member.name: int(member) for member in ours if member.name != "NONE"} == expected
    assert all(int(member) == 0 for member in ours if member.name == "NONE")


def test_a_reason_that_only_later_versions_know_is_none_and_what_is_left_out_stays_so() -> None:
    response = store_pb2.LookupBlocksResponse(matched_count=1, left_out_count=2, cut_reason=typing.cast("Any", 9))
    decoded = wire.LOOKUP_BLOCKS.decode_response(response.SerializeToString())
    assert (decoded.matched_count, decoded.left_out_count, decoded.cut_reason) == (1, 2, messages.CutReason.NONE)


def test_a_state_of_the_nvme_tier_that_is_not_known_is_not_believed() -> None:
    response = store_pb2.GetStoreStatsResponse(nvme=store_pb2.NvmeStats(state=typing.cast("Any", 9)))
    with pytest.raises(ProtocolError, match="unknown state 9"):
        wire.GET_STORE_STATS.decode_response(response.SerializeToString())


def test_a_lookup_that_does_not_care_for_costs_is_no_longer_than_before_there_were_any() -> None:
    request = messages.LookupBlocksRequest(namespace_id=messages.NamespaceId(b"n" * 32), block_hashes=b"h" * 32)
    assert len(wire.LOOKUP_BLOCKS.encode_request(request)) == 2 * (2 + 32)


def test_a_namespace_that_is_not_canonical_is_the_callers_mistake() -> None:
    request = store_pb2.OpenNamespaceRequest(namespace=store_pb2.Namespace(canonical=b"KVNS"))
    with pytest.raises(InvalidArgumentError, match="canonical"):
        wire.OPEN_NAMESPACE.decode_request(request.SerializeToString())


@given(st.floats(min_value=0.0, max_value=1e6))
def test_a_duration_keeps_its_nanoseconds(wait_s: float) -> None:
    request = messages.LookupBlocksRequest(namespace_id=messages.NamespaceId(b""), block_hashes=b"", wait_s=wait_s)
    decoded = wire.LOOKUP_BLOCKS.decode_request(wire.LOOKUP_BLOCKS.encode_request(request))
    assert decoded.wait_s == pytest.approx(wait_s, abs=1e-9)
