"""Loading blocks into the caller's memory."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore import messages as m
from kvstore import wire
from kvstore.errors import KvstoreError
from kvstore.keys import BlockHash, pack_hashes
from kvstore.messages import BlockState
from kvstore.namespace import Namespace
from kvstore_client.flows.assembly import BlockAssembler
from kvstore_client.flows.attach import Scope, attached, best_effort
from kvstore_client.flows.batches import data_batches
from kvstore_client.flows.steps import Flow, call, read
from kvstore_client.results import GetResult, get_result, padded


def get(
    scope: Scope, *, namespace: Namespace, hashes: Sequence[BlockHash], targets: Sequence[memoryview]
) -> Flow[GetResult]:
    """Fills `targets` with verified blocks. Stops at the first failed transfer; blocks loaded by then stay hits."""
    states: list[BlockState] = []
    fault: KvstoreError | None = None
    for batch in data_batches(scope.config, namespace, block_count=len(hashes)):
        assembler = BlockAssembler(
            namespace_id=namespace.id,
            hashes=hashes[batch],
            targets=targets[batch],
            payload_bytes=namespace.block_layout.payload_bytes,
        )
        failure = yield from _read_batch(scope, namespace, hashes[batch], assembler)
        states += assembler.states
        fault = fault or failure or assembler.first_fault
        if assembler.unverified:
            request = m.VerifyBlocksRequest(namespace_id=namespace.id, block_hashes=pack_hashes(assembler.unverified))
            yield from best_effort(call(wire.VERIFY_BLOCKS, request, timeout_s=scope.config.control_timeout_s))
        if failure is not None:
            break
    return get_result(padded(states, len(hashes)), error=fault)


def _read_batch(
    scope: Scope, namespace: Namespace, hashes: Sequence[BlockHash], assembler: BlockAssembler
) -> Flow[KvstoreError | None]:
    request = m.ReadBlocksRequest(namespace_id=namespace.id, block_hashes=pack_hashes(hashes))
    timeout_s = scope.config.data_timeout_s(len(hashes) * namespace.block_layout.payload_bytes)
    try:
        yield from attached(scope, namespace, lambda: read(request, on_frame=assembler.accept, timeout_s=timeout_s))
    except KvstoreError as error:
        return error
    return None
