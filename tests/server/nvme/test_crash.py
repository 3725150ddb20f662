from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from kvstore_server.nvme.crash import CRASH_POINTS, CRASH_VARIABLE, check_armed, crash_point

_PASS_POINTS = """
from kvstore_server.nvme.crash import check_armed, crash_point
check_armed()
for passing in range(1, 4):
    for name in ("nvme.before_data", "nvme.after_data"):
        print(name, passing, flush=True)
        crash_point(name)
"""


def _run(setting: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != CRASH_VARIABLE}
    if setting is not None:
        environment[CRASH_VARIABLE] = setting
    return subprocess.run(
        [sys.executable, "-c", _PASS_POINTS], env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_nothing_happens_where_nothing_is_armed() -> None:
    done = _run(None)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 6), done.stderr
    assert check_armed() is None
    for name in CRASH_POINTS:
        crash_point(name)


@pytest.mark.parametrize(
    ("setting", "last"),
    [
        ("nvme.before_data", "nvme.before_data 1"),
        ("nvme.after_data", "nvme.after_data 1"),
        ("nvme.after_data:1", "nvme.after_data 1"),
        ("nvme.before_data:3", "nvme.before_data 3"),
    ],
)
def test_an_armed_point_kills_at_its_passing_and_not_before(setting: str, last: str) -> None:
    done = _run(setting)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.splitlines()[-1] == last


def test_a_passing_that_never_comes_kills_nothing() -> None:
    assert _run("nvme.before_data:4").returncode == 0


@pytest.mark.parametrize("setting", ["nvme.nowhere", "before_data", "nvme.before_data:0", "nvme.before_data:x", ":1"])
def test_what_could_never_kill_is_refused_with_what_could(setting: str) -> None:
    done = _run(setting)
    assert done.returncode == 1
    assert not done.stdout
    assert f"{CRASH_VARIABLE} is {setting!r}; allowed: one of nvme.before_data, " in done.stderr
