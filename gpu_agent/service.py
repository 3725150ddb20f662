"""What a sidecar's RPCs do; knows messages, not transports."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterable, Iterator

from gpu_agent.agent import GpuAgent
from gpu_agent.config import AgentConfig
from gpu_agent.counters import Counters
from gpu_agent.enveloped import EnvelopedRows, incoming_runs
from gpu_agent.metrics import AgentSnapshot
from gpu_agent.store import Store
from kvstore import __version__
from kvstore import messages as m
from kvstore.errors import CapacityError, InvalidArgumentError, NamespaceUnknownError, UnavailableError
from kvstore.frames import ReadFrame, StoreFrame
from kvstore.keys import split_hashes
from kvstore.messages import BATCH_COUNT_MAX, BlockState

_ROWS_BYTES_MAX = 32 << 20
"""Host memory that one stream may take: 16 blocks of 2 MiB, a whole batch; at least one block."""


class AgentService:
    """Serves one namespace, that of the first `open_namespace`, which is when the pool is allocated.

    Methods may be called from many threads. Errors are the contract's.
    """

    def __init__(self, *, config: AgentConfig, client: Store) -> None:
        self._config = config
        self._client = client
        self._lock = threading.Lock()
        self._agent: GpuAgent | None = None
        self._is_closed = False
        self._corrupt_count = 0
        self._started_s = time.monotonic()

    def get_status(self, _: m.GetAgentStatusRequest) -> m.AgentStatus:
        return self.snapshot().status

    def open_namespace(self, request: m.OpenAgentNamespaceRequest) -> m.OpenAgentNamespaceResponse:
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the agent is shutting down")
            if self._agent is None:
                self._agent = GpuAgent(request.namespace, self._client, config=self._config)
            agent = self._agent
        if agent.namespace != request.namespace:
            raise CapacityError(
                f"this agent serves namespace {agent.namespace.id.hex()[:16]} and no other one; "
                f"start another agent for {request.namespace.id.hex()[:16]}"
            )
        return m.OpenAgentNamespaceResponse(namespace_id=agent.namespace.id, slot_count=agent.slot_count)

    def store_blocks(self, frames: Iterable[StoreFrame]) -> m.StoreBlocksResponse:
        agent = self._opened()
        stored = bytearray()
        for run in incoming_runs(frames, rows=_rows_for(agent)):
            if run.payloads is None:
                with self._lock:
                    self._corrupt_count += 1
                stored.append(0)
            else:
                stored += bytes(agent.store(run.block_hashes, run.payloads, parent_hash=run.parent_hash))
        return m.StoreBlocksResponse(stored=bytes(stored))

    def load_blocks(self, request: m.LoadBlocksRequest) -> Iterator[ReadFrame]:
        agent = self._opened()
        hashes = split_hashes(request.block_hashes)
        _check_count(len(hashes))
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
        agent = self._opened()
        hashes = split_hashes(request.block_hashes)
        _check_count(len(hashes))
        step = agent.step(request.step_count)
        agent.touch(hashes)
        return m.TouchBlocksResponse(step=step)

    @property
    def failure(self) -> str | None:
        """Why the agent offloads nothing any more, if so."""
        agent = self._agent
        return None if agent is None else agent.failure

    def snapshot(self) -> AgentSnapshot:
        """As of one moment; before a namespace is open the capacity, and zeros."""
        agent = self._agent
        if agent is None:
            return AgentSnapshot(status=self._status_without_pool(), counters=Counters())
        return dataclasses.replace(agent.snapshot(), received_corrupt_count=self._corrupt_count)

    def close(self, *, flush_s: float) -> bool:
        """Gives the store what the pool has, within `flush_s`; True when it got all of it, or had before."""
        with self._lock:
            agent = None if self._is_closed else self._agent
            self._is_closed = True
        if agent is None:
            return True
        is_flushed = agent.flush(flush_s)
        agent.close()
        return is_flushed

    def _status_without_pool(self) -> m.AgentStatus:
        return m.AgentStatus(
            version=__version__,
            device=self._config.device,
            capacity_bytes=self._config.vram_capacity_bytes,
            used_bytes=0,
            peak_bytes=0,
            resident_count=0,
            migrated_count=0,
            migration_batch_count=0,
            reloaded_count=0,
            lost_count=0,
            step=0,
            uptime_s=time.monotonic() - self._started_s,
        )

    def _opened(self) -> GpuAgent:
        agent = self._agent
        if agent is None:
            raise NamespaceUnknownError("no namespace is open; call OpenAgentNamespace first")
        return agent


def _rows_for(agent: GpuAgent) -> EnvelopedRows:
    block_bytes = agent.namespace.block_layout.payload_bytes
    return EnvelopedRows(namespace=agent.namespace, row_count=max(1, _ROWS_BYTES_MAX // block_bytes))


def _check_count(count: int) -> None:
    if count > BATCH_COUNT_MAX:
        raise InvalidArgumentError.of("block_hashes", f"{count} hashes", f"up to {BATCH_COUNT_MAX}")
