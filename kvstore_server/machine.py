"""What this machine, or the container around us, has, and how this process asks it for memory."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
"""Of mallopt(3)."""


def keep_freed_memory(*, request_bytes_max: int, kept_bytes: int) -> bool:
    """Takes memory of up to so many bytes from heaps, each of which keeps some of what is freed.

    Otherwise buffers of some MiB go back to the kernel each time, and come from it again page by page, which takes
    longer than what is done with them. False where the C library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, request_bytes_max) and mallopt(_M_TRIM_THRESHOLD, kept_bytes))


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """Memory this process may use: the smaller of physical memory and the cgroup's limit (v2 or v1).

    Every ancestor of the cgroup counts. Kernel docs: admin-guide/cgroup-v2.rst, "memory.max".
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _limit_files(root):
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


def _limit_files(root: Path) -> list[Path]:
    files = [root / "sys/fs/cgroup/memory.max", root / "sys/fs/cgroup/memory/memory.limit_in_bytes"]
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return files
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if controllers == "":
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = base / own.lstrip("/")
        files += [folder / name for folder in (group, *group.parents) if folder.is_relative_to(base)]
    return files
