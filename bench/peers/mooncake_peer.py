"""Mooncake Store over its TCP transport: zero-copy calls on registered memory, batches, segment in another process.

`python mooncake_peer.py store MASTER SEGMENT_BYTES` is that process.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from peer import Peer, accepts, free_port

from kvstore.errors import UnavailableError

_HOST = "127.0.0.1"
_NO_METADATA_SERVER = "P2PHANDSHAKE"
_LOCAL_BUFFER_BYTES = 64 << 20
_ROOM = 2


class Mooncake(Peer):
    def start(self) -> None:
        if importlib.util.find_spec("mooncake") is None:
            raise UnavailableError("mooncake-transfer-engine-non-cuda is not installed")
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise UnavailableError(
                f"Mooncake does not load ({error}); on Debian and Ubuntu: apt-get install libibverbs1"
            ) from error
        port, metrics_port = free_port(), free_port()
        master = [str(Path(sys.executable).with_name("mooncake_master")), f"--rpc_port={port}"]
        master += [f"--metrics_port={metrics_port}"]
        self.start_server(master, is_ready=lambda: accepts(port))
        address = f"{_HOST}:{port}"
        segment_bytes = self.memory.source.nbytes * _ROOM
        ready = self.folder / "segment.ready"
        store = [sys.executable, __file__, "store", address, str(segment_bytes), str(ready)]
        self.start_server(store, is_ready=ready.exists)
        self.store = MooncakeDistributedStore()
        # A client without a segment of its own: all blocks are in the other process.
        _expect(self.store.setup(_HOST, _NO_METADATA_SERVER, 0, _LOCAL_BUFFER_BYTES, "tcp", "", address), "setup")
        self.parts.callback(self.store.close)
        for memory in (self.memory.source, self.memory.target):
            _expect(self.store.register_buffer(memory.ctypes.data, memory.nbytes), "register_buffer")
        self.sizes = [self.spec.block_bytes] * self.spec.block_count

    def prepare(self, action: str, batches: Sequence[int]) -> None:
        """A key that is there is not put again, so the last put's keys go first."""
        if action == "put":
            for batch in batches:
                self.store.batch_remove(self.keys(batch), True)

    def put(self, batch: int) -> None:
        pointers = [block.ctypes.data for block in self.memory.source[batch]]
        for code in self.store.batch_put_from(self.keys(batch), pointers, self.sizes):
            _expect(code, "put")

    def get(self, batch: int) -> None:
        pointers = [block.ctypes.data for block in self.memory.target[batch]]
        for size in self.store.batch_get_into(self.keys(batch), pointers, self.sizes):
            _expect(size - self.spec.block_bytes, "get")


def _expect(code: int, what: str) -> None:
    if code:
        raise UnavailableError(f"Mooncake's {what} failed with {code}")


def _serve(address: str, segment_bytes: int, ready: Path) -> None:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    setup = store.setup(_HOST, _NO_METADATA_SERVER, segment_bytes, _LOCAL_BUFFER_BYTES, "tcp", "", address)
    _expect(setup, "setup")
    ready.touch()
    while True:
        time.sleep(60)


if __name__ == "__main__":
    _serve(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
