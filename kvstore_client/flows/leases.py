"""Leasing blocks, wherever they are in a list, for a transfer or a view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore import messages as m
from kvstore import wire
from kvstore.errors import ProtocolError
from kvstore.keys import BlockHash, pack_hashes
from kvstore.messages import LEASE_S_MAX, TICKET_BYTES, BlockState, LeaseId, OwnerId, TransferPath
from kvstore.namespace import Namespace
from kvstore.slab import SLOT_RECORD_BYTES
from kvstore_client.flows.attach import Scope, attached
from kvstore_client.flows.states import block_states
from kvstore_client.flows.steps import Flow, Post, call


@dataclass(frozen=True, slots=True, kw_only=True)
class Leased:
    """Blocks that are held; `hits` are their positions, in order, and `slots` or `ticket` is of exactly these."""

    path: TransferPath
    owner_id: OwnerId
    lease_id: LeaseId | None
    states: tuple[BlockState, ...]
    hits: Sequence[int]
    slots: bytes
    ticket: bytes


def lease_blocks(
    scope: Scope,
    namespace: Namespace,
    hashes: Sequence[BlockHash],
    *,
    path: TransferPath,
    owner_id: OwnerId,
    lease_s: float,
    hint: m.Hint | None = None,
) -> Flow[Leased]:
    request = m.LeaseBlocksRequest(
        namespace_id=namespace.id,
        owner_id=owner_id,
        block_hashes=pack_hashes(hashes),
        lease_s=min(lease_s, LEASE_S_MAX),
        path=path,
        hint=hint,
    )
    response = yield from attached(
        scope,
        namespace,
        lambda: call(wire.LEASE_BLOCKS, request, timeout_s=scope.config.control_timeout_s, is_owed=True),
    )
    scope.attachment.note(response.epoch)
    states = block_states(response.block_states, block_count=len(hashes))
    hit_count = response.block_states.count(BlockState.HIT)
    if hit_count == len(hashes):
        hits: Sequence[int] = range(hit_count)
    else:
        hits = [index for index, number in enumerate(response.block_states) if number == BlockState.HIT]
    leased = Leased(
        path=path,
        owner_id=owner_id,
        lease_id=response.lease_id,
        states=states,
        hits=hits,
        slots=response.slots,
        ticket=response.ticket,
    )
    if not _is_sound(response, path=path, hit_count=hit_count):
        yield from post_release(leased)
        raise ProtocolError(
            f"{hit_count} blocks were found, but the daemon answers with lease {response.lease_id}, "
            f"{len(response.slots)} bytes of slots and a ticket of {len(response.ticket)} bytes"
        )
    return leased


def post_release(leased: Leased) -> Flow[None]:
    """Gives the lease back without waiting; one for the data port ends by itself, with its transfer."""
    if leased.lease_id is not None and leased.path is not TransferPath.BULK:
        request = m.ReleaseLeasesRequest(owner_id=leased.owner_id, lease_ids=(leased.lease_id,))
        yield Post(method=wire.RELEASE_LEASES, request=request)


def _is_sound(response: m.LeaseBlocksResponse, *, path: TransferPath, hit_count: int) -> bool:
    if path is TransferPath.BULK:
        return len(response.ticket) == (TICKET_BYTES if hit_count else 0)
    return len(response.slots) == hit_count * SLOT_RECORD_BYTES and (response.lease_id is None) == (hit_count == 0)
