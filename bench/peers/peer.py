"""What the peers have in common: memory, servers of their own, and how they are told what to do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from kvstore.errors import UnavailableError
from kvstore_client.bench.batches import Batches
from kvstore_client.bench.processes import spawn, stop

START_S_MAX = 60.0
LOG_TAIL_BYTES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSpec:
    """Which peer, and what it moves."""

    peer: str
    network: str
    """`unix` or `tcp`: how the client reaches its server."""
    block_count: int
    block_bytes: int
    batch_count: int
    seed: int

    def command(self) -> list[str]:
        return [sys.executable, str(Path(__file__).with_name("worker.py")), json.dumps(asdict(self))]


class Peer(ABC):
    """A `Subject`: `put` and `get` of batches, to and from a server that this process starts and ends."""

    def __init__(self, spec: PeerSpec) -> None:
        self.spec = spec
        self.memory = Batches(
            batch_count=spec.batch_count, block_count=spec.block_count, block_bytes=spec.block_bytes, seed=spec.seed
        )
        self.sources = [[memoryview(block) for block in batch] for batch in self.memory.source]
        self.targets = [[memoryview(block) for block in batch] for batch in self.memory.target]
        self.parts = ExitStack()
        self.folder = Path(self.parts.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-peer-")))
        try:
            self.start()
            for batch in range(spec.batch_count):
                self.prepare("put", [batch])
                self.put(batch)
            self.check()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def start(self) -> None:
        """Starts the server and connects."""

    @abstractmethod
    def put(self, batch: int) -> None:
        """From `sources`, under `keys`."""

    @abstractmethod
    def get(self, batch: int) -> None:
        """Into `targets`."""

    def keys(self, batch: int) -> list[str]:
        return [f"bench:{batch}:{block}" for block in range(self.spec.block_count)]

    def prepare(self, action: str, batches: Sequence[int]) -> None:  # noqa: B027  (most need nothing)
        """What a put or get needs and is not measured."""

    def run(self, action: str, batch: int) -> None:
        self.put(batch) if action == "put" else self.get(batch)

    def check(self) -> None:
        batches = range(self.spec.batch_count)
        self.memory.clear(batches)
        for batch in batches:
            self.get(batch)
        self.memory.check(batches)

    def facts(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        self.parts.close()

    def start_server(self, command: list[str], *, is_ready: Callable[[], bool], **environment: str) -> None:
        """Runs until this process ends; returns once `is_ready` says so."""
        log = self.folder / "server.log"
        with log.open("ab") as output:
            server = spawn(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, **environment}
            )
        self.parts.callback(stop, server)
        deadline_s = time.monotonic() + START_S_MAX
        while not is_ready():
            if server.poll() is not None or time.monotonic() > deadline_s:
                raise UnavailableError(
                    f"{command[0]} did not start: {log.read_text(errors='replace')[-LOG_TAIL_BYTES:]}"
                )
            time.sleep(0.02)


class PipelinedPeer(Peer):
    """A text protocol with a client written for it: whole batches pipelined, blocks sent from and received into their
    place, no parsing of what is known before."""

    def converse(
        self,
        connection: socket.socket,
        *,
        put_head: Callable[[bytes], bytes],
        get_command: Callable[[bytes], bytes],
        get_head: bytes,
        stored: bytes,
    ) -> None:
        """What precedes a block on its way there, asks for it, precedes it on its way back, and says it is stored."""
        batches = [[key.encode() for key in self.keys(batch)] for batch in range(self.spec.batch_count)]
        self.connection = self.parts.enter_context(connection)
        self.put_heads = [[put_head(key) for key in keys] for keys in batches]
        self.get_commands = [b"".join(get_command(key) for key in keys) for keys in batches]
        self.get_head = get_head
        self.stored = stored * self.spec.block_count
        self.answer = memoryview(bytearray(len(self.stored)))
        self.head = memoryview(bytearray(len(get_head)))
        self.tail = memoryview(bytearray(2))

    def put(self, batch: int) -> None:
        parts: list[memoryview | bytes] = []
        for head, block in zip(self.put_heads[batch], self.sources[batch], strict=True):
            parts += [head, block, b"\r\n"]
        send(self.connection, parts)
        receive(self.connection, self.answer)
        if self.answer != self.stored:
            raise UnavailableError(f"a put was answered with {bytes(self.answer)!r}")

    def get(self, batch: int) -> None:
        self.connection.sendall(self.get_commands[batch])
        for target in self.targets[batch]:
            receive(self.connection, self.head)
            if self.head != self.get_head:
                raise UnavailableError(f"a get was answered with {bytes(self.head)!r}")
            receive(self.connection, target)
            receive(self.connection, self.tail)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


def connect(where: Path | int) -> socket.socket:
    """To a unix socket, or to a TCP port of this machine."""
    if isinstance(where, Path):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(where))
        return connection
    connection = socket.create_connection(("127.0.0.1", where))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def receive(connection: socket.socket, target: memoryview) -> None:
    """Fills the target."""
    received_bytes = 0
    while received_bytes < len(target):
        count = connection.recv_into(target[received_bytes:], 0, socket.MSG_WAITALL)
        if not count:
            raise UnavailableError("the server has closed the connection")
        received_bytes += count


def send(connection: socket.socket, parts: list[memoryview | bytes]) -> None:
    """Sends all of the parts, without joining them."""
    views = [memoryview(part) for part in parts]
    while views:
        sent_bytes = connection.sendmsg(views[:1024])
        while views and sent_bytes >= len(views[0]):
            sent_bytes -= len(views.pop(0))
        if sent_bytes:
            views[0] = views[0][sent_bytes:]
