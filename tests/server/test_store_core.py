"""The store's rules against an obvious model: sets of blocks, and a count of who holds which place."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.errors import CapacityError, LayoutMismatchError, NamespaceUnknownError
from kvstore.eviction import Watermarks
from kvstore.messages import BlockState, CommitState, LeaseId, OwnerId, ReservationId, ReserveState, TransferPath
from kvstore.namespace import Namespace
from kvstore.slab import SlotState
from kvstore_server.core.space import Place, SlabId, SlabSpace
from kvstore_server.core.store import LowerTier, Reservation, StoreCore, StoredBlock
from kvstore_server.core.tenants import DEFAULT_TENANT, ScopedId, Tenant, scoped
from tests.server.builders import (
    ALICE,
    BOB,
    MIDDLE,
    SMALL,
    FakeHeaders,
    block_hash,
    commit,
    hashes,
    make_core,
    put,
    reserve,
    states_of,
)

OTHER = dataclasses.replace(SMALL, model="other")
SLAB_COUNT = 3
SLAB_BYTES = 4 * 4096  # 4 small slots, or 1 of MIDDLE's three pages
NUMBERS = range(10)
SIZE_BYTES = 100  # of every block here: the core never looks at bytes

ACME = Tenant("acme")


@dataclass(frozen=True)
class Space:
    """A namespace of a tenant."""

    tenant: Tenant
    namespace: Namespace

    @property
    def id(self) -> ScopedId:
        return scoped(self.tenant, self.namespace.id)


Key = tuple[Space, int]
_Result = TypeVar("_Result")

owners = st.sampled_from([ALICE, BOB])
any_space = st.runner().flatmap(lambda machine: st.sampled_from(machine.spaces))
paths = st.sampled_from([TransferPath.STREAM, TransferPath.SLAB, TransferPath.NIXL])
# Ascending, and parents below: a prefix tree that has no rings, as every honest caller's.
chains = st.sets(st.sampled_from(NUMBERS), min_size=1, max_size=6).map(sorted)
durations_s = st.integers(1, 20).map(float)


@dataclass(kw_only=True)
class ModelHold:
    owner_id: OwnerId
    deadline_s: float


@dataclass(kw_only=True)
class ModelLease(ModelHold):
    places: list[Place]


@dataclass(kw_only=True)
class ModelReservation(ModelHold):
    key: Key
    parent: Key | None
    place: Place
    path: TransferPath
    is_fenced: bool = False
    landed_bytes: int = 0
    landings: list[tuple[Reservation, int]] = field(default_factory=list)


class StoreCoreMachine(RuleBasedStateMachine):
    slab_count = SLAB_COUNT
    spaces = (Space(DEFAULT_TENANT, SMALL), Space(DEFAULT_TENANT, MIDDLE))
    departing_bytes_max = 3 * 4096
    policy = "lru"

    def __init__(self, lower: LowerTier | None = None) -> None:
        super().__init__()
        self.headers = FakeHeaders()
        self.tenant_count = len({space.tenant for space in self.spaces})
        self.core = StoreCore(
            space=SlabSpace(slab_count=self.slab_count, slab_bytes=SLAB_BYTES, tenant_count=self.tenant_count),
            watermarks=Watermarks(high=0.9, low=0.7),
            headers=self.headers,
            policy=self.policy,
            lower=lower,
            departing_bytes_max=self.departing_bytes_max,
        )
        self.waiting_slabs = list(range(self.slab_count))
        self.seen_by: dict[SlabId, Tenant] = {}  # whose bytes have been in the memory that a slab has now
        self.now_s = 0.0
        self.stored: dict[Key, tuple[Place, Key | None]] = {}  # with the parent that was claimed
        self.reservations: dict[ReservationId, ModelReservation] = {}
        self.stranded: dict[ReservationId, ModelReservation] = {}
        self.unfenced: list[ModelReservation] = []
        self.committing: list[tuple[ModelReservation, Reservation]] = []
        self.promoting: list[tuple[ModelReservation, Reservation]] = []
        self.departing: dict[Place, Key] = {}
        self.leases: dict[LeaseId, ModelLease] = {}
        self.readers: list[tuple[Key, StoredBlock]] = []
        self.landings: list[tuple[ModelReservation, Reservation, int]] = []
        self.held: Counter[Place] = Counter()
        self.lease_ids: list[LeaseId] = [LeaseId(0)]
        self.reservation_ids: list[ReservationId] = [ReservationId(0)]
        self.corrupt_count = 0
        for space in self.spaces:
            self.open_again(space)

    # --- helpers

    def pending(self) -> dict[Key, ModelReservation]:
        holds = [*self.reservations.values(), *(hold for hold, _ in [*self.committing, *self.promoting])]
        return {hold.key: hold for hold in holds}

    def drop_stored(self, key: Key) -> None:
        self.release(self.stored.pop(key)[0])

    def release(self, *places: Place) -> None:
        self.held.subtract(places)

    def give_up(self, hold: ModelReservation) -> None:
        if hold.path is TransferPath.NIXL and not hold.is_fenced:
            self.unfenced.append(hold)
        else:
            self.release(hold.place)

    def place_of(self, key: Key) -> Place:
        return self.stored[key][0]

    def evicting(
        self, act: Callable[[], _Result], *, commits: Key | None = None, tenant: Tenant | None = None
    ) -> _Result:
        """Runs what may evict, and checks that only blocks went that nobody held, and whose they were.

        `tenant` is whose blocks may make room for the caller's; None: nobody waits.
        """
        before = self.core.counters.evicted_count
        may_lose = {space.tenant for space in self.spaces if self.core.space.is_above_share(space.tenant)}
        result = act()
        gone = [
            key
            for key in self.stored
            if key != commits and self.core.lookup(key[0].id, [block_hash(key[1])]).matched_count == 0
        ]
        assert len(gone) == self.core.counters.evicted_count - before
        self.check_lower_tier(gone, is_waited_for=tenant is not None)
        for key in gone:
            assert self.tenant_count == 1 or key[0].tenant == tenant or key[0].tenant in may_lose
            place, _ = self.stored.pop(key)
            assert self.held[place] == 1, f"{key[1]} was evicted while held {self.held[place] - 1} times"
            self.release(place)
        return result

    def check_lower_tier(self, gone: list[Key], *, is_waited_for: bool) -> None:
        """There is none here."""

    # --- time and space

    @precondition(lambda self: self.waiting_slabs)
    @rule()
    def put_a_slab_into_service(self) -> None:
        self.core.space.add_slab(SlabId(self.waiting_slabs.pop()))

    @rule()
    def replace_slabs(self) -> None:
        for slab in self.core.space.slabs_to_replace():
            self.seen_by.pop(slab, None)
            self.core.space.add_slab(slab)

    @rule(step_s=st.integers(0, 8))
    def let_time_pass(self, step_s: int) -> None:
        self.now_s += step_s

    @rule()
    def expire(self) -> None:
        due_leases = [lease for lease, hold in self.leases.items() if hold.deadline_s <= self.now_s]
        due = [number for number, hold in self.reservations.items() if hold.deadline_s <= self.now_s]
        assert self.core.expire(now_s=self.now_s) == len(due)
        for lease in due_leases:
            self.release(*self.leases.pop(lease).places)
        for number in due:
            hold = self.reservations.pop(number)
            if hold.path is TransferPath.SLAB:
                self.stranded[number] = hold
            else:
                self.give_up(hold)

    @rule()
    def fence(self) -> None:
        self.core.fence()
        for hold in [*self.reservations.values(), *(hold for hold, _ in self.committing)]:
            hold.is_fenced = True
        self.release(*(hold.place for hold in self.unfenced))
        self.unfenced.clear()

    @rule(owner_id=owners)
    def end_owner(self, owner_id: OwnerId) -> None:
        ended = [number for number, hold in self.reservations.items() if hold.owner_id == owner_id]
        assert self.core.end_owner(owner_id) == len(ended)
        for number in ended:
            self.give_up(self.reservations.pop(number))
        for number in [number for number, hold in self.stranded.items() if hold.owner_id == owner_id]:
            self.release(self.stranded.pop(number).place)
        for lease in [lease for lease, hold in self.leases.items() if hold.owner_id == owner_id]:
            self.release(*self.leases.pop(lease).places)

    @rule(space=any_space)
    def open_again(self, space: Space) -> None:
        slot_bytes = self.core.open_namespace(
            space.namespace, payload_bytes=space.namespace.block_layout.payload_bytes, tenant=space.tenant
        )
        assert slot_bytes == (4096 if space.namespace is SMALL else SLAB_BYTES)

    # --- reading

    @rule(space=any_space, chain=chains, owner_id=owners, duration_s=durations_s)
    def lease_prefix(self, space: Space, chain: list[int], owner_id: OwnerId, duration_s: float) -> None:
        matched = self.core.lookup(space.id, hashes(*chain)).matched_count
        places = [self.place_of((space, number)) for number in chain[:matched]]
        lease = self.core.lease(
            space.id, hashes(*chain[:matched]), owner_id=owner_id, now_s=self.now_s, duration_s=duration_s
        )
        assert (lease is None) == (matched == 0)
        if lease is None:
            return
        assert lease not in self.lease_ids
        self.lease_ids.append(lease)
        self.held.update(places)
        self.leases[lease] = ModelLease(owner_id=owner_id, deadline_s=self.now_s + duration_s, places=places)

    @rule(space=any_space, chain=chains, owner_id=owners, duration_s=durations_s)
    def lease_stored(self, space: Space, chain: list[int], owner_id: OwnerId, duration_s: float) -> None:
        leased = self.core.lease_stored(
            space.id, hashes(*chain), owner_id=owner_id, now_s=self.now_s, duration_s=duration_s
        )
        places = [self.place_of((space, number)) for number in chain if (space, number) in self.stored]
        assert [block.place for block in leased.blocks] == places
        assert [state == BlockState.HIT for state in leased.states] == [(space, n) in self.stored for n in chain]
        assert (leased.lease_id is None) == (not places)
        if leased.lease_id is not None:
            self.lease_ids.append(leased.lease_id)
            self.held.update(places)
            self.leases[leased.lease_id] = ModelLease(
                owner_id=owner_id, deadline_s=self.now_s + duration_s, places=places
            )

    @rule(data=st.data(), owner_id=owners, duration_s=durations_s)
    def renew_lease(self, data: st.DataObject, owner_id: OwnerId, duration_s: float) -> None:
        lease = data.draw(st.sampled_from(self.lease_ids))
        hold = self.leases.get(lease)
        expected = hold is not None and hold.owner_id == owner_id and hold.deadline_s > self.now_s
        assert self.core.renew_lease(lease, owner_id=owner_id, now_s=self.now_s, duration_s=duration_s) == expected
        if hold is not None and expected:
            hold.deadline_s = self.now_s + duration_s

    @rule(data=st.data(), owner_id=owners)
    def release_lease(self, data: st.DataObject, owner_id: OwnerId) -> None:
        lease = data.draw(st.sampled_from(self.lease_ids))
        hold = self.leases.get(lease)
        expected = hold is not None and hold.owner_id == owner_id
        assert self.core.release_lease(lease, owner_id=owner_id) == expected
        if hold is not None and expected:
            self.release(*hold.places)
            del self.leases[lease]

    @rule(space=any_space, number=st.sampled_from(NUMBERS))
    def begin_read(self, space: Space, number: int) -> None:
        key = (space, number)
        block = self.core.begin_read(space.id, block_hash(number))
        assert (block is not None) == (key in self.stored)
        if block is not None:
            generation, state = self.headers.slots[block.place]
            assert block == StoredBlock(self.place_of(key), SIZE_BYTES, generation, state is SlotState.VERIFIED)
            self.held[block.place] += 1
            self.readers.append((key, block))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def end_read(self, data: st.DataObject) -> None:
        _, block = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        self.core.end_read(block, sent_bytes=SIZE_BYTES)
        self.release(block.place)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        key, block = data.draw(st.sampled_from(self.readers))
        self.core.quarantine(key[0].id, block_hash(key[1]), block)
        if key in self.stored and self.place_of(key) == block.place:
            self.drop_stored(key)
            self.corrupt_count += 1

    @rule(space=any_space, chain=chains)
    def touch(self, space: Space, chain: list[int]) -> None:
        self.core.touch(space.id, hashes(*chain))

    # --- writing

    @rule(data=st.data(), space=any_space, chain=chains, owner_id=owners, duration_s=durations_s, path=paths)
    def reserve(
        self,
        data: st.DataObject,
        space: Space,
        chain: list[int],
        owner_id: OwnerId,
        duration_s: float,
        path: TransferPath,
    ) -> None:
        parent = data.draw(st.none() | st.integers(0, chain[0] - 1)) if chain[0] else None
        pending = self.pending()
        states, reservations = self.evicting(
            lambda: self.core.reserve(
                space.id,
                hashes(*chain),
                parent_hash=None if parent is None else block_hash(parent),
                owner_id=owner_id,
                now_s=self.now_s,
                duration_s=duration_s,
                path=path,
            ),
            tenant=space.tenant,
        )
        is_cut = False
        parent_key = None if parent is None else (space, parent)
        for number, state, reservation in zip(chain, states, reservations, strict=True):
            key = (space, number)
            assert (reservation is not None) == (state == ReserveState.RESERVED)
            if state == ReserveState.STORED:
                pass  # it may have been evicted after that, by a block of its own chain
            elif key in self.stored:
                raise AssertionError(f"{number} is stored and was answered {state}")
            elif key in pending:
                assert state == ReserveState.PENDING
            elif self.core.is_draining:
                assert state == ReserveState.DRAINING
            elif is_cut:
                assert state == ReserveState.ORPHAN
            elif state == ReserveState.OVERLOADED:
                is_cut = True
                assert self.core.demoting_bytes, f"{number} is to wait for room, and none is on its way"
            elif state == ReserveState.FULL:
                is_cut = True
                assert not self.core.demoting_bytes, f"{number} was refused for good, and room is on its way"
                self.check_is_full(space, child_of=parent_key)
            else:
                assert state == ReserveState.RESERVED
                assert reservation is not None
                assert reservation.id not in self.reservation_ids
                self.reservation_ids.append(reservation.id)
                self.admit(key, parent_key, reservation, duration_s)
            parent_key = key

    @rule(data=st.data(), space=any_space, chain=chains, owner_id=owners)
    def store(self, data: st.DataObject, space: Space, chain: list[int], owner_id: OwnerId) -> None:
        """All of a put at once, so that the store is full most of the time."""
        known = len(self.reservation_ids)
        self.reserve(data, space, chain, owner_id, 20.0, TransferPath.STREAM)
        for number in self.reservation_ids[known:]:
            hold = self.reservations.pop(number)
            reservation = self.core.begin_commit(number, owner_id=owner_id)
            assert reservation is not None
            self.committed(hold, reservation)

    def committed(self, hold: ModelReservation, reservation: Reservation) -> None:
        reservation.landed_bytes = SIZE_BYTES  # so that every reader can tell what it should see
        self.stored[hold.key] = (hold.place, hold.parent)
        self.core.end_commits([(reservation, CommitState.COMMITTED)])
        self.evicting(self.core.evict_to_low_watermark)

    def admit(self, key: Key, parent_key: Key | None, reservation: Reservation, duration_s: float) -> None:
        tenant = key[0].tenant
        assert self.seen_by.setdefault(self.core.space.slab_of(reservation.place), tenant) == tenant, (
            f"{tenant!r} is given memory that another tenant has seen"
        )
        self.held[reservation.place] += 1
        self.reservations[reservation.id] = ModelReservation(
            owner_id=reservation.owner_id,
            deadline_s=self.now_s + duration_s,
            key=key,
            parent=parent_key,
            place=reservation.place,
            path=reservation.path,
        )

    def check_is_full(self, space: Space, *, child_of: Key | None) -> None:
        """There was no free slot, and of this namespace no leaf that nobody holds, but the new block's own parent."""
        assert self.core.space.allocate(space.id) is None
        parents = {child_of, *(parent for place, parent in self.stored.values() if place not in self.departing)}
        parents |= {hold.parent for hold in self.pending().values()}
        idle = [key[1] for key in self.stored if key[0] == space and self.held[self.place_of(key)] == 1]
        assert all((space, number) in parents for number in idle), f"full, but {idle} could leave"

    @rule(data=st.data(), owner_id=owners, is_in_order=st.booleans(), size_bytes=st.sampled_from([1, 60, 100, 5000]))
    def begin_landing(self, data: st.DataObject, owner_id: OwnerId, is_in_order: bool, size_bytes: int) -> None:
        number = data.draw(st.sampled_from(self.reservation_ids))
        hold = self.reservations.get(number)
        offset_bytes = (hold.landed_bytes if hold else 0) + (0 if is_in_order else data.draw(st.integers(1, 99)))
        landing = self.core.begin_landing(number, owner_id=owner_id, offset_bytes=offset_bytes, size_bytes=size_bytes)
        if hold is None or hold.owner_id != owner_id or not is_in_order or hold.path is not TransferPath.STREAM:
            assert landing is None
            return
        slot_bytes = self.core.space.slot_bytes(hold.key[0].id)
        assert (landing is not None) == (64 + offset_bytes + size_bytes <= slot_bytes)
        if landing is not None:
            hold.landed_bytes += size_bytes
            self.held[hold.place] += 1
            self.landings.append((hold, landing, size_bytes))

    @precondition(lambda self: self.landings)
    @rule(data=st.data())
    def end_landing(self, data: st.DataObject) -> None:
        hold, landing, size_bytes = self.landings.pop(data.draw(st.integers(0, len(self.landings) - 1)))
        self.core.end_landing(landing, size_bytes=size_bytes)
        self.release(hold.place)

    @rule(data=st.data(), owner_id=owners)
    def begin_commit(self, data: st.DataObject, owner_id: OwnerId) -> None:
        number = data.draw(st.sampled_from(self.reservation_ids))
        hold = self.reservations.get(number)
        reservation = self.core.begin_commit(number, owner_id=owner_id)
        assert (reservation is not None) == (hold is not None and hold.owner_id == owner_id)
        self.end_stranding(number, owner_id)
        if hold is not None and reservation is not None:
            del self.reservations[number]
            self.committing.append((hold, reservation))

    def end_stranding(self, number: ReservationId, owner_id: OwnerId) -> None:
        hold = self.stranded.get(number)
        if hold is not None and hold.owner_id == owner_id:
            self.release(self.stranded.pop(number).place)

    @precondition(lambda self: self.committing)
    @rule(data=st.data(), state=st.sampled_from([CommitState.COMMITTED, CommitState.INCOMPLETE, CommitState.CORRUPT]))
    def end_commit(self, data: st.DataObject, state: CommitState) -> None:
        hold, reservation = self.committing.pop(data.draw(st.integers(0, len(self.committing) - 1)))
        if state is CommitState.COMMITTED:
            self.committed(hold, reservation)
        else:
            self.core.end_commits([(reservation, state)])
            self.give_up(hold)

    @rule(data=st.data(), owner_id=owners)
    def abort(self, data: st.DataObject, owner_id: OwnerId) -> None:
        number = data.draw(st.sampled_from(self.reservation_ids))
        hold = self.reservations.get(number)
        expected = hold is not None and hold.owner_id == owner_id
        assert self.core.abort(number, owner_id=owner_id) == expected
        self.end_stranding(number, owner_id)
        if hold is not None and expected:
            self.give_up(self.reservations.pop(number))

    @rule()
    def evict(self) -> None:
        self.evicting(self.core.evict_to_low_watermark)

    @rule(is_draining=st.booleans())
    def drain(self, is_draining: bool) -> None:
        self.core.is_draining = is_draining

    # --- what always holds

    @invariant()
    def lookups_agree_with_the_model(self) -> None:
        pending = self.pending()
        for space in self.spaces:
            expected = [
                BlockState.HIT
                if (space, number) in self.stored
                else BlockState.PENDING
                if (space, number) in pending
                else BlockState.MISS
                for number in NUMBERS
            ]
            assert states_of(self.core, *NUMBERS, namespace=space.namespace, tenant=space.tenant) == expected

    @invariant()
    def every_place_is_held_as_often_as_the_model_says(self) -> None:
        self.core.check_invariants()
        self.held = +self.held
        used_bytes = 0
        for slab in range(self.slab_count):
            if SlabId(slab) in self.core.space._shelf_of_slab:
                slot_bytes = self.core.space._shelf_of_slab[SlabId(slab)].slot_bytes
                for place in self.core.space.taken_places(SlabId(slab)):
                    assert self.core.space.ref_count(place) == self.held[place]
                    used_bytes += slot_bytes
        assert used_bytes == self.core.space.used_bytes <= self.core.space.capacity_bytes
        assert sum(self.held.values()) == sum(
            self.core.space.ref_count(place)
            for slab in self.core.space._shelf_of_slab
            for place in self.core.space.taken_places(slab)
        )

    @invariant()
    def figures_agree_with_the_model(self) -> None:
        assert self.core.lease_count == len(self.leases)
        assert self.core.stranded_count == len(self.stranded) + len(self.unfenced)
        assert self.core.unfenced_count == len(self.unfenced)
        assert self.core.reservation_count == len(self.reservations) + len(self.committing) + len(self.promoting)
        assert self.core.block_count == len(self.stored)
        assert self.core.counters.corrupt_in_memory_count == self.corrupt_count

    @invariant()
    def a_header_is_readable_exactly_while_its_block_is_stored(self) -> None:
        readable = {place for place, (_, state) in self.headers.slots.items() if state is not SlotState.GONE}
        assert readable == {place for place, _ in self.stored.values()}
        assert self.headers.slots.keys() - readable == {hold.place for hold in self.pending().values()}
        generations = [generation for generation, _ in self.headers.slots.values()]
        assert len(set(generations)) == len(generations)

    def teardown(self) -> None:
        """When all holds end, every block can leave and every byte is free."""
        while self.readers:
            self.core.end_read(self.readers.pop()[1], sent_bytes=0)
        for _, landing, size_bytes in self.landings:
            self.core.end_landing(landing, size_bytes=size_bytes)
        for _, reservation in self.committing:
            self.core.end_commits([(reservation, CommitState.CORRUPT)])
        for owner_id in (ALICE, BOB):
            self.core.end_owner(owner_id)
        self.core.fence()
        assert self.core.lease_count == self.core.reservation_count == self.core.stranded_count == 0
        self.core._evict(self.slab_count * SLAB_BYTES)
        self.core.check_invariants()
        assert self.core.block_count == 0
        assert self.core.space.used_bytes == 0


StoreCoreMachine.TestCase.settings = settings(max_examples=40, deadline=None)
TestStoreCore = StoreCoreMachine.TestCase


class TenantsMachine(StoreCoreMachine):
    """Two tenants, with equal namespaces, that fight for four slabs."""

    slab_count = 4
    spaces = (Space(DEFAULT_TENANT, SMALL), Space(ACME, SMALL), Space(ACME, MIDDLE))

    def __init__(self) -> None:
        super().__init__()
        while self.waiting_slabs:
            self.core.space.add_slab(SlabId(self.waiting_slabs.pop()))


TenantsMachine.TestCase.settings = settings(max_examples=40, deadline=None)
TestTenants = TenantsMachine.TestCase


def test_a_block_is_readable_only_after_its_commit() -> None:
    core = make_core()
    _, (reservation, *_) = reserve(core, 1)
    assert states_of(core, 1) == [BlockState.PENDING]
    commit(core, reservation)
    assert states_of(core, 1) == [BlockState.HIT]


def test_a_namespace_must_be_opened_first() -> None:
    core = make_core(namespaces=[])
    with pytest.raises(NamespaceUnknownError, match=SMALL.id.hex()[:16]):
        core.lookup(SMALL.id, hashes(1))


def test_a_client_that_lays_blocks_out_differently_is_refused_with_both_sizes() -> None:
    with pytest.raises(LayoutMismatchError, match=r"payload_bytes is 1000; namespace small gives 1024"):
        make_core().open_namespace(SMALL, payload_bytes=1000)


def test_only_the_missing_blocks_of_a_chain_are_reserved() -> None:
    core = make_core()
    put(core, 1, 2)
    reserve(core, 3, parent=2)
    states, reservations = reserve(core, 1, 2, 3, 4)
    assert states == [ReserveState.STORED, ReserveState.STORED, ReserveState.PENDING, ReserveState.RESERVED]
    assert [bool(reservation) for reservation in reservations] == [False, False, False, True]


def test_what_follows_a_block_without_a_place_is_an_orphan() -> None:
    core = make_core(slab_count=1)
    states, _ = reserve(core, 1, 2, 3, 4, 5, 6)
    assert states == [ReserveState.RESERVED] * 4 + [ReserveState.FULL, ReserveState.ORPHAN]
    assert core.counters.refused_full_count == 2, "both blocks"


def test_the_coldest_leaf_makes_room_and_heads_outlive_tails() -> None:
    core = make_core(slab_count=1)
    put(core, 1, 2)
    put(core, 11, 12)
    core.touch(SMALL.id, hashes(1, 2))
    put(core, 21)
    assert states_of(core, 1, 2, 11, 12, 21) == [
        BlockState.HIT,
        BlockState.HIT,
        BlockState.HIT,
        BlockState.MISS,
        BlockState.HIT,
    ]


def test_a_chain_longer_than_the_arena_keeps_its_head() -> None:
    """Blocks further down the chain must not evict those before them: a chain with a hole matches less."""
    core = make_core(high=0.9, low=0.7)  # 16 slots
    put(core, *range(12))
    states, reservations = reserve(core, *range(12, 24), parent=11)
    assert states == [ReserveState.RESERVED] * 4 + [ReserveState.FULL] + [ReserveState.ORPHAN] * 7
    for reservation in reservations[:4]:
        commit(core, reservation)
    assert core.lookup(SMALL.id, hashes(*range(24))).matched_count >= 11


def test_the_parent_of_a_reservation_that_ended_can_leave_again() -> None:
    core = make_core(slab_count=1)
    put(core, 1)
    _, (first, *_) = reserve(core, 2, parent=1)
    assert first is not None
    assert core.abort(first, owner_id=ALICE)
    put(core, 11, 12, 13, 14)
    assert states_of(core, 1, 11, 14) == [BlockState.MISS, BlockState.HIT, BlockState.HIT]


def test_eviction_starts_above_the_high_mark_and_stops_at_the_low_one() -> None:
    core = make_core(high=0.75, low=0.5)  # of 16 slots: 12 and 8
    for number in range(12):
        put(core, number)
    assert core.counters.evicted_count == 0
    put(core, 12)
    assert core.block_count == 8
    assert core.counters.evicted_count == 5


def test_space_moves_to_the_namespace_that_needs_it() -> None:
    core = make_core(slab_count=2, namespaces=[SMALL, MIDDLE])
    put(core, *range(8))
    put(core, 1, namespace=MIDDLE)
    assert states_of(core, 1, namespace=MIDDLE) == [BlockState.HIT]
    assert core.block_count == 5


def test_one_held_block_does_not_keep_another_namespace_out() -> None:
    """The slab of the coldest block is in use, but another slab is not."""
    core = make_core(slab_count=2, namespaces=[SMALL, MIDDLE])
    for number in range(8):
        put(core, number)
    assert core.lease(SMALL.id, hashes(1), owner_id=ALICE, now_s=0.0, duration_s=10.0)
    put(core, 1, namespace=MIDDLE)
    assert states_of(core, 1) == [BlockState.HIT]
    assert states_of(core, 1, namespace=MIDDLE) == [BlockState.HIT]


def test_a_store_whose_blocks_are_all_leased_answers_full_and_recovers_after_release() -> None:
    """faults.md: eviction must neither take what is held nor hang; room comes back with the release."""
    core = make_core()
    put(core, *range(16))
    lease = core.lease(SMALL.id, hashes(*range(16)), owner_id=ALICE, now_s=0.0, duration_s=10.0)
    assert lease is not None
    assert reserve(core, 21)[0] == [ReserveState.FULL]
    assert core.release_lease(lease, owner_id=ALICE)
    assert reserve(core, 21)[0] == [ReserveState.RESERVED]


def test_a_quarantined_block_is_gone_at_once_but_its_readers_keep_their_slot() -> None:
    core = make_core(slab_count=1)
    put(core, 1)
    block = core.begin_read(SMALL.id, block_hash(1))
    assert block is not None
    core.quarantine(SMALL.id, block_hash(1), block)
    assert states_of(core, 1) == [BlockState.MISS]
    assert core.space.used_bytes == 4096
    core.end_read(block, sent_bytes=0)
    assert core.space.used_bytes == 0


def test_a_block_written_again_is_not_taken_for_the_damaged_one() -> None:
    core = make_core()
    put(core, 1)
    block = core.begin_read(SMALL.id, block_hash(1))
    assert block is not None
    core.quarantine(SMALL.id, block_hash(1), block)
    put(core, 1)
    core.quarantine(SMALL.id, block_hash(1), block)
    assert states_of(core, 1) == [BlockState.HIT]
    assert core.counters.corrupt_in_memory_count == 1


def test_the_slot_of_an_aborted_reservation_is_not_reused_while_bytes_still_land() -> None:
    core = make_core(slab_count=1)
    _, reservations = reserve(core, 1, 2, 3, 4)
    first = reservations[0]
    assert first is not None
    landing = core.begin_landing(first, owner_id=ALICE, offset_bytes=0, size_bytes=100)
    assert landing is not None
    assert core.abort(first, owner_id=ALICE)
    assert reserve(core, 5)[0] == [ReserveState.FULL]
    core.end_landing(landing, size_bytes=100)
    assert reserve(core, 5)[0] == [ReserveState.RESERVED]


def test_a_draining_store_admits_nothing_and_still_commits_what_it_had_admitted() -> None:
    core = make_core()
    put(core, 1)
    _, (reservation,) = reserve(core, 2, parent=1)
    core.is_draining = True
    assert reserve(core, 1, 2, 3)[0] == [ReserveState.STORED, ReserveState.PENDING, ReserveState.DRAINING]
    commit(core, reservation)
    assert states_of(core, 1, 2, 3) == [BlockState.HIT, BlockState.HIT, BlockState.MISS]


def test_a_used_block_outlives_one_that_was_only_looked_up() -> None:
    """faults.md, low hit rate: lookups of queued requests promoted blocks and evicted each other's."""
    core = make_core(slab_count=1)
    for number in range(4):
        put(core, number)
    core.touch(SMALL.id, hashes(0))
    core.lookup(SMALL.id, hashes(1))
    put(core, 4)
    assert states_of(core, 0, 1) == [BlockState.HIT, BlockState.MISS]


def test_a_block_leased_twice_stays_until_the_second_lease_ends() -> None:
    core = make_core(slab_count=1)
    put(core, 1)
    leases = [core.lease(SMALL.id, hashes(1), owner_id=owner, now_s=0.0, duration_s=9.0) for owner in (ALICE, BOB)]
    assert leases[0] is not None
    assert leases[1] is not None
    core.release_lease(leases[0], owner_id=ALICE)
    assert not core.release_lease(leases[0], owner_id=ALICE)
    assert not core.release_lease(leases[1], owner_id=ALICE)
    assert reserve(core, 11, 12, 13, 14)[0][-1] == ReserveState.FULL
    core.release_lease(leases[1], owner_id=BOB)
    assert reserve(core, 14)[0] == [ReserveState.RESERVED]


def test_a_client_cannot_fill_memory_with_names_of_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_server.core.store.NAMESPACE_COUNT_MAX", 2)
    core = make_core(namespaces=(SMALL, MIDDLE))
    put(core, 1)
    core.open_namespace(OTHER, payload_bytes=OTHER.block_layout.payload_bytes)
    assert core.namespace_count == 2
    with pytest.raises(NamespaceUnknownError):  # it was empty; its clients open it again by themselves
        core.lookup(MIDDLE.id, hashes(1))
    assert core.lookup(SMALL.id, hashes(1)).matched_count == 1
    put(core, 2, namespace=OTHER)
    with pytest.raises(CapacityError, match="2 namespaces hold blocks"):
        core.open_namespace(MIDDLE, payload_bytes=MIDDLE.block_layout.payload_bytes)
    core.check_invariants()


def test_thousands_of_held_blocks_neither_hide_idle_ones_nor_slow_the_rest() -> None:
    """A client that leases a thousand single blocks, all colder than anybody else's, costs only those."""
    core = make_core(slab_count=512, slab_bytes=4 * 4096, high=1.0, low=1.0)
    for number in range(1000):
        put(core, number)
        assert core.lease(SMALL.id, hashes(number), owner_id=ALICE, now_s=0.0, duration_s=600.0)
    for number in range(1000, 2048 + 500):
        put(core, number)
    assert core.counters.refused_full_count == 0
    assert states_of(core, *range(1000)) == [BlockState.HIT] * 1000
    assert 500 <= core.counters.evicted_count <= 550
    core.expire(now_s=601.0)
    core.check_invariants()
    for number in range(5000, 5100):
        put(core, number)
    assert states_of(core, 0) == [BlockState.MISS]


def test_an_eviction_goes_on_call_by_call_until_the_low_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_server.core.store._EVICTION_COUNT_MAX", 2)
    core = make_core(high=0.8, low=0.25)
    for number in range(13):  # the 13th of 16 slots passes the high mark
        put(core, number)
    assert core.block_count == 11
    evicted = [core.evict_to_low_watermark() for _ in range(5)]
    assert evicted == [2, 2, 2, 1, 0]
    assert core.block_count == 4


def test_another_namespace_is_not_confined_by_a_few_leases() -> None:
    """One lease in every second slab of a full arena: the other half is enough to grow into."""
    core = make_core(slab_count=8, namespaces=(SMALL, OTHER))
    for number in range(32):
        put(core, number)
    for number in range(0, 32, 8):
        core.lease(SMALL.id, hashes(number), owner_id=ALICE, now_s=0.0, duration_s=600.0)
    for number in range(16):
        put(core, 100 + number, namespace=OTHER)
    assert states_of(core, *range(100, 116), namespace=OTHER) == [BlockState.HIT] * 16
    assert states_of(core, 0, 8, 16, 24) == [BlockState.HIT] * 4
    core.check_invariants()


# --- slots that clients write and read by themselves


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda core, number: core.abort(number, owner_id=ALICE), id="abort"),
        pytest.param(lambda core, number: core.begin_commit(number, owner_id=ALICE), id="commit"),
        pytest.param(lambda core, number: core.end_owner(ALICE), id="end of its session"),
    ],
)
def test_an_expired_writers_slot_is_nobody_elses_until_it_is_done(
    end: Callable[[StoreCore, ReservationId], object],
) -> None:
    """A client that was stopped for an hour wakes up and goes on writing: into its own slot."""
    core = make_core(slab_count=1)
    _, reservations = reserve(core, 1, 2, 3, 4, path=TransferPath.SLAB)
    assert reservations[0] is not None
    core.expire(now_s=3600.0)
    assert states_of(core, 1, 2, 3, 4) == [BlockState.MISS] * 4, "others wait for a block that will not come"
    assert (core.reservation_count, core.stranded_count) == (0, 4)
    assert reserve(core, 11)[0] == [ReserveState.FULL]
    end(core, reservations[0])
    assert core.stranded_count in (0, 3)
    assert reserve(core, 11)[0] == [ReserveState.RESERVED]
    core.check_invariants()


def test_a_stranded_slot_is_not_freed_by_another_owner() -> None:
    core = make_core(slab_count=1)
    _, (reservation,) = reserve(core, 1, path=TransferPath.SLAB)
    assert reservation is not None
    core.expire(now_s=30.0)
    assert core.begin_commit(reservation, owner_id=BOB) is None
    assert not core.abort(reservation, owner_id=BOB)
    core.end_owner(BOB)
    assert core.stranded_count == 1


def _fail_to_commit(core: StoreCore, number: ReservationId) -> None:
    reservation = core.begin_commit(number, owner_id=ALICE)
    assert reservation is not None
    core.end_commits([(reservation, CommitState.CORRUPT)])


ends_of_a_reservation = pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda core, number: core.abort(number, owner_id=ALICE), id="abort"),
        pytest.param(lambda core, _: core.expire(now_s=3600.0), id="time"),
        pytest.param(lambda core, _: core.end_owner(ALICE), id="end of its session"),
        pytest.param(_fail_to_commit, id="commit that fails"),
    ],
)


@ends_of_a_reservation
def test_a_slot_that_a_remote_write_may_be_on_its_way_to_is_nobodys_before_a_fence(
    end: Callable[[StoreCore, ReservationId], object],
) -> None:
    """A one-sided write cannot be called back: it may arrive long after its client has given up."""
    core = make_core(slab_count=1)
    _, reservations = reserve(core, 1, 2, 3, 4, path=TransferPath.NIXL)
    for number in reservations:
        assert number is not None
        end(core, number)
        assert not core.abort(number, owner_id=ALICE)
        assert core.begin_commit(number, owner_id=ALICE) is None
    core.expire(now_s=7200.0)
    assert states_of(core, 1, 2, 3, 4) == [BlockState.MISS] * 4, "others wait for a block that will not come"
    assert (core.stranded_count, core.unfenced_count) == (4, 4)
    assert reserve(core, 11)[0] == [ReserveState.FULL]
    core.fence()
    assert (core.stranded_count, core.unfenced_count) == (0, 0)
    assert reserve(core, 11)[0] == [ReserveState.RESERVED]
    core.check_invariants()


@ends_of_a_reservation
def test_a_slot_that_was_reserved_before_a_fence_is_free_as_soon_as_it_is_given_up(
    end: Callable[[StoreCore, ReservationId], object],
) -> None:
    """Or the writes that a fence has broken would ask for the next one, and so on for ever."""
    core = make_core(slab_count=1)
    _, reservations = reserve(core, 1, 2, 3, 4, path=TransferPath.NIXL)
    core.fence()
    for number in reservations:
        assert number is not None
        end(core, number)
    assert (core.stranded_count, core.unfenced_count) == (0, 0)
    assert core.space.used_bytes == 0
    core.check_invariants()


def test_a_session_that_ends_leaves_nothing_behind_and_others_keep_theirs() -> None:
    core = make_core()
    put(core, 1, 2)
    for owner in (ALICE, BOB):
        core.lease(SMALL.id, hashes(1), owner_id=owner, now_s=0.0, duration_s=60.0)
    reserve(core, 11, path=TransferPath.SLAB)
    core.expire(now_s=30.0)
    reserve(core, 12, 13, path=TransferPath.SLAB, now_s=30.0)
    reserve(core, 14, path=TransferPath.SLAB, owner_id=BOB, now_s=30.0)
    assert core.end_owner(ALICE) == 2
    assert (core.lease_count, core.reservation_count, core.stranded_count) == (1, 1, 0)
    assert core.end_owner(ALICE) == 0
    core.check_invariants()


def test_a_block_written_again_has_another_generation() -> None:
    core = make_core(slab_count=1)
    seen = set()
    for _ in range(3):
        put(core, 1)
        block = core.begin_read(SMALL.id, block_hash(1))
        assert block is not None
        seen.add((block.place, block.generation))
        core.quarantine(SMALL.id, block_hash(1), block)
        core.end_read(block, sent_bytes=0)
    assert len({place for place, _ in seen}) == 1
    assert len(seen) == 3


def test_a_lease_of_single_blocks_takes_every_hit_and_counts_as_a_use() -> None:
    core = make_core(slab_count=1)
    put(core, 1)
    put(core, 2)
    reserve(core, 3)
    leased = core.lease_stored(SMALL.id, hashes(9, 1, 3, 2), owner_id=ALICE, now_s=0.0, duration_s=9.0)
    assert list(leased.states) == [BlockState.MISS, BlockState.HIT, BlockState.PENDING, BlockState.HIT]
    assert [block.size_bytes for block in leased.blocks] == [1152, 1152]
    assert reserve(core, 11, 12)[0] == [ReserveState.RESERVED, ReserveState.FULL]
    assert leased.lease_id is not None
    assert core.release_lease(leased.lease_id, owner_id=ALICE)
    assert core.lease_stored(SMALL.id, hashes(9), owner_id=ALICE, now_s=0.0, duration_s=9.0).lease_id is None


def test_bytes_of_a_stream_do_not_land_in_a_slot_that_a_client_writes() -> None:
    core = make_core()
    _, (reservation,) = reserve(core, 1, path=TransferPath.SLAB)
    assert reservation is not None
    assert core.begin_landing(reservation, owner_id=ALICE, offset_bytes=0, size_bytes=100) is None


def test_stores_are_refused_while_too_much_is_on_its_way() -> None:
    core = make_core()
    put(core, 1)
    states, reservations = core.reserve(
        SMALL.id,
        hashes(1, 2, 3),
        parent_hash=None,
        owner_id=ALICE,
        now_s=0.0,
        duration_s=9.0,
        is_overloaded=True,
    )
    assert list(states) == [ReserveState.STORED, ReserveState.OVERLOADED, ReserveState.OVERLOADED]
    assert reservations == [None] * 3
    assert core.counters.refused_overloaded_count == 2


# --- tenants


def two_tenants(*, slab_count: int = 4) -> StoreCore:
    core = make_core(slab_count=slab_count, tenant_count=2)
    core.open_namespace(SMALL, payload_bytes=SMALL.block_layout.payload_bytes, tenant=ACME)
    return core


def put_in_the_end(core: StoreCore, number: int) -> None:
    """As an engine that stores one block after the other, while the daemon replaces memory beside it."""
    states, (reservation,) = reserve(core, number)
    for slab in core.space.slabs_to_replace():
        core.space.add_slab(slab)
    if states == [ReserveState.FULL]:
        _, (reservation,) = reserve(core, number)
    commit(core, reservation)


def test_what_one_tenant_stores_is_a_cold_miss_for_another() -> None:
    """faults.md, identity: "Cross-tenant probe must look like a cold miss"."""
    core = two_tenants()
    put(core, 1, 2, tenant=ACME)
    reserve(core, 3, parent=2, tenant=ACME)
    assert states_of(core, 1, 2, 3) == [BlockState.MISS] * 3
    assert reserve(core, 1, 3)[0] == [ReserveState.RESERVED] * 2
    assert core.namespace_stats()[0].block_count == 0
    with pytest.raises(NamespaceUnknownError):
        core.lookup(scoped(Tenant("another"), SMALL.id), hashes(1))


def test_a_slab_that_one_tenant_has_used_serves_another_only_with_new_memory() -> None:
    core = two_tenants()
    put(core, *range(16), tenant=ACME)
    assert core._evict(1 << 30) == 16
    assert [core.arena_owner(index) for index in range(4)] == [ACME] * 4
    assert reserve(core, 1)[0] == [ReserveState.FULL]
    (slab,) = core.space.slabs_to_replace()
    assert core.arena_owner(slab) is None, "it may be mapped while its memory changes"
    assert core.space.ready_bytes == 3 * SLAB_BYTES
    core.space.add_slab(slab)
    assert core.arena_owner(slab) == DEFAULT_TENANT
    assert reserve(core, 1)[0] == [ReserveState.RESERVED]
    core.check_invariants()


def test_a_tenant_gets_its_share_back_from_one_that_has_more() -> None:
    core = two_tenants()
    put(core, *range(16), tenant=ACME)
    for number in range(100, 116):
        put_in_the_end(core, number)
    assert states_of(core, *range(108, 116)) == [BlockState.HIT] * 8
    assert states_of(core, *range(16), tenant=ACME).count(BlockState.HIT) == 8
    core.check_invariants()


def test_a_tenant_within_its_share_loses_nothing_to_others() -> None:
    core = two_tenants()
    put(core, *range(8), tenant=ACME)
    for number in range(1000, 1100):
        put_in_the_end(core, number)
        core.evict_to_low_watermark()
    assert states_of(core, *range(8), tenant=ACME) == [BlockState.HIT] * 8
    assert states_of(core, 1099) == [BlockState.HIT]


def test_a_tenant_cannot_fill_the_table_of_namespaces_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_server.core.store.NAMESPACE_COUNT_MAX", 4)
    core = two_tenants()
    put(core, 1, tenant=ACME)
    for number in range(10):
        namespace = dataclasses.replace(SMALL, model=f"model {number}")
        core.open_namespace(namespace, payload_bytes=namespace.block_layout.payload_bytes)
    assert states_of(core, 1, tenant=ACME) == [BlockState.HIT]
    assert len(core.namespace_stats()) == 2
    assert len(core.namespace_stats(ACME)) == 1


def test_without_tenants_the_whole_arena_is_everybodys() -> None:
    core = make_core()
    put(core, 1)
    assert {core.arena_owner(index) for index in range(4)} == {DEFAULT_TENANT}
