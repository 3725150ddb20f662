"""What lookups, loads and stores tell per block. A failure is a miss here, with its reason beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvstore.errors import KvstoreError
from kvstore.messages import BlockState, CutReason, ReserveState


class PutState(IntEnum):
    """What became of one block of a put."""

    STORED = 1
    """This put made it readable."""
    ALREADY_STORED = 2
    """It was readable before; nothing was sent."""
    PENDING = 3
    """Another writer holds it."""
    DROPPED = 4
    """Not stored, or not known to be: no room, daemon leaving, reservation ended, or `error` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupResult:
    """`matched_count` leading blocks are readable; everything is a miss where `error` kept us from asking.

    `left_out_count` hits behind them are not worth reading, `cut_reason` says why: they would be there later than
    recomputing them takes the caller, who has said how long that is.
    """

    states: tuple[BlockState, ...]
    matched_count: int
    error: KvstoreError | None = None
    left_out_count: int = 0
    cut_reason: CutReason = CutReason.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class GetResult:
    """HIT means: verified, and wholly in the caller's buffer. Buffers of other blocks hold nothing of use; that of a
    MISS is as it was, unless the block left the store, or its transfer broke, while it was on its way."""

    states: tuple[BlockState, ...]
    matched_count: int
    error: KvstoreError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PutResult:
    """`stored_count` blocks were readable when the put returned, by this put or before it.

    Where blocks were DROPPED, `refusal` is why the daemon did not admit the first of them (FULL, DRAINING,
    OVERLOADED), or `error` is what went wrong; both are None only when a reservation ended before its bytes were there.
    """

    states: tuple[PutState, ...]
    stored_count: int
    error: KvstoreError | None = None
    refusal: ReserveState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchResult:
    """Where the blocks are, or are going; the counts add up to the blocks that were asked for."""

    in_memory_count: int
    started_count: int
    """On their way into memory."""
    refused_count: int
    """Left in a slower tier: over the budget, or the daemon is fetching enough."""
    missing_count: int
    """In no tier that can be read, or `error` kept us from asking."""
    error: KvstoreError | None = None


def count_leading_hits(states: Sequence[BlockState]) -> int:
    if states.count(BlockState.HIT) == len(states):
        return len(states)
    count = 0
    for state in states:
        if state is not BlockState.HIT:
            break
        count += 1
    return count


def lookup_result(states: Sequence[BlockState], *, error: KvstoreError | None) -> LookupResult:
    return LookupResult(states=tuple(states), matched_count=count_leading_hits(states), error=error)


def get_result(states: Sequence[BlockState], *, error: KvstoreError | None) -> GetResult:
    return GetResult(states=tuple(states), matched_count=count_leading_hits(states), error=error)


def put_result(
    states: Sequence[PutState], *, error: KvstoreError | None, refusal: ReserveState | None = None
) -> PutResult:
    stored_count = sum(state in (PutState.STORED, PutState.ALREADY_STORED) for state in states)
    return PutResult(states=tuple(states), stored_count=stored_count, error=error, refusal=refusal)


def padded(states: Iterable[BlockState], block_count: int) -> list[BlockState]:
    """The states known so far, then misses."""
    known = list(states)
    return known + [BlockState.MISS] * (block_count - len(known))
