"""Which blocks may enter the disk."""

from __future__ import annotations

import random

import pytest

from kvstore.errors import InvalidArgumentError
from kvstore_server.core.admission import Admission, AdmissionPolicy, Refusal

HOUR_S = 3600.0
DAY_S = 86_400.0
DAY_BYTES = 24_000  # 1000 bytes an hour


def make_admission(policy: AdmissionPolicy = "all", *, day_bytes: int | None = None) -> Admission:
    return Admission(policy=policy, write_budget_bytes_per_day=day_bytes)


def refusal(admission: Admission, *, use_count: int = 1, now_s: float = 0.0) -> Refusal | None:
    return admission.refusal(use_count=use_count, now_s=now_s)


def evict(admission: Admission, *, count: int, read_count: int = 0) -> None:
    for number in range(count):
        admission.count_eviction(was_read=number < read_count)


def test_all_takes_blocks_that_were_never_used() -> None:
    assert refusal(make_admission("all"), use_count=0) is None


def test_second_hit_takes_blocks_from_their_second_use_on() -> None:
    admission = make_admission("second-hit")
    assert [refusal(admission, use_count=count) for count in range(4)] == [
        Refusal.NOT_REUSED,
        Refusal.NOT_REUSED,
        None,
        None,
    ]


@pytest.mark.parametrize("seed", range(20))
def test_second_hit_punches_no_hole_into_any_chain(seed: int) -> None:
    """A use of a block is one of all its ancestors, whatever the tree and whoever asks."""
    chance = random.Random(seed)
    parents: dict[int, int | None] = {0: None}
    for block in range(1, 200):
        parents[block] = chance.choice([None, *range(block), block - 1, block - 1])
    use_counts = dict.fromkeys(parents, 0)
    for _ in range(60):
        ancestor: int | None = chance.randrange(200)
        while ancestor is not None:
            use_counts[ancestor] += 1
            ancestor = parents[ancestor]
    admission = make_admission("second-hit")
    accepted = {block for block, count in use_counts.items() if refusal(admission, use_count=count) is None}
    assert 0 < len(accepted) < 200
    for block in accepted:
        parent = parents[block]
        assert parent is None or parent in accepted, f"{block} is on the disk without {parent}"


# --- the budget


def test_a_budget_gives_an_hours_share_at_once_and_no_more() -> None:
    admission = make_admission(day_bytes=DAY_BYTES)
    for _ in range(10):
        assert refusal(admission) is None
        admission.charge(100, now_s=0.0)
    assert refusal(admission) is Refusal.BUDGET
    assert refusal(admission, now_s=100.0) is None


def test_an_idle_day_saves_up_no_more_than_an_hours_share() -> None:
    admission = make_admission(day_bytes=DAY_BYTES)
    admission.charge(1000, now_s=0.0)
    assert refusal(admission, now_s=DAY_S) is None
    admission.charge(1000, now_s=DAY_S)
    assert refusal(admission, now_s=DAY_S) is Refusal.BUDGET


def test_what_was_written_on_credit_is_paid_off_before_the_next_write() -> None:
    admission = make_admission(day_bytes=DAY_BYTES)
    admission.charge(3000, now_s=0.0)
    assert refusal(admission, now_s=2 * HOUR_S - 1) is Refusal.BUDGET
    assert refusal(admission, now_s=2 * HOUR_S + 1) is None


def test_what_was_not_written_after_all_is_given_back() -> None:
    admission = make_admission(day_bytes=DAY_BYTES)
    admission.charge(1000, now_s=0.0)
    admission.refund(400)
    assert refusal(admission) is None
    admission.charge(400, now_s=0.0)
    assert refusal(admission) is Refusal.BUDGET


@pytest.mark.parametrize("policy", ["all", "second-hit", "adaptive"])
def test_over_many_days_no_policy_writes_more_than_the_budget(policy: AdmissionPolicy) -> None:
    admission = make_admission(policy, day_bytes=DAY_BYTES)
    written_bytes = 0
    for minute in range(10 * 24 * 60):
        now_s = minute * 60.0
        if refusal(admission, use_count=minute % 3, now_s=now_s) is None:
            admission.charge(100, now_s=now_s)
            written_bytes += 100
    assert 0.9 * 10 * DAY_BYTES < written_bytes <= 10 * DAY_BYTES + 1000 + 100


def test_a_clock_that_goes_back_gives_nothing_away() -> None:
    admission = make_admission(day_bytes=DAY_BYTES)
    admission.charge(1500, now_s=HOUR_S)
    assert refusal(admission, now_s=0.0) is Refusal.BUDGET
    assert refusal(admission, now_s=HOUR_S / 4) is Refusal.BUDGET


def test_without_a_budget_nothing_is_counted_against_one() -> None:
    admission = make_admission()
    admission.charge(1 << 60, now_s=0.0)
    assert refusal(admission) is None


# --- adaptive


def test_adaptive_begins_by_taking_everything() -> None:
    admission = make_admission("adaptive", day_bytes=DAY_BYTES)
    assert refusal(admission, use_count=0) is None
    assert not admission.is_selective


def test_adaptive_takes_only_used_blocks_while_writes_come_faster_than_the_budget_and_some_time_after() -> None:
    admission = make_admission("adaptive", day_bytes=DAY_BYTES)
    admission.charge(760, now_s=0.0)
    assert refusal(admission, use_count=1) is Refusal.NOT_REUSED
    assert refusal(admission, use_count=2) is None
    assert refusal(admission, use_count=1, now_s=0.5 * HOUR_S) is Refusal.NOT_REUSED
    assert refusal(admission, use_count=1, now_s=0.52 * HOUR_S) is None
    admission.charge(300, now_s=0.52 * HOUR_S)
    assert refusal(admission, use_count=1, now_s=0.52 * HOUR_S) is None, "between the two it stays as it was"


def test_adaptive_keeps_to_the_budget_even_for_used_blocks() -> None:
    admission = make_admission("adaptive", day_bytes=DAY_BYTES)
    admission.charge(1000, now_s=0.0)
    assert refusal(admission, use_count=9) is Refusal.BUDGET


def test_adaptive_becomes_selective_when_hardly_any_block_is_read_before_it_is_evicted() -> None:
    admission = make_admission("adaptive")
    evict(admission, count=1023)
    assert refusal(admission, use_count=1) is None, "too few evictions to judge by"
    evict(admission, count=1)
    assert refusal(admission, use_count=1) is Refusal.NOT_REUSED
    assert refusal(admission, use_count=2) is None


def test_adaptive_takes_everything_again_when_a_tenth_was_read() -> None:
    admission = make_admission("adaptive")
    evict(admission, count=1024)
    evict(admission, count=1024, read_count=102)
    assert refusal(admission, use_count=1) is Refusal.NOT_REUSED
    evict(admission, count=1024, read_count=103)
    assert refusal(admission, use_count=1) is None


def test_adaptive_stays_as_it_is_while_one_in_thirty_is_read() -> None:
    admission = make_admission("adaptive")
    evict(admission, count=1024, read_count=34)
    assert refusal(admission, use_count=1) is None
    evict(admission, count=1024)
    evict(admission, count=1024, read_count=34)
    assert refusal(admission, use_count=1) is Refusal.NOT_REUSED


@pytest.mark.parametrize("policy", ["all", "second-hit"])
def test_only_adaptive_changes_its_mind(policy: AdmissionPolicy) -> None:
    admission = make_admission(policy, day_bytes=DAY_BYTES)
    before = admission.is_selective
    evict(admission, count=2048)
    admission.charge(900, now_s=0.0)
    refusal(admission)
    assert admission.is_selective == before


# --- bad input


def test_an_unknown_policy_is_refused_and_told_what_there_is() -> None:
    with pytest.raises(InvalidArgumentError, match="policy is 'some'; allowed: worth, all, second-hit, adaptive"):
        make_admission("some")  # type: ignore[arg-type]


@pytest.mark.parametrize("day_bytes", [0, -1])
def test_a_budget_of_nothing_is_refused(day_bytes: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"write_budget_bytes_per_day is {day_bytes}; allowed: 1 or more"):
        make_admission(day_bytes=day_bytes)
