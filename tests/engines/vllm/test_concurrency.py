"""Many requests at once, on an engine with too little room for them: the tokens are those of an engine without us.

Kinds of fault (users' reports): "only wrong under concurrency", "preemption freed blocks while an asynchronous store
read them: a poisoned key".
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DaemonProcess

from .rig import BLOCK_TOKENS, Engine, Prompt, connect, probe_prompt

_REQUEST_COUNT = 64
_SPARE_COUNT = 16
_TOKEN_COUNT = 40
"""Longer than a block, so that requests outgrow the room that they were let in with."""
_CRAMPED: dict[str, Any] = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 8 * BLOCK_TOKENS,
    "max_model_len": 16 * BLOCK_TOKENS,
}
_BLOCK_COUNTS = {"tiny-llama": 56, "tiny-hybrid": 140}
"""Room for a dozen of the 64 requests; every KV group takes blocks of its own."""


def _mixed_prompts() -> list[Prompt]:
    """Some with long common prefixes, some with short ones or none, most of them not whole blocks."""
    rng = random.Random(11)
    roots = [[rng.randrange(256) for _ in range(rng.randrange(5) * BLOCK_TOKENS)] for _ in range(8)]
    return [
        Prompt(rng.choice(roots) + [rng.randrange(256) for _ in range(rng.randrange(1, 3 * BLOCK_TOKENS))])
        for _ in range(_REQUEST_COUNT + _SPARE_COUNT)
    ]


@pytest.mark.parametrize("model_name", ["tiny-llama", "tiny-hybrid"])
def test_preempted_requests_give_the_tokens_that_they_give_without_the_store(
    model_name: str, models: dict[str, Path], start_engine: Callable[..., Engine], daemon: DaemonProcess
) -> None:
    settings = _CRAMPED | {"num_gpu_blocks_override": _BLOCK_COUNTS[model_name]}
    alone = start_engine(models[model_name], **settings)
    # Batches are put together in other ways, so last bits differ: a tie would be no fault.
    told = [
        (prompt, answer)
        for prompt, answer in zip(_mixed_prompts(), alone.ask(*_mixed_prompts(), token_count=_TOKEN_COUNT), strict=True)
        if answer.margin > 1e-4
    ][:_REQUEST_COUNT]
    alone.kill()
    assert len(told) == _REQUEST_COUNT
    prompts = [prompt for prompt, _ in told]

    engine = start_engine(models[model_name], kv_transfer_config=connect(daemon.unix_address), **settings)
    engine.wait_warm(probe_prompt())
    cached_counts = []
    for rung in ("cold", "warm"):
        engine.forget()
        answers = engine.ask(*prompts, token_count=_TOKEN_COUNT)
        engine.settle()
        differing = [number for number, answer in enumerate(answers) if answer.token_ids != told[number][1].token_ids]
        assert not differing, rung
        assert sum(answer.preemption_count for answer in answers) > 0, rung
        cached_counts.append(sum(answer.cached_count for answer in answers))
    assert cached_counts[1] > cached_counts[0]
