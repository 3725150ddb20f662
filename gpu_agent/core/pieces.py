"""How the pages of an engine's cache map onto payloads of blocks, as numbers."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.layout import LayoutOrder, Plane


class PagePlane(NamedTuple):
    """One layer of one plane in an engine's cache. Every page is `row_count` rows of `row_bytes`.

    A row is what lies together in the innermost two axes: all heads of one token (NHD), all tokens of one head (HND).
    """

    address: int
    """Of page 0."""
    page_pitch_bytes: int
    row_pitch_bytes: int
    row_count: int
    row_bytes: int


class Piece(NamedTuple):
    """One layer of one plane: where row r of page p lies in the cache, and where it goes in a block's payload.

    In the cache at `address + p * page_pitch + r * row_pitch`; of the j-th page of a block at
    `payload_offset + j * payload_page_pitch + r * payload_row_pitch` in its payload.
    """

    address: int
    page_pitch_bytes: int
    row_pitch_bytes: int
    payload_offset_bytes: int
    payload_page_pitch_bytes: int
    payload_row_pitch_bytes: int
    row_count: int
    row_bytes: int


def plan_piece(plane: Plane, layer: int, pages: PagePlane, *, order: LayoutOrder, pages_per_block: int) -> Piece:
    """Where one layer of a plane goes. Rows that lie together on both sides are joined into one."""
    if order is LayoutOrder.NHD:  # a page is a run of whole tokens in the payload
        page_pitch, row_pitch = pages.row_count * pages.row_bytes, pages.row_bytes
    else:  # a page is a part of every head's tokens
        page_pitch, row_pitch = pages.row_bytes, pages_per_block * pages.row_bytes
    row_count, row_bytes = pages.row_count, pages.row_bytes
    if row_count == 1 or pages.row_pitch_bytes == row_pitch == row_bytes:
        row_count, row_bytes = 1, row_count * row_bytes
    return Piece(
        address=pages.address,
        page_pitch_bytes=pages.page_pitch_bytes,
        row_pitch_bytes=pages.row_pitch_bytes,
        payload_offset_bytes=plane.offset_bytes + layer * plane.strides_bytes[0],
        payload_page_pitch_bytes=page_pitch,
        payload_row_pitch_bytes=row_pitch,
        row_count=row_count,
        row_bytes=row_bytes,
    )
