"""Pool, table, policy and sequences together against a model that is one dictionary."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpu_agent.core.planner import plan_copies, plan_migration
from gpu_agent.core.table import Place
from gpu_agent.device.cpu import CpuDevice
from gpu_agent.pool import Pool
from kvstore.eviction import POLICIES
from kvstore.keys import BlockHash
from kvstore.slots import SlotId

SLOT_COUNT = 6
OFFLOADED_COUNT_MAX = 4
BLOCK_BYTES = 8
BLOCKS = [BlockHash(bytes([number]) * 32) for number in range(12)]
# Two chains with a fork each; parents come from callers, so one is a ring.
PARENTS = dict(zip(BLOCKS, [None, *BLOCKS[:4], BLOCKS[2], None, *BLOCKS[6:8], BLOCKS[7], BLOCKS[11], BLOCKS[10]],
                   strict=True))  # fmt: skip
SEQUENCES = {"one": BLOCKS[:5], "two": [*BLOCKS[:3], BLOCKS[5]], "three": BLOCKS[6:9]}

blocks = st.sampled_from(BLOCKS)
names = st.sampled_from(sorted(SEQUENCES))


class VramTierMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        # The model: where each block is, which slots it or its readers have, in the order of leaving.
        self.places: dict[BlockHash, Place] = {}
        self.slots: dict[BlockHash, SlotId] = {}
        self.readers: list[SlotId] = []
        self.private: list[SlotId] = []
        self.lower: set[BlockHash] = set()
        self.leaving: set[BlockHash] = set()
        self.given_up: set[BlockHash] = set()  # although a sequence needed them when they were chosen
        self.cool_until: dict[BlockHash, int] = {}
        self.needs: dict[str, int | None] = {}
        self.now_s = 0.0
        self.device = CpuDevice()

    @initialize(policy=st.sampled_from(POLICIES))
    def start(self, policy: str) -> None:
        self.pool = Pool(
            device=self.device,
            block_bytes=BLOCK_BYTES,
            capacity_bytes=SLOT_COUNT * BLOCK_BYTES,
            policy=policy,
            offloaded_count_max=OFFLOADED_COUNT_MAX,
            clock=lambda: self.now_s,
        )
        self.pool.changed.acquire()

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.changed.release()
        self.device.close()

    @property
    def step(self) -> int:
        return self.pool.step

    def _at(self, place: Place) -> list[BlockHash]:
        return [block for block in BLOCKS if self.places.get(block) is place]

    def _held(self, block: BlockHash) -> bool:
        return self.slots[block] in self.readers

    def _needed_at(self, block: BlockHash) -> int | None:
        steps = [at for name, at in self.needs.items() if at is not None and block in SEQUENCES[name]]
        return min(steps, default=None)

    def _is_free(self, block: BlockHash) -> bool:
        """Nobody reads it or needs it at a known step."""
        return not self._held(block) and self._needed_at(block) is None

    def _taken(self) -> set[SlotId]:
        return set(self.slots.values()) | set(self.readers) | set(self.private)

    def _leave(self, block: BlockHash) -> None:
        del self.slots[block]
        del self.places[block]
        self.places[block] = Place.OFFLOADED  # re-inserted, so that the dictionary keeps the order of leaving
        self.leaving.discard(block)
        self.lower.add(block)
        offloaded = [other for other, place in self.places.items() if place is Place.OFFLOADED]
        if len(offloaded) > OFFLOADED_COUNT_MAX:
            self._forget(offloaded[0])

    def _forget(self, block: BlockHash) -> None:
        self.slots.pop(block, None)
        self.cool_until.pop(block, None)
        self.leaving.discard(block)
        self.lower.discard(block)
        del self.places[block]

    # --- bytes come

    @rule(block=blocks)
    def load(self, block: BlockHash) -> None:
        if self.places.get(block) not in (None, Place.OFFLOADED) or len(self._taken()) == SLOT_COUNT:
            return
        (slot,) = self.pool.take_slots([block], parents=[PARENTS[block]], count=1)
        assert slot not in self._taken(), f"slot {slot} was handed out while in use"
        self.places.pop(block, None)
        self.places[block] = Place.LOADING
        self.slots[block] = slot

    @rule(data=st.data(), has_lower_copy=st.booleans(), cooldown=st.integers(0, 5), is_prefetched=st.booleans())
    def land(self, data: st.DataObject, has_lower_copy: bool, cooldown: int, is_prefetched: bool) -> None:
        if loading := self._at(Place.LOADING):
            block = data.draw(st.sampled_from(loading))
            self.pool.land(
                [block],
                use=self.pool.use([block]),
                has_lower_copy=has_lower_copy,
                cool_until_step=self.step + cooldown,
                is_prefetched=is_prefetched,
            )
            self.places[block] = Place.RESIDENT
            self.cool_until[block] = self.step + cooldown
            if has_lower_copy:
                self.lower.add(block)

    @rule(data=st.data())
    def fail_to_land(self, data: st.DataObject) -> None:
        if loading := self._at(Place.LOADING):
            block = data.draw(st.sampled_from(loading))
            self.pool.abandon([block])
            self._forget(block)

    # --- the engine writes

    @rule(count=st.integers(0, 3))
    def reserve(self, count: int) -> None:
        free_count = SLOT_COUNT - len(self._taken())
        slots = self.pool.reserve(count)
        assert len(slots) == min(count, free_count)
        assert not self._taken() & set(slots)
        self.private += slots

    @rule(data=st.data(), block=blocks)
    def seal(self, data: st.DataObject, block: BlockHash) -> None:
        if self.private:
            slot = data.draw(st.sampled_from(self.private))
            (is_new,) = self.pool.seal([slot], [block], parent_hash=PARENTS[block])
            self.private.remove(slot)
            assert is_new == (self.places.get(block) in (None, Place.OFFLOADED))
            if is_new:
                self.places[block] = Place.RESIDENT
                self.slots[block] = slot
                self.cool_until[block] = 0

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        if self.private:
            slot = data.draw(st.sampled_from(self.private))
            self.pool.table.discard(slot)
            self.private.remove(slot)

    # --- the engine reads

    @rule(block=blocks, is_asked_for=st.booleans())
    def hold(self, block: BlockHash, is_asked_for: bool) -> None:
        slot = self.pool.ask_for(block) if is_asked_for else self.pool.hold(block)
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
            self.pool.release(slot)
            self.readers.remove(slot)

    @rule(chain=st.lists(blocks, max_size=4))
    def use(self, chain: list[BlockHash]) -> None:
        self.pool.use(chain)

    # --- sequences

    @rule(name=names)
    def bind(self, name: str) -> None:
        self.pool.bind(name, SEQUENCES[name])
        self.needs.setdefault(name, None)

    @rule(name=names, in_steps=st.none() | st.integers(0, 9))
    def hint(self, name: str, in_steps: int | None) -> None:
        if name in self.needs:
            self.needs[name] = None if in_steps is None else self.step + in_steps
            self.pool.hint(name, self.needs[name])

    @rule(name=names)
    def unbind(self, name: str) -> None:
        if name in self.needs:
            self.pool.unbind(name)
            del self.needs[name]

    @rule(patience=st.integers(0, 3))
    def forget_overdue(self, patience: int) -> None:
        before = self.step - patience
        self.pool.forget_overdue(before=before)
        self.needs = {name: None if at is not None and at < before else at for name, at in self.needs.items()}

    # --- bytes go

    @rule(goal=st.integers(0, 4), required=st.integers(0, 4), batch_count=st.integers(1, 3))
    def migrate(self, goal: int, required: int, batch_count: int) -> None:
        resident = self._at(Place.RESIDENT)
        free = {block for block in resident if self._is_free(block)}
        unheld = {block for block in resident if not self._held(block)}
        victims = self.pool.victims(goal_count=goal, required_count=required)
        chosen = [victim.block_hash for victim in victims]
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) <= unheld
        assert len(chosen) <= max(goal, required)
        # All that is required is found if it is there at all.
        assert len(chosen) >= min(required, len(unheld))
        needed = [block for block in chosen if block not in free]
        assert not needed or len(chosen) <= required
        cooling = [block for block in chosen if block in free and self.cool_until[block] > self.step]
        assert not cooling or len(chosen) <= required
        self._migrate(victims, batch_count=batch_count)

    @rule(count=st.integers(1, 4), in_steps=st.integers(0, 9))
    def make_room_for_what_is_needed_at_a_step(self, count: int, in_steps: int) -> None:
        at = self.step + in_steps
        victims = self.pool.victims_for(count, at=at)
        for victim in victims:
            needed_at = self._needed_at(victim.block_hash)
            assert not self._held(victim.block_hash)
            assert needed_at is None or needed_at > at
        assert len(victims) <= count
        self._migrate(victims, batch_count=2)

    def _migrate(self, victims: list, *, batch_count: int) -> None:  # type: ignore[type-arg]
        batches = plan_migration(victims, batch_count_max=batch_count)
        planned = [block for batch in batches for block in batch.block_hashes]
        assert sorted(planned) == sorted(victim.block_hash for victim in victims)
        assert all(len(batch.block_hashes) <= batch_count for batch in batches)
        for block in planned:
            self.pool.table.begin_migration(block)
            self.places[block] = Place.MIGRATING
            self.leaving.add(block)
            if self._needed_at(block) is not None:
                self.given_up.add(block)

    @rule()
    def copy_down(self) -> None:
        batches = plan_copies(self.pool.table.residents(), batch_count_max=2)
        copied = [block for batch in batches for block in batch.block_hashes]
        assert sorted(copied) == sorted(self._at(Place.RESIDENT))
        for block in copied[:2]:
            self.pool.table.begin_migration(block)
            self.places[block] = Place.MIGRATING

    @rule(data=st.data(), is_stored=st.booleans())
    def daemon_answers(self, data: st.DataObject, is_stored: bool) -> None:
        if migrating := self._at(Place.MIGRATING):
            block = data.draw(st.sampled_from(migrating))
            if is_stored and block in self.leaving:
                is_free = self._is_free(block) or (block in self.given_up and not self._held(block))
                self.given_up.discard(block)
                self.pool.migrated(block)
                if is_free:
                    self._leave(block)
                    return
                self.lower.add(block)
            elif is_stored:
                self.pool.stay(block, has_lower_copy=True)
                self.lower.add(block)
            else:
                self.pool.stay(block, has_lower_copy=False, cool_until_step=self.step + 3)
                self.lower.discard(block)
                self.cool_until[block] = max(self.cool_until[block], self.step + 3)
            self.leaving.discard(block)
            self.given_up.discard(block)
            self.places[block] = Place.RESIDENT

    @rule()
    def drop(self) -> None:
        resident, lost_before = self._at(Place.RESIDENT), self.pool.counters.lost_count
        unheld = {block for block in resident if not self._held(block)}
        self.pool.drop_coldest(1)
        gone = [block for block in resident if self.pool.table.slot_of(block) is None]
        assert set(gone) <= unheld
        assert len(gone) <= 1
        for block in gone:
            is_lost = block not in self.lower
            assert self.pool.counters.lost_count - lost_before == is_lost
            if is_lost:
                self._forget(block)
            else:
                self._leave(block)

    @precondition(lambda self: self._at(Place.OFFLOADED))
    @rule(data=st.data())
    def daemon_lost_it(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self._at(Place.OFFLOADED)))
        self.pool.forget_lower([block])
        self._forget(block)

    @rule(data=st.data())
    def daemon_lost_the_lower_copy(self, data: st.DataObject) -> None:
        if here := self._at(Place.RESIDENT) + self._at(Place.MIGRATING):
            block = data.draw(st.sampled_from(here))
            self.pool.table.forget_lower_copy(block)
            self.lower.discard(block)

    @rule(steps=st.integers(1, 4), seconds=st.floats(0, 5))
    def pass_steps(self, steps: int, seconds: float) -> None:
        self.pool.step += steps
        self.now_s += seconds

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        table = self.pool.table
        self.pool.check_invariants()
        for block in BLOCKS:
            assert table.place_of(block) is self.places.get(block)
            if block in self.places and self.places[block] is not Place.LOADING:
                assert table.has_lower_copy(block) == (block in self.lower)
        assert table.free_count == SLOT_COUNT - len(self._taken())
        assert table.pool_count == len(self.slots)
        assert table.private_count == len(self.private)
        assert table.held_count == len(set(self.readers))
        assert sorted(table.migrating()) == sorted(self._at(Place.MIGRATING))


VramTierMachine.TestCase.settings = settings(deadline=None, max_examples=150, stateful_step_count=60)
TestVramTier = VramTierMachine.TestCase
