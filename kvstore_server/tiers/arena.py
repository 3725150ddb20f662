"""The memory tier's bytes: one anonymous shared mapping, faulted in slab by slab."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
import numpy.typing as npt

from kvstore.envelope import Buffer
from kvstore_server.core.space import Place, SlabId


class Arena:
    """A memfd that every slot lives in. Knows bytes and places, neither blocks nor holders.

    Reserved at start and never grown. A slab's pages exist only after `prefault`: first touch runs several
    times slower than a copy, and the request that is being served should not pay for it.
    """

    def __init__(self, *, capacity_bytes: int, slab_bytes: int) -> None:
        assert capacity_bytes % slab_bytes == 0, f"{capacity_bytes} is no multiple of {slab_bytes}"
        self.capacity_bytes = capacity_bytes
        self._slab_bytes = slab_bytes
        self._fd = os.memfd_create("kvstore-arena", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, capacity_bytes)
        self._map = mmap.mmap(self._fd, capacity_bytes)
        self._view = memoryview(self._map)
        self._array: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    def prefault(self, slab: SlabId) -> None:
        """Faults one slab's pages in; blocks for a second or more per GiB and releases the GIL."""
        start = self._array.ctypes.data + slab * self._slab_bytes
        ctypes.memset(start, 0, self._slab_bytes)

    def land(self, place: Place, offset_bytes: int, data: Buffer) -> None:
        """Copies bytes into a slot; releases the GIL."""
        start = place + offset_bytes
        np.copyto(self._array[start : start + len(data)], np.frombuffer(data, dtype=np.uint8))

    def view(self, place: Place, size_bytes: int) -> memoryview:
        """The bytes themselves, not a copy; valid while the place is retained."""
        return self._view[place : place + size_bytes]
