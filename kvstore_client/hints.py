"""What a client may tell of the request that it works on."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from kvstore import messages as m
from kvstore.errors import InvalidArgumentError
from kvstore.keys import SESSION_BYTES_MAX, session_hash
from kvstore.messages import HINT_COUNT_MAX, HINT_S_MAX, PRIORITY_MAX, FinishReason
from kvstore.namespace import Namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """What is known of the request for which blocks are used; every part is optional, and is checked when it is made.

    Hints tell the daemon which blocks are worth keeping: who is wrong loses hits, never more. What is known when the
    request comes goes with the calls that use its blocks, what is known when its answer has ended with `Client.hint`.
    """

    session: str | None = None
    """Whatever names the conversation or the agent's run, the same for all of its turns. It never leaves this process:
    what does is a hash of it, salted with the namespace."""
    turn: int | None = None
    """1 is the first of its session."""
    input_tokens: int | None = None
    """Of the whole prompt."""
    output_tokens: int | None = None
    """Of the answer."""
    finish: FinishReason = FinishReason.UNKNOWN
    expected_return_s: float | None = None
    """In how long the session is expected to come back."""
    is_done: bool = False
    """The session is over: what only it has used is not needed any more."""
    priority: int = 0
    """-2 to 2; blocks of a higher one stay longer. It ranks the blocks of one tenant, and takes nothing from others."""
    ttl_s: float | None = None
    """The blocks are not worth keeping after so long without a use."""

    def __post_init__(self) -> None:
        _check_session(self.session)
        for name, low in (("turn", 1), ("input_tokens", 0), ("output_tokens", 0)):
            _check_count(name, getattr(self, name), low=low)
        if not isinstance(self.finish, FinishReason):
            raise InvalidArgumentError.of("finish", self.finish, ", ".join(map(str, FinishReason.__members__)))
        if not _is_whole(self.priority) or not -PRIORITY_MAX <= self.priority <= PRIORITY_MAX:
            raise InvalidArgumentError.of(
                "priority", self.priority, f"a whole number from -{PRIORITY_MAX} to {PRIORITY_MAX}"
            )
        if not isinstance(self.is_done, bool):
            raise InvalidArgumentError.of("is_done", self.is_done, "True or False")
        _check_seconds("expected_return_s", self.expected_return_s, is_zero_allowed=True)
        _check_seconds("ttl_s", self.ttl_s, is_zero_allowed=False)

    def message(self, namespace: Namespace) -> m.Hint:
        """As it travels with blocks of this namespace."""
        return m.Hint(
            session_hash=0 if self.session is None else session_hash(namespace.id, self.session),
            turn=self.turn or 0,
            input_tokens=self.input_tokens or 0,
            output_tokens=self.output_tokens or 0,
            finish_reason=self.finish,
            expected_return_s=self.expected_return_s,
            is_done=self.is_done,
            priority=self.priority,
            ttl_s=self.ttl_s,
        )


def hint_message(hint: Hint | None, namespace: Namespace) -> m.Hint | None:
    """What a caller gave as a call's hint, as it travels."""
    if hint is None:
        return None
    check_hint(hint)
    return hint.message(namespace)


def check_hint(hint: Hint) -> None:
    if not isinstance(hint, Hint):
        raise InvalidArgumentError.of("hint", hint, "a kvstore_client.Hint")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_session(session: str | None) -> None:
    if session is None:
        return
    allowed = f"a name of 1 to {SESSION_BYTES_MAX} bytes of UTF-8, or None"
    if not isinstance(session, str):
        raise InvalidArgumentError.of("session", session, allowed)
    try:
        size_bytes = len(session.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgumentError.of("session", session, allowed) from error
    if not 1 <= size_bytes <= SESSION_BYTES_MAX:
        raise InvalidArgumentError.of("session", f"{size_bytes} bytes", allowed)


def _check_count(name: str, value: int | None, *, low: int) -> None:
    if value is not None and not (_is_whole(value) and low <= value <= HINT_COUNT_MAX):
        raise InvalidArgumentError.of(name, value, f"a whole number from {low} to {HINT_COUNT_MAX}, or None")


def _check_seconds(name: str, value: float | None, *, is_zero_allowed: bool) -> None:
    if value is None:
        return
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    if not is_number or not 0.0 <= value <= HINT_S_MAX or not (value or is_zero_allowed):
        low = "0" if is_zero_allowed else "above 0"
        raise InvalidArgumentError.of(name, value, f"{low} to {HINT_S_MAX:.0f} seconds (30 days), or None")
