"""The agent's figures for Prometheus, read from its own counters when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpu_agent.core.link import Direction, LinkController, LinkDecision, LinkReason, Relief
from gpu_agent.counters import Counters
from kvstore.messages import AgentStatus
from kvstore_client.logs import dropped_line_count


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigures:
    """What is known of the link, and what is done about it."""

    utilisation: float = 0.0
    queue_s: float = 0.0
    bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """By direction, while it moved something; nothing of one that has not."""
    decision: LinkDecision | None = None
    """None: no engine has begun."""

    @classmethod
    def of(cls, link: LinkController) -> LinkFigures:
        rates = {direction.value: link.bytes_per_s(direction) for direction in Direction}
        return cls(
            utilisation=link.utilisation,
            queue_s=link.queue_s,
            bytes_per_s={name: rate for name, rate in rates.items() if rate is not None},
            decision=link.decide(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSnapshot:
    status: AgentStatus
    counters: Counters
    migrating_count: int = 0
    is_migrator_alive: bool = True
    link: LinkFigures = LinkFigures()
    received_corrupt_count: int = 0
    """Blocks that engines sent to a sidecar and that did not verify."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One time series, or one per value of `label`; docs/metrics.md is generated from `METRICS`."""

    name: str
    help: str
    read: Callable[[AgentSnapshot], float | dict[str, float]]
    label: str | None = None

    @property
    def is_counter(self) -> bool:
        return self.name.endswith("_total")

    def collect(self, snapshot: AgentSnapshot) -> Metric:
        labels = [self.label] if self.label else []
        family: CounterMetricFamily | GaugeMetricFamily
        if self.is_counter:
            family = CounterMetricFamily(self.name.removesuffix("_total"), self.help, labels=labels)
        else:
            family = GaugeMetricFamily(self.name, self.help, labels=labels)
        value = self.read(snapshot)
        for key, number in value.items() if isinstance(value, dict) else [(None, value)]:
            family.add_metric([] if key is None else [key], number)
        return family


def _by_namespace(snapshot: AgentSnapshot, name: str) -> dict[str, float]:
    return {one.namespace_id.hex()[:16]: getattr(one, name) for one in snapshot.status.namespaces}


METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(
        name="kvstore_agent_capacity_bytes",
        help="Cap of the VRAM pool; used bytes never pass it.",
        read=lambda s: s.status.capacity_bytes,
    ),
    MetricSpec(
        name="kvstore_agent_used_bytes",
        help="Bytes of slots that hold blocks or are being read.",
        read=lambda s: s.status.used_bytes,
    ),
    MetricSpec(
        name="kvstore_agent_peak_bytes",
        help="Most bytes ever used.",
        read=lambda s: s.status.peak_bytes,
    ),
    MetricSpec(
        name="kvstore_agent_resident_blocks",
        help="Blocks in the pool, those on their way in or out included.",
        read=lambda s: s.status.resident_count,
    ),
    MetricSpec(
        name="kvstore_agent_migrating_blocks",
        help="Blocks that wait for migration or are under way.",
        read=lambda s: s.migrating_count,
    ),
    MetricSpec(
        name="kvstore_agent_migrator_up",
        help="1 while the background thread lives; 0 means that nothing is offloaded any more.",
        read=lambda s: float(s.is_migrator_alive),
    ),
    MetricSpec(
        name="kvstore_agent_engine_steps_total",
        help="Engine steps.",
        read=lambda s: s.status.step,
    ),
    MetricSpec(
        name="kvstore_agent_stored_blocks_total",
        help="Blocks that the engine stored, by result.",
        label="result",
        read=lambda s: {"stored": s.counters.stored_count, "refused": s.counters.refused_count},
    ),
    MetricSpec(
        name="kvstore_agent_loaded_blocks_total",
        help="Blocks that the engine asked for, by where they were found.",
        label="source",
        read=lambda s: {
            "vram": s.counters.hit_count,
            "store": s.counters.reloaded_count,
            "none": s.counters.missed_count,
        },
    ),
    MetricSpec(
        name="kvstore_agent_migrated_blocks_total",
        help="Blocks that moved between VRAM and the store, by direction.",
        label="direction",
        read=lambda s: {"d2h": s.counters.migrated_count, "h2d": s.counters.reloaded_count},
    ),
    MetricSpec(
        name="kvstore_agent_migrated_bytes_total",
        help="Bytes that moved between VRAM and the store, by direction; blocks that the store still had move none.",
        label="direction",
        read=lambda s: {"d2h": s.counters.offloaded_bytes, "h2d": s.counters.loaded_bytes},
    ),
    MetricSpec(
        name="kvstore_agent_direct_bytes_total",
        help="Migrated bytes that the device moved to or from the store's memory itself, without a copy by the CPU.",
        label="direction",
        read=lambda s: {"d2h": s.counters.direct_offloaded_bytes, "h2d": s.counters.direct_loaded_bytes},
    ),
    MetricSpec(
        name="kvstore_agent_migration_batches_total",
        help="Batches offloaded.",
        read=lambda s: s.counters.migration_batch_count,
    ),
    MetricSpec(
        name="kvstore_agent_migration_refused_blocks_total",
        help="Blocks that the store did not take.",
        read=lambda s: s.counters.migration_refused_count,
    ),
    MetricSpec(
        name="kvstore_agent_lost_blocks_total",
        help="Blocks dropped under pressure without a known copy in the store.",
        read=lambda s: s.counters.lost_count,
    ),
    MetricSpec(
        name="kvstore_agent_corrupt_blocks_total",
        help="Blocks that did not verify and were not taken, by the hop that was checked.",
        label="hop",
        read=lambda s: {"engine": s.received_corrupt_count, "store": s.counters.corrupt_count},
    ),
    MetricSpec(
        name="kvstore_agent_store_errors_total",
        help="Calls to the store that failed.",
        read=lambda s: s.counters.daemon_error_count,
    ),
    MetricSpec(
        name="kvstore_agent_stalls_total",
        help="Calls of the engine that waited for room.",
        read=lambda s: s.counters.stall_count,
    ),
    MetricSpec(
        name="kvstore_agent_stall_seconds_total",
        help="Time that the engine waited for room.",
        read=lambda s: s.counters.stall_s,
    ),
    MetricSpec(
        name="kvstore_agent_pin_stalls_total",
        help="Pins that waited for blocks.",
        read=lambda s: s.counters.pin_stall_count,
    ),
    MetricSpec(
        name="kvstore_agent_pin_stall_seconds_total",
        help="Time that the engine waited for the blocks of sequences that it pinned.",
        read=lambda s: s.counters.pin_stall_s,
    ),
    MetricSpec(
        name="kvstore_agent_prefetched_blocks_total",
        help="Blocks brought ahead of need: there in time, on their way when needed, or gone again unused.",
        label="outcome",
        read=lambda s: {
            "hit": s.counters.prefetch_hit_count,
            "late": s.counters.prefetch_late_count,
            "wasted": s.counters.prefetch_wasted_count,
        },
    ),
    MetricSpec(
        name="kvstore_agent_fetched_on_demand_blocks_total",
        help="Blocks that a pin needed, and that nobody had begun to fetch.",
        read=lambda s: s.counters.fetched_on_demand_count,
    ),
    MetricSpec(
        name="kvstore_agent_remigrated_blocks_total",
        help="Blocks that left again in the cool-down after they had come back: thrash.",
        read=lambda s: s.counters.remigrated_count,
    ),
    MetricSpec(
        name="kvstore_agent_namespace_capacity_bytes",
        help="Cap of each namespace's pool, by the first 16 digits of its id; a sidecar has 32 at most.",
        label="namespace",
        read=lambda s: _by_namespace(s, "capacity_bytes"),
    ),
    MetricSpec(
        name="kvstore_agent_namespace_used_bytes",
        help="Bytes of slots that hold blocks or are being read, by namespace.",
        label="namespace",
        read=lambda s: _by_namespace(s, "used_bytes"),
    ),
    MetricSpec(
        name="kvstore_agent_namespace_engines",
        help="Engines that are attached, by namespace.",
        label="namespace",
        read=lambda s: _by_namespace(s, "session_count"),
    ),
    MetricSpec(
        name="kvstore_agent_namespace_granted_blocks",
        help="Slots that attached engines may be copying into or from, by namespace.",
        label="namespace",
        read=lambda s: _by_namespace(s, "granted_count"),
    ),
    MetricSpec(
        name="kvstore_agent_link_utilisation_ratio",
        help="Share of the last second or so in which the copy stream moved blocks, as of the last engine step.",
        read=lambda s: s.link.utilisation,
    ),
    MetricSpec(
        name="kvstore_agent_link_queue_seconds",
        help="How long the copy stream needs for what is queued.",
        read=lambda s: s.link.queue_s,
    ),
    MetricSpec(
        name="kvstore_agent_link_bytes_per_second",
        help="What the copy stream moves while it moves something, by direction.",
        label="direction",
        read=lambda s: dict(s.link.bytes_per_s),
    ),
    MetricSpec(
        name="kvstore_agent_link_batch_blocks",
        help="Blocks per migration batch that the link controller has chosen.",
        read=lambda s: 0 if s.link.decision is None else s.link.decision.batch_count,
    ),
    MetricSpec(
        name="kvstore_agent_link_relief",
        help="1 for what is done about a busy link; each measure includes those before it.",
        label="measure",
        read=lambda s: {
            one.name.lower(): float(s.link.decision is not None and s.link.decision.relief is one) for one in Relief
        },
    ),
    MetricSpec(
        name="kvstore_agent_link_reason",
        help="1 for why that was decided.",
        label="reason",
        read=lambda s: {
            one.value: float(s.link.decision is not None and s.link.decision.reason is one) for one in LinkReason
        },
    ),
    MetricSpec(
        name="kvstore_agent_log_lines_dropped_total",
        help="Log lines that could not be written: nobody reads stderr, or its disk is full.",
        read=lambda _: dropped_line_count(),
    ),
)


class _AgentCollector(Collector):
    def __init__(self, snapshot: Callable[[], AgentSnapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot()
        for spec in METRICS:
            yield spec.collect(snapshot)


def agent_registry(snapshot: Callable[[], AgentSnapshot]) -> CollectorRegistry:
    """A registry of its own, so that an agent inside an engine leaves the engine's metrics alone.

    `snapshot` is asked at every scrape.
    """
    registry = CollectorRegistry()
    registry.register(_AgentCollector(snapshot))
    return registry
