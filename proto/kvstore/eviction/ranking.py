"""What a policy is: an order of candidates, learned from what happens to blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from kvstore.eviction.run import Run
from kvstore.eviction.use import Key, Use


class Ranking(Protocol[Key]):
    """Orders candidates: runs without children here. What one does not care for, it inherits from here.

    Time comes with uses and never goes back. A run's place may depend on nothing but its `use`, its `mark` and
    time: one that is discarded and added again is where it was. Candidates that are held or refused are discarded while
    a search goes on. Those whose use is over or has a priority do not come here; every other hook sees all blocks.
    """

    is_steady: bool = False
    """Whether the coldest run stays the coldest one while blocks leave it; else it is asked for before each."""

    grace_s: float = 1.0
    """For so long after its last use a run is no candidate of the policy's, and leaves only when nothing else can."""

    learns_done: bool = False
    """Whether uses that are over come here as well, for the policy to find out how far to believe it."""

    capacity_blocks: int
    """Blocks that the tier holds at most, as far as is known; may change."""

    def begin(self, use: Use) -> None:
        """A request comes; sets `use.mark`, if it likes."""
        return

    def describe(self, use: Use, *, was: Use) -> None:
        """More is known of a request: `use` takes the place of `was`, with the same number, time and mark.

        Sets another mark of it, if it likes; then each run of `was` that is here is `described`.
        """
        return

    def described(self, run: Run[Key], *, use: Use) -> None:
        """`use` takes the place of what a run was used by last; it is no candidate now. May set another mark of it."""
        return

    def admit(self, keys: Sequence[Key], *, parent: Run[Key] | None, use: Use) -> Iterable[tuple[int, Any]]:
        """New blocks come, each the child of the one before: parts of them that add up to all, each with its mark.

        `parent` ends with the first one's parent, if that is here; its own blocks may be of the same use.
        """
        return ((len(keys), None),)

    def passed_over(self, keys: Sequence[Key], *, use: Use) -> None:
        """New blocks, the rest of a chain, were not taken in."""
        return

    def reused(self, run: Run[Key], *, use: Use) -> None:
        """All blocks of a run are used again; it still has the use and the mark of the last time. Heads come first.

        It is no candidate now. Sets another mark, if it likes.
        """
        return

    def add(self, run: Run[Key]) -> None:
        """It is a candidate."""

    def discard(self, run: Run[Key]) -> None:
        """It is one no more; its use and mark are those that it was added with."""

    def coldest(self, *, now_s: float) -> Run[Key] | None:
        """The candidate whose tail is to leave first; see `is_steady`. It may set another mark on it."""

    def evicted(self, keys: Sequence[Key], run: Run[Key], *, now_s: float) -> None:
        """The tail of a run has left for want of room, the last block first; the run may be empty now."""
        return

    def removed(self, key: Key, run: Run[Key]) -> None:
        """A block has left for another reason; the run may be empty now."""
        return

    def admits(self, use: Use, *, victim: Run[Key], keys: Sequence[Key], gain_min: float) -> bool:
        """False: a block of this use is not worth `gain_min` times this victim; `keys` may be the next ones."""
        return True

    def figures(self) -> Mapping[str, float]:
        """What it can tell of itself, by name."""
        return {}
