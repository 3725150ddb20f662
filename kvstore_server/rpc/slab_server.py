"""The slab socket: attaches clients of this node, hands arenas to them, and carries their calls.

Format: docs/formats/slab.md.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import structlog

from kvstore.errors import ProtocolError
from kvstore.messages import Epoch, OwnerId
from kvstore.slab import (
    ARENA_REQUEST_BYTES,
    HELLO_BYTES,
    Access,
    ArenaReply,
    ConnectionKind,
    Hello,
    Welcome,
    decode_arena_request,
)
from kvstore_server.core.in_flight import ClientId
from kvstore_server.core.sessions import SessionLimits, SessionTable
from kvstore_server.core.tenants import Membership, Tenant
from kvstore_server.rpc.caller import Caller
from kvstore_server.rpc.service import StoreService
from kvstore_server.rpc.slab_calls import CallsConnection, OnBug, answerers

_BACKLOG = 1024
"""Clients of all users queue here together; the system may allow fewer."""
_ACCEPTS_PER_TURN = 16
_ACCEPT_PAUSE_S = 0.1
"""How long nobody is accepted after the process has run out of descriptors."""
_PEER_CREDENTIALS = struct.Struct("3i")
"""pid, uid, gid: unix(7), SO_PEERCRED."""

_log = structlog.get_logger("kvstore.slab")

FindMember = Callable[[int], Membership | None]
"""Which tenant a user is and what it may do; None: nobody here."""


class ArenaSource(Protocol):
    """The arenas as this module needs them."""

    @property
    def arena_count(self) -> int: ...

    @property
    def arena_bytes(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...

    def incarnation(self, index: int) -> int: ...

    def descriptor(self, index: int, access: Access) -> int:
        """A new descriptor that allows no more than this; to be closed."""

    def may_be_written_by(self, uid: int) -> bool: ...


ArenaOwner = Callable[[int], Tenant | None]
"""Whose an arena is at this moment; None: nobody's."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Session:
    caller: Caller
    access: Access
    calls: dict[CallsConnection, asyncio.Task[None]] = field(default_factory=dict)


class SlabServer:
    """Serves the slab socket. What a session holds is given back the moment its SESSION connection closes.

    A session is never cut off for being slow: whoever wrote into slots when it was stopped must find them still its
    own when it goes on.
    """

    def __init__(
        self,
        service: StoreService,
        *,
        arenas: ArenaSource,
        arena_owner: ArenaOwner,
        find_member: FindMember,
        epoch: Epoch,
        on_bug: OnBug,
        limits: SessionLimits | None = None,
        patience_s: float = 5.0,
    ) -> None:
        self._service = service
        self._arenas = arenas
        self._arena_owner = arena_owner
        self._find_member = find_member
        self._epoch = epoch
        self._on_bug = on_bug
        self._patience_s = patience_s
        self._answerers = answerers(service)
        self._table = SessionTable(limits or SessionLimits())
        self._sessions: dict[OwnerId, _Session] = {}
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_admitting = True

    @property
    def session_count(self) -> int:
        return self._table.session_count

    @property
    def connection_count(self) -> int:
        return self._table.connection_count

    def listen(self, address: str) -> int:
        """Binds `unix:/path`, for this user alone until its mode is changed. Raises `OSError` when that cannot be."""
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.setblocking(False)
            os.fchmod(listener.fileno(), stat.S_IRUSR | stat.S_IWUSR)  # bind() makes the file with this mode
            listener.bind(address.removeprefix("unix:"))
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        return 1

    def start(self) -> None:
        """Begins to accept connections, on the running loop."""
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def admit_no_more_sessions(self) -> None:
        """Calls of the sessions there are go on."""
        self._is_admitting = False

    async def stop(self, *, grace_s: float) -> None:
        """Takes no new calls, lets running ones finish for so long, then ends all sessions."""
        self.admit_no_more_sessions()
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        calls = {one: task for session in self._sessions.values() for one, task in session.calls.items()}
        for connection in calls:
            connection.close_when_idle()
        if calls:
            await asyncio.wait(calls.values(), timeout=grace_s)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # --- connections

    def _accept(self) -> None:
        assert self._listener is not None, "accepts without listening"
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                connection, _address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.warning("accept_failed", reason=error.strerror)
                loop.remove_reader(self._listener)
                loop.call_later(_ACCEPT_PAUSE_S, self.start)
                return
            connection.setblocking(False)
            task = loop.create_task(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            uid = _peer_uid(connection)
            member = self._find_member(uid)
            if member is None:
                self._refuse(connection, f"user {uid} may not use this store")
                return
            refusal = self._table.connect(uid)
            if refusal is not None:
                self._refuse(connection, refusal)
                return
            try:
                await self._serve_user(connection, uid=uid, member=member)
            except (EOFError, ConnectionError):
                pass  # it left
            except OSError as error:
                _log.warning("slab_client_lost", uid=uid, reason=str(error))
            finally:
                self._table.disconnect(uid)

    async def _serve_user(self, connection: socket.socket, *, uid: int, member: Membership) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                hello = Hello.decode(await _receive(connection, HELLO_BYTES))
        except TimeoutError:
            self._refuse(connection, f"no hello in {self._patience_s:g} s")
        except ProtocolError as error:
            self._refuse(connection, str(error))
        else:
            match hello.kind:
                case ConnectionKind.SESSION:
                    await self._serve_session(connection, hello, uid=uid, member=member)
                case ConnectionKind.CALLS:
                    await self._serve_calls(connection, hello, uid=uid)

    def _welcome(self, connection: socket.socket, access: Access) -> None:
        """Never waits: the socket is new, so the kernel has room for it."""
        welcome = Welcome(
            epoch=self._epoch,
            arena_count=self._arenas.arena_count,
            arena_bytes=self._arenas.arena_bytes,
            access=access,
        )
        connection.send(welcome.encode())

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        _log.info("slab_client_refused", reason=reason)
        text = reason.encode()
        welcome = Welcome(epoch=self._epoch, arena_count=0, arena_bytes=0, access=Access.READ, refusal_bytes=len(text))
        with suppress(OSError):  # it left
            connection.send(welcome.encode() + text)

    # --- SESSION

    async def _serve_session(self, connection: socket.socket, hello: Hello, *, uid: int, member: Membership) -> None:
        if not self._is_admitting:
            self._refuse(connection, "the daemon is stopping")
            return
        session_id = hello.session_id
        refusal = self._table.open_session(session_id, uid=uid)
        if refusal is not None:
            self._refuse(connection, refusal)
            return
        access = hello.access if member.may_write and self._arenas.may_be_written_by(uid) else Access.READ
        caller = Caller(
            tenant=member.tenant,
            client_id=ClientId(session_id.hex()),
            session_id=session_id,
            may_write=access is Access.WRITE,
        )
        self._sessions[session_id] = session = _Session(caller=caller, access=access)
        self._service.begin_session(session_id)
        try:
            self._welcome(connection, access)
            # The kernel bounds how many descriptors wait unread at all receivers together: one or two at each.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
            while True:
                index = decode_arena_request(await _receive(connection, ARENA_REQUEST_BYTES))
                await _wait_writable(connection)
                self._hand_over(connection, index, session)
        except ProtocolError as error:
            _log.info("slab_session_ended", uid=uid, reason=str(error))
        finally:
            # What its calls still do ends first, or they would hold something after all was given back.
            for calls in list(session.calls):
                self._leave(session, calls)
            del self._sessions[session_id]
            self._table.close_session(session_id)
            self._service.end_session(session_id)

    def _hand_over(self, connection: socket.socket, index: int, session: _Session) -> None:
        """Answers an arena request, into a socket that has room for it."""
        if index >= self._arenas.arena_count or self._arena_owner(index) != session.caller.tenant:
            connection.send(ArenaReply(index=index, is_granted=False).encode())
            return
        reply = ArenaReply(
            index=index,
            is_granted=True,
            incarnation=self._arenas.incarnation(index),
            size_bytes=self._arenas.arena_bytes,
            page_bytes=self._arenas.page_bytes,
        )
        descriptor = self._arenas.descriptor(index, session.access)
        try:
            socket.send_fds(connection, [reply.encode()], [descriptor])
        finally:
            os.close(descriptor)

    # --- CALLS

    async def _serve_calls(self, connection: socket.socket, hello: Hello, *, uid: int) -> None:
        refusal = self._table.join_session(hello.session_id, uid=uid)
        if refusal is not None:
            self._refuse(connection, refusal)
            return
        session = self._sessions[hello.session_id]
        calls = CallsConnection(
            answerers=self._answerers,
            caller=session.caller,
            resize=partial(self._table.resize_buffer, uid),
            patience_s=self._patience_s,
            on_bug=self._on_bug,
        )
        task = asyncio.current_task()
        assert task is not None, "connections are served by tasks"
        session.calls[calls] = task
        try:
            self._welcome(connection, session.access)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: calls, connection)
            await calls.wait_closed()
        finally:
            self._leave(session, calls)

    def _leave(self, session: _Session, calls: CallsConnection) -> None:
        """Ends a connection, unless its session has done so already."""
        if session.calls.pop(calls, None) is not None:
            calls.abort()
            assert session.caller.session_id is not None, "a session without an id"
            self._table.leave_session(session.caller.session_id)


def _peer_uid(connection: socket.socket) -> int:
    """Who connected, as the kernel knows it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return int(_PEER_CREDENTIALS.unpack(credentials)[1])


async def _receive(connection: socket.socket, size_bytes: int) -> bytes:
    """Exactly so many bytes; raises `EOFError` when the connection ends before."""
    loop = asyncio.get_running_loop()
    received = b""
    while len(received) < size_bytes:
        more = await loop.sock_recv(connection, size_bytes - len(received))
        if not more:
            raise EOFError("the connection ended")
        received += more
    return received


async def _wait_writable(connection: socket.socket) -> None:
    """Until the peer has read most of what was sent to it, or has gone."""
    loop = asyncio.get_running_loop()
    writable = asyncio.Event()
    loop.add_writer(connection, writable.set)
    try:
        await writable.wait()
    finally:
        loop.remove_writer(connection)
