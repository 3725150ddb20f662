"""The prefix tree: which block follows which. Knows nothing of what leaves first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, Generic, Protocol

from kvstore.eviction.run import Run
from kvstore.eviction.use import NO_HINT, Key, Use

RUN_BLOCKS_MAX = 512
"""Longest run: finding a block in one and cutting it take up to 10 µs, and longer chains are rows of runs."""
_PARTS_MAX = 1024
"""Twice as many as a chain of half a million blocks has runs."""
_ANCESTORS_MAX = 2048
"""Runs that are walked up to look for a ring: a third of a millisecond."""


_NEVER = Use(0, NO_HINT, now_s=0.0, chain_blocks=0, matched_blocks=0)


class Leaves(Protocol[Key]):
    """Is told of runs that have come to be without children here, or are so no more; either may be said twice."""

    def offer(self, run: Run[Key]) -> None: ...

    def withdraw(self, run: Run[Key]) -> None:
        """It still has the use and the mark that it was offered with."""


class PrefixTree(Generic[Key]):
    """Blocks that know their parents, kept as runs: a use of a chain costs per run, hardly per block.

    A run is cut where a chain leaves it, where a use ends in it, and where a block in its middle is removed. It is
    joined with its parent when both were used by the same use last, it is the only child, and their marks are equal.
    Parents are what callers claim. They may come later, or never. A claim that would make a block its own ancestor, or
    for all that a bounded walk can tell might, is ignored: in a ring nothing is ever a leaf, so nothing could leave.
    """

    def __init__(self, leaves: Leaves[Key]) -> None:
        self._leaves = leaves
        self._at: dict[Key, Run[Key]] = {}
        # Runs whose parent is not here, counted for the day it comes (back).
        self._orphan_counts: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: Key) -> bool:
        return key in self._at

    def run_of(self, key: Key) -> Run[Key]:
        return self._at[key]

    def find(self, key: Key | None) -> Run[Key] | None:
        return None if key is None else self._at.get(key)

    def runs(self) -> Iterator[Run[Key]]:
        """All, in the order of their first blocks' coming."""
        return iter(dict.fromkeys(self._at.values()))

    # --- asking

    def matched_count(self, chain: list[Key]) -> int:
        """How many blocks of a chain, given head first, are here before the first that is not."""
        start = 0
        while start < len(chain) and (run := self._at.get(chain[start])) is not None:
            start += _common_count(run.keys, _offset(run, chain[start]), chain, start)
        return start

    def parent_of(self, key: Key) -> Key | None:
        """As it was claimed, whether or not that one is here; None: none, or one that was ignored."""
        run = self._at[key]
        index = run.index_of(key)
        return run.keys[index - 1] if index else run.parent

    def ancestors(self, key: Key) -> Iterator[Key]:
        """Those that are here, the nearest first, up to one that is not; the tree must stay as it is meanwhile."""
        run: Run[Key] | None = self._at[key]
        stop = run.index_of(key) if run is not None else 0
        while run is not None:
            yield from reversed(run.keys[:stop])
            run = self.find(run.parent)
            stop = len(run.keys) if run is not None else 0

    def is_parent(self, key: Key) -> bool:
        """Whether some block here has claimed this one as its parent, which need not be here."""
        run = self._at.get(key)
        if run is None:
            return key in self._orphan_counts
        return run.child_count > 0 or run.tail != key

    # --- growing

    def is_simple(self, keys: Sequence[Key], *, parent: Key | None) -> bool:
        """Whether new blocks, each the child of the one before, can close no ring and meet no child of theirs."""
        if parent is not None and parent not in self._at and parent in keys:
            return False
        return not self._orphan_counts or self._orphan_counts.keys().isdisjoint(keys)

    def claimable(self, key: Key, parent: Key | None) -> Key | None:
        """The parent that a new block may claim; None if that would close a ring."""
        if parent is None or parent == key:
            return None
        return None if key in self._orphan_counts and self._would_close_ring(key, parent) else parent

    def end_at(self, key: Key | None) -> Run[Key] | None:
        """The run whose last block is this one, cut there if need be; None: it is not here."""
        run = self.find(key)
        if run is None or run.keys[-1] == key:
            return run
        assert key is not None
        return self.cut(run, run.index_of(key) + 1)[0]

    def add(
        self, key: Key, *, parent: Key | None, tail: Run[Key] | None, use: Use, mark: Any, use_count: int = 0
    ) -> None:
        """`grow` of one block."""
        assert key not in self._at, f"{key!r} inserted twice"
        if tail is not None and self._may_extend(tail, use, mark):
            run = tail
            run.keys.append(key)
            run.use_counts.append(use_count - run.use_base)
        else:
            run = Run([key], parent=parent, use=use, mark=mark, use_counts=[use_count])
            self._link(run, tail)
        self._at[key] = run
        self._meet_children(run)

    def grow(
        self,
        keys: Sequence[Key],
        *,
        parent: Key | None,
        tail: Run[Key] | None,
        use: Use,
        parts: Iterable[tuple[int, Any]],
    ) -> None:
        """Adds new blocks, each the child of the one before; `tail` is the run that ends with `parent`.

        Only the last of them may be awaited by others that are here.
        """
        count_before, start = len(self._at), 0
        for count, mark in parts:
            stop = start + count
            while start < stop:
                if tail is not None and self._may_extend(tail, use, mark):
                    run = tail
                    piece = keys[start : min(stop, start + RUN_BLOCKS_MAX - len(run.keys))]
                    run.extend(piece, [0] * len(piece))
                else:
                    piece = keys[start : min(stop, start + RUN_BLOCKS_MAX)]
                    run = Run(list(piece), parent=parent, use=use, mark=mark, use_counts=[0] * len(piece))
                    self._link(run, tail)
                self._at.update(zip(piece, repeat(run), strict=False))
                parent, tail = run.keys[-1], run
                start += len(piece)
        assert start == len(keys), f"a policy has placed {start} of {len(keys)} blocks"
        assert len(self._at) == count_before + len(keys), f"some of {keys} were inserted twice"
        if tail is not None:
            self._meet_children(tail)

    def parts_of(self, chain: list[Key]) -> list[Run[Key]]:
        """Runs that have exactly those blocks of a chain, given head first, that are here; cuts where need be.

        Of what is in no order, and so is no chain, only the first so many parts: each costs a cut.
        """
        at, start, stop = self._at, 0, len(chain)
        runs: list[Run[Key]] = []
        found_count = 0
        while start < stop and len(runs) < _PARTS_MAX:
            key = chain[start]
            run = at.get(key)
            if run is None:
                start += 1
                continue
            offset = _offset(run, key)
            count = _common_count(run.keys, offset, chain, start)
            if offset:
                run = self.cut(run, offset)[1]
            if count < len(run.keys):
                run = self.cut(run, count)[0]
            start += count
            found_count += count
            runs.append(run)
        if len(runs) > 1 and sum(len(run.keys) for run in dict.fromkeys(runs)) != found_count:
            return self.parts_of(list(dict.fromkeys(chain)))  # some block is named twice
        return runs

    def join_all(self, chain: list[Run[Key]]) -> None:
        """Makes as few runs as possible of these, given head first."""
        if len(chain) > 1:
            head = chain[0]
            for run in chain[1:]:
                head = self._join(head, run)

    def cut(self, run: Run[Key], index: int) -> tuple[Run[Key], Run[Key]]:
        """Two runs of the blocks before and from `index`: as few as possible change their run."""
        if index * 2 < len(run.keys):
            head = run.cut_head(index)
            self._at.update(zip(head.keys, repeat(head)))
            return head, run
        tail = run.cut_tail(index)
        self._at.update(zip(tail.keys, repeat(tail)))
        if run.level is not None:
            self._leaves.withdraw(run)
            self._leaves.offer(tail)
        return run, tail

    # --- shrinking

    def trim(self, run: Run[Key]) -> Key:
        """Takes the last block of a leaf out; its parent is a leaf next, if nobody else claims it."""
        key = run.keys.pop()
        run.use_counts.pop()
        del self._at[key]
        if not run.keys:
            self._leaves.withdraw(run)
            self._unlink(run)
        return key

    def remove(self, key: Key) -> Run[Key]:
        """Takes a block out, even from the middle of a chain; returns the run that it was the last one of."""
        run = self._at[key]
        if run.tail != key:
            run = self.cut(run, run.index_of(key) + 1)[0]
        if run.child_count:
            self._orphan_counts[key] = run.child_count
            run.child_count = 0
        self.trim(run)
        if run.keys:
            self._leaves.offer(run)
        return run

    # --- starting

    def restore(self, keys: Sequence[Key], parents: Sequence[Key | None], uses: Iterator[Use]) -> list[Run[Key]]:
        """Fills an empty tree with blocks and their parents, the most recent one last, and each run with the next use.

        Of each ring the claim of the most recent block is ignored. Returns the runs, the most recent one last; they
        have no marks yet, and no leaf has been offered.
        """
        assert not self._at, f"{len(self._at)} blocks are here already"
        at, child_counts = self._at, Counter(parents)
        early: list[Run[Key]] = []
        for key, parent in zip(keys, parents, strict=True):
            run = None if parent is None else at.get(parent)
            if run is not None and child_counts[parent] == 1 and len(run.keys) < RUN_BLOCKS_MAX:
                run.keys.append(key)
            else:
                is_early = run is None and parent is not None
                run = Run([key], parent=parent, use=_NEVER, mark=None, use_counts=[])
                if is_early:
                    early.append(run)
            at[key] = run
        assert len(at) == len(keys), "a block was restored twice"
        suspects = [run for run in early if run.parent in at]
        if suspects:
            self._open_rings(self._by_last_block(keys), suspects)
        runs = self._by_last_block(keys)
        for run, use in zip(runs, uses, strict=False):
            run.use = use
            run.use_counts = [0] * len(run.keys)
            if run.parent is None:
                continue
            holder = at.get(run.parent)
            if holder is not None:
                holder.child_count += 1
            else:
                self._orphan_counts[run.parent] = self._orphan_counts.get(run.parent, 0) + 1
        return runs

    def _by_last_block(self, keys: Sequence[Key]) -> list[Run[Key]]:
        return [run for key, run in zip(keys, map(self._at.__getitem__, keys), strict=True) if run.keys[-1] is key]

    def _open_rings(self, runs: Sequence[Run[Key]], suspects: Sequence[Run[Key]]) -> None:
        """Takes the most recent block of each ring from its parent; `suspects` has at least one run of each."""
        order = {run: number for number, run in enumerate(runs)}
        cleared = set[Run[Key]]()
        for suspect in suspects:
            trail = dict[Run[Key], None]()
            run: Run[Key] | None = suspect
            while run is not None and run not in cleared and run not in trail:
                trail[run] = None
                run = self.find(run.parent)
            if run is not None and run in trail:
                passed = list(trail)
                last = max(passed[passed.index(run) :], key=order.__getitem__)
                if len(last.keys) > 1:  # it is alone now, and those before it have no child
                    head = Run(last.keys[:-1], parent=last.parent, use=_NEVER, mark=None, use_counts=[])
                    self._at.update(zip(head.keys, repeat(head), strict=False))
                    del last.keys[:-1]
                last.parent = None
            cleared.update(trail)

    def check_invariants(self) -> None:
        claims: Counter[Key] = Counter()
        for run in self.runs():
            assert 0 < len(run.keys) <= RUN_BLOCKS_MAX, f"a run of {len(run.keys)} blocks"
            assert len(run.keys) == len(run.use_counts), f"{len(run.use_counts)} use counts of {run.keys}"
            assert all(self._at[key] is run for key in run.keys), f"{run.keys} is mapped elsewhere"
            if run.parent is not None:
                claims[run.parent] += 1
                holder = self._at.get(run.parent)
                assert holder is None or holder.tail == run.parent, f"{run.keys} hangs in the middle of {holder}"
        for run in self.runs():
            count = claims.pop(run.tail, 0)
            assert run.child_count == count, f"{run.keys} counts {run.child_count} children, has {count}"
        assert claims == self._orphan_counts, f"orphans: {self._orphan_counts}, really {claims}"
        assert sum(len(run.keys) for run in self.runs()) == len(self._at), "a block is in two runs"

    # --- inside

    def _may_extend(self, tail: Run[Key], use: Use, mark: Any) -> bool:
        return tail.use is use and not tail.child_count and len(tail.keys) < RUN_BLOCKS_MAX and bool(tail.mark == mark)

    def _link(self, run: Run[Key], parent: Run[Key] | None) -> None:
        """A new run has come, whose parent is the end of this one, or not here."""
        if parent is not None:
            self._leaves.withdraw(parent)
            parent.child_count += 1
        elif run.parent is not None:
            self._orphan_counts[run.parent] = self._orphan_counts.get(run.parent, 0) + 1

    def _meet_children(self, run: Run[Key]) -> None:
        """Its last block is new."""
        run.child_count = self._orphan_counts.pop(run.keys[-1], 0) if self._orphan_counts else 0
        if run.child_count:
            self._leaves.withdraw(run)
        else:
            self._leaves.offer(run)

    def _join(self, head: Run[Key], tail: Run[Key]) -> Run[Key]:
        """One run of the two, if they may be joined; else `tail`."""
        if (
            head.use is not tail.use
            or head.child_count != 1
            or tail.parent != head.keys[-1]
            or head is tail
            or head.mark != tail.mark
            or len(head.keys) + len(tail.keys) > RUN_BLOCKS_MAX
        ):
            return tail
        if len(tail.keys) > len(head.keys):
            self._at.update(zip(head.keys, repeat(tail)))
            tail.prepend(head)
            head.keys = []
            return tail
        self._leaves.withdraw(tail)
        self._at.update(zip(tail.keys, repeat(head)))
        head.extend(tail.keys, tail.use_counts, use_base=tail.use_base)
        head.child_count = tail.child_count
        tail.keys = []
        if not head.child_count:
            self._leaves.offer(head)
        return head

    def _unlink(self, run: Run[Key]) -> None:
        parent = run.parent
        if parent is None:
            return
        holder = self._at.get(parent)
        if holder is not None:
            holder.child_count -= 1
            if not holder.child_count:
                self._leaves.offer(holder)
            return
        count = self._orphan_counts[parent] - 1
        if count:
            self._orphan_counts[parent] = count
        else:
            del self._orphan_counts[parent]

    def _would_close_ring(self, key: Key, parent: Key) -> bool:
        """Of a block that is awaited: else it is nobody's ancestor."""
        ancestor: Key | None = parent
        for _ in range(_ANCESTORS_MAX):
            if ancestor is None or ancestor == key:
                return ancestor is not None
            run = self._at.get(ancestor)
            ancestor = None if run is None else run.parent
        return True


def _offset(run: Run[Key], key: Key) -> int:
    return 0 if run.keys[0] == key else run.index_of(key)


def _common_count(keys: list[Key], offset: int, chain: list[Key], start: int) -> int:
    """How many blocks of two chains, the first of which are equal, are so from there on."""
    count = min(len(keys) - offset, len(chain) - start)
    if keys[offset : offset + count] == chain[start : start + count]:
        return count
    low, high = 1, count - 1  # so many are equal, at least and at most
    while low < high:
        middle = (low + high + 1) // 2
        if keys[offset + low : offset + middle] == chain[start + low : start + middle]:
            low = middle
        else:
            high = middle - 1
    return low
