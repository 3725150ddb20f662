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
from kvstore_server.core.in_flight import InFlight
from kvstore_server.core.store import StoreCore
from kvstore_server.shm.arenas import Arenas

Labels = dict[str, str]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One exported metric: `samples` reads it, as (labels, value) pairs."""

    name: str
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    help: str
    labels: tuple[str, ...] = ()
    samples: Callable[[Observed], list[tuple[Labels, float]]]


def _one(read: Callable[[Observed], float], **labels: str) -> Callable[[Observed], list[tuple[Labels, float]]]:
    return lambda store: [(labels, read(store))]


SPECS: tuple[MetricSpec, ...] = (
    MetricSpec(
        name="kvstore_store_capacity_bytes",
        kind=GaugeMetricFamily,
        help="Hard cap of a tier.",
        labels=("tier",),
        samples=_one(lambda store: store.core.space.capacity_bytes, tier="memory"),
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
        samples=_one(lambda store: store.core.space.used_bytes, tier="memory"),
    ),
    MetricSpec(
        name="kvstore_store_blocks",
        kind=GaugeMetricFamily,
        help="Readable blocks.",
        labels=("tier",),
        samples=_one(lambda store: store.core.block_count, tier="memory"),
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
        samples=_one(lambda store: store.core.counters.evicted_count, tier="memory"),
    ),
    MetricSpec(
        name="kvstore_store_refused_blocks_total",
        kind=CounterMetricFamily,
        help="Blocks that were not admitted, by reason.",
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
        help="Leases and reservations whose owner let their time pass.",
        labels=("what",),
        samples=lambda store: [
            ({"what": "lease"}, store.core.counters.expired_lease_count),
            ({"what": "reservation"}, store.core.counters.expired_reservation_count),
        ],
    ),
    MetricSpec(
        name="kvstore_store_corrupt_blocks_total",
        kind=CounterMetricFamily,
        help="Blocks that did not verify and were dropped, by the hop that was checked.",
        labels=("hop",),
        samples=lambda store: [
            ({"hop": "commit"}, store.core.counters.corrupt_on_commit_count),
            ({"hop": "memory"}, store.core.counters.corrupt_in_memory_count),
        ],
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
)


class StoreCollector(Collector):
    """Reads the core from the scraping thread: single numbers, each consistent in itself."""

    def __init__(self, store: Observed) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("kvstore_store_build", "Version of the daemon.", value={"version": __version__})
        for spec in SPECS:
            family = spec.kind(spec.name, spec.help, labels=spec.labels)
            for labels, value in spec.samples(self._store):
                family.add_metric([labels[name] for name in spec.labels], value)
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
