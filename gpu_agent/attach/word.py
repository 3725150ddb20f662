"""What an agent tells an attached engine without being asked: which of its leases are over."""

from __future__ import annotations

import mmap
import os


class Word:
    """A page of shared memory whose first 8 bytes are a number, written here in one store and read elsewhere."""

    def __init__(self) -> None:
        """Raises `OSError`."""
        self._fd = os.memfd_create("kvstore-agent-word", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, mmap.PAGESIZE)
            self._memory = mmap.mmap(self._fd, mmap.PAGESIZE)
        except BaseException:
            os.close(self._fd)
            raise
        self._word = memoryview(self._memory).cast("Q")

    def set(self, number: int) -> None:
        self._word[0] = number

    def open_read_only(self) -> int:
        """A new descriptor through which nobody can write; to be closed."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        self._word.release()
        self._memory.close()
        os.close(self._fd)
