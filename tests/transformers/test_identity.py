"""Two models share blocks only if each may use the other's; what cannot be told apart safely is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from kvstore.errors import InvalidArgumentError
from kvstore_client.integrations.transformers import PrefixCache, namespace_for
from kvstore_client.integrations.transformers.identity import adapter_digest, weights_digest

IDS = list(range(3, 3 + 49))


def test_the_same_model_built_twice_shares_blocks(make_model: Callable[..., Any], store: Any) -> None:
    with PrefixCache(make_model(), store) as first, PrefixCache(make_model(), store) as second:
        assert first.namespace == second.namespace
        first.prefill(IDS).offloaded.result()
        assert second.prefill(IDS).tokens_reused == 48


def test_other_weights_under_the_same_name_miss(make_model: Callable[..., Any], store: Any) -> None:
    with PrefixCache(make_model(seed=0), store) as first, PrefixCache(make_model(seed=1), store) as second:
        assert first.namespace.model == second.namespace.model
        first.prefill(IDS).offloaded.result()
        assert second.prefill(IDS).tokens_reused == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_dtype_misses(make_model: Callable[..., Any], dtype: torch.dtype) -> None:
    exact, other = (
        namespace_for(make_model(), weights_revision="a"),
        namespace_for(make_model().to(dtype), weights_revision="a"),
    )
    assert other.dtype == str(dtype).removeprefix("torch.")
    assert exact.id != other.id


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        {"rms_norm_eps": 1e-5},
        {"attention_bias": True},
    ],
)
def test_settings_that_change_k_and_v_miss_even_under_one_revision(
    make_model: Callable[..., Any], change: dict[str, Any]
) -> None:
    plain = namespace_for(make_model(), weights_revision="a")
    assert namespace_for(make_model(**change), weights_revision="a").id != plain.id


def test_another_sliding_window_misses(make_model: Callable[..., Any]) -> None:
    narrow, wide = (namespace_for(make_model("gemma3", sliding_window=size), weights_revision="a") for size in (24, 48))
    assert narrow.id != wide.id


def test_where_a_model_was_loaded_from_does_not_matter(make_model: Callable[..., Any], tmp_path: Path) -> None:
    names = []
    for parent in ("here", "there"):
        folder = tmp_path / parent / "model"
        make_model().save_pretrained(folder)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        names.append(namespace_for(loaded))
    assert names[0] == names[1]
    assert names[0].model == "model"


def test_tenants_tokenizers_and_block_sizes_keep_apart(llama: Any) -> None:
    spaces = [
        namespace_for(llama),
        namespace_for(llama, tenant_salt=b"a"),
        namespace_for(llama, tenant_salt=b"b"),
        namespace_for(llama, tokenizer="another"),
        namespace_for(llama, tokens_per_block=32),
    ]
    assert len({space.id for space in spaces}) == len(spaces)


class LoraLinear(nn.Module):
    """Laid out as PEFT lays out a wrapped layer."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, base: nn.Linear, *, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, base.out_features, bias=False)})
        self.scaling = {"default": 2.0}
        self.active_adapters = ["default"]
        self.disable_adapters = False
        with torch.no_grad():
            for parameter in (*self.lora_A.parameters(), *self.lora_B.parameters()):
                parameter.normal_(std=0.1, generator=generator)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self.base_layer(hidden)
        if not self.disable_adapters:
            out = out + self.lora_B["default"](self.lora_A["default"](hidden)) * self.scaling["default"]
        return out


def add_adapter(model: Any, *, seed: int) -> Any:
    attention = model.model.layers[2].self_attn
    attention.k_proj = LoraLinear(attention.k_proj, seed=seed).eval()
    return model


def test_adapters_miss_by_content_even_under_one_name_and_revision(make_model: Callable[..., Any]) -> None:
    base = namespace_for(make_model(), weights_revision="a")
    first, again, other = (
        namespace_for(add_adapter(make_model(), seed=seed), weights_revision="a") for seed in (1, 1, 2)
    )
    assert base.lora == "none"
    assert first.id == again.id
    assert len({base.id, first.id, other.id}) == 3


def test_adapter_scaling_and_activity_are_part_of_the_identity(make_model: Callable[..., Any]) -> None:
    model = add_adapter(make_model(), seed=1)
    layer = model.model.layers[2].self_attn.k_proj
    digests = [adapter_digest(model)]
    layer.scaling["default"] = 4.0
    digests.append(adapter_digest(model))
    layer.disable_adapters = True
    digests.append(adapter_digest(model))
    assert len(set(digests)) == 3


def test_a_model_changed_under_a_prefix_cache_is_refused(make_model: Callable[..., Any], store: Any) -> None:
    model = make_model()
    with PrefixCache(model, store) as prefixes:
        prefixes.prefill(IDS).offloaded.result()
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight.add_(0.01)
        with pytest.raises(InvalidArgumentError, match="new PrefixCache"):
            prefixes.prefill(IDS)
    with PrefixCache(model, store) as prefixes:
        assert prefixes.prefill(IDS).tokens_reused == 0


def test_the_weights_are_hashed_once_per_model(make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore_client.integrations.transformers import identity

    model = make_model()
    first = weights_digest(model)

    def refuse(*_: object, **__: object) -> str:
        raise AssertionError("hashed twice")

    monkeypatch.setattr(identity, "_digest_tensors", refuse)
    assert weights_digest(model) == first


_IN_A_FRESH_PROCESS = """
import sys
import torch
from transformers import AutoModelForCausalLM
from kvstore.keys import hash_blocks
from kvstore_client.integrations.transformers import namespace_for
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
print(namespace_for(model).id.hex(), hash_blocks(range(64), tokens_per_block=16)[-1].hex())
"""


def test_two_fresh_processes_compute_the_same_keys(make_model: Callable[..., Any], tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path / "model")
    keys = {
        subprocess.run(
            [sys.executable, "-c", _IN_A_FRESH_PROCESS, str(tmp_path / "model")],
            env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(keys) == 1


def test_importing_the_client_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, kvstore_client; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_training_mode_is_refused(make_model: Callable[..., Any], store: Any) -> None:
    namespace = namespace_for(make_model())
    with pytest.raises(InvalidArgumentError, match=r"model.training.*dropout"):
        namespace_for(make_model().train())
    with pytest.raises(InvalidArgumentError, match="dropout"):
        PrefixCache(make_model().train(), store, namespace=namespace)


def test_an_adapter_that_was_added_in_training_mode_is_refused(make_model: Callable[..., Any]) -> None:
    """As PEFT adds them, with a dropout of their own, to a model that was put into evaluation mode before."""
    model = add_adapter(make_model(), seed=1)
    model.model.layers[2].self_attn.k_proj.train()
    with pytest.raises(InvalidArgumentError, match=r"k_proj\.training"):
        namespace_for(model)


def test_a_model_without_memory_has_a_namespace_by_its_revision(make_model: Callable[..., Any]) -> None:
    model = make_model()
    assert namespace_for(model.to("meta"), weights_revision="a") == namespace_for(make_model(), weights_revision="a")


@pytest.mark.parametrize("part", ["", "model.layers.2.self_attn"], ids=["whole model", "one layer"])
@pytest.mark.parametrize("is_given", [False, True], ids=["namespace of the model", "namespace given"])
def test_a_model_put_into_training_mode_under_a_prefix_cache_is_refused(
    make_model: Callable[..., Any], store: Any, part: str, is_given: bool
) -> None:
    """The mode changes K and V without touching a weight."""
    model = make_model(attention_dropout=0.5)
    with PrefixCache(model, store, namespace=namespace_for(model) if is_given else None) as prefixes:
        cache = prefixes.prefill(IDS).cache
        model.get_submodule(part).train()
        for call in (
            lambda: prefixes.prefill(IDS),
            lambda: prefixes.restore(IDS),
            lambda: prefixes.offload_later(IDS, cache),
        ):
            with pytest.raises(InvalidArgumentError, match=f"{part}.*training"):
                call()
        model.eval()
        prefixes.wait()
        assert prefixes.prefill(IDS).tokens_reused == 48


def test_a_model_that_is_met_under_autocast_is_refused(make_model: Callable[..., Any]) -> None:
    model = make_model()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(InvalidArgumentError, match="autocast"):
        namespace_for(model, weights_revision="a")


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_prompts_length_is_refused(make_model: Callable[..., Any], rope_type: str) -> None:
    model = make_model()
    model.config.rope_parameters = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(InvalidArgumentError, match=rope_type):
        namespace_for(model)


def test_layers_without_k_and_v_are_named() -> None:
    config = transformers.Qwen3NextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        layer_types=["full_attention", "linear_attention"],
        num_experts=0,
    )
    with pytest.raises(InvalidArgumentError, match="layer 1: linear_attention"):
        namespace_for(transformers.Qwen3NextForCausalLM(config).eval())


def test_recurrent_models_are_refused() -> None:
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2)
    with pytest.raises(InvalidArgumentError):
        namespace_for(transformers.MambaForCausalLM(config).eval())


def test_cross_attention_is_refused() -> None:
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    with pytest.raises(InvalidArgumentError, match="cross attention"):
        namespace_for(transformers.T5ForConditionalGeneration(config).eval())


def test_k_and_v_may_differ_in_head_dim(make_model: Callable[..., Any]) -> None:
    namespace = namespace_for(make_model("deepseek_v3"))
    assert (namespace.num_kv_heads, namespace.head_dim, namespace.v_head_dim) == (1, 16, 8)
