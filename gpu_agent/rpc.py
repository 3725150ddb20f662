"""gRPC in front of the agent service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gpu_agent.service import AgentService
from gpu_agent.streams import StreamGate
from kvstore import wire
from kvstore.errors import REASON_METADATA_KEY, InternalError, KvstoreError
from kvstore.messages import FRAME_DATA_BYTES_MAX
from kvstore.wire import Method

_log = structlog.get_logger("kvstore.agent")

_STREAM_COUNT_MAX = 16
"""Data streams at a time; each has a worker for as long as it lives, which is up to its peer. More are refused."""
_WAITING_COUNT = 32
"""Calls of attached engines that may wait for room or for the store at a time: each engine has two threads that do."""
_WORKER_COUNT = _STREAM_COUNT_MAX + _WAITING_COUNT + 8
"""Calls served at a time: all of these, and health, status and other short calls beside them."""
_STREAM_IDLE_S_MAX = 5.0
"""Longest wait for a peer to send or to take a frame; one that stalls is cut off and its worker is free again."""
_STREAM_AGE_S_MAX = 120.0
"""Longest life of a stream, also of one whose peer moves a frame now and then."""
_MESSAGE_BYTES_MAX = FRAME_DATA_BYTES_MAX + (2 << 20)
"""A frame, or a request of 65,536 hashes (2 MiB), with room for its header."""
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),  # a second agent on the port must fail, not share it
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]

Context = grpc.ServicerContext
OnBug = Callable[[AssertionError], None]
"""Called when an invariant is broken: whatever is served after that might be wrong bytes."""

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class AgentServer:
    """A gRPC server with the agent, health and reflection services."""

    def __init__(self, service: AgentService, *, on_bug: OnBug, stream_idle_s_max: float = _STREAM_IDLE_S_MAX) -> None:
        self._on_bug = on_bug
        self._streams = StreamGate(
            count_max=_STREAM_COUNT_MAX, idle_s_max=stream_idle_s_max, age_s_max=_STREAM_AGE_S_MAX
        )
        self._workers = ThreadPoolExecutor(_WORKER_COUNT, thread_name_prefix="kvstore-agent-rpc")
        self._server = grpc.server(self._workers, options=_OPTIONS)
        self._server.add_generic_rpc_handlers((self._handlers(service),))
        self._health = health.HealthServicer(experimental_non_blocking=True)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (wire.AGENT_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    def listen(self, address: str) -> int:
        """Binds an address; returns the port (1 for unix sockets). Raises `OSError` when that cannot be."""
        try:
            return int(self._server.add_insecure_port(address))
        except RuntimeError as error:
            raise OSError("gRPC cannot have it") from error

    def start(self) -> None:
        self._streams.start()
        self._server.start()

    def set_serving(self, is_serving: bool) -> None:
        """What the health service answers for the whole server and for the agent."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", wire.AGENT_SERVICE):
            self._health.set(name, status)

    def stop(self, *, grace_s: float) -> None:
        """Takes no new calls, lets running ones finish for so long, then cuts them off."""
        self._server.stop(grace_s).wait()
        self._streams.stop()
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _handlers(self, service: AgentService) -> grpc.GenericRpcHandler:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            wire.GET_AGENT_STATUS.name: self._unary(wire.GET_AGENT_STATUS, service.get_status),
            wire.OPEN_AGENT_NAMESPACE.name: self._unary(wire.OPEN_AGENT_NAMESPACE, service.open_namespace),
            wire.TOUCH_BLOCKS.name: self._unary(wire.TOUCH_BLOCKS, service.touch_blocks),
            wire.FIND_BLOCKS.name: self._unary(wire.FIND_BLOCKS, service.find_blocks),
            wire.RESERVE_SLOTS.name: self._unary(wire.RESERVE_SLOTS, service.reserve_slots),
            wire.COMMIT_SLOTS.name: self._unary(wire.COMMIT_SLOTS, service.commit_slots),
            wire.ACQUIRE_SLOTS.name: self._unary(wire.ACQUIRE_SLOTS, service.acquire_slots),
            wire.RELEASE_SLOTS.name: self._unary(wire.RELEASE_SLOTS, service.release_slots),
            wire.STORE_BLOCKS.name: self._receiving(wire.STORE_BLOCKS, service.store_blocks),
            wire.LOAD_BLOCKS.name: self._sending(wire.LOAD_BLOCKS, service.load_blocks),
        }
        return grpc.method_handlers_generic_handler(wire.AGENT_SERVICE, handlers)

    def _unary(
        self, method: Method[_Request, _Response], handle: Callable[[_Request], _Response]
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        def call(data: bytes, context: Context) -> bytes:
            with self._answering(context, method.name):
                return method.encode_response(handle(method.decode_request(data)))

        return grpc.unary_unary_rpc_method_handler(call)

    def _receiving(
        self, method: Method[_Request, _Response], handle: Callable[[Iterator[_Request]], _Response]
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        def call(messages: Iterator[bytes], context: Context) -> bytes:
            with self._answering(context, method.name), self._streams.admitted(context.cancel) as stream:
                return method.encode_response(handle(map(method.decode_request, stream.received(messages))))

        return grpc.stream_unary_rpc_method_handler(call)

    def _sending(
        self, method: Method[_Request, _Response], handle: Callable[[_Request], Iterator[_Response]]
    ) -> grpc.RpcMethodHandler[bytes, bytes]:
        def call(data: bytes, context: Context) -> Iterator[bytes]:
            with self._answering(context, method.name), self._streams.admitted(context.cancel) as stream:
                yield from stream.sent(map(method.encode_response, handle(method.decode_request(data))))

        return grpc.unary_stream_rpc_method_handler(call)

    @contextmanager
    def _answering(self, context: Context, name: str) -> Iterator[None]:
        """The one place where errors become status codes, and where any exception is caught."""
        try:
            yield
        except KvstoreError as error:
            _abort(context, error)
        except grpc.RpcError:
            raise  # the call is over: the peer has gone
        except AssertionError as error:
            self._on_bug(error)
            _log.exception("bug", method=name)
            _abort(context, InternalError(f"the agent met a bug in {name} and stops: {error}"))
        except Exception as error:  # noqa: BLE001  (a bug must not take the agent's other callers down)
            _log.exception("rpc_failed", method=name)
            _abort(context, InternalError(f"{type(error).__name__} in {name}; see the agent's log"))


def _abort(context: Context, error: KvstoreError) -> None:
    context.set_trailing_metadata(((REASON_METADATA_KEY, error.reason),))
    context.abort(getattr(grpc.StatusCode, error.grpc_status), str(error))
