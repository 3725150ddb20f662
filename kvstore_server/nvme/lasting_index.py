"""The index as a running tier has it: opened again after an error, and begun anew where it is damaged or gone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from kvstore.keys import BlockHash
from kvstore_server.nvme.index import Index, IndexDamagedError, IndexRecord


class LastingIndex:
    """`open_again`, `apply` and `close` are for one thread at a time, the rest for any."""

    def __init__(
        self, index: Index, *, reopen: Callable[[], Index], remove: Callable[[], None], was_rebuilt: bool
    ) -> None:
        """`remove` deletes what is there; `reopen` makes a new one of the same store then."""
        self.store_id = index.store_id
        self.was_rebuilt = was_rebuilt
        self.is_behind = False
        """It was begun anew: the next `apply` must tell it all that is stored."""
        self._had_records = bool(index.count)
        self._index: Index | None = index
        self._reopen = reopen
        self._remove = remove
        self._size_bytes = 0

    @property
    def is_closed(self) -> bool:
        """After an error, until `open_again`."""
        return self._index is None

    def open_again(self) -> None:
        """Finds the last transaction that succeeded, or begins anew. Raises `OSError` or `IndexDamagedError`."""
        if self._index is not None:
            return
        try:
            index = self._reopen()
        except IndexDamagedError:
            self._remove()
            index = self._reopen()
        self.is_behind = self.is_behind or (self._had_records and not index.count)
        self._index = index

    def apply(
        self, puts: Sequence[IndexRecord], deletes: Sequence[tuple[bytes, BlockHash]], *, is_all: bool = False
    ) -> None:
        """As `Index.apply`. `is_all`: these are all blocks that are stored; while it is behind, less is refused."""
        index = self._index
        if index is None or (self.is_behind and not is_all):
            raise IndexDamagedError("the index was closed after an error meanwhile, and is not up to date again")
        try:
            index.apply(puts, deletes)
        except (OSError, IndexDamagedError):
            # It may refuse everything from now on.
            self.close()
            raise
        self.is_behind = False
        self._had_records = self._had_records or bool(puts)

    @property
    def fill_share(self) -> float:
        """As of `Index`; 0 while it is closed."""
        return 0.0 if self._index is None else self._index.fill_share

    @property
    def size_bytes(self) -> int:
        """What its data takes on disk; what it took last, when that cannot be said."""
        index = self._index
        if index is not None:
            with suppress(OSError):
                self._size_bytes = index.size_bytes
        return self._size_bytes

    def close(self) -> None:
        """May be called again."""
        index, self._index = self._index, None
        if index is not None:
            index.close()
