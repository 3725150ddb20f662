"""Which blocks leave VRAM, in which batches. Plans are values; the migrator carries them out."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

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


class Residents(Protocol):
    """What the planner asks of a table. Plans look at leaves and what they lead to, not at every block."""

    def leaves(self) -> Iterable[Resident]:
        """Resident blocks without a child that is loading or resident."""

    def find(self, block_hash: BlockHash) -> Resident | None:
        """The block, if it is resident."""

    def residents(self) -> Iterable[Resident]: ...


def choose_victims(
    table: Residents,
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
    picker = _LeafPicker(table, heat_of=heat_of)
    victims = picker.pick(max(goal_count, required_count), may_go=lambda resident: resident.cool_until_step <= step)
    if len(victims) < required_count:
        victims += picker.pick(required_count - len(victims), may_go=lambda _: True)
    if len(victims) < required_count:
        chosen = {victim.block_hash for victim in victims}
        rest = [r for r in table.residents() if not r.is_held and r.block_hash not in chosen]
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
    ordered = [by_hash[block_hash] for run in into_runs(list(by_hash.values())) for block_hash in run.block_hashes]
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
    for member in members.values():
        if member.parent_hash is not None and member.parent_hash in members:
            children.setdefault(member.parent_hash, []).append(member)
        else:
            heads.append(member)
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


def cut_runs(runs: Iterable[Run], *, skip: Container[BlockHash], block_count_max: int) -> Iterator[tuple[Run, ...]]:
    """The same blocks without those in `skip`, in parts of at most `block_count_max`; every run keeps its parent."""
    part: list[Run] = []
    room = block_count_max
    for run in runs:
        parent_hash, piece = run.parent_hash, list[BlockHash]()
        for block_hash in run.block_hashes:
            if block_hash in skip:
                if piece:
                    part.append(Run(parent_hash=parent_hash, block_hashes=tuple(piece)))
                parent_hash, piece = block_hash, []
                continue
            piece.append(block_hash)
            room -= 1
            if room == 0:
                yield (*part, Run(parent_hash=parent_hash, block_hashes=tuple(piece)))
                parent_hash, piece, part, room = block_hash, [], [], block_count_max
        if piece:
            part.append(Run(parent_hash=parent_hash, block_hashes=tuple(piece)))
    if part:
        yield tuple(part)


class _LeafPicker:
    """Takes leaves off the tree, coldest first; what one pick passed over is there for the next."""

    def __init__(self, table: Residents, *, heat_of: Callable[[BlockHash], Heat]) -> None:
        self._table = table
        self._heat_of = heat_of
        self._child_counts: dict[BlockHash, int] = {}
        self._queue: list[tuple[Heat, int, Resident]] = []
        self._pushes = 0
        for leaf in table.leaves():
            self._push(leaf)

    def pick(self, count: int, *, may_go: Callable[[Resident], bool]) -> list[Resident]:
        picked: list[Resident] = []
        passed: list[Resident] = []
        while len(picked) < count and self._queue:
            _, _, resident = heapq.heappop(self._queue)
            if may_go(resident):
                picked.append(resident)
                self._uncover_parent(resident)
            else:
                passed.append(resident)
        for resident in passed:
            self._push(resident)
        return picked

    def _uncover_parent(self, child: Resident) -> None:
        parent = self._table.find(child.parent_hash) if child.parent_hash is not None else None
        if parent is None:
            return
        child_count = self._child_counts.get(parent.block_hash, parent.child_count) - 1
        self._child_counts[parent.block_hash] = child_count
        if child_count == 0:
            self._push(parent)

    def _push(self, resident: Resident) -> None:
        if resident.is_held:
            return
        # Of equally cold leaves the one pushed last goes first: a plan follows one chain to its head instead
        # of nibbling at many, and its runs stay long.
        self._pushes -= 1
        heapq.heappush(self._queue, (self._heat_of(resident.block_hash), self._pushes, resident))
