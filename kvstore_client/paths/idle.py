"""Whether this machine has cores to spare."""

from __future__ import annotations

import os


class IdleCores:
    """How many cores have nothing to do at present."""

    def __init__(self) -> None:
        self._core_count = os.cpu_count() or 1
        self._own_count = len(os.sched_getaffinity(0))
        try:
            # Kept open: then a look costs 2 microseconds.
            self._file = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def count(self) -> int:
        """Of those that this process may use; 0 where the kernel does not tell."""
        if self._file < 0 or self._own_count < 2:
            return 0
        # "0.61 0.38 1.02 1/234 5678": runnable threads of the whole machine, this one among them.
        running_count = int(os.pread(self._file, 96, 0).split()[3].partition(b"/")[0])
        return min(self._core_count - running_count, self._own_count - 1)

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)
