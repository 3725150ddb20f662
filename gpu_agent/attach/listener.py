"""The attach socket: hands a pool to engines of this node, and knows when they have gone.

Format: docs/formats/agent_attach.md.
"""

from __future__ import annotations

import os
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf

import structlog

from gpu_agent.attach.share import Share
from gpu_agent.attach.word import Word
from kvstore.agent_attach import ATTACH_GOODBYE, ATTACH_HELLO_BYTES, REFUSAL_BYTES_MAX, AttachHello, AttachWelcome
from kvstore.errors import KvstoreError, ProtocolError
from kvstore.keys import NamespaceId
from kvstore.messages import OwnerId
from kvstore.slots import SlotId

_BACKLOG = 128
_SESSION_COUNT_MAX = 256
"""Engines of one machine, with a session each per namespace, and many times more than there are."""
_TICK_S = 0.25
"""How late an expired lease is taken back, and a connection that says nothing is cut off."""
_HELLO_PATIENCE_S = 5.0
_GRACE_S = 2.0
"""After an engine's end, where its process cannot be seen to end (another container): long enough for the driver to
have stopped what it had queued."""
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: unix(7), SO_PEERCRED

_log = structlog.get_logger("kvstore.agent")

FindShare = Callable[[NamespaceId], Share]
"""The share of a namespace that is open; raises a `KvstoreError` when it is not."""


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    since_s: float
    pid: int
    hello: bytearray = field(default_factory=bytearray)
    session: _Session | None = None
    has_stopped: bool = False
    """It has said so: nothing of it copies any more."""


@dataclass(slots=True, eq=False)
class _Session:
    id: OwnerId
    share: Share
    word: Word


@dataclass(slots=True, eq=False)
class _Dying:
    """An engine whose connection is closed, and which may not have stopped writing."""

    share: Share
    slots: list[SlotId]
    pid: int
    """0: the process is in another container, and cannot be seen."""
    process: int | None
    """A pidfd, which is readable when the process is gone; None: not opened yet, or not to be had."""
    free_at_s: float


class AttachListener:
    """One thread that accepts engines, answers their hello, and gives back what they held when they have gone.

    Only processes of this user are attached. A session is never cut off for being slow.
    """

    def __init__(
        self,
        find_share: FindShare,
        *,
        on_tick: Callable[[], None],
        on_bug: Callable[[AssertionError], None],
        patience_s: float = _HELLO_PATIENCE_S,
    ) -> None:
        """`on_tick` is called every quarter of a second or so; `on_bug` when the thread dies of one."""
        self._find_share = find_share
        self._on_tick = on_tick
        self._on_bug = on_bug
        self._patience_s = patience_s
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._connections: set[_Connection] = set()
        self._session_ids: set[OwnerId] = set()
        self._dying: set[_Dying] = set()
        self._is_accepting = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kvstore-agent-attach", daemon=True)

    def listen(self, address: str) -> int:
        """Binds `unix:/path`, for this user alone. Raises `OSError` when that cannot be."""
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
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._accept_again()
        self._thread.start()

    def stop(self) -> None:
        """Ends all sessions. May be called more than once, and without `start`."""
        if self._is_stopping:
            return
        self._is_stopping = True
        self._wake_sender.send(b"x")
        if self._thread.is_alive():
            self._thread.join()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._selector.close()
        self._wake_sender.close()
        self._wake_receiver.close()

    # --- on the thread

    def _run(self) -> None:
        try:
            self._serve_until_stopped()
        except BaseException as error:
            # Engines that die would never be noticed again, and their slots never be free.
            self._on_bug(AssertionError(f"the attach listener died of {type(error).__name__}: {error}"))
            raise

    def _serve_until_stopped(self) -> None:
        next_tick_s = time.monotonic() + _TICK_S
        while not self._is_stopping:
            for key, _ in self._selector.select(max(0.0, next_tick_s - time.monotonic())):
                match key.data:
                    case _Connection():
                        self._serve(key.data)
                    case _Dying():
                        self._bury(key.data)
                    case _ if key.fileobj is self._listener:
                        self._accept()
            if time.monotonic() >= next_tick_s:
                next_tick_s = time.monotonic() + _TICK_S
                self._tick()
        for connection in tuple(self._connections):
            self._close(connection)
        for dying in tuple(self._dying):
            self._bury(dying)

    def _tick(self) -> None:
        now_s = time.monotonic()
        for connection in tuple(self._connections):
            if connection.session is None and now_s - connection.since_s > self._patience_s:
                self._refuse(connection, f"no hello in {self._patience_s:g} s")
        for dying in tuple(self._dying):
            if dying.free_at_s <= now_s:
                self._bury(dying)
            elif dying.process is None and dying.pid > 0:
                self._watch(dying)
        self._accept_again()
        self._on_tick()

    def _accept_again(self) -> None:
        if self._listener is not None and not self._is_accepting:
            self._is_accepting = True
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        assert self._listener is not None, "accepts without listening"
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # out of descriptors: those that wait are taken a little later
            _log.warning("accept_failed", reason=error.strerror)
            self._is_accepting = False
            self._selector.unregister(self._listener)
            return
        accepted.setblocking(False)
        raw = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        pid, uid, _ = _PEER_CREDENTIALS.unpack(raw)
        connection = _Connection(accepted, time.monotonic(), pid)
        self._connections.add(connection)
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        if uid not in (os.getuid(), 0):
            self._refuse(connection, f"user {uid} may not use this agent")
        elif len(self._connections) > _SESSION_COUNT_MAX:
            self._refuse(connection, f"{_SESSION_COUNT_MAX} engines are attached, the most there may be")

    def _serve(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(ATTACH_HELLO_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(connection)
            return
        connection.hello += data
        if len(connection.hello) == ATTACH_HELLO_BYTES:
            self._attach(connection)
        elif len(connection.hello) > ATTACH_HELLO_BYTES:
            connection.has_stopped = connection.session is not None and data == ATTACH_GOODBYE
            self._close(connection)

    def _attach(self, connection: _Connection) -> None:
        try:
            hello = AttachHello.decode(bytes(connection.hello))
            if hello.session_id in self._session_ids:
                raise ProtocolError("a session of that id is attached")
            share = self._find_share(hello.namespace_id)
            word = Word()
        except (KvstoreError, OSError) as error:
            self._refuse(connection, str(error))
            return
        share.begin(hello.session_id, word)
        self._session_ids.add(hello.session_id)
        connection.session = _Session(hello.session_id, share, word)
        descriptors: list[int] = []
        try:
            descriptors = [word.open_read_only()]
            pool, size_bytes = share.handle.descriptor, share.handle.slot_count * share.handle.block_bytes
            welcome = AttachWelcome(pool_bytes=0 if pool is None else size_bytes)
            sent = descriptors if pool is None else [*descriptors, pool]
            socket.send_fds(connection.socket, [welcome.encode()], sent)
        except OSError as error:
            _log.warning("attach_failed", reason=error.strerror)
            self._close(connection)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _refuse(self, connection: _Connection, reason: str) -> None:
        text = reason.encode()[:REFUSAL_BYTES_MAX]
        with suppress(OSError):
            connection.socket.send(AttachWelcome(refusal_bytes=len(text)).encode() + text)
        self._close(connection)

    def _close(self, connection: _Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        session = connection.session
        if session is None:
            return
        self._session_ids.remove(session.id)
        slots = session.share.end(session.id)
        session.word.close()
        if connection.has_stopped:
            session.share.free(slots)
        elif slots:
            self._wait_gone(session.share, slots, pid=connection.pid)

    def _wait_gone(self, share: Share, slots: list[SlotId], *, pid: int) -> None:
        """It has said nothing, so the kernel has closed the connection of a dying engine, and the GPU may go on."""
        grace_until_s = time.monotonic() + _GRACE_S
        dying = _Dying(share, slots, pid, None, free_at_s=inf if pid > 0 else grace_until_s)
        self._dying.add(dying)
        if pid > 0:
            self._watch(dying)

    def _watch(self, dying: _Dying) -> None:
        """Nothing but the word of the kernel that there is no such process frees the slots of one that can be seen."""
        try:
            dying.process = os.pidfd_open(dying.pid)
        except ProcessLookupError:
            self._bury(dying)
        except OSError as error:  # no descriptors, no memory: tried again at the next tick
            _log.warning("attach_process_unseen", pid=dying.pid, reason=error.strerror)
        else:
            self._selector.register(dying.process, selectors.EVENT_READ, dying)

    def _bury(self, dying: _Dying) -> None:
        if dying not in self._dying:
            return
        self._dying.remove(dying)
        if dying.process is not None:
            self._selector.unregister(dying.process)
            os.close(dying.process)
        dying.share.free(dying.slots)
