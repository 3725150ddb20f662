"""Redis: a client written for the purpose, and redis-py with hiredis."""

from __future__ import annotations

import shutil

from peer import Peer, connect, free_port, receive, send

from kvstore.errors import UnavailableError
from kvstore_client.bench.redis_mget import encode

_OK = b"+OK\r\n"


class _Redis(Peer):
    def start(self) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise UnavailableError("there is no redis-server; on Debian and Ubuntu: apt-get install redis-server")
        self.path, self.port = self.folder / "redis.sock", free_port()
        command = [program, "--port", str(self.port), "--unixsocket", str(self.path), "--dir", str(self.folder)]
        command += ["--save", "", "--appendonly", "no"]
        self.start_server(command, is_ready=self.path.exists)


class RedisRaw(_Redis):
    """Whole batches pipelined, blocks sent from and received into their place, no parsing of what is known before."""

    def start(self) -> None:
        super().start()
        self.connection = self.parts.enter_context(connect(self.port if self.spec.network == "tcp" else self.path))
        size = b"%d" % self.spec.block_bytes
        self.set_heads = [
            [b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%b\r\n" % (len(key), key.encode(), size) for key in self.keys(batch)]
            for batch in range(self.spec.batch_count)
        ]
        self.get_commands = [
            b"".join(encode([b"GET", key.encode()]) for key in self.keys(batch))
            for batch in range(self.spec.batch_count)
        ]
        self.get_head = b"$%b\r\n" % size
        self.answer = memoryview(bytearray(len(_OK) * self.spec.block_count))
        self.head = memoryview(bytearray(len(self.get_head)))
        self.tail = memoryview(bytearray(2))

    def put(self, batch: int) -> None:
        parts: list[memoryview | bytes] = []
        for head, block in zip(self.set_heads[batch], self.sources[batch], strict=True):
            parts += [head, block, b"\r\n"]
        send(self.connection, parts)
        receive(self.connection, self.answer)
        if self.answer != _OK * self.spec.block_count:
            raise UnavailableError(f"Redis answered {bytes(self.answer)!r}")

    def get(self, batch: int) -> None:
        self.connection.sendall(self.get_commands[batch])
        for target in self.targets[batch]:
            receive(self.connection, self.head)
            if self.head != self.get_head:
                raise UnavailableError(f"Redis answered {bytes(self.head)!r}")
            receive(self.connection, target)
            receive(self.connection, self.tail)


class RedisPy(_Redis):
    """MSET and MGET of a batch; the blocks are copied to where the caller wants them."""

    def start(self) -> None:
        super().start()
        import redis

        if self.spec.network == "tcp":
            self.client = redis.Redis(port=self.port)
        else:
            self.client = redis.Redis(unix_socket_path=str(self.path))
        self.parts.callback(self.client.close)

    def put(self, batch: int) -> None:
        self.client.mset(dict(zip(self.keys(batch), self.sources[batch], strict=True)))

    def get(self, batch: int) -> None:
        for target, value in zip(self.targets[batch], self.client.mget(self.keys(batch)), strict=True):
            target[:] = value
