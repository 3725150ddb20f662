"""Requests out of what was asked of a daemon. Pure."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, replace

from kvstore.eviction.use import Finish
from kvstore.messages import ACCESS_NUMBER_BYTES, Access, AccessKind, FinishReason, Hint
from kvstore_server.simulate.trace import Numbering, Span, Trace, TraceRequest, in_order

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
    prompt: tuple[int, ...]
    session_hash: int
    added: tuple[int, ...] = ()
    """Blocks that were written behind the prompt."""

    def place_of(self, number: int) -> int | None:
        """Of a block in prompt and answer; None: it is not there."""
        chain = self.prompt + self.added
        return chain.index(number) if number in chain else None


class Recording:
    """Requests in order of arrival, from accesses in order.

    A lookup is a request, unless it is one of the last seconds again. What is read is a request only where no lookup of
    a longer prompt with these blocks came before it. What is written behind a prompt, or behind what was written there
    before, is added to the last request that it goes on; a chain that nobody has looked up is a request without a
    prompt. A hint adds to the last request of its session and turn, or else that used or wrote some of its blocks.
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
            case AccessKind.WRITE:
                written = self._write(access, numbers)
                if written is not None and access.hint is not None:
                    self._tell(written, access.hint)
            case AccessKind.HINT if access.hint is not None:
                meant = self._meant(access.hint, numbers)
                if meant is not None:
                    self._tell(meant, access.hint)

    @property
    def unique_blocks(self) -> int:
        return len(self._numbering)

    def trace(self, *, name: str, source: str) -> Trace:
        return Trace(
            name=name,
            tokens_per_block=self._tokens_per_block,
            requests=in_order(self._requests, block_count=len(self._numbering)),
            unique_blocks=len(self._numbering),
            source=source,
        )

    def _write(self, access: Access, numbers: tuple[int, ...]) -> _Recent | None:
        """The request that these blocks go on or are part of; None: nobody has asked for what is before them."""
        for one in reversed(self._recent):
            place = one.place_of(numbers[0])
            if place is None:
                continue
            chain = one.prompt + one.added
            if chain[place : place + len(numbers)] == numbers[: len(chain) - place]:
                more = numbers[len(chain) - place :]
                if more:
                    self._add(one, more)
                return one
        if access.matched_count:
            return None
        self._begin(access, (), added=numbers)
        return self._recent[-1]

    def _add(self, recent: _Recent, numbers: tuple[int, ...]) -> None:
        recent.added += numbers
        self._requests[recent.index] = replace(
            self._requests[recent.index],
            spans=self._spans(recent.prompt + recent.added),
            added_blocks=len(recent.added),
        )

    def _meant(self, hint: Hint, numbers: tuple[int, ...]) -> _Recent | None:
        """The last request that a hint may be of. Clients name all blocks, those of the answer, or some of them."""
        if hint.session_hash:
            for one in reversed(self._recent):
                turn = self._requests[one.index].turn
                if one.session_hash == hint.session_hash and (not hint.turn or turn is None or turn == hint.turn):
                    return one
        # A number stands for its whole prefix: what goes on from a request's blocks has them in it.
        for one in reversed(self._recent):
            chain = one.prompt + one.added
            if one.place_of(numbers[-1]) is not None or (chain and chain[-1] in numbers):
                return one
        return None

    def _same(self, access: Access, numbers: tuple[int, ...]) -> _Recent | None:
        """The request that this access belongs to; None: it is a new one."""
        session_hash = 0 if access.hint is None else access.hint.session_hash
        turn = 0 if access.hint is None else access.hint.turn
        for one in reversed(self._recent):
            if access.uptime_s - one.time_s > SAME_REQUEST_S:
                return None
            known_turn = self._requests[one.index].turn or 0
            is_other = one.session_hash != session_hash or (turn and known_turn and turn != known_turn)
            is_equal = one.prompt == numbers or (access.kind is AccessKind.READ and _is_prefix(numbers, one.prompt))
            if is_equal and not is_other:
                return one
        return None

    def _begin(self, access: Access, numbers: tuple[int, ...], *, added: tuple[int, ...] = ()) -> None:
        hint = access.hint or Hint()
        block_tokens = len(numbers) * self._tokens_per_block
        # The store sees full blocks only; what a hint says of the rest must fit.
        input_tokens = max(hint.input_tokens, block_tokens)
        if input_tokens >= block_tokens + self._tokens_per_block:
            input_tokens = block_tokens
        self._recent.append(_Recent(len(self._requests), access.uptime_s, numbers, hint.session_hash, added))
        self._requests.append(
            _told(
                TraceRequest(
                    time_s=access.uptime_s,
                    input_tokens=input_tokens,
                    spans=self._spans(numbers + added),
                    added_blocks=len(added),
                ),
                hint,
                session_id=self._session_id(hint),
            )
        )

    def _tell(self, recent: _Recent, hint: Hint) -> None:
        request = self._requests[recent.index]
        recent.session_hash = recent.session_hash or hint.session_hash
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
