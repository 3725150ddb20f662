"""Whose blocks SGLang's pages are: what its server arguments, its ranks and its pools say, as namespaces.

SGLang's page hashes chain token ids, salts and adapter ids; they name neither model nor rank, so all of that is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from pydantic import Field

from kvstore.namespace import NONE, Namespace, Shard
from kvstore_client.client import Client
from kvstore_client.config import ClientConfig
from kvstore_client.integrations._blocks import EngineModel, StoreSettings
from kvstore_client.integrations._identity import (
    adapter_revision,
    canonical_json,
    files_digest,
    model_label,
    settings_digest,
    weights_revision,
)
from kvstore_client.integrations.sglang.pages import PagePool

_RANK_POOLS = frozenset({"mamba"})
"""Pools that every rank has a part of, even where the ranks of a model all hold the same KV."""

_COUNTED_WORDS = ("dtype", "quant", "rope", "precision")
_COUNTED = frozenset(
    # Server arguments that can shape K and V, or the hashes, beside those with a counted word in their name.
    {"page_size", "c128_page_size", "model_impl", "load_format", "weight_version", "modelopt_checkpoint_restore_path"}
    | {"custom_weight_loader", "decrypted_config_file", "language_only", "enable_multimodal", "mm_process_config"}
    | {"trust_mm_content_hashes", "speculative_algorithm", "speculative_draft_window_size", "enable_multi_layer_eagle"}
    | {"speculative_draft_sink_size", "enable_page_major_kv_layout", "enable_unified_memory", "forward_hooks"}
    | {"enable_int8_mamba_checkpoint", "kt_method", "kt_weight_path", "dllm_algorithm", "dllm_algorithm_config"}
    | {"ple_offload_embedding", "rl_on_policy_target"}
)


class HiCacheSettings(StoreSettings):
    """What `--hicache-storage-backend-extra-config` may say, beside SGLang's own keys."""

    call_timeout_s: float = Field(default=1.0, gt=0, le=60)
    """Seconds that a lookup or a reservation waits for the daemon. A hung one costs a request this much, then nothing
    is asked of it for a while."""
    prefill_tokens_per_s: float | None = Field(default=None, gt=0)
    """How fast this engine computes prompts: blocks that would be loaded more slowly are computed. None: all are
    loaded."""

    def open_client(self) -> Client:
        return Client(
            self.address, config=ClientConfig(transport=self.transport, control_timeout_s=self.call_timeout_s)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which part of the model this process holds."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1
    is_replicated: bool = False
    """All tensor-parallel ranks hold the same KV, as of a model with multi-head latent attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Of one engine process: makes the namespaces of its pools."""

    model: EngineModel
    lora: str
    place: Place
    since: str = ""
    """Not empty where blocks from before do not count; the same on all ranks of an engine."""

    def namespace(self, pool: PagePool, *, tokens_per_page: int) -> Namespace:
        """Of the pages of a pool, each for `tokens_per_page` tokens of the chain that its hash is of."""
        place = self.place
        is_shared = place.is_replicated and pool.name not in _RANK_POOLS and "MHA" not in pool.kind
        shard = Shard(
            tp_rank=0 if is_shared else place.tp_rank,
            tp_size=1 if is_shared else place.tp_size,
            pp_rank=place.pp_rank,
            pp_size=place.pp_size,
            dcp_rank=place.dcp_rank,
            dcp_size=place.dcp_size,
        )
        settings: dict[str, object] = {"pool": pool.identity, "tokens_per_page": tokens_per_page}
        settings |= {"cp": [place.cp_rank, place.cp_size], "since": self.since}
        return self.model.namespace(pool.shape, shard=shard, lora=self.lora, settings=settings)


def read_identity(
    *, arguments: Mapping[str, Any], config: Mapping[str, object], settings: StoreSettings, place: Place, hashes: str
) -> Identity:
    """Of server arguments and the model's config; `hashes` tells how the engine hashes.

    Reads the weights' files, or what is known of them. Raises `InvalidArgumentError` for a model or an adapter that
    cannot be told by its content, and `OSError` for files that cannot be read.
    """
    path = arguments["model_path"]
    revision = settings.weights_revision or weights_revision(path, revision=arguments.get("revision"))
    told: dict[str, object] = {"engine": "sglang", "hashes": hashes, "config": settings_digest(config)}
    told |= {name: value for name, value in arguments.items() if _is_counted(name) and value not in (None, "", [], {})}
    draft_path = arguments.get("speculative_draft_model_path")
    if draft_path:
        told["draft"] = weights_revision(draft_path, revision=arguments.get("speculative_draft_model_revision"))
    scales_path = arguments.get("quantization_param_path")
    if scales_path:
        told["quantization_param_path"] = files_digest([Path(scales_path)], root=Path(scales_path).parent)
    model = EngineModel(
        model=model_label(path), weights_revision=revision, settings=told, tenant_salt=settings.tenant_salt
    )
    return Identity(model=model, lora=_adapters(arguments), place=place)


def _is_counted(name: str) -> bool:
    return name in _COUNTED or any(word in name for word in _COUNTED_WORDS)


def _adapters(arguments: Mapping[str, Any]) -> str:
    """Adapters given at the start have the same id in every process, whatever their files hold: their content counts.

    Those that are loaded later have an id of their own each time, which is in the hashes.
    """
    given = {
        str(adapter.lora_id): _adapter_revision(adapter.lora_path) for adapter in arguments.get("lora_paths") or ()
    }
    if arguments.get("uno_lora_path"):
        given["uno"] = _adapter_revision(arguments["uno_lora_path"])
    return f"blake3:{blake3(canonical_json(given).encode()).hexdigest()}" if given else NONE


def _adapter_revision(path: str) -> str:
    return adapter_revision(path) if Path(path).exists() else weights_revision(path)
