"""`kvstore bench nvme` measures what it says, looks at all that it reads, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import CorruptBlockError, InvalidArgumentError
from kvstore_client import cli
from kvstore_client.bench import blocks
from kvstore_server.nvme import images
from kvstore_server.nvme.bench import measure as measuring
from kvstore_server.nvme.bench.plain_disk import PlainDisk, make_files
from kvstore_server.nvme.bench.recovery_times import recovery_times_s
from kvstore_server.nvme.device import aligned_buffer
from kvstore_server.nvme.index import Index
from kvstore_server.nvme.recovery import Geometry

BLOCK_BYTES = 64 << 10
CAPACITY_BYTES = 96 << 20
RECORD_COUNT = 2_000


def figures_of(folder: Path, **changes: Any) -> dict[str, Any]:
    plan: dict[str, Any] = {
        "folder": folder,
        "capacity_bytes": CAPACITY_BYTES,
        "block_count": 4,
        "block_bytes": BLOCK_BYTES,
        "round_count": 2,
        "progress": lambda _: None,
        "record_count": RECORD_COUNT,
    }
    return measuring.measure(**{**plan, **changes})


def test_it_tells_what_the_page_says_and_removes_its_files(tmp_path: Path) -> None:
    shares: list[float] = []
    found = figures_of(tmp_path, progress=shares.append)
    assert list(tmp_path.iterdir()) == []
    for action in ("write", "read"):
        for part in ("", "_churned"):
            ours, disk = found[f"{action}{part}_gb_per_s"], found[f"disk_{action}{part}_gb_per_s"]
            assert found[f"{action}{part}_vs_disk"] == pytest.approx(ours / disk, rel=1e-2)
        for side in ("", "disk_"):
            assert 0 < found[f"{side}{action}_p50_ms"] <= found[f"{side}{action}_p99_ms"]
    assert 0 < found["read_block_p50_ms"] <= found["read_block_p99_ms"]
    fresh, churned = found["write_vs_disk"], found["write_churned_vs_disk"]
    assert found["churn_vs_fresh"] == pytest.approx(churned / fresh, rel=1e-2)
    # A slot of 68 KiB for 64 KiB of payload and its envelope, and one header per segment.
    assert found["write_amplification"] == pytest.approx(68 * 1024 / (BLOCK_BYTES + 128), rel=0.02)
    assert found["recovery_s"] > 0
    assert found["recovery_large_s"] > 0
    assert found["recovery_block_count"] == RECORD_COUNT
    assert found["is_direct"] in (True, False)
    assert found["fresh_rounds"] == 2
    slot_count = found["segment_count"] * ((16 << 20) // (68 << 10))
    assert found["evicted_count"] >= 0.9 * slot_count, "the whole capacity was replaced"
    assert shares[0] == 0.0
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
    json.dumps(found)


def test_the_command_prints_one_object_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**os.environ, "KVSTORE_NVME__CAPACITY": "1KiB"}  # no business of a benchmark's
    process = subprocess.run(
        [sys.executable, "-c", _WITH_FEW_RECORDS, *_SMALL_FLAGS, "--path", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    found = json.loads(process.stdout)
    assert (found["benchmark"], found["block_count"], found["block_bytes"]) == ("nvme", 4, BLOCK_BYTES)
    assert found["write_vs_disk"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_benchmark_that_is_ended_leaves_no_files(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WITH_FEW_RECORDS, *_SMALL_FLAGS, "--rounds", "1000000", "--path", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "0%" in process.stderr.readline()
    assert "%" in process.stderr.readline(), "it is under way"
    assert list(tmp_path.iterdir()) != []
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_a_block_that_came_back_changed_ends_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the tier verified nothing: the benchmark looks at the bytes itself."""
    read = images.Images.read

    def read_and_spoil(self: images.Images, *args: Any, memory_place: Any, **kwargs: Any) -> int:
        block_bytes = read(self, *args, memory_place=memory_place, **kwargs)
        self._slot_view(memory_place, 4096)[1000] ^= 1
        return block_bytes

    monkeypatch.setattr(images.Images, "read", read_and_spoil)
    with pytest.raises(CorruptBlockError, match="came back with other bytes"):
        figures_of(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_recovery_finds_every_block_and_takes_no_room_for_their_bytes(tmp_path: Path) -> None:
    times_s = recovery_times_s(
        tmp_path / "tier",
        geometry_of=lambda size_bytes: Geometry(
            segment_bytes=256 << 20, is_segment_bytes_given=False, room_bytes=size_bytes, index_map_bytes=16 << 20
        ),
        block_bytes=2 << 20,
        record_count=RECORD_COUNT,
        round_count=2,
    )
    assert len(times_s) == 2
    with_bytes = RECORD_COUNT * (2 << 20)
    on_disk = sum(path.stat().st_blocks * 512 for path in (tmp_path / "tier").rglob("*"))
    assert on_disk < with_bytes / 100
    index = Index(tmp_path / "tier" / "index", map_bytes=64 << 20)
    assert index.count == RECORD_COUNT, "nothing was refused and deleted"
    index.close()


def test_the_limit_writes_what_it_reads(tmp_path: Path) -> None:
    source = aligned_buffer(4096)
    files, is_direct = make_files(tmp_path / "disk", file_count=2, file_bytes=1 << 20, source=source)
    assert [path.stat().st_size for path in files] == [1 << 20] * 2
    memory = [aligned_buffer(64 << 10) for _ in range(8)]
    for number, piece in enumerate(memory):
        piece[:] = bytes([number + 1]) * len(piece)
    with PlainDisk(files, memory=memory, batch_count=3, thread_count=2, is_direct=is_direct) as disk:
        assert disk.write(8) > 0
        written = files[0].read_bytes()[: 8 * (64 << 10)]
        assert written == b"".join(bytes(piece) for piece in memory)
        for piece in memory:
            piece[:] = bytes(len(piece))
        assert disk.read(8) > 0
        assert sorted(piece[0] for piece in memory) == list(range(1, 9))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity_bytes": 4 << 20}, "--capacity"),
        ({"block_count": 1024}, "--capacity"),
        ({"folder": Path("/nowhere/at/all")}, "--path is '/nowhere/at/all'"),
    ],
)
def test_what_cannot_be_measured_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        figures_of(**{"folder": tmp_path, **changes})
    assert list(tmp_path.iterdir()) == []


def test_the_command_explains_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "nvme", "--help"])
    shown = capsys.readouterr().out
    for word in ("write_vs_disk", "churn_vs_fresh", "recovery_s", "is_direct", "Examples:"):
        assert word in shown


def test_the_other_benchmarks_do_not_load_the_daemon() -> None:
    code = "import sys, kvstore_client.bench.cli; print([name for name in sys.modules if 'kvstore_server' in name])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"


_SMALL_FLAGS = ("bench", "nvme", "--capacity", "96MiB", "--block-size", "64KiB", "--blocks", "4", "--rounds", "2")
_WITH_FEW_RECORDS = f"""
import functools, sys
from kvstore_client import cli
from kvstore_server.nvme.bench import measure
measure.measure = functools.partial(measure.measure, record_count={RECORD_COUNT})
cli.main(sys.argv[1:])
"""
assert blocks.slot_bytes(BLOCK_BYTES) == 68 << 10
