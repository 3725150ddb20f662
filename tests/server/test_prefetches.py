"""What comes of blocks that were brought ahead of their use: each is counted once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore_server.core.prefetches import Prefetches


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
