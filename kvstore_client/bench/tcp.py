"""The limit between processes that share no memory: one TCP connection, blocks as they are, no checksums.

`python -m kvstore_client.bench.tcp SPEC` measures, a JSON object; it starts `… serve SPEC`, the other end. A block
travels as a header of 16 bytes and its bytes: `sendmsg` from where it lies, `recv_into` with MSG_WAITALL to where it
belongs, both ends in memory that was faulted in before.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from kvstore.errors import UnavailableError
from kvstore_client.bench.batches import Batches
from kvstore_client.bench.processes import spawn, stop
from kvstore_client.bench.subject import serve

_HEADER = struct.Struct("<QQ")
_REQUEST = struct.Struct("<QQ")
_GET, _PUT = 1, 2
_DONE = b"."


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpSpec:
    block_count: int
    block_bytes: int
    batch_count: int
    seed: int

    def command(self) -> list[str]:
        return [sys.executable, "-m", "kvstore_client.bench.tcp", json.dumps(asdict(self))]


def _views(memory: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> list[list[memoryview]]:
    return [[memoryview(block) for block in batch] for batch in memory]


def _send_block(connection: socket.socket, *, number: int, block: memoryview) -> None:
    header = _HEADER.pack(number, len(block))
    sent_bytes = connection.sendmsg([header, block])
    while sent_bytes < len(header) + len(block):
        if sent_bytes < len(header):
            sent_bytes += connection.send(header[sent_bytes:], socket.MSG_MORE)
        else:
            sent_bytes += connection.send(block[sent_bytes - len(header) :])


def _receive(connection: socket.socket, target: memoryview) -> None:
    received_bytes = 0
    while received_bytes < len(target):
        count = connection.recv_into(target[received_bytes:], 0, socket.MSG_WAITALL)
        if not count:
            raise UnavailableError("the other end of the TCP connection has closed it")
        received_bytes += count


def _receive_block(connection: socket.socket, *, header: memoryview, number: int, target: memoryview) -> None:
    _receive(connection, header)
    if _HEADER.unpack(header) != (number, len(target)):
        raise UnavailableError(f"a TCP header says {_HEADER.unpack(header)}, expected {(number, len(target))}")
    _receive(connection, target)


class TcpSubject:
    """`put` and `get` of batches to and from the memory of another process, one that this one starts."""

    def __init__(self, spec: TcpSpec) -> None:
        self._memory = Batches(**asdict(spec))
        self._sources, self._targets = _views(self._memory.source), _views(self._memory.target)
        self._header = memoryview(bytearray(_HEADER.size))
        command = [sys.executable, "-m", "kvstore_client.bench.tcp", "serve", json.dumps(asdict(spec))]
        self._server = spawn(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        try:
            assert self._server.stdout is not None
            port = int(self._server.stdout.readline())
            self._connection = socket.create_connection(("127.0.0.1", port))
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for batch in range(spec.batch_count):
                self.run("put", batch)
            self.check()
        except BaseException:
            stop(self._server)
            raise

    def prepare(self, action: str, batches: Sequence[int]) -> None:
        pass

    def run(self, action: str, batch: int) -> None:
        if action == "put":
            self._connection.sendall(_REQUEST.pack(_PUT, batch))
            for number, block in enumerate(self._sources[batch]):
                _send_block(self._connection, number=number, block=block)
            if self._connection.recv(1) != _DONE:
                raise UnavailableError("the TCP server did not confirm a batch")
        else:
            self._connection.sendall(_REQUEST.pack(_GET, batch))
            for number, target in enumerate(self._targets[batch]):
                _receive_block(self._connection, header=self._header, number=number, target=target)

    def check(self) -> None:
        batches = range(len(self._sources))
        self._memory.clear(batches)
        for batch in batches:
            self.run("get", batch)
        self._memory.check(batches)

    def facts(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        self._connection.close()
        stop(self._server)


def _serve_one(spec: TcpSpec) -> None:
    """Keeps the batches of one connection, until that ends."""
    slots = _views(np.full((spec.batch_count, spec.block_count, spec.block_bytes), 1, dtype=np.uint8))
    header = memoryview(bytearray(_HEADER.size))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while request := connection.recv(_REQUEST.size, socket.MSG_WAITALL):
            action, batch = _REQUEST.unpack(request)
            for number, slot in enumerate(slots[batch]):
                if action == _PUT:
                    _receive_block(connection, header=header, number=number, target=slot)
                else:
                    _send_block(connection, number=number, block=slot)
            if action == _PUT:
                connection.sendall(_DONE)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve_one(TcpSpec(**json.loads(sys.argv[2])))
    else:
        serve(lambda: TcpSubject(TcpSpec(**json.loads(sys.argv[1]))))
