"""Which copies of one block each can be one copy of many. Plans are addresses; a device carries them out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

PITCH_BYTES_MAX = (1 << 31) - 1
"""Largest distance between the rows of one two-dimensional copy; CUDA devices report this one (`memPitch`)."""


class Move(NamedTuple):
    """One block from one address to another."""

    source: int
    target: int
    group: int = 0
    """Moves of different groups are never joined, however they lie: a DMA must stay within one registration."""


class Transfer(NamedTuple):
    """`row_count` rows of `row_bytes`, whose starts are a pitch apart on either side."""

    source: int
    target: int
    row_bytes: int
    row_count: int
    source_pitch_bytes: int
    target_pitch_bytes: int


def plan_transfers(moves: Iterable[Move], *, block_bytes: int) -> list[Transfer]:
    """The same moves in as few transfers as neighbours give, in the order of their targets.

    Blocks that follow each other without a gap on both sides become one row; those with equal gaps become rows of
    one transfer. Targets must not overlap, except that the last of several moves to one target is carried out last.
    """
    transfers: list[Transfer] = []
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
            transfers.append(_transfer(run, pitches=pitches, block_bytes=block_bytes))
        run, pitches = [move], None
    if run:
        transfers.append(_transfer(run, pitches=pitches, block_bytes=block_bytes))
    return transfers


def _transfer(run: list[Move], *, pitches: tuple[int, int] | None, block_bytes: int) -> Transfer:
    first, count = run[0], len(run)
    if pitches is None or pitches == (block_bytes, block_bytes):
        row_bytes = count * block_bytes
        return Transfer(first.source, first.target, row_bytes, 1, row_bytes, row_bytes)
    return Transfer(first.source, first.target, block_bytes, count, *pitches)
