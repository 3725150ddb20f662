"""Which copies of one block each can be one copy of many. Plans are addresses; a device carries them out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

PITCH_BYTES_MAX = (1 << 31) - 1
"""Largest distance between the rows of one two-dimensional copy; CUDA devices report this one (`memPitch`)."""


class Move(NamedTuple):
    """One block from one address to another."""

    source: int
    target: int
    group: int = 0
    """Moves of different groups are never joined, however they lie: a DMA must stay within one registration."""


class Part(NamedTuple):
    """The same bytes of every block."""

    offset_bytes: int
    size_bytes: int


class Transfer(NamedTuple):
    """`row_count` rows of `row_bytes`, whose starts are a pitch apart on either side."""

    source: int
    target: int
    row_bytes: int
    row_count: int
    source_pitch_bytes: int
    target_pitch_bytes: int
    piece_bytes: int
    """What is moved of one block; a row is one piece, or several that follow each other."""

    @property
    def size_bytes(self) -> int:
        return self.row_bytes * self.row_count


class _Run(NamedTuple):
    """Moves whose sources, and whose targets, are a pitch apart. One move alone has pitches 0."""

    source: int
    target: int
    move_count: int
    source_pitch_bytes: int
    target_pitch_bytes: int


def plan_transfers(moves: Iterable[Move], *, block_bytes: int) -> list[Transfer]:
    """The same moves in as few transfers as neighbours give, in the order of their targets.

    Blocks that follow each other without a gap on both sides become one row; those with equal gaps become rows of
    one transfer. Targets must not overlap, except that the last of several moves to one target is carried out last.
    """
    (transfers,) = plan_parts(moves, [(Part(0, block_bytes),)], block_bytes=block_bytes)
    return transfers


def plan_parts(moves: Iterable[Move], groups: Iterable[Sequence[Part]], *, block_bytes: int) -> list[list[Transfer]]:
    """As `plan_transfers`, but per group only these parts of every block: all blocks' first part, then the next."""
    runs = _runs(moves, block_bytes=block_bytes)
    return [[_transfer(run, part) for part in parts for run in runs] for parts in groups]


def _runs(moves: Iterable[Move], *, block_bytes: int) -> list[_Run]:
    runs: list[_Run] = []
    run: list[Move] = []
    pitches: tuple[int, int] | None = None
    for move in sorted(moves, key=lambda move: move.target):
        if run:
            found = (move.source - run[-1].source, move.target - run[-1].target)
            fits = all(block_bytes <= pitch <= PITCH_BYTES_MAX for pitch in found)
            if move.group == run[-1].group and fits and pitches in (None, found):
                pitches = found
                run.append(move)
                continue
            runs.append(_Run(run[0].source, run[0].target, len(run), *(pitches or (0, 0))))
        run, pitches = [move], None
    if run:
        runs.append(_Run(run[0].source, run[0].target, len(run), *(pitches or (0, 0))))
    return runs


def _transfer(run: _Run, part: Part) -> Transfer:
    source, target = run.source + part.offset_bytes, run.target + part.offset_bytes
    pitches, size_bytes = (run.source_pitch_bytes, run.target_pitch_bytes), part.size_bytes
    if run.move_count == 1 or pitches == (size_bytes, size_bytes):
        row_bytes = run.move_count * size_bytes
        return Transfer(source, target, row_bytes, 1, row_bytes, row_bytes, size_bytes)
    return Transfer(source, target, size_bytes, run.move_count, *pitches, size_bytes)
