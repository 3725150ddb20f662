"""What the connector counts, in the forms that vLLM logs and exports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS: Mapping[str, str] = {
    "load_tokens": "Prompt tokens that were loaded instead of computed",
    "load_blocks": "KV blocks that were to be loaded for them",
    "load_bytes": "Bytes of KV blocks that loads asked for, per rank",
    "load_seconds": "Seconds that loads took, per rank",
    "load_failed_blocks": "KV blocks that could not be loaded after all, per rank",
    "load_failed_requests": "Requests that were computed after a load had failed",
    "saved_seconds": "Seconds that computing the loaded tokens would have taken at the engine's pace",
    "store_blocks": "KV blocks that the store has taken, per rank",
    "store_bytes": "Bytes of the KV blocks that the store has taken, per rank",
    "store_seconds": "Seconds that stores took, per rank",
    "store_dropped_blocks": "KV blocks that the store did not take: full, overloaded or not there; per rank",
    "store_skipped_blocks": "KV blocks that were not stored, as stores under way held enough of the engine's blocks",
    "lookup_timeouts": "Requests that were computed as the store had not answered in time",
    "lookup_errors": "Requests that were computed as the store could not be asked",
    "left_out_blocks": "KV blocks that would have been loaded later than computed",
}
"""Prometheus names are `vllm:kvstore_NAME_total`."""


class ConnectorStats(KVConnectorStats):
    """Counts since they were last taken, summed over ranks; the log line tells those that are not zero."""

    @classmethod
    def of(cls, counts: Counter[str]) -> ConnectorStats | None:
        data: dict[str, int | float] = {}
        for name, count in counts.items():
            if count:
                is_time = name.endswith("_us")
                data[f"{name.removesuffix('_us')}_seconds" if is_time else name] = count / 1e6 if is_time else count
        return cls(data=data) if data else None

    def reset(self) -> None:
        self.data: dict[str, int | float] = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        told = {f"kvstore {name.replace('_', ' ')}": round(value, 3) for name, value in self.data.items()}
        for way in ("load", "store"):
            seconds = self.data.get(f"{way}_seconds", 0)
            if seconds:
                told[f"kvstore {way} GB/s"] = round(self.data.get(f"{way}_bytes", 0) / seconds / 1e9, 2)
        return told

    def is_empty(self) -> bool:
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):
    """One counter per name, with the engine's own labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._children: dict[str, dict[int, Any]] = {}
        for name, documentation in COUNTERS.items():
            counter = self._counter_cls(name=f"vllm:kvstore_{name}", documentation=documentation, labelnames=labelnames)
            self._children[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: Mapping[str, int | float], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            self._children[name][engine_idx].inc(value)
