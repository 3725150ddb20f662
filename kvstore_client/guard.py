"""The circuit breaker as the threads of a process see it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.errors import DeadlineExceededError, KvstoreError, UnavailableError
from kvstore_client.breaker import Admission, Breaker
from kvstore_client.config import ClientConfig


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

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around one call; raises `UnavailableError` instead of letting it happen while the circuit is open."""
        admission = self._admit()
        try:
            yield
        except (UnavailableError, DeadlineExceededError) as error:
            with self._lock:
                self._breaker.record_failure(
                    admission, now_s=self._clock(), is_timeout=isinstance(error, DeadlineExceededError)
                )
            raise
        except KvstoreError:
            self._record_success()
            raise
        else:
            self._record_success()

    def _admit(self) -> Admission:
        now_s = self._clock()
        with self._lock:
            admission = self._breaker.admit(now_s=now_s)
            wait_s = self._breaker.wait_s(now_s=now_s)
        if admission is Admission.REFUSED:
            raise UnavailableError(
                f"circuit open: {self._address} has not answered; calls are skipped for another {wait_s:.2f} s"
            )
        return admission

    def _record_success(self) -> None:
        with self._lock:
            self._breaker.record_success()
