"""Whatever a daemon does, both clients go on: a failure is only a miss, and costs one deadline at most."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from kvstore import wire
from kvstore.errors import (
    CapacityError,
    DeadlineExceededError,
    InternalError,
    KvstoreError,
    LayoutMismatchError,
    ProtocolError,
    UnavailableError,
)
from kvstore.frames import ReadFrame, encode_read_frame
from kvstore.keys import BlockHash
from kvstore.messages import BlockState, CutReason
from kvstore.namespace import Namespace
from kvstore_client import AsyncClient, Client, ClientConfig, PutState
from tests.client.adapters import AnyClient
from tests.client.builders import FAST, chain, enveloped, namespace, payloads
from tests.client.conftest import Connect
from tests.client.fake_daemon import FakeDaemon

HIT, MISS, CORRUPT = BlockState.HIT, BlockState.MISS, BlockState.CORRUPT
BLANK = b"\x55" * 256
IMPATIENT = ClientConfig(
    attach_timeout_s=0.2,
    control_timeout_s=0.2,
    data_timeout_base_s=0.2,
    breaker_cooldown_initial_s=5.0,
    breaker_cooldown_max_s=5.0,
)


class Stored:
    """Three blocks that a daemon has, and memory to load them into."""

    def __init__(self, client: AnyClient, *, payload_bytes: int = 256) -> None:
        self.client = client
        self.space: Namespace = namespace(payload_bytes=payload_bytes)
        self.hashes: list[BlockHash] = chain(3)
        self.blocks = payloads(self.space, 3)
        stored = client.put(self.space, self.hashes, self.blocks)
        assert stored.stored_count == 3, stored

    def load(self) -> tuple[list[BlockState], KvstoreError | None]:
        """States and error of a get, after checking that hits are right and nothing else was touched."""
        blank = b"\x55" * self.space.block_layout.payload_bytes
        memory = [bytearray(blank) for _ in self.hashes]
        loaded = self.client.get(self.space, self.hashes, memory)
        for state, found, right in zip(loaded.states, memory, self.blocks, strict=True):
            assert found == (right if state is HIT else blank), state
        return list(loaded.states), loaded.error


@pytest.fixture
def stored(connect: Connect, fake: FakeDaemon) -> Stored:
    return Stored(connect(fake.address))


# --- lies


def at(index: int, change: Callable[[ReadFrame], ReadFrame | bytes]) -> Callable[[list[ReadFrame]], list[Any]]:
    return lambda frames: [change(frame) if frame.block_index == index else frame for frame in frames]


def flipped(frame: ReadFrame) -> ReadFrame:
    damaged = bytearray(frame.data)
    damaged[len(damaged) // 2] ^= 0x10
    return ReadFrame(
        block_index=frame.block_index, block_state=HIT, size_bytes=frame.size_bytes, data=memoryview(damaged)
    )


def changed(**fields: Any) -> Callable[[ReadFrame], ReadFrame]:
    def change(frame: ReadFrame) -> ReadFrame:
        given = {name: getattr(frame, name) for name in ReadFrame.__dataclass_fields__}
        return ReadFrame(**(given | fields))

    return change


def test_a_block_that_was_damaged_on_the_way_is_a_miss_and_reported(stored: Stored, fake: FakeDaemon) -> None:
    fake.rewrites["ReadBlocks"] = at(1, flipped)
    states, error = stored.load()
    assert states == [HIT, CORRUPT, HIT]
    assert "checksum" in str(error)
    assert fake.calls[-1] == "VerifyBlocks"


def test_a_report_that_fails_changes_nothing(stored: Stored, fake: FakeDaemon) -> None:
    fake.rewrites["ReadBlocks"] = at(1, flipped)
    fake.fail(wire.VERIFY_BLOCKS, InternalError("boom"))
    assert stored.load()[0] == [HIT, CORRUPT, HIT]


def test_the_bytes_of_another_block_are_a_miss(stored: Stored, fake: FakeDaemon) -> None:
    fake.rewrites["ReadBlocks"] = lambda frames: [
        changed(block_index=place)(frame) for place, frame in enumerate([frames[1], frames[0], frames[2]])
    ]
    assert stored.load()[0] == [CORRUPT, CORRUPT, HIT]


def test_another_namespaces_block_is_a_miss(stored: Stored, fake: FakeDaemon) -> None:
    """Users' report: layout changed between writer and reader, and the cache hit anyway."""
    foreign = enveloped(namespace(layout="NHD"), stored.hashes[0], stored.blocks[0])
    fake.rewrites["ReadBlocks"] = at(0, changed(data=memoryview(foreign)))
    assert stored.load()[0] == [CORRUPT, HIT, HIT]


@pytest.mark.parametrize(
    "lie",
    [
        at(1, changed(block_index=7)),
        at(1, changed(block_index=0)),
        at(1, changed(size_bytes=1 << 40)),
        at(1, changed(size_bytes=1)),
        at(1, changed(offset_bytes=64)),
        at(1, lambda frame: changed(data=frame.data[:-1])(frame)),
        at(1, lambda frame: changed(data=frame.data[:0])(frame)),
        at(1, lambda _: b"\xff\xff\xff"),
        at(1, lambda frame: encode_read_frame(frame)[:-5]),
    ],
    ids=["index too high", "index twice", "size too large", "size too small", "offset", "short", "empty", "garbage",
         "cut off"],
)  # fmt: skip
def test_a_stream_that_lies_is_not_believed_from_there_on(stored: Stored, fake: FakeDaemon, lie: Any) -> None:
    fake.rewrites["ReadBlocks"] = lie
    states, error = stored.load()
    assert states == [HIT, MISS, MISS]
    assert isinstance(error, ProtocolError)
    del fake.rewrites["ReadBlocks"]
    assert stored.load() == ([HIT, HIT, HIT], None)


def test_a_stream_that_ends_too_early_leaves_misses(stored: Stored, fake: FakeDaemon) -> None:
    fake.rewrites["ReadBlocks"] = lambda frames: frames[:1]
    assert stored.load() == ([HIT, MISS, MISS], None)


def test_a_stream_that_breaks_keeps_what_came_whole(stored: Stored, fake: FakeDaemon) -> None:
    def breaks(frames: list[ReadFrame]) -> Any:
        yield frames[0]
        raise UnavailableError("the disk is gone")

    fake.rewrites["ReadBlocks"] = breaks
    states, error = stored.load()
    assert states == [HIT, MISS, MISS]
    assert isinstance(error, UnavailableError)
    assert str(error) == "the disk is gone"


def test_a_block_that_was_changed_while_being_put_is_not_stored(connect: Connect, fake: FakeDaemon) -> None:
    """Users' report: the store read a block before compute had written it."""
    client, space, hashes = connect(fake.address), namespace(), chain(1)

    def damage(response: Any) -> Any:
        for reservation in fake.reservations.values():
            reservation.data[200] ^= 1
        return response

    fake.rewrites["WriteBlocks"] = damage
    result = client.put(space, hashes, bytes(256))
    assert (result.states, result.error) == ((PutState.DROPPED,), None)
    assert client.lookup(space, hashes).states == (MISS,)


def test_memory_that_is_reused_before_a_put_has_returned_costs_the_block(connect: Connect, fake: FakeDaemon) -> None:
    """Same kind of fault, late in a put of several batches: wrong bytes must not be stored under the old hash."""
    client, space, hashes = connect(fake.address, config=replace(FAST, batch_count_max=1)), namespace(), chain(3)
    blocks = payloads(space, 3)
    memory = bytearray(b"".join(blocks))

    def overwrite(response: Any) -> Any:
        memory[512:] = b"\x55" * 256
        return response

    fake.rewrites["CommitBlocks"] = overwrite
    result = client.put(space, hashes, memory)
    assert result.states == (PutState.STORED, PutState.STORED, PutState.DROPPED)
    into = [bytearray(256) for _ in hashes]
    assert client.get(space, hashes, into).states == (HIT, HIT, MISS)
    assert into[:2] == blocks[:2]


# --- errors


@pytest.mark.parametrize("error", [CapacityError("full"), LayoutMismatchError("layout"), InternalError("bug")])
def test_errors_keep_their_kind_and_message_over_the_wire(
    connect: Connect, fake: FakeDaemon, error: KvstoreError
) -> None:
    client, space, hashes = connect(fake.address), namespace(), chain(2)
    fake.fail(wire.OPEN_NAMESPACE, error)
    found = client.lookup(space, hashes)
    assert found.states == (MISS, MISS)
    assert type(found.error) is type(error)
    assert str(error) in str(found.error)


@pytest.mark.parametrize("method", [wire.WRITE_BLOCKS, wire.COMMIT_BLOCKS], ids=["write", "commit"])
def test_a_put_that_fails_leaves_nothing_reserved(connect: Connect, fake: FakeDaemon, method: Any) -> None:
    client, space = connect(fake.address), namespace()
    fake.fail(method, InternalError("boom"))
    result = client.put(space, chain(3), bytes(3 * 256))
    assert result.states == (PutState.DROPPED,) * 3
    assert isinstance(result.error, InternalError)
    assert fake.reservations == {}
    assert client.lookup(space, chain(3)).matched_count == 0


def test_a_full_store_drops_the_rest_of_the_chain(connect: Connect, fake: FakeDaemon) -> None:
    client, space, hashes = connect(fake.address), namespace(), chain(4)
    fake.room_count = 2
    result = client.put(space, hashes, bytes(4 * 256))
    assert result.states == (PutState.STORED, PutState.STORED, PutState.DROPPED, PutState.DROPPED)
    assert result.error is None


def test_idempotent_calls_are_repeated_and_others_are_not(connect: Connect, fake: FakeDaemon) -> None:
    """Only what was certainly not processed may be sent twice when it takes something."""
    client, space, hashes = connect(fake.address), namespace(), chain(1)
    client.put(space, hashes, bytes(256))
    blip = UnavailableError("blip")
    fake.calls.clear()
    fake.fail(wire.LOOKUP_BLOCKS, blip, blip)
    assert client.lookup(space, hashes).matched_count == 1
    assert fake.count(wire.LOOKUP_BLOCKS) == 3
    fake.fail(wire.ACQUIRE_PREFIX, blip)
    assert isinstance(client.acquire(space, hashes).error, UnavailableError)
    assert fake.count(wire.ACQUIRE_PREFIX) == 1
    fake.fail(wire.RESERVE_BLOCKS, blip)
    assert isinstance(client.put(space, hashes, bytes(256)).error, UnavailableError)
    assert fake.count(wire.RESERVE_BLOCKS) == 1


# --- a slower tier


def test_what_would_be_there_too_late_is_left_out_of_the_matched_prefix(connect: Connect, fake: FakeDaemon) -> None:
    client, space, hashes = connect(fake.address), namespace(), chain(4)
    client.put(space, hashes[:3], bytes(3 * 256))
    fake.on_disk = set(hashes[1:3])
    found = client.lookup(space, hashes, recompute_s_per_block=0.001)
    assert found.states == (HIT, HIT, HIT, MISS)
    assert (found.matched_count, found.left_out_count, found.cut_reason) == (1, 2, CutReason.TOO_SLOW)
    with client.acquire(space, hashes, recompute_s_per_block=0.001) as lease:
        assert lease.states == (HIT, HIT, HIT, MISS)
        assert (lease.matched_count, lease.left_out_count, lease.cut_reason) == (1, 2, CutReason.TOO_SLOW)
        assert lease.renew()
    assert client.lookup(space, hashes).matched_count == 3


def test_prefetched_blocks_are_in_time_afterwards(connect: Connect, fake: FakeDaemon) -> None:
    client, space, hashes = connect(fake.address), namespace(), chain(4)
    client.put(space, hashes[:3], bytes(3 * 256))
    fake.on_disk = set(hashes[1:3])
    told = client.prefetch(space, hashes, budget_bytes=400)
    assert (told.in_memory_count, told.started_count, told.refused_count, told.missing_count) == (1, 1, 1, 1)
    assert client.lookup(space, hashes, recompute_s_per_block=0.001).matched_count == 2
    assert client.prefetch(space, hashes).started_count == 1
    assert client.lookup(space, hashes, recompute_s_per_block=0.001).matched_count == 3


def test_a_prefetch_that_fails_says_so_and_raises_nothing(connect: Connect, fake: FakeDaemon) -> None:
    client, space, hashes = connect(fake.address), namespace(), chain(2)
    fake.fail(wire.PREFETCH_BLOCKS, InternalError("boom"))
    told = client.prefetch(space, hashes)
    assert (told.started_count, told.missing_count) == (0, 2)
    assert isinstance(told.error, InternalError)
    fake.rewrites[wire.PREFETCH_BLOCKS.name] = lambda response: replace(response, missing_count=1)
    assert isinstance(client.prefetch(space, hashes).error, ProtocolError)


# --- nobody there, or nobody answering


def test_without_a_daemon_everything_is_a_miss(connect: Connect, fake: FakeDaemon) -> None:
    fake.close()
    client, space, hashes = connect(fake.address), namespace(), chain(2)
    for error in (
        client.lookup(space, hashes).error,
        client.get(space, hashes, bytearray(512)).error,
        client.put(space, hashes, bytes(512)).error,
        client.acquire(space, hashes).error,
        client.prefetch(space, hashes).error,
    ):
        assert isinstance(error, UnavailableError)
    with pytest.raises(UnavailableError):
        client.info()


@pytest.mark.parametrize("method", [wire.GET_STORE_INFO, wire.LOOKUP_BLOCKS], ids=["attach", "lookup"])
def test_a_hung_daemon_costs_one_deadline_and_then_nothing(connect: Connect, fake: FakeDaemon, method: Any) -> None:
    client, space, hashes = connect(fake.address, config=IMPATIENT), namespace(), chain(2)
    fake.hang(method)
    started_s = time.monotonic()
    assert isinstance(client.lookup(space, hashes).error, DeadlineExceededError)
    first_s = time.monotonic() - started_s
    assert 0.15 < first_s < 2.0
    started_s = time.monotonic()
    for _ in range(100):
        assert isinstance(client.lookup(space, hashes).error, UnavailableError)
        assert client.get(space, hashes, bytearray(512)).states == (MISS, MISS)
        assert client.put(space, hashes, bytes(512)).stored_count == 0
    assert time.monotonic() - started_s < 1.0
    assert "circuit open" in str(client.lookup(space, hashes).error)
    fake.resume(method.name)


@pytest.mark.parametrize(
    "method", [wire.READ_BLOCKS, wire.RESERVE_BLOCKS, wire.WRITE_BLOCKS, wire.COMMIT_BLOCKS], ids=lambda m: str(m.name)
)
def test_a_hang_on_the_data_path_ends_by_its_deadline(connect: Connect, fake: FakeDaemon, method: Any) -> None:
    client, space, hashes = connect(fake.address, config=IMPATIENT), namespace(), chain(2)
    assert client.lookup(space, hashes).error is None
    fake.hang(method)
    started_s = time.monotonic()
    result: Any = (
        client.get(space, hashes, bytearray(512))
        if method is wire.READ_BLOCKS
        else client.put(space, hashes, bytes(512))
    )
    assert time.monotonic() - started_s < 2.0
    assert isinstance(result.error, DeadlineExceededError)
    fake.resume(method.name)


def test_info_and_stats_ask_even_while_the_circuit_is_open(connect: Connect, fake: FakeDaemon) -> None:
    client, space, hashes = connect(fake.address, config=IMPATIENT), namespace(), chain(2)
    fake.hang(wire.LOOKUP_BLOCKS)
    client.lookup(space, hashes)
    assert "circuit open" in str(client.lookup(space, hashes).error)
    assert client.info().version == "fake"
    assert client.stats().block_count == 0
    fake.resume("LookupBlocks")


def test_the_circuit_closes_by_itself_once_the_daemon_answers(connect: Connect, fake: FakeDaemon) -> None:
    config = ClientConfig(control_timeout_s=0.2, breaker_cooldown_initial_s=0.05, breaker_cooldown_max_s=0.1)
    client, space, hashes = connect(fake.address, config=config), namespace(), chain(2)
    fake.hang(wire.LOOKUP_BLOCKS)
    assert client.lookup(space, hashes).error is not None
    fake.resume("LookupBlocks")
    deadline_s = time.monotonic() + 10
    while client.lookup(space, hashes).error is not None:
        assert time.monotonic() < deadline_s, "the client never came back"


# --- restarts


def test_after_a_restart_the_namespace_is_opened_again(stored: Stored, fake: FakeDaemon) -> None:
    """Users' reports: a restart went unnoticed; the engine never registered again."""
    fake.restart()
    assert stored.load() == ([MISS, MISS, MISS], None)
    assert stored.client.put(stored.space, stored.hashes, stored.blocks).stored_count == 3
    assert stored.load() == ([HIT, HIT, HIT], None)


def test_a_lease_from_before_a_restart_releases_nobody_elses(stored: Stored, fake: FakeDaemon) -> None:
    """Lease ids start again with the daemon. Users' report: a late release took another request's hold."""
    old = stored.client.acquire(stored.space, stored.hashes)
    assert old.matched_count == 3
    old_ids = set(fake.leases)
    fake.restart()
    stored.client.put(stored.space, stored.hashes, stored.blocks)
    new = [stored.client.acquire(stored.space, stored.hashes) for _ in range(8)]
    assert old_ids <= set(fake.leases), "the ids must meet again for this to test anything"
    assert not old.renew()
    old.release()
    assert all(lease.renew() for lease in new)


def test_a_put_whose_daemon_restarts_between_its_steps_stores_nothing(connect: Connect, fake: FakeDaemon) -> None:
    client, space, hashes = connect(fake.address), namespace(), chain(2)

    def restart(response: Any) -> Any:
        del fake.rewrites["ReserveBlocks"]
        fake.restart()
        return response

    fake.rewrites["ReserveBlocks"] = restart
    result = client.put(space, hashes, bytes(512))
    assert result.states == (PutState.DROPPED, PutState.DROPPED)
    assert client.put(space, hashes, bytes(512)).stored_count == 2


def test_closing_a_client_ends_the_calls_of_other_threads_as_misses(fake: FakeDaemon) -> None:
    client, space, hashes = Client(fake.address, config=FAST), namespace(), chain(1)
    assert client.lookup(space, hashes).error is None
    fake.hang(wire.LOOKUP_BLOCKS)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(client.lookup(space, hashes)))
    thread.start()
    fake.wait_for_call(wire.LOOKUP_BLOCKS, count=2)
    client.close()
    thread.join(10)
    assert isinstance(found[0].error, UnavailableError)
    fake.resume("LookupBlocks")


async def test_closing_an_async_client_ends_the_calls_of_other_tasks_as_misses(fake: FakeDaemon) -> None:
    client, space, hashes = AsyncClient(fake.address, config=FAST), namespace(), chain(1)
    assert (await client.lookup(space, hashes)).error is None
    fake.hang(wire.LOOKUP_BLOCKS)
    task = asyncio.create_task(client.lookup(space, hashes))
    await asyncio.to_thread(fake.wait_for_call, wire.LOOKUP_BLOCKS, count=2)
    await client.aclose()
    assert isinstance((await task).error, UnavailableError)
    fake.resume("LookupBlocks")


async def test_a_cancelled_task_is_cancelled_and_the_client_goes_on(fake: FakeDaemon) -> None:
    async with AsyncClient(fake.address, config=FAST) as client:
        space, hashes = namespace(), chain(1)
        assert (await client.lookup(space, hashes)).error is None
        fake.hang(wire.LOOKUP_BLOCKS)
        task = asyncio.create_task(client.lookup(space, hashes))
        await asyncio.to_thread(fake.wait_for_call, wire.LOOKUP_BLOCKS, count=2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        fake.resume("LookupBlocks")
        assert (await client.lookup(space, hashes)).error is None


@pytest.mark.parametrize(
    "method", [wire.RESERVE_BLOCKS, wire.WRITE_BLOCKS, wire.COMMIT_BLOCKS], ids=lambda method: str(method.name)
)
async def test_a_cancelled_put_ends_at_once_and_gives_back_what_it_reserved(fake: FakeDaemon, method: Any) -> None:
    """Left alone, reservations keep their share of the memory from everybody for half a minute."""
    async with AsyncClient(fake.address, config=FAST) as client:
        space, hashes = namespace(), chain(3)
        assert (await client.lookup(space, hashes)).error is None
        fake.hang(method)
        task = asyncio.create_task(client.put(space, hashes, bytes(3 * 256)))
        await asyncio.to_thread(fake.wait_for_call, method, count=1)
        task.cancel()
        started_s = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - started_s < 0.5
        if method is wire.RESERVE_BLOCKS:
            fake.resume(method.name)  # the answer, which alone names the reservations, comes after the cancellation
        await asyncio.to_thread(fake.wait_for_call, wire.ABORT_RESERVATIONS, count=1)
    assert fake.reservations == {}
    assert fake.blocks == {}
    if method is not wire.RESERVE_BLOCKS:
        fake.resume(method.name)


async def test_a_cancelled_put_at_a_daemon_that_hangs_holds_nobody_up(fake: FakeDaemon) -> None:
    client = AsyncClient(fake.address, config=IMPATIENT)
    fake.hang(wire.WRITE_BLOCKS)
    fake.hang(wire.ABORT_RESERVATIONS)
    task = asyncio.create_task(client.put(namespace(), chain(1), bytes(256)))
    await asyncio.to_thread(fake.wait_for_call, wire.WRITE_BLOCKS, count=1)
    task.cancel()
    started_s = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await task
    await client.aclose()
    assert time.monotonic() - started_s < 2.0
    fake.resume("WriteBlocks")
    fake.resume("AbortReservations")


class CountingExecutor(ThreadPoolExecutor):
    submitted_count = 0

    def submit(self, *arguments: Any, **named: Any) -> Any:
        self.submitted_count += 1
        return super().submit(*arguments, **named)


async def test_an_async_put_takes_the_checksums_of_large_blocks_off_the_event_loop(fake: FakeDaemon) -> None:
    executor = CountingExecutor()
    asyncio.get_running_loop().set_default_executor(executor)
    submitted_counts = []
    async with AsyncClient(fake.address, config=FAST) as client:
        for payload_bytes in (256, 4 << 20):
            space = namespace(payload_bytes=payload_bytes)
            assert (await client.put(space, chain(1), bytes(payload_bytes))).stored_count == 1
            submitted_counts.append(executor.submitted_count)
    assert submitted_counts == [0, 1]
