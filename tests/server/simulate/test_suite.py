from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvstore.errors import InvalidArgumentError
from kvstore_client.cli import cli
from kvstore_server.simulate.bounds import foresee
from kvstore_server.simulate.capacity import Capacity
from kvstore_server.simulate.hints import RETURN_S, will_return, with_hints
from kvstore_server.simulate.traces import read_trace, write_trace
from tests.server.simulate.builders import SMOKE, trace_of

TRACES_VARIABLE = "KVSTORE_TEST_TRACES"
"""A folder of public traces; their figures below are of an independent simulator, in %."""
LRU_PERCENT = {
    "agents_text": (38.56, 56.18, 83.18, 90.29, 90.85),
    "mooncake_conv_a": (4.37, 5.20, 10.56, 20.01, 27.77),
    "mooncake_synth_a": (1.05, 1.38, 2.70, 5.78, 11.58),
    "smoke_mooncake_conv_300": (3.58, 3.58, 3.58, 3.58, 3.58),
    "synthetic_templates_a": (41.55, 48.94, 55.21, 57.23, 58.62),
    "weka_agentic_a": (5.32, 18.17, 64.39, 87.28, 94.29),
    "weka_agentic_a_large": (25.55, 56.75, 89.82, 94.81, 95.96),
}
CLAIRVOYANT_PERCENT = {
    "agents_text": (57.39, 72.96, 89.12, 90.88, 90.88),
    "mooncake_conv_a": (18.53, 24.74, 32.82, 34.65, 34.65),
    "mooncake_synth_a": (8.62, 12.78, 20.03, 26.18, 32.21),
    "smoke_mooncake_conv_300": (4.75, 5.68, 8.10, 8.10, 8.10),
    "synthetic_templates_a": (57.01, 59.30, 59.72, 59.72, 59.72),
    "weka_agentic_a": (34.12, 54.16, 81.82, 92.37, 95.58),
    "weka_agentic_a_large": (58.35, 78.57, 93.84, 96.05, 96.16),
}
TOLERANCE_POINTS = 0.3


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)), catch_exceptions=True)


def answer(*arguments: object) -> dict[str, Any]:
    found = run(*arguments, "--json", "--jobs", 1)
    assert found.exit_code == 0, found.output
    shown = json.loads(found.stdout)
    assert isinstance(shown, dict)
    return shown


def error_of(*arguments: object) -> str:
    found = run(*arguments)
    assert isinstance(found.exception, InvalidArgumentError), found.output
    return str(found.exception)


def assert_figures(shown: dict[str, Any], names: set[str]) -> None:
    assert {trace["name"] for trace in shown["traces"]} == names
    for trace in shown["traces"]:
        name, cells = trace["name"], trace["cells"]
        assert [cell["capacity"] for cell in cells] == ["1%", "2%", "5%", "10%", "20%"]
        lru = [cell["policies"]["lru"]["token_hit_rate_percent"] for cell in cells]
        assert lru == pytest.approx(LRU_PERCENT[name], abs=TOLERANCE_POINTS), name
        best = [cell["clairvoyant"]["token_hit_rate_percent"] for cell in cells]
        assert best == pytest.approx(CLAIRVOYANT_PERCENT[name], abs=TOLERANCE_POINTS), name


def test_a_suite_prints_per_trace_and_capacity_what_an_independent_simulator_found(tmp_path: Path) -> None:
    (tmp_path / SMOKE.name).write_bytes(SMOKE.read_bytes())
    (tmp_path / "README.md").write_text("no trace")
    shown = answer("simulate", "--suite", tmp_path, "--policy", "lru")
    assert_figures(shown, {"smoke_mooncake_conv_300"})
    trace = shown["traces"][0]
    assert (trace["requests"], trace["unique_blocks"], trace["tokens_per_block"]) == (300, 7814, 512)
    assert trace["infinite"]["token_hit_rate_percent"] == pytest.approx(8.10, abs=0.01)
    assert shown["gap_closed"] == {"lru": 0.0}
    assert shown["worst_vs_lru"] == {"lru": 0.0}
    assert shown["writes_vs_lru"] == {"lru": 1.0}
    assert shown["accesses_per_s"] > 0
    cell = trace["cells"][2]["policies"]["lru"]
    assert cell["written_blocks_per_request"] == pytest.approx(27.30, abs=0.01)


@pytest.mark.soak
def test_all_public_traces_give_the_figures_of_an_independent_simulator() -> None:
    folder = os.environ.get(TRACES_VARIABLE)
    if not folder:
        pytest.skip(f"{TRACES_VARIABLE} names no folder of traces")
    found = run("simulate", "--suite", folder, "--policy", "lru", "--json")
    assert found.exit_code == 0, found.output
    assert_figures(json.loads(found.stdout), set(LRU_PERCENT))


def test_several_processes_find_what_one_finds(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    write_trace(trace_of(*["abcd", "abce", "xyz", "abcd"] * 10), path, real="nothing")
    found = [run("simulate", path, "--capacity", "2,4", "--policy", "lru", "--json", "--jobs", jobs) for jobs in (1, 2)]
    shown = [json.loads(one.stdout)["traces"][0]["cells"] for one in found]
    for cell in [cell for cells in shown for cell in cells]:
        del cell["policies"]["lru"]["accesses_per_s"]
    assert shown[0] == shown[1]


def test_tiers_are_replayed_beside_exclusive_demotion(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    write_trace(trace_of(*["ab", "cd"] * 4), path, real="nothing")
    [shown] = answer("simulate", path, "--memory", "2", "--nvme", "8", "--policy", "lru", "--block-bytes", "1MiB")[
        "tier_replays"
    ]
    memory, nvme = shown["tiers"]
    assert (shown["policy"], shown["keep"], memory["name"], nvme["name"]) == ("lru", "retain", "memory", "nvme")
    assert (nvme["written_blocks"], nvme["written_bytes"]) == (4, 4 << 20)
    assert (nvme["token_hit_rate_percent"], memory["token_hit_rate_percent"]) == (75.0, 0.0)
    assert shown["exclusive"]["written_blocks"] == 14
    assert shown["writes_vs_exclusive"] == round(4 / 14, 4)
    assert shown["points_lost_vs_exclusive"] == 0.0
    assert shown["thrash_index_of_lru"] == shown["thrash_index"]
    assert shown["next_100_gib_points"] == 0.0, "all that is used again is in the tiers already"


def test_a_suite_with_tiers_has_two_and_three_of_them(tmp_path: Path) -> None:
    write_trace(trace_of(*["abcde", "fghij"] * 4), tmp_path / "made.jsonl", real="nothing")
    shown = answer("simulate", "--suite", tmp_path, "--tiers", "--capacity", "50%", "--policy", "lru")
    assert [one["tier_count"] for one in shown["tier_replays"]] == [2, 3]
    assert [tier["name"] for tier in shown["tier_replays"][1]["tiers"]] == ["vram", "memory", "nvme"]


def test_capacity_in_bytes_follows_from_what_a_block_has_or_from_the_model(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    write_trace(trace_of("abcdefghij"), path, real="nothing")
    by_bytes = answer("simulate", path, "--capacity", "5MiB", "--block-bytes", "1MiB", "--policy", "lru")
    assert by_bytes["traces"][0]["cells"][0]["capacity_blocks"] == 5
    # 128 KiB per token, and 10 tokens per block.
    by_model = answer("simulate", path, "--capacity", "4MiB", "--model", "llama-3-8b", "--policy", "lru")
    assert by_model["traces"][0]["block_bytes"] == 1_310_720
    assert by_model["traces"][0]["cells"][0]["capacity_blocks"] == 3
    assert "say with --block-bytes" in error_of("simulate", path, "--capacity", "4MiB", "--jobs", 1)


def test_people_get_a_table_and_what_more_memory_buys(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    write_trace(trace_of(*["abcd", "efgh"] * 4), path, real="nothing")
    said = run("simulate", path, "--capacity", "4", "--policy", "lru", "--block-bytes", "20GiB", "--jobs", 1).stdout
    assert "made: 8 requests in 7 s" in said
    assert "clairvoyant" in said
    assert "At 80.0GiB the next 100GiB buy 75.00 points of hit rate with lru." in said


@pytest.mark.parametrize(
    ("tiers", "said"),
    [
        (
            ("2", "8"),
            "lru, 2 tiers: NVMe is written 0.29 times as much as with exclusive demotion, for the same hit rate.",
        ),
        (("4", "3"), "lru, 2 tiers: NVMe is not written, as with exclusive demotion, for the same hit rate."),
        (("2", "2"), "times as much as with exclusive demotion, for a hit rate 37.50 points lower."),
    ],
)
def test_people_are_told_in_whole_sentences_what_tiers_cost(tiers: tuple[str, str], said: str, tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    write_trace(trace_of(*["ab", "cd"] * 4), path, real="nothing")
    memory, nvme = tiers
    arguments = ("--memory", memory, "--nvme", nvme, "--policy", "lru", "--block-bytes", "1MiB", "--jobs", 1)
    shown = run("simulate", path, *arguments).stdout
    assert said in shown
    assert "the next 100GiB of memory buy" in shown


def test_what_of_a_log_means_nothing_is_said_once_with_the_name_that_is_meant(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"token_ids": [1, 2], "sesion_id": 1, "model": "m"}\n' * 3, encoding="utf-8")
    found = run("simulate", path, "--block-tokens", 1, "--capacity", "1,2", "--policy", "lru", "--json", "--jobs", 1)
    said = "log: ignored, as they mean nothing here: `sesion_id` (3 lines; is `session_id` meant?), `model` (3 lines)"
    assert found.stderr.splitlines() == [said]
    assert json.loads(found.stdout)["traces"][0]["ignored_fields"] == {"sesion_id": 3, "model": 3}
    for command in (("info", path), ("convert", path, "--out", tmp_path / "out.jsonl")):
        assert run("trace", *command).stderr.splitlines() == [said]
    assert run("trace", "info", SMOKE).stderr == ""


def test_more_room_than_anybody_has_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    write_trace(trace_of(*["ab", "cd"] * 4), path, real="nothing")
    for arguments in (("--capacity", 10**12), ("--capacity", "1024PiB", "--block-bytes", 1)):
        [cell] = answer("simulate", path, *arguments)["traces"][0]["cells"]
        assert {shown["token_hit_rate_percent"] for shown in cell["policies"].values()} == {75.0}
    tiers = answer("simulate", path, "--vram", 4, "--memory", 10**12, "--nvme", 10**12)["tier_replays"]
    assert {one["token_hit_rate_percent"] for one in tiers} == {75.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no trace"),
        (("missing.jsonl", "--jobs", 1), r"TRACE is 'missing\.jsonl'"),
        (("--suite", "missing"), "--suite is 'missing'; allowed: a folder"),
        ((SMOKE, "--policy", "magic"), "--policy is 'magic'; allowed: "),
        ((SMOKE, "--capacity", "0%"), "--capacity is '0%'; allowed: a share"),
        ((SMOKE, "--capacity", "many"), "--capacity is 'many'; allowed: a share"),
        ((SMOKE, "--capacity", "10^12"), r"--capacity is '10\^12'; allowed: a share"),
        ((SMOKE, "--capacity", 10**13), "--capacity is '10000000000000'; allowed: .* up to 2"),
        ((SMOKE, "--capacity", "9" * 5000), "--capacity is '999.*; allowed: a share"),
        ((SMOKE, "--memory", "2000PiB", "--block-bytes", 1), "--memory is '2000PiB'; allowed: .* up to 1024PiB"),
        ((SMOKE, "--capacity", ","), "--capacity is ','; allowed: one value or more"),
        ((SMOKE, "--capacity", ""), "--capacity is ''; allowed: one value or more"),
        ((SMOKE, "--policy", " , "), "--policy is ' , '; allowed: one value or more"),
        ((SMOKE, "--memory", "101%"), "--memory is '101%'; allowed: a share"),
        ((SMOKE, "--memory", "5%", "--capacity", "5%"), "--capacity is '5%'; allowed: not with --vram"),
        ((SMOKE, "--watermarks", "0.9"), "--watermarks is '0.9'; allowed: two shares"),
        ((SMOKE, "--watermarks", "0.5,0.9"), "watermarks is"),
        ((SMOKE, "--block-bytes", "0"), "--block-bytes is '0'; allowed: 1 byte to 1.0TiB"),
        ((SMOKE, "--block-bytes", "9" * 400), "--block-bytes is '999.*; allowed: 1 byte to 1.0TiB"),
        ((SMOKE, "--block-bytes", "1MiB", "--model", "llama-3-8b"), "--model is 'llama-3-8b'; allowed: not with"),
        ((SMOKE, "--model", "gpt-1000"), "gpt-1000"),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_what_is_allowed(
    arguments: tuple[object, ...], message: str
) -> None:
    found = run("simulate", *arguments)
    assert isinstance(found.exception, InvalidArgumentError), found.output
    assert re.search(message, str(found.exception))


def test_capacities_are_shares_blocks_or_bytes() -> None:
    blocks = [
        Capacity.parse(text, field="--memory").in_blocks(unique_blocks=1000, block_bytes=1 << 20)
        for text in ("5%", "0.01%", "70", "64MiB", "1KiB")
    ]
    assert blocks == [50, 1, 70, 64, 1]


def test_hints_are_as_often_right_as_was_asked_for_and_the_same_for_a_seed() -> None:
    trace = trace_of(*["ab", "cd"] * 2, "ab", sessions=[0, 1, 0, 1, 2])
    future = foresee(trace)
    truth = [True, True, False, False, False]
    assert will_return(future) == truth
    chances = [0.0, 0.9, 0.0, 0.9, 0.5]
    told = with_hints(future, accuracy=0.8, chances=iter(chances)).requests
    assert [request.is_done for request in told] == [False, True, True, False, True]
    assert [request.expected_return_s for request in told] == [RETURN_S, None, None, RETURN_S, None]


def test_without_sessions_who_returns_is_whose_last_block_is_used_again() -> None:
    assert will_return(foresee(trace_of("abc", "ab", "abc", "abd"))) == [True, True, False, False]


def test_a_trace_is_shown_and_converted(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl.gz"
    said = run("trace", "convert", SMOKE, "--out", out)
    assert said.exit_code == 0, said.output
    assert "300 requests, 7,814 unique blocks" in said.stdout
    assert read_trace(out).requests == read_trace(SMOKE).requests
    shown = json.loads(run("trace", "info", out, "--json").stdout)
    assert (shown["requests"], shown["unique_blocks"], shown["tokens_per_block"]) == (300, 7814, 512)
    assert shown["infinite_percent"] == pytest.approx(8.10, abs=0.01)
    assert "300 of" in run("trace", "info", out).stdout
    assert "another file" in error_of("trace", "convert", out, "--out", out)


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        found = run("simulate", SMOKE, "--plot", tmp_path / "out.svg", "--jobs", 1)
        assert "pip install 'kvstore[plot]'" in str(found.exception)
        return
    path = tmp_path / "out.svg"
    assert run("simulate", SMOKE, "--policy", "lru", "--plot", path, "--jobs", 1).exit_code == 0
    assert "token hit rate" in path.read_text(encoding="utf-8")
