"""Storing blocks: reserve, write, commit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore import messages as m
from kvstore import wire
from kvstore.envelope import ENVELOPE_BYTES, Codec, Envelope, checksum
from kvstore.errors import KvstoreError, ProtocolError
from kvstore.frames import WriteFrame, cut
from kvstore.keys import BlockHash, pack_hashes
from kvstore.messages import CommitState, OwnerId, ReservationId, ReserveState
from kvstore.namespace import Namespace
from kvstore_client.flows.attach import Scope, attached, best_effort
from kvstore_client.flows.batches import data_batches
from kvstore_client.flows.steps import Flow, call, write
from kvstore_client.results import PutResult, PutState, put_result

_REFUSALS = frozenset({int(ReserveState.FULL), int(ReserveState.DRAINING)})
_PUT_STATES = {int(ReserveState.STORED): PutState.ALREADY_STORED, int(ReserveState.PENDING): PutState.PENDING}


def put(
    scope: Scope,
    *,
    namespace: Namespace,
    hashes: Sequence[BlockHash],
    blocks: Sequence[memoryview],
    checksums: Sequence[int],
    parent_hash: BlockHash | None,
    owner_id: OwnerId,
) -> Flow[PutResult]:
    """Reserves, writes and commits batch by batch. Stops where the chain breaks: what follows could not be found.

    `checksums` are those of `blocks` before the first step. Were each taken as its block is sent, memory that its
    owner changed meanwhile would match, and be stored under the hash of what it held before.
    """
    states: list[PutState] = []
    failure: KvstoreError | None = None
    refusal: ReserveState | None = None
    for batch in data_batches(scope.config, namespace, block_count=len(hashes)):
        parent = hashes[batch.start - 1] if batch.start else parent_hash
        transfer = _Transfer(
            namespace=namespace,
            hashes=hashes[batch],
            blocks=blocks[batch],
            checksums=checksums[batch],
            owner_id=owner_id,
        )
        try:
            yield from _put_batch(scope, transfer, parent_hash=parent)
        except KvstoreError as error:
            failure = error
        states += transfer.states
        refusal = transfer.refusal
        if failure is not None or states[-1] is PutState.DROPPED:
            break
    states += [PutState.DROPPED] * (len(hashes) - len(states))
    return put_result(states, error=failure, refusal=refusal)


def checksum_blocks(blocks: Sequence[memoryview]) -> list[int]:
    """What `put` needs of the blocks, at several GB/s."""
    return [checksum(block) for block in blocks]


class _Transfer:
    """One batch of a put and what has become of its blocks so far."""

    def __init__(
        self,
        *,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        blocks: Sequence[memoryview],
        checksums: Sequence[int],
        owner_id: OwnerId,
    ) -> None:
        self.namespace = namespace
        self.hashes = hashes
        self.owner_id = owner_id
        self.states = [PutState.DROPPED] * len(hashes)
        self.refusal: ReserveState | None = None
        self._blocks = blocks
        self._checksums = checksums
        self._reserved: list[tuple[int, ReservationId]] = []

    @property
    def reservation_ids(self) -> tuple[ReservationId, ...]:
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

    def note_committed(self, response: m.CommitBlocksResponse) -> None:
        if len(response.commit_states) != len(self._reserved):
            raise ProtocolError(f"committed {len(self._reserved)} blocks, got {len(response.commit_states)} states")
        for (index, _), number in zip(self._reserved, response.commit_states, strict=True):
            if number == CommitState.COMMITTED:
                self.states[index] = PutState.STORED

    def frames(self) -> Iterator[WriteFrame]:
        layout, namespace_id = self.namespace.block_layout, self.namespace.id
        k_bytes = layout.planes[0].size_bytes
        v_bytes = layout.payload_bytes - k_bytes
        owner_id: OwnerId | None = self.owner_id
        for index, reservation_id in self._reserved:
            block = self._blocks[index]
            envelope = Envelope(
                namespace_id=namespace_id,
                block_hash=self.hashes[index],
                k_codec=Codec.EXACT,
                v_codec=Codec.EXACT if v_bytes else Codec.NONE,
                tokens=layout.tokens_per_block,
                k_bytes=k_bytes,
                v_bytes=v_bytes,
                decoded_bytes=layout.payload_bytes,
                payload_checksum=self._checksums[index],
            ).encode()
            for offset, length in cut(ENVELOPE_BYTES + layout.payload_bytes):
                start = max(0, offset - ENVELOPE_BYTES)
                yield WriteFrame(
                    reservation_id=reservation_id,
                    owner_id=owner_id,
                    offset_bytes=offset,
                    envelope=b"" if offset else envelope,
                    data=block[start : offset - ENVELOPE_BYTES + length],
                )
                owner_id = None


def _put_batch(scope: Scope, transfer: _Transfer, *, parent_hash: BlockHash | None) -> Flow[None]:
    config, namespace = scope.config, transfer.namespace
    request = m.ReserveBlocksRequest(
        namespace_id=namespace.id,
        owner_id=transfer.owner_id,
        parent_hash=parent_hash or b"",
        block_hashes=pack_hashes(transfer.hashes),
        reservation_s=config.reservation_s,
    )
    response = yield from attached(
        scope,
        namespace,
        lambda: call(wire.RESERVE_BLOCKS, request, timeout_s=config.control_timeout_s, is_owed=True),
    )
    scope.attachment.note(response.epoch)
    try:
        transfer.note_reserved(response)
        if not transfer.reservation_ids:
            return
        transfer_bytes = len(transfer.reservation_ids) * namespace.block_layout.payload_bytes
        timeout_s = config.data_timeout_s(transfer_bytes)
        yield from write(transfer.frames(), timeout_s=timeout_s)
        commit = m.CommitBlocksRequest(owner_id=transfer.owner_id, reservation_ids=transfer.reservation_ids)
        # The daemon verifies every byte before it answers, so this, too, takes time by the byte.
        transfer.note_committed((yield from call(wire.COMMIT_BLOCKS, commit, timeout_s=timeout_s)))
    except KvstoreError as error:
        scope.attachment.doubt(error)
        if transfer.reservation_ids:
            abort = m.AbortReservationsRequest(owner_id=transfer.owner_id, reservation_ids=transfer.reservation_ids)
            yield from best_effort(call(wire.ABORT_RESERVATIONS, abort, timeout_s=config.control_timeout_s))
        raise
