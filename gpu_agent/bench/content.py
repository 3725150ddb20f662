"""Blocks whose bytes are known by their hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvstore.keys import HASH_BYTES, BlockHash
from kvstore.slots import SlotId

_STEP_BYTES = 64
"""Blocks begin at different multiples of this in the noise: copies and comparisons of such are fastest."""
_PLACE_COUNT = 4093


def block_hash(sequence: str, index: int) -> BlockHash:
    return BlockHash(hashlib.sha256(f"{sequence}/{index}".encode()).digest())


class Content:
    """What belongs into each block: a cut from noise, and its own hash, so that no two are the same.

    By numpy on one thread: torch has its threads spin between such small pieces of work.
    """

    def __init__(self, *, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        noise = np.random.default_rng(block_bytes).bytes(block_bytes + _PLACE_COUNT * _STEP_BYTES)
        self._noise = np.frombuffer(noise, dtype=np.uint8)

    def write(self, memory: Tensor, slot: SlotId, block: BlockHash) -> None:
        row = memory[slot].numpy()
        row[HASH_BYTES:] = self._tail(block)
        row[:HASH_BYTES] = np.frombuffer(block, dtype=np.uint8)

    def wrong(self, memory: Tensor, slots: Iterable[SlotId], blocks: Iterable[BlockHash]) -> list[BlockHash]:
        """Those of the blocks that are not what was written, in any of their bytes."""
        rows = memory.numpy()
        return [
            block
            for slot, block in zip(slots, blocks, strict=False)
            if rows[slot, :HASH_BYTES].tobytes() != block
            or not np.array_equal(rows[slot, HASH_BYTES:], self._tail(block))
        ]

    def _tail(self, block: BlockHash) -> npt.NDArray[np.uint8]:
        start = int.from_bytes(block[:8], "little") % _PLACE_COUNT * _STEP_BYTES
        return self._noise[start + HASH_BYTES : start + self._block_bytes]
