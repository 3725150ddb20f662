"""What namespaces are made of never changes for who stores blocks already: the values here are what they were at first.

The models are stand-ins with settings of their own, as a real config gains fields with versions of the library.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kvstore_client.integrations.transformers import namespace_for

SETTINGS = {
    "_name_or_path": "maker/model",
    "transformers_version": "5.0.0",
    "dtype": "float32",
    "use_cache": True,
    "model_type": "standin",
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "sliding_window": None,
    "id2label": {0: "a"},
    "attn_implementation": "sdpa",
    "layer_types": ["full_attention", "sliding_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "quantization_config": {"bits": 8, "name": "ä"},
}


class StandInConfig:
    is_encoder_decoder = False

    def __init__(self, **changes: Any) -> None:
        self._settings = SETTINGS | changes
        for name, value in self._settings.items():
            setattr(self, name, value)

    def get_text_config(self, *, decoder: bool) -> StandInConfig:
        assert decoder
        return self

    def to_dict(self) -> dict[str, Any]:
        return dict(self._settings)


class StandIn(nn.Module):
    """Caches two heads of four dimensions per layer; its weights are the numbers from 0 on."""

    device = torch.device("cpu")

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.config = StandInConfig(**changes)
        self.embed = nn.Embedding(5, 3)
        with torch.no_grad():
            self.embed.weight.copy_(torch.arange(15.0).reshape(5, 3))
        self.register_buffer("scale", torch.ones(2, dtype=torch.bfloat16))

    def forward(self, input_ids: torch.Tensor, cache: Any = None, use_cache: bool = True) -> None:
        assert use_cache
        for layer in range(self.config.to_dict()["num_hidden_layers"]):
            plane = torch.zeros((1, 2, input_ids.shape[1], 4))
            cache.update(plane, plane, layer)


class Adapted(StandIn):
    """With a layer that is laid out as PEFT lays out a wrapped one."""

    def __init__(self) -> None:
        super().__init__()
        layer: Any = nn.Module()
        layer.adapter_layer_names = ("lora_A",)
        layer.lora_A = nn.ModuleDict({"default": nn.Linear(3, 1, bias=False)})
        layer.scaling, layer.active_adapters, layer.disable_adapters = {"default": 2.0}, ["default"], False
        with torch.no_grad():
            layer.lora_A["default"].weight.copy_(torch.arange(3.0)[None])
        self.wrapped = layer


class Words:
    def get_vocab(self) -> dict[str, int]:
        return {"b": 1, "a": 0, "é": 2}


@pytest.mark.parametrize(
    ("model", "named", "golden"),
    [
        pytest.param(
            StandIn(),
            {},
            "9a320a445ce3fd5db5ade5022a45c76b77b174f1eedc37cb1a3d894e92f40264",
            id="digest of the weights",
        ),
        pytest.param(
            StandIn(),
            {"weights_revision": "9c3b", "tenant_salt": b"7"},
            "3388c96727c9d9e0fd6552f20f73f5d16471bc247a3b042f469543c82ac7efa0",
            id="revision and salt",
        ),
        pytest.param(
            StandIn(_name_or_path=""),
            {"tokenizer": Words()},
            "db0ae18714a79f2325d7da3d5f3dd32c344f7dcfa26709b3c63731eeb25bf0e6",
            id="no name, a vocabulary",
        ),
        pytest.param(
            StandIn(notes="x" * 70_000),
            {"tokenizer": "words"},
            "c305a5f53983b16dc10b3d70547c60e59e2c67f5e96741b9b129cece79b9ec34",
            id="long settings",
        ),
        pytest.param(
            StandIn(rope_parameters={"rope_type": "linear", "notes": "x" * 70_000}),
            {},
            "b287184bd6e9926c2fcfc651f204b8f96119cb86e022e07f7d006558e4eecba4",
            id="long rope settings",
        ),
        pytest.param(
            Adapted(),
            {"weights_revision": "9c3b"},
            "3b96da87eafb62e283342c3e6027f105fe22e143df6abb107f9fe8adcad58862",
            id="an adapter",
        ),
    ],
)
def test_a_namespace_is_what_it_was(model: Any, named: dict[str, Any], golden: str) -> None:
    namespace = namespace_for(model.eval(), **named)
    assert namespace.id.hex() == golden, namespace
