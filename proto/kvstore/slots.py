"""Which slots of a slab or pool are taken, and by how many holders."""

from __future__ import annotations

from collections.abc import Collection
from typing import NewType

SlotId = NewType("SlotId", int)


class SlotAllocator:
    """Hands out slots and counts their holders. Knows nothing of bytes or blocks.

    Every slot is either free or has a ref count above zero, never both.
    """

    __slots__ = ("_free", "_refs")

    def __init__(self, *, slot_count: int, taken: Collection[int] = ()) -> None:
        """Each of `taken` has one holder; of the others the first is given out next."""
        self._refs = [0] * slot_count
        for slot in taken:
            self._refs[slot] = 1
        self._free = [SlotId(slot) for slot in range(slot_count - 1, -1, -1) if not self._refs[slot]]

    @property
    def slot_count(self) -> int:
        return len(self._refs)

    @property
    def free_count(self) -> int:
        return len(self._free)

    def allocate(self) -> SlotId | None:
        """A slot with one holder, or None: all in use."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._refs[slot] = 1
        return slot

    def retain(self, slot: SlotId) -> None:
        assert self._refs[slot] > 0, f"retain of free slot {slot}"
        self._refs[slot] += 1

    def release(self, slot: SlotId) -> bool:
        """Gives up one hold; True when it was the last and the slot is free again."""
        assert self._refs[slot] > 0, f"release of free slot {slot}"
        self._refs[slot] -= 1
        if self._refs[slot]:
            return False
        self._free.append(slot)
        return True

    def ref_count(self, slot: SlotId) -> int:
        return self._refs[slot]

    def check_invariants(self) -> None:
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is free twice"
        for slot, refs in enumerate(self._refs):
            assert refs >= 0, f"slot {slot} has {refs} refs"
            assert (refs == 0) == (slot in free), f"slot {slot}: {refs} refs, free: {slot in free}"
