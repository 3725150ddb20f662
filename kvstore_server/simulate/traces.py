"""Files of recorded requests: kvtrace-1, Mooncake's JSON lines and request logs; gzip or not, as the content says."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore.eviction.use import Finish
from kvstore_server.simulate.fields import COMMON_FIELDS, TOKENS_MAX, Ignored, Line, nearest
from kvstore_server.simulate.request_log import KNOWN_FIELDS as LOG_KNOWN_FIELDS
from kvstore_server.simulate.request_log import LOG_FIELDS, Tokenize, read_request_log
from kvstore_server.simulate.trace import Numbering, Span, Trace, TraceRequest, as_spans

FORMAT = "kvtrace-1"
_GZIP_MAGIC = b"\x1f\x8b"
_MOONCAKE_TOKENS_PER_BLOCK = 512
_BLOCKS_MAX = 1 << 26
"""Of a whole trace: they are numbered in memory, at 40 bytes each."""
_CHAIN_BLOCKS_MAX = 1 << 20
"""Of one prompt."""

_KVTRACE_HEAD = frozenset({"format", "block_size", "source", "licence", "real", "requests", "unique_blocks"})
_MOONCAKE_FIELDS = COMMON_FIELDS | {"timestamp", "input_length", "output_length", "stop", "hash_ids"}
_KVTRACE_FIELDS = _MOONCAKE_FIELDS | {"hash_runs", "added_blocks"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of a file, as it is read: a compressed one may unfold to a thousand times its size."""

    line_characters_max: int = 32 << 20
    """`_CHAIN_BLOCKS_MAX` hashes of 20 digits, and some room."""
    text_characters_max: int = 64 << 30
    """Some minutes of reading."""
    request_count_max: int = 1 << 23
    """At 400 bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a file cannot say of itself."""

    tokens_per_block: int | None = None
    """None: as the file says, or 512 for Mooncake's and 16 for request logs."""
    tokenize: Tokenize | None = None
    """For logs of text."""
    limits: Limits = Limits()


def read_trace(path: Path, *, reading: Reading | None = None) -> Trace:
    """The requests of a file, whichever format it has. Raises with file, line and field where one cannot be right."""
    reading = reading or Reading()
    name = path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")
    try:
        trace = _read(path, reading)
    except MemoryError as error:
        raise UnavailableError(f"{path} has more requests than this process has memory for") from error
    if not trace.requests:
        raise InvalidArgumentError.of(str(path), "without requests", "a trace of one request or more")
    if reading.tokens_per_block not in (None, trace.tokens_per_block):
        raise InvalidArgumentError.of(
            "--block-tokens", reading.tokens_per_block, f"{trace.tokens_per_block}, as {path} has it, or nothing"
        )
    return replace(trace, name=name)


def _read(path: Path, reading: Reading) -> Trace:
    with _open(path) as file:
        lines = _lines(path, file, reading.limits)
        first = next(lines, None)
        if first is None:
            raise InvalidArgumentError.of(str(path), "empty", "a trace of one request or more")
        rest: Iterable[Line] = chain((first,), lines)
        if first.has("format"):
            return _read_kvtrace(first, lines)
        if first.has("hash_ids"):
            return _read_mooncake(rest, tokens_per_block=reading.tokens_per_block or _MOONCAKE_TOKENS_PER_BLOCK)
        if first.first_of(*LOG_FIELDS) is not None:
            return read_request_log(rest, tokens_per_block=reading.tokens_per_block, tokenize=reading.tokenize)
    raise InvalidArgumentError.of(
        f"{path}, line {first.number}",
        sorted(first.fields),
        f"the first line of {FORMAT} (with `format`), a line of Mooncake's (with `hash_ids`), "
        f"or one of a request log (with {', '.join(f'`{one}`' for one in LOG_FIELDS)})",
    )


def nearest_field(name: str) -> str | None:
    """The field of a trace that is probably meant by one that means nothing; None: none is."""
    return nearest(name, _KVTRACE_HEAD | _KVTRACE_FIELDS | LOG_KNOWN_FIELDS)


def write_trace(trace: Trace, path: Path, *, real: str) -> None:
    """As kvtrace-1, compressed where the name ends in .gz; `real` says what of it was measured."""
    head = {
        "source": trace.source,
        "licence": trace.licence,
        "real": real,
        "format": FORMAT,
        "block_size": trace.tokens_per_block,
        "requests": len(trace.requests),
        "unique_blocks": trace.unique_blocks,
    }
    start_s = trace.requests[0].time_s if trace.requests else 0.0
    try:
        with TraceWriter(path) as writer:
            writer.write(head)
            for request in trace.requests:
                writer.write(request_fields(request, start_s=start_s))
    except OSError as error:
        raise UnavailableError(f"{path} cannot be written: {error}") from error


@contextmanager
def new_file(path: Path, *, is_forced: bool) -> Iterator[Path]:
    """A file beside this one, to write to, which takes its place if no exception leaves the block.

    Raises at once where that could not be done in the end, or where there is a file already, unless `is_forced`.
    """
    # Its suffix says whether it is compressed.
    part = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        if path.exists() and not is_forced:
            raise InvalidArgumentError.of("--out", str(path), "a file that is not there yet, or any with --force")
        part.open("xb").close()
    except OSError as error:
        allowed = f"a file in a folder that can be written to ({error.strerror})"
        raise InvalidArgumentError.of("--out", str(path), allowed) from error
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


class TraceWriter:
    """Writes JSON lines; compressed where the name ends in .gz, the same bytes for the same lines."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        # Neither a time nor a name inside, so that what is equal is equal byte by byte.
        self._out: Any = gzip.GzipFile("", "wb", 9, self._file, mtime=0) if path.suffix == ".gz" else self._file

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._out is not self._file:
            self._out.close()
        self._file.close()

    def write(self, fields: dict[str, Any]) -> None:
        self._out.write(json.dumps(fields, separators=(",", ":")).encode() + b"\n")


def request_fields(request: TraceRequest, *, start_s: float) -> dict[str, Any]:
    """A line of kvtrace-1; what is not known is left out."""
    fields: dict[str, Any] = {
        "timestamp": round((request.time_s - start_s) * 1000),
        "input_length": request.input_tokens,
        "output_length": request.output_tokens,
        "session_id": request.session_id,
        "turn": request.turn,
        "stop": None if request.finish is Finish.UNKNOWN else request.finish.value,
        "expected_return_s": request.expected_return_s,
        "done": True if request.is_done else None,
        "priority": request.priority or None,
        "ttl_s": request.ttl_s,
        "added_blocks": request.added_blocks or None,
        "hash_runs": [list(run) for run in request.spans],
    }
    return {name: value for name, value in fields.items() if value is not None}


def _open(path: Path) -> TextIO:
    try:
        with path.open("rb") as file:
            is_gzip = file.read(2) == _GZIP_MAGIC
        if is_gzip:
            return gzip.open(path, "rt", encoding="utf-8")
        return path.open(encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError.of("TRACE", str(path), f"a file that can be read ({error.strerror})") from error


def _lines(path: Path, file: TextIO, limits: Limits) -> Iterator[Line]:
    number = request_count = character_count = 0
    try:
        while text := file.readline(limits.line_characters_max + 1):
            number += 1
            character_count += len(text)
            if len(text) > limits.line_characters_max:
                raise _too_large(f"{path}, line {number},", "characters", limits.line_characters_max)
            if character_count > limits.text_characters_max:
                raise _too_large(f"{path}, up to line {number},", "characters", limits.text_characters_max)
            if text.isspace():
                continue
            request_count += 1
            if request_count > limits.request_count_max:
                raise _too_large(f"{path}, up to line {number},", "requests", limits.request_count_max)
            yield Line.parse(str(path), number, text)
    except (EOFError, OSError, UnicodeDecodeError, zlib.error) as error:
        raise InvalidArgumentError(f"{path} cannot be read after line {number}: {error}") from error


def _too_large(where: str, what: str, count_max: int) -> InvalidArgumentError:
    return InvalidArgumentError(f"{where} has more than {count_max} {what}; allowed: no more than that")


def _read_kvtrace(head: Line, lines: Iterable[Line]) -> Trace:
    if head.fields["format"] != FORMAT:
        raise head.wrong("format", FORMAT)
    tokens_per_block = head.integer("block_size", low=1, high=TOKENS_MAX)
    blocks = _ChainedBlocks()
    ignored_head, ignored = Ignored(_KVTRACE_HEAD), Ignored(_KVTRACE_FIELDS)
    ignored_head.add(head)
    requests: list[TraceRequest] = []
    for line in lines:
        ignored.add(line)
        field = line.first_of("hash_runs", "hash_ids")
        if field is None:
            raise line.wrong("hash_runs", "runs of block numbers, as [[first, count], ...]")
        spans = _spans_of(line, field)
        blocks.add(line, field, spans)
        request = replace(_request(line, spans, unit_s=1e-3), added_blocks=line.optional_integer("added_blocks") or 0)
        if requests and request.time_s < requests[-1].time_s:
            raise line.wrong("timestamp", f"{requests[-1].time_s * 1000:g} or more: requests are in order of arrival")
        _check_length(line, field, request, block_count=request.prompt_blocks, tokens_per_block=tokens_per_block)
        requests.append(request)
    for name, found in (("requests", len(requests)), ("unique_blocks", len(blocks))):
        if head.has(name) and head.integer(name) != found:
            raise head.wrong(name, f"{found}, which follow; is the file complete?")
    return Trace(
        name="",
        tokens_per_block=tokens_per_block,
        requests=tuple(requests),
        unique_blocks=len(blocks),
        source=str(head.fields.get("source", "")),
        licence=str(head.fields.get("licence", "")),
        ignored_fields=ignored_head.counts | ignored.counts,
    )


def _read_mooncake(lines: Iterable[Line], *, tokens_per_block: int) -> Trace:
    numbering = Numbering()
    ignored = Ignored(_MOONCAKE_FIELDS)
    used_count = 0
    found: list[tuple[TraceRequest, array[int]]] = []
    for line in lines:
        ignored.add(line)
        hashes = array("Q", line.integers("hash_ids", high=(1 << 64) - 1))
        used_count += len(hashes)
        line.check_used_blocks(used_count)
        request = _request(line, (), unit_s=1e-3)
        _check_length(line, "hash_ids", request, block_count=len(hashes), tokens_per_block=tokens_per_block)
        found.append((request, hashes))
    # Its logs come from several machines, and are not quite in order.
    found.sort(key=lambda one: one[0].time_s)
    return Trace(
        name="",
        tokens_per_block=tokens_per_block,
        requests=tuple([replace(request, spans=numbering.spans(hashes)) for request, hashes in found]),
        unique_blocks=len(numbering),
        source="JSON lines as Mooncake's",
        ignored_fields=ignored.counts,
    )


def _request(line: Line, spans: tuple[Span, ...], *, unit_s: float) -> TraceRequest:
    return TraceRequest(
        time_s=line.time_s("timestamp", unit_s=unit_s),
        input_tokens=line.integer("input_length", high=TOKENS_MAX),
        output_tokens=line.optional_integer("output_length", high=TOKENS_MAX),
        session_id=line.optional_integer("session_id", high=(1 << 64) - 1),
        turn=line.optional_integer("turn", low=1),
        finish=line.finish("stop"),
        expected_return_s=line.number_of("expected_return_s") if line.has("expected_return_s") else None,
        is_done=line.flag("done"),
        priority=line.integer("priority", low=-2, high=2) if line.has("priority") else 0,
        ttl_s=line.number_of("ttl_s") if line.has("ttl_s") else None,
        spans=spans,
    )


def _check_length(line: Line, field: str, request: TraceRequest, *, block_count: int, tokens_per_block: int) -> None:
    """Of a prompt all blocks are there, with or without a last partial one."""
    low = request.input_tokens // tokens_per_block
    # What follows a prompt goes on behind its last full block.
    high = low if request.added_blocks else -(-request.input_tokens // tokens_per_block)
    if not low <= block_count <= high:
        raise InvalidArgumentError.of(
            f"{line.path}, line {line.number}: {field}",
            f"{block_count} blocks",
            f"{low} or {high} blocks, for input_length {request.input_tokens} and {tokens_per_block} tokens per block",
        )


def _spans_of(line: Line, field: str) -> tuple[Span, ...]:
    if field == "hash_ids":
        return tuple(as_spans(line.integers(field, high=_BLOCKS_MAX)))
    value = line.fields[field]
    allowed = (
        f"[[first, count], ...] of block numbers below {_BLOCKS_MAX}, with counts of 1 or more, "
        f"at most {_CHAIN_BLOCKS_MAX} in all"
    )
    if value == []:
        return ()
    try:
        spans = np.array(value)
    except ValueError:  # rows of unequal lengths
        raise line.wrong(field, allowed) from None
    if not isinstance(value, list) or spans.ndim != 2 or spans.shape[1] != 2 or spans.dtype.kind != "i":
        raise line.wrong(field, allowed)
    if (
        spans[:, 0].min() < 0
        or spans[:, 1].min() < 1
        or spans.max() > _BLOCKS_MAX
        or spans.sum(axis=1).max() > _BLOCKS_MAX
        or spans[:, 1].sum() > _CHAIN_BLOCKS_MAX
    ):
        raise line.wrong(field, allowed)
    return tuple((first, count) for first, count in value)


class _ChainedBlocks:
    """Checks that numbers are given by first appearance, and that each has one parent."""

    def __init__(self) -> None:
        self._count = 0
        self._parents = np.empty(1 << 12, dtype=np.int64)

    def __len__(self) -> int:
        return self._count

    def add(self, line: Line, field: str, spans: Sequence[Span]) -> None:
        if not spans:
            return
        firsts, counts = np.array(spans, dtype=np.int64).T
        starts = np.cumsum(counts) - counts
        chain = np.repeat(firsts - starts, counts) + np.arange(int(counts.sum()))
        parents = np.empty_like(chain)
        parents[0] = -1
        parents[1:] = chain[:-1]
        is_new = chain >= self._count
        known_count = int(is_new.argmax()) if is_new.any() else len(chain)
        added = chain[known_count:]
        if (added != np.arange(self._count, self._count + len(added))).any():
            raise line.wrong(field, f"numbers by first appearance, each once; {self._count} is the next new one")
        is_wrong = self._parents[chain[:known_count]] != parents[:known_count]
        if is_wrong.any():
            at = int(is_wrong.argmax())
            other, parent = ("nothing" if one < 0 else str(one) for one in (self._parents[chain[at]], parents[at]))
            raise line.wrong(
                field, f"a block stands for its whole prefix: {chain[at]} follows {other} elsewhere, {parent} here"
            )
        self._count += len(added)
        if self._count > len(self._parents):
            self._parents = np.resize(self._parents, 2 * self._count)
        self._parents[self._count - len(added) : self._count] = parents[known_count:]
