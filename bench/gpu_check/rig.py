"""What all checks measure with: a device, sizes that suit it, clocks that suit it, and results."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gpu_agent.device import CallerRows, Device, Event, open_device
from gpu_agent.device.paged import PagedCache
from kvstore.layout import BlockLayout, LayoutOrder

_AHEAD_CYCLES = 40_000_000
"""How long the GPU is kept waiting while work is queued: some 20 ms, which queueing takes a tenth of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One check. A speed has a `ratio` to what the same machine did at best in the same run."""

    name: str
    passed: bool | None
    """None: there is no target, or the check was skipped."""
    ratio: float | None = None
    target: float | None = None
    skipped: str | None = None
    """Why."""
    figures: dict[str, float | int | str | bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is moved."""

    layout: BlockLayout
    pool_count: int
    batch_count: int = 16
    kernel_batch_count: int
    """Blocks per call of a kernel: enough that its work outlasts its launch."""
    page_count: int
    matmul_size: int
    rounds: int
    calls: int
    """Calls per round."""

    @property
    def block_bytes(self) -> int:
        return self.layout.payload_bytes

    @property
    def batch_bytes(self) -> int:
        return self.batch_count * self.block_bytes


def _layout(*, num_layers: int, num_kv_heads: int, head_dim: int) -> BlockLayout:
    return BlockLayout(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        tokens_per_block=16,
        dtype="bfloat16",
        order=LayoutOrder.NHD,
    )


GPU_SIZES = Sizes(
    layout=_layout(num_layers=32, num_kv_heads=8, head_dim=128),  # Llama-3-8B: 2 MiB
    pool_count=256,
    kernel_batch_count=64,
    page_count=256,
    matmul_size=8192,
    rounds=7,
    calls=16,
)
DRY_SIZES = Sizes(
    layout=_layout(num_layers=4, num_kv_heads=2, head_dim=32),  # 16 KiB
    pool_count=32,
    kernel_batch_count=16,
    page_count=32,
    matmul_size=64,
    rounds=2,
    calls=2,
)


class Rig:
    """A device with a pool and staging of random bytes."""

    def __init__(self, device_name: str, *, sizes: Sizes, is_dry: bool) -> None:
        self.sizes = sizes
        self.is_dry = is_dry
        self.device: Device = open_device(device_name)
        self.torch_device = torch.device(self.device.name)
        self.chance = random.Random(7)
        self.pool = self.device.allocate_pool(slot_count=sizes.pool_count, block_bytes=sizes.block_bytes)
        self.staging = self.device.allocate_staging(row_count=sizes.batch_count, block_bytes=sizes.block_bytes)
        self.pool.copy_(self.noise(sizes.pool_count))
        self.staging.copy_(self.noise(sizes.batch_count))
        self.synchronise()

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    def noise(self, row_count: int) -> Tensor:
        """Rows of random bytes on the device."""
        generator = torch.Generator(self.torch_device).manual_seed(self.chance.randrange(1 << 30))
        shape = (row_count, self.sizes.block_bytes)
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=self.torch_device, generator=generator)

    def rows(self, count: int) -> list[int]:
        """Slots of the pool that lie about."""
        return self.chance.sample(range(self.sizes.pool_count), count)

    def cache(self, order: LayoutOrder) -> PagedCache:
        """An engine's cache, whose blocks are one page each."""
        layout = replace(self.sizes.layout, order=order)
        plane = layout.planes[0]
        element = getattr(torch, layout.dtype)

        def tensor() -> Tensor:
            shape = (self.sizes.page_count, *plane.shape[1:])
            return torch.randn(shape, device=self.torch_device).to(element)

        return PagedCache(layout, [(tensor(), tensor()) for _ in range(layout.num_layers)])

    def pages(self, count: int) -> list[list[int]]:
        return [[page] for page in self.chance.sample(range(self.sizes.page_count), count)]

    def synchronise(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    def copy_for_caller(
        self, source: CallerRows, source_rows: Sequence[int], target: CallerRows, target_rows: Sequence[int]
    ) -> Event:
        return self.device.copy_rows_for_caller(
            source=source, source_rows=source_rows, target=target, target_rows=target_rows
        )

    # --- clocks

    def submitted_s(self, submit: Callable[[], Event]) -> float:
        """Of a round of submissions that are queued at once, until the last has ended."""
        self.synchronise()
        started_s = time.perf_counter()
        events = [submit() for _ in range(self.sizes.calls)]
        events[-1].wait()
        return time.perf_counter() - started_s

    def called_s(self, call: Callable[[], object]) -> float:
        """Of a round of calls until the current stream is through with them, submission included."""
        self.synchronise()
        started_s = time.perf_counter()
        for _ in range(self.sizes.calls):
            call()
        self.synchronise()
        return time.perf_counter() - started_s

    def kernel_s(self, call: Callable[[], object]) -> float:
        """Of a round of calls, on the device: they are all queued before the first one starts."""
        if not self.is_cuda:
            return self.called_s(call)
        self.synchronise()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_AHEAD_CYCLES)  # noqa: SLF001  # no other call keeps a stream waiting
        start.record()
        for _ in range(self.sizes.calls):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def compare(self, best: Callable[[], float], ours: Callable[[], float]) -> tuple[float, float]:
        """The median ratio of the two, and the median of ours in seconds; they take turns."""
        best(), ours()
        pairs = [(best(), ours()) for _ in range(self.sizes.rounds)]
        return statistics.median(one / other for one, other in pairs), statistics.median(other for _, other in pairs)

    def speed(self, name: str, ratio: float, target: float | None, **figures: float | int | str | bool) -> Result:
        """A result that passes by its ratio; nothing passes or fails when there is no GPU to be measured."""
        judged = target is not None and not self.is_dry
        return Result(
            name=name,
            ratio=round(ratio, 3),
            target=target,
            passed=ratio >= target if judged and target is not None else None,
            figures=figures,
        )


def gigabytes_per_s(size_bytes: int, seconds: float) -> float:
    return round(size_bytes / seconds / 1e9, 2)
