"""Brings blocks back from the store, through the pool, into the caller's memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from gpu_agent.core.table import Place
from gpu_agent.device import Device, Event
from gpu_agent.pool import Pool
from gpu_agent.room import RoomMaker
from gpu_agent.rows import as_buffer
from gpu_agent.store import Store
from kvstore.errors import KvstoreError
from kvstore.keys import BlockHash
from kvstore.messages import BlockState
from kvstore.namespace import Namespace
from kvstore.slots import SlotId


class Reloader:
    """Loads through one bounded staging buffer; for one thread at a time.

    Blocks that come back get slots as far as room can be made, stay for a cool-down, and keep their lower
    copy; those without a slot reach the caller all the same.
    """

    def __init__(
        self,
        *,
        pool: Pool,
        room: RoomMaker,
        store: Store,
        namespace: Namespace,
        staging_count: int,
        cooldown_steps: int,
    ) -> None:
        self._pool = pool
        self._room = room
        self._store = store
        self._namespace = namespace
        self._cooldown_steps = cooldown_steps
        self._staging = pool.device.allocate_staging(row_count=staging_count, block_bytes=pool.block_bytes)

    def reload(
        self,
        missing: Mapping[BlockHash, Sequence[int]],
        *,
        parents: Mapping[BlockHash, BlockHash | None],
        rows: Tensor,
        deadline_s: float,
    ) -> tuple[dict[BlockHash, BlockState], KvstoreError | None]:
        """Asks for blocks that are not in the pool; `missing` says which of `rows` each is wanted in.

        Returns what became of each, and what kept the store from answering.
        """
        pool = self._pool
        hashes = list(missing)
        result = self._store.get(self._namespace, hashes, as_buffer(self._staging, start_row=0, end_row=len(hashes)))
        states = dict(zip(hashes, result.states, strict=True))
        staged = {block_hash: row for row, (block_hash, state) in enumerate(states.items()) if state is BlockState.HIT}
        hits = list(staged)
        with pool.changed:
            pool.counters.reloaded_count += len(hits)
            pool.counters.loaded_bytes += len(hits) * pool.block_bytes
            pool.counters.missed_count += len(hashes) - len(hits)
            pool.counters.corrupt_count += sum(state is BlockState.CORRUPT for state in states.values())
            if result.error is not None:
                pool.counters.daemon_error_count += 1
            else:
                self._forget(block_hash for block_hash in hashes if block_hash not in staged)
            count = self._room.make_room(len(hits), deadline_s=deadline_s)
            slots = pool.take_slots(hits, parents=[parents[block_hash] for block_hash in hits], count=count)
        slot_of = dict(zip(hits, slots, strict=False))
        self._deliver(staged, slot_of=slot_of, missing=missing, rows=rows)
        return states, result.error

    def _deliver(
        self,
        staged: Mapping[BlockHash, int],
        *,
        slot_of: Mapping[BlockHash, SlotId],
        missing: Mapping[BlockHash, Sequence[int]],
        rows: Tensor,
    ) -> None:
        """Staging → slots → caller; blocks without a slot go to the caller directly."""
        pool, device = self._pool, self._pool.device
        from_pool = [(slot, row) for block_hash, slot in slot_of.items() for row in missing[block_hash]]
        past_pool = [
            (source, row)
            for block_hash, source in staged.items()
            if block_hash not in slot_of
            for row in missing[block_hash]
        ]
        landed = False
        try:
            if slot_of:
                loaded = device.copy_rows(
                    source=self._staging,
                    source_rows=[staged[block_hash] for block_hash in slot_of],
                    target=pool.memory,
                    target_rows=list(slot_of.values()),
                )
                _copy_pairs(device, from_pool, source=pool.memory, target=rows)
                loaded.wait()  # the next reload fills the staging buffer again
            if past_pool:
                _copy_pairs(device, past_pool, source=self._staging, target=rows).wait()
            landed = True
        finally:
            with pool.changed:
                if landed:
                    for block_hash in slot_of:
                        cool_until_step = pool.step + self._cooldown_steps
                        pool.table.finish_load(block_hash, has_lower_copy=True, cool_until_step=cool_until_step)
                    pool.touch(slot_of)
                else:
                    pool.abandon(slot_of)

    def _forget(self, hashes: Iterable[BlockHash]) -> None:
        """The store answered and does not have them. Wants the lock held."""
        for block_hash in hashes:
            if self._pool.table.place_of(block_hash) is Place.OFFLOADED:
                self._pool.table.forget_offloaded(block_hash)


def _copy_pairs(device: Device, pairs: Sequence[tuple[int, int]], *, source: Tensor, target: Tensor) -> Event:
    return device.copy_rows_for_caller(
        source=source,
        source_rows=[row for row, _ in pairs],
        target=target,
        target_rows=[row for _, row in pairs],
    )
