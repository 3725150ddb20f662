"""Brings blocks from the pool into the store: straight into its slots, or through staging."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from typing import TypeAlias

import numpy as np
from torch import Tensor

from gpu_agent.arenas import ArenaRegistrar
from gpu_agent.below import Below
from gpu_agent.core.planner import Run, cut_runs
from gpu_agent.device import Event, HostSlots
from gpu_agent.pool import Pool
from gpu_agent.rows import as_buffer
from gpu_agent.store import ReservedSlots, Store
from kvstore.slots import SlotId
from kvstore_client.results import PutResult, PutState

Sending: TypeAlias = Generator[tuple[Run, PutResult], None, None]


class Offloader:
    """Sends parts of batches, through one bounded staging buffer where the device does not reach the store's slots.

    For one thread at a time. The pool's slots must not change until the part was sent.
    """

    def __init__(self, *, pool: Pool, arenas: ArenaRegistrar, store: Store, below: Below, staging_count: int) -> None:
        self._pool = pool
        self._arenas = arenas
        self._store = store
        self._below = below
        self.namespace = below.namespace
        self._block_bytes = below.namespace.stored_bytes
        self._staging = pool.device.allocate_staging(row_count=staging_count, block_bytes=self._block_bytes)

    def send(self, runs: Sequence[Run], slots: Sequence[SlotId]) -> Sending:
        """What the store says to each run, one after the other; closing this before its end calls the others off.

        Blocks that cannot be stored in the precision that is asked for are dropped, and the runs cut around them.
        """
        self._arenas.follow(self._store.arenas())
        going = self._below.take_out(slots)
        rows: Sequence[int] = going.rows
        if going.refused:
            hashes = [block_hash for run in runs for block_hash in run.block_hashes]
            refused = tuple(hashes[position] for position in sorted(going.refused))
            states = (PutState.DROPPED,) * len(refused)
            yield Run(parent_hash=None, block_hashes=refused), PutResult(states=states, stored_count=0)
            row_of = dict(zip(hashes, rows, strict=True))
            parts = cut_runs(runs, skip=refused, block_count_max=len(hashes))
            runs = [run for part in parts for run in part]
            rows = [row_of[block_hash] for run in runs for block_hash in run.block_hashes]
        if self._arenas.is_direct(is_written=True):
            yield from self._send_into_slots(runs, going.memory, rows)
        else:
            yield from self._send_through_staging(runs, going.memory, rows)

    def _send_through_staging(self, runs: Sequence[Run], source: Tensor, source_rows: Sequence[int]) -> Sending:
        self._stage(source, source_rows)
        start_row = 0
        for run in runs:
            end_row = start_row + len(run.block_hashes)
            rows = as_buffer(self._staging, start_row=start_row, end_row=end_row)
            self._count(run)
            yield run, self._store.put(self.namespace, run.block_hashes, rows, parent_hash=run.parent_hash)
            start_row = end_row

    def _send_into_slots(self, runs: Sequence[Run], source: Tensor, source_rows: Sequence[int]) -> Sending:
        """All runs are copied at once, and while one is hashed and committed the later ones still move."""
        with ExitStack() as held:
            copies: list[tuple[Run, ReservedSlots, Event | None]] = []
            start = 0
            for run in runs:
                rows = source_rows[start : start + len(run.block_hashes)]
                start += len(rows)
                reserved = held.enter_context(
                    self._store.reserve(self.namespace, run.block_hashes, parent_hash=run.parent_hash)
                )
                event = self._fill(reserved.slots, source, rows)
                if event is not None:
                    # Slots are not given back while the device may write to them.
                    held.callback(event.wait)
                copies.append((run, reserved, event))
            for run, reserved, event in copies:
                if event is not None:
                    event.wait()
                self._count(run)
                yield run, reserved.commit()

    def _fill(self, targets: Sequence[memoryview | None], source: Tensor, source_rows: Sequence[int]) -> Event | None:
        """Queues the copies into the slots, and returns when they have ended as an event; None when they have."""
        wanted = [(target, row) for target, row in zip(targets, source_rows, strict=True) if target is not None]
        if not wanted:
            return None
        views = [target for target, _ in wanted]
        rows = [row for _, row in wanted]
        pool = self._pool
        event = pool.device.offload_to_slots(source, rows, slots=HostSlots(views))
        if event is not None:
            with pool.changed:
                pool.counters.direct_offloaded_bytes += len(views) * self._block_bytes
            return event
        # Not registered yet, or not registered at all.
        self._stage(source, rows)
        for row, view in enumerate(views):
            np.copyto(np.frombuffer(view, np.uint8), self._staging[row].numpy())
        return None

    def _count(self, run: Run) -> None:
        with self._pool.changed:
            self._pool.counters.offloaded_bytes += len(run.block_hashes) * self._block_bytes

    def _stage(self, source: Tensor, rows: Sequence[int]) -> None:
        self._pool.device.copy_rows(
            source=source, source_rows=rows, target=self._staging, target_rows=range(len(rows))
        ).wait()
