"""The half of the connector that looks prompts up, on rank 0."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.keys import BlockHash
from kvstore.messages import LEASE_S_MAX
from kvstore_client.integrations.tensorrt_llm import pools
from kvstore_client.integrations.tensorrt_llm.interface import ENGINE_VERSION, KvCacheConnectorScheduler
from kvstore_client.integrations.tensorrt_llm.messages import Held, Load, Step
from kvstore_client.integrations.tensorrt_llm.model import ServedModel, read_settings
from kvstore_client.integrations.tensorrt_llm.plan import Progress, salt_of, untold_input
from kvstore_client.views import Views

_LOG = logging.getLogger("kvstore.integrations.tensorrt_llm")


@dataclass(frozen=True, kw_only=True)
class _Offer:
    """Blocks that were offered to the engine, from block `first` of its request on."""

    first: int
    count: int
    views: tuple[Views, ...]

    def release(self) -> None:
        for views in self.views:
            views.release()


class KVStoreScheduler(KvCacheConnectorScheduler):
    """Offers a prompt's leading blocks, once they are verified and held for every rank: then no load can fail.

    One token at least is left to compute. The store's failures are prompts that nothing is known of.
    """

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        settings = read_settings()
        self._model = ServedModel.of(llm_args, settings, engine_version=ENGINE_VERSION)
        self._client = settings.open_client()
        self._progress: dict[int, Progress] = {}
        self._offers: dict[int, _Offer] = {}
        self._loading: list[_Offer] = []
        """Of the last step. The engine asks for the next one, or anything else, once the workers have loaded them."""
        self._recompute_s_per_block = settings.recompute_s_per_block
        self._told: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self._end_loading()
        self._forget(request.request_id)
        block_tokens = self._model.tokens_per_block
        untold = untold_input(request)
        if untold is not None:
            self._tell_once(f"requests with {untold} are neither looked up nor saved")
            return 0, False
        progress = Progress(tokens_per_block=block_tokens, salt=salt_of(request))
        self._progress[request.request_id] = progress
        # A block that the engine matched in part is shared, or a copy under way: it is not ours to write to.
        first, rest = divmod(num_computed_tokens, block_tokens)
        tokens = request.get_tokens(0)
        last = (len(tokens) - 1) // block_tokens
        if rest or last <= first:
            return 0, False
        progress.hash_to(tokens[: last * block_tokens])
        offer = self._offer(progress.hashes[first:last], first=first)
        if offer is None:
            return 0, False
        self._offers[request.request_id] = offer
        return offer.count * block_tokens, False

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        self._end_loading()
        loads = []
        for data in (*scheduler_output.new_requests, *scheduler_output.cached_requests):
            progress = self._progress.get(data.request_id)
            if progress is not None:
                progress.advance(data)
                loads += self._load(data.request_id, progress)
        saves = [
            self._progress[data.request_id].save(data)
            for data in (*scheduler_output.new_requests, *scheduler_output.cached_requests)
            if data.request_id in self._progress
        ]
        return Step(loads=tuple(loads), saves=tuple(save for save in saves if save is not None))

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int]) -> None:
        """The blocks come with `build_connector_meta`, of every chunk."""

    def request_finished(self, request: Any, cache_block_ids: Sequence[int]) -> bool:
        """True: the engine keeps the blocks until the workers have saved them."""
        self._end_loading()
        progress = self._forget(request.request_id)
        return progress is not None and progress.is_saving

    def request_reset(self, request: Any) -> None:
        """The request starts again, in other blocks."""
        self._forget(request.request_id)

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """The engine computes these tokens after all. Loading more than it counts on harms nothing, so only an offer
        that is gone from its start is withdrawn."""
        offer = self._offers.get(request.request_id)
        if offer is not None and start <= offer.first * self._model.tokens_per_block:
            del self._offers[request.request_id]
            offer.release()

    def close(self) -> None:
        self._end_loading()
        self._client.close()

    def _offer(self, hashes: Sequence[BlockHash], *, first: int) -> _Offer | None:
        pool = pools.registered(self._model.key)
        if pool is None:
            self._tell_once("nothing is loaded: no worker has registered its pool in this process")
            return None
        held: list[Views] = []
        count = len(hashes)
        for rank in range(self._model.tp_size):
            namespace = self._model.namespace(pool, rank=rank)
            if self._recompute_s_per_block is not None:
                found = self._client.lookup(
                    namespace, hashes[:count], recompute_s_per_block=self._recompute_s_per_block
                )
                count = found.matched_count
            views = self._client.view(namespace, hashes[:count], lease_s=LEASE_S_MAX)
            held.append(views)
            if views.error is not None:
                self._tell_once(f"the store does not serve the engine: {views.error}")
            count = views.matched_count
            if not count:
                break
        offer = _Offer(first=first, count=count, views=tuple(held))
        if not count:
            offer.release()
            return None
        return offer

    def _load(self, request_id: int, progress: Progress) -> list[Load]:
        offer = self._offers.pop(request_id, None)
        if offer is None:
            return []
        self._loading.append(offer)
        held = tuple(Held([view for view in list(views)[: offer.count] if view is not None]) for views in offer.views)
        return [Load(block_ids=tuple(progress.block_ids[offer.first : offer.first + offer.count]), held=held)]

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            _LOG.warning(text)

    def _end_loading(self) -> None:
        loading, self._loading = self._loading, []
        for offer in loading:
            offer.release()

    def _forget(self, request_id: int) -> Progress | None:
        offer = self._offers.pop(request_id, None)
        if offer is not None:
            offer.release()
        return self._progress.pop(request_id, None)
