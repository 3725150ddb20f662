"""LMCache in the engine's process: its remote storage plug-in.

remote_storage_plugins: ["kvstore"]
extra_config:
  remote_storage_plugin.kvstore.module_path: kvstore_client.integrations.lmcache.connector
  remote_storage_plugin.kvstore.class_name: KVStoreConnectorAdapter
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import takewhile
from typing import Any, TypeAlias

from lmcache.v1.storage_backend.connector import ConnectorAdapter
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvstore.errors import InvalidArgumentError, KvstoreError
from kvstore_client.aio import AsyncClient
from kvstore_client.config import ClientConfig
from kvstore_client.integrations._identity import model_revision
from kvstore_client.integrations.lmcache.identity import (
    LOG,
    LMCacheSettings,
    Located,
    Namespaces,
    ObjectLayout,
    Revisions,
    Space,
    bytes_of,
    chunk_hash,
    hits,
    locate,
    worth_loading,
)

_PLUGIN = "kvstore"

_Names: TypeAlias = list[str]
_Objects: TypeAlias = list[Any]
_Found: TypeAlias = list[Any | None]
# Told here, as the class has a method `list`.


class KVStoreConnectorAdapter(ConnectorAdapter):
    """Makes the connector for the plug-in `kvstore`, or `kvstore.NAME` for more than one."""

    def __init__(self) -> None:
        super().__init__(f"plugin://{_PLUGIN}")

    def create_connector(self, context: Any) -> RemoteConnector:
        prefix = f"remote_storage_plugin.{context.plugin_name or _PLUGIN}."
        extra = context.config.extra_config or {}
        loader = ("module_path", "class_name")
        params = {
            name.removeprefix(prefix): value
            for name, value in extra.items()
            if name.startswith(prefix) and name.removeprefix(prefix) not in loader
        }
        return KVStoreRemoteConnector(
            params,
            where=prefix.removesuffix("."),
            config=context.config,
            metadata=context.metadata,
            allocator=context.local_cpu_backend,
        )


class KVStoreRemoteConnector(RemoteConnector):
    """Stores full chunks. A failure is a chunk that is not there; nothing raises for the store's sake.

    The coroutines run in LMCache's loop, `exists_sync` and `batched_contains` in the thread that asks. The daemon
    evicts by itself: `remove_sync` removes nothing and `list` knows no names.
    """

    def __init__(self, params: Mapping[str, Any], *, where: str, config: Any, metadata: Any, allocator: Any) -> None:
        super().__init__(config, metadata)
        if config.use_layerwise:
            raise InvalidArgumentError.of("use_layerwise", True, "false: a block holds all layers of a chunk")
        if config.remote_serde not in (None, "naive"):
            raise InvalidArgumentError.of(
                "remote_serde", config.remote_serde, "naive: blocks are of one size, and exact"
            )
        settings = LMCacheSettings.parse(params, where=where)
        self._recompute_s_per_chunk = settings.recompute_s_per_chunk
        if settings.weights_revision is None:
            # Before the engine serves, so it may take as long as reading the files does.
            settings = settings.model_copy(update={"weights_revision": model_revision(metadata.model_name)})
        self._allocator = allocator
        self._model = metadata.model_name
        self._layout = ObjectLayout.of(self.meta_shapes, self.meta_dtypes)
        self._settings = {
            "format": self.meta_fmt.name,
            "hash": config.pre_caching_hash_algorithm,
            "blending": config.enable_blending,
        }
        self._namespaces = Namespaces(
            settings, mode="remote", lmcache_version=version("lmcache"), revisions=Revisions(settings)
        )
        self._client = AsyncClient(settings.address, config=ClientConfig(transport=settings.transport))
        self._sync_client = settings.open_client()
        self._has_told_of_partial = False
        self._last_error: str | None = None

    async def exists(self, key: Any) -> bool:
        return await self.batched_async_contains("", [key]) == 1

    def exists_sync(self, key: Any) -> bool:
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Sequence[Any]) -> int:
        """Leading keys that are there."""
        found: set[int] = set()
        for part in self._located(keys):
            recompute_s = part.recompute_s_per_block(self._recompute_s_per_chunk)
            answer = self._sync_client.lookup(part.namespace, part.hashes, recompute_s_per_block=recompute_s)
            self._note(answer.error)
            found.update(part.whole_positions(worth_loading(answer)))
        return _leading_count(found, len(keys))

    async def batched_async_contains(self, lookup_id: str, keys: Sequence[Any], pin: bool = False) -> int:
        """See `batched_contains`; nothing is pinned, a chunk may be gone when it is asked for."""
        found: set[int] = set()
        for part in self._located(keys):
            recompute_s = part.recompute_s_per_block(self._recompute_s_per_chunk)
            answer = await self._client.lookup(part.namespace, part.hashes, recompute_s_per_block=recompute_s)
            self._note(answer.error)
            found.update(part.whole_positions(worth_loading(answer)))
        return _leading_count(found, len(keys))

    async def get(self, key: Any) -> Any | None:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: Sequence[Any]) -> _Found:
        """One memory object per key, which is the caller's, or None. Where memory runs out, so do the objects."""
        found: _Found = [None] * len(keys)
        for part in self._located(keys):
            targets = self._allocate(len(part.positions))
            loaded: set[int] = set()
            try:
                blocks = part.blocks(bytes_of(target) for target in targets)
                got = await self._client.get(part.namespace, part.hashes[: len(blocks)], blocks)
                self._note(got.error)
                loaded.update(part.whole_positions(hits(got.states)))
            finally:  # also when the wait was cancelled: by then nobody writes to them any more
                for at, target in zip(part.positions, targets, strict=False):
                    if at in loaded:
                        found[at] = target
                    else:
                        target.ref_count_down()
        return found

    def support_batched_get_non_blocking(self) -> bool:
        return True

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[Any]) -> _Objects:
        """The leading objects that are there."""
        got = await self.batched_get(keys)
        leading = list(takewhile(lambda each: each is not None, got))
        for behind in got[len(leading) :]:
            if behind is not None:
                behind.ref_count_down()
        return leading

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        """Chunks that follow each other in a prompt. Whoever called keeps and releases the objects."""
        full = [at for at, stored in enumerate(memory_objs) if self._is_full(stored)]
        for part in self._located([keys[at] for at in full]):
            blocks = part.blocks(bytes_of(memory_objs[full[at]]) for at in part.positions)
            put = await self._client.put(part.namespace, part.hashes, blocks)
            self._note(put.error)

    def remove_sync(self, key: Any) -> bool:
        return False

    async def list(self) -> _Names:
        return []

    async def close(self) -> None:
        self._sync_client.close()
        await self._client.aclose()

    def _located(self, keys: Sequence[Any]) -> Sequence[Located]:
        hashes = [chunk_hash(key.chunk_hash_hex, parts=key.tags or ()) for key in keys]
        return locate([self._space(key) for key in keys], hashes)

    def _space(self, key: Any) -> Space | None:
        if key.model_name != self._model:
            return None
        settings = {**self._settings, "dtype": str(key.dtype)}
        return self._namespaces.of(
            key.model_name, self._layout, worker=key.worker_id, worker_count=key.world_size, settings=settings
        )

    def _note(self, error: KvstoreError | None) -> None:
        """Says it once, not for every call while it lasts."""
        text = None if error is None else str(error)
        if text is not None and self._last_error is None:
            LOG.warning("the store does not serve LMCache: %s", text)
        self._last_error = text

    def _allocate(self, count: int) -> _Objects:
        """As many memory objects as there is room for, without waiting for more: the loop must go on."""
        targets: _Objects = []
        while len(targets) < count:
            target = self._allocator.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt, busy_loop=False)
            if target is None:
                break
            targets.append(target)
        return targets

    def _is_full(self, stored: Any) -> bool:
        is_full = int(stored.get_size()) == self._layout.object_bytes
        if not is_full and not self._has_told_of_partial:
            self._has_told_of_partial = True
            LOG.info(
                "chunks that are not full stay in LMCache: %d bytes of %d", stored.get_size(), self._layout.object_bytes
            )
        return is_full


def _leading_count(found: set[int], count: int) -> int:
    return next((at for at in range(count) if at not in found), count)
