"""The whole demo on a tiny random model: six processes, one daemon, every promise but speed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

pytest.importorskip("torch", reason="needs the [demo] extra")
pytest.importorskip("transformers", reason="needs the [demo] extra")

from gpu_agent.demo.cli import demo
from tests.demo.tiny import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("demo") / "tiny")


def demo_command(folder: Path) -> list[str]:
    arguments = ["--json", "--model", str(folder), "--prompt-tokens", "512", "--answer-tokens", "8"]
    return [sys.executable, "-m", "kvstore_client.cli", "demo", *arguments, "--memory-capacity", "64MiB"]


@pytest.mark.timeout(400)
def test_the_demo_keeps_its_promises_on_any_model(folder: Path) -> None:
    run = subprocess.run(demo_command(folder), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["identical_output"] is True
    assert result["max_abs_kv_error"] == 0.0
    assert result["peak_vram_bytes"] <= result["vram_cap_bytes"]
    assert result["evicted_blocks"] > 0
    assert result["reloaded_blocks"] > 0
    assert 0 < result["killed_at_blocks"] < result["killed_block_count"]
    assert [stage["identical_output"] for stage in result["stages"]] == [True] * 4


def test_what_is_not_installed_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("torch", "gguf") else found(name))
    ended = CliRunner().invoke(demo, [])
    assert ended.exit_code == 1
    assert "the demo needs torch, gguf, not installed here" in ended.output
    assert "Traceback" not in ended.output
    assert "needs torch, not installed" in CliRunner().invoke(demo, ["--model", "any"]).output


def is_daemon(process: psutil.Process) -> bool:
    try:
        return "serve" in process.cmdline()
    except psutil.NoSuchProcess:  # ended meanwhile, or a zombie
        return False


@pytest.mark.timeout(200)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_demo_that_is_stopped_leaves_no_process(folder: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(demo_command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        parent = psutil.Process(process.pid)
        deadline_s = time.monotonic() + 100
        while not any(is_daemon(child) for child in parent.children()):
            assert process.poll() is None
            assert time.monotonic() < deadline_s, "no daemon was started"
            time.sleep(0.05)
        children = parent.children()
        os.kill(process.pid, number)
        process.wait(30)
        _, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []
    finally:
        process.kill()
        process.wait()
