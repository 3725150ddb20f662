"""Every block is handed out once, and what is handed out is held until every rank has reported."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore_client.integrations.vllm.messages import BlockRun, IdentityId, JobId, Report, StoreCounts, StoreJob
from kvstore_client.integrations.vllm.stores import StoreLedger, StoreProgress
from tests.integrations.vllm.fakes import chain

IDENTITY = IdentityId(7)
HASHES = chain(40)
GROUP_COUNT = 2


def make_progress(*, known: tuple[set[int], ...] = (set(), set())) -> StoreProgress:
    return StoreProgress(done_counts=[0] * GROUP_COUNT, is_known=[set(numbers) for numbers in known])


def make_plan(
    ledger: StoreLedger, progress: StoreProgress, *ready_counts: int, gone: Collection[int] = ()
) -> StoreJob | None:
    return ledger.plan(
        progress,
        identity=IDENTITY,
        hashes=[HASHES] * len(ready_counts),
        ready_counts=ready_counts,
        find_block=lambda group, number: None if number in gone else 100 * (group + 1) + number,
    )


def test_ready_blocks_become_one_run_per_group_behind_their_parent() -> None:
    ledger, progress = StoreLedger(rank_count=1, block_count_max=100), make_progress()
    first = make_plan(ledger, progress, 2, 0)
    assert first is not None
    assert first.identity == IDENTITY
    assert first.runs == (BlockRun(group=0, first=0, hashes=tuple(HASHES[:2]), block_ids=(100, 101), parent_hash=None),)
    second = make_plan(ledger, progress, 4, 1)
    assert second is not None
    assert second.runs == (
        BlockRun(group=0, first=2, hashes=tuple(HASHES[2:4]), block_ids=(102, 103), parent_hash=HASHES[1]),
        BlockRun(group=1, first=0, hashes=(HASHES[0],), block_ids=(200,), parent_hash=None),
    )
    assert make_plan(ledger, progress, 4, 1) is None


def test_blocks_that_the_store_has_or_the_engine_lost_split_a_run() -> None:
    ledger, progress = StoreLedger(rank_count=1, block_count_max=100), make_progress(known=({0, 3}, set()))
    job = make_plan(ledger, progress, 7, 0, gone={5})
    assert job is not None
    assert [(run.first, len(run.hashes), run.parent_hash) for run in job.runs] == [
        (1, 2, HASHES[0]),
        (4, 1, HASHES[3]),
        (6, 1, HASHES[5]),
    ]
    assert ledger.held_count == 4


def test_blocks_beyond_the_cap_wait_until_others_are_released() -> None:
    ledger, progress = StoreLedger(rank_count=1, block_count_max=3), make_progress()
    job = make_plan(ledger, progress, 2, 4)
    assert job is not None
    assert [run.block_ids for run in job.runs] == [(100, 101), (200,)]
    assert make_plan(ledger, progress, 2, 4) is None
    assert ledger.report(job.id, StoreCounts(1, 3, 0)) == ((100, 101, 200), StoreCounts(1, 3, 0))
    later = make_plan(ledger, progress, 2, 4)
    assert later is not None
    assert [(run.group, run.first, run.block_ids) for run in later.runs] == [(1, 1, (201, 202, 203))]


def test_blocks_are_held_until_the_last_rank_has_reported() -> None:
    ledger, progress = StoreLedger(rank_count=3, block_count_max=100), make_progress()
    job = make_plan(ledger, progress, 2, 0)
    assert job is not None
    assert ledger.report(job.id, StoreCounts(1, 2, 0)) is None
    assert ledger.report(job.id, StoreCounts(1, 1, 1)) is None
    assert ledger.held_count == 2
    assert not ledger.is_idle
    assert ledger.report(job.id, StoreCounts(1, 0, 2)) == ((100, 101), StoreCounts(3, 3, 3))
    assert ledger.held_count == 0
    assert ledger.is_idle


def test_reports_of_ranks_add_up() -> None:
    report = Report(stores={JobId(1): StoreCounts(1, 2, 3)})
    report.merge(Report(stores={JobId(1): StoreCounts(1, 5, 0), JobId(2): StoreCounts(1, 1, 1)}))
    assert report.stores == {JobId(1): StoreCounts(2, 7, 3), JobId(2): StoreCounts(1, 1, 1)}


class LedgerMachine(RuleBasedStateMachine):
    """Requests whose blocks get ready, are known or lost; jobs that ranks report in any order."""

    @initialize(rank_count=st.integers(1, 3), block_count_max=st.integers(1, 8))
    def begin(self, rank_count: int, block_count_max: int) -> None:
        self.rank_count = rank_count
        self.block_count_max = block_count_max
        self.ledger = StoreLedger(rank_count=rank_count, block_count_max=block_count_max)
        self.progress: list[StoreProgress] = []
        self.ready: list[list[int]] = []
        self.lost: list[set[tuple[int, int]]] = []
        self.handed: list[set[tuple[int, int]]] = []
        self.known: list[tuple[set[int], set[int]]] = []
        self.under_way: dict[JobId, tuple[tuple[int, ...], int]] = {}
        """Blocks, and the ranks that still have to report."""

    @precondition(lambda self: len(self.progress) < 3)
    @rule(known=st.tuples(st.sets(st.integers(0, 12), max_size=4), st.sets(st.integers(0, 12), max_size=4)))
    def arrive(self, known: tuple[set[int], set[int]]) -> None:
        self.progress.append(make_progress(known=known))
        self.ready.append([0] * GROUP_COUNT)
        self.lost.append(set())
        self.handed.append(set())
        self.known.append(known)

    @precondition(lambda self: self.progress)
    @rule(data=st.data(), more=st.tuples(st.integers(0, 5), st.integers(0, 5)))
    def compute(self, data: st.DataObject, more: tuple[int, int]) -> None:
        request = data.draw(st.integers(0, len(self.progress) - 1))
        self.ready[request] = [min(12, count + extra) for count, extra in zip(self.ready[request], more, strict=True)]

    @precondition(lambda self: self.progress)
    @rule(data=st.data(), group=st.integers(0, GROUP_COUNT - 1), number=st.integers(0, 12))
    def lose(self, data: st.DataObject, group: int, number: int) -> None:
        self.lost[data.draw(st.integers(0, len(self.progress) - 1))].add((group, number))

    @precondition(lambda self: self.progress)
    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        self._plan(data.draw(st.integers(0, len(self.progress) - 1)))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        self._report(data.draw(st.sampled_from(sorted(self.under_way))))

    def _plan(self, request: int) -> bool:
        def find_block(group: int, number: int) -> int | None:
            return None if (group, number) in self.lost[request] else 1_000 * request + 100 * group + number + 1

        job = self.ledger.plan(
            self.progress[request],
            identity=IDENTITY,
            hashes=[HASHES] * GROUP_COUNT,
            ready_counts=self.ready[request],
            find_block=find_block,
        )
        if job is None:
            return False
        assert job.runs
        assert job.id not in self.under_way
        for run in job.runs:
            assert run.hashes
            assert len(run.hashes) == len(run.block_ids)
            assert run.parent_hash == (HASHES[run.first - 1] if run.first else None)
            for number, (key, block_id) in enumerate(zip(run.hashes, run.block_ids, strict=True), start=run.first):
                assert key == HASHES[number]
                assert block_id == find_block(run.group, number)
                assert number < self.ready[request][run.group], "stored before it was computed"
                assert number not in self.known[request][run.group]
                assert (run.group, number) not in self.handed[request], "handed out twice"
                self.handed[request].add((run.group, number))
        block_ids = tuple(block_id for run in job.runs for block_id in run.block_ids)
        self.under_way[job.id] = (block_ids, self.rank_count)
        return True

    def _report(self, job_id: JobId) -> None:
        block_ids, rank_count = self.under_way[job_id]
        ended = self.ledger.report(job_id, StoreCounts(1, len(block_ids), 1))
        if rank_count == 1:
            counts = StoreCounts(self.rank_count, self.rank_count * len(block_ids), self.rank_count)
            assert ended == (block_ids, counts)
            del self.under_way[job_id]
        else:
            assert ended is None, "released while a rank may still read"
            self.under_way[job_id] = (block_ids, rank_count - 1)

    @invariant()
    def what_is_held_is_what_is_under_way_and_within_the_cap(self) -> None:
        if not hasattr(self, "ledger"):
            return
        assert self.ledger.held_count == sum(len(block_ids) for block_ids, _ in self.under_way.values())
        assert self.ledger.held_count <= self.block_count_max
        assert self.ledger.is_idle == (not self.under_way)

    def teardown(self) -> None:
        """Once everything is reported and asked for, every block that was there to be stored was."""
        if not hasattr(self, "ledger"):
            return
        is_going = True
        while is_going:
            while self.under_way:
                self._report(next(iter(self.under_way)))
            is_going = any(self._plan(request) for request in range(len(self.progress)))
        for request, ready in enumerate(self.ready):
            expected = {
                (group, number)
                for group in range(GROUP_COUNT)
                for number in range(ready[group])
                if number not in self.known[request][group]
            }
            assert expected - self.lost[request] <= self.handed[request] <= expected
        assert self.ledger.held_count == 0
        assert self.ledger.is_idle


LedgerMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
TestLedger = pytest.mark.timeout(60)(LedgerMachine.TestCase)
