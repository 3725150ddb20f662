"""Who gets how much of a device, and what attached engines hold: rules, without engines."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from gpu_agent.core.holdings import Holdings, Reservation
from gpu_agent.core.quotas import Quotas
from kvstore.errors import InvalidArgumentError
from kvstore.messages import OwnerId
from kvstore.slots import SlotId
from tests.agent.fakes import BLOCK_BYTES, NAMESPACE, chain

OTHER = dataclasses.replace(NAMESPACE, weights_revision="r2")
FOREIGN = dataclasses.replace(NAMESPACE, model="large")
NO_QUOTA = {"quota_bytes": 0, "further_count": 0, "block_bytes": BLOCK_BYTES}


def test_the_first_namespace_gets_all_that_is_not_promised_and_the_next_nothing() -> None:
    quotas = Quotas(capacity_bytes=10 * BLOCK_BYTES, promised={"large": 4 * BLOCK_BYTES})
    assert quotas.share_bytes(NAMESPACE, **NO_QUOTA) == 6 * BLOCK_BYTES
    quotas.give(NAMESPACE, 6 * BLOCK_BYTES)
    assert quotas.share_bytes(OTHER, **NO_QUOTA) == 0
    assert quotas.share_bytes(FOREIGN, **NO_QUOTA) == 4 * BLOCK_BYTES
    refusal = str(quotas.refusal(OTHER, quota_bytes=0, block_bytes=BLOCK_BYTES))
    assert "0B of 80.0KiB of the agent are neither in use nor promised" in refusal
    assert "--quota MODEL=SIZE" in refusal
    quotas.take_back(NAMESPACE.id)
    assert quotas.share_bytes(OTHER, **NO_QUOTA) == 6 * BLOCK_BYTES


def test_namespaces_that_are_opened_together_get_even_shares() -> None:
    quotas = Quotas(capacity_bytes=9 * BLOCK_BYTES, promised={})
    for further_count, namespace in zip((2, 1, 0), (NAMESPACE, OTHER, FOREIGN), strict=True):
        share = quotas.share_bytes(namespace, quota_bytes=0, further_count=further_count, block_bytes=BLOCK_BYTES)
        assert share == 3 * BLOCK_BYTES
        quotas.give(namespace, share)
    quotas.check_invariants()


def test_a_promise_is_shared_by_the_namespaces_of_a_model_or_is_one_namespaces_own() -> None:
    promised = {NAMESPACE.id.hex()[:12]: 2 * BLOCK_BYTES, "tiny": 3 * BLOCK_BYTES}
    quotas = Quotas(capacity_bytes=9 * BLOCK_BYTES, promised=promised)
    assert quotas.left_bytes(NAMESPACE) == 2 * BLOCK_BYTES
    assert quotas.left_bytes(OTHER) == 3 * BLOCK_BYTES
    quotas.give(OTHER, 2 * BLOCK_BYTES)
    third = dataclasses.replace(NAMESPACE, weights_revision="r3")
    assert quotas.left_bytes(third) == BLOCK_BYTES
    assert list(quotas.rivals(third)) == [OTHER.id]


def test_a_quota_that_is_asked_for_is_given_whole_or_not_at_all() -> None:
    quotas = Quotas(capacity_bytes=4 * BLOCK_BYTES, promised={})
    asked = {"further_count": 0, "block_bytes": BLOCK_BYTES}
    assert quotas.share_bytes(NAMESPACE, quota_bytes=5 * BLOCK_BYTES, **asked) == 0
    assert quotas.share_bytes(NAMESPACE, quota_bytes=BLOCK_BYTES - 1, **asked) == 0
    assert quotas.share_bytes(NAMESPACE, quota_bytes=3 * BLOCK_BYTES, **asked) == 3 * BLOCK_BYTES


def test_more_cannot_be_promised_than_there_is() -> None:
    with pytest.raises(InvalidArgumentError, match=r"3\.0KiB for a, b'; allowed: up to 2\.0KiB in all"):
        Quotas(capacity_bytes=2048, promised={"a": 1024, "b": 2048})


HASHES = chain(64)


class HoldingsMachine(RuleBasedStateMachine):
    """Against a plain account of who holds what; what is given back is given back once, and all of it."""

    sessions: Bundle[OwnerId] = Bundle("sessions")

    @initialize()
    def begin(self) -> None:
        self.holdings: Holdings[str] = Holdings(count_max=8, session_count_max=5)
        self.now_s = 0.0
        self.slots: dict[OwnerId, dict[int, tuple[SlotId, ...]]] = {}
        self.leases: dict[OwnerId, dict[int, tuple[str, int, float]]] = {}
        self.made_count = 0

    def held_count(self, session_id: OwnerId) -> int:
        leased_count = sum(count for _, count, _ in self.leases[session_id].values())
        return leased_count + sum(map(len, self.slots[session_id].values()))

    @rule(target=sessions)
    def open(self) -> OwnerId:
        self.made_count += 1
        session_id = OwnerId(self.made_count.to_bytes(16, "big"))
        self.holdings.open(session_id)
        self.slots[session_id], self.leases[session_id] = {}, {}
        return session_id

    @rule(session_id=consumes(sessions))
    def close(self, session_id: OwnerId) -> None:
        ended = self.holdings.close(session_id)
        slots = self.slots.pop(session_id).values()
        assert sorted(ended.written_slots) == sorted(slot for part in slots for slot in part)
        assert sorted(ended.holds) == sorted(hold for hold, _, _ in self.leases.pop(session_id).values())

    @rule(session_id=sessions, count=st.integers(1, 6), had=st.integers(0, 6), is_read=st.booleans())
    def grant(self, session_id: OwnerId, count: int, had: int, is_read: bool) -> None:
        total_count = sum(map(self.held_count, self.slots))
        promised_count = self.holdings.promise(session_id, count)
        assert promised_count == max(0, min(count, 5 - self.held_count(session_id), 8 - total_count))
        had = min(had, promised_count)
        assert self.holdings.settle(session_id, promised_count=promised_count, count=had)
        if not had:
            return
        deadline_s = self.now_s + 10.0
        if is_read:
            hold = f"hold {self.made_count}"
            self.made_count += 1
            number = self.holdings.lease(session_id, hold, slot_count=had, deadline_s=deadline_s)
            self.leases[session_id][number] = hold, had, deadline_s
        else:
            slots = tuple(map(SlotId, range(had)))
            reservation = Reservation(
                hashes=tuple(HASHES[:had]), parents=(None,) * had, slots=slots, deadline_s=deadline_s
            )
            self.slots[session_id][self.holdings.reserve(session_id, reservation)] = slots

    @rule(session_id=sessions, number=st.integers(1, 6))
    def give_back(self, session_id: OwnerId, number: int) -> None:
        reservation = self.holdings.commit(session_id, number)
        slots = self.slots[session_id].pop(number, None)
        assert (None if reservation is None else reservation.slots) == slots
        released = self.holdings.release(session_id, [number])
        lease = self.leases[session_id].pop(number, None)
        assert released == ([] if lease is None else [lease[0]])

    @rule(passed_s=st.floats(0.0, 12.0))
    def expire(self, passed_s: float) -> None:
        self.now_s += passed_s
        expired = {one.session_id: one for one in self.holdings.expire(now_s=self.now_s)}
        for session_id, leases in self.leases.items():
            late = {number for number, (_, _, deadline_s) in leases.items() if deadline_s <= self.now_s}
            assert (session_id in expired) == bool(late)
            if late:
                assert expired[session_id].last_number == max(late)
                assert sorted(expired[session_id].holds) == sorted(leases[number][0] for number in late)
            for number in late:
                del leases[number]

    @invariant()
    def adds_up(self) -> None:
        self.holdings.check_invariants()
        assert self.holdings.held_count == sum(map(self.held_count, self.slots))


TestHoldings = HoldingsMachine.TestCase
TestHoldings.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_what_is_promised_to_a_session_that_ends_meanwhile_is_not_taken() -> None:
    holdings: Holdings[str] = Holdings(count_max=4, session_count_max=4)
    session_id = OwnerId(bytes(16))
    holdings.open(session_id)
    assert holdings.promise(session_id, 3) == 3
    holdings.close(session_id)
    assert not holdings.settle(session_id, promised_count=3, count=2)
    assert holdings.held_count == 0
