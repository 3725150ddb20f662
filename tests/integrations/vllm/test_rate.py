"""What computing a token takes, learned from the engine's steps."""

from __future__ import annotations

import pytest

from kvstore_client.integrations.vllm.rate import PrefillRate


def after(*steps: tuple[float, int]) -> float | None:
    """The rate after steps of (seconds, tokens)."""
    rate, now_s = PrefillRate(), 100.0
    for took_s, token_count in steps:
        rate.begin_step(now_s=now_s, token_count=token_count)
        now_s += took_s
        rate.end_step(now_s=now_s)
    return rate.s_per_token


def test_nothing_is_known_before_a_step_has_shown_it() -> None:
    assert after() is None


def test_a_step_with_few_tokens_shows_nothing() -> None:
    assert after((1.0, 63)) is None


def test_a_step_that_took_no_time_shows_nothing() -> None:
    assert after((0.0, 64)) is None


def test_the_first_step_is_believed() -> None:
    assert after((1.0, 64)) == pytest.approx(1 / 64)


def test_one_slow_step_counts_for_a_fifth() -> None:
    assert after((1.0, 100), (6.0, 100)) == pytest.approx(0.01 + 0.2 * 0.05)


def test_a_pace_that_stays_is_learned() -> None:
    found = after((1.0, 100), *[(3.0, 100)] * 30)
    assert found == pytest.approx(0.03, rel=0.01)


def test_a_step_ends_once() -> None:
    rate = PrefillRate()
    rate.begin_step(now_s=0.0, token_count=100)
    rate.end_step(now_s=1.0)
    rate.end_step(now_s=1_000.0)
    assert rate.s_per_token == pytest.approx(0.01)
