"""For whom blocks are used: what a caller may tell, and what is remembered of it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Finish(StrEnum):
    """Why an answer ended."""

    TOOL_USE = "tool_use"
    END_TURN = "end_turn"
    OTHER = "other"
    UNKNOWN = "unknown"


PRIORITY_MAX = 2
"""Priorities go from its negative to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is known of the request for which blocks are used: hints, all optional.

    They are never trusted for safety, only for the order in which blocks leave.
    """

    session_id: int | None = None
    """Salted hash of the caller's name for its session."""
    turn: int | None = None
    """1: the first."""
    input_tokens: int | None = None
    output_tokens: int | None = None
    finish: Finish = Finish.UNKNOWN
    """Known only when the answer has ended."""
    is_last_partial: bool = False
    """The last block of the chain is not full: in traces only, as the store keeps full blocks."""
    expected_return_s: float | None = None
    """The client expects to come back in so many seconds."""
    is_done: bool = False
    """The session is over."""
    priority: int = 0
    """From -2 to 2; higher stays longer."""
    ttl_s: float | None = None
    """After so long without use the blocks are not worth keeping."""


NO_HINT = Request()


class Use:
    """One use of a chain, made by `Evictor.begin`; later ones have higher numbers.

    `mark` is the policy's own: what it derived from the request, and `maker` tells who made it. `below` is the
    same use as the tier below made it, for blocks that go down one day. `chain_blocks` and `matched_blocks` say how
    long the request's chain is and how much of it was here.
    """

    __slots__ = ("below", "chain_blocks", "maker", "mark", "matched_blocks", "now_s", "number", "request")

    def __init__(
        self,
        number: int,
        request: Request,
        *,
        now_s: float,
        chain_blocks: int,
        matched_blocks: int,
        mark: Any = None,  # of whatever type the policy likes
        maker: object = None,
        below: Use | None = None,
    ) -> None:
        self.number = number
        self.request = request
        self.now_s = now_s
        self.chain_blocks = chain_blocks
        self.matched_blocks = matched_blocks
        self.mark = mark
        self.maker = maker
        self.below = below
