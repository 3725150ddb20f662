"""One attachment to an agent's pool: the memory, mapped, and the connection that holds what is granted.

Format: docs/formats/agent_attach.md.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from kvstore.agent_attach import ATTACH_GOODBYE, ATTACH_WELCOME_BYTES, AttachHello, AttachWelcome
from kvstore.errors import DeadlineExceededError, ProtocolError, UnavailableError
from kvstore.messages import OpenAgentNamespaceResponse
from kvstore.namespace import Namespace
from kvstore_client.forks import mend_after_fork
from kvstore_client.ids import new_owner_id

_DESCRIPTOR_COUNT_MAX = 2
_RELEASED_COUNT_MAX = 64


class AgentSession:
    """While its connection is open the agent keeps what it has granted in this session's name. For many threads.

    The pool stays mapped for as long as anything looks into it.
    """

    def __init__(self, namespace: Namespace, opened: OpenAgentNamespaceResponse, *, timeout_s: float) -> None:
        """Attaches. Raises `UnavailableError`, `DeadlineExceededError` or `ProtocolError`."""
        self.id = new_owner_id()
        self.namespace = namespace
        self.opened = opened
        self.memory: memoryview | None = None
        """The pool where it is host memory; None: it is on a GPU."""
        self.tensor: Any = None
        """What its user has made of the pool. Let go of when the session ends, since a GPU's memory is not free before
        the last process has closed it, also when the agent has long gone."""
        self.released: deque[int] = deque(maxlen=_RELEASED_COUNT_MAX)
        """Leases whose end the agent may not have heard of yet."""
        self._lock = threading.Lock()
        self._user_count = 0
        self._is_closed = False
        self._socket = socket.socket(socket.AF_UNIX)
        mend_after_fork(self)  # before it connects: the fork may come in the middle of that
        try:
            self._socket.settimeout(timeout_s)
            self._attach()
            self._socket.setblocking(True)
        except BaseException as error:
            self._socket.close()
            match error:
                case TimeoutError():
                    raise DeadlineExceededError(f"attaching to the agent took longer than {timeout_s:g} s") from error
                case OSError() | EOFError():
                    reason = getattr(error, "strerror", None) or "closed"
                    raise UnavailableError(f"{opened.attach_socket}: {reason}") from error
            raise

    def is_alive(self) -> bool:
        """False once the agent has ended, or has ended the session; costs one system call."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def is_good(self, lease_number: int) -> bool:
        """Whether slots of this lease hold what they held when it was granted."""
        return self._expired[0] < lease_number and self.is_alive()

    def slot(self, place: int) -> memoryview | None:
        """Where the pool is host memory."""
        if self.memory is None:
            return None
        block_bytes = self.opened.block_bytes
        return self.memory[place * block_bytes : (place + 1) * block_bytes]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Around copies: the session stays open until the last one ends, and so do its slots stay its own."""
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the session with the agent is closed")
            self._user_count += 1
        try:
            yield
        finally:
            with self._lock:
                self._user_count -= 1
            self._close_when_unused()

    def close(self) -> None:
        """Gives back all that the session holds, once no copy is under way."""
        with self._lock:
            self._is_closed = True
        self._close_when_unused()

    def after_fork(self) -> None:
        """For the child: the session is its parent's, and must end with it."""
        self._lock = threading.Lock()
        self._socket.close()

    def _close_when_unused(self) -> None:
        with self._lock:
            if self._is_closed and not self._user_count and self._socket.fileno() >= 0:
                with suppress(OSError):  # the agent has gone
                    self._socket.send(ATTACH_GOODBYE, socket.MSG_DONTWAIT)
                self._socket.close()
                self.tensor = None

    def _attach(self) -> None:
        opened = self.opened
        self._socket.connect(opened.attach_socket)
        self._socket.sendall(AttachHello(session_id=self.id, namespace_id=opened.namespace_id).encode())
        data, descriptors, _, _ = socket.recv_fds(self._socket, ATTACH_WELCOME_BYTES, _DESCRIPTOR_COUNT_MAX)
        try:
            welcome = AttachWelcome.decode(data + self._receive(ATTACH_WELCOME_BYTES - len(data)))
            if welcome.refusal_bytes:
                reason = self._receive(welcome.refusal_bytes).decode(errors="replace")
                raise UnavailableError(f"the agent does not attach this engine: {reason}")
            self._map(welcome, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _map(self, welcome: AttachWelcome, descriptors: list[int]) -> None:
        is_host = welcome.pool_bytes > 0
        if len(descriptors) != 1 + is_host:
            raise ProtocolError(f"the agent has handed out {len(descriptors)} descriptors; expected {1 + is_host}")
        page = mmap.mmap(descriptors[0], mmap.PAGESIZE, prot=mmap.PROT_READ)
        self._expired = memoryview(page).cast("Q")
        if is_host:
            pool_bytes = self.opened.slot_count * self.opened.block_bytes
            if not welcome.pool_bytes == pool_bytes <= os.fstat(descriptors[1]).st_size:
                raise ProtocolError(f"a pool of {welcome.pool_bytes} bytes; expected {pool_bytes}")
            self.memory = memoryview(mmap.mmap(descriptors[1], pool_bytes))

    def _receive(self, size_bytes: int) -> bytes:
        whole = bytearray()
        while len(whole) < size_bytes:
            data = self._socket.recv(size_bytes - len(whole))
            if not data:
                raise EOFError
            whole += data
        return bytes(whole)
