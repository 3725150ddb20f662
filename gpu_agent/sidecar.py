"""Builds a sidecar's parts once, runs them, and takes them down in order."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import prometheus_client
import structlog

from gpu_agent.config import AgentConfig
from gpu_agent.device import open_device
from gpu_agent.metrics import agent_registry
from gpu_agent.rpc import AgentServer
from gpu_agent.service import AgentService
from gpu_agent.sockets import DEFAULT_GRPC_PORT, DEFAULT_METRICS_PORT, check_loopback, claim_socket
from kvstore import __version__
from kvstore.errors import UnavailableError
from kvstore_client import Client

_WATCH_INTERVAL_S = 0.5
"""How late a dead background thread shows in the health service."""

_log = structlog.get_logger("kvstore.agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarConfig:
    """Where a sidecar listens, what it serves, and what SIGTERM does."""

    agent: AgentConfig
    store_address: str | None = None
    """The daemon; None finds the node's own, as every client does."""
    grpc_host: str = "127.0.0.1"
    """Loopback only."""
    grpc_port: int = DEFAULT_GRPC_PORT
    """TCP port; 0 takes a free one."""
    socket_path: Path | None = None
    """Unix socket for engines of this node; None for none."""
    metrics_port: int = DEFAULT_METRICS_PORT
    """TCP port of `/metrics`, on loopback; 0 takes a free one."""
    drain_s: float = 10.0
    """Seconds after SIGTERM for running calls to end and for the pool to be copied to the daemon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where a running sidecar is found; written to the ready file."""

    grpc_address: str
    unix_address: str | None
    metrics_address: str
    pid: int


class Sidecar:
    """One agent of one node as a process. `run` returns when it was told to stop, raises when it must not go on."""

    def __init__(self, config: SidecarConfig) -> None:
        self._config = config
        self._host = check_loopback(config.grpc_host)
        open_device(config.agent.device).close()  # a wrong device must fail here, not at the first engine's call
        self._client = Client(config.store_address)
        self._service = AgentService(config=config.agent, client=self._client)
        self._server = AgentServer(self._service, on_bug=self._stop_because_of)
        self._stop = threading.Event()
        self._bug: AssertionError | None = None

    def run(self, *, ready_file: Path | None = None) -> None:
        """Serves until SIGTERM or SIGINT, then drains. For the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        with ExitStack() as parts:
            parts.callback(self._client.close)
            parts.callback(self._server.stop, grace_s=0)
            addresses = Addresses(
                grpc_address=self._listen_tcp(),
                unix_address=self._listen_unix(parts),
                metrics_address=self._start_metrics(parts),
                pid=os.getpid(),
            )
            self._server.start()
            self._server.set_serving(True)
            _announce(addresses, ready_file, parts)
            _log.info("serving", version=__version__, store_address=self._client.address, **asdict(addresses))
            self._serve_until_stopped()
            self._drain()
        if self._bug is not None:
            raise self._bug

    def _listen_tcp(self) -> str:
        address = f"{self._host}:{self._config.grpc_port}"
        try:
            return f"{self._host}:{self._server.listen(address)}"
        except OSError as error:
            raise UnavailableError(
                f"cannot listen on {address}: it is in use, perhaps by another agent "
                "(`kvstore agent status` tells); free it, or choose --grpc-port (0: any free port)"
            ) from error

    def _listen_unix(self, parts: ExitStack) -> str | None:
        if self._config.socket_path is None:
            return None
        path = self._config.socket_path.absolute()
        claim_socket(path)
        try:
            self._server.listen(f"unix:{path}")
            path.chmod(0o600)  # nobody but this user, until there is authentication
        except OSError as error:
            raise UnavailableError(f"cannot listen on {path}: {error}; choose --socket-path") from error
        parts.callback(path.unlink, missing_ok=True)
        return f"unix:{path}"

    def _start_metrics(self, parts: ExitStack) -> str:
        host, port = "127.0.0.1", self._config.metrics_port
        registry = agent_registry(self._service.snapshot)
        prometheus_client.ProcessCollector(registry=registry)
        try:
            server, thread = prometheus_client.start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise UnavailableError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}; "
                "free it, or choose --metrics-port (0: any free port)"
            ) from error
        parts.callback(thread.join)
        parts.callback(server.server_close)
        parts.callback(server.shutdown)
        return f"{host}:{server.server_port}"

    def _serve_until_stopped(self) -> None:
        is_healthy = True
        while not self._stop.wait(_WATCH_INTERVAL_S):
            if is_healthy and self._service.failure is not None:
                is_healthy = False
                self._server.set_serving(False)
                _log.critical("offloading_ended", failure=self._service.failure, hint="restart this agent")

    def _drain(self) -> None:
        """Takes no new calls, lets running ones finish, and gives the daemon what is in the pool."""
        deadline_s = time.monotonic() + self._config.drain_s
        self._server.set_serving(False)
        _log.info("draining", drain_s=self._config.drain_s)
        # Half each: a call that hangs must not cost the pool its copies.
        self._server.stop(grace_s=self._config.drain_s / 2)
        is_flushed = self._service.close(flush_s=max(0.0, deadline_s - time.monotonic()))
        _log.info("stopped", is_flushed=is_flushed)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop.set()

    def _stop_because_of(self, bug: AssertionError) -> None:
        self._bug = bug
        self._stop.set()


def configure_logs() -> None:
    """Structured logs on stderr: for people on a terminal, JSON lines otherwise."""
    is_console = sys.stderr.isatty()
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if is_console else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if is_console else [structlog.processors.format_exc_info]),
            renderer,
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _announce(addresses: Addresses, ready_file: Path | None, parts: ExitStack) -> None:
    """One line on stdout, and the same in the ready file, which appears whole or not at all."""
    line = json.dumps(asdict(addresses))
    print(line, flush=True)  # noqa: T201  (this is the command's output)
    if ready_file is None:
        return
    try:
        with tempfile.NamedTemporaryFile("w", dir=ready_file.parent, delete=False) as file:
            file.write(line + "\n")
        Path(file.name).replace(ready_file)
    except OSError as error:
        raise UnavailableError(f"cannot write the ready file {ready_file}: {error.strerror}") from error
    parts.callback(ready_file.unlink, missing_ok=True)
