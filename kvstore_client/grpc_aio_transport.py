"""Carries out the steps of flows over gRPC, for asyncio."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc.aio

from kvstore.errors import UnavailableError
from kvstore.wire import Method
from kvstore_client.channel import CHANNEL_OPTIONS, FailedCall, client_metadata, encode_frames, translate
from kvstore_client.flows.steps import Call, Post, Read, RpcStep, Write


class AsyncGrpcTransport:
    """Carries out steps on a channel that belongs to the running loop."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._callables: dict[str, Any] = {}
        self._posted: set[Any] = set()
        self._metadata = client_metadata()

    async def aclose(self) -> None:
        self._is_closed = True
        channel, self._channel = self._channel, None
        self._callables.clear()
        if channel is not None and self._loop is asyncio.get_running_loop():
            await channel.close()

    async def carry_out(self, step: RpcStep) -> object:
        try:
            match step:
                case Call(method=method):
                    data = await self._start(method, method.encode_request(step.request), timeout_s=step.timeout_s)
                    return method.decode_response(data)
                case Read():
                    await self._read(step)
                    return None
                case Write(method=method):
                    data = await self._start(method, encode_frames(step.frames), timeout_s=step.timeout_s)
                    return method.decode_response(data)
        except grpc.aio.AioRpcError as error:
            raise translate(cast("FailedCall", error), method_name=step.method.name) from error
        except (grpc.aio.UsageError, asyncio.CancelledError) as error:
            # What calls get when another task closes the channel below them; our own cancellation goes on.
            task = asyncio.current_task()
            if self._is_closed and not (task is not None and task.cancelling()):
                raise UnavailableError("the client is closed") from error
            raise

    def post(self, step: Post, *, timeout_s: float) -> None:
        try:
            call = self._callable(step.method)(step.method.encode_request(step.request), timeout=timeout_s)
        except (UnavailableError, grpc.aio.UsageError):
            return
        self._posted.add(call)  # one that nobody refers to any more is cancelled
        call.add_done_callback(self._posted.discard)

    async def _read(self, step: Read) -> None:
        stream = self._start(step.method, step.method.encode_request(step.request), timeout_s=step.timeout_s)
        try:
            async for data in stream:
                step.on_frame(step.method.decode_response(data))
        finally:
            stream.cancel()

    def _start(self, method: Method[Any, Any], data: object, *, timeout_s: float) -> Any:
        return self._callable(method)(data, timeout=timeout_s, metadata=self._metadata)

    def _callable(self, method: Method[Any, Any]) -> Any:
        """Bytes in, bytes out, as in `client`."""
        if self._is_closed:
            raise UnavailableError("the client is closed")
        loop = asyncio.get_running_loop()
        if self._channel is None or self._loop is not loop:
            self._callables.clear()
            self._loop = loop
            self._channel = grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS)
        found = self._callables.get(method.path)
        if found is None:
            found = getattr(self._channel, method.streams.value)(method.path)
            self._callables[method.path] = found
        return found
