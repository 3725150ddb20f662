"""Checksums of a caller's blocks, taken while something else is waited for."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from kvstore.envelope import checksum
from kvstore_client.forks import mend_after_fork

_THREAD_COUNT = 2
"""Each hashes about 10 GB/s, several times what a network takes."""
_AHEAD_BYTES_MIN = 512 << 10
"""Less is hashed by who needs it: 50 us, several times what it takes to hand it over."""
_PORTION_BYTES = 1 << 20
"""What is told at a time."""


class HashThreads:
    """The threads that hash for all puts of a client; they end with this object."""

    def __init__(self) -> None:
        self._executor = _new_executor()
        mend_after_fork(self)

    def after_fork(self) -> None:
        """The parent's threads do not exist here."""
        self._executor = _new_executor()

    def begin(self, blocks: Sequence[memoryview]) -> Hashing:
        """Starts on the first block; the caller owes a `close`."""
        return Hashing(blocks, self._executor)


class Hashing:
    """One thread goes through the blocks in order. It looks at the caller's memory until `close` returns."""

    def __init__(self, blocks: Sequence[memoryview], executor: ThreadPoolExecutor) -> None:
        self._blocks = blocks
        self._is_closed = False
        self._starts = _portions(blocks)
        self._portions: list[Future[list[int]]] = [Future() for _ in self._starts]
        self._runner: Future[None] | None = None
        if sum(map(len, blocks)) >= _AHEAD_BYTES_MIN:
            self._runner = executor.submit(self._run)

    def take(self, index: int) -> int:
        """The checksum of a block; waits for it, or takes it here when no thread has begun."""
        if self._runner is not None and self._runner.cancel():
            self._runner = None
        if self._runner is None:
            return checksum(self._blocks[index])
        portion = bisect.bisect_right(self._starts, index) - 1
        return self._portions[portion].result()[index - self._starts[portion]]

    def close(self) -> None:
        """What was not taken will not be."""
        self._is_closed = True
        if self._runner is not None and not self._runner.cancel():
            wait([self._runner])

    def _run(self) -> None:
        ends = [*self._starts[1:], len(self._blocks)]
        for start, end, portion in zip(self._starts, ends, self._portions, strict=True):
            if self._is_closed:
                return
            portion.set_result([checksum(block) for block in self._blocks[start:end]])


def _portions(blocks: Sequence[memoryview]) -> list[int]:
    """Where each portion begins, the first one with the first block."""
    starts: list[int] = []
    portion_bytes = _PORTION_BYTES
    for index, size_bytes in enumerate(map(len, blocks)):
        if portion_bytes >= _PORTION_BYTES:
            starts.append(index)
            portion_bytes = 0
        portion_bytes += size_bytes
    return starts


def _new_executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREAD_COUNT, thread_name_prefix="kvstore-hash")
