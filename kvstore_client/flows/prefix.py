"""Looking a prefix up, and leasing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore import messages as m
from kvstore import wire
from kvstore.errors import KvstoreError, ProtocolError, UnavailableError
from kvstore.keys import BlockHash, pack_hashes
from kvstore.messages import BlockState, CutReason, Epoch, LeaseId, OwnerId
from kvstore.namespace import Namespace
from kvstore_client.flows.attach import Scope, attached, best_effort, chosen_route
from kvstore_client.flows.batches import hash_batches
from kvstore_client.flows.hints import tell
from kvstore_client.flows.states import block_states, leading_hits, matched_hits
from kvstore_client.flows.steps import Flow, Glance, call
from kvstore_client.results import LookupResult, padded


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquired:
    """A leased prefix. `owner_id` is this acquisition's own, or of its session with one start of the daemon: lease ids
    start again when a daemon does, and so nothing that was acquired since can be renewed or released by mistake."""

    owner_id: OwnerId
    lease_ids: tuple[LeaseId, ...]
    states: tuple[BlockState, ...]
    matched_count: int
    left_out_count: int
    cut_reason: CutReason
    error: KvstoreError | None


class HeldPrefix:
    """What `Lease` and `AsyncLease` tell alike."""

    def __init__(self, acquired: Acquired) -> None:
        self._acquired = acquired

    @property
    def states(self) -> tuple[BlockState, ...]:
        return self._acquired.states

    @property
    def matched_count(self) -> int:
        """Leading blocks that are held."""
        return self._acquired.matched_count

    @property
    def left_out_count(self) -> int:
        """Hits behind them that are not held, as they would be there later than recomputing them takes the caller."""
        return self._acquired.left_out_count

    @property
    def cut_reason(self) -> CutReason:
        """Why these are left out."""
        return self._acquired.cut_reason

    @property
    def error(self) -> KvstoreError | None:
        return self._acquired.error


def lookup(
    scope: Scope,
    *,
    namespace: Namespace,
    hashes: Sequence[BlockHash],
    wait_s: float,
    recompute_s_per_block: float | None = None,
    hint: m.Hint | None = None,
) -> Flow[LookupResult]:
    # Not before the daemon has introduced itself, or after it was lost: then it is to be asked.
    if hashes and scope.attachment.epoch is not None and (yield Glance(namespace=namespace, hashes=hashes)):
        if hint is not None:
            yield from tell(scope, namespace=namespace, hashes=hashes, hint=hint)
        return LookupResult(states=(BlockState.HIT,) * len(hashes), matched_count=len(hashes))
    states: tuple[BlockState, ...] = ()
    matched_count = left_out_count = 0
    cut_reason = CutReason.NONE
    failure: KvstoreError | None = None
    try:
        for batch in hash_batches(scope.config, block_count=len(hashes)):
            # Only the matched prefix is worth waiting for, so a batch behind its end is not.
            is_unbroken = matched_count == batch.start
            request = m.LookupBlocksRequest(
                namespace_id=namespace.id,
                block_hashes=pack_hashes(hashes[batch]),
                wait_s=wait_s if is_unbroken else 0.0,
                recompute_s_per_block=(recompute_s_per_block or 0.0) if is_unbroken else 0.0,
                hint=hint,
            )
            response = yield from attached(
                scope,
                namespace,
                lambda request=request: call(  # type: ignore[misc]  # mypy infers no lambda defaults
                    wire.LOOKUP_BLOCKS, request, timeout_s=scope.config.control_timeout_s + request.wait_s
                ),
            )
            scope.attachment.note(response.epoch)
            found = block_states(response.block_states, block_count=batch.stop - batch.start)
            if is_unbroken:
                matched_count += matched_hits(response)
                left_out_count, cut_reason = response.left_out_count, response.cut_reason
            elif matched_count + left_out_count == batch.start:  # the run of hits that was cut goes on
                left_out_count += leading_hits(response.block_states)
            states += found
    except KvstoreError as error:
        failure = error
        states = tuple(padded(states, len(hashes)))
    return LookupResult(
        states=states,
        matched_count=matched_count,
        error=failure,
        left_out_count=left_out_count,
        cut_reason=cut_reason,
    )


def acquire(
    scope: Scope,
    *,
    namespace: Namespace,
    hashes: Sequence[BlockHash],
    owner_id: OwnerId,
    lease_s: float,
    wait_s: float,
    recompute_s_per_block: float | None = None,
    hint: m.Hint | None = None,
) -> Flow[Acquired]:
    """Leases the matched prefix, batch by batch; a failure keeps what was leased before it."""
    states: list[BlockState] = []
    lease_ids: list[LeaseId] = []
    matched_count = left_out_count = 0
    cut_reason = CutReason.NONE
    epoch: Epoch | None = None
    failure: KvstoreError | None = None
    try:
        if hashes:
            # Held in the name of the client's session where there is one: then it goes with the client, if need be.
            route = yield from chosen_route(scope, is_write=False)
            owner_id = route.owner_id or owner_id
        for batch in hash_batches(scope.config, block_count=len(hashes)):
            request = m.AcquirePrefixRequest(
                namespace_id=namespace.id,
                owner_id=owner_id,
                block_hashes=pack_hashes(hashes[batch]),
                lease_s=lease_s,
                wait_s=wait_s,
                recompute_s_per_block=recompute_s_per_block or 0.0,
                hint=hint,
            )
            response = yield from attached(
                scope,
                namespace,
                lambda request=request: call(  # type: ignore[misc]
                    wire.ACQUIRE_PREFIX, request, timeout_s=scope.config.control_timeout_s + request.wait_s
                ),
            )
            scope.attachment.note(response.epoch)
            if epoch not in (None, response.epoch):
                states, lease_ids, matched_count = [], _leases(response), 0
                raise UnavailableError("the daemon was restarted while the prefix was being leased")
            epoch = response.epoch
            lease_ids += _leases(response)
            found = block_states(response.block_states, block_count=batch.stop - batch.start)
            found_count = matched_hits(response)
            if found_count and response.lease_id is None:
                raise ProtocolError(f"{found_count} blocks matched, but none is leased")
            states += found
            matched_count += found_count
            left_out_count, cut_reason = response.left_out_count, response.cut_reason
            if found_count < len(found):
                break
    except KvstoreError as error:
        failure = error
    return Acquired(
        owner_id=owner_id,
        lease_ids=tuple(lease_ids),
        states=tuple(padded(states, len(hashes))),
        matched_count=matched_count,
        left_out_count=left_out_count,
        cut_reason=cut_reason,
        error=failure,
    )


def renew(scope: Scope, acquired: Acquired, *, lease_s: float) -> Flow[bool]:
    """True when the whole matched prefix is held for `lease_s` from now on."""
    if not acquired.lease_ids:
        return False
    request = m.RenewLeasesRequest(owner_id=acquired.owner_id, lease_ids=acquired.lease_ids, lease_s=lease_s)
    try:
        response = yield from call(wire.RENEW_LEASES, request, timeout_s=scope.config.control_timeout_s)
    except KvstoreError:
        return False
    return len(response.renewed) == len(acquired.lease_ids) and all(response.renewed)


def release(scope: Scope, acquired: Acquired) -> Flow[None]:
    """Best effort: what cannot be released expires."""
    if acquired.lease_ids:
        request = m.ReleaseLeasesRequest(owner_id=acquired.owner_id, lease_ids=acquired.lease_ids)
        yield from best_effort(call(wire.RELEASE_LEASES, request, timeout_s=scope.config.control_timeout_s))


def _leases(response: m.AcquirePrefixResponse) -> list[LeaseId]:
    return [] if response.lease_id is None else [response.lease_id]
