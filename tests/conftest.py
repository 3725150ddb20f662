"""A real daemon process for any test that wants one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore_client import Client

_START_S_MAX = 30.0
_STOP_S_MAX = 20.0


class DaemonProcess:
    """`kvstore serve` on free ports, in a folder of its own. Keeps its addresses over `restart`."""

    def __init__(self, folder: Path, *, arguments: tuple[str, ...]) -> None:
        self._folder = folder
        self._arguments = arguments
        self._ports = {"grpc": 0, "metrics": 0, "bulk": 0}
        self._process: subprocess.Popen[bytes] | None = None
        self.unix_address = f"unix:{folder / 'kvstore.sock'}"
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._ports['grpc']}"

    @property
    def metrics_address(self) -> str:
        return f"127.0.0.1:{self._ports['metrics']}"

    @property
    def slab_path(self) -> Path:
        """The slab socket: beside the other one."""
        return self._folder / "kvstore.sock.slab"

    @property
    def bulk_address(self) -> str:
        return f"127.0.0.1:{self._ports['bulk']}"

    @property
    def is_running(self) -> bool:
        """True for a paused one, too."""
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the daemon is not running"
        return self._process.pid

    @property
    def log_path(self) -> Path:
        return self._folder / "daemon.log"

    def start(self) -> None:
        """Returns once the daemon serves and its whole arena is in service: nothing is dropped for want of room."""
        assert self._process is None, "the daemon is running already"
        ready_path = self._folder / "ready.json"
        ready_path.unlink(missing_ok=True)
        command = [sys.executable, "-c", "from kvstore_client.cli import main; main()", "serve"]
        command += ["--grpc-port", str(self._ports["grpc"]), "--metrics-port", str(self._ports["metrics"])]
        command += ["--bulk-port", str(self._ports["bulk"])]
        command += ["--socket-path", self.unix_address.removeprefix("unix:"), "--ready-file", str(ready_path)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen([*command, *self._arguments], stdout=log, stderr=log, env=environment)
        deadline_s = time.monotonic() + _START_S_MAX
        while not ready_path.exists():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.kill()
                pytest.fail(f"the daemon did not start:\n{self.log_path.read_text()}")
            time.sleep(0.01)
        ready = json.loads(ready_path.read_text())
        self._ports = {kind: int(ready[f"{kind}_address"].rpartition(":")[2]) for kind in self._ports}
        try:
            with Client(self.address) as client:
                while (stats := client.stats()).ready_bytes < stats.capacity_bytes:
                    assert time.monotonic() < deadline_s, "the arena is not getting ready"
                    time.sleep(0.01)
        except BaseException:
            self.kill()  # nobody knows of it yet who would
            raise

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        return self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """kill -9, then a new process at the same addresses."""
        self.kill()
        self.start()

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _end(self, number: signal.Signals) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)  # a paused process takes no SIGTERM
        try:
            return process.wait(_STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


@pytest.fixture(scope="session")
def start_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., DaemonProcess]]:
    """Starts daemons, with further flags of `kvstore serve` if given; ends with the tests what is still running."""
    started: list[DaemonProcess] = []

    def start(*arguments: str) -> DaemonProcess:
        daemon = DaemonProcess(tmp_path_factory.mktemp("daemon"), arguments=("--memory-capacity", "64MiB", *arguments))
        started.append(daemon)
        return daemon

    yield start
    for daemon in started:
        daemon.kill()


@pytest.fixture
def daemon(start_daemon: Callable[..., DaemonProcess]) -> Iterator[DaemonProcess]:
    """A daemon for one test, which may do to it what it wants."""
    process = start_daemon()
    yield process
    process.kill()
