"""What a benchmark process measures, and how it is told to: JSON lines on stdin and stdout."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvstore.errors import KvstoreError


class Subject(Protocol):
    """Something measurable, ready when built: actions on batches that are known by their number."""

    def prepare(self, action: str, batches: Sequence[int]) -> None:
        """What has to be done before these runs and is not measured; None in most cases."""

    def run(self, action: str, batch: int) -> None:
        """The measured part; raises `KvstoreError` when it did not do all of its work."""

    def check(self) -> None:
        """Raises `KvstoreError` unless what the last runs brought is what it should be."""

    def facts(self) -> dict[str, object]:
        """What a reader of the figures wants to know of this subject."""

    def close(self) -> None: ...


def serve(make: Callable[[], Subject]) -> None:
    """Answers orders until stdin ends. The first answer comes when the subject is ready, or says why it is not."""
    try:
        subject = make()
    except (KvstoreError, OSError, ImportError) as error:
        _say({"error": f"{type(error).__name__}: {error}"})
        return
    try:
        # What was made for the measurement is not the collector's business while it measures.
        gc.collect()
        gc.freeze()
        _say({"facts": subject.facts()})
        for line in sys.stdin:
            try:
                _say(_carry_out(subject, json.loads(line)))
            except (KvstoreError, OSError) as error:
                _say({"error": f"{type(error).__name__}: {error}"})
    finally:
        subject.close()


def _carry_out(subject: Subject, order: dict[str, object]) -> dict[str, object]:
    action = str(order["action"])
    if action == "check":
        subject.check()
        return {"checked": True}
    batches = order["batches"]
    assert isinstance(batches, list), order
    subject.prepare(action, batches)
    _say({"prepared": True})
    go = json.loads(sys.stdin.readline())
    _wait_until(go["at_s"])
    times_s = []
    started_s = time.monotonic()
    for batch in batches:
        start_s = time.monotonic()
        subject.run(action, batch)
        times_s.append(time.monotonic() - start_s)
    return {"times_s": times_s, "started_s": started_s, "ended_s": time.monotonic()}


def _wait_until(at_s: float) -> None:
    while (left_s := at_s - time.monotonic()) > 0:
        time.sleep(left_s)


def _say(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
