"""Redis: a client written for the purpose, and redis-py with hiredis."""

from __future__ import annotations

import shutil

from peer import Peer, PipelinedPeer, connect, free_port

from kvstore.errors import UnavailableError
from kvstore_client.bench.redis_mget import encode


class _Redis(Peer):
    def start_redis(self) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise UnavailableError("there is no redis-server; on Debian and Ubuntu: apt-get install redis-server")
        self.path, self.port = self.folder / "redis.sock", free_port()
        command = [program, "--port", str(self.port), "--unixsocket", str(self.path), "--dir", str(self.folder)]
        command += ["--save", "", "--appendonly", "no"]
        self.start_server(command, is_ready=self.path.exists)


class RedisRaw(_Redis, PipelinedPeer):
    def start(self) -> None:
        self.start_redis()
        size = b"%d" % self.spec.block_bytes
        self.converse(
            connect(self.port if self.spec.network == "tcp" else self.path),
            put_head=lambda key: b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%b\r\n" % (len(key), key, size),
            get_command=lambda key: encode([b"GET", key]),
            get_head=b"$%b\r\n" % size,
            stored=b"+OK\r\n",
        )


class RedisPy(_Redis):
    """MSET and MGET of a batch; the blocks are copied to where the caller wants them."""

    def start(self) -> None:
        self.start_redis()
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
