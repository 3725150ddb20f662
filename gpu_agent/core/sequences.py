"""Which blocks the engine's sequences have, and at which step they are needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.keys import BlockHash


class Need(NamedTuple):
    """Earlier needs sort first."""

    at: int
    """The engine step."""
    sequence: str


class Change(NamedTuple):
    """Blocks that some sequence needs at a known step from now on, and those that none does any more."""

    added: list[BlockHash]
    removed: list[BlockHash]


@dataclass(slots=True)
class _Sequence:
    parent_hash: BlockHash | None = None
    hashes: tuple[BlockHash, ...] = ()
    at: int | None = None


@dataclass(slots=True)
class Sequences:
    """Engines name sequences as they like. A block may belong to several."""

    _by_name: dict[str, _Sequence] = field(default_factory=dict)
    _due_counts: Counter[BlockHash] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def bind(self, name: str, hashes: Sequence[BlockHash], *, parent_hash: BlockHash | None = None) -> Change:
        """A sequence has these blocks, head first, and no others; `parent_hash` is what they follow in their chain."""
        sequence = self._by_name.setdefault(name, _Sequence())
        sequence.parent_hash = parent_hash
        before, sequence.hashes = sequence.hashes, tuple(dict.fromkeys(hashes))
        if sequence.at is None:
            return Change([], [])
        return self._count(added=sequence.hashes, removed=before)

    def hint(self, name: str, at: int | None) -> Change:
        """Its blocks are needed at that step; None: it is not known when, or never."""
        sequence = self._by_name[name]
        before, sequence.at = sequence.at, at
        if (before is None) == (at is None):
            return Change([], [])
        return self._count(
            added=sequence.hashes if before is None else (), removed=sequence.hashes if at is None else ()
        )

    def unbind(self, name: str) -> Change:
        change = self.hint(name, None)
        del self._by_name[name]
        return change

    def hashes_of(self, name: str) -> tuple[BlockHash, ...]:
        return self._by_name[name].hashes

    def parents_of(self, name: str) -> dict[BlockHash, BlockHash | None]:
        """Each block of a sequence, head first, with its parent."""
        sequence = self._by_name[name]
        return dict(zip(sequence.hashes, (sequence.parent_hash, *sequence.hashes), strict=False))

    def is_due(self, block_hash: BlockHash) -> bool:
        """Whether some sequence needs it at a known step."""
        return block_hash in self._due_counts

    def needs(self) -> list[Need]:
        """The soonest first."""
        return sorted(Need(one.at, name) for name, one in self._by_name.items() if one.at is not None)

    def spare(self, *, after: int) -> Iterator[BlockHash]:
        """Blocks that are needed at a known step after `after` and not before: the latest first, tails before heads."""
        soon: set[BlockHash] = set()
        later: list[Need] = []
        for need in self.needs():
            if need.at > after:
                later.append(need)
            else:
                soon.update(self._by_name[need.sequence].hashes)
        wanted_by = Counter(
            block_hash
            for need in later
            for block_hash in self._by_name[need.sequence].hashes
            if self._due_counts[block_hash] > 1
        )
        for need in reversed(later):
            for block_hash in reversed(self._by_name[need.sequence].hashes):
                if block_hash in wanted_by:
                    # Shared: it is needed when the soonest of its sequences is.
                    wanted_by[block_hash] -= 1
                    if wanted_by[block_hash]:
                        continue
                if block_hash not in soon:
                    yield block_hash

    def overdue(self, *, before: int) -> list[str]:
        """Sequences that were needed before this step."""
        return [name for name, one in self._by_name.items() if one.at is not None and one.at < before]

    def _count(self, *, added: Sequence[BlockHash], removed: Sequence[BlockHash]) -> Change:
        counts = self._due_counts
        new = [block_hash for block_hash in added if block_hash not in counts]
        counts.update(added)
        gone = []
        for block_hash in removed:
            counts[block_hash] -= 1
            if not counts[block_hash]:
                del counts[block_hash]
                gone.append(block_hash)
        # Of a change both ways what is in both was never gone.
        both = set(new) & set(gone)
        return Change([one for one in new if one not in both], [one for one in gone if one not in both])
