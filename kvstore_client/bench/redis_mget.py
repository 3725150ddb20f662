"""MGET from a Redis of its own, in its fastest forms: `python -m kvstore_client.bench.redis_mget KEY_COUNT`.

`redis_raw` writes a command that was built before to a unix socket, receives an answer whose size is known, and
splits it into values. `redis_py` is the package's own `mget`, when it is installed.
"""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from kvstore.errors import UnavailableError
from kvstore_client.bench.blocks import new_hashes
from kvstore_client.bench.processes import scratch_folder, spawn, stop
from kvstore_client.bench.subject import serve

_VALUE = b"location"
_START_S_MAX = 20.0


def command(key_count: int) -> list[str]:
    return [sys.executable, "-m", "kvstore_client.bench.redis_mget", str(key_count)]


def encode(words: Sequence[bytes]) -> bytes:
    """A command in Redis' serialization protocol."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


def _mget(keys: Sequence[bytes]) -> bytes:
    """`encode` of an MGET of keys that are all as long as a hash, as fast as Python can."""
    return b"*%d\r\n$4\r\nMGET\r\n$32\r\n" % (len(keys) + 1) + b"\r\n$32\r\n".join(keys) + b"\r\n"


class RedisSubject:
    """`redis_raw` and `redis_py` of so many keys, all of them there, with values of 8 bytes."""

    def __init__(self, key_count: int) -> None:
        self._keys: list[bytes] = list(new_hashes(key_count))
        self._values: Sequence[object] = ()
        self._parts = ExitStack()
        try:
            self._start()
        except BaseException:
            self._parts.close()
            raise

    def _start(self) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise UnavailableError("there is no redis-server on this machine")
        folder = self._parts.enter_context(scratch_folder())
        path = Path(folder) / "redis.sock"
        arguments = ["--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no", "--dir", folder]
        server = spawn([program, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        self._parts.callback(stop, server)
        deadline_s = time.monotonic() + _START_S_MAX
        while not path.exists():
            if server.poll() is not None or time.monotonic() > deadline_s:
                raise UnavailableError("redis-server did not start")
            time.sleep(0.01)
        self._connection = self._parts.enter_context(socket.socket(socket.AF_UNIX))
        self._connection.connect(str(path))
        self._connection.sendall(encode([b"MSET", *(word for key in self._keys for word in (key, _VALUE))]))
        if self._connection.recv(16) != b"+OK\r\n":
            raise UnavailableError("redis-server did not take the keys")
        self._forms = ["redis_raw"]
        if importlib.util.find_spec("redis") is not None:
            import redis

            client = redis.Redis(unix_socket_path=str(path))
            self._parts.callback(client.close)
            self._mget = client.mget
            self._forms.append("redis_py")
        self.check()

    def prepare(self, action: str, batches: Sequence[int]) -> None:
        answer_bytes = {count: len(encode([_VALUE] * count)) for count in batches}
        self._answers = {count: memoryview(bytearray(size)) for count, size in answer_bytes.items()}
        self._prompts = {count: self._keys[:count] for count in batches}

    def run(self, action: str, batch: int) -> None:
        if action == "redis_py":
            self._values = self._mget(self._prompts[batch])
        else:
            self._connection.sendall(_mget(self._prompts[batch]))
            answer = self._answers[batch]
            self._connection.recv_into(answer, 0, socket.MSG_WAITALL)
            self._values = bytes(answer).split(b"\r\n")[2::2]
        if len(self._values) != batch:
            raise UnavailableError(f"{len(self._values)} of {batch} values")

    def check(self) -> None:
        count = len(self._keys)
        self.prepare("check", [count])
        for form in self._forms:
            self.run(form, count)
            if self._values != [_VALUE] * count:
                raise UnavailableError(f"{form} brought other values than were set")

    def facts(self) -> dict[str, object]:
        return {"forms": self._forms}

    def close(self) -> None:
        self._parts.close()


if __name__ == "__main__":
    serve(lambda: RedisSubject(int(sys.argv[1])))
