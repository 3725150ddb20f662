"""Logs of requests with their tokens, or with text and a tokenizer. Blocks become numbers; nothing else is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvstore.errors import InvalidArgumentError
from kvstore.keys import TOKENS_PER_BLOCK_MAX, hash_blocks
from kvstore_server.simulate.fields import COMMON_FIELDS, TOKENS_MAX, Ignored, Line
from kvstore_server.simulate.trace import Numbering, Trace, TraceRequest

LOG_FIELDS = ("token_ids", "prompt_token_ids", "text", "prompt", "messages")
"""Where a line has its prompt; the first that is there is taken."""
DEFAULT_TOKENS_PER_BLOCK = 16
_TOKEN_FIELDS = ("token_ids", "prompt_token_ids")
_OUTPUT_FIELDS = ("output_length", "output_tokens", "completion_tokens")
_FINISH_FIELDS = ("stop", "finish_reason", "stop_reason")
_TIME_FIELDS = ("timestamp", "time", "created")
_MILLISECONDS_FROM = 1e11
"""Seconds since 1970 are below it until the year 5138, and milliseconds above it since 1973."""

KNOWN_FIELDS = COMMON_FIELDS.union(LOG_FIELDS, _OUTPUT_FIELDS, _FINISH_FIELDS, _TIME_FIELDS)

Tokenize = Callable[[str | Sequence[Mapping[str, Any]]], Sequence[int]]
"""The token ids of a text, or of a conversation."""


def read_request_log(lines: Iterable[Line], *, tokens_per_block: int | None, tokenize: Tokenize | None) -> Trace:
    """One request per line. Only full blocks count, as only these are stored.

    A `timestamp` is in seconds, in milliseconds where it is too large for that, or a date; without any, requests come a
    second apart.
    """
    size = tokens_per_block or DEFAULT_TOKENS_PER_BLOCK
    if not 1 <= size <= TOKENS_PER_BLOCK_MAX:
        raise InvalidArgumentError.of("--block-tokens", size, f"1 to {TOKENS_PER_BLOCK_MAX}")
    numbering = Numbering()
    sessions: dict[object, int] = {}
    ignored = Ignored(KNOWN_FIELDS)
    has_times: bool | None = None
    used_count = 0
    # Until all are there and in order: of a prompt only its blocks' hashes, which take a fraction of its tokens.
    found: list[tuple[TraceRequest, Sequence[bytes]]] = []
    for index, line in enumerate(lines):
        ignored.add(line)
        time_field = line.first_of(*_TIME_FIELDS)
        has_times = time_field is not None if has_times is None else has_times
        if (time_field is not None) != has_times:
            raise line.wrong(time_field or "timestamp", "in all lines, or in none")
        tokens = _tokens_of(line, tokenize)
        output_field = line.first_of(*_OUTPUT_FIELDS)
        request = TraceRequest(
            time_s=float(index) if time_field is None else _time_s(line, time_field),
            input_tokens=len(tokens),
            output_tokens=None if output_field is None else line.integer(output_field, high=TOKENS_MAX),
            session_id=_session(line, sessions),
            turn=line.optional_integer("turn", low=1),
            finish=line.finish(*_FINISH_FIELDS),
            expected_return_s=line.number_of("expected_return_s") if line.has("expected_return_s") else None,
            is_done=line.flag("done"),
            priority=line.integer("priority", low=-2, high=2) if line.has("priority") else 0,
            ttl_s=line.number_of("ttl_s") if line.has("ttl_s") else None,
            spans=(),
        )
        hashes = hash_blocks(tokens, tokens_per_block=size)
        used_count += len(hashes)
        line.check_used_blocks(used_count)
        found.append((request, hashes))
    found.sort(key=lambda one: one[0].time_s)
    return Trace(
        name="",
        tokens_per_block=size,
        requests=tuple([replace(request, spans=numbering.spans(hashes)) for request, hashes in found]),
        unique_blocks=len(numbering),
        source="a request log",
        ignored_fields=ignored.counts,
    )


def _time_s(line: Line, field: str) -> float:
    time_s = line.time_s(field, unit_s=1.0)
    return time_s / 1000 if time_s >= _MILLISECONDS_FROM else time_s


def _session(line: Line, sessions: dict[object, int]) -> int | None:
    """A number in place of the caller's name for it."""
    if not line.has("session_id"):
        return None
    name = line.fields["session_id"]
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise line.wrong("session_id", "a text or a whole number")
    return sessions.setdefault(name, len(sessions))


def _tokens_of(line: Line, tokenize: Tokenize | None) -> Sequence[int]:
    field = line.first_of(*LOG_FIELDS)
    if field is None:
        raise line.wrong(LOG_FIELDS[0], f"one of {', '.join(LOG_FIELDS)} in each line")
    if field in _TOKEN_FIELDS:
        return line.integers(field, high=(1 << 32) - 1)
    if tokenize is None:
        raise InvalidArgumentError(
            f"{line.path}, line {line.number} has its prompt as `{field}`: name its model's tokenizer with --tokenizer"
        )
    value = line.fields[field]
    if field == "messages":
        if not isinstance(value, list) or not all(isinstance(one, dict) and "role" in one for one in value):
            raise line.wrong(field, "a list of objects with `role` and `content`")
    elif not isinstance(value, str):
        raise line.wrong(field, "a text")
    return tokenize(value)
