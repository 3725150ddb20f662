"""Makes `sessions.json` from a trace of real sessions.

    python -m gpu_agent.bench.record agents_text.jsonl.gz --sessions 24 > gpu_agent/bench/sessions.json

The trace is of the format `kvtrace-1` (docs/simulate.md). Taken are the last `--turns` of the longest sessions that
only ever grow; what a session had before them is in the prompt of its first turn. Their real pauses and lengths stay in
proportion to each other: both are divided by `--compress`, so that a session takes seconds and not minutes. All begin
within the first steps, one after the other.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import lt
from pathlib import Path
from typing import Any

import click

from gpu_agent.bench.sessions import Session, Sessions, Turn, to_json
from kvstore.errors import InvalidArgumentError

TOKENS_PER_BLOCK = 16
STEP_S = 0.02
"""Of an engine that the trace's seconds are translated to."""
_PAUSE_MAX_MS = 30_000


def record(
    meta: Mapping[str, Any],
    requests: Iterable[Mapping[str, Any]],
    *,
    session_count: int,
    turn_count: int,
    tokens_max: int,
    compress: int,
    start_gap_steps: int,
) -> Sessions:
    by_session: dict[int, list[Mapping[str, Any]]] = {}
    for request in requests:
        by_session.setdefault(request["session_id"], []).append(request)
    growing = [asked[-turn_count:] for asked in by_session.values() if _fits(asked, turn_count, tokens_max)]
    longest = sorted(growing, key=lambda asked: -asked[-1]["input_length"])[:session_count]
    if len(longest) < session_count:
        raise InvalidArgumentError.of("--sessions", session_count, f"at most {len(longest)}, which only grow")
    return Sessions(
        source=meta["source"],
        licence=meta["licence"],
        compress=compress,
        tokens_per_block=TOKENS_PER_BLOCK,
        sessions=tuple(
            Session(
                name=f"session-{number}",
                turns=tuple(_turns(asked, compress=compress, first_pause_steps=number * start_gap_steps)),
            )
            for number, asked in enumerate(longest)
        ),
    )


def _fits(asked: Sequence[Mapping[str, Any]], turn_count: int, tokens_max: int) -> bool:
    """Long enough, not too long, ever growing, and without a pause that outlasts the others' work."""
    lengths = [request["input_length"] for request in asked]
    times_ms = [request["timestamp"] for request in asked]
    is_steady = all(after - before <= _PAUSE_MAX_MS for before, after in pairwise(times_ms))
    return len(asked) >= turn_count and lengths[-1] <= tokens_max and all(map(lt, lengths, lengths[1:])) and is_steady


def _turns(asked: Sequence[Mapping[str, Any]], *, compress: int, first_pause_steps: int) -> Iterable[Turn]:
    before_tokens, pause_steps = 0, first_pause_steps
    for request, following in zip(asked, [*asked[1:], None], strict=True):
        output_tokens = max(1, round(request["output_length"] / compress))
        input_tokens = max(1, round(request["input_length"] / compress) - before_tokens)
        yield Turn(pause_steps=pause_steps, input_tokens=input_tokens, output_tokens=output_tokens)
        before_tokens += input_tokens + output_tokens
        if following is not None:
            between_steps = (following["timestamp"] - request["timestamp"]) / 1000 / STEP_S / compress
            pause_steps = max(0, round(between_steps) - output_tokens)


@click.command(help=__doc__)
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--sessions", "session_count", default=24, show_default=True, type=click.IntRange(min=1))
@click.option("--turns", "turn_count", default=6, show_default=True, type=click.IntRange(min=1))
@click.option("--tokens-max", default=12_000, show_default=True, type=click.IntRange(min=1))
@click.option("--compress", default=8, show_default=True, type=click.IntRange(min=1))
@click.option("--start-gap", "start_gap_steps", default=8, show_default=True, type=click.IntRange(min=0))
def main(
    *, trace: Path, session_count: int, turn_count: int, tokens_max: int, compress: int, start_gap_steps: int
) -> None:
    with gzip.open(trace, "rt", encoding="utf-8") as lines:
        meta, *requests = map(json.loads, lines)
    recorded = record(
        meta,
        requests,
        session_count=session_count,
        turn_count=turn_count,
        tokens_max=tokens_max,
        compress=compress,
        start_gap_steps=start_gap_steps,
    )
    click.echo(json.dumps(to_json(recorded), separators=(",", ":")))


if __name__ == "__main__":
    main()
