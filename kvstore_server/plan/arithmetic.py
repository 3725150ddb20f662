"""What a model's KV cache needs of each tier, and whether tiers pay: numbers in, numbers out.

All of it is for one copy of the model on one node, on `tp` * `pp` GPUs. Sizes are bytes, speeds bytes per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.eviction import Watermarks
from kvstore_server.plan.shape import CacheShape, shards
from kvstore_server.plan.tiers import (
    BATCH_COUNT,
    NO_NEED,
    VRAM_HIGH_MAX,
    DaemonSizes,
    MemoryTier,
    NvmeTier,
    Slots,
    TierNeed,
    sequence_part_bytes,
    suggest_watermarks,
    tokens_that_fit,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is asked of the model."""

    context_tokens: int
    """Of each sequence, prompt and answer."""
    sequence_count: int
    """Whose caches are to be there when they are needed again."""
    hit_rate: float
    """Share of a sequence's tokens that were computed before."""
    step_s: float
    """Of decoding: what a transfer has to hide behind."""
    prefill_tokens_per_s: float | None
    """Of all GPUs together; None: unknown."""
    requests_per_s: float | None
    """None: as many as prefill can take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What there is to serve it."""

    tp: int
    pp: int
    gpu_bytes: int
    gpu_share: float
    """Of a GPU's memory, what weights and KV cache may take; the rest is for activations and the driver."""
    weights_bytes: int | None
    """None: unknown, and so is the room for KV."""
    vram_window_tokens: int | None
    """Tokens of each sequence to keep in VRAM; None: as many as fit."""
    memory_bytes: int | None
    nvme_bytes: int | None
    """Capacities of the tiers; None: as much as is needed. NVMe may be 0: none."""
    link_bytes_per_s: float
    """Between host memory and one GPU, each way."""
    disk_bytes_per_s: float
    block_tokens: int

    @property
    def gpu_count(self) -> int:
        return self.tp * self.pp

    @property
    def usable_bytes(self) -> int:
        """Of each GPU."""
        return usable_gpu_bytes(self.gpu_bytes, self.gpu_share)


def usable_gpu_bytes(gpu_bytes: int, gpu_share: float) -> int:
    """For weights and KV cache; never nothing, however small the share."""
    return max(int(gpu_bytes * gpu_share), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Of the one that has most of each sequence."""

    token_bytes: int
    sequence_bytes: int
    block_bytes: int
    weights_bytes: int | None
    room_bytes: int | None
    """For KV; None: the weights are not known. 0: not even the weights fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Of one block, and of the part of a sequence that was computed before; None: prefill's speed is not known."""

    reused_tokens: int
    block_transfer_s: float
    blocks_per_step: int
    """That come or go while one step is decoded."""
    load_memory_s: float
    load_nvme_s: float
    recompute_s: float | None
    memory_tokens_per_s: float
    """At which they reach the GPU; slower than prefill, and they are recomputed instead."""
    nvme_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What the tiers below VRAM change. None: VRAM, or prefill's speed, is not known."""

    sequences_without: int | None
    sequences_with: int
    """That keep all of their cache; at most as many as are wanted."""
    hit_rate_without: float | None
    hit_rate_with: float
    prefill_without_s: float | None
    prefill_with_s: float | None
    """Of a mean request until its prompt is there: computed, and loaded."""
    saved_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """At the given rate of requests, or at the one that keeps prefill busy."""

    requests_per_s: float
    load_bytes_per_s: float
    """To one GPU."""
    store_bytes_per_s: float
    """From one GPU."""
    link_use: float
    """The busier way, as a share of what it can do."""
    disk_bytes_per_s: float
    """Reads and writes together."""
    disk_use: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that follows from a demand on a machine."""

    sequence_bytes: int
    stored_bytes: int
    gpu: Gpu
    vram: TierNeed
    memory: TierNeed
    nvme: TierNeed
    unheld_tokens: int
    """Of each sequence, those that no tier has room for."""
    reused_memory_bytes: int
    """Capacity of a memory tier that has all the reused tokens which VRAM has not."""
    reused_nvme_tokens: int
    """Of each sequence, reused tokens that are on NVMe alone."""
    slots: Slots
    times: Times
    gain: Gain
    traffic: Traffic | None
    vram_watermarks: Watermarks | None
    memory_watermarks: Watermarks | None


def make_plan(shape: CacheShape, demand: Demand, machine: Machine, *, sizes: DaemonSizes) -> Plan:
    parts = shards(shape, tp=machine.tp, pp=machine.pp)
    gpu = _gpu(parts, demand, machine)
    fitting_tokens = _fitting_tokens(parts, demand, machine, room_bytes=gpu.room_bytes)
    vram = _vram(shape, parts, demand, machine, fitting_tokens=fitting_tokens, room_bytes=gpu.room_bytes)
    memory_tier = MemoryTier(
        sizes=sizes, block_bytes=gpu.block_bytes, sequence_bytes=shape.sequence_bytes(demand.context_tokens)
    )
    memory = _below(shape, demand, machine, memory_tier, above=(vram,), given_bytes=machine.memory_bytes)
    slots = memory_tier.slots(memory.capacity_bytes or _SLOTS_SHOWN_FOR_BYTES)
    nvme_tier = NvmeTier(sizes=sizes, block_bytes=gpu.block_bytes, slot_bytes=slots.slot_bytes)
    nvme = NO_NEED
    if machine.nvme_bytes != 0:
        nvme = _below(shape, demand, machine, nvme_tier, above=(vram, memory), given_bytes=machine.nvme_bytes)
    held_tokens = vram.window_tokens + memory.window_tokens + nvme.window_tokens

    places = _Places(demand, vram=vram, memory=memory, nvme=nvme)
    times = _times(shape, parts, demand, machine, block_bytes=gpu.block_bytes)
    worth = _Worth(demand, times)
    gain = _gain(
        shape, parts, demand, machine,
        gpu=gpu, fitting_tokens=fitting_tokens, held_tokens=held_tokens, places=places, worth=worth,
    )  # fmt: skip
    return Plan(
        sequence_bytes=shape.sequence_bytes(demand.context_tokens),
        stored_bytes=shape.stored_bytes(demand.context_tokens),
        gpu=gpu,
        vram=vram,
        memory=memory,
        nvme=nvme,
        unheld_tokens=demand.context_tokens - held_tokens,
        reused_memory_bytes=_reused_memory_bytes(shape, demand, memory_tier, vram=vram, times=times),
        reused_nvme_tokens=places.nvme_tokens,
        slots=slots,
        times=times,
        gain=gain,
        traffic=_traffic(shape, parts, demand, machine, gain=gain, nvme=nvme, places=places, worth=worth),
        vram_watermarks=_vram_watermarks(demand, machine, gpu),
        memory_watermarks=memory_tier.watermarks(memory.capacity_bytes) if memory.capacity_bytes else None,
    )


_SLOTS_SHOWN_FOR_BYTES = 8 << 30
"""A capacity from which slabs are of full size, for a plan that needs no memory tier."""


def _gpu(parts: Sequence[CacheShape], demand: Demand, machine: Machine) -> Gpu:
    token_bytes = max(part.token_bytes for part in parts)
    sequence_bytes = max(part.sequence_bytes(demand.context_tokens) for part in parts)
    weights_bytes = room_bytes = None
    if machine.weights_bytes is not None:
        weights_bytes = -(-machine.weights_bytes // machine.gpu_count)
        room_bytes = max(machine.usable_bytes - weights_bytes, 0)
    return Gpu(
        token_bytes=token_bytes,
        sequence_bytes=sequence_bytes,
        # Models that keep states alone have no blocks of tokens: what is stored is a state.
        block_bytes=machine.block_tokens * token_bytes or sequence_bytes,
        weights_bytes=weights_bytes,
        room_bytes=room_bytes,
    )


def _fitting_tokens(
    parts: Sequence[CacheShape], demand: Demand, machine: Machine, *, room_bytes: int | None
) -> int | None:
    """Of each sequence in VRAM, when all of them share it evenly; None: its room is not known."""
    if room_bytes is None:
        return None
    return tokens_that_fit(
        lambda tokens: _largest_bytes(parts, above_tokens=0, tokens=tokens),
        tokens_max=demand.context_tokens,
        block_tokens=machine.block_tokens,
        budget_bytes=room_bytes / demand.sequence_count,
    )


def _vram(
    shape: CacheShape,
    parts: Sequence[CacheShape],
    demand: Demand,
    machine: Machine,
    *,
    fitting_tokens: int | None,
    room_bytes: int | None,
) -> TierNeed:
    tokens = fitting_tokens or 0
    if machine.vram_window_tokens is not None:
        tokens = min(machine.vram_window_tokens, demand.context_tokens)
    on_all_gpus = machine.tp * sum(sequence_part_bytes(part, above_tokens=0, tokens=tokens) for part in parts)
    return TierNeed(
        window_tokens=tokens,
        window_bytes=sequence_part_bytes(shape, above_tokens=0, tokens=tokens),
        needed_bytes=demand.sequence_count * on_all_gpus,
        capacity_bytes=None if room_bytes is None else room_bytes * machine.gpu_count,
    )


def _below(
    shape: CacheShape,
    demand: Demand,
    machine: Machine,
    tier: MemoryTier | NvmeTier,
    *,
    above: Sequence[TierNeed],
    given_bytes: int | None,
) -> TierNeed:
    """What a tier takes of that which those above have no room for."""
    above_tokens = sum(need.window_tokens for need in above)
    left_tokens = tokens = demand.context_tokens - above_tokens
    if given_bytes is not None:
        tokens = tokens_that_fit(
            lambda count: sequence_part_bytes(shape, above_tokens=above_tokens, tokens=count),
            tokens_max=left_tokens,
            block_tokens=machine.block_tokens,
            budget_bytes=tier.held_bytes(given_bytes) / demand.sequence_count,
        )
    window_bytes = sequence_part_bytes(shape, above_tokens=above_tokens, tokens=tokens)
    needed_bytes = demand.sequence_count * window_bytes
    return TierNeed(
        window_tokens=tokens,
        window_bytes=window_bytes,
        needed_bytes=needed_bytes,
        capacity_bytes=tier.capacity_for(needed_bytes) if given_bytes is None else given_bytes,
    )


def _reused_memory_bytes(shape: CacheShape, demand: Demand, tier: MemoryTier, *, vram: TierNeed, times: Times) -> int:
    tokens = max(times.reused_tokens - vram.window_tokens, 0)
    part_bytes = sequence_part_bytes(shape, above_tokens=vram.window_tokens, tokens=tokens)
    return tier.capacity_for(demand.sequence_count * part_bytes)


def _largest_bytes(parts: Sequence[CacheShape], *, above_tokens: int, tokens: int) -> int:
    return max(sequence_part_bytes(part, above_tokens=above_tokens, tokens=tokens) for part in parts)


class _Places:
    """Where the reused tokens of a sequence are: the fastest tier has those that it can. A chain loses its tail first,
    so what is reused stays longest."""

    def __init__(self, demand: Demand, *, vram: TierNeed, memory: TierNeed, nvme: TierNeed) -> None:
        left = round(demand.context_tokens * demand.hit_rate)
        self.vram_tokens = min(left, vram.window_tokens)
        left -= self.vram_tokens
        self.memory_tokens = min(left, memory.window_tokens)
        left -= self.memory_tokens
        self.nvme_tokens = min(left, nvme.window_tokens)


class _Worth:
    """Which tiers bring tokens faster than prefill computes them; the daemon is not asked for others."""

    def __init__(self, demand: Demand, times: Times) -> None:
        prefill = demand.prefill_tokens_per_s
        self.memory = prefill is None or times.memory_tokens_per_s >= prefill
        self.nvme = prefill is None or times.nvme_tokens_per_s >= prefill


def _times(
    shape: CacheShape, parts: Sequence[CacheShape], demand: Demand, machine: Machine, *, block_bytes: int
) -> Times:
    reused_tokens = round(demand.context_tokens * demand.hit_rate)
    block_transfer_s = block_bytes / machine.link_bytes_per_s
    load_memory_s, load_nvme_s = _load_s(shape, parts, machine, above_tokens=0, tokens=reused_tokens)
    whole_memory_s, whole_nvme_s = _load_s(shape, parts, machine, above_tokens=0, tokens=demand.context_tokens)
    prefill = demand.prefill_tokens_per_s
    return Times(
        reused_tokens=reused_tokens,
        block_transfer_s=block_transfer_s,
        blocks_per_step=int(demand.step_s / block_transfer_s),
        load_memory_s=load_memory_s,
        load_nvme_s=load_nvme_s,
        recompute_s=None if prefill is None else reused_tokens / prefill,
        memory_tokens_per_s=demand.context_tokens / whole_memory_s,
        nvme_tokens_per_s=demand.context_tokens / whole_nvme_s,
    )


def _load_s(
    shape: CacheShape, parts: Sequence[CacheShape], machine: Machine, *, above_tokens: int, tokens: int
) -> tuple[float, float]:
    """From memory, and from NVMe through memory, one after the other. GPUs load side by side, each on its link."""
    link_s = _largest_bytes(parts, above_tokens=above_tokens, tokens=tokens) / machine.link_bytes_per_s
    disk_s = sequence_part_bytes(shape, above_tokens=above_tokens, tokens=tokens) / machine.disk_bytes_per_s
    return link_s, link_s + disk_s


def _gain(
    shape: CacheShape,
    parts: Sequence[CacheShape],
    demand: Demand,
    machine: Machine,
    *,
    gpu: Gpu,
    fitting_tokens: int | None,
    held_tokens: int,
    places: _Places,
    worth: _Worth,
) -> Gain:
    context, count = demand.context_tokens, demand.sequence_count
    held_share = sequence_part_bytes(shape, above_tokens=0, tokens=held_tokens) / shape.sequence_bytes(context)
    used_tokens = places.vram_tokens + places.memory_tokens * worth.memory + places.nvme_tokens * worth.nvme
    without = hit_rate_without = without_s = with_s = saved_share = None
    if gpu.room_bytes is not None:
        without = min(gpu.room_bytes // gpu.sequence_bytes, count)
        hit_rate_without = min(demand.hit_rate, (fitting_tokens or 0) / context)
    if demand.prefill_tokens_per_s is not None:
        from_memory_s, _ = _load_s(
            shape, parts, machine, above_tokens=places.vram_tokens, tokens=places.memory_tokens * worth.memory
        )
        _, from_nvme_s = _load_s(
            shape,
            parts,
            machine,
            above_tokens=places.vram_tokens + places.memory_tokens,
            tokens=places.nvme_tokens * worth.nvme,
        )
        with_s = (context - used_tokens) / demand.prefill_tokens_per_s + from_memory_s + from_nvme_s
        if hit_rate_without is not None:
            without_s = context * (1.0 - hit_rate_without) / demand.prefill_tokens_per_s
            saved_share = (without_s - with_s) / without_s if without_s else 0.0
    return Gain(
        sequences_without=without,
        sequences_with=count if held_tokens == context else int(count * held_share),
        hit_rate_without=hit_rate_without,
        hit_rate_with=used_tokens / context,
        prefill_without_s=without_s,
        prefill_with_s=with_s,
        saved_share=saved_share,
    )


def _traffic(
    shape: CacheShape,
    parts: Sequence[CacheShape],
    demand: Demand,
    machine: Machine,
    *,
    gain: Gain,
    nvme: TierNeed,
    places: _Places,
    worth: _Worth,
) -> Traffic | None:
    # At least one block of each request is new, or nobody would have asked.
    computed_tokens = max(demand.context_tokens * (1.0 - gain.hit_rate_with), machine.block_tokens)
    requests_per_s = demand.requests_per_s
    if requests_per_s is None:
        if demand.prefill_tokens_per_s is None:
            return None
        requests_per_s = demand.prefill_tokens_per_s / computed_tokens
    memory_tokens, nvme_tokens = places.memory_tokens * worth.memory, places.nvme_tokens * worth.nvme
    loaded = _largest_bytes(parts, above_tokens=places.vram_tokens, tokens=memory_tokens + nvme_tokens)
    read = sequence_part_bytes(shape, above_tokens=places.vram_tokens + places.memory_tokens, tokens=nvme_tokens)
    written = computed_tokens * shape.token_bytes if nvme.window_tokens else 0.0
    load_bytes_per_s = requests_per_s * loaded
    store_bytes_per_s = requests_per_s * computed_tokens * max(part.token_bytes for part in parts)
    disk_bytes_per_s = requests_per_s * (read + written)
    return Traffic(
        requests_per_s=requests_per_s,
        load_bytes_per_s=load_bytes_per_s,
        store_bytes_per_s=store_bytes_per_s,
        link_use=max(load_bytes_per_s, store_bytes_per_s) / machine.link_bytes_per_s,
        disk_bytes_per_s=disk_bytes_per_s,
        disk_use=disk_bytes_per_s / machine.disk_bytes_per_s,
    )


def _vram_watermarks(demand: Demand, machine: Machine, gpu: Gpu) -> Watermarks | None:
    if not gpu.room_bytes:
        return None
    return suggest_watermarks(
        capacity_bytes=gpu.room_bytes,
        high_max=VRAM_HIGH_MAX,
        batch_bytes=BATCH_COUNT * gpu.block_bytes,
        sequence_bytes=gpu.sequence_bytes,
        arrival_bytes_per_s=(demand.prefill_tokens_per_s or 0.0) * gpu.token_bytes,
        drain_bytes_per_s=machine.link_bytes_per_s,
    )
