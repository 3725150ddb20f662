"""Builds the daemon's parts once, runs them, and takes them down in order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import secrets
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from kvstore import __version__
from kvstore.errors import InvalidArgumentError, KvstoreError, UnavailableError
from kvstore.eviction import Watermarks
from kvstore.messages import FRAME_DATA_BYTES_MAX, Epoch
from kvstore.slab import Access
from kvstore_client.hosting import Addresses, Role, announce, listen_tcp, listen_unix
from kvstore_client.sizes import format_size
from kvstore_server.config import Config
from kvstore_server.core.admission import Admission
from kvstore_server.core.in_flight import InFlight
from kvstore_server.core.space import SlabId, SlabSpace
from kvstore_server.core.store import StoreCore
from kvstore_server.core.tenants import Tenant, TenantRule, Tenants
from kvstore_server.nvme.compression import available
from kvstore_server.nvme.crash import check_armed
from kvstore_server.nvme.figures import NvmeFigures
from kvstore_server.nvme.format import StoredCodec
from kvstore_server.nvme.opening import NvmeSettings, open_tier
from kvstore_server.nvme.ownership import Ownership
from kvstore_server.nvme.recovery import Geometry
from kvstore_server.obs.metrics import MetricsServer, Observed
from kvstore_server.rpc import bulk_server
from kvstore_server.rpc.bulk_server import BulkServer
from kvstore_server.rpc.grpc_server import GrpcServer
from kvstore_server.rpc.nixl_endpoint import NixlEndpoint
from kvstore_server.rpc.service import INLINE_BYTES_MAX, Endpoints, StoreService
from kvstore_server.rpc.slab_server import SlabServer
from kvstore_server.rpc.streams import OpenStreams
from kvstore_server.rpc.transfer_pool import PoolSettings, TransferPool, worker_count
from kvstore_server.rpc.transfers import LoopDesk, Transfers
from kvstore_server.rpc.turns import Turns
from kvstore_server.shm.arenas import Arenas
from kvstore_server.shm.memory import HUGE_PAGE_BYTES, SMALL_PAGE_BYTES, Candidates, PageKind, find_candidates

_SWEEP_INTERVAL_S = 0.25
"""How late an expired lease or reservation may be noticed."""
_DRAIN_INTERVAL_S = 0.05
"""How late the end of the last reservation may be noticed when draining."""
_BUSY_CORE_COUNT = 2
"""Cores that one stream keeps busy at both of its ends; with no more, handing a copy to a thread only adds work."""
_FENCE_DELAY_S = 1.0
"""How long a slot of NIXL is stranded before a fence frees it: one fence is for all that are by then."""
_FENCE_INTERVAL_S = 5.0
"""The least time between two fences, each of which costs every client of NIXL its connection."""
_MEMORY_RETRY_S = 5.0
"""How long to wait for memory that another has taken while a slab was being replaced."""
_NVME_RETRY_S = 5.0
"""Between tries to open the folder of a disk that cannot be read."""
_NVME_CLOSE_S = 10.0
"""How long the disk may take to end what is under way."""
_ROLE = Role(name="daemon", asked_with="kvstore ping", port_setting="grpc.port", socket_setting="grpc.socket_path")
_SLAB_ROLE = replace(_ROLE, socket_setting="slab.socket_path")
_BULK_ROLE = replace(_ROLE, port_setting="bulk.port")

_log = structlog.get_logger("kvstore.daemon")


class Daemon:
    """One store on one node. `run` returns when it has been told to stop, and raises when it must not go on."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tenants = Tenants(
            [
                TenantRule(tenant=Tenant(one.name), uids=frozenset(one.uids), may_write=one.access == "write")
                for one in config.tenants
            ],
            own_uid=os.geteuid(),
        )
        slab_bytes = config.memory.slab_bytes
        self._slab_count = int(config.memory.capacity) // slab_bytes
        self._candidates = _find_memory(config)
        # With tenants an arena for each slab, so that a tenant can be given its own and no other.
        self._arenas = Arenas(
            sources=self._candidates.sources,
            arena_count=1 if self._tenants.count == 1 else self._slab_count,
            arena_bytes=(self._slab_count if self._tenants.count == 1 else 1) * slab_bytes,
            slab_bytes=slab_bytes,
            is_locked=config.memory.lock,
        )
        self._core = StoreCore(
            space=SlabSpace(slab_count=self._slab_count, slab_bytes=slab_bytes, tenant_count=self._tenants.count),
            watermarks=Watermarks(high=config.memory.high_watermark, low=config.memory.low_watermark),
            headers=self._arenas,
            policy=config.memory.policy,
        )
        self._in_flight = InFlight(
            bytes_max=config.limits.in_flight_bytes_max,
            bytes_per_client_max=config.limits.in_flight_bytes_per_client_max,
        )
        self._copy_pool = ThreadPoolExecutor(config.grpc.copy_threads, thread_name_prefix="kvstore-copy")
        # One thread: whatever prefaults or replaces memory does it one after the other.
        self._memory_pool = ThreadPoolExecutor(1, thread_name_prefix="kvstore-memory")
        self._stop = asyncio.Event()
        self._bug: AssertionError | None = None
        epoch = self._epoch = Epoch(secrets.token_bytes(16))
        self._turns = Turns(self._in_flight)
        self._transfers = Transfers(
            core=self._core, turns=self._turns, clock=time.monotonic, on_settled=self._wake_waiters
        )
        self._service = StoreService(
            core=self._core,
            arenas=self._arenas,
            epoch=epoch,
            copy_pool=self._copy_pool,
            clock=time.monotonic,
            in_flight=self._in_flight,
            transfers=self._transfers if config.bulk.enabled else None,
            inline_bytes_max=(
                INLINE_BYTES_MAX if len(os.sched_getaffinity(0)) > _BUSY_CORE_COUNT else FRAME_DATA_BYTES_MAX
            ),
        )
        self._streams = OpenStreams(self._turns, stream_s_max=config.grpc.stream_timeout_s, clock=time.monotonic)
        self._grpc = GrpcServer(self._service, streams=self._streams, on_bug=self._stop_because_of)
        self._slab = SlabServer(
            self._service,
            arenas=self._arenas,
            arena_owner=self._core.arena_owner,
            find_member=self._tenants.find,
            epoch=epoch,
            on_bug=self._stop_because_of,
        )
        self._bulk: BulkServer | TransferPool | None = None
        self._nixl = self._make_nixl() if config.nixl.enabled else None

    async def run(self, *, ready_file: Path | None = None) -> None:
        """Serves until SIGTERM or SIGINT, then drains."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.set_exception_handler(self._on_stray_exception)
        async with contextlib.AsyncExitStack() as parts:
            parts.callback(self._arenas.close)
            if self._nixl is not None:
                parts.callback(self._nixl.close)
            parts.callback(self._memory_pool.shutdown)
            parts.callback(self._copy_pool.shutdown)
            await self._open_nvme(parts)
            parts.push_async_callback(self._grpc.stop, grace_s=0)
            parts.push_async_callback(self._slab.stop, grace_s=0)
            addresses = self._listen(parts)
            self._ready_slab(SlabId(0))  # so that the first put after the announcement has room
            if self._arenas.page_bytes <= SMALL_PAGE_BYTES:
                self._warn_of_small_pages()
            if isinstance(self._bulk, TransferPool):
                await self._bulk.wait_until_serving()
            await self._grpc.start()
            self._slab.start()
            await self._grpc.set_serving(True)
            announce(addresses, ready_file, parts)
            _log.info(
                "serving",
                version=__version__,
                capacity_bytes=self._arenas.capacity_bytes,
                pages=str(self._arenas.kind),
                page_bytes=self._arenas.page_bytes,
                memory_policy=self._core.policy,
                **asdict(addresses),
            )
            await self._serve_until_stopped()
            await self._drain()
        if self._bug is not None:
            raise self._bug

    async def _open_nvme(self, parts: contextlib.AsyncExitStack) -> None:
        """A disk that cannot be read now is tried again later; who owns the folder, and what it is, must be right."""
        config = self._config.nvme
        if config.path is None:
            return
        check_armed()
        ownership = Ownership.take(config.path, epoch_hex=self._epoch.hex())
        parts.callback(ownership.release)
        parts.push_async_callback(self._close_nvme)
        await self._try_open_nvme()

    async def _try_open_nvme(self) -> None:
        settings = _nvme_settings(self._config, tenants=self._tenants.all)
        try:
            tier = await open_tier(
                settings,
                store=self._core,
                slot_view=self._arenas.slot,
                clock=time.monotonic,
                on_settled=self._wake_waiters,
            )
        except (OSError, KvstoreError) as error:
            self._note_closed_nvme(error, capacity_bytes=settings.capacity_bytes)
            return
        for namespace_id in self._core.namespace_ids():
            tier.open(namespace_id)
        gc.freeze()  # what was found lives long: the collector need not look at it again and again
        self._core.departing_bytes_max = self._config.demotion_queue_bytes
        self._core.lower = self._service.nvme = tier
        figures = tier.figures()
        _log.info(
            "nvme_open",
            folder=str(settings.folder),
            capacity_bytes=settings.capacity_bytes,
            blocks=figures.block_count,
            nvme_policy=figures.policy,
            admission=figures.admission,
        )

    async def _run_nvme(self) -> None:
        while self._config.nvme.path is not None and self._service.nvme is None:
            await asyncio.sleep(_NVME_RETRY_S)
            await self._try_open_nvme()
        if self._service.nvme is not None:
            await self._service.nvme.run()

    async def _close_nvme(self) -> None:
        if self._service.nvme is not None and not await self._service.nvme.close(timeout_s=_NVME_CLOSE_S):
            # Threads that wait for the disk would keep the process, and with it the folder, for ever.
            _log.error("nvme_hung", hint="the disk does not answer; the daemon ends without it")
            os._exit(1)

    def _note_closed_nvme(self, error: OSError | KvstoreError, *, capacity_bytes: int) -> None:
        folder = self._config.nvme.path
        hint = "blocks stay in memory only until the folder can be used; see the kernel's log"
        if not isinstance(error, OSError):
            hint = "blocks stay in memory only; if it does not pass, empty the folder while the daemon is stopped"
        _log.error("nvme_closed", folder=str(folder), reason=str(error), retry_s=_NVME_RETRY_S, hint=hint)
        self._service.closed_nvme = NvmeFigures(
            state="degraded",
            reason=f"{folder} cannot be opened: {error}; tried again every {_NVME_RETRY_S:g} s",
            capacity_bytes=capacity_bytes,
        )

    def _warn_of_small_pages(self) -> None:
        arenas = self._arenas
        reasons = [*arenas.passed_over, *self._candidates.left_out]
        if arenas.arena_bytes < HUGE_PAGE_BYTES:
            reasons.append(f"an arena of {format_size(arenas.arena_bytes)} is smaller than a huge page")
        elif arenas.kind is PageKind.HUGE_TMPFS:
            reasons.append(f"{arenas.kind}: taken, but the kernel gave small pages: it has no huge ones free")
        _log.warning(
            "small_pages",
            page_bytes=arenas.page_bytes,
            pages=str(arenas.kind),
            reasons=reasons,
            hint="copies are up to five times faster on huge pages: set vm.nr_hugepages, "
            "or mount a tmpfs with huge=always and name it in memory.huge_mount",
        )

    def _listen(self, parts: contextlib.AsyncExitStack) -> Addresses:
        """On all sockets and ports that there are to be."""
        config, bind = self._config, self._grpc.listen
        grpc_address = listen_tcp(bind, host=config.grpc.host, port=config.grpc.port, role=_ROLE)
        path = config.grpc.socket_path
        unix_address = None if path is None else listen_unix(bind, path, role=_ROLE, parts=parts)
        slab_address = self._listen_slab(parts)
        bulk_address = self._listen_bulk(parts)
        self._service.endpoints = Endpoints(
            slab_socket="" if slab_address is None else slab_address.removeprefix("unix:"),
            bulk_port=0 if bulk_address is None else int(bulk_address.rpartition(":")[2]),
            is_nixl_enabled=self._nixl is not None,
        )
        return Addresses(
            grpc_address=grpc_address,
            unix_address=unix_address,
            metrics_address=self._start_metrics(parts),
            pid=os.getpid(),
            slab_address=slab_address,
            bulk_address=bulk_address,
        )

    def _listen_slab(self, parts: contextlib.AsyncExitStack) -> str | None:
        path = self._config.slab_socket_path
        if path is None:
            return None
        address = listen_unix(self._slab.listen, path, role=_SLAB_ROLE, parts=parts)
        if self._config.tenants:
            path.chmod(0o666)  # the kernel tells who comes, and who is in no tenant is turned away
        return address

    def _listen_bulk(self, parts: contextlib.AsyncExitStack) -> str | None:
        config = self._config.bulk
        if not config.enabled:
            return None
        loop = asyncio.get_running_loop()

        workers = None if config.transfer_workers == "auto" else config.transfer_workers
        count = worker_count(workers, cores=len(os.sched_getaffinity(0)))

        def bind(_: str) -> int:
            listener = bulk_server.listen(config.host, self._config.bulk_port)
            transfer_s_max = self._config.grpc.stream_timeout_s
            if count:
                self._bulk = TransferPool(
                    listener,
                    transfers=self._transfers,
                    arenas=self._arenas,
                    settings=PoolSettings(
                        worker_count=count,
                        transfer_s_max=transfer_s_max,
                        log_level=self._config.log.level,
                        log_format=self._config.log.format,
                    ),
                    on_bug=self._stop_because_of,
                )
            else:
                self._bulk = BulkServer(
                    listener,
                    desk=LoopDesk(self._transfers, loop=loop, on_bug=self._stop_because_of),
                    view=self._arenas.view,
                    transfer_s_max=transfer_s_max,
                )
            self._bulk.start()
            return self._bulk.port

        address = listen_tcp(bind, host=config.host, port=self._config.bulk_port, role=_BULK_ROLE)
        parts.push_async_callback(self._stop_bulk, grace_s=0)
        return address

    async def _stop_bulk(self, *, grace_s: float) -> None:
        bulk, self._bulk = self._bulk, None
        if isinstance(bulk, TransferPool):
            await bulk.stop(grace_s=grace_s)
        elif bulk is not None:
            # Waits for threads that themselves wait for the loop, so not on it.
            await asyncio.to_thread(bulk.stop, grace_s=grace_s)

    def _start_metrics(self, parts: contextlib.AsyncExitStack) -> str:
        host, port = self._config.metrics.host, self._config.metrics.port
        try:
            observed = Observed(self._core, self._arenas, self._in_flight, self._slab, self._service.nvme_figures)
            metrics = MetricsServer(observed, host=host, port=port)
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
            background = [
                tasks.create_task(work)
                for work in (
                    self._sweep(),
                    self._ready_memory(),
                    self._replace_slabs(),
                    self._fence_nixl(),
                    self._run_nvme(),
                )
            ]
            await self._stop.wait()
            for task in background:
                task.cancel()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_INTERVAL_S)
            self._transfers.sweep()
            if isinstance(self._bulk, TransferPool):
                self._bulk.sweep()
            self._streams.end_stalled()
            self._service.sweep()

    async def _ready_memory(self) -> None:
        await self._prefault()
        if self._nixl is not None:
            await self._nixl.run()

    async def _fence_nixl(self) -> None:
        """Has stranded slots of NIXL freed, at the price of all its connections."""
        while self._nixl is not None:
            await asyncio.sleep(_SWEEP_INTERVAL_S)
            if not self._core.unfenced_count:
                continue
            await asyncio.sleep(_FENCE_DELAY_S)
            _log.info("nixl_fence", stranded_slots=self._core.unfenced_count)
            await self._nixl.fence()
            await asyncio.sleep(_FENCE_INTERVAL_S)

    def _make_nixl(self) -> NixlEndpoint:
        def note(metadata: bytes) -> None:
            self._service.endpoints = replace(self._service.endpoints, nixl_metadata=metadata)

        try:
            return NixlEndpoint(
                [self._arenas.descriptor(index, Access.WRITE) for index in range(self._arenas.arena_count)],
                arena_bytes=self._arenas.arena_bytes,
                on_metadata=note,
                on_fenced=self._core.fence,
            )
        except UnavailableError as error:
            raise InvalidArgumentError(f"nixl.enabled is true; allowed here: false, as {error}") from error

    async def _prefault(self) -> None:
        """Faults the rest of the arena in while serving; the store uses what is ready."""
        started_s = time.monotonic()
        for slab in range(1, self._slab_count):
            try:
                await self._in_memory_thread(partial(self._arenas.prefault, SlabId(slab)))
            except OSError as error:
                _log.error(
                    "arena_incomplete",
                    ready_bytes=self._core.space.ready_bytes,
                    capacity_bytes=self._arenas.capacity_bytes,
                    reason=error.strerror,
                    hint="the machine has run out of this kind of memory; lower memory.capacity",
                )
                return
            self._core.space.add_slab(SlabId(slab))
        _log.info(
            "arena_ready",
            capacity_bytes=self._arenas.capacity_bytes,
            slab_count=self._slab_count,
            pages=str(self._arenas.kind),
            page_bytes=self._arenas.page_bytes,
            took_s=round(time.monotonic() - started_s, 3),
        )

    async def _replace_slabs(self) -> None:
        """Gives slabs that go from one tenant to another new memory; each is an arena of its own then."""
        while True:
            await asyncio.sleep(_SWEEP_INTERVAL_S)
            for slab in self._core.space.slabs_to_replace():
                try:
                    await self._in_memory_thread(partial(self._renew, slab))
                except OSError as error:
                    _log.error("slab_not_replaced", slab=slab, reason=error.strerror)
                    await asyncio.sleep(_MEMORY_RETRY_S)
                else:
                    self._core.space.add_slab(slab)

    def _renew(self, slab: SlabId) -> None:
        self._arenas.replace(slab)
        self._arenas.prefault(slab)

    async def _in_memory_thread(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._memory_pool, work)

    def _ready_slab(self, slab: SlabId) -> None:
        try:
            self._arenas.prefault(slab)
        except OSError as error:
            raise UnavailableError(
                f"no memory for the first slab of {format_size(self._config.memory.slab_bytes)} "
                f"({error.strerror}); "
                "lower memory.capacity, or set memory.pages to another kind"
            ) from error
        self._core.space.add_slab(slab)

    async def _drain(self) -> None:
        """Admits nothing more, says so, and lets what is running finish.

        Calls are answered until the last reservation has ended, for a write that has begun needs more of them.
        After a bug nothing is waited for: what is served now might be wrong.
        """
        self._core.is_draining = True
        grace_s = self._config.shutdown.grace_s if self._bug is None else 0.0
        deadline_s = time.monotonic() + grace_s
        self._slab.admit_no_more_sessions()
        await self._grpc.set_serving(False)
        _log.info("draining", grace_s=grace_s, reservations=self._core.reservation_count)
        while self._core.reservation_count > self._core.promotion_count and self._bug is None:
            if time.monotonic() > deadline_s:
                break
            await asyncio.sleep(_DRAIN_INTERVAL_S)
            self._service.sweep()
        left_s = max(deadline_s - time.monotonic(), 0.0) if self._bug is None else 0.0
        await self._flush_nvme(timeout_s=left_s)
        left_s = max(deadline_s - time.monotonic(), 0.0) if self._bug is None else 0.0
        await asyncio.gather(
            self._grpc.stop(grace_s=left_s), self._slab.stop(grace_s=left_s), self._stop_bulk(grace_s=left_s)
        )
        _log.info("stopped", blocks=self._core.block_count)

    async def _flush_nvme(self, *, timeout_s: float) -> None:
        """Writes what is in memory to the disk, as far as it gets, so that the next start finds it there."""
        nvme = self._service.nvme
        if nvme is None or self._bug is not None:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(nvme.flush(), timeout_s)
        _log.info("nvme_flushed", blocks=nvme.figures().block_count, unwritten_blocks=nvme.unwritten_count())

    def _wake_waiters(self) -> None:
        self._service.wake_waiters()

    def _on_stray_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What ended a task that nobody waits for any more, such as a copy whose caller has gone."""
        error = context.get("exception")
        if isinstance(error, AssertionError):
            self._stop_because_of(error)
        loop.default_exception_handler(context)

    def _stop_because_of(self, bug: AssertionError) -> None:
        self._bug = bug
        self._stop.set()


def _nvme_settings(config: Config, *, tenants: frozenset[Tenant]) -> NvmeSettings:
    nvme = config.nvme
    assert nvme.path is not None, "there is no tier to be opened"
    forced = {"zstd": StoredCodec.ZSTD, "lz4": StoredCodec.LZ4}.get(nvme.compression)
    candidates = tuple(sorted(available() - {StoredCodec.RAW})) if nvme.compression == "auto" else ()
    return NvmeSettings(
        folder=nvme.path,
        capacity_bytes=int(nvme.capacity or 0),
        geometry=Geometry(
            segment_bytes=nvme.segment_bytes,
            is_segment_bytes_given=nvme.segment_size is not None,
            room_bytes=nvme.segment_count * nvme.segment_bytes,
            index_map_bytes=nvme.index_map_bytes,
            tenants=tenants,
        ),
        free_reserve_bytes=lambda size_bytes: nvme.free_reserve_bytes(filesystem_bytes=size_bytes),
        admission=Admission(
            policy=nvme.admission,
            write_budget_bytes_per_day=None if nvme.write_budget_per_day is None else int(nvme.write_budget_per_day),
        ),
        policy=nvme.policy,
        batch_count=nvme.demote_batch,
        io_threads=nvme.io_threads,
        is_synced=nvme.sync == "data",
        load_timeout_s=nvme.load_timeout_s,
        prefetch_bytes_max=config.prefetch_in_flight_bytes,
        codecs=candidates,
        forced_codec=forced,
    )


def _find_memory(config: Config) -> Candidates:
    memory, own_uid = config.memory, os.geteuid()
    return find_candidates(
        pages=None if memory.pages == "auto" else PageKind(memory.pages),
        huge_mount=memory.huge_mount,
        must_be_sealed=any(uid != own_uid for one in config.tenants if one.access == "write" for uid in one.uids),
    )
