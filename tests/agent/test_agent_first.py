"""The agent and the daemon as one store, as an engine's connector uses them: real ones, and either may be gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpu_agent import AgentConfig
from gpu_agent.attach.listener import AttachListener
from gpu_agent.rpc import AgentServer
from gpu_agent.service import AgentService
from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore.messages import BlockState, CutReason
from kvstore_client import Client, ClientConfig
from kvstore_client.agent.client import AgentClient, AgentClientConfig
from kvstore_client.integrations._agent_first import AgentFirst, merged_lookup
from kvstore_client.integrations.vllm.settings import ConnectorSettings
from kvstore_client.results import LookupResult, PutState
from tests.agent.fakes import BLOCK_BYTES, NAMESPACE, chain, content
from tests.conftest import DaemonProcess

HIT, MISS = BlockState.HIT, BlockState.MISS
SLOT_COUNT = 64
QUICK = AgentClientConfig(control_timeout_s=0.5, cooldown_initial_s=0.01, cooldown_max_s=0.05)


class Sidecar:
    """In this process, in front of the daemon."""

    def __init__(self, path: Path, daemon: DaemonProcess) -> None:
        self._client = Client(daemon.unix_address)
        config = AgentConfig(vram_capacity_bytes=SLOT_COUNT * BLOCK_BYTES)
        self.service = AgentService(config=config, client=self._client)
        self.service.attach_socket = f"{path}.attach"
        self.bugs: list[AssertionError] = []
        self._listener = AttachListener(self.service.share_of, on_tick=self.service.expire, on_bug=self.bugs.append)
        self._listener.listen(f"unix:{path}.attach")
        self._server = AgentServer(self.service, on_bug=self.bugs.append)
        self._server.listen(f"unix:{path}")
        self._listener.start()
        self._server.start()

    def close(self) -> None:
        self._listener.stop()
        self._server.stop(grace_s=0)
        assert not self.bugs
        self.service.check_invariants()
        self.service.close(flush_s=1.0)
        self._client.close()


@pytest.fixture(scope="module")
def daemon(start_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    """Of all tests here; the last one kills it."""
    return start_daemon()


@pytest.fixture
def sidecar(daemon: DaemonProcess, tmp_path: Path) -> Iterator[Sidecar]:
    with ExitStack() as parts:
        sidecar = Sidecar(tmp_path / "agent.sock", daemon)
        parts.callback(sidecar.close)
        yield sidecar


@pytest.fixture
def below(daemon: DaemonProcess) -> Iterator[Client]:
    """The daemon alone."""
    with Client(daemon.unix_address) as client:
        yield client


@pytest.fixture
def store(sidecar: Sidecar, daemon: DaemonProcess, tmp_path: Path) -> Iterator[AgentFirst]:
    impatient = ClientConfig(attach_timeout_s=1.0, control_timeout_s=1.0, breaker_cooldown_initial_s=0.05)
    agent = AgentClient(f"unix:{tmp_path}/agent.sock", config=QUICK)
    store = AgentFirst(agent, Client(daemon.unix_address, config=impatient))
    yield store
    store.close()


def put(store: AgentFirst, hashes: list[bytes], *, parent_hash: bytes | None = None) -> list[PutState]:
    with store.reserve(NAMESPACE, hashes, parent_hash=parent_hash) as reserved:  # type: ignore[arg-type]
        for slot, block in zip(reserved.slots, content(hashes), strict=True):  # type: ignore[arg-type]
            if slot is not None:
                assert isinstance(slot, memoryview)
                slot[:] = block.numpy().tobytes()
        return list(reserved.commit().states)


def right(store: AgentFirst, hashes: list[bytes]) -> list[bool]:
    """Which blocks came, each with the bytes that belong to it."""
    came = []
    with store.view(NAMESPACE, hashes) as views:  # type: ignore[arg-type]
        for view, block in zip(views, content(hashes), strict=True):  # type: ignore[arg-type]
            is_here = view is not None
            if view is not None:
                assert bytes(view.payload) == block.numpy().tobytes()  # type: ignore[arg-type]
                assert view.is_valid()
            came.append(is_here)
    return came


def test_blocks_go_to_the_agent_and_are_found_and_loaded_there(store: AgentFirst, below: Client) -> None:
    hashes = chain(8)
    assert put(store, hashes[:6]) == [PutState.STORED] * 6
    assert put(store, hashes) == [PutState.ALREADY_STORED] * 6 + [PutState.STORED] * 2
    assert below.lookup(NAMESPACE, hashes).matched_count == 0
    found = store.lookup(NAMESPACE, [*hashes, chain(1, seed=1)[0]])
    assert (found.matched_count, found.states, found.error) == (8, (HIT,) * 8 + (MISS,), None)
    assert right(store, [*hashes, chain(1, seed=1)[0]]) == [True] * 8 + [False]


def test_what_the_agent_has_no_room_for_goes_to_the_daemon_in_the_same_call(
    store: AgentFirst, sidecar: Sidecar, below: Client
) -> None:
    hashes = chain(12, seed=10)
    assert put(store, hashes) == [PutState.STORED] * 12
    assert below.lookup(NAMESPACE, hashes[8:]).matched_count == 4, "an eighth of the pool is the most at a time"
    assert store.lookup(NAMESPACE, hashes).matched_count == 12
    assert right(store, hashes) == [True] * 12


def test_what_the_agent_has_moved_away_comes_back_through_it(store: AgentFirst, sidecar: Sidecar) -> None:
    chains = [chain(8, seed=seed) for seed in range(20, 36)]
    for hashes in chains:
        put(store, hashes)
    for hashes in chains:
        assert store.lookup(NAMESPACE, hashes).matched_count == 8
        assert right(store, hashes) == [True] * 8
    assert sidecar.service.snapshot().counters.reloaded_count > 0


def test_without_its_agent_it_is_the_daemon_alone(store: AgentFirst, sidecar: Sidecar, below: Client) -> None:
    hashes, more = chain(8, seed=50), chain(4, seed=51)
    put(store, hashes)
    sidecar.close()  # which gives the daemon what it had
    assert store.lookup(NAMESPACE, hashes).matched_count == 8
    assert right(store, hashes) == [True] * 8
    assert put(store, more) == [PutState.STORED] * 4
    assert below.lookup(NAMESPACE, more).matched_count == 4


def test_what_comes_too_late_from_the_daemon_is_left_out_unless_the_agent_has_it() -> None:
    below = LookupResult(
        states=(HIT, HIT, HIT, HIT, MISS), matched_count=1, left_out_count=3, cut_reason=CutReason.TOO_SLOW
    )
    merged = merged_lookup([True, True, False, False, False, False, False], below)
    assert (merged.matched_count, merged.left_out_count) == (3, 3)
    merged = merged_lookup([True, True, False, True, False, True, False], below)
    assert (merged.matched_count, merged.left_out_count) == (4, 1)
    merged = merged_lookup([True, True, False, True, True, True, True], below)
    assert (merged.matched_count, merged.left_out_count) == (7, 0)


@pytest.mark.parametrize("agent", ["off", "auto", "127.0.0.1:7452", "unix:/run/a.sock"])
def test_where_the_agent_is_may_be_said(agent: str) -> None:
    store = ConnectorSettings.parse({"agent": agent}, where="extra").open_store()
    assert isinstance(store, AgentFirst) == (agent != "off")
    store.close()


def test_a_wrong_place_of_the_agent_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match=r"extra\.agent is 'on'; allowed: host:port"):
        ConnectorSettings.parse({"agent": "on"}, where="extra")


def test_when_the_daemon_is_gone_what_the_agent_has_is_served(store: AgentFirst, daemon: DaemonProcess) -> None:
    hashes = chain(4, seed=40)
    put(store, hashes)
    daemon.kill()
    found = store.lookup(NAMESPACE, [*hashes, chain(1, seed=41)[0]])
    assert (found.matched_count, found.error) == (4, None)
    assert right(store, hashes) == [True] * 4
    assert put(store, chain(4, seed=42)) == [PutState.STORED] * 4
    assert isinstance(store.lookup(NAMESPACE, chain(2, seed=43)).error, UnavailableError)
