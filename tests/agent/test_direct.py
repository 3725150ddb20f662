"""Blocks between VRAM and the store's slots without a copy by the CPU; and through staging where that cannot be."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from structlog.testing import capture_logs

from gpu_agent import GpuAgent
from gpu_agent.arenas import ArenaRegistrar
from gpu_agent.device.cpu import CpuDevice
from kvstore.errors import InternalError
from kvstore.keys import BlockHash
from kvstore.messages import BlockState
from tests.agent.conftest import MakeAgent
from tests.agent.fakes import ARENA_SLOT_COUNT, BLOCK_BYTES, GONE, FakeArena, FakeStore, chain, content

HIT, MISS, CORRUPT = BlockState.HIT, BlockState.MISS, BlockState.CORRUPT


@pytest.fixture
def shared(store: FakeStore) -> FakeStore:
    """The store, with an arena that it shares."""
    store.shared = (FakeArena(),)
    return store


def make_direct(
    make_agent: MakeAgent, slot_count: int, *, device: CpuDevice | None = None, **settings: object
) -> GpuAgent:
    """An agent that has registered what the store shares."""
    agent = make_agent(slot_count, device=device or CpuDevice(latency_s=0.001), **settings)
    assert agent.load(chain(1, seed=99), torch.zeros((1, BLOCK_BYTES), dtype=torch.uint8)) == (MISS,)
    assert agent._arenas.wait_settled(10.0)
    return agent


def test_three_times_the_pool_goes_through_the_slots_and_comes_back(make_agent: MakeAgent, shared: FakeStore) -> None:
    agent, hashes = make_direct(make_agent, 10), chain(30)
    assert agent.store(hashes, content(hashes)) == (True,) * 30
    agent.step()
    assert _load_right_or_miss(agent, hashes) == [HIT] * 30
    counters = agent.snapshot().counters
    assert counters.direct_offloaded_bytes == counters.offloaded_bytes >= 20 * BLOCK_BYTES
    assert counters.direct_loaded_bytes == counters.loaded_bytes >= 20 * BLOCK_BYTES
    assert shared.put_calls == []
    _check_store(shared)
    agent.close()
    assert len(shared.free_slots) == ARENA_SLOT_COUNT


def test_until_an_arena_is_registered_blocks_go_through_staging(make_agent: MakeAgent, shared: FakeStore) -> None:
    may_register = threading.Event()

    class Slow(CpuDevice):
        def register_host(self, memory: memoryview, *, is_read_only: bool):  # type: ignore[no-untyped-def]  # as its base
            may_register.wait(10)
            return super().register_host(memory, is_read_only=is_read_only)

    agent, hashes = make_agent(4, device=Slow()), chain(12)
    assert agent.store(hashes, content(hashes)) == (True,) * 12
    assert _load_right_or_miss(agent, hashes) == [HIT] * 12
    assert shared.reserve_calls == shared.view_calls == []
    may_register.set()
    assert agent._arenas.wait_settled(10.0)
    assert _load_right_or_miss(agent, hashes) == [HIT] * 12
    assert shared.view_calls != []


def test_memory_that_cannot_be_registered_is_told_once_and_costs_nothing_else(
    make_agent: MakeAgent, shared: FakeStore
) -> None:
    with capture_logs() as logs:
        agent, hashes = make_direct(make_agent, 4, device=CpuDevice(registered_bytes_max=4096)), chain(12)
        for _ in range(3):
            agent.store(hashes, content(hashes))
            assert _load_right_or_miss(agent, hashes) == [HIT] * 12
    warnings = [log for log in logs if log["event"] == "arena_not_registered"]
    assert len(warnings) == 1
    assert "the limit is 4096" in warnings[0]["reason"]
    assert shared.reserve_calls == []


def test_slots_of_an_arena_that_is_not_registered_are_filled_and_read_through_staging(
    make_agent: MakeAgent, shared: FakeStore
) -> None:
    """Of several arenas some may be out of reach."""
    out_of_reach, (reached,) = FakeArena(), shared.shared
    shared.shared = (out_of_reach, reached)

    class Picky(CpuDevice):
        def register_host(self, memory: memoryview, *, is_read_only: bool):  # type: ignore[no-untyped-def]  # as its base
            if memory is out_of_reach.memory:
                raise InternalError("out of reach")
            return super().register_host(memory, is_read_only=is_read_only)

    agent, hashes = make_direct(make_agent, 4, device=Picky()), chain(12)
    assert agent.store(hashes, content(hashes)) == (True,) * 12
    assert _load_right_or_miss(agent, hashes) == [HIT] * 12
    assert shared.put_calls == []
    assert agent.snapshot().counters.direct_offloaded_bytes == 0
    assert agent.snapshot().counters.direct_loaded_bytes == 0
    _check_store(shared)


def test_what_is_mapped_read_only_is_read_directly_and_written_through_staging(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    store.shared = (FakeArena(is_read_only=True),)
    agent, hashes = make_direct(make_agent, 4), chain(12)
    assert agent.store(hashes, content(hashes)) == (True,) * 12
    assert _load_right_or_miss(agent, hashes) == [HIT] * 12
    assert store.reserve_calls == []
    assert agent.snapshot().counters.direct_loaded_bytes > 0


@pytest.mark.parametrize("held_count", [0, 8], ids=["through slots", "past the pool"])
def test_a_slot_that_was_rewritten_while_it_was_copied_is_a_miss_and_leaves_the_callers_rows_alone(
    make_agent: MakeAgent, shared: FakeStore, held_count: int
) -> None:
    """A reader that was stopped until its lease had expired must not take what replaced its block for the block."""
    hashes = chain(6)
    for block_hash, block in zip(hashes, content(hashes), strict=True):
        shared.blocks[block_hash] = block.numpy().tobytes()
    agent, others = make_direct(make_agent, 8, room_wait_s=0.01), chain(held_count, seed=1)
    agent.store(others, content(others))
    with agent._pool.changed:
        held = [slot for slot in map(agent._pool.hold, others) if slot is not None]
    shared.rewritten = {hashes[0], hashes[3]}
    assert _load_right_or_miss(agent, hashes) == [MISS, HIT, HIT, MISS, HIT, HIT]
    assert not any(agent.contains([hashes[0], hashes[3]]))
    shared.rewritten.clear()
    assert _load_right_or_miss(agent, hashes) == [HIT] * 6
    with agent._pool.changed:
        for slot in held:
            agent._pool.release(slot)
    agent.check_invariants()


def test_a_corrupt_block_in_its_slot_is_no_hit(make_agent: MakeAgent, shared: FakeStore) -> None:
    hashes = chain(3)
    for block_hash, block in zip(hashes, content(hashes), strict=True):
        shared.blocks[block_hash] = block.numpy().tobytes()
    shared.corrupt.add(hashes[1])
    agent = make_direct(make_agent, 8)
    assert _load_right_or_miss(agent, hashes) == [HIT, CORRUPT, HIT]
    assert agent.snapshot().counters.corrupt_count == 1


def test_a_store_that_fails_when_slots_are_reserved_or_committed_keeps_the_blocks_resident(
    make_agent: MakeAgent, shared: FakeStore
) -> None:
    agent, hashes = make_direct(make_agent, 10, retry_pause_initial_s=0.01, retry_pause_max_s=0.02), chain(8)
    shared.error = GONE
    agent.store(hashes, content(hashes))
    assert not agent.flush(0.1)
    shared.error = None
    shared.on_put = lambda: setattr(shared, "error", GONE)  # fails between the copy and the commit
    assert not agent.flush(0.1)
    assert len(shared.free_slots) == ARENA_SLOT_COUNT, "a reservation was left behind"
    assert agent.contains(hashes) == (True,) * 8
    shared.on_put = lambda: None
    shared.revive()
    assert agent.flush(5.0)
    assert set(shared.blocks) == set(hashes)
    _check_store(shared)


def test_blocks_that_the_store_has_or_refuses_are_not_copied_into_slots(
    make_agent: MakeAgent, shared: FakeStore
) -> None:
    agent, hashes = make_direct(make_agent, 10), chain(8)
    for block_hash, block in zip(hashes[:5], content(hashes[:5]), strict=True):
        shared.blocks[block_hash] = block.numpy().tobytes()
    agent.store(hashes, content(hashes))
    assert agent.flush(5.0)
    assert agent.snapshot().counters.direct_offloaded_bytes == 3 * BLOCK_BYTES
    _check_store(shared)


def test_slots_are_given_back_only_after_the_device_has_stopped_writing_to_them(
    make_agent: MakeAgent, shared: FakeStore
) -> None:
    """The next owner's block would be spoilt. The fake spoils what is given back, and that must not be overwritten."""
    device = CpuDevice(link_bytes_per_s=BLOCK_BYTES / 0.002)
    agent = make_direct(make_agent, 10, device=device)
    shared.on_put = lambda: setattr(shared, "error", GONE)  # the first run fails while the others are being copied
    for seed in range(4):
        agent.store(chain(2, seed=seed), content(chain(2, seed=seed)))
    assert not agent.flush(0.2)
    agent.close()
    arena = shared.shared[0]
    assert len(shared.free_slots) == ARENA_SLOT_COUNT
    used = [arena.slot(index) for index in range(ARENA_SLOT_COUNT) if any(arena.slot(index))]
    assert used
    assert all(slot == b"\xee" * BLOCK_BYTES for slot in used)


def test_a_new_mapping_replaces_the_old_one_and_the_old_one_is_let_go(make_agent: MakeAgent, shared: FakeStore) -> None:
    """A daemon that was restarted has other arenas; memory of a dead one must not stay page-locked."""
    device = CpuDevice()
    agent, hashes = make_direct(make_agent, 4, device=device), chain(12)
    agent.store(hashes, content(hashes))
    old = shared.shared[0]
    shared.shared = (FakeArena(),)
    assert _load_right_or_miss(agent, hashes) == [HIT] * 12
    assert agent._arenas.wait_settled(10.0)
    assert device.registered.size_bytes == len(old.memory)
    old.memory.release()
    direct = agent.snapshot().counters.direct_loaded_bytes
    assert _load_right_or_miss(agent, hashes) == [HIT] * 12
    assert agent.snapshot().counters.direct_loaded_bytes > direct
    agent.close()
    assert device.registered.size_bytes == 0


def test_an_arena_that_is_mapped_and_gone_before_it_was_registered_is_not_kept(shared: FakeStore) -> None:
    device = CpuDevice()
    arenas = ArenaRegistrar(device)
    arenas.follow(shared.shared)
    arenas.follow(())
    arenas.start()
    assert arenas.wait_settled(10.0)
    assert not arenas.is_direct(is_written=False)
    assert device.registered.size_bytes == 0
    arenas.close(timeout_s=10.0)
    device.close()


def _load_right_or_miss(agent: GpuAgent, hashes: Sequence[BlockHash]) -> list[BlockState]:
    into = torch.full((len(hashes), BLOCK_BYTES), 255, dtype=torch.uint8)
    states = list(agent.load(hashes, into))
    right = content(hashes)
    for row, state in enumerate(states):
        expected = right[row] if state is HIT else torch.full_like(right[row], 255)
        assert torch.equal(into[row], expected), f"row {row}, {state.name}"
    return states


def _check_store(store: FakeStore) -> None:
    hashes = list(store.blocks)
    for block_hash, right in zip(hashes, content(hashes), strict=True):
        assert store.blocks[block_hash] == right.numpy().tobytes(), f"{block_hash.hex()[:8]} is poisoned"
