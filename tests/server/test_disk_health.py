from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore_server.core.disk_health import (
    HINTS,
    PAUSE_INITIAL_S,
    PAUSE_MAX_S,
    READ_ERRORS_IN_A_ROW_MAX,
    DiskFault,
    DiskHealth,
    DiskWork,
)

READING, WRITING, GROWING = DiskWork


def test_a_healthy_disk_may_do_everything_and_has_no_reason() -> None:
    health = DiskHealth()
    assert all(health.may(work, now_s=0.0) for work in DiskWork)
    assert (health.reason, health.is_reading_doubtful, +health.fault_counts) == ("", False, Counter())


@pytest.mark.parametrize("fault", DiskFault)
def test_every_fault_has_a_hint_and_gives_the_reason(fault: DiskFault) -> None:
    health = DiskHealth()
    assert health.note_fault(fault, at=WRITING, now_s=0.0, detail="just so") is (fault is not DiskFault.EIO_READ)
    if fault is not DiskFault.EIO_READ:
        assert health.reason == f"{fault}: just so; nothing is written meanwhile: {HINTS[fault]}"


@pytest.mark.parametrize(
    ("at", "stopped", "what"),
    [
        (READING, {READING, WRITING}, "nothing is read or written"),
        (WRITING, {WRITING}, "nothing is written"),
        (GROWING, {GROWING}, "no segment is made"),
    ],
)
def test_a_fault_stops_what_it_was_met_at(at: DiskWork, stopped: set[DiskWork], what: str) -> None:
    health = DiskHealth()
    health.note_fault(DiskFault.SLOW, at=at, now_s=0.0, detail="")
    assert {work for work in DiskWork if not health.may(work, now_s=0.5)} == stopped
    assert what in health.reason


def test_pauses_double_while_faults_go_on_and_begin_anew_after_something_worked() -> None:
    health, now_s, lengths = DiskHealth(), 0.0, []
    for _ in range(9):
        health.note_fault(DiskFault.EIO_WRITE, at=WRITING, now_s=now_s, detail="")
        length_s = next(length for length in range(1, 200) if health.may_write(now_s=now_s + length))
        lengths.append(length_s)
        now_s += length_s
    assert lengths == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert health.note_done(WRITING)
    assert health.may_write(now_s=now_s)
    assert health.reason == ""
    health.note_fault(DiskFault.EIO_WRITE, at=WRITING, now_s=now_s, detail="")
    assert health.may_write(now_s=now_s + PAUSE_INITIAL_S)


def test_several_faults_of_what_was_under_way_make_one_pause() -> None:
    health = DiskHealth()
    assert health.note_fault(DiskFault.SLOW, at=READING, now_s=0.0, detail="")
    for _ in range(20):
        assert not health.note_fault(DiskFault.SLOW, at=READING, now_s=0.9, detail="")
    assert health.may_read(now_s=PAUSE_INITIAL_S)
    assert health.fault_counts[DiskFault.SLOW] == 21


def test_a_few_bad_sectors_stop_nothing_but_a_disk_that_gives_nothing_back_rests() -> None:
    health = DiskHealth()
    for _ in range(2 * READ_ERRORS_IN_A_ROW_MAX):
        for _ in range(READ_ERRORS_IN_A_ROW_MAX - 1):
            assert not health.note_fault(DiskFault.EIO_READ, at=READING, now_s=0.0, detail="")
        assert not health.note_done(READING)
    assert health.may_read(now_s=0.0)
    for _ in range(READ_ERRORS_IN_A_ROW_MAX):
        health.note_fault(DiskFault.EIO_READ, at=READING, now_s=0.0, detail="")
    assert not health.may_read(now_s=0.0)
    assert not health.may_write(now_s=0.0)


def test_a_read_ends_what_reads_had_stopped_and_no_fault_of_writing() -> None:
    health = DiskHealth()
    health.note_fault(DiskFault.ENOSPC, at=WRITING, now_s=0.0, detail="")
    health.note_fault(DiskFault.SLOW, at=READING, now_s=0.0, detail="")
    assert health.note_done(READING)
    assert health.may_read(now_s=0.5)
    assert not health.may_write(now_s=0.5)
    assert health.reason.startswith("enospc")


def test_a_write_proves_nothing_of_reading() -> None:
    health = DiskHealth()
    health.note_fault(DiskFault.SLOW, at=READING, now_s=0.0, detail="")
    assert health.note_done(WRITING)
    assert not health.may_read(now_s=0.5)
    assert health.is_reading_doubtful
    assert "nothing is read meanwhile" in health.reason


class HealthMachine(RuleBasedStateMachine):
    """Against a list of what happened, which is looked through for each question."""

    def __init__(self) -> None:
        super().__init__()
        self.health = DiskHealth()
        self.now_s = 0.0
        self.counted: Counter[DiskFault] = Counter()
        self.errors_in_a_row = 0
        # Until when, how long, and whether reading caused it; none: goes on.
        self.pauses: dict[DiskWork, tuple[float, float, bool]] = {}

    def begin(self, work: DiskWork, *, is_of_reading: bool) -> bool:
        pause = self.pauses.get(work)
        if pause is not None and self.now_s < pause[0]:
            if not is_of_reading:
                self.pauses[work] = (pause[0], pause[1], False)
            return False
        length_s = PAUSE_INITIAL_S if pause is None else min(2 * pause[1], PAUSE_MAX_S)
        self.pauses[work] = (self.now_s + length_s, length_s, is_of_reading)
        return pause is None

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 2.0, 30.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(fault=st.sampled_from(DiskFault), at=st.sampled_from(DiskWork))
    def fail(self, fault: DiskFault, at: DiskWork) -> None:
        self.counted[fault] += 1
        is_new = self.health.note_fault(fault, at=at, now_s=self.now_s, detail="x")
        if fault is DiskFault.EIO_READ:
            self.errors_in_a_row += 1
            if self.errors_in_a_row < READ_ERRORS_IN_A_ROW_MAX:
                assert not is_new
                return
        assert is_new == self.begin(at, is_of_reading=False)
        if at is READING and (WRITING not in self.pauses or self.pauses[WRITING][2]):
            self.begin(WRITING, is_of_reading=True)

    @rule(work=st.sampled_from(DiskWork))
    def succeed(self, work: DiskWork) -> None:
        assert self.health.note_done(work) == (work in self.pauses)
        self.pauses.pop(work, None)
        if work is READING:
            self.errors_in_a_row = 0
            if WRITING in self.pauses and self.pauses[WRITING][2]:
                del self.pauses[WRITING]

    @invariant()
    def what_may_be_done_is_what_has_no_pause(self) -> None:
        for work in DiskWork:
            assert self.health.may(work, now_s=self.now_s) == (
                work not in self.pauses or self.now_s >= self.pauses[work][0]
            ), work
        assert self.health.is_reading_doubtful == (READING in self.pauses)

    @invariant()
    def there_is_a_reason_exactly_while_something_is_stopped(self) -> None:
        assert bool(self.health.reason) == bool(self.pauses)
        assert +self.health.fault_counts == self.counted


HealthMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestDiskHealth = HealthMachine.TestCase
