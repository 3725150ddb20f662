"""Having blocks brought into memory before they are read."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore import messages as m
from kvstore import wire
from kvstore.envelope import ENVELOPE_BYTES
from kvstore.errors import KvstoreError, ProtocolError
from kvstore.keys import BlockHash, pack_hashes
from kvstore.namespace import Namespace
from kvstore_client.flows.attach import Scope, attached
from kvstore_client.flows.batches import hash_batches
from kvstore_client.flows.steps import Flow, call
from kvstore_client.results import PrefetchResult


def prefetch(
    scope: Scope,
    *,
    namespace: Namespace,
    hashes: Sequence[BlockHash],
    budget_bytes: int | None,
    hint: m.Hint | None = None,
) -> Flow[PrefetchResult]:
    """Batch by batch; once one was refused, or the budget is used up, what follows is refused unasked."""
    block_bytes = ENVELOPE_BYTES + namespace.stored_bytes
    in_memory_count = started_count = refused_count = missing_count = 0
    failure: KvstoreError | None = None
    left_bytes = budget_bytes or 0
    try:
        for batch in hash_batches(scope.config, block_count=len(hashes)):
            if refused_count or (budget_bytes and left_bytes < block_bytes):
                refused_count += batch.stop - batch.start
                continue
            request = m.PrefetchBlocksRequest(
                namespace_id=namespace.id, block_hashes=pack_hashes(hashes[batch]), budget_bytes=left_bytes, hint=hint
            )
            response = yield from attached(
                scope,
                namespace,
                lambda request=request: call(  # type: ignore[misc]  # mypy infers no lambda defaults
                    wire.PREFETCH_BLOCKS, request, timeout_s=scope.config.control_timeout_s
                ),
            )
            scope.attachment.note(response.epoch)
            _check(response, block_count=batch.stop - batch.start)
            in_memory_count += response.in_memory_count
            started_count += response.started_count
            refused_count += response.refused_count
            missing_count += response.missing_count
            left_bytes = max(0, left_bytes - response.started_count * block_bytes)
    except KvstoreError as error:
        failure = error
        missing_count = len(hashes) - in_memory_count - started_count - refused_count
    return PrefetchResult(
        in_memory_count=in_memory_count,
        started_count=started_count,
        refused_count=refused_count,
        missing_count=missing_count,
        error=failure,
    )


def _check(response: m.PrefetchBlocksResponse, *, block_count: int) -> None:
    counts = (response.in_memory_count, response.started_count, response.refused_count, response.missing_count)
    if sum(counts) != block_count:
        raise ProtocolError(f"asked to prefetch {block_count} blocks, the daemon speaks of {sum(counts)}")
