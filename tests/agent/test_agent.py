from __future__ import annotations

import threading

import pytest
import torch

from gpu_agent import AgentConfig, GpuAgent
from gpu_agent.pool import SLOT_COUNT_MAX
from kvstore.errors import CapacityError, InvalidArgumentError, UnavailableError
from kvstore.messages import BlockState
from tests.agent.conftest import MakeAgent
from tests.agent.fakes import BLOCK_BYTES, NAMESPACE, FakeStore, chain, content

HIT, MISS = BlockState.HIT, BlockState.MISS


def test_what_was_stored_is_loaded_bit_for_bit(make_agent: MakeAgent) -> None:
    agent, hashes = make_agent(8), chain(4)
    assert agent.store(hashes, content(hashes)) == (True,) * 4
    into = torch.zeros((4, BLOCK_BYTES), dtype=torch.uint8)
    assert agent.load(hashes, into) == (HIT,) * 4
    assert torch.equal(into, content(hashes))


def test_tensors_of_any_dtype_and_shape_are_taken_as_bytes(make_agent: MakeAgent) -> None:
    agent, hashes = make_agent(8), chain(2)
    keys = torch.randn((2, 2, 2, 16, 32))
    agent.store(hashes, keys)
    into = torch.zeros_like(keys)
    agent.load(hashes, into)
    assert torch.equal(into, keys)


def test_rows_of_a_larger_buffer_need_not_be_contiguous_with_each_other(make_agent: MakeAgent) -> None:
    agent, hashes = make_agent(8), chain(3)
    frames = torch.zeros((3, BLOCK_BYTES + 128), dtype=torch.uint8)
    frames[:, 128:] = content(hashes)
    agent.store(hashes, frames[:, 128:])
    into = torch.zeros_like(frames)
    agent.load(hashes, into[:, 128:])
    assert torch.equal(into, frames)


def test_a_working_set_of_three_times_the_pool_goes_through_and_comes_back(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    agent, hashes = make_agent(10), chain(30)
    assert agent.store(hashes, content(hashes)) == (True,) * 30
    for _ in range(2):
        agent.step()
        assert agent.status().used_bytes <= 10 * BLOCK_BYTES
        into = torch.zeros((30, BLOCK_BYTES), dtype=torch.uint8)
        assert agent.load(hashes, into) == (HIT,) * 30
        assert torch.equal(into, content(hashes))
    status = agent.status()
    assert status.peak_bytes <= status.capacity_bytes
    assert status.migrated_count >= 20
    assert status.reloaded_count >= 20
    assert status.lost_count == 0


def test_a_pool_of_one_block_still_serves_everything(make_agent: MakeAgent) -> None:
    agent, hashes = make_agent(1), chain(5)
    assert agent.store(hashes, content(hashes)) == (True,) * 5
    into = torch.zeros((5, BLOCK_BYTES), dtype=torch.uint8)
    assert agent.load(hashes, into) == (HIT,) * 5
    assert torch.equal(into, content(hashes))


def test_blocks_that_another_process_offloaded_are_loaded_without_having_been_stored_here(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    hashes = chain(6)
    first = make_agent(8)
    first.store(hashes, content(hashes))
    assert first.flush(5.0)
    second = make_agent(8)
    into = torch.zeros((6, BLOCK_BYTES), dtype=torch.uint8)
    assert second.load(hashes, into) == (HIT,) * 6
    assert torch.equal(into, content(hashes))
    assert second.contains(hashes) == (True,) * 6
    sent = len(store.put_calls)
    others = chain(8, seed=1)
    second.store(others, content(others))
    assert second.contains(hashes) != (True,) * 6
    again = {block_hash for call in store.put_calls[sent:] for block_hash in call}
    assert not again & set(hashes), "what came from the store left with its bytes"


def test_a_miss_leaves_the_callers_rows_alone(make_agent: MakeAgent) -> None:
    agent, hashes = make_agent(8), chain(4)
    agent.store(hashes[:2], content(hashes[:2]))
    into = torch.full((4, BLOCK_BYTES), 7, dtype=torch.uint8)
    assert agent.load(hashes, into) == (HIT, HIT, MISS, MISS)
    assert torch.equal(into[:2], content(hashes[:2]))
    assert bool((into[2:] == 7).all())


def test_a_block_asked_for_twice_in_one_call_is_fetched_once_and_delivered_twice(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    hashes = chain(1)
    store.blocks[hashes[0]] = content(hashes).numpy().tobytes()
    agent = make_agent(8)
    into = torch.zeros((2, BLOCK_BYTES), dtype=torch.uint8)
    assert agent.load([hashes[0], hashes[0]], into) == (HIT, HIT)
    assert torch.equal(into, content([hashes[0], hashes[0]]))
    assert store.get_calls == [(hashes[0],)]
    assert agent.store([hashes[0], hashes[0]], into) == (True, True)
    with agent._pool.changed:
        assert agent._pool.table.parent_of(hashes[0]) is None


def test_passing_the_high_watermark_migrates_down_to_the_low_one_in_batches(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    agent = make_agent(100, high_watermark=0.85, low_watermark=0.60, batch_count_max=8)
    hashes = chain(90)
    agent.store(hashes[:85], content(hashes[:85]))
    assert agent.status().migrated_count == 0
    agent.store(hashes[85:], content(hashes[85:]), parent_hash=hashes[84])
    _wait_migrated(agent, 30)
    status = agent.status()
    assert status.resident_count == 60
    assert status.migration_batch_count == 4
    assert max(map(len, store.put_calls)) == 8


def test_batches_follow_the_chain_and_name_its_parents(make_agent: MakeAgent, store: FakeStore) -> None:
    agent, hashes = make_agent(16, batch_count_max=4), chain(16)
    agent.store(hashes, content(hashes))
    _wait_migrated(agent, 5)
    assert agent.contains(hashes[:11]) == (True,) * 11  # heads outlive tails
    expected = dict(zip(hashes, [None, *hashes], strict=False))
    assert store.parents == {block_hash: expected[block_hash] for block_hash in store.blocks}


def test_a_block_that_came_back_leaves_again_without_its_bytes(make_agent: MakeAgent, store: FakeStore) -> None:
    agent, first, second = make_agent(8), chain(6, seed=1), chain(8, seed=2)
    agent.store(first, content(first))
    assert agent.flush(5.0)
    offloaded = agent.snapshot().counters.offloaded_bytes
    for _ in range(3):
        agent.store(second, content(second))
        into = torch.zeros((6, BLOCK_BYTES), dtype=torch.uint8)
        assert agent.load(first, into) == (HIT,) * 6
        assert torch.equal(into, content(first))
    assert agent.snapshot().counters.offloaded_bytes - offloaded <= len(second) * BLOCK_BYTES
    assert agent.status().lost_count == 0


def test_a_block_whose_lower_copy_was_lost_is_sent_again(make_agent: MakeAgent, store: FakeStore) -> None:
    agent, hashes, others = make_agent(8), chain(4, seed=1), chain(8, seed=2)
    agent.store(hashes, content(hashes))
    assert agent.flush(5.0)
    store.blocks.clear()
    agent.store(others, content(others))
    into = torch.zeros((4, BLOCK_BYTES), dtype=torch.uint8)
    assert agent.load(hashes, into) == (HIT,) * 4
    assert torch.equal(into, content(hashes))


def test_hot_blocks_stay_and_cold_ones_go(make_agent: MakeAgent) -> None:
    now_s = 0.0
    agent = make_agent(20, high_watermark=0.9, low_watermark=0.6, policy="window-lfu", clock=lambda: now_s)
    hot, cold = chain(8, seed=1), chain(8, seed=2)
    agent.store(hot, content(hot))
    agent.store(cold, content(cold))
    for _ in range(5):
        agent.step()
        now_s += 2.0
        agent.touch(hot)
    now_s += 2.0
    agent.touch(cold)  # used last, and all the same colder
    now_s += 2.0
    new = chain(4, seed=3)
    agent.store(new, content(new))
    _wait_migrated(agent, 8)
    assert agent.contains(hot) == (True,) * 8


def test_flush_leaves_whole_prefixes_below_and_the_pool_as_it_was(make_agent: MakeAgent, store: FakeStore) -> None:
    agent, hashes = make_agent(40), chain(20)
    agent.store(hashes, content(hashes))
    assert agent.flush(5.0)
    assert [block_hash for call in store.put_calls for block_hash in call] == hashes
    assert agent.contains(hashes) == (True,) * 20
    assert agent.status().resident_count == 20


def test_where_a_block_finds_no_room_the_rest_of_its_chain_is_refused_too(make_agent: MakeAgent) -> None:
    """Later blocks of a chain with a hole could not be found by a prefix, and would push out those that can."""
    agent, read, new = make_agent(4), chain(3, seed=1), chain(4, seed=2)
    agent.store(read, content(read))
    with agent._pool.changed:
        slots = [slot for slot in map(agent._pool.hold, read) if slot is not None]
    assert agent.store([*read, *new][2:], content([*read, *new][2:])) == (True, True, True, False, False)
    with agent._pool.changed:
        for slot in slots:
            agent._pool.release(slot)
    assert agent.store(new, content(new)) == (True,) * 4


def test_what_goes_in_and_out_must_be_blocks(make_agent: MakeAgent) -> None:
    agent, hashes = make_agent(4), chain(2)
    with pytest.raises(InvalidArgumentError, match="blocks is"):
        agent.store(hashes, torch.zeros(BLOCK_BYTES))
    with pytest.raises(InvalidArgumentError, match="contiguous"):
        agent.load(hashes, torch.zeros((BLOCK_BYTES, 2), dtype=torch.uint8).T)
    with pytest.raises(InvalidArgumentError, match="hashes is"):
        agent.contains([b"short"])  # type: ignore[list-item]
    assert agent.store([], torch.zeros((0, BLOCK_BYTES), dtype=torch.uint8)) == ()


def test_a_cap_below_one_block_and_an_unknown_device_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="at least one block"):
        GpuAgent(NAMESPACE, FakeStore(), config=AgentConfig(vram_capacity_bytes=BLOCK_BYTES - 1))
    with pytest.raises(InvalidArgumentError, match="device is 'tpu'"):
        GpuAgent(NAMESPACE, FakeStore(), config=AgentConfig(vram_capacity_bytes=BLOCK_BYTES, device="tpu"))
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstore-agent")]


def test_a_closed_agent_says_so(make_agent: MakeAgent) -> None:
    agent, hashes = make_agent(4), chain(1)
    agent.close()
    agent.close()
    with pytest.raises(UnavailableError, match="closed"):
        agent.store(hashes, content(hashes))


def _wait_migrated(agent: GpuAgent, count: int) -> None:
    with agent._pool.changed:
        assert agent._pool.changed.wait_for(
            lambda: agent._pool.counters.migrated_count >= count and agent._migrator.is_idle, timeout=10
        )


def test_what_only_the_pool_has_when_it_closes_is_counted_as_lost(make_agent: MakeAgent, store: FakeStore) -> None:
    for is_flushed, lost_count in ((True, 0), (False, 4)):
        agent, hashes = make_agent(8), chain(4, seed=lost_count)
        agent.store(hashes, content(hashes))
        if is_flushed:
            assert agent.flush(5.0)
        agent.close()
        assert agent.snapshot().counters.lost_count == lost_count


def test_a_pool_of_more_blocks_than_the_host_has_memory_for_is_refused(make_agent: MakeAgent) -> None:
    with pytest.raises(CapacityError, match="at most"):
        make_agent(SLOT_COUNT_MAX + 1)
