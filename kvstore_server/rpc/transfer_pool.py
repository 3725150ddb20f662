"""Processes that serve the data port beside the daemon, and what the daemon tells them."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog

from kvstore.bulk import TransferRequest
from kvstore.errors import KvstoreError
from kvstore.slab import Access
from kvstore_server.rpc.bulk_server import CONNECTION_COUNT_MAX, STALL_S
from kvstore_server.rpc.transfer_messages import (
    Kind,
    Message,
    MessageReader,
    decode_finish_read,
    decode_finish_write,
    decode_number,
    encode_number,
    encode_transfer,
)
from kvstore_server.rpc.transfer_worker import WorkerSettings
from kvstore_server.rpc.transfers import Refusal, Transfer, TransferId, Transfers
from kvstore_server.shm.arenas import Arenas

_WORKER_COUNT_AUTO_MAX = 4
"""One of them moves 2 to 3 GB/s; four are more than a 100 Gbit/s link."""
_CORES_PER_WORKER = 3
"""Half of them at most for transfers, at 1.5 cores each with their checksums: the engine needs the others."""
_CORES_MIN = 6
"""With fewer, one worker would only add its way to the daemon and back."""
_READ_BYTES = 256 << 10
_RESTART_S_MIN = 0.1
_RESTART_S_MAX = 5.0
_START_S_MAX = 10.0
_STEADY_S = 10.0
"""A worker that has lived so long is started anew at once when it ends."""

_log = structlog.get_logger("kvstore.bulk")


def worker_count(setting: int | None, *, cores: int) -> int:
    """How many workers to start; 0: the daemon moves the blocks itself. None as a setting chooses by the cores."""
    if setting is not None:
        return setting
    return 0 if cores < _CORES_MIN else min(cores // _CORES_PER_WORKER, _WORKER_COUNT_AUTO_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    worker_count: int
    transfer_s_max: float
    stall_s: float = STALL_S
    connection_count_max: int = CONNECTION_COUNT_MAX
    """Of all workers together."""
    log_level: str
    log_format: str


class TransferPool:
    """Workers that all accept on one listening socket. One that ends is replaced, and its transfers are abandoned.

    Lives on the event loop, as `Transfers` does.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        transfers: Transfers,
        arenas: Arenas,
        settings: PoolSettings,
        on_bug: Callable[[AssertionError], None],
    ) -> None:
        self._listener = listener
        self._transfers = transfers
        self._arenas = arenas
        self._settings = settings
        self._on_bug = on_bug
        self._workers: list[_Worker | None] = [None] * settings.worker_count
        self._restarts: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._serving = asyncio.Event()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers if worker is not None]

    def start(self) -> None:
        for place in range(self._settings.worker_count):
            self._start_worker(place, pause_s=_RESTART_S_MIN)

    async def wait_until_serving(self) -> None:
        """Returns when the first worker accepts connections, or has taken too long: clients can do without."""
        try:
            async with asyncio.timeout(_START_S_MAX):
                await self._serving.wait()
        except TimeoutError:
            _log.warning("transfer_workers_slow", waited_s=_START_S_MAX)

    async def stop(self, *, grace_s: float) -> None:
        """Takes no more transfers, lets running ones finish for so long, then cuts them off."""
        self._is_stopping = True
        for restart in self._restarts:
            restart.cancel()
        ended = [worker.ended.wait() for worker in self._workers if worker is not None]
        for worker in self._workers:
            if worker is not None:
                worker.stop(grace_s=grace_s)
        try:
            async with asyncio.timeout(grace_s + _RESTART_S_MAX):
                await asyncio.gather(*ended)
        except TimeoutError:
            for worker in self._workers:
                if worker is not None:
                    worker.process.kill()
            await asyncio.gather(*(worker.ended.wait() for worker in self._workers if worker is not None))
        self._listener.close()

    def sweep(self) -> None:
        """Ends workers that have been stopped in the middle of a transfer, whose threads cannot end it themselves."""
        oldest_s = time.monotonic() - self._settings.transfer_s_max - 2 * self._settings.stall_s
        for worker in self._workers:
            if worker is not None and any(begun_s < oldest_s for begun_s in worker.transfers.values()):
                _log.error("transfer_worker_hangs", pid=worker.process.pid)
                worker.process.kill()

    def _start_worker(self, place: int, *, pause_s: float) -> None:
        daemon_end, worker_end = socket.socketpair()
        with worker_end:
            settings = WorkerSettings(
                listener_fd=self._listener.fileno(),
                daemon_fd=worker_end.fileno(),
                arena_bytes=self._arenas.arena_bytes,
                transfer_s_max=self._settings.transfer_s_max,
                stall_s=self._settings.stall_s,
                connection_count_max=-(-self._settings.connection_count_max // self._settings.worker_count),
                log_level=self._settings.log_level,
                log_format=self._settings.log_format,
            )
            command = [sys.executable, "-P", "-m", "kvstore_server.rpc.transfer_worker", settings.encode()]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(settings.listener_fd, settings.daemon_fd)
            )
        self._workers[place] = _Worker(
            process,
            daemon_end,
            transfers=self._transfers,
            arenas=self._arenas,
            on_bug=self._on_bug,
            on_ready=self._serving.set,
            on_end=partial(self._replace, place=place, pause_s=pause_s),
        )
        _log.info("transfer_worker_started", pid=process.pid)

    def _replace(self, worker: _Worker, *, place: int, pause_s: float) -> None:
        self._workers[place] = None
        if self._is_stopping:
            return
        is_steady = time.monotonic() - worker.started_s > _STEADY_S
        pause_s = _RESTART_S_MIN if is_steady else pause_s
        _log.warning("transfer_worker_ended", pid=worker.process.pid, next_start_s=pause_s)

        async def restart() -> None:
            await asyncio.sleep(pause_s)
            self._start_worker(place, pause_s=min(2 * pause_s, _RESTART_S_MAX))

        task = asyncio.ensure_future(restart())
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)


class _Worker:
    """One process, and the daemon's end of the connection to it."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        connection: socket.socket,
        *,
        transfers: Transfers,
        arenas: Arenas,
        on_bug: Callable[[AssertionError], None],
        on_ready: Callable[[], None],
        on_end: Callable[[_Worker], None],
    ) -> None:
        self.process = process
        self.started_s = time.monotonic()
        self.ended = asyncio.Event()
        self.transfers: dict[TransferId, float] = {}
        """When each one that runs in this worker has begun."""
        self._books = transfers
        self._arenas = arenas
        self._on_bug = on_bug
        self._on_ready = on_ready
        self._on_end = on_end
        self._connection = connection
        self._reader = MessageReader()
        # What the socket has not taken yet, each with the descriptor that goes with its first byte.
        self._unsent: deque[tuple[memoryview, int | None]] = deque()
        self._is_over = False
        self._loop = asyncio.get_running_loop()
        connection.setblocking(False)
        self._loop.add_reader(connection.fileno(), self._on_readable)

    def stop(self, *, grace_s: float) -> None:
        # Rounded up, for 0 means that the daemon is no more.
        self._send(Message(Kind.STOP, 0, encode_number(int(grace_s * 1000) + 1)))

    def _on_readable(self) -> None:
        try:
            data = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end()
            return
        try:
            for message in self._reader.feed(data):
                self._handle(message)
        except AssertionError as bug:
            self._on_bug(bug)

    def _handle(self, message: Message) -> None:
        match message.kind:
            case Kind.REDEEM:
                self._redeem(message)
            case Kind.FINISH_READ:
                transfer_id, sent_count = decode_finish_read(message.body)
                del self.transfers[transfer_id]
                self._books.finish_read(transfer_id, sent_count=sent_count)
            case Kind.FINISH_WRITE:
                transfer_id, landings = decode_finish_write(message.body)
                del self.transfers[transfer_id]
                states = self._books.finish_write(transfer_id, landings)
                self._send(Message(Kind.STATES, message.number, states))
            case Kind.ARENA:
                descriptor = self._arenas.descriptor(decode_number(message.body), Access.WRITE)
                self._send(Message(Kind.MAPPED, message.number, b""), descriptor=descriptor)
            case Kind.READY:
                self._on_ready()
            case _:
                raise AssertionError(f"a worker sent {message.kind.name}")

    def _redeem(self, message: Message) -> None:
        def answer(outcome: Transfer | Refusal) -> None:
            if isinstance(outcome, Refusal):
                self._send(Message(Kind.REFUSED, message.number, outcome.reason.encode()))
                return
            if self._is_over:  # while it waited for its turn
                self._books.abandon(outcome.transfer_id)
                return
            self.transfers[outcome.transfer_id] = time.monotonic()
            indexes = {block.place // self._arenas.arena_bytes for block in outcome.blocks if block.size_bytes}
            incarnations = {index: self._arenas.incarnation(index) for index in indexes}
            self._send(Message(Kind.TRANSFER, message.number, encode_transfer(outcome, incarnations)))

        try:
            self._books.redeem(TransferRequest.decode(message.body), answer)
        except KvstoreError as error:
            self._send(Message(Kind.REFUSED, message.number, str(error).encode()))

    def _send(self, message: Message, *, descriptor: int | None = None) -> None:
        self._unsent.append((memoryview(message.encode()), descriptor))
        if len(self._unsent) == 1:
            self._on_writable()

    def _on_writable(self) -> None:
        while self._unsent and not self._is_over:
            data, descriptor = self._unsent[0]
            try:
                if descriptor is None:
                    sent_bytes = self._connection.send(data)
                else:
                    sent_bytes = socket.send_fds(self._connection, [data], [descriptor])
            except BlockingIOError:
                self._loop.add_writer(self._connection.fileno(), self._on_writable)
                return
            except OSError:
                return  # it has ended, which the reading end tells
            if descriptor is not None:
                os.close(descriptor)
            if sent_bytes < len(data):
                self._unsent[0] = (data[sent_bytes:], None)
            else:
                self._unsent.popleft()
        self._loop.remove_writer(self._connection.fileno())

    def _end(self) -> None:
        """The process is no more, or cannot be talked to; then it shall be no more."""
        self._is_over = True
        self._loop.remove_reader(self._connection.fileno())
        self._loop.remove_writer(self._connection.fileno())
        self._connection.close()
        for _, descriptor in self._unsent:
            if descriptor is not None:
                os.close(descriptor)
        self.process.kill()
        reaping = self._loop.run_in_executor(None, self.process.wait)
        reaping.add_done_callback(lambda _: self._after_end())

    def _after_end(self) -> None:
        # Only now does nobody write into the slots any more.
        try:
            for transfer_id in list(self.transfers):
                del self.transfers[transfer_id]
                self._books.abandon(transfer_id)
        except AssertionError as bug:
            self._on_bug(bug)
        self.ended.set()
        self._on_end(self)
