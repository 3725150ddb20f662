"""vLLM's own tiered offload over the store: the same tokens as from vLLM's own blocks, whatever becomes of the store.

Kinds of fault (users' reports): "a large retrieve hangs silently", "a disk hit took 40 s, recompute 0.9 s", "LoRA
missing from the key".
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DaemonProcess
from tests.engines.rig import Answer, EngineError

from .rig import BLOCK_TOKENS, Engine, Prompt, Reference

_ENGINE = f"kvstore-test-{os.getpid()}"
_CASES = [("tiny-llama", "bfloat16"), ("tiny-hybrid", "float32")]


@pytest.fixture(autouse=True)
def _host_tiers_go() -> Iterator[None]:
    """vLLM leaves its host tier in /dev/shm when it is killed."""
    yield
    for path in Path("/dev/shm").glob(f"vllm_offload_{_ENGINE}-*.mmap"):
        path.unlink()


def _prompts(count: int, *, seed: int = 0) -> list[Prompt]:
    """Neither is a multiple of a block: vLLM would count the last token as cached, though it computes it."""
    lengths = [12 * BLOCK_TOKENS - 1, 12 * BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS + 5]
    return [Prompt.random(lengths[index % 3], seed=1000 * (seed + 1) + index) for index in range(count)]


def _tiered(address: str, *, connector: str = "KVStoreTieringConnector", **extra: Any) -> dict[str, Any]:
    """The flag of the docs, with copies that the CPU platform can make."""
    return {
        "kv_connector": connector,
        "kv_connector_module_path": "kvstore_client.integrations.vllm_tier",
        "kv_role": "kv_both",
        "engine_id": f"{_ENGINE}-{uuid.uuid4()}",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 64 << 20,
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.engines.vllm.cpu_tiering",
            # A busy machine is to be no reason for a miss here.
            "secondary_tiers": [{"type": "KVStoreTier", "address": address, "lookup_timeout_s": 30.0} | extra],
        },
    }


def _ask(engine: Engine, prompts: list[Prompt]) -> list[Answer]:
    answers = engine.ask(*prompts)
    engine.settle()
    return answers


@pytest.mark.parametrize(("name", "dtype"), _CASES)
def test_a_new_process_loads_what_another_stored_and_says_the_same(
    name: str,
    dtype: str,
    models: dict[str, Path],
    reference: Callable[..., Reference],
    start_engine: Callable[..., Engine],
    daemon: DaemonProcess,
) -> None:
    prompts = _prompts(3)
    settings: dict[str, Any] = {"dtype": dtype, "kv_transfer_config": _tiered(daemon.unix_address)}
    engine = start_engine(models[name], **settings)
    for prompt in prompts:
        [answer] = _ask(engine, [prompt])
        assert answer.cached_count == 0
    engine.kill()
    engine = start_engine(models[name], **settings)
    warm = [_ask(engine, [prompt])[0] for prompt in prompts]
    engine.kill()
    alone = reference(models[name], dtype=dtype)
    for prompt, answer in zip(prompts, warm, strict=True):
        assert answer.cached_count == prompt.whole_count
        assert answer.token_ids == alone.answer(prompt, cached_count=prompt.whole_count).token_ids


def test_whatever_becomes_of_the_store_the_engine_computes(
    models: dict[str, Path],
    reference: Callable[..., Reference],
    start_engine: Callable[..., Engine],
    daemon: DaemonProcess,
) -> None:
    stored = _prompts(3, seed=1)
    flag = _tiered(daemon.unix_address, lookup_timeout_s=0.5)
    engine = start_engine(models["tiny-llama"], kv_transfer_config=flag)
    _ask(engine, stored)
    engine.kill()
    engine = start_engine(models["tiny-llama"], kv_transfer_config=flag)
    alone = reference(models["tiny-llama"], dtype="float32")

    def check(prompts: list[Prompt]) -> None:
        for prompt, answer in zip(prompts, _ask(engine, prompts), strict=True):
            assert answer.token_ids == alone.answer(prompt).token_ids

    check(_prompts(3, seed=2))
    daemon.pause()
    check([stored[0], *_prompts(2, seed=3)])
    daemon.resume()
    daemon.kill()
    check([stored[1], *_prompts(2, seed=4)])
    daemon.start()
    check([stored[2], *_prompts(2, seed=5)])
    log = engine.log()
    assert "blocks are computed and not loaded" in log
    assert "Traceback" not in log


def test_adapters_are_left_out_as_a_tier_is_not_told_of_them(
    models: dict[str, Path], start_engine: Callable[..., Engine], daemon: DaemonProcess
) -> None:
    """Two adapters of one name have the same block hashes."""
    settings: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": 8,
        "kv_transfer_config": _tiered(daemon.unix_address),
    }
    plain = Prompt.random(3 * BLOCK_TOKENS + 1, seed=77)
    adapted = plain.but(lora_name="adapter", lora_id=1, lora_path=str(models["tiny-lora"]))
    engine = start_engine(models["tiny-llama"], **settings)
    _ask(engine, [adapted])
    _ask(engine, [plain])
    engine.kill()
    engine = start_engine(models["tiny-llama"], **settings)
    [answer] = _ask(engine, [adapted.but(lora_path=str(models["tiny-lora-reseeded"]))])
    assert answer.cached_count == 0
    [answer] = _ask(engine, [plain])
    assert answer.cached_count == plain.whole_count


def test_below_another_connector_the_tier_says_what_it_needs(
    models: dict[str, Path], start_engine: Callable[..., Engine], daemon: DaemonProcess
) -> None:
    flag = _tiered(daemon.unix_address, connector="OffloadingConnector")
    del flag["kv_connector_module_path"]
    flag["kv_connector_extra_config"]["secondary_tiers"][0]["module_path"] = "kvstore_client.integrations.vllm_tier"
    with pytest.raises(EngineError, match="KVStoreTieringConnector"):
        start_engine(models["tiny-llama"], kv_transfer_config=flag)
