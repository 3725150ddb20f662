"""In which batches blocks leave VRAM. Plans are values; the migrator carries them out."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

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
