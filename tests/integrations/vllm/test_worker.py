"""The workers' half over a real daemon: every way that blocks travel, and every way in which it goes wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch")

import torch

from kvstore.keys import BlockHash
from kvstore.namespace import Namespace, Shard
from kvstore_client import Client, ClientConfig
from kvstore_client.hints import Hint
from kvstore_client.integrations._blocks import BlockShape
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
from kvstore_client.integrations.vllm.regions import CpuMover, Mover, merged, placements, region
from kvstore_client.integrations.vllm.worker import LoadsEnded, WorkerSide
from kvstore_client.reserved import Reserved
from kvstore_client.views import Views
from tests.conftest import DaemonProcess
from tests.integrations.vllm.fakes import MODEL, SHAPE, chain

BLOCK_COUNT = 1300
PAGE_BYTES = SHAPE.payload_bytes // SHAPE.num_layers
IDENTITY = IdentityId(3)
TRANSPORTS = ("slab", "grpc", "bulk")
WAIT_S = 30.0


class Interrupted:
    """A mover, before whose n-th copy something happens."""

    def __init__(self, mover: Mover, *, before_copy: int, happens: Callable[[], None]) -> None:
        self._mover = mover
        self._left_count = before_copy
        self._happens = happens
        self.payload_bytes = mover.payload_bytes

    def mark(self) -> object:
        return self._mover.mark()

    def read(self, block_ids: Sequence[int], targets: Sequence[memoryview], *, after: object) -> None:
        self._count()
        self._mover.read(block_ids, targets, after=after)

    def write(self, block_ids: Sequence[int], payloads: Sequence[memoryview]) -> None:
        self._count()
        self._mover.write(block_ids, payloads)

    def _count(self) -> None:
        self._left_count -= 1
        if self._left_count == 0:
            self._happens()


class Marking(Interrupted):
    """Tells apart the moments at which it was marked."""

    def __init__(self, mover: Mover) -> None:
        super().__init__(mover, before_copy=0, happens=lambda: None)
        self.mark_count = 0
        self.read_after: list[object] = []

    def mark(self) -> object:
        self.mark_count += 1
        return self.mark_count

    def read(self, block_ids: Sequence[int], targets: Sequence[memoryview], *, after: object) -> None:
        self.read_after.append(after)
        super().read(block_ids, targets, after=None)


class CountingClient(Client):
    """Keeps what is asked of it: each call may wait for a deadline."""

    call_count = 0
    parents: tuple[BlockHash | None, ...] = ()
    hints: tuple[Hint | None, ...] = ()

    def view(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        lease_s: float | None = None,
        hint: Hint | None = None,
    ) -> Views:
        self.call_count += 1
        self.hints += (hint,)
        return super().view(namespace, hashes, lease_s=lease_s, hint=hint)

    def reserve(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        parent_hash: BlockHash | None = None,
        hint: Hint | None = None,
    ) -> Reserved:
        self.call_count += 1
        self.parents += (parent_hash,)
        self.hints += (hint,)
        return super().reserve(namespace, hashes, parent_hash=parent_hash, hint=hint)


@dataclass(slots=True, kw_only=True)
class Ended:
    loads: LoadsEnded = field(default_factory=LoadsEnded)
    stores: dict[JobId, StoreCounts] = field(default_factory=dict)


class Rank:
    """One worker of an engine, with memory of its own; two groups of layers lie over the same bytes."""

    def __init__(
        self,
        client: Client,
        *,
        rank: RankKey = (0, 0),
        seed: int = 0,
        wrap: Callable[[Mover], Mover] = lambda mover: mover,
        groups: Collection[int] = (0, 1),
        stores_nothing: bool = False,
    ) -> None:
        size_bytes = SHAPE.num_layers * BLOCK_COUNT * PAGE_BYTES
        self.memory = np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)
        self.client = client
        self.worker = WorkerSide(
            client,
            rank=rank,
            movers=[wrap(self._mover()) if group in groups else None for group in range(2)],
            stores_nothing=stores_nothing,
        )

    def block(self, block_id: int) -> bytes:
        return self.memory.reshape(SHAPE.num_layers, BLOCK_COUNT, PAGE_BYTES)[:, block_id].tobytes()

    def blocks(self, run: BlockRun) -> list[bytes]:
        return [self.block(block_id) for block_id in run.block_ids]

    def others(self, *runs: BlockRun) -> bytes:
        """All of its memory but these blocks."""
        ids = [block_id for run in runs for block_id in run.block_ids]
        return np.delete(self.memory.reshape(SHAPE.num_layers, BLOCK_COUNT, PAGE_BYTES), ids, axis=1).tobytes()

    def begin(self, step: Step) -> None:
        """As the engine does in every step."""
        self.worker.begin_step(step)
        self.worker.begin_loads()
        self.worker.begin_stores()

    def wait_ended(self, step: Step) -> Ended:
        """Goes on with idle steps until all of this one has ended."""
        ended = Ended()
        deadline_s = time.monotonic() + WAIT_S
        self.worker.begin_step(Step(is_idle=True))
        while len(ended.loads.done) < len(step.loads) or len(ended.stores) < len(step.stores):
            assert time.monotonic() < deadline_s, f"hangs; ended so far: {ended}"
            loads = self.worker.take_ended()
            ended.loads.done |= loads.done
            ended.loads.failed |= loads.failed
            ended.loads.failed_block_ids |= loads.failed_block_ids
            report = self.worker.take_report() or Report()
            ended.stores |= report.stores
        return ended

    def go(self, step: Step) -> Ended:
        self.begin(step)
        return self.wait_ended(step)

    def _mover(self) -> CpuMover:
        parts = [
            part
            for layer in range(SHAPE.num_layers)
            for part in placements(
                offset_bytes=0,
                layer_index=layer,
                layer_stride_bytes=BLOCK_COUNT * PAGE_BYTES,
                block_stride_bytes=PAGE_BYTES,
                block_count=BLOCK_COUNT,
                page_bytes=PAGE_BYTES,
            )
        ]
        storage = torch.from_numpy(self.memory)
        return CpuMover([region(storage, part, block_count=BLOCK_COUNT) for part in merged(parts)])


def namespace(name: str, *, group: int = 0, shard: Shard = Shard(), shape: BlockShape = SHAPE) -> Namespace:  # noqa: B008
    return MODEL.namespace(shape, shard=shard, settings={"test": name, "group": group})


def namespaces(name: str, *, rank_count: int = 1) -> Mapping[RankKey, tuple[Namespace | None, ...]]:
    return {
        (0, rank): tuple(
            namespace(name, group=group, shard=Shard(tp_rank=rank, tp_size=rank_count)) for group in (0, 1)
        )
        for rank in range(rank_count)
    }


def make_run(block_ids: Sequence[int], *, name: str = "a", group: int = 0) -> BlockRun:
    return BlockRun(
        group=group,
        first=0,
        hashes=tuple(chain(len(block_ids), name=name)),
        block_ids=tuple(block_ids),
        parent_hash=None,
    )


def make_step(
    name: str,
    *,
    loads: Sequence[BlockRun] = (),
    stores: Sequence[BlockRun] = (),
    found: Mapping[RankKey, tuple[Namespace | None, ...]] | None = None,
) -> Step:
    """At most one job of each kind, under the namespaces of the test of that name."""
    known = namespaces(name) if found is None else found
    return Step(
        loads=[LoadJob(request_id="a", identity=IDENTITY, runs=tuple(loads))] if loads else [],
        stores=[StoreJob(id=JobId(1), identity=IDENTITY, runs=tuple(stores))] if stores else [],
        identities={IDENTITY: {rank: tuple(part and part.encode() for part in parts) for rank, parts in known.items()}},
    )


@pytest.fixture(scope="module")
def running(start_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    return start_daemon()


@pytest.fixture
def steady(running: DaemonProcess) -> Iterator[DaemonProcess]:
    """One daemon for all; what a test did to it is undone."""
    yield running
    revive(running)


@pytest.fixture
def make_rank(steady: DaemonProcess) -> Iterator[Callable[..., Rank]]:
    """Closed at the end, and then no thread of theirs may be left."""
    made: list[Rank] = []

    def make(transport: str = "slab", *, config: Mapping[str, float] | None = None, **arguments: object) -> Rank:
        address = steady.unix_address if transport == "slab" else steady.address
        client = Client(address, config=ClientConfig(transport=transport, **(config or {})))  # type: ignore[arg-type]
        made.append(Rank(client, **arguments))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for rank in made:
        rank.worker.close()
        assert rank.worker._under_way_count == 0
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstore-")]


# What goes well.


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_one_worker_stored_another_loads_to_the_byte(make_rank: Callable[..., Rank], transport: str) -> None:
    writer, reader = make_rank(transport), make_rank(transport, seed=1)
    stored = [make_run([5, 3, 8]), make_run([6, 4], group=1)]
    ended = writer.go(make_step(transport, stores=stored))
    assert ended.stores == {1: StoreCounts(1, 5, 0)}

    targets = [make_run([9, 1, 7]), make_run([2, 11], group=1)]
    before = reader.others(*targets)
    loaded = reader.go(make_step(transport, loads=targets)).loads
    assert loaded.done == {"a"}
    assert loaded.failed == set()
    assert loaded.failed_block_ids == set()
    for source, target in zip(stored, targets, strict=True):
        assert reader.blocks(target) == writer.blocks(source)
    assert reader.others(*targets) == before, "another block was written to"


@pytest.mark.parametrize(("one", "other"), [("slab", "grpc"), ("grpc", "bulk"), ("bulk", "slab")])
def test_blocks_that_came_one_way_leave_another(make_rank: Callable[..., Rank], one: str, other: str) -> None:
    writer, reader = make_rank(one), make_rank(other, seed=1)
    source, target = make_run([5, 3, 8]), make_run([1, 2, 3])
    writer.go(make_step(f"{one} to {other}", stores=[source]))
    assert not reader.go(make_step(f"{one} to {other}", loads=[target])).loads.failed
    assert reader.blocks(target) == writer.blocks(source)


def test_more_blocks_than_are_moved_at_once_are_one_chain(
    make_rank: Callable[..., Rank], steady: DaemonProcess
) -> None:
    client = CountingClient(steady.unix_address)
    writer, reader = Rank(client), make_rank(seed=1)
    source, target = make_run(range(1, 1201)), make_run(range(1200, 0, -1))
    assert writer.go(make_step("long", stores=[source])).stores == {1: StoreCounts(1, 1200, 0)}
    writer.worker.close()
    assert client.parents == (None, source.hashes[1023])
    assert not reader.go(make_step("long", loads=[target])).loads.failed
    assert reader.blocks(target) == writer.blocks(source)


def test_a_jobs_hint_goes_with_what_it_loads_and_stores(steady: DaemonProcess) -> None:
    client = CountingClient(steady.unix_address)
    rank = Rank(client)
    hint = Hint(session="a chat", priority=1)
    run = make_run([1, 2])
    step = make_step("hinted", stores=[run])
    rank.go(replace(step, stores=[replace(job, hint=hint) for job in step.stores]))
    step = make_step("hinted", loads=[run])
    assert not rank.go(replace(step, loads=[replace(job, hint=hint) for job in step.loads])).loads.failed
    rank.worker.close()
    assert client.hints == (hint, hint)


def test_what_the_store_has_already_is_not_sent_again(make_rank: Callable[..., Rank]) -> None:
    writer = make_rank()
    step = make_step("again", stores=[make_run([1, 2, 3])])
    assert writer.go(step).stores == {1: StoreCounts(1, 3, 0)}
    assert writer.worker.take_counts()["store_bytes"] == 3 * SHAPE.payload_bytes
    assert writer.go(step).stores == {1: StoreCounts(1, 0, 0)}
    counts = writer.worker.take_counts()
    assert counts["store_bytes"] == 0
    assert counts["store_us"] > 0


def test_what_another_engine_is_storing_just_now_is_not_stored_twice(
    make_rank: Callable[..., Rank], steady: DaemonProcess
) -> None:
    run = make_run([1, 2])
    with (
        Client(steady.unix_address) as client,
        client.reserve(namespace("twice"), [BlockHash(key) for key in run.hashes]) as reserved,
    ):
        assert None not in reserved.slots
        rank = make_rank()
        assert rank.go(make_step("twice", stores=[run])).stores == {1: StoreCounts(1, 0, 0)}
        assert rank.worker.take_counts()["store_bytes"] == 0


def test_blocks_are_read_behind_the_step_that_they_were_given_out_in(make_rank: Callable[..., Rank]) -> None:
    movers: list[Marking] = []

    def wrap(mover: Mover) -> Mover:
        movers.append(Marking(mover))
        return movers[-1]

    rank = make_rank(wrap=wrap)
    rank.go(make_step("marks", stores=[make_run([1], name="a")]))
    rank.go(make_step("marks", stores=[make_run([2], name="b"), make_run([3], group=1)]))
    assert [mover.read_after for mover in movers] == [[1, 2], [2]]


def test_transfers_are_counted(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank()
    rank.go(make_step("counts", stores=[make_run([1, 2])]))
    rank.go(make_step("counts", loads=[make_run([3, 4, 5])]))
    counts = rank.worker.take_counts()
    assert counts["load_bytes"] == 3 * SHAPE.payload_bytes
    assert counts["load_failed_blocks"] == 1
    assert counts["load_us"] > 0
    assert not rank.worker.take_counts()


def test_each_rank_stores_and_loads_its_own_part(make_rank: Callable[..., Rank]) -> None:
    both = namespaces("ranks", rank_count=2)
    writers = [make_rank(rank=(0, rank), seed=rank) for rank in range(2)]
    readers = [make_rank(rank=(0, rank), seed=2 + rank) for rank in range(2)]
    source, target = make_run([1, 2, 3]), make_run([7, 8, 9])
    together = Report()
    for writer in writers:
        together.merge(Report(stores=writer.go(make_step("ranks", stores=[source], found=both)).stores))
    assert together.stores == {1: StoreCounts(2, 6, 0)}
    for reader, writer in zip(readers, writers, strict=True):
        assert not reader.go(make_step("ranks", loads=[target], found=both)).loads.failed
        assert reader.blocks(target) == writer.blocks(source)
    assert readers[0].blocks(target) != readers[1].blocks(target)


def test_a_part_that_one_rank_lacks_fails_on_that_rank_alone(make_rank: Callable[..., Rank]) -> None:
    both = namespaces("one rank", rank_count=2)
    writer = make_rank(rank=(0, 0))
    writer.go(make_step("one rank", stores=[make_run([1, 2])], found=both))
    ended = [
        make_rank(rank=(0, rank)).go(make_step("one rank", loads=[make_run([5, 6])], found=both)).loads
        for rank in range(2)
    ]
    assert [loads.done for loads in ended] == [{"a"}, {"a"}]
    assert [loads.failed_block_ids for loads in ended] == [set(), {5, 6}]


def test_a_rank_whose_bytes_another_rank_stores_reports_at_once_and_loads_all_the_same(
    make_rank: Callable[..., Rank],
) -> None:
    shared = {(0, rank): (namespace("replica"), namespace("replica", group=1)) for rank in range(2)}
    writer, replica = make_rank(rank=(0, 0)), make_rank(rank=(0, 1), seed=1, stores_nothing=True)
    step = make_step("replica", stores=[make_run([1, 2])], found=shared)
    assert replica.go(step).stores == {1: StoreCounts(1, 0, 0)}
    target = make_run([5, 6])
    load = make_step("replica", loads=[target], found=shared)
    assert replica.go(load).loads.failed_block_ids == {5, 6}, "it has stored something"
    writer.go(step)
    assert not replica.go(load).loads.failed
    assert replica.blocks(target) == [writer.block(1), writer.block(2)]


def test_a_pipeline_stage_without_layers_of_a_group_moves_the_others(make_rank: Callable[..., Rank]) -> None:
    uneven = {(0, 0): (namespace("stage"), None)}
    writer, reader = make_rank(groups=[0]), make_rank(groups=[0], seed=1)
    source, target = make_run([1, 2]), make_run([5, 6])
    without = make_run([3, 4], group=1)
    stored = writer.go(make_step("stage", stores=[without, source], found=uneven)).stores
    assert stored == {1: StoreCounts(1, 2, 0)}
    assert not reader.go(make_step("stage", loads=[target, without], found=uneven)).loads.failed
    assert reader.blocks(target) == writer.blocks(source)


# What is not there any more, or not as it was.


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_blocks_that_are_gone_are_named_and_the_others_loaded(make_rank: Callable[..., Rank], transport: str) -> None:
    name = f"gone {transport}"
    writer, reader = make_rank(transport), make_rank(transport, seed=1)
    run = make_run([1, 2, 3, 4, 5])
    kept = run._replace(hashes=(run.hashes[0], run.hashes[3]), block_ids=(1, 4))
    writer.go(make_step(name, stores=[kept]))
    target = run._replace(block_ids=(11, 12, 13, 14, 15))
    before = reader.others(target._replace(block_ids=(11, 14)))
    loaded = reader.go(make_step(name, loads=[target])).loads
    assert loaded.failed == {"a"}
    assert loaded.failed_block_ids == {12, 13, 15}
    assert [reader.block(11), reader.block(14)] == writer.blocks(kept)
    assert reader.others(target._replace(block_ids=(11, 14))) == before


def test_blocks_that_were_evicted_are_named(make_rank: Callable[..., Rank], steady: DaemonProcess) -> None:
    writer, reader = make_rank(), make_rank(seed=1)
    writer.go(make_step("evicted", stores=[make_run([1, 2, 3])]))
    fill(steady)
    assert reader.go(make_step("evicted", loads=[make_run([4, 5, 6])])).loads.failed_block_ids == {4, 5, 6}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_block_whose_bytes_have_changed_is_named_and_never_believed(
    make_rank: Callable[..., Rank], steady: DaemonProcess, transport: str
) -> None:
    name = f"corrupt {transport}"
    run, reader = make_run([1, 2, 3]), make_rank(transport, seed=1)
    payloads = [bytes([number]) * SHAPE.payload_bytes for number in (1, 2, 3)]
    with Client(steady.unix_address, config=ClientConfig(transport="slab")) as client:
        found = namespaces(name)[0, 0][0]
        assert found is not None
        with client.reserve(found, [BlockHash(key) for key in run.hashes]) as reserved:
            slots = [slot for slot in reserved.slots if slot is not None]
            for slot, payload in zip(slots, payloads, strict=True):
                slot[:] = payload
            assert reserved.commit().stored_count == 3
            slots[1][100] ^= 0xFF  # what no client may do, and a broken memory does
    loaded = reader.go(make_step(name, loads=[run])).loads
    assert loaded.failed_block_ids == {2}
    assert [reader.block(1), reader.block(3)] == [payloads[0], payloads[2]]


def test_a_block_that_leaves_its_slot_while_it_is_copied_is_named(
    make_rank: Callable[..., Rank], steady: DaemonProcess
) -> None:
    """The reader was stopped for longer than its lease; by then the slot holds another block."""

    def oversleep() -> None:
        with Client(steady.unix_address) as client:
            while client.stats().lease_count:
                time.sleep(0.01)
        fill(steady)

    writer = make_rank()
    writer.go(make_step("late", stores=[make_run([1, 2])]))
    reader = make_rank(
        seed=1,
        config={"lease_s": 0.2},
        wrap=lambda mover: Interrupted(mover, before_copy=1, happens=oversleep),
    )
    assert reader.go(make_step("late", loads=[make_run([5, 6])])).loads.failed_block_ids == {5, 6}


# What stops.

SHORT = {"attach_timeout_s": 1.0, "control_timeout_s": 1.0, "data_timeout_base_s": 1.0, "lease_s": 2.0}
"""Time limits of a client that is to give up soon."""


@pytest.mark.parametrize(
    ("transport", "fault"),
    [("slab", "kill"), ("slab", "pause"), ("grpc", "pause")],
)
def test_a_store_ends_when_the_daemon_stops_in_the_middle_of_it(
    make_rank: Callable[..., Rank], steady: DaemonProcess, transport: str, fault: str
) -> None:
    name = f"store {transport} {fault}"
    rank = make_rank(
        transport,
        config=SHORT,
        wrap=lambda mover: Interrupted(mover, before_copy=2, happens=getattr(steady, fault)),
    )
    runs = [make_run([1, 2], name="a"), make_run([3, 4], name="b"), make_run([5, 6], name="c")]
    before = rank.memory.copy()
    assert rank.go(make_step(name, stores=runs)).stores == {1: StoreCounts(1, 2, 4)}
    assert np.array_equal(rank.memory, before)
    assert_recovers(steady, rank, name)


@pytest.mark.parametrize(
    ("transport", "fault"),
    [("slab", "kill"), ("slab", "pause"), ("bulk", "pause")],
)
def test_a_load_ends_when_the_daemon_stops_in_the_middle_of_it(
    make_rank: Callable[..., Rank], steady: DaemonProcess, transport: str, fault: str
) -> None:
    """What was in view by then is loaded, as it was verified; all else is named."""
    name = f"load {transport} {fault}"
    writer = make_rank()
    runs = [make_run([1, 2], name="a"), make_run([3, 4], name="b"), make_run([5, 6], name="c")]
    writer.go(make_step(name, stores=runs))
    reader = make_rank(
        transport,
        seed=1,
        config=SHORT,
        wrap=lambda mover: Interrupted(mover, before_copy=2, happens=getattr(steady, fault)),
    )
    before = reader.others(*runs[:2])
    loaded = reader.go(make_step(name, loads=runs)).loads
    assert loaded.done == loaded.failed == {"a"}
    assert loaded.failed_block_ids == {5, 6}
    for run in runs[:2]:
        assert reader.blocks(run) == writer.blocks(run)
    assert reader.others(*runs[:2]) == before
    assert_recovers(steady, reader, name)


def test_without_a_daemon_everything_ends_as_not_stored_and_not_loaded(tmp_path: Path) -> None:
    rank = Rank(Client(f"unix:{tmp_path / 'none.sock'}", config=ClientConfig(**SHORT)))  # type: ignore[arg-type]
    before = rank.memory.copy()
    ended = rank.go(make_step("none", loads=[make_run([1, 2])], stores=[make_run([3, 4])]))
    rank.worker.close()
    assert ended.loads.failed_block_ids == {1, 2}
    assert ended.stores == {1: StoreCounts(1, 0, 2)}
    assert np.array_equal(rank.memory, before)


@pytest.mark.parametrize("way", ["loads", "stores"])
def test_a_dead_store_costs_a_long_run_one_deadline_not_one_per_batch(tmp_path: Path, way: str) -> None:
    client = CountingClient(f"unix:{tmp_path / 'none.sock'}", config=ClientConfig(**SHORT))  # type: ignore[arg-type]
    rank = Rank(client)
    run = make_run(range(1, 1201))
    ended = rank.go(
        make_step("batches", loads=[run] if way == "loads" else [], stores=[run] if way == "stores" else [])
    )
    rank.worker.close()
    assert client.call_count == 1
    if way == "loads":
        assert ended.loads.failed_block_ids == set(run.block_ids)
    else:
        assert ended.stores == {1: StoreCounts(1, 0, 1200)}


def test_a_store_that_does_not_serve_is_told_of_once_and_again_after_it_did(
    start_daemon: Callable[..., DaemonProcess], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="vllm.kvstore")
    daemon = start_daemon()
    try:
        rank = Rank(Client(daemon.unix_address, config=ClientConfig(**SHORT)))  # type: ignore[arg-type]
        daemon.kill()
        for number in range(1, 4):
            rank.go(make_step(f"gone {number}", stores=[make_run([number])]))
        assert caplog.text.count("does not serve this engine") == 1
        assert_recovers(daemon, rank, "back")
        assert caplog.text.count("serves this engine again") == 1
        rank.worker.close()
    finally:
        daemon.kill()


def assert_recovers(daemon: DaemonProcess, rank: Rank, name: str) -> None:
    """Once there is a daemon again, the same worker stores and loads; and nothing of before is held."""
    revive(daemon)
    deadline_s = time.monotonic() + WAIT_S
    source = make_run([21, 22], name="recovered")
    while rank.go(make_step(name, stores=[source])).stores != {1: StoreCounts(1, 2, 0)}:
        assert time.monotonic() < deadline_s, "it does not store again"
    before = rank.blocks(source)
    rank.memory.reshape(SHAPE.num_layers, BLOCK_COUNT, PAGE_BYTES)[:, [21, 22]] = 0
    assert not rank.go(make_step(name, loads=[source])).loads.failed
    assert rank.blocks(source) == before
    with Client(daemon.unix_address) as client:
        while (stats := client.stats()).lease_count or stats.reservation_count:
            assert time.monotonic() < deadline_s, f"{stats.lease_count} leases, {stats.reservation_count} reservations"


def revive(daemon: DaemonProcess) -> None:
    if daemon.is_running:
        daemon.resume()
    else:
        daemon.start()


# Faults of ours, and the end.


@pytest.mark.parametrize("way", ["stores", "loads"])
def test_a_fault_of_ours_costs_its_blocks_and_the_next_job_is_done(
    make_rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture, way: str
) -> None:
    def fault() -> None:
        raise ZeroDivisionError("what nobody thought of")

    name = f"fault {way}"
    make_rank().go(make_step(name, stores=[make_run([1, 2], name="a")]))
    rank = make_rank(seed=1, wrap=lambda mover: Interrupted(mover, before_copy=1, happens=fault))
    run = make_run([1, 2], name="a" if way == "loads" else "b")
    for is_first in (True, False):
        ended = rank.go(make_step(name, stores=[run] if way == "stores" else [], loads=[run] if way == "loads" else []))
        if way == "stores":
            assert ended.stores == {1: StoreCounts(1, 0, 2) if is_first else StoreCounts(1, 2, 0)}
        else:
            assert ended.loads.done == {"a"}
            assert ended.loads.failed_block_ids == ({1, 2} if is_first else set())
    assert caplog.text.count("broke off") == 1


def test_a_job_under_an_identity_that_was_never_told_fails(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank()
    step = make_step("untold", loads=[make_run([1])], stores=[make_run([2])])
    step.identities.clear()
    ended = rank.go(step)
    assert ended.loads.failed_block_ids == {1}
    assert ended.stores == {1: StoreCounts(1, 0, 1)}


def test_what_is_under_way_when_the_worker_closes_ends_as_failed(
    make_rank: Callable[..., Rank], steady: DaemonProcess
) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        assert go_on.wait(WAIT_S)

    rank = make_rank(wrap=lambda mover: Interrupted(mover, before_copy=1, happens=wait))
    step = make_step("close", stores=[make_run([1, 2], name="a"), make_run([3, 4], name="b")])
    rank.begin(step)
    assert reached.wait(WAIT_S)
    closing = threading.Thread(target=rank.worker.close)
    closing.start()
    go_on.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    counts = rank.wait_ended(step).stores[JobId(1)]
    assert counts.stored_count + counts.dropped_count == 4
    assert counts.dropped_count >= 2


def test_a_step_that_computes_something_waits_for_nothing(make_rank: Callable[..., Rank]) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        assert go_on.wait(WAIT_S)

    rank = make_rank(wrap=lambda mover: Interrupted(mover, before_copy=1, happens=wait))
    step = make_step("busy", stores=[make_run([1, 2])])
    rank.begin(step)
    assert reached.wait(WAIT_S)
    for is_idle in (False, True):
        rank.worker.begin_step(Step(is_idle=is_idle))
        assert rank.worker.take_ended() == LoadsEnded(), "it returns while the store is under way"
        assert rank.worker.take_report() is None
    go_on.set()
    assert rank.wait_ended(step).stores == {1: StoreCounts(1, 2, 0)}


BIG = BlockShape(
    layout="opaque:test",
    dtype="float16",
    num_layers=1,
    num_kv_heads=1,
    head_dim=512,
    v_head_dim=512,
    tokens_per_block=512,
)
"""1 MiB a block."""


def fill(daemon: DaemonProcess) -> None:
    """Until nothing of before is in its 64 MiB."""
    with Client(daemon.unix_address) as client:
        for part in range(5):
            keys = [BlockHash(key) for key in chain(16, name=f"{time.monotonic_ns()} {part}")]
            client.put(namespace("fill", shape=BIG), keys, [bytes(BIG.payload_bytes)] * len(keys))
