"""LMCache's multi-process server: the L2 adapter that keeps its objects in our store.

--l2-adapter '{"type": "plugin", "module_path": "kvstore_client.integrations.lmcache.l2",
    "class_name": "KVStoreL2Adapter", "adapter_params": {}}'
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from threading import Lock
from typing import Any, Generic, TypeVar

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvstore.errors import InvalidArgumentError, KvstoreError
from kvstore_client.client import Lease
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
from kvstore_client.results import PutState

_STORE_TASKS_MAX = 64
"""Stores that may wait. Each keeps its objects in LMCache's memory, which must not fill up behind a slow daemon."""
_LEASE_S = 30.0
"""How long found objects are held for the load that follows; what nobody unlocks goes by itself."""

_Result = TypeVar("_Result")


class KVStoreL2Adapter(L2AdapterInterface):
    """Nothing here blocks the caller, and a failure is an object that is not there.

    The daemon evicts by itself, so LMCache's `delete` does nothing and no capacity is declared.
    """

    def __init__(self, params: Mapping[str, Any], *, l1_memory_desc: object = None) -> None:
        super().__init__()
        settings = LMCacheSettings.parse(params, where="adapter_params")
        self._recompute_s_per_chunk = settings.recompute_s_per_chunk
        self._namespaces = Namespaces(
            settings, mode="l2", lmcache_version=version("lmcache"), revisions=Revisions(settings)
        )
        self._client = settings.open_client()
        self._stores: _Tasks[L2StoreResult] = _Tasks("store", thread_count=1, waiting_max=_STORE_TASKS_MAX)
        self._lookups: _Tasks[Bitmap] = _Tasks("lookup", thread_count=1)
        self._loads: _Tasks[Bitmap] = _Tasks("load", thread_count=2)
        self._locks = Locks()
        self._last_error: str | None = None

    def get_store_event_fd(self) -> int:
        return self._stores.event_fd

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.event_fd

    def get_load_event_fd(self) -> int:
        return self._loads.event_fd

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        return self._stores.submit(lambda: self._store(keys, objects), failed=L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.pop_all()

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], group_layout_descs: Mapping[int, Any]) -> int:
        return self._lookups.submit(lambda: self._lookup(keys, group_layout_descs), failed=Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        for lease in self._locks.unlock(keys):
            self._lookups.run(lease.release)

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        return self._loads.submit(lambda: self._load(keys, objects), failed=Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.pop(task_id)

    def report_status(self) -> dict[str, Any]:
        return {
            "is_healthy": True,  # a store that is away only misses
            "type": type(self).__name__,
            "address": self._client.address,
            "transport": self._client.transport,
            "last_error": self._last_error,
        }

    def close(self) -> None:
        """Once this returns nothing touches LMCache's memory any more."""
        self._client.close()  # ends what is under way, as misses
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()

    def _store(self, keys: Sequence[Any], objects: Sequence[Any]) -> L2StoreResult:
        layouts = [_layout_of(stored) for stored in objects]
        stored_count = stored_bytes = 0
        # Keys of many prompts come together, so none is said to follow another. The tail first: what was stored first
        # is evicted first, and a head without its tail is of use.
        for at in reversed(range(len(keys))):
            for part in self._located([keys[at]], [layouts[at]]):
                put = self._client.put(part.namespace, part.hashes, part.blocks([bytes_of(objects[at])]))
                self._note(put.error)
                if put.error is not None:
                    return L2StoreResult(False, 0)
                stored_count += put.stored_count == part.block_count
                block_bytes = part.namespace.block_layout.payload_bytes
                stored_bytes += sum(state is PutState.STORED for state in put.states) * block_bytes
        return L2StoreResult(stored_count == len(keys), stored_bytes)

    def _lookup(self, keys: Sequence[Any], group_layouts: Mapping[int, Any]) -> Bitmap:
        found = Bitmap(len(keys))
        known = {
            number: ObjectLayout.of(described.shapes, described.dtypes) for number, described in group_layouts.items()
        }
        for part in self._located(keys, [known.get(key.object_group_id) for key in keys]):
            lease = self._client.acquire(
                part.namespace,
                part.hashes,
                lease_s=_LEASE_S,
                recompute_s_per_block=part.recompute_s_per_block(self._recompute_s_per_chunk),
            )
            self._note(lease.error)
            # Behind the held prefix there may be more, which sliding windows ask for: found, though not held.
            found.batched_set(part.whole_positions(worth_loading(lease)))
            held = part.positions[: lease.matched_count // part.block_count]
            if held:
                self._locks.add(lease, [keys[at] for at in held], now_s=time.monotonic())
            else:
                lease.release()
        return found

    def _load(self, keys: Sequence[Any], objects: Sequence[Any]) -> Bitmap:
        loaded = Bitmap(len(keys))
        for part in self._located(keys, [_layout_of(target) for target in objects]):
            targets = part.blocks(bytes_of(objects[at]) for at in part.positions)
            got = self._client.get(part.namespace, part.hashes, targets)
            self._note(got.error)
            loaded.batched_set(part.whole_positions(hits(got.states)))
        return loaded

    def _located(self, keys: Sequence[Any], layouts: Sequence[ObjectLayout | None]) -> list[Located]:
        spaces = [self._space(key, layout) for key, layout in zip(keys, layouts, strict=True)]
        return locate(spaces, [chunk_hash(key.chunk_hash, parts=_parts(key)) for key in keys])

    def _space(self, key: Any, layout: ObjectLayout | None) -> Space | None:
        if layout is None:
            return None
        try:
            return self._namespaces.of(
                key.model_name,
                layout,
                worker=key.kv_rank >> 16 & 0xFF,
                worker_count=key.kv_rank >> 24 & 0xFF,
                settings={"kv_rank": key.kv_rank, "object_group": key.object_group_id},
            )
        except InvalidArgumentError as error:
            self._note(error)
            return None

    def _note(self, error: KvstoreError | None) -> None:
        """Says it once, not for every call while it lasts."""
        text = None if error is None else str(error)
        if text is not None and self._last_error is None:
            LOG.warning("the store does not serve LMCache: %s", text)
        self._last_error = text


class Locks:
    """Leases by the keys that they hold; one is given back when its last key is unlocked."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._held: dict[Any, list[_Held]] = {}
        self._all: list[_Held] = []

    def add(self, lease: Lease, keys: Sequence[Any], *, now_s: float) -> None:
        """Forgets those that have expired meanwhile: the daemon did, too."""
        with self._lock:
            for held in [held for held in self._all if held.until_s < now_s]:
                self._forget(held)
            held = _Held(lease, set(keys), until_s=now_s + _LEASE_S)
            self._all.append(held)
            for key in held.keys:
                self._held.setdefault(key, []).append(held)

    def unlock(self, keys: Sequence[Any]) -> list[Lease]:
        """The leases that hold nothing any more."""
        done = []
        with self._lock:
            for key in keys:
                holders = self._held.get(key)
                if not holders:
                    continue
                held = holders.pop(0)
                if not holders:
                    del self._held[key]
                held.keys.discard(key)
                if not held.keys:
                    self._all.remove(held)
                    done.append(held.lease)
        return done

    @property
    def held_count(self) -> int:
        """Leases that are held."""
        return len(self._all)

    def _forget(self, held: _Held) -> None:
        self._all.remove(held)
        for key in held.keys:
            self._held[key].remove(held)
            if not self._held[key]:
                del self._held[key]


class _Held:
    def __init__(self, lease: Lease, keys: set[Any], *, until_s: float) -> None:
        self.lease = lease
        self.keys = keys
        self.until_s = until_s


class _Tasks(Generic[_Result]):
    """Tasks of one kind, run in threads; every one that was submitted gets a result, and the event tells of it."""

    def __init__(self, kind: str, *, thread_count: int, waiting_max: int | None = None) -> None:
        self._kind = kind
        self._event = create_event_notifier()
        self._threads = ThreadPoolExecutor(max_workers=thread_count, thread_name_prefix=f"kvstore-{kind}")
        self._waiting_max = waiting_max
        self._lock = Lock()
        self._next_id = 0
        self._waiting_count = 0
        self._results: dict[int, _Result] = {}
        self._is_closed = False

    @property
    def event_fd(self) -> int:
        return int(self._event.fileno())

    def submit(self, work: Callable[[], _Result], *, failed: _Result) -> int:
        """Its id. `failed` is the result of a task that cannot wait, or that breaks."""
        with self._lock:
            task_id = self._next_id
            self._next_id += 1
            is_waiting = not self._is_closed and (self._waiting_max is None or self._waiting_count < self._waiting_max)
            self._waiting_count += is_waiting
        if is_waiting:
            self.run(lambda: self._work(task_id, work, failed))
        else:
            self._finish(task_id, failed)
        return task_id

    def run(self, work: Callable[[], object]) -> None:
        """In the background; an exception is a bug and goes to the log."""
        with self._lock:
            if not self._is_closed:
                self._threads.submit(work).add_done_callback(self._report)

    def pop(self, task_id: int) -> _Result | None:
        with self._lock:
            return self._results.pop(task_id, None)

    def pop_all(self) -> dict[int, _Result]:
        with self._lock:
            results, self._results = self._results, {}
        return results

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._event.close()

    def _work(self, task_id: int, work: Callable[[], _Result], failed: _Result) -> None:
        result = failed
        try:
            result = work()
        finally:
            with self._lock:
                self._waiting_count -= 1
            self._finish(task_id, result)

    def _finish(self, task_id: int, result: _Result) -> None:
        with self._lock:
            self._results[task_id] = result
        self._event.notify()

    def _report(self, done: Future[object]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            LOG.error("a %s failed: %r", self._kind, error, exc_info=error)


def _layout_of(stored: Any) -> ObjectLayout | None:
    """None where the object is not what its shapes say: compressed, or cut."""
    layout = ObjectLayout.of(stored.get_shapes(), stored.get_dtypes())
    return layout if layout.object_bytes == stored.get_size() else None


def _parts(key: Any) -> tuple[str, ...]:
    """Whose object it is: the salt is not in LMCache's hash."""
    return (key.cache_salt,) if key.cache_salt else ()
