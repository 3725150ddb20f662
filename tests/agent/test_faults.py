"""What a daemon can do to an agent, and what the engine sees of it: right bytes or a miss, soon."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch

from gpu_agent import GpuAgent
from gpu_agent.metrics import agent_registry
from kvstore.keys import BlockHash
from kvstore.messages import BlockState
from tests.agent.conftest import MakeAgent
from tests.agent.fakes import BLOCK_BYTES, GONE, FakeStore, chain, content

HIT, MISS, CORRUPT = BlockState.HIT, BlockState.MISS, BlockState.CORRUPT


def test_with_the_daemon_gone_the_pool_serves_on_and_counts_what_it_drops(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    store.error = GONE
    agent, hashes = make_agent(10), chain(30)
    started_s = time.monotonic()
    for start in range(0, 30, 5):
        part = hashes[start : start + 5]
        assert agent.store(part, content(part), parent_hash=hashes[start - 1] if start else None) == (True,) * 5
        agent.step()
        assert agent.status().used_bytes <= 10 * BLOCK_BYTES
    assert time.monotonic() - started_s < 1.0
    assert _load_right_or_miss(agent, hashes).count(HIT) == 10
    assert agent.status().lost_count == 20
    assert agent.status().migrated_count == 0


def test_a_daemon_that_comes_back_is_used_again(make_agent: MakeAgent, store: FakeStore) -> None:
    store.error = GONE
    agent = make_agent(10, retry_pause_initial_s=0.01, retry_pause_max_s=0.02)
    agent.store(chain(10), content(chain(10)))
    assert not agent.flush(0.1)
    store.revive()
    assert agent.flush(5.0)
    assert set(store.blocks) == set(chain(10))
    assert agent.status().lost_count == 0


def test_after_an_outage_the_watermarks_hold_again_at_once(make_agent: MakeAgent, store: FakeStore) -> None:
    """What could not be offered to the daemon was not refused by it, so nothing has to cool down."""
    store.error = GONE
    agent = make_agent(10, retry_pause_initial_s=0.001, retry_pause_max_s=0.001)
    agent.store(chain(10), content(chain(10)))
    _wait_idle(agent)
    store.revive()
    time.sleep(0.002)
    agent.step()
    _wait_idle(agent)
    assert agent.status().resident_count == 7
    assert agent.snapshot().counters.migration_refused_count == 0


def test_a_hung_daemon_costs_the_engine_one_bounded_wait(make_agent: MakeAgent, store: FakeStore) -> None:
    store.hang_s = 60.0
    agent = make_agent(10, room_wait_s=0.2, close_wait_s=0.1)
    waits_s = []
    for seed in range(12):
        hashes = chain(5, seed=seed)
        started_s = time.monotonic()
        assert agent.store(hashes, content(hashes)) == (True,) * 5
        waits_s.append(time.monotonic() - started_s)
        agent.step()
    assert max(waits_s) < 0.5
    assert sum(waits_s) < 1.0  # the batch that is stuck is not waited for again by every call
    assert agent.status().lost_count > 0
    started_s = time.monotonic()
    agent.close()
    assert time.monotonic() - started_s < 1.0


def test_a_load_from_a_hung_daemon_is_a_miss_and_hits_are_still_delivered(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    agent, hashes = make_agent(8), chain(4)
    agent.store(hashes[:2], content(hashes[:2]))
    store.hang_s = 0.05
    assert _load_right_or_miss(agent, hashes) == [HIT, HIT, MISS, MISS]


def test_a_store_that_does_not_answer_is_asked_once_per_load(make_agent: MakeAgent, store: FakeStore) -> None:
    agent, hashes = make_agent(4), chain(12)
    agent.store(hashes[8:9], content(hashes[8:9]))
    store.hang_s = 0.05
    assert _load_right_or_miss(agent, hashes) == [MISS] * 8 + [HIT] + [MISS] * 3
    assert len(store.get_calls) == 1


def test_blocks_that_the_daemon_refuses_stay_resident(make_agent: MakeAgent, store: FakeStore) -> None:
    store.capacity_count = 0
    agent, hashes = make_agent(10), chain(9)
    agent.store(hashes, content(hashes))
    _wait_idle(agent)
    agent.step()
    assert agent.contains(hashes) == (True,) * 9
    assert agent.status().lost_count == 0
    assert agent.snapshot().counters.migration_refused_count > 0
    calls = len(store.put_calls)
    for _ in range(5):
        agent.step()
    _wait_idle(agent)
    assert len(store.put_calls) == calls  # refused blocks cool down


def test_under_pressure_refused_blocks_make_way_for_new_ones(make_agent: MakeAgent, store: FakeStore) -> None:
    store.capacity_count = 3
    agent, hashes = make_agent(10, room_wait_s=60.0), chain(30)
    started_s = time.monotonic()
    assert agent.store(hashes, content(hashes)) == (True,) * 30
    assert time.monotonic() - started_s < 5.0  # a store that refuses is not worth waiting for
    states = _load_right_or_miss(agent, hashes)
    assert states.count(HIT) >= 10
    assert agent.status().lost_count == 30 - states.count(HIT)


def test_blocks_that_somebody_else_is_writing_stay_until_they_are_there(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    store.is_put_pending = True
    agent, hashes = make_agent(10), chain(10)
    agent.store(hashes, content(hashes))
    assert not agent.flush(5.0)
    assert agent.contains(hashes) == (True,) * 10
    store.is_put_pending = False
    assert agent.flush(5.0)


def test_a_corrupt_block_is_no_hit_and_does_not_enter_the_pool(make_agent: MakeAgent, store: FakeStore) -> None:
    hashes = chain(3)
    for block_hash, block in zip(hashes, content(hashes), strict=True):
        store.blocks[block_hash] = block.numpy().tobytes()
    store.corrupt.add(hashes[1])
    agent = make_agent(8)
    assert _load_right_or_miss(agent, hashes) == [HIT, CORRUPT, HIT]
    assert agent.contains(hashes) == (True, False, True)


def test_blocks_that_the_daemon_lost_are_misses(make_agent: MakeAgent, store: FakeStore) -> None:
    agent, hashes = make_agent(6), chain(12)
    agent.store(hashes, content(hashes))
    _wait_idle(agent)
    store.blocks.clear()
    states = _load_right_or_miss(agent, hashes)
    assert states.count(HIT) == sum(agent.contains(hashes))
    assert MISS in states


def test_dropping_a_block_whose_lower_copy_is_known_to_be_gone_counts_as_a_loss(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    agent, hashes, others = make_agent(8), chain(4, seed=1), chain(8, seed=2)
    agent.store(hashes, content(hashes))
    assert agent.flush(5.0)
    store.blocks.clear()
    store.capacity_count = 0
    agent.step()
    agent.store(others, content(others))
    states = _load_right_or_miss(agent, [*hashes, *others])
    assert agent.status().lost_count == states.count(MISS) > 0


def test_a_staging_buffer_smaller_than_a_batch_loads_and_offloads_in_parts(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    """A staging pool that ran out in mid-batch counted unloaded blocks as loaded."""
    agent, hashes = make_agent(16, staging_capacity_bytes=3 * BLOCK_BYTES), chain(48)
    assert agent.store(hashes, content(hashes)) == (True,) * 48
    assert max(map(len, store.put_calls)) == 3
    _wait_idle(agent)
    gone = next(
        block_hash for block_hash in hashes if block_hash in store.blocks and not agent.contains([block_hash])[0]
    )
    del store.blocks[gone]
    states = _load_right_or_miss(agent, hashes)
    assert [block_hash for block_hash, state in zip(hashes, states, strict=True) if state is not HIT] == [gone]
    assert max(map(len, store.get_calls)) == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_migrator_dies_the_agent_says_so_and_serves_on_as_a_pool(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    """A background thread that died on one exception and left memory taken for ever was reported twice."""

    def bug() -> None:
        raise ZeroDivisionError("a bug")

    store.on_put = bug
    agent, hashes = make_agent(10), chain(30)
    assert agent.store(hashes, content(hashes)) == (True,) * 30
    assert agent.failure == "ZeroDivisionError: a bug"
    assert agent_registry(agent.snapshot).get_sample_value("kvstore_agent_migrator_up") == 0.0
    assert not agent.flush(1.0)
    assert _load_right_or_miss(agent, hashes).count(HIT) == 10
    agent.check_invariants()
    assert agent.status().used_bytes == 10 * BLOCK_BYTES
    assert agent.snapshot().migrating_count == 0  # no slot stayed with the dead thread


@pytest.mark.parametrize("fault", ["gone", "hung", "full", "forgetful", "pending"])
def test_nothing_leaks_and_no_byte_is_wrong_while_the_daemon_flaps(
    make_agent: MakeAgent, store: FakeStore, fault: str
) -> None:
    agent = make_agent(10, room_wait_s=0.05, retry_pause_initial_s=0.01, retry_pause_max_s=0.02, cooldown_steps=2)
    chains = [chain(8, seed=seed) for seed in range(4)]
    for round_number in range(12):
        _set_fault(store, fault, is_on=round_number % 3 == 1)
        hashes = chains[round_number % 4]
        agent.store(hashes, content(hashes))
        agent.step()
        agent.check_invariants()
        for other in chains:
            _load_right_or_miss(agent, other)
            assert agent.status().used_bytes <= 10 * BLOCK_BYTES
    _set_fault(store, fault, is_on=False)
    _wait_idle(agent)
    with agent._pool.changed:
        assert agent._pool.table.held_count == 0
        assert agent._pool.used_count == agent._pool.table.pool_count


def _set_fault(store: FakeStore, fault: str, *, is_on: bool) -> None:
    match fault:
        case "gone":
            store.error = GONE if is_on else None
        case "hung":
            store.hang_s = 0.1 if is_on else 0.0
        case "full":
            store.capacity_count = 0 if is_on else 1 << 30
        case "forgetful":
            if is_on:
                store.blocks.clear()
        case "pending":
            store.is_put_pending = is_on


def _load_right_or_miss(agent: GpuAgent, hashes: Sequence[BlockHash]) -> list[BlockState]:
    into = torch.full((len(hashes), BLOCK_BYTES), 255, dtype=torch.uint8)
    states = list(agent.load(hashes, into))
    right = content(hashes)
    for row, state in enumerate(states):
        expected = right[row] if state is HIT else torch.full_like(right[row], 255)
        assert torch.equal(into[row], expected), f"row {row}, {state.name}"
    return states


def _wait_idle(agent: GpuAgent) -> None:
    with agent._pool.changed:
        assert agent._pool.changed.wait_for(lambda: agent._migrator.is_idle, timeout=10)
