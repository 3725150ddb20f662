"""A process that serves the data port beside the daemon: `python -P -m kvstore_server.rpc.transfer_worker SETTINGS`.

It maps the daemon's arenas and asks the daemon, over a socket pair, what may move; it ends with that connection.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass

from kvstore.bulk import TransferRequest
from kvstore.errors import UnavailableError
from kvstore.slab import SLOT_HEADER_BYTES
from kvstore_client.logs import configure_logs
from kvstore_server.core.space import Place
from kvstore_server.rpc.bulk_server import BulkServer
from kvstore_server.rpc.transfer_messages import (
    Incarnations,
    Kind,
    Message,
    MessageReader,
    decode_number,
    decode_transfer,
    encode_finish_read,
    encode_finish_write,
    encode_number,
)
from kvstore_server.rpc.transfers import Landing, Refusal, Transfer, TransferId

_READ_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a worker is told when it starts; the descriptors are inherited."""

    listener_fd: int
    daemon_fd: int
    arena_bytes: int
    transfer_s_max: float
    stall_s: float
    connection_count_max: int
    log_level: str
    log_format: str

    def encode(self) -> str:
        return json.dumps(asdict(self))


class ArenaMaps:
    """The daemon's arenas as this process has mapped them."""

    def __init__(self, *, arena_bytes: int) -> None:
        self._arena_bytes = arena_bytes
        self._maps: dict[int, tuple[int, memoryview]] = {}

    def stale(self, incarnations: Incarnations) -> list[int]:
        """The arenas whose present memory is not mapped."""
        return [index for index, one in incarnations.items() if self._maps.get(index, (None,))[0] != one]

    def map(self, index: int, fd: int, *, incarnation: int) -> None:
        """Takes the descriptor over."""
        try:
            self._maps[index] = (incarnation, memoryview(mmap.mmap(fd, self._arena_bytes)))
        finally:
            os.close(fd)

    def view(self, place: Place, size_bytes: int) -> memoryview:
        """The envelope and payload of a slot."""
        index, start = divmod(place, self._arena_bytes)
        start += SLOT_HEADER_BYTES
        return self._maps[index][1][start : start + size_bytes]


class PipeDesk:
    """A desk at the other end of a socket pair."""

    def __init__(self, daemon: socket.socket, maps: ArenaMaps) -> None:
        self._daemon = daemon
        self._maps = maps
        self._mapping = threading.Lock()
        self._descriptors: deque[int] = deque()
        self._grace_s: Future[float] = Future()
        # Guards the socket's writing end and what follows.
        self._lock = threading.Lock()
        self._last_number = 0
        self._answers: dict[int, Future[Message]] = {}
        self._is_over = False
        threading.Thread(target=self._listen, name="kvstore-transfer-desk", daemon=True).start()

    def wait_for_stop(self) -> float:
        """Returns how long transfers may go on: what the daemon says, or 0 when it is no more."""
        return self._grace_s.result()

    def redeem(self, request: TransferRequest) -> Transfer | Refusal:
        answer = self._ask(Kind.REDEEM, request.encode())
        if answer.kind is Kind.REFUSED:
            return Refusal(reason=answer.body.decode())
        transfer, incarnations = decode_transfer(answer.body)
        with self._mapping:
            for index in self._maps.stale(incarnations):
                self._ask(Kind.ARENA, encode_number(index))
                self._maps.map(index, self._descriptors.popleft(), incarnation=incarnations[index])
        return transfer

    def finish_read(self, transfer_id: TransferId, *, sent_count: int) -> None:
        with self._lock:
            self._send(Message(Kind.FINISH_READ, 0, encode_finish_read(transfer_id, sent_count=sent_count)))

    def finish_write(self, transfer_id: TransferId, landings: Sequence[Landing] | None) -> bytes:
        answer = self._ask(Kind.FINISH_WRITE, encode_finish_write(transfer_id, landings))
        if answer.kind is Kind.REFUSED:
            raise UnavailableError(answer.body.decode())
        return answer.body

    def tell_ready(self) -> None:
        with self._lock:
            self._send(Message(Kind.READY, 0, b""))

    def _listen(self) -> None:
        reader = MessageReader()
        while data := self._receive():
            for message in reader.feed(data):
                if message.kind is Kind.STOP:
                    self._grace_s.set_result(decode_number(message.body) / 1000)
                else:
                    self._answers.pop(message.number).set_result(message)
        with self._lock:
            self._is_over = True
            unanswered, self._answers = self._answers, {}
        for answer in unanswered.values():
            answer.set_exception(UnavailableError("the daemon has stopped"))
        if not self._grace_s.done():
            self._grace_s.set_result(0.0)

    def _receive(self) -> bytes:
        """Empty when the daemon is no more. Descriptors come with the first bytes of what they belong to."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._daemon, _READ_BYTES, 1)
        except OSError:
            return b""
        self._descriptors += descriptors
        return data

    def _ask(self, kind: Kind, body: bytes) -> Message:
        with self._lock:
            self._last_number += 1
            number = self._last_number
            answer = self._answers[number] = Future()
            self._send(Message(kind, number, body))
        return answer.result()

    def _send(self, message: Message) -> None:
        if self._is_over:
            raise UnavailableError("the daemon has stopped")
        try:
            self._daemon.sendall(message.encode())
        except OSError as error:
            raise UnavailableError("the daemon has stopped") from error


def main(settings: WorkerSettings) -> None:
    # Who stops a whole group of processes means the daemon, which stops us when it has let transfers finish.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    configure_logs(level=settings.log_level, log_format=settings.log_format)
    daemon = socket.socket(fileno=settings.daemon_fd)
    maps = ArenaMaps(arena_bytes=settings.arena_bytes)
    desk = PipeDesk(daemon, maps)
    server = BulkServer(
        socket.socket(fileno=settings.listener_fd),
        desk=desk,
        view=maps.view,
        transfer_s_max=settings.transfer_s_max,
        stall_s=settings.stall_s,
        connection_count_max=settings.connection_count_max,
    )
    server.start()
    with contextlib.suppress(UnavailableError):  # the daemon is no more; that is what we wait for next
        desk.tell_ready()
    grace_s = desk.wait_for_stop()
    if grace_s:
        server.stop(grace_s=grace_s)
    # Threads that are left serve nobody, and what they held ends with our connection to the daemon.
    os._exit(0)


if __name__ == "__main__":
    main(WorkerSettings(**json.loads(sys.argv[1])))
