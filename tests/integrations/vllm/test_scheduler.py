"""The scheduler's half, one decision at a time; whole lives of requests are in test_lives."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.errors import UnavailableError
from kvstore.messages import FinishReason
from kvstore.namespace import Namespace
from kvstore_client.hints import Hint
from kvstore_client.integrations.vllm.hints import Hints
from kvstore_client.integrations.vllm.identities import Identities
from kvstore_client.integrations.vllm.lookups import Lookups
from kvstore_client.integrations.vllm.matching import GroupShape
from kvstore_client.integrations.vllm.messages import BlockRun, JobId, Report, Step, StoreCounts, StoreJob
from kvstore_client.integrations.vllm.scheduler import SchedulerSide
from tests.integrations.vllm.fakes import (
    MODEL,
    FakePool,
    FakeStore,
    HeldExecutor,
    InlineExecutor,
    chain,
    make_request,
    rank_layouts,
)

FULL = GroupShape(kind="full", block_tokens=4)
WINDOW = GroupShape(kind="window", block_tokens=4, reach_tokens=9)
TIMEOUT_S = 0.5


class Bench:
    """A scheduler's half with all around it, and a clock that stands still unless told."""

    def __init__(
        self,
        *,
        groups: Sequence[GroupShape | None] = (FULL,),
        rank_count: int = 1,
        hash_tokens: int = 4,
        align_tokens: int = 4,
        block_count_max: int = 100,
        lookup_executor: Executor | None = None,
        identity_executor: Executor | None = None,
        adapters: dict[str, str] | None = None,
    ) -> None:
        self.now_s = 100.0
        self.store = FakeStore()
        self.pool = FakePool()
        self.stored: list[tuple[Any, StoreJob]] = []
        self.identities = Identities(
            make_model=lambda: MODEL,
            adapter_revision=(adapters or {}).__getitem__,
            group_settings=[{"group": group} for group in range(len(groups))],
            late_settings=dict,
            executor=identity_executor or InlineExecutor(),
        )
        self.identities.begin(rank_layouts(rank_count=rank_count, group_count=len(groups)))
        lookups = Lookups(
            self.store, groups, executor=lookup_executor or InlineExecutor(), clock=lambda: self.now_s, wait_s=0.1
        )
        self.side = SchedulerSide(
            groups=groups,
            hash_tokens=hash_tokens,
            align_tokens=align_tokens,
            rank_count=rank_count,
            block_count_max=block_count_max,
            lookup_timeout_s=TIMEOUT_S,
            identities=self.identities,
            lookups=lookups,
            hints=Hints(tool_stop_token_ids=[7]),
            clock=lambda: self.now_s,
            on_stored=lambda request, job: self.stored.append((request, job)),
        )
        self.side.bind(self.pool)

    def namespace(self, *, rank: int = 0, group: int = 0) -> Namespace:
        identity = self.identities.find(None)
        assert identity is not None
        namespace = identity.namespaces[0, rank][group]
        assert namespace is not None
        return namespace

    def hold(self, block_count: int, *, group: int = 0) -> None:
        self.store.hold(self.namespace(group=group), chain(block_count))

    def arrive(self, *, tokens: int, request_id: str = "a", **fields: Any) -> Any:
        request = make_request(request_id, tokens=tokens, **fields)
        self.side.begin_request(request)
        return request

    def step(self, *requests: Any, block_ids: Sequence[Sequence[int]] = (), scheduled: int = 8) -> Step:
        return self.side.build_step(
            scheduled={request.request_id: scheduled for request in requests}, block_ids_of=lambda _: block_ids
        )

    def report(self, job: StoreJob, *, stored_count: int = 1, dropped_count: int = 0) -> None:
        counts = StoreCounts(1, stored_count, dropped_count)
        self.side.take_report(Report(stores={job.id: counts}))

    def load(self, request: Any, *, block_ids: Sequence[Sequence[int]], local_tokens: int = 0) -> int:
        """From the match to the step that begins the load."""
        tokens = self.side.matched_tokens(request, local_tokens)
        assert tokens
        self.side.begin_load(request, block_ids, tokens)
        request.num_computed_tokens = local_tokens + tokens
        return tokens


def numbers(step: Step) -> list[tuple[int, list[int]]]:
    """Per run that is stored: its group, and the numbers of its blocks."""
    return [(run.group, list(range(run.first, run.first + len(run.hashes)))) for job in step.stores for run in job.runs]


# What can be loaded.


@pytest.mark.parametrize(("tokens", "expected"), [(11, 8), (12, 12), (13, 12), (3, 0), (4, 0), (5, 4), (1, 0)])
def test_a_prompt_is_matched_whole_unless_it_is_but_one_block(tokens: int, expected: int) -> None:
    bench = Bench()
    bench.hold(3)
    assert bench.side.matched_tokens(bench.arrive(tokens=tokens), 0) == expected


def test_what_the_engine_has_already_is_not_loaded() -> None:
    bench = Bench()
    bench.hold(5)
    request = bench.arrive(tokens=21)
    assert bench.side.matched_tokens(request, 8) == 12
    assert bench.side.matched_tokens(request, 20) == 0


def test_the_store_is_asked_when_a_request_arrives_and_only_then() -> None:
    bench = Bench()
    bench.hold(3)
    request = bench.arrive(tokens=13)
    assert len(bench.store.asked) == 1
    assert [bench.side.matched_tokens(request, 0) for _ in range(3)] == [12] * 3
    assert len(bench.store.asked) == 1


def test_a_request_that_nobody_announced_is_looked_up_when_the_engine_asks() -> None:
    bench = Bench()
    bench.hold(3)
    assert bench.side.matched_tokens(make_request(tokens=13), 0) == 12


def test_a_request_that_wants_no_cache_is_not_looked_up_but_stored() -> None:
    bench = Bench()
    bench.hold(1)
    request = bench.arrive(tokens=13, skip_reading_prefix_cache=True)
    assert bench.side.matched_tokens(request, 0) == 0
    assert bench.store.asked == []
    request.num_computed_tokens = 8
    assert numbers(bench.step(request, block_ids=[[7, 8, 9]])) == [(0, [0, 1])]


def test_a_lookup_that_is_not_answered_is_asked_for_again_and_blocks_nobody() -> None:
    executor = HeldExecutor()
    bench = Bench(lookup_executor=executor)
    bench.hold(3)
    request = bench.arrive(tokens=13)
    assert bench.side.matched_tokens(request, 0) is None
    assert bench.step().is_awaited
    bench.now_s += TIMEOUT_S - 0.01
    assert bench.side.matched_tokens(request, 0) is None
    executor.run()
    assert bench.side.matched_tokens(request, 0) == 12
    assert not bench.step().is_awaited


def test_a_store_that_never_answers_costs_the_timeout_and_the_prompt_is_computed() -> None:
    bench = Bench(lookup_executor=HeldExecutor())
    request = bench.arrive(tokens=13)
    bench.now_s += 60.0  # in the engine's queue; the time counts from when the engine first asked
    assert bench.side.matched_tokens(request, 0) is None
    bench.now_s += TIMEOUT_S
    assert bench.side.matched_tokens(request, 0) == 0
    assert bench.side.counts["lookup_timeouts"] == 1
    request.num_computed_tokens = 12
    assert numbers(bench.step(request, block_ids=[[7, 8, 9, 10]])) == [(0, [0, 1, 2])]


def test_a_store_that_cannot_be_asked_is_a_miss() -> None:
    bench = Bench(groups=(FULL, WINDOW))
    bench.store.error = UnavailableError("gone")
    assert bench.side.matched_tokens(bench.arrive(tokens=13), 0) == 0
    assert bench.side.counts["lookup_errors"] == 1


def test_an_answer_is_believed_for_a_second() -> None:
    bench = Bench()
    request = bench.arrive(tokens=13)
    assert bench.side.matched_tokens(request, 0) == 0
    bench.hold(3)
    bench.now_s += 0.99
    assert bench.side.matched_tokens(request, 0) == 0
    bench.now_s += 0.02
    assert bench.side.matched_tokens(request, 0) == 12


def test_hits_of_long_ago_are_asked_for_again() -> None:
    bench = Bench()
    bench.hold(3)
    request = bench.arrive(tokens=13)
    bench.store.held.clear()
    bench.now_s += 10.0
    assert bench.side.matched_tokens(request, 0) == 0


def test_a_model_that_is_not_known_yet_is_computed() -> None:
    executor = HeldExecutor()
    bench = Bench(identity_executor=executor)
    request = bench.arrive(tokens=13)
    assert bench.side.matched_tokens(request, 0) == 0
    request.num_computed_tokens = 8
    assert bench.step(request, block_ids=[[7, 8]]).stores == []
    executor.run()
    assert numbers(bench.step(request, block_ids=[[7, 8]])) == [(0, [0, 1])]


# Loads.


def test_a_load_names_the_blocks_behind_the_local_ones() -> None:
    bench = Bench()
    bench.hold(4)
    request = bench.arrive(tokens=18)
    assert bench.load(request, block_ids=[[31, 32, 33, 34]], local_tokens=4) == 12
    (job,) = bench.step().loads
    assert job.request_id == "a"
    assert job.runs == (
        BlockRun(group=0, first=1, hashes=tuple(chain(4)[1:]), block_ids=(32, 33, 34), parent_hash=None),
    )
    assert bench.step().loads == []


def test_blocks_that_a_window_has_passed_are_not_loaded() -> None:
    bench = Bench(groups=(FULL, None, WINDOW))
    for group in (0, 2):
        bench.hold(4, group=group)
    request = bench.arrive(tokens=18)
    bench.load(request, block_ids=[[31, 32, 33, 34], [], [0, 0, 35, 36]])
    (job,) = bench.step().loads
    assert [(run.group, run.block_ids) for run in job.runs] == [(0, (31, 32, 33, 34)), (2, (35, 36))]
    assert job.runs[1].hashes == tuple(chain(4)[2:])
    assert bench.side.counts["load_tokens"] == 16
    assert bench.side.counts["load_blocks"] == 6


def test_an_engine_that_takes_less_than_was_matched_loads_less() -> None:
    bench = Bench()
    bench.hold(4)
    request = bench.arrive(tokens=18)
    assert bench.side.matched_tokens(request, 0) == 16
    bench.side.begin_load(request, [[31, 32]], 8)
    assert [run.block_ids for run in bench.step().loads[0].runs] == [(31, 32)]


def test_an_engine_that_takes_nothing_loads_nothing() -> None:
    bench = Bench()
    bench.hold(4)
    request = bench.arrive(tokens=18)
    assert bench.side.matched_tokens(request, 0) == 16
    bench.side.begin_load(request, [[]], 0)
    assert bench.step().loads == []


def test_a_block_of_many_hashes_goes_by_the_last_of_them() -> None:
    coarse = GroupShape(kind="full", block_tokens=8)
    bench = Bench(groups=(coarse, FULL), align_tokens=8)
    bench.store.hold(bench.namespace(group=0), chain(6)[1::2])
    bench.store.hold(bench.namespace(group=1), chain(6))
    request = bench.arrive(tokens=26)
    assert bench.load(request, block_ids=[[1, 2, 3], [4, 5, 6, 7, 8, 9]]) == 24
    (job,) = bench.step().loads
    assert job.runs[0].hashes == tuple(chain(6)[1::2])
    assert job.runs[1].hashes == tuple(chain(6))


def test_every_rank_hears_of_an_identity_once_with_the_first_job_that_needs_it() -> None:
    bench = Bench(rank_count=2)
    bench.hold(2)
    bench.store.hold(bench.namespace(rank=1), chain(2))
    assert bench.step().identities == {}
    bench.load(bench.arrive(tokens=9), block_ids=[[1, 2]])
    step = bench.step()
    (job,) = step.loads
    assert step.identities == {job.identity: {(0, rank): (bench.namespace(rank=rank).encode(),) for rank in range(2)}}
    bench.load(bench.arrive(tokens=9, request_id="b"), block_ids=[[3, 4]])
    assert bench.step().identities == {}


def test_a_request_with_an_adapter_uses_blocks_of_that_adapter_alone() -> None:
    bench = Bench(adapters={"/lora": "blake3:a"})
    lora = SimpleNamespace(lora_name="lora", lora_int_id=1, lora_path="/lora", load_inplace=False)
    bench.hold(3)
    bench.arrive(tokens=13, request_id="first", lora_request=lora)  # the adapter is read in the background
    request = bench.arrive(tokens=13, lora_request=lora)
    assert bench.side.matched_tokens(request, 0) == 0
    assert [asked.namespace.lora for asked in bench.store.asked] == ["blake3:a"]
    request.num_computed_tokens = 12
    step = bench.step(request, block_ids=[[1, 2, 3]])
    (encoded,) = step.identities[step.stores[0].identity][0, 0]
    assert encoded is not None
    assert Namespace.decode(encoded).lora == "blake3:a"


def test_an_adapter_that_is_reloaded_in_place_is_neither_stored_nor_loaded() -> None:
    """Its name, number and path stay the same, whatever it contains by now."""
    bench = Bench(adapters={"/lora": "blake3:a"})
    lora = SimpleNamespace(lora_name="lora", lora_int_id=1, lora_path="/lora", load_inplace=True)
    bench.arrive(tokens=13, request_id="first", lora_request=lora)
    request = bench.arrive(tokens=13, lora_request=lora)
    assert bench.side.matched_tokens(request, 0) == 0
    assert bench.store.asked == []
    request.num_computed_tokens = 12
    assert bench.step(request, block_ids=[[1, 2, 3]]).stores == []


# Stores.


def test_blocks_are_stored_once_they_are_computed_and_not_before() -> None:
    bench = Bench()
    request, ids = bench.arrive(tokens=20), [[1, 2, 3, 4, 5]]
    assert bench.step(request, block_ids=ids).stores == []
    request.num_computed_tokens = 11
    assert numbers(bench.step(request, block_ids=ids)) == [(0, [0, 1])]
    request.num_computed_tokens = 12
    step = bench.step(request, block_ids=ids)
    assert step.stores[0].runs == (
        BlockRun(group=0, first=2, hashes=(chain(3)[2],), block_ids=(3,), parent_hash=chain(2)[1]),
    )
    assert bench.step(request, block_ids=ids).stores == []


@pytest.mark.parametrize("field", ["num_in_flight_tokens", "num_output_placeholders"])
def test_what_a_step_under_way_computes_is_not_computed_yet(field: str) -> None:
    bench = Bench()
    request = bench.arrive(tokens=20, **{"num_computed_tokens": 20, field: 5})
    assert numbers(bench.step(request, block_ids=[[1, 2, 3, 4, 5]])) == [(0, [0, 1, 2])]


def test_a_preempted_request_whose_step_is_still_under_way_has_nothing_to_store() -> None:
    bench = Bench()
    request = bench.arrive(tokens=20, num_computed_tokens=0, num_in_flight_tokens=8)
    assert bench.step(request, block_ids=[[]]).stores == []


def test_what_the_store_has_is_not_stored_again() -> None:
    bench = Bench(groups=(FULL, WINDOW))
    bench.hold(2, group=0)
    bench.store.hold(bench.namespace(group=1), chain(1))
    request = bench.arrive(tokens=20, num_computed_tokens=16)
    step = bench.step(request, block_ids=[[1, 2, 3, 4], [5, 6, 7, 8]])
    assert numbers(step) == [(0, [2, 3]), (1, [1, 2, 3])]


def test_what_was_loaded_is_not_stored_again() -> None:
    bench = Bench()
    bench.hold(2)
    request = bench.arrive(tokens=20)
    bench.load(request, block_ids=[[1, 2]])
    bench.side.take_report(Report(), loaded={"a"})
    request.num_computed_tokens = 16
    assert numbers(bench.step(request, block_ids=[[1, 2, 3, 4]])) == [(0, [2, 3])]


def test_an_answer_that_came_after_the_prompt_was_begun_still_tells_what_not_to_store() -> None:
    executor = HeldExecutor()
    bench = Bench(lookup_executor=executor)
    bench.hold(2)
    request = bench.arrive(tokens=20)
    executor.run()
    request.num_computed_tokens = 12
    assert numbers(bench.step(request, block_ids=[[1, 2, 3]])) == [(0, [2])]


def test_blocks_that_a_window_has_passed_are_stored_while_the_engine_still_caches_them() -> None:
    bench = Bench(groups=(FULL, WINDOW))
    keys = chain(4)
    bench.pool.cached = {(keys[1], 1): 71, (keys[0], 0): 99}
    request = bench.arrive(tokens=20, num_computed_tokens=16)
    step = bench.step(request, block_ids=[[1, 2, 3, 4], [0, 0, 7, 8]])
    assert [(run.group, run.first, run.block_ids) for run in step.stores[0].runs] == [
        (0, 0, (1, 2, 3, 4)),
        (1, 1, (71, 7, 8)),
    ]
    assert set(bench.pool.held) == {1, 2, 3, 4, 71, 7, 8}


def test_stored_blocks_are_held_until_every_rank_has_reported() -> None:
    bench = Bench(rank_count=2)
    request = bench.arrive(tokens=20, num_computed_tokens=8)
    (job,) = bench.step(request, block_ids=[[1, 2]]).stores
    assert bench.pool.held == {1: 1, 2: 1}
    assert bench.side.has_work
    bench.report(job, stored_count=2)
    assert bench.pool.held == {1: 1, 2: 1}
    bench.report(job, stored_count=1, dropped_count=1)
    assert bench.pool.held == {}
    assert not bench.side.has_work
    assert bench.side.counts["store_blocks"] == 3
    assert bench.side.counts["store_dropped_blocks"] == 1
    assert bench.stored == [], "not wholly there"


def test_who_wants_to_know_hears_of_blocks_that_are_wholly_stored() -> None:
    bench = Bench(rank_count=2)
    request = bench.arrive(tokens=20, num_computed_tokens=8)
    (job,) = bench.step(request, block_ids=[[1, 2]]).stores
    bench.report(job, stored_count=2)
    assert bench.stored == []
    bench.report(job, stored_count=2)
    assert bench.stored == [(request, job)]


def test_a_request_that_ends_stores_what_is_left_and_frees_the_rest() -> None:
    bench = Bench()
    request = bench.arrive(tokens=12)
    bench.step(request, block_ids=[[1, 2, 3]], scheduled=12)
    request.num_computed_tokens = 12
    bench.side.finish_request(request, [[1, 2, 3]])
    assert bench.pool.held == {1: 1, 2: 1, 3: 1}
    assert bench.side.has_work
    (job,) = bench.step().stores
    bench.report(job, stored_count=3)
    assert bench.pool.held == {}
    assert not bench.side.has_work


def test_stores_hold_at_most_their_share_of_the_engines_blocks() -> None:
    bench = Bench(block_count_max=2)
    request = bench.arrive(tokens=20, num_computed_tokens=16)
    (job,) = bench.step(request, block_ids=[[1, 2, 3, 4]]).stores
    assert bench.pool.held == {1: 1, 2: 1}
    assert bench.step(request, block_ids=[[1, 2, 3, 4]]).stores == []
    bench.report(job, stored_count=2)
    assert numbers(bench.step(request, block_ids=[[1, 2, 3, 4]])) == [(0, [2, 3])]


def test_what_found_no_room_until_the_request_ended_is_counted_as_skipped() -> None:
    bench = Bench(block_count_max=2)
    request = bench.arrive(tokens=20)
    bench.step(request, block_ids=[[1, 2, 3, 4, 5]], scheduled=20)
    request.num_computed_tokens = 20
    bench.side.finish_request(request, [[1, 2, 3, 4, 5]])
    assert bench.side.counts["store_skipped_blocks"] == 3


def test_a_step_of_a_request_that_is_not_ours_to_track_is_none_of_our_business() -> None:
    bench = Bench()
    assert bench.step(make_request("unknown", tokens=8)).stores == []
    bench.side.finish_request(make_request("unknown", tokens=8), [[1, 2]])
    assert bench.pool.held == {}


# Loads that end, and those that fail.


def test_nothing_of_a_request_is_stored_while_it_loads() -> None:
    bench = Bench()
    bench.hold(2)
    request = bench.arrive(tokens=20)
    bench.load(request, block_ids=[[1, 2]])
    assert bench.step(request, block_ids=[[1, 2]]).stores == []
    bench.side.take_report(Report(), loaded={"a"})
    request.num_computed_tokens = 12
    assert numbers(bench.step(request, block_ids=[[1, 2, 3]])) == [(0, [2])]


def test_a_request_that_is_aborted_while_it_loads_stores_nothing() -> None:
    bench = Bench()
    bench.hold(2)
    request = bench.arrive(tokens=20)
    bench.load(request, block_ids=[[1, 2]])
    bench.side.finish_request(request, [[1, 2]])
    assert bench.pool.held == {}
    assert not bench.side.has_work
    assert bench.side.counts["store_skipped_blocks"] == 0
    bench.side.take_report(Report(), loaded={"a"}, failed={"a"})
    again = bench.arrive(tokens=20)
    assert bench.side.matched_tokens(again, 0) == 8, "another request of that name starts afresh"


def test_room_that_another_connector_may_still_be_filling_is_not_stored_before_the_request_is_computed() -> None:
    """vLLM counts tokens as computed as soon as some connector has begun to load them."""
    bench = Bench()
    request = bench.arrive(tokens=20)
    bench.step(request, block_ids=[[1, 2]], scheduled=1)
    bench.side.begin_load(request, [[3, 4]], 0)
    request.num_computed_tokens = 16
    bench.side.finish_request(request, [[3, 4]])
    assert bench.pool.held == {}
    assert not bench.side.has_work


@pytest.mark.parametrize("way", ["failed", "failed_block_ids"])
def test_what_failed_to_load_is_computed_and_stored_again_and_not_tried_again(way: str) -> None:
    bench = Bench()
    bench.hold(3)
    request, other = bench.arrive(tokens=20), bench.arrive(tokens=20, request_id="b")
    bench.load(request, block_ids=[[1, 2, 3]])
    bench.load(other, block_ids=[[4, 5, 6]])
    bench.step()
    told: dict[str, Any] = {way: {"a"} if way == "failed" else {3}}
    bench.side.take_report(Report(), loaded={"a", "b"}, **told)
    assert bench.side.counts["load_failed_requests"] == 1
    bench.now_s += 5.0
    assert bench.side.matched_tokens(request, 0) == 0
    request.num_computed_tokens = other.num_computed_tokens = 12
    assert numbers(bench.step(request, block_ids=[[1, 2, 3]])) == [(0, [0, 1, 2])]
    assert numbers(bench.step(other, block_ids=[[4, 5, 6]])) == []


def test_a_rank_that_failed_earlier_than_the_others_ended_counts() -> None:
    bench = Bench()
    bench.hold(2)
    request = bench.arrive(tokens=20)
    bench.load(request, block_ids=[[1, 2]])
    bench.side.take_report(Report(), failed_block_ids={2})
    assert bench.step(request, block_ids=[[1, 2]]).stores == [], "another rank is still loading"
    bench.side.take_report(Report(), loaded={"a"})
    request.num_computed_tokens = 8
    assert numbers(bench.step(request, block_ids=[[1, 2]])) == [(0, [0, 1])]


def test_a_preempted_request_may_load_what_it_lost() -> None:
    bench = Bench()
    request = bench.arrive(tokens=20)
    assert bench.side.matched_tokens(request, 0) == 0
    request.num_computed_tokens = 16
    (job,) = bench.step(request, block_ids=[[1, 2, 3, 4]]).stores
    bench.report(job, stored_count=4)
    bench.hold(4)
    request.num_computed_tokens = 0
    bench.now_s += 2.0
    assert bench.load(request, block_ids=[[5, 6, 7, 8]]) == 16
    bench.side.take_report(Report(), loaded={"a"})
    assert bench.step(request, block_ids=[[5, 6, 7, 8]]).stores == []


# Weights that change.


def test_after_the_weights_have_changed_nothing_of_before_is_found() -> None:
    bench = Bench()
    bench.hold(3)
    request = bench.arrive(tokens=13)
    assert bench.side.matched_tokens(request, 0) == 12
    bench.side.renew()
    assert bench.side.matched_tokens(request, 0) == 0
    assert bench.side.matched_tokens(bench.arrive(tokens=13, request_id="b"), 0) == 0


def test_what_waits_or_was_preempted_when_the_weights_changed_is_stored_as_of_the_new_ones() -> None:
    bench = Bench()
    before = bench.namespace()
    request = bench.arrive(tokens=13)
    bench.side.renew()
    request.num_computed_tokens = 12
    step = bench.step(request, block_ids=[[1, 2, 3]])
    assert numbers(step) == [(0, [0, 1, 2])]
    (encoded,) = step.identities[step.stores[0].identity][0, 0]
    assert encoded is not None
    assert encoded != before.encode()


def test_a_request_that_was_computing_when_the_weights_changed_is_not_stored() -> None:
    """Its blocks are those of the old weights, or were computed from them."""
    bench = Bench()
    request = bench.arrive(tokens=40, num_computed_tokens=8)
    bench.side.renew()
    request.num_computed_tokens = 24
    assert bench.step(request, block_ids=[list(range(1, 11))]).stores == []
    bench.side.finish_request(request, [list(range(1, 11))])
    assert bench.pool.held == {}


# What a step says.


def test_a_step_that_computes_nothing_is_idle() -> None:
    bench = Bench()
    request = bench.arrive(tokens=12)
    assert bench.step().is_idle
    assert bench.step(request, scheduled=0, block_ids=[[]]).is_idle
    assert not bench.step(request, block_ids=[[]]).is_idle


def test_the_engines_pace_goes_with_lookups_and_values_what_is_loaded() -> None:
    bench = Bench()
    bench.hold(3)
    request = bench.arrive(tokens=200, name="other")
    bench.step(request, block_ids=[[]], scheduled=100)
    bench.now_s += 2.0
    bench.side.take_report(Report())
    bench.load(bench.arrive(tokens=13, request_id="b"), block_ids=[[1, 2, 3]])
    assert [asked.recompute_s for asked in bench.store.asked] == [None, pytest.approx(4 * 0.02)]
    bench.step(request, block_ids=[[]], scheduled=1)
    assert bench.side.counts["saved_us"] == 12 * 20_000


def test_what_is_loaded_before_the_pace_is_known_is_valued_once_it_is() -> None:
    bench = Bench()
    bench.hold(3)
    bench.load(bench.arrive(tokens=13, request_id="b"), block_ids=[[1, 2, 3]])
    request = bench.arrive(tokens=200, name="other")
    bench.step(request, block_ids=[[]], scheduled=100)
    assert bench.side.counts["saved_us"] == 0
    bench.now_s += 2.0
    bench.step(request, block_ids=[[]], scheduled=1)
    bench.step(request, block_ids=[[]], scheduled=1)
    assert bench.side.counts["saved_us"] == 12 * 20_000


def test_an_engine_whose_steps_take_long_believes_what_it_asked_since_it_waits() -> None:
    """A lookup that is older than it may be is asked again once, not as often as steps are slow."""
    bench = Bench()
    bench.hold(3)
    request = bench.arrive(tokens=13)
    for _ in range(3):
        bench.now_s += 30.0
        matched = bench.side.matched_tokens(request, 0)
    assert matched == 12


def test_a_report_of_a_job_that_nobody_gave_out_is_a_fault() -> None:
    with pytest.raises(KeyError):
        Bench().side.take_report(Report(stores={JobId(99): StoreCounts(1, 1, 0)}))


# What is told of requests.


def test_a_requests_hint_goes_with_its_lookup_its_loads_and_its_stores() -> None:
    bench = Bench()
    bench.hold(2)
    request = bench.arrive(tokens=17, session_id="a chat")
    hint = Hint(session="a chat", input_tokens=17)
    assert bench.store.asked[0].hint == hint
    bench.load(request, block_ids=[[1, 2, 3, 4]])
    assert [job.hint for job in bench.step().loads] == [hint]
    bench.side.take_report(Report(), loaded=["a"])
    request.num_computed_tokens = 16
    assert [job.hint for job in bench.step(request, block_ids=[[1, 2, 3, 4]]).stores] == [hint]


def test_how_an_answer_ended_is_told_of_all_blocks_of_its_request_on_every_rank() -> None:
    bench = Bench(rank_count=2)
    request = bench.arrive(tokens=8, session_id="a chat")
    bench.step(request, block_ids=[[1, 2]])
    request.num_computed_tokens = 8
    request.status, request.output_token_ids, request.num_output_tokens = "FINISHED_STOPPED", [1, 7], 2
    bench.side.finish_request(request, [[1, 2]])
    hint = Hint(session="a chat", input_tokens=8, output_tokens=2, finish=FinishReason.TOOL_USE)
    assert bench.store.told == [(bench.namespace(rank=rank), chain(2), hint) for rank in (0, 1)]
    assert [job.hint for job in bench.step().stores] == [hint]


def test_of_a_request_whose_weights_have_changed_nothing_is_told() -> None:
    bench = Bench()
    request = bench.arrive(tokens=8)
    bench.step(request, block_ids=[[1, 2]])
    request.num_computed_tokens = 8
    bench.side.renew()
    bench.side.finish_request(request, [[1, 2]])
    assert bench.store.told == []
