"""A plan for people and for scripts, each number with its formula."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from kvstore.eviction import Watermarks
from kvstore_client.sizes import format_size
from kvstore_server.plan.advice import Warned
from kvstore_server.plan.arithmetic import Demand, Machine, Plan
from kvstore_server.plan.models import Model
from kvstore_server.plan.shape import AttentionLayer, CacheShape, StateLayer
from kvstore_server.plan.tiers import BATCH_COUNT, TierNeed


class Row(NamedTuple):
    """A line of the table, and how its numbers come about."""

    name: str
    text: str
    formulas: tuple[str, ...] = ()


class Assumed(NamedTuple):
    """An input that was not given."""

    flag: str
    value: str
    why: str


class Report(NamedTuple):
    """All that both forms show."""

    model: Model
    shape: CacheShape
    dtype: str
    demand: Demand
    machine: Machine
    plan: Plan
    warnings: Sequence[Warned]
    assumed: Sequence[Assumed]


def as_json(report: Report, *, with_formulas: bool) -> dict[str, Any]:
    shape, plan, machine = report.shape, report.plan, report.machine
    windows = [layer for layer in shape.attention if layer.window_tokens is not None]
    shown: dict[str, Any] = {
        "model": {
            "name": report.model.name,
            "source": report.model.source,
            "dtype": report.dtype,
            "full_layer_count": len(shape.attention) - len(windows),
            "window_layer_count": len(windows),
            "window_tokens": shape.window_tokens,
            "state_layer_count": len(shape.layers) - len(shape.attention),
        },
        "bytes_per_token": shape.token_bytes,
        "bytes_per_token_full_layers": shape.full_token_bytes,
        "bytes_per_token_window_layers": shape.window_token_bytes,
        "state_bytes_per_sequence": shape.state_bytes,
        "bytes_per_block": plan.gpu.block_bytes,
        "bytes_per_sequence": plan.sequence_bytes,
        "stored_bytes_per_sequence": plan.stored_bytes,
        "gpu": asdict(plan.gpu) | {"count": machine.gpu_count},
        "tiers": {
            "vram": asdict(plan.vram),
            "memory": asdict(plan.memory),
            "nvme": asdict(plan.nvme),
            "unheld_tokens": plan.unheld_tokens,
        },
        "concurrency": {
            "wanted": report.demand.sequence_count,
            "without_tiers": plan.gain.sequences_without,
            "with_tiers": plan.gain.sequences_with,
        },
        "gain": asdict(plan.gain),
        "times": asdict(plan.times) | {"step_s": report.demand.step_s},
        "traffic": None if plan.traffic is None else asdict(plan.traffic),
        "slots": asdict(plan.slots),
        "watermarks": {
            "vram": _watermarks_json(plan.vram_watermarks),
            "memory": _watermarks_json(plan.memory_watermarks),
        },
        "warnings": [warned._asdict() for warned in report.warnings],
        "inputs": asdict(report.demand) | asdict(machine),
        "assumed": {one.flag: {"value": one.value, "why": one.why} for one in report.assumed},
    }
    if with_formulas:
        shown["formulas"] = {row.name: list(row.formulas) for row in rows(report) if row.formulas}
    return shown


def as_lines(report: Report, *, with_formulas: bool) -> list[str]:
    shown = rows(report)
    width = max(len(row.name) for row in shown)
    lines = []
    for row in shown:
        lines.append(f"{row.name:<{width}} {row.text}")
        if with_formulas:
            lines += [f"{'':<{width}}   = {formula}" for formula in row.formulas]
    return lines


def rows(report: Report) -> list[Row]:
    return [
        *_model_rows(report),
        *_tier_rows(report),
        *_speed_rows(report),
        *(Row("assumed", f"{one.flag} {one.value}: {one.why}") for one in report.assumed),
        *(Row(warned.level, f"{warned.text} [{warned.code}]") for warned in report.warnings),
    ]


def model_table(models: Mapping[str, Model], *, bytes_per_token: Mapping[str, int]) -> list[str]:
    width = max(map(len, models))
    return [
        f"{name:<{width}} {len(model.layers):>3} layers {bytes_per_token[name]:>9,} bytes/token  {model.source}"
        for name, model in models.items()
    ]


def _model_rows(report: Report) -> Iterator[Row]:
    shape, plan, machine, demand = report.shape, report.plan, report.machine, report.demand
    yield Row("model", f"{report.model.name}: {_layers_text(shape)}, {report.dtype}")
    yield Row("token", _token_text(shape), tuple(_token_formulas(shape)))
    shard = "" if machine.gpu_count == 1 else f" on one of {machine.gpu_count} GPUs"
    yield Row(
        "block",
        f"{format_size(plan.gpu.block_bytes)}: {machine.block_tokens} tokens{shard}",
        (f"{machine.block_tokens} tokens * {plan.gpu.token_bytes:,} bytes = {plan.gpu.block_bytes:,} bytes",),
    )
    yield Row(
        "sequence",
        f"{format_size(plan.sequence_bytes)}: {demand.context_tokens:,} tokens",
        tuple(_sequence_formulas(shape, demand.context_tokens, plan.sequence_bytes)),
    )


def _tier_rows(report: Report) -> Iterator[Row]:
    plan, demand = report.plan, report.demand
    yield _gpu_row(report)
    count = demand.sequence_count
    for name, need in (("vram", plan.vram), ("memory", plan.memory), ("nvme", plan.nvme)):
        yield Row(name, _tier_text(name, need), tuple(_tier_formulas(report, name, need)))
    if plan.memory.needed_bytes:
        slots = plan.slots
        yield Row(
            "slots",
            f"{format_size(slots.slot_bytes)}, {slots.count_per_slab:,} in a slab of {format_size(slots.slab_bytes)}",
            (
                "slot = 192 bytes + block, in whole pages of 4096, shared out over the slab",
                f"waste = 1 - {slots.count_per_slab:,} blocks / slab = {slots.waste:.1%}",
            ),
        )
    gain = plan.gain
    without = "unknown" if gain.sequences_without is None else f"{gain.sequences_without:,}"
    formulas = [f"with: {count:,} * share of each sequence that some tier holds"]
    if plan.gpu.room_bytes is not None:
        formulas.insert(
            0, f"without: {plan.gpu.room_bytes:,} / {plan.gpu.sequence_bytes:,} bytes of a GPU, rounded down"
        )
    yield Row(
        "sequences",
        f"{count:,} wanted; {without} kept without tiers, {gain.sequences_with:,} with",
        tuple(formulas),
    )
    without = "unknown" if gain.hit_rate_without is None else f"{gain.hit_rate_without:.0%}"
    yield Row(
        "hit rate",
        f"{demand.hit_rate:.0%} possible; {without} without tiers, {gain.hit_rate_with:.0%} with",
        (
            "without: smaller of what is possible and the share of each sequence that fits into VRAM",
            "with: the same of all tiers that are faster than prefill",
        ),
    )
    yield from _watermark_rows(report)


def _speed_rows(report: Report) -> Iterator[Row]:
    plan, machine, demand, times = report.plan, report.machine, report.demand, report.plan.times
    link, disk = machine.link_bytes_per_s, machine.disk_bytes_per_s
    yield Row(
        "transfer",
        f"{times.block_transfer_s * 1e3:.3g} ms a block, {times.blocks_per_step:,} in a step of "
        f"{demand.step_s * 1e3:g} ms",
        (
            f"{plan.gpu.block_bytes:,} bytes / {link / 1e9:g} GB/s = {times.block_transfer_s * 1e3:.3g} ms",
            f"{demand.step_s * 1e3:g} ms / {times.block_transfer_s * 1e3:.3g} ms, rounded down",
        ),
    )
    recompute = "unknown" if times.recompute_s is None else _seconds(times.recompute_s)
    formulas = [
        f"memory: bytes of {times.reused_tokens:,} tokens on one GPU / {link / 1e9:g} GB/s",
        f"NVMe: bytes of {times.reused_tokens:,} tokens / {disk / 1e9:g} GB/s, and then as from memory",
    ]
    if demand.prefill_tokens_per_s is not None:
        formulas.append(f"recompute: {times.reused_tokens:,} tokens / {demand.prefill_tokens_per_s:,.0f} tokens/s")
    yield Row(
        "prefix",
        f"{times.reused_tokens:,} reused tokens: {_seconds(times.load_memory_s)} from memory, "
        f"{_seconds(times.load_nvme_s)} from NVMe, {recompute} to recompute",
        tuple(formulas),
    )
    yield from _gain_rows(report)
    if plan.traffic is not None:
        traffic = plan.traffic
        loaded, stored = traffic.load_bytes_per_s / 1e9, traffic.store_bytes_per_s / 1e9
        yield Row(
            "traffic",
            f"{traffic.requests_per_s:.2f} requests/s: link {traffic.link_use:.0%}, disk {traffic.disk_use:.0%}",
            (
                "requests/s: as given, or prefill tokens/s / computed tokens of a request",
                f"link: larger of {loaded:.3g} GB/s loaded and {stored:.3g} stored by one GPU / {link / 1e9:g} GB/s",
                f"disk: {traffic.disk_bytes_per_s / 1e9:.3g} GB/s read and written / {disk / 1e9:g} GB/s",
            ),
        )


def _gain_rows(report: Report) -> Iterator[Row]:
    gain, demand = report.plan.gain, report.demand
    if gain.prefill_with_s is None or demand.prefill_tokens_per_s is None:
        return
    rate, context = demand.prefill_tokens_per_s, demand.context_tokens
    formulas = [f"with: {context:,} * (1 - {gain.hit_rate_with:.3g}) / {rate:,.0f} tokens/s + loads"]
    text = f"{_seconds(gain.prefill_with_s)} with tiers"
    if gain.prefill_without_s is not None and gain.saved_share is not None:
        formulas.insert(0, f"without: {context:,} * (1 - {gain.hit_rate_without:.3g}) / {rate:,.0f} tokens/s")
        text = f"{_seconds(gain.prefill_without_s)} without tiers, {text}: {gain.saved_share:.0%} saved"
    yield Row("prefill", text, tuple(formulas))


def _gpu_row(report: Report) -> Row:
    gpu, machine = report.plan.gpu, report.machine
    what = f"{machine.gpu_count} of {format_size(machine.gpu_bytes)}"
    if gpu.weights_bytes is None or gpu.room_bytes is None or machine.weights_bytes is None:
        return Row("gpu", f"{what}; room for KV unknown: give --params or --weights-bytes")
    return Row(
        "gpu",
        f"{what}; each {format_size(gpu.weights_bytes)} of weights, {format_size(gpu.room_bytes)} for KV",
        (
            f"weights: {machine.weights_bytes:,} bytes / {machine.gpu_count} GPUs",
            f"room: {machine.gpu_bytes:,} bytes * {machine.gpu_share:g} - {gpu.weights_bytes:,}, at least 0",
        ),
    )


def _tier_text(name: str, need: TierNeed) -> str:
    if not need.window_tokens:
        unused = need.capacity_bytes if name != "vram" else None
        return f"nothing; {name}.capacity {format_size(unused)} is not needed" if unused else "nothing"
    what = f"{format_size(need.window_bytes)}: {need.window_tokens:,} tokens of each sequence"
    what += f"; {format_size(need.needed_bytes)} of all"
    if need.capacity_bytes is None:
        return what
    if name == "vram":
        return f"{what}, {format_size(need.capacity_bytes)} there"
    return f"{what}; {name}.capacity {format_size(need.capacity_bytes)}"


def _tier_formulas(report: Report, name: str, need: TierNeed) -> Iterator[str]:
    if not need.window_tokens:
        return
    machine, count = report.machine, report.demand.sequence_count
    if name == "vram":
        if machine.vram_window_tokens is None:
            yield f"window: most whole blocks whose bytes are at most room / {count:,} sequences"
        copies = "" if machine.tp == 1 else ", copies on several GPUs included"
        yield f"all: {count:,} sequences{copies} = {need.needed_bytes:,} bytes"
        return
    yield f"window: bytes of {need.window_tokens:,} tokens that no faster tier has = {need.window_bytes:,}"
    yield f"all: {count:,} * {need.window_bytes:,} = {need.needed_bytes:,} bytes"
    if name == "memory":
        yield "capacity: slabs of slots of such blocks, at the low watermark"
    else:
        yield "capacity: segments of the same slots, and the index (docs/nvme.md)"


def _watermark_rows(report: Report) -> Iterator[Row]:
    plan = report.plan
    pairs = (("VRAM", plan.vram_watermarks), ("memory", plan.memory_watermarks))
    shown = [
        f"{name} {marks.high:.2f} / {marks.low:.2f}, gap {marks.high - marks.low:.2f}"
        for name, marks in pairs
        if marks is not None
    ]
    if shown:
        yield Row(
            "watermarks",
            "; ".join(shown),
            (
                f"high: 1 - ({BATCH_COUNT} blocks + what comes while they leave) / capacity, 0.60 to the default",
                "gap: a whole sequence / capacity, 0.05 to 0.15",
            ),
        )


def _layers_text(shape: CacheShape) -> str:
    kinds: dict[str, int] = {}
    for layer in shape.layers:
        kind = _kind(layer)
        kinds[kind] = kinds.get(kind, 0) + 1
    return " + ".join(f"{count} {kind}" for kind, count in kinds.items())


def _kind(layer: AttentionLayer | StateLayer) -> str:
    if isinstance(layer, StateLayer):
        return "layers with a state"
    heads = f"{layer.num_kv_heads} KV head{'' if layer.num_kv_heads == 1 else 's'} of {layer.head_dim}"
    if not layer.v_head_dim:
        heads = f"a latent of {layer.head_dim}"
    window = "" if layer.window_tokens is None else f" and a window of {layer.window_tokens:,}"
    return f"layers with {heads}{window}"


def _token_text(shape: CacheShape) -> str:
    text = format_size(shape.token_bytes)
    if shape.window_token_bytes and shape.full_token_bytes:
        text += f": {format_size(shape.full_token_bytes)} in full layers"
        text += f", {format_size(shape.window_token_bytes)} in those with windows"
    return text


def _token_formulas(shape: CacheShape) -> Iterator[str]:
    counts: dict[AttentionLayer, int] = {}
    for layer in shape.attention:
        counts[layer] = counts.get(layer, 0) + 1
    for layer, count in counts.items():
        planes = f"({layer.head_dim} K + {layer.v_head_dim} V)" if layer.v_head_dim else f"{layer.head_dim}"
        heads = f"{layer.num_kv_heads} KV head(s) * {planes} * {shape.element_bytes} bytes"
        if layer.index_bytes:
            heads = f"({heads} + {layer.index_bytes} of index)"
        yield f"{count} layers * {heads} = {count * layer.token_bytes(shape.element_bytes):,} bytes"
    if shape.state_bytes:
        yield f"and {shape.state_bytes:,} bytes of states for each sequence"


def _sequence_formulas(shape: CacheShape, tokens: int, sequence_bytes: int) -> Iterator[str]:
    terms = []
    if shape.full_token_bytes:
        terms.append(f"{shape.full_token_bytes:,} * {tokens:,}")
    by_window: dict[int, int] = {}
    for layer in shape.attention:
        if layer.window_tokens is not None:
            token_bytes = layer.token_bytes(shape.element_bytes)
            by_window[layer.window_tokens] = by_window.get(layer.window_tokens, 0) + token_bytes
    terms += [f"{token_bytes:,} * min({tokens:,}, {window:,})" for window, token_bytes in by_window.items()]
    if shape.state_bytes:
        terms.append(f"{shape.state_bytes:,}")
    yield f"{' + '.join(terms)} = {sequence_bytes:,} bytes"


def _watermarks_json(marks: Watermarks | None) -> dict[str, float] | None:
    if marks is None:
        return None
    return {"high": marks.high, "low": marks.low, "gap": round(marks.high - marks.low, 2)}


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
