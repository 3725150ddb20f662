"""Storing blocks: reserve, move, commit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore import messages as m
from kvstore.envelope import ENVELOPE_BYTES
from kvstore.errors import KvstoreError
from kvstore.exact import exact_envelope
from kvstore.frames import WriteFrame, cut
from kvstore.keys import BlockHash
from kvstore.messages import OwnerId, ReserveState, TransferPath
from kvstore.namespace import Namespace
from kvstore_client.flows.attach import Scope, chosen_route
from kvstore_client.flows.batches import data_batches
from kvstore_client.flows.reservations import Reservations, abort, commit, reserve
from kvstore_client.flows.steps import Checksum, Flow, Send, write
from kvstore_client.results import PutResult, PutState, put_result


def put(
    scope: Scope,
    *,
    namespace: Namespace,
    hashes: Sequence[BlockHash],
    blocks: Sequence[memoryview],
    parent_hash: BlockHash | None,
    owner_id: OwnerId,
) -> Flow[PutResult]:
    """Reserves, moves and commits batch by batch. Stops where the chain breaks: what follows could not be found."""
    states: list[PutState] = []
    failure: KvstoreError | None = None
    refusal: ReserveState | None = None
    checksums = _Checksums(blocks)
    for batch in data_batches(scope.config, namespace, block_count=len(hashes)):
        parent = hashes[batch.start - 1] if batch.start else parent_hash
        transfer = _Transfer(
            namespace=namespace,
            hashes=hashes[batch],
            blocks=blocks[batch],
            owner_id=owner_id,
        )
        try:
            yield from _put_batch(scope, transfer, parent_hash=parent, checksums=checksums, batch=batch)
        except KvstoreError as error:
            failure = error
        states += transfer.states
        refusal = transfer.refusal
        if failure is not None or states[-1] is PutState.DROPPED:
            break
    states += [PutState.DROPPED] * (len(hashes) - len(states))
    return put_result(states, error=failure, refusal=refusal)


class _Checksums:
    """The checksums of all blocks of a put that goes over streams, taken together before the first is sent.

    Were each taken as its block is sent, memory that its owner changed meanwhile would match, and be stored under
    the hash of what it held before.
    """

    def __init__(self, blocks: Sequence[memoryview]) -> None:
        self._blocks = blocks
        self._known: Sequence[int] | None = None

    def of(self, batch: slice) -> Flow[Sequence[int]]:
        if self._known is None:
            self._known = yield Checksum(blocks=self._blocks)
        return self._known[batch]


class _Transfer(Reservations):
    """One batch of a put and what has become of its blocks so far."""

    def __init__(
        self,
        *,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        blocks: Sequence[memoryview],
        owner_id: OwnerId,
    ) -> None:
        super().__init__(namespace=namespace, hashes=hashes, owner_id=owner_id)
        self._blocks = blocks

    def send(self, response: m.ReserveBlocksResponse, *, path: TransferPath, timeout_s: float) -> Send:
        """The step that moves the reserved blocks."""
        return Send(
            path=path,
            namespace=self.namespace,
            hashes=[self.hashes[index] for index in self.reserved],
            blocks=[self._blocks[index] for index in self.reserved],
            slots=response.slots,
            ticket=response.ticket,
            timeout_s=timeout_s,
            owner_id=self.owner_id,
        )

    def frames(self, checksums: Sequence[int]) -> Iterator[WriteFrame]:
        owner_id: OwnerId | None = self.owner_id
        block_bytes = ENVELOPE_BYTES + self.namespace.block_layout.payload_bytes
        for index, reservation_id in zip(self.reserved, self.ids, strict=True):
            block = self._blocks[index]
            envelope = exact_envelope(self.namespace, self.hashes[index], payload_checksum=checksums[index])
            for offset, length in cut(block_bytes):
                start = max(0, offset - ENVELOPE_BYTES)
                yield WriteFrame(
                    reservation_id=reservation_id,
                    owner_id=owner_id,
                    offset_bytes=offset,
                    envelope=b"" if offset else envelope,
                    data=block[start : offset - ENVELOPE_BYTES + length],
                )
                owner_id = None


def _put_batch(
    scope: Scope, transfer: _Transfer, *, parent_hash: BlockHash | None, checksums: _Checksums, batch: slice
) -> Flow[None]:
    config, namespace = scope.config, transfer.namespace
    route = yield from chosen_route(scope, is_write=True)
    is_stream = route.path is TransferPath.STREAM
    # Before anything is reserved: what would not be written after all must not be held meanwhile.
    known = (yield from checksums.of(batch)) if is_stream else ()
    transfer.owner_id = route.owner_id or transfer.owner_id
    response = yield from reserve(scope, transfer, parent_hash=parent_hash, path=route.path)
    try:
        transfer.note_reserved(response)
        if not transfer.reserved:
            return
        # The daemon verifies every byte of a stream before it answers, so a commit, too, takes time by the byte.
        timeout_s = config.data_timeout_s(len(transfer.reserved) * namespace.block_layout.payload_bytes)
        commit_states: Sequence[int] | None = None
        if is_stream:
            yield from write(transfer.frames(known), timeout_s=timeout_s)
        else:
            commit_states = yield transfer.send(response, path=route.path, timeout_s=timeout_s)
        if commit_states is None:
            commit_states = yield from commit(scope, transfer, timeout_s=timeout_s, in_slots=not is_stream)
        transfer.note_committed(commit_states)
    except KvstoreError as error:
        scope.attachment.doubt(error)
        yield from abort(scope, transfer)
        raise
