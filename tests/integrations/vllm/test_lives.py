"""Random lives of requests in an engine that does as vLLM does, with its blocks' contents written down.

A block that is computed from, stored or loaded at the wrong time would show another content than its hash says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.keys import BlockHash
from kvstore.namespace import Namespace
from kvstore_client.integrations.vllm.hints import Hints
from kvstore_client.integrations.vllm.identities import Identities
from kvstore_client.integrations.vllm.lookups import Lookups
from kvstore_client.integrations.vllm.matching import GroupShape
from kvstore_client.integrations.vllm.messages import (
    BlockRun,
    IdentityId,
    JobId,
    LoadJob,
    RankKey,
    Report,
    Step,
    StoreCounts,
    StoreJob,
)
from kvstore_client.integrations.vllm.scheduler import SchedulerSide
from tests.integrations.vllm.fakes import (
    MODEL,
    FakeStore,
    HeldExecutor,
    InlineExecutor,
    chain,
    make_request,
    rank_layouts,
)
from tests.integrations.vllm.fakes import seen_tokens as seen

HASH_TOKENS = 4
BLOCK_COUNT = 26
CHUNK_TOKENS = 8
TOKENS_MAX = 40

FULL = GroupShape(kind="full", block_tokens=4)
WINDOW = GroupShape(kind="window", block_tokens=4, reach_tokens=9)
COARSE = GroupShape(kind="full", block_tokens=8)
MODELS: Sequence[tuple[Sequence[GroupShape | None], int]] = [
    ((FULL,), 4),
    ((FULL, WINDOW), 4),
    ((WINDOW, None, COARSE), 8),
]
"""Groups, and what hits are a multiple of."""

Content = tuple[int, int, bytes]
"""Version of the weights, group, hash."""


@dataclass(eq=False)
class Life:
    """One request as the engine sees it."""

    request: Any
    keys: Sequence[BlockHash]
    state: str = "waiting"
    table: list[list[int]] = field(default_factory=list)
    local_tokens: int = 0
    version: int = 0
    is_aborted: bool = False


@dataclass
class Loading:
    """A load under way: the ranks that are still at it, and what failed so far."""

    job: LoadJob
    life: Life
    ranks: list[RankKey]
    failed: set[int] = field(default_factory=set)


class Memory:
    """The engine's blocks: who holds them, what they contain, which are found by their hash."""

    def __init__(self) -> None:
        self.refs: Counter[int] = Counter()
        self.held: Counter[int] = Counter()
        self.free = list(range(1, BLOCK_COUNT))
        self.content: dict[int, Content] = {}
        self.cached: dict[tuple[bytes, int], int] = {}

    def hold(self, block_ids: Sequence[int]) -> None:
        self.held.update(block_ids)
        for block_id in block_ids:
            self.touch(block_id)

    def release(self, block_ids: Sequence[int]) -> None:
        self.held.subtract(block_ids)
        assert min(self.held.values(), default=0) >= 0, self.held
        self.give_back(block_ids)

    def cached_block(self, block_hash: bytes, group: int) -> int | None:
        return self.cached.get((block_hash, group))

    def touch(self, block_id: int) -> None:
        assert block_id != 0
        if self.refs[block_id] == 0:
            self.free.remove(block_id)
        self.refs[block_id] += 1

    def give_back(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            if block_id == 0:
                continue
            assert self.refs[block_id] > 0, f"{block_id} is free already"
            self.refs[block_id] -= 1
            if self.refs[block_id] == 0:
                self.free.append(block_id)

    def allocate(self) -> int:
        """The oldest free block, which loses what it was."""
        block_id = self.free.pop(0)
        self.cached = {key: cached for key, cached in self.cached.items() if cached != block_id}
        self.content.pop(block_id, None)
        self.refs[block_id] += 1
        return block_id


def prompt_keys(fork: int) -> list[BlockHash]:
    """Of the longest prompt that shares its first `fork` hashes with others."""
    return chain(fork) + chain(TOKENS_MAX // HASH_TOKENS, name=f"fork {fork}")[fork:]


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        model=st.sampled_from(MODELS),
        rank_count=st.integers(1, 2),
        block_count_max=st.sampled_from([2, 100]),
        is_lookup_slow=st.booleans(),
        is_async=st.booleans(),
    )
    def begin(
        self,
        model: tuple[Sequence[GroupShape | None], int],
        rank_count: int,
        block_count_max: int,
        is_lookup_slow: bool,
        is_async: bool,
    ) -> None:
        self.groups, self.align_tokens = model
        self.cached_groups = [(group, shape) for group, shape in enumerate(self.groups) if shape is not None]
        self.ranks = list(rank_layouts(rank_count=rank_count))
        self.is_async = is_async
        self.now_s = 0.0
        self.version = 0
        self.store, self.memory = FakeStore(), Memory()
        self.lookups = HeldExecutor() if is_lookup_slow else InlineExecutor()
        identities = Identities(
            make_model=lambda: MODEL,
            adapter_revision=str,
            group_settings=[{"group": group} for group in range(len(self.groups))],
            late_settings=dict,
            executor=InlineExecutor(),
        )
        identities.begin(rank_layouts(rank_count=rank_count, group_count=len(self.groups)))
        self.current = identities
        self.side = SchedulerSide(
            groups=self.groups,
            hash_tokens=HASH_TOKENS,
            align_tokens=self.align_tokens,
            rank_count=rank_count,
            block_count_max=block_count_max,
            lookup_timeout_s=1.0,
            identities=identities,
            lookups=Lookups(self.store, self.groups, executor=self.lookups, clock=lambda: self.now_s, wait_s=0.0),
            hints=Hints(),
            clock=lambda: self.now_s,
        )
        self.side.bind(self.memory)
        self.lives: list[Life] = []
        self.loads: list[Loading] = []
        self.stores: dict[JobId, tuple[StoreJob, list[RankKey]]] = {}
        self.identities: dict[IdentityId, tuple[int, dict[RankKey, tuple[Namespace | None, ...]]]] = {}
        self.computing: list[tuple[Life, int]] = []
        """What the step under way computes: requests and their tokens."""
        self.failed_block_ids: set[int] = set()
        self.arrived_count = 0

    # What users and time do.

    @rule(
        fork=st.sampled_from([0, 3, 6]),
        tokens=st.sampled_from([1, 11, 12, 13, 24, 25, 32]),
        stored_count=st.sampled_from([0, 2, 5, 8]),
        gap=st.sampled_from([None, None, 1, 4]),
        skips=st.sampled_from([False] * 5 + [True]),
    )
    def arrive(self, fork: int, tokens: int, stored_count: int, gap: int | None, skips: bool) -> None:
        """Prompts share the first `fork` hashes; another engine may have stored some of their blocks."""
        if len(self.lives) >= 5:
            return
        self._store_elsewhere(prompt_keys(fork), stored_count, gap)
        self.arrived_count += 1
        keys = prompt_keys(fork)
        request = make_request(
            f"r{self.arrived_count}",
            tokens=tokens,
            block_hashes=keys[: tokens // HASH_TOKENS],
            skip_reading_prefix_cache=skips,
        )
        self.lives.append(Life(request=request, keys=keys))
        self.side.begin_request(request)

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), chance=st.integers(0, 3))
    def abort(self, data: st.DataObject, chance: int) -> None:
        if chance == 3:
            self._end(data.draw(st.sampled_from(self.lives)))

    @rule(seconds=st.sampled_from([0.1, 0.6, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def answer_lookups(self) -> None:
        if isinstance(self.lookups, HeldExecutor):
            self.lookups.run()

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        # In the order of their arrival: namespaces of changed weights are named at random.
        held = [(keys, key) for keys in self.store.held.values() for key in sorted(keys)]
        if held:
            keys, key = held[data.draw(st.integers(0, len(held) - 1))]
            keys.discard(key)

    @rule()
    def forget_own_cache(self) -> None:
        """As if the engine had been busy with others meanwhile."""
        held = {block_id for block_id, count in self.memory.refs.items() if count}
        self.memory.cached = {key: block_id for key, block_id in self.memory.cached.items() if block_id in held}

    @rule(chance=st.integers(0, 9))
    def change_weights(self, chance: int) -> None:
        """As vLLM does it: running requests are preempted, its own cache is emptied, and the connector told."""
        if chance < 8 or self.loads or self.memory.held.total():
            return
        self._compute()
        for life in self.lives:
            if life.state == "running":
                self._preempt(life)
        self.memory.cached.clear()
        self.side.renew()
        self.version += 1

    # What the engine does.

    @rule(count=st.integers(1, 4))
    def go_on(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        if not self.is_async:
            self._compute()
        for life in self.lives:
            if life.state == "waiting":
                self._admit(life)
        scheduled = self._schedule()
        step = self.side.build_step(
            scheduled={life.request.request_id: tokens for life, tokens in scheduled},
            block_ids_of=lambda request_id: self._life(request_id).table,
        )
        self._check_stores(step)
        self._compute()
        for life, tokens in scheduled:
            life.request.num_computed_tokens += tokens
            life.request.num_in_flight_tokens = tokens
        self.computing = scheduled
        self._begin(step)
        for life in list(self.lives):
            if life.state == "running" and life.request.num_computed_tokens >= TOKENS_MAX - 1:
                self._compute()
                self._end(life)

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), failing=st.sampled_from([0, 0, 0, 1, 3]))
    def end_load(self, data: st.DataObject, failing: int) -> None:
        """One rank is through with a load; it may have failed for blocks that the store still has."""
        load = data.draw(st.sampled_from(self.loads))
        self._end_load(load, load.ranks[0], failing=failing)

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), is_taken=st.sampled_from([True, True, False]))
    def end_store(self, data: st.DataObject, is_taken: bool) -> None:
        self._end_store(data.draw(st.sampled_from(sorted(self.stores))), is_taken=is_taken)

    # How it does it.

    def _store_elsewhere(self, keys: Sequence[BlockHash], count: int, gap: int | None) -> None:
        identity = self.current.find(None)
        assert identity is not None
        for namespaces in identity.shards():
            for group, shape in self.cached_groups:
                factor = shape.block_tokens // HASH_TOKENS
                found = [key for number, key in enumerate(keys[factor - 1 : count : factor]) if number != gap]
                namespace = namespaces[group]
                assert namespace is not None
                self.store.hold(namespace, found)

    def _life(self, request_id: str) -> Life:
        return next(life for life in self.lives if life.request.request_id == request_id)

    def _key(self, life: Life, shape: GroupShape, number: int) -> BlockHash:
        return life.keys[(number + 1) * shape.block_tokens // HASH_TOKENS - 1]

    def _needed(self, shape: GroupShape, tokens: int) -> set[int]:
        """The blocks that the token behind `tokens` ones looks back at."""
        return {position // shape.block_tokens for position in seen(shape, tokens)}

    def _local_tokens(self, life: Life) -> int:
        if life.request.skip_reading_prefix_cache:
            return 0
        limit = (life.request.num_tokens - 1) // self.align_tokens * self.align_tokens
        return max(
            tokens
            for tokens in range(0, limit + 1, self.align_tokens)
            if all(
                (self._key(life, shape, number), group) in self.memory.cached
                for group, shape in self.cached_groups
                for number in self._needed(shape, tokens)
            )
        )

    def _admit(self, life: Life) -> None:
        local_tokens = self._local_tokens(life)
        external_tokens = self.side.matched_tokens(life.request, local_tokens)
        if external_tokens is None:
            return
        tokens = local_tokens + external_tokens
        assert tokens <= life.request.num_tokens
        assert tokens % self.align_tokens == 0
        wanted: list[list[int]] = [[] for _ in self.groups]
        new_count = 0
        for group, shape in self.cached_groups:
            needed = self._needed(shape, tokens)
            for number in range(tokens // shape.block_tokens):
                if number not in needed:
                    wanted[group].append(0)
                elif number < local_tokens // shape.block_tokens:
                    wanted[group].append(self.memory.cached[self._key(life, shape, number), group])
                else:
                    wanted[group].append(-1)
                    new_count += 1
        local = {block_id for ids in wanted for block_id in ids if block_id > 0}
        if new_count > len(set(self.memory.free) - local):
            return  # the engine asks again when there is room
        for block_id in [block_id for ids in wanted for block_id in ids if block_id > 0]:
            self.memory.touch(block_id)
        life.table = [[self.memory.allocate() if block_id < 0 else block_id for block_id in ids] for ids in wanted]
        life.local_tokens, life.version = local_tokens, self.version
        life.request.num_computed_tokens = tokens
        self.side.begin_load(life.request, life.table, external_tokens)
        life.state = "loading" if external_tokens else "running"

    def _schedule(self) -> list[tuple[Life, int]]:
        scheduled: list[tuple[Life, int]] = []
        for life in list(self.lives):
            if life.state != "running":
                continue
            computed = life.request.num_computed_tokens
            if computed >= life.request.num_tokens:  # it decodes
                life.request.num_tokens = computed + 1
                life.request.block_hashes = life.keys[: life.request.num_tokens // HASH_TOKENS]
            tokens = min(CHUNK_TOKENS, life.request.num_tokens - computed)
            if self._make_room(life, computed + tokens):
                scheduled.append((life, tokens))
        return [(life, tokens) for life, tokens in scheduled if life.state == "running"]

    def _make_room(self, life: Life, tokens: int) -> bool:
        for group, shape in self.cached_groups:
            ids = life.table[group]
            first = min(self._needed(shape, life.request.num_computed_tokens), default=0)
            for number in range(min(first, len(ids))):  # what a window has passed goes back at once
                self.memory.give_back([ids[number]])
                ids[number] = 0
            while len(ids) * shape.block_tokens < tokens:
                if not self.memory.free:
                    self._preempt(life)
                    return False
                ids.append(self.memory.allocate())
        return True

    def _compute(self) -> None:
        """What the step under way computes is there."""
        for life, tokens in self.computing:
            life.request.num_in_flight_tokens = 0
            if life.state != "running":
                continue  # preempted meanwhile, or ended
            computed = life.request.num_computed_tokens
            for group, shape in self.cached_groups:
                for number in range((computed - tokens) // shape.block_tokens, computed // shape.block_tokens):
                    self.memory.content[life.table[group][number]] = self._content(life, group, number)
                self._cache(life, group, shape)
        self.computing = []

    def _cache(self, life: Life, group: int, shape: GroupShape) -> None:
        for number in range(life.request.num_computed_tokens // shape.block_tokens):
            block_id = life.table[group][number]
            if block_id and not any(cached == block_id for cached in self.memory.cached.values()):
                self.memory.cached.setdefault((self._key(life, shape, number), group), block_id)

    def _content(self, life: Life, group: int, number: int) -> Content:
        shape = self.groups[group]
        assert shape is not None
        return life.version, group, self._key(life, shape, number)

    def _preempt(self, life: Life) -> None:
        self._free(life)
        life.request.num_computed_tokens = 0
        life.state = "waiting"

    def _free(self, life: Life) -> None:
        for ids in life.table:
            self.memory.give_back(ids)
        life.table = []

    def _end(self, life: Life) -> None:
        self.lives.remove(life)
        self.side.finish_request(life.request, life.table or [[] for _ in self.groups])
        if life.state == "loading":
            life.is_aborted = True  # its blocks are written to until the load ends
        else:
            self._free(life)
        life.state = "ended"

    def _begin(self, step: Step) -> None:
        for identity, encoded in step.identities.items():
            assert identity not in self.identities, "told twice"
            decoded = {rank: tuple(data and Namespace.decode(data) for data in each) for rank, each in encoded.items()}
            self.identities[identity] = (self.version, decoded)
        for load in step.loads:
            life = next(life for life in self.lives if life.request.request_id == load.request_id)
            self.loads.append(Loading(job=load, life=life, ranks=list(self.ranks)))
            assert all(0 not in run.block_ids for run in load.runs)
        for store in step.stores:
            assert store.identity in self.identities
            self.stores[store.id] = (store, list(self.ranks))

    def _check_stores(self, step: Step) -> None:
        for store in step.stores:
            version = self.version if store.identity in step.identities else self.identities[store.identity][0]
            for run in store.runs:
                self._check_run(run, version)

    def _check_run(self, run: BlockRun, version: int) -> None:
        assert 0 not in run.block_ids
        for key, block_id in zip(run.hashes, run.block_ids, strict=True):
            assert self.memory.content.get(block_id) == (version, run.group, key), "a poisoned key"

    def _end_store(self, job_id: JobId, *, is_taken: bool) -> None:
        job, ranks = self.stores[job_id]
        rank = ranks.pop()
        version, namespaces = self.identities[job.identity]
        count = 0
        for run in job.runs:
            self._check_run(run, version)  # nobody has reused them while they were read
            count += len(run.hashes)
            namespace = namespaces[rank][run.group]
            assert namespace is not None
            if is_taken:
                self.store.hold(namespace, [BlockHash(key) for key in run.hashes])
        if not ranks:
            del self.stores[job_id]
        counts = StoreCounts(1, count if is_taken else 0, 0 if is_taken else count)
        self.side.take_report(Report(stores={job_id: counts}))

    def _end_load(self, load: Loading, rank: RankKey, *, failing: int) -> None:
        load.ranks.remove(rank)
        version, namespaces = self.identities[load.job.identity]
        failed: set[int] = set()
        for run in load.job.runs:
            namespace = namespaces[rank][run.group]
            assert namespace is not None
            held = self.store.held.get(namespace, set())
            for index, (key, block_id) in enumerate(zip(run.hashes, run.block_ids, strict=True)):
                if key not in held or (failing and index % failing == 0):
                    failed.add(block_id)
                else:
                    self.memory.content[block_id] = (version, run.group, key)
        load.failed |= failed
        for block_id in load.failed:
            self.memory.content.pop(block_id, None)
        is_single = len(self.groups) == 1
        life = load.life
        if load.ranks:
            if is_single:
                self.side.take_report(Report(), failed_block_ids=failed)
            return
        self.loads.remove(load)
        self.side.take_report(
            Report(),
            loaded={load.job.request_id},
            failed={load.job.request_id} if load.failed and not is_single else (),
            failed_block_ids=failed if is_single else (),
        )
        if life.is_aborted:
            self._free(life)
        elif not load.failed:
            life.state = "running"
            for group, shape in self.cached_groups:
                self._cache(life, group, shape)
            # Of a prompt that was matched whole, the last token is computed again.
            life.request.num_computed_tokens = min(life.request.num_computed_tokens, life.request.num_tokens - 1)
        else:
            self._recover(life, load.failed, is_single=is_single)

    def _recover(self, life: Life, failed: set[int], *, is_single: bool) -> None:
        """vLLM goes on behind the last good block where it knows which it is, else from the start."""
        good = 0
        if is_single:
            first = min(life.table[0].index(block_id) for block_id in failed)
            good = first * self.cached_groups[0][1].block_tokens
        life.request.num_computed_tokens = good
        if not good:
            self._preempt(life)
            return
        life.state = "running"
        self._cache(life, *self.cached_groups[0])

    # What always holds.

    @invariant()
    def whoever_computes_looks_back_at_the_right_blocks(self) -> None:
        for life, tokens in getattr(self, "computing", ()):
            if life.state != "running":
                continue
            for group, shape in self.cached_groups:
                before = life.request.num_computed_tokens - tokens
                for number in self._needed(shape, before):
                    if (number + 1) * shape.block_tokens <= before:
                        assert self.memory.content.get(life.table[group][number]) == self._content(life, group, number)

    @invariant()
    def what_is_held_is_what_stores_under_way_hold(self) -> None:
        if not hasattr(self, "stores"):
            return
        told = [store for store, _ in self.stores.values()] + self.side._step.stores
        held = Counter(block_id for store in told for run in store.runs for block_id in run.block_ids)
        assert +self.memory.held == held
        assert self.side.has_work == bool(told)

    def teardown(self) -> None:
        """Once everything has ended, nothing is held and nothing is remembered."""
        if not hasattr(self, "lives"):
            return
        self._compute()
        for life in list(self.lives):
            self._end(life)
        while self.side.has_work or self.loads or self.side._step.loads:
            self._begin_last(self.side.build_step(scheduled={}, block_ids_of=lambda _: []))
            for load in list(self.loads):
                for rank in list(load.ranks):
                    self._end_load(load, rank, failing=0)
            for job_id, (_, ranks) in list(self.stores.items()):
                for _ in list(ranks):
                    self._end_store(job_id, is_taken=True)
        assert not self.memory.held.total()
        assert sorted(self.memory.free) == list(range(1, BLOCK_COUNT)), "a block leaked"
        assert not self.side._tracked
        assert not self.side._loading
        assert not self.side._storing

    def _begin_last(self, step: Step) -> None:
        self._check_stores(step)
        self._begin(step)


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestEngine = pytest.mark.timeout(120)(EngineMachine.TestCase)
