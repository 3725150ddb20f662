"""Our own client as a subject: `python -m kvstore_client.bench.client_subject SPEC`, a JSON object."""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvstore.errors import KvstoreError, UnavailableError
from kvstore.keys import BlockHash
from kvstore_client.bench import blocks
from kvstore_client.bench.batches import Batches
from kvstore_client.bench.subject import serve
from kvstore_client.client import Client
from kvstore_client.config import ClientConfig

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
_HUGE_IN_SMALL = ("ShmemPmdMapped:", "FilePmdMapped:")
"""Bytes of a mapping that huge pages back although its file has small ones, as on a tmpfs with `huge=`."""
_HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSpec:
    address: str
    transport: str
    """As in `ClientConfig.transport`."""
    block_count: int
    block_bytes: int
    batch_count: int
    seed: int
    revision: str

    def command(self) -> list[str]:
        return [sys.executable, "-m", "kvstore_client.bench.client_subject", json.dumps(asdict(self))]


class ClientSubject:
    """`memcpy`, `put`, `get`, `get_first`, `view_first`, `view` of batches of blocks.

    A put stores blocks that no store has seen. A get or view asks for what the last put of its batch has stored;
    `view_first` follows a put, and `view` a `view_first`, of the same batch. A `get_first` is by a client that has not
    met the blocks, so it must ask where they are.
    """

    def __init__(self, spec: ClientSpec) -> None:
        self._spec = spec
        self._namespace = blocks.namespace(spec.block_bytes, revision=spec.revision)
        self._memory = Batches(
            batch_count=spec.batch_count, block_count=spec.block_count, block_bytes=spec.block_bytes, seed=spec.seed
        )
        self._hashes: dict[int, list[BlockHash]] = {}
        self._new_hashes: deque[list[BlockHash]] = deque()
        self._client = Client(spec.address, config=ClientConfig(transport=spec.transport))
        self._stranger = Client(spec.address, config=ClientConfig(transport=spec.transport))
        try:
            for batch in range(spec.batch_count):
                self.prepare("put", [batch])
                self.run("put", batch)
            self.check()
        except KvstoreError:
            self.close()
            raise

    def prepare(self, action: str, batches: Sequence[int]) -> None:
        if action == "put":
            self._new_hashes.extend(blocks.new_hashes(self._spec.block_count) for _ in batches)
        elif action in ("get_first", "view_first"):
            self.prepare("put", batches)
            for batch in batches:
                self.run("put", batch)

    def run(self, action: str, batch: int) -> None:
        match action:
            case "memcpy":
                self._memory.copy(batch)
            case "put":
                self._put(batch)
            case "get":
                self._get(batch)
            case "get_first":
                self._get(batch, client=self._stranger)
            case "view" | "view_first":
                self._view(batch)
            case _:
                raise AssertionError(f"no action {action!r}")

    def check(self) -> None:
        batches = range(self._spec.batch_count)
        self._memory.clear(batches)
        for batch in batches:
            self._get(batch)
        self._memory.check(batches)

    def facts(self) -> dict[str, object]:
        """`page_bytes` of the daemon's memory as it is mapped here, or None where it is not."""
        if self._spec.transport != "slab":
            return {}
        with self._client.view(self._namespace, self._hashes[0]) as views:
            view = views[0]
            if view is None or view.is_copy:
                return {"page_bytes": None}
            return {"page_bytes": mapped_page_bytes(np.frombuffer(view.payload, np.uint8).ctypes.data)}

    def close(self) -> None:
        self._client.close()
        self._stranger.close()

    def _put(self, batch: int) -> None:
        hashes = self._hashes[batch] = self._new_hashes.popleft()
        result = self._client.put(self._namespace, hashes, self._memory.source[batch])
        self._expect(result.stored_count, "stored", error=result.error)

    def _get(self, batch: int, *, client: Client | None = None) -> None:
        result = (client or self._client).get(self._namespace, self._hashes[batch], self._memory.target[batch])
        self._expect(result.matched_count, "hits", error=result.error)

    def _view(self, batch: int) -> None:
        with self._client.view(self._namespace, self._hashes[batch]) as views:
            self._expect(views.matched_count, "hits", error=views.error)
            payloads = [view.payload for view in views if view is not None and not view.is_copy]
        self._expect(len(payloads), "in view", error=None)

    def _expect(self, count: int, what: str, *, error: KvstoreError | None) -> None:
        if count != self._spec.block_count:
            reason = error or "no error was reported; is the daemon's memory too small, or used by others?"
            raise UnavailableError(f"{count} of {self._spec.block_count} blocks {what}: {reason}")


def mapped_page_bytes(address: int, smaps: Path = Path("/proc/self/smaps")) -> int | None:
    """Size of the pages behind an address of this process; None where the kernel does not tell."""
    is_inside = False
    page_bytes = None
    for line in smaps.read_text().splitlines():
        if match := _MAPPING.match(line):
            is_inside = int(match[1], 16) <= address < int(match[2], 16)
        elif is_inside and line.startswith("KernelPageSize:"):
            page_bytes = int(line.split()[1]) << 10
        elif is_inside and line.startswith(_HUGE_IN_SMALL) and int(line.split()[1]):
            page_bytes = _HUGE_PAGE_BYTES
    return page_bytes


if __name__ == "__main__":
    serve(lambda: ClientSubject(ClientSpec(**json.loads(sys.argv[1]))))
