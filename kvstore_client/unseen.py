"""Hits that the daemon does not see, because it was not asked."""

from __future__ import annotations

import threading
from math import inf

from kvstore import messages as m
from kvstore import wire
from kvstore.namespace import Namespace
from kvstore_client.flows.steps import Post
from kvstore_client.forks import mend_after_fork

REPORT_EVERY_S = 0.1
"""A single hit is told at once; of many in a row, those since the last report, so often. What is left when no more
come is told when the client closes, if the daemon hears it then."""


class UnseenHits:
    """Counts hits until there is a report to make. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._namespace: Namespace | None = None
        self._reported_s = -inf
        mend_after_fork(self)

    def after_fork(self) -> None:
        """The parent reports what was counted before."""
        self._lock = threading.Lock()
        self._count = 0

    def add(self, count: int, namespace: Namespace, *, now_s: float) -> Post | None:
        """The report, when one is due."""
        with self._lock:
            self._count += count
            self._namespace = namespace
            if now_s - self._reported_s < REPORT_EVERY_S:
                return None
            self._reported_s = now_s
            return self._report()

    def last(self) -> Post | None:
        """The report of what has not been told yet."""
        with self._lock:
            return self._report()

    def _report(self) -> Post | None:
        if not self._count or self._namespace is None:
            return None
        count, self._count = self._count, 0
        request = m.CountReadsRequest(namespace_id=self._namespace.id, block_hashes=b"", hit_count=count)
        return Post(method=wire.COUNT_READS, request=request)
