"""What this machine, or the container around us, has."""

from __future__ import annotations

import os
from pathlib import Path


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
