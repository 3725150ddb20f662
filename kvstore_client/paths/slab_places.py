"""Where a client has met blocks in the daemon's memory before."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.keys import BlockHash, NamespaceId
from kvstore.slab import SLOT_RECORD_BYTES, SlotRecord
from kvstore_client.forks import mend_after_fork

PLACE_COUNT_MAX = 65_536
"""Places that are remembered, at some 150 bytes each; when there are more, all are forgotten."""

PackedRecords: TypeAlias = npt.NDArray[np.uint64]
"""Slot records as a matrix: one row per block, with place, generation and size in bytes, as they travel."""


def pack(records: Sequence[SlotRecord]) -> PackedRecords:
    return np.array(records, np.uint64).reshape(len(records), SLOT_RECORD_BYTES // 8)


class KnownPlaces:
    """A hint and no more: blocks move and leave, and the header of a slot tells. Threads may share it.

    Held so that no step of the interpreter is taken per block when a whole prompt is looked for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._table = _Table()
        mend_after_fork(self)

    def after_fork(self) -> None:
        """Another thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    def note(self, namespace_id: NamespaceId, hashes: Sequence[BlockHash], records: PackedRecords) -> None:
        if not len(hashes):
            return
        with self._lock:
            if self._table.count + len(hashes) > PLACE_COUNT_MAX:
                self._table = _Table()
            self._table.note(namespace_id, hashes[:PLACE_COUNT_MAX], records[:PLACE_COUNT_MAX])

    def find(self, namespace_id: NamespaceId, hashes: Sequence[BlockHash]) -> PackedRecords | None:
        """One record per block, or None when not all of them are known."""
        table = self._table  # as it is now: a full one is left behind, not emptied
        rows = table.rows.get(namespace_id)
        if rows is None:
            return None
        try:
            found = list(map(rows.__getitem__, hashes))
        except KeyError:
            return None
        return table.records[np.array(found, np.int64)]

    def clear(self) -> None:
        """What is known is of a daemon that has ended."""
        with self._lock:
            self._table = _Table()


class _Table:
    """A row belongs to one block for as long as the table lives."""

    def __init__(self) -> None:
        self.rows: dict[NamespaceId, dict[BlockHash, int]] = {}
        self.records: PackedRecords = np.zeros((PLACE_COUNT_MAX, SLOT_RECORD_BYTES // 8), np.uint64)
        self.count = 0

    def note(self, namespace_id: NamespaceId, hashes: Sequence[BlockHash], records: PackedRecords) -> None:
        rows = self.rows.setdefault(namespace_id, {})
        found = [rows.get(block_hash, -1) for block_hash in hashes]
        is_new = [(index, block_hash) for index, block_hash in enumerate(hashes) if found[index] < 0]
        for row, (index, _) in enumerate(is_new, self.count):
            found[index] = row
        self.records[np.array(found, np.int64)] = records
        # The record first: whoever finds the row finds what it is of.
        for row, (_, block_hash) in enumerate(is_new, self.count):
            rows[block_hash] = row
        self.count += len(is_new)
