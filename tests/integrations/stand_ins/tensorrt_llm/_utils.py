from __future__ import annotations

import os


def mpi_rank() -> int:
    """Of this process; tests say it for the worker that they make next."""
    return int(os.environ.get("STAND_IN_RANK", "0"))
