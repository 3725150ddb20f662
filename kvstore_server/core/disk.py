"""The rules of the NVMe tier: what is on the disk, what may enter, what leaves. Moves no bytes.

Everything happens on one thread and takes the time as an argument. The shell around it writes blocks into places that
are taken here, reads them from places that are held here, and keeps an index on the disk of what is stored here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import not_
from types import MappingProxyType
from typing import NamedTuple

from kvstore.errors import InvalidArgumentError
from kvstore.eviction import DEMOTED_GAIN_MIN, NO_HINT, Evictor, Request, Use
from kvstore.keys import BlockHash
from kvstore_server.core.admission import Admission, Refusal
from kvstore_server.core.fates import Fate
from kvstore_server.core.space import SLOT_ALIGNMENT_BYTES, Place, SlabId, SlabSpace
from kvstore_server.core.store import NAMESPACE_COUNT_MAX, BlockKey
from kvstore_server.core.tenants import ScopedId, Tenant, tenant_of

_REFUSAL_COUNT_MAX = 4096
"""Blocks of other namespaces that a search for one's own coldest passes over: some 12 ms, once per eviction."""
_EVICTION_COUNT_MAX = 16
"""Blocks that one write evicts, a batch of writes: the disk is meant to be full, and a search is to serve them all."""
_EXPIRED_COUNT_MAX = 1024
"""Blocks that one call lets leave as their time is over, some 15 ms; the rest have their turn with the next call."""
_SEQUENCE_MAX = (1 << 63) - 1
"""Beyond all writes of a device's life; a record above it is damaged, and must not use up what fits into 64 bits."""


class DiskBlock(NamedTuple):
    """A readable block: where its slot starts, which write it is of, and how long it is there with its envelope."""

    place: Place
    sequence: int
    stored_bytes: int
    parent_hash: BlockHash | None


_Record = tuple[BlockKey, DiskBlock]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskWrite:
    """A slot on its way to becoming a block."""

    key: BlockKey
    place: Place
    sequence: int
    parent_hash: BlockHash | None
    slot_bytes: int


@dataclass(slots=True, kw_only=True)
class DiskCounters:
    """What happened since the start."""

    written_count: int = 0
    written_bytes: int = 0
    evicted_count: int = 0
    expired_count: int = 0
    """Blocks that were unused for as long as their clients had said that they were worth keeping."""
    dropped_count: int = 0
    """Blocks that did not verify."""
    read_count: int = 0
    read_before_evicted_count: int = 0
    """Evicted blocks that had been read at least once."""
    refused_counts: dict[str, int] = field(default_factory=lambda: {refusal.value: 0 for refusal in Refusal})
    """Blocks that were not wanted, by `Refusal`."""


@dataclass(slots=True, kw_only=True)
class _NamespaceEntry:
    stored: dict[BlockHash, DiskBlock] = field(default_factory=dict)
    writing: dict[BlockHash, DiskWrite] = field(default_factory=dict)


class DiskCore:
    """Index, space, admission and eviction of the NVMe tier.

    A block is stored, being written or absent. A stored block holds its slot once and each reader once more; a write
    holds its own. Nothing that somebody reads or writes is evicted, and no slot is given out before the last of them
    has ended. Blocks leave from the tails of their chains, and as many as a write needs: a full disk is as it should
    be. Nobody but the daemon sees the slots, and it serves nothing whose identity it has not verified, so one that
    has been another tenant's needs no wiping.
    """

    def __init__(self, *, space: SlabSpace, admission: Admission, policy: str = "lru") -> None:
        """Slabs of `space` are the segments; each is added to it once it exists."""
        self.space = space
        self.counters = DiskCounters()
        self._admission = admission
        self._last_sequence = 0
        self._namespaces: dict[ScopedId, _NamespaceEntry] = {}
        self._evictor: Evictor[BlockKey] = Evictor(policy, capacity_blocks=1, refusal_count_max=_REFUSAL_COUNT_MAX)
        self._now_s = 0.0  # the newest time that a caller has told
        self._writing_use: Use | None = None
        self._key_at: dict[Place, BlockKey] = {}
        # Whether a stored block was read since it was written. Absent: restored and not read since, so nobody knows.
        self._was_read: dict[Place, bool] = {}
        # Reads and writes under way in each segment. Absent: 0.
        self._use_counts: dict[SlabId, int] = {}
        self._evicted: dict[BlockKey, None] = {}  # a dict for its order
        self.on_left: Callable[[Sequence[BlockKey], Fate], None] = _nobody
        """Told of blocks that have left."""

    @property
    def policy(self) -> str:
        """By which blocks leave, as it was asked for."""
        return self._evictor.policy

    @property
    def policy_in_force(self) -> str:
        """The same as it is now: one that learns may follow another."""
        return self._evictor.policy_in_force

    @property
    def admission_policy(self) -> str:
        """By which blocks may enter."""
        return self._admission.policy

    # --- namespaces

    def open(self, namespace_id: ScopedId, *, slot_bytes: int) -> int | None:
        """Makes a namespace known; returns its slot size here, a multiple of 4096.

        That is what it was when first opened, at least what was asked for then. None: nothing of it can be stored
        here, for a slot does not fit into a segment, or too many other namespaces hold blocks.
        """
        if slot_bytes <= 0 or slot_bytes % SLOT_ALIGNMENT_BYTES:
            raise InvalidArgumentError.of("slot_bytes", slot_bytes, f"a multiple of {SLOT_ALIGNMENT_BYTES} above 0")
        if namespace_id not in self._namespaces:
            if slot_bytes > self.space.slab_bytes or not self._make_room_for_a_namespace():
                return None
            self._namespaces[namespace_id] = _NamespaceEntry()
        opened_bytes = self.space.open(namespace_id, block_bytes=slot_bytes)
        self._evictor.capacity_blocks = max(self._evictor.capacity_blocks, self.space.capacity_bytes // opened_bytes)
        return opened_bytes

    def is_open(self, namespace_id: ScopedId) -> bool:
        return namespace_id in self._namespaces

    # --- reading

    def stored(self, namespace_id: ScopedId) -> Mapping[BlockHash, DiskBlock]:
        """All blocks of a namespace, as they are at any later moment too; empty when it is not open."""
        entry = self._namespaces.get(namespace_id)
        return _NONE_STORED if entry is None else entry.stored

    def find(self, key: BlockKey) -> DiskBlock | None:
        return self.stored(key.namespace_id).get(key.block_hash)

    def some_block(self) -> DiskBlock | None:
        """Any that is stored."""
        key = next(iter(self._key_at.values()), None)
        return None if key is None else self.find(key)

    def begin_read(self, key: BlockKey) -> DiskBlock | None:
        """Holds a block for a reader, who owes one `end_read`; None when it is not here."""
        block = self.find(key)
        if block is not None:
            self.space.retain((block.place,))
            self._count_use(block.place, +1)
            self._evictor.hold((key,))
            self._was_read[block.place] = True
            self.counters.read_count += 1
        return block

    def end_read(self, key: BlockKey, block: DiskBlock) -> None:
        if self.find(key) == block:
            self._evictor.unhold((key,))
        self._count_use(block.place, -1)
        self.space.release(block.place)

    # --- use

    def begin_use(self, request: Request, *, now_s: float, chain_blocks: int, matched_blocks: int) -> Use:
        """A request uses a chain, whatever is here of it."""
        self._now_s = now_s
        return self._evictor.begin(request, now_s=now_s, chain_blocks=chain_blocks, matched_blocks=matched_blocks)

    def touch(self, keys: Sequence[BlockKey], *, use: Use) -> None:
        """Counts this use of a chain given head first; blocks that are not here are passed over."""
        if self._evictor.made(use):
            self._evictor.touch_chain(keys, use=use)

    def describe(self, keys: Sequence[BlockKey], request: Request, *, now_s: float) -> None:
        """More is known of the request that used this chain last."""
        self._now_s = now_s
        self._evictor.describe(keys, request, now_s=now_s)

    def retell(self, use: Use, request: Request) -> Use:
        """The same use where this is known of its request, for blocks that are yet to be written."""
        return self._evictor.retell(use, request) if self._evictor.made(use) else use

    def last_use(self, key: BlockKey) -> Use | None:
        """For which a block that is here was used last."""
        return self._evictor.last_use(key) if key in self._evictor else None

    # --- writing

    def wants(self, key: BlockKey, *, use_count: int, use: Use | None = None, now_s: float) -> bool:
        """Whether a block is to be written here, which was last used for `use`; counts the reason when it is not.

        A block that others here follow is wanted whatever admission says, and on credit if need be: without it they
        are of no use to anybody.
        """
        refusal = self._refusal(key, use_count=use_count, use=use, now_s=now_s)
        if refusal is not None:
            self.counters.refused_counts[refusal] += 1
        return refusal is None

    def begin_write(
        self, key: BlockKey, *, parent_hash: BlockHash | None, use: Use | None = None, now_s: float
    ) -> DiskWrite | None:
        """Takes a slot, at the cost of colder blocks if need be; owes one `end_write`.

        `use`: for which the block was last used; None, or one of another tier: not known, and so now.

        None: there is no room, or the block is here or on its way already.
        """
        entry = self._namespaces.get(key.namespace_id)
        if entry is None or key.block_hash in entry.stored or key.block_hash in entry.writing:
            return None
        # Into the tree first, so that room for a block is not made at its own parent's cost.
        own_use = self._own(use) or self._use_of_writes(now_s)
        self._evictor.insert(key, parent=_parent_key(key, parent_hash), use=own_use)
        self._evictor.hold((key,))
        place = self._take_place(key.namespace_id)
        if place is None:
            self._evictor.remove(key)
            return None
        self._last_sequence += 1
        write = DiskWrite(
            key=key,
            place=place,
            sequence=self._last_sequence,
            parent_hash=parent_hash,
            slot_bytes=self.space.slot_bytes(key.namespace_id),
        )
        entry.writing[key.block_hash] = write
        self._count_use(place, +1)
        self._admission.charge(write.slot_bytes, now_s=now_s)
        return write

    def end_write(self, write: DiskWrite, *, stored_bytes: int | None) -> None:
        """Makes a block readable that is so long with its envelope; None: it failed, and its slot is free again."""
        key = write.key
        entry = self._namespaces[key.namespace_id]
        assert entry.writing.get(key.block_hash) is write, f"{write} has ended already"
        del entry.writing[key.block_hash]
        self._count_use(write.place, -1)
        if stored_bytes is None:
            # Not refunded: some of it may have been written.
            self._evictor.remove(key)
            self.space.release(write.place)
            return
        assert 0 < stored_bytes <= write.slot_bytes, f"{stored_bytes} bytes in {write}"
        entry.stored[key.block_hash] = DiskBlock(write.place, write.sequence, stored_bytes, write.parent_hash)
        self._key_at[write.place] = key
        self._was_read[write.place] = False
        self._evicted.pop(key, None)
        self._evictor.unhold((key,))
        self._admission.refund(write.slot_bytes - stored_bytes)
        self.counters.written_count += 1
        self.counters.written_bytes += stored_bytes

    # --- leaving

    def drop(self, key: BlockKey, block: DiskBlock) -> bool:
        """Drops a block that did not verify, unless it was replaced meanwhile; readers keep its slot until they end."""
        if self.find(key) != block:
            return False
        self._evictor.remove(key)
        self._was_read.pop(block.place, None)
        self._forget(key)
        self.on_left([key], Fate.FAILED)
        self.counters.dropped_count += 1
        return True

    def expire(self, *, now_s: float) -> None:
        """Drops blocks that were not to be kept so long unused, some per call, but none that somebody uses."""
        self._now_s = now_s
        keys = self._evictor.expired(now_s=now_s, count_max=_EXPIRED_COUNT_MAX)
        for key in keys:
            self._was_read.pop(self._namespaces[key.namespace_id].stored[key.block_hash].place, None)
            self._forget(key)
        self.on_left(keys, Fate.EVICTED)
        self.counters.expired_count += len(keys)

    def evict_coldest(self, count: int) -> None:
        """Lets so many blocks leave, tails first, as far as nobody uses them: for want of room in the index."""
        self._evict(count, may_evict=lambda _: True)

    def is_writing(self, write: DiskWrite) -> bool:
        """Whether it owes its `end_write`."""
        return self._namespaces[write.key.namespace_id].writing.get(write.key.block_hash) is write

    def take_evicted(self) -> list[BlockKey]:
        """Blocks that have left since the last call, to be deleted from the index.

        One that is stored again is not among them, and neither is one that is being written again: its record is
        replaced when that succeeds, and it is named by a later call when that fails.
        """
        evicted, self._evicted = self._evicted, {}
        for key in evicted:
            if key.block_hash in self._namespaces[key.namespace_id].writing:
                self._evicted[key] = None
        return [key for key in evicted if key not in self._evicted]

    # --- starting

    def restore(
        self, records: Iterable[_Record], *, slot_bytes_of: Mapping[ScopedId, int], now_s: float
    ) -> list[BlockKey]:
        """Makes blocks readable that an index names, in segments of `space` that nothing is in yet.

        Opens their namespaces with these slot sizes. The order of their sequences becomes that of their recency, and
        the latest wins where two want the same slot, or two namespaces the same segment. Returns those that are not
        stored now: beaten so, out of range, misaligned, or of a namespace that cannot be opened or has no slot size.
        """
        assert not self._evictor, "blocks can only be restored before others are written"
        slots = {namespace_id: self._restored_slot_bytes(namespace_id, slot_bytes_of) for namespace_id in slot_bytes_of}
        oldest_first = sorted(records, key=_sequence_of)
        sound = [
            record
            for record in oldest_first
            if 0 < record[1][1] <= _SEQUENCE_MAX and 0 < record[1][2] <= slots.get(record[0][0], 0)
        ]
        restored = self._restore_places(sound)
        self._key_at = {block[0]: key for key, block in restored}
        make_key = BlockKey._make
        parents = [None if block[3] is None else make_key((key[0], block[3])) for key, block in restored]
        self._evictor.restore([key for key, _ in restored], parents, now_s=now_s)
        # Also of refused ones: what they were of may still be on the disk.
        sequences = (block.sequence for _, block in reversed(oldest_first) if block.sequence <= _SEQUENCE_MAX)
        self._last_sequence = max(self._last_sequence, next(sequences, 0))
        if len(restored) == len(oldest_first):
            return []
        return list(dict.fromkeys(key for key, _ in reversed(oldest_first) if self.find(key) is None))

    def skip_to(self, sequence: int) -> None:
        """Every later write has a higher number than this one."""
        self._last_sequence = max(self._last_sequence, sequence)

    # --- figures

    @property
    def last_sequence(self) -> int:
        """Of the latest write that began; every later one has a higher one."""
        return self._last_sequence

    @property
    def block_count(self) -> int:
        return len(self._key_at)

    @property
    def used_bytes(self) -> int:
        """Of slots that hold blocks, are being written, or are still being read."""
        return self.space.used_bytes

    @property
    def is_selective(self) -> bool:
        """Whether a block must have been used twice to be wanted, as things stand."""
        return self._admission.is_selective

    def check_invariants(self) -> None:
        self.space.check_invariants()
        self._evictor.check_invariants()
        stored = {
            BlockKey(namespace_id, block_hash): block
            for namespace_id, entry in self._namespaces.items()
            for block_hash, block in entry.stored.items()
        }
        writing = {write.key: write for entry in self._namespaces.values() for write in entry.writing.values()}
        assert {block.place: key for key, block in stored.items()} == self._key_at, "places and index disagree"
        assert not stored.keys() & writing.keys(), "a block is stored and being written"
        assert len(self._evictor) == len(stored) + len(writing), (
            f"{len(self._evictor)} in the evictor, {len(stored)} stored, {len(writing)} being written"
        )
        blocks: list[DiskBlock | DiskWrite] = [*stored.values(), *writing.values()]
        places = [block.place for block in blocks]
        assert len(set(places)) == len(places), "a slot was given out twice"
        sequences = [block.sequence for block in blocks]
        assert len(set(sequences)) == len(sequences), "a sequence was given out twice"
        assert max(sequences, default=0) <= self._last_sequence, "a sequence from the future"
        for key, block in stored.items():
            is_used = self.space.ref_count(block.place) > 1
            assert self._evictor.is_held(key) == is_used, f"{key} is wrongly held or not"
        for key, write in writing.items():
            assert self._evictor.is_held(key), f"{key} is being written and could be evicted"
            assert self.space.ref_count(write.place) == 1, f"{key} has no place of its own"
        for slab in self._use_counts:
            assert self.space.taken_places(slab), f"segment {slab} is in use and empty"
        assert not self._evicted.keys() & stored.keys(), "a stored block is to be deleted from the index"
        assert self._was_read.keys() <= self._key_at.keys(), "it is remembered of nothing whether it was read"

    # --- inside

    def _use_of_writes(self, now_s: float) -> Use:
        """Blocks of a batch come at once, and for the same use, as far as is known here."""
        self._now_s = now_s
        if self._writing_use is None or self._writing_use.now_s != now_s or not self._evictor.made(self._writing_use):
            self._writing_use = self._evictor.begin(NO_HINT, now_s=now_s, chain_blocks=1, matched_blocks=0)
        return self._writing_use

    def _make_room_for_a_namespace(self) -> bool:
        """Forgets an empty one when there are too many; False when all hold something."""
        if len(self._namespaces) < NAMESPACE_COUNT_MAX:
            return True
        to_delete = {key.namespace_id for key in self._evicted}
        for namespace_id, entry in self._namespaces.items():
            is_empty = not entry.stored and not entry.writing and not self.space.has_slabs(namespace_id)
            if is_empty and namespace_id not in to_delete:
                self.space.close(namespace_id)
                del self._namespaces[namespace_id]
                return True
        return False

    def _own(self, use: Use | None) -> Use | None:
        """None, too, for one that was made before this tier was opened: it means nothing to this evictor."""
        return use if use is not None and self._evictor.made(use) else None

    def _refusal(self, key: BlockKey, *, use_count: int, use: Use | None, now_s: float) -> Refusal | None:
        entry = self._namespaces.get(key.namespace_id)
        if entry is None:
            return Refusal.NOT_OPEN
        if key.block_hash in entry.stored:
            return Refusal.KNOWN
        if key.block_hash in entry.writing:
            return Refusal.IN_PROGRESS
        if self._evictor.is_parent(key):
            return None
        refusal = self._admission.refusal(use_count=use_count, now_s=now_s)
        own_use = self._own(use)
        if refusal is None and own_use is not None and self._admission.is_by_worth and self._is_full(key.namespace_id):
            self._now_s = now_s
            if not self._evictor.admits(own_use, keys=(key,), gain_min=DEMOTED_GAIN_MIN):
                self._evictor.bypassed((key,), use=own_use)
                return Refusal.WORTH_LESS
        return refusal

    def _is_full(self, namespace_id: ScopedId) -> bool:
        """Whether one more block costs another, and no segment can be made for it."""
        space = self.space
        return space.ready_bytes >= space.capacity_bytes and space.missing_slab_count({namespace_id: 1}) > 0

    def _take_place(self, namespace_id: ScopedId) -> Place | None:
        """A place, at the cost of colder blocks if need be; None when everything is in use, or another tenant's."""
        place = self.space.allocate(namespace_id)
        if place is not None:
            return place
        if self.space.tenant_count > 1 and self._claim_foreign_segment(tenant_of(namespace_id)):
            return self.space.allocate(namespace_id)
        if not self._claim_segment(namespace_id):
            own_count = len(self._namespaces[namespace_id].stored)
            count = min(max(own_count // 64, 1), _EVICTION_COUNT_MAX)
            self._evict(count, may_evict=lambda key: key.namespace_id == namespace_id)
        return self.space.allocate(namespace_id)

    def _claim_segment(self, namespace_id: ScopedId) -> bool:
        """When the tenant's coldest block is another namespace's, empties a segment that nobody uses for this one.

        This is how space follows demand. Of the coldest block's namespace the emptiest segment goes: eviction has
        thinned the coldest ones most, and the least is lost.
        """
        tenant = tenant_of(namespace_id)
        if self.space.tenant_count == 1:
            coldest = self._evictor.peek_coldest(now_s=self._now_s)
        else:
            coldest = self._evictor.peek_coldest(
                may_evict=lambda key: tenant_of(key.namespace_id) == tenant, now_s=self._now_s
            )
        if coldest is None or coldest.namespace_id == namespace_id:
            return False
        unused = [
            (owner != coldest.namespace_id, taken_count, slab)
            for owner, slab, taken_count in self.space.slabs_of_others(namespace_id)
            if slab not in self._use_counts and tenant_of(owner) == tenant
        ]
        if not unused:
            return False
        self._empty_segment(min(unused)[-1])
        return True

    def _claim_foreign_segment(self, tenant: Tenant) -> bool:
        """Gets a segment for a tenant that is out of room: a free one, or one of who has too much."""
        if not self.space.claim_foreign_slab(tenant):
            if not self.space.is_below_share(tenant):
                return False
            unused = [
                (taken_count, slab)
                for owner, slab, taken_count in self.space.slabs_of_others(None)
                if slab not in self._use_counts and self.space.is_above_share(tenant_of(owner))
            ]
            if not unused:
                return False
            self._empty_segment(min(unused)[-1])
            self.space.claim_foreign_slab(tenant)
        for slab in self.space.slabs_to_replace():
            self.space.add_slab(slab)
        return True

    def _empty_segment(self, slab: SlabId) -> None:
        """Evicts all blocks of a segment that nobody uses."""
        keys = [self._key_at[place] for place in self.space.taken_places(slab)]
        for key in keys:
            self._evictor.remove(key)
        self._end_evicted(keys)

    def _evict(self, count: int, *, may_evict: Callable[[BlockKey], bool]) -> None:
        self._end_evicted(
            self._evictor.pop_coldest(
                goal_bytes=count, size_bytes_of=lambda _: 1, may_evict=may_evict, now_s=self._now_s
            )
        )

    def _end_evicted(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            was_read = self._was_read.pop(self._namespaces[key.namespace_id].stored[key.block_hash].place, None)
            if was_read is not None:
                self._admission.count_eviction(was_read=was_read)
                self.counters.read_before_evicted_count += was_read
            self._forget(key)
        self.on_left(keys, Fate.EVICTED)
        self.counters.evicted_count += len(keys)

    def _forget(self, key: BlockKey) -> None:
        """Of a block that the evictor has forgotten."""
        entry = self._namespaces[key.namespace_id]
        block = entry.stored.pop(key.block_hash)
        del self._key_at[block.place]
        self._evicted[key] = None
        self.space.release(block.place)

    def _restored_slot_bytes(self, namespace_id: ScopedId, slot_bytes_of: Mapping[ScopedId, int]) -> int:
        """0: the namespace cannot be opened."""
        try:
            return self.open(namespace_id, slot_bytes=slot_bytes_of[namespace_id]) or 0
        except InvalidArgumentError:
            return 0

    def _restore_places(self, oldest_first: Sequence[_Record]) -> list[_Record]:
        """Stores those that get their places, of each key the newest; returns them, oldest first."""
        slab_bytes = self.space.slab_bytes
        segments = [block[0] // slab_bytes for _, block in oldest_first]
        owners = dict(zip(segments, [key[0] for key, _ in oldest_first], strict=True))  # the newest are entered last
        groups: defaultdict[ScopedId, list[_Record]] = defaultdict(list)
        for record, segment in zip(reversed(oldest_first), reversed(segments), strict=True):
            namespace_id = record[0][0]
            if owners[segment] == namespace_id:
                groups[namespace_id].append(record)
        kept: list[_Record] = []
        for namespace_id, newest_first in groups.items():
            is_taken = self.space.restore(namespace_id, [block[0] for _, block in newest_first])
            restored = list(compress(newest_first, is_taken))
            stored = {key[1]: block for key, block in reversed(restored)}
            if len(stored) < len(restored):
                is_newest = [stored[key[1]] is block for key, block in restored]
                for _, block in compress(restored, map(not_, is_newest)):
                    self.space.release(block.place)
                restored = list(compress(restored, is_newest))
            self._namespaces[namespace_id].stored.update(stored)
            kept += restored
        kept.sort(key=_sequence_of)
        return kept

    def _count_use(self, place: Place, change: int) -> None:
        slab = self.space.slab_of(place)
        count = self._use_counts.get(slab, 0) + change
        assert count >= 0, f"segment {slab} has {count} uses"
        if count:
            self._use_counts[slab] = count
        else:
            del self._use_counts[slab]


def _nobody(keys: Sequence[BlockKey], fate: Fate) -> None:
    """Is told when nobody else is."""


def _sequence_of(record: _Record) -> int:
    return record[1][1]


_NONE_STORED: Mapping[BlockHash, DiskBlock] = MappingProxyType({})


def _parent_key(key: BlockKey, parent_hash: BlockHash | None) -> BlockKey | None:
    return None if parent_hash is None else BlockKey(key.namespace_id, parent_hash)
