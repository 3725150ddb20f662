"""Blocks that are brought into memory ahead of their use, and what comes of each: useful, late, or wasted. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Prefetches(Generic[Key]):
    """Each block that was begun is counted once, when it is known what it was good for.

    useful: it was there when it was first used; late: it was asked for while it was on its way, so that somebody
    waited, if for less long; wasted: it left again unused, or did not come at all.
    """

    def __init__(self) -> None:
        self._coming: set[Key] = set()
        self._unused: set[Key] = set()
        self.useful_count = 0
        self.late_count = 0
        self.wasted_count = 0

    def __len__(self) -> int:
        """Of those of which it is not known yet."""
        return len(self._coming) + len(self._unused)

    def begin(self, keys: Iterable[Key]) -> None:
        self._coming.update(keys)

    def arrive(self, keys: Iterable[Key]) -> None:
        if self._coming:
            came = self._coming.intersection(keys)
            self._coming -= came
            self._unused |= came

    def ask(self, keys: Iterable[Key]) -> None:
        """Somebody waits for these, whether or not they are on their way."""
        if self._coming:
            late = self._coming.intersection(keys)
            self._coming -= late
            self.late_count += len(late)

    def use(self, keys: Iterable[Key]) -> None:
        if self._unused:
            used = self._unused.intersection(keys)
            self._unused -= used
            self.useful_count += len(used)

    def leave(self, keys: Iterable[Key]) -> None:
        """These are not in memory any more, or will not come."""
        if self._unused or self._coming:
            gone = (self._unused | self._coming).intersection(keys)
            self._unused -= gone
            self._coming -= gone
            self.wasted_count += len(gone)
