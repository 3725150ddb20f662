"""The examples that need no model run as their docstrings say, and so do the programs in the pages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import DaemonProcess

ROOT = Path(__file__).parents[2]


def run(program: Path, *, address: str) -> str:
    environment = {"KVSTORE_ADDRESS": address, "PATH": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def code_in(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return tmp_path / "program.py"


def test_the_client_example_stores_and_then_finds_its_blocks(daemon: DaemonProcess) -> None:
    example = ROOT / "examples" / "client.py"
    assert run(example, address=daemon.unix_address) == "0 of 31 blocks were there\n31 blocks stored\n"
    assert run(example, address=daemon.unix_address) == "31 of 31 blocks were there\n"


def test_the_client_example_says_that_no_daemon_answers(tmp_path: Path) -> None:
    said = run(ROOT / "examples" / "client.py", address=f"unix:{tmp_path}/nobody.sock")
    assert said.startswith("0 of 31 blocks were there (")
    assert "failed to connect" in said


def test_the_program_in_the_client_page_reuses_nothing_then_a_part_then_all(
    daemon: DaemonProcess, program: Path
) -> None:
    whole = code_in("client.md")[0]
    assert "range(100)" in whole
    program.write_text(whole.replace("range(100)", "range(40)"), encoding="utf-8")
    assert run(program, address=daemon.unix_address) == "0 of 2 blocks reused, 2 stored\n"
    program.write_text(whole, encoding="utf-8")
    assert run(program, address=daemon.unix_address) == "2 of 6 blocks reused, 4 stored\n"
    assert run(program, address=daemon.unix_address) == "6 of 6 blocks reused, 0 stored\n"


def test_the_program_in_the_client_page_computes_everything_without_a_daemon(tmp_path: Path, program: Path) -> None:
    program.write_text(code_in("client.md")[0], encoding="utf-8")
    assert run(program, address=f"unix:{tmp_path}/nobody.sock") == "0 of 6 blocks reused, 0 stored\n"


def test_the_asyncio_program_in_the_client_page_goes_on_from_the_first(daemon: DaemonProcess, program: Path) -> None:
    program.write_text("\n".join(code_in("client.md")[:2]), encoding="utf-8")
    said = run(program, address=daemon.unix_address)
    assert said == "0 of 6 blocks reused, 6 stored\n6 of 6 blocks are there\n"


def test_the_views_in_the_client_page_show_what_the_first_program_stored(daemon: DaemonProcess, program: Path) -> None:
    whole, _, views = code_in("client.md")
    program.write_text(f"{whole}\n{views}", encoding="utf-8")
    said = run(program, address=daemon.unix_address)
    assert said == "0 of 6 blocks reused, 6 stored\n6 blocks in view\n"


def test_the_program_in_the_agent_page_goes_on_from_the_client_page(daemon: DaemonProcess, program: Path) -> None:
    pytest.importorskip("torch")
    program.write_text("\n".join([code_in("client.md")[0], *code_in("agent.md")]), encoding="utf-8")
    said = run(program, address=daemon.unix_address)
    assert said.splitlines()[1:] == ["6 stored, 6 resident, flushed: True"]


@pytest.mark.parametrize("name", ["generate.py", "batch.py"])
def test_the_transformers_examples_say_how_they_are_used(name: str) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, str(ROOT / "examples" / "transformers" / name)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert answer.stderr.startswith(f"usage: {name} MODEL [DOCUMENT]")
