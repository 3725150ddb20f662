"""Blocks over the daemon's data port. Format: docs/formats/bulk.md."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator

from kvstore.bulk import (
    BLOCK_HEADER_BYTES,
    REPLY_BYTES,
    BlockHeader,
    BulkStatus,
    Direction,
    TransferReply,
    TransferRequest,
)
from kvstore.envelope import ENVELOPE_BYTES, Buffer, checksum
from kvstore.errors import DeadlineExceededError, ProtocolError, UnavailableError
from kvstore.messages import BlockState, CommitState, Ticket
from kvstore_client.envelopes import enveloped_state
from kvstore_client.flows.steps import Fetch, Send
from kvstore_client.paths.link import Link, tune
from kvstore_client.paths.mover import TransferRefusedError

_IDLE_COUNT_MAX = 8
"""Connections that are kept for later; more threads than that connect anew each time."""
_SEND_BYTES = 1 << 20
"""Smaller blocks are sent together, up to about this."""
_REFUSAL_BYTES_MAX = 4096
_REFUSAL_WAIT_S = 0.5
"""How long to look for the reason when the daemon has ended a transfer: it was sent before the end."""


class BulkMover:
    """A `Mover` over TCP, one connection per thread that moves blocks at the same time.

    Bytes go from the socket into the caller's memory and back without a copy in between; each block is verified
    while the kernel receives the next one.
    """

    def __init__(self, host: str, port: int, *, ssl_context: ssl.SSLContext | None = None) -> None:
        self._host = host
        self._port = port
        self._ssl_context = ssl_context
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._busy: set[Link] = set()
        self._is_closed = False
        self._pid = os.getpid()

    def fetch(self, step: Fetch) -> list[BlockState]:
        with self._transfer(step.timeout_s) as link:
            request = TransferRequest(
                direction=Direction.READ, ticket=Ticket(step.ticket), block_count=len(step.hashes)
            )
            link.send([request.encode()])
            following_bytes = _check_reply(link, block_count=len(step.hashes))
            return _receive_blocks(link, step, following_bytes=following_bytes)

    def send(self, step: Send) -> list[CommitState]:
        with self._transfer(step.timeout_s) as link:
            try:
                _send_blocks(link, step)
            except TimeoutError:
                raise
            except OSError:
                link.set_deadline(time.monotonic() + _REFUSAL_WAIT_S)
                _check_reply(link, block_count=len(step.hashes))
                raise
            following_bytes = _check_reply(link, block_count=len(step.hashes))
            if following_bytes != len(step.hashes):
                raise ProtocolError(f"{following_bytes} bytes of commit states for {len(step.hashes)} blocks")
            try:
                return [CommitState(state) for state in link.receive(len(step.hashes))]
            except ValueError as error:
                raise ProtocolError(f"commit states: {error}") from error

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for link in idle:
            link.close()
        for link in busy:
            link.shut_down()

    @contextlib.contextmanager
    def _transfer(self, timeout_s: float) -> Iterator[Link]:
        """A connection for one transfer, kept for the next one when all went well; translates what went wrong."""
        deadline_s = time.monotonic() + timeout_s
        try:
            link = self._take(deadline_s)
            try:
                link.set_deadline(deadline_s, stall_s=timeout_s)
                yield link
            except BaseException:
                self._drop(link)
                raise
            self._give_back(link)
        except TimeoutError as late:
            raise DeadlineExceededError(f"data port of {self._host}:{self._port}: {late}, {timeout_s:g} s") from late
        except OSError as error:
            raise UnavailableError(f"data port of {self._host}:{self._port}: {error.strerror or error}") from error

    def _take(self, deadline_s: float) -> Link:
        with self._lock:
            self._refuse_when_closed()
            if self._pid != os.getpid():
                # The parent's connections, of which this process has copies; closing these does not end those.
                self._idle, self._busy, self._pid = [], set(), os.getpid()
            while self._idle:
                link = self._idle.pop()
                if link.is_quiet():
                    self._busy.add(link)
                    return link
                link.close()  # by the daemon, meanwhile
        link = self._connect(deadline_s)
        try:
            with self._lock:
                self._refuse_when_closed()
                self._busy.add(link)
        except UnavailableError:
            link.close()
            raise
        return link

    def _refuse_when_closed(self) -> None:
        if self._is_closed:
            raise UnavailableError("the client is closed")

    def _connect(self, deadline_s: float) -> Link:
        timeout_s = max(deadline_s - time.monotonic(), 0.001)
        failure: OSError = OSError(f"no address for {self._host}")
        for family, kind, protocol, _, address in socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            try:
                tune(sock)
                sock.settimeout(timeout_s)
                sock.connect(address)
                if self._ssl_context is not None:
                    sock = self._ssl_context.wrap_socket(sock, server_hostname=self._host)
                return Link(sock, stall_s=timeout_s)
            except OSError as error:
                sock.close()
                failure = error  # such as ::1 for `localhost`, where the daemon has 127.0.0.1
        raise failure

    def _give_back(self, link: Link) -> None:
        with self._lock:
            self._busy.discard(link)
            if not self._is_closed and len(self._idle) < _IDLE_COUNT_MAX:
                self._idle.append(link)
                return
        link.close()

    def _drop(self, link: Link) -> None:
        with self._lock:
            self._busy.discard(link)
        link.close()


def _check_reply(link: Link, *, block_count: int) -> int:
    """Returns how many bytes follow."""
    reply = TransferReply.decode(link.receive(REPLY_BYTES))
    if reply.status is not BulkStatus.OK:
        text = link.receive(min(reply.following_bytes, _REFUSAL_BYTES_MAX)).decode(errors="replace")
        kind = TransferRefusedError if reply.status is BulkStatus.REFUSED else UnavailableError
        raise kind(f"the data port refuses: {text}")
    if reply.block_count != block_count:
        raise ProtocolError(f"a transfer of {reply.block_count} blocks; asked for {block_count}")
    return reply.following_bytes


def _receive_blocks(link: Link, step: Fetch, *, following_bytes: int) -> list[BlockState]:
    states: list[BlockState] = []
    received_bytes = 0
    link.expect(following_bytes)
    payload_bytes = step.namespace.stored_bytes
    header = memoryview(bytearray(BLOCK_HEADER_BYTES))
    envelope = memoryview(bytearray(ENVELOPE_BYTES))
    link.receive_into([header])
    for position, (block_hash, target) in enumerate(zip(step.hashes, step.targets, strict=True)):
        found = BlockHeader.decode(bytes(header))
        if found.position != position:
            raise ProtocolError(f"block header for position {found.position}; expected {position}")
        if found.size_bytes not in (0, ENVELOPE_BYTES + payload_bytes):
            raise ProtocolError(
                f"block {position} has {found.size_bytes} bytes; the namespace gives {ENVELOPE_BYTES + payload_bytes}"
            )
        parts = [envelope, target] if found.size_bytes else []
        if position < len(step.hashes) - 1:
            parts.append(header)
        link.receive_into(parts)
        received_bytes += BLOCK_HEADER_BYTES + found.size_bytes
        if not found.size_bytes:
            states.append(BlockState.MISS)
            continue
        states.append(
            enveloped_state(
                envelope,
                namespace=step.namespace,
                block_hash=block_hash,
                payload_bytes=payload_bytes,
                payload_checksum=checksum(target),
            )
        )
    if received_bytes != following_bytes:
        raise ProtocolError(f"{received_bytes} bytes have come; the reply says {following_bytes}")
    return states


def _send_blocks(link: Link, step: Send) -> None:
    """Each block leaves as soon as its checksum is known; the daemon receives and hashes earlier ones meanwhile."""
    request = TransferRequest(
        direction=Direction.WRITE,
        ticket=Ticket(step.ticket),
        block_count=len(step.hashes),
        following_bytes=sum(BLOCK_HEADER_BYTES + ENVELOPE_BYTES + len(block) for block in step.blocks),
    )
    link.send([request.encode()])  # the daemon redeems the ticket while the first block is hashed
    parts: list[Buffer] = []
    gathered_bytes = 0
    last = len(step.hashes) - 1
    for position, (block_hash, block) in enumerate(zip(step.hashes, step.blocks, strict=True)):
        payload_checksum = checksum(block) if step.checksum_of is None else step.checksum_of(position)
        envelope = step.namespace.envelopes.encode(block_hash, payload_checksum=payload_checksum)
        parts += [BlockHeader(position, ENVELOPE_BYTES + len(block)).encode(), envelope, block]
        gathered_bytes += len(block)
        if gathered_bytes >= _SEND_BYTES or position == last:
            link.send(parts)
            parts, gathered_bytes = [], 0
