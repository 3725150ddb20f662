"""Storing blocks: reserve, move, commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvstore import messages as m
from kvstore.envelope import ENVELOPE_BYTES
from kvstore.errors import KvstoreError
from kvstore.frames import WriteFrame, cut
from kvstore.keys import BlockHash
from kvstore.messages import OwnerId, ReserveState, TransferPath
from kvstore.namespace import Namespace
from kvstore_client.flows.attach import Scope, chosen_route
from kvstore_client.flows.batches import data_batches
from kvstore_client.flows.reservations import Reservations, abort, commit, reserve
from kvstore_client.flows.steps import Checksum, Flow, HashAhead, Hashing, Send, write
from kvstore_client.results import PutResult, PutState, put_result


def put(
    scope: Scope,
    *,
    namespace: Namespace,
    hashes: Sequence[BlockHash],
    blocks: Sequence[memoryview],
    parent_hash: BlockHash | None,
    owner_id: OwnerId,
    hint: m.Hint | None = None,
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
            hint=hint,
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
        hint: m.Hint | None,
    ) -> None:
        super().__init__(namespace=namespace, hashes=hashes, owner_id=owner_id)
        self.blocks = blocks
        self.hint = hint

    def send(
        self,
        response: m.ReserveBlocksResponse,
        *,
        path: TransferPath,
        checksum_of: Callable[[int], int] | None,
        timeout_s: float,
    ) -> Send:
        """The step that moves the reserved blocks."""
        reserved = self.reserved
        return Send(
            path=path,
            namespace=self.namespace,
            hashes=[self.hashes[index] for index in reserved],
            blocks=[self.blocks[index] for index in reserved],
            slots=response.slots,
            ticket=response.ticket,
            timeout_s=timeout_s,
            owner_id=self.owner_id,
            checksum_of=None if checksum_of is None else lambda position: checksum_of(reserved[position]),
        )

    def frames(self, checksum_of: Callable[[int], int]) -> Iterator[WriteFrame]:
        owner_id: OwnerId | None = self.owner_id
        block_bytes = ENVELOPE_BYTES + self.namespace.stored_bytes
        for index, reservation_id in zip(self.reserved, self.ids, strict=True):
            block = self.blocks[index]
            envelope = self.namespace.envelopes.encode(self.hashes[index], payload_checksum=checksum_of(index))
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
    route = yield from chosen_route(scope, is_write=True)
    transfer.owner_id = route.owner_id or transfer.owner_id
    match route.path:
        case TransferPath.STREAM:
            # Before anything is reserved: what would not be written after all must not be held meanwhile.
            known = yield from checksums.of(batch)
            yield from _move_batch(
                scope, transfer, parent_hash=parent_hash, path=route.path, checksum_of=known.__getitem__
            )
        case TransferPath.SLAB:
            yield from _move_batch(scope, transfer, parent_hash=parent_hash, path=route.path, checksum_of=None)
        case TransferPath.BULK | TransferPath.NIXL:
            hashing: Hashing = yield HashAhead(blocks=transfer.blocks)
            try:
                yield from _move_batch(
                    scope, transfer, parent_hash=parent_hash, path=route.path, checksum_of=hashing.take
                )
            finally:
                hashing.close()


def _move_batch(
    scope: Scope,
    transfer: _Transfer,
    *,
    parent_hash: BlockHash | None,
    path: TransferPath,
    checksum_of: Callable[[int], int] | None,
) -> Flow[None]:
    """`checksum_of` a block of the batch; None where whoever copies the block takes it."""
    config, namespace = scope.config, transfer.namespace
    response = yield from reserve(scope, transfer, parent_hash=parent_hash, path=path, hint=transfer.hint)
    try:
        transfer.note_reserved(response)
        if not transfer.reserved:
            return
        # The daemon verifies every byte of a stream before it answers, so a commit, too, takes time by the byte.
        timeout_s = config.data_timeout_s(len(transfer.reserved) * namespace.stored_bytes)
        commit_states: Sequence[int] | None = None
        if path is TransferPath.STREAM:
            assert checksum_of is not None, "the envelopes of a stream are written here"
            yield from write(transfer.frames(checksum_of), timeout_s=timeout_s)
        else:
            commit_states = yield transfer.send(response, path=path, checksum_of=checksum_of, timeout_s=timeout_s)
        if commit_states is None:
            in_slots = path is not TransferPath.STREAM
            commit_states = yield from commit(scope, transfer, timeout_s=timeout_s, in_slots=in_slots)
        transfer.note_committed(commit_states)
    except KvstoreError as error:
        scope.attachment.doubt(error)
        yield from abort(scope, transfer)
        raise
