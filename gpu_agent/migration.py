"""Carries plans out: VRAM → daemon, in the background."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import closing

import structlog

from gpu_agent.core.link import LinkDecision
from gpu_agent.core.pause import Pause
from gpu_agent.core.planner import Batch, Run, cut_runs
from gpu_agent.offload import Offloader
from gpu_agent.pool import Pool
from gpu_agent.store import Store
from kvstore.errors import KvstoreError
from kvstore.keys import BlockHash
from kvstore.messages import BlockState
from kvstore_client.results import PutState

_STORED = frozenset({PutState.STORED, PutState.ALREADY_STORED})
_log = structlog.get_logger("kvstore.agent")


class Migrator:
    """One thread that offloads batch after batch, in parts of at most `part_count_max` blocks.

    A block leaves the pool only when the daemon said that it has it. Everything else stays resident: blocks
    that it refused (in a cool-down), and on a failed call the rest of the batch and all batches behind it,
    after which nothing is accepted for a growing pause. If the thread dies of a bug, every block it had comes
    back, `failure` says why, and nothing is accepted any more.

    Methods marked *locked* want `pool.changed` held; none of them blocks.
    """

    def __init__(
        self,
        *,
        pool: Pool,
        store: Store,
        offloaders: Sequence[Offloader],
        part_count_max: int,
        cooldown_steps: int,
        pause: Pause,
    ) -> None:
        """Of two offloaders the second one is for a busy link; blocks that it has sent need not be sent again."""
        self._pool = pool
        self._store = store
        self._cooldown_steps = cooldown_steps
        self._pause = pause
        self._is_failing = False
        self._offloaders = offloaders
        self._is_lowered = False
        self._part_count_max = part_count_max
        self._queue: deque[Batch] = deque()
        self._busy_since_s: float | None = None
        self._is_stopping = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="kvstore-agent-migrator", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def follow(self, decision: LinkDecision) -> None:
        """What the link allows from now on. Locked."""
        self._is_lowered = decision.lowers_precision

    @property
    def failure(self) -> str | None:
        """Why the thread is dead, if it is. Locked."""
        return self._failure

    @property
    def is_idle(self) -> bool:
        """Locked."""
        return not self._queue and self._busy_since_s is None

    @property
    def busy_since_s(self) -> float | None:
        """When the batch under way began, on the monotonic clock. Locked."""
        return self._busy_since_s

    @property
    def is_alive(self) -> bool:
        """Locked."""
        return self._failure is None and not self._is_stopping

    def is_accepting(self) -> bool:
        """Whether a batch submitted now would be tried. Locked."""
        return self.is_alive and self._pause.is_over(now_s=time.monotonic())

    def submit(self, batches: Iterable[Batch]) -> None:
        """Takes charge of victims, or of resident blocks to copy; they migrate from now on. Locked."""
        for batch in batches:
            for block_hash in batch.block_hashes:
                self._pool.table.begin_migration(block_hash)
            self._queue.append(batch)
        self._pool.changed.notify_all()

    def cancel_queued(self) -> None:
        """Makes the blocks of all batches resident again, except those of the one under way. Locked."""
        while self._queue:
            self._call_off(self._queue.popleft().block_hashes)

    def stop(self, *, timeout_s: float) -> bool:
        """Ends after the call under way; False when that took too long. The thread never keeps a process alive."""
        with self._pool.changed:
            self._is_stopping = True
            self.cancel_queued()
            self._pool.changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- on the thread

    def _run(self) -> None:
        try:
            while (batch := self._next_batch()) is not None:
                self._migrate(batch)
        except BaseException as error:
            with self._pool.changed:
                self._failure = f"{type(error).__name__}: {error}"
                self._queue.clear()
                self._busy_since_s = None
                self._call_off(self._pool.table.migrating())
            _log.critical("migrator_died", error=self._failure)
            raise

    def _next_batch(self) -> Batch | None:
        with self._pool.changed:
            self._busy_since_s = None
            self._pool.changed.notify_all()
            while not self._queue and not self._is_stopping:
                self._pool.changed.wait()
            if self._is_stopping:
                return None
            self._busy_since_s = time.monotonic()
            return self._queue.popleft()

    def _migrate(self, batch: Batch) -> None:
        unanswered = dict.fromkeys(batch.block_hashes)
        below, error = self._find_below(batch.block_hashes)
        with self._pool.changed:
            for block_hash in below:
                del unanswered[block_hash]
                self._settle_stored(block_hash, keeps_resident=batch.keeps_resident)
        if error is None:
            for runs in cut_runs(batch.runs, skip=below, block_count_max=self._part_count_max):
                error = self._send(runs, unanswered=unanswered, keeps_resident=batch.keeps_resident)
                if error is not None or self._is_stopping:
                    break
        with self._pool.changed:
            self._pool.counters.migration_batch_count += 1
            self._call_off(unanswered)
            if error is not None:
                self._back_off(error)
            else:
                self._succeed()

    def _find_below(self, hashes: Sequence[BlockHash]) -> tuple[set[BlockHash], KvstoreError | None]:
        """Which of the blocks that came from the daemon it still has: moving those takes no bytes."""
        with self._pool.changed:
            known = [block_hash for block_hash in hashes if self._pool.table.has_lower_copy(block_hash)]
        if not known:
            return set(), None
        found: set[BlockHash] = set()
        for offloader in self._offloaders:
            asked = [block_hash for block_hash in known if block_hash not in found]
            if not asked:
                break
            result = self._store.lookup(offloader.namespace, asked)
            if result.error is not None:
                return found, result.error
            states = zip(asked, result.states, strict=True)
            found.update(block_hash for block_hash, state in states if state is BlockState.HIT)
        with self._pool.changed:
            for block_hash in known:
                if block_hash not in found:
                    self._pool.table.forget_lower_copy(block_hash)
        return found, None

    def _send(
        self, runs: Sequence[Run], *, unanswered: dict[BlockHash, None], keeps_resident: bool
    ) -> KvstoreError | None:
        pool = self._pool
        with pool.changed:
            slots = [pool.table.migrating_slot(block_hash) for run in runs for block_hash in run.block_hashes]
            offloader = self._offloaders[-1 if self._is_lowered else 0]
        with closing(offloader.send(runs, slots)) as answers:
            for run, result in answers:
                with pool.changed:
                    for block_hash, state in zip(run.block_hashes, result.states, strict=True):
                        if state in _STORED:
                            del unanswered[block_hash]
                            self._settle_stored(block_hash, keeps_resident=keeps_resident)
                        elif result.error is None:
                            del unanswered[block_hash]
                            self._settle_refused(block_hash)
                    pool.changed.notify_all()
                if result.error is not None or self._is_stopping:
                    return result.error
        return None

    # --- locked

    def _settle_stored(self, block_hash: BlockHash, *, keeps_resident: bool) -> None:
        if keeps_resident:
            self._pool.stay(block_hash, has_lower_copy=True)
        else:
            self._pool.migrated(block_hash)

    def _settle_refused(self, block_hash: BlockHash) -> None:
        self._pool.counters.migration_refused_count += 1
        cool_until_step = self._pool.step + self._cooldown_steps
        self._pool.stay(block_hash, has_lower_copy=False, cool_until_step=cool_until_step)

    def _call_off(self, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            self._pool.stay(block_hash, has_lower_copy=self._pool.table.has_lower_copy(block_hash))
        self._pool.changed.notify_all()

    def _back_off(self, error: KvstoreError) -> None:
        self.cancel_queued()
        self._pool.counters.daemon_error_count += 1
        pause_s = self._pause.fail(now_s=time.monotonic())
        if not self._is_failing:
            self._is_failing = True
            _log.warning("offload_paused", reason=error.reason, error=str(error), pause_s=pause_s)

    def _succeed(self) -> None:
        self._pause.succeed()
        if self._is_failing:
            self._is_failing = False
            _log.info("offload_resumed")
