"""The processes of a benchmark: a daemon of its own, and the subjects. They end with their context, or with us."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self, cast

import kvstore_client.tether
from kvstore.errors import DeadlineExceededError, UnavailableError
from kvstore_client.client import Client
from kvstore_client.start_environment import start_environment

START_S_MAX = 120.0
"""Seconds until a process is ready: a daemon that faults in some GiB of 4 KiB pages takes a second for each."""
ANSWER_S_MAX = 120.0
"""Seconds for one sample, which takes milliseconds; a process that hangs must not hang the benchmark."""
_STOP_S_MAX = 10.0
_LOG_TAIL_LINES = 15
# Long enough for the slowest of four processes on two cores to be waiting already.
_HEAD_START_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonAddresses:
    tcp: str
    unix: str


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A new folder, whose path is short enough for sockets in it even where $TMPDIR is not."""
    # A socket's path has at most 107 bytes: ours take 42, `/kvstore-bench-12345678/kvstore.sock.slab`.
    is_short = len(os.fsencode(tempfile.gettempdir())) <= 107 - 42
    return tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=None if is_short else "/tmp")  # noqa: S108  (its own name is random)


@contextmanager
def private_daemon(
    *, capacity_bytes: int, slab_bytes: int, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[DaemonAddresses]:
    """A daemon on free ports, with nothing of this user's settings, its whole arena in service; gone at the end."""
    with scratch_folder() as name:
        folder = Path(name)
        ready_file, log_file, socket = folder / "ready.json", folder / "daemon.log", folder / "kvstore.sock"
        command = [
            *(sys.executable, "-m", "kvstore_client.cli", "serve", "--ready-file", str(ready_file)),
            *("--memory-capacity", str(capacity_bytes), "--socket-path", str(socket)),
            *("--grpc-port", "0", "--metrics-port", "0"),
        ]
        settings = {**own_environment(), "KVSTORE_MEMORY__SLAB_SIZE": str(slab_bytes), **environment}
        with log_file.open("wb") as log:
            process = spawn(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=settings)
        try:
            deadline_s = time.monotonic() + START_S_MAX
            while not ready_file.exists():
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise UnavailableError(f"the daemon did not start:\n{_tail(log_file)}")
                time.sleep(0.01)
            ready = json.loads(ready_file.read_text())
            _wait_whole(f"unix:{socket}", deadline_s=deadline_s)
            yield DaemonAddresses(tcp=ready["grpc_address"], unix=f"unix:{socket}")
        finally:
            stop(process)


def _wait_whole(address: str, *, deadline_s: float) -> None:
    with Client(address) as client:
        while (stats := client.stats()).ready_bytes < stats.capacity_bytes:
            if time.monotonic() > deadline_s:
                raise DeadlineExceededError(
                    f"after {START_S_MAX:g} s only {stats.ready_bytes} of {stats.capacity_bytes} bytes are in service"
                )
            time.sleep(0.02)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One order carried out: seconds of each batch, and of them all together on the clock that all processes share."""

    times_s: tuple[float, ...]
    started_s: float
    ended_s: float


class Worker:
    """A subject in a process of its own, ready for orders; a context manager that leaves no process behind."""

    def __init__(
        self, command: Sequence[str], *, name: str, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._name = name
        self._unread = b""
        settings = {**start_environment(own_environment()), **environment}
        self._process = spawn(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=settings)
        self.facts: dict[str, Any] = {}

    def wait_ready(self) -> None:
        """Raises `UnavailableError` with its reason when the subject cannot be measured."""
        self.facts = self._answer(START_S_MAX)["facts"]

    def prepare(self, action: str, batches: Sequence[int]) -> None:
        """First half of an order; `start` and `sample` must follow."""
        self._say({"action": action, "batches": list(batches)})
        self._answer(ANSWER_S_MAX)

    def start(self, *, at_s: float) -> None:
        self._say({"at_s": at_s})

    def sample(self) -> Sample:
        answer = self._answer(ANSWER_S_MAX)
        return Sample(times_s=tuple(answer["times_s"]), started_s=answer["started_s"], ended_s=answer["ended_s"])

    def measure(self, action: str, batches: Sequence[int]) -> Sample:
        self.prepare(action, batches)
        self.start(at_s=0.0)
        return self.sample()

    def check(self) -> None:
        """Raises `UnavailableError` when the bytes of the last runs are wrong."""
        self._say({"action": "check"})
        self._answer(ANSWER_S_MAX)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()  # by which it ends
        try:
            self._process.wait(_STOP_S_MAX)
        except subprocess.TimeoutExpired:
            stop(self._process)
        self._process.stdout.close()

    def _say(self, order: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise UnavailableError(f"the process that measures {self._name} has ended") from error

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            readable, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline_s - time.monotonic()))
            if not readable:
                raise DeadlineExceededError(f"{self._name} was not measured within {timeout_s:g} s")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                status = self._process.wait()
                raise UnavailableError(f"the process that measures {self._name} has ended with status {status}")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        answer = cast("dict[str, Any]", json.loads(line))
        if "error" in answer:
            raise UnavailableError(answer["error"])
        return answer


def together_s(workers: Sequence[Worker], action: str, batches: Sequence[int]) -> float:
    """Seconds from the common start until the last of them has done all of its batches."""
    for worker in workers:
        worker.prepare(action, batches)
    at_s = time.monotonic() + _HEAD_START_S
    for worker in workers:
        worker.start(at_s=at_s)
    samples = [worker.sample() for worker in workers]
    return max(sample.ended_s for sample in samples) - at_s


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that every context ends what it has started."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def own_environment() -> dict[str, str]:
    """This process's, without settings for another daemon or client."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}


def spawn(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """A process that dies with this one, however that ends."""
    tether = [sys.executable, "-P", kvstore_client.tether.__file__, str(os.getpid())]
    return cast("subprocess.Popen[bytes]", subprocess.Popen([*tether, *command], **options))


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tail(log_file: Path) -> str:
    return "\n".join(log_file.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
