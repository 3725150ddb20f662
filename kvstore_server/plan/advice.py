"""What a plan should make its reader think twice about."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from kvstore_client.sizes import format_size
from kvstore_server.plan.arithmetic import Demand, Machine, Plan
from kvstore_server.plan.shape import CacheShape, StateLayer

BUSY_MAX = 0.70
"""Share of a link or a disk above which transfers wait for each other noticeably."""
GAIN_MIN = 0.05
"""Share of prefill's time below which tiers are not worth running."""
WASTE_MAX = 0.10


class Warned(NamedTuple):
    """`code` is stable and may be scripted against; `text` is for people. A note is no reason to change anything."""

    code: str
    text: str
    level: Literal["warning", "note"] = "warning"


def warnings(shape: CacheShape, demand: Demand, machine: Machine, plan: Plan) -> list[Warned]:
    return [*_vram(demand, plan), *_tiers(demand, plan), *_speeds(demand, plan), *_shape(shape, machine, plan)]


def _vram(demand: Demand, plan: Plan) -> Iterator[Warned]:
    gpu = plan.gpu
    if gpu.room_bytes is not None and gpu.room_bytes < gpu.sequence_bytes:
        yield Warned(
            "sequence-too-large",
            f"one sequence of {demand.context_tokens:,} tokens takes {format_size(gpu.sequence_bytes)} of a GPU and "
            f"{format_size(gpu.room_bytes)} are left for KV: use more GPUs (--tp, --pp), a KV cache of fp8 (--dtype) "
            "or a shorter --context",
        )
    # Only a window that was given can be too large.
    if plan.vram.capacity_bytes is not None and plan.vram.needed_bytes > plan.vram.capacity_bytes:
        yield Warned(
            "window-too-large",
            f"windows of {plan.vram.window_tokens:,} tokens take {format_size(plan.vram.needed_bytes)} of VRAM and "
            f"{format_size(plan.vram.capacity_bytes)} are there: lower --vram-window or --concurrency",
        )


def _tiers(demand: Demand, plan: Plan) -> Iterator[Warned]:
    if plan.reused_nvme_tokens:
        yield Warned(
            "hot-on-nvme",
            f"hot data on SSD: of the {plan.times.reused_tokens:,} tokens of each sequence that are used again, "
            f"{plan.reused_nvme_tokens:,} are on NVMe alone; memory of {format_size(plan.reused_memory_bytes)} "
            "would hold them",
        )
    if plan.unheld_tokens:
        yield Warned(
            "not-held",
            f"no tier has room for {plan.unheld_tokens:,} tokens of each sequence: they are computed again, "
            f"and {plan.gain.sequences_with:,} of {demand.sequence_count:,} sequences would fit whole",
        )
    gain = plan.gain
    if not plan.times.reused_tokens:
        yield Warned(
            "gain-small", f"gain too small to bother: at a hit rate of {demand.hit_rate:g} nothing is used again"
        )
    elif gain.hit_rate_without is not None and gain.hit_rate_without >= demand.hit_rate:
        yield Warned(
            "gain-small",
            "gain too small to bother: VRAM alone holds all that is used again; tiers below it add reuse after "
            "restarts and by other engines, and nothing else",
        )
    elif gain.saved_share is not None and gain.saved_share < GAIN_MIN:
        yield Warned(
            "gain-small",
            f"gain too small to bother: tiers save {max(gain.saved_share, 0.0):.1%} of prefill's time; "
            f"worth it is more than {GAIN_MIN:.0%}",
        )


def _speeds(demand: Demand, plan: Plan) -> Iterator[Warned]:
    times, prefill = plan.times, demand.prefill_tokens_per_s
    if prefill is not None and times.memory_tokens_per_s < prefill:
        yield Warned(
            "memory-slower-than-recompute",
            f"the link brings {times.memory_tokens_per_s:,.0f} tokens/s and prefill computes {prefill:,.0f}: blocks in "
            "memory and on NVMe are not fetched",
        )
    elif prefill is not None and plan.nvme.window_tokens and times.nvme_tokens_per_s < prefill:
        yield Warned(
            "nvme-slower-than-recompute",
            f"NVMe brings {times.nvme_tokens_per_s:,.0f} tokens/s and prefill computes {prefill:,.0f}: blocks on NVMe "
            "are not fetched",
        )
    if plan.traffic is not None and plan.traffic.link_use > BUSY_MAX:
        yield Warned(
            "link-busy",
            f"the link is {plan.traffic.link_use:.0%} busy at {plan.traffic.requests_per_s:.2f} requests/s; "
            f"above {BUSY_MAX:.0%} transfers wait for each other",
        )
    if plan.traffic is not None and plan.traffic.disk_use > BUSY_MAX:
        yield Warned(
            "disk-busy",
            f"the disk is {plan.traffic.disk_use:.0%} busy at {plan.traffic.requests_per_s:.2f} requests/s; "
            f"above {BUSY_MAX:.0%} reads wait: more memory, or nvme.admission second-hit",
        )
    if not times.blocks_per_step:
        yield Warned(
            "block-slower-than-step",
            f"one block takes {times.block_transfer_s * 1e3:.1f} ms over the link, longer than a step of "
            f"{demand.step_s * 1e3:g} ms: use fewer tokens per block (--block-tokens)",
        )


def _shape(shape: CacheShape, machine: Machine, plan: Plan) -> Iterator[Warned]:
    slots = plan.slots
    if not slots.count_per_slab:
        yield Warned(
            "slot-too-large",
            f"a block takes {format_size(slots.slot_bytes)} and slabs of the memory tier have "
            f"{format_size(slots.slab_bytes)}: set memory.slab_size to at least {slots.slot_bytes}, "
            "or use fewer tokens per block",
        )
    elif slots.waste > WASTE_MAX:
        yield Warned(
            "slot-waste",
            f"slots of {format_size(slots.slot_bytes)} leave {slots.waste:.0%} of memory unused: "
            "use more tokens per block, or a larger memory.slab_size",
        )
    fewest_heads = min((layer.num_kv_heads for layer in shape.attention), default=machine.tp)
    if fewest_heads < machine.tp:
        yield Warned(
            "copies",
            f"{machine.tp} GPUs share {fewest_heads} KV head{'s' if fewest_heads > 1 else ''}: VRAM holds "
            f"{machine.tp // fewest_heads} copies of the same bytes; the tiers below keep one",
            level="note",
        )
    if plan.stored_bytes > plan.sequence_bytes:
        yield Warned(
            "windows",
            f"layers with windows are stored for all tokens, {format_size(plan.stored_bytes)} of a sequence, and need "
            f"{format_size(plan.sequence_bytes)}: the rest is only used to branch off earlier, and is evicted first",
            level="note",
        )
    if any(isinstance(layer, StateLayer) for layer in shape.layers):
        yield Warned(
            "states",
            f"layers with a state keep {format_size(shape.state_bytes)} of each sequence, counted once: "
            "a stored state serves only what goes on at exactly its token",
            level="note",
        )
