"""memcached, with a client written for the purpose: meta commands, whole batches pipelined."""

from __future__ import annotations

import os
import shutil

from peer import Peer, accepts, connect, free_port, receive, send

from kvstore.errors import UnavailableError

# In use, twice over, and what memcached keeps for itself.
_ROOM = 2.5
_STORED = b"HD\r\n"


class Memcached(Peer):
    def start(self) -> None:
        program = shutil.which("memcached")
        if program is None:
            raise UnavailableError("there is no memcached; on Debian and Ubuntu: apt-get install memcached")
        path, port = self.folder / "memcached.sock", free_port()
        kept_bytes = self.spec.batch_count * self.spec.block_count * self.spec.block_bytes
        is_tcp = self.spec.network == "tcp"
        command = [
            program,
            *(("-l", "127.0.0.1", "-p", str(port)) if is_tcp else ("-s", str(path))),
            "-t",
            "2",
            "-m",
            str(64 + int(kept_bytes * _ROOM) // (1 << 20)),
        ]
        command += ["-I", str(max(self.spec.block_bytes * 2, 1 << 20))]
        command += ["-u", "root"] if os.getuid() == 0 else []
        self.start_server(command, is_ready=(lambda: accepts(port)) if is_tcp else path.exists)
        self.connection = self.parts.enter_context(connect(port if is_tcp else path))
        size = self.spec.block_bytes
        self.set_heads = [
            [b"ms %b %d\r\n" % (key.encode(), size) for key in self.keys(batch)]
            for batch in range(self.spec.batch_count)
        ]
        self.get_commands = [
            b"".join(b"mg %b v\r\n" % key.encode() for key in self.keys(batch))
            for batch in range(self.spec.batch_count)
        ]
        self.get_head = b"VA %d\r\n" % size
        self.answer = memoryview(bytearray(len(_STORED) * self.spec.block_count))
        self.head = memoryview(bytearray(len(self.get_head)))
        self.tail = memoryview(bytearray(2))

    def put(self, batch: int) -> None:
        parts: list[memoryview | bytes] = []
        for head, block in zip(self.set_heads[batch], self.sources[batch], strict=True):
            parts += [head, block, b"\r\n"]
        send(self.connection, parts)
        receive(self.connection, self.answer)
        if self.answer != _STORED * self.spec.block_count:
            raise UnavailableError(f"memcached answered {bytes(self.answer)!r}")

    def get(self, batch: int) -> None:
        self.connection.sendall(self.get_commands[batch])
        for target in self.targets[batch]:
            receive(self.connection, self.head)
            if self.head != self.get_head:
                raise UnavailableError(f"memcached answered {bytes(self.head)!r}")
            receive(self.connection, target)
            receive(self.connection, self.tail)
