"""Clients whose blocks take the data port, a real daemon, and what ends in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kvstore.messages import BlockState
from kvstore_client import Client, ClientConfig
from kvstore_client.results import PutState
from tests.client.builders import chain, namespace, payloads
from tests.conftest import DaemonProcess

LONG_S = 20.0
BULK = ClientConfig(transport="bulk")


@pytest.fixture(scope="module", params=[0, 2], ids=["no workers", "2 workers"])
def daemon(
    request: pytest.FixtureRequest,
    start_daemon: Callable[..., DaemonProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[DaemonProcess]:
    settings = tmp_path_factory.mktemp("bulk") / "kvstore.yaml"
    settings.write_text(f"bulk: {{transfer_workers: {request.param}}}\n")
    process = start_daemon("--config", str(settings))
    yield process
    process.kill()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.01)


def test_blocks_travel_and_workers_end_with_a_killed_daemon(daemon: DaemonProcess) -> None:
    space, hashes = namespace(payload_bytes=1 << 20), chain(8)
    blocks = payloads(space, 8)
    workers = [
        child for child in psutil.Process(daemon.pid).children() if "transfer_worker" in " ".join(child.cmdline())
    ]
    with Client(daemon.address, config=BULK) as client:
        assert set(client.put(space, hashes, blocks).states) == {PutState.STORED}
        targets = [bytearray(1 << 20) for _ in hashes]
        assert set(client.get(space, hashes, targets).states) == {BlockState.HIT}
        assert targets == blocks
        stats = client.stats()
        assert (stats.lease_count, stats.reservation_count) == (0, 0)
        daemon.kill()
        _, alive = psutil.wait_procs(workers, LONG_S)
        assert not alive
        daemon.start()
        wait_until(lambda: PutState.STORED in client.put(space, hashes[:1], blocks[:1]).states)


def test_a_client_killed_while_it_puts_leaks_nothing(daemon: DaemonProcess) -> None:
    code = """
import sys
from kvstore_client import Client, ClientConfig
from tests.client.builders import chain, namespace, payloads

space = namespace(model="killed", payload_bytes=1 << 20)
blocks = payloads(space, 16)
with Client(sys.argv[1], config=ClientConfig(transport="bulk")) as client:
    print("ready", flush=True)
    for seed in range(100_000):
        client.put(space, chain(16, seed=seed), blocks)
"""
    root = Path(__file__).resolve().parents[2]
    with Client(daemon.address, config=BULK) as client:
        command = [sys.executable, "-c", code, daemon.address]
        with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) as putting:
            assert putting.stdout is not None
            putting.stdout.readline()
            before = client.stats().written_bytes
            wait_until(lambda: client.stats().written_bytes > before)
            putting.kill()

        def is_nothing_held() -> bool:
            stats = client.stats()
            return stats.reservation_count == stats.lease_count == 0

        wait_until(is_nothing_held)


def test_a_stopped_client_costs_others_nothing(daemon: DaemonProcess) -> None:
    code = """
import sys
from kvstore_client import Client, ClientConfig
from tests.client.builders import chain, namespace, payloads

space = namespace(model="stopped", payload_bytes=1 << 20)
targets = [bytearray(1 << 20) for _ in range(16)]
with Client(sys.argv[1], config=ClientConfig(transport="bulk")) as client:
    client.put(space, chain(16), payloads(space, 16))
    print("ready", flush=True)
    while True:
        client.get(space, chain(16), targets)
"""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", code, daemon.address]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) as getting:
        try:
            assert getting.stdout is not None
            getting.stdout.readline()
            os.kill(getting.pid, signal.SIGSTOP)
            space, hashes = namespace(payload_bytes=1 << 20), chain(8)
            blocks = payloads(space, 8)
            with Client(daemon.address, config=BULK) as client:
                assert set(client.put(space, hashes, blocks).states) == {PutState.STORED}
                targets = [bytearray(1 << 20) for _ in hashes]
                for _ in range(5):
                    assert set(client.get(space, hashes, targets).states) == {BlockState.HIT}
                assert targets == blocks
        finally:
            getting.kill()
