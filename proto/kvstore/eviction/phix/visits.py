"""Requests, and the groups of blocks that each used alike."""

from __future__ import annotations

from kvstore.eviction.phix.features import Past, Setting
from kvstore.eviction.use import Request

_SAME_REQUEST_S = 1.0
"""Uses without a session's name or turn that are no further apart count as one."""
_UNKNOWN = Setting(0, 0, 0)


class Visit:
    """One request: what its blocks have in common."""

    __slots__ = (
        "block_count",
        "class_of_new",
        "cohorts",
        "features",
        "gap_s",
        "growth_blocks",
        "growth_tokens",
        "input_tokens",
        "is_awaited",
        "is_placed",
        "is_sampled",
        "left_count",
        "matched_blocks",
        "now_s",
        "number",
        "reached_count",
        "request",
        "score",
        "session_id",
        "setting",
        "source",
        "told_turn",
        "turn",
    )

    def __init__(self, request: Request, *, number: int, now_s: float, block_count: int) -> None:
        self.request = request
        """Forgotten once its label is known."""
        self.session_id = request.session_id
        self.told_turn = request.turn
        self.input_tokens = request.input_tokens
        self.number = number
        self.now_s = now_s
        self.is_sampled = False
        self.is_awaited = False
        """It will be learned from when its label is known."""
        self.block_count = block_count
        """Full blocks of its chain."""
        self.left_count = 0
        """Of those that it was the last to use: how many have left, or never came."""
        self.matched_blocks = 0
        """How much of its chain had been seen before."""
        self.source: Cohort | None = None
        """Of the last block that had been seen before, what it was in; forgotten once this visit is placed."""
        self.turn = 1
        self.gap_s: float | None = None
        self.growth_blocks = 0
        self.growth_tokens: int | None = None
        self.reached_count = 0
        """Blocks of its chain that it has used or brought so far."""
        self.is_placed = False
        self.features: tuple[int, ...] = ()
        self.score = 0.0
        self.class_of_new = 0
        self.setting = _UNKNOWN
        self.cohorts: tuple[Cohort, ...] = ()

    def is_same_request(self, earlier: Visit, *, age_s: float) -> bool:
        """One request of an engine comes as several uses: a lookup, leases, puts in batches."""
        if self.session_id != earlier.session_id:
            return False
        if self.session_id is None or self.told_turn is None:
            return age_s < _SAME_REQUEST_S
        return self.told_turn == earlier.told_turn


class Cohort:
    """Blocks that one request used, with the same past: the mark of runs. Two are equal if they are the same one."""

    __slots__ = ("past", "reused_count", "slot", "visit", "waiting_count")

    def __init__(self, visit: Visit, past: Past) -> None:
        self.visit = visit
        self.past = past
        self.slot = -1  # where its numbers are; -1: nowhere, as it is empty
        self.waiting_count = 0
        """Blocks that have not been used since, here or as ghosts; those whose end is unknown are taken out."""
        self.reused_count = 0
