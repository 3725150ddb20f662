"""What may not be shared is not found: other weights, adapters, salts and types miss, under whatever name.

Kinds of fault (users' reports): "LoRA missing from the key", "layout changed between writer and reader, cache hit
anyway".
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conftest import DaemonProcess
from tests.engines.rig import Answer

from .rig import BLOCK_TOKENS, Engine, Prompt, connect, probe_prompt

_PROMPT = Prompt.random(3 * BLOCK_TOKENS + 1, seed=5)
_WITH_ADAPTERS: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}


def _adapted(path: Path, *, number: int) -> Prompt:
    """Whatever the adapter, its name is the same; vLLM tells adapters apart by their numbers."""
    return _PROMPT.but(lora_name="adapter", lora_id=number, lora_path=str(path))


def _ask(engine: Engine, prompt: Prompt) -> Answer:
    [answer] = engine.ask_afresh(prompt)
    return answer


def test_salts_and_adapters_have_blocks_of_their_own_which_other_processes_find(
    models: dict[str, Path], start_engine: Callable[..., Engine], daemon: DaemonProcess
) -> None:
    settings = _WITH_ADAPTERS | {"kv_transfer_config": connect(daemon.unix_address)}
    kinds = {
        "plain": _PROMPT,
        "salted": _PROMPT.but(salt="one tenant"),
        "salted otherwise": _PROMPT.but(salt="another tenant"),
        "adapted": _adapted(models["tiny-lora"], number=1),
        "adapted otherwise": _adapted(models["tiny-lora-reseeded"], number=2),
    }
    engine = start_engine(models["tiny-llama"], **settings)
    engine.wait_warm(probe_prompt())
    for kind in ("adapted", "adapted otherwise"):
        engine.wait_warm(Prompt(probe_prompt().token_ids, **kinds[kind].others))
    computed = {kind: _ask(engine, prompt) for kind, prompt in kinds.items()}
    assert {kind: answer.cached_count for kind, answer in computed.items()} == dict.fromkeys(kinds, 0)
    distinct = {computed[kind].token_ids for kind in ("plain", "adapted", "adapted otherwise")}
    assert len(distinct) == 3, "the adapters change nothing"
    engine.kill()

    engine = start_engine(models["tiny-llama"], **settings)
    engine.wait_warm(probe_prompt())
    for kind in ("adapted", "adapted otherwise"):
        engine.wait_warm(Prompt(probe_prompt().token_ids, **kinds[kind].others))
    for kind, prompt in kinds.items():
        answer = _ask(engine, prompt)
        assert answer.cached_count == prompt.whole_count, kind
        assert answer.token_ids == computed[kind].token_ids, kind


def test_other_weights_and_types_under_the_same_name_find_nothing_and_why_miss_names_them(
    models: dict[str, Path], start_engine: Callable[..., Engine], daemon: DaemonProcess, tmp_path: Path
) -> None:
    flag = connect(daemon.unix_address)
    model = tmp_path / "a model"
    shutil.copytree(models["tiny-llama"], model)
    engine = start_engine(model, kv_transfer_config=flag)
    engine.wait_warm(probe_prompt())
    before, again = engine.ask_afresh(_PROMPT, _PROMPT)
    assert (before.cached_count, again.cached_count) == (0, _PROMPT.whole_count)
    engine.kill()

    engine = start_engine(model, dtype="bfloat16", kv_transfer_config=flag)
    engine.wait_warm(probe_prompt())
    assert _ask(engine, _PROMPT).cached_count == 0
    engine.kill()

    shutil.copytree(models["tiny-llama-reseeded"], model, dirs_exist_ok=True)
    engine = start_engine(model, kv_transfer_config=flag)
    engine.wait_warm(probe_prompt())
    after = _ask(engine, _PROMPT)
    assert after.cached_count == 0
    assert after.token_ids != before.token_ids
    assert {"dtype", "weights_revision"} <= _differing_fields(daemon)


def _differing_fields(daemon: DaemonProcess) -> set[str]:
    """What `kvstore why-miss` says of the namespaces that the daemon has."""
    command = [sys.executable, "-c", "from kvstore_client.cli import main; main()", "why-miss", "--json"]
    command += ["--others", "9", "--timeout", "30", "--address", daemon.unix_address]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    return {field["field"] for space in told["namespaces"] for other in space["others"] for field in other["fields"]}
