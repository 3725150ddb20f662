"""LMCache's `lm://` server over TCP, with a client that speaks its protocol and copies less than its own."""

from __future__ import annotations

import importlib.util
import struct
import sys

from peer import Peer, accepts, connect, free_port, receive, send

from kvstore.errors import UnavailableError

# lmcache/v1/protocol.py: command, length, format, dtype, location, four of shape, key; and the answer's nine numbers.
_REQUEST = struct.Struct("iiiiiiiii150s")
_ANSWER = struct.Struct("iiiiiiiii")
_PUT, _GET, _HEALTH = 1, 2, 5
_SUCCESS = 200
_FORMAT_BINARY = 4
_DTYPE_UINT8 = 6


class LMCache(Peer):
    def start(self) -> None:
        if importlib.util.find_spec("lmcache") is None:
            raise UnavailableError("lmcache is not installed")
        port = free_port()
        command = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port)]
        self.start_server(
            command, is_ready=lambda: accepts(port), LMCACHE_LOG_LEVEL="ERROR", LMCACHE_TRACK_USAGE="false"
        )
        self.connection = self.parts.enter_context(connect(port))
        self.requests = {
            action: [[_request(action, key=f"bench@1@0@{batch << 16 | block:x}@half",
                               size_bytes=self.spec.block_bytes if action == _PUT else 0)
                      for block in range(self.spec.block_count)]
                     for batch in range(self.spec.batch_count)]
            for action in (_PUT, _GET)
        }  # fmt: skip
        self.answer = memoryview(bytearray(_ANSWER.size))

    def put(self, batch: int) -> None:
        """The protocol answers no put. A question after the last one, which is answered, tells that all are there."""
        for request, block in zip(self.requests[_PUT][batch], self.sources[batch], strict=True):
            send(self.connection, [request, block])
        self.connection.sendall(_request(_HEALTH, key="bench@1@0@0@half", size_bytes=0))
        self._take_answer()

    def get(self, batch: int) -> None:
        for request, target in zip(self.requests[_GET][batch], self.targets[batch], strict=True):
            self.connection.sendall(request)
            if self._take_answer() != len(target):
                raise UnavailableError("LMCache's server has a block of another size")
            receive(self.connection, target)

    def _take_answer(self) -> int:
        receive(self.connection, self.answer)
        code, size, *_ = _ANSWER.unpack(self.answer)
        if code != _SUCCESS:
            raise UnavailableError(f"LMCache's server answered {code}")
        return int(size)


def _request(action: int, *, key: str, size_bytes: int) -> bytes:
    return _REQUEST.pack(
        action, size_bytes, _FORMAT_BINARY, _DTYPE_UINT8, 0, size_bytes, 0, 0, 0, key.encode().ljust(150)
    )
