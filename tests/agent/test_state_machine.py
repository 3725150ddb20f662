"""Table, slots and planner together against a model that is one dictionary."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpu_agent.core.access import AccessWindow
from gpu_agent.core.planner import choose_victims, plan_copies, plan_migration
from gpu_agent.core.table import BlockTable, Place
from kvstore.keys import BlockHash
from kvstore.slots import SlotId

SLOT_COUNT = 6
OFFLOADED_COUNT_MAX = 4
BLOCKS = [BlockHash(bytes([number]) * 32) for number in range(12)]
# Two chains with a fork each; parents come from callers, so one is a ring.
PARENTS = dict(zip(BLOCKS, [None, *BLOCKS[:4], BLOCKS[2], None, *BLOCKS[6:8], BLOCKS[7], BLOCKS[11], BLOCKS[10]],
                   strict=True))  # fmt: skip


class VramTierMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable(slot_count=SLOT_COUNT, offloaded_count_max=OFFLOADED_COUNT_MAX)
        self.access = AccessWindow(window_steps=8)
        self.step = 0
        # The model: where each block is, which slots it or its readers have, in the order of leaving.
        self.places: dict[BlockHash, Place] = {}
        self.slots: dict[BlockHash, SlotId] = {}
        self.readers: list[SlotId] = []
        self.lower: set[BlockHash] = set()
        self.cool_until: dict[BlockHash, int] = {}

    def _at(self, place: Place) -> list[BlockHash]:
        return [block for block in BLOCKS if self.places.get(block) is place]

    def _taken(self) -> set[SlotId]:
        return set(self.slots.values()) | set(self.readers)

    def _leave(self, block: BlockHash) -> None:
        del self.slots[block]
        del self.places[block]
        self.places[block] = Place.OFFLOADED  # re-inserted, so that the dictionary keeps the order of leaving
        self.access.forget(block)
        self.lower.add(block)
        offloaded = [other for other, place in self.places.items() if place is Place.OFFLOADED]
        if len(offloaded) > OFFLOADED_COUNT_MAX:
            self._forget(offloaded[0])

    def _forget(self, block: BlockHash) -> None:
        self.slots.pop(block, None)
        self.access.forget(block)
        self.cool_until.pop(block, None)
        self.lower.discard(block)
        del self.places[block]

    @rule(block=st.sampled_from(BLOCKS))
    def load(self, block: BlockHash) -> None:
        if self.places.get(block) not in (None, Place.OFFLOADED):
            return
        slot = self.table.begin_load(block, parent_hash=PARENTS[block])
        if len(self._taken()) == SLOT_COUNT:
            assert slot is None
            return
        assert slot is not None
        assert slot not in self._taken(), f"slot {slot} was handed out while in use"
        self.places.pop(block, None)
        self.places[block] = Place.LOADING
        self.slots[block] = slot

    @rule(data=st.data(), has_lower_copy=st.booleans(), cooldown=st.integers(0, 5))
    def land(self, data: st.DataObject, has_lower_copy: bool, cooldown: int) -> None:
        if loading := self._at(Place.LOADING):
            block = data.draw(st.sampled_from(loading))
            self.table.finish_load(block, has_lower_copy=has_lower_copy, cool_until_step=self.step + cooldown)
            self.access.touch(block, step=self.step)
            self.places[block] = Place.RESIDENT
            self.cool_until[block] = self.step + cooldown
            if has_lower_copy:
                self.lower.add(block)

    @rule(data=st.data())
    def fail_to_land(self, data: st.DataObject) -> None:
        if loading := self._at(Place.LOADING):
            block = data.draw(st.sampled_from(loading))
            self.table.abandon_load(block)
            self._forget(block)

    @rule(block=st.sampled_from(BLOCKS))
    def hold(self, block: BlockHash) -> None:
        slot = self.table.hold(block)
        if self.places.get(block) in (Place.RESIDENT, Place.MIGRATING):
            assert slot == self.slots[block]
            assert slot is not None
            self.readers.append(slot)
        else:
            assert slot is None

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.readers:
            slot = data.draw(st.sampled_from(self.readers))
            self.table.release(slot)
            self.readers.remove(slot)

    @rule(goal=st.integers(0, 4), required=st.integers(0, 4), batch_count=st.integers(1, 3))
    def migrate(self, goal: int, required: int, batch_count: int) -> None:
        resident = set(self._at(Place.RESIDENT))
        held = {block for block in resident if self.slots[block] in self.readers}
        victims = choose_victims(
            self.table,
            heat_of=lambda block: self.access.heat(block, step=self.step),
            step=self.step,
            goal_count=goal,
            required_count=required,
        )
        chosen = [victim.block_hash for victim in victims]
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) <= resident - held
        # All that is needed is found if it is there at all, and no more than wanted goes.
        assert min(required, len(resident - held)) <= len(chosen) <= max(goal, required)
        cooling = [block for block in chosen if self.cool_until[block] > self.step]
        assert len(cooling) == 0 or len(chosen) <= required
        if required == 0:
            staying = set(resident) | set(self._at(Place.LOADING))
            for block in chosen:
                staying.discard(block)
                assert block not in {PARENTS[child] for child in staying}, "a head went before its tail"
        batches = plan_migration(victims, batch_count_max=batch_count)
        assert sorted(block for batch in batches for block in batch.block_hashes) == sorted(chosen)
        assert all(len(batch.block_hashes) <= batch_count for batch in batches)
        for block in chosen:
            self.table.begin_migration(block)
            self.places[block] = Place.MIGRATING

    @rule(data=st.data(), is_stored=st.booleans())
    def daemon_answers(self, data: st.DataObject, is_stored: bool) -> None:
        if migrating := self._at(Place.MIGRATING):
            block = data.draw(st.sampled_from(migrating))
            if is_stored:
                self.table.finish_migration(block)
                self._leave(block)
            else:
                self.table.stay_resident(block, has_lower_copy=False, cool_until_step=self.step + 3)
                self.places[block] = Place.RESIDENT
                self.lower.discard(block)
                self.cool_until[block] = max(self.cool_until[block], self.step + 3)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if resident := self._at(Place.RESIDENT):
            block = data.draw(st.sampled_from(resident))
            is_lost = self.table.drop(block)
            assert is_lost == (block not in self.lower)
            if is_lost:
                self._forget(block)
            else:
                self._leave(block)

    @precondition(lambda self: self._at(Place.OFFLOADED))
    @rule(data=st.data())
    def daemon_lost_it(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self._at(Place.OFFLOADED)))
        self.table.forget_offloaded(block)
        self._forget(block)

    @rule(data=st.data())
    def daemon_lost_the_lower_copy(self, data: st.DataObject) -> None:
        if here := self._at(Place.RESIDENT) + self._at(Place.MIGRATING):
            block = data.draw(st.sampled_from(here))
            self.table.forget_lower_copy(block)
            self.lower.discard(block)

    @rule(steps=st.integers(1, 4))
    def pass_steps(self, steps: int) -> None:
        self.step += steps

    @rule()
    def copies_cover_the_pool(self) -> None:
        batches = plan_copies(self.table.residents(), batch_count_max=2)
        copied = [block for batch in batches for block in batch.block_hashes]
        assert sorted(copied) == sorted(self._at(Place.RESIDENT))

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.table.check_invariants()
        for block in BLOCKS:
            assert self.table.place_of(block) is self.places.get(block)
            if block in self.places and self.places[block] is not Place.LOADING:
                assert self.table.has_lower_copy(block) == (block in self.lower)
        assert self.table.free_count == SLOT_COUNT - len(self._taken())
        assert self.table.pool_count == len(self.slots)
        assert self.table.held_count == len(set(self.readers))
        assert sorted(self.table.migrating()) == sorted(self._at(Place.MIGRATING))
        assert len(self.access) <= len(self.slots)


TestVramTier = VramTierMachine.TestCase
TestVramTier.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
