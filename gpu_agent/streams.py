"""Which data streams an agent serves: so many at a time, and none whose peer stalls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import structlog

from kvstore.errors import UnavailableError

_WATCH_INTERVAL_S = 0.25
"""How late a stream may be cut off."""

_log = structlog.get_logger("kvstore.agent")

_Message = TypeVar("_Message")


class Stream:
    """One stream that was admitted; its messages pass through `received` or `sent`."""

    def __init__(self, cancel: Callable[[], object]) -> None:
        self.cancel = cancel
        self.started_s = time.monotonic()
        self.waiting_since_s: float | None = None
        """Since when the peer has been waited for; None while it is the agent's turn."""
        self.is_cut = False

    def received(self, messages: Iterable[_Message]) -> Iterator[_Message]:
        """The peer's messages; it is waited for until each is there."""
        self.waiting_since_s = time.monotonic()
        for message in messages:
            self.waiting_since_s = None
            yield message
            self.waiting_since_s = time.monotonic()
        self.waiting_since_s = None

    def sent(self, messages: Iterable[_Message]) -> Iterator[_Message]:
        """Messages for the peer; it is waited for until each is on its way."""
        for message in messages:
            self.waiting_since_s = time.monotonic()
            yield message
            self.waiting_since_s = None


class StreamGate:
    """Admits up to `count_max` streams at a time, so that a server's other workers stay free for short calls.

    From `start` to `stop` it cancels streams whose peer is waited for longer than `idle_s_max`, or that are older than
    `age_s_max` however busy they are.
    """

    def __init__(self, *, count_max: int, idle_s_max: float, age_s_max: float) -> None:
        self._count_max = count_max
        self._idle_s_max = idle_s_max
        self._age_s_max = age_s_max
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="kvstore-agent-streams", daemon=True)

    def start(self) -> None:
        self._watcher.start()

    def stop(self) -> None:
        """May be called more than once, and without `start`."""
        self._stop.set()
        if self._watcher.is_alive():
            self._watcher.join()

    @contextmanager
    def admitted(self, cancel: Callable[[], object]) -> Iterator[Stream]:
        """A stream's place; `cancel` must end it. Raises `UnavailableError` when all are taken."""
        stream = Stream(cancel)
        with self._lock:
            if len(self._streams) >= self._count_max:
                raise UnavailableError(
                    f"the agent serves {self._count_max} streams at a time and all are taken; try again"
                )
            self._streams.add(stream)
        try:
            yield stream
        finally:
            with self._lock:
                self._streams.discard(stream)

    def _watch(self) -> None:
        while not self._stop.wait(_WATCH_INTERVAL_S):
            with self._lock:
                streams = list(self._streams)
            for stream in streams:
                reason = self._too_late(stream)
                if reason is not None and not stream.is_cut:
                    stream.is_cut = True
                    _log.warning("stream_cut", reason=reason)
                    stream.cancel()

    def _too_late(self, stream: Stream) -> str | None:
        now_s, waiting_since_s = time.monotonic(), stream.waiting_since_s
        if waiting_since_s is not None and now_s - waiting_since_s > self._idle_s_max:
            return f"the peer stalled for {self._idle_s_max:g} s"
        if now_s - stream.started_s > self._age_s_max:
            return f"the stream is older than {self._age_s_max:g} s"
        return None
