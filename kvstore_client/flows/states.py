"""Packed block states, as the daemon sends them, and as callers get them."""

from __future__ import annotations

from kvstore.errors import ProtocolError
from kvstore.messages import AcquirePrefixResponse, BlockState, LookupBlocksResponse

_KNOWN = {int(state): state for state in (BlockState.HIT, BlockState.PENDING, BlockState.MISS)}
_HIT_BYTE = bytes([BlockState.HIT])


def leading_hits(packed: bytes) -> int:
    return len(packed) - len(packed.lstrip(_HIT_BYTE))


def matched_hits(response: LookupBlocksResponse | AcquirePrefixResponse) -> int:
    """Leading blocks to go by: all leading hits, unless the daemon leaves some of them out."""
    hit_count = leading_hits(response.block_states)
    if not response.left_out_count:
        return hit_count
    if response.matched_count > hit_count:
        raise ProtocolError(f"the daemon matched {response.matched_count} blocks, of {hit_count} leading hits")
    return response.matched_count


def block_states(packed: bytes, *, block_count: int) -> tuple[BlockState, ...]:
    """One state per block that was asked about; anything else raises `ProtocolError`."""
    if len(packed) != block_count:
        raise ProtocolError(f"asked about {block_count} blocks, got {len(packed)} states")
    hit_count, miss_count = leading_hits(packed), packed.count(BlockState.MISS)
    if hit_count + miss_count == block_count:  # what nearly every answer looks like, without a look at every block
        return (BlockState.HIT,) * hit_count + (BlockState.MISS,) * miss_count
    try:
        return tuple([_KNOWN[number] for number in packed])
    except KeyError as error:
        raise ProtocolError(f"unknown block state {error}") from error
