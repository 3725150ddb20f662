"""Continuous batching of sessions, step by step. Pure: nothing here depends on how long anything takes."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpu_agent.bench.sessions import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How an engine shares its steps out."""

    batch_count: int
    """Most sequences in one step."""
    slice_steps: int
    """Steps after which a sequence goes to the end of the queue, if others wait."""
    prefill_tokens: int
    """Most tokens of one prompt in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one sequence does in one step: it has `token_count` tokens before, and computes `new_count` more."""

    sequence: str
    token_count: int
    new_count: int
    is_prefill: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the engine. Who starts needs all of its K and V from here on, until the step in which it ends."""

    number: int
    starts: tuple[str, ...]
    works: tuple[Work, ...]
    ends: tuple[str, ...]
    """Sequences whose slice or turn is over behind this step."""
    queue: tuple[tuple[str, int], ...]
    """Who waits behind this step, first in line first, and when it is expected to start, as the engine knows it now."""


@dataclass(slots=True)
class _State:
    session: Session
    turn_index: int = 0
    token_count: int = 0
    input_left: int = 0
    output_left: int = 0
    slice_left: int = 0

    def begin_turn(self) -> None:
        turn = self.session.turns[self.turn_index]
        self.input_left, self.output_left = turn.input_tokens, turn.output_tokens

    @property
    def is_turn_over(self) -> bool:
        return not self.input_left and not self.output_left


def serve(sessions: Sequence[Session], batching: Batching) -> Iterator[Step]:
    """All steps until all sessions are over, but for those in which nobody is there.

    Requests are taken up in the order in which they come. A step is scheduled while the one before it runs, so whoever
    starts was in the queue of the step before. The engine does not know when answers end; it expects them to take as
    long as those before, and the first in line to start at any moment.
    """
    states = {session.name: _State(session) for session in sessions}
    arrivals = [(session.turns[0].pause_steps, number, session.name) for number, session in enumerate(sessions)]
    heapq.heapify(arrivals)
    order = len(arrivals)
    running: list[str] = []
    queue: deque[str] = deque()
    startable_count = number = run_count = 0
    run_steps = float(batching.slice_steps)
    while arrivals or queue or running:
        if not running and not queue:
            number = max(number, arrivals[0][0])
        while arrivals and arrivals[0][0] <= number:
            queue.append(heapq.heappop(arrivals)[2])
        starts = [queue.popleft() for _ in range(min(startable_count, batching.batch_count - len(running)))]
        for name in starts:
            state = states[name]
            state.slice_left = batching.slice_steps
            if state.is_turn_over:
                state.begin_turn()
        running += starts
        works = tuple(_work(states[name], batching) for name in running)
        ends = []
        for name in running:
            state = states[name]
            if state.is_turn_over or (not state.slice_left and queue):
                ends.append(name)
        queue.extend(name for name in ends if not states[name].is_turn_over)
        startable_count = len(queue)
        yield Step(
            number=number,
            starts=tuple(starts),
            works=works,
            ends=tuple(ends),
            queue=tuple(
                (name, _expected_start(position, number, run_steps=run_steps, batching=batching))
                for position, name in enumerate(queue)
            ),
        )
        number += 1
        for name in ends:
            run_count += 1
            run_steps += (batching.slice_steps - states[name].slice_left - run_steps) / run_count
            running.remove(name)
            state = states[name]
            if not state.is_turn_over:
                continue
            state.turn_index += 1
            if state.turn_index < len(state.session.turns):
                pause_steps = state.session.turns[state.turn_index].pause_steps
                heapq.heappush(arrivals, (number + pause_steps, order, name))
                order += 1


def while_busy(steps: Sequence[Step]) -> list[Step]:
    """Those until nobody waits any more, once all sequences have started: behind that, sessions only run out."""
    first_of: dict[str, int] = {}
    for position, step in enumerate(steps):
        for name in step.starts:
            first_of.setdefault(name, position)
    all_started = max(first_of.values(), default=0)
    idle = (position for position in range(all_started, len(steps)) if not steps[position].queue)
    return list(steps[: next(idle, len(steps))])


def peak_count(steps: Sequence[Step], *, tokens_per_block: int) -> int:
    """Most blocks at the same time if all stay; tails that are not full go when their sequence is over."""
    last_of = {work.sequence: step.number for step in steps for work in step.works}
    full: dict[str, int] = {}
    has_tail: set[str] = set()
    peak = 0
    for step in steps:
        for work in step.works:
            full[work.sequence], tail_tokens = divmod(work.token_count + work.new_count, tokens_per_block)
            has_tail = has_tail | {work.sequence} if tail_tokens else has_tail - {work.sequence}
        peak = max(peak, sum(full.values()) + len(has_tail))
        has_tail -= {name for name in step.ends if last_of[name] == step.number}
    return peak


def _work(state: _State, batching: Batching) -> Work:
    is_prefill = state.input_left > 0
    new_count = min(state.input_left, batching.prefill_tokens) if is_prefill else 1
    work = Work(sequence=state.session.name, token_count=state.token_count, new_count=new_count, is_prefill=is_prefill)
    state.token_count += new_count
    if is_prefill:
        state.input_left -= new_count
    else:
        state.output_left -= 1
    state.slice_left = max(0, state.slice_left - 1)
    return work


def _expected_start(position: int, number: int, *, run_steps: float, batching: Batching) -> int:
    """Twice as soon as on the average one after the other of those that run stops: half of them stop sooner."""
    return number + 1 + int(position * run_steps / batching.batch_count / 2)
