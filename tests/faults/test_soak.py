"""Memory and holds over many put/get cycles; the figures are `bench/soak.py`'s, whose exit code is the verdict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "bench" / "soak.py"


def run(*, cycle_count: int) -> None:
    command = [sys.executable, str(SOAK), "--cycles", str(cycle_count), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_few_thousand_cycles_leave_memory_flat_and_nothing_held() -> None:
    run(cycle_count=4_000)


@pytest.mark.soak
def test_a_hundred_thousand_cycles_leave_memory_flat_and_nothing_held() -> None:
    run(cycle_count=100_000)
