"""Finds blocks in the store and brings them into the pool: straight from their slots, or through staging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
from torch import Tensor

from gpu_agent.arenas import ArenaRegistrar
from gpu_agent.device import HostSlots
from gpu_agent.pool import Pool
from gpu_agent.rows import as_buffer
from gpu_agent.store import SlotView, Store
from kvstore.errors import KvstoreError
from kvstore.keys import BlockHash
from kvstore.messages import BlockState
from kvstore.namespace import Namespace
from kvstore.slots import SlotId


class Found(Protocol):
    """Blocks that the store has found, verified. What is copied counts only once it was seen to be intact."""

    @property
    def states(self) -> Mapping[BlockHash, BlockState]: ...

    @property
    def error(self) -> KvstoreError | None:
        """What kept the store from answering."""

    def load(self, slot_of: Mapping[BlockHash, SlotId]) -> frozenset[BlockHash]:
        """Copies hits into the pool; returns those that were intact until the copies had ended."""

    def stage(self, hashes: Sequence[BlockHash]) -> Mapping[BlockHash, int]:
        """Copies hits into staging; returns the rows of those that were intact until then."""


class Loader:
    """Asks the store through one bounded staging buffer, which is all there is where no memory is shared.

    For one thread at a time, and for one load at a time.
    """

    def __init__(
        self, *, pool: Pool, arenas: ArenaRegistrar, store: Store, namespace: Namespace, staging_count: int
    ) -> None:
        self._pool = pool
        self._arenas = arenas
        self._store = store
        self._namespace = namespace
        self.staging: Tensor = pool.device.allocate_staging(row_count=staging_count, block_bytes=pool.block_bytes)

    @contextmanager
    def find(self, hashes: Sequence[BlockHash]) -> Iterator[Found]:
        """What the store has of these blocks, which it keeps until the `with` block ends."""
        self._arenas.follow(self._store.arenas())
        if self._arenas.is_direct(is_written=False):
            with self._store.view(self._namespace, hashes) as views:
                states = dict(zip(hashes, views.states, strict=True))
                seen = {block_hash: view for block_hash, view in zip(hashes, views, strict=True) if view is not None}
                yield _InSlots(self._pool, self.staging, states=states, error=views.error, views=seen)
        else:
            rows = as_buffer(self.staging, start_row=0, end_row=len(hashes))
            result = self._store.get(self._namespace, hashes, rows)
            states = dict(zip(hashes, result.states, strict=True))
            yield _InStaging(self._pool, self.staging, states=states, error=result.error)


class _InStaging:
    """Hits lie in the rows of their places among the hashes."""

    def __init__(
        self, pool: Pool, staging: Tensor, *, states: Mapping[BlockHash, BlockState], error: KvstoreError | None
    ) -> None:
        self.states = states
        self.error = error
        self._pool = pool
        self._staging = staging
        self._row_of = {block_hash: row for row, block_hash in enumerate(states)}

    def load(self, slot_of: Mapping[BlockHash, SlotId]) -> frozenset[BlockHash]:
        rows = [self._row_of[block_hash] for block_hash in slot_of]
        _load_staged(self._pool, self._staging, rows, list(slot_of.values()))
        return frozenset(slot_of)

    def stage(self, hashes: Sequence[BlockHash]) -> Mapping[BlockHash, int]:
        return {block_hash: self._row_of[block_hash] for block_hash in hashes}


class _InSlots:
    """Hits lie in slots of the store, under a lease. The lease may expire: so each slot is looked at after the copy."""

    def __init__(
        self,
        pool: Pool,
        staging: Tensor,
        *,
        states: Mapping[BlockHash, BlockState],
        error: KvstoreError | None,
        views: Mapping[BlockHash, SlotView],
    ) -> None:
        self.states = states
        self.error = error
        self._pool = pool
        self._staging = staging
        self._views = views

    def load(self, slot_of: Mapping[BlockHash, SlotId]) -> frozenset[BlockHash]:
        payloads = HostSlots([self._views[block_hash].payload for block_hash in slot_of])
        pool, pool_slots = self._pool, list(slot_of.values())
        event = pool.device.load_from_slots(payloads, range(len(pool_slots)), pool=pool.memory, pool_rows=pool_slots)
        if event is not None:
            event.wait()
            with pool.changed:
                pool.counters.direct_loaded_bytes += len(pool_slots) * pool.block_bytes
            return frozenset(block_hash for block_hash in slot_of if self._views[block_hash].is_valid())
        rows = self.stage(list(slot_of))
        _load_staged(pool, self._staging, list(rows.values()), [slot_of[block_hash] for block_hash in rows])
        return frozenset(rows)

    def stage(self, hashes: Sequence[BlockHash]) -> Mapping[BlockHash, int]:
        for row, block_hash in enumerate(hashes):
            np.copyto(self._staging[row].numpy(), np.frombuffer(self._views[block_hash].payload, np.uint8))
        return {block_hash: row for row, block_hash in enumerate(hashes) if self._views[block_hash].is_valid()}


def _load_staged(pool: Pool, staging: Tensor, rows: Sequence[int], pool_slots: Sequence[SlotId]) -> None:
    pool.device.copy_rows(source=staging, source_rows=rows, target=pool.memory, target_rows=pool_slots).wait()
