"""Builds the daemon's parts once, runs them, and takes them down in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import stat
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from kvstore import __version__
from kvstore.errors import UnavailableError
from kvstore.eviction import Watermarks
from kvstore.messages import Epoch
from kvstore_server.config import Config
from kvstore_server.core.space import SlabId, SlabSpace
from kvstore_server.core.store import StoreCore
from kvstore_server.obs.metrics import MetricsServer
from kvstore_server.rpc.grpc_server import GrpcServer
from kvstore_server.rpc.service import StoreService
from kvstore_server.tiers.arena import Arena

_SWEEP_INTERVAL_S = 0.25
"""How late an expired lease or reservation may be noticed."""
_DRAIN_INTERVAL_S = 0.05
"""How late the end of the last reservation may be noticed when draining."""
_PROBE_TIMEOUT_S = 2.0
"""How long another daemon may take to accept a connection on its socket; the kernel does it at once."""

_log = structlog.get_logger("kvstore.daemon")


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where a running daemon is found; written to the ready file."""

    grpc_address: str
    unix_address: str | None
    metrics_address: str
    pid: int


class Daemon:
    """One store on one node. `run` returns when it has been told to stop, and raises when it must not go on."""

    def __init__(self, config: Config) -> None:
        self._config = config
        slab_bytes = config.memory.slab_bytes
        self._slab_count = int(config.memory.capacity) // slab_bytes
        self._arena = Arena(capacity_bytes=self._slab_count * slab_bytes, slab_bytes=slab_bytes)
        self._core = StoreCore(
            space=SlabSpace(slab_count=self._slab_count, slab_bytes=slab_bytes),
            watermarks=Watermarks(high=config.memory.high_watermark, low=config.memory.low_watermark),
        )
        self._copy_pool = ThreadPoolExecutor(config.grpc.copy_threads, thread_name_prefix="kvstore-copy")
        self._stop = asyncio.Event()
        self._bug: AssertionError | None = None
        self._service = StoreService(
            core=self._core,
            arena=self._arena,
            epoch=Epoch(secrets.token_bytes(16)),
            copy_pool=self._copy_pool,
            clock=time.monotonic,
        )
        self._grpc = GrpcServer(self._service, stream_s_max=config.grpc.stream_timeout_s, on_bug=self._stop_because_of)

    async def run(self, *, ready_file: Path | None = None) -> None:
        """Serves until SIGTERM or SIGINT, then drains."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.set_exception_handler(self._on_stray_exception)
        async with contextlib.AsyncExitStack() as parts:
            parts.callback(self._copy_pool.shutdown)
            parts.push_async_callback(self._grpc.stop, grace_s=0)
            grpc_address = self._listen_tcp()
            unix_path = self._listen_unix(parts)
            metrics_address = self._start_metrics(parts)
            self._ready_slab(SlabId(0))  # so that the first put after the announcement has room
            await self._grpc.start()
            await self._grpc.set_serving(True)
            addresses = Addresses(
                grpc_address=grpc_address,
                unix_address=f"unix:{unix_path}" if unix_path else None,
                metrics_address=metrics_address,
                pid=os.getpid(),
            )
            _announce(addresses, ready_file, parts)
            _log.info("serving", version=__version__, capacity_bytes=self._arena.capacity_bytes, **asdict(addresses))
            await self._serve_until_stopped()
            await self._drain()
        if self._bug is not None:
            raise self._bug

    def _listen_tcp(self) -> str:
        config = self._config.grpc
        host = f"[{config.host}]" if ":" in config.host else config.host
        try:
            return f"{host}:{self._grpc.listen(f'{host}:{config.port}')}"
        except OSError as error:
            raise UnavailableError(
                f"cannot listen on {host}:{config.port}: it is in use, perhaps by another daemon "
                "(`kvstore ping` tells); free it, or set grpc.port (0: any free port)"
            ) from error

    def _listen_unix(self, parts: contextlib.AsyncExitStack) -> Path | None:
        path = self._config.grpc.socket_path
        if path is None:
            return None
        path = path.absolute()
        _claim_socket(path)
        try:
            self._grpc.listen(f"unix:{path}")
            path.chmod(0o600)  # nobody but this user, until there is authentication
        except OSError as error:
            raise UnavailableError(f"cannot listen on {path}: {error}; set grpc.socket_path") from error
        _remove_at_exit(path, parts)
        return path

    def _start_metrics(self, parts: contextlib.AsyncExitStack) -> str:
        host, port = self._config.metrics.host, self._config.metrics.port
        try:
            metrics = MetricsServer(self._core, host=host, port=port)
        except OSError as error:
            raise UnavailableError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}; "
                "free it, or set metrics.port (0: any free port)"
            ) from error
        parts.callback(metrics.close)
        return f"{host}:{metrics.port}"

    async def _serve_until_stopped(self) -> None:
        """Runs the background work; if any of it fails, so does the daemon, loudly."""
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self._sweep()), tasks.create_task(self._prefault())]
            await self._stop.wait()
            for task in background:
                task.cancel()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_INTERVAL_S)
            self._service.sweep()

    async def _prefault(self) -> None:
        """Faults the rest of the arena in while serving; the store uses what is ready."""
        loop = asyncio.get_running_loop()
        started_s = time.monotonic()
        with ThreadPoolExecutor(1, thread_name_prefix="kvstore-prefault") as pool:
            for slab in range(1, self._slab_count):
                await loop.run_in_executor(pool, self._arena.prefault, SlabId(slab))
                self._core.space.add_slab(SlabId(slab))
        _log.info(
            "arena_ready",
            capacity_bytes=self._arena.capacity_bytes,
            slab_count=self._slab_count,
            took_s=round(time.monotonic() - started_s, 3),
        )

    def _ready_slab(self, slab: SlabId) -> None:
        self._arena.prefault(slab)
        self._core.space.add_slab(slab)

    async def _drain(self) -> None:
        """Admits nothing more, says so, and lets what is running finish.

        Calls are answered until the last reservation has ended, for a write that has begun needs more of them.
        After a bug nothing is waited for: what is served now might be wrong.
        """
        self._core.is_draining = True
        grace_s = self._config.shutdown.grace_s if self._bug is None else 0.0
        deadline_s = time.monotonic() + grace_s
        await self._grpc.set_serving(False)
        _log.info("draining", grace_s=grace_s, reservations=self._core.reservation_count)
        while self._core.reservation_count and self._bug is None and time.monotonic() < deadline_s:
            await asyncio.sleep(_DRAIN_INTERVAL_S)
            self._service.sweep()
        await self._grpc.stop(grace_s=max(deadline_s - time.monotonic(), 0.0) if self._bug is None else 0.0)
        _log.info("stopped", blocks=self._core.block_count)

    def _on_stray_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What ended a task that nobody waits for any more, such as a copy whose caller has gone."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        if isinstance(error, AssertionError):
            self._stop_because_of(error)

    def _stop_because_of(self, bug: AssertionError) -> None:
        self._bug = bug
        self._stop.set()


def _claim_socket(path: Path) -> None:
    """Removes a socket that a dead daemon left; refuses to take a live one's, or anything that is no socket."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            return
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise UnavailableError(f"{path} is in the way and is not a socket; remove it, or set grpc.socket_path")
        if not _is_answered(path):
            path.unlink(missing_ok=True)
            return
    except OSError as error:
        raise UnavailableError(f"{path} cannot be used: {error.strerror}; set grpc.socket_path") from error
    raise UnavailableError(
        f"another daemon serves {path} (`kvstore ping --address unix:{path}`); stop it, or set grpc.socket_path"
    )


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except (TimeoutError, BlockingIOError):
            return True  # its queue is full, so somebody has it
    return True


def _remove_at_exit(path: Path, parts: contextlib.AsyncExitStack) -> None:
    """Removes a file of ours when we stop, but not what a successor has put in its place while we drained."""

    def identity() -> tuple[int, ...] | None:
        try:
            entry = path.lstat()
        except FileNotFoundError:
            return None
        return entry.st_dev, entry.st_ino, entry.st_mtime_ns

    ours = identity()

    def remove() -> None:
        if ours is not None and identity() == ours:
            path.unlink(missing_ok=True)

    parts.callback(remove)


def _announce(addresses: Addresses, ready_file: Path | None, parts: contextlib.AsyncExitStack) -> None:
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
    _remove_at_exit(ready_file, parts)
