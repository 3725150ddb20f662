"""The limit of a lookup: as many bytes over a unix socket between two processes that do nothing with them."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from kvstore.errors import UnavailableError
from kvstore.keys import HASH_BYTES
from kvstore_client.bench.processes import spawn, stop
from kvstore_client.bench.subject import serve

_ANSWER_BYTES_PER_HASH = 2
"""A state and a tier."""


def command() -> list[str]:
    return [sys.executable, "-m", "kvstore_client.bench.ping"]


class PingSubject:
    """`ping` with the request of so many hashes, and an answer as long as a lookup's."""

    def __init__(self) -> None:
        self._parts = ExitStack()
        ours, theirs = socket.socketpair()
        self._socket = self._parts.enter_context(ours)
        with theirs:
            fd = theirs.fileno()
            process = spawn([*command(), str(fd)], stdin=subprocess.DEVNULL, pass_fds=(fd,))
        self._parts.callback(stop, process)

    def prepare(self, action: str, batches: Sequence[int]) -> None:
        self._requests = {count: count.to_bytes(4, "little") + bytes(count * HASH_BYTES) for count in batches}
        self._answer = memoryview(bytearray(max(batches) * _ANSWER_BYTES_PER_HASH))

    def run(self, action: str, batch: int) -> None:
        size_bytes = batch * _ANSWER_BYTES_PER_HASH
        self._socket.sendall(self._requests[batch])
        if self._socket.recv_into(self._answer[:size_bytes], 0, socket.MSG_WAITALL) != size_bytes:
            raise UnavailableError("the other end of the ping has ended")

    def check(self) -> None:
        """There is nothing to be right or wrong."""

    def facts(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        self._parts.close()


def answer(connection: socket.socket) -> None:
    """The other end."""
    while head := connection.recv(4, socket.MSG_WAITALL):
        count = int.from_bytes(head, "little")
        connection.recv(count * HASH_BYTES, socket.MSG_WAITALL)
        connection.sendall(bytes(count * _ANSWER_BYTES_PER_HASH))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        with socket.socket(fileno=int(sys.argv[1])) as inherited:
            answer(inherited)
    else:
        serve(PingSubject)
