"""What a sidecar's RPCs do; knows messages, not transports."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import TypeVar

from gpu_agent.agent import GpuAgent
from gpu_agent.attach.share import LEASE_S, Share
from gpu_agent.config import AgentConfig
from gpu_agent.core.quotas import Quotas
from gpu_agent.enveloped import EnvelopedRows, incoming_runs
from gpu_agent.metrics import AgentSnapshot
from gpu_agent.pools import Pool, Pools, add_counters
from gpu_agent.store import Store
from kvstore import __version__
from kvstore import messages as m
from kvstore.errors import InvalidArgumentError
from kvstore.frames import ReadFrame, StoreFrame
from kvstore.keys import BlockHash, NamespaceId, split_hashes
from kvstore.messages import BATCH_COUNT_MAX, BlockState

_ROWS_BYTES_MAX = 32 << 20
"""Host memory that one stream may take: 16 blocks of 2 MiB, a whole batch; at least one block."""
_FURTHER_COUNT_MAX = 1024

_Response = TypeVar("_Response")


class AgentService:
    """Serves namespaces, each with a pool of its own that is allocated when it is first opened.

    Methods may be called from many threads. Errors are the contract's.
    """

    def __init__(
        self,
        *,
        config: AgentConfig,
        client: Store,
        quotas: Mapping[str, int] | None = None,
        idle_release_s: float = 300.0,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`quotas` are bytes that are kept for models, or for namespaces by the first digits of their id."""
        self._config = config
        self._pools = Pools(
            config=config,
            client=client,
            quotas=Quotas(capacity_bytes=config.vram_capacity_bytes, promised=quotas or {}),
            idle_release_s=idle_release_s,
            lease_s=lease_s,
            clock=clock,
        )
        self._lock = threading.Lock()
        self._corrupt_count = 0
        self._started_s = time.monotonic()
        self.attach_socket = ""
        """Where the pools are handed out; set once, before there are calls."""

    def get_status(self, _: m.GetAgentStatusRequest) -> m.AgentStatus:
        return self.snapshot().status

    def open_namespace(self, request: m.OpenAgentNamespaceRequest) -> m.OpenAgentNamespaceResponse:
        if request.further_count > _FURTHER_COUNT_MAX:
            raise InvalidArgumentError.of("further_count", request.further_count, f"up to {_FURTHER_COUNT_MAX}")
        pool = self._pools.open(request.namespace, quota_bytes=request.quota_bytes, further_count=request.further_count)
        handle = pool.share.handle
        return m.OpenAgentNamespaceResponse(
            namespace_id=request.namespace.id,
            slot_count=handle.slot_count,
            block_bytes=handle.block_bytes,
            batch_count_max=pool.share.batch_count_max,
            attach_socket=self.attach_socket,
            lease_s=pool.share.lease_s,
            cuda_ipc_handle=handle.ipc_handle,
            device_uuid=handle.device_uuid,
        )

    def store_blocks(self, frames: Iterable[StoreFrame]) -> m.StoreBlocksResponse:
        stream = iter(frames)
        first = next(stream, None)
        if first is None:
            return m.StoreBlocksResponse(stored=b"")
        stored = bytearray()
        with self._pools.using(first.namespace_id or b"") as pool:
            agent = pool.agent
            for run in incoming_runs(chain([first], stream), rows=_rows_for(agent)):
                if run.payloads is None:
                    with self._lock:
                        self._corrupt_count += 1
                    stored.append(0)
                else:
                    stored += bytes(agent.store(run.block_hashes, run.payloads, parent_hash=run.parent_hash))
        return m.StoreBlocksResponse(stored=bytes(stored))

    def load_blocks(self, request: m.LoadBlocksRequest) -> Iterator[ReadFrame]:
        hashes = _hashes(request.block_hashes)
        with self._pools.using(request.namespace_id) as pool:
            agent = pool.agent
            rows = _rows_for(agent)
            for start in range(0, len(hashes), rows.row_count):
                part = hashes[start : start + rows.row_count]
                payloads = rows.payloads(start_row=0, end_row=len(part))
                states = agent.load(part, payloads, parent_hash=hashes[start - 1] if start else None)
                for row, (block_hash, state) in enumerate(zip(part, states, strict=True)):
                    if state is BlockState.HIT:
                        rows.seal(row, block_hash=block_hash)
                        yield from rows.frames(row, block_index=start + row)
                    else:
                        yield ReadFrame(block_index=start + row, block_state=state)

    def touch_blocks(self, request: m.TouchBlocksRequest) -> m.TouchBlocksResponse:
        hashes = _hashes(request.block_hashes)
        with self._pools.using(request.namespace_id) as pool:
            step = pool.agent.step(request.step_count)
            pool.agent.touch(hashes)
        return m.TouchBlocksResponse(step=step)

    def find_blocks(self, request: m.FindBlocksRequest) -> m.FindBlocksResponse:
        hashes = _hashes(request.block_hashes)
        with self._pools.using(request.namespace_id) as pool:
            found = pool.agent.contains(hashes)
        return m.FindBlocksResponse(block_states=bytes(BlockState.HIT if hit else BlockState.MISS for hit in found))

    def reserve_slots(self, request: m.ReserveSlotsRequest) -> m.ReserveSlotsResponse:
        return self._with_session(request.session_id, lambda share: share.reserve(request))

    def commit_slots(self, request: m.CommitSlotsRequest) -> m.CommitSlotsResponse:
        return self._with_session(request.session_id, lambda share: share.commit(request))

    def acquire_slots(self, request: m.AcquireSlotsRequest) -> m.AcquireSlotsResponse:
        return self._with_session(request.session_id, lambda share: share.acquire(request))

    def release_slots(self, request: m.ReleaseSlotsRequest) -> m.ReleaseSlotsResponse:
        return self._with_session(request.session_id, lambda share: share.release(request))

    def share_of(self, namespace_id: NamespaceId) -> Share:
        """What an engine attaches to; raises `NamespaceUnknownError`."""
        return self._pools.share_of(namespace_id)

    def expire(self) -> None:
        """To be called now and then: takes back what attached engines have held for too long."""
        self._pools.expire()

    @property
    def failure(self) -> str | None:
        """Why some agent offloads nothing any more, if so."""
        return next((pool.agent.failure for pool in self._pools.open_pools() if pool.agent.failure), None)

    def snapshot(self) -> AgentSnapshot:
        """The sums over all namespaces; of those that are closed by now, what they had counted."""
        pools, closed = self._pools.open_pools(), self._pools.closed
        snapshots = [pool.agent.snapshot() for pool in pools]
        counters = dataclasses.replace(closed.counters)
        for snapshot in snapshots:
            add_counters(counters, snapshot.counters)
        statuses = [snapshot.status for snapshot in snapshots]
        status = m.AgentStatus(
            version=__version__,
            device=self._config.device,
            capacity_bytes=self._config.vram_capacity_bytes,
            used_bytes=sum(one.used_bytes for one in statuses),
            peak_bytes=max(closed.peak_bytes, sum(one.peak_bytes for one in statuses)),
            resident_count=sum(one.resident_count for one in statuses),
            migrated_count=counters.migrated_count,
            migration_batch_count=counters.migration_batch_count,
            reloaded_count=counters.reloaded_count,
            lost_count=counters.lost_count,
            step=closed.step + sum(one.step for one in statuses),
            uptime_s=time.monotonic() - self._started_s,
            namespaces=tuple(map(_namespace_status, pools, statuses)),
        )
        # Each has its own view of the one link; that of the busiest tells most.
        empty = AgentSnapshot(status=status, counters=counters)
        return dataclasses.replace(
            max(snapshots, key=lambda one: one.link.utilisation, default=empty),
            status=status,
            counters=counters,
            migrating_count=sum(one.migrating_count for one in snapshots),
            is_migrator_alive=all(one.is_migrator_alive for one in snapshots),
            received_corrupt_count=self._corrupt_count,
        )

    def close(self, *, flush_s: float) -> bool:
        """Gives the store what the pools have, within `flush_s`; True when it got all of it, or had before."""
        return self._pools.close(flush_s=flush_s)

    def check_invariants(self) -> None:
        """For tests: raises `AssertionError` when slots, blocks or what engines hold do not add up."""
        for pool in self._pools.open_pools():
            pool.share.check_invariants()

    def _with_session(self, session_id: m.OwnerId, ask: Callable[[Share], _Response]) -> _Response:
        with self._pools.using_session(session_id) as share:
            return ask(share)


def _namespace_status(pool: Pool, status: m.AgentStatus) -> m.AgentNamespaceStatus:
    return m.AgentNamespaceStatus(
        namespace_id=pool.namespace.id,
        model=pool.namespace.model,
        capacity_bytes=status.capacity_bytes,
        used_bytes=status.used_bytes,
        resident_count=status.resident_count,
        session_count=pool.share.session_count,
        granted_count=pool.share.granted_count,
    )


def _rows_for(agent: GpuAgent) -> EnvelopedRows:
    block_bytes = agent.namespace.block_layout.payload_bytes
    return EnvelopedRows(namespace=agent.namespace, row_count=max(1, _ROWS_BYTES_MAX // block_bytes))


def _hashes(packed: bytes) -> list[BlockHash]:
    hashes = split_hashes(packed)
    if len(hashes) > BATCH_COUNT_MAX:
        raise InvalidArgumentError.of("block_hashes", f"{len(hashes)} hashes", f"up to {BATCH_COUNT_MAX}")
    return hashes
