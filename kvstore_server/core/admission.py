"""Which blocks may enter a tier whose writes wear it out, and how many bytes of them in a day."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import Literal, get_args

from kvstore.errors import InvalidArgumentError

AdmissionPolicy = Literal["worth", "all", "second-hit", "adaptive"]

_DAY_S = 86_400.0
_BURST_S = 3_600.0
"""What the budget gives in so long can be written at once: prompts come in waves, and a day is to last a day."""
_USE_COUNT_MIN = 2
_JUDGED_COUNT = 1024
"""Evictions by which `adaptive` judges: 2 GiB of blocks of 2 MiB, and a share of 2 % is some 20 of them."""
_READ_SHARE_LOW = 0.02
_READ_SHARE_HIGH = 0.1
"""Apart, for what was chosen is read more often than the rest: one in ten of it says little of one in fifty of all."""
_BURST_SHARE_LOW = 0.25
_BURST_SHARE_HIGH = 0.75


class Refusal(StrEnum):
    """Why a block stays out; labels of a metric, so none is ever renamed."""

    KNOWN = "known"
    """It is here already."""
    IN_PROGRESS = "in_progress"
    """It is being written."""
    WORTH_LESS = "worth_less"
    """It is worth no more than what would have to leave for it."""
    NOT_REUSED = "not_reused"
    """It has been used too seldom."""
    BUDGET = "budget"
    """What may be written by now has been written."""
    NOT_OPEN = "not_open"
    """Its namespace has no slots here: its blocks do not fit, or too many other namespaces hold some."""


class Admission:
    """Accepts blocks by how often they were used, and as long as the budget lasts. Knows neither blocks nor clock.

    `all` takes every block. So does `worth` as far as this class goes: what a block is worth beside those that would
    have to leave for it the eviction policy knows, and the tier asks that. `second-hit` takes those that were used
    twice. `adaptive` begins as `all` and acts as `second-hit` while writes come faster than the budget allows, or
    hardly any block is read before it is evicted.
    `second-hit` is chain-wise by itself: every use of a block is one of all its ancestors, so their counts are never
    lower than its own, and of every chain a leading run is accepted. The budget, and `adaptive` when it changes its
    mind, may cut a chain anywhere: callers accept the ancestors of what they hold without asking.
    """

    def __init__(self, *, policy: AdmissionPolicy, write_budget_bytes_per_day: int | None) -> None:
        """`write_budget_bytes_per_day`: None for no limit."""
        if policy not in get_args(AdmissionPolicy):
            raise InvalidArgumentError.of("policy", policy, ", ".join(get_args(AdmissionPolicy)))
        if write_budget_bytes_per_day is not None and write_budget_bytes_per_day < 1:
            raise InvalidArgumentError.of(
                "write_budget_bytes_per_day", write_budget_bytes_per_day, "1 or more, or None for no limit"
            )
        self.policy = policy
        self._budget = None if write_budget_bytes_per_day is None else _Budget(write_budget_bytes_per_day / _DAY_S)
        self._is_too_fast = False
        self._is_too_seldom_read = False
        self._was_read: deque[bool] = deque(maxlen=_JUDGED_COUNT)
        self._read_count = 0

    @property
    def is_by_worth(self) -> bool:
        """Whether a full tier takes only what is worth more than what it has."""
        return self.policy == "worth"

    @property
    def is_selective(self) -> bool:
        """Whether a block must have been used twice, as things stand."""
        if self.policy == "adaptive":
            return self._is_too_fast or self._is_too_seldom_read
        return self.policy == "second-hit"

    def refusal(self, *, use_count: int, now_s: float) -> Refusal | None:
        """Why a block may not enter; None: it may."""
        level_bytes = self._judge_pace(now_s)
        if self.is_selective and use_count < _USE_COUNT_MIN:
            return Refusal.NOT_REUSED
        return Refusal.BUDGET if level_bytes is not None and level_bytes <= 0 else None

    def charge(self, size_bytes: int, *, now_s: float) -> None:
        """Counts a write against the budget, also one that it has no room for: that is paid off before the next."""
        if self._budget is not None:
            self._judge_pace(now_s)
            self._budget.level_bytes -= size_bytes

    def refund(self, size_bytes: int) -> None:
        """Gives back what was charged and not written."""
        if self._budget is not None:
            self._budget.level_bytes += size_bytes

    def count_eviction(self, *, was_read: bool) -> None:
        """Of a block that was let in and has been evicted for others; not of one that was damaged."""
        if len(self._was_read) == _JUDGED_COUNT:
            self._read_count -= self._was_read[0]
        self._was_read.append(was_read)
        self._read_count += was_read
        if len(self._was_read) == _JUDGED_COUNT:
            limit = _READ_SHARE_HIGH if self._is_too_seldom_read else _READ_SHARE_LOW
            self._is_too_seldom_read = self._read_count < limit * _JUDGED_COUNT

    def _judge_pace(self, now_s: float) -> float | None:
        """Bytes that may be written by now; None: any number."""
        if self._budget is None:
            return None
        self._budget.refill(now_s)
        limit = _BURST_SHARE_HIGH if self._is_too_fast else _BURST_SHARE_LOW
        self._is_too_fast = self._budget.level_bytes < limit * self._budget.burst_bytes
        return self._budget.level_bytes


class _Budget:
    """A token bucket, full at first. Its level is negative while more has been written than was allowed."""

    __slots__ = ("_bytes_per_s", "_refilled_s", "burst_bytes", "level_bytes")

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._refilled_s: float | None = None
        self.burst_bytes = bytes_per_s * _BURST_S
        self.level_bytes = self.burst_bytes

    def refill(self, now_s: float) -> None:
        elapsed_s = 0.0 if self._refilled_s is None else max(now_s - self._refilled_s, 0.0)
        self._refilled_s = now_s
        self.level_bytes = min(self.level_bytes + elapsed_s * self._bytes_per_s, self.burst_bytes)
