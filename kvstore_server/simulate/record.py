"""Takes what is asked of a daemon, until it is to end, and loses none of it, whatever ended it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import click

from kvstore.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from kvstore.messages import DescribedNamespace, TakeAccessesResponse
from kvstore.namespace import Namespace
from kvstore_client import Client
from kvstore_server.simulate.recording import Recording

_TAKEN_EVERY_S = 0.5
_LOOKED_EVERY_S = 0.2
"""For a namespace to appear."""
_TERMINAL_EVERY_S = 1.0
_LOG_EVERY_S = 60.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ending_by_signal() -> Iterator[threading.Event]:
    """An event that Ctrl-C, SIGTERM or SIGHUP sets, to end in good order; a second one interrupts."""
    is_ending = threading.Event()

    def end(_: int, __: FrameType | None) -> None:
        if is_ending.is_set():
            raise KeyboardInterrupt
        is_ending.set()

    if threading.current_thread() is not threading.main_thread():
        yield is_ending
        return
    before = {one: signal.signal(one, end) for one in _SIGNALS}
    try:
        yield is_ending
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@dataclass(slots=True, kw_only=True)
class Progress:
    """Says every so often how far it is."""

    every_s: float
    _said_s: float | None = field(default=None, init=False)

    def text(self, recording: Recording, *, dropped_count: int, now_s: float) -> str | None:
        """None: it has been said lately. The first call says nothing: there is nothing yet."""
        if self._said_s is None:
            self._said_s = now_s
        if now_s < self._said_s + self.every_s:
            return None
        self._said_s = now_s
        lost = f", {dropped_count:,} accesses lost" if dropped_count else ""
        return f"{len(recording):,} requests, {recording.unique_blocks:,} unique blocks{lost}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    namespace: Namespace
    recording: Recording
    dropped_count: int


def record_accesses(
    client: Client,
    *,
    id_prefix: str,
    duration_s: float | None,
    request_count_max: int | None,
    is_ending: threading.Event,
) -> Recorded:
    """Of one namespace, from when it is there until the time is over, or so many requests, or `is_ending`.

    What a daemon that goes away has told before is returned all the same. Raises when nothing was recorded.
    """
    until_s = float("inf") if duration_s is None else time.monotonic() + duration_s

    def is_over() -> bool:
        return is_ending.is_set() or time.monotonic() >= until_s

    namespace = _wait_for_namespace(client, id_prefix, is_over=is_over, is_ending=is_ending)
    recording = Recording(tokens_per_block=namespace.tokens_per_block)
    taken = client.accesses(namespace)
    epoch, dropped_count = taken.epoch, 0
    click.echo(f"recording {namespace.id.hex()[:16]} {namespace.model}, until Ctrl-C or as told", err=True)
    progress = Progress(every_s=_TERMINAL_EVERY_S if sys.stderr.isatty() else _LOG_EVERY_S)
    is_last = False
    try:
        while not is_last:
            if not taken.accesses:
                is_ending.wait(min(_TAKEN_EVERY_S, max(until_s - time.monotonic(), 0.0)))
            is_last = is_over()
            taken = client.accesses(namespace, after_number=taken.last_number)
            if taken.epoch != epoch:
                click.echo("the daemon has restarted, and names blocks anew: the recording ends here", err=True)
                break
            dropped_count += taken.dropped_count
            _add(recording, taken)
            is_last = is_last or len(recording) >= (request_count_max or sys.maxsize)
            _say(progress.text(recording, dropped_count=dropped_count, now_s=time.monotonic()))
    except (UnavailableError, DeadlineExceededError) as error:
        if not len(recording):
            raise
        click.echo(f"the recording ends here: {error}", err=True)
    if not len(recording):
        raise UnavailableError("nothing was asked of this namespace in that time: there is no trace to write")
    return Recorded(namespace=namespace, recording=recording, dropped_count=dropped_count)


def _add(recording: Recording, taken: TakeAccessesResponse) -> None:
    for access in taken.accesses:
        recording.add(access)


def _say(text: str | None) -> None:
    if text is not None:
        # On a terminal in one line, which each overwrites.
        click.echo(f"\r{text}" if sys.stderr.isatty() else text, err=True, nl=not sys.stderr.isatty())


def _wait_for_namespace(
    client: Client, id_prefix: str, *, is_over: Callable[[], bool], is_ending: threading.Event
) -> Namespace:
    is_said = False
    while True:
        known = client.namespaces().namespaces
        found = _chosen(known, id_prefix)
        if found is not None:
            return found
        if is_over():
            raise UnavailableError(f"no client has opened {_meant(id_prefix)} in that time: there is no trace to write")
        if not is_said:
            there = f"; there are: {_listed(known)}" if known else ""
            click.echo(f"waiting for a client to open {_meant(id_prefix)}{there}", err=True)
            is_said = True
        is_ending.wait(_LOOKED_EVERY_S)


def _meant(id_prefix: str) -> str:
    return f"a namespace whose id begins with {id_prefix}" if id_prefix else "a namespace"


def _chosen(known: Sequence[DescribedNamespace], id_prefix: str) -> Namespace | None:
    """None: it is not there yet."""
    matching = [one.namespace for one in known if one.namespace.id.hex().startswith(id_prefix.lower())]
    if len(matching) > 1:
        raise InvalidArgumentError.of(
            "--namespace", id_prefix, f"the start of the id of exactly one of: {_listed(known)}"
        )
    return matching[0] if matching else None


def _listed(known: Sequence[DescribedNamespace]) -> str:
    return ", ".join(f"{one.namespace.id.hex()[:16]} ({one.namespace.model})" for one in known)
