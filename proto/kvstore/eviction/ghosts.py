"""Names of blocks that have left."""

from __future__ import annotations

from itertools import islice
from typing import Generic

from kvstore.eviction.use import Key


class Ghosts(Generic[Key]):
    """Keys in the order in which their blocks left."""

    def __init__(self) -> None:
        self._keys: dict[Key, None] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def add(self, key: Key) -> None:
        """It is the latest now."""
        self._keys.pop(key, None)
        self._keys[key] = None

    def discard(self, key: Key) -> bool:
        """True: it was here."""
        return self._keys.pop(key, self) is None

    def trim(self, count_max: int) -> None:
        """Forgets the oldest beyond so many, and some more: a dict passes over all that left it to find its first."""
        excess_count = len(self._keys) - count_max
        if excess_count > 0:
            for key in list(islice(self._keys, excess_count + count_max // 32)):
                del self._keys[key]
