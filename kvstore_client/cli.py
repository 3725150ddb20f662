"""The `kvstore` command. Subcommands are loaded when they are called, so `kvstore --help` loads none of them."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import click

from kvstore import __version__
from kvstore.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    KvstoreError,
    ProtocolError,
    UnavailableError,
)
from kvstore.messages import NamespaceStats, NvmeState, NvmeStats, ReuseStats, StoreStats
from kvstore_client.client import Client
from kvstore_client.config import ClientConfig
from kvstore_client.paths.slab_calls import AttachRefusedError

EXIT_FAILED = 1
EXIT_USAGE = 2


class _Entry(NamedTuple):
    """Where a subcommand is, what `--help` says of it unloaded, and the extra of the package that brings it."""

    target: str
    summary: str
    extra: str | None = None


_COMMANDS = {
    "serve": _Entry("kvstore_server.cli:serve", "Run the daemon on this node."),
    "ping": _Entry("kvstore_client.cli:ping", "Check that a daemon answers, and how fast."),
    "stats": _Entry("kvstore_client.cli:stats", "Show what a daemon holds and has done."),
    "why-miss": _Entry("kvstore_client.why_miss:why_miss", "Name what keeps namespaces from sharing blocks."),
    "config": _Entry("kvstore_server.cli:config", "Show the settings that `kvstore serve` would run with."),
    "plan": _Entry("kvstore_server.plan.cli:plan", "Work out what each tier must hold for a model."),
    "simulate": _Entry("kvstore_server.simulate.cli:simulate", "Replay recorded requests: what would each policy hit?"),
    "trace": _Entry("kvstore_server.simulate.trace_cli:trace", "Look into recorded requests, convert or record them."),
    "nvme": _Entry("kvstore_server.nvme.cli:nvme", "Look into a folder of the NVMe tier, or check it."),
    "bench": _Entry("kvstore_client.bench.cli:bench", "Measure blocks and lookups beside what this machine can do."),
    "agent": _Entry("gpu_agent.cli:agent", "Run the agent that keeps blocks in VRAM.", "agent"),
    "ablate": _Entry("gpu_agent.ablate.cli:ablate", "Measure what fewer bits for K and V cost a model.", "demo"),
    "demo": _Entry("gpu_agent.demo.cli:demo", "See the whole store at work on a real model.", "demo"),
}


class _LazyGroup(click.Group):
    """A group whose subcommands come from a table of names."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = _COMMANDS.get(cmd_name)
        return None if entry is None else _load(cmd_name, entry)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"no command {args[0]!r}; there are: {', '.join(_COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in _COMMANDS.items()])


def _load(name: str, entry: _Entry) -> click.Command:
    module_name, _, attribute = entry.target.partition(":")
    try:
        command = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        if entry.extra is None:
            raise
        raise click.ClickException(
            f"`kvstore {name}` needs {error.name}, which is not installed. "
            f"In a checkout of this project: pip install '.[{entry.extra}]'"
        ) from error
    assert isinstance(command, click.Command), f"{entry.target} is {command!r}, not a command"
    return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvstore")
def cli() -> None:
    """KV-cache store for language-model serving.

    Keeps the KV cache of prompts in memory, shared by all engines of a node, so that no prefix is computed twice.

    \b
    First steps:
      kvstore serve                       run a daemon with defaults fit for this machine
      kvstore ping                        does it answer?
      kvstore stats                       what does it hold?
      kvstore demo                        see it work on a small model

    \b
    Which daemon the commands talk to, first that is given or answers:
      --address, $KVSTORE_ADDRESS, this node's unix socket, 127.0.0.1:7450
    """


def daemon_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--timeout", "timeout_s", default=2.0, show_default=True, metavar="SECONDS",
                     type=click.FloatRange(min=0, min_open=True), help="Longest wait for an answer."),
        click.option("--json", "is_json", is_flag=True, help="Print one JSON object, for scripts."),
        click.option("--address", metavar="ADDRESS",
                     help="The daemon: host:port or unix:/path. Found by itself when not given."),
    ):  # fmt: skip
        command = option(command)
    return command


@cli.command()
@daemon_options
def ping(address: str | None, *, is_json: bool, timeout_s: float) -> None:
    """Check that a daemon answers, and how fast.

    Exits with 0 when it does, 1 when it does not. Says how the NVMe tier is, where there is one.

    \b
    Examples:
      kvstore ping
      kvstore ping --address 127.0.0.1:7450 --timeout 0.5
      kvstore ping --json | jq .round_trip_s
    """
    with asking(address, timeout_s=timeout_s) as client:
        client.info()  # connects, so that the next one measures the round trip alone
        started_s = time.perf_counter()
        info = client.info()
        round_trip_s = time.perf_counter() - started_s
        nvme = client.stats().nvme
        used_address, transport = client.address, client.transport
    if is_json:
        shown = dataclasses.asdict(info) | {
            "epoch": info.epoch.hex(),
            "address": used_address,
            "transport": transport,
            "round_trip_s": round(round_trip_s, 6),
            "has_nixl": bool(info.nixl_metadata),
            "nvme": _nvme_json(nvme),
        }
        del shown["nixl_metadata"]  # who has it has the daemon's memory: nothing for a log
        click.echo(json.dumps(shown))
        return
    state = "draining, takes no new blocks" if info.draining else "serving"
    click.echo(
        f"{used_address}: kvstore {info.version}, {state}, up {_duration(info.uptime_s)}, "
        f"answers in {round_trip_s * 1e3:.2f} ms, transport {transport or 'none'}"
    )
    if nvme is not None:
        click.echo(f"nvme {_nvme_state(nvme)}")


@cli.command()
@daemon_options
def stats(address: str | None, *, is_json: bool, timeout_s: float) -> None:
    """Show what a daemon holds and has done since its start.

    \b
    Examples:
      kvstore stats
      kvstore stats --json | jq '.used_bytes / .capacity_bytes'
    """
    with asking(address, timeout_s=timeout_s) as client:
        found = client.stats()
    if is_json:
        shown = dataclasses.asdict(found) | {
            "nvme": _nvme_json(found.nvme),
            "reuse": _reuse_json(found.reuse),
            "recent_reuse": _reuse_json(found.recent_reuse),
        }
        for namespace in shown["namespaces"]:
            namespace["namespace_id"] = namespace["namespace_id"].hex()
        click.echo(json.dumps(shown))
        return
    click.echo("\n".join(_stats_lines(found)))


_IS_HUNG = "SETTINGS"
"""gRPC's word for a peer that took the connection and has not greeted: stopped, or far too busy."""


@contextmanager
def asking(address: str | None, *, timeout_s: float) -> Iterator[Client]:
    """A client whose failures say what to do about them."""
    with Client(address, config=ClientConfig(control_timeout_s=timeout_s)) as client:
        try:
            yield client
        except AttachRefusedError as error:
            raise AttachRefusedError(f"{client.address}: {error}") from error
        except UnavailableError as error:
            if _IS_HUNG in str(error):
                raise DeadlineExceededError(
                    f"{client.address} accepts connections and does not answer. Either nothing that speaks gRPC is "
                    "there: is it the right port? Or the daemon is hung or overloaded: look at its log."
                ) from error
            raise UnavailableError(
                f"no daemon answers at {client.address} ({error}). "
                "Start one with `kvstore serve`, or name it with --address or $KVSTORE_ADDRESS. "
                "If something runs there: does it speak gRPC, is it the right port?"
            ) from error
        except InternalError as error:
            if "UNIMPLEMENTED" not in str(error):
                raise
            raise ProtocolError(
                f"{client.address} is no store daemon; if it is an agent, ask it with `kvstore agent status`"
            ) from error
        except DeadlineExceededError as error:
            raise DeadlineExceededError(
                f"{client.address} did not answer within {timeout_s:g} s. "
                "The daemon is hung, overloaded or far away: look at its log, or allow more with --timeout. "
                "Or nothing that speaks gRPC is there: is it the right port?"
            ) from error


def _stats_lines(found: StoreStats) -> list[str]:
    looked_up = found.hit_count + found.miss_count + found.pending_count
    memory = f"{_size(found.used_bytes)} of {_size(found.capacity_bytes)} used, {_size(found.ready_bytes)} ready"
    lookups = (
        f"{looked_up:,} blocks: {found.hit_count:,} hits, {found.pending_count:,} pending, {found.miss_count:,} misses"
    )
    rows = [
        ("memory", memory),
        ("blocks", f"{found.block_count:,} stored, {found.reservation_count:,} being written"),
        ("leases", f"{found.lease_count:,}"),
        ("lookups", lookups),
        ("reads", f"{found.sent_count + found.unsent_count:,} blocks: {found.sent_count:,} hits"),
        ("moved", f"{_size(found.written_bytes)} in, {_size(found.read_bytes)} out"),
        ("committed", f"{found.committed_count:,}"),
        ("evicted", f"{found.evicted_count:,}"),
        ("refused", f"{found.refused_count:,} blocks"),
        ("corrupt", f"{found.corrupt_count:,}"),
        ("uptime", _duration(found.uptime_s)),
    ]
    if found.nvme is not None:
        rows.insert(1, ("nvme", f"{_nvme_state(found.nvme)}; {_nvme_counts(found.nvme)}"))
        rows.insert(2, ("prefetch", _prefetch_line(found.nvme)))
    if found.policy:
        rows.insert(1, ("policy", _policy_line(found)))
    if found.recent_reuse is not None:
        at = next(index for index, (name, _) in enumerate(rows) if name == "lookups")
        rows.insert(at + 1, ("reuse", _reuse_line(found.recent_reuse)))
    rows += [("namespace", _namespace_line(namespace)) for namespace in found.namespaces]
    return [f"{name:<10} {value}" for name, value in rows]


def _namespace_line(namespace: NamespaceStats) -> str:
    return (
        f"{namespace.namespace_id.hex()[:16]} {namespace.model}: {namespace.block_count:,} blocks, "
        f"{_size(namespace.used_bytes)}, slots of {_size(namespace.slot_bytes)}"
    )


def _reuse_line(reuse: ReuseStats) -> str:
    gap = ", ".join(f"{cause} {share:.1%}" for cause, share in reuse.gap_ratios().items() if round(share, 3))
    return (
        f"of the last {_duration(reuse.window_s)}: hits {reuse.hit_ratio:.1%} of a possible {reuse.ceiling_ratio:.1%}"
        f"{'; missing for ' + gap if gap else ''}"
    )


def _reuse_json(reuse: ReuseStats | None) -> dict[str, Any] | None:
    if reuse is None:
        return None
    return dataclasses.asdict(reuse) | {
        "hit_ratio": reuse.hit_ratio,
        "ceiling_ratio": reuse.ceiling_ratio,
        "gap_ratios": reuse.gap_ratios(),
    }


def _nvme_state(nvme: NvmeStats) -> str:
    if nvme.state is NvmeState.OK:
        return f"ok {_size(nvme.used_bytes)} of {_size(nvme.capacity_bytes)}"
    return f"{nvme.state.name}: {nvme.reason}"


def _nvme_counts(nvme: NvmeStats) -> str:
    return (
        f"{nvme.block_count:,} blocks, {nvme.hit_count:,} hits, {nvme.demoted_count:,} demoted, "
        f"{nvme.promoted_count:,} promoted, {nvme.evicted_count:,} evicted, {nvme.dropped_count:,} dropped"
    )


def _policy_line(found: StoreStats) -> str:
    if found.nvme is None or not found.nvme.policy:
        return found.policy
    return f"memory {found.policy}; NVMe {found.nvme.policy}, admission {found.nvme.admission}"


def _prefetch_line(nvme: NvmeStats) -> str:
    """What came of the blocks that were brought ahead of their use."""
    known = nvme.prefetch_useful_count + nvme.prefetch_late_count + nvme.prefetch_wasted_count
    share = f" ({nvme.prefetch_useful_count / known:.0%} of those known)" if known else ""
    return (
        f"{nvme.prefetch_started_count:,} blocks: {nvme.prefetch_useful_count:,} useful{share}, "
        f"{nvme.prefetch_late_count:,} late, {nvme.prefetch_wasted_count:,} wasted; "
        f"{nvme.prefetch_refused_count:,} not begun"
    )


def _nvme_json(nvme: NvmeStats | None) -> dict[str, Any] | None:
    return None if nvme is None else dataclasses.asdict(nvme) | {"state": nvme.state.name.lower()}


def _size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, whole_seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (whole_seconds, "s")]
    shown = [f"{count} {unit}" for count, unit in parts if count]
    return " ".join(shown[:2])


def main(arguments: list[str] | None = None) -> Any:
    """Runs the command line: 0 when it worked, 1 with a reason on stderr when not, 2 for wrong usage."""
    try:
        return cli.main(args=arguments, prog_name="kvstore")
    except KvstoreError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(EXIT_USAGE if isinstance(error, InvalidArgumentError) else EXIT_FAILED)


if __name__ == "__main__":
    main()
