"""`kvstore plan`: published figures, every input said, every wrong one named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvstore_client import cli
from kvstore_server.plan.models import MODELS

GIB = 1 << 30
DESCRIBED = ("--layers", "80", "--heads", "64", "--head-dim", "128", "--dtype", "fp16")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["plan", *arguments])
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    return call


@pytest.fixture
def answer(run: Any) -> Any:
    def call(*arguments: str) -> dict[str, Any]:
        code, shown, error = run(*arguments, "--json")
        assert code == 0, error
        found: dict[str, Any] = json.loads(shown)
        return found

    return call


def test_a_described_model_of_80_layers_takes_20_gib_of_an_8k_sequence(answer: Any) -> None:
    found = answer(*DESCRIBED)
    assert found["bytes_per_token"] == 2_621_440
    assert found["bytes_per_block"] == 16 * 2_621_440
    assert found["bytes_per_sequence"] == 20 * GIB
    assert answer(*DESCRIBED, "--context", "2K")["bytes_per_sequence"] == 5 * GIB
    assert answer(*DESCRIBED, "--context", "6144")["bytes_per_sequence"] == 15 * GIB


def test_windows_of_2k_and_6k_take_5_and_15_gib(answer: Any) -> None:
    tiers = answer(*DESCRIBED, "--vram-window", "2048")["tiers"]
    assert (tiers["vram"]["window_tokens"], tiers["vram"]["window_bytes"]) == (2048, 5 * GIB)
    assert (tiers["memory"]["window_tokens"], tiers["memory"]["window_bytes"]) == (6144, 15 * GIB)


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [("llama-3-8b", 131_072), ("llama-3-70b", 327_680), ("deepseek-v3", 70_272), ("gemma-3-270m", 18_432)],
)
def test_known_models_take_what_is_known(name: str, bytes_per_token: int, answer: Any) -> None:
    assert answer(name)["bytes_per_token"] == bytes_per_token
    assert answer("--model", name)["bytes_per_token"] == bytes_per_token


def test_gemmas_windows_are_counted_apart(answer: Any) -> None:
    found = answer("gemma-3-270m", "--context", "32K")
    assert (found["bytes_per_token_full_layers"], found["bytes_per_token_window_layers"]) == (3_072, 15_360)
    assert found["bytes_per_sequence"] == 3_072 * 32_768 + 15_360 * 512
    assert found["model"]["window_tokens"] == 512


def test_fewer_kv_heads_and_smaller_elements_take_less(answer: Any) -> None:
    grouped = answer(*DESCRIBED, "--kv-heads", "8")["bytes_per_token"]
    assert grouped * 8 == 2_621_440
    assert answer("llama-3-8b", "--dtype", "fp8")["bytes_per_token"] == 65_536


def test_a_config_is_read_from_its_file_or_its_folder(answer: Any, tmp_path: Path) -> None:
    config = {
        "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert answer("--config", str(tmp_path / "config.json"))["bytes_per_token"] == 131_072
    found = answer("--config", str(tmp_path), "--params", "8B")
    assert found["bytes_per_token"] == 131_072
    assert found["gpu"]["weights_bytes"] == 16 * 10**9


def test_what_was_not_given_is_said_to_be_assumed_and_what_was_is_not(answer: Any, run: Any) -> None:
    assumed = answer("llama-3-8b")["assumed"]
    assert {"--context", "--concurrency", "--hit-rate", "--gpu-memory", "--link", "--disk", "--step-ms"} <= set(assumed)
    given = ("--context", "4K", "--hit-rate", "0.7", "--gpu-memory", "141GiB", "--prefill-tokens-per-s", "9000")
    found = answer("llama-3-8b", *given)
    assert not {"--context", "--hit-rate", "--gpu-memory", "--prefill-tokens-per-s"} & set(found["assumed"])
    assert found["inputs"]["context_tokens"] == 4096
    assert found["inputs"]["prefill_tokens_per_s"] == 9000
    assert re.search(r"^assumed +--concurrency 32: sequences", run("llama-3-8b")[1], flags=re.MULTILINE)


def test_people_get_a_table_and_each_formula_on_request(run: Any) -> None:
    code, shown, _ = run("llama-3-8b", "--concurrency", "200")
    assert code == 0
    table = dict(line.split(maxsplit=1) for line in shown.splitlines())
    assert table["token"] == "128.0KiB"
    assert table["block"] == "2.0MiB: 16 tokens"
    assert table["sequence"] == "1.0GiB: 8,192 tokens"
    assert {"model", "gpu", "vram", "memory", "nvme", "sequences", "transfer", "prefix", "watermarks"} <= set(table)
    explained = run("llama-3-8b", "--concurrency", "200", "--explain")[1]
    assert "= 32 layers * 8 KV head(s) * (128 K + 128 V) * 2 bytes = 131,072 bytes" in explained
    assert "= 131,072 * 8,192 = 1,073,741,824 bytes" in explained


def test_scripts_get_the_formulas_on_request(answer: Any) -> None:
    assert "formulas" not in answer("llama-3-8b")
    assert "131,072" in answer("llama-3-8b", "--explain")["formulas"]["token"][0]


def test_the_table_of_models_is_shown_with_its_sources(run: Any) -> None:
    code, shown, _ = run("--list-models")
    assert code == 0
    assert len(shown.splitlines()) == len(MODELS)
    assert "deepseek-v3" in shown
    found = json.loads(run("--list-models", "--json")[1])
    assert found["gemma-3-270m"]["bytes_per_token"] == 18_432


def test_warnings_come_with_stable_codes(answer: Any) -> None:
    found = answer("llama-3-8b", "--gpu-memory", "17GiB")
    assert found["warnings"][0]["code"] == "sequence-too-large"
    assert found["concurrency"]["without_tiers"] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("llama-3-70b", "--gpu-memory", "80GiB"),
        ("llama-3-70b", "--tp", "1"),
        ("deepseek-v3", "--tp", "8", "--json"),
        (*DESCRIBED, "--weights-bytes", "72.1GiB", "--gpu-memory", "80GiB"),
        (*DESCRIBED, "--params", "70B", "--pp", "1"),
    ],
)
def test_weights_that_do_not_fit_into_the_gpus_that_were_named_are_no_plan(
    arguments: tuple[str, ...], run: Any
) -> None:
    code, shown, error = run(*arguments)
    assert (code, shown) == (1, "")
    assert "the weights do not fit" in error
    assert "GPUs are needed (--tp, --pp)" in error


def test_of_gpus_that_nobody_has_named_there_are_as_many_as_the_weights_need(answer: Any, run: Any) -> None:
    assert (answer("llama-3-8b")["gpu"]["count"], "--tp" in answer("llama-3-8b")["assumed"]) == (1, False)
    found = answer("llama-3.1-405b")
    assert (found["inputs"]["tp"], found["inputs"]["pp"]) == (8, 2)
    assert found["gpu"]["weights_bytes"] * 16 >= 812 * 10**9
    assert found["gpu"]["room_bytes"] > 0
    assert {"--tp", "--pp"} <= set(found["assumed"])
    assert re.search(r"^assumed +--tp 8: the fewest GPUs", run("llama-3.1-405b")[1], flags=re.MULTILINE)


def test_a_capacity_that_was_given_and_is_not_needed_is_shown_all_the_same(run: Any) -> None:
    table = dict(
        line.split(maxsplit=1) for line in run("llama-3-8b", "--memory", "64GiB", "--nvme", "1TiB")[1].splitlines()
    )
    assert table["memory"] == "nothing; memory.capacity 64.0GiB is not needed"
    assert table["nvme"] == "nothing; nvme.capacity 1.0TiB is not needed"
    assert "memory     nothing\n" in run("llama-3-8b")[1]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "no model is given; allowed: --model NAME, --config FILE, or --layers"),
        (("gpt-4",), "--model is 'gpt-4'; allowed: llama-2-7b, "),
        (("llama3-8b",), "--model is 'llama3-8b'; did you mean llama-3-8b or "),
        (("llama-3-8b", "--model", "llama-3-8b"), "--model is 'llama-3-8b'; allowed: one model"),
        (("llama-3-8b", "--layers", "3"), "--layers is '3'; allowed: none beside --model"),
        (("llama-3-8b", "--kv-heads", "3"), "--kv-heads is '3'; allowed: none beside --model, only with --layers"),
        (("--layers", "80", "--head-dim", "128"), "--heads is missing"),
        (("--layers", "80", "--heads", "64"), "--head-dim is missing"),
        (("--layers", "0", "--heads", "64", "--head-dim", "128"), "--layers is '0'; allowed: a whole number from 1"),
        (("--layers", "x", "--heads", "64", "--head-dim", "128"), "--layers is 'x'; allowed: a whole number"),
        ((*DESCRIBED, "--kv-heads", "7"), "--kv-heads is 7; allowed: a divisor of --heads, 64"),
        (("llama-3-8b", "--dtype", "fp12"), "--dtype is 'fp12'; allowed: float32, "),
        (("llama-3-8b", "--context", "0"), "--context is '0'; allowed: 1 to "),
        (("llama-3-8b", "--context", "8KiB"), "--context is '8KiB'; allowed: "),
        (("llama-3-8b", "--context", "0.0001K"), "--context is '0.0001K'"),
        (("llama-3-8b", "--concurrency", "-1"), "--concurrency is '-1'"),
        (("llama-3-8b", "--concurrency", "9" * 30), "--concurrency is '999"),
        (("llama-3-8b", "--hit-rate", "1.5"), "--hit-rate is '1.5'; allowed: a number, 0 to 1"),
        (("llama-3-8b", "--hit-rate", "nan"), "--hit-rate is 'nan'"),
        (("llama-3-8b", "--gpu-memory", "lots"), "--gpu-memory is 'lots'; allowed: a size such as"),
        (("llama-3-8b", "--gpu-share", "0"), "--gpu-share is '0'; allowed: a number, above 0 to 1"),
        (("llama-3-8b", "--params", "8X"), "--params is '8X'; allowed: a number of parameters"),
        (("llama-3-8b", "--weights-bytes", "0"), "--weights-bytes is '0'; allowed: 1.0MiB to"),
        (("llama-3-8b", "--weights-bytes", "16"), "without a unit it is bytes: is 16GiB meant?"),
        (("llama-3-8b", "--gpu-memory", "80"), "without a unit it is bytes: is 80GiB meant?"),
        (("llama-3-8b", "--gpu-memory", "0.08"), "without a unit it is bytes"),
        (("llama-3-8b", "--memory", "512"), "without a unit it is bytes: is 512GiB meant?"),
        (("llama-3-8b", "--nvme", "2"), "without a unit it is bytes: is 2GiB meant?"),
        (("llama-3-8b", "--gpu-memory", "80MiB"), "--gpu-memory is '80MiB'; allowed: 1.0GiB to 1024.0PiB"),
        (("llama-3-8b", "--memory", "1KiB"), "--memory is '1KiB'; allowed: 1.0MiB to"),
        (("llama-3-8b", "--nvme", "1MiB"), "--nvme is '1MiB'; allowed: 0 for none, or 64.0MiB to"),
        (("llama-3-8b", "--link", "0"), "--link is '0'; allowed: a number, above 0"),
        (("llama-3-8b", "--disk", "inf"), "--disk is 'inf'"),
        (("llama-3-8b", "--step-ms", "fast"), "--step-ms is 'fast'"),
        (("llama-3-8b", "--prefill-tokens-per-s", "0"), "--prefill-tokens-per-s is '0'"),
        (("llama-3-8b", "--requests-per-s", "-3"), "--requests-per-s is '-3'"),
        (("llama-3-8b", "--block-tokens", "0"), "--block-tokens is '0'"),
        (("llama-3-8b", "--vram-window", "many"), "--vram-window is 'many'"),
        (("llama-3-8b", "--tp", "3"), "--tp is 3; allowed: a divisor of the model's 32 attention heads"),
        (("deepseek-v3", "--tp", "3"), "--tp is 3; allowed: a divisor of the model's 128 attention heads"),
        ((*DESCRIBED, "--kv-heads", "1", "--tp", "3"), "--tp is 3; allowed: a divisor of the model's 64 attention"),
        (("qwen2.5-0.5b", "--tp", "7"), "--tp is 7; allowed: a divisor or a multiple of the model's 2 KV heads"),
        (("llama-3-8b", "--tp", "0"), "'--tp': 0 is not in the range"),
        (("llama-3-8b", "--pp", "33"), "--pp is 33; allowed: 1 to 32"),
        (("--config", "/nowhere.json"), "--config is '/nowhere.json'; allowed: a readable config.json"),
    ],
)
def test_bad_input_is_named_with_what_is_allowed(arguments: tuple[str, ...], named: str, run: Any) -> None:
    code, shown, error = run(*arguments)
    assert code == 2
    assert named in error
    assert not shown


def test_a_config_that_is_no_json_or_says_too_little_is_named(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text, named in (("{", "JSON; this is not"), ("[]", "a JSON object"), ("{}", "num_hidden_layers is missing")):
        file.write_text(text, encoding="utf-8")
        code, _, error = run("--config", str(file))
        assert (code, named in error) == (2, True)


def test_the_help_teaches_by_example(run: Any) -> None:
    code, shown, _ = run("--help")
    assert code == 0
    for text in ("Examples:", "kvstore plan llama-3-8b", "bytes_per_token", "--explain"):
        assert text in shown


def test_every_known_model_has_a_plan(answer: Any) -> None:
    for name in MODELS:
        found = answer(name, "--concurrency", "64", "--context", "16K")
        assert found["bytes_per_sequence"] > 0
        assert found["tiers"]["unheld_tokens"] == 0
