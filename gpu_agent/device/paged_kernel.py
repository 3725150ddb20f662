"""Gather and scatter as one kernel per batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_agent.core.pieces import Piece
from gpu_agent.device.paged import PagedBlocks

_TILE_WORDS = 1024
"""Words that one program moves: 8 KiB, four times 16 bytes for each of 128 threads."""
_VECTOR_BYTES = 16
"""Most that one thread moves at once; less when an address or a pitch is not a multiple of it."""
_PIECE_FIELDS = tl.constexpr(len(Piece._fields))
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


class PageMover:
    """Moves pages of one cache on the current stream; holds its table of layers and planes on the device."""

    def __init__(self, pieces: Sequence[Piece], *, device: torch.device) -> None:
        self._device = device
        self._pieces = torch.tensor(pieces, dtype=torch.int64, device=device)
        # Everything that an address is made of, apart from the blocks' own: words divide all of it.
        self._divisor = math.gcd(*(number for piece in pieces for number in piece._replace(row_count=0)))
        self._row_count = max(piece.row_count for piece in pieces)
        self._row_bytes = max(piece.row_bytes for piece in pieces)

    def move(self, blocks: PagedBlocks, indices: Sequence[int], *, payloads: Sequence[int], is_gather: bool) -> None:
        """`payloads` are addresses that the device reaches: VRAM, or page-locked host memory."""
        if not payloads:
            return
        aligned_bytes = math.gcd(self._divisor, *payloads, _VECTOR_BYTES)
        word_bytes = min(aligned_bytes, max(_WORDS))
        tile_count = -(-self._row_bytes // (word_bytes * _TILE_WORDS))
        pages = torch.from_numpy(blocks.pages[list(indices)])
        grid = (pages.numel(), len(self._pieces), self._row_count * tile_count)
        _move_pages[grid](
            self._pieces,
            self._on_device(pages),
            self._on_device(torch.tensor(payloads, dtype=torch.int64)),
            pages.shape[1],
            tile_count,
            IS_GATHER=is_gather,
            WORD=_WORDS[word_bytes],
            WORD_BYTES=word_bytes,
            ALIGNED_BYTES=aligned_bytes,
            TILE_WORDS=_TILE_WORDS,
        )

    def _on_device(self, table: Tensor) -> Tensor:
        return table.to(self._device, non_blocking=True)


@triton.jit  # type: ignore[untyped-decorator]
def _move_pages(  # type: ignore[no-untyped-def]  # triton evaluates annotations and wants its own
    pieces,
    pages,
    payloads,
    pages_per_block,
    tile_count,
    IS_GATHER: tl.constexpr,  # noqa: N803  # constants of a kernel
    WORD: tl.constexpr,  # noqa: N803
    WORD_BYTES: tl.constexpr,  # noqa: N803
    ALIGNED_BYTES: tl.constexpr,  # noqa: N803
    TILE_WORDS: tl.constexpr,  # noqa: N803
):
    """One tile of one row of one page of one layer's plane; `Piece` says where it is on either side."""
    page_index = tl.program_id(0)
    piece = pieces + tl.program_id(1) * _PIECE_FIELDS
    row = (tl.program_id(2) // tile_count).to(tl.int64)
    tile = tl.program_id(2) % tile_count
    address = tl.load(piece) + tl.load(pages + page_index) * tl.load(piece + 1) + row * tl.load(piece + 2)
    payload = (
        tl.load(payloads + page_index // pages_per_block)
        + tl.load(piece + 3)
        + (page_index % pages_per_block) * tl.load(piece + 4)
        + row * tl.load(piece + 5)
    )
    word = tile * TILE_WORDS + tl.arange(0, TILE_WORDS)
    word_count = tl.where(row < tl.load(piece + 6), tl.load(piece + 7) // WORD_BYTES, 0)
    is_inside = word < tl.multiple_of(word_count, ALIGNED_BYTES // WORD_BYTES)
    in_page = tl.multiple_of(address.to(tl.pointer_type(WORD)), ALIGNED_BYTES) + word
    in_payload = tl.multiple_of(payload.to(tl.pointer_type(WORD)), ALIGNED_BYTES) + word
    if IS_GATHER:
        tl.store(in_payload, tl.load(in_page, mask=is_inside), mask=is_inside)
    else:
        tl.store(in_page, tl.load(in_payload, mask=is_inside), mask=is_inside)
