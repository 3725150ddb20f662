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

Measure = Callable[..., dict[str, object]]
Row = tuple[str, str]
"""What a line of the table says, and the name of its figure."""


@click.group()
def bench() -> None:
    """Measure this machine: blocks and lookups, beside the best that it can do.

    Every figure is a median of samples that were taken in turn with those of
    its limit, so that a busy machine is busy for both; read the ratios. All
    but nvme run a daemon of their own, on free ports, unless --address names
    one. Speeds are 10^9 bytes per second.
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
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        cells = [row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].ljust(widths[2])]
        cells += [row[3].rjust(widths[3]), row[4].rjust(widths[4])]
        click.echo("  ".join(cells).rstrip())
    for label, name in lines:
        click.echo(f"{label}: {_text(figures.get(name))}")
    for name, value in figures.items():
        if name.endswith("_reason"):
            click.echo(f"{name.removesuffix('_reason')} was not measured: {value}")
    click.echo(", ".join(f"{name} {figures[name]}" for name in ("cores", "page_bytes", "rounds") if name in figures))


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
