"""The VRAM tier of a sidecar, from an engine's process: its blocks are copied here, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor

from gpu_agent.device import CallerRows, PoolHandle, open_device, open_pool
from gpu_agent.rows import as_caller_rows, check_hashes, check_parent_hash, check_targets
from kvstore.errors import KvstoreError
from kvstore.keys import BlockHash
from kvstore.messages import AgentStatus, BlockState
from kvstore.namespace import Namespace
from kvstore_client.agent.client import AgentClient, AgentClientConfig
from kvstore_client.agent.session import AgentSession

_TOLD_STEPS = 8
"""Engine steps that are told together: what the agent counts in steps, it counts in many."""


class AttachedAgent:
    """`store` and `load` as `GpuAgent` has them, with the pool in a sidecar of this node.

    Whatever happens to the sidecar, calls end by their deadlines: what it does not have is a MISS, what it does not
    take is False, and when it is back it is used again. Rows of blocks that are no HIT may have been written to.
    """

    def __init__(
        self,
        namespace: Namespace,
        address: str | None = None,
        *,
        device: str = "cpu",
        config: AgentClientConfig = AgentClientConfig(),  # noqa: B008
        load_wait_s: float = 2.0,
    ) -> None:
        """`device` is the one that the agent's pool is on, as this process names it; `address` None: the node's own.

        A load waits `load_wait_s` for blocks that the agent must bring in from the store.
        """
        self._namespace = namespace
        self._load_wait_s = load_wait_s
        self._device = open_device(device)
        self._client = AgentClient(address, config=config)
        self._untold_steps = 0
        self._step = 0

    @property
    def namespace(self) -> Namespace:
        return self._namespace

    def store(
        self, hashes: Sequence[BlockHash], blocks: CallerRows, *, parent_hash: BlockHash | None = None
    ) -> tuple[bool, ...]:
        """See `GpuAgent.store`; hashes are distinct ones. The caller may overwrite `blocks` when it returns."""
        check_hashes(hashes, field="hashes")
        check_parent_hash(parent_hash)
        rows = self._rows(blocks, row_count=len(hashes), field="blocks")
        stored: list[bool] = []
        while len(stored) < len(hashes) and False not in stored:
            start = len(stored)
            step = self._client.batch_count_max(self._namespace) or len(hashes)
            part = hashes[start : start + step]
            parent = hashes[start - 1] if start else parent_hash
            stored += self._store_part(part, rows[start : start + step], parent_hash=parent)
        rest = hashes[len(stored) :]
        return (*stored, *(self._client.find(self._namespace, rest) if rest else ()))

    def load(
        self, hashes: Sequence[BlockHash], into: CallerRows, *, parent_hash: BlockHash | None = None
    ) -> tuple[BlockState, ...]:
        """See `GpuAgent.load`; hashes are distinct ones. When it returns, what was loaded is there."""
        check_hashes(hashes, field="hashes")
        check_parent_hash(parent_hash)
        rows = self._rows(into, row_count=len(hashes), field="into")
        check_targets(rows, field="into")
        states: list[BlockState] = []
        while len(states) < len(hashes):
            start = len(states)
            step = self._client.batch_count_max(self._namespace) or len(hashes)
            part = hashes[start : start + step]
            parent = hashes[start - 1] if start else parent_hash
            states += self._load_part(part, rows[start : start + step], parent_hash=parent)
        return tuple(states)

    def contains(self, hashes: Sequence[BlockHash]) -> tuple[bool, ...]:
        """Which blocks are in VRAM now, so that loading them needs no store."""
        check_hashes(hashes, field="hashes")
        return self._client.find(self._namespace, hashes)

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """Counts a use at this step of those blocks that are in the pool."""
        check_hashes(hashes, field="hashes")
        self._client.touch(self._namespace, hashes, step_count=self._take_steps())

    def step(self, step_count: int = 1) -> int:
        """Engine steps have passed; returns how many of this engine. Told to the agent every few, without waiting."""
        self._step += step_count
        self._untold_steps += step_count
        if self._untold_steps >= _TOLD_STEPS:
            self._client.tell_steps(self._namespace, self._take_steps())
        return self._step

    def status(self) -> AgentStatus:
        """The sidecar's, all its namespaces together; raises `KvstoreError` when it does not answer."""
        return self._client.status()

    def close(self) -> None:
        """Closing twice changes nothing. What is in the pool stays there."""
        self._client.close()
        self._device.close()

    def __enter__(self) -> AttachedAgent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _store_part(
        self, hashes: Sequence[BlockHash], rows: CallerRows, *, parent_hash: BlockHash | None
    ) -> tuple[bool, ...]:
        with self._client.reserve(self._namespace, hashes, parent_hash=parent_hash) as reserved:
            pool = self._pool_of(reserved.session)
            places = {index: place for index, place in enumerate(reserved.places) if place is not None}
            if pool is None:
                return reserved.commit([False] * len(hashes))
            if places:
                self._device.copy_rows_for_caller(
                    source=rows, source_rows=list(places), target=pool, target_rows=list(places.values())
                ).wait()
            return reserved.commit()

    def _load_part(
        self, hashes: Sequence[BlockHash], rows: CallerRows, *, parent_hash: BlockHash | None
    ) -> tuple[BlockState, ...]:
        acquired = self._client.acquire(self._namespace, hashes, parent_hash=parent_hash, wait_s=self._load_wait_s)
        with acquired:
            pool = self._pool_of(acquired.session)
            places = {index: place for index, place in enumerate(acquired.places) if place is not None}
            if pool is not None and places:
                self._device.copy_rows_for_caller(
                    source=pool, source_rows=list(places.values()), target=rows, target_rows=list(places)
                ).wait()
                if acquired.is_valid():
                    return acquired.states
            return (BlockState.MISS,) * len(hashes)

    def _pool_of(self, session: AgentSession | None) -> Tensor | None:
        """The session's pool on this process's device; None where this process does not reach it."""
        if session is None:
            return None
        if session.tensor is None:
            try:
                session.tensor = _open(session)
            except KvstoreError as error:
                self._client.give_up(session, error)
        pool: Tensor | None = session.tensor
        return pool

    def _take_steps(self) -> int:
        steps, self._untold_steps = self._untold_steps, 0
        return steps

    def _rows(self, blocks: CallerRows, *, row_count: int, field: str) -> CallerRows:
        layout = self._namespace.block_layout
        return as_caller_rows(blocks, row_count=row_count, layout=layout, device_name=self._device.name, field=field)


def _open(session: AgentSession) -> Tensor:
    """Raises `KvstoreError`."""
    opened = session.opened
    if session.memory is not None:
        return torch.frombuffer(session.memory, dtype=torch.uint8).view(opened.slot_count, opened.block_bytes)
    return open_pool(
        PoolHandle(
            slot_count=opened.slot_count,
            block_bytes=opened.block_bytes,
            device_uuid=opened.device_uuid,
            ipc_handle=opened.cuda_ipc_handle,
        )
    )
