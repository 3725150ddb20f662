"""Where each block of the VRAM tier is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvstore.keys import BlockHash
from kvstore.slots import SlotAllocator, SlotId


class Place(Enum):
    LOADING = "loading"
    """Has a slot; its bytes are on their way in and may not be read."""
    RESIDENT = "resident"
    """Has a slot with its bytes."""
    MIGRATING = "migrating"
    """Has a slot with its bytes, still readable, which may not be given up before the daemon has answered."""
    OFFLOADED = "offloaded"
    """Has no slot; the daemon had it when last heard of."""


class Resident(NamedTuple):
    """A block that is to be copied down."""

    block_hash: BlockHash
    parent_hash: BlockHash | None


@dataclass(slots=True)
class _Entry:
    place: Place
    parent_hash: BlockHash | None
    slot: SlotId | None
    has_lower_copy: bool = False
    cool_until_step: int = 0


class BlockTable:
    """Block hash → place, and which slot of the pool holds what. Knows nothing of bytes.

    A slot is free, or has exactly one block, or has lost its block while readers still hold it, or is private: an
    engine writes a block there that is not full yet. Blocks move only LOADING → RESIDENT ⇄ MIGRATING → OFFLOADED →
    LOADING, and out of the table from any place; every other move is a bug. OFFLOADED entries are hints: beyond
    `offloaded_count_max` the oldest is forgotten.
    """

    def __init__(self, *, slot_count: int, offloaded_count_max: int) -> None:
        self._slots = SlotAllocator(slot_count=slot_count)
        self._entries: dict[BlockHash, _Entry] = {}
        self._offloaded: dict[BlockHash, None] = {}  # in the order they left
        self._offloaded_count_max = offloaded_count_max
        self._block_in: dict[SlotId, BlockHash] = {}
        self._private: set[SlotId] = set()
        self._reader_counts: dict[SlotId, int] = {}
        self._migrating_count = 0

    @property
    def slot_count(self) -> int:
        return self._slots.slot_count

    @property
    def free_count(self) -> int:
        return self._slots.free_count

    @property
    def pool_count(self) -> int:
        """Blocks that have a slot."""
        return len(self._block_in)

    @property
    def private_count(self) -> int:
        return len(self._private)

    @property
    def migrating_count(self) -> int:
        return self._migrating_count

    @property
    def held_count(self) -> int:
        """Slots that are being read."""
        return len(self._reader_counts)

    def place_of(self, block_hash: BlockHash) -> Place | None:
        entry = self._entries.get(block_hash)
        return None if entry is None else entry.place

    def parent_of(self, block_hash: BlockHash) -> BlockHash | None:
        return self._entries[block_hash].parent_hash

    def has_lower_copy(self, block_hash: BlockHash) -> bool:
        """Whether the daemon had this block when last heard of."""
        return self._entries[block_hash].has_lower_copy

    def block_in(self, slot: SlotId) -> BlockHash | None:
        """None: the slot is free or private, or has lost its block."""
        return self._block_in.get(slot)

    def slot_of(self, block_hash: BlockHash) -> SlotId | None:
        entry = self._entries.get(block_hash)
        return None if entry is None else entry.slot

    def cools(self, block_hash: BlockHash, *, step: int) -> bool:
        """Whether a block in the pool is in its cool-down."""
        return self._entries[block_hash].cool_until_step > step

    def reader_count(self, slot: SlotId) -> int:
        return self._reader_counts.get(slot, 0)

    def is_held(self, block_hash: BlockHash) -> bool:
        """Whether the slot of a block in the pool is being read."""
        return self._entries[block_hash].slot in self._reader_counts

    def forget_lower_copy(self, block_hash: BlockHash) -> None:
        """The daemon no longer has this block, which has a slot: if it is dropped now, it is lost."""
        entry = self._entries[block_hash]
        assert entry.slot is not None, f"{block_hash.hex()[:16]} would be nowhere"
        entry.has_lower_copy = False

    def residents(self) -> Iterator[Resident]:
        for block_hash, entry in self._entries.items():
            if entry.place is Place.RESIDENT:
                yield Resident(block_hash, entry.parent_hash)

    def migrating(self) -> list[BlockHash]:
        return [block_hash for block_hash, entry in self._entries.items() if entry.place is Place.MIGRATING]

    # --- bytes come in

    def begin_load(self, block_hash: BlockHash, *, parent_hash: BlockHash | None) -> SlotId | None:
        """Takes a slot for a block that has none; None: no slot is free. A known parent is kept."""
        entry = self._entries.get(block_hash)
        assert entry is None or entry.place is Place.OFFLOADED, f"load of a block that is {entry}"
        slot = self._slots.allocate()
        if slot is None:
            return None
        if entry is None:
            entry = _Entry(Place.LOADING, parent_hash, slot)
            self._entries[block_hash] = entry
        else:
            del self._offloaded[block_hash]
            entry.place, entry.slot = Place.LOADING, slot
        self._block_in[slot] = block_hash
        return slot

    def finish_load(self, block_hash: BlockHash, *, has_lower_copy: bool, cool_until_step: int = 0) -> None:
        """The bytes have landed. A block that left for the daemon before still counts as being there, too."""
        entry = self._at(block_hash, Place.LOADING)
        entry.place = Place.RESIDENT
        entry.has_lower_copy |= has_lower_copy
        entry.cool_until_step = cool_until_step

    def abandon_load(self, block_hash: BlockHash) -> None:
        """The bytes did not land; the block is nowhere in this tier."""
        entry = self._at(block_hash, Place.LOADING)
        self._release_slot(entry)
        del self._entries[block_hash]

    # --- bytes are written by an engine

    def reserve(self) -> SlotId | None:
        """A slot of the caller's own; None: no slot is free."""
        slot = self._slots.allocate()
        if slot is not None:
            self._private.add(slot)
        return slot

    def seal(self, slot: SlotId, block_hash: BlockHash, *, parent_hash: BlockHash | None) -> bool:
        """A private slot holds this block from now on; False: the block has a slot, and this one is free again."""
        self._private.remove(slot)
        entry = self._entries.get(block_hash)
        if entry is not None and entry.place is not Place.OFFLOADED:
            self._slots.release(slot)
            return False
        if entry is None:
            self._entries[block_hash] = _Entry(Place.RESIDENT, parent_hash, slot)
        else:
            del self._offloaded[block_hash]
            entry.place, entry.slot = Place.RESIDENT, slot
        self._block_in[slot] = block_hash
        return True

    def is_private(self, slot: SlotId) -> bool:
        return slot in self._private

    def discard(self, slot: SlotId) -> None:
        """Gives a private slot back."""
        self._private.remove(slot)
        self._slots.release(slot)

    # --- bytes are read

    def hold(self, block_hash: BlockHash) -> SlotId | None:
        """The slot of a readable block, kept from reuse until `release`; None: no bytes here."""
        entry = self._entries.get(block_hash)
        if entry is None or entry.slot is None or entry.place is Place.LOADING:
            return None
        self._slots.retain(entry.slot)
        self._reader_counts[entry.slot] = self._reader_counts.get(entry.slot, 0) + 1
        return entry.slot

    def release(self, slot: SlotId) -> bool:
        """True: nobody reads it any more."""
        count = self._reader_counts.get(slot, 0)
        assert count > 0, f"release of slot {slot}, which nobody holds"
        if count == 1:
            del self._reader_counts[slot]
        else:
            self._reader_counts[slot] = count - 1
        self._slots.release(slot)
        return count == 1

    # --- bytes go out

    def begin_migration(self, block_hash: BlockHash) -> None:
        entry = self._at(block_hash, Place.RESIDENT)
        entry.place = Place.MIGRATING
        self._migrating_count += 1

    def migrating_slot(self, block_hash: BlockHash) -> SlotId:
        slot = self._at(block_hash, Place.MIGRATING).slot
        assert slot is not None, f"{block_hash.hex()[:16]} migrates without a slot"
        return slot

    def finish_migration(self, block_hash: BlockHash) -> None:
        """The daemon has the block; its slot is free as soon as nobody reads it."""
        entry = self._at(block_hash, Place.MIGRATING)
        self._migrating_count -= 1
        self._leave_for_daemon(block_hash, entry)

    def stay_resident(self, block_hash: BlockHash, *, has_lower_copy: bool, cool_until_step: int = 0) -> None:
        """The migration was called off, refused, or only a copy was wanted."""
        entry = self._at(block_hash, Place.MIGRATING)
        entry.place = Place.RESIDENT
        entry.has_lower_copy = has_lower_copy
        entry.cool_until_step = max(entry.cool_until_step, cool_until_step)
        self._migrating_count -= 1

    def drop(self, block_hash: BlockHash) -> bool:
        """Gives a resident block up without moving it; True when no lower copy is known, so it may be lost."""
        entry = self._at(block_hash, Place.RESIDENT)
        if entry.has_lower_copy:
            self._leave_for_daemon(block_hash, entry)
            return False
        self._release_slot(entry)
        del self._entries[block_hash]
        return True

    def forget_offloaded(self, block_hash: BlockHash) -> None:
        """The daemon no longer has it."""
        self._at(block_hash, Place.OFFLOADED)
        del self._entries[block_hash], self._offloaded[block_hash]

    # ---

    def check_invariants(self) -> None:
        self._slots.check_invariants()
        refs = dict(self._reader_counts)
        owned: dict[SlotId, BlockHash] = {}
        for slot in self._private:
            assert slot not in refs, f"private slot {slot} is being read"
            refs[slot] = 1
        for block_hash, entry in self._entries.items():
            offloaded = entry.place is Place.OFFLOADED
            assert (entry.slot is None) == offloaded, f"{entry} has the wrong idea of its slot"
            assert offloaded == (block_hash in self._offloaded), f"{entry} is not where the hints say"
            if entry.slot is not None:
                assert entry.slot not in owned, f"slot {entry.slot} holds two blocks"
                owned[entry.slot] = block_hash
                refs[entry.slot] = refs.get(entry.slot, 0) + 1
        for number in range(self.slot_count):
            slot = SlotId(number)
            assert self._slots.ref_count(slot) == refs.get(slot, 0), f"slot {slot} has refs that nobody accounts for"
        assert owned == self._block_in, f"slots: {self._block_in}, really {owned}"
        migrating = sum(entry.place is Place.MIGRATING for entry in self._entries.values())
        assert migrating == self._migrating_count, f"{self._migrating_count} migrating, really {migrating}"
        assert len(self._offloaded) <= self._offloaded_count_max, f"{len(self._offloaded)} hints"

    def _at(self, block_hash: BlockHash, place: Place) -> _Entry:
        entry = self._entries.get(block_hash)
        assert entry is not None, f"{block_hash.hex()[:16]} is unknown, not {place.value}"
        assert entry.place is place, f"{block_hash.hex()[:16]} is {entry.place.value}, not {place.value}"
        return entry

    def _leave_for_daemon(self, block_hash: BlockHash, entry: _Entry) -> None:
        self._release_slot(entry)
        entry.place, entry.has_lower_copy, entry.cool_until_step = Place.OFFLOADED, True, 0
        self._offloaded[block_hash] = None
        if len(self._offloaded) > self._offloaded_count_max:
            self.forget_offloaded(next(iter(self._offloaded)))

    def _release_slot(self, entry: _Entry) -> None:
        assert entry.slot is not None, f"{entry} has no slot to release"
        del self._block_in[entry.slot]
        self._slots.release(entry.slot)
        entry.slot = None
