"""What Prometheus sees of the tiers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from kvstore.messages import BlockState
from kvstore_server.core.disk_health import DiskFault
from kvstore_server.core.fates import Fate
from kvstore_server.core.tenants import DEFAULT_TENANT, scoped
from kvstore_server.nvme.figures import NvmeFigures
from kvstore_server.obs.metrics import Observed, StoreCollector
from kvstore_server.shm.arenas import Arenas
from tests.server.builders import SMALL, make_arenas, make_core, make_in_flight, packed

FIGURES = NvmeFigures(
    state="degraded",
    reason="enospc: nothing is written",
    is_direct=True,
    capacity_bytes=1000,
    disk_bytes=900,
    used_bytes=800,
    segment_count=3,
    segment_count_max=4,
    block_count=5,
    queue_bytes=6,
    demoted_count=7,
    demoted_bytes=70,
    promoted_count=8,
    promoted_bytes=80,
    hit_count=9,
    undemoted_count=10,
    evicted_count=11,
    dropped_counts={"budget": 12, "degraded": 13},
    corrupt_count=14,
    fault_counts={"enospc": 15},
    device_written_bytes=1100,
    payload_written_bytes=1000,
    device_read_bytes=16,
    read_latency_s=0.002,
    read_bytes_per_s=17.0,
    policy="phix",
    policy_in_force="lru",
    admission="worth",
    expired_count=22,
    prefetch_started_count=18,
    prefetch_refused_count=19,
    recovery_s=0.25,
    recovered_count=20,
    refused_record_count=21,
)


class Nobody:
    session_count = 0
    connection_count = 0


@pytest.fixture
def arenas() -> Iterator[Arenas]:
    arenas = make_arenas(slab_count=4, slab_bytes=4 * 4096)
    yield arenas
    arenas.close()


Scrape = Callable[[NvmeFigures | None], dict[str, dict[str, float]]]


@pytest.fixture
def scrape(arenas: Arenas) -> Scrape:
    """Samples by metric, and there by the value of their label ('' for none)."""

    def scrape(figures: NvmeFigures | None) -> dict[str, dict[str, float]]:
        observed = Observed(make_core(), arenas, make_in_flight(), Nobody(), nvme=lambda: figures)
        registry = CollectorRegistry()
        registry.register(StoreCollector(observed))
        found: dict[str, dict[str, float]] = {}
        text = prometheus_client.generate_latest(registry).decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, {})[" ".join(sample.labels.values())] = sample.value
        return found

    return scrape


def test_without_an_nvme_tier_nothing_is_said_of_one(scrape: Scrape) -> None:
    found = scrape(None)
    assert not [name for name in found if "nvme" in name]
    assert found["kvstore_store_capacity_bytes"] == {"memory": 4 * 4 * 4096}


def test_what_every_tier_has_is_told_apart_by_the_tier(scrape: Scrape) -> None:
    found = scrape(FIGURES)
    assert found["kvstore_store_capacity_bytes"] == {"memory": 4 * 4 * 4096, "nvme": 1000}
    assert found["kvstore_store_used_bytes"] == {"memory": 0, "nvme": 800}
    assert found["kvstore_store_blocks"] == {"memory": 0, "nvme": 5}
    assert found["kvstore_store_evicted_blocks_total"] == {"memory": 0, "nvme": 11}
    assert found["kvstore_store_corrupt_blocks_total"] == {"commit": 0, "memory": 0, "nvme": 14}


def test_the_policy_of_each_tier_is_exported_as_configured_and_as_in_force(scrape: Scrape) -> None:
    # Labels come by name: configured, in_force, tier.
    assert scrape(FIGURES)["kvstore_store_policy"] == {"lru lru memory": 1, "phix lru nvme": 1}
    assert scrape(None)["kvstore_store_policy"] == {"lru lru memory": 1}
    closed = NvmeFigures(state="degraded", reason="eio", capacity_bytes=1)
    assert scrape(closed)["kvstore_store_policy"] == {"lru lru memory": 1}
    assert scrape(FIGURES)["kvstore_store_expired_total"]["nvme_block"] == 22


def test_the_ceiling_of_the_hit_rate_and_the_causes_of_the_gap_are_exported(arenas: Arenas) -> None:
    core = make_core()
    namespace_id = scoped(DEFAULT_TENANT, SMALL.id)
    states = bytes([BlockState.HIT] * 6 + [BlockState.MISS] * 2)
    core.reuse.left(namespace_id, packed(7), Fate.EVICTED)
    core.reuse.looked_up(namespace_id, packed(*range(1, 9)), states, block_bytes=4096, now_s=1.0)
    core.reuse.tick(now_s=2.0)
    registry = CollectorRegistry()
    registry.register(StoreCollector(Observed(core, arenas, make_in_flight(), Nobody())))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("kvstore_store_recent_hit_ratio", of="this_store") == 0.75
    assert value("kvstore_store_recent_hit_ratio", of="ceiling") == 0.875
    assert value("kvstore_store_missed_blocks_total", cause="new") == 1
    causes = ("capacity", "policy", "admission", "identity", "failure", "unoffered")
    assert [value("kvstore_store_recent_gap_ratio", cause=cause) for cause in causes] == [0.125, 0, 0, 0, 0, 0]


def test_the_figures_of_the_nvme_tier_are_exported(scrape: Scrape) -> None:
    found = {name: samples for name, samples in scrape(FIGURES).items() if name.startswith("kvstore_nvme_")}
    faults = found.pop("kvstore_nvme_faults_total")
    assert found == {
        "kvstore_nvme_state": {"ok": 0, "degraded": 1, "recovering": 0},
        "kvstore_nvme_direct": {"": 1},
        "kvstore_nvme_disk_bytes": {"": 900},
        "kvstore_nvme_segments": {"": 3},
        "kvstore_nvme_segments_max": {"": 4},
        "kvstore_nvme_queue_bytes": {"": 6},
        "kvstore_nvme_hit_blocks_total": {"": 9},
        "kvstore_nvme_moved_blocks_total": {"demoted": 7, "promoted": 8},
        "kvstore_nvme_moved_bytes_total": {"demoted": 70, "promoted": 80},
        "kvstore_nvme_undemoted_blocks_total": {"": 10},
        "kvstore_nvme_dropped_blocks_total": {"budget": 12, "degraded": 13},
        "kvstore_nvme_device_bytes_total": {"read": 16, "written": 1100},
        "kvstore_nvme_payload_written_bytes_total": {"": 1000},
        "kvstore_nvme_write_amplification": {"": 1.1},
        "kvstore_nvme_read_latency_seconds": {"": 0.002},
        "kvstore_nvme_read_bytes_per_second": {"": 17.0},
        "kvstore_nvme_prefetch_blocks_total": {"started": 18, "refused": 19, "useful": 0, "late": 0, "wasted": 0},
        "kvstore_nvme_recovery_seconds": {"": 0.25},
        "kvstore_nvme_recovered_blocks": {"kept": 20, "refused": 21},
    }
    # Every kind, so that a first fault is an increase and not a new series.
    assert faults == dict.fromkeys((fault.value for fault in DiskFault), 0) | {"enospc": 15}


def test_the_figures_of_one_scrape_are_of_one_moment(arenas: Arenas) -> None:
    asked: list[None] = []

    def figures() -> NvmeFigures:
        asked.append(None)
        return dataclasses.replace(FIGURES, block_count=len(asked))

    collector = StoreCollector(Observed(make_core(), arenas, make_in_flight(), Nobody(), nvme=figures))
    for _ in collector.collect():
        pass
    assert len(asked) == 1


def test_nothing_written_is_not_amplified() -> None:
    assert dataclasses.replace(FIGURES, payload_written_bytes=0, device_written_bytes=0).write_amplification == 1.0
    assert FIGURES.write_amplification == pytest.approx(1.1)
