"""The demo's child processes: the daemon and the workers. They end with their context, or with the demo itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import kvstore_client.tether

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0
_LOG_TAIL_LINES = 15

_WORKER_ENVIRONMENT = {
    # Threads that wait by spinning halve the speed of a model as soon as something else runs beside it.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Memory that a layer gives back is kept for the next: faulting it in again took a fifth of a prefill.
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(128 << 20),
}
"""Applied before a worker starts, as its libraries read them only then; what the user has set wins."""


class DemoError(Exception):
    """The demo could not run to its end; the message is for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    address: str
    pid: int


@contextmanager
def running_daemon(folder: Path, *, memory_capacity: str) -> Iterator[Daemon]:
    """A daemon of our own on free ports, with nothing taken from this user's settings; gone at the end."""
    ready_file, log_file = folder / "daemon.json", folder / "daemon.log"
    command = [
        *(sys.executable, "-m", "kvstore_client.cli", "serve", "--memory-capacity", memory_capacity),
        *("--grpc-port", "0", "--metrics-port", "0", "--socket-path", str(folder / "kvstore.sock")),
        *("--ready-file", str(ready_file)),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    with log_file.open("wb") as log:
        process = _spawn(command, stdout=log, stderr=log, env=environment)
    try:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not ready_file.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise DemoError(f"the daemon did not start:\n{_tail(log_file)}")
            time.sleep(0.02)
        ready = json.loads(ready_file.read_text())
        yield Daemon(address=ready["grpc_address"], pid=process.pid)
    finally:
        _stop(process)


class Worker:
    """One worker process doing one job; a context manager that leaves no process behind.

    It loads its model, if it is told one, before it is given its job, which goes in as one JSON object. Events
    come out as JSON lines; the last one is the result.
    """

    def __init__(self, *, model: str | None, log_file: Path) -> None:
        self._name = "worker"
        self._log_file = log_file
        command = [sys.executable, "-m", "gpu_agent.demo.worker"]
        with log_file.open("wb") as log:
            environment = _WORKER_ENVIRONMENT | os.environ
            self._process = _spawn(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment)
        self._say({"model": model})

    def give(self, job: Mapping[str, Any]) -> None:
        self._name = f"worker {job['kind']}"
        self._say(job)

    def events(self) -> Iterator[dict[str, Any]]:
        """Events as they come; raises `DemoError` when the worker ends without a result."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] == "failed":
                raise DemoError(event["text"])
            yield event
            if event["event"] == "result":
                return
        self._process.wait()
        raise DemoError(f"{self._name} failed ({self._process.returncode}):\n{_tail(self._log_file)}")

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL, now."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _stop(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _say(self, line: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise DemoError(f"{self._name} did not start:\n{_tail(self._log_file)}") from error


def _spawn(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    tether = [sys.executable, "-P", kvstore_client.tether.__file__, str(os.getpid())]
    process = subprocess.Popen([*tether, *command], **({"stdin": subprocess.DEVNULL} | options))
    return cast("subprocess.Popen[bytes]", process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tail(log_file: Path) -> str:
    lines = log_file.read_text(errors="replace").splitlines()
    return "\n".join(lines[-_LOG_TAIL_LINES:])
