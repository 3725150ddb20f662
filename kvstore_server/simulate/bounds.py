"""What no policy can beat: a cache without end, and one that knows the future. Pure."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore_server.simulate.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What a replay yields at most."""

    hit_tokens: int
    input_tokens: int
    written_blocks: int
    """Blocks that were stored, and still were when their request had ended."""

    @property
    def token_hit_rate(self) -> float:
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0


@dataclass(frozen=True, slots=True)
class _Part:
    """Blocks of one request that are used again first by the same later one, or never."""

    next_use: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Future:
    """For each request its chain in parts, head first, by ascending `next_use`: no block is used without its parent."""

    trace: Trace
    parts: tuple[tuple[_Part, ...], ...]


def infinite(trace: Trace) -> Bound:
    """A cache that never evicts: what misses is new."""
    known = hit_tokens = 0
    for request in trace.requests:
        end = max((first + count for first, count in request.spans), default=0)
        new_count = max(end - known, 0)
        known += new_count
        hit_tokens += trace.tokens_of(request, request.block_count - new_count)
    return Bound(hit_tokens=hit_tokens, input_tokens=trace.input_tokens, written_blocks=known)


def foresee(trace: Trace) -> Future:
    """When each block is used next, for `clairvoyant` at any capacity."""
    never = len(trace.requests)
    next_use = np.full(trace.unique_blocks, never, dtype=np.int64)
    last_first = [_parts_of(trace.requests[index], next_use, index) for index in range(never - 1, -1, -1)]
    return Future(trace=trace, parts=tuple(reversed(last_first)))


def clairvoyant(future: Future, *, capacity_blocks: int) -> Bound:
    """Belady's rule with bypass: of all blocks at hand those stay whose next use is nearest.

    A block is used whenever one behind it is, so those that are used last of all are tails, and no chain gets a hole.
    What is cached of blocks with the same next use is then always a run that begins where the blocks with an earlier
    one end: a count per later request is all the state that there is. Blocks that a request only adds count as used.
    """
    trace, never = future.trace, len(future.trace.requests)
    cached = [0] * never
    farthest: list[int] = []  # a heap of requests whose count is above 0, negated; may hold some twice
    used_blocks = hit_tokens = written_blocks = 0
    for index, request in enumerate(trace.requests):
        hit_blocks = cached[index]
        cached[index] = 0
        used_blocks -= hit_blocks
        hit_tokens += trace.tokens_of(request, hit_blocks)
        kept = [part for part in future.parts[index] if part.next_use < never]
        for part in kept:
            cached[part.next_use] += part.end - part.start
            used_blocks += part.end - part.start
            heapq.heappush(farthest, -part.next_use)
        while used_blocks > capacity_blocks:
            last = -farthest[0]
            count = min(cached[last], used_blocks - capacity_blocks)
            cached[last] -= count
            used_blocks -= count
            if not cached[last]:
                heapq.heappop(farthest)
        for part in kept:
            end = min(part.end, part.start + cached[part.next_use])
            written_blocks += max(end - max(part.start, hit_blocks), 0)
    return Bound(hit_tokens=hit_tokens, input_tokens=trace.input_tokens, written_blocks=written_blocks)


def _parts_of(request: TraceRequest, next_use: npt.NDArray[np.int64], index: int) -> tuple[_Part, ...]:
    """Also notes in `next_use` that this request uses its blocks."""
    spans = [slice(first, first + count) for first, count in request.spans]
    if not spans:
        return ()
    uses = np.concatenate([next_use[span] for span in spans])
    for span in spans:
        next_use[span] = index
    ends = [*(np.flatnonzero(uses[1:] != uses[:-1]) + 1).tolist(), len(uses)]
    return tuple(
        _Part(next_use, start, end)
        for next_use, start, end in zip(uses[[end - 1 for end in ends]].tolist(), [0, *ends], ends, strict=False)
    )
