"""Calls over the slab socket, for asyncio, against a daemon that turns the client away."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from kvstore import messages as m
from kvstore import wire
from kvstore.errors import UnavailableError
from kvstore.messages import Epoch, OwnerId
from kvstore.slab import Access, Welcome
from kvstore_client.paths.slab_calls_aio import AsyncCallPool

_LONG_S = 20.0


class RefusingSocket:
    """A slab socket that refuses one connection, and closes it, before it has said hello."""

    def __init__(self, path: Path, *, refusal: str) -> None:
        self.has_closed = threading.Event()
        self._refusal = refusal.encode()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._refuse)
        self._thread.start()

    def _refuse(self) -> None:
        connection, _ = self._listener.accept()
        welcome = Welcome(
            epoch=Epoch(b"e" * 16),
            arena_count=0,
            arena_bytes=0,
            access=Access.READ,
            refusal_bytes=len(self._refusal),
        )
        with connection:
            connection.sendall(welcome.encode() + self._refusal)
        self.has_closed.set()

    def close(self) -> None:
        self._thread.join(_LONG_S)
        self._listener.close()


class LateLoop(asyncio.SelectorEventLoop):
    """Is so busy that its connections have been closed by the time that it looks at them again."""

    has_closed: threading.Event

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        await super().sock_connect(sock, address)
        assert await asyncio.to_thread(self.has_closed.wait, _LONG_S)


def test_a_client_that_is_turned_away_before_its_hello_is_told_why(tmp_path: Path) -> None:
    refusing = RefusingSocket(tmp_path / "s.slab", refusal="the daemon has no room for more connections")

    def late_loop() -> LateLoop:
        loop = LateLoop()
        loop.has_closed = refusing.has_closed
        return loop

    async def call() -> None:
        pool = AsyncCallPool(tmp_path / "s.slab", session_id=OwnerId(b"s" * 16))
        try:
            await pool.call(wire.GET_STORE_STATS, m.GetStoreStatsRequest(), timeout_s=_LONG_S)
        finally:
            pool.close()

    with asyncio.Runner(loop_factory=late_loop) as runner, pytest.raises(UnavailableError, match="no room for more"):
        runner.run(call())
    refusing.close()
