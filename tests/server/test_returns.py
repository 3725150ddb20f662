"""When sessions are expected back: what they say, and else what the gaps between turns tell."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.eviction import Finish
from kvstore.keys import BlockHash
from kvstore_server.core.returns import GapModel, Returns, SessionKey
from kvstore_server.core.tenants import ScopedId

SPACE = ScopedId(b"n" * 33)
TAIL = BlockHash(b"t" * 32)


def key(number: int = 1) -> SessionKey:
    return SessionKey(SPACE, number)


def learned(gaps_s: list[float | None], *, finish: Finish = Finish.TOOL_USE) -> Returns:
    """One that has seen a session with these gaps."""
    returns = Returns()
    now_s = 0.0
    for number, gap_s in enumerate(gaps_s):
        if gap_s is None:
            returns.gaps[finish].note(None)
            continue
        returns.leave(key(10_000 + number), TAIL, finish=finish, now_s=now_s)
        now_s += gap_s
        returns.come(key(10_000 + number), now_s=now_s)
    return returns


def dues(returns: Returns, *, from_s: float, until_s: float, step_s: float = 1.0) -> list[float]:
    """The seconds after `from_s` at which something was due."""
    found = []
    at_s = from_s
    while at_s <= until_s:
        found += [at_s - from_s] * len(returns.due(now_s=at_s, count_max=10))
        at_s += step_s
    return found


def test_who_says_when_is_due_from_shortly_before_until_shortly_after() -> None:
    returns = Returns(horizon_s=30)
    returns.leave(key(), TAIL, expected_return_s=300, now_s=1_000.0)
    found = dues(returns, from_s=1_000.0, until_s=2_000.0)
    assert found
    assert 270 <= found[0] <= 272
    assert 300 < found[-1] <= 330


def test_who_says_it_is_back_at_once_is_due_as_soon_as_its_blocks_can_have_left() -> None:
    returns = Returns(recheck_s=5)
    returns.leave(key(), TAIL, expected_return_s=1, now_s=0.0)
    assert dues(returns, from_s=0.0, until_s=100.0)[0] == 5


def test_who_says_nothing_is_due_while_those_of_its_kind_come_back_soon() -> None:
    returns = learned([10.0 + number % 10 for number in range(50)])
    returns.leave(key(), TAIL, finish=Finish.TOOL_USE, now_s=5_000.0)
    found = dues(returns, from_s=5_000.0, until_s=5_200.0)
    assert found
    assert found[0] == 5
    assert found[-1] < 40, "nobody of its kind has come as late as that"


def test_a_kind_that_comes_back_late_or_seldom_is_never_due() -> None:
    late = learned([600.0 + 10 * number for number in range(50)], finish=Finish.END_TURN)
    late.leave(key(), TAIL, finish=Finish.END_TURN, now_s=100_000.0)
    assert dues(late, from_s=100_000.0, until_s=100_300.0) == []
    seldom = learned([10.0, None, None, None] * 20)
    seldom.leave(key(), TAIL, finish=Finish.TOOL_USE, now_s=5_000.0)
    assert dues(seldom, from_s=5_000.0, until_s=5_200.0) == []


def test_nothing_is_due_while_little_is_known() -> None:
    returns = learned([10.0] * 19)
    returns.leave(key(), TAIL, finish=Finish.TOOL_USE, now_s=1_000.0)
    assert dues(returns, from_s=1_000.0, until_s=1_100.0) == []


def test_kinds_are_learned_apart() -> None:
    returns = learned([10.0] * 50)
    returns.leave(key(), TAIL, finish=Finish.END_TURN, now_s=1_000.0)
    assert dues(returns, from_s=1_000.0, until_s=1_100.0) == []


@pytest.mark.parametrize("how", ["it came", "it ended"])
def test_who_is_back_or_done_is_not_due(how: str) -> None:
    returns = Returns()
    returns.leave(key(), TAIL, expected_return_s=10, now_s=0.0)
    if how == "it came":
        returns.come(key(), now_s=1.0)
    else:
        returns.end(key())
    assert dues(returns, from_s=1.0, until_s=100.0) == []
    assert len(returns) == 0


def test_what_was_brought_once_is_not_brought_again_before_the_session_was_back() -> None:
    returns = Returns()
    returns.leave(key(), TAIL, expected_return_s=10, now_s=0.0)
    assert returns.due(now_s=10.0, count_max=9)
    returns.rest(key())
    assert dues(returns, from_s=10.0, until_s=60.0) == []
    returns.come(key(), now_s=61.0)
    returns.leave(key(), TAIL, expected_return_s=10, now_s=62.0)
    assert dues(returns, from_s=62.0, until_s=80.0)


def test_a_turn_that_asks_twice_is_not_back() -> None:
    returns = Returns()
    returns.leave(key(), TAIL, turn=2, expected_return_s=10, now_s=0.0)
    returns.come(key(), turn=2, now_s=0.1)
    assert len(returns) == 1
    returns.come(key(), turn=3, now_s=9.0)
    assert len(returns) == 0
    assert returns.gaps[Finish.UNKNOWN].turn_count == 1


def test_a_later_word_replaces_the_earlier_one() -> None:
    returns = Returns(horizon_s=30)
    returns.leave(key(), TAIL, expected_return_s=300, now_s=0.0)
    returns.leave(key(), BlockHash(b"u" * 32), expected_return_s=600, now_s=1.0)
    assert dues(returns, from_s=0.0, until_s=500.0) == []
    [due] = returns.due(now_s=600.0, count_max=10)
    assert due.tail == b"u" * 32


def test_who_stays_away_for_an_hour_counts_as_gone() -> None:
    returns = Returns()
    returns.leave(key(), TAIL, finish=Finish.TOOL_USE, now_s=0.0)
    dues(returns, from_s=0.0, until_s=8_000.0, step_s=10.0)
    assert len(returns) == 0
    assert returns.gaps[Finish.TOOL_USE].turn_count == 1
    assert returns.gaps[Finish.TOOL_USE].share_within(1e6, age_s=0.0) == 0.0


def test_no_more_are_named_than_are_asked_for_and_the_rest_come_next() -> None:
    returns = Returns()
    for number in range(25):
        returns.leave(key(number), TAIL, expected_return_s=10, now_s=0.0)
    named = [returns.due(now_s=10.0, count_max=10) for _ in range(3)]
    assert [len(some) for some in named] == [10, 10, 5]
    assert len({due.key for some in named for due in some}) == 25


def test_of_many_that_have_their_turn_at_once_a_bounded_number_is_looked_at_per_call() -> None:
    """A daemon that was stopped for an hour does not look at all its sessions in one turn of its loop."""
    returns = Returns()
    for number in range(2_000):
        returns.leave(key(number), TAIL, now_s=0.0)
    left = []
    for _ in range(5):
        assert returns.due(now_s=4_000.0, count_max=10_000) == []
        left.append(len(returns))
    assert left == [2_000 - 512, 2_000 - 2 * 512, 2_000 - 3 * 512, 0, 0]
    assert returns.gaps[Finish.UNKNOWN].turn_count > 800, "each of them was learned from"


def test_those_that_are_due_come_before_the_bound_of_looks_and_none_is_left_out() -> None:
    returns = Returns(horizon_s=30)
    for number in range(1_200):
        returns.leave(key(number), TAIL, expected_return_s=60.0, now_s=0.0)
    named = [returns.due(now_s=50.0, count_max=10_000) for _ in range(4)]
    assert [len(one) for one in named] == [512, 512, 176, 0]
    assert {due.key.session_id for one in named for due in one} == set(range(1_200))


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["leave", "come", "end"]), st.floats(0, 1e5)), max_size=60)
)
def test_nothing_is_due_that_is_not_away_and_the_queue_stays_bounded(events: list[tuple[int, str, float]]) -> None:
    returns = Returns()
    away = set[int]()
    now_s = 0.0
    for number, what, seconds in events:
        now_s += seconds / 10
        if what == "leave":
            returns.leave(key(number), TAIL, expected_return_s=seconds, now_s=now_s)
            away.add(number)
        elif what == "come":
            returns.come(key(number), now_s=now_s)
            away.discard(number)
        else:
            returns.end(key(number))
            away.discard(number)
        assert {due.key.session_id for due in returns.due(now_s=now_s, count_max=100)} <= away


@given(st.lists(st.floats(0, 1e4), min_size=100, max_size=300), st.floats(0, 1e3), st.floats(1, 1e3))
def test_a_share_is_that_of_the_gaps_seen_within_the_width_of_a_bin(
    gaps_s: list[float], age_s: float, horizon_s: float
) -> None:
    model = GapModel()
    for gap_s in gaps_s:
        model.note(gap_s)
    share = model.share_within(horizon_s, age_s=age_s)
    assert 0 <= share <= 1 + 1e-9
    left = [gap_s for gap_s in gaps_s if gap_s > age_s * 1.7 + 1]
    if left and share == 1:
        assert min(left) <= (age_s + horizon_s) * 1.7 + 1


def test_the_past_fades() -> None:
    model, rng = GapModel(), random.Random(7)
    for _ in range(3_000):
        model.note(rng.uniform(500, 600))
    for _ in range(3_000):
        model.note(rng.uniform(5, 10))
    assert model.share_within(20.0, age_s=0.0) > 0.9
