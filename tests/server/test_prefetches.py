"""What comes of blocks that were brought ahead of their use: each is counted once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_server.core.prefetches import Pace, Prefetches


def counts(prefetches: Prefetches[int]) -> tuple[int, int, int]:
    return prefetches.useful_count, prefetches.late_count, prefetches.wasted_count


def test_a_block_that_is_there_when_it_is_used_was_useful_once() -> None:
    prefetches = Prefetches[int]()
    prefetches.begin([1, 2])
    prefetches.arrive([1, 2])
    prefetches.ask([1])
    prefetches.use([1, 3])
    prefetches.use([1])
    prefetches.leave([1])
    assert counts(prefetches) == (1, 0, 0)
    assert len(prefetches) == 1


def test_a_block_that_is_asked_for_on_its_way_was_late_and_nothing_else() -> None:
    prefetches = Prefetches[int]()
    prefetches.begin([1])
    prefetches.use([1])  # it cannot be, yet
    prefetches.ask([1])
    prefetches.arrive([1])
    prefetches.use([1])
    prefetches.leave([1])
    assert counts(prefetches) == (0, 1, 0)


def test_a_block_that_leaves_unused_or_never_comes_was_wasted() -> None:
    prefetches = Prefetches[int]()
    prefetches.begin([1, 2])
    prefetches.arrive([1])
    prefetches.leave([1])
    prefetches.leave([2])
    assert counts(prefetches) == (0, 0, 2)


def test_blocks_that_nobody_prefetched_count_for_nothing() -> None:
    prefetches = Prefetches[int]()
    prefetches.arrive([1])
    prefetches.ask([1])
    prefetches.use([1])
    prefetches.leave([1])
    assert counts(prefetches) == (0, 0, 0)


@given(st.lists(st.tuples(st.sampled_from(["begin", "arrive", "ask", "use", "leave"]), st.integers(0, 4)), max_size=60))
def test_each_that_was_begun_is_counted_by_the_first_thing_that_tells(events: list[tuple[str, int]]) -> None:
    prefetches = Prefetches[int]()
    state = dict[int, str]()
    expected = {"useful": 0, "late": 0, "wasted": 0}
    for what, key in events:
        if what == "begin" and key in state:
            continue  # whoever prefetches knows what is there
        getattr(prefetches, what)([key])
        was = state.pop(key, None)
        if what == "begin":
            state[key] = "coming"
        elif was == "coming" and what == "ask":
            expected["late"] += 1
        elif was == "unused" and what == "use":
            expected["useful"] += 1
        elif was and what == "leave":
            expected["wasted"] += 1
        elif was:
            state[key] = "unused" if what == "arrive" else was
        assert counts(prefetches) == tuple(expected.values())
        assert len(prefetches) == len(state)


# --- what is brought for sessions that are expected


def test_what_became_of_expected_blocks_is_told_once_and_of_no_others() -> None:
    prefetches = Prefetches[int]()
    prefetches.begin([1, 2, 3], is_expected=True)
    prefetches.begin([7, 8])
    prefetches.ask([1, 7])
    prefetches.arrive([2, 3, 8])
    prefetches.use([2, 8])
    prefetches.leave([3])
    assert sorted(prefetches.take_outcomes()) == [(1, False), (2, False), (3, True)]
    assert prefetches.take_outcomes() == []
    assert counts(prefetches) == (2, 2, 1)


def taken(pace: Pace, *, count: int = 160) -> int:
    return sum(pace.takes() for _ in range(count))


def test_everything_due_is_brought_while_little_is_known_or_half_of_it_is_asked_for() -> None:
    pace = Pace()
    pace.note(good_count=0, wasted_count=255)
    assert taken(pace) == 160
    pace.note(good_count=256, wasted_count=0)
    assert taken(pace) == 160


@pytest.mark.parametrize(("good_count", "expected"), [(500, 160), (250, 80), (125, 40), (0, 10)])
def test_where_most_is_wasted_less_is_brought_in_proportion_but_never_nothing(good_count: int, expected: int) -> None:
    pace = Pace()
    pace.note(good_count=good_count, wasted_count=1000 - good_count)
    assert taken(pace) == expected


def test_who_becomes_worth_it_again_is_brought_again() -> None:
    pace = Pace()
    pace.note(good_count=0, wasted_count=1_000_000)
    assert pace.share == 1 / 16
    for _ in range(100):
        pace.note(good_count=50, wasted_count=10)
    assert pace.share == 1.0
