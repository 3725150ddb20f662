"""Looking at blocks where they lie, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from kvstore import messages as m
from kvstore import wire
from kvstore.errors import CorruptBlockError, KvstoreError
from kvstore.keys import BlockHash
from kvstore.messages import BlockState, OwnerId, TransferPath
from kvstore.namespace import Namespace
from kvstore_client.flows.attach import Scope, chosen_route
from kvstore_client.flows.batches import hash_batches
from kvstore_client.flows.leases import Leased, lease_blocks, post_release
from kvstore_client.flows.load import get, report_unverified
from kvstore_client.flows.steps import Flow, SeenBlock, View, call
from kvstore_client.results import count_leading_hits


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewed:
    """One entry of `blocks` per block: where it lies, its private copy, or None when it is no hit."""

    namespace: Namespace
    states: Sequence[BlockState]
    matched_count: int
    blocks: Sequence[SeenBlock | memoryview | None]
    leases: Sequence[Leased]
    error: KvstoreError | None


def view(
    scope: Scope,
    *,
    namespace: Namespace,
    hashes: Sequence[BlockHash],
    owner_id: OwnerId,
    lease_s: float,
    hint: m.Hint | None = None,
) -> Flow[Viewed]:
    """Leases what is stored among these blocks and says where it lies; private copies where no memory is shared."""
    states: list[BlockState] = []
    blocks: list[SeenBlock | memoryview | None] = []
    leases: list[Leased] = []
    unverified: list[BlockHash] = []
    error: KvstoreError | None = None
    if not hashes:
        return Viewed(namespace=namespace, states=(), matched_count=0, blocks=(), leases=(), error=None)
    try:
        route = yield from chosen_route(scope, is_write=False)
        if route.path is not TransferPath.SLAB or route.owner_id is None:
            return (yield from _copies(scope, namespace=namespace, hashes=hashes, owner_id=owner_id, hint=hint))
        for batch in hash_batches(scope.config, block_count=len(hashes)):
            wanted = hashes[batch]
            leased = yield from lease_blocks(
                scope, namespace, wanted, path=route.path, owner_id=route.owner_id, lease_s=lease_s, hint=hint
            )
            leases.append(leased)
            if not leased.hits:
                states += leased.states
                blocks += [None] * len(wanted)
                continue
            if len(leased.hits) != len(wanted):
                wanted = [wanted[index] for index in leased.hits]
            seen: Sequence[SeenBlock | BlockState] = yield View(
                namespace=namespace, hashes=wanted, slots=leased.slots, owner_id=leased.owner_id
            )
            unverified += _place(leased, wanted, seen, states, blocks)
    except KvstoreError as failure:
        error = failure
        scope.attachment.doubt(failure)
    if unverified:
        error = error or CorruptBlockError(f"block {unverified[0].hex()[:16]} does not match its envelope")
        yield from report_unverified(scope, namespace, unverified)
    missing_count = len(hashes) - len(states)
    return Viewed(
        namespace=namespace,
        states=(*states, *(BlockState.MISS,) * missing_count),
        matched_count=count_leading_hits(states),
        blocks=(*blocks, *(None,) * missing_count),
        leases=leases,
        error=error,
    )


def renew(scope: Scope, viewed: Viewed, *, lease_s: float) -> Flow[bool]:
    """True when every block in view is held for `lease_s` from now on."""
    held = [leased for leased in viewed.leases if leased.lease_id is not None]
    try:
        for leased in held:
            request = m.RenewLeasesRequest(owner_id=leased.owner_id, lease_ids=(_held(leased),), lease_s=lease_s)
            response = yield from call(wire.RENEW_LEASES, request, timeout_s=scope.config.control_timeout_s)
            if response.renewed != (True,):
                return False
    except KvstoreError:
        return False
    return any(block is not None for block in viewed.blocks)


def release(viewed: Viewed) -> Flow[None]:
    """Without waiting for an answer: what cannot be released expires."""
    for leased in viewed.leases:
        yield from post_release(leased)


def _held(leased: Leased) -> m.LeaseId:
    assert leased.lease_id is not None, "renews what is not held"
    return leased.lease_id


def _place(
    leased: Leased,
    wanted: Sequence[BlockHash],
    seen: Sequence[SeenBlock | BlockState],
    states: list[BlockState],
    blocks: list[SeenBlock | memoryview | None],
) -> list[BlockHash]:
    """Puts what was seen beside what was not there; returns what did not verify."""
    start = len(states)
    states += leased.states
    if len(seen) == len(leased.states) and set(map(type, seen)) == {SeenBlock}:
        blocks += cast("Sequence[SeenBlock]", seen)  # all of them, as usual
        return []
    blocks += [None] * len(leased.states)
    unverified = []
    for index, block, block_hash in zip(leased.hits, seen, wanted, strict=True):
        if isinstance(block, SeenBlock):
            blocks[start + index] = block
            continue
        states[start + index] = block
        if block is BlockState.CORRUPT:
            unverified.append(block_hash)
    return unverified


def _copies(
    scope: Scope, *, namespace: Namespace, hashes: Sequence[BlockHash], owner_id: OwnerId, hint: m.Hint | None
) -> Flow[Viewed]:
    size_bytes = namespace.stored_bytes
    targets = [memoryview(bytearray(size_bytes)) for _ in hashes]
    loaded = yield from get(scope, namespace=namespace, hashes=hashes, targets=targets, owner_id=owner_id, hint=hint)
    return Viewed(
        namespace=namespace,
        states=loaded.states,
        matched_count=loaded.matched_count,
        blocks=[
            target.toreadonly() if state is BlockState.HIT else None
            for target, state in zip(targets, loaded.states, strict=True)
        ],
        leases=(),
        error=loaded.error,
    )
