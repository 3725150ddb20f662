"""The state that the engine's thread and the migrator share."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from torch import Tensor

from gpu_agent.core.access import AccessWindow, Heat
from gpu_agent.core.planner import choose_victims
from gpu_agent.core.table import BlockTable, Place, Resident
from gpu_agent.counters import Counters
from gpu_agent.device import Device
from kvstore.errors import InvalidArgumentError
from kvstore.keys import BlockHash
from kvstore.slots import SlotId


class Pool:
    """The pool's memory on its device, what lies where, how hot it is, and the one lock around that.

    Every method except `__init__` wants the lock held. The lock is a condition that is notified whenever
    a slot, a block or a migration changes state; nothing ever holds it while bytes move or a daemon answers.
    """

    def __init__(
        self,
        *,
        device: Device,
        block_bytes: int,
        capacity_bytes: int,
        window_steps: int,
        offloaded_count_max: int,
    ) -> None:
        slot_count = capacity_bytes // block_bytes
        if slot_count < 1:
            raise InvalidArgumentError.of("vram_capacity_bytes", capacity_bytes, f"at least one block, {block_bytes}")
        self.changed = threading.Condition()
        self.device = device
        self.block_bytes = block_bytes
        self.memory: Tensor = device.allocate_pool(slot_count=slot_count, block_bytes=block_bytes)
        self.table = BlockTable(slot_count=slot_count, offloaded_count_max=offloaded_count_max)
        self.access = AccessWindow(window_steps=window_steps)
        self.counters = Counters()
        self.step = 0
        self.peak_count = 0

    @property
    def slot_count(self) -> int:
        return self.table.slot_count

    @property
    def used_count(self) -> int:
        """Slots that hold a block or are still being read."""
        return self.table.slot_count - self.table.free_count

    def touch(self, hashes: Iterable[BlockHash]) -> None:
        """Counts a use of those blocks that are in the pool."""
        for block_hash in hashes:
            if self.table.place_of(block_hash) not in (None, Place.OFFLOADED):
                self.access.touch(block_hash, step=self.step)

    def take_slots(
        self, hashes: Sequence[BlockHash], *, parents: Sequence[BlockHash | None], count: int
    ) -> list[SlotId]:
        """Slots for the first `count` of these blocks, which are LOADING from now on."""
        slots: list[SlotId] = []
        for block_hash, parent_hash in zip(hashes[:count], parents[:count], strict=True):
            slot = self.table.begin_load(block_hash, parent_hash=parent_hash)
            assert slot is not None, f"{count} slots were free, got {len(slots)}"
            slots.append(slot)
        self.peak_count = max(self.peak_count, self.used_count)
        return slots

    def abandon(self, hashes: Iterable[BlockHash]) -> None:
        """Gives back the slots of blocks whose bytes did not land."""
        for block_hash in hashes:
            self.table.abandon_load(block_hash)
            self.access.forget(block_hash)
        self.changed.notify_all()

    def victims(self, *, goal_count: int, required_count: int = 0) -> list[Resident]:
        return choose_victims(
            self.table,
            heat_of=self._heat,
            step=self.step,
            goal_count=goal_count,
            required_count=required_count,
        )

    def migrated(self, block_hash: BlockHash) -> None:
        """The daemon has it: its place here is free."""
        self.table.finish_migration(block_hash)
        self.access.forget(block_hash)
        self.counters.migrated_count += 1

    def drop_coldest(self, count: int) -> None:
        """Frees up to `count` slots at once, whatever becomes of the blocks."""
        for victim in self.victims(goal_count=count, required_count=count):
            self.access.forget(victim.block_hash)
            if self.table.drop(victim.block_hash):
                self.counters.lost_count += 1
        self.changed.notify_all()

    def check_invariants(self) -> None:
        self.table.check_invariants()
        assert len(self.access) <= self.table.pool_count, f"{len(self.access)} histories of {self.table.pool_count}"

    def _heat(self, block_hash: BlockHash) -> Heat:
        return self.access.heat(block_hash, step=self.step)
