"""What a benchmark is asked to do, and what it tells meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[float], None]
"""Told the share of the work that is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    address: str | None
    """A running daemon; None: one of our own."""
    transport: str
    block_count: int
    """Blocks in one call."""
    block_bytes: int
    round_count: int
    """Samples of each kind."""
