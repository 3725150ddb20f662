"""Clients of the real daemon's slab that are stopped and killed at any moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore_client import Client, ClientConfig
from tests.client.builders import FAST, chain, namespace
from tests.client.slab_worker import BLOCK_BYTES

_ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def worker(address: str, *, lease_s: float) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.client.slab_worker", address, str(lease_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, "the worker has ended"
    assert line != "wrong"
    return line


def wait_until(condition: Callable[[], bool], *, within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "not in time"
        time.sleep(0.005)


def holds_nothing(client: Client) -> bool:
    stats = client.stats()
    return (stats.lease_count, stats.reservation_count) == (0, 0)


@pytest.mark.parametrize("turn_count", [12, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_a_reader_that_was_stopped_beyond_its_lease_never_takes_rewritten_slots_for_its_blocks(
    daemon: Any, turn_count: int
) -> None:
    """Users' report of the kind: a load read blocks that were being written. The whole store is rewritten meanwhile."""
    rng = random.Random(1)
    space, count = namespace(payload_bytes=BLOCK_BYTES), 56
    filler = [bytes([turn % 251]) * BLOCK_BYTES for turn in range(2)]
    with worker(daemon.unix_address, lease_s=0.2) as process, Client(daemon.unix_address, config=FAST) as client:
        for turn in range(turn_count):
            while not next_line(process).startswith("16 stored"):
                pass  # its calls have missed their deadlines while it was stopped
            time.sleep(rng.random() * 0.02)  # whatever the worker is doing by then is what is tested
            os.kill(process.pid, signal.SIGSTOP)
            wait_until(lambda: client.stats().lease_count == 0, within_s=5.0)
            client.put(space, chain(count, seed=turn), [filler[turn % 2]] * count)
            os.kill(process.pid, signal.SIGCONT)


def test_a_client_that_is_killed_at_any_moment_leaves_nothing_behind(daemon: Any) -> None:
    """Its leases would last for a minute: here they go at once."""
    rng = random.Random(2)
    with Client(daemon.unix_address, config=ClientConfig(transport="slab")) as client:
        for _ in range(4):
            with worker(daemon.unix_address, lease_s=60.0) as process:
                next_line(process)
                time.sleep(rng.random() * 0.03)
                process.kill()
            wait_until(lambda: holds_nothing(client), within_s=3.0)
