"""`kvstore bench` measures what it says, refuses what it cannot measure, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvstore.errors import CorruptBlockError, InvalidArgumentError, UnavailableError
from kvstore_client import cli
from kvstore_client.bench import blocks
from kvstore_client.bench.batches import Batches, cold_batch_count, last_cache_bytes
from kvstore_client.bench.client_subject import mapped_page_bytes
from kvstore_client.bench.figures import gb_per_s, median, percentile, rounded
from kvstore_client.bench.processes import Worker, together_s
from kvstore_client.bench.redis_mget import encode
from kvstore_client.bench.tcp import TcpSpec
from tests.conftest import DaemonProcess

_SMALL = ("--rounds", "2", "--blocks", "4", "--block-size", "1MiB")
_END_S_MAX = 20.0


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder with a short name: where the name of the temporary folder is long, sockets are elsewhere."""
    with tempfile.TemporaryDirectory(prefix="kvb-", dir="/tmp") as name:
        yield Path(name)


def start_bench(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    """The command with its temporary files in `folder`."""
    command = [sys.executable, "-m", "kvstore_client.cli", "bench", *arguments]
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def figures_of(*arguments: str, folder: Path) -> dict[str, Any]:
    process = start_bench(*arguments, "--json", folder=folder)
    shown, errors = process.communicate()
    assert process.returncode == 0, errors
    assert list(folder.iterdir()) == []
    found: dict[str, Any] = json.loads(shown)
    return found


def test_node_tells_what_the_page_says(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 20)  # too long for a socket in it
    folder.mkdir()
    found = figures_of("node", *_SMALL, folder=folder)
    assert found["benchmark"] == "node"
    assert (found["block_count"], found["block_bytes"]) == (4, 1 << 20)
    for name in ("get_vs_memcpy", "put_vs_memcpy", "get_4_clients_vs_memcpy_4", "put_4_clients_vs_memcpy_4"):
        assert found[name] > 0, name
    assert found["get_vs_memcpy"] == pytest.approx(found["get_gb_per_s"] / found["memcpy_gb_per_s"], rel=1e-2)
    assert found["view_us_p50"] > 0
    assert found["view_first_us_p50"] > 0
    assert found["page_bytes"] in (4096, 2 << 20, 1 << 30)


def test_stream_tells_what_the_page_says_and_why_something_is_missing(tmp_path: Path) -> None:
    found = figures_of("stream", *_SMALL, folder=tmp_path)
    for path in ("grpc", "bulk"):
        for action in ("get", "put"):
            assert found[f"{path}_{action}_vs_tcp"] > 0
    assert found["nixl_vs_bare"] is not None or found["nixl_reason"]


def test_lookup_of_a_running_daemon_tells_what_the_page_says(daemon: DaemonProcess, tmp_path: Path) -> None:
    found = figures_of("lookup", "--rounds", "2", "--address", daemon.unix_address, folder=tmp_path)
    for count in (256, 8192):
        for name in (f"lookup_{count}", f"lookup_{count}_first"):
            assert 0 < found[f"{name}_p50_ms"] <= found[f"{name}_p99_ms"]
    assert found["lookups_per_s"] > 0
    if shutil.which("redis-server") is None:
        assert found["lookup_vs_redis"] is None
        assert "redis-server" in found["redis_reason"]
    else:
        assert found["lookup_vs_redis"] > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_benchmark_that_is_ended_leaves_no_process(number: signal.Signals, scratch: Path) -> None:
    process = start_bench("lookup", "--rounds", "1000000", folder=scratch)
    assert process.stderr is not None
    assert "0%" in process.stderr.readline()
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2, "a daemon and a client"
    process.send_signal(number)
    process.communicate(timeout=_END_S_MAX)
    _, alive = psutil.wait_procs(children, timeout=_END_S_MAX)
    assert alive == []
    if number == signal.SIGTERM:
        assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("node", "--block-size", "1000"), "--block-size is '1000 bytes'; allowed: a multiple of 64 bytes"),
        (("node", "--block-size", "much"), "--block-size is 'much'"),
        (("stream", "--address", "nowhere"), "--address is 'nowhere'"),
        (("lookup", "--rounds", "0"), "--rounds"),
        (("node", "--blocks", "0"), "--blocks"),
    ],
)
def test_wrong_input_is_named(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_every_benchmark_explains_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    for name, figure in (("node", "get_vs_memcpy"), ("stream", "grpc_get_vs_tcp"), ("lookup", "lookup_8192_p50_ms")):
        with pytest.raises(SystemExit):
            cli.main(["bench", name, "--help"])
        shown = capsys.readouterr().out
        assert figure in shown
        assert "Examples:" in shown


def test_a_block_that_came_back_changed_is_noticed() -> None:
    memory = Batches(batch_count=2, block_count=2, block_bytes=64, seed=0)
    for batch in (0, 1):
        memory.copy(batch)
    memory.check([0, 1])
    memory.target[1, 1, 63] ^= 1
    with pytest.raises(CorruptBlockError, match="block 1 of batch 1"):
        memory.check([0, 1])
    memory.clear([0])
    with pytest.raises(CorruptBlockError, match="block 0 of batch 0"):
        memory.check([0])


def test_the_batches_together_are_larger_than_the_caches() -> None:
    for batch_bytes in (4096, 32 << 20, 1 << 40):
        count = cold_batch_count(batch_bytes)
        assert count >= 4
        assert count * batch_bytes >= 2 * last_cache_bytes()


def test_the_raw_connection_moves_blocks_both_ways_from_a_common_start() -> None:
    spec = TcpSpec(block_count=3, block_bytes=1 << 16, batch_count=2, seed=0)
    with Worker(spec.command(), name="first") as first, Worker(spec.command(), name="second") as second:
        for worker in (first, second):
            worker.wait_ready()
            sample = worker.measure("put", [0, 1])
            assert len(sample.times_s) == 2
            assert 0 < sum(sample.times_s) <= sample.ended_s - sample.started_s
        assert together_s([first, second], "get", [0, 1]) > 0
        first.check()


def test_what_keeps_a_process_from_measuring_is_told() -> None:
    cases = {
        "import sys; sys.exit(3)": "the process that measures it has ended with status 3",
        """print('{"error": "no such thing"}')""": "no such thing",
    }
    for script, message in cases.items():
        with Worker([sys.executable, "-c", script], name="it") as worker, pytest.raises(UnavailableError) as raised:
            worker.wait_ready()
        assert str(raised.value) == message


def test_a_daemon_is_given_room_for_what_is_in_use_and_slabs_of_whole_slots() -> None:
    for block_bytes in (64, 512, 2 << 20):
        slot_bytes = blocks.slot_bytes(block_bytes)
        assert slot_bytes % 4096 == 0
        assert slot_bytes - 4096 < block_bytes + 192 <= slot_bytes
        assert blocks.slab_bytes(block_bytes) % slot_bytes == 0
        for block_count in (1, 1000):
            room_bytes = blocks.capacity_bytes(block_count=block_count, block_bytes=block_bytes)
            assert room_bytes % blocks.slab_bytes(block_bytes) == 0
            assert room_bytes >= 2 * block_count * slot_bytes


def test_blocks_have_the_size_that_was_asked_for() -> None:
    for block_bytes in (64, 512, 1 << 20, 2 << 20, 320):
        assert blocks.namespace(block_bytes, revision="1").block_layout.payload_bytes == block_bytes
    with pytest.raises(InvalidArgumentError, match="--block-size"):
        blocks.namespace(65, revision="1")


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert (percentile(values, 50), percentile(values, 99), percentile(values, 100)) == (50, 99, 100)
    assert percentile([7.0], 99) == 7
    assert median([3.0, 1.0, 2.0]) == 2
    assert gb_per_s(10**9, [0.25, 0.5, 4.0]) == 2
    assert rounded(1234.56) == 1235


def test_page_sizes_are_read_from_what_the_kernel_tells(tmp_path: Path) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "1000-2000 rw-s 00000000 00:01 7 /memfd:a (deleted)\nKernelPageSize:        4 kB\nShmemPmdMapped:      0 kB\n"
        "200000-400000 rw-s 00000000 00:01 8 /huge/arena\nKernelPageSize:        4 kB\nFilePmdMapped:      2048 kB\n"
        "400000-600000 rw-s 00000000 00:0f 9 /memfd:hugetlb\nKernelPageSize:     2048 kB\n"
    )
    assert mapped_page_bytes(0x1FFF, smaps) == 4096
    assert mapped_page_bytes(0x200000, smaps) == 2 << 20
    assert mapped_page_bytes(0x400000, smaps) == 2 << 20
    assert mapped_page_bytes(0x700000, smaps) is None


def test_commands_to_redis_are_encoded_as_its_protocol_says() -> None:
    assert encode([b"MGET", b"a", b""]) == b"*3\r\n$4\r\nMGET\r\n$1\r\na\r\n$0\r\n\r\n"
