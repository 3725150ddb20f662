"""The limit of the NIXL path: NIXL alone, over TCP, all memory registered before, no checksums.

`python -m kvstore_client.bench.nixl_bare SPEC` measures, a JSON object; it starts `… serve SPEC`, the other end.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import numpy as np

from kvstore_client.bench.batches import Batches
from kvstore_client.bench.processes import spawn, stop
from kvstore_client.bench.subject import serve
from kvstore_client.paths.nixl import BareTransfer, ServedMemory

_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlSpec:
    block_count: int
    block_bytes: int
    batch_count: int
    seed: int

    def command(self) -> list[str]:
        return [sys.executable, "-m", "kvstore_client.bench.nixl_bare", json.dumps(asdict(self))]


class NixlSubject:
    """`put` and `get` of batches to and from the memory of another process, one that this one starts."""

    def __init__(self, spec: NixlSpec) -> None:
        self._memory = Batches(**asdict(spec))
        self._parts = ExitStack()
        try:
            self._connect(spec)
            for batch in range(spec.batch_count):
                self.run("put", batch)
            self.check()
        except BaseException:
            self._parts.close()
            raise

    def _connect(self, spec: NixlSpec) -> None:
        command = [sys.executable, "-m", "kvstore_client.bench.nixl_bare", "serve", json.dumps(asdict(spec))]
        server = spawn(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._parts.callback(stop, server)
        assert server.stdout is not None
        metadata = bytes.fromhex(server.stdout.readline().decode())
        batch_bytes = spec.block_count * spec.block_bytes
        self._transfers = {}
        for action, memory in (("put", self._memory.source), ("get", self._memory.target)):
            for batch in range(spec.batch_count):
                transfer = BareTransfer(
                    metadata,
                    places=[batch * batch_bytes + block * spec.block_bytes for block in range(spec.block_count)],
                    buffers=[memoryview(block) for block in memory[batch]],
                )
                self._parts.callback(transfer.close)
                self._transfers[action, batch] = transfer

    def prepare(self, action: str, batches: Sequence[int]) -> None:
        pass

    def run(self, action: str, batch: int) -> None:
        transfer = self._transfers[action, batch]
        transfer.write(timeout_s=_TIMEOUT_S) if action == "put" else transfer.read(timeout_s=_TIMEOUT_S)

    def check(self) -> None:
        batches = range(self._memory.batch_count)
        self._memory.clear(batches)
        for batch in batches:
            self.run("get", batch)
        self._memory.check(batches)

    def facts(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        self._parts.close()


def _serve(spec: NixlSpec) -> None:
    """Lends memory until its stdin ends."""
    memory = np.full(spec.batch_count * spec.block_count * spec.block_bytes, 1, dtype=np.uint8)
    served = ServedMemory([memory.ctypes.data], arena_bytes=memory.nbytes)
    sys.stdout.write(served.metadata.hex() + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(NixlSpec(**json.loads(sys.argv[2])))
    else:
        serve(lambda: NixlSubject(NixlSpec(**json.loads(sys.argv[1]))))
