"""The pools of one sidecar: one agent per namespace, each within its quota, on one device."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from gpu_agent.agent import GpuAgent
from gpu_agent.attach.share import LEASE_S, Share, session_ended
from gpu_agent.config import AgentConfig
from gpu_agent.core.quotas import Quotas
from gpu_agent.counters import Counters
from gpu_agent.device import open_device
from gpu_agent.store import Store
from kvstore.errors import CapacityError, NamespaceUnknownError, UnavailableError
from kvstore.keys import NamespaceId
from kvstore.messages import OwnerId
from kvstore.namespace import Namespace

POOL_COUNT_MAX = 32
"""Pools at a time. Each has its own staging buffers, threads and metrics; more namespaces than this are not hot."""
_STAGING_SHARE = 0.25
"""Of a pool's bytes, at most, for each of its staging buffers: many small pools must not take much host memory."""
_RELEASE_FLUSH_S = 5.0

_log = structlog.get_logger("kvstore.agent")


@dataclass(slots=True, eq=False)
class Pool:
    """One namespace's, open."""

    namespace: Namespace
    agent: GpuAgent
    share: Share
    used_s: float
    call_count: int = 0
    """Calls under way."""


@dataclass(slots=True)
class Closed:
    """What the pools that are closed by now had counted."""

    counters: Counters = field(default_factory=Counters)
    step: int = 0
    peak_bytes: int = 0


class Pools:
    """Opens a pool per namespace, and closes what nobody uses when its memory is needed. For many threads."""

    def __init__(
        self,
        *,
        config: AgentConfig,
        client: Store,
        quotas: Quotas,
        idle_release_s: float,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A pool that no engine is attached to and nobody has called for `idle_release_s` may be closed."""
        self._config = config
        self._client = client
        self._quotas = quotas
        self._idle_release_s = idle_release_s
        self._lease_s = lease_s
        self._clock = clock
        self._opening = threading.Lock()
        self._lock = threading.Lock()
        self._pools: dict[NamespaceId, Pool] = {}
        self._is_closed = False
        self.closed = Closed()

    def open_pools(self) -> tuple[Pool, ...]:
        with self._lock:
            return tuple(self._pools.values())

    def open(self, namespace: Namespace, *, quota_bytes: int = 0, further_count: int = 0) -> Pool:
        """The namespace's pool, which it keeps as it is if it has one.

        Raises `CapacityError` when there is no room for one, and says what to do.
        """
        with self._opening:
            with self._lock:
                if self._is_closed:
                    raise UnavailableError("the agent is shutting down")
                known = self._pools.get(namespace.id)
                if known is not None:
                    known.used_s = self._clock()
                    return known
            size_bytes = self._find_room(namespace, quota_bytes=quota_bytes, further_count=further_count)
            pool = self._make(namespace, size_bytes)
            with self._lock:
                self._quotas.give(namespace, size_bytes)
                self._pools[namespace.id] = pool
            _log.info(
                "namespace_opened",
                namespace=namespace.id.hex()[:16],
                model=namespace.model,
                size_bytes=size_bytes,
                slot_count=pool.agent.slot_count,
            )
            return pool

    @contextmanager
    def using(self, namespace_id: bytes) -> Iterator[Pool]:
        """A pool for one call; none named: the only one."""
        with self._lock:
            pool = self._named(namespace_id)
            pool.call_count += 1
            pool.used_s = self._clock()
        try:
            yield pool
        finally:
            with self._lock:
                pool.call_count -= 1

    @contextmanager
    def using_session(self, session_id: OwnerId) -> Iterator[Share]:
        """The share that an engine is attached to, for one call; raises `UnavailableError` when it is to none."""
        for pool in self.open_pools():
            if session_id in pool.share:
                with self.using(pool.namespace.id):
                    yield pool.share
                return
        raise session_ended()

    def share_of(self, namespace_id: NamespaceId) -> Share:
        """For an engine that attaches: the pool counts as used from now on."""
        with self._lock:
            pool = self._named(namespace_id)
            pool.used_s = self._clock()
            return pool.share

    def expire(self) -> None:
        """Takes back what attached engines have held for too long."""
        for pool in self.open_pools():
            pool.share.expire()

    def close(self, *, flush_s: float) -> bool:
        """Gives the store what the pools have, within `flush_s`; True when it got all of it, or had before."""
        deadline_s = time.monotonic() + flush_s
        with self._opening:
            with self._lock:
                self._is_closed = True
            is_flushed = True
            for pool in self.open_pools():
                is_flushed &= self._end(pool, flush_s=max(0.0, deadline_s - time.monotonic()))
        return is_flushed

    # --- inside

    def _named(self, namespace_id: bytes) -> Pool:
        if not self._pools:
            raise NamespaceUnknownError("no namespace is open; call OpenAgentNamespace first")
        if namespace_id:
            pool = self._pools.get(NamespaceId(namespace_id))
            if pool is None:
                raise NamespaceUnknownError(f"namespace {namespace_id.hex()[:16]} is not open; open it first")
            return pool
        if len(self._pools) > 1:
            raise NamespaceUnknownError(f"{len(self._pools)} namespaces are open; say which one is meant")
        return next(iter(self._pools.values()))

    def _find_room(self, namespace: Namespace, *, quota_bytes: int, further_count: int) -> int:
        """Bytes for a namespace; closes idle pools, longest idle first, as far as that helps."""
        block_bytes = namespace.block_layout.payload_bytes
        while True:
            size_bytes = self._quotas.share_bytes(
                namespace, quota_bytes=quota_bytes, further_count=further_count, block_bytes=block_bytes
            )
            if size_bytes and len(self._pools) < POOL_COUNT_MAX:
                return size_bytes
            idle = self._longest_idle(namespace, is_any=bool(size_bytes))
            if idle is None:
                if size_bytes:
                    raise CapacityError(f"{POOL_COUNT_MAX} namespaces are open, the most there may be")
                raise self._quotas.refusal(namespace, quota_bytes=quota_bytes, block_bytes=block_bytes)
            _log.info("namespace_released", namespace=idle.namespace.id.hex()[:16], model=idle.namespace.model)
            self._end(idle, flush_s=_RELEASE_FLUSH_S)

    def _longest_idle(self, namespace: Namespace, *, is_any: bool) -> Pool | None:
        """Whose memory this namespace would get, or of all; taken out, so that nobody begins to use it."""
        with self._lock:
            rivals = self._pools if is_any else self._quotas.rivals(namespace)
            idle = [pool for namespace_id in rivals if self._is_idle(pool := self._pools[namespace_id])]
            if not idle:
                return None
            longest = min(idle, key=lambda pool: pool.used_s)
            del self._pools[longest.namespace.id]
            return longest

    def _is_idle(self, pool: Pool) -> bool:
        is_used = pool.call_count or pool.share.session_count or pool.share.granted_count
        return not is_used and self._clock() - pool.used_s >= self._idle_release_s

    def _make(self, namespace: Namespace, size_bytes: int) -> Pool:
        staging_bytes = min(self._config.staging_capacity_bytes, max(1, int(size_bytes * _STAGING_SHARE)))
        config = dataclasses.replace(self._config, vram_capacity_bytes=size_bytes, staging_capacity_bytes=staging_bytes)
        device = open_device(config.device, shares_pools=True)
        agent = GpuAgent(namespace, self._client, config=config, device=device)
        try:
            share = Share(agent, device.share_pool(agent.memory), lease_s=self._lease_s, clock=self._clock)
        except BaseException:
            agent.close()
            raise
        return Pool(namespace, agent, share, self._clock())

    def _end(self, pool: Pool, *, flush_s: float) -> bool:
        is_flushed = pool.agent.flush(flush_s)
        lost_before = pool.agent.snapshot().counters.lost_count
        pool.agent.close()
        snapshot = pool.agent.snapshot()
        lost_count = snapshot.counters.lost_count - lost_before
        if lost_count:
            _log.warning(
                "blocks_lost",
                namespace=pool.namespace.id.hex()[:16],
                block_count=lost_count,
                reason=f"the store did not take them in {flush_s:.1f} s",
            )
        with self._lock:
            self._pools.pop(pool.namespace.id, None)
            self._quotas.take_back(pool.namespace.id)
            self.closed.step += snapshot.status.step
            self.closed.peak_bytes = max(self.closed.peak_bytes, snapshot.status.peak_bytes)
            add_counters(self.closed.counters, snapshot.counters)
        return is_flushed


def add_counters(total: Counters, part: Counters) -> None:
    for one in dataclasses.fields(Counters):
        setattr(total, one.name, getattr(total, one.name) + getattr(part, one.name))
