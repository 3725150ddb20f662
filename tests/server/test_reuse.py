"""The ceiling of the hit rate and what keeps it from being reached: against exact counting, and cause by cause."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvstore.keys import BlockHash, hash_blocks, pack_hashes
from kvstore.messages import BlockState, ReserveState, ReuseStats
from kvstore.namespace import Shard
from kvstore_server.core.distinct import DistinctCounter, RecentDistinct
from kvstore_server.core.fates import Fate, Fates
from kvstore_server.core.reuse import WINDOW_S, Reuse
from kvstore_server.core.shadow import ShadowLru
from kvstore_server.core.siblings import are_siblings
from kvstore_server.core.tenants import ScopedId
from tests.server.builders import SMALL

HIT, MISS, PENDING = BlockState.HIT, BlockState.MISS, BlockState.PENDING
HOME, ELSEWHERE = ScopedId(b"h" * 32), ScopedId(b"e" * 32)
BLOCK_BYTES = 4096


def prompt(session: int, block_count: int) -> list[BlockHash]:
    """A chain: the shorter ones of a session are beginnings of the longer ones."""
    return hash_blocks([session] * block_count, tokens_per_block=1)


def some_hashes(count: int, *, seed: int = 0) -> list[BlockHash]:
    rng = random.Random(seed)
    return [BlockHash(rng.randbytes(32)) for _ in range(count)]


class Store:
    """LRU of so many blocks, exact about everything it tells; beside it, what an exact count of all says."""

    def __init__(self, capacity: int, *, window_s: float = WINDOW_S) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[BlockHash, None] = OrderedDict()
        self.reuse = Reuse(used_bytes=lambda: len(self.blocks) * BLOCK_BYTES, window_s=window_s)
        self.seen: set[BlockHash] = set()
        self.asked = self.hits = self.seen_before = 0
        self.now_s = 1000.0

    def ask(self, hashes: Sequence[BlockHash], *, elsewhere_count: int = 0, unreadable_count: int = 0) -> None:
        states = bytes(HIT if one in self.blocks else MISS for one in hashes)
        self.asked += len(hashes)
        self.hits += states.count(HIT)
        self.seen_before += sum(one in self.seen for one in hashes)
        self.seen.update(hashes)
        self.reuse.looked_up(
            HOME,
            pack_hashes(hashes),
            states,
            block_bytes=BLOCK_BYTES,
            now_s=self.now_s,
            elsewhere_count=elsewhere_count,
            unreadable_count=unreadable_count,
        )

    def store(self, hashes: Sequence[BlockHash]) -> None:
        for one in reversed(hashes):
            self.blocks[one] = None
            self.blocks.move_to_end(one)
        self.reuse.used(HOME, pack_hashes(hashes), block_bytes=BLOCK_BYTES)
        victims = [self.blocks.popitem(last=False)[0] for _ in range(len(self.blocks) - self.capacity)]
        self.reuse.left(HOME, pack_hashes(victims), Fate.EVICTED)

    def evict(self, hashes: Sequence[BlockHash]) -> None:
        for one in hashes:
            del self.blocks[one]
        self.reuse.left(HOME, pack_hashes(hashes), Fate.EVICTED)

    def serve(self, hashes: Sequence[BlockHash]) -> None:
        self.ask(hashes)
        self.store(hashes)

    @property
    def stats(self) -> ReuseStats:
        self.reuse.tick(now_s=self.now_s)
        return self.reuse.total


def gap(stats: ReuseStats) -> dict[str, int]:
    """The causes that there are."""
    names = ("new", "capacity", "policy", "admission", "identity", "failure", "unoffered")
    return {name: count for name in names if (count := getattr(stats, f"{name}_count"))}


# --- the ceiling


@pytest.mark.parametrize("capacity", [200, 2_000, 20_000])
def test_the_ceiling_is_that_of_exact_counting_within_three_points(capacity: int) -> None:
    rng = random.Random(capacity)
    store = Store(capacity)
    for _ in range(2_500):
        session = int(rng.paretovariate(0.8)) % 400
        store.serve(prompt(session, rng.randint(1, 60)))
    stats = store.stats
    assert stats.hit_ratio == pytest.approx(store.hits / store.asked)
    assert stats.ceiling_ratio == pytest.approx(store.seen_before / store.asked, abs=0.03)
    assert sum(gap(stats).values()) == stats.miss_count


@pytest.mark.parametrize("count", [10, 1_000, 30_000, 300_000])
def test_different_blocks_are_counted_within_three_percent(count: int) -> None:
    keys = np.random.default_rng(count).integers(0, 1 << 64, count, dtype=np.uint64)
    counter = DistinctCounter()
    added = sum(counter.add(keys[start : start + 97]) for start in range(0, count, 97))
    assert counter.count == pytest.approx(count, rel=0.03)
    assert added == pytest.approx(counter.count)
    assert counter.add(keys) == 0.0


def test_a_batch_that_has_the_same_block_twice_counts_it_once() -> None:
    one, twice = DistinctCounter(), DistinctCounter()
    keys = np.random.default_rng(3).integers(0, 1 << 64, 500, dtype=np.uint64)
    one.add(keys)
    twice.add(np.concatenate([keys, keys]))
    assert one.count == twice.count


def test_new_is_what_was_not_seen_since_the_rotation_before_the_last() -> None:
    keys = np.random.default_rng(4).integers(0, 1 << 64, 1000, dtype=np.uint64)
    recent = RecentDistinct()
    assert recent.add(keys) == pytest.approx(1000, rel=0.03)
    recent.rotate()
    assert recent.add(keys) == 0.0
    recent.rotate()
    assert recent.add(keys) == 0.0, "seen again within the window that has just ended"
    recent.rotate()
    recent.rotate()
    assert recent.add(keys) == pytest.approx(1000, rel=0.03)


def test_equal_hashes_of_two_namespaces_are_different_blocks() -> None:
    store = Store(1000)
    hashes = some_hashes(100)
    store.ask(hashes)
    store.reuse.looked_up(ELSEWHERE, pack_hashes(hashes), bytes([MISS]) * 100, block_bytes=BLOCK_BYTES, now_s=1000.0)
    assert store.stats.new_count == pytest.approx(200, abs=6)


def test_what_is_pending_is_neither_hit_nor_miss() -> None:
    store = Store(1000)
    states = bytes([HIT, PENDING, MISS, PENDING])
    store.reuse.looked_up(HOME, pack_hashes(some_hashes(4)), states, block_bytes=BLOCK_BYTES, now_s=1.0)
    stats = store.stats
    assert (stats.hit_count, stats.miss_count, stats.new_count) == (1, 1, 1)


def test_hits_that_clients_find_by_themselves_count() -> None:
    store = Store(1000)
    store.serve(some_hashes(10))
    store.reuse.found_unseen(30)
    assert (store.stats.hit_count, store.stats.ceiling_ratio) == (30, pytest.approx(0.75))


# --- the gap, cause by cause


def test_what_lru_would_have_evicted_as_well_is_for_want_of_capacity() -> None:
    store = Store(100)
    first = some_hashes(50, seed=1)
    store.serve(first)
    store.serve(some_hashes(100, seed=2))
    store.ask(first)
    assert gap(store.stats) == {"new": pytest.approx(150, abs=5), "capacity": 50}


def test_what_left_although_lru_would_still_have_it_is_the_policys() -> None:
    store = Store(100)
    first, second = some_hashes(50, seed=1), some_hashes(50, seed=2)
    store.serve(first)
    store.serve(second)
    store.evict(second[25:])  # and not the colder first ones
    store.store(some_hashes(25, seed=3))
    store.ask(second[25:])
    assert gap(store.stats) == {"new": pytest.approx(100, abs=4), "policy": 25}


def test_what_was_offered_and_not_taken_is_for_admission() -> None:
    store = Store(100)
    hashes = some_hashes(20)
    store.ask(hashes)
    store.reuse.left(HOME, pack_hashes(hashes), Fate.REFUSED)
    store.ask(hashes)
    assert gap(store.stats) == {"new": pytest.approx(20, abs=1), "admission": 20}


def test_what_was_damaged_or_cannot_be_read_is_a_failure() -> None:
    store = Store(100)
    hashes = some_hashes(20)
    store.serve(hashes)
    for one in hashes[:5]:
        del store.blocks[one]
    store.reuse.left(HOME, pack_hashes(hashes[:5]), Fate.FAILED)
    store.ask(hashes)
    store.ask(some_hashes(8, seed=9), unreadable_count=8)
    assert gap(store.stats) == {"new": pytest.approx(20, abs=1), "failure": 13}


def test_what_another_namespace_has_is_for_identity_and_not_new() -> None:
    store = Store(100)
    store.ask(some_hashes(20), elsewhere_count=15)
    stats = store.stats
    assert gap(stats) == {"new": 5, "identity": 15}
    assert stats.ceiling_ratio == pytest.approx(0.75)


def test_what_nobody_offered_after_it_was_missed_is_told_apart() -> None:
    store = Store(100)
    for _ in range(3):
        store.ask(some_hashes(20))
    assert gap(store.stats) == {"new": pytest.approx(20, abs=1), "unoffered": pytest.approx(40, abs=1)}


def test_the_last_that_became_of_a_block_is_its_cause() -> None:
    store = Store(100)
    hashes = some_hashes(10)
    for fate in (Fate.REFUSED, Fate.EVICTED, Fate.FAILED):
        store.reuse.left(HOME, pack_hashes(hashes), fate)
    store.ask(hashes)
    assert gap(store.stats) == {"failure": 10}


# --- of late


def test_recent_figures_are_of_the_last_one_to_two_windows() -> None:
    store = Store(1000, window_s=100.0)
    hashes = some_hashes(50)
    store.serve(hashes)
    for _ in range(3):
        store.now_s += 100.0
        store.ask(hashes)
        store.reuse.tick(now_s=store.now_s)
        assert 100.0 <= store.reuse.recent.window_s <= 200.0
    recent = store.reuse.recent
    assert (recent.hit_ratio, recent.miss_count) == (1.0, 0)
    assert recent.hit_count <= 100
    assert store.stats.hit_count == 150
    store.now_s += 1000.0
    store.reuse.tick(now_s=store.now_s)
    assert store.reuse.recent.hit_count == 0, "after a long silence nothing is recent"


def test_before_anything_happened_all_figures_are_zero() -> None:
    reuse = Reuse(used_bytes=lambda: 0)
    assert (reuse.total.window_s, reuse.total.ceiling_ratio, gap(reuse.recent)) == (0.0, 0.0, {})


def test_time_that_goes_back_counts_as_standing_still() -> None:
    store = Store(10)
    store.serve(some_hashes(3))
    store.now_s -= 500.0
    store.serve(some_hashes(3))
    assert (store.stats.hit_count, store.stats.window_s) == (3, 0.0)


# --- bounds


def test_the_shadow_keeps_a_share_of_the_blocks_when_there_are_many() -> None:
    shadow = ShadowLru(sample_count_max=1000)
    keys = np.random.default_rng(5).integers(0, 1 << 64, 50_000, dtype=np.uint64)
    for start in range(0, len(keys), 500):
        shadow.use(keys[start : start + 500], block_bytes=1, room_bytes=20_000)
        assert len(shadow) <= 1000
    kept, gone = shadow.sampled(keys[-19_000:]), shadow.sampled(keys[:29_000])
    assert sum(key in shadow for key in kept) > 0.95 * len(kept)
    assert not any(key in shadow for key in gone[: len(gone) // 2])


def test_a_sampled_shadow_judges_like_a_whole_one() -> None:
    """Half of what returns was evicted too early: the sample says so within a few points."""
    store = Store(40_000)
    store.serve(some_hashes(40_000, seed=1))
    recent = some_hashes(40_000, seed=2)
    for start in range(0, 40_000, 200):
        store.serve(recent[start : start + 200])
    early = recent[-10_000:]
    store.evict(early)
    store.store(some_hashes(10_000, seed=3))
    before = store.stats.miss_count
    store.ask(early + some_hashes(10_000, seed=1))
    stats = store.stats
    assert stats.miss_count - before == 20_000
    assert stats.policy_count == pytest.approx(10_000, rel=0.1)
    assert stats.capacity_count == pytest.approx(10_000, rel=0.1)


def test_newer_fates_push_older_ones_out_and_never_speak_for_other_blocks() -> None:
    fates = Fates(table_bits=8)
    keys = np.random.default_rng(6).integers(1, 1 << 64, 5000, dtype=np.uint64)
    for start in range(0, 5000, 100):
        fates.note(keys[start : start + 100], Fate.EVICTED)
    found = fates.find(keys)
    assert found is not None
    assert 100 <= np.count_nonzero(found) <= 256
    assert fates.find(np.random.default_rng(7).integers(1, 1 << 64, 5000, dtype=np.uint64)) is None


# --- namespaces that would share


def test_namespaces_are_siblings_when_a_setting_alone_keeps_them_apart() -> None:
    for change in ({"dtype": "bfloat16"}, {"weights_revision": "main"}, {"layout": "NHD"}, {"tokenizer": "other"}):
        assert are_siblings(SMALL, replace(SMALL, **change)), change  # type: ignore[arg-type]
    sharded = replace(SMALL, shard=Shard(tp_rank=0, tp_size=2))
    assert are_siblings(SMALL, sharded)


def test_other_models_adapters_salts_and_parts_are_no_siblings() -> None:
    assert not are_siblings(SMALL, SMALL)
    for change in ({"model": "other"}, {"lora": "abc"}, {"tenant_salt": b"x"}, {"tokens_per_block": 32}):
        assert not are_siblings(SMALL, replace(SMALL, **change)), change  # type: ignore[arg-type]
    parts = [replace(SMALL, shard=Shard(tp_rank=rank, tp_size=2)) for rank in (0, 1)]
    assert not are_siblings(*parts)


def test_every_way_of_not_taking_a_block_counts_as_refused() -> None:
    from kvstore_server.core.store import _REFUSED_STATES

    taken = {ReserveState.RESERVED, ReserveState.STORED, ReserveState.PENDING}
    assert set(ReserveState) - taken == _REFUSED_STATES
