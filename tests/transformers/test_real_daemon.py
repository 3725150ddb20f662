"""The ladder against a real daemon: warm in another process, and a daemon that goes away and comes back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore_client import Client, ClientConfig
from kvstore_client.integrations.transformers import PrefixCache
from kvstore_client.results import GetResult
from tests.conftest import DaemonProcess
from tests.transformers.test_prefix_cache import assert_same_kv, compute, decode

IMPATIENT = ClientConfig(
    attach_timeout_s=2.0, control_timeout_s=2.0, breaker_cooldown_initial_s=0.01, breaker_cooldown_max_s=0.02
)

PATIENT = ClientConfig(attach_timeout_s=20.0, control_timeout_s=20.0, data_timeout_base_s=20.0)

_OTHER_PROCESS = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
from kvstore_client import Client
from kvstore_client.integrations.transformers import PrefixCache
folder, address, ids = json.load(sys.stdin)
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
with Client(address) as client, PrefixCache(model, client) as prefixes:
    prefill = prefixes.prefill(ids)
    print(json.dumps([prefill.tokens_reused, prefill.offloaded.result().stored_count]))
"""


def run_other_process(folder: Path, daemon: DaemonProcess, ids: Any) -> list[int]:
    run = subprocess.run(
        [sys.executable, "-c", _OTHER_PROCESS],
        input=json.dumps([str(folder), daemon.address, ids.tolist()]),
        capture_output=True,
        text=True,
        check=True,
    )
    result: list[int] = json.loads(run.stdout)
    return result


def test_another_process_finds_what_the_first_one_computed(
    make_model: Callable[..., Any], daemon: DaemonProcess, prompt: Callable[..., Any], tmp_path: Path
) -> None:
    model, ids = make_model("gemma3"), prompt(100)
    model.save_pretrained(tmp_path / "model")
    assert run_other_process(tmp_path / "model", daemon, ids) == [0, 6]
    kept, without_store = compute(model, ids, first_chunk=96)
    with Client(daemon.address) as client, PrefixCache(model, client) as prefixes:
        # Same weights under another name: a name alone never matches.
        assert prefixes.prefill(ids).tokens_reused == 0
    model.config._name_or_path = str(tmp_path / "model")
    with Client(daemon.address) as client, PrefixCache(model, client) as prefixes:
        warm = prefixes.prefill(ids)
        assert warm.tokens_reused == 96
        assert_same_kv(warm.cache, compute(model, ids)[0], token_count=96)
        assert decode(model, warm.logits, warm.cache) == without_store
    assert len(kept.layers) == 7


@pytest.mark.parametrize("address", ["address", "unix_address"])
def test_a_daemon_that_restarts_costs_one_recompute(
    llama: Any, daemon: DaemonProcess, prompt: Callable[..., Any], address: str
) -> None:
    ids = prompt(70)
    _, without_store = compute(llama, ids)
    with (
        Client(getattr(daemon, address), config=IMPATIENT) as client,
        PrefixCache(llama, client) as prefixes,
    ):
        assert prefixes.prefill(ids).offloaded.result().stored_count == 4
        assert prefixes.prefill(ids).tokens_reused == 64
        daemon.kill()
        while_gone = prefixes.prefill(ids)
        assert while_gone.tokens_reused == 0
        assert while_gone.restored.error is not None
        assert decode(llama, while_gone.logits, while_gone.cache) == without_store
        assert while_gone.offloaded.result().stored_count == 0
        daemon.start()
        # The first calls after an outage may still be within the client's cool-down.
        while not prefixes.prefill(ids).offloaded.result().stored_count:
            pass
        assert prefixes.prefill(ids).tokens_reused == 64


class DiesBeforeLoads:
    """A client whose daemon is killed once it has promised blocks."""

    def __init__(self, client: Client, daemon: DaemonProcess) -> None:
        self._client, self._daemon = client, daemon
        self.lookup, self.put, self.hint = client.lookup, client.put, client.hint

    def get(self, *arguments: Any, **options: Any) -> GetResult:
        self._daemon.kill()
        return self._client.get(*arguments, **options)


def test_a_batch_goes_on_when_the_daemon_dies_between_its_lookup_and_its_load(
    windowed: Any, daemon: DaemonProcess, prompt: Callable[..., Any]
) -> None:
    prompts = [prompt(70), prompt(100, seed=2), torch.cat([prompt(48), prompt(5, seed=3)])]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = [windowed.generate(ids[None], **options)[0, len(ids) :].tolist() for ids in prompts]
    with Client(daemon.unix_address, config=IMPATIENT) as client:
        with PrefixCache(windowed, client) as prefixes:
            cold = prefixes.generate(prompts, **options)
            assert [future.result().stored_count for future in cold.offloaded] == [4, 6, 0]
            warm = prefixes.generate(prompts, **options)
            assert sum(row.token_count for row in warm.reused) > 64 + 48
        with PrefixCache(windowed, DiesBeforeLoads(client, daemon)) as prefixes:
            left_alone = prefixes.generate(prompts, **options)
            assert [row.token_count for row in left_alone.reused] == [0, 0, 0]
            assert all(row.error is not None for row in left_alone.reused)
    for generation in (cold, warm, left_alone):
        assert generation.sequences[:, 100:].tolist() == expected


def test_ninety_six_prompts_at_once_say_what_they_say_without_a_store(
    make_model: Callable[..., Any], start_daemon: Callable[..., DaemonProcess], prompt: Callable[..., Any]
) -> None:
    """Kind of fault (users' reports): "only wrong under concurrency". The store is too small for all of them."""
    model = make_model("llama")
    daemon = start_daemon("--memory-capacity", "1MiB")
    shared = [prompt(64 + 16 * number) for number in range(8)]
    prompts = [torch.cat([shared[number % 8], prompt(12 + number)[-12:]]) for number in range(96)]
    with Client(daemon.unix_address, config=PATIENT) as client, PrefixCache(model, client) as prefixes:

        def answer(ids: Any) -> tuple[int, list[int]]:
            prefill = prefixes.prefill(ids)
            return prefill.tokens_reused, decode(model, prefill.logits, prefill.cache)

        with ThreadPoolExecutor(6) as threads:
            answers = list(threads.map(answer, prompts))
        prefixes.wait()
        stats = client.stats()
    differing = [
        number
        for number, (ids, (reused, said)) in enumerate(zip(prompts, answers, strict=True))
        if said != compute(model, ids, first_chunk=reused)[1]
    ]
    assert differing == []
    assert sum(reused > 0 for reused, _ in answers) > 10
    assert stats.evicted_count > 0
    assert (stats.reservation_count, stats.lease_count, stats.corrupt_count) == (0, 0, 0)
