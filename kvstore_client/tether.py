"""Runs a command that dies with its parent, however that ends: `python -P tether.py PPID COMMAND…`.

Run as a file, so that it costs an interpreter's start and no import of the package.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent_pid, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the call above.
    if os.getppid() != int(parent_pid):
        sys.exit(1)
    os.execv(command[0], command)  # noqa: S606  (no shell; the command is the caller's own)


if __name__ == "__main__":
    main()
