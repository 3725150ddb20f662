"""RPCs on CALLS connections of the slab socket. Format: docs/formats/slab.md."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvstore import wire
from kvstore.errors import DeadlineExceededError, KvstoreError, ProtocolError, UnavailableError, error_from_status
from kvstore.messages import OwnerId
from kvstore.slab import CALL_HEADER_BYTES, WELCOME_BYTES, Access, CallHeader, ConnectionKind, Hello, Welcome
from kvstore.wire import Method
from kvstore_client.forks import mend_after_fork
from kvstore_client.paths.idle import IdleCores

CONNECTIONS_MAX = 16
"""CALLS connections of one session, the daemon's own limit; a thread that finds all of them busy waits for one."""

METHOD_CODES = {method.name: code for code, method in enumerate(wire.UNARY_STORE_METHODS, start=1)}

IDEMPOTENT = frozenset(
    method.name
    for method in (
        wire.GET_STORE_INFO,
        wire.GET_STORE_STATS,
        wire.OPEN_NAMESPACE,
        wire.LOOKUP_BLOCKS,
        wire.RELEASE_LEASES,
        wire.VERIFY_BLOCKS,
        wire.PREFETCH_BLOCKS,
        wire.DESCRIBE_NAMESPACES,
        wire.HINT_BLOCKS,
    )
)
"""Calls that may be made again when the session they were made in has ended."""

RECEIVE_BYTES = 16 << 10
_POST_WAIT_S = 0.01
"""How long a call without an answer may wait for a connection when all are busy; what it gives back expires else."""
_SPIN_S = 300e-6
"""How long to look for an answer before sleeping until it is there. An answer takes some 50 to 500 microseconds, and
waking up on another core than the daemon's 50 to 100 more."""
_TIMEVAL = struct.Struct("@ll")


class SessionLostError(UnavailableError):
    """The daemon has closed the connection: it ended, or it ended the session; what the session held is void."""


class AttachRefusedError(UnavailableError):
    """The daemon does not want this client at its slab socket; the message has its reason."""


def decode_answer(header: CallHeader, body: bytes, method: Method[Any, Any], *, call_number: int) -> Any:
    """The response, or the error that it stands for."""
    if header.call_number != call_number:
        raise ProtocolError(f"answer to call {header.call_number}; expected {call_number}")
    if header.code == 0:
        return method.decode_response(body)
    reason, _, message = body.decode(errors="replace").partition("\n")
    raise error_from_status(status="INTERNAL", reason=reason, message=message)


def check_welcome(sock_answer: bytes, refusal: bytes) -> Welcome:
    """The welcome; a refusal raises `AttachRefusedError`."""
    welcome = Welcome.decode(sock_answer)
    if welcome.refusal_bytes:
        raise AttachRefusedError(f"the daemon refuses this client: {refusal.decode(errors='replace')}")
    return welcome


def too_late(name: str, timeout_s: float) -> DeadlineExceededError:
    return DeadlineExceededError(f"{name}: no answer within {timeout_s:g} s")


class TimedSocket:
    """A blocking socket whose calls end by a deadline that the kernel keeps: one system call each, no polling."""

    def __init__(self, path: Path, hello: Hello, *, timeout_s: float, idle_cores: IdleCores) -> None:
        """Connects and says hello. Raises `OSError` or a `KvstoreError`."""
        self.socket = socket.socket(socket.AF_UNIX)
        self._timeout_s = 0.0
        self._deadline_s = 0.0
        self._buffer = bytearray(RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._idle_cores = idle_cores
        mend_after_fork(self)  # before it connects: the fork may come in the middle of that
        try:
            self.start(timeout_s)
            self.socket.connect(str(path))
            with suppress(BrokenPipeError):  # refused already; the answer says why
                self.send(hello.encode())
            answer = self.receive(WELCOME_BYTES)
            self.welcome = check_welcome(answer, self.receive(Welcome.decode(answer).refusal_bytes))
        except BaseException as error:
            self.socket.close()
            if isinstance(error, BlockingIOError):
                raise too_late("attaching to the daemon", timeout_s) from error
            raise

    def after_fork(self) -> None:
        """The connection is the parent's, and must end with it."""
        self.socket.close()

    def start(self, timeout_s: float) -> None:
        """What follows has this long, all together."""
        self._deadline_s = time.monotonic() + timeout_s
        self._set(timeout_s)

    def send(self, data: bytes) -> None:
        """Raises `BlockingIOError` when it does not leave in time."""
        self.socket.sendall(data)

    def receive(self, size_bytes: int) -> bytes:
        """Exactly so many bytes. Raises `BlockingIOError` when they come too late, `EOFError` when they never will."""
        whole = bytearray(size_bytes)
        self.fill(memoryview(whole))
        return bytes(whole)

    def fill(self, target: memoryview) -> None:
        while target:
            count = self.socket.recv_into(target)
            if not count:
                raise EOFError
            target = target[count:]
            if target:
                self._set(self._deadline_s - time.monotonic())

    def receive_call(self) -> tuple[CallHeader, bytes]:
        """One response, which is all that can have come."""
        view, have_bytes = self._view, self._spin()
        while have_bytes < CALL_HEADER_BYTES:
            count = self.socket.recv_into(view[have_bytes:])
            if not count:
                raise EOFError
            have_bytes += count
        header = CallHeader.decode(view[:CALL_HEADER_BYTES])
        end = CALL_HEADER_BYTES + header.body_bytes
        if have_bytes > end:
            raise ProtocolError(f"{have_bytes - end} bytes behind an answer")
        if have_bytes == end:
            return header, bytes(view[CALL_HEADER_BYTES:end])
        body = bytearray(header.body_bytes)
        body[: have_bytes - CALL_HEADER_BYTES] = view[CALL_HEADER_BYTES:have_bytes]
        self._set(self._deadline_s - time.monotonic())
        self.fill(memoryview(body)[have_bytes - CALL_HEADER_BYTES :])
        return header, bytes(body)

    def _spin(self) -> int:
        """Looks for an answer while a core has nothing better to do; returns how many bytes of it have come."""
        if not self._idle_cores.count():
            return 0
        receive, view, clock = self.socket.recv_into, self._view, time.monotonic
        end_s = clock() + _SPIN_S
        while clock() < end_s:
            try:
                count = receive(view, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            if not count:
                raise EOFError
            return count
        return 0

    def _set(self, timeout_s: float) -> None:
        if timeout_s == self._timeout_s:
            return
        self._timeout_s = timeout_s
        micros = max(1, int(timeout_s * 1e6))  # 0 would be for ever
        value = _TIMEVAL.pack(micros // 1_000_000, micros % 1_000_000)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


class CallPool:
    """The CALLS connections of one session: each serves one thread at a time, the one used last first."""

    def __init__(self, path: Path, *, session_id: OwnerId) -> None:
        self._path = path
        self._hello = Hello(kind=ConnectionKind.CALLS, access=Access.READ, session_id=session_id)
        self._idle: list[TimedSocket] = []
        self._numbers = itertools.count(1)
        self._idle_cores = IdleCores()
        self._freed = threading.Condition()
        self._connection_count = 0
        self._waiting_count = 0
        self._is_closed = False
        self._all: set[TimedSocket] = set()

    def call(self, method: Method[Any, Any], request: Any, *, timeout_s: float) -> Any:
        """One RPC. Raises `SessionLostError` when the daemon has closed the connection."""
        body = method.encode_request(request)
        number = next(self._numbers)
        connection = self._take(timeout_s)
        try:
            connection.start(timeout_s)
            connection.send(CallHeader(len(body), METHOD_CODES[method.name], False, number).encode() + body)
            header, answer = connection.receive_call()
        except BaseException as error:
            # Half a call may be under way: nothing else may be said on this connection.
            self._discard(connection)
            match error:
                case BlockingIOError():
                    raise too_late(method.name, timeout_s) from error
                case EOFError() | OSError():
                    raise self._lost(method) from error
            raise
        self._give_back(connection)
        return decode_answer(header, answer, method, call_number=number)

    def post(self, method: Method[Any, Any], request: Any) -> None:
        """One RPC without an answer; dropped when it cannot leave now."""
        body = method.encode_request(request)
        data = CallHeader(len(body), METHOD_CODES[method.name], True, next(self._numbers)).encode() + body
        try:
            connection = self._take(_POST_WAIT_S)
        except KvstoreError:
            return
        try:
            is_whole = connection.socket.send(data, socket.MSG_DONTWAIT) == len(data)
        except OSError:
            is_whole = False
        if is_whole:
            self._give_back(connection)
        else:
            self._discard(connection)

    def close(self) -> None:
        """Ends calls under way in other threads."""
        with self._freed:
            self._is_closed = True
            connections = list(self._all)
            self._freed.notify_all()
        for connection in connections:
            with suppress(OSError):  # the daemon was first
                connection.socket.shutdown(socket.SHUT_RDWR)
        while self._idle:
            self._discard(self._idle.pop())

    def close_descriptors(self) -> None:
        """For a forked child: the connections go on in the parent."""
        for connection in self._all:
            connection.socket.close()

    def _lost(self, method: Method[Any, Any]) -> KvstoreError:
        if self._is_closed:
            return UnavailableError("the client is closed")
        return SessionLostError(f"{method.name}: the daemon has closed the slab socket")

    def _take(self, timeout_s: float) -> TimedSocket:
        try:
            return self._idle.pop()
        except IndexError:
            pass
        with self._freed:
            if self._connection_count >= CONNECTIONS_MAX:
                self._waiting_count += 1
                is_free = self._freed.wait_for(self._may_take, timeout_s)
                self._waiting_count -= 1
                if not is_free:
                    raise DeadlineExceededError(f"no slab connection was free within {timeout_s:g} s")
            if self._is_closed:
                raise UnavailableError("the client is closed")
            if self._idle:
                return self._idle.pop()
            self._connection_count += 1
        try:
            connection = TimedSocket(self._path, self._hello, timeout_s=timeout_s, idle_cores=self._idle_cores)
        except BaseException as error:
            with self._freed:
                self._connection_count -= 1
            if isinstance(error, (OSError, EOFError)):
                raise SessionLostError(f"the slab socket is closed: {error}") from error
            raise
        with self._freed:
            self._all.add(connection)
        return connection

    def _may_take(self) -> bool:
        return bool(self._idle) or self._is_closed or self._connection_count < CONNECTIONS_MAX

    def _give_back(self, connection: TimedSocket) -> None:
        self._idle.append(connection)
        if self._waiting_count or self._is_closed:
            with self._freed:
                self._freed.notify()
            if self._is_closed:
                self.close()

    def _discard(self, connection: TimedSocket) -> None:
        connection.socket.close()
        with self._freed:
            self._all.discard(connection)
            self._connection_count -= 1
            self._freed.notify()
