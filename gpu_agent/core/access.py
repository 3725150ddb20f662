"""How often and when each block was last used, counted in engine steps."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.keys import BlockHash


class Heat(NamedTuple):
    """Orders blocks from cold to hot: by uses in the window, then by the last use."""

    use_count: int
    last_step: int


COLD = Heat(0, -1)


class _Uses:
    __slots__ = ("current", "half", "last_step", "previous")

    def __init__(self, half: int, step: int) -> None:
        self.half = half
        self.current = 0
        self.previous = 0
        self.last_step = step


class AccessWindow:
    """Counts uses per block over a sliding window of engine steps.

    The window slides by halves: a count covers the running half and the whole one before it, so between
    half of `window_steps` and all of them. That costs two numbers per block and no work when time passes.
    """

    def __init__(self, *, window_steps: int) -> None:
        self._half_steps = max(1, window_steps // 2)
        self._uses: dict[BlockHash, _Uses] = {}

    def __len__(self) -> int:
        return len(self._uses)

    def touch(self, block_hash: BlockHash, *, step: int) -> None:
        half = step // self._half_steps
        uses = self._uses.get(block_hash)
        if uses is None:
            uses = self._uses[block_hash] = _Uses(half, step)
        elif uses.half != half:
            uses.previous = uses.current if uses.half == half - 1 else 0
            uses.current = 0
            uses.half = half
        uses.current += 1
        uses.last_step = step

    def heat(self, block_hash: BlockHash, *, step: int) -> Heat:
        uses = self._uses.get(block_hash)
        if uses is None:
            return COLD
        match step // self._half_steps - uses.half:
            case 0:
                return Heat(uses.current + uses.previous, uses.last_step)
            case 1:
                return Heat(uses.current, uses.last_step)
            case _:
                return Heat(0, uses.last_step)

    def forget(self, block_hash: BlockHash) -> None:
        """A block that has left takes its history with it, so that memory stays bounded by the pool."""
        self._uses.pop(block_hash, None)
