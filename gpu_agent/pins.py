"""What an engine computes on: the blocks of a sequence, kept in their slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType

from gpu_agent.load import Arrival
from gpu_agent.pool import Pool
from kvstore.keys import BlockHash
from kvstore.slots import SlotId


class Pinned:
    """The blocks of one sequence, which stay where they are until the `with` block ends.

    What a sequence needs and the store does not have, or the pool has no room for, is missing: then `slots` ends before
    it, and the rest is to be recomputed.
    """

    def __init__(self, pool: Pool, parents: Mapping[BlockHash, BlockHash | None]) -> None:
        """Blocks, head first, each with its parent."""
        self._pool = pool
        self._parents = parents
        self._held: dict[BlockHash, SlotId] = {}
        self._coming: dict[BlockHash, tuple[SlotId, Arrival]] = {}
        self._is_broken = False
        self._wanted: dict[BlockHash, BlockHash | None] = {}
        self._is_released = False

    @property
    def slots(self) -> list[SlotId]:
        """Where the leading blocks lie, one slot each, head first."""
        leading: list[SlotId] = []
        with self._pool.changed:
            for block_hash in self._parents:
                slot = self._slot_of(block_hash)
                if slot is None:
                    break
                leading.append(slot)
        return leading

    @property
    def held(self) -> Mapping[BlockHash, SlotId]:
        """All that is here, also behind what is missing."""
        return self._held

    @property
    def is_complete(self) -> bool:
        """Whether all blocks are here, or on their way."""
        with self._pool.changed:
            return len(self._held) + len(self._coming) == len(self._parents)

    def wait_layer(self, layer: int) -> bool:
        """What the caller does from now on, on the host or on its current stream, finds this layer of all blocks.

        False: something has gone wrong with what came, and what was read of it is of no use.
        """
        with self._pool.changed:
            arrivals = {id(arrival): arrival for _, arrival in self._coming.values()}
        for arrival in arrivals.values():
            self._pool.device.before_caller(arrival.event_of(layer))
        with self._pool.changed:
            return not self._is_broken

    def wait(self) -> bool:
        """Waits until all has come and was seen to be intact; False: what was computed on it is of no use."""
        with self._pool.changed:
            self._pool.changed.wait_for(lambda: not self._coming)
            return not self._is_broken

    def release(self) -> None:
        """Lets the blocks go once all that the caller's current stream has queued is done with them.

        Doing so twice changes nothing.
        """
        with self._pool.changed:
            if self._is_released:
                return
            self._is_released = True
            self._pool.device.follow_caller()
            if self in self._pool.waiters:
                self._pool.waiters.remove(self)
            self._coming.clear()
            for slot in self._held.values():
                self._pool.release(slot)
            self._pool.changed.notify_all()

    def __enter__(self) -> Pinned:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    # --- for the agent, with the pool's lock held

    @property
    def wanted(self) -> Mapping[BlockHash, BlockHash | None]:
        """Blocks that are not here yet, head first, each with its parent."""
        return self._wanted

    def begin(self) -> None:
        """Holds what is here."""
        for block_hash, parent_hash in self._parents.items():
            slot = self._pool.ask_for(block_hash)
            if slot is None:
                self._wanted[block_hash] = parent_hash
            else:
                self._held[block_hash] = slot

    @property
    def is_coming(self) -> bool:
        """Whether something is on its way to slots that the engine knows."""
        return bool(self._coming)

    def expect(self, slot_of: Mapping[BlockHash, SlotId], arrival: Arrival) -> None:
        """These are on their way."""
        for block_hash, slot in slot_of.items():
            if block_hash in self._wanted:
                del self._wanted[block_hash]
                self._coming[block_hash] = slot, arrival

    def landed(self, block_hash: BlockHash) -> None:
        if block_hash in self._wanted:
            del self._wanted[block_hash]
        elif block_hash in self._coming:
            del self._coming[block_hash]
        else:
            return
        self._held[block_hash] = self._pool.claim(block_hash)

    def lost(self, block_hash: BlockHash) -> None:
        if self._coming.pop(block_hash, None) is not None:
            self._is_broken = True

    def _slot_of(self, block_hash: BlockHash) -> SlotId | None:
        slot = self._held.get(block_hash)
        if slot is not None:
            return slot
        slot, _ = self._coming.get(block_hash, (None, None))
        return slot

    def give_up(self, block_hashes: Iterable[BlockHash]) -> None:
        """These will not come."""
        for block_hash in list(block_hashes):
            self._wanted.pop(block_hash, None)
