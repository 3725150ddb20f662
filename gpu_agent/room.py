"""Makes room in the pool: ahead of need by watermarks, and at once when a call has to have it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gpu_agent.config import AgentConfig
from gpu_agent.core.link import LinkDecision
from gpu_agent.core.planner import plan_migration
from gpu_agent.core.table import Resident
from gpu_agent.migration import Migrator
from gpu_agent.pool import Pool


class RoomMaker:
    """Turns pressure into migrations, and pressure that migration cannot relieve in time into drops.

    Every method wants `pool.changed` held.
    """

    def __init__(self, *, pool: Pool, migrator: Migrator, config: AgentConfig, batch_count_max: int) -> None:
        self._pool = pool
        self._migrator = migrator
        self._config = config
        self._batch_count_max = batch_count_max
        self._batch_count = batch_count_max
        self._is_calm = False
        self._next_relief_step = 0

    def deadline_s(self, *, block_count: int) -> float:
        """Until when, on the monotonic clock, a call that brings this many blocks waits for room."""
        return time.monotonic() + self._patience_s(block_count)

    def follow(self, decision: LinkDecision) -> None:
        """What the link allows from now on."""
        self._batch_count = decision.batch_count
        self._is_calm = decision.is_calm

    def relieve(self) -> None:
        """Starts migrating above the high watermark; never waits."""
        if self._pool.step < self._next_relief_step or not self._migrator.is_accepting():
            return
        if self._excess_count() and (self._start(required_count=0) == 0 or self._is_calm):
            # All that could go is cooling: looking again at every step would cost the engine a walk over the pool. Or
            # the link is busy: then one batch at a time has to do.
            self._next_relief_step = self._pool.step + self._config.cooldown_steps // 8

    def make_room(self, count: int, *, deadline_s: float) -> int:
        """Waits until this many slots are free, or as many as can be had; returns how many of them are.

        Waits while migration gets on. When it does not (no daemon, a hung one, a slow one, or one that refuses
        more blocks than it takes), the coldest blocks are dropped.
        """
        pool = self._pool
        if pool.table.free_count >= count:
            return count
        started_s = time.monotonic()
        counters = pool.counters
        counters.stall_count += 1
        balance_before = counters.migrated_count - counters.migration_refused_count
        while (missing_count := count - pool.table.free_count) > 0:
            wait_s = self._give_up_s(deadline_s) - time.monotonic()
            is_getting_on = counters.migrated_count - counters.migration_refused_count >= balance_before
            if wait_s > 0 and is_getting_on and self._migrator.is_accepting():
                self._start(required_count=missing_count - pool.table.migrating_count)
                if pool.table.migrating_count:
                    pool.changed.wait(wait_s)
                    continue
            self._migrator.cancel_queued()
            pool.drop_coldest(missing_count)
            break
        counters.stall_s += time.monotonic() - started_s
        return min(count, pool.table.free_count)

    def make_room_ahead(self, count: int, *, at: int) -> int:
        """How many of this many slots are free below the high watermark; never waits.

        For the others, blocks start to migrate that no sequence needs before step `at`.
        """
        pool = self._pool
        room_count = int(self._config.high_watermark * pool.slot_count) - pool.used_count
        missing_count = count - room_count - pool.table.migrating_count
        if missing_count > 0 and self._migrator.is_accepting():
            self._submit(pool.victims_for(missing_count, at=at))
        return max(0, min(count, room_count))

    def _excess_count(self) -> int:
        """Blocks by which the pool is above its low watermark; 0 while it is not above the high one."""
        pool = self._pool
        staying_count = pool.table.pool_count - pool.table.migrating_count
        excess_bytes = self._config.watermarks.excess_bytes(
            used_bytes=staying_count * pool.block_bytes, capacity_bytes=pool.slot_count * pool.block_bytes
        )
        return -(-excess_bytes // pool.block_bytes)

    def _start(self, *, required_count: int) -> int:
        """Submits what brings the pool down to the low watermark, at least `required_count`; returns how many."""
        excess_count = self._excess_count()
        goal_count = max(min(excess_count, self._batch_count) if self._is_calm else excess_count, required_count)
        if goal_count <= 0:
            return 0
        victims = self._pool.victims(goal_count=goal_count, required_count=max(0, required_count))
        self._submit(victims)
        return len(victims)

    def _submit(self, victims: Sequence[Resident]) -> None:
        self._migrator.submit(plan_migration(victims, batch_count_max=self._batch_count))

    def _patience_s(self, block_count: int) -> float:
        moved_bytes = block_count * self._pool.block_bytes
        return self._config.room_wait_s + moved_bytes / self._config.offload_rate_min_bytes_per_s

    def _give_up_s(self, deadline_s: float) -> float:
        """A batch that is stuck is waited for once, not once by every call."""
        busy_since_s = self._migrator.busy_since_s
        if busy_since_s is None:
            return deadline_s
        return min(deadline_s, busy_since_s + self._patience_s(self._batch_count_max))
