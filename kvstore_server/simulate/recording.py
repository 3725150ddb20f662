"""Requests out of what was asked of a daemon. Pure."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, replace

from kvstore.eviction.use import Finish
from kvstore.messages import ACCESS_NUMBER_BYTES, Access, AccessKind, FinishReason, Hint
from kvstore_server.simulate.trace import Numbering, Span, Trace, TraceRequest

SAME_REQUEST_S = 10.0
"""An engine asks again for a prompt that waits for its turn, and reads what it was told of: that is one request."""
_RECENT_MAX = 1024
_FINISH = {
    FinishReason.UNKNOWN: Finish.UNKNOWN,
    FinishReason.TOOL_USE: Finish.TOOL_USE,
    FinishReason.END_TURN: Finish.END_TURN,
    FinishReason.OTHER: Finish.OTHER,
}


@dataclass(slots=True)
class _Recent:
    index: int
    time_s: float
    chain: tuple[int, ...]
    session_hash: int


class Recording:
    """Requests in order of arrival, from accesses in order.

    A lookup is a request, unless it is one of the last seconds again. What is read is a request only where no lookup of
    a longer prompt with these blocks came before it, and a hint adds to the last request that used its blocks.
    """

    def __init__(self, *, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._numbering = Numbering()
        self._sessions: dict[int, int] = {}
        self._requests: list[TraceRequest] = []
        self._recent: deque[_Recent] = deque(maxlen=_RECENT_MAX)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, access: Access) -> None:
        numbers = struct.unpack(f"<{len(access.block_numbers) // ACCESS_NUMBER_BYTES}Q", access.block_numbers)
        if not numbers:
            return
        match access.kind:
            case AccessKind.LOOKUP | AccessKind.READ:
                same = self._same(access, numbers)
                if same is None:
                    self._begin(access, numbers)
                elif access.hint is not None:
                    self._tell(same, access.hint)
            case AccessKind.HINT if access.hint is not None:
                last = next((one for one in reversed(self._recent) if _is_prefix(numbers, one.chain)), None)
                if last is not None:
                    self._tell(last, access.hint)

    def trace(self, *, name: str, source: str) -> Trace:
        return Trace(
            name=name,
            tokens_per_block=self._tokens_per_block,
            requests=tuple(self._requests),
            unique_blocks=len(self._numbering),
            source=source,
        )

    def _same(self, access: Access, numbers: tuple[int, ...]) -> _Recent | None:
        """The request that this access belongs to; None: it is a new one."""
        session_hash = 0 if access.hint is None else access.hint.session_hash
        turn = 0 if access.hint is None else access.hint.turn
        for one in reversed(self._recent):
            if access.uptime_s - one.time_s > SAME_REQUEST_S:
                return None
            known_turn = self._requests[one.index].turn or 0
            is_other = one.session_hash != session_hash or (turn and known_turn and turn != known_turn)
            is_equal = one.chain == numbers or (access.kind is AccessKind.READ and _is_prefix(numbers, one.chain))
            if is_equal and not is_other:
                return one
        return None

    def _begin(self, access: Access, numbers: tuple[int, ...]) -> None:
        hint = access.hint or Hint()
        block_tokens = len(numbers) * self._tokens_per_block
        # The store sees full blocks only; what a hint says of the rest must fit.
        input_tokens = max(hint.input_tokens, block_tokens)
        if input_tokens >= block_tokens + self._tokens_per_block:
            input_tokens = block_tokens
        self._recent.append(_Recent(len(self._requests), access.uptime_s, numbers, hint.session_hash))
        self._requests.append(
            _told(
                TraceRequest(time_s=access.uptime_s, input_tokens=input_tokens, spans=self._spans(numbers)),
                hint,
                session_id=self._session_id(hint),
            )
        )

    def _tell(self, recent: _Recent, hint: Hint) -> None:
        request = self._requests[recent.index]
        session_id = request.session_id if not hint.session_hash else self._session_id(hint)
        self._requests[recent.index] = _told(request, hint, session_id=session_id)

    def _spans(self, numbers: tuple[int, ...]) -> tuple[Span, ...]:
        return self._numbering.spans(numbers)

    def _session_id(self, hint: Hint) -> int | None:
        if not hint.session_hash:
            return None
        return self._sessions.setdefault(hint.session_hash, len(self._sessions))


def _told(request: TraceRequest, hint: Hint, *, session_id: int | None) -> TraceRequest:
    """What a hint says is added to what was known."""
    return replace(
        request,
        session_id=session_id,
        turn=hint.turn or request.turn,
        output_tokens=hint.output_tokens or request.output_tokens,
        finish=_FINISH[hint.finish_reason] if hint.finish_reason else request.finish,
        expected_return_s=request.expected_return_s if hint.expected_return_s is None else hint.expected_return_s,
        is_done=hint.is_done or request.is_done,
        priority=hint.priority or request.priority,
        ttl_s=request.ttl_s if hint.ttl_s is None else hint.ttl_s,
    )


def _is_prefix(numbers: tuple[int, ...], chain: tuple[int, ...]) -> bool:
    """A number stands for its whole prefix, so the last one decides."""
    return len(numbers) <= len(chain) and numbers[-1] == chain[len(numbers) - 1]
