"""A worker's half: moves blocks between the engine's memory and the store, in threads beside the engine's own."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvstore.errors import KvstoreError
from kvstore.keys import BlockHash
from kvstore.namespace import Namespace
from kvstore_client.hints import Hint
from kvstore_client.integrations._store import Store
from kvstore_client.integrations.vllm.messages import (
    BlockRun,
    IdentityId,
    JobId,
    LoadJob,
    RankKey,
    Report,
    Step,
    StoreCounts,
    StoreJob,
)
from kvstore_client.integrations.vllm.regions import Mover
from kvstore_client.results import PutState

_LOG = logging.getLogger("vllm.kvstore")  # below vLLM's own logger, so that its handlers show it

_BATCH_BYTES = 32 << 20
"""Blocks that are reserved, or in view, at once."""
_BLOCK_COUNT_MAX = 1024
_IDLE_WAIT_S = 0.002
"""How long a step that computes nothing waits for what is under way, instead of asking again at once: the threads that
move blocks would wait for the interpreter meanwhile."""
_AWAIT_S = 0.0005
"""The same while only the scheduler's half waits for something."""


@dataclass(slots=True)
class LoadsEnded:
    """What has ended since it was last asked."""

    done: set[str] = field(default_factory=set)
    """Requests whose loads are over, well or not."""
    failed: set[str] = field(default_factory=set)
    """Those of them that lack blocks."""
    failed_block_ids: set[int] = field(default_factory=set)


class WorkerSide:
    """Begins what a step says, and reports what has ended. A load or a store never raises: it fails, and is counted.

    `movers` are those of the KV cache groups, None for groups that are not cached. Where `stores_nothing`, another rank
    holds the same bytes and stores them.
    """

    def __init__(
        self,
        client: Store,
        *,
        rank: RankKey,
        movers: Sequence[Mover | None],
        stores_nothing: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._client = client
        self._rank = rank
        self._movers = movers
        self._stores_nothing = stores_nothing
        self._clock = clock
        self._namespaces: dict[IdentityId, tuple[Namespace | None, ...]] = {}
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="kvstore-load")
        self._storer = ThreadPoolExecutor(1, thread_name_prefix="kvstore-store")
        self._changed = threading.Condition()
        self._under_way_count = 0
        self._ended = LoadsEnded()
        self._report = Report()
        self._step = Step()
        self._counts: Counter[str] = Counter()
        self._is_in_trouble = False

    def begin_step(self, step: Step) -> None:
        self._step = step
        for identity, ranks in step.identities.items():
            self._namespaces[identity] = _decoded(ranks[self._rank])

    def begin_loads(self) -> None:
        for job in self._step.loads:
            self._begin(self._loader, self._load, job)

    def begin_stores(self) -> None:
        """After the engine has computed the step. What is stored was computed before it."""
        for job in self._step.stores:
            if self._stores_nothing:
                self._end_store(job.id, 0, 0)
                continue
            marks = [mover and mover.mark() for mover in self._movers]
            self._begin(self._storer, self._store, job, marks)

    def take_ended(self) -> LoadsEnded:
        """Loads that ended. In a step that computes nothing it waits a little for one, or for a store."""
        with self._changed:
            if self._step.is_idle and not self._has_news() and (self._under_way_count or self._step.is_awaited):
                self._changed.wait(_IDLE_WAIT_S if self._under_way_count else _AWAIT_S)
            ended, self._ended = self._ended, LoadsEnded()
        return ended

    def take_report(self) -> Report | None:
        with self._changed:
            report, self._report = self._report, Report()
        return report if report.stores else None

    def take_counts(self) -> Counter[str]:
        """Bytes, blocks and seconds of transfers since they were last taken; see `figures`."""
        with self._changed:
            counts, self._counts = self._counts, Counter()
        return counts

    def close(self) -> None:
        """Ends what is under way as failed, and the threads with it."""
        self._client.close()
        self._loader.shutdown()
        self._storer.shutdown()

    def _begin(self, executor: ThreadPoolExecutor, work: Callable[..., None], *arguments: object) -> None:
        with self._changed:
            self._under_way_count += 1
        executor.submit(work, *arguments)

    def _has_news(self) -> bool:
        return bool(self._ended.done or self._report.stores)

    def _load(self, job: LoadJob) -> None:
        started_s = self._clock()
        failed: set[int] = set()
        loaded_bytes = block_count = 0
        try:
            for run in job.runs:
                part = self._part(job.identity, run.group)
                if part is None:
                    continue
                namespace, mover = part
                failed |= self._load_run(run, namespace, mover, hint=job.hint)
                block_count += len(run.block_ids)
                loaded_bytes += len(run.block_ids) * mover.payload_bytes
        except Exception:  # noqa: BLE001  (a bug here must cost a computation, never the engine)
            _LOG.exception("a load broke off; its blocks are computed")
            failed |= {block_id for run in job.runs for block_id in run.block_ids}
        with self._changed:
            self._under_way_count -= 1
            self._ended.done.add(job.request_id)
            if failed:
                self._ended.failed.add(job.request_id)
                self._ended.failed_block_ids |= failed
            self._counts["load_bytes"] += loaded_bytes
            self._counts["load_failed_blocks"] += len(failed)
            self._counts["load_us"] += round((self._clock() - started_s) * 1e6)
            self._changed.notify_all()

    def _part(self, identity: IdentityId, group: int) -> tuple[Namespace, Mover] | None:
        """None: this part of the pipeline has none of the group's layers."""
        namespace, mover = self._namespaces[identity][group], self._movers[group]
        if namespace is None or mover is None:
            assert namespace is None, f"group {group} has a namespace and no memory"
            assert mover is None, f"group {group} has memory and no namespace"
            return None
        return namespace, mover

    def _load_run(self, run: BlockRun, namespace: Namespace, mover: Mover, *, hint: Hint | None) -> set[int]:
        """Returns the blocks that are not there as they should be."""
        failed: set[int] = set()
        step = _batch_count(mover)
        for start in range(0, len(run.hashes), step):
            hashes = [BlockHash(key) for key in run.hashes[start : start + step]]
            block_ids = run.block_ids[start : start + step]
            with self._client.view(namespace, hashes, hint=hint) as views:
                found = [(block_id, view) for block_id, view in zip(block_ids, views, strict=True) if view is not None]
                failed |= set(block_ids) - {block_id for block_id, _ in found}
                mover.write([block_id for block_id, _ in found], [view.payload for _, view in found])
                failed |= {block_id for block_id, view in found if not view.is_valid()}
                self._note(views.error, is_served=bool(found))
                if views.error is not None and not found:
                    # Nothing more will come; each further batch would wait for its deadline.
                    return failed | set(run.block_ids[start:])
        return failed

    def _store(self, job: StoreJob, marks: Sequence[object]) -> None:
        started_s = self._clock()
        stored_count = dropped_count = stored_bytes = 0
        try:
            for run in job.runs:
                part = self._part(job.identity, run.group)
                if part is None:
                    continue
                namespace, mover = part
                run_stored, run_held = self._store_run(run, namespace, mover, after=marks[run.group], hint=job.hint)
                stored_count += run_stored
                dropped_count += len(run.hashes) - run_held
                stored_bytes += run_stored * mover.payload_bytes
        except Exception:  # noqa: BLE001  (as for loads)
            _LOG.exception("a store broke off; its blocks are not stored")
            dropped_count = sum(len(run.hashes) for run in job.runs) - stored_count
        self._counts_store(stored_bytes, started_s)
        self._end_store(job.id, stored_count, dropped_count, is_under_way=True)

    def _store_run(
        self, run: BlockRun, namespace: Namespace, mover: Mover, *, after: object, hint: Hint | None
    ) -> tuple[int, int]:
        """How many of the blocks were stored, and how many the store has now."""
        stored_count = held_count = 0
        parent_hash = None if run.parent_hash is None else BlockHash(run.parent_hash)
        step = _batch_count(mover)
        for start in range(0, len(run.hashes), step):
            hashes = [BlockHash(key) for key in run.hashes[start : start + step]]
            block_ids = run.block_ids[start : start + step]
            with self._client.reserve(namespace, hashes, parent_hash=parent_hash, hint=hint) as reserved:
                wanted = [
                    (block_id, slot)
                    for block_id, slot in zip(block_ids, reserved.slots, strict=True)
                    if slot is not None
                ]
                if wanted:
                    mover.read([block_id for block_id, _ in wanted], [slot for _, slot in wanted], after=after)
                result = reserved.commit()
            held = sum(state in (PutState.STORED, PutState.ALREADY_STORED, PutState.PENDING) for state in result.states)
            self._note(result.error, is_served=bool(held))
            stored_count += result.states.count(PutState.STORED)
            held_count += held
            parent_hash = hashes[-1]
            if result.error is not None and not held:
                break
        return stored_count, held_count

    def _note(self, error: KvstoreError | None, *, is_served: bool) -> None:
        """Says once that there is trouble, and once that it is over."""
        if error is None:
            if is_served and self._is_in_trouble:
                self._is_in_trouble = False
                _LOG.info("the store serves this engine again")
        elif not self._is_in_trouble:
            self._is_in_trouble = True
            _LOG.warning(
                "the store does not serve this engine, which computes instead, and goes on asking: %s; "
                "`kvstore ping` tells whether a daemon answers",
                error,
            )

    def _counts_store(self, stored_bytes: int, started_s: float) -> None:
        with self._changed:
            self._counts["store_bytes"] += stored_bytes
            self._counts["store_us"] += round((self._clock() - started_s) * 1e6)

    def _end_store(self, job_id: JobId, stored_count: int, dropped_count: int, *, is_under_way: bool = False) -> None:
        with self._changed:
            self._under_way_count -= is_under_way
            self._report.stores[job_id] = StoreCounts(1, stored_count, dropped_count)
            self._changed.notify_all()


def _batch_count(mover: Mover) -> int:
    return min(max(1, _BATCH_BYTES // mover.payload_bytes), _BLOCK_COUNT_MAX)


def _decoded(encoded: Sequence[bytes | None]) -> tuple[Namespace | None, ...]:
    return tuple(None if data is None else Namespace.decode(data) for data in encoded)
