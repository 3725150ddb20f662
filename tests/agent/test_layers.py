"""Layers of many blocks come one group after the other; together they are the blocks."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gpu_agent.core.layers import LayerGroup, layer_groups
from gpu_agent.core.link import Direction
from gpu_agent.core.transfers import Move, Part, Transfer, plan_parts, plan_transfers
from gpu_agent.device import HostSlots
from gpu_agent.device.cpu import CpuDevice
from kvstore.errors import InternalError
from kvstore.layout import BlockLayout, LayoutOrder, OpaqueOrder

LAYOUT = BlockLayout(
    num_layers=6,
    num_kv_heads=2,
    head_dim=16,
    v_head_dim=8,
    tokens_per_block=4,
    dtype="float16",
    order=LayoutOrder.NHD,
)
BLOCK_BYTES = LAYOUT.payload_bytes


@given(num_layers=st.integers(1, 40), group_count=st.integers(1, 50), v_head_dim=st.integers(0, 9))
def test_groups_are_all_layers_in_order_and_all_bytes_once(num_layers: int, group_count: int, v_head_dim: int) -> None:
    layout = BlockLayout(
        num_layers=num_layers,
        num_kv_heads=2,
        head_dim=4,
        v_head_dim=v_head_dim,
        tokens_per_block=2,
        dtype="bfloat16",
        order=LayoutOrder.HND,
    )
    groups = layer_groups(layout, group_count)
    layers = [layer for group in groups for layer in range(group.first_layer, group.end_layer)]
    assert layers == list(range(num_layers))
    assert len(groups) == min(group_count, num_layers)
    sizes = [group.end_layer - group.first_layer for group in groups]
    assert max(sizes) - min(sizes) <= 1
    covered = sorted(
        byte
        for group in groups
        for part in group.parts
        for byte in range(part.offset_bytes, part.offset_bytes + part.size_bytes)
    )
    assert covered == list(range(layout.payload_bytes))


def test_a_group_is_the_k_and_the_v_of_its_layers() -> None:
    first, last = layer_groups(LAYOUT, 2)
    k, v = LAYOUT.planes
    assert first.parts == (Part(0, k.size_bytes // 2), Part(v.offset_bytes, v.size_bytes // 2))
    assert last.parts[1] == Part(v.offset_bytes + v.size_bytes // 2, v.size_bytes // 2)


def test_a_layout_that_only_the_engine_knows_comes_as_a_whole() -> None:
    layout = BlockLayout(
        num_layers=6,
        num_kv_heads=2,
        head_dim=16,
        v_head_dim=8,
        tokens_per_block=4,
        dtype="float16",
        order=OpaqueOrder("packed"),
    )
    assert layer_groups(layout, 4) == (LayerGroup(0, 6, (Part(0, layout.payload_bytes),)),)


@given(
    rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=10, unique_by=lambda row: row[1]),
    group_count=st.integers(1, 6),
)
def test_parts_of_a_plan_move_what_the_plan_moves(rows: list[tuple[int, int]], group_count: int) -> None:
    moves = [Move(source * BLOCK_BYTES, 1_000_000 + target * BLOCK_BYTES) for source, target in rows]
    groups = [group.parts for group in layer_groups(LAYOUT, group_count)]
    planned = plan_parts(moves, groups, block_bytes=BLOCK_BYTES)
    assert len(planned) == len(groups)
    for transfers, parts in zip(planned, groups, strict=True):
        # As few as for whole blocks, once per plane.
        assert len(transfers) <= len(parts) * max(1, len(plan_transfers(moves, block_bytes=BLOCK_BYTES)))
        assert sorted(_pieces(transfers)) == sorted(
            (source + part.offset_bytes, target + part.offset_bytes, part.size_bytes)
            for source, target, _ in moves
            for part in parts
        )


class _Gate:
    """Lets pieces pass one by one, when told to."""

    def __init__(self) -> None:
        self._may_pass = threading.Semaphore(0)

    def __call__(self) -> float:
        assert self._may_pass.acquire(timeout=10)
        return 0.0

    def open(self, count: int) -> None:
        self._may_pass.release(count)


def test_the_first_layers_are_there_while_the_last_are_still_to_come() -> None:
    gate = _Gate()
    device = CpuDevice(delay=gate)
    pool = device.allocate_pool(slot_count=8, block_bytes=BLOCK_BYTES)
    staging = device.allocate_staging(row_count=4, block_bytes=BLOCK_BYTES)
    pool.zero_()
    staging.copy_(_noise(4))
    groups = layer_groups(LAYOUT, 3)
    rows = [6, 1, 2, 4]
    events = device.copy_layers(source=staging, source_rows=range(4), target=pool, target_rows=rows, groups=groups)
    piece_count = 4 * 2  # the K and the V of four blocks
    for index, (group, event) in enumerate(zip(groups, events, strict=True)):
        assert not event.is_over()
        gate.open(piece_count)
        device.before_caller(event)
        assert event.is_over()
        for part in group.parts:
            end = part.offset_bytes + part.size_bytes
            assert torch.equal(pool[rows, part.offset_bytes : end], staging[:, part.offset_bytes : end])
        assert not any(later.is_over() for later in events[index + 1 :])
    assert torch.equal(pool[rows], staging)
    assert not bool(pool[[0, 3, 5, 7]].any())
    device.close()


def test_layers_of_registered_slots_come_in_order_too_and_of_others_not_at_all() -> None:
    device = CpuDevice()
    pool = device.allocate_pool(slot_count=4, block_bytes=BLOCK_BYTES)
    source = _noise(3)
    memory = memoryview(source.numpy().reshape(-1).data)
    slots = HostSlots([memory[row * BLOCK_BYTES : (row + 1) * BLOCK_BYTES] for row in range(3)])
    groups = layer_groups(LAYOUT, 3)

    def load() -> bool:
        events = device.load_layers_from_slots(slots, [2, 0], pool=pool, pool_rows=[3, 1], groups=groups)
        if events is None:
            return False
        for event in events:
            event.wait()
        return True

    assert not load()
    registration = device.register_host(memory, is_read_only=True)
    assert load()
    assert torch.equal(pool[[3, 1]], source[[2, 0]])
    registration.unregister()
    assert not load()
    device.close()


def test_a_group_that_failed_says_so_and_the_others_do_not() -> None:
    piece_numbers = itertools.count()

    def delay() -> float:
        if next(piece_numbers) == 2:
            raise RuntimeError("link lost")
        return 0.0

    device = CpuDevice(delay=delay)
    pool = device.allocate_pool(slot_count=1, block_bytes=BLOCK_BYTES)
    staging = device.allocate_staging(row_count=1, block_bytes=BLOCK_BYTES)
    first, second, third = device.copy_layers(
        source=staging, source_rows=[0], target=pool, target_rows=[0], groups=layer_groups(LAYOUT, 3)
    )
    first.wait()
    with pytest.raises(InternalError, match="link lost"):
        second.wait()
    third.wait()
    sample = device.link()
    assert sample.h2d.queued_bytes == 0
    assert sample.h2d.moved_bytes == BLOCK_BYTES * 2 // 3
    device.close()


def test_what_crosses_the_link_is_counted_by_direction_and_copies_for_the_caller_are_not() -> None:
    gate = _Gate()
    device = CpuDevice(delay=gate)
    pool = device.allocate_pool(slot_count=4, block_bytes=BLOCK_BYTES)
    staging = device.allocate_staging(row_count=4, block_bytes=BLOCK_BYTES)
    down = device.copy_rows(source=pool, source_rows=[0, 1], target=staging, target_rows=[0, 1])
    up = device.copy_rows(source=staging, source_rows=[0], target=pool, target_rows=[3])
    queued = device.link()
    assert (queued.d2h.queued_bytes, queued.h2d.queued_bytes) == (2 * BLOCK_BYTES, BLOCK_BYTES)
    gate.open(4)
    down.wait()
    up.wait()
    device.copy_rows_for_caller(source=_noise(1), source_rows=[0], target=pool, target_rows=[0])
    moved = device.link()
    assert (moved.d2h.moved_bytes, moved.h2d.moved_bytes) == (2 * BLOCK_BYTES, BLOCK_BYTES)
    assert (moved.d2h.queued_bytes, moved.h2d.queued_bytes) == (0, 0)
    assert moved.d2h.busy_s > 0 < moved.h2d.busy_s
    device.close()


@pytest.mark.parametrize("direction", Direction)
def test_a_link_is_no_faster_than_it_is_said_to_be(direction: Direction) -> None:
    rate = BLOCK_BYTES / 50e-6
    device = CpuDevice(latency_s=0.001, **{f"{direction.value}_bytes_per_s": rate})  # type: ignore[arg-type]
    pool = device.allocate_pool(slot_count=200, block_bytes=BLOCK_BYTES)
    staging = device.allocate_staging(row_count=200, block_bytes=BLOCK_BYTES)
    source, target = (staging, pool) if direction is Direction.H2D else (pool, staging)
    began_s = time.monotonic()
    device.copy_rows(source=source, source_rows=range(200), target=target, target_rows=range(200)).wait()
    assert time.monotonic() - began_s >= 0.001 + 200 * 50e-6
    sample = device.link()
    traffic = sample.h2d if direction is Direction.H2D else sample.d2h
    assert traffic.moved_bytes == 200 * BLOCK_BYTES
    assert traffic.busy_s == pytest.approx(200 * 50e-6)
    device.close()


def _pieces(transfers: list[Transfer]) -> list[tuple[int, int, int]]:
    return [
        (
            transfer.source + row * transfer.source_pitch_bytes + offset,
            transfer.target + row * transfer.target_pitch_bytes + offset,
            transfer.piece_bytes,
        )
        for transfer in transfers
        for row in range(transfer.row_count)
        for offset in range(0, transfer.row_bytes, transfer.piece_bytes)
    ]


def _noise(row_count: int) -> Tensor:
    generator = torch.Generator().manual_seed(row_count)
    return torch.randint(0, 256, (row_count, BLOCK_BYTES), dtype=torch.uint8, generator=generator)
