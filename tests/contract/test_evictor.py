"""What holds for every policy, and for the engine around them."""

from __future__ import annotations

import gc
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvstore.errors import InvalidArgumentError
from kvstore.eviction import NO_HINT, POLICIES, Evictor, Finish, Request, Use
from kvstore.eviction.run import Run
from kvstore.eviction.tree import RUN_BLOCKS_MAX

# One small universe of keys, so that chains meet, break, and come back.
KEY_COUNT = 12
keys = st.integers(0, KEY_COUNT - 1)
HOUR_S = 3600.0

requests = st.builds(
    Request,
    session_id=st.none() | st.integers(0, 2),
    turn=st.none() | st.integers(1, 3),
    finish=st.sampled_from(Finish),
    is_done=st.booleans(),
    priority=st.integers(-2, 2),
    ttl_s=st.none() | st.sampled_from([0.0, 5.0, 2 * HOUR_S]),
    expected_return_s=st.none() | st.just(10.0),
)


@dataclass
class ModelBlock:
    key: int
    parent: int | None
    use_count: int
    use: Use
    request: Request
    hold_count: int = 0


class Model:
    """Blocks in a list. Slow and plain."""

    def __init__(self, *, learns_done: bool, grace_s: float) -> None:
        self.learns_done = learns_done
        self.grace_s = grace_s
        self.blocks: dict[int, ModelBlock] = {}

    def is_ancestor_of_itself(self, key: int, parent: int | None) -> bool:
        while parent is not None and parent != key:
            parent = self.blocks[parent].parent if parent in self.blocks else None
        return parent is not None

    def insert(self, key: int, parent: int | None, use: Use, use_count: int) -> None:
        if self.is_ancestor_of_itself(key, parent):
            parent = None
        self.blocks[key] = ModelBlock(key, parent, use_count, use, use.request)

    def touch_chain(self, chain: list[int], use: Use) -> None:
        for key in dict.fromkeys(chain):
            if key in self.blocks:
                block = self.blocks[key]
                block.use, block.request = use, use.request
                block.use_count += 1

    def candidates(self, spared: set[int]) -> list[ModelBlock]:
        parents = {block.parent for block in self.blocks.values()}
        return [
            block
            for block in self.blocks.values()
            if block.key not in parents and block.key not in spared and not block.hold_count
        ]

    def level(self, block: ModelBlock, now_s: float) -> float:
        if block.request.is_done and not self.learns_done:
            return -3
        has_lapsed = block.request.priority > 0 and block.use.now_s + HOUR_S <= now_s
        level = 0 if has_lapsed else block.request.priority
        return 0.5 if level == 0 and block.use.now_s + self.grace_s > now_s else level


class EvictorMachine(RuleBasedStateMachine):
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.evictor: Evictor[int] = Evictor(self.policy, capacity_blocks=8)
        self.model = Model(learns_done=self.policy == "phix", grace_s=0.0 if self.policy == "lru" else 1.0)
        self.now_s = 0.0
        self.use = self.evictor.begin(NO_HINT, now_s=0.0, chain_blocks=1, matched_blocks=0)

    def is_permitted(self, key: int, spared: set[int]) -> bool:
        """Whether the model can agree that this one leaves first."""
        candidates = self.model.candidates(spared)
        chosen = next((block for block in candidates if block.key == key), None)
        if chosen is None:
            return False
        level = self.model.level(chosen, self.now_s)
        if level != min(self.model.level(block, self.now_s) for block in candidates):
            return False
        equals = [block for block in candidates if self.model.level(block, self.now_s) == level]
        is_by_time = self.policy == "lru" or level != 0
        return not is_by_time or chosen.use.number == min(block.use.number for block in equals)

    @rule(request=st.just(NO_HINT) | requests, later_s=st.sampled_from([0.0, 0.0, 1.0, 10.0, HOUR_S]))
    def begin(self, request: Request, later_s: float) -> None:
        self.now_s += later_s
        self.use = self.evictor.begin(request, now_s=self.now_s, chain_blocks=4, matched_blocks=2)

    @rule(key=keys, parent=st.none() | keys, use_count=st.integers(0, 2))
    def insert(self, key: int, parent: int | None, use_count: int) -> None:
        if key not in self.model.blocks:
            self.evictor.insert(key, parent=parent, use=self.use, use_count=use_count)
            self.model.insert(key, parent, self.use, use_count)

    @rule(parent=st.none() | keys, chain=st.lists(keys, max_size=6, unique=True))
    def insert_chain(self, parent: int | None, chain: list[int]) -> None:
        chain = [key for key in chain if key not in self.model.blocks]
        self.evictor.insert_chain(chain, parent=parent, use=self.use)
        for key in chain:
            self.model.insert(key, parent, self.use, 0)
            parent = key

    @rule(request=st.just(NO_HINT) | requests, start=keys, count=st.integers(1, KEY_COUNT))
    def use_a_chain(self, request: Request, start: int, count: int) -> None:
        """As tiers do, so that runs grow long: touch what is here, insert what is not."""
        self.begin(request, 0.0)
        chain = list(range(start, min(start + count, KEY_COUNT)))
        self.touch_chain(chain)
        parent = start - 1 if start else None
        for key in chain:
            if key not in self.model.blocks:
                self.insert(key, parent, 0)
            parent = key

    @rule(chain=st.lists(keys, max_size=6))
    def touch_chain(self, chain: list[int]) -> None:
        self.evictor.touch_chain(iter(chain), use=self.use)
        self.model.touch_chain(chain, self.use)

    @rule(start=keys, count=st.integers(1, KEY_COUNT))
    def touch_a_row(self, start: int, count: int) -> None:
        self.touch_chain(list(range(start, min(start + count, KEY_COUNT))))

    @rule(chain=st.lists(keys, min_size=1, max_size=4), request=requests)
    def describe(self, chain: list[int], request: Request) -> None:
        here = [key for key in chain if key in self.model.blocks]
        before = self.model.blocks[here[-1]].request if here else NO_HINT
        self.evictor.describe(chain, request, now_s=self.now_s)
        if not here:
            return
        # All blocks of a run are described when one is; which those are is seen here by the runs' requests.
        for block in self.model.blocks.values():
            block.use = self.evictor._tree.run_of(block.key).use
            block.request = block.use.request
        last = self.model.blocks[here[-1]].request
        is_of_another = None not in (request.session_id, before.session_id) and request.session_id != before.session_id
        is_of_another_turn = None not in (request.turn, before.turn) and request.turn != before.turn
        if is_of_another or (is_of_another_turn and None not in (request.session_id, before.session_id)):
            assert last == before
            return
        assert last.is_done == (last.is_done or request.is_done)
        assert request.finish in (Finish.UNKNOWN, last.finish)
        assert request.priority in (0, last.priority)

    @precondition(lambda self: self.model.blocks)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model.blocks)))
        self.evictor.remove(key)
        del self.model.blocks[key]

    @precondition(lambda self: self.model.blocks)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        held = data.draw(st.lists(st.sampled_from(sorted(self.model.blocks)), max_size=4))
        self.evictor.hold(held)
        for key in held:
            self.model.blocks[key].hold_count += 1

    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        held = [block.key for block in self.model.blocks.values() if block.hold_count]
        if held:
            chosen = data.draw(st.lists(st.sampled_from(held), unique=True))
            self.evictor.unhold(chosen)
            for key in chosen:
                self.model.blocks[key].hold_count -= 1

    @rule(goal_bytes=st.integers(0, 30), spared=st.sets(keys, max_size=4))
    def pop_coldest(self, goal_bytes: int, spared: set[int]) -> None:
        victims = self.evictor.pop_coldest(
            goal_bytes=goal_bytes,
            size_bytes_of=lambda key: key + 1,
            may_evict=lambda key: key not in spared,
            now_s=self.now_s,
        )
        freed_bytes = 0
        for key in victims:
            assert freed_bytes < goal_bytes, "more was taken than the goal needs"
            assert self.is_permitted(key, spared), f"{key} of {victims} should not have left"
            del self.model.blocks[key]
            freed_bytes += key + 1
        assert freed_bytes >= goal_bytes or not self.model.candidates(spared), "others could have left"

    @rule(spared=st.sets(keys, max_size=4))
    def peek_coldest(self, spared: set[int]) -> None:
        def may_evict(key: int) -> bool:
            return key not in spared

        key = self.evictor.peek_coldest(may_evict=may_evict, now_s=self.now_s)
        assert key is None or self.is_permitted(key, spared)
        assert (key is None) == (not self.model.candidates(spared))
        if key is not None:
            assert self.evictor.pop_coldest(
                goal_bytes=1, size_bytes_of=lambda _: 1, may_evict=may_evict, now_s=self.now_s
            ) == [key]
            del self.model.blocks[key]

    @rule()
    def admits(self) -> None:
        use = self.evictor.begin(NO_HINT, now_s=self.now_s, chain_blocks=1, matched_blocks=0)
        candidates = self.model.candidates(set())
        levels = [self.model.level(block, self.now_s) for block in candidates]
        if not levels or min(levels) < 0:
            assert self.evictor.admits(use)
        elif min(levels) >= 1:
            assert not self.evictor.admits(use)
        else:
            self.evictor.admits(use)

    @rule(count_max=st.integers(0, KEY_COUNT))
    def expired(self, count_max: int) -> None:
        gone = self.evictor.expired(now_s=self.now_s, count_max=count_max)
        for key in gone:
            block = next(block for block in self.model.candidates(set()) if block.key == key)
            assert block.request.ttl_s is not None
            assert block.use.now_s + block.request.ttl_s <= self.now_s
            del self.model.blocks[key]
        assert len(gone) <= count_max
        if len(gone) < count_max:
            for block in self.model.candidates(set()):
                assert block.request.ttl_s is None or block.use.now_s + block.request.ttl_s > self.now_s

    @invariant()
    def same_blocks(self) -> None:
        self.evictor.check_invariants()
        assert len(self.evictor) == len(self.model.blocks)
        parents = {block.parent for block in self.model.blocks.values()}
        for key in range(KEY_COUNT):
            assert (key in self.evictor) == (key in self.model.blocks)
            assert self.evictor.is_parent(key) == (key in parents)
        for block in self.model.blocks.values():
            assert self.evictor.parent_of(block.key) == block.parent
            assert self.evictor.use_count(block.key) == block.use_count
            assert self.evictor.is_held(block.key) == (block.hold_count > 0)
            ancestors, at = [], block.parent
            while at in self.model.blocks:
                ancestors.append(at)
                at = self.model.blocks[at].parent
            assert list(self.evictor.ancestors(block.key)) == ancestors


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_policy_agrees_with_plain_blocks_in_a_list(policy: str) -> None:
    machine = type("Machine", (EvictorMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None))


# --- every policy


class Tier:
    """An evictor, and a clock that ticks with each use."""

    def __init__(self, policy: str, *, capacity_blocks: int = 100, refusal_count_max: int | None = None) -> None:
        self.evictor: Evictor[str] = Evictor(
            policy, capacity_blocks=capacity_blocks, refusal_count_max=refusal_count_max
        )
        self.now_s = 0.0

    def begin(self, request: Request = NO_HINT, *, chain_blocks: int = 1) -> Use:
        self.now_s += 1.0
        return self.evictor.begin(request, now_s=self.now_s, chain_blocks=chain_blocks, matched_blocks=0)

    def insert(self, *chain: str, parent: str | None = None, request: Request = NO_HINT) -> None:
        use = self.begin(request, chain_blocks=len(chain))
        self.evictor.insert_chain(chain, parent=parent, use=use)

    def touch(self, *chain: str, request: Request = NO_HINT) -> None:
        self.evictor.touch_chain(chain, use=self.begin(request, chain_blocks=len(chain)))

    def pop(self, count: int = 1 << 30, may_evict: Callable[[str], bool | None] = lambda _: True) -> list[str]:
        return self.evictor.pop_coldest(
            goal_bytes=count, size_bytes_of=lambda _: 1, may_evict=may_evict, now_s=self.now_s
        )

    def request(self, chain: list[str], *, request: Request = NO_HINT) -> int:
        """As a tier serves one: what is not here comes in the place of what is colder."""
        evictor, matched_count = self.evictor, self.evictor.matched_count(chain)
        self.now_s += 1.0
        use = evictor.begin(request, now_s=self.now_s, chain_blocks=len(chain), matched_blocks=matched_count)
        evictor.touch_chain(chain[:matched_count], use=use)
        evictor.hold(chain[:matched_count][-1:])
        missing = chain[matched_count:]
        self.pop(len(missing) - (evictor.capacity_blocks - len(evictor)))
        room = evictor.capacity_blocks - len(evictor)
        evictor.insert_chain(missing[:room], parent=chain[matched_count - 1] if matched_count else None, use=use)
        evictor.unhold(chain[:matched_count][-1:])
        return matched_count


@pytest.fixture
def tier(policy: str) -> Tier:
    return Tier(policy)


def traffic(seed: int, *, request_count: int) -> list[list[str]]:
    """Sessions that grow, over a few shared heads; some never come back."""
    rng = random.Random(seed)
    sessions: list[list[str]] = []
    chains = []
    for number in range(request_count):
        if not sessions or rng.random() < 0.3:
            head = rng.randrange(4)
            sessions.append([f"head {head}/{block}" for block in range(5)])
        session = rng.choice(sessions[-12:])
        session += [f"{number}/{block}" for block in range(rng.randrange(1, 9))]
        chains.append(list(session))
    return chains


def test_a_chain_leaves_from_its_tail(tier: Tier) -> None:
    tier.insert("a", "b", "c")
    assert tier.pop() == ["c", "b", "a"]


def test_no_more_is_taken_than_the_goal_needs(tier: Tier) -> None:
    tier.insert("a", "b", "c")
    assert tier.evictor.pop_coldest(goal_bytes=15, size_bytes_of=lambda _: 10, now_s=2.0) == ["c", "b"]
    assert tier.evictor.pop_coldest(goal_bytes=0, size_bytes_of=lambda _: 10, now_s=2.0) == []


def test_no_more_blocks_leave_in_one_call_than_allowed(tier: Tier) -> None:
    tier.insert("a", "b", "c")
    assert tier.evictor.pop_coldest(goal_bytes=9, size_bytes_of=lambda _: 1, count_max=2, now_s=2.0) == ["c", "b"]


def test_a_refused_tail_keeps_its_whole_chain(tier: Tier) -> None:
    tier.insert("a", "b")
    assert tier.pop(may_evict=lambda key: key != "b") == []
    assert tier.pop() == ["b", "a"]


def test_a_removed_middle_that_comes_back_holds_its_children_again(tier: Tier) -> None:
    tier.insert("a", "b", "c")
    tier.evictor.remove("b")
    tier.insert("b", parent="a")
    tier.evictor.check_invariants()
    assert tier.pop() == ["c", "b", "a"]


def test_a_branch_keeps_what_it_shares_with_others(tier: Tier) -> None:
    tier.insert("a", "b", "c")
    tier.insert("x", "y", parent="b")
    victims = tier.pop()
    assert victims[-2:] == ["b", "a"]
    assert victims.index("c") < victims.index("b")
    assert victims.index("y") < victims.index("x") < victims.index("b")


def test_blocks_that_claim_each_other_as_parents_can_still_leave(tier: Tier) -> None:
    for key, parent in (("self", "self"), ("a", "c"), ("b", "a"), ("c", "b")):
        tier.insert(key, parent=parent)
        tier.evictor.check_invariants()
    tier.insert("d", "e", "f", parent="f")
    tier.evictor.check_invariants()
    assert sorted(tier.pop()) == ["a", "b", "c", "d", "e", "f", "self"]


def test_blocks_that_others_remove_leave_nothing_behind(policy: str) -> None:
    """With nothing evicted, entries of removed blocks would otherwise pile up for ever."""
    tier = Tier(policy)
    for number in range(4_000):
        tier.insert(str(number), request=Request(ttl_s=1e6))
        tier.touch(str(number))
        tier.evictor.remove(str(number))
    assert len(tier.evictor) == 0
    assert len(gc_reachable_runs(tier.evictor)) < 3_000


def gc_reachable_runs(evictor: Evictor[str]) -> set[int]:
    seen: set[int] = set()
    runs: set[int] = set()
    pending: list[object] = [evictor]
    while pending:
        one = pending.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType):
            continue
        seen.add(id(one))
        if isinstance(one, Run):
            runs.add(id(one))
        pending += gc.get_referents(one)
    return runs


def test_inserting_what_is_here_is_a_bug(tier: Tier) -> None:
    tier.insert("a", "b")
    with pytest.raises(AssertionError, match="twice"):
        tier.insert("b")
    with pytest.raises(AssertionError, match="twice"):
        tier.insert("c", "c")


def test_a_search_among_refused_blocks_ends_after_its_limit_and_keeps_their_order(policy: str) -> None:
    def filled() -> Tier:
        tier = Tier(policy, refusal_count_max=3)
        for number in range(6):
            tier.insert(str(number))
        return tier

    in_order = [key for _ in range(6) for key in filled().pop()][:6]
    tier = filled()
    asked: list[str] = []

    def may_evict(key: str) -> bool:
        asked.append(key)
        return key in in_order[4:]

    assert tier.pop(1, may_evict) == []
    assert asked == in_order[:3]
    assert tier.pop(1) == in_order[:1]
    tier.evictor.check_invariants()


def test_a_search_that_is_called_off_ends_there_and_keeps_all_that_it_refused(tier: Tier) -> None:
    for number in range(6):
        tier.insert(str(number))
    asked: list[str] = []

    def may_evict(key: str) -> bool | None:
        asked.append(key)
        return {1: False, 2: True, 3: None}[len(asked)]

    victims = tier.pop(may_evict=may_evict)
    assert victims == asked[1:2]
    assert len(asked) == 3
    tier.evictor.check_invariants()
    assert sorted(tier.pop()) == sorted({"0", "1", "2", "3", "4", "5"} - {*victims})


def test_a_block_is_still_here_when_it_is_asked_whether_it_may_leave(tier: Tier) -> None:
    tier.insert("a", "b")
    seen: list[tuple[str, str | None, int]] = []

    def may_evict(key: str) -> bool:
        seen.append((key, tier.evictor.parent_of(key), tier.evictor.use_count(key)))
        return True

    tier.touch("a", "b")
    tier.touch("b")
    assert tier.pop(may_evict=may_evict) == ["b", "a"]
    assert seen == [("b", "a", 2), ("a", None, 1)]


def test_held_blocks_are_no_candidates_and_cost_a_search_nothing(policy: str) -> None:
    tier = Tier(policy, refusal_count_max=1)
    for number in range(300):
        tier.insert(str(number))
        tier.evictor.hold([str(number)])
    tier.insert("free")
    tier.evictor.check_invariants()
    assert tier.pop(10) == ["free"]
    tier.evictor.hold(["7"])
    tier.evictor.unhold(["7"])
    assert tier.evictor.is_held("7")
    tier.evictor.unhold(["7"])
    tier.evictor.check_invariants()
    assert tier.pop(10) == ["7"]


def test_unholding_what_nobody_holds_is_a_bug(tier: Tier) -> None:
    tier.insert("a")
    with pytest.raises(AssertionError, match="not held"):
        tier.evictor.unhold(["a"])


def test_nothing_leaves_before_there_is_need_and_everything_leaves_in_the_end(tier: Tier) -> None:
    chains = traffic(1, request_count=60)
    tier.evictor.capacity_blocks = 1000
    for chain in chains:
        tier.request(chain)
        tier.evictor.check_invariants()
    everything = {key for chain in chains for key in chain}
    assert len(tier.evictor) == len(everything)
    victims = tier.pop()
    assert len(victims) == len(everything)
    assert set(victims) == everything
    assert tier.evictor.figures().evicted_count == len(everything)


def test_a_tier_under_pressure_keeps_whole_prefixes_and_stays_within_its_capacity(tier: Tier) -> None:
    for number, chain in enumerate(traffic(2, request_count=400)):
        tier.request(chain)
        assert len(tier.evictor) <= 100
        present = [key in tier.evictor for key in chain]
        assert present == sorted(present, reverse=True), "a chain has a hole"
        if number % 20 == 0:
            tier.evictor.check_invariants()


def test_what_is_remembered_of_blocks_that_left_is_bounded(tier: Tier, policy: str) -> None:
    for chain in traffic(3, request_count=600):
        tier.request(chain)
    # A small tier learns from more than its size.
    count_max = 32_768 if policy == "phix" else 2 * tier.evictor.capacity_blocks
    assert tier.evictor.figures().of_policy.get("ghost_count", 0) <= count_max


def test_a_time_that_goes_back_counts_as_the_latest(tier: Tier) -> None:
    tier.evictor.begin(NO_HINT, now_s=100.0, chain_blocks=1, matched_blocks=0)
    use = tier.evictor.begin(NO_HINT, now_s=3.0, chain_blocks=1, matched_blocks=0)
    assert use.now_s == 100.0
    tier.evictor.insert("a", parent=None, use=use)
    assert tier.pop() == ["a"]


def test_the_order_depends_on_no_hash_seed() -> None:
    """Key hashes of strings differ from process to process."""
    orders = {
        subprocess.run(
            [sys.executable, "-c", _ORDER_SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(orders) == 1
    assert orders.pop().count("\n") == len(POLICIES)


_ORDER_SCRIPT = """
from kvstore.eviction import POLICIES
from tests.contract.test_evictor import Tier, traffic

for policy in POLICIES:
    tier = Tier(policy)
    hits = [tier.request(chain) for chain in traffic(4, request_count=200)]
    print(policy, hits, tier.pop())
"""


@given(blocks=st.lists(st.tuples(keys, st.none() | keys), unique_by=lambda block: block[0]))
@pytest.mark.parametrize("policy", POLICIES)
def test_restoring_blocks_is_inserting_them_one_after_the_other(
    policy: str, blocks: list[tuple[int, int | None]]
) -> None:
    restored: Evictor[int] = Evictor(policy, capacity_blocks=20)
    restored.restore([key for key, _ in blocks], [parent for _, parent in blocks], now_s=0.0)
    restored.check_invariants()
    inserted: Evictor[int] = Evictor(policy, capacity_blocks=20)
    for key, parent in blocks:
        use = inserted.begin(NO_HINT, now_s=0.0, chain_blocks=1, matched_blocks=0)
        inserted.insert(key, parent=parent, use=use)
    assert {key: restored.parent_of(key) for key, _ in blocks} == {key: inserted.parent_of(key) for key, _ in blocks}
    for evictor in (restored, inserted):
        use = evictor.begin(NO_HINT, now_s=1.0, chain_blocks=1, matched_blocks=0)
        evictor.insert(100, parent=None, use=use)  # the newest of all
    if policy == "lru":
        assert all(
            restored.pop_coldest(goal_bytes=1, size_bytes_of=lambda _: 1, now_s=1.0)
            == inserted.pop_coldest(goal_bytes=1, size_bytes_of=lambda _: 1, now_s=1.0)
            for _ in range(len(blocks) + 1)
        )
    else:
        left = restored.pop_coldest(goal_bytes=99, size_bytes_of=lambda _: 1, now_s=1.0)
        assert sorted(left) == sorted([100, *(key for key, _ in blocks)])


def test_a_long_chain_is_many_runs_and_still_leaves_from_its_tail(tier: Tier) -> None:
    chain = [str(number) for number in range(3 * RUN_BLOCKS_MAX + 7)]
    tier.insert(*chain)
    tier.touch(*chain)
    tier.touch(*chain[: RUN_BLOCKS_MAX + 1])
    tier.touch(*chain)
    tier.evictor.check_invariants()
    assert list(tier.evictor.ancestors(chain[-1])) == chain[-2::-1]
    assert tier.evictor.matched_count([*chain, "more"]) == len(chain)
    assert tier.pop() == chain[::-1]


def test_what_was_used_just_now_leaves_only_when_nothing_else_can(policy: str) -> None:
    """Kind of fault: a prompt's own blocks leave while it is being loaded, as a policy thinks little of new ones."""
    tier = Tier(policy)
    for number in range(20):
        tier.insert(f"old {number}")
        tier.touch(f"old {number}")
    tier.now_s += 10.0
    chain = [f"new {number}" for number in range(10)]
    tier.insert(*chain)
    tier.now_s += 0.5
    assert not set(tier.pop(20)) & set(chain)
    assert tier.pop(10) == chain[::-1]


# --- hints


def test_blocks_of_a_session_that_is_over_leave_first(policy: str) -> None:
    if policy == "phix":
        pytest.skip("learns for itself how far to believe it")
    tier = Tier(policy)
    tier.insert("shared", "old")
    tier.insert("over", parent="shared", request=Request(is_done=True))
    tier.touch("over")
    tier.touch("over", request=Request(is_done=True))
    assert tier.pop(1) == ["over"]


def test_what_is_told_later_counts_for_the_last_use_and_is_none_itself(policy: str) -> None:
    tier = Tier(policy)
    tier.insert("old")
    tier.insert("a", "b")
    tier.insert("c", parent="a")
    tier.touch("a", "c")
    tier.evictor.describe(["a", "b"], Request(priority=-1), now_s=tier.now_s)
    tier.evictor.check_invariants()
    assert tier.evictor.use_count("b") == 0
    assert tier.pop(1) == ["b"], "of what others have used since, nothing was told"
    tier.evictor.describe(["nowhere"], Request(priority=-1), now_s=tier.now_s)
    assert "c" in tier.evictor


def test_what_a_session_tells_is_of_all_blocks_that_it_used_last_and_of_no_other_sessions(tier: Tier) -> None:
    mine = Request(session_id=1, turn=2)
    tier.insert("a", "b", request=mine)
    tier.insert("c", "d", parent="b", request=mine)  # as an engine stores: in parts
    tier.insert("other", parent="b", request=Request(session_id=2, turn=2))
    tier.evictor.describe(["a", "b", "c", "d"], Request(session_id=1, turn=2, priority=-1), now_s=tier.now_s)
    tier.evictor.describe(["a", "b", "other"], Request(session_id=3, priority=-2), now_s=tier.now_s)
    priorities = {key: tier.evictor.last_use(key).request.priority for key in ("a", "b", "c", "d", "other")}
    assert priorities == {"a": -1, "b": -1, "c": -1, "d": -1, "other": 0}


def test_a_time_to_live_that_is_told_later_runs_from_then(tier: Tier) -> None:
    """Kind of fault: a lookup with a short one found blocks that were idle for longer, and took them with it."""
    tier.insert("a")
    tier.now_s += 600.0
    tier.evictor.describe(["a"], Request(ttl_s=300.0), now_s=tier.now_s)
    assert tier.evictor.expired(now_s=tier.now_s + 299.0, count_max=9) == []
    assert tier.evictor.expired(now_s=tier.now_s + 301.0, count_max=9) == ["a"]


def test_blocks_with_a_time_to_live_cost_one_entry_however_often_they_are_passed_over(policy: str) -> None:
    tier = Tier(policy)
    for number in range(2_000):
        tier.insert(f"kept {number}", request=Request(ttl_s=1e6))
    for _ in range(10):
        assert tier.pop(1, may_evict=lambda _: False) == []
    assert len(tier.evictor._candidates._deadlines) == 2_000


def test_what_is_in_no_order_is_cut_into_a_bounded_number_of_parts(policy: str) -> None:
    tier = Tier(policy)
    chain = [f"{number}" for number in range(8_000)]
    tier.insert(*chain)
    random.Random(3).shuffle(chain)
    tier.touch(*chain)
    assert sum(1 for _ in tier.evictor._tree.runs()) < 3_000
    tier.evictor.check_invariants()


def test_a_capacity_that_becomes_known_before_there_are_blocks_is_the_policys_from_the_start() -> None:
    late: Evictor[str] = Evictor("phix", capacity_blocks=1)
    late.capacity_blocks = 100_000
    known: Evictor[str] = Evictor("phix", capacity_blocks=100_000)
    assert late.figures() == known.figures()
    foreign = Evictor[str]("phix", capacity_blocks=1).begin(NO_HINT, now_s=0.0, chain_blocks=1, matched_blocks=0)
    assert not late.made(foreign)


def test_a_higher_priority_stays_longer(tier: Tier) -> None:
    tier.insert("high", request=Request(priority=2))
    tier.insert("raised", request=Request(priority=1))
    tier.insert("plain")
    tier.insert("lowered", request=Request(priority=-1))
    tier.insert("low", request=Request(priority=-2))
    assert tier.pop() == ["low", "lowered", "plain", "raised", "high"]


def test_a_priority_lapses_when_its_blocks_are_not_used_for_an_hour() -> None:
    tier = Tier("lru")
    tier.insert("high", request=Request(priority=2))
    tier.now_s = HOUR_S / 2
    tier.insert("plain")
    tier.now_s = HOUR_S
    assert tier.pop(1) == ["plain"]
    tier.insert("later")
    assert tier.pop(1) == ["high"]


def test_blocks_expire_when_unused_for_the_time_that_was_given_and_parents_stay_for_their_children(tier: Tier) -> None:
    tier.insert("head", "tail", request=Request(ttl_s=5.0))
    tier.insert("lasting", parent="head")
    tier.insert("forever")
    evictor = tier.evictor
    evictor.hold(["tail"])
    assert evictor.expired(now_s=100.0, count_max=9) == [], "it is held"
    evictor.unhold(["tail"])
    assert evictor.expired(now_s=100.0, count_max=9) == ["tail"]
    assert evictor.expired(now_s=100.0, count_max=9) == [], "somebody follows it"
    evictor.remove("lasting")
    assert evictor.expired(now_s=100.0, count_max=9) == ["head"]
    assert evictor.figures().expired_count == 2
    assert tier.pop() == ["forever"]


def test_a_use_puts_the_end_off(tier: Tier) -> None:
    tier.insert("a", request=Request(ttl_s=5.0))
    tier.now_s = 4.0
    tier.touch("a", request=Request(ttl_s=5.0))
    assert tier.evictor.expired(now_s=7.0, count_max=9) == []
    assert tier.evictor.expired(now_s=10.0, count_max=9) == ["a"]


def test_no_more_blocks_expire_in_one_call_than_allowed(tier: Tier) -> None:
    tier.insert("a", "b", "c", request=Request(ttl_s=0.0))
    assert tier.evictor.expired(now_s=9.0, count_max=2) == ["c", "b"]
    assert tier.evictor.expired(now_s=9.0, count_max=2) == ["a"]


def test_what_is_worth_more_is_not_given_up_for_what_is_worth_less(tier: Tier) -> None:
    tier.insert("high", request=Request(priority=1))
    assert not tier.evictor.admits(tier.begin())
    assert tier.evictor.figures().bypassed_count == 1
    assert tier.evictor.admits(tier.begin(Request(priority=2)))


def test_where_nothing_can_leave_anything_may_come(tier: Tier) -> None:
    assert tier.evictor.admits(tier.begin())


# --- bad input


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Request(priority=3), "priority"),
        (Request(priority=-3), "priority"),
        (Request(ttl_s=-1.0), "ttl_s"),
        (Request(ttl_s=math.nan), "ttl_s"),
        (Request(expected_return_s=math.inf), "expected_return_s"),
    ],
)
def test_hints_that_make_no_sense_are_refused(request_: Request, field: str) -> None:
    tier = Tier("lru")
    tier.insert("a")
    with pytest.raises(InvalidArgumentError, match=field):
        tier.begin(request_)
    with pytest.raises(InvalidArgumentError, match=field):
        tier.evictor.describe(["a"], request_, now_s=2.0)


def test_an_unknown_policy_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidArgumentError, match=r"policy is 'mru'; allowed: .*lru, arc"):
        Evictor("mru", capacity_blocks=1)


def test_a_tier_without_room_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="capacity_blocks"):
        Evictor("lru", capacity_blocks=0)
