"""Telling what became known of blocks after they were used."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore import messages as m
from kvstore import wire
from kvstore.keys import BlockHash, pack_hashes
from kvstore.namespace import Namespace
from kvstore_client.flows.attach import Scope
from kvstore_client.flows.batches import hash_batches
from kvstore_client.flows.steps import Flow, Post


def tell(scope: Scope, *, namespace: Namespace, hashes: Sequence[BlockHash], hint: m.Hint) -> Flow[None]:
    """Without waiting for an answer: a daemon that does not know the namespace has none of the blocks either."""
    for batch in hash_batches(scope.config, block_count=len(hashes)):
        request = m.HintBlocksRequest(namespace_id=namespace.id, block_hashes=pack_hashes(hashes[batch]), hint=hint)
        yield Post(method=wire.HINT_BLOCKS, request=request)
