"""The sidecar: its RPCs in this process, and itself as a process in front of a real daemon."""

from __future__ import annotations

import dataclasses
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import torch
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch import Tensor

from gpu_agent import AgentConfig
from gpu_agent.ask import ask_status
from gpu_agent.cli import agent as agent_command
from gpu_agent.device import open_device
from gpu_agent.enveloped import EnvelopedRows
from gpu_agent.metrics import METRICS, agent_registry
from gpu_agent.rpc import AgentServer
from gpu_agent.service import AgentService
from kvstore import messages as m
from kvstore import wire
from kvstore.envelope import verify_block
from kvstore.errors import (
    CapacityError,
    InvalidArgumentError,
    KvstoreError,
    NamespaceUnknownError,
    ProtocolError,
)
from kvstore.frames import StoreFrame
from kvstore.keys import BlockHash, pack_hashes
from kvstore.messages import BlockState
from kvstore.namespace import Namespace
from kvstore_client import Client
from kvstore_client.agent.address import AGENT_ADDRESS_VARIABLE, find_agent
from kvstore_client.agent.calls import call_unary
from kvstore_client.channel import FailedCall, translate
from tests.agent.fakes import NAMESPACE, FakeStore, chain, content, make_namespace
from tests.conftest import DaemonProcess

HIT, MISS = BlockState.HIT, BlockState.MISS
LARGE = make_namespace(head_dim=16384)  # 4 MiB blocks: three frames each


class Engine:
    """An engine's side of a sidecar."""

    def __init__(self, address: str, *, namespace: Namespace = NAMESPACE) -> None:
        self.channel = grpc.insecure_channel(address)
        self.namespace = namespace
        self.block_bytes = namespace.block_layout.payload_bytes

    def call(self, method: wire.Method[Any, Any], request: Any) -> Any:
        return call_unary(self.channel, method, request, timeout_s=10.0)

    def open(self) -> m.OpenAgentNamespaceResponse:
        return cast(
            "m.OpenAgentNamespaceResponse",
            self.call(wire.OPEN_AGENT_NAMESPACE, m.OpenAgentNamespaceRequest(namespace=self.namespace)),
        )

    def frames(
        self, hashes: Sequence[BlockHash], blocks: Tensor, *, parent_hash: BlockHash | None = None
    ) -> Iterator[StoreFrame]:
        rows = EnvelopedRows(namespace=self.namespace, row_count=1)
        for block_hash, block in zip(hashes, blocks, strict=True):
            rows.payloads(start_row=0, end_row=1)[0] = block
            rows.seal(0, block_hash=block_hash)
            for frame in rows.frames(0, block_index=0):
                yield StoreFrame(
                    block_hash=None if frame.offset_bytes else block_hash,
                    parent_hash=None if frame.offset_bytes else parent_hash,
                    offset_bytes=frame.offset_bytes,
                    data=frame.data,
                )
            parent_hash = block_hash

    def send(self, stream: Iterator[StoreFrame]) -> bytes:
        method = wire.STORE_BLOCKS
        call: Any = self.channel.stream_unary(method.path)
        try:
            return method.decode_response(call(map(method.encode_request, stream), timeout=10.0)).stored
        except grpc.RpcError as error:
            raise translate(cast("FailedCall", error), method_name=method.name) from error

    def load(self, hashes: Sequence[BlockHash]) -> tuple[list[BlockState], dict[int, bytes]]:
        method = wire.LOAD_BLOCKS
        call: Any = self.channel.unary_stream(method.path)
        states, blocks = [MISS] * len(hashes), dict[int, bytearray]()
        request = method.encode_request(m.LoadBlocksRequest(block_hashes=pack_hashes(hashes)))
        for message in call(request, timeout=10.0):
            frame = method.decode_response(message)
            states[frame.block_index] = frame.block_state
            if frame.block_state is HIT:
                block = blocks.setdefault(frame.block_index, bytearray(frame.size_bytes))
                block[frame.offset_bytes : frame.offset_bytes + len(frame.data)] = frame.data
        payloads = {
            index: bytes(_verified(block, namespace=self.namespace, block_hash=hashes[index]))
            for index, block in blocks.items()
        }
        return states, payloads

    def health(self) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=wire.AGENT_SERVICE), timeout=5.0).status)


def _verified(block: bytearray, *, namespace: Namespace, block_hash: BlockHash) -> memoryview:
    return verify_block(
        block,
        namespace_id=namespace.id,
        block_hash=block_hash,
        payload_bytes=namespace.block_layout.payload_bytes,
    )


@pytest.fixture
def bugs() -> list[AssertionError]:
    return []


@pytest.fixture
def idle_release_s(request: pytest.FixtureRequest) -> float:
    """That of the test, if it says so."""
    return float(getattr(request, "param", 300.0))


@pytest.fixture
def service(store: FakeStore, idle_release_s: float) -> Iterator[AgentService]:
    config = AgentConfig(vram_capacity_bytes=8 * LARGE.block_layout.payload_bytes)
    service = AgentService(config=config, client=store, idle_release_s=idle_release_s)
    yield service
    store.revive()
    service.close(flush_s=0.0)


@pytest.fixture
def address(service: AgentService, bugs: list[AssertionError]) -> Iterator[str]:
    server = AgentServer(service, on_bug=bugs.append)
    port = server.listen("127.0.0.1:0")
    server.start()
    server.set_serving(True)
    yield f"127.0.0.1:{port}"
    server.stop(grace_s=0)


@pytest.fixture
def engine(address: str) -> Iterator[Engine]:
    engine = Engine(address)
    yield engine
    engine.channel.close()


@pytest.mark.parametrize("namespace", [NAMESPACE, LARGE], ids=["one frame per block", "three frames per block"])
def test_blocks_go_in_and_come_back_verified(address: str, namespace: Namespace) -> None:
    engine, hashes = Engine(address, namespace=namespace), chain(12)
    opened = engine.open()
    assert opened.namespace_id == namespace.id
    blocks = content(hashes, block_bytes=namespace.block_layout.payload_bytes)
    assert engine.send(engine.frames(hashes, blocks)) == b"\1" * 12
    states, payloads = engine.load([*hashes, chain(1, seed=9)[0]])
    assert states == [HIT] * 12 + [MISS]
    for index in range(12):
        assert payloads[index] == blocks[index].numpy().tobytes()
    status = ask_status(address, timeout_s=5.0)
    assert status.used_bytes <= status.capacity_bytes
    engine.channel.close()


def test_chains_keep_their_parents_across_the_wire(engine: Engine, store: FakeStore, service: AgentService) -> None:
    engine.open()
    first, second = chain(3, seed=1), chain(3, seed=2)
    engine.send(engine.frames(first, content(first)))
    engine.send(engine.frames(second, content(second), parent_hash=first[1]))
    service.close(flush_s=5.0)
    assert store.parents == {
        first[0]: None, first[1]: first[0], first[2]: first[1],
        second[0]: first[1], second[1]: second[0], second[2]: second[1],
    }  # fmt: skip


def test_a_block_damaged_on_the_way_is_refused_alone_and_counted(engine: Engine, service: AgentService) -> None:
    engine.open()
    hashes = chain(3)

    def damage_second(stream: Iterator[StoreFrame]) -> Iterator[StoreFrame]:
        for frame in stream:
            data = bytearray(frame.data)
            data[500] ^= frame.block_hash == hashes[1]
            yield dataclasses.replace(frame, data=memoryview(data))

    assert engine.send(damage_second(engine.frames(hashes, content(hashes)))) == b"\1\0\1"
    states, _ = engine.load(hashes)
    assert states == [HIT, MISS, HIT]
    assert service.snapshot().received_corrupt_count == 1


def test_calls_before_a_namespace_is_open_and_for_another_one_say_what_is_wrong(engine: Engine, address: str) -> None:
    touch = m.TouchBlocksRequest(block_hashes=b"", step_count=1)
    with pytest.raises(NamespaceUnknownError, match="OpenAgentNamespace"):
        engine.call(wire.TOUCH_BLOCKS, touch)
    assert ask_status(address, timeout_s=5.0).device == "cpu"
    engine.open()
    engine.open()
    with pytest.raises(CapacityError, match=r"0B of 32\.0MiB of the agent .* --quota MODEL=SIZE"):
        engine.call(wire.OPEN_AGENT_NAMESPACE, m.OpenAgentNamespaceRequest(namespace=LARGE))


def test_streams_of_several_namespaces_say_which_one_they_mean(address: str, service: AgentService) -> None:
    hashes, quota_bytes = chain(3), 4 * LARGE.block_layout.payload_bytes
    engines = [Engine(address, namespace=namespace) for namespace in (NAMESPACE, LARGE)]
    for engine in engines:
        request = m.OpenAgentNamespaceRequest(namespace=engine.namespace, quota_bytes=quota_bytes)
        assert engine.call(wire.OPEN_AGENT_NAMESPACE, request).block_bytes == engine.block_bytes
    for engine in engines:
        blocks = content(hashes, block_bytes=engine.block_bytes)
        named = (
            dataclasses.replace(frame, namespace_id=engine.namespace.id) for frame in engine.frames(hashes, blocks)
        )
        assert engine.send(named) == b"\1" * 3
        touch = m.TouchBlocksRequest(block_hashes=pack_hashes(hashes), namespace_id=engine.namespace.id)
        assert engine.call(wire.TOUCH_BLOCKS, touch).step == 1
        find = m.FindBlocksRequest(
            namespace_id=engine.namespace.id, block_hashes=pack_hashes([*hashes, *chain(1, seed=1)])
        )
        assert engine.call(wire.FIND_BLOCKS, find).block_states == bytes([HIT, HIT, HIT, MISS])
        with pytest.raises(NamespaceUnknownError, match="2 namespaces are open"):
            engine.send(engine.frames(hashes, blocks))
        engine.channel.close()
    used = {one.namespace_id: one.used_bytes for one in service.snapshot().status.namespaces}
    assert used == {engine.namespace.id: 3 * engine.block_bytes for engine in engines}
    value = agent_registry(service.snapshot).get_sample_value
    label = {"namespace": LARGE.id.hex()[:16]}
    assert value("kvstore_agent_namespace_used_bytes", label) == used[LARGE.id]
    assert value("kvstore_agent_namespace_capacity_bytes", label) == quota_bytes


@pytest.mark.parametrize("idle_release_s", [0.0], indirect=True)
def test_a_namespace_that_gives_its_memory_away_keeps_its_counts(
    engine: Engine, address: str, service: AgentService, store: FakeStore
) -> None:
    engine.open()
    hashes = chain(3)
    engine.send(engine.frames(hashes, content(hashes)))
    other = Engine(address, namespace=LARGE)
    other.open()
    other.channel.close()
    status = service.snapshot().status
    assert [one.namespace_id for one in status.namespaces] == [LARGE.id]
    assert (service.snapshot().counters.stored_count, len(store.blocks), status.lost_count) == (3, 3, 0)


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        ([StoreFrame(data=memoryview(b"x"))], ProtocolError),
        ([StoreFrame(block_hash=BlockHash(b"short"), data=memoryview(b"x"))], ProtocolError),
        ([StoreFrame(block_hash=BlockHash(bytes(32)), data=memoryview(b"x"))], ProtocolError),
        ([StoreFrame(block_hash=BlockHash(bytes(32)))], ProtocolError),
        (
            [
                StoreFrame(block_hash=BlockHash(bytes(32)), data=memoryview(b"x")),
                StoreFrame(offset_bytes=9, data=memoryview(b"x")),
            ],
            ProtocolError,
        ),
        ([StoreFrame(block_hash=BlockHash(bytes(32)), data=memoryview(bytes(1 << 20)))], ProtocolError),
    ],
    ids=["no hash", "short hash", "cut off", "no data", "gap", "too long"],
)
def test_frames_that_break_the_contract_are_refused_with_a_reason(
    engine: Engine, stream: list[StoreFrame], error: type[KvstoreError]
) -> None:
    engine.open()
    with pytest.raises(error):
        engine.send(iter(stream))
    assert engine.send(iter([])) == b""


def test_a_request_with_a_broken_hash_list_is_an_invalid_argument(engine: Engine) -> None:
    engine.open()
    with pytest.raises(InvalidArgumentError, match="multiple of 32"):
        engine.call(wire.TOUCH_BLOCKS, m.TouchBlocksRequest(block_hashes=b"abc"))


def test_touching_passes_steps(engine: Engine) -> None:
    engine.open()
    hashes = chain(2)
    engine.send(engine.frames(hashes, content(hashes)))
    request = m.TouchBlocksRequest(block_hashes=pack_hashes(hashes), step_count=3)
    assert engine.call(wire.TOUCH_BLOCKS, request) == m.TouchBlocksResponse(step=3)


def test_a_bug_in_a_call_is_reported_and_stops_the_sidecar(
    engine: Engine, service: AgentService, bugs: list[AssertionError], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.open()
    (pool,) = service._pools.open_pools()

    def broken(*_: object) -> int:
        raise AssertionError("slot 3 holds two blocks")

    monkeypatch.setattr(pool.agent, "step", broken)
    with pytest.raises(KvstoreError, match="slot 3 holds two blocks"):
        engine.call(wire.TOUCH_BLOCKS, m.TouchBlocksRequest(block_hashes=b""))
    assert [str(bug) for bug in bugs] == ["slot 3 holds two blocks"]


def test_metrics_have_units_are_there_from_the_start_and_are_read_when_scraped(
    engine: Engine, service: AgentService
) -> None:
    registry = agent_registry(service.snapshot)
    value = registry.get_sample_value
    assert value("kvstore_agent_capacity_bytes") == 8 * LARGE.block_layout.payload_bytes
    assert value("kvstore_agent_migrator_up") == 1
    assert value("kvstore_agent_lost_blocks_total") == value("kvstore_agent_resident_blocks") == 0
    engine.open()
    hashes = chain(4)
    engine.send(engine.frames(hashes, content(hashes)))
    engine.load(hashes)
    assert value("kvstore_agent_resident_blocks") == 4
    assert value("kvstore_agent_loaded_blocks_total", {"source": "vram"}) == 4
    assert value("kvstore_agent_migrator_up") == 1
    assert all(spec.name.startswith("kvstore_agent_") and spec.help.endswith(".") for spec in METRICS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--grpc-host", "0.0.0.0"], "no authentication yet"),
        (["--device", "tpu"], "cpu, cuda, cuda:N"),
        (["--vram-capacity", "12 apples"], "--vram-capacity is '12 apples'; allowed: a size such as 512MiB"),
        (["--vram-capacity", "1000TiB"], "the memory of cpu"),
        (["--quota", "8GiB"], "--quota is '8GiB'; allowed: NAME=SIZE, such as my-model=8GiB"),
        (["--quota", "a=1MiB", "--quota", "a=2MiB"], "allowed: each name once"),
        (["--quota", "a=12 apples"], "allowed: a size such as 512MiB"),
        (["--vram-capacity", "1GiB", "--quota", "a=1GiB", "--quota", "b=1MiB"], "up to 1.0GiB in all"),
        (["--vram-capacity", "64MiB", "serve"], "--vram-capacity before `serve` would have no effect"),
        (["--device", "cpu", "--drain", "1", "status"], "--device, --drain before `status` would have no effect"),
        (["--log-level", "loud"], "'debug', 'info', 'warning', 'error'"),
        (["status", "--address", "nowhere"], "host:port"),
    ],
)
def test_wrong_flags_are_usage_errors_that_say_what_is_allowed(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(agent_command, arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_asking_where_no_agent_is_says_how_to_start_one(tmp_path: Path) -> None:
    result = CliRunner().invoke(agent_command, ["status", "--address", f"unix:{tmp_path}/none.sock", "--timeout", "5"])
    assert result.exit_code == 1
    assert "Start one with `kvstore agent`" in result.output


def test_asking_a_daemon_says_that_it_is_no_agent(daemon: DaemonProcess) -> None:
    result = CliRunner().invoke(agent_command, ["status", "--address", daemon.address])
    assert result.exit_code == 1
    assert f"Error: {daemon.address}: that is not an agent (a store daemon?)" in result.output


def test_the_help_of_status_names_the_variable() -> None:
    assert AGENT_ADDRESS_VARIABLE in CliRunner().invoke(agent_command, ["status", "--help"]).output


def test_only_a_socket_that_no_other_user_can_have_put_there_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(AGENT_ADDRESS_VARIABLE, raising=False)
    monkeypatch.setattr("kvstore_client.agent.address.socket_candidates", lambda: [tmp_path / "kvstore.sock"])
    path = tmp_path / "kvstore-agent.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert find_agent(None) == f"unix:{path}"
        monkeypatch.setattr("kvstore_client.address._is_trusted_owner", lambda _: False)
        assert find_agent(None) == "127.0.0.1:7452"


@pytest.mark.parametrize(
    ("device_count", "allowed"),
    [(0, "cpu; there is no CUDA device: "), (2, "cpu, cuda:0, cuda:1")],
)
def test_a_cuda_device_that_is_not_there_is_refused_with_what_is(
    device_count: int, allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: device_count)
    with pytest.raises(InvalidArgumentError, match=f"device is 'cuda:7'; allowed: {allowed}"):
        open_device("cuda:7")


def test_a_port_in_use_is_one_sentence_on_stderr_and_nothing_on_stdout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-c", "from kvstore_client.cli import main; main()", "agent", "serve"]
        command += ["--vram-capacity", "1MiB", "--grpc-port", str(port), "--metrics-port", "0", "--socket-path", ""]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == (
        f"Error: cannot listen on 127.0.0.1:{port}: it is in use, perhaps by another agent "
        "(`kvstore agent status` tells); free it, or set --grpc-port (0: any free port)\n"
    )


def test_the_command_line_and_its_help_load_no_torch() -> None:
    code = (
        "import sys; from gpu_agent.cli import agent\n"
        "try: agent(['status', '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_sidecar_process_serves_and_gives_the_daemon_its_pool_when_it_is_told_to_stop(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    ready_path = tmp_path / "ready.json"
    command = [sys.executable, "-c", "from kvstore_client.cli import main; main()", "agent", "--device", "cpu"]
    command += ["--vram-capacity", f"{8 * NAMESPACE.block_layout.payload_bytes}", "--store-address", daemon.address]
    command += ["--grpc-port", "0", "--metrics-port", "0", "--socket-path", str(tmp_path / "agent.sock")]
    process = subprocess.Popen([*command, "--ready-file", str(ready_path)], stdout=subprocess.PIPE)
    try:
        ready = _wait_ready(process, ready_path)
        assert Path(tmp_path / "agent.sock").stat().st_mode & 0o777 == 0o600
        engine, hashes = Engine(ready["unix_address"]), chain(20)
        assert engine.health() == health_pb2.HealthCheckResponse.SERVING
        engine.open()
        assert engine.send(engine.frames(hashes, content(hashes))) == b"\1" * 20
        states, payloads = engine.load(hashes)
        assert states == [HIT] * 20
        assert [payloads[index] for index in range(20)] == [row.numpy().tobytes() for row in content(hashes)]
        with urllib.request.urlopen(f"http://{ready['metrics_address']}/metrics", timeout=5) as response:
            assert b"kvstore_agent_migration_batches_total" in response.read()
        shown = CliRunner().invoke(agent_command, ["status", "--address", ready["grpc_address"], "--json"])
        status = json.loads(shown.output)
        assert status["peak_bytes"] <= status["capacity_bytes"]
        assert status["lost_count"] == 0
        engine.channel.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()
    assert not ready_path.exists()
    with Client(daemon.address) as client:
        into = torch.zeros((20, NAMESPACE.block_layout.payload_bytes), dtype=torch.uint8)
        assert client.get(NAMESPACE, hashes, into).matched_count == 20
    assert torch.equal(into, content(hashes))


def _wait_ready(process: subprocess.Popen[bytes], path: Path) -> dict[str, Any]:
    deadline_s = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, "the sidecar ended before it served"
        assert time.monotonic() < deadline_s, "the sidecar does not get ready"
        time.sleep(0.02)
    return cast("dict[str, Any]", json.loads(path.read_text()))
