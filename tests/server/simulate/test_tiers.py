from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgumentError
from kvstore.eviction import POLICIES, Watermarks
from kvstore_server.simulate.replay import replay
from kvstore_server.simulate.tiers import Keep, TierPlan, Tiers
from kvstore_server.simulate.trace import Trace
from tests.server.simulate.builders import PROMPTS, trace_of


def plan(name: str, capacity_blocks: int) -> TierPlan:
    return TierPlan(name=name, capacity_blocks=capacity_blocks, policy="lru")


def ends_of(trace: Trace, plans: list[TierPlan], *, keep: Keep = Keep.RETAIN) -> tuple[Tiers, list[list[int]]]:
    tiers = Tiers(plans, parents=trace.parents, keep=keep)
    ends = []
    for request in trace.requests:
        hint = request.hint(tokens_per_block=trace.tokens_per_block)
        ends.append(tiers.use(trace.chain(request), request.spans, hint, now_s=request.time_s))
        tiers.check_invariants()
    return tiers, ends


def test_one_tier_finds_the_longest_prefix_and_takes_the_rest() -> None:
    _, ends = ends_of(trace_of("abc", "abd", "abcd"), [plan("memory", 10)])
    assert ends == [[0], [2], [3]]


def test_the_tail_of_the_chain_used_longest_ago_leaves_first() -> None:
    # Four blocks: "abc" and "x" fill it; "y" costs "c", and "ab" are still there.
    tiers, ends = ends_of(trace_of("abc", "x", "y", "abc"), [plan("memory", 4)])
    assert ends[-1] == [2]
    assert tiers.counts[0].evicted_blocks == 2
    assert tiers.counts[0].returned_blocks == 1


def test_of_a_chain_that_is_longer_than_the_tier_the_head_stays() -> None:
    tiers, ends = ends_of(trace_of("abcdef", "abcdef"), [plan("memory", 4)])
    assert ends == [[0], [4]]
    assert tiers.counts[0].stored_blocks == 4
    assert tiers.counts[0].roomless_blocks == 4


def test_what_memory_has_no_room_for_goes_down_and_comes_back_when_it_is_used() -> None:
    tiers, ends = ends_of(trace_of("ab", "cd", "ab"), [plan("memory", 2), plan("nvme", 8)])
    assert ends[-1] == [0, 2]
    memory, nvme = tiers.counts
    assert (memory.stored_blocks, memory.promoted_blocks, nvme.demoted_blocks) == (4, 2, 4)


def test_a_retained_copy_costs_no_second_write_and_an_exclusive_one_does() -> None:
    trace = trace_of(*["ab", "cd"] * 4)
    plans = [plan("memory", 2), plan("nvme", 8)]
    retained, ends = ends_of(trace, plans, keep=Keep.RETAIN)
    moved, exclusive_ends = ends_of(trace, plans, keep=Keep.EXCLUSIVE)
    assert ends == exclusive_ends
    assert retained.counts[1].written_blocks == 4
    assert moved.counts[1].written_blocks == 14


def test_inclusive_tiers_write_everything_once_as_it_comes() -> None:
    tiers, ends = ends_of(trace_of("ab", "cd", "ab"), [plan("memory", 2), plan("nvme", 8)], keep=Keep.INCLUSIVE)
    assert ends[-1] == [0, 2]
    assert tiers.counts[1].stored_blocks == 4
    assert tiers.counts[1].demoted_blocks == 0


def test_a_block_goes_down_with_those_before_it_so_that_no_chain_lacks_its_head() -> None:
    # "d" leaves for "x", and "abc", which stay in memory, are copied below it.
    tiers, _ = ends_of(trace_of("abcd", "x"), [plan("memory", 4), plan("nvme", 8)])
    assert tiers.counts[1].demoted_blocks == 4
    assert tiers.counts[0].evicted_blocks == 1


def test_a_chain_that_is_longer_than_memory_goes_on_in_the_tier_below() -> None:
    _, ends = ends_of(trace_of("abcdef", "abcdef"), [plan("memory", 4), plan("nvme", 8)])
    assert ends[-1] == [4, 6]


def test_what_passes_through_three_tiers_is_found_in_the_nearest() -> None:
    plans = [plan("vram", 2), plan("memory", 4), plan("nvme", 8)]
    _, ends = ends_of(trace_of("ab", "cd", "ef", "gh", "ab", "ab", "gh"), plans)
    assert ends[-3:] == [[0, 0, 2], [2, 2, 2], [0, 2, 2]]


def test_eviction_begins_above_the_high_watermark_and_ends_at_the_low_one() -> None:
    high_low = TierPlan(name="memory", capacity_blocks=10, policy="lru", watermarks=Watermarks(high=0.8, low=0.5))
    tiers, _ = ends_of(trace_of("abcdefgh"), [high_low])
    assert tiers.counts[0].evicted_blocks == 0
    tiers, _ = ends_of(trace_of("abcdefgh", "x"), [high_low])
    assert tiers.counts[0].evicted_blocks == 4


def test_blocks_past_their_time_to_live_leave_without_want_of_room() -> None:
    trace = trace_of("ab", "c", "ab", step_s=10.0)
    mortal = trace.requests[0]
    requests = (type(mortal)(time_s=0.0, input_tokens=20, spans=mortal.spans, ttl_s=5.0), *trace.requests[1:])
    trace = Trace(name="made", tokens_per_block=10, requests=requests, unique_blocks=trace.unique_blocks)
    tiers, ends = ends_of(trace, [plan("memory", 10)])
    assert ends[-1] == [0]
    assert tiers.counts[0].expired_blocks == 2


def test_only_evicted_blocks_that_are_back_within_the_cool_down_count_as_thrash() -> None:
    trace = trace_of("ab", "cd", "ef", "ab")
    soon = replay(trace, [plan("memory", 2)], cool_down_requests=2).tiers[0].counts
    too_late = replay(trace, [plan("memory", 2)], cool_down_requests=1).tiers[0].counts
    assert (soon.evicted_blocks, soon.returned_blocks, soon.thrash_index) == (6, 2, 2 / 6)
    assert too_late.returned_blocks == 0


@given(
    prompts=PROMPTS,
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    keep=st.sampled_from(Keep),
    policy=st.sampled_from(POLICIES),
    is_choosy=st.booleans(),
)
def test_tiers_never_hold_more_than_they_may_nor_claim_more_hits_than_there_are(
    prompts: list[str], sizes: list[int], keep: Keep, policy: str, *, is_choosy: bool
) -> None:
    trace = trace_of(*prompts)
    plans = [
        TierPlan(name=f"tier {index}", capacity_blocks=size, policy=policy, is_choosy=is_choosy)
        for index, size in enumerate(sizes)
    ]
    tiers, all_ends = ends_of(trace, plans, keep=keep)
    known = 0
    for request, ends in zip(trace.requests, all_ends, strict=True):
        assert ends == sorted(ends)
        new_count = max(max(first + count for first, count in request.spans) - known, 0)
        known += new_count
        assert ends[-1] <= request.block_count - new_count
    for counts in tiers.counts:
        assert counts.written_blocks >= counts.evicted_blocks


@given(prompts=PROMPTS, size=st.integers(1, 6))
def test_more_room_below_never_costs_a_hit(prompts: list[str], size: int) -> None:
    trace = trace_of(*prompts)
    alone = replay(trace, [plan("memory", size)])
    helped = replay(trace, [plan("memory", size), plan("nvme", 100)])
    assert helped.hit_tokens >= alone.hit_tokens
    assert helped.hit_tokens == sum(tier.hit_tokens for tier in helped.tiers)


def test_a_tier_without_room_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="memory capacity is '0 blocks'; allowed: 1 block or more"):
        plan("memory", 0)
