"""Which blocks leave VRAM, in which batches. Plans are values; the migrator carries them out."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpu_agent.core.access import Heat
from gpu_agent.core.table import Resident
from kvstore.keys import BlockHash


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Blocks of one chain, each the parent of the next: what one put can carry."""

    parent_hash: BlockHash | None
    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Blocks that are copied together; a run never comes before the run that holds its parent."""

    runs: tuple[Run, ...]
    keeps_resident: bool = False
    """The daemon gets a copy and the blocks stay."""

    @property
    def block_hashes(self) -> tuple[BlockHash, ...]:
        return tuple(block_hash for run in self.runs for block_hash in run.block_hashes)


def choose_victims(
    residents: Iterable[Resident],
    *,
    heat_of: Callable[[BlockHash], Heat],
    step: int,
    goal_count: int,
    required_count: int = 0,
) -> list[Resident]:
    """Up to `goal_count` blocks to give up, in the order in which to do it.

    Coldest first, and a block only after all its children here, so that heads outlive tails. Blocks that are
    held never go. Blocks in their cool-down go only while fewer than `required_count` were found, and only
    then, as a last resort, blocks whose children have to stay.
    """
    by_hash = {resident.block_hash: resident for resident in residents if not resident.is_held}
    goal_count = max(goal_count, required_count)
    picker = _LeafPicker(by_hash, heat_of=heat_of)
    victims = picker.pick(goal_count, may_go=lambda resident: resident.cool_until_step <= step)
    if len(victims) < required_count:
        victims += picker.pick(required_count - len(victims), may_go=lambda _: True)
    if len(victims) < required_count:
        chosen = {victim.block_hash for victim in victims}
        rest = [resident for resident in by_hash.values() if resident.block_hash not in chosen]
        rest.sort(key=lambda resident: heat_of(resident.block_hash))
        victims += rest[: required_count - len(victims)]
    return victims


def plan_migration(victims: Sequence[Resident], *, batch_count_max: int) -> tuple[Batch, ...]:
    """Batches of the victims, in their order; inside a batch, runs go head first, as the daemon wants them."""
    return tuple(
        Batch(runs=into_runs(victims[start : start + batch_count_max]))
        for start in range(0, len(victims), batch_count_max)
    )


def plan_copies(residents: Iterable[Resident], *, batch_count_max: int) -> tuple[Batch, ...]:
    """Batches that copy everything down, heads first: cut off anywhere, what arrived is whole prefixes."""
    by_hash = {resident.block_hash: resident for resident in residents}
    ordered = [
        by_hash[block_hash] for run in into_runs(list(by_hash.values())) for block_hash in run.block_hashes
    ]
    return tuple(
        Batch(runs=into_runs(ordered[start : start + batch_count_max]), keeps_resident=True)
        for start in range(0, len(ordered), batch_count_max)
    )


def into_runs(blocks: Sequence[Resident]) -> tuple[Run, ...]:
    """Groups blocks into runs of their chains, parents before children.

    Where a chain forks, one branch goes on and the others start runs of their own. Parents come from
    callers, so even a ring of them must not lose a block: it is cut where it is met first.
    """
    members = {block.block_hash: block for block in blocks}
    children: dict[BlockHash, list[Resident]] = {}
    heads: list[Resident] = []
    for block in members.values():
        if block.parent_hash is not None and block.parent_hash in members:
            children.setdefault(block.parent_hash, []).append(block)
        else:
            heads.append(block)
    runs: list[Run] = []
    seen: set[BlockHash] = set()
    # Heads of trees first; what is left after them are rings.
    for start in (*heads, *members.values()):
        pending = [start]
        while pending:
            block: Resident | None = pending[-1]
            run: list[BlockHash] = []
            parent_hash = pending.pop().parent_hash
            while block is not None and block.block_hash not in seen:
                seen.add(block.block_hash)
                run.append(block.block_hash)
                branches = children.get(block.block_hash, [])
                pending += branches[1:]
                block = branches[0] if branches else None
            if run:
                runs.append(Run(parent_hash=parent_hash, block_hashes=tuple(run)))
    return tuple(runs)


class _LeafPicker:
    """Takes leaves off the tree, coldest first; what one pick passed over is there for the next."""

    def __init__(self, by_hash: Mapping[BlockHash, Resident], *, heat_of: Callable[[BlockHash], Heat]) -> None:
        self._by_hash = by_hash
        self._heat_of = heat_of
        self._child_counts = {block_hash: resident.child_count for block_hash, resident in by_hash.items()}
        self._queue: list[tuple[Heat, int, Resident]] = []
        self._pushes = 0
        for resident in by_hash.values():
            if resident.child_count == 0:
                self._push(resident)

    def pick(self, count: int, *, may_go: Callable[[Resident], bool]) -> list[Resident]:
        picked: list[Resident] = []
        passed: list[Resident] = []
        while len(picked) < count and self._queue:
            _, _, resident = heapq.heappop(self._queue)
            if not may_go(resident):
                passed.append(resident)
                continue
            picked.append(resident)
            parent = self._by_hash.get(resident.parent_hash) if resident.parent_hash is not None else None
            if parent is not None:
                self._child_counts[parent.block_hash] -= 1
                if self._child_counts[parent.block_hash] == 0:
                    self._push(parent)
        for resident in passed:
            self._push(resident)
        return picked

    def _push(self, resident: Resident) -> None:
        # Of equally cold leaves the one pushed last goes first: a plan follows one chain to its head instead
        # of nibbling at many, and its runs stay long.
        self._pushes -= 1
        heapq.heappush(self._queue, (self._heat_of(resident.block_hash), self._pushes, resident))
