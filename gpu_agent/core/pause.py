"""How long to leave a daemon alone that does not answer."""

from __future__ import annotations


class Pause:
    """Doubles with each failure in a row from `min_s` to `max_s`; one success ends it."""

    def __init__(self, *, min_s: float, max_s: float) -> None:
        self._min_s = min_s
        self._max_s = max_s
        self._next_s = min_s
        self._until_s = float("-inf")

    def is_over(self, *, now_s: float) -> bool:
        return now_s >= self._until_s

    def left_s(self, *, now_s: float) -> float | None:
        """None: it is over."""
        return None if self.is_over(now_s=now_s) else self._until_s - now_s

    def fail(self, *, now_s: float) -> float:
        """Starts the next pause; returns its length."""
        length_s = self._next_s
        self._until_s = now_s + length_s
        self._next_s = min(self._max_s, length_s * 2)
        return length_s

    def succeed(self) -> None:
        self._next_s = self._min_s
        self._until_s = float("-inf")
