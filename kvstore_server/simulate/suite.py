"""Many replays side by side: each policy at each capacity of each trace, and what they come to together."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore.eviction import POLICIES, Watermarks
from kvstore_server.simulate import bounds
from kvstore_server.simulate.capacity import Capacity
from kvstore_server.simulate.hints import with_hints
from kvstore_server.simulate.replay import replay
from kvstore_server.simulate.tiers import COOL_DOWN_REQUESTS, Keep, TierCounts, TierPlan
from kvstore_server.simulate.tokenizers import load_tokenizer
from kvstore_server.simulate.trace import Trace
from kvstore_server.simulate.traces import Reading, read_trace

_Task = TypeVar("_Task")
_Outcome = TypeVar("_Outcome")

BASE_LINE = "lru"
NO_BYPASS = ":no-bypass"
_GAP_POINTS_MIN = 1.0
"""Where the bounds are closer than this, what share of the gap is closed says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A trace, and how it is read."""

    path: Path
    tokens_per_block: int | None = None
    tokenizer: str | None = None
    block_bytes: int | None = None
    token_bytes: int | None = None
    """What a block has, or a token; None: nobody knows, and capacities are in blocks."""
    hint_accuracy: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One replay. `policy` may end in `:no-bypass`; else the lowest tier may refuse blocks, if its policy has a say."""

    source: Source
    policy: str
    tiers: tuple[tuple[str, Capacity], ...]
    """Names and sizes from the top down."""
    keep: Keep = Keep.RETAIN
    cool_down_requests: int = COOL_DOWN_REQUESTS
    watermarks: Watermarks | None = None
    """Of all tiers but the lowest, if there are several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFigures:
    name: str
    capacity: str
    capacity_blocks: int
    token_hit_rate_percent: float
    counts: TierCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one replay came to."""

    token_hit_rate_percent: float
    saved_prefill_tokens: int
    tiers: tuple[TierFigures, ...]
    elapsed_s: float

    @property
    def written_blocks(self) -> int:
        """In the lowest tier."""
        return self.tiers[-1].counts.written_blocks

    @property
    def thrash_index(self) -> float:
        """Of all tiers together."""
        evicted = sum(tier.counts.evicted_blocks for tier in self.tiers)
        return sum(tier.counts.returned_blocks for tier in self.tiers) / evicted if evicted else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """A trace, and what no policy can change."""

    name: str
    request_count: int
    block_accesses: int
    unique_blocks: int
    tokens_per_block: int
    block_bytes: int | None
    input_tokens: int
    duration_s: float
    infinite_percent: float
    infinite_written_blocks: int
    ignored_fields: dict[str, int] = field(default_factory=dict)
    """Of the file, that mean nothing to us, with the count of lines that have them."""
    clairvoyant_percent: dict[int, float] = field(default_factory=dict)
    """By capacity in blocks."""
    clairvoyant_written_blocks: dict[int, int] = field(default_factory=dict)


def read_source(source: Source) -> Trace:
    """The trace, with the hints that were asked for."""
    tokenize = None if source.tokenizer is None else load_tokenizer(source.tokenizer)
    trace = read_trace(source.path, reading=Reading(tokens_per_block=source.tokens_per_block, tokenize=tokenize))
    if source.hint_accuracy is None:
        return trace
    chances = random.Random(source.seed)
    return with_hints(
        bounds.foresee(trace), accuracy=source.hint_accuracy, chances=(chances.random() for _ in repeat(None))
    )


_read_again = lru_cache(maxsize=1)(read_source)
"""Jobs come trace by trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A trace, and the capacities at which its bounds are wanted."""

    source: Source
    capacities: tuple[Capacity, ...]


def look_at(look: Look) -> About:
    trace = _read_again(look.source)
    future = bounds.foresee(trace)
    infinite = bounds.infinite(trace)
    block_bytes = _block_bytes(look.source, trace)
    sizes = [one.in_blocks(unique_blocks=trace.unique_blocks, block_bytes=block_bytes) for one in look.capacities]
    at_best = {blocks: bounds.clairvoyant(future, capacity_blocks=blocks) for blocks in sizes}
    return About(
        name=trace.name,
        request_count=len(trace.requests),
        block_accesses=trace.block_accesses,
        unique_blocks=trace.unique_blocks,
        tokens_per_block=trace.tokens_per_block,
        block_bytes=block_bytes,
        input_tokens=trace.input_tokens,
        duration_s=trace.duration_s,
        infinite_percent=100 * infinite.token_hit_rate,
        infinite_written_blocks=infinite.written_blocks,
        ignored_fields=trace.ignored_fields,
        clairvoyant_percent={blocks: 100 * bound.token_hit_rate for blocks, bound in at_best.items()},
        clairvoyant_written_blocks={blocks: bound.written_blocks for blocks, bound in at_best.items()},
    )


def run_job(job: Job) -> Figures:
    trace = _read_again(job.source)
    policy = job.policy.removesuffix(NO_BYPASS)
    lowest = len(job.tiers) - 1
    block_bytes = _block_bytes(job.source, trace)
    plans = [
        TierPlan(
            name=name,
            capacity_blocks=capacity.in_blocks(unique_blocks=trace.unique_blocks, block_bytes=block_bytes),
            policy=policy,
            is_choosy=index == lowest and job.policy == policy,
            watermarks=job.watermarks if index < lowest or not lowest else None,
        )
        for index, (name, capacity) in enumerate(job.tiers)
    ]
    started_s = time.perf_counter()
    result = replay(trace, plans, keep=job.keep, cool_down_requests=job.cool_down_requests)
    elapsed_s = time.perf_counter() - started_s
    return Figures(
        token_hit_rate_percent=100 * result.token_hit_rate,
        saved_prefill_tokens=result.hit_tokens,
        tiers=tuple(
            TierFigures(
                name=tier.plan.name,
                capacity=capacity.text,
                capacity_blocks=tier.plan.capacity_blocks,
                token_hit_rate_percent=100 * result.share(tier.hit_tokens),
                counts=tier.counts,
            )
            for tier, (_, capacity) in zip(result.tiers, job.tiers, strict=True)
        ),
        elapsed_s=elapsed_s,
    )


def _block_bytes(source: Source, trace: Trace) -> int | None:
    if source.token_bytes is not None:
        return source.token_bytes * trace.tokens_per_block
    return source.block_bytes


def check_policies(names: Sequence[str]) -> tuple[str, ...]:
    """As they were given, each once."""
    for name in names:
        if name.removesuffix(NO_BYPASS) not in POLICIES:
            raise InvalidArgumentError.of(
                "--policy", name, f"{', '.join(POLICIES)}, each also with {NO_BYPASS} behind it"
            )
    return tuple(dict.fromkeys(names))


def run_all(
    function: Callable[[_Task], _Outcome],
    tasks: Sequence[_Task],
    *,
    process_count: int,
    on_done: Callable[[_Task], None],
) -> list[_Outcome]:
    """What a function makes of each, in their order; several processes work on them, if that is allowed."""
    if process_count == 1 or len(tasks) <= 1:
        return list(_one_by_one(function, tasks, on_done))
    outcomes: dict[int, _Outcome] = {}
    # Not by forking: who calls may have threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(process_count, len(tasks)), mp_context=context) as pool:
        waiting: dict[Future[_Outcome], int] = {pool.submit(function, task): at for at, task in enumerate(tasks)}
        try:
            while waiting:
                done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for one in done:
                    at = waiting.pop(one)
                    outcomes[at] = one.result()
                    on_done(tasks[at])
        except BrokenProcessPool as error:
            raise UnavailableError(
                "a process was killed while it replayed: is there too little memory for --jobs?"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return [outcomes[at] for at in range(len(tasks))]


def _one_by_one(
    function: Callable[[_Task], _Outcome], tasks: Sequence[_Task], on_done: Callable[[_Task], None]
) -> Iterator[_Outcome]:
    for task in tasks:
        yield function(task)
        on_done(task)


# --- what all cells of a suite come to


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A trace at a capacity: what every policy came to, and the clairvoyant bound."""

    about: About
    capacity: Capacity
    capacity_blocks: int
    figures: dict[str, Figures]

    @property
    def clairvoyant_percent(self) -> float:
        return self.about.clairvoyant_percent[self.capacity_blocks]

    def gap_closed(self, policy: str) -> float | None:
        """The share of what lies between LRU and the clairvoyant bound; None: hardly anything does."""
        base = self.figures[BASE_LINE].token_hit_rate_percent
        gap = self.clairvoyant_percent - base
        if gap < _GAP_POINTS_MIN:
            return None
        return (self.figures[policy].token_hit_rate_percent - base) / gap

    def points_over_base(self, policy: str) -> float:
        return self.figures[policy].token_hit_rate_percent - self.figures[BASE_LINE].token_hit_rate_percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A policy beside LRU over all cells. None: there is nothing to compare."""

    gap_closed: float | None
    worst_vs_lru: float
    """Points, in the cell where it is worst."""
    mean_vs_lru: float
    writes_vs_lru: float | None
    """Blocks written in all cells, over LRU's."""


def judge(cells: Sequence[Cell], policy: str) -> Verdict:
    shares = [share for cell in cells if (share := cell.gap_closed(policy)) is not None]
    points = [cell.points_over_base(policy) for cell in cells]
    written = sum(cell.figures[policy].written_blocks for cell in cells)
    written_by_lru = sum(cell.figures[BASE_LINE].written_blocks for cell in cells)
    return Verdict(
        gap_closed=fmean(shares) if shares else None,
        worst_vs_lru=min(points),
        mean_vs_lru=fmean(points),
        writes_vs_lru=written / written_by_lru if written_by_lru else None,
    )
