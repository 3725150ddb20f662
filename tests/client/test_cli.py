"""The command teaches, answers scripts in JSON, and fails with one line and a meaningful code."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import click
import grpc
import pytest

from kvstore import __version__, wire
from kvstore.errors import CapacityError
from kvstore.messages import NvmeState, NvmeStats, ReuseStats
from kvstore_client import cli
from tests.client.fake_daemon import FakeDaemon
from tests.conftest import DaemonProcess


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return int(ended.value.code or 0)


def test_help_names_every_command_without_loading_any() -> None:
    script = (
        "import sys; sys.argv = ['kvstore', '--help']\n"
        "from kvstore_client.cli import main\n"
        "try: main()\n"
        "finally: print([name for name in sys.modules if name in ('kvstore_server', 'gpu_agent', 'torch')])"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.endswith("[]\n")
    for name in ("serve", "ping", "stats", "config", "agent", "demo", "First steps", "KVSTORE_ADDRESS"):
        assert name in shown


def test_commands_show_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("ping", "stats"):
        assert run(name, "--help") == 0
        assert "Examples:" in capsys.readouterr().out


def test_the_demo_shows_its_help_without_what_it_needs_to_run() -> None:
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('rich', 'torch', 'transformers')))\n"  # None: cannot be imported
        "sys.argv = ['kvstore', 'demo', '--help']\n"
        "from kvstore_client.cli import main; main()"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "See the whole store at work" in shown


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert __version__ in capsys.readouterr().out


def test_ping_says_who_answers_and_how_fast(fake: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ping", "--address", fake.address) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{fake.address}: kvstore fake, serving, up 1.0 s, answers in ")
    assert run("ping", "--address", fake.address, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["epoch"] == fake.epoch.hex()
    assert 0 < answer["round_trip_s"] < 2
    assert shown.endswith(", transport grpc\n")
    assert answer["transport"] == "grpc"


def test_stats_come_as_lines_or_as_json(fake: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("stats", "--address", fake.address) == 0
    assert "blocks     0 stored" in capsys.readouterr().out
    assert run("stats", "--address", fake.address, "--json") == 0
    assert json.loads(capsys.readouterr().out)["block_count"] == 0


def test_the_ceiling_of_the_hit_rate_is_one_line_or_an_object(
    fake: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    reuse = ReuseStats(
        window_s=5_040.0,
        hit_count=60,
        miss_count=40,
        new_count=26,
        capacity_count=8,
        policy_count=2,
        admission_count=0,
        identity_count=4,
        failure_count=0,
        unoffered_count=0,
    )
    fake.rewrites["GetStoreStats"] = lambda stats: replace(stats, reuse=reuse, recent_reuse=reuse)
    assert run("stats", "--address", fake.address) == 0
    ratios = "hits 60.0% of a possible 74.0%; missing for capacity 8.0%, policy 2.0%, identity 4.0%"
    assert f"reuse      of the last 1 h 24 min: {ratios}\n" in capsys.readouterr().out
    assert run("stats", "--address", fake.address, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["recent_reuse"]["ceiling_ratio"] == pytest.approx(0.74)
    assert shown["reuse"]["gap_ratios"]["identity"] == pytest.approx(0.04)
    fake.rewrites.clear()
    assert run("stats", "--address", fake.address, "--json") == 0
    assert json.loads(capsys.readouterr().out)["reuse"] is None


NVME = NvmeStats(
    state=NvmeState.OK,
    reason="",
    capacity_bytes=64 << 30,
    used_bytes=12 << 30,
    block_count=6_000,
    segment_count=48,
    demoted_count=7_000,
    promoted_count=5,
    hit_count=4,
    written_bytes=14 << 30,
    read_bytes=10 << 20,
    evicted_count=1_000,
    dropped_count=0,
    corrupt_count=0,
    undemoted_count=3,
)


def test_stats_name_the_policies_in_force_and_what_became_of_prefetches(
    fake: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.rewrites["GetStoreStats"] = lambda stats: replace(stats, policy="phix")
    assert run("stats", "--address", fake.address) == 0
    assert "policy     phix\n" in capsys.readouterr().out
    nvme = replace(
        NVME,
        policy="phix, which follows lru at present",
        admission="worth",
        prefetch_started_count=100,
        prefetch_refused_count=7,
        prefetch_useful_count=30,
        prefetch_late_count=10,
        prefetch_wasted_count=20,
    )
    fake.rewrites["GetStoreStats"] = lambda stats: replace(stats, policy="phix", nvme=nvme)
    assert run("stats", "--address", fake.address) == 0
    shown = capsys.readouterr().out
    assert "policy     memory phix; NVMe phix, which follows lru at present, admission worth\n" in shown
    assert "prefetch   100 blocks: 30 useful (50% of those known), 10 late, 20 wasted; 7 not begun\n" in shown
    assert run("stats", "--address", fake.address, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["policy"], found["nvme"]["admission"], found["nvme"]["prefetch_wasted_count"]) == (
        "phix",
        "worth",
        20,
    )
    fake.rewrites.clear()
    assert run("stats", "--address", fake.address) == 0
    assert "policy" not in capsys.readouterr().out, "an older daemon does not tell"


@pytest.mark.parametrize("command", ["ping", "stats"])
def test_the_nvme_tier_is_one_line_or_an_object_and_nothing_where_there_is_none(
    command: str, fake: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*options: str) -> str:
        assert run(command, "--address", fake.address, *options) == 0
        return capsys.readouterr().out

    assert "nvme" not in shown()
    assert json.loads(shown("--json"))["nvme"] is None
    fake.nvme = NVME
    (line,) = (line for line in shown().splitlines() if line.startswith("nvme"))
    assert " ".join(line.split()).startswith("nvme ok 12.0 GiB of 64.0 GiB")
    nvme = json.loads(shown("--json"))["nvme"]
    assert (nvme["state"], nvme["capacity_bytes"], nvme["undemoted_count"]) == ("ok", 64 << 30, 3)


@pytest.mark.parametrize("command", ["ping", "stats"])
def test_a_degraded_nvme_tier_is_shown_with_its_reason(
    command: str, fake: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.nvme = replace(NVME, state=NvmeState.DEGRADED, reason="the file system is full")
    assert run(command, "--address", fake.address) == 0
    assert "nvme DEGRADED: the file system is full" in " ".join(capsys.readouterr().out.split())
    assert run(command, "--address", fake.address, "--json") == 0
    nvme = json.loads(capsys.readouterr().out)["nvme"]
    assert (nvme["state"], nvme["reason"]) == ("degraded", "the file system is full")


def test_the_environment_names_the_daemon(fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_ADDRESS", fake.address)
    assert run("ping") == 0


def test_no_daemon_is_exit_code_1_with_advice(fake: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    fake.close()
    assert run("ping", "--address", fake.address) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"Error: no daemon answers at {fake.address}")
    assert "kvstore serve" in captured.err
    assert "Traceback" not in captured.err


def test_a_hung_daemon_is_exit_code_1_by_the_timeout(fake: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    fake.hang(wire.GET_STORE_INFO)
    assert run("ping", "--address", fake.address, "--timeout", "0.2") == 1
    assert f"{fake.address} did not answer within 0.2 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["ping", "--address", "nonsense"], ["pign"], ["ping", "--timeout", "0"], ["ping", "--what"]]
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert "Error: " in capsys.readouterr().err


def test_a_mistyped_command_is_answered_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    run("pign")
    assert "serve, ping, stats" in capsys.readouterr().err


def test_a_command_whose_extra_is_missing_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_module(_: str) -> Any:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("kvstore_client.cli.importlib.import_module", import_module)
    assert run("agent", "--help") == 1
    message = capsys.readouterr().err
    assert "needs torch" in message
    assert "pip install '.[agent]'" in message


def test_an_operating_error_of_any_command_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command()
    def fails() -> None:
        raise CapacityError("too much")

    monkeypatch.setattr(cli, "_load", lambda _name, _entry: fails)
    assert run("serve") == 1
    assert capsys.readouterr().err == "Error: too much\n"


@pytest.mark.parametrize(("seconds", "shown"), [(0.5, "0.5 s"), (61, "1 min 1 s"), (3600, "1 h"), (90061, "1 d 1 h")])
def test_durations_are_readable(seconds: float, shown: str) -> None:
    assert cli._duration(seconds) == shown


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1.0 GiB"), (5 << 40, "5.0 TiB")],
)
def test_sizes_are_readable(size_bytes: int, shown: str) -> None:
    assert cli._size(size_bytes) == shown


def test_a_paused_daemon_is_called_hung_and_not_absent(
    daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.pause()
    try:
        assert run("ping", "--address", daemon.address, "--timeout", "4") == 1
    finally:
        daemon.resume()
    said = capsys.readouterr().err
    assert "hung or overloaded" in said or "hung, overloaded" in said
    assert "is it the right port?" in said
    assert "kvstore serve" not in said


def test_an_address_that_is_no_store_is_said_to_be_none(capsys: pytest.CaptureFixture[str]) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert run("ping", "--address", f"127.0.0.1:{port}") == 1
    finally:
        server.stop(0)
    assert "is no store daemon" in capsys.readouterr().err


@pytest.mark.parametrize("speaks", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"hello\r\n", b""])
def test_a_port_of_another_service_is_asked_after(speaks: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """The last one says nothing and hangs up at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, suppress(OSError):
                        connection.sendall(speaks)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            assert run("ping", "--address", f"127.0.0.1:{server.getsockname()[1]}", "--timeout", "1") == 1
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
    assert "is it the right port?" in capsys.readouterr().err
