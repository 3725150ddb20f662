"""The scheduler's side of the tier: it decides, hands over and collects, and waits for nothing but `drain`."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvstore.keys import BlockHash
from kvstore.messages import BlockState
from kvstore.namespace import Namespace
from kvstore_client.integrations.tiering.jobs import Finished, JobId, Jobs, Progress
from kvstore_client.integrations.tiering.lookups import Lookups
from kvstore_client.integrations.tiering.messages import (
    PART_BLOCKS_MAX,
    PART_BYTES_MAX,
    Answer,
    Identity,
    Kind,
    PartId,
    Task,
)
from kvstore_client.integrations.tiering.process import MoverProcess

_LOG = logging.getLogger("vllm.kvstore.tiering")  # below vLLM's own logger, so that its handlers show it

_Item = TypeVar("_Item")

HANG_S = 10.0
"""Without an answer for so long, a mover is ended: what it is asked for at once ends by the client's own deadlines
within 2 s + 64 MiB / 32 MiB/s = 4 s."""
_RESTART_S_MIN, _RESTART_S_MAX = 0.5, 30.0
_STORING_SHARE_MAX = 0.5
"""Of the host tier's blocks. What stores hold cannot be evicted there, and then nothing can be loaded either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block of a job. `key` is the engine's; blocks of a chain follow each other by `number`."""

    key: bytes
    group: int
    hash: BlockHash
    row: int
    number: int = 0


class StoreTier:
    """Looks up, loads and stores blocks of an engine's host tier by a mover, which it starts, watches and replaces.

    For one thread. `split` tells the group and the hash of an engine's key. Groups have namespaces by `rename` only:
    until then nothing of them is found or stored.
    """

    def __init__(
        self,
        *,
        start: Callable[[], MoverProcess],
        split: Callable[[bytes], tuple[int, BlockHash]],
        row_bytes: int,
        row_count: int,
        lookup_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._namespaces: dict[int, Namespace] = {}
        self._split = split
        self._clock = clock
        self._part_blocks_max = max(1, min(PART_BLOCKS_MAX, PART_BYTES_MAX // row_bytes))
        self._storing_count_max = int(row_count * _STORING_SHARE_MAX)
        self._lookups = Lookups(timeout_s=lookup_timeout_s)
        self._asked: dict[PartId, list[bytes]] = {}
        self._jobs = Jobs()
        self._progress = Progress(hang_s=HANG_S)
        self._finished: list[Finished] = []
        self._next_part = 0
        self._error = ""
        self._restart_s = _RESTART_S_MIN
        self._restart_at_s = 0.0
        self._mover: MoverProcess | None = None
        self._begin_mover()

    @property
    def mover(self) -> MoverProcess | None:
        return self._mover

    def lookup(self, key: bytes, request_id: str) -> bool | None:
        """Whether the store holds the block; None while that is being asked."""
        return self._lookups.ask(key, request_id)

    def forget(self, request_id: str) -> None:
        self._lookups.forget(request_id)

    def load(self, job_id: JobId, blocks: Sequence[Block]) -> None:
        self._submit(job_id, Kind.LOAD, blocks)

    def store(self, job_id: JobId, blocks: Sequence[Block], *, parents: Mapping[int, BlockHash]) -> None:
        """Stores blocks in the order of their numbers; `parents` are per group those before the first ones.

        Drops them where stores under way hold too much of the host tier already.
        """
        if self._jobs.storing_count + len(blocks) > self._storing_count_max:
            self._drop(job_id, Kind.STORE, blocks)
            return
        self._submit(job_id, Kind.STORE, sorted(blocks, key=lambda block: block.number), parents=parents)

    def end_step(self) -> None:
        """Asks what was to be looked up in this step, at once."""
        self._collect()
        now_s = self._clock()
        keys = self._lookups.take(now_s=now_s)
        if not keys:
            return
        for group, members in _by_group(keys, lambda key: self._split(key)[0]).items():
            if self._mover is None or group not in self._namespaces:
                self._lookups.miss(members)
                continue
            for batch in _batches(members, PART_BLOCKS_MAX):
                part = self._new_part()
                self._asked[part] = batch
                hashes = tuple(self._split(key)[1] for key in batch)
                self._tell(Task(kind=Kind.LOOKUP, part=part, group=group, hashes=hashes))

    def finished(self) -> list[Finished]:
        """Jobs that have ended since the last time."""
        self._collect()
        finished, self._finished = self._finished, []
        return finished

    def rename(self, namespaces: Mapping[int, Namespace]) -> None:
        """From now on blocks of these groups are stored and found under these."""
        self._namespaces = dict(namespaces)
        self._introduce()

    def drain(self) -> None:
        """Waits until no job is under way, as long as that takes at most: see `HANG_S`."""
        while not self._jobs.is_idle:
            if self._mover is not None:
                select.select([self._mover], [], [], 0.05)
            self._collect()

    def close(self) -> None:
        """Ends the mover. Jobs under way have failed then."""
        if self._mover is not None:
            self._mover.kill()
            self._lose_mover("")

    def _submit(
        self,
        job_id: JobId,
        kind: Kind,
        blocks: Sequence[Block],
        *,
        parents: Mapping[int, BlockHash] | None = None,
    ) -> None:
        self._collect()
        is_known = bool(blocks) and all(block.group in self._namespaces for block in blocks)
        if self._mover is None or not is_known:
            self._drop(job_id, kind, blocks)
            return
        tasks: list[Task] = []
        parts: dict[PartId, list[bytes]] = {}
        for group, members in _by_group(blocks, lambda block: block.group).items():
            parent = (parents or {}).get(group)
            for batch in _batches(members, self._part_blocks_max):
                part = self._new_part()
                parts[part] = [block.key for block in batch]
                hashes = tuple(block.hash for block in batch)
                rows = tuple(block.row for block in batch)
                tasks.append(Task(kind=kind, part=part, group=group, hashes=hashes, rows=rows, parent_hash=parent))
                parent = hashes[-1] if kind is Kind.STORE else None
        self._jobs.begin(job_id, kind, parts)
        for task in tasks:
            self._tell(task)

    def _drop(self, job_id: JobId, kind: Kind, blocks: Sequence[Block]) -> None:
        keys = tuple(block.key for block in blocks)
        self._end(Finished(job_id=job_id, kind=kind, done=(), failed=keys, took_s=0.0))

    def _end(self, finished: Finished) -> None:
        if finished.kind is Kind.LOAD:
            self._lookups.miss(finished.failed)
        self._finished.append(finished)

    def _tell(self, task: Task) -> None:
        assert self._mover is not None, task
        self._progress.begin(task.part, task.kind, now_s=self._clock())
        self._mover.tell(task)

    def _new_part(self) -> PartId:
        self._next_part += 1
        return PartId(self._next_part)

    def _collect(self) -> None:
        if self._mover is None:
            self._begin_mover()
            return
        if not self._progress.is_awaited:
            return
        self._mover.flush()
        for answer in self._mover.answers():
            self._note(answer)
        if self._mover.is_gone:
            self._mover.kill()
            self._lose_mover("the process that moves blocks has ended")
        elif self._progress.is_hung(now_s=self._clock()):
            self._mover.kill()
            self._lose_mover(f"the process that moves blocks has not answered for {HANG_S:g} s, and was ended")

    def _note(self, answer: Answer) -> None:
        now_s = self._clock()
        self._restart_s = _RESTART_S_MIN
        self._progress.end(answer.part, now_s=now_s)
        if answer.error != self._error:
            self._error = answer.error
            if answer.error:
                _LOG.warning("blocks are computed and not loaded, or not stored: %s", answer.error)
            else:
                _LOG.info("blocks are loaded and stored again")
        if answer.kind is Kind.LOOKUP:
            self._lookups.answer(self._asked.pop(answer.part), answer.states, now_s=now_s)
            return
        finished = self._jobs.answer(answer.part, answer.states, took_s=answer.took_s)
        if finished is not None:
            self._end(finished)

    def _begin_mover(self) -> None:
        now_s = self._clock()
        if now_s < self._restart_at_s:
            return
        try:
            self._mover = self._start()
        except OSError as error:
            self._lose_mover(f"no process can be started that moves blocks: {error}")
        else:
            self._introduce()

    def _introduce(self) -> None:
        if self._mover is not None:
            for group, namespace in self._namespaces.items():
                self._mover.tell(Identity(group=group, namespace=namespace.encode()))

    def _lose_mover(self, reason: str) -> None:
        self._mover = None
        self._restart_at_s = self._clock() + self._restart_s
        if reason:
            _LOG.warning("%s; another is started in %.1f s", reason, self._restart_s)
        self._restart_s = min(self._restart_s * 2, _RESTART_S_MAX)
        self._progress.clear()
        for keys in self._asked.values():
            self._lookups.answer(keys, bytes([BlockState.MISS]) * len(keys), now_s=self._clock())
        self._asked.clear()
        for finished in self._jobs.fail():
            self._end(finished)


def _by_group(items: Iterable[_Item], group_of: Callable[[_Item], int]) -> dict[int, list[_Item]]:
    groups: dict[int, list[_Item]] = {}
    for item in items:
        groups.setdefault(group_of(item), []).append(item)
    return groups


def _batches(items: Sequence[_Item], count_max: int) -> list[list[_Item]]:
    return [list(items[start : start + count_max]) for start in range(0, len(items), count_max)]
