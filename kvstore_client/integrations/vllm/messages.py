"""What the scheduler's half and the workers' halves tell each other, once per step and pickled by vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, NewType

from kvstore.namespace import Shard
from kvstore_client.hints import Hint
from kvstore_client.integrations._blocks import BlockShape

RankKey = tuple[int, int]
"""(pipeline rank, tensor rank), as vLLM names workers."""

IdentityId = NewType("IdentityId", int)
JobId = NewType("JobId", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """How one worker holds its blocks: a shape per KV cache group, None for those that it does not cache."""

    shapes: tuple[BlockShape | None, ...]
    layers: tuple[tuple[str, ...], ...]
    """Names of the layers per group."""
    shard: Shard


class BlockRun(NamedTuple):
    """Blocks of one KV cache group that follow each other in one chain, and where the engine holds them."""

    group: int
    first: int
    """Number of the first one in its chain; of loads, where the engine may skip some, only that."""
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    parent_hash: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadJob:
    request_id: str
    identity: IdentityId
    runs: tuple[BlockRun, ...]
    hint: Hint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreJob:
    id: JobId
    identity: IdentityId
    runs: tuple[BlockRun, ...]
    hint: Hint | None = None


@dataclass(slots=True, kw_only=True)
class Step:
    """What workers are to begin in this step. Every rank gets the same, and finds its own part."""

    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    identities: dict[IdentityId, Mapping[RankKey, tuple[bytes | None, ...]]] = field(default_factory=dict)
    """Encoded namespaces per rank and group, of identities that were not told before."""
    is_idle: bool = False
    """Nothing is computed: the worker has nothing better to do than to wait for what is under way."""
    is_awaited: bool = False
    """The scheduler's half itself waits for something."""


class StoreCounts(NamedTuple):
    """Of one job, summed over ranks."""

    rank_count: int
    stored_count: int
    dropped_count: int


@dataclass(slots=True, kw_only=True)
class Report:
    """What a worker, or all of them together, have finished storing since the last step."""

    stores: dict[JobId, StoreCounts] = field(default_factory=dict)

    def merge(self, other: Report) -> None:
        for job_id, counts in other.stores.items():
            mine = self.stores.get(job_id, StoreCounts(0, 0, 0))
            self.stores[job_id] = StoreCounts(*(a + b for a, b in zip(mine, counts, strict=True)))
