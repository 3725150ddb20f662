"""SGLang's storage backend: what SGLang asks of one, translated. Works with SGLang 0.5.23."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType
from sglang.srt.runtime_context import get_model, get_server_args, get_serving

from kvstore.errors import InvalidArgumentError
from kvstore_client.hints import Hint
from kvstore_client.integrations.sglang.identity import HiCacheSettings, Place, read_identity
from kvstore_client.integrations.sglang.store import KV, PageStore, restorable

_LOG = logging.getLogger("kvstore.sglang")

_SGLANG_KEYS = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
"""What the extra config says to SGLang itself."""

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_SOURCE = HookSource(plugin_name="kvstore", dist_name="kvstore")
_UPDATES = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)


class _WeightUpdates:
    """Counts how often this process's weights were replaced: not every update of them has a version to tell it by."""

    def __init__(self) -> None:
        self.count = 0
        self._is_watching = False

    def watch(self) -> None:
        if not self._is_watching:
            self._is_watching = True
            for name in _UPDATES:
                HookRegistry.register(f"{_UPDATER}.{name}", self._note, HookType.BEFORE, source=_SOURCE)
            HookRegistry.apply_hooks()

    def _note(self, *_arguments: object, **_named: object) -> None:
        self.count += 1


_weight_updates = _WeightUpdates()


class KVStoreHiCache(HiCacheStorage):
    """Keeps HiCache's pages in the store of this node. Each rank looks up, loads and stores its own.

    SGLang takes the least of what its ranks found or loaded, so that a rank whose daemon fails costs hits, and never
    agreement. No method raises for the store, or waits longer than the client's deadlines.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        extra = {key: value for key, value in (storage_config.extra_config or {}).items() if key not in _SGLANG_KEYS}
        settings = HiCacheSettings.parse(extra, where="hicache_storage_backend_extra_config")
        arguments = get_server_args()
        named = {name: getattr(arguments, name) for name in type(arguments).__struct_fields__}
        # The path that the weights come from now, which is another one once they were replaced.
        named["model_path"] = get_model().model_path
        identity = read_identity(
            arguments=named,
            config=ModelConfig.from_server_args(arguments).hf_config.to_dict(),
            settings=settings,
            place=_place(storage_config),
            hashes=get_hash_str([1, 2, 3]),
        )
        _weight_updates.watch()
        self._clear_count = 0
        self._client = settings.open_client()
        self._store = PageStore(
            self._client,
            identity=identity,
            weights_now=lambda: (_weight_updates.count, get_serving().weight_version),
            prefill_tokens_per_s=settings.prefill_tokens_per_s,
            is_metered=storage_config.enable_storage_metrics,
        )
        if _weight_updates.count:
            self._store.stop("the model's weights were changed since the engine was started. Restart it")
        elif named["load_format"] == "dummy":
            self._store.stop("the model has made-up weights (load_format dummy)")
        model = identity.model
        _LOG.info("pages of %s (%s) are kept at %s", model.model, model.weights_revision, self._client.address)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._store.register(mem_pool_host, name=KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if _name(host_pool_name) != KV:
            self._store.register(host_pool, name=_name(host_pool_name))

    def exists(self, key: str) -> bool:
        return self._store.count_hits(KV, [key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return self._store.count_hits(KV, keys, hint=_hint(extra_info))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        kv_count = self._store.count_hits(KV, keys, hint=_hint(extra_info))
        lengths = set(range(1, kv_count + 1))
        counts = {KV: kv_count} if kv_count else {}
        for transfer in pool_transfers or ():
            # Groups of blocks never gate the KV, and a pool that is not told has no verdict.
            if not lengths or transfer.hit_policy is PoolHitPolicy.BLOCK_GROUPS:
                continue
            is_trailing = transfer.hit_policy is PoolHitPolicy.TRAILING_PAGES
            served = restorable(
                kv_count,
                self._store.find(_name(transfer.name), keys[:kv_count]),
                trailing_count=max(1, len(transfer.keys or ())) if is_trailing else None,
            )
            if served:
                counts[transfer.name] = served[-1]
            lengths &= set(served)
        return PoolTransferResult(max(lengths, default=0), counts, sorted(lengths))

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._store.load(KV, keys, host_indices, hint=_hint(extra_info))

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._store.store(KV, keys, host_indices, prefix_keys=_prefix_keys(extra_info), hint=_hint(extra_info))

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        hint = _hint(extra_info)
        return {
            transfer.name: self._store.load(_name(transfer.name), transfer.keys or [], transfer.host_indices, hint=hint)
            for transfer in transfers
        }

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        prefix_keys, hint = _prefix_keys(extra_info), _hint(extra_info)
        return {
            transfer.name: self._store.store(
                _name(transfer.name), transfer.keys or [], transfer.host_indices, prefix_keys=prefix_keys, hint=hint
            )
            for transfer in transfers
        }

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        [loaded] = self.batch_get([key], [target_location])
        return loaded

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        loaded = self._store.load_tensors(KV, keys, target_locations)
        return [target if is_loaded else None for target, is_loaded in zip(target_locations, loaded, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return all(self._store.store_tensors(KV, keys, values))

    def get_stats(self) -> StorageMetrics:
        prefetch_pages, prefetch_gb_per_s = self._store.loads.take()
        backup_pages, backup_gb_per_s = self._store.stores.take()
        return StorageMetrics(
            prefetch_pgs=prefetch_pages,
            backup_pgs=backup_pages,
            prefetch_bandwidth=prefetch_gb_per_s,
            backup_bandwidth=backup_gb_per_s,
        )

    def clear(self) -> None:
        """The blocks are of all engines, so they stay. This one finds none of them any more, until it is restarted."""
        self._clear_count += 1
        self._store.forget(f"{_launch()}#{self._clear_count}")

    def close(self) -> None:
        self._client.close()


def _place(config: HiCacheStorageConfig) -> Place:
    return Place(
        tp_rank=config.tp_rank,
        tp_size=config.tp_size,
        pp_rank=config.pp_rank,
        pp_size=config.pp_size,
        cp_rank=config.attn_cp_rank,
        cp_size=config.attn_cp_size,
        dcp_rank=config.dcp_rank,
        dcp_size=config.dcp_size,
        is_replicated=config.is_mla_model,
    )


def _launch() -> str:
    """Names this start of the engine, alike in all of its ranks on a node: the process that started them, and when."""
    started = Path(f"/proc/{os.getppid()}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return f"{os.getppid()}@{started}"


def _name(name: Any) -> str:
    return str(getattr(name, "value", name))


def _prefix_keys(extra_info: HiCacheStorageExtraInfo | None) -> Sequence[str] | None:
    return extra_info.prefix_keys if extra_info is not None else None


def _hint(extra_info: HiCacheStorageExtraInfo | None) -> Hint | None:
    """The session, where SGLang says of which one a call is."""
    session = (extra_info.extra_info or {}).get("session_id") if extra_info is not None else None
    if not session:
        return None
    try:
        return Hint(session=session)
    except InvalidArgumentError:  # a name that cannot be one; blocks move without it
        return None
