"""RPCs on CALLS connections of the slab socket, for asyncio. Format: docs/formats/slab.md."""

from __future__ import annotations

import asyncio
import itertools
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvstore.errors import ProtocolError, UnavailableError
from kvstore.messages import OwnerId
from kvstore.slab import CALL_HEADER_BYTES, WELCOME_BYTES, Access, CallHeader, ConnectionKind, Hello, Welcome
from kvstore.wire import Method
from kvstore_client.paths.slab_calls import (
    CONNECTIONS_MAX,
    METHOD_CODES,
    RECEIVE_BYTES,
    SessionLostError,
    check_welcome,
    decode_answer,
    too_late,
)


class AsyncCallPool:
    """`CallPool` for the tasks of the loop that it is made in."""

    def __init__(self, path: Path, *, session_id: OwnerId) -> None:
        self.loop = asyncio.get_running_loop()
        self._path = path
        self._hello = Hello(kind=ConnectionKind.CALLS, access=Access.READ, session_id=session_id)
        self._idle: list[socket.socket] = []
        self._all: set[socket.socket] = set()
        self._free = asyncio.Semaphore(CONNECTIONS_MAX)
        self._numbers = itertools.count(1)
        self._is_closed = False

    async def call(self, method: Method[Any, Any], request: Any, *, timeout_s: float) -> Any:
        """One RPC. Raises `SessionLostError` when the daemon has closed the connection."""
        body = method.encode_request(request)
        number = next(self._numbers)
        data = CallHeader(len(body), METHOD_CODES[method.name], False, number).encode() + body
        try:
            async with asyncio.timeout(timeout_s), self._free:
                header, answer = await self._exchange(data)
        except TimeoutError as error:
            raise too_late(method.name, timeout_s) from error
        except (EOFError, OSError) as error:
            if self._is_closed:
                raise UnavailableError("the client is closed") from error
            raise SessionLostError(f"{method.name}: the daemon has closed the slab socket") from error
        return decode_answer(header, answer, method, call_number=number)

    def post(self, method: Method[Any, Any], request: Any) -> None:
        """One RPC without an answer; dropped when it cannot leave at once."""
        if not self._idle:
            return
        body = method.encode_request(request)
        data = CallHeader(len(body), METHOD_CODES[method.name], True, next(self._numbers)).encode() + body
        connection = self._idle.pop()
        try:
            is_whole = connection.send(data) == len(data)
        except OSError:
            is_whole = False
        if is_whole:
            self._idle.append(connection)
        else:
            self._discard(connection)

    def close(self) -> None:
        """Ends calls under way in other tasks."""
        self._is_closed = True
        for connection in tuple(self._all):
            with suppress(OSError):  # the daemon was first
                connection.shutdown(socket.SHUT_RDWR)
        while self._idle:
            self._discard(self._idle.pop())

    async def _exchange(self, data: bytes) -> tuple[CallHeader, bytes]:
        connection = self._idle.pop() if self._idle else await self._connect()
        try:
            await self.loop.sock_sendall(connection, data)
            answer = await self._receive_call(connection)
        except BaseException:
            # Half a call may be under way: nothing else may be said on this connection.
            self._discard(connection)
            raise
        if self._is_closed:
            self._discard(connection)
        else:
            self._idle.append(connection)
        return answer

    async def _connect(self) -> socket.socket:
        if self._is_closed:
            raise UnavailableError("the client is closed")
        connection = socket.socket(socket.AF_UNIX)
        self._all.add(connection)
        try:
            connection.setblocking(False)
            await self.loop.sock_connect(connection, str(self._path))
            with suppress(BrokenPipeError):  # refused already; the answer says why
                await self.loop.sock_sendall(connection, self._hello.encode())
            answer = await self._receive(connection, WELCOME_BYTES)
            check_welcome(answer, await self._receive(connection, Welcome.decode(answer).refusal_bytes))
        except BaseException:
            self._discard(connection)
            raise
        return connection

    async def _receive(self, connection: socket.socket, size_bytes: int) -> bytes:
        whole = bytearray(size_bytes)
        await self._fill(connection, memoryview(whole))
        return bytes(whole)

    async def _fill(self, connection: socket.socket, target: memoryview) -> None:
        while target:
            count = await self.loop.sock_recv_into(connection, target)
            if not count:
                raise EOFError
            target = target[count:]

    async def _receive_call(self, connection: socket.socket) -> tuple[CallHeader, bytes]:
        data = b""
        while len(data) < CALL_HEADER_BYTES:
            more = await self.loop.sock_recv(connection, RECEIVE_BYTES)
            if not more:
                raise EOFError
            data += more
        header = CallHeader.decode(data[:CALL_HEADER_BYTES])
        missing_bytes = CALL_HEADER_BYTES + header.body_bytes - len(data)
        if missing_bytes < 0:
            raise ProtocolError(f"{-missing_bytes} bytes behind an answer")
        if missing_bytes:
            data += await self._receive(connection, missing_bytes)
        return header, data[CALL_HEADER_BYTES:]

    def _discard(self, connection: socket.socket) -> None:
        self._all.discard(connection)
        connection.close()


class AsyncCalls:
    """The pools of one client: one per session and loop."""

    def __init__(self) -> None:
        self._pools: dict[OwnerId, AsyncCallPool] = {}

    def pool(self, path: Path, session_id: OwnerId) -> AsyncCallPool:
        found = self._pools.get(session_id)
        if found is None or found.loop is not asyncio.get_running_loop():
            if found is not None:
                found.close()
            found = self._pools[session_id] = AsyncCallPool(path, session_id=session_id)
        return found

    def forget(self, session_id: OwnerId) -> None:
        pool = self._pools.pop(session_id, None)
        if pool is not None:
            pool.close()

    def close(self) -> None:
        for session_id in tuple(self._pools):
            self.forget(session_id)
