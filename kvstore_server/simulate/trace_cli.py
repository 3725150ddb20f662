"""`kvstore trace`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import click

from kvstore.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from kvstore.messages import DescribedNamespace
from kvstore.namespace import Namespace
from kvstore_client.cli import asking, daemon_options
from kvstore_server.simulate.bounds import infinite
from kvstore_server.simulate.cli import reading_options
from kvstore_server.simulate.recording import Recording
from kvstore_server.simulate.suite import Source, read_source
from kvstore_server.simulate.trace import Trace
from kvstore_server.simulate.traces import write_trace

_TAKEN_EVERY_S = 0.5


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

    \b
    Example:
      kvstore trace info trace.jsonl.gz --json | jq .infinite_percent
    """
    found = read_source(Source(path=path, tokens_per_block=block_tokens, tokenizer=tokenizer))
    sessions = {request.session_id for request in found.requests if request.session_id is not None}
    gaps_s = _return_gaps_s(found)
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
    }
    if is_json:
        click.echo(json.dumps(figures))
        return
    of_sessions = f" of {len(sessions):,} sessions" if sessions else ""
    gap = f", back after {figures['median_return_gap_s']} s at the median" if gaps_s else ""
    rows = [
        ("source", f"{found.source}; licence: {found.licence or 'not told'}"),
        ("requests", f"{len(found.requests):,}{of_sessions} in {found.duration_s:,.0f} s{gap}"),
        ("prompts", f"{found.input_tokens:,} tokens, {figures['median_input_tokens']:,} at the median"),
        (
            "blocks",
            f"{found.block_accesses:,} used, {found.unique_blocks:,} unique, of {found.tokens_per_block} tokens",
        ),
        ("ceiling", f"{figures['infinite_percent']:.2f} % of tokens hit in a cache that never evicts"),
    ]
    click.echo("\n".join(f"{name:<10} {value}" for name, value in rows))


@trace.command()
@click.argument("path", metavar="TRACE", type=click.Path(path_type=Path))
@click.option("--out", required=True, metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
              help="The file to write; compressed if its name ends in .gz.")  # fmt: skip
@reading_options
def convert(path: Path, *, out: Path, block_tokens: int | None, tokenizer: str | None) -> None:
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
    found = read_source(Source(path=path, tokens_per_block=block_tokens, tokenizer=tokenizer))
    write_trace(found, out, real="times, lengths and equal prefixes as in the source")
    click.echo(f"{out}: {len(found.requests):,} requests, {found.unique_blocks:,} unique blocks")


@trace.command()
@click.option("--out", required=True, metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
              help="The file to write; compressed if its name ends in .gz.")  # fmt: skip
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
    id_prefix: str,
    duration_s: float | None,
    request_count_max: int | None,
    timeout_s: float,
    is_json: bool,
) -> None:
    """Write what is asked of a daemon as a trace.

    Of one namespace, as its lookups are seen by the daemon: when, and which
    blocks by numbers that tell nothing of them, with the hints that clients
    give. Ends at Ctrl-C, and the file is written then.

    \b
    Fields of --json:
      path, namespace_id, requests, unique_blocks
      dropped_count  accesses that came too fast to be taken

    \b
    Examples:
      kvstore trace record --out trace.jsonl.gz --for 3600
      kvstore trace record --address 10.0.0.5:7450 --namespace 3fa2 --out trace.jsonl.gz
    """
    with asking(address, timeout_s=timeout_s) as client:
        namespace = _chosen(client.namespaces().namespaces, id_prefix)
        recording = Recording(tokens_per_block=namespace.tokens_per_block)
        until_s = float("inf") if duration_s is None else time.monotonic() + duration_s
        dropped_count = 0
        try:
            taken = client.accesses(namespace)
            epoch = taken.epoch
            click.echo(f"recording {namespace.id.hex()[:16]} {namespace.model}, until Ctrl-C or as told", err=True)
            while time.monotonic() < until_s and len(recording) < (request_count_max or float("inf")):
                if not taken.accesses:
                    time.sleep(min(_TAKEN_EVERY_S, max(until_s - time.monotonic(), 0.0)))
                taken = client.accesses(namespace, after_number=taken.last_number)
                dropped_count += taken.dropped_count
                if taken.epoch != epoch:
                    click.echo("the daemon has restarted, and names blocks anew: the recording ends here", err=True)
                    break
                for access in taken.accesses:
                    recording.add(access)
        except KeyboardInterrupt:
            pass
        except (UnavailableError, DeadlineExceededError) as error:
            if not len(recording):
                raise
            click.echo(f"the recording ends here: {error}", err=True)
    found = recording.trace(name=out.name, source=f"recorded on a daemon, model {namespace.model}")
    write_trace(found, out, real="times of lookups, equal prefixes in full blocks, and hints")
    figures = {
        "path": str(out),
        "namespace_id": namespace.id.hex(),
        "requests": len(found.requests),
        "unique_blocks": found.unique_blocks,
        "dropped_count": dropped_count,
    }
    if is_json:
        click.echo(json.dumps(figures))
        return
    lost = f", {dropped_count:,} accesses lost" if dropped_count else ""
    click.echo(f"{out}: {len(found.requests):,} requests, {found.unique_blocks:,} unique blocks{lost}")


def _chosen(known: Sequence[DescribedNamespace], id_prefix: str) -> Namespace:
    matching = [one.namespace for one in known if one.namespace.id.hex().startswith(id_prefix.lower())]
    if len(matching) != 1:
        there = ", ".join(f"{one.namespace.id.hex()[:16]} ({one.namespace.model})" for one in known) or "none yet"
        raise InvalidArgumentError.of("--namespace", id_prefix, f"the start of the id of exactly one of: {there}")
    return matching[0]


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
