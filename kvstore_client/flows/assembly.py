"""From frames of a `ReadBlocks` stream to verified blocks in the caller's memory."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.envelope import ENVELOPE_BYTES, verify_block
from kvstore.errors import CorruptBlockError, ProtocolError
from kvstore.frames import ReadFrame
from kvstore.keys import BlockHash, NamespaceId
from kvstore.messages import BlockState


class BlockAssembler:
    """Takes the frames of one stream in order of arrival; fills one target per block.

    A block's state is HIT only after all of its bytes were verified and then copied; targets of other blocks
    stay untouched. A block that arrives whole but wrong is CORRUPT and concerns nobody else. A frame that
    breaks the contract raises `ProtocolError`: the stream is not to be believed any further.
    """

    def __init__(
        self,
        *,
        namespace_id: NamespaceId,
        hashes: Sequence[BlockHash],
        targets: Sequence[memoryview],
        payload_bytes: int,
    ) -> None:
        self._namespace_id = namespace_id
        self._hashes = hashes
        self._targets = targets
        self._payload_bytes = payload_bytes
        # Every codec so far keeps the size, so there is one size that a block can have.
        self._block_bytes = ENVELOPE_BYTES + payload_bytes
        self._states = [BlockState.MISS] * len(hashes)
        self._next_index = 0
        self._partial = memoryview(b"")
        self._partial_bytes = 0
        self._unverified: list[BlockHash] = []
        self._first_fault: CorruptBlockError | None = None

    @property
    def states(self) -> list[BlockState]:
        return self._states

    @property
    def unverified(self) -> Sequence[BlockHash]:
        """Blocks that arrived but were not what was asked for."""
        return self._unverified

    @property
    def first_fault(self) -> CorruptBlockError | None:
        """What was wrong with the first of them."""
        return self._first_fault

    def accept(self, frame: ReadFrame) -> None:
        index = frame.block_index
        if not self._next_index <= index < len(self._hashes):
            raise ProtocolError(f"frame for block {index}; expected {self._next_index} to {len(self._hashes) - 1}")
        if self._partial_bytes and index != self._next_index:
            raise ProtocolError(f"frame for block {index} in the middle of block {self._next_index}")
        if frame.block_state is not BlockState.HIT:
            self._finish(index, frame.block_state)
        elif frame.size_bytes != self._block_bytes:
            raise ProtocolError(
                f"block {index} claims {frame.size_bytes} bytes; the namespace gives {self._block_bytes}"
            )
        else:
            self._take(index, frame)

    def _take(self, index: int, frame: ReadFrame) -> None:
        start, end = self._partial_bytes, self._partial_bytes + len(frame.data)
        if frame.offset_bytes != start or end == start or end > self._block_bytes:
            raise ProtocolError(
                f"block {index} goes on with {len(frame.data)} bytes at offset {frame.offset_bytes}; "
                f"{start} of {self._block_bytes} have come"
            )
        if end - start == self._block_bytes:
            self._verify(index, frame.data)  # in place: the usual block comes in one frame
            return
        if not self._partial:
            self._partial = memoryview(bytearray(self._block_bytes))
        self._partial[start:end] = frame.data
        self._next_index, self._partial_bytes = index, end
        if end == self._block_bytes:
            self._verify(index, self._partial)

    def _verify(self, index: int, block: memoryview) -> None:
        try:
            payload = verify_block(
                block,
                namespace_id=self._namespace_id,
                block_hash=self._hashes[index],
                payload_bytes=self._payload_bytes,
            )
        except CorruptBlockError as error:
            self._unverified.append(self._hashes[index])
            self._first_fault = self._first_fault or error
            self._finish(index, BlockState.CORRUPT)
            return
        # Raises on any difference in length, so that nothing but a whole block can become a hit.
        self._targets[index][:] = payload
        self._finish(index, BlockState.HIT)

    def _finish(self, index: int, state: BlockState) -> None:
        self._states[index] = state
        self._next_index, self._partial_bytes = index + 1, 0
