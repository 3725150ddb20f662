"""Tiers hold what they are planned for, in the daemon's own sizes, and more of anything is never worse."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_server.config import NvmeConfig, default_slab_bytes
from kvstore_server.plan.advice import warnings
from kvstore_server.plan.arithmetic import Demand, Machine, Plan, make_plan
from kvstore_server.plan.models import find_model, full, windowed
from kvstore_server.plan.shape import CacheShape
from kvstore_server.plan.tiers import (
    NVME_BYTES_MIN,
    DaemonSizes,
    MemoryTier,
    NvmeTier,
    slots_for,
    suggest_watermarks,
    tokens_that_fit,
)
from tests.server.plan.test_shape import shapes

GIB = 1 << 30


def segments(capacity_bytes: int) -> tuple[int, int]:
    config = NvmeConfig.model_validate({"path": "/", "capacity": capacity_bytes})
    return config.segment_bytes, config.segment_count


SIZES = DaemonSizes(slab_bytes=default_slab_bytes, segments=segments)
LLAMA = CacheShape(layers=find_model("llama-3-8b").layers, element_bytes=2)
DEMAND = Demand(
    context_tokens=8192,
    sequence_count=200,
    hit_rate=0.5,
    step_s=0.025,
    prefill_tokens_per_s=25_000.0,
    requests_per_s=None,
)
MACHINE = Machine(
    tp=1,
    pp=1,
    gpu_bytes=80 * GIB,
    gpu_share=0.9,
    weights_bytes=16 * GIB,
    vram_window_tokens=None,
    memory_bytes=None,
    nvme_bytes=None,
    link_bytes_per_s=25e9,
    disk_bytes_per_s=3e9,
    block_tokens=16,
)


def plan_of(shape: CacheShape = LLAMA, demand: Demand = DEMAND, machine: Machine = MACHINE) -> Plan:
    return make_plan(shape, demand, machine, sizes=SIZES)


def codes(shape: CacheShape = LLAMA, demand: Demand = DEMAND, machine: Machine = MACHINE) -> set[str]:
    return {warned.code for warned in warnings(shape, demand, machine, plan_of(shape, demand, machine))}


demands = st.builds(
    Demand,
    context_tokens=st.integers(1, 300_000),
    sequence_count=st.integers(1, 5_000),
    hit_rate=st.floats(0, 1),
    step_s=st.floats(1e-3, 1),
    prefill_tokens_per_s=st.none() | st.floats(1, 1e6),
    requests_per_s=st.none() | st.floats(0.01, 1e4),
)
machines = st.builds(
    Machine,
    tp=st.sampled_from([1, 2, 8]),
    pp=st.just(1),
    gpu_bytes=st.integers(GIB, 200 * GIB),
    gpu_share=st.floats(0.1, 1),
    weights_bytes=st.none() | st.integers(1, 300 * GIB),
    vram_window_tokens=st.none() | st.integers(1, 100_000),
    memory_bytes=st.none() | st.integers(1 << 20, 2_000 * GIB),
    nvme_bytes=st.none() | st.just(0) | st.integers(NVME_BYTES_MIN, 20_000 * GIB),
    link_bytes_per_s=st.floats(1e8, 1e12),
    disk_bytes_per_s=st.floats(1e7, 1e11),
    block_tokens=st.sampled_from([1, 16, 256]),
)


@given(shape=shapes, demand=demands, machine=machines)
def test_every_token_is_in_one_tier_or_in_none_and_no_tier_holds_more_than_it_can(
    shape: CacheShape, demand: Demand, machine: Machine
) -> None:
    made = plan_of(shape, demand, machine)
    tiers = (made.vram, made.memory, made.nvme)
    assert sum(tier.window_tokens for tier in tiers) + made.unheld_tokens == demand.context_tokens
    assert made.unheld_tokens >= 0
    held_bytes = sum(tier.window_bytes for tier in tiers)
    assert held_bytes <= made.sequence_bytes
    assert made.unheld_tokens or held_bytes == made.sequence_bytes
    tier = MemoryTier(sizes=SIZES, block_bytes=made.gpu.block_bytes, sequence_bytes=made.sequence_bytes)
    if made.memory.needed_bytes:
        assert tier.held_bytes(made.memory.capacity_bytes or 0) >= made.memory.needed_bytes
    if machine.vram_window_tokens is None:
        assert made.vram.needed_bytes <= (made.vram.capacity_bytes or 0)
    assert 0 <= made.gain.sequences_with <= demand.sequence_count
    assert 0 <= made.gain.hit_rate_with <= 1
    warnings(shape, demand, machine, made)


@given(demand=demands, machine=machines, more=st.integers(0, 100 * GIB))
def test_more_memory_never_holds_less(demand: Demand, machine: Machine, more: int) -> None:
    small = replace(machine, memory_bytes=machine.memory_bytes or GIB, nvme_bytes=0)
    large = replace(small, memory_bytes=(small.memory_bytes or 0) * 2 + more)
    before, after = plan_of(demand=demand, machine=small), plan_of(demand=demand, machine=large)
    assert after.memory.window_tokens >= before.memory.window_tokens
    assert after.unheld_tokens <= before.unheld_tokens
    assert after.gain.sequences_with >= before.gain.sequences_with


@given(
    needed_bytes=st.integers(1, 10_000 * GIB),
    block_bytes=st.integers(1, 4 * GIB),
    sequence_bytes=st.integers(1, 64 * GIB),
)
def test_a_suggested_capacity_holds_what_is_needed_and_is_no_larger_than_it_must_be(
    needed_bytes: int, block_bytes: int, sequence_bytes: int
) -> None:
    memory = MemoryTier(sizes=SIZES, block_bytes=block_bytes, sequence_bytes=sequence_bytes)
    capacity_bytes = memory.capacity_for(needed_bytes)
    assert memory.held_bytes(capacity_bytes) >= needed_bytes
    slots = memory.slots(capacity_bytes)
    nvme = NvmeTier(sizes=SIZES, block_bytes=block_bytes, slot_bytes=slots.slot_bytes)
    disk_bytes = nvme.capacity_for(needed_bytes)
    assert nvme.held_bytes(disk_bytes) >= needed_bytes
    if block_bytes >= 1 << 20 and slots.slot_bytes <= 16 << 20 and needed_bytes >= 100 * GIB:
        assert capacity_bytes <= needed_bytes / 0.80 / (1 - slots.waste) * 1.05
        assert disk_bytes <= needed_bytes / (block_bytes / slots.slot_bytes) * 1.05


@given(block_bytes=st.integers(1, GIB), slab_bytes=st.integers(1, 256).map(lambda pages: pages << 20))
def test_slots_hold_a_block_and_share_out_the_slab(block_bytes: int, slab_bytes: int) -> None:
    slots = slots_for(block_bytes, slab_bytes=slab_bytes)
    assert slots.slot_bytes >= block_bytes + 192
    assert slots.slot_bytes % 4096 == 0
    if slots.count_per_slab:
        assert slots.count_per_slab * slots.slot_bytes <= slab_bytes
        assert 0 <= slots.waste < 1
    else:
        assert slots.slot_bytes > slab_bytes


@given(
    capacity_bytes=st.integers(1, 1_000 * GIB),
    batch_bytes=st.integers(1, 10 * GIB),
    sequence_bytes=st.integers(1, 100 * GIB),
    arrival_bytes_per_s=st.floats(0, 1e12),
)
def test_watermarks_leave_a_gap_within_bounds(
    capacity_bytes: int, batch_bytes: int, sequence_bytes: int, arrival_bytes_per_s: float
) -> None:
    marks = suggest_watermarks(
        capacity_bytes=capacity_bytes,
        high_max=0.85,
        batch_bytes=batch_bytes,
        sequence_bytes=sequence_bytes,
        arrival_bytes_per_s=arrival_bytes_per_s,
        drain_bytes_per_s=25e9,
    )
    assert 0.60 <= marks.high <= 0.85
    assert 0.05 - 1e-9 <= marks.high - marks.low <= 0.16 + 1e-9


def test_watermarks_leave_room_for_a_sequence_and_for_what_comes_while_a_batch_leaves() -> None:
    marks = suggest_watermarks(
        capacity_bytes=100 * GIB,
        high_max=0.95,
        batch_bytes=8 * GIB,
        sequence_bytes=10 * GIB,
        arrival_bytes_per_s=12.5e9,
        drain_bytes_per_s=25e9,
    )
    assert (marks.high, marks.low) == (0.88, 0.78)  # 1 - 8 % * 1.5; 10 % below


@given(budget_bytes=st.integers(0, 100_000), tokens_max=st.integers(1, 1_000), block_tokens=st.integers(1, 64))
def test_as_many_whole_blocks_fit_as_the_budget_has(budget_bytes: int, tokens_max: int, block_tokens: int) -> None:
    def part_bytes(tokens: int) -> int:
        return 100 * tokens

    found = tokens_that_fit(part_bytes, tokens_max=tokens_max, block_tokens=block_tokens, budget_bytes=budget_bytes)
    assert found == tokens_max or found % block_tokens == 0
    assert part_bytes(found) <= budget_bytes
    assert found == tokens_max or part_bytes(min(found + block_tokens, tokens_max)) > budget_bytes


def test_a_window_in_vram_leaves_the_rest_to_memory() -> None:
    shape = CacheShape(layers=full(layers=80, kv_heads=64, head_dim=128), element_bytes=2)
    made = plan_of(shape, DEMAND, replace(MACHINE, vram_window_tokens=2048))
    assert made.sequence_bytes == 20 * GIB
    assert (made.vram.window_tokens, made.vram.window_bytes) == (2048, 5 * GIB)
    assert (made.memory.window_tokens, made.memory.window_bytes) == (6144, 15 * GIB)
    assert made.memory.needed_bytes == 200 * 15 * GIB
    assert made.nvme.needed_bytes == 0


def test_vram_memory_and_nvme_take_what_fits_in_that_order() -> None:
    machine = replace(MACHINE, memory_bytes=64 * GIB, nvme_bytes=64 * GIB)
    made = plan_of(machine=machine)
    assert made.gpu.room_bytes == 56 * GIB
    assert made.vram.window_tokens == 2288  # 56 GiB / 200 sequences / 128 KiB = 2293.8, in blocks of 16
    assert 2200 <= made.memory.window_tokens <= 2400  # 0.9 of 64 GiB / 200 / 128 KiB = 2359, less what slots waste
    assert 2500 <= made.nvme.window_tokens <= 2621
    assert made.unheld_tokens == 8192 - 2288 - made.memory.window_tokens - made.nvme.window_tokens
    assert made.gain.sequences_without == 56
    assert 160 <= made.gain.sequences_with < 200


def test_windows_of_layers_are_needed_once_and_full_layers_for_every_token() -> None:
    layers = windowed(layers=12, kv_heads=1, head_dim=256, window=512, every=6)
    shape = CacheShape(layers=layers, element_bytes=2)
    made = plan_of(shape, DEMAND, replace(MACHINE, vram_window_tokens=1024))
    assert made.sequence_bytes == 1024 * (2 * 8192 + 10 * 512)
    assert made.vram.window_bytes == 1024 * (2 * 1024 + 10 * 512)
    assert made.memory.window_bytes == 1024 * 2 * (8192 - 1024)
    assert made.stored_bytes == 1024 * 12 * 8192


def test_times_are_bytes_over_speeds_and_tokens_over_rates() -> None:
    times = plan_of().times
    assert times.reused_tokens == 4096
    assert times.block_transfer_s == pytest.approx(2 * 1024 * 1024 / 25e9)
    assert times.blocks_per_step == 298
    assert times.load_memory_s == pytest.approx(4096 * 131_072 / 25e9)
    assert times.load_nvme_s == pytest.approx(4096 * 131_072 / 25e9 + 4096 * 131_072 / 3e9)
    assert times.recompute_s == pytest.approx(4096 / 25_000)
    assert times.memory_tokens_per_s == pytest.approx(25e9 / 131_072)


def test_tiers_save_what_is_not_computed_less_what_loading_it_takes() -> None:
    gain = plan_of().gain
    assert gain.hit_rate_without == pytest.approx(2288 / 8192)
    assert gain.hit_rate_with == pytest.approx(0.5)
    assert gain.prefill_without_s == pytest.approx((8192 - 2288) / 25_000)
    loaded = (4096 - 2288) * 131_072 / 25e9
    assert gain.prefill_with_s == pytest.approx(4096 / 25_000 + loaded)


def test_gpus_load_their_shares_side_by_side() -> None:
    one, eight = plan_of(), plan_of(machine=replace(MACHINE, tp=8))
    assert eight.gpu.block_bytes * 8 == one.gpu.block_bytes
    assert eight.times.load_memory_s * 8 == pytest.approx(one.times.load_memory_s)
    assert eight.sequence_bytes == one.sequence_bytes


def test_a_tier_that_is_slower_than_prefill_is_not_counted_on() -> None:
    slow = replace(MACHINE, memory_bytes=16 * GIB, disk_bytes_per_s=1e9)
    made = plan_of(machine=slow)
    assert "nvme-slower-than-recompute" in codes(machine=slow)
    assert made.gain.hit_rate_with == pytest.approx((made.vram.window_tokens + made.memory.window_tokens) / 8192)
    slower = replace(MACHINE, link_bytes_per_s=1e9)
    assert "memory-slower-than-recompute" in codes(machine=slower)
    assert plan_of(machine=slower).gain.hit_rate_with == plan_of(machine=slower).gain.hit_rate_without


def test_without_the_weights_nothing_is_said_of_vram_and_memory_has_it_all() -> None:
    made = plan_of(machine=replace(MACHINE, weights_bytes=None))
    assert (made.gpu.room_bytes, made.vram.capacity_bytes, made.gain.sequences_without) == (None, None, None)
    assert made.memory.window_tokens == 8192
    assert made.gain.saved_share is None


def test_without_the_speed_of_prefill_nothing_is_compared_with_it() -> None:
    made = plan_of(demand=replace(DEMAND, prefill_tokens_per_s=None))
    assert (made.times.recompute_s, made.gain.prefill_with_s, made.traffic) == (None, None, None)
    assert plan_of(demand=replace(DEMAND, prefill_tokens_per_s=None, requests_per_s=2.0)).traffic is not None


@pytest.mark.parametrize(
    ("code", "demand", "machine"),
    [
        ("sequence-too-large", DEMAND, replace(MACHINE, weights_bytes=72 * GIB - 1000)),
        ("window-too-large", DEMAND, replace(MACHINE, vram_window_tokens=4096)),
        ("hot-on-nvme", DEMAND, replace(MACHINE, memory_bytes=16 * GIB)),
        ("not-held", DEMAND, replace(MACHINE, memory_bytes=16 * GIB, nvme_bytes=0)),
        ("gain-small", replace(DEMAND, sequence_count=4), MACHINE),
        ("gain-small", replace(DEMAND, hit_rate=0.0), MACHINE),
        ("gain-small", replace(DEMAND, hit_rate=0.3), MACHINE),
        ("link-busy", replace(DEMAND, requests_per_s=40.0), MACHINE),
        ("disk-busy", DEMAND, replace(MACHINE, memory_bytes=16 * GIB)),
        ("block-slower-than-step", DEMAND, replace(MACHINE, block_tokens=8192)),
        ("slot-too-large", DEMAND, replace(MACHINE, block_tokens=4096)),
        ("slot-waste", DEMAND, replace(MACHINE, block_tokens=1040)),
        ("copies", DEMAND, replace(MACHINE, tp=16)),
    ],
)
def test_what_should_be_thought_about_twice_is_said(code: str, demand: Demand, machine: Machine) -> None:
    assert code in codes(demand=demand, machine=machine)


def test_a_plan_without_a_flaw_has_no_warnings() -> None:
    assert codes() == set()


def test_the_memory_that_would_hold_hot_data_does() -> None:
    cold = replace(MACHINE, memory_bytes=16 * GIB)
    made = plan_of(machine=cold)
    assert made.reused_nvme_tokens > 0
    enough = replace(cold, memory_bytes=made.reused_memory_bytes)
    assert plan_of(machine=enough).reused_nvme_tokens == 0
    assert "hot-on-nvme" not in codes(machine=enough)


def test_models_with_windows_and_states_come_with_a_note() -> None:
    gemma = CacheShape(layers=find_model("gemma-3-270m").layers, element_bytes=2)
    hybrid = CacheShape(layers=find_model("qwen3-next-80b-a3b").layers, element_bytes=2)
    assert "windows" in codes(gemma)
    assert "states" in codes(hybrid)
