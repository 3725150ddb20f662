"""What crosses the link between a device and host memory."""

from __future__ import annotations

import threading

from gpu_agent.core.link import Direction, LinkSample, Traffic


class LinkMeter:
    """Counts submissions; any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traffic = {direction: Traffic() for direction in Direction}

    def queue(self, direction: Direction, size_bytes: int) -> None:
        with self._lock:
            before = self._traffic[direction]
            self._traffic[direction] = before._replace(queued_bytes=before.queued_bytes + size_bytes)

    def retire(self, direction: Direction, size_bytes: int, *, busy_s: float) -> None:
        """What was queued has moved, which kept the link busy so long."""
        with self._lock:
            before = self._traffic[direction]
            self._traffic[direction] = Traffic(
                before.moved_bytes + size_bytes, before.busy_s + busy_s, before.queued_bytes - size_bytes
            )

    def fail(self, direction: Direction, size_bytes: int) -> None:
        """What was queued has not moved."""
        self.queue(direction, -size_bytes)

    def sample(self) -> LinkSample:
        with self._lock:
            return LinkSample(h2d=self._traffic[Direction.H2D], d2h=self._traffic[Direction.D2H])
