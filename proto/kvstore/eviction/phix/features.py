"""What is told of a request and of its blocks, as indices of weights. Deterministic: no hashes."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from kvstore.eviction.use import Finish, Request

FINISHES = {Finish.UNKNOWN: 0, Finish.TOOL_USE: 1, Finish.END_TURN: 2, Finish.OTHER: 3}
NO_HINT, HINT_GONE, HINT_BACK = 0, 1, 2
HINT_COUNT = 3
FINISH_COUNT = len(FINISHES)

_TURN_BOUNDS = (1, 2, 3, 5, 9, 20)
_TURNS = len(_TURN_BOUNDS) + 1
_SIZES = 32
_GAPS = 12
_DEPTHS = 8
_USES = 6
_BLOCK_GAPS = 9

_SIZE_OF = (
    1,  # bias
    _TURNS,
    FINISH_COUNT,
    _SIZES,  # of the prompt
    _SIZES,  # of the answer
    _SIZES,  # what the prompt has grown by
    _GAPS,  # since the request before in the session
    _DEPTHS,  # share of the chain that was here
    _TURNS * FINISH_COUNT,
    HINT_COUNT,
    HINT_COUNT * _GAPS,
    _USES,  # of the block
    _BLOCK_GAPS,
    _USES * 4,  # and whether it is shared, or partial
    _USES * _TURNS * FINISH_COUNT,
    HINT_COUNT * _USES,
)
_AT = tuple(sum(_SIZE_OF[:index]) for index in range(len(_SIZE_OF)))
FEATURE_COUNT = sum(_SIZE_OF)
_BITS_OF_BLOCKS = _SIZES // 2
"""Sizes that are known in tokens come first in their table, those in blocks after them."""
_USES_BOUNDS = (1, 2, 4, 8, 16)
_BLOCK_GAP_BOUNDS_S = (1.0, 3.0, 8.0, 20.0, 50.0, 120.0, 300.0)

PRIORS = {_AT[9] + HINT_GONE: -1.4, _AT[9] + HINT_BACK: 1.4}
"""Log odds, ln(0.8 / 0.2): until more is known, a hint is taken to be right four times in five."""
HAZARD_SCALES = {NO_HINT: 1.0, HINT_GONE: 0.3, HINT_BACK: 2.5}
"""The same for hazards, where 40 % come back without a hint: ln(1 - 0.14) and ln(1 - 0.73) by ln(1 - 0.4)."""


def hint_of(request: Request) -> int:
    if request.is_done:
        return HINT_GONE
    return NO_HINT if request.expected_return_s is None else HINT_BACK


def turn_band(turn: int) -> int:
    return bisect_left(_TURN_BOUNDS, turn)


def uses_band(uses: int) -> int:
    return bisect_left(_USES_BOUNDS, uses)


def next_uses_band(band: int) -> int:
    """After one more use, where only the band is known: exact up to three."""
    return band + 1 if band < 2 else band


def gap_band(gap_s: float | None) -> int:
    """Of a block since its last use; 0: it has none."""
    return 0 if gap_s is None else 1 + bisect_left(_BLOCK_GAP_BOUNDS_S, gap_s)


def of_request(
    request: Request,
    *,
    turn: int,
    gap_s: float | None,
    growth_tokens: int | None,
    growth_blocks: int,
    chain_blocks: int,
    matched_blocks: int,
) -> tuple[int, ...]:
    turns, finish, hint = turn_band(turn), FINISHES[request.finish], hint_of(request)
    gap = 0 if gap_s is None else 1 + min(int(gap_s).bit_length(), _GAPS - 2)
    depth = 0 if not matched_blocks else 1 + min(6 * matched_blocks // max(chain_blocks, 1), _DEPTHS - 2)
    output = 0 if request.output_tokens is None else _size(request.output_tokens >> 3, in_blocks=False)
    if growth_tokens is None:
        growth = _size(growth_blocks, in_blocks=True)
    else:
        growth = _size(growth_tokens >> 5, in_blocks=False)
    if request.input_tokens is None:
        prompt = _size(chain_blocks, in_blocks=True)
    else:
        prompt = _size(request.input_tokens >> 6, in_blocks=False)
    at = _AT
    return (
        0,
        at[1] + turns,
        at[2] + finish,
        at[3] + prompt,
        at[4] + output,
        at[5] + growth,
        at[6] + gap,
        at[7] + depth,
        at[8] + turns * FINISH_COUNT + finish,
        at[9] + hint,
        at[10] + hint * _GAPS + gap,
    )


class Past(NamedTuple):
    """What is known of blocks apart from the request that used them last."""

    uses: int = 0
    """How often they were used: a band."""
    gap: int = 0
    """How long before the last use they had been used: a band; 0: never."""
    is_shared: bool = False
    """Chains have been seen that leave theirs at or after these blocks."""
    is_partial: bool = False


_PASTS = tuple(
    Past(uses, gap, is_shared, is_partial)
    for uses in range(_USES)
    for gap in range(_BLOCK_GAPS)
    for is_shared in (False, True)
    for is_partial in (False, True)
)


def past_of(uses: int, gap: int, *, is_shared: bool, is_partial: bool) -> Past:
    """Of these bands; the same object each time."""
    return _PASTS[((uses * _BLOCK_GAPS + gap) * 2 + is_shared) * 2 + is_partial]


NEW = past_of(0, 0, is_shared=False, is_partial=False)
NEW_PARTIAL = past_of(0, 0, is_shared=False, is_partial=True)


class Setting(NamedTuple):
    """What of a request bears on how its blocks' past counts."""

    turns: int
    finish: int
    hint: int


def of_blocks(past: Past, setting: Setting) -> tuple[int, ...]:
    at, (uses, gap, is_shared, is_partial), (turns, finish, hint) = _AT, past, setting
    return (
        at[11] + uses,
        at[12] + gap,
        at[13] + uses * 4 + is_shared * 2 + is_partial,
        at[14] + (uses * _TURNS + turns) * FINISH_COUNT + finish,
        at[15] + hint * _USES + uses,
    )


def _size(count: int, *, in_blocks: bool) -> int:
    bits = min(max(count, 0).bit_length(), _BITS_OF_BLOCKS - 1)
    return bits + _BITS_OF_BLOCKS if in_blocks else bits
