"""Both halves of every race between the engine, the copy stream and the daemon, on a slow copy stream."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from gpu_agent import GpuAgent
from gpu_agent.device.base import Event
from gpu_agent.device.cpu import CpuDevice
from kvstore.errors import CapacityError, InternalError
from kvstore.keys import BlockHash
from kvstore.messages import BlockState
from tests.agent.conftest import MakeAgent
from tests.agent.fakes import BLOCK_BYTES, GONE, NAMESPACE, FakeArena, FakeStore, chain, content

SLOW_LINK_BYTES_PER_S = BLOCK_BYTES / 0.0005


class _StreamOrderedDevice(CpuDevice):
    """Returns before the copy has retired: right for a caller whose tensor is on the device and who goes on in
    stream order, as on a GPU; wrong, and to be caught, for one who looks from the host.
    """

    def wait_idle(self) -> None:
        nothing = torch.empty((0, 1), dtype=torch.uint8)
        self.copy_rows(source=nothing, source_rows=[], target=nothing, target_rows=[]).wait()

    def copy_rows_for_caller(  # type: ignore[override]
        self, *, source: Tensor, source_rows: Sequence[int], target: Tensor, target_rows: Sequence[int]
    ) -> Event:
        return self.copy_rows(source=source, source_rows=source_rows, target=target, target_rows=target_rows)


def _overwrite_after_store(make_agent: MakeAgent, device: CpuDevice) -> bool:
    """Whether the pool has the right bytes after the caller overwrote its tensor at once."""
    agent, hashes = make_agent(8, device=device), chain(4)
    blocks = content(hashes)
    agent.store(hashes, blocks)
    blocks.fill_(0)
    into = torch.zeros((4, BLOCK_BYTES), dtype=torch.uint8)
    agent.load(hashes, into)
    agent.flush(5.0)
    return torch.equal(into, content(hashes))


def test_the_source_may_be_overwritten_as_soon_as_store_returns(make_agent: MakeAgent) -> None:
    assert _overwrite_after_store(make_agent, CpuDevice(latency_s=0.02))


def test_a_device_that_does_not_wait_is_caught(make_agent: MakeAgent) -> None:
    assert not _overwrite_after_store(make_agent, _StreamOrderedDevice(latency_s=0.02))


@pytest.mark.parametrize("slot_count", [6, 1], ids=["through slots", "more blocks than slots"])
def test_staging_is_not_filled_again_before_it_was_read(
    make_agent: MakeAgent, store: FakeStore, slot_count: int
) -> None:
    """On a GPU nothing makes the host wait for the last copy out of staging, unless the agent does."""
    hashes = chain(12)
    for block_hash, block in zip(hashes, content(hashes), strict=True):
        store.blocks[block_hash] = block.numpy().tobytes()
    device = _StreamOrderedDevice(latency_s=0.005)
    agent = make_agent(slot_count, device=device, staging_capacity_bytes=2 * BLOCK_BYTES)
    into = torch.zeros((12, BLOCK_BYTES), dtype=torch.uint8)
    assert agent.load(hashes, into) == (BlockState.HIT,) * 12
    device.wait_idle()
    assert torch.equal(into, content(hashes))


def test_blocks_that_find_no_slot_reach_the_caller_past_the_pool(make_agent: MakeAgent, store: FakeStore) -> None:
    held, hashes = chain(4, seed=1), chain(6, seed=2)
    for block_hash, block in zip(hashes, content(hashes), strict=True):
        store.blocks[block_hash] = block.numpy().tobytes()
    device = _StreamOrderedDevice(latency_s=0.005)
    agent = make_agent(4, device=device, room_wait_s=0.01)
    blocks = content(held)
    agent.store(held, blocks)
    device.wait_idle()
    slots = [slot for slot in agent.hold(held) if slot is not None]
    into = torch.zeros((6, BLOCK_BYTES), dtype=torch.uint8)
    assert agent.load(hashes, into) == (BlockState.HIT,) * 6
    device.wait_idle()
    assert torch.equal(into, content(hashes))
    agent.unhold(slots)


def test_the_target_is_complete_when_load_returns(make_agent: MakeAgent, store: FakeStore) -> None:
    hashes = chain(6)
    for block_hash, block in zip(hashes, content(hashes), strict=True):
        store.blocks[block_hash] = block.numpy().tobytes()
    agent = make_agent(6, device=CpuDevice(latency_s=0.02))
    for _ in range(2):  # from the store, then from the pool
        into = torch.zeros((6, BLOCK_BYTES), dtype=torch.uint8)
        assert agent.load(hashes, into) == (BlockState.HIT,) * 6
        assert torch.equal(into, content(hashes))


def test_a_slot_is_not_reused_while_its_block_is_being_uploaded(make_agent: MakeAgent, store: FakeStore) -> None:
    """Preemption that freed blocks while an async store read them poisoned keys."""
    store.put_latency_s = 0.005
    agent = make_agent(8, device=CpuDevice(link_bytes_per_s=SLOW_LINK_BYTES_PER_S), batch_count_max=4)
    for seed in range(12):
        hashes = chain(6, seed=seed)
        blocks = content(hashes)
        agent.store(hashes, blocks)
        blocks.fill_(seed)
    assert len(store.blocks) > 40
    _check_store(store)


def test_a_block_under_way_to_the_daemon_can_be_read_until_its_slot_is_gone(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    agent, hashes = make_agent(8), chain(8)
    put_began, put_may_end = threading.Event(), threading.Event()

    def on_put() -> None:
        put_began.set()
        put_may_end.wait(10)

    store.on_put = on_put
    agent.store(hashes, content(hashes))
    assert put_began.wait(10)
    into = torch.zeros((8, BLOCK_BYTES), dtype=torch.uint8)
    assert agent.load(hashes, into) == (BlockState.HIT,) * 8
    assert torch.equal(into, content(hashes))
    assert store.get_calls == []
    put_may_end.set()


def test_threads_that_store_load_and_step_at_once_never_see_a_wrong_byte(
    make_agent: MakeAgent, store: FakeStore
) -> None:
    """Wrong only under concurrency was reported more than once."""
    agent = make_agent(12, device=CpuDevice(latency_s=0.0002), batch_count_max=4, cooldown_steps=4)
    chains = [chain(9, seed=seed) for seed in range(6)]
    rights = {block_hash: row for hashes in chains for block_hash, row in zip(hashes, content(hashes), strict=True)}
    wrong: list[str] = []
    over_cap: list[int] = []

    def churn(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(40):
            hashes = chance.choice(chains)[: chance.randint(1, 9)]
            if chance.random() < 0.4:
                blocks = torch.stack([rights[block_hash] for block_hash in hashes])
                agent.store(hashes, blocks)
                blocks.fill_(seed)
            else:
                into = torch.full((len(hashes), BLOCK_BYTES), 255, dtype=torch.uint8)
                for row, state in enumerate(agent.load(hashes, into)):
                    expected = rights[hashes[row]] if state is BlockState.HIT else torch.full_like(into[row], 255)
                    if not torch.equal(into[row], expected):
                        wrong.append(f"{hashes[row].hex()[:8]} {state.name}")
            agent.step()
            if agent.status().used_bytes > 12 * BLOCK_BYTES:
                over_cap.append(agent.status().used_bytes)

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert over_cap == []
    _check_store(store)
    agent.check_invariants()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_direct", [False, True], ids=["staging", "registered slots"])
def test_an_engine_never_sees_a_wrong_byte_however_late_copies_and_answers_come(
    make_agent: MakeAgent, store: FakeStore, seed: int, is_direct: bool
) -> None:
    """10^4 steps in all: stores whose source is overwritten at once, loads, pins, blocks written in place."""
    chance = random.Random(seed)
    device = CpuDevice(delay=_now_and_then(random.Random(seed + 100)))
    answer = _now_and_then(random.Random(seed + 200))
    store.on_put = store.on_view = lambda: time.sleep(answer())
    if is_direct:
        store.shared = (FakeArena(),)
    agent = make_agent(
        12,
        device=device,
        batch_count_max=4,
        cooldown_steps=4,
        retry_pause_initial_s=0.001,
        staging_capacity_bytes=3 * BLOCK_BYTES,
    )
    engine = _Engine(agent, chance)
    caller_delay = _now_and_then(random.Random(seed + 300))
    for _ in range(1250):
        time.sleep(caller_delay())
        engine.act()
        if chance.random() < (0.1 if store.error else 0.005):
            store.error = None if store.error else GONE
    store.error = None
    assert engine.wrong == []
    assert engine.read_count > 500
    assert agent.flush(10.0)
    counters = agent.snapshot().counters
    assert counters.migrated_count > 0 < counters.reloaded_count
    assert (counters.direct_loaded_bytes > 0) == is_direct
    _check_store(store)


def test_such_an_engine_finds_a_device_that_does_not_wait(make_agent: MakeAgent) -> None:
    engine = _Engine(make_agent(12, device=_StreamOrderedDevice(latency_s=0.002)), random.Random(0))
    for _ in range(100):
        engine.act()
    assert engine.wrong


class _Engine:
    """Does one random thing after the other, and looks at every byte that it is given."""

    def __init__(self, agent: GpuAgent, chance: random.Random) -> None:
        self._agent = agent
        self._chance = chance
        self._chains = [chain(5, seed=seed) for seed in range(7)]
        self._rights = {
            block_hash: row for hashes in self._chains for block_hash, row in zip(hashes, content(hashes), strict=True)
        }
        self.wrong: list[str] = []
        self.read_count = 0

    def act(self) -> None:
        number = self._chance.randrange(len(self._chains))
        hashes = self._chains[number][: self._chance.randint(1, 5)]
        action = self._chance.choice((self._store, self._load, self._pin, self._write))
        action(f"sequence {number}", hashes)
        self._agent.step()

    def _store(self, _: str, hashes: list[BlockHash]) -> None:
        blocks = torch.stack([self._rights[block_hash] for block_hash in hashes])
        self._agent.store(hashes, blocks)
        blocks.fill_(255)

    def _load(self, _: str, hashes: list[BlockHash]) -> None:
        into = torch.full((len(hashes), BLOCK_BYTES), 254, dtype=torch.uint8)
        states = self._agent.load(hashes, into)
        for block_hash, state, row in zip(hashes, states, into, strict=True):
            if state is BlockState.HIT:
                self._see("all", block_hash, row)
            elif not bool((row == 254).all()):
                self.wrong.append(f"a row of {state.name} was written")
        into.fill_(253)

    def _pin(self, sequence: str, hashes: list[BlockHash]) -> None:
        agent = self._agent
        agent.bind(sequence, hashes)
        if self._chance.random() < 0.5:
            agent.hint(sequence, at=agent.step() + self._chance.randint(0, 3))
            return
        with agent.pin(sequence) as pinned:
            slots = pinned.slots
            # Of fewer layers than there are: it is preempted while the others still come.
            for layer in range(self._chance.randint(0, NAMESPACE.num_layers)):
                if not pinned.wait_layer(layer):
                    self.wrong.append("what was on its way was lost")
                for plane in NAMESPACE.block_layout.planes:
                    start = plane.offset_bytes + layer * plane.strides_bytes[0]
                    for block_hash, slot in zip(hashes, slots, strict=False):
                        found = agent.memory[slot, start : start + plane.strides_bytes[0]]
                        self._see(f"layer {layer}", block_hash, found, start=start)
        if self._chance.random() < 0.5:
            agent.unbind(sequence)

    def _write(self, _: str, hashes: list[BlockHash]) -> None:
        agent = self._agent
        slots = agent.reserve(min(2, len(hashes)))
        for slot, block_hash, parent_hash in zip(slots, hashes, (None, *hashes), strict=False):
            agent.memory[slot] = self._rights[block_hash]
            if self._chance.random() < 0.2:
                agent.discard([slot])
            else:
                agent.seal(slot, block_hash, parent_hash=parent_hash)

    def _see(self, what: str, block_hash: BlockHash, found: Tensor, *, start: int = 0) -> None:
        self.read_count += 1
        if not torch.equal(found, self._rights[block_hash][start : start + len(found)]):
            self.wrong.append(f"{what} of {block_hash.hex()[:8]}")


def _now_and_then(chance: random.Random) -> Callable[[], float]:
    """Mostly nothing, at times some fraction of a millisecond: enough for any other thread to overtake."""
    return lambda: chance.uniform(0.0, 0.0005) if chance.random() < 0.1 else 0.0


def test_a_copy_that_fails_raises_and_leaks_no_slot(make_agent: MakeAgent) -> None:
    class Broken(CpuDevice):
        is_broken = False

        def _copy(self, copy: object) -> float:
            if self.is_broken:
                raise RuntimeError("link lost")
            return super()._copy(copy)  # type: ignore[arg-type]

    device = Broken()
    agent, hashes = make_agent(8, device=device), chain(4)
    agent.store(hashes[:2], content(hashes[:2]))
    device.is_broken = True
    with pytest.raises(InternalError, match="link lost"):
        agent.store(hashes, content(hashes))
    with pytest.raises(InternalError, match="link lost"):
        agent.load(hashes[:2], torch.zeros((2, BLOCK_BYTES), dtype=torch.uint8))
    assert agent.status().used_bytes == 2 * BLOCK_BYTES
    device.is_broken = False
    assert agent.store(hashes, content(hashes)) == (True,) * 4


def test_more_memory_than_there_is_cannot_be_allocated() -> None:
    device = CpuDevice()
    with pytest.raises(CapacityError):
        device.allocate_pool(slot_count=1 << 40, block_bytes=1 << 20)
    device.close()


def _check_store(store: FakeStore) -> None:
    hashes = list(store.blocks)
    for block_hash, right in zip(hashes, content(hashes), strict=True):
        assert store.blocks[block_hash] == right.numpy().tobytes(), f"{block_hash.hex()[:8]} is poisoned"
