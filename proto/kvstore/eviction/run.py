"""A run of blocks that live and leave together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic

from kvstore.eviction.use import Key, Use


class Run(Generic[Key]):
    """Blocks, each the only child of the one before, which were all used by `use` last.

    `parent` is what the first block claims, which need not be here; children are those of the last block. `mark` is the
    policy's own, an immutable value: both parts of a run that is cut keep it, and only equal ones are joined.
    A run without keys is dead: it was emptied, or its blocks went over to another.
    """

    __slots__ = ("child_count", "entry", "keys", "level", "mark", "parent", "use", "use_base", "use_counts", "watched")

    def __init__(
        self, keys: list[Key], *, parent: Key | None, use: Use, mark: Any, use_counts: list[int], use_base: int = 0
    ) -> None:
        self.keys = keys
        self.parent = parent
        self.use = use
        self.mark = mark
        self.child_count = 0
        # How often each block was used, less the base: so a use of all of them costs one addition.
        self.use_counts = use_counts
        self.use_base = use_base
        self.level: int | None = None  # of the candidates that it is among; None: it is none
        self.entry: tuple[Any, ...] | None = None  # in the queue that it is in
        self.watched: Use | None = None  # whose end is waited for

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def tail(self) -> Key:
        return self.keys[-1]

    def index_of(self, key: Key) -> int:
        keys = self.keys
        if keys[-1] == key:
            return len(keys) - 1
        return keys.index(key)

    def use_count(self, index: int) -> int:
        return self.use_counts[index] + self.use_base

    def extend(self, keys: Sequence[Key], use_counts: Sequence[int], *, use_base: int = 0) -> None:
        """Adds blocks at the tail."""
        change = use_base - self.use_base
        self.keys += keys
        self.use_counts += use_counts if not change else [count + change for count in use_counts]

    def prepend(self, head: Run[Key]) -> None:
        """Takes the blocks of its parent over."""
        change = head.use_base - self.use_base
        self.keys[:0] = head.keys
        self.use_counts[:0] = head.use_counts if not change else [count + change for count in head.use_counts]
        self.parent = head.parent

    def cut_tail(self, index: int) -> Run[Key]:
        """Moves the blocks from `index` on into a new run, its child."""
        keys, counts = self.keys, self.use_counts
        tail = Run(
            keys[index:],
            parent=keys[index - 1],
            use=self.use,
            mark=self.mark,
            use_counts=counts[index:],
            use_base=self.use_base,
        )
        del keys[index:], counts[index:]
        tail.child_count, self.child_count = self.child_count, 1
        return tail

    def cut_head(self, index: int) -> Run[Key]:
        """Moves the blocks before `index` into a new run, its parent."""
        keys, counts = self.keys, self.use_counts
        head = Run(
            keys[:index],
            parent=self.parent,
            use=self.use,
            mark=self.mark,
            use_counts=counts[:index],
            use_base=self.use_base,
        )
        self.parent = keys[index - 1]
        del keys[:index], counts[:index]
        head.child_count = 1
        return head
