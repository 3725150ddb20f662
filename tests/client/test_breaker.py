"""A daemon that does not answer is asked ever less often, and again as soon as it answers."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore_client.breaker import Admission, Breaker

CALL, TRIAL, REFUSED = Admission.CALL, Admission.TRIAL, Admission.REFUSED


def breaker() -> Breaker:
    return Breaker(failure_count_max=3, cooldown_initial_s=1.0, cooldown_max_s=8.0)


def test_one_timeout_opens_it_but_refusals_need_company() -> None:
    timed_out = breaker()
    timed_out.record_failure(CALL, now_s=0.0, is_timeout=True)
    assert timed_out.admit(now_s=0.5) is REFUSED
    refused = breaker()
    for _ in range(2):
        refused.record_failure(CALL, now_s=0.0, is_timeout=False)
        assert refused.admit(now_s=0.0) is CALL
    refused.record_failure(CALL, now_s=0.0, is_timeout=False)
    assert refused.admit(now_s=0.5) is REFUSED
    assert refused.wait_s(now_s=0.25) == 0.75


def test_an_answer_in_between_starts_the_count_again() -> None:
    circuit = breaker()
    for _ in range(10):
        circuit.record_failure(CALL, now_s=0.0, is_timeout=False)
        circuit.record_failure(CALL, now_s=0.0, is_timeout=False)
        circuit.record_success()
    assert circuit.admit(now_s=0.0) is CALL


def test_after_the_cooldown_one_caller_tries_for_all() -> None:
    circuit = breaker()
    circuit.record_failure(CALL, now_s=0.0, is_timeout=True)
    assert [circuit.admit(now_s=1.0) for _ in range(3)] == [TRIAL, REFUSED, REFUSED]
    circuit.record_success()
    assert circuit.admit(now_s=1.1) is CALL


def test_cooldowns_grow_while_trials_fail() -> None:
    circuit, now_s, cooldowns = breaker(), 0.0, []
    circuit.record_failure(CALL, now_s=now_s, is_timeout=True)
    for _ in range(6):
        cooldowns.append(circuit.wait_s(now_s=now_s))
        now_s += cooldowns[-1]
        assert circuit.admit(now_s=now_s) is TRIAL
        circuit.record_failure(TRIAL, now_s=now_s, is_timeout=False)
    assert cooldowns == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_a_daemon_that_answers_probes_but_hangs_on_data_is_left_alone_ever_longer() -> None:
    circuit, now_s, cooldowns = breaker(), 0.0, []
    for _ in range(5):
        circuit.record_success()
        circuit.record_failure(circuit.admit(now_s=now_s), now_s=now_s, is_timeout=True)
        cooldowns.append(circuit.wait_s(now_s=now_s))
        now_s += cooldowns[-1]
    assert cooldowns == [1.0, 2.0, 4.0, 8.0, 8.0]


def test_after_calm_the_next_cooldown_is_short_again() -> None:
    circuit = breaker()
    for now_s in (0.0, 1.0, 3.0):
        circuit.record_failure(circuit.admit(now_s=now_s), now_s=now_s, is_timeout=True)
    circuit.record_success()
    circuit.record_failure(CALL, now_s=60.0, is_timeout=True)
    assert circuit.wait_s(now_s=60.0) == 1.0


def test_calls_that_were_under_way_when_it_opened_count_once() -> None:
    circuit = breaker()
    for _ in range(50):
        circuit.record_failure(CALL, now_s=0.0, is_timeout=True)
    assert circuit.wait_s(now_s=0.0) == 1.0


def test_a_trial_that_never_ends_makes_room_for_another() -> None:
    circuit = breaker()
    circuit.record_failure(CALL, now_s=0.0, is_timeout=True)
    assert circuit.admit(now_s=1.0) is TRIAL
    assert circuit.admit(now_s=1.5) is REFUSED
    assert circuit.admit(now_s=2.0) is TRIAL


class AnyHistory(RuleBasedStateMachine):
    """Whatever the calls do, and however late they tell."""

    def __init__(self) -> None:
        super().__init__()
        self.circuit = breaker()
        self.now_s = 0.0
        self.under_way: list[Admission] = []
        self.trial_times_s: list[float] = []

    @rule(seconds=st.floats(0.0, 20.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def call(self) -> None:
        admission = self.circuit.admit(now_s=self.now_s)
        if admission is TRIAL:
            assert not self.trial_times_s or self.now_s - self.trial_times_s[-1] >= 1.0
            self.trial_times_s.append(self.now_s)
        if admission is not REFUSED:
            self.under_way.append(admission)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), is_timeout=st.booleans())
    def fail(self, data: st.DataObject, is_timeout: bool) -> None:
        admission = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        self.circuit.record_failure(admission, now_s=self.now_s, is_timeout=is_timeout)
        if is_timeout or admission is TRIAL:
            assert self.circuit.is_open

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def succeed(self, data: st.DataObject) -> None:
        self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        self.circuit.record_success()
        assert not self.circuit.is_open

    @invariant()
    def the_wait_is_bounded(self) -> None:
        assert 0.0 <= self.circuit.wait_s(now_s=self.now_s) <= 8.0


AnyHistory.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestAnyHistory = AnyHistory.TestCase
