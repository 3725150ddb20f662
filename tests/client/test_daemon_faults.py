"""The real daemon stopped, killed and restarted under both clients."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import DeadlineExceededError, UnavailableError
from kvstore.messages import BlockState
from kvstore_client import ClientConfig
from tests.client.adapters import AnyClient
from tests.client.builders import FAST, chain, namespace, payloads
from tests.client.conftest import Connect
from tests.conftest import DaemonProcess

MISS = BlockState.MISS


def come_back(client: AnyClient, *, within_s: float = 10.0) -> None:
    """Waits until lookups work again; the client gets no help."""
    deadline_s = time.monotonic() + within_s
    while (error := client.lookup(namespace(), chain(1)).error) is not None:
        assert time.monotonic() < deadline_s, error


@pytest.mark.parametrize("is_unix", [False, True], ids=["tcp", "unix"])
def test_a_stopped_daemon_costs_one_deadline_and_comes_back_by_itself(
    connect: Connect, daemon: Any, is_unix: bool
) -> None:
    config = ClientConfig(
        attach_timeout_s=0.3, control_timeout_s=0.5, breaker_cooldown_initial_s=0.5, breaker_cooldown_max_s=1.0
    )
    client = connect(daemon.unix_address if is_unix else daemon.address, config=config)
    space, hashes = namespace(), chain(2)
    data = b"".join(payloads(space, 2))
    assert client.put(space, hashes, data).stored_count == 2
    daemon.pause()
    started_s = time.monotonic()
    unknown = chain(2, seed=9)
    assert isinstance(client.lookup(space, unknown).error, DeadlineExceededError)
    for _ in range(50):
        assert client.get(space, unknown, bytearray(512)).states == (MISS, MISS)
    assert time.monotonic() - started_s < 3.0
    daemon.resume()
    come_back(client)
    into = bytearray(512)
    assert client.get(space, hashes, into).matched_count == 2
    assert into == data
    stats = client.stats()
    assert (stats.lease_count, stats.reservation_count) == (0, 0)


@pytest.mark.parametrize("transport", ["auto", "slab"])
def test_a_daemon_that_is_started_anew_while_it_hangs_is_found_again(
    connect: Connect, daemon: Any, transport: str
) -> None:
    """Kind of fault (users' reports): "engine never re-registered". No connection is left by then that could break."""
    quick = {"breaker_cooldown_initial_s": 0.05, "breaker_cooldown_max_s": 0.1}
    config = ClientConfig(transport=transport, attach_timeout_s=0.5, control_timeout_s=0.5, **quick)
    client = connect(daemon.unix_address, config=config)
    space, hashes = namespace(), chain(2)
    data = b"".join(payloads(space, 2))
    assert client.put(space, hashes, data).stored_count == 2
    daemon.pause()
    assert isinstance(client.lookup(space, chain(2, seed=9)).error, DeadlineExceededError)
    daemon.restart()
    come_back(client)
    assert client.put(space, hashes, data).stored_count == 2
    into = bytearray(512)
    assert client.get(space, hashes, into).matched_count == 2
    assert into == data


def test_a_daemon_stopped_in_mid_stream_ends_by_the_deadline(connect: Connect, daemon: Any) -> None:
    config = ClientConfig(transport="grpc", data_timeout_base_s=0.5, data_rate_min_bytes_per_s=64 << 20)
    client = connect(daemon.address, config=config)
    space, hashes = namespace(payload_bytes=2 << 20), chain(12)
    blocks = payloads(space, 12)
    assert client.put(space, hashes, blocks).stored_count == 12
    blank = b"\x55" * len(blocks[0])
    memory = bytearray(blank * len(blocks))

    def stop_after_first_block() -> None:
        deadline_s = time.monotonic() + 10
        while memory[:8] == blank[:8] and time.monotonic() < deadline_s:
            time.sleep(0)
        daemon.pause()

    stopper = threading.Thread(target=stop_after_first_block)
    stopper.start()
    started_s = time.monotonic()
    loaded = client.get(space, hashes, memory)
    assert time.monotonic() - started_s < 5.0
    stopper.join()
    for index, state in enumerate(loaded.states):
        found = memory[index * len(blank) : (index + 1) * len(blank)]
        assert found == (blocks[index] if state is BlockState.HIT else blank), index
    daemon.resume()
    come_back(client)
    assert client.get(space, hashes, memory).matched_count == len(blocks)


@pytest.mark.parametrize("transport", ["grpc", "slab", "bulk"])
def test_a_daemon_killed_in_mid_transfer_leaves_verified_hits_and_misses(
    connect: Connect, daemon: Any, transport: str
) -> None:
    client = connect(daemon.address, config=replace(FAST, transport=transport))
    space, hashes = namespace(payload_bytes=2 << 20), chain(12)
    blocks = payloads(space, 12)
    assert client.put(space, hashes, blocks).stored_count == 12
    blank = b"\x55" * (2 << 20)
    memory = bytearray(blank * 12)
    killer = threading.Timer(0.02, daemon.kill)
    killer.start()
    loaded = client.get(space, hashes, memory)
    killer.join()
    for index, state in enumerate(loaded.states):
        found = memory[index * len(blank) : (index + 1) * len(blank)]
        if state is BlockState.HIT or transport != "bulk":  # what a broken transfer leaves is of no use
            assert found == (blocks[index] if state is BlockState.HIT else blank), index
    assert isinstance(client.get(space, hashes, memory).error, UnavailableError)


@pytest.mark.parametrize("transport", ["grpc", "slab", "bulk"])
def test_a_daemon_killed_during_a_put_stored_nothing_it_did_not_say(
    connect: Connect, daemon: Any, transport: str
) -> None:
    client = connect(daemon.address, config=replace(FAST, transport=transport))
    space, hashes = namespace(payload_bytes=2 << 20), chain(12)
    blocks = payloads(space, 12)
    killer = threading.Timer(0.03, daemon.kill)
    killer.start()
    stored = client.put(space, hashes, blocks)
    killer.join()
    assert stored.stored_count == 12 or stored.error is not None
    daemon.start()
    come_back(client)
    assert client.lookup(space, hashes).matched_count == 0  # this daemon remembers nothing yet
    assert client.put(space, hashes, blocks).stored_count == 12


@pytest.mark.parametrize("is_unix", [False, True], ids=["tcp", "unix"])
def test_after_a_restart_clients_attach_again_and_reopen_their_namespaces(
    connect: Connect, daemon: Any, is_unix: bool
) -> None:
    client = connect(daemon.unix_address if is_unix else daemon.address, config=FAST)
    space, hashes = namespace(), chain(2)
    data = b"".join(payloads(space, 2))
    client.put(space, hashes, data)
    epoch = client.info().epoch
    lease = client.acquire(space, hashes)
    assert lease.matched_count == 2
    daemon.restart()
    come_back(client)
    assert client.info().epoch != epoch
    assert not lease.renew()
    lease.release()
    assert client.lookup(space, hashes).states == (MISS, MISS)
    assert client.put(space, hashes, data).stored_count == 2
    into = bytearray(512)
    assert client.get(space, hashes, into).matched_count == 2
    assert into == data


def test_a_client_that_comes_before_the_daemon_finds_it_later(connect: Connect, daemon: Any) -> None:
    daemon.kill()
    client = connect(daemon.address)
    for _ in range(5):
        assert client.lookup(namespace(), chain(1)).error is not None
    daemon.start()
    come_back(client)


def test_sigterm_ends_the_daemon_and_clients_miss(connect: Connect, daemon: Any) -> None:
    client = connect(daemon.address)
    client.put(namespace(), chain(1), bytes(256))
    assert daemon.stop() == 0
    assert isinstance(client.lookup(namespace(), chain(1)).error, UnavailableError)


def test_the_client_loads_neither_torch_nor_the_daemon() -> None:
    script = (
        "import sys, kvstore_client\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'kvstore_server', 'gpu_agent')])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_warning_is_given_when_blocks_travel_another_way_and_not_when_the_daemon_is_gone(
    connect: Connect,
    start_daemon: Callable[..., DaemonProcess],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = tmp_path / "kvstore.yaml"
    settings.write_text("{}")
    daemon = start_daemon("--config", str(settings))
    client, space, hashes = connect(daemon.unix_address), namespace(), chain(2)

    def use() -> str | None:
        come_back(client)
        assert client.put(space, hashes, payloads(space, 2)).stored_count == 2
        assert client.get(space, hashes, bytearray(512)).matched_count == 2
        return client.transport

    with caplog.at_level(logging.INFO, "kvstore.client"):
        assert use() == "slab"
        daemon.stop()
        for _ in range(3):
            assert client.put(space, hashes, payloads(space, 2)).error is not None
            assert client.get(space, hashes, bytearray(512)).error is not None
        daemon.start()
        assert use() == "slab"
        assert not caplog.messages
        daemon.stop()
        settings.write_text("slab: {socket_path: ''}")
        daemon.start()
        assert use() == use() == "bulk"
    assert caplog.messages == ["blocks travel over bulk, not through shared memory: the daemon offers no slab socket"]
    daemon.kill()
