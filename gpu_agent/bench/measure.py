"""`kvstore bench agent`: one schedule, three pools, in turn."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from gpu_agent.agent import GpuAgent
from gpu_agent.bench.clairvoyant import clairvoyant_moves
from gpu_agent.bench.content import Content
from gpu_agent.bench.loop import Loop, Run
from gpu_agent.bench.pools import AgentPool, OffloadingPool, Pool, WholePool
from gpu_agent.bench.serving import Batching, Step, peak_count, serve, while_busy
from gpu_agent.bench.sessions import Sessions, parse_sessions
from gpu_agent.config import AgentConfig
from gpu_agent.device import Device
from gpu_agent.device.cpu import CpuDevice
from kvstore.errors import InvalidArgumentError
from kvstore_client.bench import blocks
from kvstore_client.bench.figures import rounded
from kvstore_client.bench.plan import Progress
from kvstore_client.bench.processes import private_daemon
from kvstore_client.client import Client

TARGETS: Mapping[str, tuple[str, float]] = {
    "peak_vs_baseline": ("at most", 0.5),
    "throughput_vs_baseline": ("at least", 0.9),
    "prefetch_hit_rate": ("at least", 0.9),
    "stall_fraction": ("at most", 0.05),
}
_PREFILL_TOKENS = 128
_LINK_SAMPLES = 5
_LINK_BATCH_COUNT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    sessions: Sessions
    batching: Batching
    steps: Sequence[Step]
    step_s: float
    link_block_s: float
    """A block's time on the imitated link."""
    block_bytes: int
    whole_count: int
    """Slots that the schedule takes without tiering."""
    slot_count: int
    """Slots of the agent."""
    policy: str


@dataclass(frozen=True, slots=True)
class _Served:
    run: Run
    peak_count: int
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return self.run.token_count / self.run.wall_s

    @property
    def stall_fraction(self) -> float:
        return self.run.stall_s / self.run.wall_s


def measure(
    *,
    sessions_file: Path | None,
    batch_count: int,
    slice_steps: int,
    step_s: float,
    link_block_s: float,
    block_bytes: int,
    vram_share: float,
    policy: str,
    round_count: int,
    progress: Progress,
) -> dict[str, object]:
    plan = _plan(
        read_sessions(sessions_file),
        Batching(batch_count=batch_count, slice_steps=slice_steps, prefill_tokens=_PREFILL_TOKENS),
        step_s=step_s,
        link_block_s=link_block_s,
        block_bytes=block_bytes,
        vram_share=vram_share,
        policy=policy,
    )
    _config(plan)  # refuses a policy that there is not, before anything is started
    try:
        bound = clairvoyant_moves(
            plan.steps, tokens_per_block=plan.sessions.tokens_per_block, slot_count=plan.slot_count
        )
    except InvalidArgumentError as error:
        raise InvalidArgumentError.of(
            "--vram-share", vram_share, f"enough for all that run in one step: {plan.slot_count} blocks are too few"
        ) from error
    link_s = _measure_link(plan)
    served: dict[str, list[_Served]] = {"baseline": [], "agent": [], "naive": []}
    servers = {"baseline": _serve_whole, "agent": _serve_agent, "naive": _serve_naive}
    for number in range(round_count):
        for place, (name, serve_one) in enumerate(servers.items()):
            part = _part(progress, number * len(servers) + place, round_count * len(servers))
            served[name].append(serve_one(plan, part))
    return _figures(plan, served, link_s=link_s, bound_count=bound.count)


def read_sessions(path: Path | None) -> Sessions:
    """From a file that `gpu_agent.bench.record` has made; None: the one of this package."""
    if path is None:
        return parse_sessions(json.loads(resources.files(__package__).joinpath("sessions.json").read_text()))
    try:
        return parse_sessions(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError.of("--sessions", path, "what `python -m gpu_agent.bench.record` writes") from error


def missed_targets(figures: Mapping[str, object]) -> list[str]:
    """One sentence each."""
    missed = []
    for name, (kind, limit) in TARGETS.items():
        value = figures[name]
        is_met = isinstance(value, float) and (value <= limit if kind == "at most" else value >= limit)
        if not is_met:
            missed.append(f"{name} is {value}, which should be {kind} {limit}")
    return missed


def _plan(
    sessions: Sessions,
    batching: Batching,
    *,
    step_s: float,
    link_block_s: float,
    block_bytes: int,
    vram_share: float,
    policy: str,
) -> _Plan:
    steps = while_busy(list(serve(sessions.sessions, batching)))
    whole_count = peak_count(steps, tokens_per_block=sessions.tokens_per_block)
    return _Plan(
        sessions=sessions,
        batching=batching,
        steps=steps,
        step_s=step_s,
        link_block_s=link_block_s,
        block_bytes=block_bytes,
        whole_count=whole_count,
        slot_count=int(whole_count * vram_share),
        policy=policy,
    )


def _part(progress: Progress, number: int, count: int) -> Progress:
    return lambda share: progress((number + share) / count)


def _measure_link(plan: _Plan) -> float:
    """Seconds per block that the imitated link really takes on this machine, when nothing else does anything."""
    with _device(plan) as device:
        shape = {"block_bytes": plan.block_bytes}
        pool = device.allocate_pool(slot_count=_LINK_BATCH_COUNT, **shape)
        staging = device.allocate_staging(row_count=_LINK_BATCH_COUNT, **shape)
        rows = range(_LINK_BATCH_COUNT)
        times_s = [time.perf_counter()]
        for _ in range(1 + _LINK_SAMPLES):
            device.copy_rows(source=pool, source_rows=rows, target=staging, target_rows=rows).wait()
            times_s.append(time.perf_counter())
    # Without the first, which faults the pages in.
    return median(after - before for before, after in pairwise(times_s[1:])) / _LINK_BATCH_COUNT


def _serve_whole(plan: _Plan, progress: Progress) -> _Served:
    with _device(plan) as device:
        pool = WholePool(device, slot_count=plan.whole_count, block_bytes=plan.block_bytes)
        run = _run(plan, pool, progress)
        return _Served(run, pool.peak_count)


def _serve_agent(plan: _Plan, progress: Progress) -> _Served:
    namespace = blocks.namespace(plan.block_bytes, revision=blocks.new_revision())
    config = _config(plan)
    with _client(plan) as client, GpuAgent(namespace, client, config=config, device=_open_device(plan)) as agent:
        pool = AgentPool(agent)
        run = _run(plan, pool, progress)
        counters = agent.snapshot().counters
        needed_count = counters.prefetch_hit_count + counters.prefetch_late_count + counters.fetched_on_demand_count
        moved_bytes = counters.offloaded_bytes + counters.loaded_bytes
        figures = {
            "prefetch_hit_rate": counters.prefetch_hit_count / needed_count if needed_count else 0.0,
            "fetched_blocks": needed_count,
            "prefetch_late_blocks": counters.prefetch_late_count,
            "on_demand_blocks": counters.fetched_on_demand_count,
            "prefetch_wasted_blocks": counters.prefetch_wasted_count,
            "offloaded_bytes": counters.offloaded_bytes,
            "loaded_bytes": counters.loaded_bytes,
            "moved_blocks": moved_bytes / plan.block_bytes,
            "migrated_blocks": counters.migrated_count,
            "remigrated_blocks": counters.remigrated_count,
            "lost_blocks": counters.lost_count,
        }
        return _Served(run, pool.peak_count, figures)


def _config(plan: _Plan) -> AgentConfig:
    capacity_bytes = plan.slot_count * plan.block_bytes
    usual = AgentConfig(vram_capacity_bytes=capacity_bytes, policy=plan.policy)
    return replace(usual, cooldown_steps=usual.cooldown_steps // plan.sessions.compress)


def _serve_naive(plan: _Plan, progress: Progress) -> _Served:
    namespace = blocks.namespace(plan.block_bytes, revision=blocks.new_revision())
    with _client(plan) as client, _device(plan) as device:
        pool = OffloadingPool(device, client, namespace, slot_count=plan.whole_count)
        run = _run(plan, pool, progress)
        return _Served(run, pool.peak_count, {"moved_blocks": pool.moved_count})


def _run(plan: _Plan, pool: Pool, progress: Progress) -> Run:
    # Faulted in, so that the larger pool does not pay for its pages meanwhile.
    pool.memory.zero_()
    loop = Loop(
        pool,
        Content(block_bytes=plan.block_bytes),
        tokens_per_block=plan.sessions.tokens_per_block,
        prefill_tokens=plan.batching.prefill_tokens,
        step_s=plan.step_s,
    )
    return loop.run(plan.steps, progress=progress)


@contextmanager
def _client(plan: _Plan) -> Iterator[Client]:
    """Of a daemon that has nothing yet, and room for all."""
    capacity_bytes = blocks.capacity_bytes(block_count=plan.whole_count, block_bytes=plan.block_bytes)
    slab_bytes = blocks.slab_bytes(plan.block_bytes)
    with (
        private_daemon(capacity_bytes=capacity_bytes, slab_bytes=slab_bytes) as daemon,
        Client(daemon.unix) as client,
    ):
        yield client


def _open_device(plan: _Plan) -> CpuDevice:
    return CpuDevice(link_bytes_per_s=plan.block_bytes / plan.link_block_s)


@contextmanager
def _device(plan: _Plan) -> Iterator[Device]:
    device = _open_device(plan)
    try:
        yield device
    finally:
        device.close()


def _figures(
    plan: _Plan, served: Mapping[str, Sequence[_Served]], *, link_s: float, bound_count: int
) -> dict[str, object]:
    compute_s = len(plan.steps) * plan.step_s

    def ratio_to_baseline(name: str) -> float:
        rounds = zip(served[name], served["baseline"], strict=True)
        return median(one.tokens_per_s / baseline.tokens_per_s for one, baseline in rounds)

    def middle(name: str, figure: str) -> float:
        return median(one.figures[figure] for one in served[name])

    def stall(name: str) -> float:
        return median(one.stall_fraction for one in served[name])

    baseline_peak = max(one.peak_count for one in served["baseline"])
    moved_count = middle("agent", "moved_blocks")
    wall_s = median(one.run.wall_s for one in served["agent"])
    all_runs = [one.run for each in served.values() for one in each]
    figures: dict[str, Any] = {
        "peak_vs_baseline": max(one.peak_count for one in served["agent"]) / baseline_peak,
        "throughput_vs_baseline": ratio_to_baseline("agent"),
        "prefetch_hit_rate": middle("agent", "prefetch_hit_rate"),
        "stall_fraction": stall("agent"),
        "naive_peak_vs_baseline": max(one.peak_count for one in served["naive"]) / baseline_peak,
        "naive_throughput_vs_baseline": ratio_to_baseline("naive"),
        "naive_stall_fraction": stall("naive"),
    }
    figures |= {f"{name}_tokens_per_s": median(one.tokens_per_s for one in each) for name, each in served.items()}
    figures |= {
        "link_utilisation": moved_count * link_s / wall_s,
        "naive_link_utilisation": median(
            one.figures["moved_blocks"] * link_s / one.run.wall_s for one in served["naive"]
        ),
        "moved_vs_clairvoyant": moved_count / bound_count if bound_count else 1.0,
        "clairvoyant_bytes": bound_count * plan.block_bytes,
        "clairvoyant_link_vs_compute": bound_count * link_s / compute_s,
        "naive_moved_bytes": middle("naive", "moved_blocks") * plan.block_bytes,
    }
    figures |= {name: middle("agent", name) for name in served["agent"][0].figures if name != "prefetch_hit_rate"}
    figures |= {
        "recomputed_blocks": max(one.run.recomputed_count for one in served["agent"]),
        "checked_blocks": sum(run.checked_count for run in all_runs),
        "host_overrun_fraction": median(run.overrun_s / run.wall_s for run in all_runs),
        "link_block_ms": link_s * 1e3,
        "link_block_ms_asked": plan.link_block_s * 1e3,
        "step_ms": plan.step_s * 1e3,
        "steps": len(plan.steps),
        "sequences": len(plan.sessions.sessions),
        "baseline_blocks": baseline_peak,
        "vram_blocks": plan.slot_count,
        "schedule": plan.sessions.source,
    }
    return {name: rounded(value) if isinstance(value, float) else value for name, value in figures.items()}
