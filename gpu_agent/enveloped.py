"""Blocks as they travel to and from a sidecar: envelope first, cut into frames, verified on arrival."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstore.envelope import ENVELOPE_BYTES, Codec, Envelope, checksum, verify_block
from kvstore.errors import CorruptBlockError, InvalidArgumentError, ProtocolError
from kvstore.frames import ReadFrame, StoreFrame, cut
from kvstore.keys import HASH_BYTES, BlockHash
from kvstore.messages import BATCH_COUNT_MAX, BlockState
from kvstore.namespace import Namespace


class EnvelopedRows:
    """Host memory for a number of blocks with their envelopes, one per row."""

    def __init__(self, *, namespace: Namespace, row_count: int) -> None:
        self._namespace = namespace
        self._layout = namespace.block_layout
        self.block_bytes = ENVELOPE_BYTES + self._layout.payload_bytes
        self._memory = torch.empty((row_count, self.block_bytes), dtype=torch.uint8)

    @property
    def row_count(self) -> int:
        return self._memory.shape[0]

    def payloads(self, *, start_row: int, end_row: int) -> Tensor:
        return self._memory[start_row:end_row, ENVELOPE_BYTES:]

    def row(self, row: int) -> memoryview:
        return self._memory[row].numpy().data

    def seal(self, row: int, *, block_hash: BlockHash) -> None:
        """Puts the envelope before a payload."""
        k_bytes = self._layout.planes[0].size_bytes
        v_bytes = self._layout.payload_bytes - k_bytes
        block = self.row(row)
        block[:ENVELOPE_BYTES] = Envelope(
            namespace_id=self._namespace.id,
            block_hash=block_hash,
            k_codec=Codec.EXACT,
            v_codec=Codec.EXACT if v_bytes else Codec.NONE,
            tokens=self._layout.tokens_per_block,
            k_bytes=k_bytes,
            v_bytes=v_bytes,
            decoded_bytes=self._layout.payload_bytes,
            payload_checksum=checksum(block[ENVELOPE_BYTES:]),
        ).encode()

    def is_sound(self, row: int, *, block_hash: BlockHash) -> bool:
        try:
            verify_block(
                self.row(row),
                namespace_id=self._namespace.id,
                block_hash=block_hash,
                payload_bytes=self._layout.payload_bytes,
            )
        except CorruptBlockError:
            return False
        return True

    def frames(self, row: int, *, block_index: int) -> Iterator[ReadFrame]:
        """Of a sealed row. Views: to be encoded before the row is filled again."""
        block = self.row(row)
        for offset, length in cut(self.block_bytes):
            yield ReadFrame(
                block_index=block_index,
                block_state=BlockState.HIT,
                offset_bytes=offset,
                size_bytes=self.block_bytes,
                data=block[offset : offset + length],
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingRun:
    """Verified blocks of one chain; or, with `payloads` None, one block that did not verify."""

    block_hashes: tuple[BlockHash, ...]
    parent_hash: BlockHash | None
    payloads: Tensor | None


def incoming_runs(frames: Iterable[StoreFrame], *, rows: EnvelopedRows) -> Iterator[IncomingRun]:
    """The blocks of a stream in order of arrival, as runs that fit into `rows`, which hold one run at a time.

    A block that arrives whole but wrong concerns nobody else. A frame that breaks the contract raises
    `ProtocolError`, and more than 65,536 blocks `InvalidArgumentError`.
    """
    run: list[BlockHash] = []
    run_parent: BlockHash | None = None
    block_count = 0

    def finish() -> IncomingRun:
        done = IncomingRun(
            block_hashes=tuple(run),
            parent_hash=run_parent,
            payloads=rows.payloads(start_row=0, end_row=len(run)),
        )
        run.clear()
        return done

    stream = iter(frames)
    while (first := next(stream, None)) is not None:
        block_hash, parent_hash = _check_first(first)
        block_count += 1
        if block_count > BATCH_COUNT_MAX:
            raise InvalidArgumentError.of("StoreBlocks", f"{block_count} blocks", f"up to {BATCH_COUNT_MAX}")
        if run and (len(run) == rows.row_count or parent_hash != run[-1]):
            yield finish()
        row = len(run)
        _fill(rows.row(row), first=first, stream=stream)
        if not rows.is_sound(row, block_hash=block_hash):
            if run:
                yield finish()
            yield IncomingRun(block_hashes=(block_hash,), parent_hash=parent_hash, payloads=None)
            continue
        if not run:
            run_parent = parent_hash
        run.append(block_hash)
    if run:
        yield finish()


def _check_first(frame: StoreFrame) -> tuple[BlockHash, BlockHash | None]:
    if frame.block_hash is None or len(frame.block_hash) != HASH_BYTES or frame.offset_bytes:
        raise ProtocolError("a block must begin with a frame that has its hash and offset 0")
    if frame.parent_hash is not None and len(frame.parent_hash) != HASH_BYTES:
        raise ProtocolError(f"parent_hash has {len(frame.parent_hash)} bytes; allowed: {HASH_BYTES}, or none")
    return frame.block_hash, frame.parent_hash


def _fill(block: memoryview, *, first: StoreFrame, stream: Iterator[StoreFrame]) -> None:
    frame: StoreFrame | None = first
    filled_bytes = 0
    while True:
        if frame is None:
            raise ProtocolError(f"the stream ended {len(block) - filled_bytes} bytes before the end of a block")
        end_bytes = filled_bytes + len(frame.data)
        if frame.offset_bytes != filled_bytes or end_bytes > len(block) or not frame.data:
            raise ProtocolError(
                f"frame at offset {frame.offset_bytes} with {len(frame.data)} bytes; "
                f"expected offset {filled_bytes} of {len(block)}"
            )
        block[filled_bytes:end_bytes] = frame.data
        filled_bytes = end_bytes
        if filled_bytes == len(block):
            return
        frame = next(stream, None)
