"""gRPC in front of the store service: the contract, for everybody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore import wire
from kvstore.errors import REASON_METADATA_KEY, InternalError, KvstoreError
from kvstore.frames import WriteFrame
from kvstore.messages import FRAME_DATA_BYTES_MAX
from kvstore.wire import Method
from kvstore_client.channel import STREAM_OPTIONS, STREAM_WINDOW_BYTES
from kvstore_server.core.in_flight import ClientId
from kvstore_server.rpc.caller import LOOPBACK, Caller
from kvstore_server.rpc.service import StoreService
from kvstore_server.rpc.streams import OpenStreams, Stream

_log = structlog.get_logger("kvstore.rpc")

_MESSAGE_BYTES_MAX = FRAME_DATA_BYTES_MAX + (2 << 20)
"""A frame, or a request of 65,536 hashes (2 MiB), with room for its header."""

_STREAM_BYTES_MAX = FRAME_DATA_BYTES_MAX + STREAM_WINDOW_BYTES
"""What one stream holds at most in the daemon, whatever its peer does: a frame in hand, and what gRPC has taken."""
_CLIENT_ID_CHARS_MAX = 64

_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *STREAM_OPTIONS,
    ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),  # a second daemon on the port must fail, not share it
    ("grpc.keepalive_time_ms", 20_000),  # so that a peer that vanished without a word frees what it holds
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]

Context = grpc.aio.ServicerContext[Any, Any]
OnBug = Callable[[AssertionError], None]
"""Called when an invariant is broken: whatever is served after that might be wrong bytes."""

_Answer = TypeVar("_Answer")


class GrpcServer:
    """A gRPC server with the store, health and reflection services."""

    def __init__(self, service: StoreService, *, streams: OpenStreams, on_bug: OnBug) -> None:
        self._server = grpc.aio.server(options=_CHANNEL_OPTIONS)
        self._streams = streams
        self._on_bug = on_bug
        self._server.add_generic_rpc_handlers((self._store_handlers(service),))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (wire.STORE_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    def listen(self, address: str) -> int:
        """Binds an address; returns the port (1 for unix sockets). Raises `OSError` when that cannot be."""
        try:
            return int(self._server.add_insecure_port(address))
        except RuntimeError as error:
            raise OSError("gRPC cannot have it") from error

    async def start(self) -> None:
        await self._server.start()

    async def set_serving(self, is_serving: bool) -> None:
        """What the health service answers for the whole server and for the store."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", wire.STORE_SERVICE):
            await self._health.set(name, status)

    async def stop(self, *, grace_s: float) -> None:
        """Takes no new calls, lets running ones finish for so long, then cuts them off."""
        await self._server.stop(grace_s)

    def _store_handlers(self, service: StoreService) -> grpc.GenericRpcHandler:
        unary: list[tuple[Method[Any, Any], Callable[[Any, Caller], Awaitable[Any]]]] = [
            (wire.GET_STORE_INFO, service.get_store_info),
            (wire.GET_STORE_STATS, service.get_store_stats),
            (wire.OPEN_NAMESPACE, service.open_namespace),
            (wire.LOOKUP_BLOCKS, service.lookup_blocks),
            (wire.ACQUIRE_PREFIX, service.acquire_prefix),
            (wire.RENEW_LEASES, service.renew_leases),
            (wire.RELEASE_LEASES, service.release_leases),
            (wire.VERIFY_BLOCKS, service.verify_blocks),
            (wire.COUNT_READS, service.count_reads),
            (wire.PREFETCH_BLOCKS, service.prefetch_blocks),
            (wire.DESCRIBE_NAMESPACES, service.describe_namespaces),
            (wire.HINT_BLOCKS, service.hint_blocks),
            (wire.TAKE_ACCESSES, service.take_accesses),
            (wire.RESERVE_BLOCKS, service.reserve_blocks),
            (wire.COMMIT_BLOCKS, service.commit_blocks),
            (wire.ABORT_RESERVATIONS, service.abort_reservations),
            (wire.LEASE_BLOCKS, service.lease_blocks),
        ]
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            method.name: grpc.unary_unary_rpc_method_handler(self._unary(method, handle)) for method, handle in unary
        }
        handlers[wire.READ_BLOCKS.name] = grpc.unary_stream_rpc_method_handler(self._read_blocks(service))
        handlers[wire.WRITE_BLOCKS.name] = grpc.stream_unary_rpc_method_handler(self._write_blocks(service))
        return grpc.method_handlers_generic_handler(wire.STORE_SERVICE, handlers)

    def _unary(
        self, method: Method[Any, Any], handle: Callable[[Any, Caller], Awaitable[Any]]
    ) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def call(data: bytes, context: Context) -> bytes:
            async def answer() -> bytes:
                return method.encode_response(await handle(method.decode_request(data), _caller(context)))

            return await _answered(answer(), context, method, self._on_bug)

        return call

    def _read_blocks(self, service: StoreService) -> Callable[[bytes, Context], Awaitable[None]]:
        method = wire.READ_BLOCKS

        async def call(data: bytes, context: Context) -> None:
            async def send() -> None:
                request, caller = method.decode_request(data), _caller(context)
                size_bytes = service.load_bytes_max(request, caller)
                async with self._streams.open(_client_id(context)) as stream:
                    await stream.wait_turn(min(size_bytes, _STREAM_BYTES_MAX))
                    async with aclosing(service.read_blocks(request, caller)) as frames:
                        async for frame in frames:
                            await context.write(method.encode_response(frame))
                            stream.note_progress()

            await _answered(send(), context, method, self._on_bug)

        return call

    def _write_blocks(self, service: StoreService) -> Callable[[AsyncIterator[bytes], Context], Awaitable[bytes]]:
        method = wire.WRITE_BLOCKS

        async def call(messages: AsyncIterator[bytes], context: Context) -> bytes:
            async def receive() -> bytes:
                caller = _caller(context)
                async with self._streams.open(_client_id(context)) as stream:
                    frames = _write_frames(messages, stream, store_bytes_max=service.store_bytes_max)
                    return method.encode_response(await service.write_blocks(frames, caller))

            return await _answered(receive(), context, method, self._on_bug)

        return call


def _client_id(context: Context) -> ClientId:
    """Who shares one budget: a connection, and on a unix socket, where connections have no names, what it says it is.

    It decides about fairness alone. Who gives itself another name for each stream is held by what all may have.
    """
    metadata = context.invocation_metadata() or ()
    declared = next((str(value) for key, value in metadata if key == wire.CLIENT_METADATA_KEY), "")
    return ClientId(f"{context.peer()} {declared[:_CLIENT_ID_CHARS_MAX]}")


def _caller(context: Context) -> Caller:
    return replace(LOOPBACK, client_id=_client_id(context))


async def _write_frames(
    messages: AsyncIterator[bytes], stream: Stream, *, store_bytes_max: Callable[[WriteFrame], int]
) -> AsyncIterator[WriteFrame]:
    is_counted = False
    async for message in messages:
        frame = wire.WRITE_BLOCKS.decode_request(message)
        if not is_counted:
            stream.count_store(min(store_bytes_max(frame), _STREAM_BYTES_MAX))
            is_counted = True
        stream.note_progress()
        yield frame
    # grpc.aio ends the messages of a cancelled call as if they were all, and cancels its task just after:
    # mostly before the next turn of the loop.
    await asyncio.sleep(0)


async def _answered(work: Awaitable[_Answer], context: Context, method: Method[Any, Any], on_bug: OnBug) -> _Answer:
    """The one place where errors become status codes, and where any exception is caught."""
    try:
        return await work
    except KvstoreError as error:
        await _abort(context, error)
    except grpc.aio.BaseError:
        raise  # the call is over: the peer has gone or was told
    except AssertionError as error:
        on_bug(error)
        _log.exception("bug", method=method.name)
        await _abort(context, InternalError(f"the daemon met a bug in {method.name} and stops: {error}"))
    except Exception as error:  # noqa: BLE001  (a bug must not take the daemon's other callers down)
        _log.exception("rpc_failed", method=method.name)
        await _abort(context, InternalError(f"{type(error).__name__} in {method.name}; see the daemon's log"))


async def _abort(context: Context, error: KvstoreError) -> NoReturn:
    status = getattr(grpc.StatusCode, error.grpc_status)
    await context.abort(status, str(error), trailing_metadata=((REASON_METADATA_KEY, error.reason),))
    raise AssertionError("abort returned")
