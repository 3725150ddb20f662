"""Blocks that are brought into memory ahead of their use, and what comes of each: useful, late, or wasted. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)

_KNOWN_MIN = 256
"""Blocks of which it must be known what became of them: a handful of prompts, before which nothing is held back."""
_KNOWN_MAX = 4096.0
"""Older ones fade, so that who becomes worth it again is found out."""
_GOOD_SHARE = 0.5
"""Less than half of it good, and bringing costs more reads of the disk, and room, than it saves."""
_PACE_MIN = 1 / 16
"""Some are always brought: only by these it is known what became of them."""


class Pace:
    """How many of the prompts that are due are brought, by what became of those brought before.

    All, while half of their blocks are asked for before they leave; below that in proportion, down to one of 16.
    """

    def __init__(self) -> None:
        self._good_count = 0.0
        self._wasted_count = 0.0
        self._credit = 0.0

    def note(self, *, good_count: int, wasted_count: int) -> None:
        """Of so many blocks it is known now."""
        self._good_count += good_count
        self._wasted_count += wasted_count
        known_count = self._good_count + self._wasted_count
        if known_count > _KNOWN_MAX:
            self._good_count *= _KNOWN_MAX / known_count
            self._wasted_count *= _KNOWN_MAX / known_count

    @property
    def share(self) -> float:
        """Of prompts that are due, those that are brought."""
        known_count = self._good_count + self._wasted_count
        if known_count < _KNOWN_MIN:
            return 1.0
        return min(max(self._good_count / known_count / _GOOD_SHARE, _PACE_MIN), 1.0)

    def takes(self) -> bool:
        """Whether to bring one more that is due: as many as `share` says, evenly."""
        self._credit += self.share
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True


class Outcome(NamedTuple, Generic[Key]):
    key: Key
    is_wasted: bool


class Prefetches(Generic[Key]):
    """Each block that was begun is counted once, when it is known what it was good for.

    useful: it was there when it was first used; late: it was asked for while it was on its way, so that somebody
    waited, if for less long; wasted: it left again unused, or did not come at all.
    """

    def __init__(self) -> None:
        self._coming: set[Key] = set()
        self._unused: set[Key] = set()
        # Those of them that nobody has asked to bring; and of earlier ones what became of them.
        self._expected: set[Key] = set()
        self._outcomes: list[Outcome[Key]] = []
        self.useful_count = 0
        self.late_count = 0
        self.wasted_count = 0

    def __len__(self) -> int:
        """Of those of which it is not known yet."""
        return len(self._coming) + len(self._unused)

    def begin(self, keys: Iterable[Key], *, is_expected: bool = False) -> None:
        """`is_expected`: nobody has asked for it, but a session is expected to; what becomes of these is told."""
        keys = list(keys)
        self._coming.update(keys)
        if is_expected:
            self._expected.update(keys)

    def take_outcomes(self) -> list[Outcome[Key]]:
        """What became of blocks that were expected, since the last call. Somebody has to take them."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

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
            self._tell(late, is_wasted=False)

    def use(self, keys: Iterable[Key]) -> None:
        if self._unused:
            used = self._unused.intersection(keys)
            self._unused -= used
            self.useful_count += len(used)
            self._tell(used, is_wasted=False)

    def leave(self, keys: Iterable[Key]) -> None:
        """These are not in memory any more, or will not come."""
        if self._unused or self._coming:
            gone = (self._unused | self._coming).intersection(keys)
            self._unused -= gone
            self._coming -= gone
            self.wasted_count += len(gone)
            self._tell(gone, is_wasted=True)

    def _tell(self, keys: set[Key], *, is_wasted: bool) -> None:
        if self._expected:
            known = self._expected & keys
            self._expected -= known
            self._outcomes += [Outcome(key, is_wasted) for key in known]
