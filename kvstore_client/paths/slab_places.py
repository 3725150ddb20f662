"""Where a client has met blocks in the daemon's memory before."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.keys import BlockHash, NamespaceId
from kvstore.slab import SlotRecord

PLACE_COUNT_MAX = 65_536
"""Places that are remembered, at some 300 bytes each; when there are more, all are forgotten."""


class KnownPlaces:
    """A hint and no more: blocks move and leave, and the header of a slot tells. Threads may share it."""

    def __init__(self) -> None:
        self._places: dict[tuple[NamespaceId, BlockHash], SlotRecord] = {}

    def note(self, namespace_id: NamespaceId, block_hash: BlockHash, record: SlotRecord) -> None:
        if len(self._places) >= PLACE_COUNT_MAX:
            self._places.clear()
        self._places[namespace_id, block_hash] = record

    def find(self, namespace_id: NamespaceId, hashes: Sequence[BlockHash]) -> list[SlotRecord] | None:
        """One record per block, or None when not all of them are known."""
        get = self._places.get
        found = [get((namespace_id, block_hash)) for block_hash in hashes]
        records = [record for record in found if record is not None]
        return records if len(records) == len(hashes) else None

    def clear(self) -> None:
        """What is known is of a daemon that has ended."""
        self._places.clear()
