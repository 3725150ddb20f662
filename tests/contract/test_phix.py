"""PHIX: its parts against plain reckoning, and what it learns from what happens."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.eviction import NO_HINT, POLICIES, Evictor, Finish, Request
from kvstore.eviction.guard import Guard
from kvstore.eviction.phix.ages import BIN_COUNT, EDGES_S, WIDTHS_S, bin_of, bins_of
from kvstore.eviction.phix.ghost_table import GhostTable, is_one_of
from kvstore.eviction.phix.gittins import gittins_index
from kvstore.eviction.phix.hazards import Hazards
from kvstore.eviction.phix.ranking import Phix
from kvstore.eviction.phix.returns import ReturnModel, probability

ages_s = st.floats(0, 20_000)


def one(_: object) -> int:
    return 1


class Traffic:
    """Requests through one tier, as a caller with a choice sends them."""

    def __init__(self, *, capacity_blocks: int, policy: str = "phix", may_bypass: bool = False) -> None:
        self.capacity_blocks = capacity_blocks
        self.evictor: Evictor[int] = Evictor(policy, capacity_blocks=capacity_blocks)
        self.may_bypass = may_bypass
        self.now_s = 0.0
        self.written_count = 0
        self._keys = itertools.count()

    def new_chain(self, count: int = 8) -> list[int]:
        return list(itertools.islice(self._keys, count))

    def use(self, chain: list[int], request: Request = NO_HINT, *, after_s: float = 2.0) -> int:
        """Returns the hits."""
        self.now_s += after_s
        evictor = self.evictor
        matched = next((index for index, key in enumerate(chain) if key not in evictor), len(chain))
        use = evictor.begin(request, now_s=self.now_s, chain_blocks=len(chain), matched_blocks=matched)
        evictor.touch_chain(chain[:matched], use=use)
        evictor.hold(chain[matched - 1 : matched])
        new = chain[matched:]
        if new:
            excess = len(evictor) + len(new) - self.capacity_blocks
            if excess > 0 and self.may_bypass and not evictor.admits(use, keys=new):
                evictor.bypassed(new, use=use)
            else:
                if excess > 0:
                    evictor.pop_coldest(goal_bytes=excess, size_bytes_of=one, now_s=self.now_s)
                evictor.insert_chain(new, parent=chain[matched - 1] if matched else None, use=use)
                self.written_count += len(new)
        evictor.unhold(chain[matched - 1 : matched])
        evictor.check_invariants()
        return matched


# --- parts


@given(ages_s)
def test_an_age_is_in_the_bin_whose_edges_are_around_it(age_s: float) -> None:
    number = bin_of(age_s)
    assert number == bins_of(np.array([age_s]))[0]
    assert EDGES_S[number] <= age_s * (1 + 1e-9) + 1e-9
    assert number == BIN_COUNT - 1 or age_s <= EDGES_S[number + 1] * (1 + 1e-9)


@given(st.lists(st.floats(1e-6, 5.0), min_size=6, max_size=6))
def test_the_index_is_the_best_rate_over_all_horizons(hazards: list[float]) -> None:
    widths_s = [0.3, 0.5, 1.0, 2.0, 4.0, 8.0]
    index = gittins_index(np.array([hazards]), np.array(widths_s))[0]
    for start in range(6):
        rates = []
        for end in range(start, 6):
            alive, time_s = 1.0, 0.0
            for number in range(start, end + 1):
                survives = math.exp(-hazards[number] * widths_s[number])
                time_s += alive * (1 - survives) / hazards[number]
                alive *= survives
            rates.append((1 - alive) / time_s)
        assert index[start] == pytest.approx(max(rates), rel=1e-6)


def test_a_constant_hazard_is_its_own_index() -> None:
    index = gittins_index(np.full((1, BIN_COUNT), 0.01), WIDTHS_S)
    assert index == pytest.approx(np.full((1, BIN_COUNT), 0.01))


@given(st.lists(st.tuples(st.integers(0, 2), ages_s, ages_s, st.integers(1, 9)), max_size=20))
def test_time_at_risk_is_what_counting_bin_by_bin_gives(spans: list[tuple[int, float, float, int]]) -> None:
    hazards = Hazards([0, 0, 1], pool_scales=[1.0, 1.0])
    expected = np.zeros((3, BIN_COUNT))
    spans = [(number, min(a, b), max(a, b), count) for number, a, b, count in spans]
    for number, since_s, until_s, count in spans:
        for age_bin in range(BIN_COUNT):
            end_s = math.inf if age_bin == BIN_COUNT - 1 else EDGES_S[age_bin + 1]
            expected[number, age_bin] += count * max(0.0, min(until_s, end_s) - max(since_s, EDGES_S[age_bin]))
    if spans:
        classes, since, until, counts = (np.array(column) for column in zip(*spans, strict=True))
        hazards.count_time(classes, since.astype(float), until.astype(float), counts.astype(float))
    assert hazards.at_risk_s == pytest.approx(expected, rel=1e-6, abs=1e-4)


def test_a_class_with_much_data_is_what_was_counted_and_one_without_is_as_its_pool() -> None:
    hazards = Hazards([0, 0, 1], pool_scales=[1.0, 2.0])
    everything = np.arange(1)
    hazards.count_events(everything, np.array([10.0]), np.array([1e6]))
    hazards.count_time(everything, np.array([0.0]), np.array([1e4]), np.array([1e5]))
    counted, pooled, other = hazards.of(np.array([0, 1, 2]))[:, bin_of(10.0)]
    width_s = WIDTHS_S[bin_of(10.0)]
    assert counted == pytest.approx(1e6 / (1e5 * width_s), rel=0.01)
    assert pooled == pytest.approx(counted, rel=0.01)
    # The pool has no data of its own either: as all blocks, times its scale.
    assert other == pytest.approx(2.0 * counted, rel=0.01)


def test_a_model_learns_which_feature_tells() -> None:
    model, chance = ReturnModel(3), random.Random(7)
    for _ in range(2000):
        tells, noise = chance.random() < 0.5, chance.random() < 0.5
        features = [0, *([1] if tells else []), *([2] if noise else [])]
        came = chance.random() < (0.9 if tells else 0.1)
        model.learn(features, error=probability(model.score(features)) - came)
    assert probability(model.score([0, 1])) > 0.75
    assert probability(model.score([0])) < 0.35
    assert abs(model.score([2])) < 0.3


def test_every_second_key_leaves_a_ghost_whatever_keys_are() -> None:
    chance = random.Random(3)
    for keys in (range(1000), [chance.randbytes(32) for _ in range(1000)], [f"key {n}" for n in range(1000)]):
        ghosts = GhostTable(size_min=1 << 20)
        count, displaced = ghosts.put(keys, 7)
        assert 400 < count < 600
        assert len(displaced) < 5
        found = ghosts.take(keys)
        assert len(found) == count - len(displaced)
        assert {number for _, number in found} == {7}
        assert not ghosts.take(keys)
        assert len(ghosts) == 0
    hashes = [chance.randbytes(32) for _ in range(100)]
    ghosts.put([("namespace", one) for one in hashes], 3)
    assert len(ghosts.take(hashes)) > 30


def test_a_full_table_of_ghosts_says_whose_place_was_taken() -> None:
    ghosts, chance = GhostTable(size_min=64), random.Random(9)
    numbers = [0] * 50
    for _ in range(1000):
        number = chance.randrange(50)
        count, displaced = ghosts.put([chance.randbytes(16) for _ in range(3)], number)
        numbers[number] += count
        for other in displaced:
            numbers[other] -= 1
        assert sum(numbers) == len(ghosts) <= 64
        assert min(numbers) >= 0


def test_places_of_ghosts_are_freed_in_turn() -> None:
    ghosts = GhostTable(size_min=64)
    assert ghosts.sweep(50) == []
    count, displaced = ghosts.put(range(200), 5)
    left_count = count - len(displaced)
    assert left_count == len(ghosts) > 20
    swept = [number for _ in range(3) for number in ghosts.sweep(20)]
    assert 0 < len(swept) < left_count
    assert len(ghosts) == left_count - len(swept)
    swept += [number for _ in range(3) for number in ghosts.sweep(60)]
    assert swept == [5] * left_count
    assert len(ghosts) == len(ghosts.take(range(200))) == 0


def test_one_of_so_many_sessions_is_sampled() -> None:
    for count in (4, 16):
        assert 0.8 / count < sum(is_one_of(count, number) for number in range(20_000)) / 20_000 < 1.2 / count


# --- what is learned


def returning(traffic: Traffic, *, rounds: int, swapped: bool = False) -> int:
    """Tool calls come back after half a minute, ends of turns never (or the other way round). Returns the hits."""
    stay, go = (Finish.END_TURN, Finish.TOOL_USE) if swapped else (Finish.TOOL_USE, Finish.END_TURN)
    waiting: list[tuple[int, list[int]]] = []
    hits = 0
    for number in range(rounds):
        session = traffic.now_s.__hash__() + 2 * number
        chain = traffic.new_chain()
        hits += traffic.use(chain, Request(session_id=session, turn=1, finish=stay))
        waiting.append((session, chain))
        hits += traffic.use(traffic.new_chain(), Request(session_id=session + 1, turn=1, finish=go))
        if len(waiting) > 8:
            session, chain = waiting.pop(0)
            hits += traffic.use([*chain, *traffic.new_chain(2)], Request(session_id=session, turn=2, finish=go))
    return hits


def test_what_comes_back_stays_and_what_does_not_leaves_first() -> None:
    """A tier for ten chains, where each comes back after 26 others or never: LRU has no hit at all."""
    lru, phix = Traffic(capacity_blocks=80, policy="lru"), Traffic(capacity_blocks=80)
    assert returning(lru, rounds=300) == 0
    assert returning(phix, rounds=300) > 100 * 8


def test_it_learns_anew_when_the_traffic_turns_round() -> None:
    traffic = Traffic(capacity_blocks=80)
    returning(traffic, rounds=200)
    returning(traffic, rounds=400, swapped=True)
    assert returning(traffic, rounds=100, swapped=True) > 30 * 8


def test_what_would_not_come_back_is_not_taken_in() -> None:
    taking, choosing = Traffic(capacity_blocks=80), Traffic(capacity_blocks=80, may_bypass=True)
    hits = returning(taking, rounds=300)
    assert returning(choosing, rounds=300) >= 0.9 * hits
    assert choosing.written_count < 0.8 * taking.written_count


def test_what_was_passed_over_and_is_asked_for_again_is_taken_in() -> None:
    """Learned from blocks that never came in: a tier that is full of what nobody wants opens up again."""
    traffic = Traffic(capacity_blocks=80, may_bypass=True)
    for _ in range(200):
        traffic.use(traffic.new_chain())
    chains = [traffic.new_chain() for _ in range(4)]
    hits = [traffic.use(chains[number % 4], after_s=5.0) for number in range(200)]
    assert sum(hits[-40:]) > 30 * 8


def test_a_hint_that_is_always_wrong_is_disbelieved() -> None:
    """Each chain of which it is said that its session is over comes back, and no other does."""

    def hits(rounds: int, traffic: Traffic) -> int:
        waiting: list[tuple[int, list[int]]] = []
        count = 0
        for number in range(rounds):
            chain = traffic.new_chain()
            count += traffic.use(chain, Request(session_id=2 * number, turn=1, is_done=True))
            waiting.append((2 * number, chain))
            told = Request(session_id=2 * number + 1, turn=1, expected_return_s=30.0)
            count += traffic.use(traffic.new_chain(), told)
            if len(waiting) > 8:
                session, chain = waiting.pop(0)
                count += traffic.use(chain, Request(session_id=session, turn=2, expected_return_s=30.0))
        return count

    assert hits(400, Traffic(capacity_blocks=80)) > 100 * 8


def test_before_anything_is_known_what_is_said_to_be_over_leaves_first() -> None:
    traffic = Traffic(capacity_blocks=24)
    back, over = traffic.new_chain(), traffic.new_chain()
    traffic.use(over, Request(session_id=1, is_done=True))
    traffic.use(back, Request(session_id=2, expected_return_s=30.0))
    assert traffic.evictor.peek_coldest(now_s=10.0) == over[-1]


def test_calls_of_one_request_are_no_returns() -> None:
    """An engine asks for a chain, leases it, and puts what is new, all within a moment."""
    traffic = Traffic(capacity_blocks=10_000)
    for number in range(300):
        chain = traffic.new_chain()
        request = Request(session_id=number, turn=1)
        for after_s in (2.0, 0.01, 0.02, 3.0):
            traffic.use(chain, request, after_s=after_s)
    figures = traffic.evictor.figures().of_policy
    assert figures["cohort_count"] == 300
    assert figures["returned_count"] == 0


def test_what_is_remembered_is_bounded() -> None:
    traffic = Traffic(capacity_blocks=64, may_bypass=True)
    evictor = traffic.evictor
    for number in range(6000):
        use = evictor.begin(Request(session_id=number), now_s=float(number), chain_blocks=20, matched_blocks=0)
        evictor.bypassed(traffic.new_chain(20), use=use)
    figures = evictor.figures().of_policy
    assert 25_000 < figures["ghost_count"] <= 32_768
    assert figures["session_count"] <= 1024
    assert figures["cohort_count"] <= 6000


def test_requests_of_one_block_have_a_bounded_number_of_cohorts() -> None:
    traffic = Traffic(capacity_blocks=64)
    for _ in range(40_000):
        (key,) = traffic.new_chain(1)
        traffic.now_s += 1.5
        use = traffic.evictor.begin(NO_HINT, now_s=traffic.now_s, chain_blocks=1, matched_blocks=0)
        traffic.evictor.insert_chain([key], parent=None, use=use)
        if len(traffic.evictor) > 64:
            traffic.evictor.pop_coldest(goal_bytes=1, size_bytes_of=one, now_s=traffic.now_s)
    figures = traffic.evictor.figures().of_policy
    assert 4000 < figures["cohort_count"] <= 64 + 4096 + 1
    assert 3500 < figures["ghost_count"] <= 4096
    traffic.evictor.check_invariants()


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_the_same_calls_give_the_same_victims(seed: int) -> None:
    def run() -> list[list[int]]:
        chance = random.Random(seed)
        evictor: Evictor[int] = Evictor("phix", capacity_blocks=30)
        gone = []
        for now_s in range(30):
            start = chance.choice([0, 100, 200, 300])
            chain = list(range(start, start + chance.randint(1, 12)))
            here = [key for key in chain if key in evictor]
            use = evictor.begin(NO_HINT, now_s=2.0 * now_s, chain_blocks=len(chain), matched_blocks=len(here))
            evictor.touch_chain(here, use=use)
            evictor.insert_chain(chain[len(here) :], parent=here[-1] if here else None, use=use)
            excess = len(evictor) - 30
            gone.append(evictor.pop_coldest(goal_bytes=excess, size_bytes_of=one, now_s=2.0 * now_s) if excess else [])
        return gone

    assert run() == run()


# --- the guard


def chains_in_turn(count: int) -> Iterator[list[int]]:
    """So many chains of 16 blocks, again and again."""
    chains = [list(range(16 * number, 16 * number + 16)) for number in range(count)]
    return itertools.cycle(chains)


def make_guard() -> Guard[int]:
    return Guard(lambda count: Evictor("lru", capacity_blocks=count), capacity_blocks=1024)


def test_a_policy_that_falls_behind_follows_lru_for_a_while_and_then_tries_again() -> None:
    guard = make_guard()
    chains = chains_in_turn(8)
    trips = [number for number in range(400) if guard.note_sampled(next(chains), hit_blocks=0, now_s=float(number))]
    assert trips == [99]
    assert guard.follows_lru
    returned = [number for number in range(1, 3000) if guard.note_request()]
    assert returned == [1000]
    assert not guard.follows_lru


@pytest.mark.parametrize("policy", POLICIES)
def test_the_policy_in_force_is_the_one_that_was_asked_for(policy: str) -> None:
    assert Evictor(policy, capacity_blocks=1024).policy_in_force == policy


def test_while_the_guard_follows_lru_that_is_the_policy_in_force() -> None:
    evictor: Evictor[int] = Evictor("phix", capacity_blocks=1024)
    ranking = evictor._ranking
    assert isinstance(ranking, Phix)
    chains = chains_in_turn(8)
    while not ranking._guard.note_sampled(next(chains), hit_blocks=0, now_s=0.0):
        assert evictor.policy_in_force == "phix"
    assert (evictor.policy, evictor.policy_in_force) == ("phix", "lru")
    while not ranking._guard.note_request():
        assert evictor.policy_in_force == "lru"
    assert evictor.policy_in_force == "phix"


def test_the_second_time_it_follows_twice_as_long() -> None:
    guard, chains = make_guard(), chains_in_turn(8)
    respites = []
    for _ in range(3):
        while not guard.note_sampled(next(chains), hit_blocks=0, now_s=0.0):
            pass
        respites.append(1 + sum(1 for _ in iter(guard.note_request, True)))
    assert respites == [1000, 2000, 4000]


def test_a_policy_that_is_as_good_as_lru_goes_its_own_way() -> None:
    guard, chance, lru = make_guard(), random.Random(5), Traffic(capacity_blocks=256, policy="lru")
    chains = [list(range(16 * number, 16 * number + 16)) for number in range(40)]
    for number in range(2000):
        chain = chance.choice(chains)
        assert not guard.note_sampled(chain, hit_blocks=lru.use(chain), now_s=float(number))


def test_a_tier_of_a_few_chains_is_not_watched() -> None:
    assert not Guard(lambda count: Evictor("lru", capacity_blocks=count), capacity_blocks=200).is_watching


def test_parts_of_chains_and_chains_longer_than_the_shadow_do_no_harm() -> None:
    guard, chance = make_guard(), random.Random(11)
    for number in range(500):
        start = chance.randrange(0, 900)
        guard.note_sampled(list(range(start, start + chance.randrange(1, 600))), hit_blocks=0, now_s=float(number))
