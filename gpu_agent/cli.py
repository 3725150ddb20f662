"""`kvstore agent`: the VRAM tier as a process of its own. Needs torch only to serve."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from kvstore.errors import DeadlineExceededError, InvalidArgumentError, KvstoreError, UnavailableError
from kvstore.eviction import POLICIES
from kvstore.messages import AgentStatus
from kvstore.precision import BLOCK_PRECISIONS
from kvstore_client.sizes import parse_size


def _size_bytes(context: click.Context, parameter: click.Parameter, value: str) -> int:
    try:
        return parse_size(value, field=parameter.opts[0])
    except InvalidArgumentError as error:
        raise click.UsageError(str(error), context) from error


def _quotas_bytes(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    quotas: dict[str, int] = {}
    for value in values:
        name, equals, size = value.rpartition("=")
        if not equals or not name or name in quotas:
            problem = "each name once" if name in quotas else "NAME=SIZE, such as my-model=8GiB"
            raise click.UsageError(str(InvalidArgumentError.of("--quota", value, problem)), context)
        quotas[name] = _size_bytes(context, parameter, size)
    return quotas


_PORT = click.IntRange(0, 65535)
_SERVE_OPTIONS = (
    click.option(
        "--vram-capacity", callback=_size_bytes, metavar="SIZE", default="1GiB", show_default=True,
        envvar="KVSTORE_AGENT_VRAM_CAPACITY", show_envvar=True, help="Bytes of VRAM for blocks. A hard cap.",
    ),
    click.option(
        "--quota", "quotas", multiple=True, callback=_quotas_bytes, metavar="NAME=SIZE",
        help="Bytes of it that are kept for a model, or for a namespace by the first digits of its id; repeatable. "
        "Namespaces without one share what is left.",
    ),
    click.option(
        "--idle-release", "idle_release_s", type=click.FloatRange(min=0), default=300.0, show_default=True,
        metavar="SECONDS", help="A namespace that no engine uses for so long gives its memory to one that needs it.",
    ),
    click.option(
        "--device", default="cpu", show_default=True, envvar="KVSTORE_AGENT_DEVICE", show_envvar=True,
        help="cuda:N, or cpu for the same tier in host memory.",
    ),
    click.option(
        "--policy", type=click.Choice(POLICIES), default="phix", show_default=True,
        help="Which blocks leave VRAM first.",
    ),
    click.option(
        "--precision", type=click.Choice(list(BLOCK_PRECISIONS)), default="exact", show_default=True,
        help="In how many bits blocks are stored below VRAM.",
    ),
    click.option(
        "--precision-under-pressure", type=click.Choice(list(BLOCK_PRECISIONS)),
        help="The same while the link is busy; fewer bits.  [default: as ever]",
    ),
    click.option("--store-address", help="The daemon: host:port or unix:/path. Found by itself when not given."),
    click.option("--socket-path", help="Unix socket for engines; '' for none.  [default: beside the daemon's]"),
    click.option("--grpc-host", default="127.0.0.1", show_default=True, help="Loopback only: no authentication yet."),
    click.option("--grpc-port", type=_PORT, default=7452, show_default=True, help="TCP port; 0 takes a free one."),
    click.option("--metrics-port", type=_PORT, default=7453, show_default=True, help="Of /metrics; 0: a free one."),
    click.option(
        "--drain", "drain_s", type=click.FloatRange(min=0), default=10.0, show_default=True, metavar="SECONDS",
        help="Time after SIGTERM to copy the pool to the daemon.",
    ),
    click.option(
        "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True,
        help="Least severity that is written.",
    ),
    click.option(
        "--log-format", type=click.Choice(["auto", "console", "json"]), default="auto", show_default=True,
        help="auto: console on a terminal, json otherwise.",
    ),
    click.option(
        "--ready-file", type=click.Path(path_type=Path, dir_okay=False),
        help="Written once the agent serves: its addresses as JSON; removed when it stops.",
    ),
)  # fmt: skip


def _serve_options(command: Any) -> Any:
    for option in reversed(_SERVE_OPTIONS):
        command = option(command)
    return command


@click.group(invoke_without_command=True)
@_serve_options
@click.pass_context
def agent(context: click.Context, /, **flags: Any) -> None:
    """Run the agent that keeps blocks in VRAM, or ask one how it does.

    \b
    Without a subcommand it serves: engines store blocks, cold ones move to the
    daemon in batches, and come back when they are asked for. SIGTERM copies
    what is in VRAM to the daemon.

    \b
    Examples:
      kvstore agent --device cuda:0 --vram-capacity 16GiB
      kvstore agent serve --grpc-port 0 --ready-file /run/kvstore-agent.json
      kvstore agent status --json
    """
    subcommand = context.invoked_subcommand
    if subcommand is None:
        _serve(**flags)
        return
    misplaced = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name is not None
        and context.get_parameter_source(parameter.name) is click.core.ParameterSource.COMMANDLINE
    ]
    if misplaced:
        raise click.UsageError(
            f"{', '.join(misplaced)} before `{subcommand}` would have no effect; options go behind it: "
            f"`kvstore agent {subcommand} {misplaced[0]} ...`"
        )


@agent.command()
@_serve_options
def serve(**flags: Any) -> None:
    """Run the agent of this node; `kvstore agent` alone does the same."""
    _serve(**flags)


@agent.command()
@click.option(
    "--address", metavar="ADDRESS",
    help="The agent: host:port or unix:/path.  "
    "[default: $KVSTORE_AGENT_ADDRESS, else this node's unix socket, else 127.0.0.1:7452]",
)  # fmt: skip
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object, for scripts.")
@click.option("--timeout", "timeout_s", default=2.0, show_default=True, metavar="SECONDS",
              type=click.FloatRange(min=0, min_open=True), help="Longest wait for an answer.")  # fmt: skip
def status(address: str | None, *, is_json: bool, timeout_s: float) -> None:
    """Show what is in VRAM and what has moved.

    \b
    Examples:
      kvstore agent status
      kvstore agent status --address 127.0.0.1:7452 --json | jq .lost_count
    """
    from gpu_agent.ask import ask_status
    from kvstore_client.agent.address import find_agent

    try:
        used_address = find_agent(address)
        found = ask_status(used_address, timeout_s=timeout_s)
    except InvalidArgumentError as error:
        raise click.UsageError(str(error)) from error
    except (UnavailableError, DeadlineExceededError) as error:
        raise click.ClickException(
            f"{error}\nIs an agent running? Start one with `kvstore agent`, or name it with --address or "
            "$KVSTORE_AGENT_ADDRESS."
        ) from error
    except KvstoreError as error:
        raise click.ClickException(f"{used_address}: {error}") from error
    if is_json:
        click.echo(json.dumps(dataclasses.asdict(found) | {"address": used_address}, default=bytes.hex))
    else:
        click.echo("\n".join(_lines(found)))


def _serve(*, vram_capacity: int, quotas: dict[str, int], idle_release_s: float, device: str, policy: str,
           precision: str, precision_under_pressure: str | None, store_address: str | None,
           socket_path: str | None, grpc_host: str, grpc_port: int, metrics_port: int, drain_s: float,
           ready_file: Path | None, log_level: str, log_format: str) -> None:  # fmt: skip
    from kvstore_client.hosting import open_standard_files

    open_standard_files()
    try:
        from gpu_agent.sidecar import Sidecar, SidecarConfig
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"`kvstore agent` needs {error.name}, which is not installed. "
            "In a checkout of this project: pip install '.[agent]'"
        ) from error
    from gpu_agent.config import AgentConfig
    from kvstore_client.logs import configure_logs

    configure_logs(level=log_level, log_format=log_format)
    try:
        sidecar = Sidecar(
            SidecarConfig(
                agent=AgentConfig(
                    vram_capacity_bytes=vram_capacity,
                    device=device,
                    policy=policy,
                    precision=precision,
                    precision_under_pressure=precision_under_pressure,
                ),
                store_address=store_address,
                grpc_host=grpc_host,
                grpc_port=grpc_port,
                socket_path=_socket_path(socket_path),
                metrics_port=metrics_port,
                quotas=quotas,
                idle_release_s=idle_release_s,
                drain_s=drain_s,
            )
        )
    except InvalidArgumentError as error:
        raise click.UsageError(str(error)) from error
    try:
        sidecar.run(ready_file=ready_file)
    except KvstoreError as error:
        raise click.ClickException(str(error)) from error


def _socket_path(given: str | None) -> Path | None:
    if given is None:
        from kvstore_client.agent.address import default_agent_socket_path

        return default_agent_socket_path()
    return Path(given) if given else None


def _lines(found: AgentStatus) -> list[str]:
    rows = [
        ("device", found.device),
        ("vram", f"{_size(found.used_bytes)} of {_size(found.capacity_bytes)} used, at most {_size(found.peak_bytes)}"),
        ("blocks", f"{found.resident_count:,} resident"),
        ("migrated", f"{found.migrated_count:,} to the daemon in {found.migration_batch_count:,} batches"),
        ("reloaded", f"{found.reloaded_count:,}"),
        ("lost", f"{found.lost_count:,}"),
        ("step", f"{found.step:,}"),
        ("uptime", f"{found.uptime_s:.0f} s, kvstore {found.version}"),
    ]
    rows += [
        (
            one.namespace_id.hex()[:8],
            f"{_size(one.used_bytes)} of {_size(one.capacity_bytes)}, {one.session_count} engines, {one.model}",
        )
        for one in found.namespaces
    ]
    return [f"{name:<10} {value}" for name, value in rows]


def _size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
