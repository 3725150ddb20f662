"""A serving loop over a pool: real blocks, real waits, and an accelerator's time that only passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from gpu_agent.bench.content import Content, block_hash
from gpu_agent.bench.pools import Pool
from gpu_agent.bench.serving import Step, Work
from kvstore.errors import CorruptBlockError, UnavailableError
from kvstore.keys import BlockHash
from kvstore.slots import SlotId

_RECOMPUTE_MAX = 3
"""Times in a row that lost blocks are computed again, before their sequence counts as impossible to start."""


@dataclass(slots=True)
class Run:
    """What a loop took."""

    wall_s: float = 0.0
    stall_s: float = 0.0
    """In which the accelerator had nothing to do, as blocks, or room for them, were not there."""
    overrun_s: float = 0.0
    """In which it had nothing to do, as this host was not through with its own part: filling and comparing."""
    token_count: int = 0
    """That were generated."""
    checked_count: int = 0
    """Comparisons of a block, byte for byte, with what was written."""
    recomputed_count: int = 0
    """Blocks that were lost."""


@dataclass(slots=True)
class _Sequence:
    blocks: list[BlockHash] = field(default_factory=list)
    """That are full."""
    slots: list[SlotId] = field(default_factory=list)
    """Theirs, while the sequence runs."""
    open_slots: list[SlotId] = field(default_factory=list)
    """Of the blocks behind those: tokens are being written there."""


class Loop:
    """Carries steps out, once, over one pool. Raises `CorruptBlockError` when a block is not what was written."""

    def __init__(
        self,
        pool: Pool,
        content: Content,
        *,
        tokens_per_block: int,
        prefill_tokens: int,
        step_s: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._pool = pool
        self._content = content
        self._tokens_per_block = tokens_per_block
        self._prefill_tokens = prefill_tokens
        self._step_s = step_s
        self._clock = clock
        self._sleep = sleep
        self._sequences: dict[str, _Sequence] = {}
        self._run = Run()

    def run(self, steps: Sequence[Step], *, progress: Callable[[float], None] = lambda _: None) -> Run:
        last_step_of = {work.sequence: step.number for step in steps for work in step.works}
        started_s = self._clock()
        for done_count, step in enumerate(steps, start=1):
            self._step(step, over=[name for name in step.ends if last_step_of[name] == step.number])
            progress(done_count / len(steps))
        self._run.wall_s = self._clock() - started_s
        return self._run

    def _step(self, step: Step, *, over: Sequence[str]) -> None:
        with self._stalled():
            self._pool.step(step.queue)
            for name in step.starts:
                self._start(name)
            opened = [pair for work in step.works for pair in self._open(work)]
        ends_s = self._clock() + self._step_s
        for name in step.starts:
            self._check(name)
        self._fill(opened)
        for work in step.works:
            self._compute(work)
        for name in step.ends:
            self._check(name)
        left_s = ends_s - self._clock()
        self._run.overrun_s += max(0.0, -left_s)
        self._sleep(max(0.0, left_s))
        with self._stalled():
            for name in step.ends:
                self._pool.stop(name)
        for name in over:
            self._pool.discard(self._sequences.pop(name).open_slots)
            self._pool.finish(name)

    def _start(self, name: str) -> None:
        sequence = self._sequences.setdefault(name, _Sequence())
        sequence.slots = self._pool.start(name, sequence.blocks)
        for _ in range(_RECOMPUTE_MAX):
            lost = sequence.blocks[len(sequence.slots) :]
            if not lost:
                return
            self._run.recomputed_count += len(lost)
            slots = self._pool.reserve(len(lost))
            self._fill(list(zip(slots, lost, strict=True)))
            self._sleep(-(-len(lost) * self._tokens_per_block // self._prefill_tokens) * self._step_s)
            sequence.slots = self._pool.seal(name, slots, sequence.blocks)
        raise UnavailableError(f"{name}: its {len(sequence.blocks)} blocks are never there all at once")

    def _open(self, work: Work) -> list[tuple[SlotId, BlockHash]]:
        """New slots for blocks that this step begins to write."""
        sequence = self._sequences[work.sequence]
        block_count = -(-(work.token_count + work.new_count) // self._tokens_per_block)
        missing_count = block_count - len(sequence.blocks) - len(sequence.open_slots)
        slots = self._pool.reserve(missing_count) if missing_count else []
        sequence.open_slots += slots
        return list(zip(slots, self._names(work.sequence, block_count)[block_count - missing_count :], strict=True))

    def _compute(self, work: Work) -> None:
        """Blocks that are full with this step are sealed, as soon as what writes them is queued."""
        sequence = self._sequences[work.sequence]
        full_count = (work.token_count + work.new_count) // self._tokens_per_block
        new_count = full_count - len(sequence.blocks)
        if new_count:
            slots, sequence.open_slots = sequence.open_slots[:new_count], sequence.open_slots[new_count:]
            sequence.blocks = self._names(work.sequence, full_count)
            sequence.slots = self._pool.seal(work.sequence, slots, sequence.blocks)
        self._run.token_count += not work.is_prefill

    def _fill(self, pairs: Sequence[tuple[SlotId, BlockHash]]) -> None:
        for slot, block in pairs:
            self._content.write(self._pool.memory, slot, block)

    def _check(self, name: str) -> None:
        sequence = self._sequences[name]
        self._run.checked_count += len(sequence.slots)
        wrong = self._content.wrong(self._pool.memory, sequence.slots, sequence.blocks)
        if wrong or len(sequence.slots) < len(sequence.blocks):
            raise CorruptBlockError(
                f"{name}: {len(wrong)} of {len(sequence.blocks)} blocks are not what was written, "
                f"{len(sequence.slots)} are there"
            )

    def _names(self, name: str, count: int) -> list[BlockHash]:
        blocks = self._sequences[name].blocks
        return [*blocks, *(block_hash(name, index) for index in range(len(blocks), count))]

    @contextmanager
    def _stalled(self) -> Iterator[None]:
        started_s = self._clock()
        yield
        self._run.stall_s += self._clock() - started_s
