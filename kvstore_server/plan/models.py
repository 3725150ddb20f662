"""Well-known models and what their layers keep. Each row was compared with the public source that it names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from kvstore.errors import InvalidArgumentError
from kvstore_server.plan.shape import AttentionLayer, Layer, StateLayer

_LITGPT = "github.com/Lightning-AI/litgpt litgpt/config.py"
_GEMMA = "github.com/google/gemma_pytorch gemma/config.py"
_GEMMA_270M = "huggingface.co config.json of models made from google/gemma-3-270m"
_DEEPSEEK = "github.com/deepseek-ai/DeepSeek-V3 inference/configs"
_GPT_OSS = "github.com/openai/gpt-oss gpt_oss/torch/model.py"
_MAXTEXT = "github.com/AI-Hypercomputer/maxtext configs/models"
_MEGATRON = "github.com/NVIDIA-NeMo/Megatron-Bridge tests/unit_tests/models/glm/test_glm45_bridge.py"

_SIMILAR_MAX = 4
_SIMILAR_FROM = 0.6
"""Share of letters in common from which a name may be meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The layers of a model and, where they are known, its size and who says so."""

    name: str
    layers: tuple[Layer, ...]
    num_heads: int | None = None
    """Attention heads, which tensor parallel GPUs share out; None: not known."""
    dtype: str = "bfloat16"
    """Of the KV cache, unless an engine is told otherwise."""
    params: float | None = None
    active_params: float | None = None
    """Parameters that work on each token; those of a dense model are all."""
    weights_bytes: int | None = None
    """As published."""
    source: str | None = None


def find_model(name: str) -> Model:
    """A model of the table, in any case; `InvalidArgumentError` names those that may be meant, or else all."""
    found = MODELS.get(name.strip().lower())
    if found is None:
        meant = similar_names(name)
        allowed = f"did you mean {' or '.join(meant)}?" if meant else f"allowed: {', '.join(MODELS)}."
        raise InvalidArgumentError(
            f"--model is {name!r}; {allowed} `kvstore plan --list-models` shows all that are known. "
            "Others: --config with the model's config.json, or --layers, --heads, --kv-heads and --head-dim"
        )
    return found


def similar_names(name: str) -> list[str]:
    """Those of the table that may be meant, the likeliest first.

    Neither case, hyphens nor who published it matter, nor what is behind it, such as `-Instruct`.
    """
    asked = _letters(name.rpartition("/")[2])
    if not asked:
        return []
    spelled = {_letters(known): known for known in MODELS}
    # Of those within what was asked for the longest says most of it; around it, the shortest adds least.
    within = sorted((one for one in spelled if one in asked), key=len, reverse=True)[:1]
    around = sorted((one for one in spelled if asked in one), key=len)
    close = get_close_matches(asked, spelled, n=_SIMILAR_MAX, cutoff=_SIMILAR_FROM)
    return [spelled[one] for one in list(dict.fromkeys([*within, *around, *close]))[:_SIMILAR_MAX]]


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def full(*, layers: int, kv_heads: int, head_dim: int) -> tuple[Layer, ...]:
    """Layers that all keep every token."""
    return (AttentionLayer(num_kv_heads=kv_heads, head_dim=head_dim, v_head_dim=head_dim),) * layers


def latent(*, layers: int, latent_dim: int, rope_dim: int, index_bytes: int = 0) -> tuple[Layer, ...]:
    """MLA: one vector for all heads, and no V."""
    layer = AttentionLayer(num_kv_heads=1, head_dim=latent_dim + rope_dim, v_head_dim=0, index_bytes=index_bytes)
    return (layer,) * layers


def windowed(*, layers: int, kv_heads: int, head_dim: int, window: int, every: int) -> tuple[Layer, ...]:
    """Each `every`-th layer keeps all tokens, those before it a window."""
    return tuple(
        AttentionLayer(
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=head_dim,
            window_tokens=window if (number + 1) % every else None,
        )
        for number in range(layers)
    )


def gated_delta(
    *, key_heads: int, value_heads: int, key_dim: int, value_dim: int, conv_kernel: int, state_element_bytes: int
) -> StateLayer:
    """A layer of Gated DeltaNet: one matrix for each value head, and what its convolution looks back at."""
    return StateLayer(
        recurrent_elements=value_heads * key_dim * value_dim,
        recurrent_element_bytes=state_element_bytes,
        conv_elements=(2 * key_heads * key_dim + value_heads * value_dim) * (conv_kernel - 1),
    )


def _qwen3_next() -> tuple[Layer, ...]:
    state = gated_delta(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_kernel=4, state_element_bytes=2)
    attention = full(layers=1, kv_heads=2, head_dim=256)
    return ((state,) * 3 + attention) * 12


def _rows() -> Iterable[Model]:
    def row(
        name: str,
        num_heads: int,
        layers: tuple[Layer, ...],
        source: str,
        *,
        billions: float,
        active: float | None = None,
        bytes_per_weight: int = 2,
        weights_bytes: int | None = None,
    ) -> Model:
        params = billions * 1e9
        return Model(
            name=name,
            layers=layers,
            num_heads=num_heads,
            params=params,
            active_params=params if active is None else active * 1e9,
            weights_bytes=round(params * bytes_per_weight) if weights_bytes is None else weights_bytes,
            source=source,
        )

    yield row("llama-2-7b", 32, full(layers=32, kv_heads=32, head_dim=128), _LITGPT, billions=6.74)
    yield row("llama-2-13b", 40, full(layers=40, kv_heads=40, head_dim=128), _LITGPT, billions=13.0)
    yield row("llama-2-70b", 64, full(layers=80, kv_heads=8, head_dim=128), _LITGPT, billions=69.0)
    for generation in ("llama-3", "llama-3.1"):
        yield row(f"{generation}-8b", 32, full(layers=32, kv_heads=8, head_dim=128), _LITGPT, billions=8.03)
        yield row(f"{generation}-70b", 64, full(layers=80, kv_heads=8, head_dim=128), _LITGPT, billions=70.6)
    yield row("llama-3.1-405b", 128, full(layers=126, kv_heads=8, head_dim=128), _LITGPT, billions=406)
    yield row("llama-3.2-1b", 32, full(layers=16, kv_heads=8, head_dim=64), _LITGPT, billions=1.24)
    yield row("llama-3.2-3b", 24, full(layers=28, kv_heads=8, head_dim=128), _LITGPT, billions=3.21)
    yield row("llama-3.3-70b", 64, full(layers=80, kv_heads=8, head_dim=128), _LITGPT, billions=70.6)
    llama_4 = windowed(layers=48, kv_heads=8, head_dim=128, window=8192, every=4)
    yield row("llama-4-scout", 40, llama_4, _MAXTEXT, billions=109, active=17)
    yield row("llama-4-maverick", 40, llama_4, _MAXTEXT, billions=400, active=17)

    yield row("qwen2.5-0.5b", 14, full(layers=24, kv_heads=2, head_dim=64), _LITGPT, billions=0.494)
    yield row("qwen2.5-1.5b", 12, full(layers=28, kv_heads=2, head_dim=128), _LITGPT, billions=1.54)
    yield row("qwen2.5-3b", 16, full(layers=36, kv_heads=2, head_dim=128), _LITGPT, billions=3.09)
    yield row("qwen2.5-7b", 28, full(layers=28, kv_heads=4, head_dim=128), _LITGPT, billions=7.62)
    yield row("qwen2.5-14b", 40, full(layers=48, kv_heads=8, head_dim=128), _LITGPT, billions=14.8)
    yield row("qwen2.5-32b", 40, full(layers=64, kv_heads=8, head_dim=128), _LITGPT, billions=32.8)
    yield row("qwen2.5-72b", 64, full(layers=80, kv_heads=8, head_dim=128), _LITGPT, billions=72.7)
    yield row("qwen3-0.6b", 16, full(layers=28, kv_heads=8, head_dim=128), _LITGPT, billions=0.596)
    yield row("qwen3-1.7b", 16, full(layers=28, kv_heads=8, head_dim=128), _LITGPT, billions=1.72)
    yield row("qwen3-4b", 32, full(layers=36, kv_heads=8, head_dim=128), _LITGPT, billions=4.02)
    yield row("qwen3-8b", 32, full(layers=36, kv_heads=8, head_dim=128), _LITGPT, billions=8.19)
    yield row("qwen3-14b", 40, full(layers=40, kv_heads=8, head_dim=128), _LITGPT, billions=14.8)
    yield row("qwen3-32b", 64, full(layers=64, kv_heads=8, head_dim=128), _LITGPT, billions=32.8)
    yield row("qwen3-30b-a3b", 32, full(layers=48, kv_heads=4, head_dim=128), _LITGPT, billions=30.5, active=3.35)
    yield row("qwen3-235b-a22b", 64, full(layers=94, kv_heads=4, head_dim=128), _LITGPT, billions=235, active=22.2)
    yield row("qwen3-coder-480b-a35b", 96, full(layers=62, kv_heads=8, head_dim=128), _MAXTEXT, billions=480, active=35)
    yield row("qwen3-next-80b-a3b", 16, _qwen3_next(), _MAXTEXT, billions=80, active=3)

    # Version 0.1 had a window of 4096; those since have none.
    yield row("mistral-7b", 32, full(layers=32, kv_heads=8, head_dim=128), _LITGPT, billions=7.25)
    yield row("mixtral-8x7b", 32, full(layers=32, kv_heads=8, head_dim=128), _LITGPT, billions=46.7, active=12.9)
    yield row("mixtral-8x22b", 48, full(layers=56, kv_heads=8, head_dim=128), _LITGPT, billions=141, active=39.2)
    yield row("phi-3-mini-128k", 32, full(layers=32, kv_heads=32, head_dim=96), _LITGPT, billions=3.82)
    yield row("phi-4", 40, full(layers=40, kv_heads=10, head_dim=128), _LITGPT, billions=14.7)
    yield row("phi-4-mini", 24, full(layers=32, kv_heads=8, head_dim=128), _LITGPT, billions=3.84)

    def gemma_2(layers: int, kv_heads: int, head_dim: int) -> tuple[Layer, ...]:
        return windowed(layers=layers, kv_heads=kv_heads, head_dim=head_dim, window=4096, every=2)

    def gemma_3(layers: int, kv_heads: int, head_dim: int, window: int) -> tuple[Layer, ...]:
        return windowed(layers=layers, kv_heads=kv_heads, head_dim=head_dim, window=window, every=6)

    yield row("gemma-2-2b", 8, gemma_2(26, 4, 256), _GEMMA, billions=2.61)
    yield row("gemma-2-9b", 16, gemma_2(42, 8, 256), _GEMMA, billions=9.24)
    yield row("gemma-2-27b", 32, gemma_2(46, 16, 128), _GEMMA, billions=27.2)
    yield row("gemma-3-270m", 4, gemma_3(18, 1, 256, 512), _GEMMA_270M, billions=0.268)
    yield row("gemma-3-1b", 4, gemma_3(26, 1, 256, 512), _GEMMA, billions=1.0)
    yield row("gemma-3-4b", 8, gemma_3(34, 4, 256, 1024), _GEMMA, billions=3.88)
    yield row("gemma-3-12b", 16, gemma_3(48, 8, 256, 1024), _GEMMA, billions=11.8)
    yield row("gemma-3-27b", 32, gemma_3(62, 16, 128, 1024), _GEMMA, billions=27.0)

    # Published with MXFP4 experts: the sizes of the checkpoints are those of OpenAI's model card.
    yield row(
        "gpt-oss-20b",
        64,
        windowed(layers=24, kv_heads=8, head_dim=64, window=128, every=2),
        _MAXTEXT,
        billions=20.9,
        active=3.61,
        weights_bytes=round(12.8 * (1 << 30)),
    )
    yield row(
        "gpt-oss-120b",
        64,
        windowed(layers=36, kv_heads=8, head_dim=64, window=128, every=2),
        _GPT_OSS,
        billions=116.8,
        active=5.13,
        weights_bytes=round(60.8 * (1 << 30)),
    )

    yield row(
        "deepseek-v2-lite", 16, latent(layers=27, latent_dim=512, rope_dim=64), _DEEPSEEK, billions=15.7, active=2.4
    )
    yield row("deepseek-v2", 128, latent(layers=60, latent_dim=512, rope_dim=64), _DEEPSEEK, billions=236, active=21)
    for name in ("deepseek-v3", "deepseek-r1"):
        layers = latent(layers=61, latent_dim=512, rope_dim=64)
        yield row(name, 128, layers, _DEEPSEEK, billions=671, active=37, bytes_per_weight=1)
    layers = latent(layers=61, latent_dim=512, rope_dim=64)
    yield row("kimi-k2", 64, layers, _MAXTEXT, billions=1000, active=32, bytes_per_weight=1)
    yield row("glm-4.5-air", 96, full(layers=46, kv_heads=8, head_dim=128), _MEGATRON, billions=106, active=12)
    yield row("glm-4.5", 96, full(layers=92, kv_heads=8, head_dim=128), _MEGATRON, billions=355, active=32)


MODELS: dict[str, Model] = {model.name: model for model in _rows()}
