"""Which blocks sequences need, against a plain reckoning; pins and prefetch against a store in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_agent import GpuAgent
from gpu_agent.core.sequences import Sequences
from gpu_agent.core.table import Place
from gpu_agent.device.cpu import CpuDevice
from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore.keys import BlockHash
from tests.agent.conftest import MakeAgent
from tests.agent.fakes import BLOCK_BYTES, FakeArena, FakeStore, chain, content


def _hash(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 32)


calls = st.one_of(
    st.tuples(st.just("bind"), st.sampled_from("abc"), st.lists(st.integers(0, 9), max_size=6)),
    st.tuples(st.just("hint"), st.sampled_from("abc"), st.none() | st.integers(0, 20)),
    st.tuples(st.just("unbind"), st.sampled_from("abc"), st.none()),
)


@given(st.lists(calls, max_size=40), st.integers(-1, 20))
def test_a_block_is_due_as_long_as_some_sequence_that_has_it_is(made: list[tuple], after: int) -> None:  # type: ignore[type-arg]
    sequences = Sequences()
    chains: dict[str, list[BlockHash]] = {}
    needs: dict[str, int | None] = {}
    due: set[BlockHash] = set()
    for kind, name, argument in made:
        if kind == "bind":
            chains[name] = [_hash(number) for number in argument]
            needs.setdefault(name, None)
            change = sequences.bind(name, chains[name])
        elif name not in chains:
            continue
        elif kind == "hint":
            needs[name] = argument
            change = sequences.hint(name, argument)
        else:
            change = sequences.unbind(name)
            del chains[name], needs[name]
        assert due.isdisjoint(change.added)
        assert due.issuperset(change.removed)
        due = due.union(change.added).difference(change.removed)
        assert due == {block for other, at in needs.items() if at is not None for block in chains[other]}
        assert all(sequences.is_due(block) == (block in due) for block in map(_hash, range(10)))
    assert [need.at for need in sequences.needs()] == sorted(at for at in needs.values() if at is not None)
    needed_at = {
        block: min(at for other, at in needs.items() if at is not None and block in chains[other]) for block in due
    }
    spare = list(sequences.spare(after=after))
    assert sorted(spare) == sorted(block for block, at in needed_at.items() if at > after)
    assert [needed_at[block] for block in spare] == sorted((needed_at[block] for block in spare), reverse=True)


# --- pins


def _rows(agent: GpuAgent, slots: list[int]) -> torch.Tensor:
    return agent.memory[slots]


def _put_away(agent: GpuAgent, store: FakeStore, hashes: list[BlockHash]) -> None:
    """Stores blocks and has the daemon alone keep them."""
    store.put(agent.namespace, hashes, content(hashes).numpy())


def test_a_pinned_sequence_is_in_its_slots_wherever_its_blocks_were(make_agent: MakeAgent, store: FakeStore) -> None:
    agent, hashes = make_agent(8), chain(6)
    agent.store(hashes[:2], content(hashes[:2]))
    _put_away(agent, store, hashes[2:])
    agent.bind("s", hashes)
    with agent.pin("s") as pinned:
        assert pinned.is_complete
        assert torch.equal(_rows(agent, pinned.slots), content(hashes))
    counters = agent.snapshot().counters
    assert counters.fetched_on_demand_count == 4
    assert counters.pin_stall_count == 1


def test_pinned_blocks_stay_whatever_comes(make_agent: MakeAgent) -> None:
    agent, mine = make_agent(8, low_watermark=0.1, high_watermark=0.2), chain(4)
    agent.store(mine, content(mine))
    agent.bind("s", mine)
    with agent.pin("s") as pinned:
        for seed in range(1, 6):
            others = chain(4, seed=seed)
            agent.store(others, content(others))
            agent.step()
        assert torch.equal(_rows(agent, pinned.slots), content(mine))
        agent.check_invariants()
    assert agent.contains(mine) == (True,) * 4


def test_what_the_store_does_not_have_is_missing_and_the_leading_part_is_there(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    agent, hashes = make_agent(8), chain(5)
    _put_away(agent, store, [*hashes[:3], hashes[4]])
    agent.bind("s", hashes)
    with agent.pin("s") as pinned:
        assert not pinned.is_complete
        assert torch.equal(_rows(agent, pinned.slots), content(hashes[:3]))


def test_a_sequence_larger_than_the_pool_is_there_as_far_as_there_is_room(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    agent, hashes = make_agent(4, room_wait_s=0.05), chain(9)
    _put_away(agent, store, hashes)
    agent.bind("s", hashes)
    with agent.pin("s") as pinned:
        assert len(pinned.slots) == 4
        assert torch.equal(_rows(agent, pinned.slots), content(hashes[:4]))


def test_a_store_that_hangs_costs_a_pin_no_more_than_its_time(make_agent: MakeAgent, store: FakeStore) -> None:
    agent, hashes = make_agent(4), chain(3)
    _put_away(agent, store, hashes)
    store.hang_s = 30.0
    agent.bind("s", hashes)
    with agent.pin("s", timeout_s=0.05) as pinned:
        assert pinned.slots == []
    store.revive()


def test_a_store_that_fails_is_a_miss_and_is_asked_again_by_the_next_pin(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    agent, hashes = make_agent(4), chain(3)
    _put_away(agent, store, hashes)
    store.error = UnavailableError("gone")
    agent.bind("s", hashes)
    with agent.pin("s") as pinned:
        assert pinned.slots == []
    store.revive()
    with agent.pin("s") as pinned:
        assert pinned.is_complete


def test_unknown_sequences_and_steps_are_refused_by_name(make_agent: MakeAgent) -> None:
    agent = make_agent(4)
    for call in (lambda: agent.pin("s"), lambda: agent.hint("s", 3)):
        with pytest.raises(InvalidArgumentError, match="sequence"):
            call()
    agent.bind("s", chain(1))
    for at in (-1, 1.5, "3"):
        with pytest.raises(InvalidArgumentError, match="at"):
            agent.hint("s", at)  # type: ignore[arg-type]
    for timeout_s in (float("inf"), float("nan"), -1.0, 1e12):
        with pytest.raises(InvalidArgumentError, match="timeout_s"):
            agent.pin("s", timeout_s=timeout_s)
    for step_count in (-3, 1.5, float("nan")):
        with pytest.raises(InvalidArgumentError, match="step_count"):
            agent.step(step_count)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="sequence"):
        agent.bind(7, chain(1))  # type: ignore[arg-type]
    agent.unbind("s")
    agent.unbind("s")
    (slot,) = agent.reserve(1)
    one, two = chain(2)
    for wrong in (
        lambda: agent.discard([slot + 1]),
        lambda: agent.discard([slot, slot]),
        lambda: agent.seal_all([slot, slot], [one, two], parent_hash=None),
        lambda: agent.seal_all([slot], [one, two], parent_hash=None),
        lambda: agent.unhold([slot]),
    ):
        with pytest.raises(InvalidArgumentError, match="slot"):
            wrong()
    agent.store([one], content([one]))
    (held,) = agent.hold([one])
    assert held is not None
    with pytest.raises(InvalidArgumentError, match="slot"):
        agent.unhold([held, held])
    agent.unhold([held])
    agent.discard([slot])
    assert len(agent.reserve(10**12)) == 4


# --- prefetch


def _wait(agent: GpuAgent, is_so: Callable[[], bool]) -> None:
    """By the agent's own notifications; the deadline only ends a test that fails."""
    with agent._pool.changed:
        assert agent._pool.changed.wait_for(is_so, timeout=10.0)


def _wait_resident(agent: GpuAgent, hashes: list[BlockHash]) -> None:
    table = agent._pool.table
    _wait(agent, lambda: all(table.place_of(block_hash) is Place.RESIDENT for block_hash in hashes))


def test_what_is_hinted_is_there_before_it_is_needed(make_agent: MakeAgent, store: FakeStore) -> None:
    agent, hashes = make_agent(8), chain(5)
    _put_away(agent, store, hashes)
    agent.bind("s", hashes)
    agent.hint("s", agent.step() + 3)
    _wait_resident(agent, hashes)
    with agent.pin("s") as pinned:
        assert torch.equal(_rows(agent, pinned.slots), content(hashes))
    counters = agent.snapshot().counters
    assert (counters.prefetch_hit_count, counters.prefetch_late_count, counters.fetched_on_demand_count) == (5, 0, 0)
    assert counters.pin_stall_count == 0


def test_blocks_that_are_on_their_way_when_they_are_needed_are_waited_for_and_called_late(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    agent = make_agent(8, device=CpuDevice(latency_s=0.2))
    hashes = chain(4)
    _put_away(agent, store, hashes)
    agent.bind("s", hashes)
    agent.hint("s", 0)
    _wait(agent, lambda: agent._pool.table.pool_count == 4)
    with agent.pin("s") as pinned:
        assert torch.equal(_rows(agent, pinned.slots), content(hashes))
    counters = agent.snapshot().counters
    assert (counters.prefetch_late_count, counters.fetched_on_demand_count) == (4, 0)


def test_what_is_needed_soon_is_not_given_up_for_what_is_needed_later(make_agent: MakeAgent, store: FakeStore) -> None:
    agent, soon, later = make_agent(6, high_watermark=1.0, low_watermark=0.9), chain(4), chain(4, seed=1)
    _put_away(agent, store, [*soon, *later])
    for name, hashes, at in (("later", later, 9), ("soon", soon, 5)):
        agent.bind(name, hashes)
        agent.hint(name, at)
    _wait(agent, lambda: agent._pool.table.pool_count == 6)
    _wait_resident(agent, soon)
    with agent.pin("soon") as pinned:
        assert pinned.is_complete


def test_what_is_brought_ahead_and_never_asked_for_is_wasted(make_agent: MakeAgent, store: FakeStore) -> None:
    agent, hashes = make_agent(4, cooldown_steps=0), chain(3)
    _put_away(agent, store, hashes)
    agent.bind("s", hashes)
    agent.hint("s", 1)
    _wait_resident(agent, hashes)
    agent.hint("s", None)
    for seed in range(1, 4):
        others = chain(4, seed=seed)
        agent.store(others, content(others))
    assert agent.snapshot().counters.prefetch_wasted_count == 3


def test_calls_from_two_threads_and_the_fetcher_never_meet_in_one_block(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    agent, hashes = make_agent(8, device=CpuDevice(latency_s=0.002)), chain(6)
    _put_away(agent, store, hashes)
    agent.bind("s", hashes)
    failures: list[str] = []

    def load() -> None:
        into = torch.zeros((6, BLOCK_BYTES), dtype=torch.uint8)
        agent.load(hashes, into)
        if not torch.equal(into, content(hashes)):
            failures.append("load")

    def store_() -> None:
        if not all(agent.store(hashes, content(hashes))):
            failures.append("store")

    for round_ in range(20):
        agent.hint("s", round_)
        threads = [threading.Thread(target=target) for target in (load, store_)]
        for thread in threads:
            thread.start()
        with agent.pin("s") as pinned:
            if not torch.equal(_rows(agent, pinned.slots), content(hashes)):
                failures.append("pin")
        for thread in threads:
            thread.join()
        agent.flush(5.0)
        others = chain(8, seed=round_ + 1)
        agent.store(others, content(others))
    assert failures == []


def test_blocks_that_the_daemon_refuses_are_not_offered_again_and_again_for_what_comes_ahead(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    agent, later, soon = make_agent(8, high_watermark=1.0, low_watermark=0.9), chain(8), chain(4, seed=1)
    _put_away(agent, store, soon)
    agent.store(later, content(later))
    store.capacity_count = 0  # full: everything else is refused
    for name, hashes, at in (("later", later, 50), ("soon", soon, 5)):
        agent.bind(name, hashes)
        agent.hint(name, at)
    refused = agent._pool.counters
    _wait(agent, lambda: refused.migration_refused_count >= 4)
    with agent._pool.changed:
        is_offered_again = agent._pool.changed.wait_for(
            lambda: refused.migration_refused_count > len(later), timeout=0.3
        )
    assert not is_offered_again
    with agent.pin("later") as pinned:
        assert pinned.is_complete


# --- by layer


class _Slow:
    """A link that stops between pieces until it is let go on."""

    def __init__(self) -> None:
        self.passed_count = 0
        self._allowed = threading.Semaphore(0)

    def __call__(self) -> float:
        self._allowed.acquire()
        self.passed_count += 1
        return 0.0

    def let_pass(self, count: int) -> None:
        for _ in range(count):
            self._allowed.release()


def _layers(agent: GpuAgent, slots: list[int], layer: int) -> list[torch.Tensor]:
    """The bytes of one layer, K and V, in the pool."""
    parts = []
    for plane in agent.namespace.block_layout.planes:
        start = plane.offset_bytes + layer * plane.strides_bytes[0]
        parts.append(agent.memory[slots, start : start + plane.strides_bytes[0]])
    return parts


def test_the_first_layer_is_there_while_the_last_one_still_comes(make_agent: MakeAgent, store: FakeStore) -> None:
    link = _Slow()
    agent, hashes = make_agent(8, device=CpuDevice(delay=link), layer_group_count=2), chain(3)
    _put_away(agent, store, hashes)
    agent.bind("s", hashes)
    plane_bytes = agent.namespace.block_layout.planes[0].size_bytes
    expected = content(hashes)
    with agent.pin("s", by_layer=True) as pinned:
        assert pinned.is_complete
        slots = pinned.slots
        assert len(slots) == 3
        link.let_pass(6)  # of twelve pieces: three blocks, K and V, two layers
        assert pinned.wait_layer(0)
        k, v = _layers(agent, slots, 0)
        assert torch.equal(k, expected[:, : plane_bytes // 2])
        assert torch.equal(v, expected[:, plane_bytes : plane_bytes + plane_bytes // 2])
        assert not agent.contains(hashes)[0]
        link.let_pass(100)
        assert pinned.wait_layer(1)
        assert pinned.wait()
        assert torch.equal(agent.memory[slots], expected)


def test_a_sequence_that_is_let_go_while_its_layers_still_come_harms_nobody(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    link = _Slow()
    agent, hashes = make_agent(8, device=CpuDevice(delay=link), layer_group_count=2), chain(3)
    _put_away(agent, store, hashes)
    agent.bind("s", hashes)
    with agent.pin("s", by_layer=True):
        pass
    link.let_pass(1000)
    with agent.pin("s") as pinned:
        assert torch.equal(_rows(agent, pinned.slots), content(hashes))


def test_what_comes_by_layer_and_turns_out_to_be_rewritten_is_said_to_be_of_no_use(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    store.shared = (FakeArena(),)
    agent, hashes = make_agent(8, device=CpuDevice(), layer_group_count=2), chain(3)
    agent.load(chain(1, seed=99), torch.zeros((1, BLOCK_BYTES), dtype=torch.uint8))
    assert agent._arenas.wait_settled(10.0)
    for block_hash, block in zip(hashes, content(hashes), strict=True):
        store.blocks[block_hash] = block.numpy().tobytes()
    store.rewritten = {hashes[1]}
    agent.bind("s", hashes)
    with agent.pin("s", by_layer=True) as pinned:
        assert not pinned.wait()
    assert agent.contains(hashes) == (True, False, True)


def test_what_the_store_does_not_have_is_remembered_only_of_what_is_bound(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    agent = make_agent(8)
    for seed in range(10):
        hashes = chain(3, seed=seed)
        agent.bind("s", hashes)
        agent.hint("s", agent.step())
        _wait(agent, lambda hashes=hashes: agent._fetcher._absent >= set(hashes))  # type: ignore[misc]
    assert len(agent._fetcher._absent) == 3
    agent.unbind("s")
    assert not agent._fetcher._absent


# --- blocks being written


def test_a_reserved_slot_is_the_writers_until_it_is_sealed(make_agent: MakeAgent) -> None:
    agent, hashes = make_agent(4), chain(2)
    first, second = agent.reserve(2)
    agent.memory[first].copy_(content(hashes)[0])
    assert agent.contains(hashes) == (False, False)
    assert agent.seal(first, hashes[0], parent_hash=None)
    assert agent.contains(hashes) == (True, False)
    into = torch.zeros((1, BLOCK_BYTES), dtype=torch.uint8)
    agent.load(hashes[:1], into)
    assert torch.equal(into, content(hashes[:1]))
    assert not agent.seal(second, hashes[0], parent_hash=None)
    assert agent.status().used_bytes == BLOCK_BYTES


def test_reserved_slots_make_others_leave_and_never_more_than_there_are(make_agent: MakeAgent) -> None:
    agent, hashes = make_agent(4), chain(4)
    agent.store(hashes, content(hashes))
    slots = agent.reserve(9)
    assert len(slots) == 4
    assert agent.status().used_bytes == 4 * BLOCK_BYTES
    agent.discard(slots)
    assert agent.status().used_bytes == 0
