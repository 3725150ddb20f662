"""The script that judges a GPU, without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.gpu_check.run import main


def test_without_a_gpu_nothing_is_checked_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert main([]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err


def test_a_dry_run_goes_through_all_checks_finds_every_byte_and_judges_no_speed(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    assert main(["--dry-run", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    checks = {check["name"]: check for check in report["checks"]}
    assert report["passed"]
    for name in (
        "through_staging",
        "by_layers",
        "through_pages_nhd",
        "agent_staging",
        "agent_registered_slots",
        "attach",
    ):
        assert checks[name]["passed"], name
    speeds = ("d2h_scattered_slots", "h2d_registered_slots", "gather_hnd", "compute_beside_migration")
    for name in speeds:
        assert checks[name]["ratio"] > 0
        assert checks[name]["passed"] is None
    assert checks["encode_int8"]["skipped"]
