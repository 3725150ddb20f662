"""What Prometheus sees: the core's own figures, read when it scrapes, so nothing is counted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from wsgiref.simple_server import WSGIServer

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from kvstore import __version__
from kvstore_client.logs import dropped_line_count
from kvstore_server.core.disk_health import DiskFault
from kvstore_server.core.in_flight import InFlight
from kvstore_server.core.store import StoreCore
from kvstore_server.nvme.figures import STATES, NvmeFigures
from kvstore_server.shm.arenas import Arenas

CAUSES = ("capacity", "policy", "admission", "identity", "failure")

Labels = dict[str, str]
Samples = list[tuple[Labels, float]]


class Attached(Protocol):
    """Who is attached to the slab socket."""

    @property
    def session_count(self) -> int: ...

    @property
    def connection_count(self) -> int: ...


class Observed(NamedTuple):
    """What the figures are read from."""

    core: StoreCore
    arenas: Arenas
    in_flight: InFlight
    slab: Attached
    nvme: Callable[[], NvmeFigures | None] = lambda: None
    """Called once per scrape, from the scraping thread; None: there is no NVMe tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One exported metric: `samples` reads it, as (labels, value) pairs."""

    name: str
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    help: str
    labels: tuple[str, ...] = ()
    samples: Callable[[Observed], Samples]


def _one(read: Callable[[Observed], float], **labels: str) -> Callable[[Observed], Samples]:
    return lambda store: [(labels, read(store))]


def _nvme(read: Callable[[NvmeFigures], Samples]) -> Callable[[Observed], Samples]:
    """No samples where there is no NVMe tier."""

    def samples(store: Observed) -> Samples:
        figures = store.nvme()
        return [] if figures is None else read(figures)

    return samples


def _one_nvme(read: Callable[[NvmeFigures], float], **labels: str) -> Callable[[Observed], Samples]:
    return _nvme(lambda figures: [(labels, read(figures))])


def _both(first: Callable[[Observed], Samples], second: Callable[[Observed], Samples]) -> Callable[[Observed], Samples]:
    return lambda store: first(store) + second(store)


def _policy(tier: str, configured: str, in_force: str) -> tuple[Labels, float]:
    return {"tier": tier, "configured": configured, "in_force": in_force}, 1


SPECS: tuple[MetricSpec, ...] = (
    MetricSpec(
        name="kvstore_store_capacity_bytes",
        kind=GaugeMetricFamily,
        help="Hard cap of a tier.",
        labels=("tier",),
        samples=_both(
            _one(lambda store: store.core.space.capacity_bytes, tier="memory"),
            _one_nvme(lambda nvme: nvme.capacity_bytes, tier="nvme"),
        ),
    ),
    MetricSpec(
        name="kvstore_store_ready_bytes",
        kind=GaugeMetricFamily,
        help="Part of the cap that is faulted in and in service; reaches the cap soon after a start.",
        labels=("tier",),
        samples=_one(lambda store: store.core.space.ready_bytes, tier="memory"),
    ),
    MetricSpec(
        name="kvstore_store_used_bytes",
        kind=GaugeMetricFamily,
        help="Bytes of slots that hold blocks or reservations.",
        labels=("tier",),
        samples=_both(
            _one(lambda store: store.core.space.used_bytes, tier="memory"),
            _one_nvme(lambda nvme: nvme.used_bytes, tier="nvme"),
        ),
    ),
    MetricSpec(
        name="kvstore_store_blocks",
        kind=GaugeMetricFamily,
        help="Readable blocks.",
        labels=("tier",),
        samples=_both(
            _one(lambda store: store.core.block_count, tier="memory"),
            _one_nvme(lambda nvme: nvme.block_count, tier="nvme"),
        ),
    ),
    MetricSpec(
        name="kvstore_store_policy",
        kind=GaugeMetricFamily,
        help="1 for the policy by which blocks leave a tier, as configured and as in force: phix follows lru while "
        "that does better.",
        labels=("tier", "configured", "in_force"),
        samples=_both(
            lambda store: [_policy("memory", store.core.policy, store.core.policy_in_force)],
            _nvme(lambda nvme: [_policy("nvme", nvme.policy, nvme.policy_in_force)] if nvme.policy else []),
        ),
    ),
    MetricSpec(
        name="kvstore_store_leases",
        kind=GaugeMetricFamily,
        help="Leases that are neither released nor expired; returns to 0 when no client holds a prefix.",
        samples=_one(lambda store: store.core.lease_count),
    ),
    MetricSpec(
        name="kvstore_store_reservations",
        kind=GaugeMetricFamily,
        help="Slots being written; returns to 0 when no client writes.",
        samples=_one(lambda store: store.core.reservation_count),
    ),
    MetricSpec(
        name="kvstore_store_stranded_slots",
        kind=GaugeMetricFamily,
        help="Slots that are given to nobody because something may still be written into them: of expired reservations "
        "until their client is done or gone, of NIXL until nothing can be on its way any more.",
        samples=_one(lambda store: store.core.stranded_count),
    ),
    MetricSpec(
        name="kvstore_store_stranded_reservations_total",
        kind=CounterMetricFamily,
        help="Reservations that ended while something may still have been written into the slot.",
        samples=_one(lambda store: store.core.counters.stranded_reservation_count),
    ),
    MetricSpec(
        name="kvstore_slab_sessions",
        kind=GaugeMetricFamily,
        help="Clients attached to the slab socket; one that reads and writes may have two sessions.",
        samples=_one(lambda store: store.slab.session_count),
    ),
    MetricSpec(
        name="kvstore_slab_connections",
        kind=GaugeMetricFamily,
        help="Connections to the slab socket, sessions included.",
        samples=_one(lambda store: store.slab.connection_count),
    ),
    MetricSpec(
        name="kvstore_store_in_flight_bytes",
        kind=GaugeMetricFamily,
        help="Bytes on their way over streams and the data port.",
        samples=_one(lambda store: store.in_flight.total_bytes),
    ),
    MetricSpec(
        name="kvstore_store_waiting_loads",
        kind=GaugeMetricFamily,
        help="Loads that wait for their turn because too many bytes are on their way.",
        samples=_one(lambda store: store.in_flight.waiting_count),
    ),
    MetricSpec(
        name="kvstore_memory_page_bytes",
        kind=GaugeMetricFamily,
        help="Page size of the arena, by kind of memory; copies on pages of 4 KiB are several times slower.",
        labels=("kind",),
        samples=lambda store: [({"kind": store.arenas.kind}, store.arenas.page_bytes)],
    ),
    MetricSpec(
        name="kvstore_store_namespaces",
        kind=GaugeMetricFamily,
        help="Namespaces opened since the start.",
        samples=_one(lambda store: store.core.namespace_count),
    ),
    MetricSpec(
        name="kvstore_store_lookup_blocks_total",
        kind=CounterMetricFamily,
        help="Blocks asked for by lookups and acquires, by answer.",
        labels=("outcome",),
        samples=lambda store: [
            ({"outcome": "hit"}, store.core.counters.hit_count),
            ({"outcome": "pending"}, store.core.counters.pending_count),
            ({"outcome": "miss"}, store.core.counters.miss_count),
        ],
    ),
    MetricSpec(
        name="kvstore_store_missed_blocks_total",
        kind=CounterMetricFamily,
        help="Missing blocks that lookups and acquires asked for, by cause, some of them estimated: new, or why those "
        "are not there that were asked for or stored before (docs/hints.md). All others had been asked for before, and "
        "never offered.",
        labels=("cause",),
        samples=lambda store: [
            ({"cause": cause}, getattr(store.core.reuse.total, f"{cause}_count")) for cause in ("new", *CAUSES)
        ],
    ),
    MetricSpec(
        name="kvstore_store_recent_hit_ratio",
        kind=GaugeMetricFamily,
        help="Of the blocks asked for in the last one to two hours, the share that was there, and the share that a "
        "store without limits would have had.",
        labels=("of",),
        samples=lambda store: [
            ({"of": "this_store"}, store.core.reuse.recent.hit_ratio),
            ({"of": "ceiling"}, store.core.reuse.recent.ceiling_ratio),
        ],
    ),
    MetricSpec(
        name="kvstore_store_recent_gap_ratio",
        kind=GaugeMetricFamily,
        help="What lies between these two, by cause: too little room, the policy, what was not admitted, another "
        "namespace that has it, failures, and what nobody offered.",
        labels=("cause",),
        samples=lambda store: [
            ({"cause": cause}, share) for cause, share in store.core.reuse.recent.gap_ratios().items()
        ],
    ),
    MetricSpec(
        name="kvstore_store_read_blocks_total",
        kind=CounterMetricFamily,
        help="Blocks asked for by reads, by outcome; a client may read without having looked up.",
        labels=("outcome",),
        samples=lambda store: [
            ({"outcome": "hit"}, store.core.counters.sent_count),
            ({"outcome": "miss"}, store.core.counters.unsent_count),
        ],
    ),
    MetricSpec(
        name="kvstore_store_committed_blocks_total",
        kind=CounterMetricFamily,
        help="Blocks that were written, verified and made readable.",
        samples=_one(lambda store: store.core.counters.committed_count),
    ),
    MetricSpec(
        name="kvstore_store_evicted_blocks_total",
        kind=CounterMetricFamily,
        help="Blocks that left a tier to make room.",
        labels=("tier",),
        samples=_both(
            _one(lambda store: store.core.counters.evicted_count, tier="memory"),
            _one_nvme(lambda nvme: nvme.evicted_count, tier="nvme"),
        ),
    ),
    MetricSpec(
        name="kvstore_store_refused_blocks_total",
        kind=CounterMetricFamily,
        help="Blocks that were not admitted, those behind them included, by reason.",
        labels=("reason",),
        samples=lambda store: [
            ({"reason": "full"}, store.core.counters.refused_full_count),
            ({"reason": "draining"}, store.core.counters.refused_draining_count),
            ({"reason": "overloaded"}, store.core.counters.refused_overloaded_count),
        ],
    ),
    MetricSpec(
        name="kvstore_store_expired_total",
        kind=CounterMetricFamily,
        help="Leases and reservations whose owner let their time pass, and blocks that were unused for as long as a "
        "hint gave them.",
        labels=("what",),
        samples=_both(
            lambda store: [
                ({"what": "lease"}, store.core.counters.expired_lease_count),
                ({"what": "reservation"}, store.core.counters.expired_reservation_count),
                ({"what": "block"}, store.core.counters.expired_block_count),
            ],
            _one_nvme(lambda nvme: nvme.expired_count, what="nvme_block"),
        ),
    ),
    MetricSpec(
        name="kvstore_store_corrupt_blocks_total",
        kind=CounterMetricFamily,
        help="Blocks that did not verify and were dropped, by the hop that was checked.",
        labels=("hop",),
        samples=_both(
            lambda store: [
                ({"hop": "commit"}, store.core.counters.corrupt_on_commit_count),
                ({"hop": "memory"}, store.core.counters.corrupt_in_memory_count),
            ],
            _one_nvme(lambda nvme: nvme.corrupt_count, hop="nvme"),
        ),
    ),
    MetricSpec(
        name="kvstore_store_read_bytes_total",
        kind=CounterMetricFamily,
        help="Bytes sent to readers, envelopes included.",
        samples=_one(lambda store: store.core.counters.read_bytes),
    ),
    MetricSpec(
        name="kvstore_store_written_bytes_total",
        kind=CounterMetricFamily,
        help="Bytes that landed in slots, envelopes included.",
        samples=_one(lambda store: store.core.counters.written_bytes),
    ),
    MetricSpec(
        name="kvstore_store_log_lines_dropped_total",
        kind=CounterMetricFamily,
        help="Log lines that could not be written: nobody reads stderr, or its disk is full.",
        samples=_one(lambda _: dropped_line_count()),
    ),
    MetricSpec(
        name="kvstore_nvme_state",
        kind=GaugeMetricFamily,
        help="1 for the state that the NVMe tier is in, ok, degraded or recovering, and 0 for the others; "
        "the log says why.",
        labels=("state",),
        samples=_nvme(lambda nvme: [({"state": state}, state == nvme.state) for state in STATES]),
    ),
    MetricSpec(
        name="kvstore_nvme_direct",
        kind=GaugeMetricFamily,
        help="1 where blocks bypass the page cache (O_DIRECT), 0 where the file system cannot: several times slower.",
        samples=_one_nvme(lambda nvme: nvme.is_direct),
    ),
    MetricSpec(
        name="kvstore_nvme_disk_bytes",
        kind=GaugeMetricFamily,
        help="What segments and index take on disk; never above the tier's cap.",
        samples=_one_nvme(lambda nvme: nvme.disk_bytes),
    ),
    MetricSpec(
        name="kvstore_nvme_segments",
        kind=GaugeMetricFamily,
        help="Segment files that have been made.",
        samples=_one_nvme(lambda nvme: nvme.segment_count),
    ),
    MetricSpec(
        name="kvstore_nvme_segments_max",
        kind=GaugeMetricFamily,
        help="Segment files that fit under the cap.",
        samples=_one_nvme(lambda nvme: nvme.segment_count_max),
    ),
    MetricSpec(
        name="kvstore_nvme_queue_bytes",
        kind=GaugeMetricFamily,
        help="Memory of blocks that are on their way to the disk.",
        samples=_one_nvme(lambda nvme: nvme.queue_bytes),
    ),
    MetricSpec(
        name="kvstore_nvme_hit_blocks_total",
        kind=CounterMetricFamily,
        help="Blocks that lookups and acquires asked for, that memory did not have and the disk did.",
        samples=_one_nvme(lambda nvme: nvme.hit_count),
    ),
    MetricSpec(
        name="kvstore_nvme_moved_blocks_total",
        kind=CounterMetricFamily,
        help="Blocks that were demoted to the disk or promoted from it.",
        labels=("direction",),
        samples=_nvme(
            lambda nvme: [
                ({"direction": "demoted"}, nvme.demoted_count),
                ({"direction": "promoted"}, nvme.promoted_count),
            ]
        ),
    ),
    MetricSpec(
        name="kvstore_nvme_moved_bytes_total",
        kind=CounterMetricFamily,
        help="Bytes of the blocks that were demoted or promoted.",
        labels=("direction",),
        samples=_nvme(
            lambda nvme: [
                ({"direction": "demoted"}, nvme.demoted_bytes),
                ({"direction": "promoted"}, nvme.promoted_bytes),
            ]
        ),
    ),
    MetricSpec(
        name="kvstore_nvme_undemoted_blocks_total",
        kind=CounterMetricFamily,
        help="Blocks that were to go to the disk and were dropped: too many were on their way, or writing failed.",
        samples=_one_nvme(lambda nvme: nvme.undemoted_count),
    ),
    MetricSpec(
        name="kvstore_nvme_dropped_blocks_total",
        kind=CounterMetricFamily,
        help="Blocks that memory evicted and the disk did not take, by reason; docs/nvme.md lists them.",
        labels=("reason",),
        samples=_nvme(
            lambda nvme: [({"reason": reason}, count) for reason, count in sorted(nvme.dropped_counts.items())]
        ),
    ),
    MetricSpec(
        name="kvstore_nvme_faults_total",
        kind=CounterMetricFamily,
        help="Faults of the device, the folder or the index, by kind; docs/nvme.md says of each what to do.",
        labels=("fault",),
        samples=_nvme(
            lambda nvme: [({"fault": fault.value}, nvme.fault_counts.get(fault.value, 0)) for fault in DiskFault]
        ),
    ),
    MetricSpec(
        name="kvstore_nvme_device_bytes_total",
        kind=CounterMetricFamily,
        help="Bytes read from the device and written to it: blocks, their padding to whole pages and segment headers; "
        "without the index.",
        labels=("direction",),
        samples=_nvme(
            lambda nvme: [
                ({"direction": "read"}, nvme.device_read_bytes),
                ({"direction": "written"}, nvme.device_written_bytes),
            ]
        ),
    ),
    MetricSpec(
        name="kvstore_nvme_payload_written_bytes_total",
        kind=CounterMetricFamily,
        help="Bytes of blocks written to the device, as stored, compressed or not.",
        samples=_one_nvme(lambda nvme: nvme.payload_written_bytes),
    ),
    MetricSpec(
        name="kvstore_nvme_write_amplification",
        kind=GaugeMetricFamily,
        help="Bytes written to the device for each byte of a block since the start; 1 is the least there can be.",
        samples=_one_nvme(lambda nvme: nvme.write_amplification),
    ),
    MetricSpec(
        name="kvstore_nvme_read_latency_seconds",
        kind=GaugeMetricFamily,
        help="What a read of the disk is taken to cost whatever its size, by those so far; with the rate below it "
        "decides what a lookup that names a recompute cost is offered.",
        samples=_one_nvme(lambda nvme: nvme.read_latency_s),
    ),
    MetricSpec(
        name="kvstore_nvme_read_bytes_per_second",
        kind=GaugeMetricFamily,
        help="Rate at which blocks are taken to come from the disk, by the reads so far.",
        samples=_one_nvme(lambda nvme: nvme.read_bytes_per_s),
    ),
    MetricSpec(
        name="kvstore_nvme_prefetch_blocks_total",
        kind=CounterMetricFamily,
        help="Blocks of prefetches that were started, or refused because too much was under way; of those started: "
        "there when they were used, asked for while on their way, or gone again unused.",
        labels=("outcome",),
        samples=_nvme(
            lambda nvme: [
                ({"outcome": "started"}, nvme.prefetch_started_count),
                ({"outcome": "refused"}, nvme.prefetch_refused_count),
                ({"outcome": "useful"}, nvme.prefetch_useful_count),
                ({"outcome": "late"}, nvme.prefetch_late_count),
                ({"outcome": "wasted"}, nvme.prefetch_wasted_count),
            ]
        ),
    ),
    MetricSpec(
        name="kvstore_nvme_recovery_seconds",
        kind=GaugeMetricFamily,
        help="From the tier's start until its blocks could be found; depends on their number, not on their bytes.",
        samples=_one_nvme(lambda nvme: nvme.recovery_s),
    ),
    MetricSpec(
        name="kvstore_nvme_recovered_blocks",
        kind=GaugeMetricFamily,
        help="Index records at the last start, by whether they name a place where a block can be.",
        labels=("outcome",),
        samples=_nvme(
            lambda nvme: [
                ({"outcome": "kept"}, nvme.recovered_count),
                ({"outcome": "refused"}, nvme.refused_record_count),
            ]
        ),
    ),
)


class StoreCollector(Collector):
    """Reads the core from the scraping thread: single numbers, each consistent in itself."""

    def __init__(self, store: Observed) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("kvstore_store_build", "Version of the daemon.", value={"version": __version__})
        nvme = self._store.nvme()
        store = self._store._replace(nvme=lambda: nvme)
        for spec in SPECS:
            family = spec.kind(spec.name, spec.help, labels=spec.labels)
            for labels, value in spec.samples(store):
                family.add_metric([labels[name] for name in spec.labels], value)
            if family.samples:
                yield family


class MetricsServer:
    """`/metrics` on a port of its own, in a thread of its own."""

    def __init__(self, store: Observed, *, host: str, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(StoreCollector(store))
        prometheus_client.ProcessCollector(registry=registry)
        self._server: WSGIServer
        self._thread: Any
        self._server, self._thread = prometheus_client.start_http_server(port, addr=host, registry=registry)

    @property
    def port(self) -> int:
        return self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
