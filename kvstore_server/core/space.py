"""How an arena is divided: slabs of equal slots, one slot size per namespace."""

from __future__ import annotations

from typing import NewType

from kvstore.errors import CapacityError
from kvstore.keys import NamespaceId
from kvstore.slots import SlotAllocator, SlotId

Place = NewType("Place", int)
"""Where a slot starts in the arena, in bytes."""

SlabId = NewType("SlabId", int)

SLOT_ALIGNMENT_BYTES = 4096
"""Page and O_DIRECT sector size, so that slots can be registered, mapped and written to disk as they are."""


class _Shelf:
    """The slabs of one namespace."""

    __slots__ = ("open_slabs", "slabs", "slot_bytes", "slots_per_slab")

    def __init__(self, *, slot_bytes: int, slots_per_slab: int) -> None:
        self.slot_bytes = slot_bytes
        self.slots_per_slab = slots_per_slab
        self.slabs: dict[SlabId, SlotAllocator] = {}
        self.open_slabs: dict[SlabId, None] = {}  # those with a free slot; a dict for its order


class SlabSpace:
    """Hands out places and counts their holders. Knows nothing of bytes or blocks.

    A slab belongs to one namespace while any of its slots is taken, and to nobody otherwise, so space moves
    to where it is needed. Slots of different namespaces never overlap; `used_bytes` never passes
    `capacity_bytes`.
    """

    def __init__(self, *, slab_count: int, slab_bytes: int) -> None:
        self.slab_bytes = slab_bytes
        self.capacity_bytes = slab_count * slab_bytes
        self.ready_bytes = 0
        self.used_bytes = 0
        self._free_slabs: list[SlabId] = []
        self._shelves: dict[NamespaceId, _Shelf] = {}
        self._shelf_of_slab: dict[SlabId, _Shelf] = {}

    def add_slab(self, slab: SlabId) -> None:
        """Puts a slab into service; its memory must be faulted in by now."""
        self.ready_bytes += self.slab_bytes
        assert self.ready_bytes <= self.capacity_bytes, f"slab {slab} was added twice"
        self._free_slabs.append(slab)

    def open(self, namespace_id: NamespaceId, *, block_bytes: int) -> int:
        """Makes a namespace known and returns its slot size in bytes; raises `CapacityError` if no slab holds a block.

        Slots share out the whole slab, so that a full arena is full by its bytes too.
        """
        if namespace_id not in self._shelves:
            if block_bytes > self.slab_bytes:
                raise CapacityError(
                    f"a block of {block_bytes} bytes does not fit into a slab of {self.slab_bytes}; "
                    "raise memory.slab_size, or use fewer tokens per block"
                )
            count = self.slab_bytes // _round_up(block_bytes)
            slot_bytes = self.slab_bytes // max(count, 1) // SLOT_ALIGNMENT_BYTES * SLOT_ALIGNMENT_BYTES
            self._shelves[namespace_id] = _Shelf(slot_bytes=slot_bytes, slots_per_slab=self.slab_bytes // slot_bytes)
        return self._shelves[namespace_id].slot_bytes

    def close(self, namespace_id: NamespaceId) -> None:
        """Forgets a namespace that has no slab."""
        shelf = self._shelves.pop(namespace_id)
        assert not shelf.slabs, f"namespace {namespace_id.hex()[:16]} still has slabs {list(shelf.slabs)}"

    def allocate(self, namespace_id: NamespaceId) -> Place | None:
        """A place with one holder, or None: no free slot and no free slab."""
        shelf = self._shelves[namespace_id]
        slab = next(iter(shelf.open_slabs), None)
        if slab is None:
            if not self._free_slabs:
                return None
            slab = self._free_slabs.pop()
            shelf.slabs[slab] = SlotAllocator(slot_count=shelf.slots_per_slab)
            shelf.open_slabs[slab] = None
            self._shelf_of_slab[slab] = shelf
        allocator = shelf.slabs[slab]
        slot = allocator.allocate()
        assert slot is not None, f"slab {slab} is listed as open but full"
        if not allocator.free_count:
            del shelf.open_slabs[slab]
        self.used_bytes += shelf.slot_bytes
        return Place(slab * self.slab_bytes + slot * shelf.slot_bytes)

    def retain(self, place: Place) -> None:
        allocator, slot = self._find(place)
        allocator.retain(slot)

    def release(self, place: Place) -> bool:
        """Gives up one hold; True when the slot is free again. An empty slab goes back to everybody."""
        allocator, slot = self._find(place)
        if not allocator.release(slot):
            return False
        slab = self.slab_of(place)
        shelf = self._shelf_of_slab[slab]
        self.used_bytes -= shelf.slot_bytes
        if allocator.free_count == allocator.slot_count:
            del shelf.slabs[slab], self._shelf_of_slab[slab]
            shelf.open_slabs.pop(slab, None)
            self._free_slabs.append(slab)
        else:
            shelf.open_slabs[slab] = None
        return True

    def ref_count(self, place: Place) -> int:
        allocator, slot = self._find(place)
        return allocator.ref_count(slot)

    def has_slabs(self, namespace_id: NamespaceId) -> bool:
        """Whether anything of a namespace is here, be it only for its last readers."""
        return bool(self._shelves[namespace_id].slabs)

    def slot_bytes(self, namespace_id: NamespaceId) -> int:
        return self._shelves[namespace_id].slot_bytes

    def slab_of(self, place: Place) -> SlabId:
        return SlabId(place // self.slab_bytes)

    def slabs_of_others(self, namespace_id: NamespaceId) -> list[tuple[NamespaceId, SlabId, int]]:
        """All slabs that belong to other namespaces: whose, which, and how many of its slots are taken."""
        return [
            (owner, slab, allocator.slot_count - allocator.free_count)
            for owner, shelf in self._shelves.items()
            if owner != namespace_id
            for slab, allocator in shelf.slabs.items()
        ]

    def taken_places(self, slab: SlabId) -> list[Place]:
        """All places of a slab that have a holder."""
        shelf = self._shelf_of_slab[slab]
        allocator = shelf.slabs[slab]
        base = slab * self.slab_bytes
        return [
            Place(base + slot * shelf.slot_bytes)
            for slot in range(allocator.slot_count)
            if allocator.ref_count(SlotId(slot))
        ]

    def check_invariants(self) -> None:
        taken = 0
        for shelf in self._shelves.values():
            for slab, allocator in shelf.slabs.items():
                allocator.check_invariants()
                assert self._shelf_of_slab[slab] is shelf, f"slab {slab} is on two shelves"
                assert slab not in self._free_slabs, f"slab {slab} is free and taken"
                assert (slab in shelf.open_slabs) == (allocator.free_count > 0), f"slab {slab} is wrongly open or not"
                assert allocator.free_count < allocator.slot_count, f"slab {slab} is empty but not free"
                taken += (allocator.slot_count - allocator.free_count) * shelf.slot_bytes
        assert taken == self.used_bytes <= self.ready_bytes, f"used_bytes {self.used_bytes}, really {taken}"
        slabs = len(self._free_slabs) + len(self._shelf_of_slab)
        assert slabs * self.slab_bytes == self.ready_bytes, f"{slabs} slabs for {self.ready_bytes} bytes"

    def _find(self, place: Place) -> tuple[SlotAllocator, SlotId]:
        slab = self.slab_of(place)
        shelf = self._shelf_of_slab[slab]
        return shelf.slabs[slab], SlotId((place - slab * self.slab_bytes) // shelf.slot_bytes)


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
