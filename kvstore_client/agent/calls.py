"""Calls to an agent."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import grpc

from kvstore.errors import ProtocolError
from kvstore.wire import Method
from kvstore_client.channel import CHANNEL_OPTIONS, FailedCall, translate

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class AgentCalls:
    """A gRPC channel to one agent; it connects at the first call, and again when the agent is back."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._posted: set[Any] = set()  # gRPC cancels a call that nobody refers to

    def call(self, method: Method[_Request, _Response], request: _Request, *, timeout_s: float) -> _Response:
        """Its failure is the error of the one tree that it stands for."""
        return call_unary(self._channel, method, request, timeout_s=timeout_s)

    def post(self, method: Method[_Request, Any], request: _Request, *, timeout_s: float) -> None:
        """Sends and does not wait; nobody learns what became of it."""
        call: Any = self._channel.unary_unary(method.path)
        posted = call.future(method.encode_request(request), timeout=timeout_s)
        self._posted.add(posted)
        posted.add_done_callback(self._posted.discard)

    def close(self) -> None:
        self._channel.close()


def call_unary(
    channel: grpc.Channel, method: Method[_Request, _Response], request: _Request, *, timeout_s: float
) -> _Response:
    """As `AgentCalls.call`, on any channel."""
    call: Any = channel.unary_unary(method.path)
    try:
        data: bytes = call(method.encode_request(request), timeout=timeout_s)
    except grpc.RpcError as error:
        if cast("FailedCall", error).code() is grpc.StatusCode.UNIMPLEMENTED:
            raise ProtocolError(f"that is not an agent (a store daemon?): it has no {method.name}") from error
        raise translate(cast("FailedCall", error), method_name=method.name) from error
    return method.decode_response(data)
