"""Daemon and agent whose log nobody reads, whose disk is full, or who have no standard files at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvstore_client import Client
from tests.conftest import DaemonProcess

LONG_S = 60.0
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
FREE_PORTS = ("--grpc-port", "0", "--metrics-port", "0", "--socket-path", "")
SERVE = ("serve", "--memory-capacity", "16MiB", *FREE_PORTS)
AGENT = ("agent", "--vram-capacity", "1MiB", *FREE_PORTS)


class Process:
    """One `kvstore` process; a shell redirects its standard files as an operator's script would."""

    def __init__(self, folder: Path, *arguments: str, redirection: str, pipe: int | None = None) -> None:
        self._ready = folder / "ready.json"
        command = [sys.executable, "-c", "from kvstore_client.cli import main; main()", *arguments]
        self.process = subprocess.Popen(
            ["sh", "-c", f'exec "$@" {redirection}', "sh", *command, "--ready-file", str(self._ready)],
            stdout=subprocess.DEVNULL,
            stderr=pipe,
            env=ENVIRONMENT,
        )

    def ready(self) -> dict[str, Any]:
        deadline_s = time.monotonic() + LONG_S
        while not self._ready.exists():
            assert self.process.poll() is None, "it ended before it served"
            assert time.monotonic() < deadline_s, "it does not get ready"
            time.sleep(0.02)
        return dict(json.loads(self._ready.read_text()))

    def dropped_count(self, metric: str) -> float:
        with urllib.request.urlopen(f"http://{self.ready()['metrics_address']}/metrics", timeout=5) as response:
            lines = response.read().decode().splitlines()
        return float(next(line for line in lines if line.startswith(f"{metric} ")).split()[1])

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LONG_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Process]:
    def run(*arguments: str, redirection: str = "", pipe: int | None = None) -> Process:
        process = Process(tmp_path, *arguments, redirection=redirection, pipe=pipe)
        request.addfinalizer(process.kill)
        return process

    return run


REDIRECTIONS = ["2>/dev/full", "2>&-", ">&-", ">&- 2>&- <&-", ">/dev/full 2>/dev/full"]


@pytest.mark.parametrize("redirection", REDIRECTIONS)
def test_a_daemon_serves_and_stops_in_order_whatever_its_standard_files_are(
    redirection: str, run: Callable[..., Process]
) -> None:
    daemon = run(*SERVE, redirection=redirection)
    with Client(daemon.ready()["grpc_address"]) as client:
        assert client.info().draining is False
    dropped_count = daemon.dropped_count("kvstore_store_log_lines_dropped_total")
    assert (dropped_count > 0) == ("2>/dev/full" in redirection)
    assert daemon.stop() == 0


@pytest.mark.parametrize("redirection", ["2>/dev/full", ">&- 2>&- <&-", ">/dev/full 2>/dev/full"])
def test_an_agent_serves_and_stops_in_order_whatever_its_standard_files_are(
    redirection: str, daemon: DaemonProcess, run: Callable[..., Process]
) -> None:
    agent = run(*AGENT, "--store-address", daemon.address, redirection=redirection)
    dropped_count = agent.dropped_count("kvstore_agent_log_lines_dropped_total")
    assert (dropped_count > 0) == ("2>/dev/full" in redirection)
    assert agent.stop() == 0


@pytest.mark.parametrize("when", ["before it starts", "while it serves"])
@pytest.mark.parametrize("arguments", [SERVE, AGENT], ids=["daemon", "agent"])
def test_a_log_whose_reader_goes_away_stops_nothing(
    when: str, arguments: tuple[str, ...], run: Callable[..., Process]
) -> None:
    with ExitStack() as ends:
        reader, pipe = os.pipe()
        ends.callback(os.close, pipe)
        if when == "before it starts":
            os.close(reader)
        process = run(*arguments, pipe=pipe)
        process.ready()
        if when == "while it serves":
            os.close(reader)
    assert process.stop() == 0, "it logs that it drains and that it stopped"
