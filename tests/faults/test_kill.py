"""kill -9 of clients and daemons at random moments: no wrong byte, nothing left behind.

Kinds of fault (users' reports): "key visible before its data", "failed stores stayed visible", "lookup pins of
requests that never load stay", "engine never re-registered after a restart".
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.errors import KvstoreError
from kvstore.messages import BlockState, StoreStats
from kvstore_client import Client, ClientConfig

from . import blocks

CLIENT_KILLS = 100
DAEMON_KILLS = 100
CLIENTS = 2


class Zygote:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._alive: set[int] = set()

    def _ask(self, **command: Any) -> dict[str, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer: dict[str, int] = json.loads(self._process.stdout.readline())
        return answer

    def client(self, address: str, *, seed: int) -> int:
        pid = self._ask(run="client", address=address, seed=seed)["pid"]
        self._alive.add(pid)
        return pid

    def daemon(self, folder: Path) -> int:
        """Starts a daemon on the folder's socket and waits until it serves."""
        ready = folder / "ready.json"
        ready.unlink(missing_ok=True)
        arguments = ["--memory-capacity", "64MiB", "--grpc-port", "0", "--metrics-port", "0"]
        arguments += ["--socket-path", str(folder / "s.sock"), "--ready-file", str(ready), "--log-level", "error"]
        pid = self._ask(run="daemon", arguments=arguments)["pid"]
        self._alive.add(pid)
        deadline_s = time.monotonic() + 20
        while not ready.exists():
            assert time.monotonic() < deadline_s, "the daemon did not start"
            time.sleep(0.005)
        return pid

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        code = self._ask(wait=pid)["code"]
        self._alive.discard(pid)
        assert code == -signal.SIGKILL, f"process ended by itself with {code} (3: a hit with wrong bytes)"

    def close(self) -> None:
        for pid in self._alive:
            os.kill(pid, signal.SIGKILL)
        self._process.communicate()


@pytest.fixture
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


def check_every_block(client: Client) -> int:
    """Reads all blocks there may be; every hit must be right. Returns how many hits there were."""
    hit_count = 0
    for space in blocks.NAMESPACES:
        for number in range(blocks.CHAIN_COUNT):
            hashes = blocks.chain(number)
            into = np.zeros((len(hashes), space.block_layout.payload_bytes), dtype=np.uint8)
            result = client.get(space, hashes, into)
            for block_hash, row, state in zip(hashes, into, result.states, strict=True):
                if state is BlockState.HIT:
                    hit_count += 1
                    assert np.array_equal(row, blocks.right_bytes(space, block_hash))
    return hit_count


def wait_until_nothing_is_held(client: Client) -> StoreStats:
    deadline_s = time.monotonic() + 10
    while True:
        stats = client.stats()
        if not stats.lease_count and not stats.reservation_count:
            return stats
        assert time.monotonic() < deadline_s, f"left behind: {stats}"
        time.sleep(0.05)


def wait_until_blocks_arrive(client: Client) -> None:
    deadline_s = time.monotonic() + 20
    while client.stats().committed_count == 0:
        assert time.monotonic() < deadline_s, "clients did not come back to the last daemon"
        time.sleep(0.05)


@pytest.mark.timeout(300)
def test_killed_clients_leave_no_wrong_byte_and_no_hold(zygote: Zygote, tmp_path: Path) -> None:
    rng = random.Random(1)
    zygote.daemon(tmp_path)
    address = f"unix:{tmp_path}/s.sock"
    survivor = zygote.client(address, seed=0)
    for kill in range(CLIENT_KILLS):
        victim = zygote.client(address, seed=kill + 1)
        time.sleep(rng.uniform(0.02, 0.35))
        zygote.kill(victim)
    zygote.kill(survivor)  # asserts that it was still at work
    with Client(address) as client:
        stats = wait_until_nothing_is_held(client)
        assert check_every_block(client) > 0
        assert stats.corrupt_count == 0
        assert stats.used_bytes <= stats.capacity_bytes


@pytest.mark.timeout(400)
def test_killed_daemons_leave_no_wrong_byte_and_clients_come_back(zygote: Zygote, tmp_path: Path) -> None:
    rng = random.Random(2)
    address = f"unix:{tmp_path}/s.sock"
    daemon = zygote.daemon(tmp_path)
    clients = [zygote.client(address, seed=number) for number in range(CLIENTS)]
    attached_count = 0
    with Client(address, config=ClientConfig(control_timeout_s=2.0)) as observer:
        for _ in range(DAEMON_KILLS):
            time.sleep(rng.uniform(0.05, 0.6))
            with contextlib.suppress(KvstoreError):  # the observer's own channel may still be backing off
                attached_count += observer.stats().committed_count > 0
            zygote.kill(daemon)
            daemon = zygote.daemon(tmp_path)
        wait_until_blocks_arrive(observer)
        for client in clients:
            zygote.kill(client)
        wait_until_nothing_is_held(observer)
        check_every_block(observer)
    assert attached_count > DAEMON_KILLS // 10, f"clients wrote to {attached_count} of {DAEMON_KILLS} daemons"
