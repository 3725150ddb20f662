"""The half of the connector that moves blocks, on every rank."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from threading import Lock
from typing import Any

import torch

from kvstore.errors import InvalidArgumentError
from kvstore.keys import BlockHash
from kvstore.namespace import Namespace
from kvstore_client.integrations.tensorrt_llm import pools
from kvstore_client.integrations.tensorrt_llm.interface import ENGINE_VERSION, KvCacheConnectorWorker, mpi_rank
from kvstore_client.integrations.tensorrt_llm.messages import Step
from kvstore_client.integrations.tensorrt_llm.model import PoolShape, ServedModel, read_settings
from kvstore_client.integrations.tensorrt_llm.plan import Save

_LOG = logging.getLogger("kvstore.integrations.tensorrt_llm")

_WAITING_BLOCKS_MAX = 4096
"""Blocks that may wait to be saved. Their requests keep them in the pool; behind a slow daemon the rest is dropped."""

_SAVE_BLOCKS = 32
"""Blocks that are reserved at a time: what is reserved is nobody else's meanwhile."""


class KVStoreWorker(KvCacheConnectorWorker):
    """Loads before the step, from memory alone; saves behind it, in a thread of its own."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        settings = read_settings()
        self._model = ServedModel.of(llm_args, settings, engine_version=ENGINE_VERSION)
        self._rank = mpi_rank() % self._model.tp_size
        self._client = settings.open_client()
        self._saver = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvstore-save")
        self._saves = Outstanding()
        self._finished: set[int] = set()
        self._pool: Any = None
        self._namespace: Namespace | None = None
        self._copy_stream: Any = None

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """One pool, [blocks, layers, K and V, heads · tokens · head size]; raises for one that is not dense."""
        if not kv_cache_tensor.is_contiguous() or kv_cache_tensor.dim() < 2:
            raise InvalidArgumentError.of(
                "kv_cache_tensor", f"of shape {[*kv_cache_tensor.shape]}, strided", "one dense pool, blocks first"
            )
        shape = PoolShape(
            axes=tuple(kv_cache_tensor.shape[1:]),
            dtype=str(kv_cache_tensor.dtype).removeprefix("torch."),
            element_bytes=kv_cache_tensor.element_size(),
        )
        self._namespace = self._model.namespace(shape, rank=self._rank)
        self._pool = kv_cache_tensor.view(len(kv_cache_tensor), -1).view(torch.int8)
        if self._pool.is_cuda:
            self._copy_stream = torch.cuda.Stream(self._pool.device)  # type: ignore[no-untyped-call]
        pools.register(self._model.key, shape)

    def start_load_kv(self, stream: Any) -> None:
        """Raises `UnavailableError` if what was offered cannot be loaded any more, rather than let the step run."""
        with torch.cuda.stream(stream) if self._pool is not None and self._pool.is_cuda else nullcontext():
            for load in self._step().loads:
                for block_id, block in load.pages(rank=self._rank):
                    self._pool[block_id].copy_(block)
                load.held[self._rank].check()

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """All layers are there when `start_load_kv` returns."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """A block holds all layers, so it is saved after the last."""

    def wait_for_save(self, stream: Any) -> None:
        """Waits for nothing: the blocks stay in the pool until `get_finished` has told that they are saved."""
        saves = [save for save in self._step().saves if self._saves.begin(save)]
        if not saves:
            return
        event = None
        if self._pool.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        for save in saves:
            self._saver.submit(self._save, save, event).add_done_callback(_report)

    def get_finished(
        self, finished_gen_req_ids: Sequence[int], started_loading_req_ids: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        self._finished.update(finished_gen_req_ids)
        saved = [request_id for request_id in self._finished if not self._saves.is_saving(request_id)]
        self._finished.difference_update(saved)
        return saved, []

    def close(self) -> None:
        """Once this returns nothing touches the pool any more."""
        self._client.close()
        self._saver.shutdown(wait=True)

    def _step(self) -> Step:
        return self.get_connector_meta() or Step()

    def _save(self, save: Save, event: Any) -> None:
        assert self._namespace is not None, "blocks to save, but no pool"
        try:
            if event is not None:
                event.synchronize()
            known_count = self._client.lookup(self._namespace, save.hashes).matched_count
            for start in range(known_count, len(save.hashes), _SAVE_BLOCKS):
                parent_hash = save.hashes[start - 1] if start else save.parent_hash
                self._save_run(save, slice(start, start + _SAVE_BLOCKS), parent_hash=parent_hash)
        finally:
            self._saves.end(save)

    def _save_run(self, save: Save, run: slice, *, parent_hash: BlockHash | None) -> None:
        assert self._namespace is not None, "blocks to save, but no pool"
        with self._client.reserve(self._namespace, save.hashes[run], parent_hash=parent_hash) as reserved:
            with torch.cuda.stream(self._copy_stream) if self._copy_stream is not None else nullcontext():
                for block_id, slot in zip(save.block_ids[run], reserved.slots, strict=True):
                    if slot is not None:
                        torch.frombuffer(slot, dtype=torch.int8).copy_(self._pool[block_id])
            reserved.commit()


class Outstanding:
    """Saves that are waiting or under way, by request. Never more than `_WAITING_BLOCKS_MAX` blocks."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._block_count = 0
        self._save_counts: dict[int, int] = {}

    def begin(self, save: Save) -> bool:
        """False: too much is waiting, so these blocks are not saved."""
        with self._lock:
            if self._block_count + len(save.hashes) > _WAITING_BLOCKS_MAX:
                return False
            self._block_count += len(save.hashes)
            self._save_counts[save.request_id] = self._save_counts.get(save.request_id, 0) + 1
            return True

    def end(self, save: Save) -> None:
        with self._lock:
            self._block_count -= len(save.hashes)
            self._save_counts[save.request_id] -= 1
            if not self._save_counts[save.request_id]:
                del self._save_counts[save.request_id]

    def is_saving(self, request_id: int) -> bool:
        with self._lock:
            return request_id in self._save_counts


def _report(done: Future[None]) -> None:
    error = done.exception()
    if error is not None:
        _LOG.error("a save failed: %r", error, exc_info=error)
