"""Asks a running sidecar, without torch."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import grpc

from kvstore import wire
from kvstore.errors import ProtocolError
from kvstore.messages import AgentStatus, GetAgentStatusRequest
from kvstore.wire import Method
from kvstore_client.channel import CHANNEL_OPTIONS, FailedCall, translate

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


def ask_status(address: str, *, timeout_s: float) -> AgentStatus:
    """Raises `KvstoreError` when no agent answers in time."""
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        return call_unary(channel, wire.GET_AGENT_STATUS, GetAgentStatusRequest(), timeout_s=timeout_s)


def call_unary(
    channel: grpc.Channel, method: Method[_Request, _Response], request: _Request, *, timeout_s: float
) -> _Response:
    """One call; its failure is the error of the one tree that it stands for."""
    call: Any = channel.unary_unary(method.path)
    try:
        data: bytes = call(method.encode_request(request), timeout=timeout_s)
    except grpc.RpcError as error:
        if cast("FailedCall", error).code() is grpc.StatusCode.UNIMPLEMENTED:
            raise ProtocolError(f"that is not an agent (a store daemon?): it has no {method.name}") from error
        raise translate(cast("FailedCall", error), method_name=method.name) from error
    return method.decode_response(data)
