"""Blocks that go down to a lower tier and come back up: what memory keeps, lets go and drops, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kvstore.eviction import Request, Use, Watermarks
from kvstore.messages import BlockState, CommitState, OwnerId, ReservationId, ReserveState, TransferPath
from kvstore.namespace import Namespace
from kvstore.slab import SlotState
from kvstore_server.core.space import Place, SlabId, SlabSpace
from kvstore_server.core.store import PROMOTER, BlockKey, Departure, Reservation, StoreCore
from kvstore_server.core.tenants import DEFAULT_TENANT, scoped
from tests.server.builders import (
    ALICE,
    MIDDLE,
    SMALL,
    FakeHeaders,
    block_hash,
    commit,
    hashes,
    put,
    reserve,
    states_of,
)
from tests.server.test_store_core import (
    ACME,
    NUMBERS,
    SIZE_BYTES,
    SLAB_BYTES,
    Key,
    Space,
    StoreCoreMachine,
    any_space,
    chains,
)

SLOT_BYTES = 4096


def number_of(key: BlockKey) -> int:
    return int.from_bytes(key.block_hash, "big")


def small(number: int) -> BlockKey:
    return BlockKey(scoped(DEFAULT_TENANT, SMALL.id), block_hash(number))


class FakeLower:
    """Wants everything but `unwanted`, and has what it was given."""

    def __init__(self) -> None:
        self.kept: set[BlockKey] = set()
        self.unwanted: set[BlockKey] = set()
        self.wants_nothing = False
        self.asked: list[tuple[int, int, float]] = []
        self.requests: list[Request] = []
        self.touched: list[tuple[Request, list[int]]] = []
        self.described: list[tuple[Request, list[int]]] = []
        self.expired_s: list[float] = []

    def find(self, key: BlockKey) -> object | None:
        return key if key in self.kept else None

    def begin_use(self, request: Request, *, now_s: float, chain_blocks: int, matched_blocks: int) -> Use:
        self.requests.append(request)
        return Use(0, request, now_s=now_s, chain_blocks=chain_blocks, matched_blocks=matched_blocks, maker=self)

    def touch(self, keys: Sequence[BlockKey], *, use: Use) -> None:
        assert use.maker is self
        self.touched.append((use.request, [number_of(key) for key in keys]))

    def describe(self, keys: Sequence[BlockKey], request: Request, *, now_s: float) -> None:
        self.described.append((request, [number_of(key) for key in keys]))

    def retell(self, use: Use, request: Request) -> Use:
        assert use.maker is self
        return Use(use.number, request, now_s=use.now_s, chain_blocks=1, matched_blocks=0, maker=self)

    def expire(self, *, now_s: float) -> None:
        self.expired_s.append(now_s)

    def last_use(self, key: BlockKey) -> Use | None:
        return None

    def wants(self, key: BlockKey, *, use_count: int, use: Use | None, now_s: float) -> bool:
        assert use is not None
        assert use.maker is self, "a use of memory's"
        assert key not in self.kept, f"{key} is asked about though it is found"
        self.asked.append((number_of(key), use_count, now_s))
        return not self.wants_nothing and key not in self.unwanted

    def would_lose(self, key: BlockKey) -> bool:
        return not self.wants_nothing and key not in self.kept and key not in self.unwanted


# --- against the model


class DeparturesMachine(StoreCoreMachine):
    """The store's own machine, with a tier below it that changes its mind, writes, fails and gives back."""

    def __init__(self) -> None:
        self.lower = FakeLower()
        super().__init__(self.lower)
        self.taken: list[Departure] = []
        self.copying: dict[Place, Key] = {}
        self.lost_count = 0

    def key_of(self, key: BlockKey) -> Key:
        (space,) = [space for space in self.spaces if space.id == key.namespace_id]
        return space, number_of(key)

    def block_key(self, key: Key) -> BlockKey:
        return BlockKey(key[0].id, block_hash(key[1]))

    def begun(self) -> list[Departure]:
        """Departures that the model does not know yet, which it does from now on."""
        begun = [departure for place, departure in self.core._departing.items() if place not in self.departing]
        wanted = {self.key_of(departure.key) for departure in begun if self.lower.would_lose(departure.key)}
        heads = set[Key]().union(*map(self.heads_of, wanted))
        for departure in begun:
            key = self.key_of(departure.key)
            assert departure.block.place == self.place_of(key)
            assert departure.parent_hash in (None, *(block_hash(number) for number in range(key[1])))
            assert key in wanted | heads, f"{key[1]} departs for nothing"
            self.departing[departure.block.place] = key
        for departure in begun:
            self.check_head_goes_first(self.departing[departure.block.place])
        return begun

    def copied(self) -> list[Departure]:
        """As `begun`, of those that stay."""
        copied = [departure for place, departure in self.core._copying.items() if place not in self.copying]
        for departure in copied:
            key = self.key_of(departure.key)
            assert departure.block.place == self.place_of(key)
            assert departure.key not in self.lower.kept, f"{key[1]} is copied for nothing"
            assert departure.block.place not in self.departing
            self.copying[departure.block.place] = key
        return copied

    def heads_of(self, key: Key) -> set[Key]:
        """Its stored ancestors, up to the first that is below or on its way there."""
        parents = {key: parent for key, (_, parent) in self.stored.items()}
        parents |= {key: hold.parent for key, hold in self.pending().items()}
        demoting = self.departing.keys() | self.copying.keys()
        found = set[Key]()
        parent = parents[key]
        while parent is not None and parent in parents and self.block_key(parent) not in self.lower.kept:
            if parent in self.stored:
                if self.place_of(parent) in demoting:
                    break
                found.add(parent)
            parent = parents[parent]
        return found

    def check_head_goes_first(self, key: Key) -> None:
        """Of its ancestors, up to the first that is below or on its way there, none is left out."""
        parents = {key: parent for key, (_, parent) in self.stored.items()}
        parents |= {key: hold.parent for key, hold in self.pending().items()}
        parent = parents[key]
        while parent is not None and parent in parents and self.block_key(parent) not in self.lower.kept:
            if parent in self.stored:
                place = self.place_of(parent)
                assert place in self.core._departing or place in self.core._copying, (
                    f"{key[1]} leaves before {parent[1]}"
                )
                return
            parent = parents[parent]

    def check_lower_tier(self, gone: list[Key], *, is_waited_for: bool) -> None:
        lost_count = sum(self.lower.would_lose(self.block_key(key)) for key in gone)
        assert is_waited_for or not lost_count, "blocks were lost for the sake of nobody"
        self.lost_count += lost_count
        begun, copied = self.begun(), self.copied()
        # Between tenants a whole slab goes at once, whatever is in it.
        is_shared = self.core.space.tenant_count > 1
        assert is_shared or not (is_waited_for and (begun or copied) and lost_count), (
            "blocks were lost, and others departed, at once"
        )
        self.held.update(departure.block.place for departure in copied)
        for departure in begun:
            place = departure.block.place
            assert self.held[place] == 1, f"{departure.key} departs while held {self.held[place] - 1} times"
            self.held[place] += 1
        is_alone = len(self.departing) + len(self.copying) == 1  # one may always go down, however large it is
        is_within = self.core.demoting_bytes <= self.departing_bytes_max
        assert is_within or is_alone or not (begun or copied)

    def drop_stored(self, key: Key) -> None:
        place = self.place_of(key)
        super().drop_stored(key)
        for demoting in (self.departing, self.copying):
            if place in demoting and all(departure.block.place != place for departure in self.taken):
                del demoting[place]  # nobody copies from it yet, and nobody will
                self.release(place)

    # --- what the lower tier does

    @rule(space=any_space, number=st.sampled_from(NUMBERS), is_wanted=st.booleans())
    def want(self, space: Space, number: int, is_wanted: bool) -> None:
        (self.lower.unwanted.discard if is_wanted else self.lower.unwanted.add)(self.block_key((space, number)))

    @rule(space=any_space, number=st.sampled_from(NUMBERS))
    def lose(self, space: Space, number: int) -> None:
        self.lower.kept.discard(self.block_key((space, number)))

    @rule()
    def take_departures(self) -> None:
        departures = self.core.take_departures()
        places = {departure.block.place for departure in departures}
        assert len(places) == len(departures)
        demoting = self.departing.keys() | self.copying.keys()
        assert places == demoting - {departure.block.place for departure in self.taken}
        for index, departure in enumerate(departures):
            later = {later.key for later in departures[index:]}
            assert departure.parent_hash is None or BlockKey(departure.key[0], departure.parent_hash) not in later
        self.taken += departures

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), is_written=st.booleans())
    def end_departure(self, data: st.DataObject, is_written: bool) -> None:
        departure = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        if is_written:
            self.lower.kept.add(departure.key)
        place = departure.block.place
        stays = place in self.copying
        key = self.copying.pop(place) if stays else self.departing.pop(place)
        is_stored = key in self.stored and self.place_of(key) == place
        evicted_count = self.core.counters.evicted_count
        assert self.core.end_departure(departure) == is_stored
        self.release(place)
        if is_stored and not stays:
            evicted_count += 1
            self.drop_stored(key)
        assert self.core.counters.evicted_count == evicted_count
        self.evicting(self.core.evict_to_low_watermark)

    @rule()
    def depart_all(self) -> None:
        demoting = self.departing.keys() | self.copying.keys()
        staying = {key for key in self.stored if self.place_of(key) not in demoting}
        undemoted = {key for key in staying if self.lower.would_lose(self.block_key(key))}
        for key in list(undemoted):
            undemoted |= self.heads_of(key) & staying
        assert self.core.depart_all(now_s=self.now_s) == len(undemoted)
        begun = self.begun()
        assert {self.key_of(departure.key) for departure in begun} == undemoted
        self.held.update(departure.block.place for departure in begun)

    @rule(data=st.data(), space=any_space, chain=chains)
    def begin_promotion(self, data: st.DataObject, space: Space, chain: list[int]) -> None:
        parents = [data.draw(st.none() | st.integers(0, number - 1)) if number else None for number in chain]
        pending = self.pending()
        stored = set(self.stored)
        reservations = self.evicting(
            lambda: self.core.begin_promotion(
                space.id,
                hashes(*chain),
                parent_hashes=[None if parent is None else block_hash(parent) for parent in parents],
                now_s=self.now_s,
                may_lose=True,
            ),
            tenant=space.tenant,
        )
        is_cut = False
        for number, parent, reservation in zip(chain, parents, reservations, strict=True):
            key = (space, number)
            parent_key = None if parent is None else (space, parent)
            if reservation is not None:
                assert not is_cut, f"{number} was admitted behind one that was not"
                assert key not in pending
                assert key not in self.stored
                self.admit_promotion(key, parent_key, reservation)
            elif key not in stored and key not in pending and not is_cut:
                is_cut = True
                self.check_is_full(space, child_of=parent_key)

    def admit_promotion(self, key: Key, parent: Key | None, reservation: Reservation) -> None:
        self.admit(key, parent, reservation, 0.0)
        hold = self.reservations.pop(reservation.id)
        self.promoting.append((hold, reservation))

    @precondition(lambda self: self.promoting)
    @rule(data=st.data(), has_come=st.booleans())
    def end_promotion(self, data: st.DataObject, has_come: bool) -> None:
        hold, reservation = self.promoting.pop(data.draw(st.integers(0, len(self.promoting) - 1)))
        self.core.end_promotion([(reservation, SIZE_BYTES if has_come else None)])
        if not has_come:
            self.give_up(hold)
            return
        self.stored[hold.key] = (hold.place, hold.parent)
        assert self.headers.slots[hold.place][1] is SlotState.VERIFIED
        self.evicting(self.core.evict_to_low_watermark)

    @rule()
    def whoever_knows_the_owner_of_promotions_can_do_nothing(self) -> None:
        self.core.expire(now_s=-1.0)
        assert self.core.end_owner(PROMOTER) == 0
        assert not self.core.abort(ReservationId(0), owner_id=PROMOTER)
        assert self.core.begin_commit(ReservationId(0), owner_id=PROMOTER) is None

    # --- what always holds

    @invariant()
    def figures_of_departures_agree_with_the_model(self) -> None:
        slot_bytes = self.core.space.slot_bytes
        assert self.core.departing_bytes == sum(slot_bytes(key[0].id) for key in self.departing.values())
        assert self.core.copying_bytes == sum(slot_bytes(key[0].id) for key in self.copying.values())
        assert self.core.counters.dropped_undemoted_count == self.lost_count

    def teardown(self) -> None:
        self.core.end_promotion([(reservation, None) for _, reservation in self.promoting])
        for departure in [*self.taken, *self.core.take_departures()]:
            self.core.end_departure(departure)
        assert self.core.demoting_bytes == 0
        super().teardown()


DeparturesMachine.TestCase.settings = settings(max_examples=40, deadline=None, phases=[Phase.generate])
TestDepartures = DeparturesMachine.TestCase


class DeparturesByS3FifoMachine(DeparturesMachine):
    policy = "s3fifo"


class DeparturesByWindowLfuMachine(DeparturesMachine):
    policy = "window-lfu"


for machine in (DeparturesByS3FifoMachine, DeparturesByWindowLfuMachine):
    machine.TestCase.settings = settings(max_examples=15, deadline=None, phases=[Phase.generate])
TestDeparturesByS3Fifo = DeparturesByS3FifoMachine.TestCase
TestDeparturesByWindowLfu = DeparturesByWindowLfuMachine.TestCase


class DeparturesOfTenantsMachine(DeparturesMachine):
    slab_count = 4
    spaces = (Space(DEFAULT_TENANT, SMALL), Space(ACME, SMALL), Space(ACME, MIDDLE))

    def __init__(self) -> None:
        super().__init__()
        while self.waiting_slabs:
            self.core.space.add_slab(SlabId(self.waiting_slabs.pop()))


DeparturesOfTenantsMachine.TestCase.settings = settings(max_examples=20, deadline=None)
TestDeparturesOfTenants = DeparturesOfTenantsMachine.TestCase


# --- going down


def make(
    *,
    slab_count: int = 4,
    high: float = 1.0,
    low: float = 1.0,
    departing_count_max: int = 100,
    namespaces: tuple[Namespace, ...] = (SMALL,),
) -> tuple[StoreCore, FakeLower]:
    """A core of 4 small slots a slab, over a lower tier that wants everything and has nothing."""
    lower = FakeLower()
    core = StoreCore(
        space=SlabSpace(slab_count=slab_count, slab_bytes=SLAB_BYTES),
        watermarks=Watermarks(high=high, low=low),
        headers=FakeHeaders(),
        lower=lower,
        departing_bytes_max=departing_count_max * SLOT_BYTES,
    )
    for slab in range(slab_count):
        core.space.add_slab(SlabId(slab))
    for namespace in namespaces:
        core.open_namespace(namespace, payload_bytes=namespace.block_layout.payload_bytes)
    return core, lower


def departing(core: StoreCore) -> list[int]:
    return [number_of(departure.key) for departure in core._departing.values()]


def demoted(core: StoreCore, lower: FakeLower) -> list[int]:
    """Writes all that departs; returns it in the order in which it was handed out."""
    departures = core.take_departures()
    for departure in departures:
        lower.kept.add(departure.key)
        core.end_departure(departure)
    return [number_of(departure.key) for departure in departures]


def one_departing(core: StoreCore) -> Departure:
    """Of a chain 1, 2 its tail, which was handed out; its head was copied."""
    put(core, 1, 2)
    watermarks, share = core._watermarks, 1.5 * SLOT_BYTES / core.space.ready_bytes
    core._watermarks = Watermarks(high=share, low=share)
    assert core.evict_to_low_watermark() == 1
    core._watermarks = watermarks
    head, tail = core.take_departures()
    assert (number_of(head.key), number_of(tail.key)) == (1, 2)
    core.end_departure(head)
    return tail


def test_what_the_lower_tier_wants_departs_and_is_readable_until_it_has_left() -> None:
    core, _ = make(high=0.75, low=0.5)  # of 16 slots: 12 and 8
    for number in range(13):
        put(core, number)
    assert departing(core) == [0, 1, 2, 3, 4]
    assert states_of(core, *range(13)) == [BlockState.HIT] * 13
    assert (core.block_count, core.counters.evicted_count, core.counters.departed_count) == (13, 0, 0)
    for departure in core.take_departures():
        assert core.end_departure(departure)
    assert states_of(core, 0, 4, 5) == [BlockState.MISS, BlockState.MISS, BlockState.HIT]
    assert (core.block_count, core.counters.evicted_count, core.counters.departed_count) == (8, 5, 5)
    assert core.counters.dropped_undemoted_count == 0
    core.check_invariants()


def test_what_is_below_already_and_what_is_not_wanted_there_is_dropped_at_once() -> None:
    core, lower = make(high=0.75, low=0.5)
    lower.kept.add(small(0))
    lower.unwanted.add(small(1))
    for number in range(13):
        put(core, number)
    assert states_of(core, 0, 1, 2) == [BlockState.MISS, BlockState.MISS, BlockState.HIT]
    assert departing(core) == [2, 3, 4]
    assert (core.counters.evicted_count, core.counters.dropped_undemoted_count) == (2, 0)


def test_blocks_that_depart_are_not_counted_as_excess_again() -> None:
    core, _ = make(high=0.75, low=0.5)
    for number in range(13):
        put(core, number)
    assert [core.evict_to_low_watermark() for _ in range(3)] == [0, 0, 0]
    assert len(departing(core)) == 5
    assert core.departing_bytes == 5 * SLOT_BYTES


def test_no_more_departs_at_once_than_there_is_room_for_and_the_rest_stays() -> None:
    core, lower = make(high=0.75, low=0.5, departing_count_max=2)
    for number in range(13):
        put(core, number)
    assert departing(core) == [0, 1]
    assert core.evict_to_low_watermark() == 0
    assert (core.block_count, core.counters.evicted_count) == (13, 0)
    assert demoted(core, lower) == [1, 0]
    assert core.evict_to_low_watermark() == 2
    assert departing(core) == [2, 3]
    core.check_invariants()


def test_blocks_that_are_below_already_leave_even_if_nothing_more_can_depart() -> None:
    core, lower = make(high=0.75, low=0.5, departing_count_max=1)
    lower.kept.update(map(small, (1, 2)))
    for number in range(13):
        put(core, number)
    assert departing(core) == [0]
    assert states_of(core, 0, 1, 2, 3) == [BlockState.HIT, BlockState.MISS, BlockState.MISS, BlockState.HIT]


def test_a_tail_that_leaves_goes_down_after_copies_of_its_ancestors_which_then_leave_for_nothing() -> None:
    core, lower = make(high=0.75, low=0.5)  # of 16 slots: 12 and 8
    put(core, *range(13))
    assert departing(core) == [12, 11, 10, 9, 8]
    assert core.copying_bytes == 8 * SLOT_BYTES
    assert core.evict_to_low_watermark() == 0
    assert demoted(core, lower) == list(range(13)), "head first"
    assert states_of(core, *range(13)) == [BlockState.HIT] * 8 + [BlockState.MISS] * 5
    assert (core.demoting_bytes, core.counters.departed_count, core.counters.evicted_count) == (0, 5, 5)
    core._watermarks = Watermarks(high=0.1, low=0.1)
    core.evict_to_low_watermark()
    assert (core.block_count, core.take_departures()) == (1, [])
    assert core.counters.dropped_undemoted_count == 0
    core.check_invariants()


def test_ancestors_of_several_tails_are_copied_once_and_stay_while_one_of_these_does() -> None:
    core, lower = make(high=0.75, low=0.5)
    put(core, 0, 1)
    for tail in range(2, 13):
        put(core, tail, parent=1)
    assert demoted(core, lower) == [0, 1, 6, 5, 4, 3, 2]
    assert states_of(core, 0, 1, 2, 7) == [BlockState.HIT, BlockState.HIT, BlockState.MISS, BlockState.HIT]
    put(core, *range(20, 26))
    assert not {0, 1} & set(demoted(core, lower)), "nothing is written twice"


def test_as_long_as_its_ancestors_are_not_all_on_their_way_a_block_does_not_leave() -> None:
    core, lower = make(high=0.75, low=0.5, departing_count_max=3)
    put(core, *range(13))
    written: list[int] = []
    for _ in range(4):
        assert (departing(core), core.copying_bytes) == ([], 3 * SLOT_BYTES)
        written += demoted(core, lower)
        core.evict_to_low_watermark()
    assert written == list(range(12))
    assert departing(core) == [12]
    assert core.block_count == 9, "of the others each was below already"


def test_a_damaged_block_that_was_to_be_copied_is_not_handed_out() -> None:
    core, _ = make(high=0.75, low=0.5)
    put(core, *range(13))
    core.quarantine(SMALL.id, block_hash(0), core.stored(SMALL.id)[block_hash(0)])
    core.check_invariants()
    first, second, *others = core.take_departures()
    assert (number_of(first.key), number_of(second.key)) == (1, 2)
    core.quarantine(SMALL.id, block_hash(1), first.block)
    core.check_invariants()
    assert [core.end_departure(one) for one in (first, second, *others)] == [False] + [True] * 11
    assert core.space.used_bytes == 6 * SLOT_BYTES
    core.check_invariants()


def test_a_chain_that_is_longer_than_memory_is_stored_whole_each_block_once() -> None:
    core, lower = make(slab_count=1)  # of 4 slots
    written: list[int] = []
    number = 0
    for _ in range(40):
        states, reservations = reserve(core, number, number + 1, parent=number - 1 if number else None)
        assert ReserveState.FULL not in states, "there will be room later"
        for reservation in filter(None, reservations):
            commit(core, reservation)
        number += 2 - reservations.count(None)
        core.check_invariants()
        written += demoted(core, lower)
        if number >= 12:
            break
    assert written == list(range(len(written))), "each once, head first"
    in_memory = [state == BlockState.HIT for state in states_of(core, *range(12))]
    assert number >= 12
    assert all(there or one < len(written) for one, there in enumerate(in_memory))
    assert core.counters.dropped_undemoted_count == 0


def test_a_chain_that_is_longer_than_memory_is_promoted_behind_its_own_head() -> None:
    core, lower = make(slab_count=1)
    lower.kept.update(map(small, range(12)))
    for first in range(0, 12, 2):
        reservations = promote(core, first, first + 1, parent=first - 1 if first else None)
        assert None not in reservations
        core.end_promotion([(one, 1152) for one in reservations if one])
    assert states_of(core, 10, 11) == [BlockState.HIT] * 2
    assert core.counters.dropped_undemoted_count == 0


def test_the_head_of_a_chain_that_fills_memory_stays_where_the_lower_tier_does_not_want_it() -> None:
    core, lower = make(slab_count=1)
    put(core, *range(4))
    lower.wants_nothing = True
    assert reserve(core, 4, parent=3)[0] == [ReserveState.FULL]
    assert states_of(core, *range(4)) == [BlockState.HIT] * 4


def test_departures_are_handed_out_once_and_parents_before_their_children() -> None:
    core, _ = make(high=0.75, low=0.25)
    put(core, 1, 2, 3)
    put(core, *range(11, 21))
    assert len(departing(core)) == 9
    departures = core.take_departures()
    numbers = [number_of(departure.key) for departure in departures]
    assert [number for number in numbers if number < 10] == [1, 2, 3]
    assert [number for number in numbers if number > 10] == list(range(11, 21)), "with their ancestors"
    parents = {number_of(departure.key): departure.parent_hash for departure in departures}
    assert (parents[1], parents[2], parents[3]) == (None, block_hash(1), block_hash(2))
    assert core.take_departures() == []


def test_a_child_that_begins_to_depart_after_its_parent_is_handed_out_after_it() -> None:
    core, _ = make()
    put(core, 1)
    assert core.depart_all(now_s=0.0) == 1
    put(core, 2, parent=1)
    assert core.depart_all(now_s=0.0) == 1
    assert [number_of(departure.key) for departure in core.take_departures()] == [1, 2]


def test_blocks_that_claim_each_other_as_parents_are_all_handed_out() -> None:
    core, _ = make()
    put(core, 1, parent=2)
    core.depart_all(now_s=0.0)
    put(core, 2, parent=1)
    core.depart_all(now_s=0.0)
    assert sorted(number_of(departure.key) for departure in core.take_departures()) == [1, 2]


def test_a_block_that_departs_is_leased_and_read_and_its_readers_keep_its_slot() -> None:
    core, _ = make(slab_count=1)
    departure = one_departing(core)
    lease = core.lease(SMALL.id, hashes(1, 2), owner_id=ALICE, now_s=0.0, duration_s=9.0)
    reading = core.begin_read(SMALL.id, block_hash(2))
    assert lease is not None
    assert reading == departure.block
    assert core.end_departure(departure)
    core.check_invariants()
    assert states_of(core, 1, 2) == [BlockState.HIT, BlockState.MISS]
    assert core.space.used_bytes == 2 * SLOT_BYTES
    core.end_read(reading, sent_bytes=0)
    assert core.space.used_bytes == 2 * SLOT_BYTES
    core.release_lease(lease, owner_id=ALICE)
    assert core.space.used_bytes == SLOT_BYTES
    core.check_invariants()


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda core: core.expire(now_s=9.0), id="time"),
        pytest.param(lambda core: core.end_owner(ALICE), id="end of its session"),
    ],
)
def test_a_lease_that_ends_while_its_block_departs_frees_nothing_that_is_being_copied(
    end: Callable[[StoreCore], object],
) -> None:
    core, _ = make(slab_count=1)
    departure = one_departing(core)
    core.lease(SMALL.id, hashes(2), owner_id=ALICE, now_s=0.0, duration_s=9.0)
    end(core)
    assert core.lease_count == 0
    assert core.space.ref_count(departure.block.place) == 2
    core.check_invariants()
    core.end_departure(departure)
    assert core.space.used_bytes == SLOT_BYTES


def test_storing_a_block_that_departs_is_not_needed() -> None:
    core, _ = make()
    one_departing(core)
    assert reserve(core, 1, 2, 3)[0] == [ReserveState.STORED, ReserveState.STORED, ReserveState.RESERVED]
    core.check_invariants()


def test_a_damaged_block_that_was_to_depart_is_not_handed_out() -> None:
    core, _ = make(slab_count=1)
    put(core, 1)
    core.depart_all(now_s=0.0)
    block = core.begin_read(SMALL.id, block_hash(1))
    assert block is not None
    core.quarantine(SMALL.id, block_hash(1), block)
    assert core.take_departures() == []
    assert core.departing_bytes == 0
    core.check_invariants()
    core.end_read(block, sent_bytes=0)
    assert core.space.used_bytes == 0


def test_a_block_found_damaged_while_it_is_copied_keeps_its_slot_and_whoever_copied_is_told() -> None:
    core, _ = make(slab_count=1)
    departure = one_departing(core)
    core.quarantine(SMALL.id, block_hash(2), departure.block)
    assert states_of(core, 1, 2) == [BlockState.HIT, BlockState.MISS]
    assert core.space.ref_count(departure.block.place) == 1
    put(core, 2, parent=1)
    assert core.end_departure(departure) is False
    assert states_of(core, 1, 2) == [BlockState.HIT, BlockState.HIT], "another block of that name was dropped"
    assert (core.counters.evicted_count, core.counters.corrupt_in_memory_count) == (0, 1)
    core.check_invariants()


def test_a_departure_that_ends_twice_is_a_bug() -> None:
    core, _ = make()
    departure = one_departing(core)
    core.end_departure(departure)
    with pytest.raises(AssertionError, match="does not depart"):
        core.end_departure(departure)


def test_a_namespace_is_not_forgotten_while_its_last_block_departs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_server.core.store.NAMESPACE_COUNT_MAX", 1)
    core, _ = make()
    put(core, 1)
    core.depart_all(now_s=0.0)
    (departure,) = core.take_departures()
    core.quarantine(SMALL.id, block_hash(1), departure.block)
    with pytest.raises(Exception, match="1 namespaces hold blocks"):
        core.open_namespace(MIDDLE, payload_bytes=MIDDLE.block_layout.payload_bytes)
    core.end_departure(departure)
    core.open_namespace(MIDDLE, payload_bytes=MIDDLE.block_layout.payload_bytes)


def test_at_the_end_everything_departs_that_only_memory_has_held_or_not() -> None:
    core, lower = make(slab_count=2, departing_count_max=1)
    put(core, 1, 2, 3)
    put(core, 11)
    put(core, 12)
    lower.kept.add(small(11))
    lower.unwanted.add(small(12))
    lease = core.lease(SMALL.id, hashes(1, 2, 3), owner_id=ALICE, now_s=0.0, duration_s=9.0)
    assert core.depart_all(now_s=5.0) == 3
    assert core.depart_all(now_s=5.0) == 0
    core.check_invariants()
    assert demoted(core, lower) == [1, 2, 3]
    assert states_of(core, 11, 12) == [BlockState.HIT, BlockState.HIT]
    assert core.space.used_bytes == 5 * SLOT_BYTES
    assert lease is not None
    core.release_lease(lease, owner_id=ALICE)
    assert core.space.used_bytes == 2 * SLOT_BYTES


def test_without_a_lower_tier_nothing_departs() -> None:
    core, _ = make(high=0.75, low=0.5)
    core.lower = None
    for number in range(13):
        put(core, number)
    assert (core.block_count, core.departing_bytes, core.take_departures()) == (8, 0, [])
    assert (core.counters.evicted_count, core.counters.dropped_undemoted_count) == (5, 0)
    assert core.depart_all(now_s=0.0) == 0


# --- when somebody waits for a slot


def test_who_waits_is_given_the_slot_of_a_block_that_is_below_already_though_it_is_not_the_coldest() -> None:
    core, lower = make(slab_count=1)
    for number in range(4):
        put(core, number)
    lower.kept.add(small(2))
    assert reserve(core, 9)[0] == [ReserveState.RESERVED]
    assert states_of(core, 0, 1, 2, 3) == [BlockState.HIT, BlockState.HIT, BlockState.MISS, BlockState.HIT]
    assert departing(core) == []
    assert core.counters.dropped_undemoted_count == 0


def test_who_waits_is_given_the_slot_of_a_block_that_nobody_wants_below() -> None:
    core, lower = make(slab_count=1)
    for number in range(4):
        put(core, number)
    lower.unwanted.add(small(3))
    assert reserve(core, 9)[0] == [ReserveState.RESERVED]
    assert states_of(core, 0, 3) == [BlockState.HIT, BlockState.MISS]
    assert (core.counters.evicted_count, core.counters.dropped_undemoted_count) == (1, 0)


def test_when_nothing_else_is_left_the_coldest_is_lost_and_counted() -> None:
    core, _ = make(slab_count=1)
    for number in range(4):
        put(core, number)
    assert promote(core, 9) != [None]
    assert states_of(core, 0, 1) == [BlockState.MISS, BlockState.HIT]
    assert departing(core) == []
    assert (core.counters.evicted_count, core.counters.dropped_undemoted_count) == (1, 1)


def test_while_room_is_on_its_way_a_put_is_refused_and_nothing_is_lost_for_it() -> None:
    """Heads of chains whose tails have departed already would be the first to go."""
    core, lower = make(slab_count=1, high=0.8, low=0.5, departing_count_max=1)
    put(core, *range(4))
    for copied in range(3):
        core.evict_to_low_watermark()
        assert (core.departing_bytes, core.copying_bytes) == (0, SLOT_BYTES)
        assert reserve(core, 8, 9)[0] == [ReserveState.OVERLOADED, ReserveState.ORPHAN]
        assert demoted(core, lower) == [copied]
    core.evict_to_low_watermark()
    assert departing(core) == [3]
    assert states_of(core, 0, 1, 2, 3) == [BlockState.HIT, BlockState.HIT, BlockState.MISS, BlockState.HIT]
    assert reserve(core, 8)[0] == [ReserveState.RESERVED]
    assert (core.counters.refused_overloaded_count, core.counters.dropped_undemoted_count) == (6, 0)


def test_a_block_that_is_wanted_now_is_promoted_at_the_cost_of_what_only_memory_has() -> None:
    core, _ = make(slab_count=1, high=0.8, low=0.5, departing_count_max=1)
    put(core, *range(4))
    core.evict_to_low_watermark()
    assert core.demoting_bytes
    assert promote(core, 9) != [None]
    assert core.counters.dropped_undemoted_count == 1


def test_a_tenant_within_its_share_makes_room_by_letting_its_own_blocks_depart() -> None:
    core, _ = make(slab_count=1)  # below every watermark until it is full
    put(core, *range(4))
    assert reserve(core, 9)[0] == [ReserveState.OVERLOADED]
    assert core.departing_bytes
    for departure in core.take_departures():
        core.end_departure(departure)
    assert reserve(core, 9)[0] == [ReserveState.RESERVED]
    assert core.counters.dropped_undemoted_count == 0


def test_who_waits_is_not_given_a_slot_that_is_being_copied_from() -> None:
    core, _ = make(slab_count=1)
    put(core, *range(4))
    core.depart_all(now_s=0.0)
    assert reserve(core, 9)[0] == [ReserveState.OVERLOADED]
    (first, *_) = core.take_departures()
    core.end_departure(first)
    assert reserve(core, 9)[0] == [ReserveState.RESERVED]


def test_another_namespace_takes_a_slab_that_is_below_already_before_one_that_is_not() -> None:
    core, lower = make(slab_count=2, namespaces=(SMALL, MIDDLE))
    for number in range(8):
        put(core, number)
    put_in = {number: core.stored(SMALL.id)[block_hash(number)].place // SLAB_BYTES for number in range(8)}
    first, second = ([number for number, slab in put_in.items() if slab == index] for index in range(2))
    lower.kept.update(map(small, [*first, *second]))
    put(core, 1, namespace=MIDDLE)
    assert core.counters.dropped_undemoted_count == 0
    lower.kept.clear()
    assert promote(core, 2, namespace=MIDDLE) != [None]
    assert core.counters.dropped_undemoted_count == 4
    assert core.block_count == 1
    core.check_invariants()


def test_a_slab_that_is_not_below_is_spared_while_a_namespace_has_copies_of_its_own_to_drop() -> None:
    core, lower = make(slab_count=2, namespaces=(SMALL, MIDDLE))
    put(core, *range(4))
    put(core, 1, namespace=MIDDLE)
    lower.kept.add(BlockKey(scoped(DEFAULT_TENANT, MIDDLE.id), block_hash(1)))
    put(core, 2, namespace=MIDDLE)
    assert states_of(core, *range(4)) == [BlockState.HIT] * 4
    assert states_of(core, 1, 2, namespace=MIDDLE) == [BlockState.MISS, BlockState.HIT]
    assert core.counters.dropped_undemoted_count == 0
    assert promote(core, 3, namespace=MIDDLE) != [None]  # now something must be lost, and the slab is colder
    assert states_of(core, *range(4)) == [BlockState.MISS] * 4
    assert core.counters.dropped_undemoted_count == 4


@pytest.mark.parametrize("departing_count_max", [1, 8])
def test_a_slab_that_only_memory_has_goes_down_before_another_namespace_takes_it(departing_count_max: int) -> None:
    """It was lost, and the next block of the same call then let others depart, which had room below just as well."""
    core, lower = make(slab_count=2, namespaces=(SMALL, MIDDLE), departing_count_max=departing_count_max)
    put(core, *range(6))  # four in one slab, and the tail in the other
    states: list[ReserveState] = []
    while states != [ReserveState.RESERVED]:
        states = reserve(core, 1, namespace=MIDDLE)[0]
        assert core.counters.dropped_undemoted_count == 0
        assert states == [ReserveState.RESERVED] or demoted(core, lower), f"{states}, and nothing goes down"
    assert {number_of(key) for key in lower.kept} == set(range(6)), "with those before them"
    assert states_of(core, *range(6)) == [BlockState.HIT] * 4 + [BlockState.MISS] * 2
    core.check_invariants()


def test_a_slab_that_is_being_copied_from_is_not_given_to_another_namespace() -> None:
    core, lower = make(slab_count=1, namespaces=(SMALL, MIDDLE))
    put(core, 1)
    core.depart_all(now_s=0.0)
    put(core, 2)  # beside it, so that there is a coldest block
    lower.kept.add(small(2))
    assert reserve(core, 1, namespace=MIDDLE)[0] == [ReserveState.OVERLOADED]
    for departure in core.take_departures():
        core.end_departure(departure)
    assert reserve(core, 1, namespace=MIDDLE)[0] == [ReserveState.RESERVED]


def test_a_search_among_blocks_that_only_memory_has_is_given_up_soon() -> None:
    core, lower = make(slab_count=512)
    for number in range(2048):
        put(core, number)
    lower.asked.clear()
    for number in range(5000, 5032):
        assert promote(core, number) != [None]
    assert core.counters.dropped_undemoted_count == 32
    assert len(lower.asked) < 200, "each of them was searched for"


# --- use counts


def uses(core: StoreCore, *numbers: int) -> list[int]:
    return [core._evictor.use_count(small(number)) for number in numbers]


def test_a_block_counts_how_often_it_was_used() -> None:
    core, _ = make()
    put(core, 1, 2)
    assert uses(core, 1, 2) == [1, 1], "it was stored"
    lease = core.lease(SMALL.id, hashes(1, 2), owner_id=ALICE, now_s=0.0, duration_s=9.0)
    core.touch(SMALL.id, hashes(1))
    core.count_unseen_reads(SMALL.id, hashes(1), hit_count=1)
    reserve(core, 3, parent=2)
    core.lookup(SMALL.id, hashes(1, 2))
    assert uses(core, 1, 2) == [4, 3]
    assert lease is not None


def test_both_tiers_hear_of_each_use_and_of_what_is_told_later() -> None:
    core, lower = make()
    put(core, 1, 2)
    lower.touched.clear()
    request = Request(session_id=7, turn=2)
    assert core.lease(SMALL.id, hashes(1, 2), owner_id=ALICE, now_s=3.0, duration_s=9.0, request=request)
    assert lower.touched == [(request, [1, 2])]
    core.describe(SMALL.id, hashes(1, 2), Request(is_done=True), now_s=4.0)
    assert lower.described == [(Request(is_done=True), [1, 2])]
    core.depart_all(now_s=5.0)
    for departure in core.take_departures():
        assert departure.use is not None
        told = replace(request, is_done=True)
        assert (departure.use.maker, departure.use.request, departure.use.now_s) == (lower, told, 3.0)


def test_what_is_told_of_blocks_that_only_memory_has_goes_down_with_them() -> None:
    """A time to live that came with a hint was unknown below, and the block a hit there after it had left memory."""
    core, lower = make()
    put(core, 1, 2)
    put(core, 9)
    core.describe(SMALL.id, hashes(1, 2), Request(ttl_s=10.0), now_s=4.0)
    core.expire(now_s=5.0)
    assert lower.expired_s == [5.0]
    core.depart_all(now_s=5.0)
    told = {number_of(one.key): one.use.request.ttl_s for one in core.take_departures() if one.use is not None}
    assert told == {1: 14.0, 2: 14.0, 9: None}, "counted from the use, at 0 s"


def test_what_is_brought_ahead_is_no_use_of_it() -> None:
    core, lower = make()
    put(core, 1)
    lower.touched.clear()
    [reservation] = core.begin_promotion(
        SMALL.id, hashes(2), parent_hashes=hashes(1), now_s=5.0, may_lose=False, request=None
    )
    assert reservation is not None
    core.end_promotion([(reservation, reservation.block_bytes_max)])
    assert lower.touched == []
    assert uses(core, 1) == [1]
    core.check_invariants()


def test_a_block_that_is_wanted_does_not_go_down_without_those_before_it() -> None:
    core, lower = make()
    put(core, 1, 2, 3)
    lower.unwanted = {small(1), small(3)}
    assert core.depart_all(now_s=0.0) == 2
    assert [number_of(departure.key) for departure in core.take_departures()] == [1, 2]


def test_the_lower_tier_is_asked_with_the_uses_of_a_block_and_the_newest_time() -> None:
    core, lower = make(high=0.75, low=0.5)
    for number in range(12):
        put(core, number)
    core.touch(SMALL.id, hashes(*range(1, 12)))
    core.expire(now_s=77.0)
    _, (reservation,) = reserve(core, 12, now_s=78.0)
    commit(core, reservation)
    assert lower.asked[:2] == [(0, 1, 78.0), (11, 2, 78.0)]
    core._watermarks = Watermarks(high=0.1, low=0.1)
    core.expire(now_s=79.0)
    core.evict_to_low_watermark()
    assert lower.asked[-1][2] == 79.0


def test_a_block_written_again_begins_anew() -> None:
    core, _ = make()
    put(core, 1)
    core.touch(SMALL.id, hashes(1, 1, 1))
    core._evict(1)
    put(core, 1)
    assert uses(core, 1) == [1]


# --- coming back


def promote(
    core: StoreCore, *numbers: int, parent: int | None = None, now_s: float = 0.0, namespace: Namespace = SMALL
) -> list[Reservation | None]:
    """Begins with a chain."""
    parents = [None if parent is None else block_hash(parent), *hashes(*numbers[:-1])]
    namespace_id = scoped(DEFAULT_TENANT, namespace.id)
    return core.begin_promotion(namespace_id, hashes(*numbers), parent_hashes=parents, now_s=now_s, may_lose=True)


def test_a_promoted_block_is_pending_until_it_has_come_and_then_verified_and_used_twice() -> None:
    core, _ = make()
    reservations = promote(core, 1, 2)
    assert states_of(core, 1, 2) == [BlockState.PENDING] * 2
    assert core.reservation_count == 2
    assert [(one.path, one.owner_id) for one in reservations if one] == [(TransferPath.STREAM, PROMOTER)] * 2
    core.end_promotion([(one, 1152) for one in reservations if one])
    assert states_of(core, 1, 2) == [BlockState.HIT] * 2
    assert [block.is_verified and block.size_bytes for block in core.stored(SMALL.id).values()] == [1152, 1152]
    assert uses(core, 1, 2) == [2, 2]
    assert (core.counters.promoted_count, core.counters.committed_count, core.reservation_count) == (2, 0, 0)
    core.check_invariants()


def test_a_promotion_that_fails_leaves_a_miss_and_a_free_slot() -> None:
    core, _ = make(slab_count=1)
    first, second = promote(core, 1, 2)
    assert first is not None
    assert second is not None
    core.end_promotion([(first, None), (second, 1152)])
    assert states_of(core, 1, 2) == [BlockState.MISS, BlockState.HIT]
    assert core.space.used_bytes == SLOT_BYTES
    assert (core.counters.promoted_count, core.counters.corrupt_on_commit_count) == (1, 0)
    core.check_invariants()


def test_what_is_here_or_on_its_way_is_not_promoted_again() -> None:
    core, _ = make()
    put(core, 1)
    reserve(core, 2, parent=1)
    assert [one is not None for one in promote(core, 1, 2, 3)] == [False, False, True]
    assert promote(core, 3) == [None]
    assert reserve(core, 3)[0] == [ReserveState.PENDING]


def test_a_promotion_makes_room_but_not_at_its_own_heads_cost() -> None:
    core, lower = make(slab_count=1)
    put(core, 1)
    for number in range(11, 14):
        put(core, number)
    lower.kept.update(map(small, (1, 11, 12, 13, 2, 3)))
    assert None not in promote(core, 2, 3, parent=1)
    assert states_of(core, 1, 11, 12, 13) == [BlockState.HIT, BlockState.MISS, BlockState.MISS, BlockState.HIT]


def test_a_promotion_does_not_take_the_slot_of_a_block_of_its_own_chain() -> None:
    core, _ = make(slab_count=1)
    put(core, 2)
    for number in range(11, 14):
        put(core, number)
    assert [one is not None for one in promote(core, 1, 2, 3)] == [True, False, True]
    assert states_of(core, 2, 11, 12, 13) == [BlockState.HIT, BlockState.MISS, BlockState.MISS, BlockState.HIT]


def test_behind_a_block_without_room_nothing_is_lost_for_the_rest() -> None:
    core, _ = make(slab_count=1)
    put(core, *range(1, 5))
    core.lease(SMALL.id, hashes(1, 2, 3), owner_id=ALICE, now_s=0.0, duration_s=9.0)
    parents = [block_hash(4), None]
    assert core.begin_promotion(SMALL.id, hashes(5, 6), parent_hashes=parents, now_s=0.0, may_lose=True) == [None, None]
    assert states_of(core, 4) == [BlockState.HIT]


def test_behind_a_block_without_room_nothing_is_promoted() -> None:
    core, _ = make(slab_count=1)
    put(core, *range(1, 4))
    assert core.lease(SMALL.id, hashes(1, 2, 3), owner_id=ALICE, now_s=0.0, duration_s=9.0)
    reservations = promote(core, 4, 5, 6, parent=3)
    assert [one is not None for one in reservations] == [True, False, False]
    core.check_invariants()


def test_a_draining_store_promotes_to_the_end_and_tells_promotions_from_what_clients_write() -> None:
    core, _ = make()
    core.is_draining = True
    (reservation,) = promote(core, 1)
    assert reservation is not None
    assert (core.reservation_count, core.promotion_count) == (1, 1)
    core.end_promotion([(reservation, 1152)])
    assert states_of(core, 1) == [BlockState.HIT]
    assert (core.reservation_count, core.promotion_count) == (0, 0)


def test_no_time_and_no_client_ends_a_promotion() -> None:
    core, _ = make()
    (reservation,) = promote(core, 1)
    assert reservation is not None
    assert core.expire(now_s=1e12) == 0
    for owner_id in (ALICE, PROMOTER, OwnerId(bytes(16))):
        assert not core.abort(reservation.id, owner_id=owner_id)
        assert core.reservation(reservation.id, owner_id=owner_id) is None
        assert core.begin_commit(reservation.id, owner_id=owner_id) is None
        assert core.begin_landing(reservation.id, owner_id=owner_id, offset_bytes=0, size_bytes=1) is None
        assert core.end_owner(owner_id) == 0
    assert states_of(core, 1) == [BlockState.PENDING]
    core.end_promotion([(reservation, 1152)])
    assert states_of(core, 1) == [BlockState.HIT]


def test_a_promotion_that_says_more_than_its_slot_holds_is_a_bug() -> None:
    core, _ = make()
    (reservation,) = promote(core, 1)
    assert reservation is not None
    with pytest.raises(AssertionError, match="5000 bytes"):
        core.end_promotion([(reservation, 5000)])


def test_a_block_goes_down_and_comes_back_and_goes_down_for_nothing() -> None:
    core, lower = make(slab_count=1)
    put(core, 1)
    core.depart_all(now_s=0.0)
    assert demoted(core, lower) == [1]
    (reservation,) = promote(core, 1)
    assert reservation is not None
    core.end_promotion([(reservation, 1152)])
    assert core.depart_all(now_s=0.0) == 0
    put(core, *range(11, 15))
    assert states_of(core, 1) == [BlockState.MISS]
    assert core.counters.dropped_undemoted_count == 0


def test_a_reservation_and_a_promotion_end_each_on_their_own() -> None:
    core, _ = make()
    (promotion,) = promote(core, 1)
    _, (number,) = reserve(core, 2)
    assert promotion is not None
    assert number is not None
    assert number != promotion.id
    hold = core.begin_commit(number, owner_id=ALICE)
    assert hold is not None
    core.end_commits([(hold, CommitState.CORRUPT)])
    assert core.reservation_count == 1
    core.end_promotion([(promotion, 1152)])
    assert core.reservation_count == 0
