"""Brings blocks back from the store, through the pool, into the caller's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpu_agent.core.layers import LayerGroup
from gpu_agent.device import CallerRows, Device, Event
from gpu_agent.load import Found, Loader
from gpu_agent.pool import Pool
from gpu_agent.room import RoomMaker
from kvstore.errors import KvstoreError
from kvstore.eviction import Use
from kvstore.keys import BlockHash
from kvstore.messages import BlockState
from kvstore.slots import SlotId


class Reloader:
    """Loads what the store has found; for one thread at a time.

    Blocks that come back get slots as far as room can be made, stay for a cool-down, and keep their lower
    copy; those without a slot reach the caller all the same.
    """

    def __init__(
        self, *, pool: Pool, room: RoomMaker, loader: Loader, whole: Sequence[LayerGroup], cooldown_steps: int
    ) -> None:
        """`whole` is all layers at once."""
        self._whole = whole
        self._pool = pool
        self._room = room
        self._loader = loader
        self._cooldown_steps = cooldown_steps

    def reload(
        self,
        missing: Mapping[BlockHash, Sequence[int]],
        *,
        parents: Mapping[BlockHash, BlockHash | None],
        rows: CallerRows,
        use: Use,
        deadline_s: float,
    ) -> tuple[dict[BlockHash, BlockState], KvstoreError | None]:
        """Asks for blocks that are not in the pool; `missing` says which of `rows` each is wanted in.

        Returns what became of each, and what kept the store from answering.
        """
        pool = self._pool
        with self._loader.find(list(missing)) as found:
            states = dict(found.states)
            hits = [block_hash for block_hash, state in states.items() if state is BlockState.HIT]
            with pool.changed:
                count = self._room.make_room(len(hits), deadline_s=deadline_s) if hits else 0
                away = [block_hash for block_hash in hits if pool.is_away(block_hash)]
                count = min(count, len(away))
                slots = pool.take_slots(away, parents=[parents[block_hash] for block_hash in away], count=count)
            slot_of = dict(zip(away, slots, strict=False))
            intact = self._deliver(found, hits, slot_of=slot_of, missing=missing, rows=rows, use=use)
        states |= dict.fromkeys((block_hash for block_hash in hits if block_hash not in intact), BlockState.MISS)
        with pool.changed:
            pool.counters.reloaded_count += len(intact)
            pool.counters.missed_count += len(states) - len(intact)
            pool.counters.corrupt_count += sum(state is BlockState.CORRUPT for state in states.values())
            if found.error is not None:
                pool.counters.daemon_error_count += 1
            else:
                pool.forget_lower(block_hash for block_hash in states if block_hash not in intact)
        return states, found.error

    def _deliver(
        self,
        found: Found,
        hits: Sequence[BlockHash],
        *,
        slot_of: Mapping[BlockHash, SlotId],
        missing: Mapping[BlockHash, Sequence[int]],
        rows: CallerRows,
        use: Use,
    ) -> set[BlockHash]:
        """Store → slots → caller; blocks without a slot go to the caller directly. Returns those that were intact."""
        pool, device = self._pool, self._pool.device
        loaded: frozenset[BlockHash] = frozenset()
        landed = False
        try:
            if slot_of:
                loaded = found.begin(slot_of, groups=self._whole).finish()
                from_pool = [(slot_of[block_hash], row) for block_hash in loaded for row in missing[block_hash]]
                _copy_pairs(device, from_pool, source=pool.memory, target=rows)
            landed = True
        finally:
            with pool.changed:
                intact = [block_hash for block_hash in slot_of if landed and block_hash in loaded]
                cool_until_step = pool.step + self._cooldown_steps
                pool.land(intact, use=use, has_lower_copy=True, cool_until_step=cool_until_step)
                pool.abandon(block_hash for block_hash in slot_of if block_hash not in intact)
        staged = found.stage([block_hash for block_hash in hits if block_hash not in slot_of])
        if staged.row_of:
            past_pool = [(source, row) for block_hash, source in staged.row_of.items() for row in missing[block_hash]]
            _copy_pairs(device, past_pool, source=staged.memory, target=rows).wait()
        return {*loaded, *staged.row_of}


def _copy_pairs(device: Device, pairs: Sequence[tuple[int, int]], *, source: CallerRows, target: CallerRows) -> Event:
    return device.copy_rows_for_caller(
        source=source,
        source_rows=[row for row, _ in pairs],
        target=target,
        target_rows=[row for _, row in pairs],
    )
