"""What computing a token takes this engine, learned from its own steps. Pure."""

from __future__ import annotations

_TOKENS_MIN = 64
"""In a step; with fewer, what a step costs anyway hides what a token does."""
_WEIGHT = 0.2


class PrefillRate:
    """A moving average over the steps that computed many tokens."""

    def __init__(self) -> None:
        self._step: tuple[float, int] | None = None
        self.s_per_token: float | None = None
        """None until a step has shown it."""

    def begin_step(self, *, now_s: float, token_count: int) -> None:
        self._step = (now_s, token_count)

    def end_step(self, *, now_s: float) -> None:
        if self._step is None:
            return
        started_s, token_count = self._step
        self._step = None
        if token_count < _TOKENS_MIN or now_s <= started_s:
            return
        found = (now_s - started_s) / token_count
        known = self.s_per_token
        self.s_per_token = found if known is None else known + _WEIGHT * (found - known)
