"""Least recently used, leaves of the prefix tree only, so that no chain ever has a hole."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

_STALE_ENTRIES_MAX = 1024
_ANCESTORS_MAX = 2048
"""Blocks that are walked up to look for a ring: a third of a millisecond, and 32k tokens of 16-token blocks."""


class _Node(Generic[Key]):
    __slots__ = ("child_count", "hold_count", "parent", "queued_push", "stamp", "use_count")

    def __init__(self, parent: Key | None, stamp: int, use_count: int) -> None:
        self.parent = parent
        self.stamp = stamp
        self.use_count = use_count
        self.child_count = 0
        self.hold_count = 0
        self.queued_push = 0  # number of its queue entry; 0: none


class LeafLru(Generic[Key]):
    """Recency of blocks that know their parents.

    A block is a candidate while none of its children is here and nobody holds it. Touch a chain tail first, or
    its tail outlives its head. Every candidate has exactly one entry in the queue, possibly with an old stamp:
    a touch costs O(1), and old entries are put right when they surface. Held blocks cost a search nothing.
    """

    def __init__(self, *, refusal_count_max: int | None = None) -> None:
        """A search ends after so many refusals, so that a tier full of held blocks costs no more than that."""
        self._refusal_count_max = refusal_count_max
        self._nodes: dict[Key, _Node[Key]] = {}
        # Children whose parent is not here, counted for the day it comes (back).
        self._orphan_counts: dict[Key, int] = {}
        self._queue: list[tuple[int, int, Key]] = []
        self._clock = 0
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: Key) -> bool:
        return key in self._nodes

    def insert(self, key: Key, *, parent: Key | None, use_count: int = 0) -> None:
        """Adds a block as the most recent one; its parent may come later, or never.

        Parents are what callers claim. One that would make the block its own ancestor, or for all that a bounded
        walk can tell might, is ignored: in a ring nothing is ever a leaf, so nothing could ever leave.
        """
        assert key not in self._nodes, f"{key!r} inserted twice"
        self._clock += 1
        child_count = self._orphan_counts.pop(key, 0)
        if parent is not None and self._would_close_ring(key, parent, child_count):
            parent = None
        node = _Node(parent, self._clock, use_count)
        node.child_count = child_count
        self._nodes[key] = node
        if parent is not None:
            holder = self._nodes.get(parent)
            if holder is not None:
                holder.child_count += 1
            else:
                self._orphan_counts[parent] = self._orphan_counts.get(parent, 0) + 1
        self._queue_leaf(key, node)

    def restore(self, keys: Sequence[Key], parents: Sequence[Key | None]) -> None:
        """`insert` of each block with its parent, the most recent one last, into an empty tree; several times as fast.

        Of each ring the claim of one block is ignored.
        """
        assert not self._nodes, f"{len(self._nodes)} blocks are here already"
        self._clock = self._pushes = len(keys)
        nodes = {
            key: _Node(parent, stamp, 0)
            for key, parent, stamp in zip(keys, parents, range(1, len(keys) + 1), strict=True)
        }
        assert len(nodes) == len(keys), "a block was restored twice"
        self._nodes = nodes
        orphan_counts = self._orphan_counts
        against_order: list[Key] = []
        for key, node in nodes.items():
            parent = node.parent
            if parent is None:
                continue
            holder = nodes.get(parent)
            if holder is None:
                orphan_counts[parent] = orphan_counts.get(parent, 0) + 1
                continue
            holder.child_count += 1
            if holder.stamp >= node.stamp:
                against_order.append(key)
        self._open_rings(against_order)
        for key, node in nodes.items():
            if not node.child_count:
                node.queued_push = node.stamp
                self._queue.append((node.stamp, node.stamp, key))  # in order, and so a heap

    def touch_chain(self, chain: Iterable[Key]) -> None:
        """Counts one use of a run of blocks given head first; blocks that are not here are passed over."""
        stamp = self._clock
        nodes = filter(None, map(self._nodes.get, reversed(list(chain))))
        for stamp, node in enumerate(nodes, self._clock + 1):
            node.stamp = stamp
            node.use_count += 1
        self._clock = stamp

    def hold(self, keys: Iterable[Key]) -> None:
        """Keeps each of these blocks from being a candidate, once more, until as many `unhold`s."""
        nodes = self._nodes
        for key in keys:
            nodes[key].hold_count += 1

    def unhold(self, keys: Iterable[Key]) -> None:
        nodes = self._nodes
        for key in keys:
            node = nodes[key]
            assert node.hold_count > 0, f"{key!r} is not held"
            node.hold_count -= 1
            if not node.hold_count and not node.queued_push:
                self._queue_leaf(key, node)

    def is_held(self, key: Key) -> bool:
        return self._nodes[key].hold_count > 0

    def parent_of(self, key: Key) -> Key | None:
        """As it was claimed, whether or not that one is here; None: none, or one that was ignored."""
        return self._nodes[key].parent

    def is_parent(self, key: Key) -> bool:
        """Whether some block here has claimed this one as its parent, which need not be here."""
        node = self._nodes.get(key)
        return key in self._orphan_counts if node is None else node.child_count > 0

    def use_count(self, key: Key) -> int:
        """How often a block was touched, and what it came with."""
        return self._nodes[key].use_count

    def remove(self, key: Key) -> None:
        """Takes a block out, whoever asked, even from the middle of a chain."""
        node = self._nodes.pop(key)
        if node.child_count:
            self._orphan_counts[key] = node.child_count
        self._unlink(node)
        if len(self._queue) > 2 * len(self._nodes) + _STALE_ENTRIES_MAX:
            self._forget_stale_entries()

    def pop_coldest(
        self,
        *,
        goal_bytes: int,
        size_bytes_of: Callable[[Key], int],
        may_evict: Callable[[Key], bool | None] = lambda _: True,
        count_max: int | None = None,
    ) -> list[Key]:
        """Removes and returns the coldest leaves until they add up to `goal_bytes`, are `count_max`, or none is left.

        A parent becomes a candidate in the same call once its last child has gone. `may_evict` is asked of each while
        it is still here; blocks that it refuses keep their place, and where it says None the search ends, too.
        """
        victims: list[Key] = []
        refused: list[Key] = []
        freed_bytes = 0
        while freed_bytes < goal_bytes and (count_max is None or len(victims) < count_max):
            key = self._pop_leaf(refused, may_evict)
            if key is None:
                break
            self._unlink(self._nodes.pop(key))
            victims.append(key)
            freed_bytes += size_bytes_of(key)
        self._queue_again(refused)
        return victims

    def peek_coldest(self, *, may_evict: Callable[[Key], bool | None] = lambda _: True) -> Key | None:
        """The block that `pop_coldest` would take first."""
        seen: list[Key] = []
        key = self._pop_leaf(seen, may_evict)
        self._queue_again([*seen, key] if key is not None else seen)
        return key

    def check_invariants(self) -> None:
        counts: dict[Key, int] = {}
        for node in self._nodes.values():
            if node.parent is not None:
                counts[node.parent] = counts.get(node.parent, 0) + 1
        queued = {(push, key) for _, push, key in self._queue}
        for key, node in self._nodes.items():
            assert node.child_count == counts.pop(key, 0), f"{key!r} counts {node.child_count} children"
            is_candidate = not node.child_count and not node.hold_count
            assert not is_candidate or (node.queued_push, key) in queued, f"leaf {key!r} is not queued"
        assert counts == self._orphan_counts, f"orphans: {self._orphan_counts}, really {counts}"

    def _pop_leaf(self, refused: list[Key], may_evict: Callable[[Key], bool | None]) -> Key | None:
        """Takes the coldest permitted leaf off the queue; what `may_evict` refuses is added to `refused`."""
        while self._queue and (self._refusal_count_max is None or len(refused) < self._refusal_count_max):
            stamp, push, key = heapq.heappop(self._queue)
            node = self._nodes.get(key)
            if node is None or node.queued_push != push:
                continue  # of a block that has left since
            node.queued_push = 0
            if node.stamp != stamp:
                self._queue_leaf(key, node)
            elif node.child_count == 0 and node.hold_count == 0:
                verdict = may_evict(key)
                if verdict:
                    return key
                refused.append(key)
                if verdict is None:
                    return None
        return None

    def _queue_again(self, keys: list[Key]) -> None:
        for key in keys:
            self._queue_leaf(key, self._nodes[key])

    def _queue_leaf(self, key: Key, node: _Node[Key]) -> None:
        if node.queued_push == 0 and node.child_count == 0 and node.hold_count == 0:
            self._pushes += 1  # also breaks ties, so that keys need no order
            node.queued_push = self._pushes
            heapq.heappush(self._queue, (node.stamp, self._pushes, key))

    def _open_rings(self, suspects: Iterable[Key]) -> None:
        """Takes the most recent block of each ring from its parent; `suspects` has at least one block of each."""
        nodes, cleared = self._nodes, set[Key]()
        for suspect in suspects:
            trail = dict[Key, None]()
            at: Key | None = suspect
            while at in nodes and at not in cleared and at not in trail:
                trail[at] = None
                at = nodes[at].parent
            if at in trail:
                passed = list(trail)
                last = max(map(nodes.__getitem__, passed[passed.index(at) :]), key=lambda node: node.stamp)
                assert last.parent is not None, "a ring has no start"
                nodes[last.parent].child_count -= 1
                last.parent = None
            cleared.update(trail)

    def _would_close_ring(self, key: Key, parent: Key, child_count: int) -> bool:
        if key == parent:
            return True
        if child_count == 0:
            return False  # nobody's ancestor: the usual case, at no cost
        ancestor: Key | None = parent
        for _ in range(_ANCESTORS_MAX):
            if ancestor is None or ancestor == key:
                return ancestor is not None
            node = self._nodes.get(ancestor)
            ancestor = None if node is None else node.parent
        return True

    def _forget_stale_entries(self) -> None:
        """Drops entries of blocks that were removed; they surface too late when nothing is evicted."""
        self._queue = [entry for entry in self._queue if self._is_current(entry)]
        heapq.heapify(self._queue)

    def _is_current(self, entry: tuple[int, int, Key]) -> bool:
        _, push, key = entry
        node = self._nodes.get(key)
        return node is not None and node.queued_push == push

    def _unlink(self, node: _Node[Key]) -> None:
        if node.parent is None:
            return
        parent = self._nodes.get(node.parent)
        if parent is not None:
            parent.child_count -= 1
            self._queue_leaf(node.parent, parent)
        elif self._orphan_counts[node.parent] == 1:
            del self._orphan_counts[node.parent]
        else:
            self._orphan_counts[node.parent] -= 1
