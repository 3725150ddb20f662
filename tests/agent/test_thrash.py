"""A working set a little larger than the pool: what moves, beside what somebody who knows the future would move."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import pytest

from gpu_agent import AgentConfig, GpuAgent
from gpu_agent.bench.clairvoyant import Moves, clairvoyant_moves
from gpu_agent.bench.content import Content
from gpu_agent.bench.loop import Loop
from gpu_agent.bench.pools import AgentPool
from gpu_agent.bench.serving import Step, Work
from gpu_agent.counters import Counters
from gpu_agent.device.cpu import CpuDevice
from kvstore.keys import BlockHash
from kvstore.namespace import Namespace
from kvstore_client.buffers import Buffers
from kvstore_client.results import GetResult
from tests.agent.fakes import BLOCK_BYTES, NAMESPACE, FakeStore

SLOT_COUNT = 100
BLOCKS_EACH = 11
NAMES = [f"sequence-{number}" for number in range(SLOT_COUNT * 11 // 10 // BLOCKS_EACH)]
BATCH_COUNT = 2
SLICE_STEPS = 64
"""As long as the cool-down, so that what is used up may leave."""
STEP_S = 0.02
BLOCK_S = 0.0005
TOKENS_PER_BLOCK = 1
BURST_REQUESTS = 12
QUEUE_DEPTH = 2 * BURST_REQUESTS
"""Requests that wait at most: a burst comes before the one before it is through."""


class FakeClock:
    """Steps and blocks take their time at once."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self._now_s

    def pass_s(self, time_s: float) -> None:
        with self._lock:
            self._now_s += time_s


@dataclass
class TimedStore(FakeStore):
    clock: FakeClock = field(default_factory=FakeClock)

    def get(self, namespace: Namespace, hashes: Sequence[BlockHash], into: Buffers) -> GetResult:
        self.clock.pass_s(BLOCK_S * len(hashes))
        return super().get(namespace, hashes, into)


class SteppedPool(AgentPool):
    """Behind each step all that it has started comes to its end: time is steps, and nothing is late."""

    def __init__(self, agent: GpuAgent, clock: FakeClock) -> None:
        super().__init__(agent)
        self._clock = clock

    def step(self, queue: Sequence[tuple[str, int]]) -> None:
        self._clock.pass_s(STEP_S)
        super().step(queue)
        changed = self._agent._pool.changed
        with changed:
            while len(changed._waiters) < 2:  # type: ignore[attr-defined]  # migrator and fetcher, both without work
                changed.wait(0.0001)


def steps_of(order: Sequence[str], *, depth: int) -> list[Step]:
    """Each sequence is written once, and then they take turns, `BATCH_COUNT` at a time, each for a whole slice.

    The engine knows the next `depth` requests: those that wait in its queue.
    """
    first, stagger = len(NAMES), SLICE_STEPS // BATCH_COUNT
    slices = [(first + stagger * place, name) for place, name in enumerate(order)]
    steps = []
    for number in range(slices[-1][0] + SLICE_STEPS):
        if number < first:
            starts = ends = tuple(NAMES[number : number + 1])
            works = [Work(sequence=NAMES[number], token_count=0, new_count=BLOCKS_EACH, is_prefill=True)]
        else:
            running = [(start, name) for start, name in slices if start <= number < start + SLICE_STEPS]
            starts = tuple(name for start, name in running if start == number)
            ends = tuple(name for start, name in running if start + SLICE_STEPS == number + 1)
            works = [Work(sequence=name, token_count=BLOCKS_EACH, new_count=0, is_prefill=False) for _, name in running]
        waiting = [(start, name) for start, name in slices if start > number][:depth]
        comes_at = {name: start for start, name in reversed(waiting)}
        queue = sorted(comes_at.items(), key=itemgetter(1))
        steps.append(Step(number=number, starts=starts, works=tuple(works), ends=ends, queue=tuple(queue)))
    return steps


def cyclic() -> list[str]:
    return NAMES * 10


def bursty() -> list[str]:
    """A few at a time come again and again, and then others."""
    choose = random.Random(1)
    bursts = (choose.sample(NAMES, BURST_REQUESTS // 3) * 3 for _ in range(10))
    return spaced([name for burst in bursts for name in burst])


def mixed() -> list[str]:
    """Every other one in turn, between them any."""
    choose = random.Random(2)
    return spaced([name for number in range(50) for name in (NAMES[number % len(NAMES)], choose.choice(NAMES))])


def spaced(order: list[str]) -> list[str]:
    """Without those that would run already."""
    kept: list[str] = []
    for name in order:
        if name not in kept[-BATCH_COUNT:]:
            kept.append(name)
    return kept


class Outcome(NamedTuple):
    counters: Counters
    moved_count: int
    clairvoyant: Moves
    """With the slots that the agent fills: up to its high watermark, the rest is for what comes."""


@contextmanager
def _agent(clock: FakeClock, *, policy: str) -> Iterator[GpuAgent]:
    config = AgentConfig(vram_capacity_bytes=SLOT_COUNT * BLOCK_BYTES, policy=policy, cooldown_steps=SLICE_STEPS)
    store = TimedStore(clock=clock)
    with GpuAgent(NAMESPACE, store, config=config, device=CpuDevice(), clock=clock) as agent:
        yield agent
        agent.check_invariants()


def serve_all(order: Sequence[str], *, depth: int, policy: str = "phix") -> Outcome:
    clock, steps = FakeClock(), steps_of(order, depth=depth)
    with _agent(clock, policy=policy) as agent:
        loop = Loop(
            SteppedPool(agent, clock),
            Content(block_bytes=BLOCK_BYTES),
            tokens_per_block=TOKENS_PER_BLOCK,
            prefill_tokens=1,
            step_s=0.0,
            clock=clock,
            sleep=clock.pass_s,
        )
        loop.run(steps)
        counters = agent.snapshot().counters
    moved_count = (counters.offloaded_bytes + counters.loaded_bytes) // BLOCK_BYTES
    return Outcome(
        counters,
        moved_count,
        clairvoyant_moves(steps, tokens_per_block=TOKENS_PER_BLOCK, slot_count=int(0.85 * SLOT_COUNT)),
    )


@pytest.mark.parametrize("order", [cyclic(), bursty(), mixed()], ids=["cyclic", "bursty", "mixed"])
def test_what_moves_is_little_more_than_a_clairvoyant_would_move(order: list[str]) -> None:
    outcome = serve_all(order, depth=QUEUE_DEPTH)
    assert outcome.moved_count <= 1.3 * outcome.clairvoyant.count
    assert outcome.counters.remigrated_count <= 0.01 * outcome.counters.migrated_count
    assert outcome.counters.migrated_count > SLOT_COUNT // 2
    assert outcome.counters.lost_count == 0


def test_without_hints_nothing_leaves_in_its_cool_down_and_more_moves() -> None:
    order = mixed()
    hinted, blind = serve_all(order, depth=QUEUE_DEPTH), serve_all(order, depth=0)
    assert blind.counters.remigrated_count <= 0.01 * blind.counters.migrated_count
    assert blind.moved_count > hinted.moved_count
