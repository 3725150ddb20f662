"""One connection of the data port, for either end: blocking, whole buffers at a time, never longer than told."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence

from kvstore.envelope import Buffer

SOCKET_BUFFER_BYTES = 4 << 20
"""Two blocks of 2 MiB: one end may hash a block while the kernel moves the next. Measured 1.3 to 1.6 times as fast
as the system's default, and no slower than 1 or 2 MiB."""

_WAKE_BYTES = 3 << 19
"""How much must have come before a receiver wakes up, while enough is to come: 1.2 to 1.3 times as fast over loopback
as waking up for every piece. Three blocks of 512 KiB, or 3/4 of one of 2 MiB; far below the buffer, so that the
sender never waits for it."""
_RESET_TIMEOUT_S = 0.05
"""How much later than its deadline a call may end."""
_TLS_JOIN_BYTES_MAX = 64 << 10
"""Smaller pieces are copied together, to share TLS records."""
_TLS_WRITE_BYTES = 1 << 20
"""What one write takes, so that a slow peer is not taken for a stalled one."""
_SCRATCH_BYTES = 64 << 10
_TIMEVAL = struct.Struct("@ll")
_IOVEC_COUNT_MAX = 1024  # IOV_MAX of Linux


def tune(sock: socket.socket) -> None:
    """Sets up a TCP socket before it listens or connects; what it accepts inherits all of it.

    Large buffers only where the system grants them in full: asking for more than net.core.rmem_max or wmem_max gives
    less than what the kernel finds by itself.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        with socket.socket(sock.family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
            is_granted = probe.getsockopt(socket.SOL_SOCKET, option) >= SOCKET_BUFFER_BYTES
        if is_granted:
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)


class Link:
    """A connected stream socket, plain or TLS.

    Its calls move all that they were given and let go of the interpreter meanwhile. They raise `TimeoutError` when
    nothing moves for `stall_s` or the deadline has passed, and `ConnectionError` or another `OSError` when the peer
    has gone; the stream is good for nothing then. `shut_down` may come from any thread.
    """

    def __init__(self, sock: socket.socket, *, stall_s: float) -> None:
        self._socket = sock
        self._stall_s = stall_s
        self._deadline_s: float | None = None
        self._expected_bytes = 0
        self._wake_bytes = 1
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        sock.settimeout(None)
        self._set_timeout(stall_s)

    def set_deadline(self, deadline_s: float | None, *, stall_s: float | None = None) -> None:
        """Until when, by `time.monotonic`, further calls may take; they start to count as stalled after `stall_s`."""
        self._deadline_s = deadline_s
        self._stall_s = self._stall_s if stall_s is None else stall_s
        self._set_timeout(self._stall_s)

    def expect(self, size_bytes: int) -> None:
        """That many bytes are sure to come, and further calls may wait for many of them at once."""
        self._expected_bytes = size_bytes

    def receive(self, size_bytes: int) -> bytes:
        data = bytearray(size_bytes)
        self.receive_into([memoryview(data)])
        return bytes(data)

    def receive_into(self, targets: Sequence[memoryview]) -> None:
        """Fills the targets one after the other."""
        left = list(targets)
        self._expected_bytes -= sum(map(len, left))
        # What comes after this call must be enough to wake it up at its own end.
        self._wake_at(_WAKE_BYTES if self._expected_bytes >= _WAKE_BYTES else 1)
        while left:
            self._bound()
            moved_bytes = self._receive_some(left)
            if not moved_bytes:
                raise ConnectionResetError("the peer has closed the connection")
            left = _rest(left, moved_bytes)

    def send(self, parts: Sequence[Buffer]) -> None:
        if self._tls is not None:
            self._send_encrypted(self._tls, parts)
            return
        left = [memoryview(part) for part in parts]
        while left:
            self._bound()
            try:
                moved_bytes = self._socket.sendmsg(left[:_IOVEC_COUNT_MAX])
            except BlockingIOError as late:
                raise _stalled() from late
            left = _rest(left, moved_bytes)

    def is_quiet(self) -> bool:
        """Whether the peer has neither sent anything that nobody has read nor closed the connection."""
        if self._tls is not None and self._tls.pending():
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLRDHUP)
        return not poll.poll(0)

    def end(self, *, within_s: float) -> None:
        """Ends what we send and passes over what still comes: closing before would take back what was sent last."""
        self.set_deadline(time.monotonic() + within_s)
        scratch = [memoryview(bytearray(_SCRATCH_BYTES))]
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
            self._wake_at(1)
            while self._receive_some(scratch):
                self._bound()

    def shut_down(self) -> None:
        """Ends what is under way, here and at the peer."""
        with contextlib.suppress(OSError):  # the peer was faster, or it is closed
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _receive_some(self, targets: list[memoryview]) -> int:
        try:
            if self._tls is not None:
                return self._tls.recv_into(targets[0])
            return self._socket.recvmsg_into(targets[:_IOVEC_COUNT_MAX], 0, socket.MSG_WAITALL)[0]
        except BlockingIOError as late:
            raise _stalled() from late

    def _send_encrypted(self, tls: ssl.SSLSocket, parts: Sequence[Buffer]) -> None:
        small = bytearray()
        for part in parts:
            if len(small) + len(part) <= _TLS_JOIN_BYTES_MAX:
                small += part
                continue
            view = memoryview(part)
            pieces = [view[at : at + _TLS_WRITE_BYTES] for at in range(0, len(view), _TLS_WRITE_BYTES)]
            for piece in (memoryview(small), *pieces):
                self._bound()
                tls.sendall(piece)
            small = bytearray()
        self._bound()
        tls.sendall(small)

    def _wake_at(self, size_bytes: int) -> None:
        if size_bytes != self._wake_bytes and self._tls is None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)
            self._wake_bytes = size_bytes

    def _bound(self) -> None:
        """Makes sure that the next call ends with the deadline."""
        if self._deadline_s is None:
            return
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the transfer has taken too long")
        if left_s < self._timeout_s - _RESET_TIMEOUT_S:
            self._set_timeout(left_s)

    def _set_timeout(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        if self._tls is not None:
            self._tls.settimeout(timeout_s)
            return
        # The kernel's own timeouts, for Python's make the socket non-blocking: then a block would come in many pieces.
        whole_s = int(timeout_s)
        value = _TIMEVAL.pack(whole_s, max(int((timeout_s - whole_s) * 1e6), 1))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def _stalled() -> TimeoutError:
    return TimeoutError("the peer has stalled")


def _rest(views: list[memoryview], moved_bytes: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if moved_bytes < len(view):
            return [view[moved_bytes:], *views[index + 1 :]]
        moved_bytes -= len(view)
    return []
