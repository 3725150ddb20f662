"""A figure that is measured again and again."""

from __future__ import annotations

_NEWEST_SHARE = 0.2


class Average:
    """Exponentially weighted: what was noted ten times ago counts a tenth of the newest."""

    def __init__(self) -> None:
        self.value: float | None = None
        """None: nothing has been noted."""

    def note(self, value: float) -> None:
        self.value = value if self.value is None else self.value + _NEWEST_SHARE * (value - self.value)
