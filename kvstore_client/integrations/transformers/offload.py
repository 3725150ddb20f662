"""Storing computed blocks in the background, from private copies."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from transformers import DynamicCache

from kvstore.errors import InvalidArgumentError, KvstoreError, UnavailableError
from kvstore.keys import BlockHash
from kvstore.namespace import Namespace
from kvstore_client.hints import Hint
from kvstore_client.integrations.transformers.blocks import ONLY_ROW, CacheRow, gather_blocks
from kvstore_client.integrations.transformers.results import BlockStore, Offloaded
from kvstore_client.integrations.transformers.said import ReuseLog
from kvstore_client.results import PutState


class Offloader:
    """Copies blocks out of caches at once and puts the copies on one background thread, in the order of the calls.

    Beyond `pending_bytes_max` of waiting copies offloads are DROPPED, and so is every one after `close`.
    """

    def __init__(
        self, client: BlockStore, namespace: Namespace, log: ReuseLog, *, blocks_per_put: int, pending_bytes_max: int
    ) -> None:
        if blocks_per_put < 1:
            raise InvalidArgumentError.of("blocks_per_put", blocks_per_put, "at least 1")
        self._client = client
        self._namespace = namespace
        self._layout = namespace.block_layout
        self._log = log
        self._blocks_per_put = blocks_per_put
        self._pending_bytes_max = pending_bytes_max
        self._pending_bytes = 0
        self._pending: set[Future[Offloaded]] = set()
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvstore-offload")

    def offload(
        self,
        hashes: Sequence[BlockHash],
        cache: DynamicCache,
        *,
        first_block: int,
        row: CacheRow = ONLY_ROW,
        behind: Future[Offloaded] | None = None,
        hint: Hint | None = None,
    ) -> Future[Offloaded]:
        """Stores the blocks of one row's chain from `first_block` on.

        `behind` is the offload of the blocks before them: what it cannot store, these could not be found without.
        Raises `InvalidArgumentError` where the cache does not hold those blocks.
        """
        count = len(hashes) - first_block
        size_bytes = count * self._layout.payload_bytes
        with self._lock:
            fits = self._pending_bytes + size_bytes <= self._pending_bytes_max
            if count and fits:
                self._pending_bytes += size_bytes
        if not count or not fits:
            return dropped(first_block=first_block, count=count)
        future: Future[Offloaded] | None = None
        try:
            blocks = gather_blocks(cache, self._layout, first_block=first_block, block_count=count, row=row)
            try:
                future = self._worker.submit(self._put_behind, behind, hashes, blocks, first_block, hint)
            except RuntimeError as error:  # closed, or the interpreter is on its way out
                return dropped(
                    first_block=first_block, count=count, error=UnavailableError(f"offloads have ended: {error}")
                )
            with self._lock:
                self._pending.add(future)
        finally:
            if future is None:
                self._forget(size_bytes)
        future.add_done_callback(lambda done: self._forget(size_bytes, done))
        return future

    def wait(self, timeout_s: float | None) -> bool:
        with self._lock:
            pending = set(self._pending)
        return not wait(pending, timeout=timeout_s).not_done

    def close(self) -> None:
        self._worker.shutdown(wait=True)

    def _forget(self, size_bytes: int, future: Future[Offloaded] | None = None) -> None:
        with self._lock:
            self._pending_bytes -= size_bytes
            if future is not None:
                self._pending.discard(future)

    def _put_behind(
        self,
        behind: Future[Offloaded] | None,
        hashes: Sequence[BlockHash],
        blocks: torch.Tensor,
        first_block: int,
        hint: Hint | None,
    ) -> Offloaded:
        # One thread works in the order of the calls, so what is to come before is done.
        if behind is not None and (behind.cancelled() or PutState.DROPPED in behind.result(timeout=0).states):
            return Offloaded(first_block=first_block, states=(PutState.DROPPED,) * blocks.shape[0], error=None)
        return self._put(hashes, blocks, first_block, hint)

    def _put(self, hashes: Sequence[BlockHash], blocks: torch.Tensor, first_block: int, hint: Hint | None) -> Offloaded:
        states: list[PutState] = []
        error: KvstoreError | None = None
        # In small puts: the first blocks are readable while later ones travel, and a kill loses only the rest.
        for start in range(0, blocks.shape[0], self._blocks_per_put):
            part = blocks[start : start + self._blocks_per_put]
            position = first_block + start
            try:
                result = self._client.put(
                    self._namespace,
                    hashes[position : position + part.shape[0]],
                    part,
                    parent_hash=hashes[position - 1] if position else None,
                    hint=hint,
                )
            except KvstoreError as failure:
                error = failure
                break
            states += result.states
            if result.error is not None or PutState.DROPPED in result.states:
                # What comes after a block without a place could not be found either.
                error = result.error
                break
        states += [PutState.DROPPED] * (blocks.shape[0] - len(states))
        self._log.answered(error)
        return Offloaded(first_block=first_block, states=tuple(states), error=error)


def dropped(*, first_block: int, count: int, error: KvstoreError | None = None) -> Future[Offloaded]:
    done: Future[Offloaded] = Future()
    done.set_result(Offloaded(first_block=first_block, states=(PutState.DROPPED,) * count, error=error))
    return done
