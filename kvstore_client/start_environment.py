"""What a process needs in its environment, before it starts, to move blocks over gRPC at speed."""

from __future__ import annotations

import os
from collections.abc import Mapping

GRPC_EXPERIMENTS = "-event_engine_client,-event_engine_listener"
"""gRPC's older network loop: fewer threads hand each message on."""
ALLOCATOR_MMAP_THRESHOLD_BYTES = 32 << 20
"""The most that glibc takes. Memory below it comes from a heap, not from the kernel, page fault by page fault."""
ALLOCATOR_TRIM_THRESHOLD_BYTES = 64 << 20
"""Freed memory that a heap keeps for the next blocks: a batch of 16 x 2 MiB, and as much that is on its way."""


def start_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a child process that will load or store blocks over gRPC; what is in it already stays.

    It is this process's own unless `environ` is given. gRPC and the allocator read it when they start, so that a
    process cannot do this to itself. Loads gain most (docs/adr/0005-grpc-streams.md); freed memory of up to 64 MiB per
    heap stays with the process. A daemon has it already; the shared slab and the data port need none of it.
    """
    return {
        "GRPC_EXPERIMENTS": GRPC_EXPERIMENTS,
        "MALLOC_MMAP_THRESHOLD_": str(ALLOCATOR_MMAP_THRESHOLD_BYTES),
        "MALLOC_TRIM_THRESHOLD_": str(ALLOCATOR_TRIM_THRESHOLD_BYTES),
        **(os.environ if environ is None else environ),
    }
