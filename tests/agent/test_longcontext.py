"""The example of a serving loop: what a tiny model says with its K and V in pools, beside what it says by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the [transformers] extra")

from gpu_agent import AgentConfig, GpuAgent  # noqa: E402
from gpu_agent.bench.pools import AgentPool, Pool, WholePool  # noqa: E402
from gpu_agent.bench.serving import Batching, peak_count, serve  # noqa: E402
from gpu_agent.bench.sessions import Session, Turn  # noqa: E402
from gpu_agent.device.cpu import CpuDevice  # noqa: E402
from kvstore_client.integrations.transformers import namespace_for  # noqa: E402
from tests.agent.fakes import FakeStore  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "longcontext"
TOKENS_PER_BLOCK = 4
PROMPT_TOKENS, ANSWER_TOKENS = 30, 9
NAMES = [f"s{number}" for number in range(8)]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return pytest.importorskip("engine")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=None,  # so that it never ends by itself
    )
    return transformers.LlamaForCausalLM(config).eval()


def _prompts() -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randint(0, 97, (PROMPT_TOKENS,), generator=generator).tolist() for name in NAMES}


def _serve(engine: Any, model: Any, pool: Pool, namespace: Any) -> Any:
    return engine.Engine(model, pool, namespace.block_layout).serve(_prompts(), _steps(), progress=lambda _: None)


def _steps() -> list[Any]:
    turn = Turn(pause_steps=0, input_tokens=PROMPT_TOKENS, output_tokens=ANSWER_TOKENS)
    sessions = [Session(name=name, turns=(turn,)) for name in NAMES]
    return list(serve(sessions, Batching(batch_count=2, slice_steps=3, prefill_tokens=8)))


def _whole(engine: Any, model: Any, namespace: Any) -> Any:
    device = CpuDevice()
    try:
        pool = WholePool(device, slot_count=200, block_bytes=namespace.block_layout.payload_bytes)
        return _serve(engine, model, pool, namespace)
    finally:
        device.close()


def test_with_half_the_pool_every_logit_is_the_same_and_what_is_said_is_the_models_own(engine: Any, model: Any) -> None:
    namespace = namespace_for(model, tokens_per_block=TOKENS_PER_BLOCK, weights_revision="r1")
    whole = _whole(engine, model, namespace)
    block_bytes = namespace.block_layout.payload_bytes
    slot_count = peak_count(_steps(), tokens_per_block=TOKENS_PER_BLOCK) // 2
    config = AgentConfig(vram_capacity_bytes=slot_count * block_bytes, cooldown_steps=3)
    with GpuAgent(namespace, FakeStore(), config=config) as agent:
        tiered = _serve(engine, model, AgentPool(agent), namespace)
        agent.check_invariants()
        assert agent.snapshot().counters.reloaded_count > 0
    assert tiered.peak_bytes <= whole.peak_bytes / 2
    assert tiered.logits_digest == whole.logits_digest
    assert tiered.recomputed_tokens == 0
    for name, prompt in _prompts().items():
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=ANSWER_TOKENS + 1, do_sample=False)
        assert tiered.answers[name] == alone[0, PROMPT_TOKENS:].tolist()


def test_what_the_store_lost_is_computed_again(engine: Any, model: Any) -> None:
    namespace = namespace_for(model, tokens_per_block=TOKENS_PER_BLOCK, weights_revision="r1")
    whole = _whole(engine, model, namespace)
    slot_count = peak_count(_steps(), tokens_per_block=TOKENS_PER_BLOCK) // 2
    config = AgentConfig(
        vram_capacity_bytes=slot_count * namespace.block_layout.payload_bytes, cooldown_steps=3, room_wait_s=0.05
    )
    with GpuAgent(namespace, FakeStore(capacity_count=20), config=config) as agent:
        tiered = _serve(engine, model, AgentPool(agent), namespace)
        agent.check_invariants()
    assert tiered.recomputed_tokens > 0
    assert tiered.answers == whole.answers
