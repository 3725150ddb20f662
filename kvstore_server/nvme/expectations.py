"""Brings back from the disk, ahead of time, what sessions that are expected soon will use. For the loop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from kvstore.eviction import Request
from kvstore.keys import BlockHash
from kvstore_server.core.prefetches import Pace
from kvstore_server.core.returns import Returns, SessionKey
from kvstore_server.core.tenants import ScopedId, Tenant, tenant_of
from kvstore_server.nvme.parts import Parts
from kvstore_server.nvme.promotion import Promotion

_PROMPTS_AT_ONCE = 16
"""Per call: each is a walk up its chain, and a prefetch within the budget that all prefetches share."""
_CHAIN_COUNT_MAX = 8192
"""Blocks of a chain that are walked up."""


class Expectations:
    """Learns when sessions come back from what they say, and from when they did. See `Returns`."""

    def __init__(self, parts: Parts, promotion: Promotion) -> None:
        self._parts = parts
        self._promotion = promotion
        self._returns: dict[Tenant, Returns] = {}
        """Of each tenant its own: what one's sessions do says nothing of another's."""
        self._paces: defaultdict[Tenant, Pace] = defaultdict(Pace)
        """Likewise."""

    def asked(self, namespace_id: ScopedId, request: Request) -> None:
        """A request of a session looks for its prompt, or uses it."""
        if request.session_id is not None:
            key = SessionKey(namespace_id, request.session_id)
            self._of(namespace_id).come(key, turn=request.turn, now_s=self._parts.clock())

    def ended(self, namespace_id: ScopedId, hashes: Sequence[BlockHash], request: Request) -> None:
        """A request has brought blocks, given head first, or has told more of itself: as far as is known it is over."""
        if request.session_id is None or not hashes:
            return
        key = SessionKey(namespace_id, request.session_id)
        if request.is_done:
            self._of(namespace_id).end(key)
            return
        self._of(namespace_id).leave(
            key,
            hashes[-1],
            turn=request.turn,
            finish=request.finish,
            expected_return_s=request.expected_return_s,
            now_s=self._parts.clock(),
        )

    def tick(self) -> None:
        """Begins what is due, as far as that has been worth it of late; to be called about every second."""
        self._learn()
        for tenant, returns in self._returns.items():
            for due in returns.due(now_s=self._parts.clock(), count_max=_PROMPTS_AT_ONCE):
                namespace_id = due.key.namespace_id
                chain = self._missing_chain(namespace_id, due.tail)
                if not chain:
                    continue
                if not self._paces[tenant].takes():
                    returns.rest(due.key)  # it is left to whoever asks for it, this time
                elif self._promotion.prefetch(namespace_id, chain, budget_bytes=0, is_expected=True).started_count:
                    returns.rest(due.key)

    def share_of(self, tenant: Tenant) -> float:
        """Of a tenant's prompts that are due, those that are brought."""
        return self._paces[tenant].share

    def _learn(self) -> None:
        for outcome in self._parts.store.prefetches.take_outcomes():
            pace = self._paces[tenant_of(outcome.key.namespace_id)]
            pace.note(good_count=not outcome.is_wasted, wasted_count=outcome.is_wasted)

    def _of(self, namespace_id: ScopedId) -> Returns:
        return self._returns.setdefault(tenant_of(namespace_id), Returns())

    def _missing_chain(self, namespace_id: ScopedId, tail: BlockHash) -> list[BlockHash]:
        """The blocks up from this one that only the disk has, head first. Memory has what is above those it has."""
        on_disk, in_memory = self._parts.disk.stored(namespace_id), self._parts.store.stored(namespace_id)
        chain: list[BlockHash] = []
        at: BlockHash | None = tail
        while at is not None and at not in in_memory and at in on_disk and len(chain) < _CHAIN_COUNT_MAX:
            chain.append(at)
            at = on_disk[at].parent_hash
        return chain[::-1]
