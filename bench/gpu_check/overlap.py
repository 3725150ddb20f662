"""What migration costs the engine: a loop of matrix products, alone and with blocks moving both ways beside it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bench.gpu_check.rig import Result, Rig

_TARGET = 0.97
"""At most 3 % slower."""
_ROUND_S = 0.2
"""How long a round computes alone: far longer than a batch moves."""


def check_overlap(rig: Rig) -> Iterator[Result]:
    size = rig.sizes.matmul_size
    left, right = (torch.randn((size, size), device=rig.torch_device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)

    def multiply() -> None:
        torch.matmul(left, right, out=out)

    def multiply_often() -> None:
        for _ in range(product_count):
            multiply()

    rig.called_s(multiply)
    product_count = max(1, round(_ROUND_S / rig.called_s(multiply)))

    def compute_s() -> float:
        return rig.called_s(multiply_often)

    moved_bytes = 0

    def beside_s() -> float:
        nonlocal moved_bytes
        before = _moved_bytes(rig)
        with _migration(rig):
            seconds = compute_s()
        moved_bytes += _moved_bytes(rig) - before
        return seconds

    ratio, seconds = rig.compare(compute_s, beside_s)
    yield rig.speed(
        "compute_beside_migration",
        ratio,
        _TARGET,
        slowdown=round(1 / ratio - 1, 4),
        compute_s=round(seconds, 4),
        moved_bytes=moved_bytes,
    )


@contextmanager
def _migration(rig: Rig) -> Iterator[None]:
    """Batches out and back in, one after the other, as the agent's thread does it."""
    is_over, has_begun = threading.Event(), threading.Event()
    count = rig.sizes.batch_count
    rows = rig.rows(count)

    def migrate() -> None:
        while not is_over.is_set():
            rig.device.copy_rows(source=rig.pool, source_rows=rows, target=rig.staging, target_rows=range(count)).wait()
            rig.device.copy_rows(source=rig.staging, source_rows=range(count), target=rig.pool, target_rows=rows).wait()
            has_begun.set()

    thread = threading.Thread(target=migrate)
    thread.start()
    has_begun.wait()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _moved_bytes(rig: Rig) -> int:
    sample = rig.device.link()
    return sample.h2d.moved_bytes + sample.d2h.moved_bytes
