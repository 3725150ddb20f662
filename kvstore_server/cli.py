"""`kvstore serve` and `kvstore config`."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import click

from kvstore.errors import InvalidArgumentError, KvstoreError
from kvstore_client.hosting import open_standard_files
from kvstore_client.start_environment import (
    ALLOCATOR_MMAP_THRESHOLD_BYTES,
    ALLOCATOR_TRIM_THRESHOLD_BYTES,
    GRPC_EXPERIMENTS,
)
from kvstore_server.config import Config, load_config, unknown_environment
from kvstore_server.machine import keep_freed_memory

_FLAGS: tuple[tuple[str, str, str, type, str], ...] = (
    ("--memory-capacity", "memory", "capacity", str, "Bytes of host memory for blocks, such as 8GiB. A hard cap."),
    (
        "--nvme-path",
        "nvme",
        "path",
        str,
        "Folder on a disk for blocks that memory has no room for; '' for none.  [default: none]",
    ),
    ("--nvme-capacity", "nvme", "capacity", str, "Bytes of that folder, such as 200GiB. A hard cap."),
    ("--grpc-port", "grpc", "port", int, "TCP port of the store service; 0 takes a free one.  [default: 7450]"),
    ("--socket-path", "grpc", "socket_path", str, "Unix socket for clients on this node; '' for none."),
    (
        "--bulk-port",
        "bulk",
        "port",
        str,
        "TCP port of the data port, 0 for a free one, or auto: 7454, or free if --grpc-port is.  [default: auto]",
    ),
    ("--metrics-port", "metrics", "port", int, "TCP port of /metrics; 0 takes a free one.  [default: 7451]"),
    ("--log-level", "log", "level", str, "debug, info, warning or error.  [default: info]"),
    ("--log-format", "log", "format", str, "auto, console or json.  [default: auto]"),
)


def _config_options(command: Any) -> Any:
    for flag, section, field, kind, text in reversed(_FLAGS):
        command = click.option(flag, f"{section}__{field}", type=kind, default=None, help=text)(command)
    return click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path),
        envvar="KVSTORE_CONFIG",
        show_envvar=True,
        help="YAML file with any of the settings that `kvstore config` lists.",
    )(command)


def _load(config_file: Path | None, flags: dict[str, Any]) -> Config:
    sections: dict[str, dict[str, object]] = {}
    for name, value in flags.items():
        if value is not None:
            section, field = name.split("__")
            sections.setdefault(section, {})[field] = value
    try:
        return load_config(file=config_file, flags=sections)
    except InvalidArgumentError as error:
        raise click.UsageError(str(error)) from error


@click.command()
@_config_options
@click.option(
    "--ready-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Written once the daemon serves: its addresses as JSON; removed when it stops.",
)
@click.option("--json", "as_json", is_flag=True, help="Log JSON lines, as --log-format json does.")
def serve(config_file: Path | None, ready_file: Path | None, as_json: bool, **flags: Any) -> None:
    """Run the store daemon of this node.

    \b
    Needs no configuration: it takes a quarter of this machine's memory, listens
    on 127.0.0.1:7450 and on a unix socket that clients find by themselves, and
    prints its addresses as one JSON line when it serves. SIGTERM drains it.

    \b
    Examples:
      kvstore serve
      kvstore serve --memory-capacity 64GiB
      kvstore serve --nvme-path /var/cache/kvstore --nvme-capacity 200GiB
      kvstore serve --grpc-port 0 --metrics-port 0 --ready-file /run/kvstore.json
      KVSTORE_MEMORY__CAPACITY=8GiB kvstore serve --config kvstore.yaml
    """
    open_standard_files()
    if as_json:
        flags["log__format"] = "json"
    config = _load(config_file, flags)
    # Read when gRPC starts. Its lines on stderr are not ours.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    os.environ.setdefault("GRPC_EXPERIMENTS", GRPC_EXPERIMENTS)
    keep_freed_memory(request_bytes_max=ALLOCATOR_MMAP_THRESHOLD_BYTES, kept_bytes=ALLOCATOR_TRIM_THRESHOLD_BYTES)
    import structlog
    import uvloop

    from kvstore_server.daemon import Daemon
    from kvstore_server.obs.logs import configure_logs

    configure_logs(config.log)
    for name in unknown_environment():
        structlog.get_logger("kvstore.config").warning(
            "unknown_setting", variable=name, hint="a setting is KVSTORE_SECTION__FIELD; see `kvstore config`"
        )

    async def main() -> None:
        await Daemon(config).run(ready_file=ready_file)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    except InvalidArgumentError as error:
        raise click.UsageError(str(error)) from error
    except KvstoreError as error:
        raise click.ClickException(str(error)) from error


@click.command()
@_config_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of YAML.")
def config(config_file: Path | None, as_json: bool, **flags: Any) -> None:
    """Show the configuration that `kvstore serve` would run with.

    \b
    Sources, last wins: defaults, the YAML file, KVSTORE_ environment variables
    (KVSTORE_MEMORY__CAPACITY=8GiB), flags. The output is itself a valid file:

    \b
      kvstore config > kvstore.yaml
      kvstore serve --config kvstore.yaml
    """
    values = _load(config_file, flags).model_dump(mode="json")
    for name in unknown_environment():
        click.echo(f"Warning: ${name} is no setting; a setting is KVSTORE_SECTION__FIELD", err=True)
    if as_json:
        click.echo(json.dumps(values, indent=2))
        return
    import yaml

    click.echo(yaml.safe_dump(values, sort_keys=False), nl=False)
