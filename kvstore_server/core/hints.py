"""What clients tell of their requests, checked, as eviction takes it."""

from __future__ import annotations

from blake3 import blake3

from kvstore.errors import InvalidArgumentError
from kvstore.eviction import NO_HINT, Finish, Request
from kvstore.messages import HINT_S_MAX, PRIORITY_MAX, FinishReason, Hint
from kvstore_server.core.tenants import ScopedId

SECRET_BYTES = 32

_FINISHES = {
    FinishReason.UNKNOWN: Finish.UNKNOWN,
    FinishReason.TOOL_USE: Finish.TOOL_USE,
    FinishReason.END_TURN: Finish.END_TURN,
    FinishReason.OTHER: Finish.OTHER,
}


def request_of(hint: Hint | None, *, namespace_id: ScopedId, secret: bytes) -> Request:
    """What a hint says; raises when it says what it must not.

    It ranks a tenant's own blocks: whose block has to leave when memory is short is decided by the tenants' shares
    first, which no priority reaches. Sessions are salted once more, with the tenant and a secret of this start: nobody
    can name another tenant's, and what is written down of them can be traced to no name.
    """
    if hint is None:
        return NO_HINT
    if not -PRIORITY_MAX <= hint.priority <= PRIORITY_MAX:
        raise InvalidArgumentError.of("hint.priority", hint.priority, f"-{PRIORITY_MAX} to {PRIORITY_MAX}")
    if hint.expected_return_s is not None:
        _check_seconds("hint.expected_return_duration", hint.expected_return_s, is_zero_allowed=True)
    if hint.ttl_s is not None:
        _check_seconds("hint.ttl_duration", hint.ttl_s, is_zero_allowed=False)
    return Request(
        session_id=_session_id(hint.session_hash, namespace_id, secret) if hint.session_hash else None,
        turn=hint.turn or None,
        input_tokens=hint.input_tokens or None,
        output_tokens=hint.output_tokens or None,
        finish=_FINISHES[hint.finish_reason],
        expected_return_s=hint.expected_return_s,
        is_done=hint.is_done,
        priority=hint.priority,
        ttl_s=hint.ttl_s,
    )


def _check_seconds(field: str, seconds: float, *, is_zero_allowed: bool) -> None:
    if not 0.0 <= seconds <= HINT_S_MAX or not (seconds or is_zero_allowed):
        low = "0" if is_zero_allowed else "above 0"
        raise InvalidArgumentError.of(field, f"{seconds:g} s", f"{low} to {HINT_S_MAX:.0f} s")


def _session_id(session_hash: int, namespace_id: ScopedId, secret: bytes) -> int:
    name = session_hash.to_bytes(8, "little") + namespace_id
    return int.from_bytes(blake3(name, key=secret).digest(length=8), "little")
