"""The node's agent before the daemon: the engine gives the tokens that it gives without one, whatever becomes of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpu_agent.ask import ask_status
from kvstore.messages import AgentStatus
from tests.conftest import DaemonProcess

from .rig import BLOCK_TOKENS, Engine, Prompt, connect, probe_prompt

_PROMPTS = [Prompt.random(24 * BLOCK_TOKENS + 1, seed=seed) for seed in range(11, 14)]


@contextmanager
def sidecar(daemon: DaemonProcess, path: Path) -> Iterator[Callable[[], None]]:
    """Gives what kills it."""
    command = [sys.executable, "-c", "from kvstore_client.cli import main; main()", "agent", "--device", "cpu"]
    command += ["--vram-capacity", "64MiB", "--store-address", daemon.unix_address, "--socket-path", str(path)]
    command += ["--grpc-port", "0", "--metrics-port", "0", "--log-format", "json"]
    with (path.parent / "agent.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        assert process.stdout.readline(), "the sidecar ended before it served"
        yield process.kill
    finally:
        process.kill()
        process.communicate()


def status(path: Path) -> AgentStatus:
    return ask_status(f"unix:{path}", timeout_s=10.0)


@pytest.mark.parametrize("model_name", ["tiny-llama", "tiny-hybrid"])
def test_tokens_are_the_same_without_an_agent_with_one_and_after_it_was_killed(
    model_name: str,
    models: dict[str, Path],
    start_engine: Callable[..., Engine],
    daemon: DaemonProcess,
    tmp_path: Path,
) -> None:
    path = tmp_path / "agent.sock"
    flag = connect(daemon.unix_address, agent=f"unix:{path}")
    engine = start_engine(models[model_name], kv_transfer_config=flag)
    alone, through, lost = _PROMPTS
    computed = engine.ask_afresh(*_PROMPTS)
    assert all(answer.margin > 1e-3 for answer in computed), "last bits decide: take other prompts"
    engine.wait_warm(probe_prompt())
    [warm] = engine.ask_afresh(alone)
    assert warm.token_ids == computed[0].token_ids
    with sidecar(daemon, path) as kill:
        while len(status(path).namespaces) < engine.group_count():  # the engine finds it by itself
            engine.ask_afresh(probe_prompt())
        before = status(path)
        for prompt, expected in ((through, computed[1]), (lost, computed[2])):
            salted = prompt.but(salt="agent")  # its blocks are new
            cold, warm = engine.ask_afresh(salted, salted)
            assert cold.token_ids == warm.token_ids == expected.token_ids
            assert (cold.cached_count, warm.cached_count) == (0, prompt.whole_count)
        assert status(path).resident_count > before.resident_count
        assert sum(one.granted_count for one in status(path).namespaces) == 0
        kill()
        salted = lost.but(salt="agent")
        gone, again = engine.ask_afresh(salted, salted)
        assert gone.token_ids == again.token_ids == computed[2].token_ids
        assert gone.cached_count == 0
        assert again.cached_count == prompt.whole_count, "without an agent the daemon gets what is computed"
    # Scheduler and worker, before there was one and after it was killed, and in between that it was there.
    assert engine.log().count("the agent does not serve this engine") == 4
    assert engine.log().count("the agent serves this engine again") == 2
