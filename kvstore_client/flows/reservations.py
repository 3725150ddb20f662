"""What has been reserved for the blocks of a batch, and what has become of them."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore import messages as m
from kvstore import wire
from kvstore.errors import ProtocolError
from kvstore.keys import BlockHash, pack_hashes
from kvstore.messages import CommitState, OwnerId, ReservationId, ReserveState, TransferPath
from kvstore.namespace import Namespace
from kvstore_client.flows.attach import Scope, attached, best_effort
from kvstore_client.flows.steps import Flow, call
from kvstore_client.results import PutState

_REFUSALS = frozenset({int(ReserveState.FULL), int(ReserveState.DRAINING), int(ReserveState.OVERLOADED)})
_PUT_STATES = {int(ReserveState.STORED): PutState.ALREADY_STORED, int(ReserveState.PENDING): PutState.PENDING}


class Reservations:
    """The blocks of one batch of a chain; `reserved` are the positions of those that are to be written."""

    def __init__(self, *, namespace: Namespace, hashes: Sequence[BlockHash], owner_id: OwnerId) -> None:
        self.namespace = namespace
        self.hashes = hashes
        self.owner_id = owner_id
        self.states = [PutState.DROPPED] * len(hashes)
        self.refusal: ReserveState | None = None
        self._reserved: list[tuple[int, ReservationId]] = []

    @property
    def reserved(self) -> list[int]:
        return [index for index, _ in self._reserved]

    @property
    def ids(self) -> tuple[ReservationId, ...]:
        return tuple(reservation for _, reservation in self._reserved)

    def note_reserved(self, response: m.ReserveBlocksResponse) -> None:
        # What is reserved is noted before anything is found wrong, so that it can be aborted.
        self._reserved = [
            (index, reservation)
            for index, reservation in enumerate(response.reservation_ids[: len(self.hashes)])
            if reservation is not None
        ]
        if not len(response.reserve_states) == len(response.reservation_ids) == len(self.hashes):
            raise ProtocolError(
                f"reserved {len(self.hashes)} blocks, got {len(response.reserve_states)} states "
                f"and {len(response.reservation_ids)} reservations"
            )
        for index, number in enumerate(response.reserve_states):
            if (number == ReserveState.RESERVED) != (response.reservation_ids[index] is not None):
                raise ProtocolError(f"block {index} has reserve state {number} and contradicts its reservation")
            self.states[index] = _PUT_STATES.get(number, PutState.DROPPED)
            if self.refusal is None and number in _REFUSALS:
                self.refusal = ReserveState(number)

    def note_committed(self, commit_states: Sequence[int]) -> None:
        """Takes states of commits, packed or not."""
        if len(commit_states) != len(self._reserved):
            raise ProtocolError(f"committed {len(self._reserved)} blocks, got {len(commit_states)} states")
        for (index, _), number in zip(self._reserved, commit_states, strict=True):
            if number == CommitState.COMMITTED:
                self.states[index] = PutState.STORED


def reserve(
    scope: Scope,
    reservations: Reservations,
    *,
    parent_hash: BlockHash | None,
    path: TransferPath,
    hint: m.Hint | None,
) -> Flow[m.ReserveBlocksResponse]:
    """Asks for reservations. The caller notes them, and owes them an end from then on."""
    request = m.ReserveBlocksRequest(
        namespace_id=reservations.namespace.id,
        owner_id=reservations.owner_id,
        parent_hash=parent_hash or b"",
        block_hashes=pack_hashes(reservations.hashes),
        reservation_s=scope.config.reservation_s,
        path=path,
        hint=hint,
    )
    response = yield from attached(
        scope,
        reservations.namespace,
        lambda: call(wire.RESERVE_BLOCKS, request, timeout_s=scope.config.control_timeout_s, is_owed=True),
    )
    scope.attachment.note(response.epoch)
    return response


def commit(scope: Scope, reservations: Reservations, *, timeout_s: float, in_slots: bool) -> Flow[Sequence[int]]:
    """The states of the commits, packed."""
    request = m.CommitBlocksRequest(owner_id=reservations.owner_id, reservation_ids=reservations.ids, in_slots=in_slots)
    committed = yield from call(wire.COMMIT_BLOCKS, request, timeout_s=timeout_s)
    return committed.commit_states


def abort(scope: Scope, reservations: Reservations) -> Flow[None]:
    """Gives back what is reserved, as far as that can be told to anybody."""
    if reservations.ids:
        request = m.AbortReservationsRequest(owner_id=reservations.owner_id, reservation_ids=reservations.ids)
        yield from best_effort(call(wire.ABORT_RESERVATIONS, request, timeout_s=scope.config.control_timeout_s))
