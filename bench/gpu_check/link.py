"""Host to device and back, beside page-locked copies of the same size by torch."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from bench.gpu_check.rig import Result, Rig, gigabytes_per_s
from gpu_agent.core.layers import layer_groups
from gpu_agent.core.link import Direction
from gpu_agent.device import Event, HostSlots
from kvstore.errors import CapacityError
from kvstore.slab import PAYLOAD_OFFSET_BYTES

_TARGET = 0.90
_LAYER_GROUP_COUNT = 4
_SLOT_ALIGNMENT_BYTES = 4096


def check_staging(rig: Rig) -> Iterator[Result]:
    """Through the agent's own page-locked buffers, as over a network."""
    count = rig.sizes.batch_count
    groups = layer_groups(rig.sizes.layout, _LAYER_GROUP_COUNT)

    def move(direction: Direction, rows: list[int]) -> Callable[[], Event]:
        source, target = (rig.staging, rig.pool) if direction is Direction.H2D else (rig.pool, rig.staging)
        ends = (range(count), rows) if direction is Direction.H2D else (rows, range(count))
        return lambda: rig.device.copy_rows(source=source, source_rows=ends[0], target=target, target_rows=ends[1])

    def move_layers() -> Event:
        return rig.device.copy_layers(
            source=rig.staging, source_rows=range(count), target=rig.pool, target_rows=scattered, groups=groups
        )[-1]

    scattered = rig.rows(count)
    for direction in Direction:
        yield _compared(rig, f"{direction.value}_scattered_slots", direction, move(direction, scattered))
        yield _compared(rig, f"{direction.value}_neighbouring_slots", direction, move(direction, list(range(count))))
    yield _compared(rig, "h2d_by_layers", Direction.H2D, move_layers, target=None)


def check_registered(rig: Rig) -> Iterator[Result]:
    """Straight between the pool and memory as the daemon shares it."""
    with _slots(rig, is_read_only=False) as slots:
        rows = rig.rows(len(slots.views))

        def offload() -> Event:
            return _some(rig.device.offload_to_slots(rig.pool, rows, slots=slots))

        def load() -> Event:
            return _some(rig.device.load_from_slots(slots, range(len(rows)), pool=rig.pool, pool_rows=rows))

        yield _compared(rig, "d2h_registered_slots", Direction.D2H, offload)
        yield _compared(rig, "h2d_registered_slots", Direction.H2D, load)
    try:
        with _slots(rig, is_read_only=True):
            is_possible, why = True, ""
    except CapacityError as error:
        is_possible, why = False, str(error)
    yield Result(name="read_only_registration", passed=None, figures={"is_possible": is_possible, "why": why})


def check_measurement(rig: Rig) -> Iterator[Result]:
    """What the device says of its link, beside a clock."""
    before = rig.device.link().d2h
    seconds = rig.submitted_s(
        lambda: rig.device.copy_rows(
            source=rig.pool,
            source_rows=range(rig.sizes.batch_count),
            target=rig.staging,
            target_rows=range(rig.sizes.batch_count),
        )
    )
    after = rig.device.link().d2h
    moved_bytes = after.moved_bytes - before.moved_bytes
    yield Result(
        name="link_measurement",
        passed=moved_bytes == rig.sizes.calls * rig.sizes.batch_bytes and after.queued_bytes == 0,
        ratio=round((after.busy_s - before.busy_s) / seconds, 3),
        figures={"gigabytes_per_s": gigabytes_per_s(moved_bytes, after.busy_s - before.busy_s)},
    )


def _compared(
    rig: Rig,
    name: str,
    direction: Direction,
    move: Callable[[], Event],
    *,
    target: float | None = _TARGET,
) -> Result:
    ratio, seconds = rig.compare(lambda: _peak_s(rig, direction), lambda: rig.submitted_s(move))
    size_bytes = rig.sizes.calls * rig.sizes.batch_bytes
    return rig.speed(
        name,
        ratio,
        target,
        gigabytes_per_s=gigabytes_per_s(size_bytes, seconds),
        peak_gigabytes_per_s=gigabytes_per_s(size_bytes, seconds * ratio),
    )


def _peak_s(rig: Rig, direction: Direction) -> float:
    """One copy per batch, from one page-locked piece into one piece of the device, or back."""
    on_device = rig.pool[: rig.sizes.batch_count]
    source, target = (rig.staging, on_device) if direction is Direction.H2D else (on_device, rig.staging)
    return rig.called_s(lambda: _copy(target, source))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


@contextmanager
def _slots(rig: Rig, *, is_read_only: bool) -> Iterator[HostSlots]:
    """A batch of slots with the offsets and the distances that the daemon's have."""
    block_bytes, count = rig.sizes.block_bytes, rig.sizes.batch_count
    pitch_bytes = -(-(PAYLOAD_OFFSET_BYTES + block_bytes) // _SLOT_ALIGNMENT_BYTES) * _SLOT_ALIGNMENT_BYTES
    memory = memoryview(mmap.mmap(-1, count * pitch_bytes))
    registration = rig.device.register_host(memory, is_read_only=is_read_only)
    try:
        starts = [index * pitch_bytes + PAYLOAD_OFFSET_BYTES for index in range(count)]
        yield HostSlots([memory[start : start + block_bytes] for start in starts])
    finally:
        registration.unregister()


def _some(event: Event | None) -> Event:
    assert event is not None, "the slots are registered"
    return event
