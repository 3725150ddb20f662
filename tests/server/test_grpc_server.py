"""The service behind gRPC: errors, bugs, stalled peers and hostile ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore import messages as m
from kvstore import wire
from kvstore.errors import REASON_METADATA_KEY
from kvstore.frames import WriteFrame
from kvstore.keys import NamespaceId
from kvstore.messages import BlockState, CommitState, Epoch
from kvstore.namespace import Namespace
from kvstore.v1 import store_pb2
from kvstore.wire import Method, Streams
from kvstore_server.rpc.grpc_server import GrpcServer
from kvstore_server.rpc.service import StoreService
from kvstore_server.rpc.streams import OpenStreams
from kvstore_server.rpc.turns import Turns
from tests.server.builders import (
    ALICE,
    HUGE,
    SMALL,
    block_hash,
    enveloped,
    hashes,
    make_arenas,
    make_core,
    make_in_flight,
    packed,
    write_frames,
)

SLAB_BYTES = 16 << 20
STREAM_S_MAX = 0.4
METHODS: tuple[Method[Any, Any], ...] = (
    wire.GET_STORE_INFO,
    wire.GET_STORE_STATS,
    wire.OPEN_NAMESPACE,
    wire.LOOKUP_BLOCKS,
    wire.ACQUIRE_PREFIX,
    wire.RENEW_LEASES,
    wire.RELEASE_LEASES,
    wire.READ_BLOCKS,
    wire.RESERVE_BLOCKS,
    wire.WRITE_BLOCKS,
    wire.COMMIT_BLOCKS,
    wire.ABORT_RESERVATIONS,
    wire.VERIFY_BLOCKS,
)


class Rpc:
    """A served store and a channel to it, both in this loop."""

    def __init__(self, path: Path) -> None:
        self.arenas = make_arenas(slab_count=2, slab_bytes=SLAB_BYTES)
        self.core = make_core(slab_count=2, slab_bytes=SLAB_BYTES, namespaces=[SMALL, HUGE], headers=self.arenas)
        self.pool = ThreadPoolExecutor(1)
        self.in_flight = make_in_flight()
        self.service = StoreService(
            core=self.core,
            arenas=self.arenas,
            epoch=Epoch(b"e" * 16),
            copy_pool=self.pool,
            clock=asyncio.get_running_loop().time,
            in_flight=self.in_flight,
        )
        self.bugs: list[AssertionError] = []
        self._path = path

    async def start(self, *, stream_s_max: float = 30.0) -> None:
        self.streams = OpenStreams(
            Turns(self.in_flight), stream_s_max=stream_s_max, clock=asyncio.get_running_loop().time
        )
        self.server = GrpcServer(self.service, streams=self.streams, on_bug=self.bugs.append)
        self.server.listen(f"unix:{self._path}")
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"unix:{self._path}")

    async def close(self) -> None:
        await self.channel.close()
        await self.server.stop(grace_s=0)
        self.pool.shutdown()
        self.arenas.close()
        assert self.in_flight.total_bytes == 0
        self.in_flight.check_invariants()

    async def call(self, method: Method[Any, Any], request: object) -> Any:
        return method.decode_response(await self.call_raw(method, method.encode_request(request)))

    async def call_raw(self, method: Method[Any, Any], data: bytes) -> bytes:
        """The (last) answer to these bytes."""
        answer: bytes = b""
        match method.streams:
            case Streams.NEITHER:
                answer = await self.channel.unary_unary(method.path)(data, timeout=20)
            case Streams.REQUEST:
                answer = await self.channel.stream_unary(method.path)(iter([data]), timeout=20)
            case Streams.RESPONSE:
                async for message in self.channel.unary_stream(method.path)(data, timeout=20):
                    answer = message
        return answer

    async def write(self, frames: list[WriteFrame]) -> m.WriteBlocksResponse:
        messages = (wire.WRITE_BLOCKS.encode_request(frame) for frame in frames)
        answer = await self.channel.stream_unary(wire.WRITE_BLOCKS.path)(messages, timeout=20)
        return wire.WRITE_BLOCKS.decode_response(answer)

    async def put(self, *numbers: int, namespace: Namespace = SMALL) -> None:
        reserved = await self.call(wire.RESERVE_BLOCKS, reserve_request(*numbers, namespace=namespace))
        blocks = zip(reserved.reservation_ids, (enveloped(number, namespace) for number in numbers), strict=True)
        await self.write(write_frames(blocks))
        commit = m.CommitBlocksRequest(owner_id=ALICE, reservation_ids=reserved.reservation_ids)
        states = (await self.call(wire.COMMIT_BLOCKS, commit)).commit_states
        assert set(states) == {CommitState.COMMITTED}

    def is_idle(self) -> bool:
        return all(self.core.space.ref_count(place) == 1 for place in self.core._key_at)


@pytest.fixture
async def rpc(tmp_path: Path) -> AsyncIterator[Rpc]:
    rpc = Rpc(tmp_path / "s")
    yield rpc
    await rpc.close()
    rpc.core.check_invariants()


def lookup_request(*numbers: int, namespace_id: NamespaceId = SMALL.id) -> m.LookupBlocksRequest:
    return m.LookupBlocksRequest(namespace_id=namespace_id, block_hashes=packed(*numbers))


def reserve_request(*numbers: int, namespace: Namespace = SMALL) -> m.ReserveBlocksRequest:
    return m.ReserveBlocksRequest(
        namespace_id=namespace.id, owner_id=ALICE, block_hashes=packed(*numbers), reservation_s=30.0
    )


async def is_soon(condition: Callable[[], bool], *, within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  (what is waited for has no event)
            await asyncio.sleep(0.005)


async def read_to_the_end(reading: Any) -> None:
    while await reading.read() is not grpc.aio.EOF:
        pass


def reason_of(error: grpc.aio.AioRpcError) -> object:
    return dict(error.trailing_metadata() or ()).get(REASON_METADATA_KEY)


async def test_blocks_travel_there_and_back(rpc: Rpc) -> None:
    await rpc.start()
    await rpc.put(1, 2, namespace=HUGE)
    data = wire.READ_BLOCKS.encode_request(m.ReadBlocksRequest(namespace_id=HUGE.id, block_hashes=packed(2, 1)))
    received = [bytearray(), bytearray()]
    async for message in rpc.channel.unary_stream(wire.READ_BLOCKS.path)(data):
        frame = wire.READ_BLOCKS.decode_response(message)
        received[frame.block_index] += frame.data
    assert received == [enveloped(2, HUGE), enveloped(1, HUGE)]


@pytest.mark.parametrize(
    ("method", "request_", "status", "reason", "details"),
    [
        (
            wire.LOOKUP_BLOCKS,
            lookup_request(1, namespace_id=NamespaceId(b"u" * 32)),
            grpc.StatusCode.FAILED_PRECONDITION,
            "NAMESPACE_UNKNOWN",
            "has not been opened",
        ),
        (
            wire.OPEN_NAMESPACE,
            m.OpenNamespaceRequest(namespace=SMALL, payload_bytes=1),
            grpc.StatusCode.FAILED_PRECONDITION,
            "LAYOUT_MISMATCH",
            "payload_bytes is 1; namespace small gives 1024",
        ),
        (
            wire.RELEASE_LEASES,
            m.ReleaseLeasesRequest(owner_id=m.OwnerId(b"x"), lease_ids=()),
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_ARGUMENT",
            "owner_id is '1 bytes'; allowed: 16 bytes",
        ),
    ],
)
async def test_errors_travel_as_a_status_with_a_reason(
    rpc: Rpc, method: Method[Any, Any], request_: object, status: grpc.StatusCode, reason: str, details: str
) -> None:
    await rpc.start()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await rpc.call(method, request_)
    assert refused.value.code() is status
    assert reason_of(refused.value) == reason
    assert details in str(refused.value.details())


async def test_an_unforeseen_exception_ends_one_call_and_nothing_else(rpc: Rpc) -> None:
    async def fail(_: object, __: object) -> object:
        raise RuntimeError("secret detail")

    rpc.service.get_store_stats = fail  # type: ignore[method-assign, assignment]
    await rpc.start()
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await rpc.call(wire.GET_STORE_STATS, m.GetStoreStatsRequest())
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    assert reason_of(failed.value) == "INTERNAL"
    assert failed.value.details() == "RuntimeError in GetStoreStats; see the daemon's log"
    assert (await rpc.call(wire.GET_STORE_INFO, m.GetStoreInfoRequest())).protocol_version == 1
    assert rpc.bugs == []


async def test_a_broken_invariant_is_reported_to_the_caller_and_to_the_daemon(rpc: Rpc) -> None:
    async def fail(_: object, __: object) -> object:
        raise AssertionError("release of free slot 7")

    rpc.service.lookup_blocks = fail  # type: ignore[method-assign, assignment]
    await rpc.start()
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await rpc.call(wire.LOOKUP_BLOCKS, lookup_request(1))
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    assert "release of free slot 7" in str(failed.value.details())
    assert [str(bug) for bug in rpc.bugs] == ["release of free slot 7"]


async def test_a_reader_that_stops_reading_is_cut_off_and_its_blocks_are_free_again(rpc: Rpc) -> None:
    """faults.md, hangs: a peer that is stopped in mid-stream must not hold blocks for ever."""
    await rpc.start()
    await rpc.put(1, 2, 3, 4, namespace=HUGE)
    rpc.streams.stream_s_max = STREAM_S_MAX  # only now: on a busy machine 16 MiB may take longer
    data = wire.READ_BLOCKS.encode_request(m.ReadBlocksRequest(namespace_id=HUGE.id, block_hashes=packed(1, 2, 3, 4)))
    stalled = rpc.channel.unary_stream(wire.READ_BLOCKS.path)(data)
    assert await stalled.read() is not grpc.aio.EOF
    assert not rpc.is_idle()
    await is_soon(rpc.is_idle, within_s=STREAM_S_MAX + 5.0)
    assert rpc.core._evict(1 << 40) == 4
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await read_to_the_end(stalled)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert reason_of(late.value) == "DEADLINE_EXCEEDED"


async def test_a_writer_that_stops_writing_is_cut_off_and_its_reservations_are_given_up(rpc: Rpc) -> None:
    await rpc.start(stream_s_max=STREAM_S_MAX)
    reserved = await rpc.call(wire.RESERVE_BLOCKS, reserve_request(1))
    (frame,) = write_frames([(reserved.reservation_ids[0], enveloped(1)[:500])])
    stalled = rpc.channel.stream_unary(wire.WRITE_BLOCKS.path)()
    await stalled.write(wire.WRITE_BLOCKS.encode_request(frame))
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await stalled
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert rpc.core.reservation_count == 0
    assert rpc.core.space.used_bytes == 0


async def test_a_reader_that_goes_away_frees_its_blocks(rpc: Rpc) -> None:
    await rpc.start()
    await rpc.put(1, 2, 3, 4, namespace=HUGE)
    data = wire.READ_BLOCKS.encode_request(m.ReadBlocksRequest(namespace_id=HUGE.id, block_hashes=packed(1, 2, 3, 4)))
    reading = rpc.channel.unary_stream(wire.READ_BLOCKS.path)(data)
    await reading.read()
    assert not rpc.is_idle()
    reading.cancel()
    await is_soon(rpc.is_idle)


async def test_clients_on_one_socket_have_a_share_each(rpc: Rpc) -> None:
    """faults.md, hangs: a peer that takes all it can get must not keep others waiting."""
    await rpc.start()
    await rpc.put(1, 2, 3, 4, namespace=HUGE)
    data = wire.READ_BLOCKS.encode_request(m.ReadBlocksRequest(namespace_id=HUGE.id, block_hashes=packed(1, 2, 3, 4)))

    def read_as(name: str) -> Any:
        metadata = ((wire.CLIENT_METADATA_KEY, name),)
        return rpc.channel.unary_stream(wire.READ_BLOCKS.path)(data, metadata=metadata, timeout=20)

    greedy = [read_as("greedy") for _ in range(4)]  # each may hold 10 MiB, and one client 32 MiB
    await is_soon(lambda: rpc.in_flight.waiting_count == 1)
    await read_to_the_end(read_as("modest"))
    assert rpc.in_flight.waiting_count == 1
    await asyncio.gather(*(read_to_the_end(reading) for reading in greedy))
    assert rpc.in_flight.total_bytes == 0


async def test_a_writer_that_goes_away_gives_its_reservations_up(rpc: Rpc) -> None:
    await rpc.start()
    reserved = await rpc.call(wire.RESERVE_BLOCKS, reserve_request(1, 2))
    blocks = zip(reserved.reservation_ids, (enveloped(1), enveloped(2)[:500]), strict=True)
    writing = rpc.channel.stream_unary(wire.WRITE_BLOCKS.path)()
    for frame in write_frames(blocks):
        await writing.write(wire.WRITE_BLOCKS.encode_request(frame))
    await is_soon(lambda: rpc.core.counters.written_bytes == len(enveloped(1)) + 500)
    writing.cancel()
    await is_soon(lambda: rpc.core.reservation_count == 0)
    assert rpc.core.space.used_bytes == 0


async def test_a_frame_over_the_limit_ends_the_stream_and_its_reservations(rpc: Rpc) -> None:
    await rpc.start()
    reserved = await rpc.call(wire.RESERVE_BLOCKS, reserve_request(1, namespace=HUGE))
    reservation = reserved.reservation_ids[0]
    first = WriteFrame(reservation_id=reservation, owner_id=ALICE, data=memoryview(b"x"))
    large = WriteFrame(reservation_id=reservation, data=memoryview(bytes(m.FRAME_DATA_BYTES_MAX + 1)))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await rpc.write([first, large])
    assert reason_of(refused.value) == "PROTOCOL"
    assert rpc.core.reservation_count == 0


async def test_the_largest_allowed_requests_fit_through_grpc(rpc: Rpc) -> None:
    await rpc.start()
    batch = b"".join(number.to_bytes(32, "big") for number in range(m.BATCH_COUNT_MAX))
    request = m.LookupBlocksRequest(namespace_id=SMALL.id, block_hashes=batch)
    answer = await rpc.call(wire.LOOKUP_BLOCKS, request)
    assert answer.block_states == bytes([BlockState.MISS]) * m.BATCH_COUNT_MAX
    reserve = m.ReserveBlocksRequest(
        namespace_id=SMALL.id, owner_id=ALICE, parent_hash=block_hash(1 << 20), block_hashes=batch, reservation_s=30.0
    )
    reserved = await rpc.call(wire.RESERVE_BLOCKS, reserve)
    abort = m.AbortReservationsRequest(
        owner_id=ALICE, reservation_ids=tuple(number for number in reserved.reservation_ids if number)
    )
    assert (await rpc.call(wire.ABORT_RESERVATIONS, abort)).aborted_count == 2 * SLAB_BYTES // 4096
    assert rpc.core.space.used_bytes == 0


# --- hostile peers

_STATUSES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INTERNAL,  # with the reason PROTOCOL
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


async def outcome_of(rpc: Rpc, method: Method[Any, Any], data: bytes) -> tuple[grpc.StatusCode, object]:
    try:
        await rpc.call_raw(method, data)
    except grpc.aio.AioRpcError as error:
        return error.code(), reason_of(error)
    return grpc.StatusCode.OK, None


def _field(number: int) -> st.SearchStrategy[bytes]:
    """One protobuf field with this number and any content."""
    varint = st.integers(0, 2**64 - 1).map(lambda value: bytes([number << 3]) + _varint(value))
    text = st.binary(max_size=80).map(lambda value: bytes([number << 3 | 2]) + _varint(len(value)) + value)
    known = st.sampled_from([SMALL.id, ALICE, packed(1), packed(1, 2), SMALL.encode()]).map(
        lambda value: bytes([number << 3 | 2]) + _varint(len(value)) + value
    )
    return st.one_of(varint, text, known)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


_messages = st.one_of(
    st.binary(max_size=200),
    st.lists(st.integers(1, 15).flatmap(_field), max_size=6).map(b"".join),
)


async def test_garbage_sent_to_every_rpc_is_refused_and_harms_nobody(rpc: Rpc) -> None:
    await rpc.start()
    await rpc.put(1)
    chance = random.Random(7)
    for method in METHODS:
        for size_bytes in (0, 1, 7, 64, 1000, 100_000):
            status, reason = await outcome_of(rpc, method, chance.randbytes(size_bytes))
            assert status in _STATUSES, f"{method.name}: {status}"
            assert status is not grpc.StatusCode.INTERNAL or reason == "PROTOCOL", f"{method.name} failed on garbage"
    assert rpc.bugs == []
    assert (await rpc.call(wire.LOOKUP_BLOCKS, lookup_request(1))).matched_count == 1


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.lists(st.tuples(st.sampled_from(METHODS), _messages), min_size=10, max_size=40))
def test_random_messages_never_meet_a_bug(tmp_path: Path, batch: list[tuple[Method[Any, Any], bytes]]) -> None:
    async def attack() -> None:
        rpc = Rpc(tmp_path / "s")
        try:
            await rpc.start()
            outcomes = await asyncio.gather(*(outcome_of(rpc, method, data) for method, data in batch))
            for (method, data), (status, reason) in zip(batch, outcomes, strict=True):
                assert status in _STATUSES, f"{method.name}({data!r}): {status}"
                assert status is not grpc.StatusCode.INTERNAL or reason == "PROTOCOL", f"{method.name}({data!r})"
            assert rpc.bugs == []
            rpc.core.check_invariants()
        finally:
            await rpc.close()

    asyncio.run(attack())


async def test_durations_from_the_edge_of_protobuf_are_refused(rpc: Rpc) -> None:
    await rpc.start()
    await rpc.put(1)
    for seconds, nanos in ((-1, 0), (0, -1), (2**62, 0), (0, 2**31 - 1), (-(2**62), 0), (10**12, 999_999_999)):
        request = store_pb2.LookupBlocksRequest(namespace_id=SMALL.id, block_hashes=packed(1))
        request.wait_duration.seconds, request.wait_duration.nanos = seconds, nanos
        status, _ = await outcome_of(rpc, wire.LOOKUP_BLOCKS, request.SerializeToString())
        is_allowed = 0 <= seconds + nanos / 1e9 <= m.WAIT_S_MAX
        assert status is (grpc.StatusCode.OK if is_allowed else grpc.StatusCode.INVALID_ARGUMENT)


async def test_claimed_parents_that_form_a_ring_do_not_keep_blocks_for_ever(rpc: Rpc) -> None:
    """A caller may claim any parent; what it wrote must still be able to leave."""
    await rpc.start()
    for first, second in ((1, 2), (2, 3), (3, 1)):
        request = m.ReserveBlocksRequest(
            namespace_id=SMALL.id,
            owner_id=ALICE,
            parent_hash=block_hash(first),
            block_hashes=packed(second),
            reservation_s=30.0,
        )
        reserved = await rpc.call(wire.RESERVE_BLOCKS, request)
        await rpc.write(write_frames([(reserved.reservation_ids[0], enveloped(second))]))
        await rpc.call(
            wire.COMMIT_BLOCKS, m.CommitBlocksRequest(owner_id=ALICE, reservation_ids=reserved.reservation_ids)
        )
    assert rpc.core.lookup(SMALL.id, hashes(1, 2, 3)).matched_count == 3
    assert rpc.core._evict(1 << 40) == 3
