"""Storing blocks that the caller writes into their slots itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore import messages as m
from kvstore.errors import KvstoreError, ProtocolError
from kvstore.keys import BlockHash
from kvstore.messages import OwnerId, TransferPath
from kvstore.namespace import Namespace
from kvstore.slab import SlotRecord, decode_slot_records
from kvstore_client.flows.attach import Scope, chosen_route
from kvstore_client.flows.reservations import Reservations, abort, commit, reserve
from kvstore_client.flows.steps import Flow
from kvstore_client.results import PutResult, put_result


@dataclass(slots=True, kw_only=True)
class Filling:
    """Blocks of a chain and the slots that are reserved for them."""

    reservations: Reservations
    records: Sequence[SlotRecord] | None = None
    """One per reserved block; None where no memory is shared with the daemon, and nothing is reserved."""
    error: KvstoreError | None = None

    def result(self) -> PutResult:
        reservations = self.reservations
        return put_result(reservations.states, error=self.error, refusal=reservations.refusal)


def begin(
    scope: Scope,
    *,
    namespace: Namespace,
    hashes: Sequence[BlockHash],
    parent_hash: BlockHash | None,
    owner_id: OwnerId,
    hint: m.Hint | None = None,
) -> Flow[Filling]:
    """Reserves what the daemon wants of these blocks. A failure is told by the filling."""
    filling = Filling(reservations=Reservations(namespace=namespace, hashes=hashes, owner_id=owner_id))
    reservations = filling.reservations
    try:
        route = yield from chosen_route(scope, is_write=True)
        if route.path is not TransferPath.SLAB or route.owner_id is None:
            return filling
        reservations.owner_id = route.owner_id
        response = yield from reserve(scope, reservations, parent_hash=parent_hash, path=route.path, hint=hint)
        reservations.note_reserved(response)
        records = decode_slot_records(response.slots)
        if len(records) != len(reservations.reserved):
            raise ProtocolError(f"{len(records)} slots for {len(reservations.reserved)} reservations")
        filling.records = records
    except KvstoreError as error:
        yield from fail(scope, filling, error)
    return filling


def finish(scope: Scope, filling: Filling) -> Flow[None]:
    """Commits what is in the slots."""
    reservations = filling.reservations
    if not reservations.reserved or filling.error is not None:
        return
    block_bytes = reservations.namespace.stored_bytes
    timeout_s = scope.config.data_timeout_s(len(reservations.reserved) * block_bytes)
    try:
        reservations.note_committed((yield from commit(scope, reservations, timeout_s=timeout_s, in_slots=True)))
    except KvstoreError as error:
        yield from fail(scope, filling, error)


def fail(scope: Scope, filling: Filling, error: KvstoreError) -> Flow[None]:
    """Nothing more is written after this: the slots go back."""
    filling.error = error
    filling.records = ()
    scope.attachment.doubt(error)
    yield from abort(scope, filling.reservations)


def give_up(scope: Scope, filling: Filling) -> Flow[None]:
    """Gives back what was not committed; nothing more is written after this."""
    yield from abort(scope, filling.reservations)
