"""What clients would say of the future, if so many of them were right. Pure: chance comes as a stream of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvstore_server.simulate.bounds import Future
from kvstore_server.simulate.trace import Trace, TraceRequest

RETURN_S = 120.0
"""What every client that expects to come back says: about the median gap of chats. Only the bit is of the trace."""


def will_return(future: Future) -> list[bool]:
    """Of each request: whether its session goes on; without a session, whether its last block is used again."""
    trace, never = future.trace, len(future.trace.requests)
    later_sessions: set[int] = set()
    answers: list[bool] = []
    for request, parts in zip(reversed(trace.requests), reversed(future.parts), strict=True):
        if request.session_id is None:
            last_full = request.input_tokens // trace.tokens_per_block - 1
            answers.append(any(part.start <= last_full < part.end and part.next_use < never for part in parts))
        else:
            answers.append(request.session_id in later_sessions)
            later_sessions.add(request.session_id)
    answers.reverse()
    return answers


def with_hints(future: Future, *, accuracy: float, chances: Iterator[float]) -> Trace:
    """The same trace, where clients say whether they come back or are done; of them the share `accuracy` is right."""
    requests = tuple(
        _told(request, comes_back=is_true == (chance < accuracy))
        for request, is_true, chance in zip(future.trace.requests, will_return(future), chances, strict=False)
    )
    return replace(future.trace, requests=requests)


def _told(request: TraceRequest, *, comes_back: bool) -> TraceRequest:
    return replace(request, expected_return_s=RETURN_S if comes_back else None, is_done=not comes_back)
