"""vLLM's own tiered offload, with the store as the tier below its host memory.

    vllm serve MODEL --kv-transfer-config '{"kv_connector":"KVStoreTieringConnector",
        "kv_connector_module_path":"kvstore_client.integrations.vllm_tier","kv_role":"kv_both",
        "kv_connector_extra_config":{"cpu_bytes_to_use":8589934592}}'

vLLM moves blocks between VRAM and its host tier, `KVStoreTier` between that and the store. vLLM tells a tier neither
which weights it serves nor how its kernels order bytes, so the tier works below this connector only, which knows.
"""

from __future__ import annotations

import copy
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from pydantic import Field
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.kv_offload.base import (
    LookupResult,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvstore.errors import InvalidArgumentError, KvstoreError
from kvstore.keys import BlockHash
from kvstore.namespace import Namespace
from kvstore_client.integrations._blocks import BlockShape, EngineModel, StoreSettings, to_block_hash
from kvstore_client.integrations.tiering.jobs import Finished, JobId
from kvstore_client.integrations.tiering.messages import Kind
from kvstore_client.integrations.tiering.process import MoverProcess, SharedMemory
from kvstore_client.integrations.tiering.tier import Block, StoreTier
from kvstore_client.integrations.vllm import model
from kvstore_client.integrations.vllm.connector import Handshake
from kvstore_client.integrations.vllm.messages import RankKey, RankLayout
from kvstore_client.integrations.vllm.settings import ConnectorSettings

_LOG = logging.getLogger("vllm.kvstore.tiering")  # below vLLM's own logger, so that its handlers show it

_TIER = "KVStoreTier"
_MODEL_WAIT_S = 2.0
"""That the engine's start waits for the digest of the weights, so that small models are warm from their first request
on. Large ones that were never read on this machine take longer: until then nothing is loaded or stored."""


class TierSettings(StoreSettings):
    """What an entry of `secondary_tiers` may say; the defaults need no change where a daemon runs on the node."""

    lookup_timeout_s: float = Field(default=0.5, gt=0, le=60)
    """Seconds that a request waits at most to know what the store has; then it is computed."""
    recompute_tokens_per_s: float | None = Field(default=None, gt=0)
    """How fast this engine computes a prompt. Where it is said, blocks are not loaded that would be there later."""


class KVStoreTieringConnector(OffloadingConnector):
    """vLLM's OffloadingConnector, with the store among its secondary tiers: added where no entry names it."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(_with_tier(vllm_config), role, kv_cache_config)
        self._tier: KVStoreTier | None = None
        self._off_reason = model.why_unsupported(vllm_config, kv_cache_config)
        if self.connector_scheduler is not None:
            tiers = self.connector_scheduler.manager.secondary_tiers
            self._tier = next(tier for tier in tiers if isinstance(tier, KVStoreTier))
            if self._off_reason is not None:
                _LOG.warning("kvstore is off for this engine: %s", self._off_reason)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *arguments: Any) -> Any:
        return super().build_prom_metrics(_with_tier(vllm_config), *arguments)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        if self._off_reason is None:
            rank = (get_pp_group().rank_in_group, get_tp_group().rank_in_group)
            self._layout = model.rank_layout(self._vllm_config, self._kv_cache_config, rank=rank)

    def get_handshake_metadata(self) -> Handshake | None:
        return Handshake(self._layout) if self._off_reason is None else None

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[RankKey, Any]) -> None:
        assert self._tier is not None, "only the scheduler's half is told"
        ranks = {rank: handshake.layout for rank, handshake in metadata.items()}
        self._tier.identify(self._vllm_config, self._kv_cache_config, ranks)

    def on_new_request(self, request: Any) -> None:
        # vLLM's hashes know an adapter by its name, and the tier is told nothing of it.
        if request.lora_request is not None and self._tier is not None:
            self._tier.leave_out(request.request_id)
        super().on_new_request(request)

    def reset_cache(self) -> bool | None:
        """For new weights in a running engine: what was stored before is not found any more, by this engine."""
        result: bool | None = super().reset_cache()
        if self._tier is not None:
            self._tier.renew()
        return result


class KVStoreTier(SecondaryTierManager):
    """The store as a secondary tier: whatever becomes of it, vLLM computes what it does not get."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        connector: str | None = None,
        **extra_config: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if connector is None:
            raise InvalidArgumentError.of(
                "kv_connector", "OffloadingConnector", f"KVStoreTieringConnector of {__name__}, for a {_TIER}"
            )
        settings = self._settings = TierSettings.parse(extra_config, where=f"secondary_tiers.{_TIER}")
        self._config = offloading_spec.config
        self._row_bytes = int(self.block_size_bytes)
        rows = np.frombuffer(primary_kv_view, np.uint8)
        memory = SharedMemory.find(rows.ctypes.data, rows.nbytes)
        # Once, and for all movers: its name may go, or be another file's, while the engine runs.
        memory_fd = self._memory_fd = memory.open()
        self._identity: _Identity | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="kvstore-identity")
        self._reading: Future[EngineModel] | None = None
        self._left_out: set[str] = set()
        group_count = len(self._config.groups)
        chunk_tokens = (
            max(group.tokens_per_block for group in self._config.groups) * self._config.cache.blocks_per_chunk
        )

        def start() -> MoverProcess:
            rate = settings.recompute_tokens_per_s
            return MoverProcess(
                memory,
                memory_fd=memory_fd,
                row_bytes=self._row_bytes,
                address=settings.address,
                transport=settings.transport,
                # All groups are loaded, so that each may take its part of what computing takes.
                recompute_s_per_block=None if rate is None else chunk_tokens / rate / group_count,
            )

        self._tier = StoreTier(
            start=start,
            split=_split,
            row_bytes=self._row_bytes,
            row_count=rows.nbytes // self._row_bytes,
            lookup_timeout_s=settings.lookup_timeout_s,
        )

    def identify(self, vllm_config: Any, kv_cache_config: Any, ranks: Mapping[RankKey, RankLayout]) -> None:
        """Begins to find out what the model is, now that the workers have said how they hold blocks."""
        known = ConnectorSettings(
            weights_revision=self._settings.weights_revision, tenant_salt=self._settings.tenant_salt
        )
        hash_tokens = self._config.cache.tokens_per_hash
        self._identity = _Identity(
            config=self._config,
            row_bytes=self._row_bytes,
            ranks=ranks,
            group_settings=model.group_settings(kv_cache_config),
            late_settings=partial(model.hash_settings, vllm_config, hash_tokens=hash_tokens),
        )
        self._reading = self._threads.submit(model.read_model, vllm_config, settings=known)
        wait([self._reading], _MODEL_WAIT_S)

    def leave_out(self, request_id: str) -> None:
        """Nothing is loaded or stored for this request."""
        self._left_out.add(request_id)

    def renew(self) -> None:
        """The model has become another one: nothing that was stored is found any more, by this engine."""
        if self._identity is not None:
            self._identity.suffix = f"+{uuid.uuid4().hex}"
            self._tier.rename(self._identity.namespaces())

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        self._learn_model()
        return RequestOffloadingContext()

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        if req_context.req_id in self._left_out:
            return LookupResult.MISS
        is_there = self._tier.lookup(key, req_context.req_id)
        if is_there is None:
            return LookupResult.RETRY
        return LookupResult.HIT if is_there else LookupResult.MISS

    def submit_load(self, job_metadata: Any) -> None:
        self._tier.load(JobId(job_metadata.job_id), _blocks(job_metadata))

    def submit_store(self, job_metadata: Any) -> None:
        context = job_metadata.req_context
        blocks = [] if context.req_id in self._left_out else _blocks(job_metadata)
        tails = context.get_state(_Tails) or _Tails()
        context.set_state(tails)
        parents = tails.before(blocks, _known_positions(context))
        tails.note(blocks)
        self._tier.store(JobId(job_metadata.job_id), blocks, parents=parents)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [self._result(finished) for finished in self._tier.finished()]

    def on_schedule_end(self, context: Any) -> None:
        self._tier.end_step()

    def on_request_finished(self, req_context: Any) -> None:
        self._tier.forget(req_context.req_id)
        self._left_out.discard(req_context.req_id)

    def drain_jobs(self) -> None:
        self._tier.drain()

    def shutdown(self) -> None:
        self._tier.drain()  # what vLLM has handed over is still stored
        self._tier.close()
        os.close(self._memory_fd)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _result(self, finished: Finished) -> JobResult:
        return JobResult(
            job_id=finished.job_id,
            success=not finished.failed,
            successful_keys=finished.done if finished.kind is Kind.LOAD and finished.failed else None,
            transfer_time=finished.took_s,
            transfer_bytes=len(finished.done) * self._row_bytes,
        )

    def _learn_model(self) -> None:
        if self._reading is None or not self._reading.done():
            return
        assert self._identity is not None, "there are ranks before the model is read"
        reading, self._reading = self._reading, None
        try:
            self._identity.model = reading.result()
            self._tier.rename(self._identity.namespaces())
        except (KvstoreError, OSError) as error:
            _LOG.warning("nothing is stored or loaded, as it is not known which model this is: %s", error)


@dataclass(slots=True, kw_only=True)
class _Identity:
    """What a row of the host tier is: the bytes of all ranks, of one chunk of one group."""

    config: Any
    row_bytes: int
    ranks: Mapping[RankKey, RankLayout]
    group_settings: Sequence[Mapping[str, object]]
    late_settings: Callable[[], Mapping[str, object]]
    """How the engine hashes: known from its first request on."""
    model: EngineModel | None = None
    suffix: str = ""

    def namespaces(self) -> dict[int, Namespace]:
        """Per group; none before the model is known."""
        if self.model is None:
            return {}
        config = self.config
        engine = replace(self.model, weights_revision=self.model.weights_revision + self.suffix)
        blocks_per_chunk = config.cache.blocks_per_chunk
        settings = {
            "tier_rows": self._row_settings(),
            "blocks_per_chunk": blocks_per_chunk,
            # Groups share rows: where one's bytes lie depends on all of them.
            "groups": [[group.group_id, group.tokens_per_block, *group.layer_names] for group in config.groups],
            **self.late_settings(),
        }
        return {
            group.group_id: engine.namespace(
                BlockShape.of_bytes(
                    layout="opaque:vllm-tier-row",
                    num_layers=1,
                    tokens_per_block=group.tokens_per_block * blocks_per_chunk,
                    layer_bytes=self.row_bytes,
                ),
                shard=None,
                settings={**settings, **self.group_settings[group.group_id], "group": group.group_id},
            )
            for group in config.groups
        }

    def _row_settings(self) -> dict[str, object]:
        config = self.config
        kernels = sorted(
            {shape.layout for layout in self.ranks.values() for shape in layout.shapes if shape is not None}
        )
        if config.canonical_layout and config.parallel.is_parallelism_agnostic:
            return {"kernels": kernels, "canonical": canonical_format_id(config.kv_cache_layout)}
        return {
            "kernels": kernels,
            "canonical": canonical_format_id(config.kv_cache_layout) if config.canonical_layout else None,
            "is_replicated": config.replicated_layout,
            "ranks": [
                [*rank, layout.shard.encode().hex(), [list(names) for names in layout.layers]]
                for rank, layout in sorted(self.ranks.items())
            ],
        }


@dataclass(slots=True)
class _Tails:
    """Of one request: per group the last block that was stored, and its place in the chain."""

    last: dict[int, tuple[int, BlockHash]] = field(default_factory=dict)

    def before(self, blocks: Sequence[Block], positions: Mapping[bytes, int]) -> dict[int, BlockHash]:
        """Per group the block before these: stored before, or known by its position. Without one, a chain starts."""
        found: dict[int, BlockHash] = {}
        for group, first in _ends(blocks, min).items():
            last = self.last.get(group)
            if last is None or last[0] >= first.number:
                earlier = [
                    (number, key)
                    for key, number in positions.items()
                    if number < first.number and _split(key)[0] == group
                ]
                last = (max(earlier)[0], _split(max(earlier)[1])[1]) if earlier else None
            if last is not None:
                found[group] = last[1]
        return found

    def note(self, blocks: Sequence[Block]) -> None:
        for group, block in _ends(blocks, max).items():
            self.last[group] = max(self.last.get(group, (0, block.hash)), (block.number, block.hash))


def _ends(blocks: Sequence[Block], choose: Callable[..., Block]) -> dict[int, Block]:
    groups = {block.group for block in blocks}
    return {
        group: choose((block for block in blocks if block.group == group), key=lambda block: block.number)
        for group in groups
    }


def _with_tier(vllm_config: Any) -> Any:
    """The configuration with vLLM's tiered offload chosen, and our tier in it. The caller's stays as it is."""
    transfer = copy.copy(vllm_config.kv_transfer_config)
    extra = {"spec_name": "TieringOffloadingSpec", **transfer.kv_connector_extra_config}
    tiers = [dict(tier) for tier in extra.get("secondary_tiers", [])]
    own = [tier for tier in tiers if tier.get("type") == _TIER] or [{"type": _TIER}]
    if len(own) > 1:
        raise InvalidArgumentError.of("secondary_tiers", f"{len(own)} entries of {_TIER}", "one")
    own[0].update(module_path=__name__, connector="KVStoreTieringConnector")
    if own[0] not in tiers:
        tiers.append(own[0])
    transfer.kv_connector_extra_config = {**extra, "secondary_tiers": tiers}
    changed = copy.copy(vllm_config)
    changed.kv_transfer_config = transfer
    return changed


def _split(key: bytes) -> tuple[int, BlockHash]:
    return get_offload_group_idx(key), to_block_hash(get_offload_block_hash(key))


def _blocks(job: Any) -> list[Block]:
    position = job.req_context.get_offload_key_position
    return [
        Block(key=key, group=group, hash=block_hash, row=int(row), number=position(key) or 0)
        for key, row in zip(job.keys, job.chunk_ids, strict=True)
        for group, block_hash in (_split(key),)
    ]


def _known_positions(context: Any) -> Mapping[bytes, int]:
    """Of all keys of the request, those that the engine's own cache had, too: vLLM tells them one by one only. Without
    them a chain that goes on starts anew, which costs the store's policy some foresight and nothing else."""
    return getattr(context, "_offload_key_positions", {})
