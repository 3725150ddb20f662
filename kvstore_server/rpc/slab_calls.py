"""RPCs over the slab socket: a connection's requests, answered in order by the store's handlers.

Format: docs/formats/slab.md, "CALLS".
"""

from __future__ import annotations

import asyncio
from asyncio.tasks import _enter_task, _leave_task  # public: "Extending", in asyncio's documentation
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import structlog

from kvstore import wire
from kvstore.errors import InternalError, KvstoreError, ProtocolError
from kvstore.slab import CALL_BODY_BYTES_MAX, CALL_HEADER_BYTES, CallHeader
from kvstore.wire import Method
from kvstore_server.rpc.caller import Caller
from kvstore_server.rpc.service import StoreService

_CALLS_PER_TURN = 8
"""How many requests of one connection are answered before other connections have their turn."""
_WRITE_BUFFER_BYTES_MAX = 64 << 10
"""Responses that may wait for the client to read before it gets no further answers."""

_READ_AHEAD_BYTES_MAX = 64 << 10
"""What is read behind a request that waits: whoever reads nothing does not see that the client has gone."""

_log = structlog.get_logger("kvstore.slab")

OnBug = Callable[[AssertionError], None]
"""Called when an invariant is broken: whatever is served after that might be wrong bytes."""


class Resize(Protocol):
    def __call__(self, *, from_bytes: int, to_bytes: int) -> bool:
        """Told how many bytes a connection kept and keeps in memory; False when that is too much."""


@dataclass(frozen=True, slots=True)
class Answerer:
    """One RPC and who answers it."""

    method: Method[Any, Any]
    handle: Callable[[Any, Caller], Coroutine[Any, Any, Any]]


def answerers(service: StoreService) -> tuple[Answerer, ...]:
    """By place in `wire.UNARY_STORE_METHODS`."""
    handlers: dict[str, Callable[[Any, Caller], Coroutine[Any, Any, Any]]] = {
        wire.GET_STORE_INFO.name: service.get_store_info,
        wire.GET_STORE_STATS.name: service.get_store_stats,
        wire.OPEN_NAMESPACE.name: service.open_namespace,
        wire.LOOKUP_BLOCKS.name: service.lookup_blocks,
        wire.ACQUIRE_PREFIX.name: service.acquire_prefix,
        wire.RENEW_LEASES.name: service.renew_leases,
        wire.RELEASE_LEASES.name: service.release_leases,
        wire.VERIFY_BLOCKS.name: service.verify_blocks,
        wire.COUNT_READS.name: service.count_reads,
        wire.PREFETCH_BLOCKS.name: service.prefetch_blocks,
        wire.DESCRIBE_NAMESPACES.name: service.describe_namespaces,
        wire.HINT_BLOCKS.name: service.hint_blocks,
        wire.TAKE_ACCESSES.name: service.take_accesses,
        wire.RESERVE_BLOCKS.name: service.reserve_blocks,
        wire.COMMIT_BLOCKS.name: service.commit_blocks,
        wire.ABORT_RESERVATIONS.name: service.abort_reservations,
        wire.LEASE_BLOCKS.name: service.lease_blocks,
    }
    return tuple(Answerer(method, handlers[method.name]) for method in wire.UNARY_STORE_METHODS)


class CallsConnection(asyncio.Protocol):
    """Answers one connection's requests, one at a time, in order, and reads no further than it answers.

    A handler that does not wait is run at once and costs no task; one that waits keeps its connection waiting and
    no other. A client that leaves a request unfinished or a response unread for `patience_s` is cut off.
    """

    def __init__(
        self,
        *,
        answerers: Sequence[Answerer],
        caller: Caller,
        resize: Resize,
        patience_s: float,
        on_bug: OnBug,
    ) -> None:
        self._answerers = answerers
        self._caller = caller
        self._resize = resize
        self._patience_s = patience_s
        self._on_bug = on_bug
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()
        self._kept_bytes = 0
        self._is_reading = True
        self._is_unread_by_client = False
        self._is_ending = False
        self._patience: asyncio.TimerHandle | None = None
        self._suspended: tuple[CallHeader, _Rest] | None = None
        self._resume = asyncio.Event()
        self._worker = self._loop.create_task(self._finish_suspended())
        self._closed = asyncio.Event()

    async def wait_closed(self) -> None:
        await self._closed.wait()

    def close_when_idle(self) -> None:
        """Takes no further request, finishes the one that runs, and ends."""
        self._is_ending = True
        self._go_on()

    def abort(self) -> None:
        """Ends at once: what runs is cancelled, and nothing is kept in memory."""
        self._is_ending = True
        self._worker.cancel()
        self._be_patient()
        self._unread.clear()
        if self._kept_bytes:
            self._resize(from_bytes=self._kept_bytes, to_bytes=0)
            self._kept_bytes = 0
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast("asyncio.Transport", transport)  # uvloop's are none of asyncio's classes
        if self._is_ending:
            stream.abort()
            return
        stream.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES_MAX)
        self._transport = stream

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        self._unread += data
        self._go_on()

    def pause_writing(self) -> None:
        self._is_unread_by_client = True
        self._lose_patience_later()
        self._keep()

    def resume_writing(self) -> None:
        self._is_unread_by_client = False
        self._be_patient()
        self._loop.call_soon(self._go_on)  # this may come out of a write of the worker's

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None
        self.abort()
        self._closed.set()

    # --- inside

    def _go_on(self) -> None:
        """Answers what is there, until a request is incomplete or suspended or the client does not read."""
        if self._transport is None:
            return
        for _ in range(_CALLS_PER_TURN):
            if self._is_held_up or self._is_ending or not self._answer_next():
                break
        else:
            self._loop.call_soon(self._go_on)
            self._read_on(is_wanted=False)
            return
        if self._is_ending and not self._is_held_up:
            self._transport.close()
            return
        if self._unread and not self._is_held_up:
            self._lose_patience_later()
        self._read_on(is_wanted=not self._is_held_up or len(self._unread) <= _READ_AHEAD_BYTES_MAX)
        self._keep()

    @property
    def _is_held_up(self) -> bool:
        return self._suspended is not None or self._is_unread_by_client

    def _answer_next(self) -> bool:
        """Answers or begins one request; False when none is whole."""
        unread = self._unread
        if len(unread) < CALL_HEADER_BYTES:
            return False
        try:
            header = CallHeader.decode(unread[:CALL_HEADER_BYTES])
        except ProtocolError as error:
            self._refuse(int.from_bytes(unread[8:CALL_HEADER_BYTES], "little"), error)
            return False
        end = CALL_HEADER_BYTES + header.body_bytes
        if len(unread) < end:
            return False
        with memoryview(unread) as view:
            body = bytes(view[CALL_HEADER_BYTES:end])
        del unread[:end]
        self._be_patient()
        self._begin(header, body)
        return True

    def _begin(self, header: CallHeader, body: bytes) -> None:
        call = self._answered(header, body)
        # What runs now may set a timeout or start to wait, which takes a task: it will be the worker that goes on.
        _enter_task(self._loop, self._worker)
        try:
            waits_for = call.send(None)
        except StopIteration as answered:
            self._send(header, answered.value)
        else:
            self._suspended = header, _Rest(call, waits_for)
            self._resume.set()
        finally:
            _leave_task(self._loop, self._worker)

    async def _finish_suspended(self) -> None:
        try:
            while True:
                cancelled: asyncio.CancelledError | None = None
                try:
                    await self._resume.wait()
                except asyncio.CancelledError as error:
                    # A timeout that the call has set may fire before the worker has taken the call over.
                    cancelled = error
                if self._suspended is None:
                    return
                header, rest = self._suspended
                rest.cancelled = cancelled
                answer = await rest
                self._resume.clear()
                self._suspended = None
                self._send(header, answer)
                self._loop.call_soon(self._go_on)
        finally:
            self.abort()

    async def _answered(self, header: CallHeader, body: bytes) -> tuple[int, bytes]:
        """The response's code and body: the one place where errors become codes, and where any exception is caught."""
        if not 1 <= header.code <= len(self._answerers):
            allowed = f"1 to {len(self._answerers)}"
            return _failure(ProtocolError(f"method {header.code} is not known; allowed: {allowed}"))
        answerer = self._answerers[header.code - 1]
        name = answerer.method.name
        try:
            response = await answerer.handle(answerer.method.decode_request(body), self._caller)
            return 0, answerer.method.encode_response(response)
        except KvstoreError as error:
            return _failure(error)
        except AssertionError as error:
            self._on_bug(error)
            _log.exception("bug", method=name)
            return _failure(InternalError(f"the daemon met a bug in {name} and stops: {error}"))
        except Exception as error:  # noqa: BLE001  (a bug must not take the daemon's other callers down)
            _log.exception("rpc_failed", method=name)
            return _failure(InternalError(f"{type(error).__name__} in {name}; see the daemon's log"))

    def _send(self, header: CallHeader, answer: tuple[int, bytes]) -> None:
        if self._transport is None or header.is_one_way:
            return
        code, body = answer
        self._transport.write(CallHeader(len(body), code, False, header.call_number).encode() + body)

    def _refuse(self, call_number: int, error: ProtocolError) -> None:
        """Says why, and ends: what follows cannot be told apart from a request."""
        _log.info("calls_refused", reason=str(error))
        self._send(CallHeader(0, 0, False, call_number), _failure(error))
        self._unread.clear()
        self._is_ending = True

    def _read_on(self, *, is_wanted: bool) -> None:
        if self._transport is None or is_wanted == self._is_reading:
            return
        self._is_reading = is_wanted
        if is_wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _keep(self) -> None:
        """Accounts for the memory that this connection takes; ends it when its user takes too much."""
        if self._transport is None:
            return
        kept_bytes = len(self._unread)
        if self._is_unread_by_client:
            kept_bytes += self._transport.get_write_buffer_size()
        if kept_bytes == self._kept_bytes:
            return
        if self._resize(from_bytes=self._kept_bytes, to_bytes=kept_bytes):
            self._kept_bytes = kept_bytes
        else:
            self._cut_off("its user keeps too many bytes of requests and responses waiting")

    def _lose_patience_later(self) -> None:
        if self._patience is None:
            self._patience = self._loop.call_later(
                self._patience_s, self._cut_off, "it left a request unfinished or a response unread"
            )

    def _be_patient(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _cut_off(self, reason: str) -> None:
        _log.info("calls_cut_off", reason=reason, patience_s=self._patience_s)
        self.abort()


class _Rest:
    """What is left of a call whose first step has been taken; to be awaited once, by the task that took it."""

    def __init__(self, call: Coroutine[Any, Any, tuple[int, bytes]], waits_for: Any) -> None:
        self._call = call
        self._waits_for = waits_for
        self._is_taken_over = False
        self.cancelled: asyncio.CancelledError | None = None

    def __await__(self) -> Generator[Any, Any, tuple[int, bytes]]:
        return cast("Generator[Any, Any, tuple[int, bytes]]", self)  # as far as `await` needs it

    def __iter__(self) -> _Rest:
        return self

    def __next__(self) -> Any:
        if self._is_taken_over:
            return self._call.send(None)
        self._is_taken_over = True
        return self._waits_for if self.cancelled is None else self._call.throw(self.cancelled)

    def throw(self, *error: Any) -> Any:
        return self._call.throw(*error)


def _failure(error: KvstoreError) -> tuple[int, bytes]:
    text = f"{error.reason}\n{error}".encode(errors="replace")
    return 1, text[:CALL_BODY_BYTES_MAX]
