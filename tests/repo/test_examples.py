"""The examples that need no model run as their docstrings say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import DaemonProcess

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example: str, *, address: str) -> str:
    environment = {"KVSTORE_ADDRESS": address, "PATH": ""}
    command = [sys.executable, str(EXAMPLES / example)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_the_client_example_stores_and_then_finds_its_blocks(daemon: DaemonProcess) -> None:
    assert run("client.py", address=daemon.unix_address) == "0 of 31 blocks were there\n31 blocks stored\n"
    assert run("client.py", address=daemon.unix_address) == "31 of 31 blocks were there\n"


def test_the_client_example_says_that_no_daemon_answers(tmp_path: Path) -> None:
    said = run("client.py", address=f"unix:{tmp_path}/nobody.sock")
    assert said.startswith("0 of 31 blocks were there (")
    assert "failed to connect" in said
