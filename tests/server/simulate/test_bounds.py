from __future__ import annotations

from functools import cache
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.eviction import POLICIES
from kvstore_server.simulate.bounds import clairvoyant, foresee, infinite
from kvstore_server.simulate.replay import replay
from kvstore_server.simulate.tiers import TierPlan
from kvstore_server.simulate.trace import Trace
from kvstore_server.simulate.traces import read_trace
from tests.server.simulate.builders import PROMPTS, SMOKE, trace_of


def best_by_trying_everything(trace: Trace, *, capacity_blocks: int) -> int:
    """Hit tokens of the best of all sequences of choices: after each request any set of whole prefixes may stay."""
    parents, requests = trace.parents, trace.requests

    @cache
    def best(index: int, cached: frozenset[int]) -> int:
        if index == len(requests):
            return 0
        chain = trace.chain(requests[index])
        hit_count = next((at for at, block in enumerate(chain) if block not in cached), len(chain))
        at_hand = cached | set(chain)
        kept = (
            frozenset(choice)
            for count in range(min(capacity_blocks, len(at_hand)) + 1)
            for choice in combinations(sorted(at_hand), count)
        )
        whole = (one for one in kept if all(parents[block] < 0 or parents[block] in one for block in one))
        return trace.tokens_of(requests[index], hit_count) + max(best(index + 1, one) for one in whole)

    return best(0, frozenset())


@given(
    prompts=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=5),
    capacity_blocks=st.integers(1, 4),
)
def test_no_choice_of_victims_beats_the_clairvoyant_bound_and_some_reach_it(
    prompts: list[str], capacity_blocks: int
) -> None:
    trace = trace_of(*prompts)
    bound = clairvoyant(foresee(trace), capacity_blocks=capacity_blocks)
    assert bound.hit_tokens == best_by_trying_everything(trace, capacity_blocks=capacity_blocks)


@given(prompts=PROMPTS, capacity_blocks=st.integers(1, 12), policy=st.sampled_from(POLICIES), is_choosy=st.booleans())
def test_no_policy_beats_the_bounds(prompts: list[str], capacity_blocks: int, policy: str, *, is_choosy: bool) -> None:
    trace = trace_of(*prompts)
    plan = TierPlan(name="memory", capacity_blocks=capacity_blocks, policy=policy, is_choosy=is_choosy)
    found = replay(trace, [plan])
    best = clairvoyant(foresee(trace), capacity_blocks=capacity_blocks)
    assert found.hit_tokens <= best.hit_tokens <= infinite(trace).hit_tokens


@given(prompts=PROMPTS)
def test_with_room_for_everything_all_bounds_and_policies_agree(prompts: list[str]) -> None:
    trace = trace_of(*prompts)
    room = trace.unique_blocks
    found = replay(trace, [TierPlan(name="memory", capacity_blocks=room, policy="lru")])
    best = clairvoyant(foresee(trace), capacity_blocks=room)
    assert found.hit_tokens == best.hit_tokens == infinite(trace).hit_tokens
    assert found.tiers[0].counts.written_blocks == infinite(trace).written_blocks == trace.unique_blocks


def test_the_clairvoyant_bound_keeps_what_is_used_next_and_does_not_store_what_never_is() -> None:
    trace = trace_of("ab", "cd", "ab", "cd")
    bound = clairvoyant(foresee(trace), capacity_blocks=2)
    # "ab" stays until it is used, and "cd" comes too late: of it nothing is worth storing the first time.
    assert bound.hit_tokens == 20
    assert bound.written_blocks == 2


def test_bounds_of_a_real_trace_are_those_of_an_independent_simulator() -> None:
    trace = read_trace(SMOKE)
    future = foresee(trace)
    at_percent = {
        percent: round(
            100 * clairvoyant(future, capacity_blocks=round(percent * trace.unique_blocks / 100)).token_hit_rate, 2
        )
        for percent in (1, 2, 5, 10, 20, 50)
    }
    assert at_percent == {1: 4.75, 2: 5.68, 5: 8.10, 10: 8.10, 20: 8.10, 50: 8.10}
    assert round(100 * infinite(trace).token_hit_rate, 2) == 8.10
    assert infinite(trace).written_blocks == 7814
