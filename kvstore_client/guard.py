"""The circuit breaker as the threads of a process see it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from kvstore.errors import DeadlineExceededError, KvstoreError, UnavailableError
from kvstore_client.breaker import Admission, Breaker
from kvstore_client.config import ClientConfig
from kvstore_client.forks import mend_after_fork


class Guard:
    """Admits calls and learns from how they end; safe to share between threads, never blocks for long."""

    def __init__(self, *, address: str, config: ClientConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._address = address
        self._clock = clock
        self._lock = threading.Lock()
        self._breaker = Breaker(
            failure_count_max=config.breaker_failure_count,
            cooldown_initial_s=config.breaker_cooldown_initial_s,
            cooldown_max_s=config.breaker_cooldown_max_s,
        )
        mend_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def watching(self) -> _Watch:
        """Around one call; raises `UnavailableError` instead of letting it happen while the circuit is open."""
        return _Watch(self)

    def admit(self) -> Admission:
        now_s = self._clock()
        with self._lock:
            admission = self._breaker.admit(now_s=now_s)
            wait_s = self._breaker.wait_s(now_s=now_s)
        if admission is Admission.REFUSED:
            raise UnavailableError(
                f"circuit open: {self._address} has not answered; calls are skipped for another {wait_s:.2f} s"
            )
        return admission

    def record(self, admission: Admission, error: BaseException | None) -> None:
        """How a call ended. What is no operating error, such as an interrupt, says nothing about the daemon."""
        with self._lock:
            if isinstance(error, (UnavailableError, DeadlineExceededError)):
                is_timeout = isinstance(error, DeadlineExceededError)
                self._breaker.record_failure(admission, now_s=self._clock(), is_timeout=is_timeout)
            elif error is None or isinstance(error, KvstoreError):
                self._breaker.record_success()


class _Watch:
    """A context manager by hand: it is around every call, and a generator would cost as much as the rest of it."""

    __slots__ = ("_admission", "_guard")

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def __enter__(self) -> None:
        self._admission = self._guard.admit()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._guard.record(self._admission, error)
