"""What vLLM loads: its connector interface, on our scheduler's and worker's halves."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvstore.errors import KvstoreError
from kvstore_client.integrations._identity import adapter_revision
from kvstore_client.integrations.vllm import model
from kvstore_client.integrations.vllm.figures import ConnectorMetrics, ConnectorStats
from kvstore_client.integrations.vllm.hints import Hints
from kvstore_client.integrations.vllm.identities import Identities
from kvstore_client.integrations.vllm.lookups import Lookups
from kvstore_client.integrations.vllm.messages import RankKey, RankLayout, Report, Step, StoreJob
from kvstore_client.integrations.vllm.scheduler import SchedulerSide
from kvstore_client.integrations.vllm.settings import ConnectorSettings
from kvstore_client.integrations.vllm.worker import WorkerSide

_LOG = logging.getLogger("vllm.kvstore")  # below vLLM's own logger, so that its handlers show it

_LOOKUP_THREADS = 4


class StepMetadata(KVConnectorMetadata):
    def __init__(self, step: Step) -> None:
        self.step = step


class WorkerReport(KVConnectorWorkerMetadata):
    def __init__(self, report: Report) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport), other
        self.report.merge(other.report)
        return self


class Handshake(KVConnectorHandshakeMetadata):
    def __init__(self, layout: RankLayout) -> None:
        self.layout = layout


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """Prefixes from the store, and new blocks into it, both beside the engine's steps.

    One instance per role. Whatever happens to the store, the engine computes what it does not get.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = ConnectorSettings.parse(
            self._kv_transfer_config.kv_connector_extra_config, where="kv_connector_extra_config"
        )
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._events: list[BlockStored] = []
        self._threads: ThreadPoolExecutor | None = None
        self._failed_block_ids: set[int] = set()
        self._off_reason = model.why_unsupported(vllm_config, kv_cache_config)
        if self._off_reason is not None:
            _LOG.warning("kvstore is off for this engine: %s", self._off_reason)
        elif self._kv_transfer_config.kv_load_failure_policy != "recompute":
            _LOG.warning(
                "kv_load_failure_policy is %r: a block that leaves the store before it is loaded fails its request; "
                'set "kv_load_failure_policy": "recompute"',
                self._kv_transfer_config.kv_load_failure_policy,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """What could not be stored is only a later miss."""
        return False

    # What the scheduler calls.

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[RankKey, KVConnectorHandshakeMetadata]) -> None:
        layouts = {rank: found.layout for rank, found in metadata.items() if isinstance(found, Handshake)}
        if len(layouts) != len(metadata):
            _LOG.warning("kvstore is off for this engine: another connector's handshake came instead of its own")
            return
        self._scheduler = self._make_scheduler(layouts)
        if self._kv_cache_manager is not None:
            self._scheduler.bind(EnginePool(self._kv_cache_manager.block_pool))

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.begin_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.begin_load(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        if self._scheduler is None:
            return StepMetadata(Step())
        assert self._kv_cache_manager is not None, "a step before the engine's blocks are known"
        return StepMetadata(
            self._scheduler.build_step(
                scheduled=scheduler_output.num_scheduled_tokens,
                block_ids_of=self._kv_cache_manager.get_block_ids,
            )
        )

    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is None:
            return
        metadata = connector_output.kv_connector_worker_meta
        self._scheduler.take_report(
            metadata.report if isinstance(metadata, WorkerReport) else Report(),
            loaded=connector_output.finished_recving or (),
            failed=connector_output.failed_recving or (),
            failed_block_ids=connector_output.invalid_block_ids or (),
        )

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finish_request(request, block_ids)
        return False, None  # blocks that are still to be stored are held one by one

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Called instead where connectors beside this one know of a single KV cache group only."""
        return self.request_finished_all_groups(request, (block_ids,))

    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_work

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_work

    def take_events(self) -> Iterable[BlockStored]:
        events, self._events = self._events, []
        return events

    def reset_cache(self) -> bool:
        """For new weights in a running engine: what was stored before is not found any more, by this engine."""
        if self._scheduler is not None:
            self._scheduler.renew()
            if self._scheduler.has_work:
                _LOG.warning(
                    "stores under way held blocks while the prefix cache was reset, so vLLM has kept its own: "
                    "reset again until it answers true, before new weights are used"
                )
        return True

    # What workers call.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._off_reason is not None:
            return
        rank = (get_pp_group().rank_in_group, get_tp_group().rank_in_group)
        self._layout = model.rank_layout(self._vllm_config, self._kv_cache_config, rank=rank)
        movers = model.movers(self._kv_cache_config, kv_caches)
        self._worker = WorkerSide(
            self._settings.open_store(namespace_count=max(1, sum(mover is not None for mover in movers))),
            rank=rank,
            movers=movers,
            stores_nothing=rank[1] % self._kv_cache_config.kv_tp_replicas != 0,
        )

    def get_handshake_metadata(self) -> Handshake | None:
        return Handshake(self._layout) if self._worker is not None else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            assert isinstance(connector_metadata, StepMetadata), connector_metadata
            self._worker.begin_step(connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.begin_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        return  # loads are over before their requests are scheduled

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return  # whole blocks are stored, after the step

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.begin_stores()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        ended = self._worker.take_ended()
        is_single = len(self._kv_cache_config.kv_cache_groups) == 1
        # With one group vLLM takes the blocks, and keeps those before them; with several it takes the requests.
        self._failed_block_ids = ended.failed_block_ids if is_single else set()
        return KVConnectorTransferResults(
            finished_recving=ended.done, failed_recving=set() if is_single else ended.failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def build_connector_worker_meta(self) -> WorkerReport | None:
        report = self._worker.take_report() if self._worker is not None else None
        return WorkerReport(report) if report is not None else None

    # What both do.

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        if self._worker is not None:
            return ConnectorStats.of(self._worker.take_counts())
        if self._scheduler is not None:
            counts, self._scheduler.counts = self._scheduler.counts, Counter()
            return ConnectorStats.of(counts)
        return None

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._threads is not None:
            self._client.close()
            self._threads.shutdown(wait=False, cancel_futures=True)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorMetrics:
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _make_scheduler(self, layouts: Mapping[RankKey, RankLayout]) -> SchedulerSide:
        config, cache = self._vllm_config, self._kv_cache_config
        align_tokens, hash_tokens = model.block_sizes(config, cache)
        groups = self._groups = model.group_shapes(config, cache)
        self._client = self._settings.open_store()
        self._threads = ThreadPoolExecutor(_LOOKUP_THREADS, thread_name_prefix="kvstore-lookup")
        identities = Identities(
            make_model=partial(model.read_model, config, settings=self._settings),
            adapter_revision=adapter_revision,
            group_settings=model.group_settings(cache),
            late_settings=partial(model.hash_settings, config, hash_tokens=hash_tokens),
            executor=self._threads,
        )
        lookups = Lookups(
            self._client,
            groups,
            executor=self._threads,
            clock=time.monotonic,
            wait_s=self._settings.pending_wait_s,
        )
        wants_events = config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events
        identities.begin(layouts)
        self._threads.submit(self._greet)
        return SchedulerSide(
            groups=groups,
            hash_tokens=hash_tokens,
            align_tokens=align_tokens,
            rank_count=len(layouts),
            block_count_max=max(1, int(cache.num_blocks * self._settings.store_share_max)),
            lookup_timeout_s=self._settings.lookup_timeout_s + self._settings.pending_wait_s,
            identities=identities,
            lookups=lookups,
            hints=Hints(tool_stop_token_ids=self._settings.tool_stop_token_ids),
            clock=time.monotonic,
            on_stored=self._add_events if wants_events else None,
        )

    def _greet(self) -> None:
        """So that a wrong address shows before there is traffic."""
        try:
            found = self._client.info()
        except KvstoreError as error:
            _LOG.warning(
                "no daemon answers at %s, and all is computed until one does (`kvstore serve`, $KVSTORE_ADDRESS): %s",
                self._client.address,
                error,
            )
            return
        _LOG.info("the store at %s, version %s, serves this engine", self._client.address, found.version)

    def _add_events(self, request: Any, job: StoreJob) -> None:
        """What routers read: who has which blocks, under the engine's own hashes."""
        _, hash_tokens = model.block_sizes(self._vllm_config, self._kv_cache_config)
        lora = request.lora_request
        for run in job.runs:
            shape = self._groups[run.group]
            assert shape is not None, run
            tokens = shape.block_tokens
            factor = tokens // hash_tokens
            numbers = range(run.first, run.first + len(run.hashes))
            own = [request.block_hashes[(number + 1) * factor - 1] for number in numbers]
            parent = request.block_hashes[run.first * factor - 1] if run.first else None
            self._events.append(
                BlockStored(
                    block_hashes=[maybe_convert_block_hash(block_hash) for block_hash in own],
                    parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
                    token_ids=list(request.all_token_ids[numbers.start * tokens : numbers.stop * tokens]),
                    block_size=tokens,
                    lora_id=lora.adapter_id if lora else None,
                    medium="kvstore",
                    lora_name=lora.name if lora else None,
                    group_idx=run.group,
                )
            )


class EnginePool:
    """vLLM's block pool, of which blocks are held by a reference more."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def hold(self, block_ids: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def release(self, block_ids: Sequence[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in block_ids])

    def cached_block(self, block_hash: bytes, group: int) -> int | None:
        found = self._pool.get_cached_block(block_hash, [group])
        return found[0].block_id if found else None
