"""The store's rules: what is readable, what is held, what leaves. Moves no bytes.

Everything happens on one thread and takes the time as an argument. The shell around it copies bytes into
places that are reserved here and out of places that are retained here. Where clients map the places themselves,
they go by the slots' headers, which change here in the same breath as what they tell of.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat, takewhile
from math import inf
from typing import NamedTuple, Protocol

from kvstore.envelope import ENVELOPE_BYTES, EnvelopeTemplate, PayloadChecksum
from kvstore.errors import CapacityError, LayoutMismatchError, NamespaceUnknownError
from kvstore.eviction import NO_HINT, Evictor, Request, Use, Watermarks
from kvstore.keys import BlockHash, pack_hashes
from kvstore.layout import DTYPE_BYTES
from kvstore.messages import (
    BlockState,
    CommitState,
    DescribedNamespace,
    LeaseId,
    NamespaceStats,
    OwnerId,
    ReservationId,
    ReserveState,
    Tier,
    TransferPath,
)
from kvstore.namespace import Namespace
from kvstore.slab import SLOT_HEADER_BYTES, Generation
from kvstore_server.core.fates import Fate
from kvstore_server.core.holds import HoldTable
from kvstore_server.core.prefetches import Prefetches
from kvstore_server.core.reuse import Reuse
from kvstore_server.core.siblings import are_siblings
from kvstore_server.core.space import Place, SlabId, SlabSpace
from kvstore_server.core.tenants import DEFAULT_TENANT, ScopedId, Tenant, namespace_of, scoped, tenant_of

NAMESPACE_COUNT_MAX = 4096
"""Namespaces known at once: far more than a node serves, few enough that a client cannot fill memory with names."""

_REFUSAL_COUNT_MAX = 4096
"""Blocks of other namespaces that a search for one's own coldest passes over: some 12 ms, once per request."""
_EVICTION_COUNT_MAX = 1024
"""Blocks that one call evicts, some 15 ms; an eviction goes on with the next call, or the next sweep."""
_UNDEMOTED_COUNT_MAX = 128
"""Blocks that only memory has which a search for others passes over, some 1 ms: it is done once per place."""
_LOSS_COUNT_MAX = 64
"""Blocks lost at once when only such are left: the next so many places are free without another search."""
_DEPARTING_BYTES_MAX = 64 << 20
"""Of blocks on their way down, unless told otherwise: what a disk of 1 GB/s writes in 64 ms."""

PROMOTER = OwnerId(b"kvstore promoter")
"""Whose the reservations of blocks are that come from the lower tier."""
_NO_RESERVATION_ID = ReservationId(0)
"""Of a reservation that no client can name."""
_PROMOTED_USE_COUNT = 1
"""It was used once before it came here, and is promoted because it is used again."""


_SHOWN_NAME_MAX = 128
"""Characters of a model's name in the figures: those of all namespaces together must fit into one message."""

_REFUSED_STATES = frozenset({ReserveState.DRAINING, ReserveState.OVERLOADED, ReserveState.ORPHAN, ReserveState.FULL})

_IN_SLOT_PATHS = frozenset({TransferPath.SLAB, TransferPath.NIXL})
"""Ways on which the client writes into the slot itself."""

# Of a byte that says whether a block is stored: what a lookup answers.
_STATE_OF_IS_STORED = bytes([BlockState.MISS, BlockState.HIT]) + bytes(254)
_TIER_OF_IS_STORED = bytes([0, Tier.MEMORY]) + bytes(254)
_HIT_BYTE = bytes([BlockState.HIT])


def _anything(_: object) -> bool:
    return True


class SlotHeaders(Protocol):
    """The 64 bytes by which who maps a slot knows what is in it (`kvstore.slab`); written at once, and never fail."""

    def begin_slot(self, place: Place, generation: Generation) -> None:
        """A slot is being written."""

    def publish_slot(self, place: Place, generation: Generation, *, is_verified: bool) -> None:
        """It is readable."""

    def clear_slot(self, place: Place) -> None:
        """What was in it, or was to come, must not be read any more."""


class BlockKey(NamedTuple):
    namespace_id: ScopedId
    block_hash: BlockHash


class StoredBlock(NamedTuple):
    """A readable block: where its slot starts, which use of it this is, and how long it is with its envelope."""

    place: Place
    size_bytes: int
    generation: Generation
    is_verified: bool
    """Whether the daemon itself has seen the payload match its checksum."""


class Departure(NamedTuple):
    """A block on its way to the lower tier; readable here until `end_departure`, and after it, if it is only copied."""

    key: BlockKey
    block: StoredBlock
    parent_hash: BlockHash | None
    """As it was claimed; None: the start of a prompt."""
    use: Use | None
    """For which it came here, or was used last, in the lower tier's own terms; None: not known there."""


class LowerTier(Protocol):
    """What the memory tier asks and tells the tier below it: often, and nothing of it takes long."""

    def find(self, key: BlockKey) -> object | None:
        """Anything but None: the block is there and can be read."""

    def wants(self, key: BlockKey, *, use_count: int, use: Use | None, now_s: float) -> bool:
        """Whether a block that is not there should be written; an answer binds nobody, and is asked for again."""

    def begin_use(self, request: Request, *, now_s: float, chain_blocks: int, matched_blocks: int) -> Use:
        """A request uses a chain, whatever is there of it: both tiers learn from it."""

    def touch(self, keys: Sequence[BlockKey], *, use: Use) -> None:
        """Counts this use of blocks of a chain, given head first, that are there."""

    def describe(self, keys: Sequence[BlockKey], request: Request, *, now_s: float) -> None:
        """More is known of the request that used this chain, given head first, last."""

    def retell(self, use: Use, request: Request) -> Use:
        """The same use where this is known of its request, for blocks that are yet to go down."""

    def expire(self, *, now_s: float) -> None:
        """Drops blocks that were not to be kept so long unused, some per call."""

    def last_use(self, key: BlockKey) -> Use | None:
        """For which a block that is there was used last; None: it is not there."""


@dataclass(slots=True, kw_only=True)
class Reservation:
    """A slot on its way to becoming a block. Bytes land in order, so `landed_bytes` says all there is.

    `siblings` are all reservations of the same call, this one included: they are given up together.
    """

    id: ReservationId
    owner_id: OwnerId
    key: BlockKey
    use: Use
    """For which the block comes."""
    place: Place
    generation: Generation
    path: TransferPath
    block_bytes_max: int
    """Of envelope and payload: what the slot holds."""
    siblings: list[ReservationId]
    landed_bytes: int = 0
    landing_count: int = 0
    """Copies under way; what they have not written yet is counted in `landed_bytes` already."""
    checksum: PayloadChecksum | None = None
    """Of the payload as it landed, by whoever lands it; says nothing unless it has taken in all that has landed."""

    @property
    def known_checksum(self) -> int | None:
        """Of the payload in the slot, if it was taken while it landed."""
        is_known = self.checksum is not None and self.checksum.block_bytes == self.landed_bytes
        return self.checksum.value if self.checksum is not None and is_known else None

    @property
    def is_in_slot(self) -> bool:
        """Whether the client writes into the slot itself."""
        return self.path in _IN_SLOT_PATHS


@dataclass(slots=True, kw_only=True)
class Counters:
    """What happened since the start."""

    hit_count: int = 0
    miss_count: int = 0
    pending_count: int = 0
    committed_count: int = 0
    evicted_count: int = 0
    """Blocks that left memory for want of room, whether or not another tier has them."""
    departed_count: int = 0
    """Those of them that were handed to the lower tier."""
    dropped_undemoted_count: int = 0
    """Those of them that the lower tier would have taken, had there been time."""
    promoted_count: int = 0
    expired_reservation_count: int = 0
    stranded_reservation_count: int = 0
    expired_lease_count: int = 0
    expired_block_count: int = 0
    """Blocks that were unused for as long as their clients had said that they were worth keeping."""
    corrupt_on_commit_count: int = 0
    corrupt_in_memory_count: int = 0
    refused_full_count: int = 0
    """Blocks without room, and those behind them in their chains."""
    refused_draining_count: int = 0
    refused_overloaded_count: int = 0
    sent_count: int = 0
    unsent_count: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


class Leased(NamedTuple):
    """What a lease of single blocks says: one state byte per block, and the leased ones in order."""

    states: bytes
    lease_id: LeaseId | None
    blocks: list[StoredBlock]


class Found(NamedTuple):
    """What a lookup says: one state and one tier byte per block, and the leading run of hits."""

    states: bytes
    tiers: bytes
    matched_count: int


def with_lower_tier(found: Found, is_there: bytes) -> Found:
    """The same with what the NVMe tier has: a byte per block, 1 when it is there, whoever else has it."""
    if 1 not in is_there:
        return found
    hit, nvme = int(BlockState.HIT), int(Tier.NVME)
    states = bytes([hit if there else state for state, there in zip(found.states, is_there, strict=True)])
    tiers = bytes([tier or (there and nvme) for tier, there in zip(found.tiers, is_there, strict=True)])
    return Found(states, tiers, len(states) - len(states.lstrip(_HIT_BYTE)))


@dataclass(slots=True, kw_only=True)
class _NamespaceEntry:
    namespace: Namespace
    envelopes: EnvelopeTemplate
    stored: dict[BlockHash, StoredBlock] = field(default_factory=dict)
    pending: dict[BlockHash, Reservation] = field(default_factory=dict)


class StoreCore:
    """Index, space, leases, reservations and eviction of the memory tier.

    A block is stored, pending or absent. Stored blocks hold their place once; each lease, each reader and
    each landing frame holds it once more. Only blocks that nobody else holds can be evicted. Pending blocks
    have their place in the prefix tree already, so that room for a chain is not made at its own head's cost.
    The header of a slot is readable exactly while its block is stored. Each use of a slot has a generation of
    its own. A slot that something may still be written to although its block is given up is stranded: nobody else
    gets it before its writer is done with it (SLAB), or nothing that is on its way can arrive any more (NIXL).

    With a lower tier, what it wants and has not yet departs rather than being dropped: such a block stays stored and
    readable, but is no candidate any more, and its departure holds its place until it ends. Blocks leave tail first,
    but go down head first, for without those before it a block is of no use there: ancestors of what departs that the
    lower tier has not are copied before it, and stay.
    """

    def __init__(
        self,
        *,
        space: SlabSpace,
        watermarks: Watermarks,
        headers: SlotHeaders,
        policy: str = "lru",
        lower: LowerTier | None = None,
        departing_bytes_max: int = _DEPARTING_BYTES_MAX,
    ) -> None:
        self.space = space
        self.lower = lower
        self.departing_bytes_max = departing_bytes_max
        """Of the slots of blocks that are on their way down at once."""
        self.departing_bytes = 0
        """Of those of them that leave."""
        self.copying_bytes = 0
        """Of those of them that stay."""
        self.now_s = 0.0
        """The newest time that a caller has told."""
        self._headers = headers
        self._last_generation = 0
        self.counters = Counters()
        self.reuse = Reuse(used_bytes=lambda: space.used_bytes)
        self.prefetches: Prefetches[BlockKey] = Prefetches()
        self.is_draining = False
        self._watermarks = watermarks
        self._namespaces: dict[ScopedId, _NamespaceEntry] = {}
        # Found when they are asked for; of no use any more once a namespace has come or gone.
        self._siblings: dict[ScopedId, list[ScopedId]] = {}
        self._evictor: Evictor[BlockKey] = Evictor(policy, capacity_blocks=1, refusal_count_max=_REFUSAL_COUNT_MAX)
        # Of stored blocks that do not depart.
        self._key_at: dict[Place, BlockKey] = {}
        self._departing: dict[Place, Departure] = {}
        # Of stored blocks, each of which is held for that.
        self._copying: dict[Place, Departure] = {}
        self._untaken: dict[Place, Departure] = {}
        self._leases: HoldTable[tuple[Place, ...]] = HoldTable()
        self._reservations: HoldTable[Reservation] = HoldTable()
        self._stranded: HoldTable[Reservation] = HoldTable()
        # Stranded, too, but no word of their writer frees them: what it has put on its way may arrive after that.
        self._unfenced: list[Reservation] = []
        self._fenced_generation = Generation(0)
        self._committing_count = 0
        self.promotion_count = 0
        """Of `reservation_count`, those of blocks that come from the lower tier."""
        self._is_evicting = False
        # Uses of each slab's places beside the index's own: readers, leases, writers. Absent: 0.
        self._use_counts: dict[SlabId, int] = {}

    # --- namespaces

    def open_namespace(self, namespace: Namespace, *, payload_bytes: int, tenant: Tenant = DEFAULT_TENANT) -> int:
        """Makes a namespace known; returns its slot size. Raises when the two sides differ on the block size."""
        expected_bytes = namespace.stored_bytes
        if payload_bytes != expected_bytes:
            raise LayoutMismatchError(
                f"payload_bytes is {payload_bytes}; namespace {namespace.model} gives {expected_bytes} "
                f"({namespace.layout}, {namespace.dtype}, {namespace.tokens_per_block} tokens per block)"
            )
        namespace_id = scoped(tenant, namespace.id)
        if namespace_id not in self._namespaces:
            self._make_room_for_a_namespace(tenant)
        block_bytes = SLOT_HEADER_BYTES + ENVELOPE_BYTES + expected_bytes
        slot_bytes = self.space.open(namespace_id, block_bytes=block_bytes)
        self._evictor.capacity_blocks = max(self._evictor.capacity_blocks, self.space.capacity_bytes // slot_bytes)
        if namespace_id not in self._namespaces:
            self._namespaces[namespace_id] = _NamespaceEntry(namespace=namespace, envelopes=namespace.envelopes)
            self._siblings.clear()
        return slot_bytes

    def namespace_ids(self) -> list[ScopedId]:
        """Of all that are known."""
        return list(self._namespaces)

    def payload_bytes(self, namespace_id: ScopedId) -> int:
        return self._entry(namespace_id).namespace.stored_bytes

    def element_bytes(self, namespace_id: ScopedId) -> int:
        """Of the payload's elements."""
        return DTYPE_BYTES[self._entry(namespace_id).namespace.dtype]

    def envelopes(self, namespace_id: ScopedId) -> EnvelopeTemplate:
        """What the envelopes of its blocks look like."""
        return self._entry(namespace_id).envelopes

    def arena_owner(self, index: int) -> Tenant | None:
        """Whose an arena is, which nobody else may map; None: nobody's. With tenants each slab is one."""
        return DEFAULT_TENANT if self.space.tenant_count == 1 else self.space.tenant_of_slab(SlabId(index))

    # --- reading

    def lookup(self, namespace_id: ScopedId, hashes: Sequence[BlockHash]) -> Found:
        """What is here of these blocks. Changes nothing but counters."""
        entry = self._entry(namespace_id)
        # No step of the interpreter per block: this is what every prompt waits for.
        has = entry.stored.__contains__
        matched_count = len(list(takewhile(has, hashes)))
        is_stored = b"\1" * matched_count + bytes(list(map(has, hashes[matched_count:])))
        states = is_stored.translate(_STATE_OF_IS_STORED)
        if entry.pending and matched_count < len(hashes):
            states = bytes(
                BlockState.PENDING if state != BlockState.HIT and block_hash in entry.pending else state
                for state, block_hash in zip(states, hashes, strict=True)
            )
        return Found(states, is_stored.translate(_TIER_OF_IS_STORED), matched_count)

    def siblings(self, namespace_id: ScopedId) -> list[ScopedId]:
        """Namespaces of the same tenant whose blocks would serve here as well, but for a setting that differs."""
        found = self._siblings.get(namespace_id)
        if found is None:
            own, tenant = self._entry(namespace_id).namespace, tenant_of(namespace_id)
            found = self._siblings[namespace_id] = [
                other_id
                for other_id, entry in self._namespaces.items()
                if tenant_of(other_id) == tenant and are_siblings(own, entry.namespace)
            ]
        return found

    def stored(self, namespace_id: ScopedId) -> Mapping[BlockHash, StoredBlock]:
        """All readable blocks of a namespace, as they come and go; not to be changed."""
        return self._entry(namespace_id).stored

    def is_pending(self, namespace_id: ScopedId, block_hash: BlockHash) -> bool:
        return block_hash in self._entry(namespace_id).pending

    def count_lookup(self, found: Found) -> None:
        """Counts an answered lookup; one that waited is counted once, by its last answer."""
        self.counters.hit_count += found.states.count(BlockState.HIT)
        self.counters.pending_count += found.states.count(BlockState.PENDING)
        self.counters.miss_count += found.states.count(BlockState.MISS)

    def lease(
        self,
        namespace_id: ScopedId,
        hashes: Sequence[BlockHash],
        *,
        owner_id: OwnerId,
        now_s: float,
        duration_s: float,
        request: Request = NO_HINT,
    ) -> LeaseId | None:
        """Leases stored blocks as one hold and counts a use of them; None when there are none."""
        if not hashes:
            return None
        stored = self._entry(namespace_id).stored
        blocks = [stored[block_hash] for block_hash in hashes]
        use = self._begin_use(request, now_s=now_s, chain_blocks=len(hashes), matched_blocks=len(hashes))
        return self._lease(blocks, use=use, owner_id=owner_id, now_s=now_s, duration_s=duration_s)

    def lease_stored(
        self,
        namespace_id: ScopedId,
        hashes: Sequence[BlockHash],
        *,
        owner_id: OwnerId,
        now_s: float,
        duration_s: float,
        request: Request = NO_HINT,
    ) -> Leased:
        """Leases whatever is stored of these blocks as one hold, for a transfer to come."""
        states = self.lookup(namespace_id, hashes).states
        blocks = list(filter(None, map(self._entry(namespace_id).stored.get, hashes)))
        self.counters.unsent_count += len(hashes) - len(blocks)
        if not blocks:
            return Leased(states, None, blocks)
        use = self._begin_use(request, now_s=now_s, chain_blocks=len(hashes), matched_blocks=len(blocks))
        lease_id = self._lease(blocks, use=use, owner_id=owner_id, now_s=now_s, duration_s=duration_s)
        return Leased(states, lease_id, blocks)

    def renew_lease(self, lease: LeaseId, *, owner_id: OwnerId, now_s: float, duration_s: float) -> bool:
        return self._leases.renew(lease, owner_id=owner_id, now_s=now_s, duration_s=duration_s)

    def release_lease(self, lease: LeaseId, *, owner_id: OwnerId) -> bool:
        places = self._leases.release(lease, owner_id=owner_id)
        if places is None:
            return False
        self._end_use(places)
        return True

    def begin_read(self, namespace_id: ScopedId, block_hash: BlockHash) -> StoredBlock | None:
        """Retains a block for a reader, who owes one `end_read`; None when it is not here."""
        block = self._entry(namespace_id).stored.get(block_hash)
        if block is not None:
            self._use((block.place,))
        return block

    def end_read(self, block: StoredBlock, *, sent_bytes: int) -> None:
        self._end_use((block.place,))
        self.counters.read_bytes += sent_bytes

    def count_read(self, blocks: Sequence[StoredBlock]) -> None:
        """Counts blocks that a client reads in their slots, unseen by us."""
        self.counters.sent_count += len(blocks)
        self.counters.read_bytes += sum(block.size_bytes for block in blocks)

    def count_unseen_reads(
        self, namespace_id: ScopedId, hashes: Sequence[BlockHash], *, hit_count: int, request: Request = NO_HINT
    ) -> None:
        """A client has read these blocks, given head first, and found so many, without having asked for them."""
        self.count_read(list(filter(None, map(self._entry(namespace_id).stored.get, hashes))))
        self.counters.hit_count += hit_count
        self._touch(namespace_id, hashes, request=request)

    def touch(self, namespace_id: ScopedId, hashes: Sequence[BlockHash], *, request: Request = NO_HINT) -> None:
        """Counts one use of a chain given head first."""
        self._entry(namespace_id)
        self._touch(namespace_id, hashes, request=request)

    def describe(self, namespace_id: ScopedId, hashes: Sequence[BlockHash], request: Request, *, now_s: float) -> None:
        """More is known of the request that used this chain, given head first, last; this is no use of it."""
        self._entry(namespace_id)
        self.now_s = now_s
        keys = list(map(BlockKey, repeat(namespace_id), hashes))
        uses = self._evictor.describe(keys, request, now_s=now_s)
        if self.lower is None:
            return
        self.lower.describe(keys, request, now_s=now_s)
        # What only memory has is to be known below, too, when it goes down.
        for use in uses:
            if use.below is not None:
                use.below = self.lower.retell(use.below, use.request)

    # --- writing

    def reserve(
        self,
        namespace_id: ScopedId,
        hashes: Sequence[BlockHash],
        *,
        parent_hash: BlockHash | None,
        owner_id: OwnerId,
        now_s: float,
        duration_s: float,
        path: TransferPath = TransferPath.STREAM,
        is_overloaded: bool = False,
        request: Request = NO_HINT,
    ) -> tuple[bytes, list[Reservation | None]]:
        """Takes a slot for each block of a chain that is neither stored nor pending.

        Once a block finds no place, the rest of the chain is not admitted: it could never be matched.
        """
        self.now_s = now_s
        entry = self._entry(namespace_id)
        states = bytearray()
        reservations: list[Reservation | None] = []
        siblings: list[ReservationId] = []
        # The chain being extended is in use: making room must not take its own head.
        use = self._touch(namespace_id, [*([parent_hash] if parent_hash else []), *hashes], request=request)
        parent = BlockKey(namespace_id, parent_hash) if parent_hash else None
        is_cut = False
        cut_state = ReserveState.FULL
        refused_count = 0
        for block_hash in hashes:
            key = BlockKey(namespace_id, block_hash)
            reservation = None
            if block_hash in entry.stored:
                state = ReserveState.STORED
            elif block_hash in entry.pending:
                state = ReserveState.PENDING
            elif self.is_draining:
                state = ReserveState.DRAINING
                self.counters.refused_draining_count += 1
            elif is_overloaded:
                state = ReserveState.OVERLOADED
                self.counters.refused_overloaded_count += 1
            elif is_cut:
                state = ReserveState.ORPHAN
                refused_count += 1
            elif (place := self._admit(key, parent=parent, may_lose=False, use=use)) is None:
                # Room may be on its way.
                state = ReserveState.OVERLOADED if self.demoting_bytes else ReserveState.FULL
                cut_state = state
                refused_count += 1
                is_cut = True
            else:
                state = ReserveState.RESERVED
                number = ReservationId(self._reservations.next_number)
                reservation = self._begin(
                    key, place, use=use, number=number, owner_id=owner_id, path=path, siblings=siblings
                )
                self._reservations.adopt(number, owner_id=owner_id, value=reservation, deadline_s=now_s + duration_s)
                entry.pending[block_hash] = reservation
                siblings.append(number)
            states.append(state)
            reservations.append(reservation)
            parent = key
        # What comes behind a block without room is refused for the same reason.
        if cut_state is ReserveState.OVERLOADED:
            self.counters.refused_overloaded_count += refused_count
        else:
            self.counters.refused_full_count += refused_count
        refused = [one for one, state in zip(hashes, states, strict=True) if state in _REFUSED_STATES]
        self.reuse.left(namespace_id, pack_hashes(refused), Fate.REFUSED)
        return bytes(states), reservations

    def reservation(self, reservation_id: ReservationId, *, owner_id: OwnerId) -> Reservation | None:
        return self._reservations.get(reservation_id, owner_id=owner_id)

    def begin_landing(
        self, reservation_id: ReservationId, *, owner_id: OwnerId, offset_bytes: int, size_bytes: int
    ) -> Reservation | None:
        """Retains the place for bytes that arrive, owing one `end_landing`; None when the bytes have nowhere to go.

        That is when the reservation has ended, or was made for a client that writes by itself, when they do not
        follow on what has landed, or do not fit.
        """
        reservation = self._reservations.get(reservation_id, owner_id=owner_id)
        if reservation is None or reservation.is_in_slot or offset_bytes != reservation.landed_bytes:
            return None
        if offset_bytes + size_bytes > reservation.block_bytes_max:
            return None
        reservation.landed_bytes += size_bytes
        reservation.landing_count += 1
        self._use((reservation.place,))
        return reservation

    def end_landing(self, reservation: Reservation, *, size_bytes: int) -> None:
        reservation.landing_count -= 1
        self._end_use((reservation.place,))
        self.counters.written_bytes += size_bytes

    def begin_commit(self, reservation_id: ReservationId, *, owner_id: OwnerId) -> Reservation | None:
        """Takes a reservation off the clock while its bytes are verified; owes one entry in `end_commits`.

        None when it has ended; the slot of a stranded one is free again, for its writer has shown to be done.
        """
        reservation = self._reservations.release(reservation_id, owner_id=owner_id)
        if reservation is not None:
            self._committing_count += 1
        else:
            self._end_stranding(reservation_id, owner_id=owner_id)
        return reservation

    def land_in_slot(self, reservation: Reservation, *, size_bytes: int) -> None:
        """Says how long the block is that the client has written into its slot by itself."""
        assert reservation.is_in_slot, f"{reservation.id} was made for {reservation.path!r}"
        reservation.landed_bytes = size_bytes
        self.counters.written_bytes += size_bytes

    def end_commits(self, outcomes: Iterable[tuple[Reservation, CommitState]], *, is_verified: bool = True) -> None:
        """Makes the blocks readable that are COMMITTED, and gives the places of the others up.

        `is_verified` says whether the daemon itself has seen their payloads match their checksums.
        """
        self.counters.committed_count += self._settle(outcomes, is_verified=is_verified)

    def abort_siblings(self, reservation_ids: Iterable[ReservationId], *, owner_id: OwnerId) -> None:
        """Gives these reservations up, and all others of the calls that made them."""
        for reservation_id in reservation_ids:
            reservation = self._reservations.get(reservation_id, owner_id=owner_id)
            for sibling in reservation.siblings if reservation is not None else ():
                self.abort(sibling, owner_id=owner_id)

    def abort(self, reservation_id: ReservationId, *, owner_id: OwnerId) -> bool:
        """Gives a reservation up; False when it had ended, even if its slot is free only now, or not yet."""
        reservation = self._reservations.release(reservation_id, owner_id=owner_id)
        if reservation is None:
            self._end_stranding(reservation_id, owner_id=owner_id)
            return False
        self._give_up(reservation)
        return True

    # --- leaving

    def end_owner(self, owner_id: OwnerId) -> int:
        """Ends all that an owner holds who is no more; returns how many reservations, which may unblock waiters."""
        for places in self._leases.release_all(owner_id=owner_id):
            self._end_use(places)
        reservations = self._reservations.release_all(owner_id=owner_id)
        for reservation in reservations:
            self._give_up(reservation)
        for reservation in self._stranded.release_all(owner_id=owner_id):
            self._free(reservation)
        return len(reservations)

    def expire(self, *, now_s: float) -> int:
        """Ends leases and reservations whose time is up, and drops blocks that were not to be kept so long unused, in
        the lower tier, too.

        Returns how many reservations have ended, which may unblock waiters.
        """
        self.now_s = now_s
        for places in self._leases.expire(now_s=now_s):
            self.counters.expired_lease_count += 1
            self._end_use(places)
        expired = self._reservations.expire(now_s=now_s)
        for reservation in expired:
            if reservation.is_in_slot:
                self._strand(reservation)
            else:
                self._give_up(reservation)
        self.counters.expired_reservation_count += len(expired)
        if self.lower is not None:
            self.lower.expire(now_s=now_s)
        unwanted = self._evictor.expired(now_s=now_s, count_max=_EVICTION_COUNT_MAX)
        for key in unwanted:
            self._drop(key)
        self._note_left(unwanted, Fate.EVICTED)
        self.counters.expired_block_count += len(unwanted)
        return len(expired)

    def fence(self) -> None:
        """To be told when nothing can arrive any more over NIXL in a slot that was reserved so far."""
        self._fenced_generation = Generation(self._last_generation)
        unfenced, self._unfenced = self._unfenced, []
        for reservation in unfenced:
            self._free(reservation)

    def quarantine(self, namespace_id: ScopedId, block_hash: BlockHash, block: StoredBlock) -> None:
        """Drops a block that did not verify, unless it was replaced meanwhile; readers keep its slot until they end.

        One that departs is not handed out any more; if it was already, its slot stays until that departure ends.
        """
        if self._entry(namespace_id).stored.get(block_hash) != block:
            return
        if block.place not in self._departing:
            self._evictor.remove(BlockKey(namespace_id, block_hash))
        self._drop(BlockKey(namespace_id, block_hash))
        if self._untaken.pop(block.place, None) is not None:
            self._free_demoting(block.place)
        self._note_left([BlockKey(namespace_id, block_hash)], Fate.FAILED)
        self.counters.corrupt_in_memory_count += 1

    def evict_to_low_watermark(self) -> int:
        """From above the high mark, rids memory of the coldest leaves down to the low one, some per call.

        Returns how many were dropped or depart. To be called after commits and departures, when nobody waits for it:
        no more departs at once than `departing_bytes_max`, and what it has to leave for that stays until the next
        call. A store that is full all the same makes its own room.
        """
        excess_bytes = self._excess_bytes()
        if not excess_bytes:
            return 0
        may_evict = _anything if self.space.tenant_count == 1 else self._is_above_share
        if self.lower is None:
            return self._evict(excess_bytes, count_max=_EVICTION_COUNT_MAX, may_evict=may_evict)
        return self._evict_or_demote(self.lower, excess_bytes, count_max=_EVICTION_COUNT_MAX, may_evict=may_evict)

    # --- to and from the lower tier

    def left_below(self, keys: Sequence[BlockKey], fate: Fate) -> None:
        """To be told of blocks that are in the lower tier no more."""
        entries = self._namespaces
        self._tell(
            [key for key in keys if (entry := entries.get(key.namespace_id)) and key.block_hash not in entry.stored],
            fate,
        )

    @property
    def demoting_bytes(self) -> int:
        """Of the slots of blocks on their way down: once they are there, more of them can leave."""
        return self.departing_bytes + self.copying_bytes

    def take_departures(self) -> list[Departure]:
        """Blocks that are to go down, each once, parents before their children; each owes an `end_departure`.

        Also those of later calls are to be found there after those of earlier ones.
        """
        untaken = {departure.key: departure for departure in reversed(self._untaken.values())}
        self._untaken.clear()
        ordered: list[Departure] = []
        while untaken:
            chain: list[Departure] = []
            departure = untaken.pop(next(iter(untaken)), None)
            while departure is not None:
                chain.append(departure)
                parent_hash = departure.parent_hash
                if parent_hash is None:
                    break
                departure = untaken.pop(BlockKey(departure.key.namespace_id, parent_hash), None)
            ordered.extend(reversed(chain))
        return ordered

    def end_departure(self, departure: Departure) -> bool:
        """Drops a block that departs, whatever became of that; readers keep its slot until they end. Copies stay.

        False: it had been quarantined meanwhile, so what was copied from its slot is not to be trusted.
        """
        key, block = departure.key, departure.block
        is_copied = self._copying.get(block.place) is departure
        assert is_copied or self._departing.get(block.place) is departure, f"{key} does not depart from {block.place}"
        self._untaken.pop(block.place, None)
        is_stored = self._entry(key.namespace_id).stored.get(key.block_hash) == block
        if is_stored and not is_copied:
            self._drop(key)
            self._note_left([key], Fate.FAILED)
            self.counters.evicted_count += 1
            self.counters.departed_count += 1
        self._free_demoting(block.place)
        return is_stored

    def depart_all(self, *, now_s: float) -> int:
        """Lets every block depart that only memory has and the lower tier wants, held or not; returns how many.

        With those before them, without which they are of no use. However many bytes that are: for the end of the
        daemon, when nobody needs the room.
        """
        self.now_s = now_s
        lower = self.lower
        if lower is None:
            return 0
        keys: dict[BlockKey, None] = {}
        for place, key in self._key_at.items():
            if place not in self._copying and key not in keys and self._is_undemoted(key):
                keys |= dict.fromkeys([*self._ancestors_to_copy(lower, key, known=keys), key])
        for departure in [self._departure(key) for key in keys]:
            self._evictor.remove(departure.key)
            self._begin_departure(departure)
        return len(keys)

    def begin_promotion(
        self,
        namespace_id: ScopedId,
        hashes: Sequence[BlockHash],
        *,
        parent_hashes: Sequence[BlockHash | None],
        now_s: float,
        may_lose: bool,
        request: Request | None = NO_HINT,
    ) -> list[Reservation | None]:
        """Takes a slot for each block, given head first, that comes from the lower tier; each owes an `end_promotion`.

        None: it is stored or pending already, or there was no room for it, as then for all that follow. They are
        reservations of nobody's that end by no time and no owner, and count as such. `request` is for whom they come;
        None: for nobody yet, which is no use of them. A store that drains promotes, too: it serves what it has to the
        end. Unless `may_lose`, what the lower tier wants departs rather than being dropped
        for this: there is room when it has.
        """
        self.now_s = now_s
        entry = self._entry(namespace_id)
        chain = [one for pair in zip(parent_hashes, hashes, strict=True) for one in pair if one is not None]
        # As in `reserve`: room for a chain is not to be made at the cost of its own head.
        heads: list[BlockKey] = []
        if request is not None:
            use = self._touch(namespace_id, list(dict.fromkeys(chain)), request=request, is_asked_for=False)
        else:
            heads = [key for one in dict.fromkeys(chain) if (key := BlockKey(namespace_id, one)) in self._evictor]
            self._evictor.hold(heads)
            use = self._last_use_below(BlockKey(namespace_id, hashes[-1]), chain_blocks=len(hashes))
        reservations: list[Reservation | None] = []
        is_cut = False
        for block_hash, parent_hash in zip(hashes, parent_hashes, strict=True):
            reservation = None
            if not is_cut and block_hash not in entry.stored and block_hash not in entry.pending:
                key = BlockKey(namespace_id, block_hash)
                parent = None if parent_hash is None else BlockKey(namespace_id, parent_hash)
                place = self._admit(key, parent=parent, may_lose=may_lose, use=use, use_count=_PROMOTED_USE_COUNT)
                if place is None:
                    is_cut = True
                else:
                    reservation = self._begin(
                        key,
                        place,
                        use=use,
                        number=_NO_RESERVATION_ID,
                        owner_id=PROMOTER,
                        path=TransferPath.STREAM,
                        siblings=[],
                    )
                    entry.pending[block_hash] = reservation
                    # In no table, so that nobody who knows its owner's name can end it.
                    self._committing_count += 1
                    self.promotion_count += 1
            reservations.append(reservation)
        self._evictor.unhold(heads)
        return reservations

    def end_promotion(self, outcomes: Iterable[tuple[Reservation, int | None]]) -> None:
        """Makes the blocks readable that have come and were verified, given their sizes with their envelopes in bytes.

        None: it has not come; its slot is free again. Either way it is pending no more.
        """
        settled: list[tuple[Reservation, CommitState]] = []
        for reservation, size_bytes in outcomes:
            if size_bytes is not None:
                assert 0 < size_bytes <= reservation.block_bytes_max, f"{reservation.key} has {size_bytes} bytes"
                reservation.landed_bytes = size_bytes
            settled.append((reservation, CommitState.INCOMPLETE if size_bytes is None else CommitState.COMMITTED))
        self.promotion_count -= len(settled)
        self.counters.promoted_count += self._settle(settled, is_verified=True)

    # --- figures

    @property
    def policy(self) -> str:
        """By which blocks leave, as it was asked for."""
        return self._evictor.policy

    @property
    def policy_in_force(self) -> str:
        """The same as it is now: one that learns may follow another."""
        return self._evictor.policy_in_force

    @property
    def lease_count(self) -> int:
        return len(self._leases)

    @property
    def reservation_count(self) -> int:
        """Blocks on their way, from clients or from the lower tier; a stranded one has missed it."""
        return len(self._reservations) + self._committing_count

    @property
    def stranded_count(self) -> int:
        return len(self._stranded) + len(self._unfenced)

    @property
    def unfenced_count(self) -> int:
        """Stranded slots that only a fence frees."""
        return len(self._unfenced)

    @property
    def block_count(self) -> int:
        return sum(len(entry.stored) for entry in self._namespaces.values())

    @property
    def namespace_count(self) -> int:
        return len(self._namespaces)

    def namespace_stats(self, tenant: Tenant = DEFAULT_TENANT) -> tuple[NamespaceStats, ...]:
        """Of one tenant: what models others run is none of its business."""
        return tuple(
            NamespaceStats(
                namespace_id=namespace_of(namespace_id),
                model=entry.namespace.model[:_SHOWN_NAME_MAX],
                slot_bytes=self.space.slot_bytes(namespace_id),
                block_count=len(entry.stored),
                used_bytes=(len(entry.stored) + len(entry.pending)) * self.space.slot_bytes(namespace_id),
            )
            for namespace_id, entry in self._namespaces.items()
            if tenant_of(namespace_id) == tenant
        )

    def namespaces_of(self, tenant: Tenant) -> tuple[DescribedNamespace, ...]:
        """The tenant's namespaces in full, with their blocks in memory."""
        return tuple(
            DescribedNamespace(namespace=entry.namespace, block_count=len(entry.stored))
            for namespace_id, entry in self._namespaces.items()
            if tenant_of(namespace_id) == tenant
        )

    def check_invariants(self) -> None:
        self.space.check_invariants()
        self._evictor.check_invariants()
        stored = {
            BlockKey(namespace_id, block_hash): block.place
            for namespace_id, entry in self._namespaces.items()
            for block_hash, block in entry.stored.items()
        }
        staying = {key: place for key, place in stored.items() if place not in self._departing}
        assert {place: key for key, place in staying.items()} == self._key_at, "places and index disagree"
        pending_count = sum(len(entry.pending) for entry in self._namespaces.values())
        assert len(self._evictor) == len(staying) + pending_count, (
            f"{len(self._evictor)} in the evictor, {len(staying)} stored, {pending_count} pending"
        )
        self._check_departures()
        generations = [
            generation
            for entry in self._namespaces.values()
            for generation in (
                *(block.generation for block in entry.stored.values()),
                *(reservation.generation for reservation in entry.pending.values()),
            )
        ]
        stranded = [*self._stranded.values(), *self._unfenced]
        generations += [hold.generation for hold in stranded]
        assert len(set(generations)) == len(generations), "a generation was given out twice"
        assert max(generations, default=0) <= self._last_generation, "a generation from the future"
        for hold in stranded:
            assert hold.place not in self._key_at, f"stranded slot {hold.place} has a block"
            assert hold.is_in_slot, f"{hold.key} is stranded though nobody else writes it"
        for hold in self._unfenced:
            assert hold.generation > self._fenced_generation, f"stranded slot {hold.place} is fenced"
        for slab in self._use_counts:
            assert self.space.taken_places(slab), f"slab {slab} is in use and empty"
        for key, place in staying.items():
            assert self._evictor.is_held(key) == (self.space.ref_count(place) > 1), f"{key} is wrongly held or not"
            assert key in self._evictor, f"{key} cannot be evicted"
        for key, place in stored.items():
            assert key.block_hash not in self._namespaces[key.namespace_id].pending, f"{key} is stored and pending"
            assert self.space.ref_count(place) >= 1, f"{key} has no place"

    def _check_departures(self) -> None:
        assert not self._departing.keys() & self._copying.keys(), "a block departs and stays"
        for what, departures, claimed_bytes in (
            ("departing_bytes", self._departing, self.departing_bytes),
            ("copying_bytes", self._copying, self.copying_bytes),
        ):
            for place, departure in departures.items():
                key, block = departure.key, departure.block
                assert block.place == place, f"{key} departs from {block.place}, not from {place}"
                is_stored = self._namespaces[key.namespace_id].stored.get(key.block_hash) == block
                assert self.space.ref_count(place) >= 1 + is_stored, f"{key} departs from {place}, not held for it"
                assert self.space.slab_of(place) in self._use_counts, f"{key} departs from a slab that is not in use"
                assert is_stored or place not in self._untaken, f"{key} is gone and would be handed out"
            real_bytes = sum(self.space.slot_bytes(departure.key.namespace_id) for departure in departures.values())
            assert real_bytes == claimed_bytes, f"{what} {claimed_bytes}, really {real_bytes}"
        for place, departure in self._untaken.items():
            demoted = self._departing.get(place) or self._copying.get(place)
            assert demoted is departure, f"{departure.key} would be handed out and does not go down"

    # --- inside

    def _entry(self, namespace_id: ScopedId) -> _NamespaceEntry:
        entry = self._namespaces.get(namespace_id)
        if entry is None:
            raise NamespaceUnknownError(f"namespace {namespace_id.hex()[:16]} has not been opened since the start")
        return entry

    def _make_room_for_a_namespace(self, tenant: Tenant) -> None:
        """Forgets an empty one of a tenant that has too many; its clients open it again by themselves."""
        count_max = NAMESPACE_COUNT_MAX // self.space.tenant_count
        own = [namespace_id for namespace_id in self._namespaces if tenant_of(namespace_id) == tenant]
        if len(own) < count_max:
            return
        for namespace_id in own:
            entry = self._namespaces[namespace_id]
            if not entry.stored and not entry.pending and not self.space.has_slabs(namespace_id):
                self.space.close(namespace_id)
                del self._namespaces[namespace_id]
                self._siblings.clear()
                return
        raise CapacityError(f"{count_max} namespaces hold blocks; allowed: no more than that at once")

    def _begin_use(self, request: Request, *, now_s: float, chain_blocks: int, matched_blocks: int) -> Use:
        self.now_s = now_s
        use = self._evictor.begin(request, now_s=now_s, chain_blocks=chain_blocks, matched_blocks=matched_blocks)
        if self.lower is not None:
            use.below = self.lower.begin_use(
                request, now_s=now_s, chain_blocks=chain_blocks, matched_blocks=matched_blocks
            )
        return use

    def _last_use_below(self, key: BlockKey, *, chain_blocks: int) -> Use:
        """What the lower tier knows of the last use of a block, in this tier's terms."""
        below = None if self.lower is None else self.lower.last_use(key)
        use = self._evictor.begin(
            NO_HINT if below is None else below.request,
            now_s=self.now_s,
            chain_blocks=chain_blocks,
            matched_blocks=0,
        )
        use.below = below
        return use

    def _touch_keys(self, keys: list[BlockKey], *, use: Use) -> None:
        self._evictor.touch_chain(keys, use=use)
        if self.lower is not None and use.below is not None:
            self.lower.touch(keys, use=use.below)

    def _touch(
        self,
        namespace_id: ScopedId,
        hashes: Sequence[BlockHash],
        *,
        request: Request = NO_HINT,
        is_asked_for: bool = True,
    ) -> Use:
        """One use of those blocks that are here, and of what may come with them."""
        chain = list(map(BlockKey, repeat(namespace_id), hashes))
        if is_asked_for:
            self.prefetches.use(chain)
        matched_count = sum(map(self._namespaces[namespace_id].stored.__contains__, hashes))
        use = self._begin_use(request, now_s=self.now_s, chain_blocks=len(chain), matched_blocks=matched_count)
        self._touch_keys(chain, use=use)
        return use

    def _admit(
        self, key: BlockKey, *, parent: BlockKey | None, may_lose: bool, use: Use, use_count: int = 0
    ) -> Place | None:
        """A place for a block that nobody has yet, which is held from now on; None: there is no room."""
        self._evictor.insert(key, parent=parent, use=use, use_count=use_count)
        self._evictor.hold((key,))  # until it is committed
        place = self._take_place(key.namespace_id, may_lose=may_lose)
        if place is None and parent is not None:
            place = self._take_place_of_ancestor(parent)
        if place is None:
            self._evictor.remove(key)
            return None
        self._count_uses((place,), +1)
        return place

    def _begin(
        self,
        key: BlockKey,
        place: Place,
        *,
        use: Use,
        number: ReservationId,
        owner_id: OwnerId,
        path: TransferPath,
        siblings: list[ReservationId],
    ) -> Reservation:
        self._last_generation += 1
        reservation = Reservation(
            id=number,
            owner_id=owner_id,
            key=key,
            use=use,
            place=place,
            generation=Generation(self._last_generation),
            path=path,
            block_bytes_max=self.space.slot_bytes(key.namespace_id) - SLOT_HEADER_BYTES,
            siblings=siblings,
        )
        self._headers.begin_slot(place, reservation.generation)
        return reservation

    def _take_place(self, namespace_id: ScopedId, *, may_lose: bool) -> Place | None:
        """A place, at the cost of colder blocks if need be; None when everything is held, or another tenant's.

        Unless `may_lose`, not at the cost of blocks that the lower tier wants and has not yet, if these can depart.
        """
        place = self.space.allocate(namespace_id)
        if place is not None:
            return place
        if self.space.tenant_count > 1:
            self._claim_foreign_slab(tenant_of(namespace_id))
        count_max = None
        if self.lower is None:
            self.evict_to_low_watermark()
            place = self.space.allocate(namespace_id)
        else:
            count_max = _LOSS_COUNT_MAX
            place = self._take_place_without_loss(namespace_id)
        if place is not None:
            return place
        if self.lower is not None and not may_lose:
            self.evict_to_low_watermark()
            if not self.demoting_bytes:
                # All tenants are within their shares, or the room is in slabs of others: then one's own blocks depart.
                self._evict_or_demote(
                    self.lower,
                    self._own_goal_bytes(namespace_id),
                    may_evict=lambda key: key.namespace_id == namespace_id,
                    count_max=_LOSS_COUNT_MAX,
                )
            if not self.demoting_bytes:
                self._copy_slab_to_claim(self.lower, namespace_id)
            if self.demoting_bytes:
                return self.space.allocate(namespace_id)
        if not self._claim_slab(namespace_id):
            self._evict(
                self._own_goal_bytes(namespace_id),
                may_evict=lambda key: key.namespace_id == namespace_id,
                count_max=count_max,
            )
        return self.space.allocate(namespace_id)

    def _take_place_without_loss(self, namespace_id: ScopedId) -> Place | None:
        """A place at the cost of blocks that the lower tier has, or does not want.

        Nothing departs for it: that would free no memory now, and somebody waits.
        """
        excess_bytes = self._excess_bytes()
        if excess_bytes:
            may_evict = _anything if self.space.tenant_count == 1 else self._is_above_share
            self._evict_copies(excess_bytes, may_evict=may_evict, count_max=_EVICTION_COUNT_MAX)
            place = self.space.allocate(namespace_id)
            if place is not None:
                return place
        if not self._claim_slab(namespace_id, is_lossless=True):
            self._evict_copies(
                self._own_goal_bytes(namespace_id), may_evict=lambda key: key.namespace_id == namespace_id
            )
        return self.space.allocate(namespace_id)

    def _take_place_of_ancestor(self, key: BlockKey) -> Place | None:
        """For a chain that fills memory by itself: what follows `key` takes the place of the chain's head.

        This is no hole where the lower tier has it; what it has not is copied first, and leaves when asked again.
        """
        lower = self.lower
        if lower is None or self.demoting_bytes:
            return None
        stored = self._namespaces[key.namespace_id].stored
        if key not in self._evictor:
            return None
        chain = [
            one
            for one in (key, *self._evictor.ancestors(key))
            if one.block_hash in stored and not self._evictor.is_held(one)
        ]
        slot_bytes = self.space.slot_bytes(key.namespace_id)
        head_first = list(reversed(chain))
        below = list(takewhile(lambda one: lower.find(one) is not None, head_first))
        for one in below[: self._own_goal_bytes(key.namespace_id) // slot_bytes]:
            self._evictor.remove(one)
            self._drop(one)
            self.counters.evicted_count += 1
        if not below:
            for one in head_first[: max(self.departing_bytes_max // slot_bytes, 1)]:
                if not self._is_undemoted(one):
                    break
                self._begin_copy(one)
        return self.space.allocate(key.namespace_id)

    def _own_goal_bytes(self, namespace_id: ScopedId) -> int:
        """Of a namespace's own blocks that make room for one: more than one, so that the next need not search again."""
        own_count = len(self._entry(namespace_id).stored)
        return max(own_count // 64, 1) * self.space.slot_bytes(namespace_id)

    def _claim_slab(self, namespace_id: ScopedId, *, is_lossless: bool = False) -> bool:
        """Empties a slab of another namespace for this one, if one is to be claimed.

        `is_lossless`: only if nothing is lost to the lower tier.
        """
        slab = self._slab_to_claim(namespace_id)
        return slab is not None and self._empty_slab(slab, is_lossless=is_lossless)

    def _copy_slab_to_claim(self, lower: LowerTier, namespace_id: ScopedId) -> None:
        """Lets what would be lost with a slab of another namespace go down first: asked again, it costs nothing."""
        slab = self._slab_to_claim(namespace_id)
        if slab is None:
            return
        copies: dict[BlockKey, None] = {}
        for key in [self._key_at[place] for place in self.space.taken_places(slab)]:
            if key not in copies and self._is_undemoted(key):
                copies |= dict.fromkeys([*self._ancestors_to_copy(lower, key, known=copies), key])
        room_bytes = self.departing_bytes_max
        for key in copies:
            room_bytes -= self.space.slot_bytes(key.namespace_id)
            if room_bytes < 0 and self.demoting_bytes:
                break  # but one block may always go down, however large it is
            self._begin_copy(key)

    def _slab_to_claim(self, namespace_id: ScopedId) -> SlabId | None:
        """When the tenant's coldest block is another namespace's, a slab that nobody uses.

        This is how space follows demand. Of the coldest block's namespace the emptiest slab goes: eviction has
        thinned the coldest ones most, and the least is lost.
        """
        tenant = tenant_of(namespace_id)
        if self.space.tenant_count == 1:
            coldest = self._evictor.peek_coldest(now_s=self.now_s)
        else:
            coldest = self._evictor.peek_coldest(
                may_evict=lambda key: tenant_of(key.namespace_id) == tenant, now_s=self.now_s
            )
        if coldest is None or coldest.namespace_id == namespace_id:
            return None
        unused = [
            (owner != coldest.namespace_id, taken_count, slab)
            for owner, slab, taken_count in self.space.slabs_of_others(namespace_id)
            if slab not in self._use_counts and tenant_of(owner) == tenant
        ]
        return min(unused)[-1] if unused else None

    def _claim_foreign_slab(self, tenant: Tenant) -> None:
        """Has a slab's memory replaced for a tenant that is out of room: a free one, or one of who has too much.

        It serves once it has been replaced; the block that asked for it finds another place, or none.
        """
        if self.space.claim_foreign_slab(tenant) or self.space.is_waiting(tenant):
            return
        if not self.space.is_below_share(tenant):
            return
        unused = [
            (taken_count, slab)
            for owner, slab, taken_count in self.space.slabs_of_others(None)
            if slab not in self._use_counts and self.space.is_above_share(tenant_of(owner))
        ]
        if unused:
            self._empty_slab(min(unused)[-1])
            self.space.claim_foreign_slab(tenant)

    def _empty_slab(self, slab: SlabId, *, is_lossless: bool = False) -> bool:
        """Evicts all blocks of a slab that nobody uses; `is_lossless`: or none, if one were lost to the lower tier."""
        keys = [self._key_at[place] for place in self.space.taken_places(slab)]
        if self.lower is not None:
            undemoted = filter(self._is_undemoted, keys)
            if is_lossless and next(undemoted, None) is not None:
                return False
            self.counters.dropped_undemoted_count += len(list(undemoted))
        for key in keys:
            self._evictor.remove(key)
            self._drop(key)
        self._note_left(keys, Fate.EVICTED)
        self.counters.evicted_count += len(keys)
        return True

    def _is_above_share(self, key: BlockKey) -> bool:
        return self.space.is_above_share(tenant_of(key.namespace_id))

    def _excess_bytes(self) -> int:
        """What is to leave beside that which departs already."""
        excess_bytes = self._watermarks.excess_bytes(
            used_bytes=self.space.used_bytes - self.departing_bytes,
            capacity_bytes=self.space.ready_bytes,
            is_evicting=self._is_evicting,
        )
        self._is_evicting = excess_bytes > 0
        return excess_bytes

    def _evict(
        self,
        goal_bytes: int,
        *,
        may_evict: Callable[[BlockKey], bool | None] = _anything,
        count_max: int | None = None,
    ) -> int:
        """Drops the coldest leaves, even what the lower tier has not and wants."""
        lost_count = 0

        def may_drop(key: BlockKey) -> bool | None:
            nonlocal lost_count
            verdict = may_evict(key)
            lost_count += bool(verdict) and self._is_undemoted(key)
            return verdict

        victims = self._pop_coldest(
            goal_bytes, may_evict=may_evict if self.lower is None else may_drop, count_max=count_max
        )
        for key in victims:
            self._drop(key)
        self._note_left(victims, Fate.EVICTED)
        self.counters.evicted_count += len(victims)
        self.counters.dropped_undemoted_count += lost_count
        return len(victims)

    def _evict_copies(
        self, goal_bytes: int, *, may_evict: Callable[[BlockKey], bool], count_max: int | None = None
    ) -> None:
        """Drops the coldest leaves that the lower tier has or does not want, among the coldest of all."""
        undemoted_count = 0

        def may_drop(key: BlockKey) -> bool | None:
            nonlocal undemoted_count
            if not may_evict(key):
                return False
            if not self._is_undemoted(key):
                return True
            undemoted_count += 1
            return False if undemoted_count < _UNDEMOTED_COUNT_MAX else None

        victims = self._pop_coldest(goal_bytes, may_evict=may_drop, count_max=count_max)
        for key in victims:
            self._drop(key)
        self._note_left(victims, Fate.REFUSED)
        self.counters.evicted_count += len(victims)

    def _evict_or_demote(
        self, lower: LowerTier, goal_bytes: int, *, may_evict: Callable[[BlockKey], bool], count_max: int
    ) -> int:
        """As `_evict`, but what the lower tier has not and wants departs, after copies of its ancestors.

        Ends where too much is on its way already.
        """
        room_bytes = self.departing_bytes_max - self.demoting_bytes
        departures: dict[BlockKey, Departure] = {}
        copies: dict[BlockKey, None] = {}

        def may_leave(key: BlockKey) -> bool | None:
            nonlocal room_bytes
            if not may_evict(key):
                return False
            if lower.find(key) is not None:
                return True
            if key in copies:  # its last child leaves with it
                del copies[key]
                departures[key] = self._departure(key)
                return True
            slot_bytes = self.space.slot_bytes(key.namespace_id)
            is_idle = not (self.demoting_bytes or departures or copies)
            if slot_bytes > room_bytes and not is_idle:
                return None  # but one block may always go down, however large it is
            if not self._is_wanted(lower, key):
                return True
            # On credit, if need be: the block would be of no use without them.
            above = [one for one in self._ancestors_to_copy(lower, key) if one not in copies]
            count = max(room_bytes // slot_bytes, int(is_idle))
            copies.update(dict.fromkeys(above[:count]))
            if len(above) >= count:
                room_bytes = 0
                return None
            room_bytes -= (len(above) + 1) * slot_bytes
            departures[key] = self._departure(key)
            return True

        victims = self._pop_coldest(goal_bytes, may_evict=may_leave, count_max=count_max)
        for key in victims:
            departure = departures.get(key)
            if departure is None:
                self._drop(key)
            else:
                self._begin_departure(departure)
        self._note_left([key for key in victims if key not in departures], Fate.REFUSED)
        for key in copies:
            self._begin_copy(key)
        self.counters.evicted_count += len(victims) - len(departures)
        return len(victims)

    def _ancestors_to_copy(self, lower: LowerTier, key: BlockKey, *, known: Container[BlockKey] = ()) -> list[BlockKey]:
        """Stored ancestors that are neither below nor on their way there nor known, up to the first that is, head
        first."""
        stored = self._namespaces[key.namespace_id].stored
        above: list[BlockKey] = []
        for parent in self._evictor.ancestors(key):
            if parent in known or lower.find(parent) is not None:
                break
            block = stored.get(parent.block_hash)
            if block is not None:
                if block.place in self._copying:
                    break
                above.append(parent)
        above.reverse()
        return above

    def _pop_coldest(
        self, goal_bytes: int, *, may_evict: Callable[[BlockKey], bool | None], count_max: int | None
    ) -> list[BlockKey]:
        return self._evictor.pop_coldest(
            goal_bytes=goal_bytes,
            size_bytes_of=lambda key: self.space.slot_bytes(key.namespace_id),
            may_evict=may_evict,
            count_max=count_max,
            now_s=self.now_s,
        )

    def _is_undemoted(self, key: BlockKey) -> bool:
        """Whether the lower tier would lose something with this block: it has it not, and wants it."""
        lower = self.lower
        return lower is not None and lower.find(key) is None and self._is_wanted(lower, key)

    def _is_wanted(self, lower: LowerTier, key: BlockKey) -> bool:
        evictor = self._evictor
        return lower.wants(key, use_count=evictor.use_count(key), use=evictor.last_use(key).below, now_s=self.now_s)

    def _note_left(self, keys: Sequence[BlockKey], fate: Fate) -> None:
        """Of blocks that memory has not, or not any more: those that the lower tier has not either are gone."""
        lower = self.lower
        self._tell(keys if lower is None else [key for key in keys if lower.find(key) is None], fate)

    def _tell(self, keys: Sequence[BlockKey], fate: Fate) -> None:
        for namespace_id, hashes in _by_namespace(keys).items():
            self.reuse.left(namespace_id, pack_hashes(hashes), fate)

    def _departure(self, key: BlockKey) -> Departure:
        parent = self._evictor.parent_of(key)
        return Departure(
            key=key,
            block=self._namespaces[key.namespace_id].stored[key.block_hash],
            parent_hash=None if parent is None else parent.block_hash,
            use=self._evictor.last_use(key).below,
        )

    def _begin_departure(self, departure: Departure) -> None:
        """Of a block that is out of the evictor already."""
        place = departure.block.place
        del self._key_at[place]
        self.space.retain((place,))
        self._count_uses((place,), +1)
        self._departing[place] = self._untaken[place] = departure
        self.departing_bytes += self.space.slot_bytes(departure.key.namespace_id)

    def _begin_copy(self, key: BlockKey) -> None:
        departure = self._departure(key)
        place = departure.block.place
        self._use((place,))
        self._copying[place] = self._untaken[place] = departure
        self.copying_bytes += self.space.slot_bytes(key.namespace_id)

    def _free_demoting(self, place: Place) -> None:
        departure = self._departing.pop(place, None)
        if departure is not None:
            self.departing_bytes -= self.space.slot_bytes(departure.key.namespace_id)
        else:
            departure = self._copying.pop(place)
            self.copying_bytes -= self.space.slot_bytes(departure.key.namespace_id)
        self._end_use((place,))

    def _use(self, places: Sequence[Place]) -> list[BlockKey]:
        """Holds places for somebody beside the index, and returns the blocks there; owes one `_end_use` of each."""
        self.space.retain(places)
        self._count_uses(places, +1)
        keys = self._keys_at(places)
        self._evictor.hold(keys)
        return keys

    def _end_use(self, places: Sequence[Place]) -> None:
        self._evictor.unhold(self._keys_at(places))
        self._count_uses(places, -1)
        for place in places:
            self.space.release(place)

    def _lease(
        self, blocks: Sequence[StoredBlock], *, use: Use, owner_id: OwnerId, now_s: float, duration_s: float
    ) -> LeaseId:
        places = tuple([block.place for block in blocks])
        keys = self._use(places)
        self.prefetches.use(keys)
        self._touch_keys(keys, use=use)
        return LeaseId(self._leases.grant(owner_id=owner_id, value=places, now_s=now_s, duration_s=duration_s))

    def _keys_at(self, places: Sequence[Place]) -> list[BlockKey]:
        """The stored blocks at these places; there is none where it is still to come, departs, or was quarantined."""
        return list(filter(None, map(self._key_at.get, places)))

    def _count_uses(self, places: Sequence[Place], change: int) -> None:
        counts, slab_bytes = self._use_counts, self.space.slab_bytes
        for place in places:
            slab = SlabId(place // slab_bytes)
            count = counts.get(slab, 0) + change
            assert count >= 0, f"slab {slab} has {count} uses"
            if count:
                counts[slab] = count
            else:
                del counts[slab]

    def _drop(self, key: BlockKey) -> None:
        self.prefetches.leave((key,))
        block = self._namespaces[key.namespace_id].stored.pop(key.block_hash)
        self._headers.clear_slot(block.place)
        self._key_at.pop(block.place, None)  # a block that departs is not there
        self.space.release(block.place)

    def _settle(self, outcomes: Iterable[tuple[Reservation, CommitState]], *, is_verified: bool) -> int:
        """What `end_commits` does; returns how many blocks are readable now."""
        keys: list[BlockKey] = []
        places: list[Place] = []
        keys_of: dict[Use, list[BlockKey]] = {}
        for reservation, state in outcomes:
            self._committing_count -= 1
            if state is not CommitState.COMMITTED:
                self.counters.corrupt_on_commit_count += state is CommitState.CORRUPT
                self._give_up(reservation)
                continue
            key, place, generation = reservation.key, reservation.place, reservation.generation
            entry = self._namespaces[key.namespace_id]
            del entry.pending[key.block_hash]
            entry.stored[key.block_hash] = StoredBlock(place, reservation.landed_bytes, generation, is_verified)
            self._headers.publish_slot(place, generation, is_verified=is_verified)
            self._key_at[place] = key
            keys.append(key)
            places.append(place)
            keys_of.setdefault(reservation.use, []).append(key)
        self._count_uses(places, -1)
        for namespace_id, hashes in _by_namespace(keys).items():
            self.reuse.used(namespace_id, pack_hashes(hashes), block_bytes=self.space.slot_bytes(namespace_id))
        for use, used in keys_of.items():
            self._touch_keys(used, use=use)
        self._evictor.unhold(keys)
        self.prefetches.arrive(keys)
        return len(keys)

    def _give_up(self, reservation: Reservation) -> None:
        """Its writer is done with the slot, or no more."""
        if reservation.path is TransferPath.NIXL:
            self._strand(reservation)
            return
        self._forget(reservation)
        self._free(reservation)

    def _strand(self, reservation: Reservation) -> None:
        """Gives a block up, but not its slot, into which something may be written at any moment."""
        self._forget(reservation)
        if reservation.path is TransferPath.NIXL and reservation.generation <= self._fenced_generation:
            self._free(reservation)
            return
        self.counters.stranded_reservation_count += 1
        if reservation.path is TransferPath.NIXL:
            self._unfenced.append(reservation)
        else:
            self._stranded.adopt(reservation.id, owner_id=reservation.owner_id, value=reservation, deadline_s=inf)

    def _end_stranding(self, reservation_id: ReservationId, *, owner_id: OwnerId) -> None:
        stranded = self._stranded.release(reservation_id, owner_id=owner_id)
        if stranded is not None:
            self._free(stranded)

    def _forget(self, reservation: Reservation) -> None:
        """The block is not to come any more."""
        entry = self._namespaces[reservation.key.namespace_id]
        del entry.pending[reservation.key.block_hash]
        self._evictor.remove(reservation.key)
        self._headers.clear_slot(reservation.place)
        self.prefetches.leave((reservation.key,))
        self._note_left([reservation.key], Fate.FAILED)

    def _free(self, reservation: Reservation) -> None:
        self._count_uses((reservation.place,), -1)
        self.space.release(reservation.place)


def _by_namespace(keys: Iterable[BlockKey]) -> dict[ScopedId, list[BlockHash]]:
    found: dict[ScopedId, list[BlockHash]] = {}
    for namespace_id, block_hash in keys:
        found.setdefault(namespace_id, []).append(block_hash)
    return found
