"""Recorded requests in memory: chains as runs of numbers, and never a word of text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from kvstore.eviction.use import Finish, Request

Span = tuple[int, int]
"""A first block number and a count: so many consecutive numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request: when it came, and the blocks of its prompt, head first."""

    time_s: float
    input_tokens: int
    spans: tuple[Span, ...]
    """Of the prompt, and behind it `added_blocks` blocks of what followed: these are stored, and not looked for."""
    added_blocks: int = 0
    output_tokens: int | None = None
    session_id: int | None = None
    turn: int | None = None
    finish: Finish = Finish.UNKNOWN
    expected_return_s: float | None = None
    is_done: bool = False
    priority: int = 0
    ttl_s: float | None = None

    @property
    def block_count(self) -> int:
        return sum(count for _, count in self.spans)

    @property
    def prompt_blocks(self) -> int:
        return self.block_count - self.added_blocks

    def hint(self, *, tokens_per_block: int) -> Request:
        """What the store would be told of this request."""
        return Request(
            session_id=self.session_id,
            turn=self.turn,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            finish=self.finish,
            is_last_partial=self.prompt_blocks * tokens_per_block > self.input_tokens,
            expected_return_s=self.expected_return_s,
            is_done=self.is_done,
            priority=self.priority,
            ttl_s=self.ttl_s,
        )


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Requests in order of arrival.

    Blocks are numbered by first appearance, and a number stands for a whole prefix: it has one parent, ever.
    """

    name: str
    tokens_per_block: int
    requests: tuple[TraceRequest, ...]
    unique_blocks: int
    source: str = ""
    licence: str = ""
    ignored_fields: dict[str, int] = field(default_factory=dict)
    """Of the file that it was read from, that mean nothing to us, with the count of lines that have them."""

    @cached_property
    def _numbers(self) -> list[int]:
        """All block numbers, made once: chains are slices of it, and share its objects."""
        return list(range(self.unique_blocks))

    @cached_property
    def parents(self) -> list[int]:
        """The block before each; -1 for the first of a chain."""
        parents = list(range(-1, self.unique_blocks - 1))
        known = 0
        for request in self.requests:
            before = -1
            for first, count in request.spans:
                end = first + count
                if end > known and first >= known:
                    parents[first] = before
                known = max(known, end)
                before = end - 1
        return parents

    def chain(self, request: TraceRequest) -> list[int]:
        numbers = self._numbers
        if len(request.spans) == 1:
            first, count = request.spans[0]
            return numbers[first : first + count]
        chain: list[int] = []
        for first, count in request.spans:
            chain += numbers[first : first + count]
        return chain

    def tokens_of(self, request: TraceRequest, block_count: int) -> int:
        """Tokens in so many blocks from the head; the last block of a prompt may be partial."""
        return min(block_count * self.tokens_per_block, request.input_tokens)

    @cached_property
    def input_tokens(self) -> int:
        return sum(request.input_tokens for request in self.requests)

    @cached_property
    def block_accesses(self) -> int:
        return sum(request.block_count for request in self.requests)

    @cached_property
    def duration_s(self) -> float:
        return self.requests[-1].time_s - self.requests[0].time_s if self.requests else 0.0


class Numbering:
    """Numbers blocks by first appearance, in an order of prefixes: a block is known by its parent and its own hash."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, object], int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def spans(self, hashes: Sequence[object]) -> tuple[Span, ...]:
        """The numbers of a chain given head first."""
        numbers, parent = self._numbers, -1
        chain = []
        for one in hashes:
            parent = numbers.setdefault((parent, one), len(numbers))
            chain.append(parent)
        return tuple(as_spans(chain))


def in_order(requests: Sequence[TraceRequest], *, block_count: int) -> tuple[TraceRequest, ...]:
    """The same with blocks numbered anew, by first appearance: so many have been numbered in any other order."""
    new_numbers = np.full(block_count, -1, dtype=np.int64)
    known = 0
    renumbered = []
    for request in requests:
        chain = [number for first, count in request.spans for number in range(first, first + count)]
        old = np.array(chain, dtype=np.int64)
        is_new = new_numbers[old] < 0
        new_count = int(is_new.sum())
        new_numbers[old[is_new]] = np.arange(known, known + new_count)
        known += new_count
        renumbered.append(replace(request, spans=tuple(as_spans(new_numbers[old].tolist()))))
    return tuple(renumbered)


def as_spans(numbers: Sequence[int]) -> Iterator[Span]:
    """Consecutive numbers, together."""
    start = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield numbers[start], at - start
            start = at
