"""Why prompts reuse nothing, said where the user looks: 0 % without a reason is what users search longest for."""

from __future__ import annotations

import logging

from kvstore.errors import KvstoreError

_LOG = logging.getLogger("kvstore.transformers")


class ReuseLog:
    """Says each reason when it begins, not with every prompt."""

    def __init__(self, *, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._last_error: type[KvstoreError] | type[None] = type(None)
        self._has_said_too_short = False
        self._has_said_unfit = False

    def answered(self, error: KvstoreError | None) -> None:
        """After each answer of the store: names the error when it begins, and says when it is over."""
        before, self._last_error = self._last_error, type(error)
        if error is not None and before is not type(error):
            _LOG.warning("prompts are computed without the store: %s: %s", error.reason, error)
        elif error is None and before is not type(None):
            _LOG.warning("the store answers again")

    def too_short(self, token_count: int) -> None:
        if not self._has_said_too_short:
            self._has_said_too_short = True
            _LOG.warning(
                "a prompt of %d tokens has no full block of %d before its last token, so it can never hit",
                token_count,
                self._tokens_per_block,
            )

    def not_stored(self, error: KvstoreError) -> None:
        if not self._has_said_unfit:
            self._has_said_unfit = True
            _LOG.warning("computed blocks are not stored: %s", error)
