"""Whether bytes in a slot are the block that belongs there."""

from __future__ import annotations

from kvstore.envelope import ENVELOPE_BYTES, Envelope, verify_block
from kvstore.errors import CorruptBlockError
from kvstore.keys import BlockHash, NamespaceId
from kvstore.messages import CommitState


def verdict(
    block: memoryview,
    *,
    namespace_id: NamespaceId,
    block_hash: BlockHash,
    payload_bytes: int,
    payload_checksum: int | None = None,
) -> CommitState:
    """COMMITTED when these bytes are the block, no byte more; INCOMPLETE when its end is missing; else CORRUPT.

    Releases the interpreter while it hashes, and need not where the checksum of the payload is known.
    """
    try:
        payload = verify_block(
            block,
            namespace_id=namespace_id,
            block_hash=block_hash,
            payload_bytes=payload_bytes,
            payload_checksum=payload_checksum,
        )
    except CorruptBlockError:
        return CommitState.INCOMPLETE if is_cut_off(block) else CommitState.CORRUPT
    return CommitState.COMMITTED if len(block) == ENVELOPE_BYTES + len(payload) else CommitState.CORRUPT


def is_cut_off(block: memoryview) -> bool:
    """Whether these bytes may be the beginning of a longer block."""
    if len(block) < ENVELOPE_BYTES:
        return True
    try:
        return len(block) < ENVELOPE_BYTES + Envelope.decode(block).payload_bytes
    except CorruptBlockError:
        return False
