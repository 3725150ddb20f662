"""How busy the link between device and host is, and what the agent does about it."""

from __future__ import annotations

from collections import deque
from enum import Enum, IntEnum, StrEnum
from typing import NamedTuple

from gpu_agent.core.average import Average

BUSY_ABOVE = 0.70
"""Utilisation above which the agent asks less of the link."""
FREE_BELOW = 0.60
"""Utilisation below which it stops doing so; in between, what it does stays."""
WINDOW_S = 1.0
"""Utilisation is that of the last window; and the next change waits for a whole window after the last one."""
STEP_SHARE = 0.5
"""Of what the link moves during one engine step, what one migration batch may be; the rest is for what comes back."""
_SAMPLES_PER_WINDOW = 32


class Direction(Enum):
    H2D = "h2d"
    D2H = "d2h"


class Traffic(NamedTuple):
    """Of one direction since the start, except for what is queued."""

    moved_bytes: int = 0
    busy_s: float = 0.0
    queued_bytes: int = 0
    """Submitted, and not known to have moved."""


class LinkSample(NamedTuple):
    """One moment's state of the copy stream. Copies from and to the caller's own memory are not part of it."""

    h2d: Traffic = Traffic()
    d2h: Traffic = Traffic()


class Relief(IntEnum):
    """What is done about a busy link; each includes those before it."""

    NONE = 0
    LARGER_BATCHES = 1
    LOWER_PRECISION = 2
    CALMER_EVICTION = 3


class LinkReason(StrEnum):
    UNMEASURED = "unmeasured"
    """Less than one window is known."""
    FREE = "link_free"
    BETWEEN = "between_thresholds"
    BUSY = "link_busy"
    SETTLING = "settling"
    """Something was changed within the last window, which says nothing about it yet."""
    EXHAUSTED = "link_busy_nothing_left"
    """Everything that may be done is done."""


class LinkDecision(NamedTuple):
    relief: Relief
    batch_count: int
    """Blocks per migration batch."""
    lowers_precision: bool
    is_calm: bool
    """Eviction should wait longer between its plans, and take less at a time."""
    prefetch_budget_bytes: int | None
    """What may be brought ahead per engine step, at least a block; None: not known, so no limit."""
    reason: LinkReason


class _Point(NamedTuple):
    now_s: float
    h2d_busy_s: float
    d2h_busy_s: float


class LinkController:
    """Asks less of a link that is busy, one measure after the other, and takes the measures back in reverse.

    Changes are at least a window apart. With the time as an argument, the same calls give the same decisions.
    """

    def __init__(self, *, block_bytes: int, batch_count_max: int, may_lower_precision: bool) -> None:
        assert block_bytes >= 1 <= batch_count_max, f"{batch_count_max} blocks of {block_bytes} bytes"
        self._block_bytes = block_bytes
        self._batch_count_max = batch_count_max
        self._reliefs = [one for one in Relief if may_lower_precision or one is not Relief.LOWER_PRECISION]
        self._level = 0
        self._changed_s: float | None = None
        self._reason = LinkReason.UNMEASURED
        self._points: deque[_Point] = deque()
        self._sample = LinkSample()
        self._bytes_per_s = {direction: Average() for direction in Direction}
        self._step_s = Average()

    def note_step(self, step_s: float) -> None:
        """How long an engine step took."""
        self._step_s.note(step_s)

    def note(self, sample: LinkSample, *, now_s: float) -> None:
        """The link's state now; `now_s` never falls."""
        points = self._points
        if not points:
            self._sample = sample
        elif now_s - points[-1].now_s < WINDOW_S / _SAMPLES_PER_WINDOW:
            return
        self._measure(Direction.H2D, self._sample.h2d, sample.h2d)
        self._measure(Direction.D2H, self._sample.d2h, sample.d2h)
        self._sample = sample
        points.append(_Point(now_s, sample.h2d.busy_s, sample.d2h.busy_s))
        # The newest of those that are a whole window old stays: from it on, the window is complete.
        while len(points) > 2 and points[1].now_s <= now_s - WINDOW_S:
            points.popleft()
        self._change(now_s)

    @property
    def step_s(self) -> float | None:
        """What an engine step takes; None: none was noted."""
        return self._step_s.value

    def bytes_per_s(self, direction: Direction) -> float | None:
        """While it moves something; None: it has not."""
        return self._bytes_per_s[direction].value

    @property
    def utilisation(self) -> float:
        """Share of the last window in which the link was moving something."""
        return min(1.0, sum(self._busy_shares()))

    @property
    def queue_s(self) -> float:
        """How long the link needs for what is queued."""
        return sum(
            traffic.queued_bytes / rate
            for direction, traffic in ((Direction.H2D, self._sample.h2d), (Direction.D2H, self._sample.d2h))
            if (rate := self.bytes_per_s(direction))
        )

    def decide(self) -> LinkDecision:
        relief = self._reliefs[self._level]
        return LinkDecision(
            relief=relief,
            batch_count=self._batch_count(relief),
            lowers_precision=relief >= Relief.LOWER_PRECISION and Relief.LOWER_PRECISION in self._reliefs,
            is_calm=relief is Relief.CALMER_EVICTION,
            prefetch_budget_bytes=self._prefetch_budget_bytes(),
            reason=self._reason,
        )

    def _busy_shares(self) -> tuple[float, float]:
        """Of the last window, host to device and back."""
        if len(self._points) < 2:
            return 0.0, 0.0
        first, last = self._points[0], self._points[-1]
        window_s = last.now_s - first.now_s
        return (last.h2d_busy_s - first.h2d_busy_s) / window_s, (last.d2h_busy_s - first.d2h_busy_s) / window_s

    def _measure(self, direction: Direction, before: Traffic, after: Traffic) -> None:
        moved_bytes, busy_s = after.moved_bytes - before.moved_bytes, after.busy_s - before.busy_s
        # Less than a block says more about latency than about the link.
        if moved_bytes >= self._block_bytes and busy_s > 0:
            self._bytes_per_s[direction].note(moved_bytes / busy_s)

    def _change(self, now_s: float) -> None:
        first_s = self._points[0].now_s if self._changed_s is None else self._changed_s
        if now_s - first_s < WINDOW_S:
            self._reason = LinkReason.UNMEASURED if self._changed_s is None else LinkReason.SETTLING
            return
        # A queue of a window's length is a busy link, too, also when nothing of it has moved yet.
        pressure = max(self.utilisation, min(1.0, self.queue_s / WINDOW_S))
        if pressure > BUSY_ABOVE:
            self._reason = LinkReason.BUSY
            if self._level + 1 < len(self._reliefs):
                self._level += 1
                self._changed_s = now_s
            else:
                self._reason = LinkReason.EXHAUSTED
        elif pressure < FREE_BELOW:
            self._reason = LinkReason.FREE
            if self._level:
                self._level -= 1
                self._changed_s = now_s
        else:
            self._reason = LinkReason.BETWEEN

    def _batch_count(self, relief: Relief) -> int:
        """As many blocks as fit beside a step, but at least half of the most; under pressure the most."""
        step_s, rate = self._step_s.value, self.bytes_per_s(Direction.D2H)
        if relief >= Relief.LARGER_BATCHES or step_s is None or rate is None:
            return self._batch_count_max
        beside_step = int(step_s * rate * STEP_SHARE / self._block_bytes)
        return max(-(-self._batch_count_max // 2), min(self._batch_count_max, beside_step))

    def _prefetch_budget_bytes(self) -> int | None:
        """What is left of the busy threshold after what goes out; bringing a block late instead costs no less."""
        step_s, rate = self._step_s.value, self.bytes_per_s(Direction.H2D)
        if step_s is None or rate is None:
            return None
        _, offload_share = self._busy_shares()
        return max(self._block_bytes, int((BUSY_ABOVE - offload_share) * step_s * rate))
