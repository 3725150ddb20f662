"""What the agent needs of the store below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.keys import BlockHash
from kvstore.namespace import Namespace
from kvstore_client.buffers import Buffers
from kvstore_client.results import GetResult, LookupResult, PutResult


class Store(Protocol):
    """The part of `kvstore_client.Client` that moves blocks.

    Called from two threads at a time. Every call ends by a deadline of its own; whatever goes wrong with the
    daemon comes back as misses and drops with an `error`, never as an exception.
    """

    def lookup(self, namespace: Namespace, hashes: Sequence[BlockHash], *, wait_s: float = 0.0) -> LookupResult: ...

    def get(self, namespace: Namespace, hashes: Sequence[BlockHash], into: Buffers) -> GetResult: ...

    def put(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        blocks: Buffers,
        *,
        parent_hash: BlockHash | None = None,
    ) -> PutResult: ...
