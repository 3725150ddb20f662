"""An engine in a process of its own, which does one job after another: warm in a new process means just that."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.models import ROOT

START_S_MAX = 600.0
"""An engine alone needs 6 to 70 s, by its kind; on a busy machine many times as long."""
JOB_S_MAX = 90.0
"""Far above what any job takes: an engine that has not answered by then hangs."""


class EngineError(Exception):
    """The engine ended, hung, or said that it could not do what it was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an engine made of one prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of these tokens."""
    cached_count: int
    """Tokens of the prompt that it did not compute."""
    margin: float
    """How far, in log-probability, the runner-up was behind where it came closest: next to nothing means that last
    bits decide."""
    first_token_s: float
    preemption_count: int = 0


class EngineProcess:
    """`python -m MODULE` that reads one job per line, and answers with one line each; see `vllm_worker.py`.

    No variable that could make two processes alike by accident reaches it, `PYTHONHASHSEED` above all.
    """

    def __init__(
        self,
        module: str,
        *,
        settings: Mapping[str, Any],
        environment: Mapping[str, str],
        log_path: Path,
        python: str = sys.executable,
        start_s_max: float = START_S_MAX,
    ) -> None:
        self.log_path = log_path
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("KVSTORE_", "PYTHONHASHSEED"))
        }
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [python, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=kept | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | dict(environment),
                start_new_session=True,
            )
        self._unread = b""
        try:
            self.started: dict[str, Any] = self.call("start", timeout_s=start_s_max, settings=dict(settings))
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, job: str, *, timeout_s: float = JOB_S_MAX, **arguments: Any) -> Any:
        """What the job gives. Raises `EngineError`, with the end of the engine's log, when it gives nothing in time."""
        self.send(job, **arguments)
        return self.receive(timeout_s=timeout_s)

    def send(self, job: str, **arguments: Any) -> None:
        """Begins a job; `receive` waits for it."""
        assert self._process.stdin is not None, "the engine has a pipe"
        try:
            self._process.stdin.write(json.dumps({"job": job} | arguments).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise EngineError(f"{job}: the engine has ended\n{self._log_end()}") from error

    def receive(self, *, timeout_s: float = JOB_S_MAX) -> Any:
        line = self._read_line(time.monotonic() + timeout_s)
        reply = json.loads(line)
        if "error" in reply:
            raise EngineError(f"{reply['error']}\n{self._log_end()}")
        return reply["result"]

    def stop(self) -> None:
        """Lets the engine end by itself, as it would when it is shut down."""
        assert self._process.stdin is not None, "the engine has a pipe"
        self._process.stdin.close()
        try:
            self._process.wait(timeout=JOB_S_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
            raise EngineError(f"the engine does not end\n{self._log_end()}") from None
        finally:
            self._close_output()

    def kill(self) -> None:
        # All of its session: an engine may have started processes of its own.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._close_output()

    def _read_line(self, deadline_s: float) -> bytes:
        assert self._process.stdout is not None, "the engine has a pipe"
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    raise EngineError(f"the engine hangs\n{self._log_end()}")
                read = os.read(self._process.stdout.fileno(), 1 << 20)
                if not read:
                    status = self._process.wait(timeout=JOB_S_MAX)
                    raise EngineError(f"the engine has ended with {status}\n{self._log_end()}")
                self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _close_output(self) -> None:
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _log_end(self) -> str:
        return self.log_path.read_text(errors="replace")[-6000:]
