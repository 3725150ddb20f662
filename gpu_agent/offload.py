"""Brings blocks from the pool into the store: straight into its slots, or through staging."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from typing import TypeAlias

import numpy as np

from gpu_agent.arenas import ArenaRegistrar
from gpu_agent.core.planner import Run
from gpu_agent.device import Event, HostSlots
from gpu_agent.pool import Pool
from gpu_agent.rows import as_buffer
from gpu_agent.store import ReservedSlots, Store
from kvstore.namespace import Namespace
from kvstore.slots import SlotId
from kvstore_client.results import PutResult

Sending: TypeAlias = Generator[tuple[Run, PutResult], None, None]


class Offloader:
    """Sends parts of batches, through one bounded staging buffer where the device does not reach the store's slots.

    For one thread at a time. The pool's slots must not change until the part was sent.
    """

    def __init__(
        self, *, pool: Pool, arenas: ArenaRegistrar, store: Store, namespace: Namespace, staging_count: int
    ) -> None:
        self._pool = pool
        self._arenas = arenas
        self._store = store
        self._namespace = namespace
        self._staging = pool.device.allocate_staging(row_count=staging_count, block_bytes=pool.block_bytes)

    def send(self, runs: Sequence[Run], slots: Sequence[SlotId]) -> Sending:
        """What the store says to each run, one after the other; closing this before its end calls the others off."""
        self._arenas.follow(self._store.arenas())
        if self._arenas.is_direct(is_written=True):
            yield from self._send_into_slots(runs, slots)
        else:
            yield from self._send_through_staging(runs, slots)

    def _send_through_staging(self, runs: Sequence[Run], slots: Sequence[SlotId]) -> Sending:
        self._stage(slots)
        start_row = 0
        for run in runs:
            end_row = start_row + len(run.block_hashes)
            rows = as_buffer(self._staging, start_row=start_row, end_row=end_row)
            yield run, self._store.put(self._namespace, run.block_hashes, rows, parent_hash=run.parent_hash)
            start_row = end_row

    def _send_into_slots(self, runs: Sequence[Run], slots: Sequence[SlotId]) -> Sending:
        """All runs are copied at once, and while one is hashed and committed the later ones still move."""
        with ExitStack() as held:
            copies: list[tuple[Run, ReservedSlots, Event | None]] = []
            start = 0
            for run in runs:
                sources = slots[start : start + len(run.block_hashes)]
                start += len(sources)
                reserved = held.enter_context(
                    self._store.reserve(self._namespace, run.block_hashes, parent_hash=run.parent_hash)
                )
                event = self._fill(reserved.slots, sources)
                if event is not None:
                    # Slots are not given back while the device may write to them.
                    held.callback(event.wait)
                copies.append((run, reserved, event))
            for run, reserved, event in copies:
                if event is not None:
                    event.wait()
                yield run, reserved.commit()

    def _fill(self, targets: Sequence[memoryview | None], sources: Sequence[SlotId]) -> Event | None:
        """Queues the copies into the slots, and returns when they have ended as an event; None when they have."""
        wanted = [(target, source) for target, source in zip(targets, sources, strict=True) if target is not None]
        if not wanted:
            return None
        views = [target for target, _ in wanted]
        pool_slots = [source for _, source in wanted]
        pool = self._pool
        event = pool.device.offload_to_slots(pool.memory, pool_slots, slots=HostSlots(views))
        if event is not None:
            with pool.changed:
                pool.counters.direct_offloaded_bytes += len(views) * pool.block_bytes
            return event
        # Not registered yet, or not registered at all.
        self._stage(pool_slots)
        for row, view in enumerate(views):
            np.copyto(np.frombuffer(view, np.uint8), self._staging[row].numpy())
        return None

    def _stage(self, slots: Sequence[SlotId]) -> None:
        self._pool.device.copy_rows(
            source=self._pool.memory, source_rows=slots, target=self._staging, target_rows=range(len(slots))
        ).wait()
