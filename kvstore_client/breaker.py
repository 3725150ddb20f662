"""When to stop asking a daemon that does not answer, and when to ask again."""

from __future__ import annotations

from enum import Enum


class Admission(Enum):
    CALL = "call"
    """The circuit is closed: go ahead."""
    TRIAL = "trial"
    """The cool-down has passed: go ahead, alone; the outcome decides for everybody."""
    REFUSED = "refused"
    """The circuit is open: do not call."""


class Breaker:
    """A circuit breaker. Knows nothing of calls, threads or clocks: time is an argument.

    Between two openings at least one cool-down passes, in which at most one trial is admitted. Cool-downs
    double while failures keep coming within `cooldown_max_s` of each other, successes in between or not,
    so a daemon that answers probes but hangs on data does not cost a deadline per call either. A trial
    without an outcome (its caller was interrupted) makes room for the next one after a further cool-down.
    """

    __slots__ = ("_cooldown_initial_s", "_cooldown_max_s", "_cooldown_s", "_failure_count", "_failure_count_max",
                 "_last_opened_s", "_open_until_s")  # fmt: skip

    def __init__(self, *, failure_count_max: int, cooldown_initial_s: float, cooldown_max_s: float) -> None:
        self._failure_count_max = failure_count_max
        self._cooldown_initial_s = cooldown_initial_s
        self._cooldown_max_s = cooldown_max_s
        self._failure_count = 0
        self._cooldown_s = 0.0
        self._last_opened_s: float | None = None
        self._open_until_s: float | None = None

    @property
    def is_open(self) -> bool:
        return self._open_until_s is not None

    def wait_s(self, *, now_s: float) -> float:
        """Seconds until a trial is admitted; 0 when calls are."""
        return 0.0 if self._open_until_s is None else max(0.0, self._open_until_s - now_s)

    def admit(self, *, now_s: float) -> Admission:
        if self._open_until_s is None:
            return Admission.CALL
        if now_s < self._open_until_s:
            return Admission.REFUSED
        self._open_until_s = now_s + self._cooldown_s
        return Admission.TRIAL

    def record_success(self) -> None:
        """The daemon answered, whatever it said."""
        self._failure_count = 0
        self._open_until_s = None

    def record_failure(self, admission: Admission, *, now_s: float, is_timeout: bool) -> None:
        """The daemon did not answer; a timeout opens the circuit alone, refusals do so together."""
        if admission is Admission.CALL and self.is_open:
            return  # one of many that were under way when the circuit opened: counted once
        self._failure_count += 1
        if admission is Admission.TRIAL or is_timeout or self._failure_count >= self._failure_count_max:
            self._open(now_s=now_s)

    def _open(self, *, now_s: float) -> None:
        is_calm = self._last_opened_s is None or now_s - self._last_opened_s > self._cooldown_s + self._cooldown_max_s
        doubled_s = self._cooldown_initial_s if is_calm else 2 * self._cooldown_s
        self._cooldown_s = min(doubled_s, self._cooldown_max_s)
        self._last_opened_s = now_s
        self._open_until_s = now_s + self._cooldown_s
        self._failure_count = 0
