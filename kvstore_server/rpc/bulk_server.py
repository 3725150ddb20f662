"""The data port: a thread per connection moves blocks between socket and slots. Format: docs/formats/bulk.md."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import structlog

from kvstore.bulk import (
    BLOCK_HEADER_BYTES,
    REQUEST_BYTES,
    BlockHeader,
    BulkStatus,
    Direction,
    TransferReply,
    TransferRequest,
)
from kvstore.envelope import Buffer
from kvstore.errors import KvstoreError, ProtocolError
from kvstore.messages import CommitState
from kvstore_client.paths.link import Link, tune
from kvstore_server.core.space import Place
from kvstore_server.core.verdict import verdict
from kvstore_server.rpc.transfers import Desk, GrantedBlock, Landing, Refusal, Transfer

CONNECTION_COUNT_MAX = 64
"""Threads, then; a client has one connection per thread that transfers, and the idle ones give way."""
STALL_S = 10.0
"""How long a peer may keep a transfer waiting before it is cut off and its blocks are free again."""
IDLE_S = 300.0
"""How long a connection is kept between transfers."""

_BACKLOG = 128
_SEND_BYTES = 1 << 20
"""Smaller blocks are sent together, up to about this: a call per block would cost more than moving it."""
_INLINE_BYTES_MAX = 256 << 10
"""Smaller blocks are hashed in 25 us at most, which handing them to another thread costs, too."""
_REFUSAL_S = 1.0
"""How long a peer may take to learn that it is refused; it may be sending blocks meanwhile."""
_ACCEPT_PAUSE_S = 0.1
"""Between tries when the system has no descriptors left."""

_log = structlog.get_logger("kvstore.bulk")

View = Callable[[Place, int], memoryview]
"""The envelope and payload at a place."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, tuned for blocks; raises `OSError`."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        tune(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


class BulkServer:
    """Serves a listening socket until it is stopped. A peer that is slow, stopped or hostile costs one thread."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        desk: Desk,
        view: View,
        transfer_s_max: float,
        hash_threads: int = 1,
        connection_count_max: int = CONNECTION_COUNT_MAX,
        stall_s: float = STALL_S,
        idle_s: float = IDLE_S,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._listener = listener
        self._desk = desk
        self._view = view
        self._transfer_s_max = transfer_s_max
        self._connection_count_max = connection_count_max
        self._stall_s = stall_s
        self._idle_s = idle_s
        self._ssl_context = ssl_context
        self._hashing = ThreadPoolExecutor(hash_threads, thread_name_prefix="kvstore-bulk-hash")
        self._acceptor = threading.Thread(target=self._accept, name="kvstore-bulk-accept", daemon=True)
        self._stopping = threading.Event()
        # Guards what follows. A connection is in `_idle` while it waits for a request, longest first.
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, Link | None] = {}
        self._idle: dict[Link, None] = {}

    def start(self) -> None:
        self._acceptor.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def stop(self, *, grace_s: float) -> None:
        """Takes no more transfers, lets running ones finish for so long, then cuts them off; blocks until all end."""
        self._stopping.set()
        with contextlib.suppress(OSError):  # a listener that workers share may have been shut by one of them
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the acceptor; closing does not
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            idle, threads = list(self._idle), list(self._connections)
        for link in idle:
            link.shut_down()
        deadline_s = time.monotonic() + grace_s
        for thread in threads:
            thread.join(max(deadline_s - time.monotonic(), 0.0))
        with self._lock:
            links = [link for link in self._connections.values() if link is not None]
        for link in links:
            link.shut_down()
        for thread in threads:
            thread.join()
        self._hashing.shutdown()

    # --- connections

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                # Shut down, or the peer has gone already, or the system is short of something for now.
                self._stopping.wait(_ACCEPT_PAUSE_S)
                continue
            if not self._has_room():
                _refuse(sock, f"the data port has {self._connection_count_max} transfers running; try again")
                continue
            thread = threading.Thread(target=self._serve, args=(sock,), name="kvstore-bulk", daemon=True)
            with self._lock:
                self._connections[thread] = None
            try:
                thread.start()
            except RuntimeError:
                with self._lock:
                    del self._connections[thread]
                _refuse(sock, "the daemon can have no more threads; try again")
                self._stopping.wait(_ACCEPT_PAUSE_S)

    def _has_room(self) -> bool:
        """Whether one more connection may come; the one that has been idle for longest gives way to it."""
        with self._lock:
            if len(self._connections) < self._connection_count_max:
                return True
            oldest = next(iter(self._idle), None)
            if oldest is None:
                return False
            del self._idle[oldest]
        oldest.shut_down()
        return True

    def _serve(self, sock: socket.socket) -> None:
        thread = threading.current_thread()
        try:
            with contextlib.closing(self._secured(sock)) as link:
                with self._lock:
                    self._connections[thread] = link
                while self._serve_transfer(link):
                    pass
        except OSError as error:
            _log.info("transfer_cut", reason=str(error))
        except KvstoreError as error:
            _log.warning("transfer_refused", reason=str(error))
        except Exception:  # noqa: BLE001  (one connection's thread; the daemon's other callers go on)
            _log.exception("transfer_failed")
        finally:
            with self._lock:
                del self._connections[thread]

    def _secured(self, sock: socket.socket) -> Link:
        if self._ssl_context is None:
            return Link(sock, stall_s=self._idle_s)
        try:
            sock.settimeout(self._stall_s)
            return Link(self._ssl_context.wrap_socket(sock, server_side=True), stall_s=self._idle_s)
        except OSError:
            sock.close()
            raise

    def _serve_transfer(self, link: Link) -> bool:
        """Waits for a request and answers it; False when the connection has done its work."""
        link.set_deadline(None, stall_s=self._idle_s)
        with self._lock:
            self._idle[link] = None
        try:
            try:
                if self._stopping.is_set():  # since before we were seen to be idle
                    return False
                request = TransferRequest.decode(link.receive(REQUEST_BYTES))
            finally:
                with self._lock:
                    self._idle.pop(link, None)
        except (ConnectionError, TimeoutError):
            return False  # that is how connections end
        except ProtocolError as error:
            _send_refusal(link, str(error))
            raise
        link.set_deadline(time.monotonic() + self._transfer_s_max, stall_s=self._stall_s)
        if self._stopping.is_set():
            _send_refusal(link, "the daemon is shutting down", status=BulkStatus.BUSY)
            return False
        try:
            transfer = self._desk.redeem(request)
        except KvstoreError as error:
            _send_refusal(link, str(error), status=BulkStatus.BUSY)
            raise
        if isinstance(transfer, Refusal):
            _send_refusal(link, transfer.reason)
            return False
        if request.direction is Direction.READ:
            self._send_blocks(link, transfer)
            return not self._stopping.is_set()
        try:
            states = self._receive_blocks(link, transfer, following_bytes=request.following_bytes)
        except ProtocolError as error:
            _send_refusal(link, str(error))
            raise
        link.send([TransferReply(BulkStatus.OK, len(states), len(states)).encode(), states])
        return not self._stopping.is_set()

    # --- blocks

    def _send_blocks(self, link: Link, transfer: Transfer) -> None:
        sent_count = 0
        try:
            following_bytes = sum(BLOCK_HEADER_BYTES + block.size_bytes for block in transfer.blocks)
            parts: list[Buffer] = [TransferReply(BulkStatus.OK, len(transfer.blocks), following_bytes).encode()]
            gathered_bytes = 0
            for position, block in enumerate(transfer.blocks):
                parts.append(BlockHeader(position, block.size_bytes).encode())
                if block.size_bytes:
                    parts.append(self._view(block.place, block.size_bytes))
                gathered_bytes += block.size_bytes
                if gathered_bytes >= _SEND_BYTES or position == len(transfer.blocks) - 1:
                    link.send(parts)
                    parts, gathered_bytes, sent_count = [], 0, position + 1
        finally:
            self._desk.finish_read(transfer.transfer_id, sent_count=sent_count)

    def _receive_blocks(self, link: Link, transfer: Transfer, *, following_bytes: int) -> bytes:
        landings: list[Landing] | None = None
        checks: list[Future[CommitState]] = []
        try:
            link.expect(following_bytes)
            sizes_bytes = self._land(link, transfer, checks)
            _check_total(sizes_bytes, following_bytes)
            landings = [Landing(size, check.result()) for size, check in zip(sizes_bytes, checks, strict=True)]
        finally:
            wait(checks)  # they look into the slots
            states = self._desk.finish_write(transfer.transfer_id, landings)
        return states

    def _land(self, link: Link, transfer: Transfer, checks: list[Future[CommitState]]) -> list[int]:
        """Receives each block while another thread verifies the one before; returns their sizes."""
        sizes_bytes: list[int] = []
        header = memoryview(bytearray(BLOCK_HEADER_BYTES))
        link.receive_into([header])
        for position, slot in enumerate(transfer.blocks):
            size_bytes = _checked_size(header, position, slot)
            targets = [self._view(slot.place, size_bytes)] if size_bytes else []
            if position < len(transfer.blocks) - 1:
                targets.append(header)
            link.receive_into(targets)
            sizes_bytes.append(size_bytes)
            checks.append(self._check(transfer, slot, size_bytes))
        return sizes_bytes

    def _check(self, transfer: Transfer, slot: GrantedBlock, size_bytes: int) -> Future[CommitState]:
        def check() -> CommitState:
            return verdict(
                self._view(slot.place, size_bytes),
                namespace_id=transfer.namespace_id,
                block_hash=slot.block_hash,
                payload_bytes=transfer.payload_bytes,
            )

        if size_bytes > _INLINE_BYTES_MAX:
            return self._hashing.submit(check)
        done: Future[CommitState] = Future()
        done.set_result(check())
        return done


def _checked_size(header: memoryview, position: int, slot: GrantedBlock) -> int:
    found = BlockHeader.decode(bytes(header))
    if found.position != position:
        raise ProtocolError(f"block header for position {found.position}; expected {position}")
    if found.size_bytes > slot.size_bytes:
        raise ProtocolError(f"block {position} has {found.size_bytes} bytes; allowed: {slot.size_bytes}")
    return found.size_bytes


def _check_total(sizes_bytes: list[int], following_bytes: int) -> None:
    received_bytes = sum(BLOCK_HEADER_BYTES + size_bytes for size_bytes in sizes_bytes)
    if received_bytes != following_bytes:
        raise ProtocolError(f"{received_bytes} bytes have come; the request says {following_bytes}")


def _send_refusal(link: Link, reason: str, *, status: BulkStatus = BulkStatus.REFUSED) -> None:
    text = reason.encode()
    with contextlib.suppress(OSError):  # the peer may not wait for it
        link.send([TransferReply(status, 0, len(text)).encode(), text])
        link.end(within_s=_REFUSAL_S)


def _refuse(sock: socket.socket, reason: str) -> None:
    """For a connection that gets no thread: says why without ever waiting."""
    text = reason.encode()
    with contextlib.closing(sock), contextlib.suppress(OSError):
        sock.setblocking(False)
        sock.send(TransferReply(BulkStatus.BUSY, 0, len(text)).encode() + text)
