from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgumentError
from kvstore.eviction import Watermarks

shares = st.floats(min_value=0.001, max_value=1.0)


@given(shares, shares, st.integers(0, 2**50), st.integers(0, 2**50))
def test_evicting_the_excess_brings_usage_from_above_high_to_low(
    one: float, other: float, used_bytes: int, capacity_bytes: int
) -> None:
    marks = Watermarks(high=max(one, other), low=min(one, other))
    excess_bytes = marks.excess_bytes(used_bytes=used_bytes, capacity_bytes=capacity_bytes)
    if used_bytes <= marks.high * capacity_bytes:
        assert excess_bytes == 0
    else:
        assert 0 < excess_bytes <= used_bytes
        assert used_bytes - excess_bytes <= marks.low * capacity_bytes


def test_the_high_mark_itself_is_not_yet_too_much() -> None:
    marks = Watermarks(high=0.9, low=0.5)
    assert marks.excess_bytes(used_bytes=900, capacity_bytes=1000) == 0
    assert marks.excess_bytes(used_bytes=901, capacity_bytes=1000) == 401


def test_marks_at_the_capacity_let_it_fill_to_the_last_byte() -> None:
    marks = Watermarks(high=1.0, low=1.0)
    assert marks.excess_bytes(used_bytes=1000, capacity_bytes=1000) == 0
    assert marks.excess_bytes(used_bytes=1001, capacity_bytes=1000) == 1


@pytest.mark.parametrize(
    ("high", "low"), [(0.5, 0.6), (1.1, 0.5), (0.5, 0.0), (0.5, -0.1), (0.0, 0.0), (math.nan, 0.5), (0.5, math.nan)]
)
def test_marks_that_make_no_sense_are_refused(high: float, low: float) -> None:
    with pytest.raises(InvalidArgumentError, match="watermarks"):
        Watermarks(high=high, low=low)


def test_an_eviction_that_was_begun_goes_on_below_the_high_mark() -> None:
    marks = Watermarks(high=0.9, low=0.5)
    assert marks.excess_bytes(used_bytes=80, capacity_bytes=100) == 0
    assert marks.excess_bytes(used_bytes=80, capacity_bytes=100, is_evicting=True) == 30
    assert marks.excess_bytes(used_bytes=40, capacity_bytes=100, is_evicting=True) == 0
