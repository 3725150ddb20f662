"""What is taken from a slow tier is never there later than recomputing it, and costs are learned from reads."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_server.core.worth import CostMeter, TierCost, worth_fetching

KIB, MIB = 1 << 10, 1 << 20
FAST = TierCost(latency_s=1e-4, bytes_per_s=3e9)
FIRST = TierCost(latency_s=2e-3, bytes_per_s=2e8)


def saved_s(
    flags: Sequence[bool], count: int, *, block_bytes: int, cost: TierCost, queued_bytes: int, per_block_s: float
) -> float:
    slow_count = sum(flags[:count])
    load_s = cost.latency_s + (queued_bytes + slow_count * block_bytes) / cost.bytes_per_s if slow_count else 0.0
    return count * per_block_s - load_s


def best_by_trying_all(flags: Sequence[bool], **terms: object) -> int:
    saved = [saved_s(flags, count, **terms) for count in range(len(flags) + 1)]  # type: ignore[arg-type]
    return max(count for count, value in enumerate(saved) if value == max(saved))


# Sums and quotients of these are exact, so that equal savings compare as equal.
exact_terms = st.fixed_dictionaries(
    {
        "block_bytes": st.integers(1, 16).map(lambda pages: pages * 4096),
        "cost": st.builds(
            TierCost,
            latency_s=st.integers(1, 64).map(lambda ticks: ticks / 1024),
            bytes_per_s=st.integers(14, 26).map(lambda exponent: float(1 << exponent)),
        ),
        "queued_bytes": st.integers(0, 64).map(lambda pages: pages * 4096),
        "per_block_s": st.integers(1, 256).map(lambda ticks: ticks / 1024),
    }
)
prefixes = st.lists(st.booleans(), max_size=40)


def worth(flags: Sequence[bool] | bytes, *, per_block_s: float, **terms: object) -> int:
    return worth_fetching(flags, recompute_s_per_block=per_block_s, **terms)  # type: ignore[arg-type]


@given(flags=prefixes, terms=exact_terms)
def test_the_prefix_that_saves_most_is_taken_and_the_longest_of_equals(
    flags: list[bool], terms: dict[str, object]
) -> None:
    assert worth(flags, **terms) == worth(bytes(flags), **terms) == best_by_trying_all(flags, **terms)  # type: ignore[arg-type]


@given(
    flags=prefixes,
    block_bytes=st.integers(1, 64 * MIB),
    cost=st.builds(TierCost, latency_s=st.floats(1e-6, 10.0), bytes_per_s=st.floats(1e3, 1e11)),
    queued_bytes=st.integers(0, 1 << 32),
    per_block_s=st.floats(1e-7, 60.0),
)
def test_nothing_comes_later_than_it_could_be_recomputed_nor_is_what_costs_nothing_left(
    flags: list[bool], block_bytes: int, cost: TierCost, queued_bytes: int, per_block_s: float
) -> None:
    terms = {"block_bytes": block_bytes, "cost": cost, "queued_bytes": queued_bytes, "per_block_s": per_block_s}
    count = worth(flags, **terms)  # type: ignore[arg-type]
    saved = [saved_s(flags, other, **terms) for other in range(len(flags) + 1)]  # type: ignore[arg-type]
    assert saved[count] >= 0
    assert saved[count] == pytest.approx(max(saved), rel=1e-9, abs=1e-12)
    in_memory_count = flags.index(True) if True in flags else len(flags)
    assert count >= in_memory_count


def test_blocks_behind_a_queue_are_left_when_the_queue_takes_too_long() -> None:
    def taken(queued_bytes: int) -> int:
        return worth_fetching(
            b"\1" * 10, block_bytes=MIB, cost=FAST, queued_bytes=queued_bytes, recompute_s_per_block=1e-3
        )

    assert taken(0) == 10
    assert taken(64 * MIB) == 0


def test_a_throttled_disk_is_worth_it_for_what_takes_longer_still() -> None:
    throttled = TierCost(latency_s=1e-3, bytes_per_s=5e6)

    def taken(recompute_s: float) -> int:
        return worth_fetching(
            b"\0\0" + b"\1" * 8, block_bytes=2 * MIB, cost=throttled, queued_bytes=0, recompute_s_per_block=recompute_s
        )

    assert taken(10e-3) == 2
    assert taken(1.0) == 10


def test_a_slow_block_in_the_middle_is_read_for_the_sake_of_those_behind_it() -> None:
    slow = TierCost(latency_s=1e-3, bytes_per_s=1e9)

    def taken(memory_count: int) -> int:
        flags = b"\0\1" + b"\0" * memory_count + b"\1"
        return worth_fetching(flags, block_bytes=10_000_000, cost=slow, queued_bytes=0, recompute_s_per_block=1e-3)

    # 11 ms to read it, and 1 ms for each block that is not recomputed, its own included.
    assert taken(9) == 1
    assert taken(10) == 12


# --- the meter


def learn(meter: CostMeter, device: TierCost, sizes: Sequence[int], *, count: int) -> None:
    for index in range(count):
        size_bytes = sizes[index % len(sizes)]
        meter.note(size_bytes=size_bytes, elapsed_s=device.seconds(size_bytes))


def error_factor(meter: CostMeter, device: TierCost, size_bytes: int) -> float:
    """1: right; above: so many times too pessimistic; below: too optimistic."""
    return meter.cost.seconds(size_bytes) / device.seconds(size_bytes)


MIXES = [[256 * KIB], [64 * MIB], [256 * KIB, MIB, 16 * MIB, 64 * MIB]]
every_mix = pytest.mark.parametrize("sizes", MIXES, ids=["small", "large", "mixed"])


def test_before_the_first_sample_the_first_cost_is_believed() -> None:
    assert CostMeter(first=FIRST).cost == FIRST


@every_mix
def test_a_few_reads_tell_what_reads_like_them_take(sizes: list[int]) -> None:
    meter = CostMeter(first=FIRST)
    learn(meter, FAST, sizes, count=12)
    for size_bytes in sizes:
        assert 0.4 < error_factor(meter, FAST, size_bytes) < 2.5


def test_reads_of_several_sizes_tell_latency_and_rate_apart() -> None:
    meter = CostMeter(first=FIRST)
    learn(meter, FAST, MIXES[2], count=80)
    assert meter.cost.latency_s == pytest.approx(FAST.latency_s, rel=0.2)
    assert meter.cost.bytes_per_s == pytest.approx(FAST.bytes_per_s, rel=0.2)


@every_mix
@pytest.mark.parametrize("elapsed_factor", [1e-3, 1e4])
def test_one_odd_read_among_even_ones_changes_nothing(sizes: list[int], elapsed_factor: float) -> None:
    meter = CostMeter(first=FIRST)
    learn(meter, FAST, sizes, count=80)
    before = meter.cost
    meter.note(size_bytes=sizes[0], elapsed_s=elapsed_factor * FAST.seconds(sizes[0]))
    learn(meter, FAST, sizes, count=3)
    assert meter.cost.latency_s == pytest.approx(before.latency_s, rel=0.02)
    assert meter.cost.bytes_per_s == pytest.approx(before.bytes_per_s, rel=0.02)


@every_mix
@pytest.mark.parametrize(
    "slow",
    [TierCost(FAST.latency_s * 100, FAST.bytes_per_s / 100), TierCost(FAST.latency_s, 5e6)],
    ids=["all 100 times slower", "throttled to 5 MB/s"],
)
def test_ten_reads_tell_that_a_device_became_slow_and_ten_that_it_recovered(sizes: list[int], slow: TierCost) -> None:
    meter = CostMeter(first=FIRST)
    learn(meter, FAST, sizes, count=40)
    learn(meter, slow, sizes, count=10)
    for size_bytes in sizes:
        assert 0.4 < error_factor(meter, slow, size_bytes) < 2.5
    learn(meter, slow, sizes, count=30)
    learn(meter, FAST, sizes, count=10)
    for size_bytes in sizes:
        assert 0.4 < error_factor(meter, FAST, size_bytes) < 2.5


@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.floats(0.0, 1e6)), max_size=60))
def test_whatever_is_measured_a_cost_stays_a_cost(samples: list[tuple[int, float]]) -> None:
    meter = CostMeter(first=FIRST)
    for size_bytes, elapsed_s in samples:
        meter.note(size_bytes=size_bytes, elapsed_s=elapsed_s)
        assert 0 < meter.cost.latency_s < math.inf
        assert 0 < meter.cost.bytes_per_s < math.inf
