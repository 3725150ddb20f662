"""Builds the daemon's parts once, runs them, and takes them down in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from kvstore import __version__
from kvstore.errors import UnavailableError
from kvstore.eviction import Watermarks
from kvstore.messages import Epoch
from kvstore_client.hosting import Addresses, Role, announce, listen_tcp, listen_unix
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
_ROLE = Role(name="daemon", asked_with="kvstore ping", port_setting="grpc.port", socket_setting="grpc.socket_path")

_log = structlog.get_logger("kvstore.daemon")


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
            listen, settings = self._grpc.listen, self._config.grpc
            grpc_address = listen_tcp(listen, host=settings.host, port=settings.port, role=_ROLE)
            path = settings.socket_path
            unix_address = None if path is None else listen_unix(listen, path, role=_ROLE, parts=parts)
            metrics_address = self._start_metrics(parts)
            self._ready_slab(SlabId(0))  # so that the first put after the announcement has room
            await self._grpc.start()
            await self._grpc.set_serving(True)
            addresses = Addresses(
                grpc_address=grpc_address,
                unix_address=unix_address,
                metrics_address=metrics_address,
                pid=os.getpid(),
            )
            announce(addresses, ready_file, parts)
            _log.info("serving", version=__version__, capacity_bytes=self._arena.capacity_bytes, **asdict(addresses))
            await self._serve_until_stopped()
            await self._drain()
        if self._bug is not None:
            raise self._bug

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
        error = context.get("exception")
        if isinstance(error, AssertionError):
            self._stop_because_of(error)
        loop.default_exception_handler(context)

    def _stop_because_of(self, bug: AssertionError) -> None:
        self._bug = bug
        self._stop.set()
