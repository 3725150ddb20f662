from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the [transformers] extra")
transformers = pytest.importorskip("transformers", reason="needs the [transformers] extra")

from kvstore.errors import UnavailableError  # noqa: E402
from kvstore.keys import BlockHash  # noqa: E402
from kvstore.messages import BlockState  # noqa: E402
from kvstore.namespace import Namespace  # noqa: E402
from kvstore_client.buffers import block_views  # noqa: E402
from kvstore_client.hints import Hint  # noqa: E402
from kvstore_client.results import (  # noqa: E402
    GetResult,
    LookupResult,
    PutResult,
    PutState,
    get_result,
    lookup_result,
    put_result,
)


class FakeStore:
    """Holds blocks in a dictionary, and can be gone, or go in mid-way, like a real daemon."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[bytes, bytes], bytes] = {}
        self.is_gone = False
        self.blocks_until_gone: int | None = None
        self.before_put: Callable[[], None] = lambda: None
        self.hints: list[tuple[str, Hint | None]] = []
        self.lookup_count = 0
        self.loaded_count = 0

    def lookup(
        self, namespace: Namespace, hashes: Sequence[BlockHash], *, wait_s: float = 0.0, hint: Hint | None = None
    ) -> LookupResult:
        self.hints.append(("lookup", hint))
        self.lookup_count += 1
        if self.is_gone:
            return lookup_result([BlockState.MISS] * len(hashes), error=UnavailableError("gone"))
        return lookup_result([self._state(namespace, block_hash) for block_hash in hashes], error=None)

    def get(
        self, namespace: Namespace, hashes: Sequence[BlockHash], into: Any, *, hint: Hint | None = None
    ) -> GetResult:
        self.hints.append(("get", hint))
        views = self._views(namespace, hashes, into, is_writable=True)
        states = []
        for block_hash, view in zip(hashes, views, strict=True):
            self._count_down()
            state = BlockState.MISS if self.is_gone else self._state(namespace, block_hash)
            if state is BlockState.HIT:
                view[:] = self.blocks[namespace.id, block_hash]
                self.loaded_count += 1
            states.append(state)
        return get_result(states, error=UnavailableError("gone") if self.is_gone else None)

    def put(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        blocks: Any,
        *,
        parent_hash: BlockHash | None = None,
        hint: Hint | None = None,
    ) -> PutResult:
        self.hints.append(("put", hint))
        self.before_put()
        views = self._views(namespace, hashes, blocks, is_writable=False)
        assert parent_hash is None or (namespace.id, parent_hash) in self.blocks, "a block before its parent"
        states = []
        for block_hash, view in zip(hashes, views, strict=True):
            self._count_down()
            known = (namespace.id, block_hash) in self.blocks
            if not self.is_gone and not known:
                self.blocks[namespace.id, block_hash] = bytes(view)
            states.append(PutState.DROPPED if self.is_gone else PutState.ALREADY_STORED if known else PutState.STORED)
        return put_result(states, error=UnavailableError("gone") if self.is_gone else None)

    def hint(self, namespace: Namespace, hashes: Sequence[BlockHash], hint: Hint) -> None:
        assert hashes, "a hint of nothing"
        self.hints.append(("hint", hint))

    def forget(self, namespace: Namespace, block_hash: BlockHash) -> None:
        del self.blocks[namespace.id, block_hash]

    def _state(self, namespace: Namespace, block_hash: BlockHash) -> BlockState:
        return BlockState.HIT if (namespace.id, block_hash) in self.blocks else BlockState.MISS

    def _views(self, namespace: Namespace, hashes: Sequence[BlockHash], buffers: Any, **kind: bool) -> list[memoryview]:
        size = namespace.block_layout.payload_bytes
        return block_views(buffers, block_count=len(hashes), block_bytes=size, field="buffers", **kind)

    def _count_down(self) -> None:
        if self.blocks_until_gone is not None:
            self.is_gone = self.blocks_until_gone <= 0
            self.blocks_until_gone -= 1


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _llama(**changes: Any) -> Any:
    settings = {"num_key_value_heads": 2, "head_dim": 64} | changes
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_common(6), **settings))


def _gemma(**changes: Any) -> Any:
    settings = {"num_key_value_heads": 1, "head_dim": 32, "sliding_window": 24} | changes
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**_common(7), **settings))


def _mistral(**changes: Any) -> Any:
    settings = {"num_key_value_heads": 4, "sliding_window": 20} | changes
    return transformers.MistralForCausalLM(transformers.MistralConfig(**_common(3) | settings))


def _qwen(**changes: Any) -> Any:
    settings = {"num_key_value_heads": 2, "head_dim": 32} | changes
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_common(3), **settings))


def _gpt2(**changes: Any) -> Any:
    config = transformers.GPT2Config(vocab_size=259, n_embd=64, n_layer=2, n_head=4, n_positions=512, **changes)
    return transformers.GPT2LMHeadModel(config)


def _deepseek_v3(**changes: Any) -> Any:
    """Latent attention: one head whose K (16) and V (8) planes differ."""
    ranks = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    experts = {"moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
    config = transformers.DeepseekV3Config(
        **_common(2), **ranks, **experts, num_key_value_heads=8, num_experts_per_tok=2, **changes
    )
    return transformers.DeepseekV3ForCausalLM(config)


def _common(num_layers: int) -> dict[str, Any]:
    return {
        "vocab_size": 259,
        "hidden_size": 512,
        "intermediate_size": 512,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 8,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": 257,
        "eos_token_id": 258,
    }


FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": _llama,
    "gemma3": _gemma,
    "mistral": _mistral,
    "qwen3": _qwen,
    "gpt2": _gpt2,
    "deepseek_v3": _deepseek_v3,
}


def build_model(family: str = "llama", *, seed: int = 0, **changes: Any) -> Any:
    """A tiny random model whose greedy output does not degenerate: weights wider than the library's default."""
    model = FAMILIES[family](**changes).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.normal_(std=0.06, generator=generator)
            else:
                parameter.fill_(0.0 if "bias" in name or family == "gemma3" else 1.0)
    return model


@pytest.fixture
def make_model() -> Callable[..., Any]:
    return build_model


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest) -> Any:
    return build_model(request.param)


@pytest.fixture(scope="session")
def llama() -> Any:
    return build_model("llama")


@pytest.fixture(scope="session")
def windowed() -> Any:
    """Small and fast; its window is a little more than a block."""
    return build_model("mistral", hidden_size=64, intermediate_size=64)


@pytest.fixture
def prompt() -> Callable[..., Any]:
    def make(token_count: int, *, seed: int = 1) -> Any:
        return torch.randint(3, 256, (token_count,), generator=torch.Generator().manual_seed(seed))

    return make
