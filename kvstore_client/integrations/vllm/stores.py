"""Which blocks of requests are still to be stored, and which are on their way. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore_client.hints import Hint
from kvstore_client.integrations.vllm.messages import BlockRun, IdentityId, JobId, StoreCounts, StoreJob

FindBlock = Callable[[int, int], int | None]
"""Where the engine holds a group's block number, or None when it does not any more."""


@dataclass(slots=True)
class StoreProgress:
    """Of one request: how many blocks of each group are dealt with."""

    done_counts: list[int]
    is_known: list[set[int]] = field(default_factory=list)
    """Per group the numbers of blocks that the store holds already."""


class StoreLedger:
    """Hands out store jobs, and knows which of the engine's blocks they hold. At most `block_count_max` at once."""

    def __init__(self, *, rank_count: int, block_count_max: int) -> None:
        self._rank_count = rank_count
        self._block_count_max = block_count_max
        self._next_id = 0
        self._jobs: dict[JobId, tuple[int, ...]] = {}
        self._reported: dict[JobId, StoreCounts] = {}
        self.held_count = 0
        """Blocks that stores under way hold."""

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    def plan(
        self,
        progress: StoreProgress,
        *,
        identity: IdentityId,
        hashes: Sequence[Sequence[bytes]],
        ready_counts: Sequence[int],
        find_block: FindBlock,
        hint: Hint | None = None,
    ) -> StoreJob | None:
        """What to store of a request whose first `ready_counts` blocks per group are computed.

        Blocks that find no room now stay for the next time.
        """
        room_count = self._block_count_max - self.held_count
        runs: list[BlockRun] = []
        for group, ready_count in enumerate(ready_counts):
            found: list[tuple[int, int]] = []
            number = progress.done_counts[group]
            while number < ready_count and len(found) < room_count:
                block_id = None if number in progress.is_known[group] else find_block(group, number)
                if block_id is not None:
                    found.append((number, block_id))
                number += 1
            progress.done_counts[group] = max(number, progress.done_counts[group])
            runs += _runs(group, found, hashes[group])
            room_count -= len(found)
        if not runs:
            return None
        job = StoreJob(id=JobId(self._next_id), identity=identity, runs=tuple(runs), hint=hint)
        self._next_id += 1
        block_ids = tuple(block_id for run in runs for block_id in run.block_ids)
        self._jobs[job.id] = block_ids
        self.held_count += len(block_ids)
        return job

    def report(self, job_id: JobId, counts: StoreCounts) -> tuple[tuple[int, ...], StoreCounts] | None:
        """The blocks that nobody reads any more and what became of them, once all ranks have reported."""
        before = self._reported.get(job_id, StoreCounts(0, 0, 0))
        total = StoreCounts(*(a + b for a, b in zip(before, counts, strict=True)))
        if total.rank_count < self._rank_count:
            self._reported[job_id] = total
            return None
        self._reported.pop(job_id, None)
        block_ids = self._jobs.pop(job_id)
        self.held_count -= len(block_ids)
        return block_ids, total


def _runs(group: int, found: Sequence[tuple[int, int]], hashes: Sequence[bytes]) -> list[BlockRun]:
    """Numbered blocks as runs without gaps, each behind the block before it."""
    runs: list[BlockRun] = []
    start = 0
    for end in range(1, len(found) + 1):
        if end < len(found) and found[end][0] == found[end - 1][0] + 1:
            continue
        numbers = [number for number, _ in found[start:end]]
        runs.append(
            BlockRun(
                group=group,
                first=numbers[0],
                hashes=tuple(hashes[number] for number in numbers),
                block_ids=tuple(block_id for _, block_id in found[start:end]),
                parent_hash=hashes[numbers[0] - 1] if numbers[0] else None,
            )
        )
        start = end
    return runs
