"""Builds a sidecar's parts once, runs them, and takes them down in order."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

import prometheus_client
import structlog

from gpu_agent.attach.listener import AttachListener
from gpu_agent.config import AgentConfig
from gpu_agent.device import open_device
from gpu_agent.metrics import agent_registry
from gpu_agent.rpc import AgentServer
from gpu_agent.service import AgentService
from kvstore import __version__
from kvstore.agent_attach import ATTACH_SOCKET_SUFFIX
from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore_client import Client
from kvstore_client.agent.address import DEFAULT_AGENT_PORT
from kvstore_client.hosting import (
    LOOPBACK_ALLOWED,
    Addresses,
    Role,
    announce,
    is_loopback,
    listen_tcp,
    listen_unix,
)

DEFAULT_METRICS_PORT = 7453
_WATCH_INTERVAL_S = 0.5
"""How late a dead background thread shows in the health service."""

_ROLE = Role(
    name="agent", asked_with="kvstore agent status", port_setting="--grpc-port", socket_setting="--socket-path"
)

_log = structlog.get_logger("kvstore.agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarConfig:
    """Where a sidecar listens, what it serves, and what SIGTERM does."""

    agent: AgentConfig
    store_address: str | None = None
    """The daemon; None finds the node's own, as every client does."""
    grpc_host: str = "127.0.0.1"
    """Loopback only."""
    grpc_port: int = DEFAULT_AGENT_PORT
    """TCP port; 0 takes a free one."""
    socket_path: Path | None = None
    """Unix socket for engines of this node, with the one that hands out the pools beside it; None for neither."""
    quotas: Mapping[str, int] = field(default_factory=dict)
    """Bytes of `vram_capacity_bytes` that are kept for models, or for namespaces by the first digits of their id."""
    idle_release_s: float = 300.0
    """Seconds after which a namespace that no engine is attached to may give its memory to another one."""
    metrics_port: int = DEFAULT_METRICS_PORT
    """TCP port of `/metrics`, on loopback; 0 takes a free one."""
    drain_s: float = 10.0
    """Seconds after SIGTERM for running calls to end and for the pool to be copied to the daemon."""


class Sidecar:
    """One agent of one node as a process. `run` returns when it was told to stop, raises when it must not go on."""

    def __init__(self, config: SidecarConfig) -> None:
        self._config = config
        if not is_loopback(config.grpc_host):
            raise InvalidArgumentError.of("--grpc-host", config.grpc_host, LOOPBACK_ALLOWED)
        _check_device(config.agent)
        self._client = Client(config.store_address)
        self._service = AgentService(
            config=config.agent, client=self._client, quotas=config.quotas, idle_release_s=config.idle_release_s
        )
        self._attach = AttachListener(
            self._service.share_of, on_tick=self._service.expire, on_bug=self._stop_because_of
        )
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
            parts.callback(self._attach.stop)
            listen, config = self._server.listen, self._config
            path = config.socket_path
            if path is not None:
                attach_path = path.with_name(path.name + ATTACH_SOCKET_SUFFIX)
                address = listen_unix(self._attach.listen, attach_path, role=_ROLE, parts=parts)
                self._service.attach_socket = address.removeprefix("unix:")
            addresses = Addresses(
                grpc_address=listen_tcp(listen, host=config.grpc_host, port=config.grpc_port, role=_ROLE),
                unix_address=None if path is None else listen_unix(listen, path, role=_ROLE, parts=parts),
                metrics_address=self._start_metrics(parts),
                pid=os.getpid(),
            )
            self._attach.start()
            self._server.start()
            self._server.set_serving(True)
            announce(addresses, ready_file, parts)
            _log.info("serving", version=__version__, store_address=self._client.address, **asdict(addresses))
            self._serve_until_stopped()
            self._drain()
        if self._bug is not None:
            raise self._bug

    def _start_metrics(self, parts: ExitStack) -> str:
        host, port = "127.0.0.1", self._config.metrics_port
        registry = agent_registry(self._service.snapshot)
        prometheus_client.ProcessCollector(registry=registry)
        try:
            server, thread = prometheus_client.start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise UnavailableError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}; "
                "free it, or set --metrics-port (0: any free port)"
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
        self._attach.stop()
        is_flushed = self._service.close(flush_s=max(0.0, deadline_s - time.monotonic()))
        _log.info("stopped", is_flushed=is_flushed)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop.set()

    def _stop_because_of(self, bug: AssertionError) -> None:
        self._bug = bug
        self._stop.set()


def _check_device(config: AgentConfig) -> None:
    """What can never work must fail at the start, not at the first engine's call, which allocates the pool."""
    with closing(open_device(config.device)) as device:
        if config.vram_capacity_bytes > device.memory_bytes:
            raise InvalidArgumentError.of(
                "--vram-capacity",
                config.vram_capacity_bytes,
                f"up to {device.memory_bytes}, the memory of {device.name}",
            )
