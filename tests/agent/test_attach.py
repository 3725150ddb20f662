"""Engines beside a sidecar: they copy blocks into and out of its pool themselves, die, hang, and see it die."""

from __future__ import annotations

import dataclasses
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import torch

from gpu_agent import AgentConfig, PagedCache
from gpu_agent.attach import AttachedAgent
from gpu_agent.attach.listener import AttachListener
from gpu_agent.rpc import AgentServer
from gpu_agent.service import AgentService
from kvstore import messages as m
from kvstore.agent_attach import AttachHello, AttachWelcome
from kvstore.errors import InvalidArgumentError
from kvstore.keys import BlockHash
from kvstore.messages import BlockState, OwnerId, SlotGrant
from kvstore.namespace import Namespace
from kvstore_client import Client
from kvstore_client.agent.client import AgentClient, AgentClientConfig
from tests.agent.fakes import BLOCK_BYTES, NAMESPACE, FakeStore, chain, content
from tests.conftest import DaemonProcess

HIT, MISS = BlockState.HIT, BlockState.MISS
OTHER = dataclasses.replace(NAMESPACE, weights_revision="r2")
SLOT_COUNT = 64
LONG_S = 20.0
QUICK = AgentClientConfig(control_timeout_s=0.5, cooldown_initial_s=0.01, cooldown_max_s=0.05, refused_pause_s=0.01)


class Clock:
    """Stands still until it is told otherwise."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Sidecar:
    """In this process, at a unix socket, with a clock of its own for what it grants."""

    def __init__(self, path: Path, store: FakeStore, clock: Clock, **settings: object) -> None:
        config = AgentConfig(vram_capacity_bytes=SLOT_COUNT * BLOCK_BYTES, room_wait_s=0.2)
        self.service = AgentService(config=config, client=store, clock=clock, **settings)  # type: ignore[arg-type]
        self.address = f"unix:{path}"
        self.bugs: list[AssertionError] = []
        self.service.attach_socket = f"{path}.attach"
        self.listener = AttachListener(
            self.service.share_of, on_tick=self.service.expire, on_bug=self.bugs.append, patience_s=0.2
        )
        self.listener.listen(f"{self.address}.attach")
        self.listener.start()
        self.server = AgentServer(self.service, on_bug=self.bugs.append)
        self.server.listen(self.address)
        self.server.start()

    def close(self) -> None:
        self.listener.stop()
        self.server.stop(grace_s=0)
        Path(self.service.attach_socket).unlink(missing_ok=True)
        assert not self.bugs
        self.service.check_invariants()
        self.service.close(flush_s=0.0)

    def granted_count(self) -> int:
        return sum(one.granted_count for one in self.service.snapshot().status.namespaces)

    def session_count(self) -> int:
        return sum(one.session_count for one in self.service.snapshot().status.namespaces)


Start = Callable[..., Sidecar]


@pytest.fixture(scope="module")
def daemon(start_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    """Of all tests here; nothing happens to it."""
    return start_daemon()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def start(store: FakeStore, clock: Clock, tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as parts:

        def start(**settings: object) -> Sidecar:
            sidecar = Sidecar(tmp_path / "agent.sock", store, clock, **settings)
            parts.callback(sidecar.close)
            parts.callback(store.revive)
            return sidecar

        yield start


@pytest.fixture
def sidecar(start: Start) -> Sidecar:
    return start()


@pytest.fixture
def client(sidecar: Sidecar) -> Iterator[AgentClient]:
    client = AgentClient(sidecar.address)
    yield client
    client.close()


@pytest.fixture
def agent(sidecar: Sidecar) -> Iterator[AttachedAgent]:
    with AttachedAgent(NAMESPACE, sidecar.address) as agent:
        yield agent


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline_s, "it does not come about"
        time.sleep(0.005)


def stop(process: subprocess.Popen[str]) -> None:
    """Until all of its threads stand still."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


def loaded(agent: AttachedAgent, hashes: list[BlockHash]) -> tuple[BlockState, ...]:
    """And proves that every HIT has the right bytes."""
    into = torch.zeros((len(hashes), BLOCK_BYTES), dtype=torch.uint8)
    states = agent.load(hashes, into)
    for state, row, right in zip(states, into, content(hashes), strict=True):
        assert state is not HIT or torch.equal(row, right)
    return states


# --- what it is for


def test_blocks_go_in_and_come_back_without_passing_a_socket(agent: AttachedAgent, sidecar: Sidecar) -> None:
    hashes = chain(20)
    assert agent.store(hashes, content(hashes)) == (True,) * 20
    assert agent.contains([*hashes, chain(1, seed=9)[0]]) == (True,) * 20 + (False,)
    assert loaded(agent, [*hashes, chain(1, seed=9)[0]]) == (HIT,) * 20 + (MISS,)
    status = agent.status()
    assert status.resident_count == 20
    assert [one.session_count for one in status.namespaces] == [1]
    wait_until(lambda: sidecar.granted_count() == 0)


def test_blocks_that_had_to_leave_for_the_store_come_back_through_the_pool(
    agent: AttachedAgent, store: FakeStore, sidecar: Sidecar
) -> None:
    hashes = chain(3 * SLOT_COUNT)
    assert agent.store(hashes, content(hashes)) == (True,) * len(hashes)
    assert not all(agent.contains(hashes))
    assert loaded(agent, hashes) == (HIT,) * len(hashes)
    assert agent.status().peak_bytes <= SLOT_COUNT * BLOCK_BYTES
    parents = dict(zip(hashes[1:], hashes, strict=False))
    assert all(parents.get(block) == parent for block, parent in store.parents.items() if parent is not None)


def test_pages_of_an_engines_cache_are_gathered_into_slots_and_scattered_from_them(agent: AttachedAgent) -> None:
    layout = NAMESPACE.block_layout

    def plane() -> torch.Tensor:
        return torch.randn(40, 1, 8, 32)  # two pages of 8 tokens make a block

    caches = [PagedCache(layout, [(plane(), plane()) for _ in range(2)]) for _ in range(2)]
    hashes = chain(12)
    pages = [[2 * index + 1, 2 * index] for index in range(12)]
    assert agent.store(hashes, caches[0].blocks(pages)) == (True,) * 12
    assert agent.load(hashes, caches[1].blocks(pages)) == (HIT,) * 12
    for source, target in zip(caches[0].layers, caches[1].layers, strict=True):
        for before, after in zip(source, target, strict=True):
            assert torch.equal(before[:24], after[:24])


def test_two_engines_share_blocks_of_one_namespace(agent: AttachedAgent, sidecar: Sidecar) -> None:
    hashes = chain(6)
    agent.store(hashes[:4], content(hashes[:4]))
    with AttachedAgent(NAMESPACE, sidecar.address) as other:
        assert loaded(other, hashes) == (HIT,) * 4 + (MISS,) * 2
        assert other.store(hashes, content(hashes)) == (True,) * 6
    assert loaded(agent, hashes) == (HIT,) * 6


def test_steps_and_uses_of_attached_engines_count(agent: AttachedAgent, sidecar: Sidecar) -> None:
    hashes = chain(2)
    agent.store(hashes, content(hashes))
    assert agent.step(3) == 3
    agent.touch(hashes)
    assert agent.step(8) == 11
    wait_until(lambda: sidecar.service.snapshot().status.step == 11)


# --- namespaces and quotas


def test_each_namespace_has_a_pool_of_its_own_within_the_cap(start: Start) -> None:
    sidecar = start(quotas={NAMESPACE.id.hex()[:16]: 8 * BLOCK_BYTES})
    hashes = chain(12)
    with AttachedAgent(NAMESPACE, sidecar.address) as one, AttachedAgent(OTHER, sidecar.address) as other:
        one.store(hashes, content(hashes))
        assert other.contains(hashes) == (False,) * 12
        other.store(hashes, content(hashes))
        assert loaded(one, hashes) == loaded(other, hashes) == (HIT,) * 12
        sizes = {found.namespace_id: found.capacity_bytes for found in one.status().namespaces}
    assert sizes == {NAMESPACE.id: 8 * BLOCK_BYTES, OTHER.id: (SLOT_COUNT - 8) * BLOCK_BYTES}


def test_a_namespace_without_room_is_told_so_once_and_gets_the_memory_of_one_that_is_not_used_any_more(
    start: Start, store: FakeStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    sidecar, hashes = start(idle_release_s=60.0), chain(4)
    with AttachedAgent(NAMESPACE, sidecar.address) as first:
        first.store(hashes, content(hashes))
        with AttachedAgent(OTHER, sidecar.address, config=QUICK) as second:
            clock.now_s += 61.0  # idle, but with an engine attached
            with caplog.at_level(logging.WARNING, logger="kvstore.agent"):
                assert second.store(hashes, content(hashes)) == (False,) * 4
                assert loaded(second, hashes) == (MISS,) * 4
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            assert "raise --vram-capacity, or give each its part with --quota" in caplog.text
    wait_until(lambda: sidecar.session_count() == 0)
    clock.now_s += 61.0
    with AttachedAgent(OTHER, sidecar.address) as second:
        assert second.store(hashes, content(hashes)) == (True,) * 4
        assert [one.namespace_id for one in second.status().namespaces] == [OTHER.id]
    assert len(store.blocks) == 4, "what the first one had was given to the store"


def test_namespaces_of_one_engine_share_what_is_left_evenly(sidecar: Sidecar) -> None:
    client = AgentClient(sidecar.address, config=AgentClientConfig(namespace_count=2))
    assert client.batch_count_max(NAMESPACE) == client.batch_count_max(OTHER) == SLOT_COUNT // 16
    sizes = [one.capacity_bytes for one in client.status().namespaces]
    client.close()
    assert sizes == [SLOT_COUNT // 2 * BLOCK_BYTES] * 2


# --- engines that die


class Engine:
    """A process that stores or loads the blocks of `chain(4)`."""

    def __init__(self, address: str, act: str) -> None:
        command = [sys.executable, "-m", "tests.agent.attached_engine", address, NAMESPACE.encode().hex(), act]
        command += [block_hash.hex() for block_hash in chain(4)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._said = ""

    def go_to(self, place: str) -> None:
        """Lets it go on until it is there, where it waits."""
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        while self._said != place:
            if self._said:
                print(file=self.process.stdin, flush=True)
            self._said = self.process.stdout.readline().strip()
            assert self._said, f"the engine ended before it was {place}"

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def engine(sidecar: Sidecar, act: str) -> Iterator[Engine]:
    with closing(Engine(sidecar.address, act)) as started:
        yield started


@pytest.mark.parametrize("place", ["reserved", "half-copied", "copied", "committed"])
def test_an_engine_that_is_killed_while_it_stores_leaves_whole_blocks_or_none(
    agent: AttachedAgent, sidecar: Sidecar, place: str
) -> None:
    hashes = chain(4)
    with engine(sidecar, "store") as engine_:
        engine_.go_to(place)
        assert sidecar.granted_count() == (0 if place == "committed" else 4)
        engine_.process.kill()
        wait_until(lambda: sidecar.granted_count() == 0)
    assert loaded(agent, hashes) == ((HIT,) * 4 if place == "committed" else (MISS,) * 4)
    assert agent.store(hashes, content(hashes)) == (True,) * 4
    assert loaded(agent, hashes) == (HIT,) * 4


def test_an_engine_that_is_killed_while_it_loads_holds_nothing_any_more(agent: AttachedAgent, sidecar: Sidecar) -> None:
    hashes = chain(4)
    agent.store(hashes, content(hashes))
    with engine(sidecar, "load") as engine_:
        engine_.go_to("acquired")
        assert sidecar.granted_count() == 4
        engine_.process.kill()
        wait_until(lambda: sidecar.granted_count() == 0)


def test_slots_of_an_engine_that_hangs_while_it_writes_are_nobody_elses(
    agent: AttachedAgent, sidecar: Sidecar, clock: Clock
) -> None:
    """It may go on writing where it was told to, however late that is; only its commit comes too late."""
    others = chain(3 * SLOT_COUNT, seed=1)
    with engine(sidecar, "store") as engine_:
        engine_.go_to("half-copied")
        stop(engine_.process)
        clock.now_s += 31.0
        assert agent.store(others, content(others)) == (True,) * len(others)
        assert sidecar.granted_count() == 4
        engine_.process.send_signal(signal.SIGCONT)
        engine_.go_to("refused")
        assert loaded(agent, others) == (HIT,) * len(others)
        assert agent.contains(chain(4)) == (False,) * 4
        wait_until(lambda: sidecar.granted_count() == 0)


def test_slots_of_a_living_engine_stay_its_own_while_the_agent_has_no_descriptor_to_watch_it_by(
    client: AgentClient, sidecar: Sidecar
) -> None:
    """An error that says nothing of the process must not be taken for its end: it may go on writing."""
    hashes = chain(8)
    assert len(client.reserve(NAMESPACE, hashes).places) == 8
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0)]
    while taken[-1] < 10:
        taken.append(os.dup(0))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (10, hard))  # all below are in use: nobody here gets another one
        client._sessions[NAMESPACE.id]._socket.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: sidecar.session_count() == 0)
        wait_until(lambda: bool(sidecar.listener._dying))
        assert sidecar.granted_count() == 8
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


@pytest.mark.parametrize("parent", [b"short", bytes(33)], ids=["short", "long"])
def test_a_reservation_that_cannot_be_committed_is_refused_and_takes_no_slots(
    sidecar: Sidecar, client: AgentClient, parent: bytes
) -> None:
    client.reserve(NAMESPACE, chain(1))
    granted_before = sidecar.granted_count()
    session = client._sessions[NAMESPACE.id]
    request = m.ReserveSlotsRequest(session_id=session.id, block_hashes=b"".join(chain(8, seed=3)), parent_hash=parent)
    with pytest.raises(InvalidArgumentError, match="parent_hash"):
        sidecar.service.share_of(NAMESPACE.id).reserve(request)
    assert sidecar.granted_count() == granted_before


def test_an_engine_that_hangs_while_it_reads_learns_that_its_slots_are_others(
    agent: AttachedAgent, sidecar: Sidecar, clock: Clock
) -> None:
    hashes, others = chain(4), chain(3 * SLOT_COUNT, seed=1)
    agent.store(hashes, content(hashes))
    with engine(sidecar, "load") as engine_:
        engine_.go_to("acquired")
        stop(engine_.process)
        clock.now_s += 31.0
        wait_until(lambda: sidecar.granted_count() == 0)
        agent.store(others, content(others))
        engine_.process.send_signal(signal.SIGCONT)
        engine_.go_to("wrong and expired")


def test_what_one_engine_holds_leaves_room_for_the_others(client: AgentClient, agent: AttachedAgent) -> None:
    hashes = chain(SLOT_COUNT)
    with client.reserve(NAMESPACE, hashes) as reserved:
        assert [place is not None for place in reserved.places] == [True] * 8 + [False] * 56
        with client.reserve(NAMESPACE, hashes[8:16]), client.reserve(NAMESPACE, hashes[16:]) as more:
            assert set(more.grants) == {SlotGrant.REFUSED}
        others = chain(2 * SLOT_COUNT, seed=1)
        assert agent.store(others, content(others)) == (True,) * len(others)
    assert client.find(NAMESPACE, hashes) == (False,) * SLOT_COUNT


def test_blocks_that_were_not_filled_are_not_committed(client: AgentClient) -> None:
    hashes = chain(4)
    with client.reserve(NAMESPACE, hashes) as reserved:
        assert reserved.commit([True, False, True, True]) == (True, False, True, True)
    assert client.find(NAMESPACE, hashes) == (True, False, True, True)
    with client.reserve(NAMESPACE, hashes) as reserved:
        present, new = SlotGrant.PRESENT, SlotGrant.RESERVED
        assert reserved.grants == (present, new, present, present)


# --- agents that die


def test_an_engine_goes_on_without_its_agent_says_so_once_and_finds_the_next_one(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    sidecar, hashes = start(), chain(4)
    with (
        caplog.at_level(logging.INFO, logger="kvstore.agent"),
        AttachedAgent(NAMESPACE, sidecar.address, config=QUICK) as agent,
    ):
        agent.store(hashes, content(hashes))
        sidecar.close()
        for _ in range(5):
            assert loaded(agent, hashes) == (MISS,) * 4
            assert agent.store(hashes, content(hashes)) == (False,) * 4
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        start()
        wait_until(lambda: agent.store(hashes, content(hashes)) == (True,) * 4)
        assert loaded(agent, hashes) == (HIT,) * 4
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_what_was_being_written_and_read_when_the_agent_ended_is_of_no_use(start: Start) -> None:
    sidecar, hashes = start(), chain(8)
    client = AgentClient(sidecar.address, config=QUICK)
    with AttachedAgent(NAMESPACE, sidecar.address) as agent:
        agent.store(hashes[:4], content(hashes[:4]))
    with client.reserve(NAMESPACE, hashes[4:]) as reserved, client.acquire(NAMESPACE, hashes[:4]) as acquired:
        assert acquired.is_valid()
        sidecar.close()
        for slot in reserved.slots:
            assert slot is not None
            slot[:] = bytes(len(slot))  # the memory is still there
        assert not acquired.is_valid()
        assert reserved.commit() == (False,) * 4
    client.close()


@contextmanager
def sidecar_process(daemon: DaemonProcess, path: Path, *, device: str = "cpu") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", "from kvstore_client.cli import main; main()", "agent", "--device", device]
    command += ["--vram-capacity", f"{SLOT_COUNT * BLOCK_BYTES}", "--store-address", daemon.address]
    command += ["--grpc-port", "0", "--metrics-port", "0", "--socket-path", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline(), "the sidecar ended before it served"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_sidecar_that_hangs_and_is_killed_costs_misses_and_leaves_nothing_reserved_or_half_written(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    address, seen = f"unix:{tmp_path}/agent.sock", set[tuple[BlockState, ...]]()
    hashes, others = chain(8), chain(8, seed=1)
    with (
        sidecar_process(daemon, tmp_path / "agent.sock") as process,
        closing(AgentClient(address, config=QUICK)) as client,
        AttachedAgent(NAMESPACE, address, config=QUICK) as agent,
    ):
        wait_until(lambda: all(agent.store(hashes, content(hashes))))
        with client.reserve(NAMESPACE, others) as reserved:
            assert all(slot is not None for slot in reserved.slots)
            stop(process)
            assert reserved.commit() == (False,) * 8
        assert agent.store(others, content(others)) == (False,) * 8
        assert loaded(agent, hashes) == (MISS,) * 8
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: all(agent.store(others, content(others))))
        wait_until(lambda: loaded(agent, hashes) == (HIT,) * 8)
        wait_until(lambda: sum(one.granted_count for one in agent.status().namespaces) == 0)
        for seed in range(40):
            if seed == 20:
                process.kill()  # while it migrates what does not fit
            hashes = chain(12, seed=seed)
            agent.store(hashes, content(hashes))
            seen.add(loaded(agent, hashes))
    assert {(HIT,) * 12, (MISS,) * 12} <= seen
    hashes = [block_hash for seed in range(40) for block_hash in chain(12, seed=seed)]
    with Client(daemon.address) as below:
        into = torch.zeros((len(hashes), BLOCK_BYTES), dtype=torch.uint8)
        states = below.get(NAMESPACE, hashes, into).states
        for state, row, right in zip(states, into, content(hashes), strict=True):
            assert state is MISS or (state is HIT and torch.equal(row, right))
        wait_until(lambda: below.stats().reservation_count == 0)


def test_an_engine_without_any_agent_says_nothing(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVSTORE_AGENT_ADDRESS", raising=False)
    monkeypatch.setattr("kvstore_client.agent.address.socket_candidates", lambda: [tmp_path / "kvstore.sock"])
    with caplog.at_level(logging.INFO, logger="kvstore.agent"), AttachedAgent(NAMESPACE) as agent:
        assert agent.store(chain(2), content(chain(2))) == (False,) * 2
        assert loaded(agent, chain(2)) == (MISS,) * 2
    assert not caplog.records


# --- the attach socket


def greet(sidecar: Sidecar, data: bytes) -> tuple[AttachWelcome, str, int]:
    """The answer, its text, and how many descriptors came with it."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(LONG_S)
        connection.connect(sidecar.service.attach_socket)
        connection.sendall(data)
        answer, descriptors, _, _ = socket.recv_fds(connection, 16, 4)
        for descriptor in descriptors:
            socket.close(descriptor)
        welcome = AttachWelcome.decode(answer)
        text = connection.recv(welcome.refusal_bytes).decode() if welcome.refusal_bytes else ""
        return welcome, text, len(descriptors)


def hello(namespace: Namespace) -> bytes:
    return AttachHello(session_id=OwnerId(bytes(16)), namespace_id=namespace.id).encode()


def test_a_greeting_gets_the_pool_or_a_reason(sidecar: Sidecar, client: AgentClient) -> None:
    assert "no namespace is open" in greet(sidecar, hello(NAMESPACE))[1]
    assert client.batch_count_max(NAMESPACE) == SLOT_COUNT // 8
    welcome, _, descriptor_count = greet(sidecar, hello(NAMESPACE))
    assert (welcome.pool_bytes, descriptor_count) == (SLOT_COUNT * BLOCK_BYTES, 2)
    assert "is not open" in greet(sidecar, hello(OTHER))[1]
    assert "not an agent's attach socket" in greet(sidecar, b"GET / HTTP/1.1\r\n".ljust(56))[1]
    assert "attach version 2" in greet(sidecar, b"KVAH\2\0" + hello(NAMESPACE)[6:])[1]
    assert "no hello in" in greet(sidecar, b"KV")[1]
    wait_until(lambda: sidecar.session_count() == 1)  # the client's own


def test_the_attach_socket_is_this_users_alone(sidecar: Sidecar) -> None:
    assert Path(sidecar.service.attach_socket).stat().st_mode & 0o777 == 0o600


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_listener_that_dies_of_a_bug_says_so(tmp_path: Path) -> None:
    bugs: list[AssertionError] = []

    def broken() -> None:
        raise AssertionError("slot 3 holds two blocks")

    listener = AttachListener(lambda _: pytest.fail("nobody attaches"), on_tick=broken, on_bug=bugs.append)
    listener.listen(f"unix:{tmp_path}/attach")
    listener.start()
    wait_until(lambda: bool(bugs))
    listener.stop()
    assert "AssertionError: slot 3 holds two blocks" in str(bugs[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_on_a_gpu_blocks_are_copied_from_device_memory_to_device_memory(daemon: DaemonProcess, tmp_path: Path) -> None:
    path, hashes = tmp_path / "agent.sock", chain(40)
    with (
        sidecar_process(daemon, path, device="cuda:0"),
        AttachedAgent(NAMESPACE, f"unix:{path}", device="cuda:0") as agent,
    ):
        assert agent.store(hashes, content(hashes).cuda()) == (True,) * 40
        into = torch.zeros((40, BLOCK_BYTES), dtype=torch.uint8, device="cuda:0")
        assert agent.load(hashes, into) == (HIT,) * 40
        assert torch.equal(into.cpu(), content(hashes))
