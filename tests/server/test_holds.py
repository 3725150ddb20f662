"""The table of leases and reservations against an obvious model: a dict of deadlines."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.messages import OwnerId
from kvstore_server.core.holds import HoldTable
from tests.server.builders import ALICE, BOB

owners = st.sampled_from([ALICE, BOB])
durations_s = st.integers(0, 30).map(float)


@dataclass(kw_only=True)
class ModelHold:
    owner_id: OwnerId
    value: str
    deadline_s: float


class HoldTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table: HoldTable[str] = HoldTable()
        self.model: dict[int, ModelHold] = {}
        self.numbers: list[int] = [0, 10_000]  # of all holds ever, and two of none
        self.ended: list[str] = []
        self.now_s = 0.0

    def number(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(self.numbers))

    @rule(owner_id=owners, duration_s=durations_s)
    def grant(self, owner_id: OwnerId, duration_s: float) -> None:
        value = f"hold {len(self.numbers)}"
        number = self.table.grant(owner_id=owner_id, value=value, now_s=self.now_s, duration_s=duration_s)
        assert number not in self.numbers, f"number {number} was used before"
        self.numbers.append(number)
        self.model[number] = ModelHold(owner_id=owner_id, value=value, deadline_s=self.now_s + duration_s)

    @rule(data=st.data(), owner_id=owners)
    def get(self, data: st.DataObject, owner_id: OwnerId) -> None:
        number = self.number(data)
        hold = self.model.get(number)
        expected = hold.value if hold and hold.owner_id == owner_id else None
        assert self.table.get(number, owner_id=owner_id) == expected

    @rule(data=st.data(), owner_id=owners, duration_s=durations_s)
    def renew(self, data: st.DataObject, owner_id: OwnerId, duration_s: float) -> None:
        number = self.number(data)
        hold = self.model.get(number)
        may_renew = hold is not None and hold.owner_id == owner_id and hold.deadline_s > self.now_s
        assert self.table.renew(number, owner_id=owner_id, now_s=self.now_s, duration_s=duration_s) == may_renew
        if hold is not None and may_renew:
            hold.deadline_s = self.now_s + duration_s

    @rule(data=st.data(), owner_id=owners)
    def release(self, data: st.DataObject, owner_id: OwnerId) -> None:
        number = self.number(data)
        hold = self.model.get(number)
        expected = hold.value if hold and hold.owner_id == owner_id else None
        assert self.table.release(number, owner_id=owner_id) == expected
        if expected is not None:
            del self.model[number]
            self.ended.append(expected)

    @rule(owner_id=owners)
    def release_all(self, owner_id: OwnerId) -> None:
        own = [number for number, hold in self.model.items() if hold.owner_id == owner_id]
        expected = [self.model.pop(number).value for number in own]
        assert self.table.release_all(owner_id=owner_id) == expected
        self.ended += expected

    @rule(owner_id=owners, duration_s=st.none() | durations_s)
    def adopt(self, owner_id: OwnerId, duration_s: float | None) -> None:
        """Under a number of another table, which is never one that this one has given out."""
        number = self.table.next_number + len(self.numbers) % 3
        deadline_s = math.inf if duration_s is None else self.now_s + duration_s
        value = f"hold {len(self.numbers)}"
        self.table.adopt(number, owner_id=owner_id, value=value, deadline_s=deadline_s)
        self.numbers.append(number)
        self.model[number] = ModelHold(owner_id=owner_id, value=value, deadline_s=deadline_s)

    @rule(step_s=st.integers(0, 12))
    def let_time_pass(self, step_s: int) -> None:
        self.now_s += step_s

    @rule()
    def expire(self) -> None:
        due = sorted(hold.value for hold in self.model.values() if hold.deadline_s <= self.now_s)
        assert sorted(self.table.expire(now_s=self.now_s)) == due
        self.model = {number: hold for number, hold in self.model.items() if hold.deadline_s > self.now_s}
        self.ended += due

    @invariant()
    def counts_agree_and_nothing_ends_twice(self) -> None:
        assert len(self.table) == len(self.model)
        assert sorted(self.table.values()) == sorted(hold.value for hold in self.model.values())
        assert len(set(self.ended)) == len(self.ended)

    def teardown(self) -> None:
        for owner_id in (ALICE, BOB):
            self.release_all(owner_id)
        assert len(self.table) == 0
        assert not self.table._numbers_of


HoldTableMachine.TestCase.settings = settings(max_examples=50, deadline=None)
TestHoldTable = HoldTableMachine.TestCase


def test_a_renewed_hold_outlives_its_first_deadline() -> None:
    table: HoldTable[str] = HoldTable()
    number = table.grant(owner_id=ALICE, value="x", now_s=0.0, duration_s=10.0)
    assert table.renew(number, owner_id=ALICE, now_s=9.0, duration_s=10.0)
    assert table.expire(now_s=10.0) == []
    assert table.expire(now_s=19.0) == ["x"]


def test_a_hold_renewed_to_an_earlier_deadline_ends_then() -> None:
    table: HoldTable[str] = HoldTable()
    number = table.grant(owner_id=ALICE, value="x", now_s=0.0, duration_s=100.0)
    assert table.renew(number, owner_id=ALICE, now_s=0.0, duration_s=1.0)
    assert table.expire(now_s=1.0) == ["x"]


def test_a_hold_without_a_deadline_does_not_expire() -> None:
    table: HoldTable[str] = HoldTable()
    table.adopt(7, owner_id=ALICE, value="x", deadline_s=math.inf)
    assert table.expire(now_s=1e12) == []
    assert table.release(7, owner_id=ALICE) == "x"


def test_holds_that_end_early_leave_no_queue_behind() -> None:
    table: HoldTable[str] = HoldTable()
    for _ in range(10_000):
        number = table.grant(owner_id=ALICE, value="x", now_s=0.0, duration_s=600.0)
        table.release(number, owner_id=ALICE)
    assert len(table._deadlines) < 200


def test_renewals_to_and_fro_leave_no_queue_behind() -> None:
    table: HoldTable[str] = HoldTable()
    number = table.grant(owner_id=ALICE, value="x", now_s=0.0, duration_s=600.0)
    for _ in range(5_000):
        table.renew(number, owner_id=ALICE, now_s=0.0, duration_s=1.0)
        table.renew(number, owner_id=ALICE, now_s=0.0, duration_s=600.0)
    assert len(table._deadlines) < 200
    assert table.expire(now_s=599.0) == []
    assert table.expire(now_s=600.0) == ["x"]
