"""Loading blocks into the caller's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore import messages as m
from kvstore import wire
from kvstore.errors import CorruptBlockError, KvstoreError
from kvstore.keys import BlockHash, pack_hashes
from kvstore.messages import BlockState, OwnerId, TransferPath
from kvstore.namespace import Namespace
from kvstore_client.flows.assembly import BlockAssembler
from kvstore_client.flows.attach import Scope, attached, best_effort, chosen_route
from kvstore_client.flows.batches import data_batches
from kvstore_client.flows.leases import lease_blocks, post_release
from kvstore_client.flows.steps import Fetch, Flow, Post, Recall, Route, call, read
from kvstore_client.results import GetResult, get_result, padded


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """What became of one batch. `failure` ends the load, `fault` is what was wrong with a block."""

    states: Sequence[BlockState]
    unverified: Sequence[BlockHash] = ()
    fault: KvstoreError | None = None
    failure: KvstoreError | None = None


def get(
    scope: Scope,
    *,
    namespace: Namespace,
    hashes: Sequence[BlockHash],
    targets: Sequence[memoryview],
    owner_id: OwnerId,
    hint: m.Hint | None = None,
) -> Flow[GetResult]:
    """Fills `targets` with verified blocks. Stops at the first failed transfer; blocks loaded by then stay hits."""
    states: list[BlockState] = []
    fault: KvstoreError | None = None
    for batch in data_batches(scope.config, namespace, block_count=len(hashes)):
        loaded = yield from _load_batch(scope, namespace, hashes[batch], targets[batch], owner_id=owner_id, hint=hint)
        states += loaded.states
        fault = fault or loaded.failure or loaded.fault
        if loaded.unverified:
            yield from report_unverified(scope, namespace, loaded.unverified)
        if loaded.failure is not None:
            break
    return get_result(padded(states, len(hashes)), error=fault)


def report_unverified(scope: Scope, namespace: Namespace, hashes: Sequence[BlockHash]) -> Flow[None]:
    """Has the daemon look at its own copies of blocks that came and did not verify."""
    request = m.VerifyBlocksRequest(namespace_id=namespace.id, block_hashes=pack_hashes(hashes))
    yield from best_effort(call(wire.VERIFY_BLOCKS, request, timeout_s=scope.config.control_timeout_s))


def _load_batch(
    scope: Scope,
    namespace: Namespace,
    hashes: Sequence[BlockHash],
    targets: Sequence[memoryview],
    *,
    owner_id: OwnerId,
    hint: m.Hint | None,
) -> Flow[_Loaded]:
    try:
        route = yield from chosen_route(scope, is_write=False)
        if route.path is not TransferPath.STREAM:
            return (
                yield from _fetch_batch(scope, namespace, hashes, targets, route=route, owner_id=owner_id, hint=hint)
            )
    except KvstoreError as error:
        return _Loaded(states=(), failure=error)
    return (yield from _read_batch(scope, namespace, hashes, targets, hint=hint))


def _read_batch(
    scope: Scope,
    namespace: Namespace,
    hashes: Sequence[BlockHash],
    targets: Sequence[memoryview],
    *,
    hint: m.Hint | None,
) -> Flow[_Loaded]:
    assembler = BlockAssembler(
        namespace_id=namespace.id,
        hashes=hashes,
        targets=targets,
        payload_bytes=namespace.stored_bytes,
    )
    request = m.ReadBlocksRequest(namespace_id=namespace.id, block_hashes=pack_hashes(hashes), hint=hint)
    timeout_s = scope.config.data_timeout_s(len(hashes) * namespace.stored_bytes)
    failure: KvstoreError | None = None
    try:
        yield from attached(scope, namespace, lambda: read(request, on_frame=assembler.accept, timeout_s=timeout_s))
    except KvstoreError as error:
        failure = error
    return _Loaded(
        states=assembler.states, unverified=assembler.unverified, fault=assembler.first_fault, failure=failure
    )


def _fetch_batch(
    scope: Scope,
    namespace: Namespace,
    hashes: Sequence[BlockHash],
    targets: Sequence[memoryview],
    *,
    route: Route,
    owner_id: OwnerId,
    hint: m.Hint | None,
) -> Flow[_Loaded]:
    timeout_s = scope.config.data_timeout_s(len(hashes) * namespace.stored_bytes)
    if route.path is TransferPath.SLAB and route.owner_id is not None:
        is_done = yield from _fetch_known(scope, namespace, hashes, targets, owner_id=route.owner_id, hint=hint)
        if is_done:
            return _Loaded(states=[BlockState.HIT] * len(hashes))
    leased = yield from lease_blocks(
        scope, namespace, hashes, path=route.path, owner_id=route.owner_id or owner_id, lease_s=timeout_s, hint=hint
    )
    states = list(leased.states)
    if not leased.hits:
        return _Loaded(states=states)
    wanted = [hashes[index] for index in leased.hits]
    try:
        found: Sequence[BlockState] = yield Fetch(
            path=route.path,
            namespace=namespace,
            hashes=wanted,
            targets=[targets[index] for index in leased.hits],
            slots=leased.slots,
            ticket=leased.ticket,
            timeout_s=timeout_s,
            owner_id=leased.owner_id,
        )
    except KvstoreError as error:
        scope.attachment.doubt(error)
        yield from post_release(leased)
        return _Loaded(states=(), failure=error)
    yield from post_release(leased)
    for index, state in zip(leased.hits, found, strict=True):
        states[index] = state
    unverified = [block for block, state in zip(wanted, found, strict=True) if state is BlockState.CORRUPT]
    fault = CorruptBlockError(f"block {unverified[0].hex()[:16]} does not match its envelope") if unverified else None
    return _Loaded(states=states, unverified=unverified, fault=fault)


def _fetch_known(
    scope: Scope,
    namespace: Namespace,
    hashes: Sequence[BlockHash],
    targets: Sequence[memoryview],
    *,
    owner_id: OwnerId,
    hint: m.Hint | None,
) -> Flow[bool]:
    """Copies blocks from where this client has met them before, without asking; False when they are not all there."""
    slots: bytes = yield Recall(namespace=namespace, hashes=hashes, owner_id=owner_id)
    if not slots:
        return False
    found: Sequence[BlockState] = yield Fetch(
        path=TransferPath.SLAB,
        namespace=namespace,
        hashes=hashes,
        targets=targets,
        slots=slots,
        ticket=b"",
        timeout_s=scope.config.data_timeout_s(0),
        owner_id=owner_id,
    )
    if found.count(BlockState.HIT) != len(hashes):
        return False  # some have left meanwhile, or are damaged: the daemon is asked after all
    yield Post(
        method=wire.COUNT_READS,
        request=m.CountReadsRequest(namespace_id=namespace.id, block_hashes=pack_hashes(hashes), hint=hint),
    )
    return True
