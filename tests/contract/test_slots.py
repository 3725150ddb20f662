from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kvstore.slots import SlotAllocator, SlotId


class SlotAllocatorMachine(RuleBasedStateMachine):
    """Against a plain dict of ref counts; every hold is given back exactly once."""

    holds = Bundle("holds")

    @initialize(slot_count=st.integers(0, 5))
    def start(self, slot_count: int) -> None:
        self.slots = SlotAllocator(slot_count=slot_count)
        self.refs = dict.fromkeys(range(slot_count), 0)

    @rule(target=holds)
    def allocate(self) -> object:
        slot = self.slots.allocate()
        if slot is None:
            assert all(self.refs.values())
            return multiple()
        assert self.refs[slot] == 0
        self.refs[slot] = 1
        return slot

    @rule(target=holds, slot=holds)
    def retain(self, slot: SlotId) -> SlotId:
        self.slots.retain(slot)
        self.refs[slot] += 1
        return slot

    @rule(slot=consumes(holds))
    def release(self, slot: SlotId) -> None:
        self.refs[slot] -= 1
        assert self.slots.release(slot) == (self.refs[slot] == 0)

    @invariant()
    def counts_agree(self) -> None:
        self.slots.check_invariants()
        assert self.slots.slot_count == len(self.refs)
        assert self.slots.free_count == list(self.refs.values()).count(0)
        assert {slot: self.slots.ref_count(SlotId(slot)) for slot in self.refs} == self.refs


TestSlotAllocator = SlotAllocatorMachine.TestCase
TestSlotAllocator.settings = settings(max_examples=50)


def test_holding_or_giving_back_a_free_slot_is_a_bug() -> None:
    slots = SlotAllocator(slot_count=1)
    with pytest.raises(AssertionError, match="retain of free slot 0"):
        slots.retain(SlotId(0))
    with pytest.raises(AssertionError, match="release of free slot 0"):
        slots.release(SlotId(0))
