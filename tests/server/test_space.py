"""Slabs and slots against an obvious model: a dict of byte ranges."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.errors import CapacityError
from kvstore_server.core.space import Place, SlabId, SlabSpace
from kvstore_server.core.tenants import DEFAULT_TENANT, ScopedId, Tenant

PAGE = 4096
SLAB_BYTES = 8 * PAGE
SLAB_COUNT = 5
NAMESPACES = {
    ScopedId(b"1" * 32): 100,  # one page: 8 slots a slab
    ScopedId(b"2" * 32): PAGE + 1,  # two pages: 4
    ScopedId(b"3" * 32): 3 * PAGE,  # three pages, but two slots share out the slab: four pages each
    ScopedId(b"8" * 32): SLAB_BYTES,  # one
}
SLOT_BYTES = dict(zip(NAMESPACES, (PAGE, 2 * PAGE, 4 * PAGE, 8 * PAGE), strict=True))
namespace_ids = st.sampled_from(list(NAMESPACES))


class SlabSpaceMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.space = SlabSpace(slab_count=SLAB_COUNT, slab_bytes=SLAB_BYTES)
        self.waiting = [SlabId(slab) for slab in range(SLAB_COUNT)]
        self.refs: dict[Place, int] = {}
        self.owner: dict[Place, ScopedId] = {}
        for namespace_id, block_bytes in NAMESPACES.items():
            assert self.space.open(namespace_id, block_bytes=block_bytes) == SLOT_BYTES[namespace_id]

    def used_slabs(self) -> dict[SlabId, ScopedId]:
        return {SlabId(place // SLAB_BYTES): namespace_id for place, namespace_id in self.owner.items()}

    def has_room(self, namespace_id: ScopedId) -> bool:
        slabs = self.used_slabs()
        if len(slabs) < SLAB_COUNT - len(self.waiting):
            return True
        capacity = sum(SLAB_BYTES // SLOT_BYTES[namespace_id] for owner in slabs.values() if owner == namespace_id)
        return list(self.owner.values()).count(namespace_id) < capacity

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def put_a_slab_into_service(self, data: st.DataObject) -> None:
        slab = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(slab)
        self.space.add_slab(slab)

    @rule(namespace_id=namespace_ids)
    def allocate(self, namespace_id: ScopedId) -> None:
        expected = self.has_room(namespace_id)
        place = self.space.allocate(namespace_id)
        assert (place is not None) == expected
        if place is None:
            return
        assert SlabId(place // SLAB_BYTES) not in self.waiting, "a place in a slab that is not in service"
        slot_bytes = SLOT_BYTES[namespace_id]
        for other, owner in self.owner.items():
            assert place + slot_bytes <= other or other + SLOT_BYTES[owner] <= place, "places overlap"
        assert place % PAGE == 0
        assert place // SLAB_BYTES == (place + slot_bytes - 1) // SLAB_BYTES, "a place crosses slabs"
        self.refs[place] = 1
        self.owner[place] = namespace_id

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(self.refs)))
        self.space.retain([place])
        self.refs[place] += 1

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(self.refs)))
        self.refs[place] -= 1
        assert self.space.release(place) == (self.refs[place] == 0)
        if not self.refs[place]:
            del self.refs[place], self.owner[place]

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.space.check_invariants()
        assert self.space.used_bytes == sum(SLOT_BYTES[owner] for owner in self.owner.values())
        assert self.space.used_bytes <= self.space.ready_bytes <= self.space.capacity_bytes
        assert self.space.ready_bytes == (SLAB_COUNT - len(self.waiting)) * SLAB_BYTES
        for place, refs in self.refs.items():
            assert self.space.ref_count(place) == refs
        for slab in self.used_slabs():
            taken = [place for place in sorted(self.owner) if place // SLAB_BYTES == slab]
            assert sorted(self.space.taken_places(slab)) == taken

    def teardown(self) -> None:
        for place, refs in self.refs.items():
            for _ in range(refs):
                self.space.release(place)
        self.space.check_invariants()
        assert self.space.used_bytes == 0


SlabSpaceMachine.TestCase.settings = settings(max_examples=50, deadline=None)
TestSlabSpace = SlabSpaceMachine.TestCase


def test_a_block_larger_than_a_slab_is_refused_and_told_what_to_change() -> None:
    space = SlabSpace(slab_count=1, slab_bytes=SLAB_BYTES)
    with pytest.raises(CapacityError, match=r"32769 bytes.*slab of 32768.*memory\.slab_size"):
        space.open(ScopedId(b"1" * 32), block_bytes=SLAB_BYTES + 1)


def test_a_slab_added_twice_is_a_bug() -> None:
    space = SlabSpace(slab_count=1, slab_bytes=SLAB_BYTES)
    space.add_slab(SlabId(0))
    with pytest.raises(AssertionError, match="added twice"):
        space.add_slab(SlabId(0))


def test_an_emptied_slab_serves_another_slot_size() -> None:
    space = SlabSpace(slab_count=1, slab_bytes=SLAB_BYTES)
    space.add_slab(SlabId(0))
    small, *_, large = NAMESPACES
    for namespace_id in (small, large):
        space.open(namespace_id, block_bytes=NAMESPACES[namespace_id])
    place = space.allocate(small)
    assert place is not None
    assert space.allocate(large) is None
    space.release(place)
    assert space.allocate(large) == 0


def served(*slabs: int) -> SlabSpace:
    space = SlabSpace(slab_count=SLAB_COUNT, slab_bytes=SLAB_BYTES)
    for slab in slabs:
        space.add_slab(SlabId(slab))
    for namespace_id, block_bytes in NAMESPACES.items():
        space.open(namespace_id, block_bytes=block_bytes)
    return space


def test_restored_places_are_taken_and_all_others_are_still_given_out() -> None:
    space = served(0, 1)
    small, large, *_ = NAMESPACES
    places = [Place(slot * PAGE) for slot in (5, 1, 2)]
    assert space.restore(small, places) == [True] * 3
    space.check_invariants()
    assert space.used_bytes == 3 * PAGE
    assert [space.ref_count(place) for place in places] == [1] * 3
    assert [space.allocate(small) for _ in range(5)] == [slot * PAGE for slot in (0, 3, 4, 6, 7)]
    assert space.allocate(large) == SLAB_BYTES
    for slot in range(8):
        assert space.release(Place(slot * PAGE))
    assert space.allocate(ScopedId(b"8" * 32)) == 0, "the emptied slab serves everybody"
    space.check_invariants()


def test_a_slab_that_is_restored_full_gives_nothing_out() -> None:
    space = served(0)
    assert all(space.restore(ScopedId(b"2" * 32), [Place(slot * 2 * PAGE) for slot in range(4)]))
    assert space.allocate(ScopedId(b"2" * 32)) is None
    space.check_invariants()


def test_places_that_cannot_be_are_not_restored() -> None:
    space = served(0, 2)
    _, pairs, shared, _ = NAMESPACES
    assert space.restore(pairs, [Place(0), Place(0), Place(PAGE), Place(2 * PAGE)]) == [True, False, False, True]
    assert space.restore(shared, [Place(4 * PAGE)]) == [False], "the slab is another namespace's"
    assert space.restore(pairs, [Place(4 * PAGE)]) == [False], "the slab serves already"
    out_of_service = [Place(SLAB_BYTES), Place(-2 * PAGE), Place(SLAB_COUNT * SLAB_BYTES)]
    assert space.restore(pairs, out_of_service) == [False] * 3
    assert space.used_bytes == 4 * PAGE
    space.check_invariants()
    assert space.allocate(shared) == 2 * SLAB_BYTES


def test_a_place_behind_the_last_whole_slot_of_a_slab_is_not_restored() -> None:
    space = SlabSpace(slab_count=1, slab_bytes=7 * PAGE)
    space.add_slab(SlabId(0))
    assert space.open(ScopedId(b"2" * 32), block_bytes=2 * PAGE) == 2 * PAGE
    assert space.restore(ScopedId(b"2" * 32), [Place(6 * PAGE)]) == [False]
    space.check_invariants()


ACME = Tenant("acme")
ACMES = ScopedId(b"acme" + b"1" * 32)


def two_tenants() -> SlabSpace:
    """Two slabs of eight places, one namespace for each tenant, whose ids differ in the tenant alone."""
    space = SlabSpace(slab_count=2, slab_bytes=SLAB_BYTES, tenant_count=2)
    for slab in range(2):
        space.add_slab(SlabId(slab))
    for namespace_id in (ScopedId(b"1" * 32), ACMES):
        space.open(namespace_id, block_bytes=100)
    return space


def test_an_emptied_slab_serves_its_tenant_again_and_no_other() -> None:
    space = two_tenants()
    places = [space.allocate(ACMES) for _ in range(16)]
    assert space.is_above_share(ACME)
    for place in places:
        assert place is not None
        space.release(place)
    assert space.allocate(ScopedId(b"1" * 32)) is None
    assert space.allocate(ACMES) is not None
    space.check_invariants()


def test_a_slab_is_out_of_service_while_its_memory_is_replaced_and_then_its_new_tenants() -> None:
    space = two_tenants()
    place = space.allocate(ACMES)
    other = space.allocate(ScopedId(b"1" * 32))
    assert place is not None
    assert other is not None
    space.release(place)
    assert space.claim_foreign_slab(DEFAULT_TENANT)
    assert not space.claim_foreign_slab(DEFAULT_TENANT), "one at a time"
    (slab,) = space.slabs_to_replace()
    assert slab == space.slab_of(place)
    assert (space.tenant_of_slab(slab), space.ready_bytes) == (None, SLAB_BYTES)
    assert space.allocate(ACMES) is None
    space.check_invariants()
    space.add_slab(slab)
    assert (space.tenant_of_slab(slab), space.ready_bytes) == (DEFAULT_TENANT, 2 * SLAB_BYTES)
    assert space.is_above_share(DEFAULT_TENANT)
    assert space.allocate(ACMES) is None
    space.check_invariants()


def test_a_slab_that_is_in_use_is_never_claimed() -> None:
    space = two_tenants()
    for _ in range(9):
        space.allocate(ACMES)
    assert not space.claim_foreign_slab(DEFAULT_TENANT)
    assert space.slabs_to_replace() == []


def test_every_slot_has_room_for_its_header_and_is_aligned_to_pages() -> None:
    space = SlabSpace(slab_count=1, slab_bytes=64 << 20)
    assert space.open(ScopedId(b"1" * 32), block_bytes=192 + (2 << 20)) % PAGE == 0


def test_a_restored_slab_is_its_tenants() -> None:
    space = two_tenants()
    assert space.restore(ACMES, [Place(0)]) == [True]
    assert space.tenant_of_slab(SlabId(0)) == ACME
    assert not space.is_below_share(ACME)
    assert space.allocate(ScopedId(b"1" * 32)) == SLAB_BYTES
    space.check_invariants()


def test_missing_slabs_are_those_that_no_free_slot_and_no_free_slab_of_ones_own_makes_up_for() -> None:
    alice, bob = ScopedId(b"alice" + bytes(32)), ScopedId(b"bob" + bytes(32))
    space = SlabSpace(slab_count=8, slab_bytes=4 * 4096, tenant_count=2)
    for slab in range(3):
        space.add_slab(SlabId(slab))
    for namespace_id in (alice, bob):
        space.open(namespace_id, block_bytes=4096)
    assert space.missing_slab_count({alice: 12}) == 0
    assert space.missing_slab_count({alice: 13}) == 1
    assert space.missing_slab_count({alice: 8, bob: 5}) == 1
    place = space.allocate(alice)
    assert place is not None
    assert space.missing_slab_count({alice: 11}) == 0, "three slots of its own slab, and two slabs"
    space.release(place)
    assert space.missing_slab_count({bob: 9}) == 1, "a slab that was alice's is for bob only once it is replaced"
