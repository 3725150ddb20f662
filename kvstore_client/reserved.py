"""Blocks that the caller writes where they are to lie, without a copy: the write twin of views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from kvstore.envelope import checksum
from kvstore.errors import KvstoreError, UnavailableError
from kvstore.keys import BlockHash
from kvstore.namespace import Namespace
from kvstore.slab import PAYLOAD_OFFSET_BYTES, SLOT_HEADER_BYTES, SlotRecord, encode_slot_header
from kvstore_client.flows import fill
from kvstore_client.flows.attach import Scope
from kvstore_client.flows.fill import Filling
from kvstore_client.flows.steps import Flow
from kvstore_client.paths.slab import SlabSession
from kvstore_client.results import PutResult


class Reserved:
    """Room for blocks of one chain. Fill `slots`, then `commit`; leaving the `with` block gives back what is not.

    There is a slot per block that the daemon wants, of exactly the block's bytes, and None for every other one: it has
    the block, somebody else is writing it, or it has no room. Nobody but the caller writes to a slot until the `with`
    block has ended, and nothing may write to it after that: a device that copies must have finished.
    """

    def __init__(
        self,
        filling: Filling,
        *,
        session: SlabSession | None,
        put: Callable[[Sequence[memoryview]], PutResult],
        scope: Scope,
        run: Callable[[Flow[Any]], Any],
    ) -> None:
        self._filling = filling
        self._put = put
        self._scope = scope
        self._run = run
        self._result: PutResult | None = None
        self._held = ExitStack()
        self._whole: list[memoryview | None] = []
        """The slots with header and envelope, where the daemon's memory is shared."""
        self.slots: tuple[memoryview | None, ...] = self._open(session)

    @property
    def is_copy(self) -> bool:
        """True where no memory is shared with the daemon: then the slots are private, and `commit` sends them."""
        return self._filling.records is None

    @property
    def error(self) -> KvstoreError | None:
        """What kept the daemon from reserving anything."""
        return self._filling.error

    def commit(self) -> PutResult:
        """Takes the checksums of the slots and makes their blocks readable; called again, it repeats its answer."""
        if self._result is None:
            self._result = self._commit()
        return self._result

    def __enter__(self) -> Reserved:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._held:
            if self._result is None and not self.is_copy and self.error is None:
                self._run(fill.give_up(self._scope, self._filling))
            self._result = self._result or self._filling.result()
            self.slots = ()
            self._whole = []

    def _commit(self) -> PutResult:
        filling = self._filling
        if filling.records is None and filling.error is None:
            return self._put([slot for slot in self.slots if slot is not None])
        reservations = filling.reservations
        for index, slot in zip(reservations.reserved, self._whole, strict=False):
            if slot is not None:
                _seal(slot, namespace=reservations.namespace, block_hash=reservations.hashes[index])
        self._run(fill.finish(self._scope, filling))
        return filling.result()

    def _open(self, session: SlabSession | None) -> tuple[memoryview | None, ...]:
        filling = self._filling
        reservations = filling.reservations
        slots: list[memoryview | None] = [None] * len(reservations.hashes)
        payload_bytes = reservations.namespace.stored_bytes
        if filling.error is not None:
            return tuple(slots)
        if filling.records is None:
            return tuple(memoryview(bytearray(payload_bytes)) for _ in slots)
        try:
            if session is None and filling.records:
                raise UnavailableError("the slab session has ended, and what it held with it")
            if session is not None:
                self._held.enter_context(session.used())
                self._whole = [
                    _reserved_slot(session, record, payload_bytes=payload_bytes) for record in filling.records
                ]
        except KvstoreError as error:
            self._run(fill.fail(self._scope, filling, error))
            return tuple(slots)
        for index, slot in zip(reservations.reserved, self._whole, strict=True):
            if slot is not None:
                slots[index] = slot[PAYLOAD_OFFSET_BYTES : PAYLOAD_OFFSET_BYTES + payload_bytes]
        return tuple(slots)


def _reserved_slot(session: SlabSession, record: SlotRecord, *, payload_bytes: int) -> memoryview | None:
    """None when it is nobody's or somebody else's by now; the daemon says so when it is asked to commit it."""
    header = encode_slot_header(record.generation, is_readable=False, is_verified=False)
    slot = session.slot(record, sequence=header, payload_bytes=payload_bytes)
    return slot if slot[:SLOT_HEADER_BYTES] == header else None


def _seal(slot: memoryview, *, namespace: Namespace, block_hash: BlockHash) -> None:
    payload = slot[PAYLOAD_OFFSET_BYTES : PAYLOAD_OFFSET_BYTES + namespace.stored_bytes]
    slot[SLOT_HEADER_BYTES:PAYLOAD_OFFSET_BYTES] = namespace.envelopes.encode(
        block_hash, payload_checksum=checksum(payload)
    )
