"""Blocks between slots in mapped memory and the caller's memory, checked on the way.

A copying reader holds a lease, and does not rely on it: it finds the slot's header as it was told, copies, hashes
what it has copied, and finds the header again. So a slot that was given to another block meanwhile is never
taken for the block that was asked for, however long the reader was stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

import numpy as np

from kvstore.envelope import Buffer, Envelope, EnvelopeTemplate, RunningChecksum, checksum
from kvstore.errors import CorruptBlockError
from kvstore.keys import BlockHash
from kvstore.messages import BlockState
from kvstore.namespace import Namespace
from kvstore.slab import PAYLOAD_OFFSET_BYTES, SLOT_HEADER_BYTES, Generation, SlotState, slot_state
from kvstore_client.paths.idle import IdleCores

_SHARED_BYTES_MIN = 2 << 20
"""Bytes of blocks below which a second thread is not worth waking: 2 MiB take about as long as five wake-ups."""


_PIECE_BYTES = 1 << 20
"""What is copied and hashed at a time, so that the second of the two finds it in the cache. Measured with 2 MiB blocks:
1.1 times as fast as whole blocks; pieces below 512 KiB are copied several times slower on some processors."""


def copy_and_hash(target: Buffer, source: Buffer) -> int:
    """Copies equal lengths; the checksum is of what has arrived."""
    to, whole = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    if len(whole) <= _PIECE_BYTES:
        np.copyto(to, whole)  # memoryviews copy as fast, but do not release the interpreter
        return checksum(target)
    running = RunningChecksum()
    for start in range(0, len(whole), _PIECE_BYTES):
        piece = to[start : start + _PIECE_BYTES]
        np.copyto(piece, whole[start : start + _PIECE_BYTES])
        running.add(piece)
    return running.value()


def hash_and_copy(target: Buffer, source: Buffer) -> int:
    """Copies equal lengths; the checksum is of what the source held just before."""
    to, whole = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    if len(whole) <= _PIECE_BYTES:
        payload_checksum = checksum(source)
        np.copyto(to, whole)
        return payload_checksum
    running = RunningChecksum()
    for start in range(0, len(whole), _PIECE_BYTES):
        piece = whole[start : start + _PIECE_BYTES]
        running.add(piece)
        np.copyto(to[start : start + _PIECE_BYTES], piece)
    return running.value()


def read_envelope(slot: memoryview, *, namespace: Namespace, block_hash: BlockHash, payload_bytes: int) -> Envelope:
    """The envelope of a slot, proved to be of this block; raises `CorruptBlockError`."""
    envelope = Envelope.decode(slot[SLOT_HEADER_BYTES:PAYLOAD_OFFSET_BYTES])
    if envelope.block_hash != block_hash or envelope.namespace_id != namespace.id:
        raise CorruptBlockError(f"asked for block {block_hash.hex()[:16]}, got {envelope.block_hash.hex()[:16]}")
    if envelope.payload_bytes != payload_bytes:
        raise CorruptBlockError(f"block of {envelope.payload_bytes} bytes, the namespace gives {payload_bytes}")
    return envelope


def load_slot(
    slot: memoryview,
    target: memoryview,
    *,
    generation: Generation,
    envelopes: EnvelopeTemplate,
    block_hash: BlockHash,
    take: Callable[[Buffer, Buffer], int] = copy_and_hash,
) -> BlockState:
    """Copies a leased block out of its slot. HIT: `target` holds it. MISS: the slot holds something else by now.

    CORRUPT: the slot still claims to hold it, and does not. `target` is as it was when the slot had changed before
    the copy began, and holds nothing of use when that, or damage, was found later.
    """
    header = slot[:SLOT_HEADER_BYTES]
    if slot_state(header, generation) is SlotState.GONE:
        return BlockState.MISS
    envelope = bytes(slot[SLOT_HEADER_BYTES:PAYLOAD_OFFSET_BYTES])
    # What has arrived is hashed, not the slot: the slot may be written to by whoever has it mapped.
    found = take(target, slot[PAYLOAD_OFFSET_BYTES : PAYLOAD_OFFSET_BYTES + len(target)])
    if slot_state(header, generation) is SlotState.GONE:
        return BlockState.MISS
    # The namespace says all but the checksum, so there is one envelope that what has arrived can have.
    is_sound = envelope == envelopes.encode(block_hash, payload_checksum=found)
    return BlockState.HIT if is_sound else BlockState.CORRUPT


def store_slot(slot: memoryview, block: memoryview, *, envelopes: EnvelopeTemplate, block_hash: BlockHash) -> None:
    """Puts a block and its envelope into a reserved slot. The header is the daemon's."""
    # Hashed first: then memory that changes while it is copied is found out by the first who reads the block.
    payload_checksum = hash_and_copy(slot[PAYLOAD_OFFSET_BYTES : PAYLOAD_OFFSET_BYTES + len(block)], block)
    slot[SLOT_HEADER_BYTES:PAYLOAD_OFFSET_BYTES] = envelopes.encode(block_hash, payload_checksum=payload_checksum)


class Crew:
    """The thread that asks, and helpers, share the blocks of a batch while cores of this machine are idle.

    With idle cores two threads copy and hash 1.4 times as fast as one; on a busy machine they lose, so none helps
    then. Many threads may use a crew.
    """

    def __init__(self, *, thread_count_max: int) -> None:
        self._helper_count_max = thread_count_max - 1
        self._idle_cores = IdleCores()
        self._helpers: ThreadPoolExecutor | None = None

    def run(
        self, work: Callable[[int], None], *, block_count: int, block_bytes: int, is_stopped: Callable[[], bool]
    ) -> None:
        """Does `work(index)` for each block, in no order, and leaves the rest out once `is_stopped`.

        When it returns or raises, nobody works on.
        """
        helper_count = 0
        if block_count > 1 and block_count * block_bytes >= _SHARED_BYTES_MIN and self._helper_count_max:
            helper_count = min(self._helper_count_max, block_count - 1, self._idle_cores.count())
        left = iter(range(block_count))  # taking the next one is atomic

        def share() -> None:
            for index in left:
                if is_stopped():
                    return
                work(index)

        helping: list[Future[None]] = []
        with suppress(RuntimeError):  # closed by another thread just now, or the interpreter is ending: then alone
            helping += [self._pool().submit(share) for _ in range(helper_count)]
        try:
            share()
        finally:
            _exhaust(left)
            _join(helping)

    def close(self) -> None:
        if self._helpers is not None:
            self._helpers.shutdown(wait=False)

    def after_fork(self) -> None:
        """The parent's helpers do not exist here."""
        self._helpers = None

    def _pool(self) -> ThreadPoolExecutor:
        if self._helpers is None:
            # Two threads that find none make one each; the spare one is collected with its threads.
            self._helpers = ThreadPoolExecutor(self._helper_count_max, thread_name_prefix="kvstore-copy")
        return self._helpers


def _exhaust(left: Iterator[int]) -> None:
    for _ in left:
        pass


def _join(helping: list[Future[None]]) -> None:
    started = [helper for helper in helping if not helper.cancel()]
    wait(started)
    for helper in started:
        helper.result()
