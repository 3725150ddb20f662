"""Pages of SGLang's host pools in the store: which are there, into the pools, and out of them.

Nothing in it raises for a store that is gone, slow or full: what was not got is a miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from kvstore.errors import KvstoreError
from kvstore.keys import BlockHash
from kvstore.messages import BlockState
from kvstore.namespace import Namespace
from kvstore_client.hints import Hint
from kvstore_client.integrations._blocks import to_block_hash
from kvstore_client.integrations.sglang.identity import Identity
from kvstore_client.integrations.sglang.pages import Page, PagePool, tensor_bytes
from kvstore_client.reserved import Reserved
from kvstore_client.results import LookupResult, PutState
from kvstore_client.views import BlockView, Views

_LOG = logging.getLogger("kvstore.sglang")

BATCH_BYTES_MAX = 64 << 20
"""Bytes of blocks that are leased or reserved at once: as much as the client moves in one transfer."""

KV = "kv"
"""SGLang's name of the pool that holds K and V."""


class BlockStore(Protocol):
    """What is needed of a `kvstore_client.Client`."""

    def lookup(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        recompute_s_per_block: float | None = None,
        hint: Hint | None = None,
    ) -> LookupResult: ...
    def view(self, namespace: Namespace, hashes: Sequence[BlockHash], *, hint: Hint | None = None) -> Views: ...
    def reserve(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        parent_hash: BlockHash | None = None,
        hint: Hint | None = None,
    ) -> Reserved: ...


@dataclass(slots=True)
class Meter:
    """Pages and speed of what moved since somebody last asked, as SGLang's metrics have it."""

    page_counts: list[int] = field(default_factory=list)
    gb_per_s: list[float] = field(default_factory=list)

    def note(self, *, page_count: int, moved_bytes: int, took_s: float) -> None:
        self.page_counts.append(page_count)
        self.gb_per_s.append(moved_bytes / 1e9 / max(took_s, 1e-9))

    def take(self) -> tuple[list[int], list[float]]:
        taken = self.page_counts, self.gb_per_s
        self.page_counts, self.gb_per_s = [], []
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class _Registered:
    pool: PagePool
    namespace: Namespace


class PageStore:
    """The pools of one engine process and their blocks. For threads: SGLang looks up, loads and stores in three.

    `weights_now` tells apart the weights that the engine has now from those it had: once it tells something else,
    nothing is loaded or stored any more, as nobody knows by which weights pages in host memory were computed.
    """

    def __init__(
        self,
        client: BlockStore,
        *,
        identity: Identity,
        weights_now: Callable[[], object] = lambda: None,
        prefill_tokens_per_s: float | None = None,
        is_metered: bool = False,
    ) -> None:
        self._client = client
        self._identity = identity
        self._weights_now = weights_now
        self._weights = weights_now()
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._is_metered = is_metered
        self._pools: dict[str, _Registered] = {}
        self._logical: set[str] = set()
        self._tokens_per_page = 0
        self._lock = threading.Lock()
        self._is_stopped = False
        self._is_failing = False
        self.loads = Meter()
        self.stores = Meter()

    def register(self, pool: Any, *, name: str) -> None:
        """`pool` is SGLang's; its KV pool comes first."""
        pages = PagePool(pool, name=name)
        if name == KV:
            self._tokens_per_page = pages.page_size
        if pages.is_logical:
            self._logical.add(name)
            return
        self._pools[name] = _Registered(pool=pages, namespace=self._identify(pages))

    def namespace(self, name: str) -> Namespace:
        """Of the blocks of a registered pool."""
        return self._pools[name].namespace

    def forget(self, since: str) -> None:
        """From now on this engine finds nothing of what was stored before; `since` tells this moment from others."""
        self._identity = replace(self._identity, since=since)
        self._pools = {
            name: replace(registered, namespace=self._identify(registered.pool))
            for name, registered in self._pools.items()
        }

    def stop(self, reason: str) -> None:
        """From now on everything is a miss, and nothing is stored."""
        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
        _LOG.warning("nothing is loaded or stored any more: %s", reason)

    def find(self, name: str, keys: Sequence[str]) -> list[bool]:
        """Which pages are in the store, whatever they follow."""
        if name in self._logical:
            return [not self._is_off()] * len(keys)
        registered = self._pools.get(name)
        if registered is None or not keys or self._is_off():
            return [False] * len(keys)
        found = self._client.lookup(registered.namespace, [to_block_hash(key) for key in keys])
        self._note(found.error)
        return [state is BlockState.HIT for state in found.states]

    def count_hits(self, name: str, keys: Sequence[str], *, hint: Hint | None = None) -> int:
        """Leading pages that are in the store and, where the engine's speed is known, faster loaded than computed."""
        if name in self._logical:
            return 0 if self._is_off() else len(keys)
        registered = self._pools.get(name)
        if registered is None or not keys or self._is_off():
            return 0
        rate = self._prefill_tokens_per_s
        found = self._client.lookup(
            registered.namespace,
            [to_block_hash(key) for key in keys],
            recompute_s_per_block=None if rate is None else self._tokens_per_page / rate,
            hint=hint,
        )
        self._note(found.error)
        return found.matched_count

    def load(self, name: str, keys: Sequence[str], host_indices: Any, *, hint: Hint | None = None) -> list[bool]:
        """Which pages are in the pool now; those behind the first that is not are left as they were."""
        if name in self._logical:
            return [not self._is_off()] * len(keys)
        registered = self._pools.get(name)
        if registered is None or not keys:
            return [False] * len(keys)
        return self._load(registered, keys, registered.pool.pages(host_indices, page_count=len(keys)), hint=hint)

    def load_tensors(self, name: str, keys: Sequence[str], tensors: Sequence[Any]) -> list[bool]:
        """The same, into whole flat pages."""
        registered = self._pools.get(name)
        if registered is None or not keys:
            return [False] * len(keys)
        return self._load(registered, keys, [TensorPage(tensor) for tensor in tensors], hint=None)

    def store(
        self,
        name: str,
        keys: Sequence[str],
        host_indices: Any,
        *,
        prefix_keys: Sequence[str] | None = None,
        hint: Hint | None = None,
    ) -> list[bool]:
        """Which pages the store has now, or is getting from another engine. `prefix_keys` are those before them."""
        if name in self._logical:
            return [not self._is_off()] * len(keys)
        registered = self._pools.get(name)
        if registered is None or not keys:
            return [False] * len(keys)
        pages = registered.pool.pages(host_indices, page_count=len(keys))
        return self._store(registered, keys, pages, prefix_keys=prefix_keys, hint=hint)

    def store_tensors(self, name: str, keys: Sequence[str], tensors: Sequence[Any]) -> list[bool]:
        registered = self._pools.get(name)
        if registered is None or not keys:
            return [False] * len(keys)
        return self._store(registered, keys, [TensorPage(tensor) for tensor in tensors], prefix_keys=None, hint=None)

    def _load(
        self, registered: _Registered, keys: Sequence[str], pages: Sequence[Page], *, hint: Hint | None
    ) -> list[bool]:
        started_s = time.monotonic()
        loaded: list[bool] = []
        hashes = [to_block_hash(key) for key in keys]
        step = max(1, BATCH_BYTES_MAX // registered.pool.page_bytes)
        while len(loaded) < len(keys) and all(loaded) and not self._is_off():
            start = len(loaded)
            with self._client.view(registered.namespace, hashes[start : start + step], hint=hint) as views:
                self._note(views.error)
                for view, page in zip(views, pages[start : start + step], strict=True):
                    loaded.append(view is not None and _write_page(view, page))
                    if not loaded[-1]:
                        break
        self._measure(self.loads, loaded, registered, started_s)
        return loaded + [False] * (len(keys) - len(loaded))

    def _store(
        self,
        registered: _Registered,
        keys: Sequence[str],
        pages: Sequence[Page],
        *,
        prefix_keys: Sequence[str] | None,
        hint: Hint | None,
    ) -> list[bool]:
        started_s = time.monotonic()
        stored: list[bool] = []
        hashes = [to_block_hash(key) for key in keys]
        parent = to_block_hash(prefix_keys[-1]) if prefix_keys else None
        step = max(1, BATCH_BYTES_MAX // registered.pool.page_bytes)
        while len(stored) < len(keys) and all(stored) and not self._is_off():
            start = len(stored)
            part = hashes[start : start + step]
            with self._client.reserve(registered.namespace, part, parent_hash=parent, hint=hint) as reserved:
                for slot, page in zip(reserved.slots, pages[start : start + step], strict=True):
                    if slot is not None:
                        page.read(np.frombuffer(slot, np.uint8))
                result = reserved.commit()
            self._note(result.error)
            stored += [state is not PutState.DROPPED for state in result.states]
            parent = part[-1]
        self._measure(self.stores, stored, registered, started_s)
        return stored + [False] * (len(keys) - len(stored))

    def _identify(self, pool: PagePool) -> Namespace:
        return self._identity.namespace(pool, tokens_per_page=self._tokens_per_page)

    def _is_off(self) -> bool:
        if not self._is_stopped and self._weights_now() != self._weights:
            self.stop("the model's weights were changed while it serves. Restart the engine to use the store again")
        return self._is_stopped

    def _measure(self, meter: Meter, moved: Sequence[bool], registered: _Registered, started_s: float) -> None:
        page_count = sum(moved)
        if self._is_metered and page_count:
            moved_bytes = page_count * registered.pool.page_bytes
            meter.note(page_count=page_count, moved_bytes=moved_bytes, took_s=time.monotonic() - started_s)

    def _note(self, error: KvstoreError | None) -> None:
        """Says once that the store fails, and once that it works again."""
        is_failing = error is not None
        with self._lock:
            is_new, self._is_failing = is_failing != self._is_failing, is_failing
        if is_new and is_failing:
            _LOG.warning("the store does not answer, so prompts are computed: %s", error)
        elif is_new:
            _LOG.info("the store answers again")


@dataclass(frozen=True, slots=True)
class TensorPage:
    """A page in a flat CPU tensor of its own."""

    tensor: Any

    def read(self, into: Any) -> None:
        np.copyto(into, tensor_bytes(self.tensor))

    def write(self, payload: Any) -> None:
        assert self.tensor.is_contiguous(), "a copy would be filled, and lost"
        np.copyto(tensor_bytes(self.tensor), payload)


def restorable(kv_count: int, has_pages: Sequence[bool], *, trailing_count: int | None) -> list[int]:
    """Prefix lengths, in pages, that a pool can serve: with all of its pages, or its last `trailing_count` alone."""
    if trailing_count is None:
        leading_count = next((index for index in range(kv_count) if not has_pages[index]), kv_count)
        return list(range(1, leading_count + 1))
    lengths = []
    run_count = 0
    for length in range(1, kv_count + 1):
        run_count = run_count + 1 if has_pages[length - 1] else 0
        if run_count >= min(length, trailing_count):
            lengths.append(length)
    return lengths


def _write_page(view: BlockView, page: Page) -> bool:
    page.write(np.frombuffer(view.payload, np.uint8))
    # Of a block whose lease ended while it was copied, nobody can say what was.
    return view.is_valid()
