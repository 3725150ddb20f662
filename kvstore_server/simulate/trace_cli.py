"""`kvstore trace`."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import click

from kvstore.errors import InvalidArgumentError
from kvstore_client.cli import asking, daemon_options
from kvstore_server.simulate.bounds import infinite
from kvstore_server.simulate.cli import reading_options, say_ignored
from kvstore_server.simulate.record import ending_by_signal, record_accesses
from kvstore_server.simulate.suite import Source, read_source
from kvstore_server.simulate.trace import Trace
from kvstore_server.simulate.traces import new_file, write_trace

force_option = click.option("--force", "is_forced", is_flag=True, help="Replace the file if it is there.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def trace() -> None:
    """Look into recorded requests, convert them, or record a daemon's.

    A trace has when requests came, how long they were and which blocks they
    shared, as numbers: no text, no tokens and no names.

    \b
    Examples:
      kvstore trace info trace.jsonl.gz
      kvstore trace convert log.jsonl --tokenizer ./model --out trace.jsonl.gz
      kvstore trace record --out trace.jsonl.gz --for 3600
    """


@trace.command()
@click.argument("path", metavar="TRACE", type=click.Path(path_type=Path))
@reading_options
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object, for scripts.")
def info(path: Path, *, block_tokens: int | None, tokenizer: str | None, is_json: bool) -> None:
    """Check a trace, and show what is in it.

    \b
    Fields of --json:
      path, source, licence, tokens_per_block
      requests, sessions      the latter null where none are named
      duration_s, input_tokens, median_input_tokens, median_return_gap_s
      block_accesses, unique_blocks
      infinite_percent        token hit rate of a cache that never evicts
      ignored_fields          names that mean nothing here, with their lines

    \b
    Example:
      kvstore trace info trace.jsonl.gz --json | jq .infinite_percent
    """
    found = read_source(Source(path=path, tokens_per_block=block_tokens, tokenizer=tokenizer))
    sessions = {request.session_id for request in found.requests if request.session_id is not None}
    gaps_s = _return_gaps_s(found)
    say_ignored(found.name, found.ignored_fields)
    figures = {
        "path": str(path),
        "source": found.source,
        "licence": found.licence,
        "tokens_per_block": found.tokens_per_block,
        "requests": len(found.requests),
        "sessions": len(sessions) or None,
        "duration_s": round(found.duration_s, 3),
        "input_tokens": found.input_tokens,
        "median_input_tokens": median(request.input_tokens for request in found.requests),
        "median_return_gap_s": round(median(gaps_s), 3) if gaps_s else None,
        "block_accesses": found.block_accesses,
        "unique_blocks": found.unique_blocks,
        "infinite_percent": round(100 * infinite(found).token_hit_rate, 4),
        "ignored_fields": found.ignored_fields,
    }
    if is_json:
        click.echo(json.dumps(figures))
        return
    of_sessions = f" of {len(sessions):,} session{'' if len(sessions) == 1 else 's'}" if sessions else ""
    gap = f"; a session's next one comes after {figures['median_return_gap_s']} s (median)" if gaps_s else ""
    rows = [
        ("source", f"{found.source or 'not told'}; licence: {found.licence or 'not told'}"),
        ("requests", f"{len(found.requests):,}{of_sessions} in {found.duration_s:,.0f} s{gap}"),
        ("prompts", f"{found.input_tokens:,} tokens; the median prompt has {figures['median_input_tokens']:,.0f}"),
        ("blocks", f"{found.unique_blocks:,} of {found.tokens_per_block} tokens, used {found.block_accesses:,} times"),
        ("ceiling", f"a cache that never evicts hits {figures['infinite_percent']:.2f} % of the tokens"),
    ]
    click.echo("\n".join(f"{name:<10} {value}" for name, value in rows))


@trace.command()
@click.argument("path", metavar="TRACE", type=click.Path(path_type=Path))
@click.option("--out", required=True, metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
              help="The file to write; compressed if its name ends in .gz.")  # fmt: skip
@force_option
@reading_options
def convert(path: Path, *, out: Path, is_forced: bool, block_tokens: int | None, tokenizer: str | None) -> None:
    """Write a trace as kvtrace-1, in which there is no text.

    Blocks and sessions become numbers by first appearance, which tell nothing
    of what they stand for.

    \b
    Examples:
      kvstore trace convert conversation_trace.jsonl --out trace.jsonl.gz
      kvstore trace convert log.jsonl --tokenizer ./model --block-tokens 64 --out trace.jsonl.gz
    """
    if out.exists() and out.samefile(path):
        raise InvalidArgumentError.of("--out", str(out), "another file than the one that is read")
    with new_file(out, is_forced=is_forced) as part:
        found = read_source(Source(path=path, tokens_per_block=block_tokens, tokenizer=tokenizer))
        say_ignored(found.name, found.ignored_fields)
        write_trace(found, part, real="times, lengths and equal prefixes as in the source")
    click.echo(f"{out}: {len(found.requests):,} requests, {found.unique_blocks:,} unique blocks")


@trace.command()
@click.option("--out", required=True, metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
              help="The file to write; compressed if its name ends in .gz.")  # fmt: skip
@force_option
@click.option("--namespace", "id_prefix", metavar="HEX", default="",
              help="The namespace, by the start of its id.  [default: the only one]")  # fmt: skip
@click.option("--for", "duration_s", metavar="SECONDS", type=click.FloatRange(min=0, min_open=True),
              help="End after so long.  [default: at Ctrl-C]")  # fmt: skip
@click.option("--requests", "request_count_max", metavar="COUNT", type=click.IntRange(min=1),
              help="End after so many requests.")  # fmt: skip
@daemon_options
def record(
    address: str | None,
    *,
    out: Path,
    is_forced: bool,
    id_prefix: str,
    duration_s: float | None,
    request_count_max: int | None,
    timeout_s: float,
    is_json: bool,
) -> None:
    """Write what is asked of a daemon as a trace.

    Of one namespace, as the daemon sees it: what is looked up, when, and what
    is stored behind it, as blocks by numbers that tell nothing of them, with the
    hints that clients give. Waits for the namespace if no client has opened it
    yet. The file is written at the end: after --for, at Ctrl-C or SIGTERM.

    \b
    Fields of --json:
      path, namespace_id, requests, unique_blocks
      dropped_count  accesses that came too fast to be taken

    \b
    Examples:
      kvstore trace record --out trace.jsonl.gz --for 3600
      kvstore trace record --address 10.0.0.5:7450 --namespace 3fa2 --out trace.jsonl.gz
    """
    with new_file(out, is_forced=is_forced) as part, ending_by_signal() as is_ending:
        with asking(address, timeout_s=timeout_s) as client:
            recorded = record_accesses(
                client,
                id_prefix=id_prefix,
                duration_s=duration_s,
                request_count_max=request_count_max,
                is_ending=is_ending,
            )
        namespace = recorded.namespace
        found = recorded.recording.trace(name=out.name, source=f"recorded on a daemon, model {namespace.model}")
        write_trace(found, part, real="times of lookups, equal prefixes in full blocks, and hints")
    figures = {
        "path": str(out),
        "namespace_id": namespace.id.hex(),
        "requests": len(found.requests),
        "unique_blocks": found.unique_blocks,
        "dropped_count": recorded.dropped_count,
    }
    if is_json:
        click.echo(json.dumps(figures))
        return
    lost = f", {recorded.dropped_count:,} accesses lost" if recorded.dropped_count else ""
    click.echo(f"{out}: {len(found.requests):,} requests, {found.unique_blocks:,} unique blocks{lost}")


def _return_gaps_s(found: Trace) -> list[float]:
    """Between the requests of a session."""
    last_s: dict[int, float] = {}
    gaps_s = []
    for request in found.requests:
        if request.session_id is not None:
            if request.session_id in last_s:
                gaps_s.append(request.time_s - last_s[request.session_id])
            last_s[request.session_id] = request.time_s
    return gaps_s
