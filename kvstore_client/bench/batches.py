"""The memory that benchmarks move: batches of blocks, together larger than the processor's caches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.errors import CorruptBlockError

_CACHE_BYTES_DEFAULT = 32 << 20
"""Where the kernel does not tell."""


def last_cache_bytes() -> int:
    """Size of the largest cache of the first core."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20}[text[-1]])
    return max(sizes, default=_CACHE_BYTES_DEFAULT)


def cold_batch_count(batch_bytes: int) -> int:
    """So many batches that one is out of the caches again when its turn comes: twice the last cache, four at least."""
    return max(4, -(-2 * last_cache_bytes() // batch_bytes))


class Batches:
    """Two private buffers, faulted in: `source` with random bytes, `target` with ones; [batch, block, byte]."""

    def __init__(self, *, batch_count: int, block_count: int, block_bytes: int, seed: int) -> None:
        self.batch_count = batch_count
        shape = (batch_count, block_count, block_bytes)
        words = np.random.default_rng(seed).integers(0, 1 << 63, -(-batch_count * block_count * block_bytes // 8))
        whole = words.view(np.uint8)[: batch_count * block_count * block_bytes]
        self.source: npt.NDArray[np.uint8] = whole.reshape(shape)
        self.target: npt.NDArray[np.uint8] = np.full(shape, 1, dtype=np.uint8)

    def copy(self, batch: int) -> None:
        """The limit: a plain copy of a batch's blocks from one buffer to the other."""
        for target, source in zip(self.target[batch], self.source[batch], strict=True):
            np.copyto(target, source)

    def clear(self, batches: Sequence[int]) -> None:
        for batch in batches:
            self.target[batch].fill(1)

    def check(self, batches: Sequence[int]) -> None:
        for batch in batches:
            for block, (target, source) in enumerate(zip(self.target[batch], self.source[batch], strict=True)):
                if not np.array_equal(target, source):
                    raise CorruptBlockError(f"block {block} of batch {batch} came back with other bytes")
