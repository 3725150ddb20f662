"""Data streams of a sidecar whose peers stall: they are cut off, and cost nobody else an answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from gpu_agent import AgentConfig
from gpu_agent.ask import ask_status
from gpu_agent.rpc import AgentServer
from gpu_agent.service import AgentService
from gpu_agent.streams import Stream, StreamGate
from kvstore import messages as m
from kvstore import wire
from kvstore.errors import UnavailableError
from kvstore.keys import pack_hashes
from kvstore_client.agent.calls import call_unary
from tests.agent.fakes import FakeStore, chain, content, make_namespace
from tests.agent.test_service import Engine

LARGE = make_namespace(head_dim=16384)  # 4 MiB blocks: more than a connection buffers for a peer that does not read
STREAM_COUNT_MAX = 16
IDLE_S_MAX = 1.0
LONG_S = 20.0

Start = Callable[..., str]


@pytest.fixture
def start(store: FakeStore) -> Iterator[Start]:
    with ExitStack() as parts:

        def start(**limits: float) -> str:
            config = AgentConfig(vram_capacity_bytes=8 * LARGE.block_layout.payload_bytes)
            service = AgentService(config=config, client=store)
            parts.callback(service.close, flush_s=0.0)
            server = AgentServer(service, on_bug=lambda _: None, **limits)
            port = server.listen("127.0.0.1:0")
            server.start()
            server.set_serving(True)
            parts.callback(server.stop, grace_s=0)
            return f"127.0.0.1:{port}"

        yield start


@pytest.fixture
def silence() -> Iterator[Iterator[bytes]]:
    """Messages of a peer that sends none; ends with the test, or gRPC's thread would wait on."""
    is_over = threading.Event()

    class Silence:
        def __iter__(self) -> Iterator[bytes]:
            return self

        def __next__(self) -> bytes:
            is_over.wait(60)
            raise StopIteration

    yield Silence()
    is_over.set()


@pytest.fixture
def channel_to() -> Iterator[Callable[[str], grpc.Channel]]:
    with ExitStack() as parts:

        def connect(address: str) -> grpc.Channel:
            # Channels with equal options share a connection, and a stalled reader blocks the others on it.
            channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
            parts.callback(channel.close)
            return channel

        yield connect


def store_nothing(channel: grpc.Channel, silence: Iterator[bytes]) -> Any:
    return channel.stream_unary(wire.STORE_BLOCKS.path).future(silence)


def load_unread(channel: grpc.Channel) -> Any:
    request = wire.LOAD_BLOCKS.encode_request(m.LoadBlocksRequest(block_hashes=pack_hashes(chain(4))))
    return channel.unary_stream(wire.LOAD_BLOCKS.path)(request)


def open_and_fill(address: str) -> None:
    engine = Engine(address, namespace=LARGE)
    engine.open()
    hashes = chain(4)
    assert (
        engine.send(engine.frames(hashes, content(hashes, block_bytes=LARGE.block_layout.payload_bytes))) == b"\1" * 4
    )
    engine.channel.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to pass"
        time.sleep(0.02)


def all_places_are_taken(channel: grpc.Channel) -> bool:
    call: Any = channel.stream_unary(wire.STORE_BLOCKS.path).future(iter(()), timeout=LONG_S)
    if call.exception() is None:
        return False
    assert call.code() is grpc.StatusCode.UNAVAILABLE, call.details()
    assert "16 streams at a time" in call.details()
    return True


@pytest.mark.parametrize("kind", ["writers that send nothing", "readers that do not read"])
def test_stalled_streams_leave_health_status_and_short_calls_answering(
    kind: str, start: Start, silence: Iterator[bytes], channel_to: Callable[[str], grpc.Channel]
) -> None:
    """faults.md, hangs: sixteen stalled engines, and the agent answers nobody, its health included."""
    address = start(stream_idle_s_max=60.0)
    open_and_fill(address)
    stalled = channel_to(address)
    calls = [
        store_nothing(stalled, silence) if kind.startswith("writers") else load_unread(stalled)
        for _ in range(2 * STREAM_COUNT_MAX)
    ]
    channel = channel_to(address)
    wait_until(lambda: all_places_are_taken(channel))
    started_s = time.monotonic()
    health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=LONG_S)
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert ask_status(address, timeout_s=LONG_S).resident_count > 0
    touch = m.TouchBlocksRequest(block_hashes=pack_hashes(chain(4)), step_count=1)
    assert call_unary(channel, wire.TOUCH_BLOCKS, touch, timeout_s=LONG_S) == m.TouchBlocksResponse(step=1)
    assert time.monotonic() - started_s < 5.0
    for call in calls:
        call.cancel()
    wait_until(lambda: not all_places_are_taken(channel))


@pytest.mark.parametrize("kind", ["writers that send nothing", "readers that do not read"])
def test_a_peer_that_stalls_is_cut_off_and_its_place_is_free_again(
    kind: str, start: Start, silence: Iterator[bytes], channel_to: Callable[[str], grpc.Channel]
) -> None:
    address = start(stream_idle_s_max=IDLE_S_MAX)
    open_and_fill(address)
    stalled, channel = channel_to(address), channel_to(address)
    with capture_logs() as logs:
        calls = [
            store_nothing(stalled, silence) if kind.startswith("writers") else load_unread(stalled)
            for _ in range(STREAM_COUNT_MAX)
        ]
        wait_until(lambda: [entry["event"] for entry in logs] == ["stream_cut"] * STREAM_COUNT_MAX)
    wait_until(lambda: not all_places_are_taken(channel))
    if kind.startswith("writers"):
        assert all(call.code() is grpc.StatusCode.CANCELLED for call in calls)


def test_time_that_the_agent_takes_itself_is_no_stall() -> None:
    stream = Stream(cancel=lambda: None)
    received = stream.received(["frame"])
    next(received)
    assert stream.waiting_since_s is None
    assert list(received) == []
    assert stream.waiting_since_s is None
    sent = stream.sent(["frame"])
    next(sent)
    assert stream.waiting_since_s is not None
    assert list(sent) == []
    assert stream.waiting_since_s is None


def test_a_stream_that_is_too_old_is_cut_off_however_busy_it_is() -> None:
    is_cut = threading.Event()
    gate = StreamGate(count_max=1, idle_s_max=60.0, age_s_max=0.1)
    gate.start()
    with gate.admitted(is_cut.set):
        with pytest.raises(UnavailableError, match="1 streams at a time"), gate.admitted(is_cut.set):
            pass
        assert is_cut.wait(LONG_S)
    with gate.admitted(is_cut.set):
        pass
    gate.stop()
    gate.stop()
