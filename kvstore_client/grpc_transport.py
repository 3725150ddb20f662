"""Carries out the steps of flows over gRPC, for threads."""

from __future__ import annotations

import threading
from typing import Any, cast

import grpc
from grpc.experimental import ChannelOptions

from kvstore.errors import UnavailableError
from kvstore.wire import Method
from kvstore_client.channel import CHANNEL_OPTIONS, FailedCall, client_metadata, encode_frames, translate
from kvstore_client.flows.steps import Call, Post, Read, RpcStep, Write

_OPTIONS = [
    *CHANNEL_OPTIONS,
    # Whoever reads a stream waits for the network itself: a thread in between costs a fifth of the CPU time.
    (ChannelOptions.SingleThreadedUnaryStream, 1),
]


class GrpcTransport:
    """Carries out steps on a channel that is opened by the first of them."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._is_closed = False
        self._callables: dict[str, Any] = {}
        self._posted: set[Any] = set()
        self._metadata = client_metadata()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            channel, self._channel = self._channel, None
            self._callables.clear()
        if channel is not None:
            channel.close()

    def carry_out(self, step: RpcStep) -> object:
        try:
            match step:
                case Call(method=method):
                    data = self._start(method, method.encode_request(step.request), timeout_s=step.timeout_s)
                    return method.decode_response(data)
                case Read():
                    self._read(step)
                    return None
                case Write(method=method):
                    data = self._start(method, encode_frames(step.frames), timeout_s=step.timeout_s)
                    return method.decode_response(data)
        except grpc.RpcError as error:
            raise translate(cast("FailedCall", error), method_name=step.method.name) from error
        except ValueError as error:
            if self._is_closed:  # gRPC's answer to a call on a channel that another thread has just closed
                raise UnavailableError("the client is closed") from error
            raise

    def post(self, step: Post, *, timeout_s: float) -> None:
        try:
            call = self._callable(step.method).future(step.method.encode_request(step.request), timeout=timeout_s)
        except (UnavailableError, ValueError):  # closed, by us or by another thread just now
            return
        self._posted.add(call)  # one that nobody refers to any more is cancelled
        call.add_done_callback(self._posted.discard)

    def _read(self, step: Read) -> None:
        stream = self._start(step.method, step.method.encode_request(step.request), timeout_s=step.timeout_s)
        try:
            for data in stream:
                step.on_frame(step.method.decode_response(data))
        finally:
            stream.cancel()

    def _start(self, method: Method[Any, Any], data: object, *, timeout_s: float) -> Any:
        return self._callable(method)(data, timeout=timeout_s, metadata=self._metadata)

    def _callable(self, method: Method[Any, Any]) -> Any:
        """Bytes in, bytes out: gRPC would turn an error of ours while decoding into one without its reason."""
        found = self._callables.get(method.path)
        if found is not None:
            return found
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the client is closed")
            if self._channel is None:
                self._channel = grpc.insecure_channel(self._address, options=_OPTIONS)
            found = getattr(self._channel, method.streams.value)(method.path)
            self._callables[method.path] = found
            return found
