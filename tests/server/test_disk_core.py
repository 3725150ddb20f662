"""The disk's rules against an obvious model: a table of blocks, who holds which place, and what an index would say."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.errors import InvalidArgumentError
from kvstore.eviction import NO_HINT, Finish, Request
from kvstore.keys import BlockHash
from kvstore_server.core.admission import Admission, AdmissionPolicy
from kvstore_server.core.disk import DiskBlock, DiskCore, DiskWrite
from kvstore_server.core.space import Place, SlabId, SlabSpace
from kvstore_server.core.store import BlockKey
from kvstore_server.core.tenants import DEFAULT_TENANT, ScopedId, tenant_of
from tests.server.builders import block_hash

PAGE = 4096
SEGMENT_BYTES = 8 * PAGE
SEGMENT_COUNT = 3
ONE = ScopedId(b"1" * 32)
TWO = ScopedId(b"2" * 32)
ACMES = ScopedId(b"acme" + b"1" * 32)
ACMES_TWO = ScopedId(b"acme" + b"2" * 32)
SLOT_BYTES = {ONE: PAGE, TWO: 3 * PAGE, ACMES: 2 * PAGE, ACMES_TWO: 3 * PAGE}
REAL_SLOT_BYTES = {ONE: PAGE, TWO: 4 * PAGE, ACMES: 2 * PAGE, ACMES_TWO: 4 * PAGE}  # slots share out the whole segment
NUMBERS = range(12)
SIZE_BYTES = 100

numbers = st.sampled_from(NUMBERS)
any_namespace = st.runner().flatmap(lambda machine: st.sampled_from(machine.namespaces))


def key_of(number: int, namespace_id: ScopedId = ONE) -> BlockKey:
    return BlockKey(namespace_id, block_hash(number))


def tenant_count(namespaces: tuple[ScopedId, ...]) -> int:
    return len({DEFAULT_TENANT, *map(tenant_of, namespaces)})


def make_disk(
    *,
    segment_count: int = SEGMENT_COUNT,
    namespaces: tuple[ScopedId, ...] = (ONE, TWO),
    policy: AdmissionPolicy = "all",
    eviction: str = "lru",
    write_budget_bytes_per_day: int | None = None,
) -> DiskCore:
    space = SlabSpace(slab_count=segment_count, slab_bytes=SEGMENT_BYTES, tenant_count=tenant_count(namespaces))
    for segment in range(segment_count):
        space.add_slab(SlabId(segment))
    admission = Admission(policy=policy, write_budget_bytes_per_day=write_budget_bytes_per_day)
    disk = DiskCore(space=space, admission=admission, policy=eviction)
    for namespace_id in namespaces:
        assert disk.open(namespace_id, slot_bytes=SLOT_BYTES[namespace_id]) == REAL_SLOT_BYTES[namespace_id]
    return disk


def touch(disk: DiskCore, keys: list[BlockKey]) -> None:
    use = disk.begin_use(NO_HINT, now_s=0.0, chain_blocks=len(keys), matched_blocks=len(keys))
    disk.touch(keys, use=use)


def begin(disk: DiskCore, number: int, namespace_id: ScopedId = ONE, *, parent: int | None = None) -> DiskWrite | None:
    parent_hash = None if parent is None else block_hash(parent)
    return disk.begin_write(key_of(number, namespace_id), parent_hash=parent_hash, now_s=0.0)


def put(disk: DiskCore, *chain: int, namespace_id: ScopedId = ONE, parent: int | None = None) -> None:
    """Stores a chain of blocks, all of which must find room."""
    for number in chain:
        write = begin(disk, number, namespace_id, parent=parent)
        assert write is not None, f"no room for {number}"
        disk.end_write(write, stored_bytes=SIZE_BYTES)
        parent = number


def numbers_in(disk: DiskCore, namespace_id: ScopedId = ONE) -> set[int]:
    return {int.from_bytes(one, "big") for one in disk.stored(namespace_id)}


def records_of(disk: DiskCore) -> list[tuple[BlockKey, DiskBlock]]:
    return [(BlockKey(one, hash_), block) for one in (ONE, TWO) for hash_, block in disk.stored(one).items()]


class DiskCoreMachine(RuleBasedStateMachine):
    namespaces: tuple[ScopedId, ...] = (ONE, TWO)

    def __init__(self) -> None:
        super().__init__()
        self.waiting_segments = list(range(SEGMENT_COUNT))
        self.index: dict[BlockKey, DiskBlock] = {}
        self.start()

    def start(self) -> None:
        space = SlabSpace(
            slab_count=SEGMENT_COUNT, slab_bytes=SEGMENT_BYTES, tenant_count=tenant_count(self.namespaces)
        )
        for segment in range(SEGMENT_COUNT):
            if segment not in self.waiting_segments:
                space.add_slab(SlabId(segment))
        self.disk = DiskCore(space=space, admission=Admission(policy="all", write_budget_bytes_per_day=None))
        self.stored: dict[BlockKey, DiskBlock] = {}
        self.parents: dict[BlockKey, BlockHash | None] = {}
        self.writing: list[DiskWrite] = []
        self.readers: list[tuple[BlockKey, DiskBlock]] = []
        self.held: Counter[Place] = Counter()
        self.gone: set[BlockKey] = set()
        self.counts: Counter[str] = Counter()
        self.read: set[Place] = set()
        self.last_sequence = 0

    # --- time and space

    @precondition(lambda self: self.waiting_segments)
    @rule()
    def put_a_segment_into_service(self) -> None:
        self.disk.space.add_slab(SlabId(self.waiting_segments.pop()))

    @rule(namespace_id=any_namespace)
    def open(self, namespace_id: ScopedId) -> None:
        assert self.disk.open(namespace_id, slot_bytes=SLOT_BYTES[namespace_id]) == REAL_SLOT_BYTES[namespace_id]

    # --- reading

    @rule(namespace_id=any_namespace, number=numbers)
    def begin_read(self, namespace_id: ScopedId, number: int) -> None:
        key = key_of(number, namespace_id)
        block = self.disk.begin_read(key)
        assert block == self.stored.get(key)
        if block is not None:
            self.held[block.place] += 1
            self.readers.append((key, block))
            self.read.add(block.place)
            self.counts["read"] += 1

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def end_read(self, data: st.DataObject) -> None:
        key, block = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        self.disk.end_read(key, block)
        self.held[block.place] -= 1

    @rule(namespace_id=any_namespace, chain=st.lists(numbers, max_size=4))
    def touch(self, namespace_id: ScopedId, chain: list[int]) -> None:
        touch(self.disk, [key_of(number, namespace_id) for number in chain])

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        key, block = data.draw(st.sampled_from(self.readers))
        is_same = self.stored.get(key) == block
        assert self.disk.drop(key, block) == is_same
        if is_same:
            self.leave(key)
            self.counts["dropped"] += 1

    # --- writing

    @rule(
        data=st.data(),
        namespace_id=any_namespace,
        number=numbers,
        is_ended=st.booleans(),
    )
    def begin_write(self, data: st.DataObject, namespace_id: ScopedId, number: int, is_ended: bool) -> None:
        # Parents have lower numbers: a prefix tree that has no rings, as every honest caller's.
        parent = data.draw(st.none() | st.integers(0, number - 1)) if number else None
        key = key_of(number, namespace_id)
        is_known = key in self.stored or any(write.key == key for write in self.writing)
        is_open = namespace_id in self.disk._namespaces
        assert self.disk.wants(key, use_count=1, now_s=0.0) == (is_open and not is_known)
        space, tenant = self.disk.space, tenant_of(namespace_id)
        losers = {tenant_of(one) for one in self.namespaces if space.is_above_share(tenant_of(one))}
        may_lose = {tenant} | (losers if space.is_below_share(tenant) else set())
        write = begin(self.disk, number, namespace_id, parent=parent)
        for evicted in [key for key in self.stored if self.disk.find(key) is None]:
            place = self.stored[evicted].place
            assert self.held[place] == 1, f"{evicted} was evicted while it was read"
            assert tenant_of(evicted.namespace_id) in may_lose, f"{evicted} was evicted for another tenant"
            self.counts["evicted"] += 1
            self.counts["read_before_evicted"] += place in self.read
            self.leave(evicted)
        if write is None:
            if is_open and not is_known:
                self.check_is_full(namespace_id, child_of=parent)
            return
        assert is_open
        assert not is_known
        assert not self.held[write.place], "a place that is in use was given out"
        assert write.slot_bytes == REAL_SLOT_BYTES[namespace_id]
        assert write.sequence > self.last_sequence
        self.last_sequence = write.sequence
        self.held[write.place] += 1
        self.writing.append(write)
        if is_ended:
            self.end(write, stored_bytes=SIZE_BYTES)

    def check_is_full(self, namespace_id: ScopedId, *, child_of: int | None) -> None:
        """There was no free slot, and of this namespace no leaf that nobody reads, but the new block's own parent."""
        assert self.disk.space.allocate(namespace_id) is None
        parents = {(key.namespace_id, block.parent_hash) for key, block in self.stored.items()}
        parents |= {(write.key.namespace_id, write.parent_hash) for write in self.writing}
        parents.add((namespace_id, None if child_of is None else block_hash(child_of)))
        idle = [key for key, block in self.stored.items() if self.held[block.place] == 1]
        leaves = [key for key in idle if key.namespace_id == namespace_id and tuple(key) not in parents]
        assert not leaves, f"full, but {leaves} could leave"

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), stored_bytes=st.sampled_from([None, SIZE_BYTES, PAGE]))
    def end_write(self, data: st.DataObject, stored_bytes: int | None) -> None:
        self.end(data.draw(st.sampled_from(self.writing)), stored_bytes=stored_bytes)

    def end(self, write: DiskWrite, *, stored_bytes: int | None) -> None:
        self.writing.remove(write)
        self.disk.end_write(write, stored_bytes=stored_bytes)
        if stored_bytes is None:
            self.held[write.place] -= 1
            return
        block = DiskBlock(write.place, write.sequence, stored_bytes, write.parent_hash)
        self.stored[write.key] = self.index[write.key] = block
        self.gone.discard(write.key)
        self.counts["written"] += 1
        self.counts["written_bytes"] += stored_bytes

    # --- leaving

    def leave(self, key: BlockKey) -> None:
        place = self.stored.pop(key).place
        self.held[place] -= 1
        self.read.discard(place)
        self.gone.add(key)

    @rule()
    def delete_from_the_index(self) -> None:
        taken = self.disk.take_evicted()
        writing = {write.key for write in self.writing}
        assert len(set(taken)) == len(taken)
        assert set(taken) == self.gone - writing
        self.gone &= writing
        for key in taken:
            self.index.pop(key, None)
        assert self.index.keys() - self.gone == self.stored.keys()

    @rule()
    def restart(self) -> None:
        """As after a kill: what was under way is lost, and the index may name what has been evicted since."""
        segments: dict[int, BlockKey] = {}
        places: dict[Place, BlockKey] = {}
        for key, block in sorted(self.index.items(), key=lambda item: item[1].sequence):
            segments[block.place // SEGMENT_BYTES] = places[block.place] = key
        expected = {
            key: block
            for key, block in self.index.items()
            if segments[block.place // SEGMENT_BYTES].namespace_id == key.namespace_id and places[block.place] == key
        }
        assert self.stored.items() <= expected.items(), "something stored would not survive"
        self.start()
        refused = self.disk.restore(self.index.items(), slot_bytes_of=SLOT_BYTES, now_s=0.0)
        assert sorted(refused) == sorted(self.index.keys() - expected.keys())
        self.stored = dict(expected)
        self.index = dict(expected)
        self.held.update(block.place for block in expected.values())
        self.last_sequence = max((block.sequence for block in expected.values()), default=0)
        assert self.disk.last_sequence >= self.last_sequence

    # --- what always holds

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.disk.check_invariants()
        for namespace_id in self.namespaces:
            stored = {key.block_hash: block for key, block in self.stored.items() if key.namespace_id == namespace_id}
            assert self.disk.stored(namespace_id) == stored
        assert self.disk.block_count == len(self.stored)
        self.held = +self.held
        slabs = self.disk.space._shelf_of_slab
        taken = {place for slab in slabs for place in self.disk.space.taken_places(slab)}
        assert taken == self.held.keys()
        for place in taken:
            assert self.disk.space.ref_count(place) == self.held[place]

    @invariant()
    def counts_agree_with_the_model(self) -> None:
        counters = self.disk.counters
        assert counters.written_count == self.counts["written"]
        assert counters.written_bytes == self.counts["written_bytes"]
        assert counters.evicted_count == self.counts["evicted"]
        assert counters.dropped_count == self.counts["dropped"]
        assert counters.read_count == self.counts["read"]
        assert counters.read_before_evicted_count == self.counts["read_before_evicted"]

    def teardown(self) -> None:
        """When all reads and writes end, every block can leave and every byte is free."""
        for write in list(self.writing):
            self.end(write, stored_bytes=None)
        for key, block in self.readers:
            self.disk.end_read(key, block)
        for key, block in list(self.stored.items()):
            assert self.disk.drop(key, block)
        self.disk.check_invariants()
        assert self.disk.used_bytes == 0


class DiskCoreOfTenantsMachine(DiskCoreMachine):
    namespaces = (ONE, ACMES, ACMES_TWO)


DiskCoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
DiskCoreOfTenantsMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
TestDiskCore = DiskCoreMachine.TestCase
TestDiskCoreOfTenants = DiskCoreOfTenantsMachine.TestCase


# --- what leaves


def test_a_full_disk_evicts_tails_before_heads_and_the_coldest_chain_first() -> None:
    disk = make_disk(segment_count=1)
    put(disk, 1, 2, 3, 4)
    put(disk, 11, 12, 13, 14)
    touch(disk, [key_of(number) for number in (1, 2, 3, 4)])
    put(disk, 21, 22, 23)
    assert numbers_in(disk) == {1, 2, 3, 4, 11, 21, 22, 23}
    assert disk.take_evicted() == [key_of(14), key_of(13), key_of(12)]
    assert disk.take_evicted() == []


def test_a_block_does_not_push_its_own_ancestors_out() -> None:
    disk = make_disk(segment_count=1)
    put(disk, *range(8))
    assert begin(disk, 8, parent=7) is None
    assert numbers_in(disk) == set(range(8))


def test_a_large_full_disk_evicts_for_a_batch_of_writes_at_a_time() -> None:
    disk = make_disk(segment_count=256)
    for number in range(2048):
        put(disk, number)
    evicted = []
    for number in range(3000, 3032):
        put(disk, number)
        evicted.append(disk.counters.evicted_count)
    assert evicted == [16] * 16 + [32] * 16
    assert disk.take_evicted() == [key_of(number) for number in range(32)]


def test_space_moves_to_the_namespace_that_is_used() -> None:
    disk = make_disk()
    put(disk, 1, namespace_id=TWO)
    for number in range(16):
        put(disk, number)
    disk.begin_read(key_of(0))  # in the fuller segment of the two, which is not the one to be emptied
    put(disk, 2, namespace_id=TWO)
    touch(disk, [key_of(1, TWO), key_of(2, TWO)])
    put(disk, 3, namespace_id=TWO)
    assert numbers_in(disk, TWO) == {1, 2, 3}
    assert numbers_in(disk) == set(range(8))
    assert sorted(disk.take_evicted()) == [key_of(number) for number in range(8, 16)]


def test_a_segment_that_is_read_or_written_is_not_taken_from_its_namespace() -> None:
    disk = make_disk(segment_count=1)
    put(disk, *range(7))
    write = begin(disk, 7)
    assert write is not None
    assert begin(disk, 1, TWO) is None
    assert numbers_in(disk) == set(range(7))
    disk.end_write(write, stored_bytes=SIZE_BYTES)
    block = disk.begin_read(key_of(3))
    assert block is not None
    assert begin(disk, 1, TWO) is None
    assert numbers_in(disk) == set(range(8))
    disk.end_read(key_of(3), block)
    assert begin(disk, 1, TWO) is not None
    assert numbers_in(disk) == set()


def test_a_tenant_that_is_out_of_room_gets_its_share_back_at_once() -> None:
    disk = make_disk(segment_count=2, namespaces=(ONE, ACMES))
    for number in range(16):
        put(disk, number)
    reads = [(key_of(number), disk.begin_read(key_of(number))) for number in (0, 8)]
    assert begin(disk, 0, ACMES) is None, "both segments are being read"
    assert len(numbers_in(disk)) == 16
    for key, block in reads:
        assert block is not None
        disk.end_read(key, block)
    for number in range(5):
        put(disk, number, namespace_id=ACMES)
    assert len(numbers_in(disk)) == 8
    assert len(numbers_in(disk, ACMES)) == 4, "of its own it evicts, when it has its share"


def test_a_tenants_space_moves_between_its_own_namespaces_and_takes_nothing_from_others() -> None:
    disk = make_disk(segment_count=2, namespaces=(ONE, ACMES, ACMES_TWO))
    put(disk, 1, 2)  # few and cold, in a segment that another namespace of the same tenant might get
    put(disk, *range(4), namespace_id=ACMES)
    read = disk.begin_read(key_of(0, ACMES))
    assert read is not None
    assert begin(disk, 1, ACMES_TWO) is None
    assert numbers_in(disk) == {1, 2}
    disk.end_read(key_of(0, ACMES), read)
    put(disk, 1, namespace_id=ACMES_TWO)
    assert numbers_in(disk) == {1, 2}
    assert numbers_in(disk, ACMES) == set()
    assert sorted(disk.take_evicted()) == [key_of(number, ACMES) for number in range(4)]
    block = disk.begin_read(key_of(1, ACMES_TWO))
    assert block is not None
    assert begin(disk, 4, ACMES) is None
    assert numbers_in(disk) == {1, 2}


def test_a_damaged_block_is_gone_at_once_but_its_readers_keep_its_slot() -> None:
    disk = make_disk(segment_count=1)
    put(disk, 1)
    block = disk.begin_read(key_of(1))
    assert block is not None
    assert disk.drop(key_of(1), block)
    assert disk.find(key_of(1)) is None
    assert disk.take_evicted() == [key_of(1)]
    put(disk, *range(2, 9))
    assert begin(disk, 9, parent=8) is None
    disk.end_read(key_of(1), block)
    assert begin(disk, 9, parent=8) is not None


def test_a_block_written_again_is_neither_taken_for_the_damaged_one_nor_deleted_from_the_index() -> None:
    disk = make_disk()
    put(disk, 1)
    block = disk.begin_read(key_of(1))
    assert block is not None
    assert disk.drop(key_of(1), block)
    put(disk, 1)
    assert not disk.drop(key_of(1), block)
    disk.end_read(key_of(1), block)
    assert disk.find(key_of(1)) is not None
    assert disk.take_evicted() == []


def test_a_block_that_is_being_written_again_is_deleted_from_the_index_only_when_that_fails() -> None:
    disk = make_disk()
    put(disk, 1)
    block = disk.find(key_of(1))
    assert block is not None
    assert disk.drop(key_of(1), block)
    write = begin(disk, 1)
    assert write is not None
    assert disk.take_evicted() == []
    disk.end_write(write, stored_bytes=None)
    assert disk.take_evicted() == [key_of(1)]


def test_a_mapping_of_stored_blocks_follows_what_happens_to_them() -> None:
    disk = make_disk()
    stored = disk.stored(ONE)
    put(disk, 1)
    assert list(stored) == [block_hash(1)]
    assert disk.stored(ScopedId(b"9" * 32)) == {}


# --- what may enter


def test_a_block_is_wanted_once() -> None:
    disk = make_disk()
    assert disk.wants(key_of(1), use_count=0, now_s=0.0)
    write = begin(disk, 1)
    assert write is not None
    assert not disk.wants(key_of(1), use_count=9, now_s=0.0)
    assert begin(disk, 1) is None
    disk.end_write(write, stored_bytes=SIZE_BYTES)
    assert not disk.wants(key_of(1), use_count=9, now_s=0.0)
    assert begin(disk, 1) is None
    assert not disk.wants(key_of(1, ScopedId(b"9" * 32)), use_count=9, now_s=0.0)
    counts = {"known": 1, "in_progress": 1, "worth_less": 0, "not_reused": 0, "budget": 0, "not_open": 1}
    assert disk.counters.refused_counts == counts


def test_a_full_disk_takes_what_is_worth_more_than_what_it_has_and_one_with_room_takes_everything() -> None:
    disk = make_disk(policy="worth", eviction="phix")
    seen = itertools.count(1_000)

    def offer(number: int, *, session: int, turn: int, now_s: float) -> bool:
        """A block of one request, which the disk is offered at once; whether it is there then."""
        key, request = key_of(number), Request(session_id=session, turn=turn, finish=Finish.TOOL_USE)
        is_here = disk.find(key) is not None
        use = disk.begin_use(request, now_s=now_s, chain_blocks=1, matched_blocks=int(is_here))
        disk.touch([key], use=use)
        if is_here or not disk.wants(key, use_count=1, use=use, now_s=now_s):
            return is_here
        write = disk.begin_write(key, parent_hash=None, use=use, now_s=now_s)
        if write is not None:
            disk.end_write(write, stored_bytes=SIZE_BYTES)
        return write is not None

    for session in range(24):
        assert offer(next(seen), session=session, turn=1, now_s=0.0), "there is room for everything"
    assert not disk.counters.evicted_count
    # As many sessions as there is room for come back again and again, and what all others leave is never used again.
    now_s, back = 0.0, 0
    for step in range(1200):
        now_s += 1.0
        back += offer(step % 24, session=step % 24, turn=2 + step // 24, now_s=now_s)
        offer(next(seen), session=10_000 + step, turn=1, now_s=now_s)
    assert disk.counters.refused_counts["worth_less"] > 600
    assert back > 600, "most of what comes back has stayed"
    # Whoever used a block before the tier was opened says nothing of what it is worth.
    foreign = make_disk().begin_use(NO_HINT, now_s=now_s, chain_blocks=1, matched_blocks=0)
    assert disk.wants(key_of(99), use_count=1, use=foreign, now_s=now_s)


def test_a_chain_is_finished_on_credit_and_paid_off_before_the_next_one_begins() -> None:
    """field/eviction.md: a filter that punches holes into chains is worse than none. Memory evicts tails first."""
    day_bytes = 24 * SIZE_BYTES  # a block of that size in an hour
    disk = make_disk(write_budget_bytes_per_day=day_bytes)

    def offer(number: int, *, parent: int | None, now_s: float) -> bool:
        key = key_of(number)
        if not disk.wants(key, use_count=1, now_s=now_s):
            return False
        write = disk.begin_write(key, parent_hash=None if parent is None else block_hash(parent), now_s=now_s)
        assert write is not None
        disk.end_write(write, stored_bytes=SIZE_BYTES)
        return True

    assert offer(3, parent=2, now_s=0.0)
    assert not offer(13, parent=12, now_s=0.0)
    assert offer(2, parent=1, now_s=0.0)
    assert offer(1, parent=None, now_s=0.0)
    assert not offer(12, parent=11, now_s=7000.0)
    assert disk.counters.refused_counts["budget"] == 2
    assert offer(11, parent=None, now_s=7300.0)


def test_a_write_that_failed_may_have_worn_the_device_and_is_not_refunded() -> None:
    disk = make_disk(write_budget_bytes_per_day=24 * PAGE)
    write = begin(disk, 1)
    assert write is not None
    disk.end_write(write, stored_bytes=None)
    assert not disk.wants(key_of(1), use_count=1, now_s=0.0)


def test_a_block_used_once_stays_out_unless_one_on_the_disk_follows_it() -> None:
    disk = make_disk(policy="second-hit")
    assert disk.is_selective
    assert not disk.wants(key_of(1), use_count=1, now_s=0.0)
    assert disk.wants(key_of(2), use_count=2, now_s=0.0)
    put(disk, 2, parent=1)
    assert disk.wants(key_of(1), use_count=1, now_s=0.0)
    block = disk.find(key_of(2))
    assert block is not None
    assert disk.drop(key_of(2), block)
    assert not disk.wants(key_of(1), use_count=1, now_s=0.0)
    assert disk.counters.refused_counts["not_reused"] == 2


def test_an_adaptive_disk_whose_blocks_are_never_read_becomes_selective() -> None:
    disk = make_disk(policy="adaptive", segment_count=1)
    for number in range(8 + 1024):
        assert not disk.is_selective
        put(disk, number)
    assert disk.is_selective


def test_an_adaptive_disk_does_not_judge_blocks_whose_past_it_does_not_know() -> None:
    """After a restart the disk is full of blocks that may well have been read before."""
    old = make_disk(segment_count=200)
    for number in range(1600):
        put(old, number)
    disk = make_disk(segment_count=200, namespaces=(), policy="adaptive")
    assert disk.restore(records_of(old), slot_bytes_of=SLOT_BYTES, now_s=0.0) == []
    for number in range(2000, 3600):
        put(disk, number)
    assert disk.counters.evicted_count >= 1600
    assert numbers_in(disk) == set(range(2000, 3600))
    assert not disk.is_selective


# --- namespaces


def test_a_namespace_whose_blocks_do_not_fit_into_a_segment_stays_off_the_disk() -> None:
    disk = make_disk()
    other = ScopedId(b"3" * 32)
    assert disk.open(other, slot_bytes=SEGMENT_BYTES + PAGE) is None
    assert not disk.wants(key_of(1, other), use_count=1, now_s=0.0)
    assert begin(disk, 1, other) is None
    assert not disk.is_open(other)
    assert disk.open(other, slot_bytes=SEGMENT_BYTES) == SEGMENT_BYTES
    assert disk.is_open(other)
    assert begin(disk, 1, other) is not None


@pytest.mark.parametrize("slot_bytes", [0, -4096, 4097])
def test_slots_that_are_not_whole_pages_are_refused(slot_bytes: int) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"slot_bytes is {slot_bytes}; allowed: a multiple of 4096 above 0"):
        make_disk().open(ScopedId(b"3" * 32), slot_bytes=slot_bytes)


def test_an_empty_namespace_is_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_server.core.disk.NAMESPACE_COUNT_MAX", 2)
    disk = make_disk()
    other, another = ScopedId(b"3" * 32), ScopedId(b"4" * 32)
    put(disk, 1)
    put(disk, 1, namespace_id=TWO)
    assert disk.open(other, slot_bytes=PAGE) is None
    block = disk.find(key_of(1, TWO))
    assert block is not None
    assert disk.drop(key_of(1, TWO), block)
    assert disk.open(other, slot_bytes=PAGE) is None, "the index still names a block of every namespace"
    assert disk.take_evicted() == [key_of(1, TWO)]
    assert disk.open(other, slot_bytes=PAGE) == PAGE
    assert disk.open(another, slot_bytes=PAGE) == PAGE
    assert not disk.wants(key_of(1, TWO), use_count=1, now_s=0.0)
    assert numbers_in(disk) == {1}
    disk.check_invariants()


# --- starting


def test_after_a_restart_all_blocks_are_back_with_their_chains_and_their_age() -> None:
    old = make_disk()
    put(old, 1, 2, 3)
    put(old, 1, namespace_id=TWO)
    put(old, 11, 12, 13, 14, 15)
    disk = make_disk(namespaces=())
    assert disk.restore(reversed(records_of(old)), slot_bytes_of=SLOT_BYTES, now_s=0.0) == []
    assert sorted(records_of(disk)) == sorted(records_of(old))
    assert (disk.block_count, disk.used_bytes, disk.last_sequence) == (9, old.used_bytes, 9)
    disk.check_invariants()
    put(disk, 2, 3, namespace_id=TWO)
    put(disk, 21)
    write = begin(disk, 22)
    assert write is not None
    assert write.sequence == 13
    assert disk.take_evicted() == [key_of(3), key_of(2)], "the oldest chain loses its tail first"


def test_of_two_records_that_want_the_same_slot_or_key_or_segment_the_latest_wins() -> None:
    disk = make_disk(namespaces=())
    records = [
        (key_of(1), DiskBlock(Place(0), 1, SIZE_BYTES, None)),
        (key_of(2), DiskBlock(Place(0), 2, SIZE_BYTES, None)),
        (key_of(3), DiskBlock(Place(PAGE), 3, SIZE_BYTES, None)),
        (key_of(3), DiskBlock(Place(2 * PAGE), 4, SIZE_BYTES, None)),
        (key_of(4), DiskBlock(Place(SEGMENT_BYTES), 5, SIZE_BYTES, None)),
        (key_of(1, TWO), DiskBlock(Place(SEGMENT_BYTES + 4 * PAGE), 6, SIZE_BYTES, None)),
        (key_of(5), DiskBlock(Place(SEGMENT_BYTES + PAGE), 7, SIZE_BYTES, None)),
        (key_of(2, TWO), DiskBlock(Place(SEGMENT_BYTES), 8, SIZE_BYTES, None)),
    ]
    refused = disk.restore(records, slot_bytes_of=SLOT_BYTES, now_s=0.0)
    assert sorted(refused) == sorted([key_of(1), key_of(4), key_of(5)]), "what is stored is not to be deleted"
    assert numbers_in(disk) == {2, 3}
    assert disk.stored(ONE)[block_hash(3)].sequence == 4
    assert numbers_in(disk, TWO) == {1, 2}
    disk.check_invariants()
    assert disk.used_bytes == (2 + 2 * 4) * PAGE
    assert disk.last_sequence == 8


UNKNOWN, UNFIT = ScopedId(b"8" * 32), ScopedId(b"9" * 32)


@pytest.mark.parametrize(
    ("key", "block"),
    [
        (key_of(1), DiskBlock(Place(-PAGE), 9, SIZE_BYTES, None)),
        (key_of(1), DiskBlock(Place(SEGMENT_COUNT * SEGMENT_BYTES), 9, SIZE_BYTES, None)),
        (key_of(1), DiskBlock(Place(1 << 63), 9, SIZE_BYTES, None)),
        (key_of(1), DiskBlock(Place(PAGE + 1), 9, SIZE_BYTES, None)),
        (key_of(1, TWO), DiskBlock(Place(SEGMENT_BYTES + PAGE), 9, SIZE_BYTES, None)),
        (key_of(1), DiskBlock(Place(PAGE), 9, PAGE + 1, None)),
        (key_of(1), DiskBlock(Place(PAGE), 9, 0, None)),
        (key_of(1), DiskBlock(Place(PAGE), 0, SIZE_BYTES, None)),
        (key_of(1), DiskBlock(Place(PAGE), (1 << 64) - 1, SIZE_BYTES, None)),
        (key_of(1, UNKNOWN), DiskBlock(Place(PAGE), 9, SIZE_BYTES, None)),
        (key_of(1, UNFIT), DiskBlock(Place(PAGE), 9, SIZE_BYTES, None)),
    ],
)
def test_a_record_of_what_cannot_be_is_refused_and_costs_no_other_block(key: BlockKey, block: DiskBlock) -> None:
    disk = make_disk(namespaces=())
    sound = (key_of(2), DiskBlock(Place(0), 5, SIZE_BYTES, block_hash(1)))
    slot_bytes_of = {**SLOT_BYTES, UNFIT: PAGE + 1}
    assert disk.restore([(key, block), sound], slot_bytes_of=slot_bytes_of, now_s=0.0) == [key]
    assert numbers_in(disk) == {2}
    assert disk.last_sequence == (9 if block.sequence == 9 else 5)
    disk.check_invariants()
    put(disk, 1)


def test_a_block_whose_child_was_restored_is_wanted_whatever_admission_says() -> None:
    disk = make_disk(namespaces=(), policy="second-hit")
    disk.restore([(key_of(2), DiskBlock(Place(0), 5, SIZE_BYTES, block_hash(1)))], slot_bytes_of=SLOT_BYTES, now_s=0.0)
    assert disk.wants(key_of(1), use_count=1, now_s=0.0)
    assert not disk.wants(key_of(3), use_count=1, now_s=0.0)


def test_records_that_claim_to_be_each_others_parents_can_still_leave() -> None:
    disk = make_disk(segment_count=1, namespaces=())
    ring = [
        (key_of(number), DiskBlock(Place(number * PAGE), number + 1, SIZE_BYTES, block_hash((number + 1) % 8)))
        for number in range(8)
    ]
    assert disk.restore(ring, slot_bytes_of=SLOT_BYTES, now_s=0.0) == []
    put(disk, *range(11, 17))
    disk.check_invariants()


def test_numbers_of_writes_go_on_above_what_is_skipped_and_never_back() -> None:
    disk = make_disk()
    for sequence in (100, 7):
        disk.skip_to(sequence)
        assert disk.last_sequence == 100
    write = begin(disk, 1)
    assert write is not None
    assert write.sequence == 101


# --- time to live


def keys(*numbers: int) -> list[BlockKey]:
    return [key_of(number) for number in numbers]


def test_blocks_that_were_not_to_be_kept_so_long_leave_the_disk_tails_first_and_others_stay() -> None:
    disk = make_disk()
    put(disk, 0, 1, 2)
    put(disk, 10, 11)
    chain = keys(0, 1, 2)
    disk.touch(chain, use=disk.begin_use(Request(ttl_s=10.0), now_s=5.0, chain_blocks=3, matched_blocks=3))
    disk.expire(now_s=14.9)
    assert numbers_in(disk) == {0, 1, 2, 10, 11}
    disk.expire(now_s=15.0)
    assert numbers_in(disk) == {10, 11}
    assert set(disk.take_evicted()) == set(chain), "the index forgets them"
    assert (disk.counters.expired_count, disk.counters.evicted_count) == (3, 0)
    disk.check_invariants()


def test_a_block_that_is_being_read_outlives_its_time_and_then_leaves() -> None:
    disk = make_disk()
    put(disk, 0, 1)
    disk.touch(keys(0, 1), use=disk.begin_use(Request(ttl_s=1.0), now_s=0.0, chain_blocks=2, matched_blocks=2))
    block = disk.begin_read(key_of(1))
    assert block is not None
    disk.expire(now_s=60.0)
    assert numbers_in(disk) == {0, 1}
    disk.end_read(key_of(1), block)
    disk.expire(now_s=60.0)
    assert numbers_in(disk) == set()
    disk.check_invariants()


def test_a_later_use_without_a_time_keeps_a_block_and_what_is_written_late_has_its_own() -> None:
    disk = make_disk()
    put(disk, 0)
    disk.touch(keys(0), use=disk.begin_use(Request(ttl_s=1.0), now_s=0.0, chain_blocks=1, matched_blocks=1))
    touch(disk, keys(0))
    use = disk.retell(disk.begin_use(NO_HINT, now_s=0.0, chain_blocks=1, matched_blocks=0), Request(ttl_s=9.0))
    write = disk.begin_write(key_of(5), parent_hash=None, use=use, now_s=3.0)
    assert write is not None
    disk.end_write(write, stored_bytes=SIZE_BYTES)
    disk.expire(now_s=8.9)
    assert numbers_in(disk) == {0, 5}
    disk.expire(now_s=9.0)
    assert numbers_in(disk) == {0}
