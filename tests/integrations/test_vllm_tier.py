"""The tier below an engine's host tier, without the engine: its decisions, and its mover in front of a real daemon.

Kinds of fault (users' reports): "a large retrieve hangs silently", "key visible before its data", "staging ran out in
mid-batch and unloaded buffers counted as loaded".
"""

from __future__ import annotations

import mmap
import os
import random
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.errors import InvalidArgumentError, ProtocolError
from kvstore.keys import BlockHash
from kvstore.messages import BlockState, CutReason
from kvstore.namespace import Namespace
from kvstore_client import Client
from kvstore_client.integrations._blocks import BlockShape, EngineModel
from kvstore_client.integrations.tiering.jobs import Finished, JobId, Jobs, Progress
from kvstore_client.integrations.tiering.lookups import Lookups
from kvstore_client.integrations.tiering.messages import (
    Answer,
    Identity,
    Kind,
    PartId,
    Task,
    decode_answer,
    decode_for_mover,
)
from kvstore_client.integrations.tiering.mover import worth_loading
from kvstore_client.integrations.tiering.process import MoverProcess, SharedMemory
from kvstore_client.integrations.tiering.tier import HANG_S, Block, StoreTier
from kvstore_client.results import LookupResult
from tests.conftest import DaemonProcess

ROW_BYTES = 16 << 10
ROW_COUNT = 64
WAIT_S_MAX = 30.0
HIT, MISS, PENDING = BlockState.HIT, BlockState.MISS, BlockState.PENDING


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class HostTier:
    """Memory of a file, as an engine's host tier is, with a tier below it."""

    def __init__(self, folder: Path, address: str) -> None:
        self.path = folder / "host"
        with self.path.open("w+b") as file:
            file.truncate(ROW_BYTES * ROW_COUNT)
            self.memory = mmap.mmap(file.fileno(), ROW_BYTES * ROW_COUNT)
        self.rows: npt.NDArray[np.uint8] = np.frombuffer(self.memory, np.uint8).reshape(ROW_COUNT, ROW_BYTES)
        self._shared = SharedMemory.find(self.rows.ctypes.data, self.rows.nbytes)
        self._shared_fd = self._shared.open()
        self.clock = Clock()
        self._address = address
        self._job_count = 0
        self.tier = StoreTier(
            start=self._start,
            split=lambda key: (key[-1], BlockHash(key[:-1])),
            row_bytes=ROW_BYTES,
            row_count=ROW_COUNT,
            lookup_timeout_s=0.5,
            clock=self.clock,
        )
        self.tier.rename({group: namespace(group=group) for group in range(2)})

    def close(self) -> None:
        self.tier.close()
        os.close(self._shared_fd)

    def _start(self) -> MoverProcess:
        return MoverProcess(
            self._shared,
            memory_fd=self._shared_fd,
            row_bytes=ROW_BYTES,
            address=self._address,
            transport="auto",
            recompute_s_per_block=None,
        )

    def begin_store(self, keys: list[bytes], rows: list[int]) -> JobId:
        job_id = self._new_job()
        self.tier.store(job_id, blocks(keys, rows), parents={})
        return job_id

    def begin_load(self, keys: list[bytes], rows: list[int]) -> JobId:
        job_id = self._new_job()
        self.tier.load(job_id, blocks(keys, rows))
        return job_id

    def store(self, keys: list[bytes], rows: list[int]) -> Finished:
        self.begin_store(keys, rows)
        return self.end()

    def load(self, keys: list[bytes], rows: list[int]) -> Finished:
        self.begin_load(keys, rows)
        return self.end()

    def end(self) -> Finished:
        self.tier.drain()
        [finished] = self.tier.finished()
        return finished

    def look_up(self, keys: list[bytes], request_id: str = "request") -> list[bool]:
        """As an engine that steps until it is known."""
        deadline_s = time.monotonic() + WAIT_S_MAX
        while None in (found := [self.tier.lookup(key, request_id) for key in keys]):
            assert time.monotonic() < deadline_s, "the mover does not answer"
            self.tier.end_step()
            if self.tier.mover is not None:
                select.select([self.tier.mover], [], [], 0.05)
            self.tier.finished()
        self.tier.forget(request_id)
        return [bool(is_there) for is_there in found]

    @property
    def mover(self) -> MoverProcess:
        assert self.tier.mover is not None, "no mover"
        return self.tier.mover

    def _new_job(self) -> JobId:
        self._job_count += 1
        return JobId(self._job_count)


def namespace(*, group: int = 0, weights_revision: str = "1") -> Namespace:
    shape = BlockShape.of_bytes(layout="opaque:test", num_layers=1, tokens_per_block=16, layer_bytes=ROW_BYTES)
    model = EngineModel(model="tier", weights_revision=weights_revision)
    return model.namespace(shape, shard=None, settings={"group": group})


def blocks(keys: list[bytes], rows: list[int]) -> list[Block]:
    return [
        Block(key=key, group=key[-1], hash=BlockHash(key[:-1]), row=row, number=number)
        for number, (key, row) in enumerate(zip(keys, rows, strict=True))
    ]


_KEYS = random.Random(5)


def new_keys(count: int, *, group: int = 0) -> list[bytes]:
    return [_KEYS.randbytes(32) + bytes([group]) for _ in range(count)]


@pytest.fixture(scope="module")
def shared_daemon(start_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    return start_daemon()


@pytest.fixture
def host(shared_daemon: DaemonProcess, tmp_path: Path) -> Iterator[HostTier]:
    host = HostTier(tmp_path, shared_daemon.unix_address)
    yield host
    host.close()


@pytest.fixture
def own_host(daemon: DaemonProcess, tmp_path: Path) -> Iterator[HostTier]:
    """In front of a daemon that the test may do anything to."""
    host = HostTier(tmp_path, daemon.unix_address)
    yield host
    host.close()


# The tier and its mover, in front of a real daemon.


def test_what_one_row_held_is_loaded_into_another(host: HostTier) -> None:
    keys = new_keys(5) + new_keys(3, group=1)
    for row in range(8):
        host.rows[row] = row + 1
    assert not host.store(keys, list(range(8))).failed
    assert host.look_up(keys) == [True] * 8
    loaded = host.load(keys, list(range(40, 48)))
    assert set(loaded.done) == set(keys)
    assert not loaded.failed
    assert (host.rows[40:48] == host.rows[:8]).all()
    assert not host.rows[48:].any()
    assert not host.rows[8:40].any()


def test_only_what_was_stored_is_found_and_told_as_loaded(host: HostTier) -> None:
    stored, absent = new_keys(3), new_keys(3)
    host.rows[:3] = 7
    host.store(stored, [0, 1, 2])
    mixed = [stored[0], absent[0], stored[1], absent[1], stored[2], absent[2]]
    assert host.look_up(mixed) == [True, False] * 3
    loaded = host.load(mixed, list(range(20, 26)))
    assert set(loaded.done) == set(stored)
    assert set(loaded.failed) == set(absent)
    assert (host.rows[[20, 22, 24]] == 7).all()


def test_blocks_of_one_group_are_none_of_another(host: HostTier) -> None:
    [key] = new_keys(1, group=0)
    host.store([key], [0])
    assert host.look_up([key, key[:-1] + b"\1"]) == [True, False]


def test_a_block_that_could_not_be_loaded_is_not_asked_for_again_by_who_waits(host: HostTier) -> None:
    [key] = new_keys(1)
    assert host.tier.lookup(key, "request") is None
    host.load([key], [0])
    assert host.tier.lookup(key, "request") is False


def test_a_chain_is_stored_in_its_order_whatever_order_it_comes_in(
    host: HostTier, shared_daemon: DaemonProcess
) -> None:
    keys = new_keys(4)
    shuffled = [blocks(keys, [0, 1, 2, 3])[index] for index in (2, 0, 3, 1)]
    host.rows[:4] = np.arange(4, dtype=np.uint8)[:, None]
    host.tier.store(JobId(1), shuffled, parents={})
    assert not host.end().failed
    into = np.empty((4, ROW_BYTES), np.uint8)
    with Client(shared_daemon.unix_address) as client:
        assert client.get(namespace(), [BlockHash(key[:-1]) for key in keys], into).matched_count == 4
    assert (into == host.rows[:4]).all()


def test_without_namespaces_nothing_is_found_or_stored(host: HostTier) -> None:
    host.tier.rename({})
    keys = new_keys(2)
    assert host.look_up(keys) == [False, False]
    assert host.store(keys, [0, 1]).failed == tuple(keys)


def test_after_a_rename_nothing_from_before_is_found(host: HostTier) -> None:
    keys = new_keys(2)
    host.store(keys, [0, 1])
    host.tier.rename({0: namespace(weights_revision="2")})
    assert host.look_up(keys) == [False, False]


def test_stores_hold_no_more_than_half_of_the_host_tier(host: HostTier) -> None:
    os.kill(host.mover.pid, signal.SIGSTOP)
    host.begin_store(new_keys(30), list(range(30)))
    dropped = host.begin_store(new_keys(3), [30, 31, 32])
    assert [(finished.job_id, len(finished.failed)) for finished in host.tier.finished()] == [(dropped, 3)]
    os.kill(host.mover.pid, signal.SIGCONT)
    assert len(host.end().done) == 30
    assert not host.store(new_keys(3), [30, 31, 32]).failed


def test_a_job_without_blocks_ends_at_once(host: HostTier) -> None:
    job_id = host.begin_store([], [])
    assert [finished.job_id for finished in host.tier.finished()] == [job_id]


# Whatever becomes of the mover or the daemon.


def test_jobs_of_a_mover_that_dies_have_failed_and_another_takes_over(host: HostTier) -> None:
    keys = new_keys(4)
    host.rows[:4] = 9
    host.store(keys, [0, 1, 2, 3])
    os.kill(host.mover.pid, signal.SIGSTOP)
    host.begin_load(keys, [10, 11, 12, 13])
    assert host.tier.finished() == []
    os.kill(host.mover.pid, signal.SIGKILL)
    assert set(host.end().failed) == set(keys)
    assert host.tier.mover is None
    assert host.look_up(new_keys(1)) == [False]
    host.path.unlink()
    host.clock.now_s += 60
    assert not host.load(keys, [10, 11, 12, 13]).failed
    assert (host.rows[10:14] == 9).all()


def test_a_mover_that_hangs_is_ended_before_its_rows_are_given_away(host: HostTier) -> None:
    keys = new_keys(2)
    host.rows[:2] = 9
    host.store(keys, [0, 1])
    hung = host.mover.pid
    os.kill(hung, signal.SIGSTOP)
    host.begin_load(keys, [10, 11])
    host.clock.now_s += HANG_S - 1
    assert host.tier.finished() == []
    host.clock.now_s += 2
    [finished] = host.tier.finished()
    assert set(finished.failed) == set(keys)
    with pytest.raises(ProcessLookupError):
        os.kill(hung, 0)
    assert not host.rows[10:12].any()


def test_draining_waits_for_no_mover_for_ever(host: HostTier) -> None:
    os.kill(host.mover.pid, signal.SIGSTOP)
    keys = new_keys(2)
    host.begin_load(keys, [0, 1])
    host.clock.now_s += HANG_S + 1
    assert set(host.end().failed) == set(keys)


def test_a_lookup_that_is_not_answered_is_a_miss_after_its_time(host: HostTier) -> None:
    os.kill(host.mover.pid, signal.SIGSTOP)
    [key] = new_keys(1)
    assert host.tier.lookup(key, "request") is None
    host.tier.end_step()
    host.clock.now_s += 0.4
    host.tier.end_step()
    assert host.tier.lookup(key, "request") is None
    host.clock.now_s += 0.2
    host.tier.end_step()
    assert host.tier.lookup(key, "request") is False
    os.kill(host.mover.pid, signal.SIGCONT)


def test_a_mover_that_takes_nothing_more_does_not_hold_the_engine(host: HostTier) -> None:
    """Many times what fits into its channel."""
    os.kill(host.mover.pid, signal.SIGSTOP)
    keys = new_keys(60)
    for _ in range(200):
        host.begin_load(keys, list(range(60)))
    assert host.tier.finished() == []
    os.kill(host.mover.pid, signal.SIGCONT)
    host.tier.drain()
    assert len(host.tier.finished()) == 200


def test_a_daemon_that_died_is_only_misses_and_its_successor_is_used(own_host: HostTier, daemon: DaemonProcess) -> None:
    keys = new_keys(3)
    own_host.rows[:3] = 5
    own_host.store(keys, [0, 1, 2])
    daemon.kill()
    assert own_host.look_up(new_keys(2)) == [False, False]
    assert len(own_host.load(new_keys(2), [5, 6]).failed) == 2
    assert len(own_host.store(new_keys(2), [5, 6]).failed) == 2
    daemon.start()
    deadline_s = time.monotonic() + WAIT_S_MAX
    while own_host.store(keys, [0, 1, 2]).failed:
        assert time.monotonic() < deadline_s, "the daemon is not used again"
    assert own_host.look_up(keys) == [True] * 3
    assert not own_host.load(keys, [30, 31, 32]).failed
    assert (own_host.rows[30:33] == 5).all()


def test_a_daemon_that_hangs_holds_neither_steps_nor_jobs_for_ever(own_host: HostTier, daemon: DaemonProcess) -> None:
    own_host.store(new_keys(1), [0])
    daemon.pause()
    keys = new_keys(2)
    assert [own_host.tier.lookup(key, "request") for key in keys] == [None, None]
    own_host.tier.end_step()
    own_host.begin_store(new_keys(1), [1])
    own_host.begin_load(keys, [2, 3])
    assert own_host.tier.finished() == []
    own_host.tier.drain()
    assert [len(finished.failed) for finished in own_host.tier.finished()] in ([1, 2], [2, 1])
    assert not own_host.rows[2:4].any()
    daemon.resume()


def test_a_mover_ends_with_its_engine(host: HostTier) -> None:
    descriptor = os.pidfd_open(host.mover.pid)
    try:
        host.mover._channel.close()
        readable, _, _ = select.select([descriptor], [], [], WAIT_S_MAX)
        assert readable, "the mover goes on"
    finally:
        os.close(descriptor)


# Memory that can be shared.


def test_memory_that_is_no_file_cannot_be_shared() -> None:
    private = np.zeros(1 << 20, np.uint8)
    with pytest.raises(InvalidArgumentError, match=r"primary_kv_view .* a shared file"):
        SharedMemory.find(private.ctypes.data, private.nbytes)


def test_a_part_of_a_mapping_is_found_at_its_offset(host: HostTier) -> None:
    part = host.rows[3:5]
    host.rows[3] = 77
    memory = SharedMemory.find(part.ctypes.data, part.nbytes)
    descriptor = memory.open()
    try:
        assert os.pread(descriptor, 4, memory.offset_bytes) == bytes([77] * 4)
    finally:
        os.close(descriptor)


def test_memory_that_is_advised_about_in_parts_is_one_file_still(host: HostTier) -> None:
    half = ROW_BYTES * ROW_COUNT // 2
    host.memory.madvise(mmap.MADV_DONTFORK, half, half)
    memory = SharedMemory.find(host.rows.ctypes.data, host.rows.nbytes)
    assert (memory.path, memory.offset_bytes, memory.size_bytes) == (str(host.path), 0, 2 * half)


def test_another_file_in_the_place_of_the_memory_is_not_taken(host: HostTier) -> None:
    memory = SharedMemory.find(host.rows.ctypes.data, host.rows.nbytes)
    host.path.unlink()
    host.path.write_bytes(bytes(ROW_BYTES))
    with pytest.raises(FileNotFoundError, match="another file"):
        memory.open()


# What requests want to know. Pure.


def test_a_key_is_asked_for_once_however_many_requests_want_it() -> None:
    lookups = Lookups(timeout_s=1.0)
    assert lookups.ask(b"k", "one") is None
    assert lookups.ask(b"k", "two") is None
    assert lookups.take(now_s=0.0) == [b"k"]
    assert lookups.take(now_s=0.1) == []
    lookups.answer([b"k"], [HIT], now_s=0.2)
    assert lookups.ask(b"k", "one") is True
    lookups.forget("one")
    assert lookups.ask(b"k", "two") is True
    lookups.forget("two")
    assert lookups.ask(b"k", "three") is None


def test_what_another_writer_is_storing_is_asked_again_until_time_is_up() -> None:
    lookups = Lookups(timeout_s=1.0, again_s=0.25)
    lookups.ask(b"k", "one")
    assert lookups.take(now_s=0.0) == [b"k"]
    lookups.answer([b"k"], [PENDING], now_s=0.0)
    assert lookups.take(now_s=0.2) == []
    assert lookups.take(now_s=0.3) == [b"k"]
    lookups.answer([b"k"], [PENDING], now_s=0.3)
    assert lookups.take(now_s=1.0) == []
    assert lookups.ask(b"k", "one") is False


def test_an_answer_that_comes_late_changes_nothing() -> None:
    lookups = Lookups(timeout_s=1.0)
    lookups.ask(b"k", "one")
    lookups.take(now_s=0.0)
    lookups.take(now_s=1.0)
    lookups.answer([b"k"], [HIT], now_s=1.1)
    assert lookups.ask(b"k", "one") is False


class LookupsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.lookups = Lookups(timeout_s=3.0, again_s=1.0)
        self.now_s = 0.0
        self.wanted: dict[bytes, set[str]] = {}

    @rule(key=st.sampled_from([b"a", b"b", b"c"]), request_id=st.sampled_from(["1", "2"]))
    def ask(self, key: bytes, request_id: str) -> None:
        self.lookups.ask(key, request_id)
        self.wanted.setdefault(key, set()).add(request_id)

    @rule(later_s=st.floats(0, 4))
    def take(self, later_s: float) -> None:
        self.now_s += later_s
        taken = self.lookups.take(now_s=self.now_s)
        assert len(set(taken)) == len(taken)
        assert set(taken) <= self.wanted.keys()

    @rule(key=st.sampled_from([b"a", b"b", b"c"]), state=st.sampled_from([HIT, MISS, PENDING]))
    def answer(self, key: bytes, state: BlockState) -> None:
        self.lookups.answer([key], [state], now_s=self.now_s)

    @rule(key=st.sampled_from([b"a", b"b", b"c"]))
    def miss(self, key: bytes) -> None:
        self.lookups.miss([key])
        if key in self.wanted:
            assert self.lookups.ask(key, next(iter(self.wanted[key]))) is False

    @rule(request_id=st.sampled_from(["1", "2"]))
    def forget(self, request_id: str) -> None:
        self.lookups.forget(request_id)
        self.wanted = {key: left for key, ids in self.wanted.items() if (left := ids - {request_id})}

    @invariant()
    def holds(self) -> None:
        self.lookups.check_invariants()


TestLookups = LookupsMachine.TestCase
TestLookups.settings = settings(max_examples=50, deadline=None)


# Jobs in parts. Pure.


def test_a_job_has_ended_with_the_last_of_its_parts() -> None:
    jobs = Jobs()
    jobs.begin(JobId(1), Kind.LOAD, {PartId(1): [b"a", b"b"], PartId(2): [b"c"]})
    assert jobs.answer(PartId(2), bytes([HIT]), took_s=1.0) is None
    jobs.check_invariants()
    finished = jobs.answer(PartId(1), bytes([HIT, MISS]), took_s=2.0)
    assert finished == Finished(job_id=JobId(1), kind=Kind.LOAD, done=(b"c", b"a"), failed=(b"b",), took_s=3.0)
    assert jobs.is_idle
    assert jobs.answer(PartId(1), bytes([HIT, HIT]), took_s=0.0) is None


def test_all_that_is_under_way_can_be_given_up() -> None:
    jobs = Jobs()
    jobs.begin(JobId(1), Kind.LOAD, {PartId(1): [b"a"], PartId(2): [b"b"]})
    jobs.begin(JobId(2), Kind.STORE, {PartId(3): [b"c"]})
    assert jobs.storing_count == 1
    jobs.answer(PartId(1), bytes([HIT]), took_s=0.0)
    failed = {finished.job_id: (finished.done, finished.failed) for finished in jobs.fail()}
    assert failed == {1: ((b"a",), (b"b",)), 2: ((), (b"c",))}
    assert jobs.storing_count == 0
    jobs.check_invariants()


def test_long_work_of_one_kind_is_no_hang_of_another() -> None:
    progress = Progress(hang_s=10.0)
    progress.begin(PartId(1), Kind.STORE, now_s=0.0)
    progress.begin(PartId(2), Kind.STORE, now_s=0.0)
    progress.begin(PartId(3), Kind.LOAD, now_s=8.0)
    progress.end(PartId(1), now_s=9.0)
    assert not progress.is_hung(now_s=17.0)
    progress.end(PartId(3), now_s=17.0)
    assert not progress.is_hung(now_s=18.0)
    assert progress.is_hung(now_s=19.5)
    progress.clear()
    assert not progress.is_hung(now_s=99.0)


# Datagrams and answers.

_HASHES = st.lists(st.binary(min_size=32, max_size=32).map(BlockHash), max_size=5).map(tuple)


@given(
    kind=st.sampled_from([Kind.LOAD, Kind.STORE]),
    hashes=_HASHES,
    part=st.integers(0, 2**63),
    parent=st.none() | st.binary(min_size=32, max_size=32).map(BlockHash),
    data=st.data(),
)
def test_tasks_come_out_as_they_went_in(
    kind: Kind, hashes: tuple[BlockHash, ...], part: int, parent: BlockHash | None, data: st.DataObject
) -> None:
    rows = tuple(data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=len(hashes), max_size=len(hashes))))
    task = Task(kind=kind, part=PartId(part), group=3, hashes=hashes, rows=rows, parent_hash=parent)
    assert decode_for_mover(task.encode()) == task


@given(hashes=_HASHES, states=st.binary(max_size=9), error=st.text(max_size=20), took_s=st.floats(0, 1e6))
def test_lookups_answers_and_identities_come_out_as_they_went_in(
    hashes: tuple[BlockHash, ...], states: bytes, error: str, took_s: float
) -> None:
    task = Task(kind=Kind.LOOKUP, part=PartId(1), group=0, hashes=hashes)
    assert decode_for_mover(task.encode()) == task
    answer = Answer(kind=Kind.LOAD, part=PartId(2), states=states, took_s=took_s, error=error)
    assert decode_answer(answer.encode()) == answer
    identity = Identity(group=4, namespace=namespace().encode())
    assert decode_for_mover(identity.encode()) == identity


def test_a_task_with_a_row_too_few_is_refused() -> None:
    task = Task(kind=Kind.LOAD, part=PartId(1), group=0, hashes=(BlockHash(bytes(32)),), rows=(1,))
    with pytest.raises(ProtocolError, match="0 rows for 1 blocks"):
        decode_for_mover(task.encode()[:-4])


def test_what_would_come_later_than_computing_it_reads_as_a_miss() -> None:
    states = (HIT, HIT, HIT, MISS, HIT)
    assert list(worth_loading(LookupResult(states=states, matched_count=3))) == list(states)
    cut = LookupResult(states=states, matched_count=1, left_out_count=2, cut_reason=CutReason.TOO_SLOW)
    assert list(worth_loading(cut)) == [HIT, MISS, MISS, MISS, HIT]
