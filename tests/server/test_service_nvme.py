"""The store service with a disk below memory: real arenas, files, index and threads, and a device that can fail."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from kvstore import messages as m
from kvstore.errors import InvalidArgumentError
from kvstore.messages import BlockState, CutReason, Epoch, NvmeState, OwnerId, ReserveState, Tier, TransferPath
from kvstore.namespace import Namespace
from kvstore.slab import SLOT_HEADER_BYTES, SlotState, decode_slot_records, slot_state
from kvstore_server.core.store import BlockKey
from kvstore_server.core.tenants import DEFAULT_TENANT, scoped
from kvstore_server.rpc.caller import LOOPBACK
from kvstore_server.rpc.service import StoreService
from tests.server.builders import (
    ALICE,
    LARGE,
    MIDDLE,
    SMALL,
    block_hash,
    enveloped,
    enveloped_bytes,
    hashes,
    make_in_flight,
    packed,
)
from tests.server.nvme.rig import SLAB_BYTES, Rig
from tests.server.test_service import Store, is_soon
from tests.server.test_service_slots import Tickets

SESSION = OwnerId(b"s" * 16)
ATTACHED = dataclasses.replace(LOOPBACK, session_id=SESSION)
SLOT_BYTES = 4096
"""Of a small block."""
LARGE_PER_SLAB = 3
NOT_LEARNT_S = 1.0
"""Recomputing a block takes so long that any disk is faster."""
AT_ONCE_S = 1e-7
"""Recomputing a block takes so short that no disk is faster."""


class Tiered(Store):
    """The service, on what a rig has built. Time is real, but for what the disk's health goes by."""

    def __init__(self, rig: Rig, *, read_ahead_bytes: int) -> None:
        self.rig = rig
        self.arenas = rig.arenas
        self.core = rig.core
        self.tier = rig.tier
        self.in_flight = make_in_flight()
        self.pool = ThreadPoolExecutor(1)
        self.gates = []
        self.tickets = Tickets()
        self.service = StoreService(
            core=self.core,
            arenas=self.arenas,
            epoch=Epoch(b"e" * 16),
            copy_pool=self.pool,
            clock=time.monotonic,
            in_flight=self.in_flight,
            transfers=self.tickets,
            read_ahead_bytes=read_ahead_bytes,
        )
        self.service.nvme = self.tier
        self.tier._parts.on_settled = self.service.wake_waiters
        # A pause of the disk lasts until a test moves this.
        self.health_s = 0.0
        self.tier._parts.clock = lambda: self.health_s

    async def put_on_disk(self, numbers: Iterable[int], namespace: Namespace = SMALL, **options: Any) -> None:
        """And nowhere else."""
        numbers = list(numbers)
        assert self.rig.put(numbers, namespace, **options) == len(numbers)
        await self.rig.demote_all()
        assert self.core.block_count == 0
        assert self.rig.on_disk(namespace) >= {block_hash(number) for number in numbers}

    async def idle(self) -> None:
        """Nothing is under way between the tiers."""
        await self.tier._parts.wait_idle()

    async def look(
        self, numbers: Iterable[int], namespace: Namespace = SMALL, **changes: Any
    ) -> m.LookupBlocksResponse:
        request = m.LookupBlocksRequest(namespace_id=namespace.id, block_hashes=packed(*numbers), **changes)
        return await self.service.lookup_blocks(request, LOOPBACK)

    async def take(
        self, numbers: Iterable[int], namespace: Namespace = SMALL, **changes: Any
    ) -> m.AcquirePrefixResponse:
        request = m.AcquirePrefixRequest(
            namespace_id=namespace.id, owner_id=ALICE, block_hashes=packed(*numbers), lease_s=30.0, **changes
        )
        return await self.service.acquire_prefix(request, LOOPBACK)

    async def lease(
        self, numbers: Iterable[int], namespace: Namespace = SMALL, *, path: TransferPath = TransferPath.SLAB
    ) -> m.LeaseBlocksResponse:
        is_slab = path is TransferPath.SLAB
        request = m.LeaseBlocksRequest(
            namespace_id=namespace.id,
            owner_id=SESSION if is_slab else ALICE,
            block_hashes=packed(*numbers),
            lease_s=30.0,
            path=path,
        )
        return await self.service.lease_blocks(request, ATTACHED if is_slab else LOOPBACK)

    async def prefetch(self, numbers: Iterable[int], *, budget_bytes: int = 0) -> tuple[int, int, int, int]:
        """In memory, started, refused, missing."""
        request = m.PrefetchBlocksRequest(
            namespace_id=SMALL.id, block_hashes=packed(*numbers), budget_bytes=budget_bytes
        )
        response = await self.service.prefetch_blocks(request, LOOPBACK)
        assert response.epoch == b"e" * 16
        return response.in_memory_count, response.started_count, response.refused_count, response.missing_count

    async def stats(self) -> m.StoreStats:
        return await self.service.get_store_stats(m.GetStoreStatsRequest(), LOOPBACK)

    @property
    def promoted_count(self) -> int:
        return self.tier.figures().promoted_count

    @property
    def read_count(self) -> int:
        """Reads that the device was asked for."""
        return self.rig.disk.calls["read"]


OpenStore = Callable[..., Awaitable[Tiered]]


@pytest.fixture
async def open_store(tmp_path: Path) -> AsyncIterator[OpenStore]:
    opened: list[Tiered] = []

    async def open_one(*, read_ahead_bytes: int = 32 << 20, **options: Any) -> Tiered:
        rig = await Rig(folder=tmp_path / "nvme", **options).open()
        opened.append(Tiered(rig, read_ahead_bytes=read_ahead_bytes))
        return opened[-1]

    yield open_one
    for store in opened:
        store.rig.disk.heal()
        store.pool.shutdown()
        await store.rig.close()


@pytest.fixture
async def store(open_store: OpenStore) -> Tiered:
    return await open_store()


# --- lookups


async def test_a_lookup_says_of_each_block_where_it_is_and_matches_over_both_tiers(store: Tiered) -> None:
    await store.put_on_disk(range(3))
    await store.put(3, 4)
    await store.reserve(6)
    found = await store.look([0, 1, 2, 3, 4, 5, 6])
    assert list(found.block_states) == [BlockState.HIT] * 5 + [BlockState.MISS, BlockState.PENDING]
    assert list(found.tiers) == [Tier.NVME] * 3 + [Tier.MEMORY] * 2 + [0, 0]
    assert (found.matched_count, found.left_out_count, found.cut_reason) == (5, 0, CutReason.NONE)


async def test_the_matched_prefix_may_change_tiers_any_number_of_times_and_ends_at_the_first_miss(
    store: Tiered,
) -> None:
    await store.put_on_disk([1, 3, 6])
    await store.put(0, 2)
    found = await store.look([0, 1, 2, 3, 5, 6])
    assert found.matched_count == 4
    assert list(found.tiers) == [Tier.MEMORY, Tier.NVME, Tier.MEMORY, Tier.NVME, 0, Tier.NVME]


async def test_a_block_in_both_tiers_is_in_memory(store: Tiered) -> None:
    await store.put_on_disk(range(2))
    assert None not in await store.read(0)
    assert list((await store.look(range(2))).tiers) == [Tier.MEMORY, Tier.NVME]


async def test_a_block_on_the_disk_is_a_hit_while_somebody_writes_it_anew(store: Tiered) -> None:
    await store.put_on_disk([0])
    await store.reserve(0)
    found = await store.look([0], wait_s=30.0)
    assert (found.matched_count, list(found.tiers)) == (1, [Tier.NVME])


async def test_a_lookup_waits_for_what_is_pending_behind_blocks_on_the_disk_and_for_no_disk(store: Tiered) -> None:
    await store.put_on_disk(range(2))
    (reservation,) = await store.reserve(2)
    await store.write((reservation, enveloped(2)))
    waiting = asyncio.create_task(store.look(range(3), wait_s=30.0))
    await is_soon(lambda: not waiting.done())
    await store.commit(reservation)
    assert (await waiting).matched_count == 3
    assert store.promoted_count == 0


async def test_ten_thousand_lookups_of_queued_requests_deeper_than_memory_move_nothing(open_store: OpenStore) -> None:
    store = await open_store(namespaces=(SMALL, LARGE), segment_count=12)
    for start in range(0, 30, 5):
        assert store.rig.put(range(start, start + 5), LARGE) == 5
        await store.rig.demote_all()
    memory_count = store.rig.slab_count * LARGE_PER_SLAB
    assert memory_count < 30
    before = store.read_count, store.core.space.used_bytes, store.core.counters.evicted_count
    for number in range(10_000):
        found = await store.look(range(30), LARGE, recompute_s_per_block=NOT_LEARNT_S * (number % 2))
        assert found.matched_count == 30
    assert (store.read_count, store.core.space.used_bytes, store.core.counters.evicted_count) == before
    assert store.promoted_count == 0
    assert store.tier.figures().hit_count == 300_000


# --- use


async def test_a_slab_lease_brings_blocks_verified_in_memory_and_leaves_the_disk_its_copies(store: Tiered) -> None:
    await store.put_on_disk(range(3))
    await store.put(3)
    leased = await store.lease([0, 9, 1, 2, 3])
    assert list(leased.block_states) == [BlockState.HIT, BlockState.MISS] + [BlockState.HIT] * 3
    for number, slot in zip((0, 1, 2, 3), decode_slot_records(leased.slots), strict=True):
        header = store.arenas.slot(slot.place, SLOT_HEADER_BYTES)
        assert slot_state(header, slot.generation) is SlotState.VERIFIED
        assert bytes(store.arenas.view(slot.place, slot.size_bytes)) == enveloped(number)
    assert store.rig.on_disk() == set(hashes(0, 1, 2))
    assert (store.promoted_count, store.core.lease_count) == (3, 1)


async def test_a_block_asked_for_twice_in_one_call_is_read_once(store: Tiered) -> None:
    await store.put_on_disk([0])
    before = store.read_count
    assert list((await store.lease([0, 0])).block_states) == [BlockState.HIT] * 2
    assert store.read_count == before + 1


async def test_a_lease_for_the_data_port_brings_blocks_and_its_ticket_is_for_those_that_came(store: Tiered) -> None:
    await store.put_on_disk(range(2))
    leased = await store.lease([0, 9, 1], path=TransferPath.BULK)
    assert list(leased.block_states) == [BlockState.HIT, BlockState.MISS, BlockState.HIT]
    ((_, _, ticketed),) = store.tickets.reads
    assert ticketed == hashes(0, 1)


async def test_a_stream_sends_blocks_from_both_tiers_over_many_windows(open_store: OpenStore) -> None:
    store = await open_store(read_ahead_bytes=4 * SLOT_BYTES)
    await store.put_on_disk(range(18))
    await store.put(18)
    numbers = [*range(10), 99, *range(10, 19)]
    assert await store.read(*numbers) == [None if number == 99 else enveloped(number) for number in numbers]
    assert store.promoted_count == 18
    assert store.rig.on_disk() == set(hashes(*range(18)))


async def test_a_stream_that_nobody_reads_on_brings_the_next_blocks_and_no_more(open_store: OpenStore) -> None:
    store = await open_store(read_ahead_bytes=4 * SLOT_BYTES)
    await store.put_on_disk(range(30))
    request = m.ReadBlocksRequest(namespace_id=SMALL.id, block_hashes=packed(*range(30)))
    async with aclosing(store.service.read_blocks(request, LOOPBACK)) as frames:
        await anext(frames)
        await store.idle()
        assert store.promoted_count == 8
    assert set(store.rig.states(range(8))) == {BlockState.HIT}


async def test_an_acquire_brings_the_matched_prefix_and_holds_it(store: Tiered) -> None:
    await store.put_on_disk(range(4))
    await store.put(4)
    taken = await store.take([0, 1, 2, 3, 4, 5])
    assert (taken.matched_count, taken.left_out_count, taken.cut_reason) == (5, 0, CutReason.NONE)
    assert list(taken.tiers) == [Tier.NVME] * 4 + [Tier.MEMORY, 0], "where they were found"
    assert [block.is_verified for block in store.core.stored(SMALL.id).values()] == [True] * 5
    store.core._evict(1 << 30)
    assert store.rig.states(range(5)) == [BlockState.HIT] * 5, "a leased block was evicted"
    assert taken.lease_id is not None
    released = await store.service.release_leases(
        m.ReleaseLeasesRequest(owner_id=ALICE, lease_ids=(taken.lease_id,)), LOOPBACK
    )
    assert released.released == (True,)
    store.core._evict(1 << 30)
    assert store.core.block_count == 0
    assert store.rig.on_disk() >= set(hashes(*range(4)))


async def test_what_was_brought_is_not_read_again(store: Tiered) -> None:
    await store.put_on_disk(range(6))
    await store.take(range(6))
    before = store.read_count
    assert (await store.take(range(6))).matched_count == 6
    assert set((await store.lease(range(6))).block_states) == {BlockState.HIT}
    assert None not in await store.read(*range(6))
    assert store.read_count == before


async def test_callers_that_want_the_same_block_at_once_have_it_read_once(store: Tiered) -> None:
    await store.put_on_disk([0])
    before = store.read_count
    store.rig.disk.hang("read")
    callers = [
        asyncio.create_task(store.take([0])),
        asyncio.create_task(store.lease([0])),
        asyncio.create_task(store.read(0)),
    ]
    await asyncio.to_thread(store.rig.disk.wait_until_hung)
    store.rig.disk.heal()
    taken, leased, read = await asyncio.gather(*callers)
    assert (taken.matched_count, list(leased.block_states), read) == (1, [BlockState.HIT], [enveloped(0)])
    assert store.read_count == before + 1


async def test_memory_that_is_too_small_leases_what_fits_and_says_what_it_leaves_out(open_store: OpenStore) -> None:
    store = await open_store(namespaces=(LARGE,), segment_count=6)
    room_count = store.rig.slab_count * LARGE_PER_SLAB
    await store.put_on_disk(range(5), LARGE)
    await store.put_on_disk(range(5, 10), LARGE, parent=4)
    taken = await store.take(range(10), LARGE)
    fitting_count = taken.matched_count
    assert room_count // 2 < fitting_count <= room_count
    assert (taken.left_out_count, taken.cut_reason) == (10 - fitting_count, CutReason.TIER_UNAVAILABLE)
    assert (taken.lease_id is not None, store.core.lease_count) == (True, 1)
    store.core._evict(1 << 30)
    assert set(store.core.stored(LARGE.id)) == set(hashes(*range(fitting_count)))
    again = await store.take(range(fitting_count, 10), LARGE)
    assert again.matched_count <= room_count - fitting_count, "a leased block gave way"
    assert again.matched_count + again.left_out_count == 10 - fitting_count
    sent = await store.read(*range(10), namespace=LARGE)
    assert sent[:fitting_count] == [enveloped(number, LARGE) for number in range(fitting_count)]
    assert sent.count(None) >= 10 - room_count


async def test_an_acquire_that_is_cancelled_holds_nothing_and_what_it_wanted_still_comes(store: Tiered) -> None:
    await store.put_on_disk([0])
    store.rig.disk.hang("read")
    caller = asyncio.create_task(store.take([0]))
    await asyncio.to_thread(store.rig.disk.wait_until_hung)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    store.rig.disk.heal()
    await store.idle()
    assert store.rig.states([0]) == [BlockState.HIT]
    assert (store.core.lease_count, store.core.reservation_count) == (0, 0)


async def test_a_bit_that_flipped_on_the_disk_ends_the_prefix_and_is_never_served(store: Tiered) -> None:
    await store.put_on_disk(range(4))
    place = store.tier.stored(store.rig.id_of())[block_hash(2)].place
    segment_bytes = store.tier._parts.settings.slab_bytes
    store.rig.disk.flip(place // segment_bytes, 4096 + place % segment_bytes + 700, 3)
    taken = await store.take(range(4))
    assert (taken.matched_count, taken.left_out_count, taken.cut_reason) == (2, 2, CutReason.TIER_UNAVAILABLE)
    assert await store.read(*range(4)) == [enveloped(0), enveloped(1), None, enveloped(3)]
    assert list((await store.lease(range(4))).block_states).count(BlockState.MISS) == 1
    assert list((await store.look(range(4))).block_states)[2] == BlockState.MISS
    stats = await store.stats()
    assert stats.nvme is not None
    assert stats.nvme.corrupt_count == 1


async def test_what_the_disk_does_not_give_back_is_a_miss_on_every_path(store: Tiered) -> None:
    for number in range(0, 9, 3):
        await store.put_on_disk(range(number, number + 3))
    await store.put(20)
    store.rig.disk.fail("read", errno.EIO)
    assert await store.read(0, 20) == [None, enveloped(20)]
    assert list((await store.lease([3, 20])).block_states) == [BlockState.MISS, BlockState.HIT]
    taken = await store.take([20, 6])
    assert (taken.matched_count, taken.left_out_count, taken.cut_reason) == (1, 1, CutReason.TIER_UNAVAILABLE)


# --- never slower than recomputing


async def test_what_comes_later_than_it_could_be_recomputed_is_left_out_and_says_so(store: Tiered) -> None:
    await store.put_on_disk(range(2, 6))
    await store.put(0, 1)
    numbers = range(6)
    for found in (
        await store.look(numbers, recompute_s_per_block=AT_ONCE_S),
        await store.take(numbers, recompute_s_per_block=AT_ONCE_S),
    ):
        assert (found.matched_count, found.left_out_count, found.cut_reason) == (2, 4, CutReason.TOO_SLOW)
        assert list(found.block_states) == [BlockState.HIT] * 6, "what is left out is a hit all the same"
        assert list(found.tiers) == [Tier.MEMORY] * 2 + [Tier.NVME] * 4
    assert store.promoted_count == 0, "a block that was left out was brought"


async def test_what_is_in_memory_is_never_too_slow(store: Tiered) -> None:
    await store.put(*range(6))
    found = await store.look(range(6), recompute_s_per_block=AT_ONCE_S)
    assert (found.matched_count, found.left_out_count, found.cut_reason) == (6, 0, CutReason.NONE)


@pytest.mark.parametrize("recompute_s", [0.0, NOT_LEARNT_S, m.RECOMPUTE_S_MAX])
async def test_nothing_is_left_out_for_who_does_not_say_or_computes_slowly(store: Tiered, recompute_s: float) -> None:
    await store.put_on_disk(range(6))
    for found in (
        await store.look(range(6), recompute_s_per_block=recompute_s),
        await store.take(range(6), recompute_s_per_block=recompute_s),
    ):
        assert (found.matched_count, found.left_out_count, found.cut_reason) == (6, 0, CutReason.NONE)


async def test_the_cost_is_what_reads_were_measured_to_take(store: Tiered) -> None:
    await store.put_on_disk(range(20))
    recompute_s = 5e-3
    assert (await store.look(range(5), recompute_s_per_block=recompute_s)).matched_count == 5
    store.rig.disk.slow_down(latency_s=0.2)
    for number in range(10, 16):
        await store.read(number)
    found = await store.look(range(5), recompute_s_per_block=recompute_s)
    assert (found.matched_count, found.left_out_count, found.cut_reason) == (0, 5, CutReason.TOO_SLOW)
    assert (await store.look(range(5), recompute_s_per_block=30.0)).matched_count == 5
    assert store.tier.figures().read_latency_s > 5 * recompute_s


@pytest.mark.parametrize("recompute_s", [-1e-6, float("nan"), float("inf"), 60.001])
async def test_a_recompute_cost_that_cannot_be_is_refused_with_its_name_before_anything_else(
    store: Tiered, recompute_s: float
) -> None:
    await store.reserve(0)
    for ask in (store.look, store.take):
        with pytest.raises(InvalidArgumentError, match=r"recompute_us_per_block is .*; allowed: 0 to 6e\+07"):
            await asyncio.wait_for(ask([0], wait_s=60.0, recompute_s_per_block=recompute_s), 20.0)


# --- a disk that rests


async def test_a_disk_that_rests_is_no_hit_and_the_answer_says_how_much_is_on_it(store: Tiered) -> None:
    await store.put_on_disk([*range(2, 6), *range(20, 23)])
    await store.put(0, 1)
    store.rig.disk.fail("read", errno.EIO)
    assert await store.read(20, 21, 22) == [None] * 3
    store.rig.disk.heal()
    before = store.read_count
    for found in (await store.look(range(7)), await store.take(range(7))):
        assert list(found.block_states) == [BlockState.HIT] * 2 + [BlockState.MISS] * 5
        assert list(found.tiers) == [Tier.MEMORY] * 2 + [0] * 5
        assert (found.matched_count, found.left_out_count, found.cut_reason) == (2, 4, CutReason.TIER_UNAVAILABLE)
    behind_a_miss = await store.look([9, 2, 3])
    assert (behind_a_miss.left_out_count, behind_a_miss.cut_reason) == (0, CutReason.NONE)
    assert await store.read(0, 2) == [enveloped(0), None]
    assert list((await store.lease([0, 2])).block_states) == [BlockState.HIT, BlockState.MISS]
    assert await store.prefetch(range(6)) == (2, 0, 0, 4)
    assert store.read_count == before
    stats = await store.stats()
    assert stats.nvme is not None
    assert stats.nvme.state is NvmeState.DEGRADED
    assert stats.nvme.reason.startswith("eio_read: ")

    store.health_s += 3600.0
    assert (await store.take(range(6))).matched_count == 6, "it was not tried again"
    stats = await store.stats()
    assert stats.nvme is not None
    assert (stats.nvme.state, stats.nvme.reason) == (NvmeState.OK, "")


async def test_a_disk_that_hangs_costs_the_load_timeout_once_and_nothing_more_while_it_rests(
    open_store: OpenStore,
) -> None:
    store = await open_store(load_timeout_s=0.05)
    await store.put_on_disk(range(4))
    store.rig.disk.hang("read")
    taken = await asyncio.wait_for(store.take(range(4)), 20.0)
    assert (taken.matched_count, taken.left_out_count, taken.cut_reason) == (0, 4, CutReason.TIER_UNAVAILABLE)
    before = store.read_count
    found = await store.look(range(4))
    # Blocks that are still on their way into memory are pending; nobody waits for them who does not say so.
    assert (found.matched_count, found.left_out_count) == (0, 4)
    assert (await asyncio.wait_for(store.read(*range(4)), 20.0)) == [None] * 4
    assert store.read_count == before
    store.rig.disk.heal()
    await store.idle()
    assert store.rig.states(range(4)) == [BlockState.HIT] * 4, "what came late was thrown away"


# --- prefetch


async def test_a_prefetch_brings_blocks_within_its_budget_head_first_and_counts_all(store: Tiered) -> None:
    await store.put_on_disk(range(2, 8))
    await store.put(0, 1)
    assert await store.prefetch([*range(8), 99], budget_bytes=4 * SLOT_BYTES + 1) == (2, 4, 2, 1)
    await store.idle()
    assert list((await store.look(range(8))).tiers) == [Tier.MEMORY] * 6 + [Tier.NVME] * 2
    assert store.promoted_count == 4


async def test_a_session_that_says_when_it_is_back_finds_its_blocks_in_memory(store: Tiered) -> None:
    await store.put_on_disk(range(5))

    await tell(store, range(5), session_hash=7, turn=1, expected_return_s=60.0)
    await store.put_on_disk(range(10, 13))
    await tell(store, range(10, 13), session_hash=8, turn=1, expected_return_s=60.0)
    await tell(store, range(10, 13), session_hash=8, is_done=True)
    for now_s, promoted_count in ((0.0, 0), (20.0, 0), (35.0, 5)):
        store.health_s = now_s
        store.service.sweep()
        await store.idle()
        assert store.promoted_count == promoted_count, f"at {now_s} s"
    back = m.Hint(session_hash=7, turn=2)
    assert list((await store.look(range(5), hint=back)).tiers) == [Tier.MEMORY] * 5
    assert await store.read(*range(5)) == [enveloped(number) for number in range(5)]
    figures = store.tier.figures()
    assert (figures.prefetch_useful_count, figures.prefetch_late_count, figures.prefetch_wasted_count) == (5, 0, 0)


async def tell(store: Tiered, numbers: Iterable[int], **hint: Any) -> None:
    request = m.HintBlocksRequest(namespace_id=SMALL.id, block_hashes=packed(*numbers), hint=m.Hint(**hint))
    await store.service.hint_blocks(request, LOOPBACK)


async def test_sessions_that_are_expected_in_vain_get_fewer_blocks_brought_and_others_all(store: Tiered) -> None:
    for number in range(16):
        await store.put_on_disk([number])

    async def expect_all(turn: int) -> int:
        """How many prompts are brought for sixteen sessions that say that they are back at once."""
        for number in range(16):
            await tell(store, [number], session_hash=number + 1, turn=turn, expected_return_s=1.0)
        promoted_count = store.promoted_count
        store.health_s += 10.0
        store.service.sweep()
        await store.idle()
        return store.promoted_count - promoted_count

    prefetches = store.core.prefetches
    others = [BlockKey(scoped(DEFAULT_TENANT, SMALL.id), block_hash(number)) for number in range(1000, 2000)]
    prefetches.begin(others, is_expected=True)
    prefetches.leave(others)
    assert await expect_all(turn=1) == 1
    prefetches.begin(others, is_expected=True)
    prefetches.ask(others)
    assert await expect_all(turn=2) == 15, "all that are not there yet"


async def test_a_block_whose_time_is_over_is_a_hit_in_no_tier(store: Tiered) -> None:
    """Memory let it go, and the copy on the disk came back as a hit."""
    await store.put_on_disk(range(3))
    await store.put(*range(3))
    await store.put(10, 11)
    for numbers in (range(3), range(10, 12)):
        await tell(store, numbers, ttl_s=1e-6)
    store.service.sweep()
    assert (await store.look([*range(3), 10, 11])).block_states == bytes([BlockState.MISS] * 5)
    assert store.tier.figures().expired_count == 3


async def test_a_time_to_live_that_was_told_while_memory_had_a_block_holds_on_the_disk(store: Tiered) -> None:
    await store.put(*range(3))
    await tell(store, range(3), ttl_s=1e-6)
    await store.rig.demote_all()
    assert len(store.rig.on_disk()) == 3
    store.service.sweep()
    assert (await store.look(range(3))).block_states == bytes([BlockState.MISS] * 3)


async def test_stats_name_the_policies_in_force_and_what_became_of_prefetches(store: Tiered) -> None:
    await store.put_on_disk(range(4))
    await store.prefetch(range(2))
    await store.idle()
    await store.read(0)
    found = await store.stats()
    assert found.nvme is not None
    assert (found.policy, found.nvme.policy, found.nvme.admission) == ("lru", "lru", "all")
    nvme = found.nvme
    known = (nvme.prefetch_useful_count, nvme.prefetch_late_count, nvme.prefetch_wasted_count)
    assert (nvme.prefetch_started_count, known) == (2, (1, 0, 0))


async def test_what_is_on_a_disk_that_rests_is_missed_because_of_a_failure(store: Tiered) -> None:
    await store.put_on_disk([*range(4), *range(20, 23)])
    store.rig.disk.fail("read", errno.EIO)
    assert await store.read(20, 21, 22) == [None] * 3
    store.rig.disk.heal()
    await store.look(range(6))
    reuse = (await store.stats()).reuse
    assert reuse is not None
    assert (reuse.failure_count, reuse.new_count, reuse.miss_count) == (4, 2, 6)


async def test_a_second_prefetch_of_the_same_does_nothing(store: Tiered) -> None:
    await store.put_on_disk(range(5))
    assert await store.prefetch(range(5)) == (0, 5, 0, 0)
    await store.idle()
    before = store.read_count
    assert await store.prefetch(range(5)) == (5, 0, 0, 0)
    await store.idle()
    assert (store.read_count, store.promoted_count) == (before, 5)


async def test_prefetches_share_the_daemons_own_budget_until_they_have_ended(open_store: OpenStore) -> None:
    store = await open_store(prefetch_bytes_max=3 * SLOT_BYTES)
    await store.put_on_disk(range(10))
    store.rig.disk.hang("read")
    assert await store.prefetch(range(5)) == (0, 3, 2, 0)
    assert await store.prefetch(range(5, 10), budget_bytes=1 << 30) == (0, 0, 5, 0)
    store.rig.disk.heal()
    await store.idle()
    assert await store.prefetch(range(10)) == (3, 3, 4, 0)
    await store.idle()
    figures = store.tier.figures()
    assert (figures.prefetch_started_count, figures.prefetch_refused_count) == (6, 11)
    assert figures.promoted_count == 6


async def test_a_reader_waits_for_the_prefetch_that_is_under_way(store: Tiered) -> None:
    await store.put_on_disk([0])
    before = store.read_count
    store.rig.disk.hang("read")
    assert await store.prefetch([0]) == (0, 1, 0, 0)
    await asyncio.to_thread(store.rig.disk.wait_until_hung)
    reader = asyncio.create_task(store.take([0]))
    await asyncio.sleep(0)
    store.rig.disk.heal()
    assert (await reader).matched_count == 1
    assert store.read_count == before + 1


async def test_a_daemon_without_the_tier_prefetches_nothing_and_has_no_figures_of_it(store: Tiered) -> None:
    await store.put(0, 1)
    store.service.nvme = None
    assert await store.prefetch(range(5)) == (2, 0, 0, 3)
    assert (await store.stats()).nvme is None
    found = await store.look(range(2), recompute_s_per_block=AT_ONCE_S)
    assert (found.matched_count, found.left_out_count, found.cut_reason) == (2, 0, CutReason.NONE)


# --- the way down, figures, the end


async def test_what_is_put_beyond_memory_goes_to_the_disk_by_itself_and_comes_back_whole(
    open_store: OpenStore,
) -> None:
    store = await open_store(namespaces=(LARGE,), segment_count=16)
    demoting = asyncio.create_task(store.tier.run())
    for number in range(30):
        await store.put(number, namespace=LARGE)
        await is_soon(lambda: store.core.departing_bytes == 0)
    found = await store.look(range(30), LARGE)
    assert set(found.tiers) == {Tier.MEMORY, Tier.NVME}
    assert found.matched_count == 30
    for number in range(30):
        assert await store.read(number, namespace=LARGE) == [enveloped(number, LARGE)]
    demoting.cancel()


async def test_a_namespace_that_is_opened_while_serving_has_the_disk_too(store: Tiered) -> None:
    payload_bytes = MIDDLE.block_layout.payload_bytes
    await store.service.open_namespace(m.OpenNamespaceRequest(namespace=MIDDLE, payload_bytes=payload_bytes), LOOPBACK)
    await store.put_on_disk(range(3), MIDDLE)
    assert await store.read(*range(3), namespace=MIDDLE) == [enveloped(number, MIDDLE) for number in range(3)]


async def test_the_figures_tell_what_went_down_came_up_and_was_asked_for(store: Tiered) -> None:
    await store.put_on_disk(range(4))
    await store.look(range(4))
    await store.take(range(2))
    figures = (await store.stats()).nvme
    assert figures is not None
    assert (figures.state, figures.reason) == (NvmeState.OK, "")
    assert (figures.demoted_count, figures.promoted_count, figures.hit_count) == (4, 2, 6)
    assert (figures.block_count, figures.segment_count) == (4, 1)
    assert figures.used_bytes == 4 * SLOT_BYTES < SLAB_BYTES < figures.capacity_bytes
    assert figures.read_bytes == 2 * SLOT_BYTES
    assert figures.written_bytes >= 4 * enveloped_bytes(SMALL)
    assert (figures.evicted_count, figures.dropped_count, figures.corrupt_count, figures.undemoted_count) == (0,) * 4


async def test_a_draining_daemon_refuses_puts_and_serves_the_disk_to_the_end(store: Tiered) -> None:
    await store.put_on_disk(range(6))
    store.core.is_draining = True
    request = m.ReserveBlocksRequest(namespace_id=SMALL.id, owner_id=ALICE, block_hashes=packed(9), reservation_s=30.0)
    assert list((await store.service.reserve_blocks(request, LOOPBACK)).reserve_states) == [ReserveState.DRAINING]
    assert (await store.take(range(2))).matched_count == 2
    assert set((await store.lease(range(2, 4))).block_states) == {BlockState.HIT}
    assert await store.read(4, 5) == [enveloped(4), enveloped(5)]
