"""Who the blocks of an engine are of: its arguments, and the pool that it registered, as a namespace."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.errors import InvalidArgumentError
from kvstore.namespace import Namespace, Shard
from kvstore_client.integrations._blocks import BlockShape, EngineModel, StoreSettings
from kvstore_client.integrations._identity import canonical_json, model_label, model_revision

SETTINGS_VARIABLE = "KVSTORE_TENSORRT_LLM"
"""Settings as JSON: the engine passes nothing of its own to a connector."""

_LAYOUT = "opaque:tensorrt-llm.pool"


class ConnectorSettings(StoreSettings):
    """What this connector takes beside what every integration does."""

    recompute_s_per_block: float | None = None
    """Seconds that computing one block takes the engine: blocks that would be there later are not fetched. None: all
    are."""


@dataclass(frozen=True, kw_only=True)
class PoolShape:
    """One block of the registered pool, as the engine orders it: [layers, K and V, heads · tokens · head size]."""

    axes: tuple[int, ...]
    dtype: str
    element_bytes: int

    @property
    def layer_bytes(self) -> int:
        size = self.element_bytes
        for axis in self.axes[1:]:
            size *= axis
        return size


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What scheduler and workers know alike, from the same arguments."""

    engine: EngineModel
    tokens_per_block: int
    tp_size: int

    @classmethod
    def of(cls, llm_args: Any, settings: ConnectorSettings, *, engine_version: str) -> ServedModel:
        """Raises `InvalidArgumentError` for what cannot be stored, and where nobody knows what the weights are."""
        _check(llm_args)
        cache, model = llm_args.kv_cache_config, str(llm_args.model)
        speculative, quantisation = (
            getattr(llm_args, "speculative_config", None),
            getattr(llm_args, "quant_config", None),
        )
        return cls(
            engine=EngineModel(
                model=model_label(model),
                weights_revision=settings.weights_revision
                or model_revision(model, revision=getattr(llm_args, "revision", None)),
                settings={
                    "tensorrt_llm": engine_version,
                    "attention": str(getattr(llm_args, "attn_backend", None)),
                    "kv_dtype": str(getattr(cache, "dtype", None)),
                    "windows": getattr(cache, "max_attention_window", None),
                    "quantisation": _told(quantisation),
                    "speculative": _told(speculative),
                },
                tenant_salt=settings.tenant_salt,
            ),
            tokens_per_block=cache.tokens_per_block,
            tp_size=llm_args.tensor_parallel_size,
        )

    def namespace(self, pool: PoolShape, *, rank: int) -> Namespace:
        shape = BlockShape.of_bytes(
            layout=_LAYOUT,
            num_layers=pool.axes[0],
            tokens_per_block=self.tokens_per_block,
            layer_bytes=pool.layer_bytes,
        )
        return self.engine.namespace(
            shape,
            shard=Shard(tp_rank=rank, tp_size=self.tp_size),
            settings={"pool": [*pool.axes], "pool_dtype": pool.dtype},
        )

    @property
    def key(self) -> str:
        """Equal for the scheduler and the worker of one engine."""
        return canonical_json([self.engine.model, self.engine.settings, self.tokens_per_block, self.tp_size])


def read_settings(environment: Mapping[str, str] = os.environ) -> ConnectorSettings:
    text = environment.get(SETTINGS_VARIABLE) or "{}"
    try:
        found = json.loads(text)
    except ValueError:
        found = text
    if not isinstance(found, dict):
        raise InvalidArgumentError.of(f"${SETTINGS_VARIABLE}", text, "a JSON object")
    return ConnectorSettings.parse(found, where=f"${SETTINGS_VARIABLE}")


def _check(llm_args: Any) -> None:
    for name in ("pipeline_parallel_size", "context_parallel_size"):
        size = getattr(llm_args, name, 1) or 1
        if size != 1:
            raise InvalidArgumentError.of(name, size, "1 with this connector")
    dtype = str(getattr(llm_args.kv_cache_config, "dtype", "auto")).lower()
    if "fp4" in dtype:
        raise InvalidArgumentError.of("kv_cache_config.dtype", dtype, "no 4-bit type: its scales are outside the pool")


def _told(config: Any) -> object:
    return config.model_dump(mode="json") if hasattr(config, "model_dump") else str(config)
