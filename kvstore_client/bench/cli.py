"""`kvstore bench`."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import click

from kvstore import __version__
from kvstore.messages import BATCH_COUNT_MAX
from kvstore_client.address import parse_address
from kvstore_client.bench import blocks, lookup, node, stream
from kvstore_client.bench.plan import Plan, Progress
from kvstore_client.bench.processes import ended_by_signals
from kvstore_client.logs import configure_logs
from kvstore_client.sizes import parse_size

_LINE_STEP = 0.25
"""Share of the work after which a line says so where there is no progress bar."""
_NVME_MEASURE = "kvstore_server.nvme.bench.measure", "measure"
"""Loaded when it is called: it is made of the daemon's parts, which clients do without."""
_AGENT_MODULE = "gpu_agent.bench.measure"
"""Likewise of the agent's, and it needs torch."""

Measure = Callable[..., dict[str, object]]
Row = tuple[str, str]
"""What a line of the table says, and the name of its figure."""


@click.group()
def bench() -> None:
    """Measure blocks, lookups and the agent, beside the best that this machine can do.

    Every figure is a median of samples that were taken in turn with those of
    its limit, so that a busy machine is busy for both; read the ratios. All
    but nvme run a daemon of their own, on free ports; node, stream and lookup
    take another with --address. Speeds are 10^9 bytes per second.
    """


def _options(*, round_count: int, has_blocks: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    options = [
        click.option("--json", "is_json", is_flag=True, help="Print one JSON object, for scripts."),
        click.option("--rounds", "round_count", default=round_count, show_default=True, metavar="COUNT",
                     type=click.IntRange(min=1), help="Samples of each kind; more steady the medians."),
        click.option("--address", metavar="ADDRESS",
                     help="Measure this daemon instead: host:port or unix:/path. It keeps what the benchmark stores."),
    ]  # fmt: skip
    if has_blocks:
        options += [
            click.option("--blocks", "block_count", default=16, show_default=True, metavar="COUNT",
                         type=click.IntRange(1, BATCH_COUNT_MAX), help="Blocks in one call."),
            click.option("--block-size", default="2MiB", show_default=True, metavar="SIZE",
                         help="Bytes of a block; 2MiB is 16 tokens of an 8B model."),
        ]  # fmt: skip

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@bench.command(name="node")
@_options(round_count=61, has_blocks=True)
def node_command(*, is_json: bool, **options: Any) -> None:
    """Blocks between a client and its node's daemon, through shared memory.

    \b
    Beside it: memcpy, a plain copy of the same blocks between two private
    buffers that are faulted in and too large for the caches. Per sample one
    call moves --blocks blocks, checksums included.
      get_vs_memcpy, put_vs_memcpy
          speed of a get into the caller's buffer, and of a put of blocks that
          the store has never seen, over the speed of memcpy; the client has
          put or got these blocks before, so it knows where they are
      get_first_vs_memcpy
          the same for blocks that the client has not met, and has to ask for
      view_us_p50, view_first_us_p50
          microseconds for a view of --blocks blocks, taken and given back: of
          blocks that this process has seen before, and of new ones, whose
          checksums are taken first
      get_4_clients_vs_memcpy_4, put_4_clients_vs_memcpy_4
          speed of four client processes together over that of four processes
          that copy; all start at once, and the last one's end counts

    \b
    Examples:
      kvstore bench node
      kvstore bench node --json | jq .get_vs_memcpy
      kvstore bench node --blocks 64 --block-size 512KiB
    """
    rows = [
        ("get", "get_gb_per_s", "memcpy", "memcpy_gb_per_s", "get_vs_memcpy"),
        ("get, blocks not met before", "get_first_gb_per_s", "memcpy", "memcpy_gb_per_s", "get_first_vs_memcpy"),
        ("put", "put_gb_per_s", "memcpy", "memcpy_gb_per_s", "put_vs_memcpy"),
        ("get, 4 clients", "get_4_clients_gb_per_s", "memcpy, 4", "memcpy_4_gb_per_s", "get_4_clients_vs_memcpy_4"),
        ("put, 4 clients", "put_4_clients_gb_per_s", "memcpy, 4", "memcpy_4_gb_per_s", "put_4_clients_vs_memcpy_4"),
    ]
    figures = _run("node", node.measure, transport="slab", is_json=is_json, **options)
    _show(figures, is_json=is_json, unit="GB/s", rows=rows, lines=[
        ("view, µs", "view_us_p50"), ("first view, µs", "view_first_us_p50"),
    ])  # fmt: skip


@bench.command(name="stream")
@_options(round_count=41, has_blocks=True)
def stream_command(*, is_json: bool, **options: Any) -> None:
    """Blocks over the network paths: gRPC streams, the bulk port, NIXL.

    \b
    Beside them: tcp, one plain connection to another process on loopback that
    sends each block with sendmsg and takes it with recv_into, without any
    checksum; and for NIXL, NIXL alone between the same two processes.
      grpc_get_vs_tcp, grpc_put_vs_tcp, bulk_get_vs_tcp, bulk_put_vs_tcp
          speed of a get or put of --blocks blocks, checksums included, over
          the speed of tcp in that direction
      nixl_vs_bare
          the lower one of nixl_get_vs_bare and nixl_put_vs_bare: speed through
          our client over the speed of NIXL alone
    A path that cannot be measured is null, and PATH_reason says why.

    \b
    Examples:
      kvstore bench stream
      kvstore bench stream --json | jq .grpc_get_vs_tcp
    """
    rows = []
    for side, limit, vs in (("grpc", "tcp", "tcp"), ("bulk", "tcp", "tcp"), ("nixl", "nixl_bare", "bare")):
        for action in ("get", "put"):
            name = f"{side}_{action}"
            rows.append(
                (f"{side} {action}", f"{name}_gb_per_s", limit, f"{limit}_{action}_gb_per_s", f"{name}_vs_{vs}")
            )
    figures = _run("stream", stream.measure, transport="grpc", is_json=is_json, **options)
    _show(figures, is_json=is_json, unit="GB/s", rows=rows, lines=[])


@bench.command(name="lookup")
@_options(round_count=100, has_blocks=False)
def lookup_command(*, is_json: bool, **options: Any) -> None:
    """Lookups of a prompt's blocks, from a list of hashes to a result.

    \b
    Beside them: MGET of as many keys from a Redis of its own, over a unix
    socket, from a list of keys to a list of values, in the faster of two
    forms: one made for keys and values of this length, and redis-py's mget.
    And a ping: as many bytes to and fro, with nothing done at either end.
      lookup_8192_p50_ms, lookup_8192_p99_ms, lookup_256_p50_ms, lookup_256_p99_ms
          milliseconds for a lookup of so many hashes, all of them hits that
          this client has put; lookup_256_first_p50_ms and so on are of a
          client that has to ask the daemon
      lookup_256_vs_ping, lookup_8192_vs_ping
          how many times as long as the ping
      lookups_per_s, lookup_hashes_per_s
          lookups of 256 hashes, and hashes in lookups of 8192, that one client
          gets answered per second
      lookup_vs_redis
          time of Redis' fastest form for 8192 keys over ours; null without a
          redis-server; lookup_256_vs_redis is the same for 256

    \b
    Examples:
      kvstore bench lookup
      kvstore bench lookup --json | jq .lookup_8192_p50_ms
    """
    figures = _run(
        "lookup", lookup.measure, transport="auto", is_json=is_json, block_count=0, block_size="512", **options
    )
    rows = []
    for count in lookup.PROMPT_COUNTS:
        name = f"lookup_{count}"
        rows.append(
            (f"{count} hashes, p50", f"{name}_p50_ms", "Redis MGET", f"redis_{count}_p50_ms", f"{name}_vs_redis")
        )
    lines = [(f"{count} hashes, p99 ms", f"lookup_{count}_p99_ms") for count in lookup.PROMPT_COUNTS]
    lines += [(f"{count} hashes, first, ms", f"lookup_{count}_first_p50_ms") for count in lookup.PROMPT_COUNTS]
    lines += [(f"{count} hashes, of a ping", f"lookup_{count}_vs_ping") for count in lookup.PROMPT_COUNTS]
    lines += [("lookups of 256 per s", "lookups_per_s"), ("hashes per s", "lookup_hashes_per_s")]
    _show(figures, is_json=is_json, unit="ms", rows=rows, lines=lines)


@bench.command(name="nvme")
@click.option(
    "--path",
    "folder",
    type=click.Path(path_type=Path),
    default=".",
    metavar="DIR",
    help="Folder on the disk to measure, this one by default; a temporary one is made in it.",
)
@click.option(
    "--capacity",
    default="4GiB",
    show_default=True,
    metavar="SIZE",
    help="Of the tier, at most a quarter of what is free; the limit's files take as much.",
)
@click.option(
    "--block-size",
    default="2MiB",
    show_default=True,
    metavar="SIZE",
    help="Bytes of a block; 2MiB is 16 tokens of an 8B model.",
)
@click.option(
    "--blocks",
    "block_count",
    default=16,
    show_default=True,
    metavar="COUNT",
    type=click.IntRange(1, BATCH_COUNT_MAX),
    help="Blocks in one batch.",
)
@click.option(
    "--rounds",
    "round_count",
    default=25,
    show_default=True,
    metavar="COUNT",
    type=click.IntRange(min=1),
    help="Samples of each kind; more steady the medians.",
)
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object, for scripts.")
def nvme_command(
    *, folder: Path, capacity: str, block_size: str, block_count: int, round_count: int, is_json: bool
) -> None:
    """Blocks between the daemon's memory and the NVMe tier.

    \b
    Beside them: the disk, by pwritev and preadv of as many blocks of the same
    size, by as many threads, past the page cache (O_DIRECT) as well, with an
    fdatasync per batch, on files of the same size that were written before.
      write_vs_disk, read_vs_disk
          speed of four batches from their eviction until they are durable and
          can be found, and from the disk until they are verified in memory,
          over the speed of the disk
      churn_vs_fresh, read_churn_vs_fresh
          the same ratios after all blocks were replaced in a random order,
          over those before, when the tier was being filled
      write_p50_ms, write_p99_ms, read_p50_ms, read_p99_ms
          milliseconds for one batch of --blocks, of a full tier
      read_block_p50_ms, read_block_p99_ms
          milliseconds for one block
      write_amplification
          bytes written to the device for each byte of a block
      recovery_s, recovery_large_s
          seconds until 100,000 blocks can be found again after a restart, of
          --block-size and of blocks four times as large
      is_direct
          whether blocks go past the page cache; where they do not, the figures
          tell of the disk less

    \b
    Examples:
      kvstore bench nvme --path /var/cache
      kvstore bench nvme --json | jq .write_vs_disk
    """
    block_bytes = parse_size(block_size, field="--block-size")
    blocks.namespace(block_bytes, revision="check")  # refuses a size that no block can have
    capacity_bytes = parse_size(capacity, field="--capacity")
    configure_logs(level="error", log_format="console")
    about = _about("nvme", block_count=block_count, block_bytes=block_bytes) | {"rounds": round_count}
    module, name = _NVME_MEASURE
    measure = cast("Measure", getattr(importlib.import_module(module), name))
    with ended_by_signals(), _progress("nvme", is_shown=not is_json) as progress:
        figures = about | measure(
            folder=folder,
            capacity_bytes=capacity_bytes,
            block_count=block_count,
            block_bytes=block_bytes,
            round_count=round_count,
            progress=progress,
        )
    rows = [
        (
            f"{action}{label}",
            f"{action}{part}_gb_per_s",
            "disk",
            f"disk_{action}{part}_gb_per_s",
            f"{action}{part}_vs_disk",
        )
        for action in ("write", "read")
        for label, part in (("", ""), (", all replaced", "_churned"))
    ]
    _show(figures, is_json=is_json, unit="GB/s", rows=rows, lines=[
        ("write, all replaced over before", "churn_vs_fresh"),
        ("read, all replaced over before", "read_churn_vs_fresh"),
        ("write of a batch, p99 ms", "write_p99_ms"), ("disk, p99 ms", "disk_write_p99_ms"),
        ("read of a batch, p99 ms", "read_p99_ms"), ("disk, p99 ms", "disk_read_p99_ms"),
        ("read of a block, p50 ms", "read_block_p50_ms"), ("read of a block, p99 ms", "read_block_p99_ms"),
        ("bytes written per byte of a block", "write_amplification"),
        ("recovery, s", "recovery_s"), ("recovery of larger blocks, s", "recovery_large_s"),
        ("past the page cache", "is_direct"),
    ])  # fmt: skip


@bench.command(name="agent")
@click.option(
    "--rounds",
    "round_count",
    default=3,
    show_default=True,
    metavar="COUNT",
    type=click.IntRange(min=1),
    help="Runs of each kind, in turn; more steady the medians.",
)
@click.option(
    "--block-size",
    default="256KiB",
    show_default=True,
    metavar="SIZE",
    help="Bytes of a block. Larger ones make this machine's own memory the link.",
)
@click.option(
    "--vram-share",
    default=0.5,
    show_default=True,
    metavar="SHARE",
    type=click.FloatRange(0, 1, min_open=True),
    help="The agent's pool, of what there is without tiering.",
)
@click.option(
    "--batch",
    "batch_count",
    default=4,
    show_default=True,
    metavar="COUNT",
    type=click.IntRange(min=1),
    help="Most sequences in one step.",
)
@click.option(
    "--slice",
    "slice_steps",
    default=64,
    show_default=True,
    metavar="STEPS",
    type=click.IntRange(min=1),
    help="After so many a sequence lets others go first.",
)
@click.option(
    "--step-ms",
    default=20.0,
    show_default=True,
    metavar="MS",
    type=click.FloatRange(min=0, min_open=True),
    help="Computing of one step: time that passes.",
)
@click.option(
    "--link-ms",
    default=0.5,
    show_default=True,
    metavar="MS",
    type=click.FloatRange(min=0, min_open=True),
    help="A block's time between the pool and the daemon's memory.",
)
@click.option("--policy", default="phix", show_default=True, help="Which blocks leave first that nobody waits for.")
@click.option(
    "--sessions",
    "sessions_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Other sessions than those in the package: what `python -m gpu_agent.bench.record` makes of a trace.",
)
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object, for scripts.")
def agent_command(
    *, round_count: int, block_size: str, vram_share: float, batch_count: int, slice_steps: int, step_ms: float,
    link_ms: float, policy: str, sessions_file: Path | None, is_json: bool,
) -> None:  # fmt: skip
    """Sequences whose K and V do not fit in VRAM, kept running by the agent.

    A serving loop with continuous batching over recorded sessions: prompts
    come, are computed, answered token by token, and come back longer. The
    accelerator is imitated: a step's computing and a block's time on the link
    are time that passes. The blocks, the agent, its link's order and the
    daemon behind it, started for this, are real; whatever a sequence starts
    with and ends with is compared byte for byte with what was written.

    \b
    Beside it, on the same schedule and in turn: baseline, a pool in which all
    sessions have room, and naive, which fetches all blocks of a sequence when
    it starts and brings them away when it stops.
      peak_vs_baseline, naive_peak_vs_baseline
          most blocks in the pool at any time, over baseline; at most 0.5
      throughput_vs_baseline, naive_throughput_vs_baseline
          tokens per second over baseline; at least 0.9
      prefetch_hit_rate
          of the blocks that were not in the pool before a sequence needed them,
          those that were there when it did; at least 0.9
      stall_fraction, naive_stall_fraction
          share of the time in which the accelerator waited for blocks, or for
          room; at most 0.05
      link_utilisation, offloaded_bytes, loaded_bytes
          share of the time in which blocks moved, and how much each way
      moved_vs_clairvoyant, clairvoyant_link_vs_compute
          bytes over those of somebody who knows the whole schedule and has all
          slots of the pool; and how long those take, over all computing: the
          limit of this schedule
      link_block_ms, host_overrun_fraction
          what the imitated link really takes for a block on this machine, and
          the share of time in which it was not through with its own part, such
          as comparing: if that is much, the figures tell of the machine

    Exits with 1 when a figure is not what it should be.

    \b
    Examples:
      kvstore bench agent
      kvstore bench agent --json | jq .throughput_vs_baseline
      kvstore bench agent --vram-share 0.3 --slice 32 --rounds 1
    """
    block_bytes = parse_size(block_size, field="--block-size")
    blocks.namespace(block_bytes, revision="check")  # refuses a size that no block can have
    module = _agent_module()
    configure_logs(level="error", log_format="console")
    about = _about("agent", block_count=0, block_bytes=block_bytes) | {"block_bytes": block_bytes}
    with ended_by_signals(), _progress("agent", is_shown=not is_json) as progress:
        figures = (
            about
            | {"rounds": round_count}
            | module.measure(
                sessions_file=sessions_file,
                batch_count=batch_count,
                slice_steps=slice_steps,
                step_s=step_ms / 1e3,
                link_block_s=link_ms / 1e3,
                block_bytes=block_bytes,
                vram_share=vram_share,
                policy=policy,
                round_count=round_count,
                progress=progress,
            )
        )
    missed = module.missed_targets(figures)
    if is_json:
        click.echo(json.dumps(figures))
    else:
        _show_agent(figures, targets=module.TARGETS)
    for text in missed:
        click.echo(text, err=True)
    if missed:
        raise SystemExit(1)


def _agent_module() -> Any:
    try:
        return importlib.import_module(_AGENT_MODULE)
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"`kvstore bench agent` needs {error.name}, which is not installed. "
            "In a checkout of this project: pip install '.[agent]'"
        ) from error


def _show_agent(figures: Mapping[str, object], *, targets: Mapping[str, tuple[str, float]]) -> None:
    table = [("", "agent", "should be", "naive", "no tiering")]
    for label, name, naive, baseline in (
        ("most blocks in the pool, of no tiering", "peak_vs_baseline", "naive_peak_vs_baseline", "1.00"),
        ("tokens per second, of no tiering", "throughput_vs_baseline", "naive_throughput_vs_baseline", "1.00"),
        ("blocks that were there in time", "prefetch_hit_rate", "", ""),
        ("waiting for blocks, of the time", "stall_fraction", "naive_stall_fraction", ""),
    ):
        kind, limit = targets[name]
        table.append((label, _text(figures[name]), f"{kind} {limit}", _text(figures[naive]) if naive else "", baseline))
    agent, naive, baseline = (_text(figures[f"{name}_tokens_per_s"]) for name in ("agent", "naive", "baseline"))
    table.append(("tokens per second", agent, "", naive, baseline))
    used = [_text(figures[name]) for name in ("link_utilisation", "naive_link_utilisation")]
    table.append(("link in use, of the time", used[0], "", used[1], ""))
    _show_table(table)
    for label, name in (
        ("bytes to the daemon", "offloaded_bytes"),
        ("bytes back", "loaded_bytes"),
        ("bytes, of a clairvoyant's", "moved_vs_clairvoyant"),
        ("the clairvoyant's link time, of all computing", "clairvoyant_link_vs_compute"),
        ("ms per block on the link, as measured", "link_block_ms"),
        ("this machine not through with its part, of the time", "host_overrun_fraction"),
        ("blocks compared byte for byte", "checked_blocks"),
    ):
        click.echo(f"{label}: {_text(figures[name])}")
    click.echo(
        f"{figures['sequences']} sequences, {figures['steps']} steps, {figures['baseline_blocks']} blocks of "
        f"{figures['block_bytes']} bytes, {figures['vram_blocks']} in VRAM, cores {figures['cores']}, "
        f"rounds {figures['rounds']}"
    )


def _about(name: str, *, block_count: int, block_bytes: int) -> dict[str, object]:
    """What every benchmark says of itself."""
    about: dict[str, object] = {"benchmark": name, "version": __version__, "cores": len(os.sched_getaffinity(0))}
    return about | ({"block_count": block_count, "block_bytes": block_bytes} if block_count else {})


def _run(
    name: str,
    measure: Measure,
    *,
    transport: str,
    is_json: bool,
    address: str | None,
    block_count: int,
    block_size: str,
    round_count: int,
) -> dict[str, object]:
    block_bytes = parse_size(block_size, field="--block-size")
    blocks.namespace(block_bytes, revision="check")  # refuses a size that no block can have
    plan = Plan(
        address=None if address is None else parse_address(address, field="--address"),
        transport=transport,
        block_count=block_count,
        block_bytes=block_bytes,
        round_count=round_count,
    )
    about = _about(name, block_count=block_count, block_bytes=block_bytes)
    with ended_by_signals(), _progress(name, is_shown=not is_json) as progress:
        figures = measure(plan, progress=progress)
    return about | {"rounds": round_count} | figures


@contextmanager
def _progress(name: str, *, is_shown: bool) -> Iterator[Progress]:
    """A bar on a terminal where rich is installed, else lines; both on stderr."""
    if not is_shown:
        yield lambda _: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress as Bar
    except ModuleNotFoundError:
        console = None
    else:
        console = Console(stderr=True)
    if console is None or not console.is_terminal:
        yield _line_by_line(name)
        return
    # Drawn between samples only, not by a thread that would run during them.
    with Bar(console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(f"bench {name}", total=1.0)
        yield lambda share: bar.update(task, completed=share, refresh=True)


def _line_by_line(name: str) -> Progress:
    next_share = 0.0

    def tell(share: float) -> None:
        nonlocal next_share
        if share >= next_share:
            next_share = share - share % _LINE_STEP + _LINE_STEP
            click.echo(f"bench {name}: {share:.0%}", err=True)

    return tell


def _show(
    figures: Mapping[str, object],
    *,
    is_json: bool,
    unit: str,
    rows: Sequence[tuple[str, str, str, str, str]],
    lines: Sequence[Row],
) -> None:
    if is_json:
        click.echo(json.dumps(figures))
        return
    table = [("", unit, "beside", unit, "ratio")]
    for label, ours, limit_label, limit, ratio in rows:
        table.append(
            (label, _text(figures.get(ours)), limit_label, _text(figures.get(limit)), _text(figures.get(ratio)))
        )
    _show_table(table)
    for label, name in lines:
        click.echo(f"{label}: {_text(figures.get(name))}")
    for name, value in figures.items():
        if name.endswith("_reason"):
            click.echo(f"{name.removesuffix('_reason')} was not measured: {value}")
    click.echo(", ".join(f"{name} {figures[name]}" for name in ("cores", "page_bytes", "rounds") if name in figures))


def _show_table(table: Sequence[tuple[str, str, str, str, str]]) -> None:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        cells = [row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].ljust(widths[2])]
        cells += [row[3].rjust(widths[3]), row[4].rjust(widths[4])]
        click.echo("  ".join(cells).rstrip())


def _text(value: object) -> str:
    match value:
        case None:
            return "-"
        case float() if value < 100:
            return f"{value:.2f}"
        case float():
            return f"{value:,.0f}"
        case _:
            return str(value)
