"""vLLM's own server with the one flag: it answers 200 with the right text, whatever becomes of the daemon."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import DaemonProcess
from tests.engines.models import ROOT
from tests.engines.rig import JOB_S_MAX, START_S_MAX

from .rig import ENVIRONMENT, FLAG, Prompt

_BLOCK_TOKENS = 128
"""What vLLM takes on a CPU when nothing is said."""
_PROMPTS = [Prompt.random(2 * _BLOCK_TOKENS + 1 + number, seed=100 + number) for number in range(12)]


class Server:
    """`vllm serve`, told of the store by nothing but the flag. It finds the daemon as any program on its node does."""

    def __init__(self, model: Path, *, daemon_address: str, log_path: Path) -> None:
        self._log_path = log_path
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._url = f"http://127.0.0.1:{free.getsockname()[1]}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", self._url.rpartition(":")[2]]
        command += [
            "--enforce-eager",
            "--dtype",
            "float32",
            "--max-model-len",
            "2048",
            "--kv-cache-memory-bytes",
            "256M",
        ]
        command += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(dict(FLAG))]
        # The mode in which its own cache can be emptied over HTTP.
        own = {"VLLM_SERVER_DEV_MODE": "1", "KVSTORE_ADDRESS": daemon_address, "OMP_NUM_THREADS": "1"}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        environment = kept | dict(ENVIRONMENT) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | own
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        deadline_s = time.monotonic() + START_S_MAX
        while not self._is_ready():
            assert self._process.poll() is None, self._log_end()
            assert time.monotonic() < deadline_s, self._log_end()
            time.sleep(0.1)

    def complete(self, prompt: Prompt) -> tuple[int, str, int]:
        """HTTP status, text, and tokens of the prompt that were not computed."""
        asked = {
            "model": "tiny",
            "prompt": list(prompt.token_ids),
            "temperature": 0,
            "max_tokens": 8,
            "ignore_eos": True,
        }
        status, body = self._read("/v1/completions", json.dumps(asked).encode())
        said = json.loads(body)
        details = said["usage"]["prompt_tokens_details"] or {}
        return status, said["choices"][0]["text"], details.get("cached_tokens") or 0

    def complete_all(self) -> list[tuple[int, str, int]]:
        with ThreadPoolExecutor(len(_PROMPTS)) as pool:
            return list(pool.map(self.complete, _PROMPTS))

    def forget(self) -> None:
        self._read("/reset_prefix_cache", b"")

    def metric(self, name: str) -> float:
        _, body = self._read("/metrics")
        return sum(float(line.split()[-1]) for line in body.decode().splitlines() if line.startswith(name))

    def end(self) -> None:
        """Its engine is a process of its own, in the same session."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _is_ready(self) -> bool:
        try:
            self._read("/health")
        except OSError:
            return False
        return True

    def _read(self, path: str, data: bytes | None = None) -> tuple[int, bytes]:
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=JOB_S_MAX) as response:
            return response.status, response.read()

    def _log_end(self) -> str:
        return self._log_path.read_text(errors="replace")[-6000:]


@pytest.fixture
def server(models: dict[str, Path], daemon: DaemonProcess, tmp_path: Path) -> Iterator[Server]:
    one = Server(models["tiny-llama"], daemon_address=daemon.unix_address, log_path=tmp_path / "server.log")
    try:
        one.wait_ready()
        yield one
    finally:
        one.end()


def test_the_server_answers_while_the_daemon_is_killed_and_stopped_and_is_warm_again_afterwards(
    server: Server, daemon: DaemonProcess
) -> None:
    told = server.complete_all()
    assert {status for status, _, _ in told} == {200}
    texts = [text for _, text, _ in told]
    _wait_warm(server, texts)
    assert server.metric("vllm:kvstore_load_tokens_total") > 0

    for fault in (daemon.kill, daemon.start, daemon.pause, daemon.resume):
        server.forget()
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(server.complete_all)
            fault()
            _check(answers.result(), texts, said=fault.__name__)
        _check(server.complete_all(), texts, said=f"after {fault.__name__}")
    _wait_warm(server, texts)


def _check(answers: list[tuple[int, str, int]], texts: list[str], *, said: str) -> None:
    assert {status for status, _, _ in answers} == {200}, said
    assert [text for _, text, _ in answers] == texts, said


def _wait_warm(server: Server, texts: list[str]) -> None:
    """Until every prompt's full blocks come from the store."""
    deadline_s = time.monotonic() + JOB_S_MAX
    while True:
        server.forget()
        answers = server.complete_all()
        _check(answers, texts, said="until all is warm")
        if all(cached_count == 2 * _BLOCK_TOKENS for _, _, cached_count in answers):
            return
        assert time.monotonic() < deadline_s, "what the server has stored is not found"
