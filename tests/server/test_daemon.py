"""The daemon as a process: start, addresses, drain, refusals, takeover, and what stops it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from kvstore import messages as m
from kvstore import wire
from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore.messages import BlockState, CommitState, ReservationId, ReserveState
from kvstore.namespace import Namespace
from kvstore.wire import Method
from kvstore_server.config import load_config
from kvstore_server.daemon import Daemon
from kvstore_server.obs.metrics import SPECS
from tests.conftest import DaemonProcess
from tests.faults.raw_slab import RawSession
from tests.server.builders import ALICE, HUGE, SMALL, enveloped, packed, write_frames

LONG_S = 30.0
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
FREE_PORTS = ("--grpc-port", "0", "--metrics-port", "0", "--memory-capacity", "16MiB")


class Caller:
    """A synchronous client without any logic of its own."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)

    def call(self, method: Method[Any, Any], request: object) -> Any:
        stub = self.channel.unary_unary(method.path, method.encode_request, method.decode_response)
        return stub(request, timeout=LONG_S, wait_for_ready=True)

    def open(self, namespace: Namespace = SMALL) -> None:
        payload_bytes = namespace.block_layout.payload_bytes
        self.call(wire.OPEN_NAMESPACE, m.OpenNamespaceRequest(namespace=namespace, payload_bytes=payload_bytes))
        wait_until(self.is_ready)

    def is_ready(self) -> bool:
        """Whether the whole arena is in service."""
        stats = self.call(wire.GET_STORE_STATS, m.GetStoreStatsRequest())
        return bool(stats.ready_bytes == stats.capacity_bytes)

    def reserve(self, *numbers: int, namespace: Namespace = SMALL) -> tuple[list[int], list[ReservationId | None]]:
        request = m.ReserveBlocksRequest(
            namespace_id=namespace.id, owner_id=ALICE, block_hashes=packed(*numbers), reservation_s=30.0
        )
        response = self.call(wire.RESERVE_BLOCKS, request)
        return list(response.reserve_states), list(response.reservation_ids)

    def write(self, *blocks: tuple[ReservationId | None, bytes]) -> None:
        stub = self.channel.stream_unary(wire.WRITE_BLOCKS.path, wire.WRITE_BLOCKS.encode_request)
        stub(iter(write_frames(blocks)), timeout=LONG_S)

    def commit(self, *reservations: ReservationId | None) -> list[int]:
        ids = tuple(reservation for reservation in reservations if reservation)
        return list(
            self.call(wire.COMMIT_BLOCKS, m.CommitBlocksRequest(owner_id=ALICE, reservation_ids=ids)).commit_states
        )

    def put(self, *numbers: int, namespace: Namespace = SMALL) -> None:
        _, reservations = self.reserve(*numbers, namespace=namespace)
        blocks = [enveloped(number, namespace) for number in numbers]
        self.write(*zip(reservations, blocks, strict=True))
        assert set(self.commit(*reservations)) == {CommitState.COMMITTED}

    def reading(self, *numbers: int, namespace: Namespace = SMALL) -> Any:
        method = wire.READ_BLOCKS
        stub = self.channel.unary_stream(method.path, method.encode_request, method.decode_response)
        return stub(m.ReadBlocksRequest(namespace_id=namespace.id, block_hashes=packed(*numbers)), timeout=LONG_S)

    def lookup(self, *numbers: int) -> list[int]:
        request = m.LookupBlocksRequest(namespace_id=SMALL.id, block_hashes=packed(*numbers))
        return list(self.call(wire.LOOKUP_BLOCKS, request).block_states)

    def health(self, service: str = "") -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=LONG_S).status)


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def connect() -> Iterator[Callable[[str], Caller]]:
    callers: list[Caller] = []

    def connect(address: str) -> Caller:
        callers.append(Caller(address))
        return callers[-1]

    yield connect
    for caller in callers:
        caller.channel.close()


@pytest.fixture(scope="module")
def shared(start_daemon: Callable[..., DaemonProcess]) -> Iterator[DaemonProcess]:
    """One daemon for all tests that leave it as it is."""
    process = start_daemon()
    yield process
    process.kill()


def serve(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """`kvstore serve` that is expected to end by itself; `code` runs in its process first."""
    program = f"{code}\nfrom kvstore_client.cli import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", program, "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        env=ENVIRONMENT,
        check=False,
    )


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to pass"
        time.sleep(0.01)


def stop_in_background(daemon: DaemonProcess) -> Callable[[], int]:
    """Sends SIGTERM; the returned function waits for the exit code."""
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(daemon.stop()))
    thread.start()

    def exit_code() -> int:
        thread.join(LONG_S)
        return codes[0]

    return exit_code


# --- start and stop


def test_it_says_where_it_is_and_cleans_up_when_it_stops(
    tmp_path: Path, start_daemon: Callable[..., DaemonProcess]
) -> None:
    daemon = start_daemon()
    ready = daemon.log_path.parent / "ready.json"
    said = json.loads(ready.read_text())
    printed = [line for line in daemon.log_path.read_text().splitlines() if line.startswith('{"grpc_address"')]
    assert [json.loads(line) for line in printed] == [said]
    assert said == {
        "grpc_address": daemon.address,
        "unix_address": daemon.unix_address,
        "metrics_address": daemon.metrics_address,
        "pid": daemon.pid,
        "slab_address": f"unix:{daemon.slab_path}",
        "bulk_address": daemon.bulk_address,
    }
    path = Path(daemon.unix_address.removeprefix("unix:"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert daemon.stop() == 0
    assert not ready.exists()
    assert not path.exists()
    assert [entry.name for entry in ready.parent.iterdir()] == ["daemon.log"]


def test_both_addresses_serve_the_same_store(shared: DaemonProcess, connect: Callable[[str], Caller]) -> None:
    over_tcp, over_unix = connect(shared.address), connect(shared.unix_address)
    over_tcp.open()
    over_tcp.put(501)
    assert over_unix.lookup(501) == [BlockState.HIT]


def test_health_and_reflection_answer(shared: DaemonProcess, connect: Callable[[str], Caller]) -> None:
    caller = connect(shared.address)
    assert caller.health() == caller.health(wire.STORE_SERVICE) == SERVING
    stub = reflection_pb2_grpc.ServerReflectionStub(caller.channel)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=wire.STORE_SERVICE),
    ]
    listed, described = stub.ServerReflectionInfo(iter(requests), timeout=LONG_S)
    names = {service.name for service in listed.list_services_response.service}
    assert {wire.STORE_SERVICE, "grpc.health.v1.Health"} <= names
    assert b"CommitBlocksRequest" in b"".join(described.file_descriptor_response.file_descriptor_proto)


def test_every_documented_metric_is_exported(
    start_daemon: Callable[..., DaemonProcess], connect: Callable[[str], Caller], tmp_path: Path
) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    daemon = start_daemon("--memory-capacity", "64MiB", "--nvme-path", str(nvme), "--nvme-capacity", "256MiB")
    caller = connect(daemon.address)
    caller.open()
    caller.put(601, 602)
    caller.lookup(601, 602, 603)
    with (
        RawSession(daemon.slab_path),
        urllib.request.urlopen(f"http://{daemon.metrics_address}/metrics", timeout=LONG_S) as response,
    ):
        families = {family.name: family for family in text_string_to_metric_families(response.read().decode())}
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    for spec in SPECS:
        family = families[spec.name.removesuffix("_total")]
        assert family.documentation == spec.help
        assert {tuple(sorted(sample.labels)) for sample in family.samples} == {tuple(sorted(spec.labels))}
    assert samples["kvstore_store_capacity_bytes", "memory"] == 64 << 20
    assert samples["kvstore_store_capacity_bytes", "nvme"] == 256 << 20
    assert samples["kvstore_store_blocks", "memory"] >= 2
    assert samples["kvstore_store_lookup_blocks_total", "hit"] >= 2
    assert samples["kvstore_store_lookup_blocks_total", "miss"] >= 1
    assert samples["kvstore_slab_sessions",] >= 1
    assert samples["kvstore_slab_connections",] >= 2
    assert samples["kvstore_store_reservations",] == samples["kvstore_store_leases",] == 0
    assert "kvstore_store_build_info" in families
    assert "process_resident_memory_bytes" in families


def test_an_idle_daemon_is_small_beside_its_arena(shared: DaemonProcess) -> None:
    def resident_bytes(kind: str) -> int:
        status = Path(f"/proc/{shared.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith(f"{kind}:")]
        return int(line.split()[1]) << 10

    # The arena is shared memory and counts as RssShmem.
    assert resident_bytes("RssAnon") + resident_bytes("RssFile") <= 120 << 20
    assert "torch" not in {Path(entry.path).name.split(".")[0] for entry in psutil.Process(shared.pid).memory_maps()}


# --- drain


def test_sigterm_lets_a_write_that_has_begun_finish_and_admits_no_new_one(
    daemon: DaemonProcess, connect: Callable[[str], Caller]
) -> None:
    """faults.md, operations: "Graceful shutdown missing"."""
    caller = connect(daemon.address)
    caller.open()
    _, (reservation,) = caller.reserve(1)
    exit_code = stop_in_background(daemon)
    wait_until(lambda: caller.health() == NOT_SERVING)
    assert caller.health(wire.STORE_SERVICE) == NOT_SERVING
    assert caller.call(wire.GET_STORE_INFO, m.GetStoreInfoRequest()).draining
    assert caller.reserve(2) == ([ReserveState.DRAINING], [None])
    caller.write((reservation, enveloped(1)))
    assert caller.commit(reservation) == [CommitState.COMMITTED]
    assert exit_code() == 0


def test_sigterm_lets_a_stream_that_is_being_read_finish(
    daemon: DaemonProcess, connect: Callable[[str], Caller]
) -> None:
    caller = connect(daemon.address)
    caller.open(HUGE)
    numbers = range(1, 9)
    for number in numbers:
        caller.put(number, namespace=HUGE)
    frames = caller.reading(*numbers, namespace=HUGE)
    received = [bytearray() for _ in numbers]
    first = next(frames)
    received[first.block_index] += first.data
    exit_code = stop_in_background(daemon)
    wait_until(lambda: "draining" in daemon.log_path.read_text())
    for frame in frames:
        received[frame.block_index] += frame.data
    assert [bytes(block) for block in received] == [enveloped(number, HUGE) for number in numbers]
    assert exit_code() == 0


def test_a_drain_ends_after_its_grace_whatever_clients_do(
    start_daemon: Callable[..., DaemonProcess], tmp_path: Path, connect: Callable[[str], Caller]
) -> None:
    file = tmp_path / "kvstore.yaml"
    file.write_text("shutdown: {grace_s: 0.3}\n")
    daemon = start_daemon("--config", str(file))
    caller = connect(daemon.address)
    caller.open()
    caller.reserve(1)
    started_s = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - started_s < 5.0


def test_a_successor_that_starts_during_the_drain_keeps_its_socket(
    daemon: DaemonProcess, start_daemon: Callable[..., DaemonProcess], connect: Callable[[str], Caller]
) -> None:
    """A rolling restart: the old daemon must not take the new one's socket with it."""
    caller = connect(daemon.address)
    caller.open(HUGE)
    for number in range(1, 9):
        caller.put(number, namespace=HUGE)
    frames = caller.reading(*range(1, 9), namespace=HUGE)
    next(frames)
    exit_code = stop_in_background(daemon)
    path = Path(daemon.unix_address.removeprefix("unix:"))
    wait_until(lambda: not path.exists())
    successor = start_daemon("--socket-path", str(path))
    assert connect(daemon.unix_address).health() == SERVING
    assert len(list(frames)) > 0
    assert exit_code() == 0
    assert path.exists()
    later = connect(daemon.unix_address)
    assert later.health() == SERVING
    assert successor.stop() == 0


# --- takeover and refusal


def test_a_killed_daemons_socket_is_taken_over_and_its_store_is_empty(
    daemon: DaemonProcess, connect: Callable[[str], Caller]
) -> None:
    before = connect(daemon.unix_address)
    before.open()
    before.put(1)
    epoch = before.call(wire.GET_STORE_INFO, m.GetStoreInfoRequest()).epoch
    daemon.kill()
    assert Path(daemon.unix_address.removeprefix("unix:")).exists(), "a killed daemon cannot clean up"
    daemon.start()
    after = connect(daemon.unix_address)
    assert after.call(wire.GET_STORE_INFO, m.GetStoreInfoRequest()).epoch != epoch
    with pytest.raises(grpc.RpcError) as unknown:
        after.lookup(1)
    assert unknown.value.code() is grpc.StatusCode.FAILED_PRECONDITION  # type: ignore[attr-defined]


def run_here(**sections: dict[str, object]) -> None:
    """A daemon in this process that is expected to refuse to start."""
    grpc_section = {"port": 0, "socket_path": "", **sections.get("grpc", {})}
    metrics_section = {"port": 0, **sections.get("metrics", {})}
    flags = {"memory": {"capacity": "4MiB"}, "grpc": grpc_section, "metrics": metrics_section}
    config = load_config(file=None, flags=flags)

    async def run() -> None:
        async with asyncio.timeout(LONG_S):
            await Daemon(config).run()

    asyncio.run(run())


def test_a_second_daemon_on_the_same_socket_is_refused_and_leaves_the_first_alone(
    shared: DaemonProcess, connect: Callable[[str], Caller]
) -> None:
    path = Path(shared.unix_address.removeprefix("unix:"))
    result = serve(*FREE_PORTS, "--socket-path", str(path))
    assert result.returncode == 1
    assert f"another daemon serves {path}" in result.stderr
    assert "set grpc.socket_path" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert connect(shared.unix_address).health() == SERVING


def test_a_port_in_use_is_named_with_what_to_do_and_nothing_is_left_behind(
    shared: DaemonProcess, tmp_path: Path, connect: Callable[[str], Caller]
) -> None:
    port = int(shared.address.rpartition(":")[2])
    metrics_port = int(shared.metrics_address.rpartition(":")[2])
    path = tmp_path / "s"
    with pytest.raises(UnavailableError, match=rf"cannot listen on 127\.0\.0\.1:{port}: it is in use.*set grpc\.port"):
        run_here(grpc={"socket_path": path, "port": port})
    with pytest.raises(
        UnavailableError, match=rf"cannot serve metrics on 127\.0\.0\.1:{metrics_port}: .*set metrics\.port"
    ):
        run_here(grpc={"socket_path": path}, metrics={"port": metrics_port})
    assert list(tmp_path.iterdir()) == [], "a refused daemon left its socket behind"
    assert connect(shared.unix_address).health() == connect(shared.address).health() == SERVING


def test_what_is_in_the_way_of_the_socket_is_named_and_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(UnavailableError, match=f"{path} is in the way and is not a socket; remove it, or set"):
        run_here(grpc={"socket_path": path})
    assert path.read_text() == "data"


def test_a_socket_path_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match=r"set grpc\.socket_path"):
        run_here(grpc={"socket_path": tmp_path / "file" / "s"})
    with pytest.raises(InvalidArgumentError, match=r"grpc\.socket_path is .*allowed: a socket path of up to 107 bytes"):
        run_here(grpc={"socket_path": tmp_path / ("long" * 30)})


def test_a_port_in_use_is_one_sentence_without_a_line_of_grpcs_own(shared: DaemonProcess) -> None:
    port = shared.address.rpartition(":")[2]
    result = serve("--memory-capacity", "16MiB", "--metrics-port", "0", "--socket-path", "", "--grpc-port", port)
    assert result.returncode == 1
    assert result.stderr == (
        f"Error: cannot listen on 127.0.0.1:{port}: it is in use, perhaps by another daemon (`kvstore ping` tells); "
        "free it, or set grpc.port (0: any free port)\n"
    )


def test_a_ready_file_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    ready, path = tmp_path / "absent" / "ready.json", tmp_path / "s"
    result = serve(*FREE_PORTS, "--socket-path", str(path), "--ready-file", str(ready))
    assert result.returncode == 1
    assert f"cannot write the ready file {ready}" in result.stderr
    assert result.stdout == "", "it was announced all the same"
    assert not path.exists()


# --- what stops it


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(
            "from kvstore_server.rpc.service import StoreService\n"
            "def fail(self): raise RuntimeError('thrown once')\n"
            "StoreService.sweep = fail",
            id="sweep",
        ),
        pytest.param(
            "from kvstore_server.shm.arenas import Arenas\n"
            "def fail(self, slab): raise RuntimeError('thrown once')\n"
            "Arenas.prefault = fail",
            id="prefault",
        ),
    ],
)
def test_a_failed_background_task_ends_the_daemon_loudly(tmp_path: Path, code: str) -> None:
    """faults.md, leaks: "A background thread dies on one exception and memory is never freed again"."""
    path, ready = tmp_path / "s", tmp_path / "ready.json"
    result = serve(*FREE_PORTS, "--socket-path", str(path), "--ready-file", str(ready), code=code)
    assert result.returncode not in (0, 2)
    assert "RuntimeError: thrown once" in result.stderr
    assert not path.exists()
    assert not ready.exists()


def test_a_broken_invariant_ends_the_daemon_with_an_error(tmp_path: Path, connect: Callable[[str], Caller]) -> None:
    """A bug is no outcome: what is served after it might be wrong bytes, so there is no grace."""
    path = tmp_path / "s"
    code = (
        "from kvstore_server.core.store import StoreCore\n"
        "def fail(self, *_): raise AssertionError('release of free slot 7')\n"
        "StoreCore.lookup = fail\n"
        "from kvstore_client.cli import main\n"
        "main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "serve", *FREE_PORTS, "--socket-path", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith('{"grpc_address"')
            caller = connect(f"unix:{path}")
            caller.open()
            caller.reserve(1)  # nobody waits for this one after a bug
            started_s = time.monotonic()
            with pytest.raises(grpc.RpcError):
                caller.lookup(1)
            _, said = process.communicate(timeout=LONG_S)
        finally:
            process.kill()
    assert time.monotonic() - started_s < 5.0
    assert process.returncode not in (0, 2)
    assert "release of free slot 7" in said
    assert not path.exists()


def test_a_broken_invariant_in_a_task_that_nobody_waits_for_ends_the_daemon_too(tmp_path: Path) -> None:
    """Such as in a copy that goes on after its caller has gone."""

    def fail() -> None:
        raise AssertionError("release of free slot 9")

    async def run() -> None:
        ready = tmp_path / "ready.json"
        config = load_config(
            file=None,
            flags={
                "memory": {"capacity": "4MiB"},
                "grpc": {"port": 0, "socket_path": ""},
                "metrics": {"port": 0},
            },
        )
        async with asyncio.timeout(LONG_S):
            running = asyncio.create_task(Daemon(config).run(ready_file=ready))
            while not ready.exists():  # noqa: ASYNC110  (this is how a daemon says that it serves)
                await asyncio.sleep(0.01)
            asyncio.get_running_loop().call_soon(fail)
            await running

    with pytest.raises(AssertionError, match="release of free slot 9"):
        asyncio.run(run())
