"""Logs that cannot be written stop nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore_client.hosting import Addresses, announce
from kvstore_client.logs import LineWriter

ADDRESSES = Addresses(grpc_address="127.0.0.1:1", unix_address=None, metrics_address="127.0.0.1:2", pid=3)


def test_lines_are_written_whole_and_at_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        writer = LineWriter(file.fileno())
        writer.write("größer\n")
        writer.write("half a surrogate \ud800\n")
        assert path.read_text() == "größer\nhalf a surrogate \\ud800\n"
    assert writer.dropped_count == 0


def test_lines_that_cannot_be_written_are_counted_and_forgotten() -> None:
    reader, pipe = os.pipe()
    writer = LineWriter(pipe)
    os.close(reader)
    writer.write("nobody reads this\n")
    assert writer.dropped_count == 1
    os.close(pipe)
    writer.write("and this goes nowhere\n")
    assert writer.dropped_count == 2
    with Path("/dev/full").open("wb", buffering=0) as full:
        writer = LineWriter(full.fileno())
        writer.write("no space\n")
    assert writer.dropped_count == 1


@pytest.mark.parametrize("log", ["structlog.get_logger()", "logging.getLogger('library')"])
def test_neither_kind_of_log_raises_or_shows_in_the_exit_code(log: str) -> None:
    code = f"""
import logging, structlog
from kvstore_client.logs import configure_logs, dropped_line_count
configure_logs(level="info", log_format="json")
log = {log}
log.warning("one")
try:
    raise ValueError("thrown")
except ValueError:
    log.exception("two")
assert dropped_line_count() == 2, dropped_line_count()
"""
    with Path("/dev/full").open("wb") as full:
        assert subprocess.run([sys.executable, "-c", code], stderr=full, check=False, timeout=60).returncode == 0


def test_an_announcement_that_stdout_does_not_take_is_still_in_the_ready_file(tmp_path: Path) -> None:
    code = f"""
from contextlib import ExitStack
from pathlib import Path
from kvstore_client.hosting import Addresses, announce
from kvstore_client.logs import configure_logs
configure_logs(level="info", log_format="json")
path = Path({str(tmp_path / "ready.json")!r})
with ExitStack() as parts:
    announce(Addresses(grpc_address="a", unix_address=None, metrics_address="b", pid=3), path, parts)
    assert path.exists()
"""
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    assert result.returncode == 0, result.stderr
    assert "stdout_unwritable" in result.stderr
    assert "No space left on device" in result.stderr


def test_a_process_without_a_stdout_announces_in_its_ready_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", None)
    with ExitStack() as parts:
        announce(ADDRESSES, tmp_path / "ready.json", parts)
        assert (tmp_path / "ready.json").exists()
