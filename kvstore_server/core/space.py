"""How arenas are divided: slabs of equal slots, one slot size per namespace, one tenant per slab."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NewType

from kvstore.errors import CapacityError
from kvstore.slots import SlotAllocator, SlotId
from kvstore_server.core.tenants import ScopedId, Tenant, tenant_of

Place = NewType("Place", int)
"""Where a slot starts, in bytes from the start of arena 0; arenas follow each other without gaps."""

SlabId = NewType("SlabId", int)

SLOT_ALIGNMENT_BYTES = 4096
"""Page and O_DIRECT sector size, so that slots can be registered, mapped and written to disk as they are."""


class _Shelf:
    """The slabs of one namespace."""

    __slots__ = ("open_slabs", "slabs", "slot_bytes", "slots_per_slab", "tenant")

    def __init__(self, *, tenant: Tenant, slot_bytes: int, slots_per_slab: int) -> None:
        self.tenant = tenant
        self.slot_bytes = slot_bytes
        self.slots_per_slab = slots_per_slab
        self.slabs: dict[SlabId, SlotAllocator] = {}
        self.open_slabs: dict[SlabId, None] = {}  # those with a free slot; a dict for its order


class SlabSpace:
    """Hands out places and counts their holders. Knows nothing of bytes or blocks.

    A slab belongs to one namespace while any of its slots is taken, and to nobody otherwise, so space moves
    to where it is needed. Slots of different namespaces never overlap; `used_bytes` never passes
    `capacity_bytes`. A slab that a tenant has used serves only that tenant until its memory has been replaced.
    """

    def __init__(self, *, slab_count: int, slab_bytes: int, tenant_count: int = 1) -> None:
        self.slab_bytes = slab_bytes
        self.capacity_bytes = slab_count * slab_bytes
        self.ready_bytes = 0
        self.used_bytes = 0
        self.tenant_count = tenant_count
        self.share_count = slab_count // tenant_count
        """Slabs that each tenant can have whatever the others do."""
        self._fresh_slabs: dict[SlabId, None] = {}  # a dict for its order
        self._free_slabs: dict[Tenant, list[SlabId]] = {}
        self._tenant_of_slab: dict[SlabId, Tenant] = {}
        self._slab_counts: dict[Tenant, int] = {}
        self._replacing: dict[SlabId, Tenant] = {}
        self._shelves: dict[ScopedId, _Shelf] = {}
        self._shelf_of_slab: dict[SlabId, _Shelf] = {}
        # Holders beside the one that `allocate` gave. Absent: none, which is what nearly all places have.
        self._more_holders: dict[Place, int] = {}

    def add_slab(self, slab: SlabId) -> None:
        """Puts a slab into service, of which nobody has seen a byte; its memory must be faulted in by now.

        One that was replaced is kept for the tenant that it was replaced for.
        """
        assert slab not in self._tenant_of_slab or slab in self._replacing, f"slab {slab} was added twice"
        self.ready_bytes += self.slab_bytes
        assert self.ready_bytes <= self.capacity_bytes, f"slab {slab} was added twice"
        tenant = self._replacing.pop(slab, None)
        if tenant is None:
            self._fresh_slabs[slab] = None
        else:
            self._free_slabs.setdefault(tenant, []).append(slab)

    def claim_foreign_slab(self, tenant: Tenant) -> bool:
        """Takes a free slab that another tenant has used out of service, so that its memory is replaced.

        False when there is none, or when one is on its way to this tenant already.
        """
        if self.is_waiting(tenant):
            return False
        for other, slabs in self._free_slabs.items():
            if other != tenant and slabs:
                slab = slabs.pop()
                self._replacing[slab] = tenant
                self._disown(slab)
                self._own(slab, tenant)
                self.ready_bytes -= self.slab_bytes
                return True
        return False

    def is_waiting(self, tenant: Tenant) -> bool:
        """Whether a slab is being replaced for a tenant."""
        return tenant in self._replacing.values()

    def slabs_to_replace(self) -> list[SlabId]:
        """Slabs out of service: each needs new memory, and then `add_slab`."""
        return list(self._replacing)

    def is_below_share(self, tenant: Tenant) -> bool:
        return self._slab_counts.get(tenant, 0) < self.share_count

    def is_above_share(self, tenant: Tenant) -> bool:
        return self._slab_counts.get(tenant, 0) > self.share_count

    def tenant_of_slab(self, slab: SlabId) -> Tenant | None:
        """Whose bytes are, or may be, in a slab: nobody else may map it. None: nobody's."""
        return None if slab in self._replacing else self._tenant_of_slab.get(slab)

    def open(self, namespace_id: ScopedId, *, block_bytes: int) -> int:
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
            self._shelves[namespace_id] = _Shelf(
                tenant=tenant_of(namespace_id), slot_bytes=slot_bytes, slots_per_slab=self.slab_bytes // slot_bytes
            )
        return self._shelves[namespace_id].slot_bytes

    def close(self, namespace_id: ScopedId) -> None:
        """Forgets a namespace that has no slab."""
        shelf = self._shelves.pop(namespace_id)
        assert not shelf.slabs, f"namespace {namespace_id.hex()[:16]} still has slabs {list(shelf.slabs)}"

    def allocate(self, namespace_id: ScopedId) -> Place | None:
        """A place with one holder, or None: no free slot and no free slab."""
        shelf = self._shelves[namespace_id]
        slab = next(iter(shelf.open_slabs), None)
        if slab is None:
            slab = self._take_free_slab(shelf.tenant)
            if slab is None:
                return None
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

    def restore(self, namespace_id: ScopedId, places: Sequence[Place]) -> list[bool]:
        """Takes places as they were before a restart, with one holder each; says of each whether it could be taken.

        It cannot when it is misaligned or was given before, or when its slab is not in service or in use already.
        """
        shelf, slab_bytes = self._shelves[namespace_id], self.slab_bytes
        slot_at = {slot * shelf.slot_bytes: slot for slot in range(shelf.slots_per_slab)}
        slots_of: dict[int, set[int]] = {slab: set() for slab in self._fresh_slabs}
        none: set[int] = set()
        is_taken: list[bool] = []
        for place in places:
            slab, offset = divmod(place, slab_bytes)
            slot, slots = slot_at.get(offset), slots_of.get(slab, none)
            if slot is None or slots is none or slot in slots:
                is_taken.append(False)
            else:
                slots.add(slot)
                is_taken.append(True)
        for slab, slots in slots_of.items():
            if slots:
                self._restore_slab(SlabId(slab), shelf, slots)
        return is_taken

    def missing_slab_count(self, counts: Mapping[ScopedId, int]) -> int:
        """How many more slabs it takes so that so many places of each namespace can be allocated."""
        needed: Counter[Tenant] = Counter()
        for namespace_id, count in counts.items():
            shelf = self._shelves[namespace_id]
            left = count - sum(shelf.slabs[slab].free_count for slab in shelf.open_slabs)
            needed[shelf.tenant] += max(-(-left // shelf.slots_per_slab), 0)
        own = {tenant: len(self._free_slabs.get(tenant, ())) for tenant in needed}
        short = sum(max(count - own[tenant], 0) for tenant, count in needed.items())
        return max(short - len(self._fresh_slabs), 0)

    def retain(self, places: Iterable[Place]) -> None:
        """Adds a holder to each, which has one already; one `release` is owed for each."""
        more = self._more_holders
        for place in places:
            more[place] = more.get(place, 0) + 1

    def release(self, place: Place) -> bool:
        """Gives up one hold; True when the slot is free again. An empty slab goes back to everybody."""
        count = self._more_holders.get(place)
        if count:
            if count == 1:
                del self._more_holders[place]
            else:
                self._more_holders[place] = count - 1
            return False
        allocator, slot = self._find(place)
        allocator.release(slot)
        slab = self.slab_of(place)
        shelf = self._shelf_of_slab[slab]
        self.used_bytes -= shelf.slot_bytes
        if allocator.free_count == allocator.slot_count:
            del shelf.slabs[slab], self._shelf_of_slab[slab]
            shelf.open_slabs.pop(slab, None)
            self._free_slabs.setdefault(shelf.tenant, []).append(slab)
        else:
            shelf.open_slabs[slab] = None
        return True

    def ref_count(self, place: Place) -> int:
        allocator, slot = self._find(place)
        return allocator.ref_count(slot) + self._more_holders.get(place, 0)

    def has_slabs(self, namespace_id: ScopedId) -> bool:
        """Whether anything of a namespace is here, be it only for its last readers."""
        return bool(self._shelves[namespace_id].slabs)

    def slot_bytes(self, namespace_id: ScopedId) -> int:
        return self._shelves[namespace_id].slot_bytes

    def slab_of(self, place: Place) -> SlabId:
        return SlabId(place // self.slab_bytes)

    def slabs_of_others(self, namespace_id: ScopedId | None) -> list[tuple[ScopedId, SlabId, int]]:
        """All slabs that belong to other namespaces (None: to any): whose, which, and how many slots are taken."""
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
        for place, count in self._more_holders.items():
            assert count > 0, f"place {place} has {count} more holders"
            allocator, slot = self._find(place)
            assert allocator.ref_count(slot) == 1, f"place {place} is held and free"
        taken = 0
        free = [*self._fresh_slabs, *(slab for slabs in self._free_slabs.values() for slab in slabs)]
        assert len(set(free)) == len(free), f"a slab is free twice: {free}"
        assert not set(free) & set(self._replacing), f"slabs {list(self._replacing)} are not out of service"
        for slab in self._fresh_slabs:
            assert slab not in self._tenant_of_slab, f"slab {slab} is not fresh"
        for tenant, slabs_of_tenant in self._free_slabs.items():
            for slab in slabs_of_tenant:
                assert self._tenant_of_slab[slab] == tenant, f"slab {slab} is free for the wrong tenant"
        for tenant, count in self._slab_counts.items():
            assert count == list(self._tenant_of_slab.values()).count(tenant), f"{tenant!r} has not {count} slabs"
        for shelf in self._shelves.values():
            for slab, allocator in shelf.slabs.items():
                allocator.check_invariants()
                assert self._shelf_of_slab[slab] is shelf, f"slab {slab} is on two shelves"
                assert slab not in free, f"slab {slab} is free and taken"
                assert self._tenant_of_slab[slab] == shelf.tenant, f"slab {slab} is another tenant's"
                assert (slab in shelf.open_slabs) == (allocator.free_count > 0), f"slab {slab} is wrongly open or not"
                assert allocator.free_count < allocator.slot_count, f"slab {slab} is empty but not free"
                taken += (allocator.slot_count - allocator.free_count) * shelf.slot_bytes
        assert taken == self.used_bytes <= self.ready_bytes, f"used_bytes {self.used_bytes}, really {taken}"
        slabs = len(free) + len(self._shelf_of_slab)
        assert slabs * self.slab_bytes == self.ready_bytes, f"{slabs} slabs for {self.ready_bytes} bytes"

    def _take_free_slab(self, tenant: Tenant) -> SlabId | None:
        own = self._free_slabs.get(tenant)
        if own:
            return own.pop()
        if not self._fresh_slabs:
            return None
        slab, _ = self._fresh_slabs.popitem()
        self._own(slab, tenant)
        return slab

    def _restore_slab(self, slab: SlabId, shelf: _Shelf, slots: set[int]) -> None:
        del self._fresh_slabs[slab]
        self._own(slab, shelf.tenant)
        allocator = shelf.slabs[slab] = SlotAllocator(slot_count=shelf.slots_per_slab, taken=slots)
        if allocator.free_count:
            shelf.open_slabs[slab] = None
        self._shelf_of_slab[slab] = shelf
        self.used_bytes += len(slots) * shelf.slot_bytes

    def _own(self, slab: SlabId, tenant: Tenant) -> None:
        self._tenant_of_slab[slab] = tenant
        self._slab_counts[tenant] = self._slab_counts.get(tenant, 0) + 1

    def _disown(self, slab: SlabId) -> None:
        self._slab_counts[self._tenant_of_slab.pop(slab)] -= 1

    def _find(self, place: Place) -> tuple[SlotAllocator, SlotId]:
        slab_bytes = self.slab_bytes
        slab = SlabId(place // slab_bytes)
        shelf = self._shelf_of_slab[slab]
        return shelf.slabs[slab], SlotId(place % slab_bytes // shelf.slot_bytes)


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
