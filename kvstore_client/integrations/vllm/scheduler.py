"""The scheduler's half: what to load, what to store, and which of the engine's blocks are held meanwhile.

It takes vLLM's objects and calls only what it names in the protocols here. Nothing in it waits.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from kvstore.keys import BlockHash
from kvstore_client.hints import Hint
from kvstore_client.integrations._blocks import to_block_hash
from kvstore_client.integrations.vllm.hints import Hints
from kvstore_client.integrations.vllm.identities import Adapter, Identities, Identity
from kvstore_client.integrations.vllm.lookups import Found, Lookup, Lookups
from kvstore_client.integrations.vllm.matching import GroupShape, matched_tokens
from kvstore_client.integrations.vllm.messages import BlockRun, IdentityId, JobId, LoadJob, Report, Step, StoreJob
from kvstore_client.integrations.vllm.rate import PrefillRate
from kvstore_client.integrations.vllm.stores import StoreLedger, StoreProgress

_LOG = logging.getLogger("vllm.kvstore")  # below vLLM's own logger, so that its handlers show it

_LOOKUP_FRESH_S = 1.0
"""How long the answer to a lookup is believed; what has left the store since then is only a failed load."""


class Pool(Protocol):
    """The engine's blocks, as the connector holds and gives back some of them."""

    def hold(self, block_ids: Sequence[int]) -> None: ...
    def release(self, block_ids: Sequence[int]) -> None: ...
    def cached_block(self, block_hash: bytes, group: int) -> int | None:
        """A block that left its request's table, but still holds what it held."""


@dataclass(slots=True, kw_only=True)
class Tracked:
    """What is known of one request that the engine has not finished."""

    request: Any
    hint: Hint
    progress: StoreProgress
    lookup: Lookup | None = None
    asked_s: float | None = None
    """When the engine first asked and there was no answer yet."""
    found: Found | None = None
    found_s: float = 0.0
    local_tokens: int = 0
    """That the engine had when it last asked."""
    may_load: bool = True
    """False once a load has failed: what failed once is computed."""
    is_scheduled: bool = False
    """Whether it was computed since room was last made for it: until then another connector may be loading into it."""
    may_store: bool = True
    """False once the weights have changed under it: its blocks are of the old ones, or computed from such."""
    hashes: list[list[BlockHash]] = field(default_factory=list)


class SchedulerSide:
    """See the module. For the scheduler's one thread."""

    def __init__(
        self,
        *,
        groups: Sequence[GroupShape | None],
        hash_tokens: int,
        align_tokens: int,
        rank_count: int,
        block_count_max: int,
        lookup_timeout_s: float,
        identities: Identities,
        lookups: Lookups,
        hints: Hints,
        clock: Callable[[], float],
        on_stored: Callable[[Any, StoreJob], None] | None = None,
    ) -> None:
        """`on_stored` is told the request and the job of blocks that the store has taken, all of them."""
        self._on_stored = on_stored
        self._storing: dict[JobId, tuple[Any, StoreJob]] = {}
        self._groups = groups
        self._cached_groups = [group for group, shape in enumerate(groups) if shape is not None]
        self._hash_tokens = hash_tokens
        self._align_tokens = align_tokens
        self._lookup_timeout_s = lookup_timeout_s
        self._identities = identities
        self._lookups = lookups
        self._hints = hints
        self._clock = clock
        self._pool: Pool | None = None
        self._tracked: dict[str, Tracked] = {}
        self._ledger = StoreLedger(rank_count=rank_count, block_count_max=block_count_max)
        self._rate = PrefillRate()
        self._unpriced_tokens = 0
        """Loaded tokens whose worth is counted once the engine's pace is known."""
        self._step = Step()
        self._told: set[IdentityId] = set()
        self._loading: dict[str, frozenset[int]] = {}
        """The blocks that each request waits for."""
        self.counts: Counter[str] = Counter()
        """Since they were last taken; see `figures`."""

    def bind(self, pool: Pool) -> None:
        self._pool = pool

    @property
    def has_work(self) -> bool:
        """Whether stores are under way, or still to be told to the workers: the engine is to go on for them."""
        return not self._ledger.is_idle

    def begin_request(self, request: Any) -> None:
        """Asks early, so that the answer is there when the request's turn comes."""
        tracked = self._tracked[request.request_id] = self._new_tracked(request)
        if not request.skip_reading_prefix_cache:
            self._begin_lookup(tracked)

    def matched_tokens(self, request: Any, local_tokens: int) -> int | None:
        """Tokens beyond the local ones that can be loaded; None while that is not known."""
        tracked = self._track(request)
        tracked.local_tokens = local_tokens
        # The last token is always computed: there must be something to sample from. So that one block alone is never
        # loaded for it, but with others it is: the engine computes that token again and nothing else.
        worth_tokens = (request.num_tokens - 1) // self._align_tokens * self._align_tokens
        if not tracked.may_load or request.skip_reading_prefix_cache or worth_tokens <= local_tokens:
            return 0
        found = self._answer(tracked)
        if found is None:
            return None
        if found.error is not None:
            return 0
        total = matched_tokens(
            [shape for shape in self._groups if shape is not None],
            [found.hits[group] for group in self._cached_groups],
            local_tokens=local_tokens,
            prompt_tokens=request.num_tokens,
            align_tokens=self._align_tokens,
        )
        return total - local_tokens

    def begin_load(self, request: Any, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        """The engine has made room for these tokens behind those that it has."""
        tracked = self._track(request)
        tracked.is_scheduled = False
        if external_tokens == 0:
            return
        identity = self._identity(request)
        assert identity is not None, "tokens matched under no identity"
        runs: list[BlockRun] = []
        block_count = 0
        for group in self._cached_groups:
            shape = self._groups[group]
            assert shape is not None
            first = tracked.local_tokens // shape.block_tokens
            end = (tracked.local_tokens + external_tokens) // shape.block_tokens
            numbers = [number for number in range(first, end) if block_ids[group][number] != 0]
            hashes = self._hashes(tracked)[group]
            runs.append(
                BlockRun(
                    group=group,
                    first=first,
                    hashes=tuple(hashes[number] for number in numbers),
                    block_ids=tuple(block_ids[group][number] for number in numbers),
                    parent_hash=None,
                )
            )
            block_count += len(numbers)
        self._step.loads.append(
            LoadJob(request_id=request.request_id, identity=self._tell(identity), runs=tuple(runs), hint=tracked.hint)
        )
        self._loading[request.request_id] = frozenset(block_id for run in runs for block_id in run.block_ids)
        self.counts["load_tokens"] += external_tokens
        self.counts["load_blocks"] += block_count
        self._unpriced_tokens += external_tokens

    def build_step(
        self,
        *,
        scheduled: Mapping[str, int],
        block_ids_of: Callable[[str], Sequence[Sequence[int]]],
    ) -> Step:
        """What workers begin in this step, in which these tokens of these requests are computed."""
        now_s = self._clock()
        self._rate.end_step(now_s=now_s)
        self._rate.begin_step(now_s=now_s, token_count=sum(scheduled.values()))
        if self._rate.s_per_token is not None:
            self.counts["saved_us"] += round(self._unpriced_tokens * self._rate.s_per_token * 1e6)
            self._unpriced_tokens = 0
        for request_id in scheduled:
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            tracked.is_scheduled = True
            if self._may_store(tracked):
                self._plan_stores(tracked, partial(block_ids_of, request_id))
        step, self._step = self._step, Step()
        step.is_idle = not any(scheduled.values())
        step.is_awaited = any(tracked.asked_s is not None for tracked in self._tracked.values())
        return step

    def finish_request(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        """Its blocks may be given to others, but for those that are still to be stored."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        tracked.hint = self._hints.of(request, is_over=True)
        identity = self._identity(request)
        if identity is not None and tracked.may_store:
            self._lookups.tell(identity, [list(hashes) for hashes in self._hashes(tracked)], tracked.hint)
        if not self._may_store(tracked):
            return
        self._plan_stores(tracked, lambda: block_ids)
        ready = self._ready_counts(tracked)
        self.counts["store_skipped_blocks"] += sum(
            max(0, ready_count - done) for ready_count, done in zip(ready, tracked.progress.done_counts, strict=True)
        )

    def take_report(
        self,
        report: Report,
        *,
        loaded: Collection[str] = (),
        failed: Collection[str] = (),
        failed_block_ids: Collection[int] = (),
    ) -> None:
        """What the workers have finished. What a request failed to load is computed, and stored again."""
        self._rate.end_step(now_s=self._clock())
        failed_requests = set(failed) | {
            request_id for request_id, block_ids in self._loading.items() if not block_ids.isdisjoint(failed_block_ids)
        }
        for request_id in loaded:
            self._loading.pop(request_id, None)
        for request_id in failed_requests:
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.may_load = False
                tracked.progress = self._new_progress()
            self.counts["load_failed_requests"] += 1
        for job_id, counts in report.stores.items():
            ended = self._ledger.report(job_id, counts)
            if ended is None:
                continue
            block_ids, total = ended
            request, job = self._storing.pop(job_id)
            assert self._pool is not None
            self._pool.release(block_ids)
            self.counts["store_blocks"] += total.stored_count
            self.counts["store_dropped_blocks"] += total.dropped_count
            if self._on_stored is not None and not total.dropped_count:
                self._on_stored(request, job)

    def renew(self) -> None:
        """The engine's weights have become others: what is stored is of no use to it any more."""
        self._identities.renew()
        for tracked in self._tracked.values():
            tracked.lookup = tracked.found = None
            tracked.progress = self._new_progress()
            tracked.may_store = tracked.request.num_computed_tokens == 0

    def _track(self, request: Any) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._tracked[request.request_id] = self._new_tracked(request)
        return tracked

    def _new_tracked(self, request: Any) -> Tracked:
        return Tracked(request=request, hint=self._hints.of(request), progress=self._new_progress())

    def _new_progress(self) -> StoreProgress:
        return StoreProgress(done_counts=[0] * len(self._groups), is_known=[set() for _ in self._groups])

    def _identity(self, request: Any) -> Identity | None:
        lora = request.lora_request
        adapter = lora and Adapter(
            name=lora.lora_name, id=lora.lora_int_id, path=lora.lora_path, is_replaced_in_place=lora.load_inplace
        )
        return self._identities.find(adapter)

    def _begin_lookup(self, tracked: Tracked) -> None:
        identity = self._identity(tracked.request)
        if identity is None:
            return
        tracked.lookup = self._lookups.begin(
            identity,
            [list(hashes) for hashes in self._hashes(tracked)],
            recompute_s_per_token=self._rate.s_per_token,
            hint=tracked.hint,
        )

    def _answer(self, tracked: Tracked) -> Found | None:
        """What is known now; None while it is worth waiting for."""
        now_s = self._clock()
        if tracked.found is not None and now_s - tracked.found_s < _LOOKUP_FRESH_S:
            return tracked.found
        if tracked.lookup is None:
            self._begin_lookup(tracked)
            if tracked.lookup is None:
                return _nothing(self._groups)
        if tracked.asked_s is None:
            tracked.asked_s = now_s
        found = tracked.lookup.found()
        if found is None:
            if now_s - tracked.asked_s < self._lookup_timeout_s:
                tracked.found = None
                return None
            self.counts["lookup_timeouts"] += 1
            found = _nothing(self._groups)
        self.counts["lookup_errors"] += found.error is not None
        self.counts["left_out_blocks"] += found.left_out_count
        # Begun when the request came, which may be long ago. Begun since the engine asks, it is as fresh as it can be.
        is_stale = tracked.lookup.began_s < tracked.asked_s - _LOOKUP_FRESH_S
        tracked.lookup = None
        if is_stale and found.error is None and any(map(any, found.hits)):
            return self._answer(tracked)
        tracked.asked_s = None
        tracked.found, tracked.found_s = found, now_s
        tracked.progress.is_known = _known_numbers(found)
        return found

    def _hashes(self, tracked: Tracked) -> Sequence[Sequence[BlockHash]]:
        """Our hashes of the request's full blocks, per group: the last of the engine's hashes inside each."""
        own = tracked.request.block_hashes
        if not tracked.hashes:
            tracked.hashes = [[] for _ in self._groups]
        for group in self._cached_groups:
            shape = self._groups[group]
            assert shape is not None
            factor = shape.block_tokens // self._hash_tokens
            known = tracked.hashes[group]
            for number in range(len(known), len(own) // factor):
                known.append(to_block_hash(bytes(own[(number + 1) * factor - 1])))
        return tracked.hashes

    def _ready_counts(self, tracked: Tracked) -> list[int]:
        request = tracked.request
        in_flight = max(request.num_in_flight_tokens, request.num_output_placeholders)
        tokens = max(0, request.num_computed_tokens - in_flight)
        hashes = self._hashes(tracked)
        return [
            min(tokens // shape.block_tokens, len(hashes[group])) if shape is not None else 0
            for group, shape in enumerate(self._groups)
        ]

    def _may_store(self, tracked: Tracked) -> bool:
        return tracked.is_scheduled and tracked.may_store and tracked.request.request_id not in self._loading

    def _plan_stores(self, tracked: Tracked, find_block_ids: Callable[[], Sequence[Sequence[int]]]) -> None:
        """`find_block_ids` costs the more, the longer the request is, and most steps complete no block."""
        if tracked.lookup is not None and (found := tracked.lookup.found()) is not None and found.error is None:
            tracked.progress.is_known = _known_numbers(found)
        ready_counts = self._ready_counts(tracked)
        if all(map(int.__ge__, tracked.progress.done_counts, ready_counts)):
            return
        identity = self._identity(tracked.request)
        if identity is None:
            return
        pool = self._pool
        assert pool is not None, "a step before the engine's blocks are known"
        own = tracked.request.block_hashes
        block_ids = find_block_ids()

        def find_block(group: int, number: int) -> int | None:
            ids = block_ids[group]
            if number < len(ids) and ids[number] != 0:
                return ids[number]
            shape = self._groups[group]
            assert shape is not None
            factor = shape.block_tokens // self._hash_tokens
            return pool.cached_block(own[(number + 1) * factor - 1], group)

        job = self._ledger.plan(
            tracked.progress,
            identity=identity.id,
            hashes=self._hashes(tracked),
            ready_counts=ready_counts,
            find_block=find_block,
            hint=tracked.hint,
        )
        if job is not None:
            self._tell(identity)
            pool.hold([block_id for run in job.runs for block_id in run.block_ids])
            self._storing[job.id] = (tracked.request, job)
            self._step.stores.append(job)

    def _tell(self, identity: Identity) -> IdentityId:
        if identity.id not in self._told:
            self._told.add(identity.id)
            self._step.identities[identity.id] = identity.encoded()
        return identity.id


def _known_numbers(found: Found) -> list[set[int]]:
    return [{number for number, hit in enumerate(hits) if hit} for hits in found.hits]


def _nothing(groups: Sequence[GroupShape | None]) -> Found:
    return Found(hits=tuple(() for _ in groups))
