"""What the agent needs of the store below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from kvstore.errors import KvstoreError
from kvstore.keys import BlockHash
from kvstore.messages import BlockState
from kvstore.namespace import Namespace
from kvstore_client.buffers import Buffers
from kvstore_client.results import GetResult, LookupResult, PutResult


class Arena(Protocol):
    """Memory of the store that is mapped in this process; it stays mapped while anything refers to `memory`."""

    @property
    def memory(self) -> memoryview: ...

    @property
    def is_read_only(self) -> bool: ...


class SlotView(Protocol):
    """A verified block in its slot."""

    @property
    def payload(self) -> memoryview: ...

    def is_valid(self) -> bool:
        """False once the slot has been given to another block: what was copied until then is not to be used."""


class SlotViews(Protocol):
    """Blocks that are leased until the `with` block ends: a view per HIT, None for every other block."""

    @property
    def states(self) -> Sequence[BlockState]: ...

    @property
    def error(self) -> KvstoreError | None: ...

    def __iter__(self) -> Iterator[SlotView | None]: ...


class ReservedSlots(Protocol):
    """Slots that are reserved until the `with` block ends: one per block that the store wants, None for the others."""

    @property
    def slots(self) -> Sequence[memoryview | None]: ...

    def commit(self) -> PutResult:
        """To be called once, when the slots are filled: takes their checksums and makes their blocks readable."""


class Store(Protocol):
    """The part of `kvstore_client.Client` that moves blocks.

    Called from two threads at a time. Every call ends by a deadline of its own; whatever goes wrong with the
    daemon comes back as misses and drops with an `error`, never as an exception.
    """

    def lookup(self, namespace: Namespace, hashes: Sequence[BlockHash], *, wait_s: float = 0.0) -> LookupResult: ...

    def get(self, namespace: Namespace, hashes: Sequence[BlockHash], into: Buffers) -> GetResult: ...

    def put(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        blocks: Buffers,
        *,
        parent_hash: BlockHash | None = None,
    ) -> PutResult: ...

    def arenas(self) -> Sequence[Arena]:
        """What is mapped now; nothing where store and agent share no memory. Asks nobody."""

    def view(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> AbstractContextManager[SlotViews, Any]: ...

    def reserve(
        self, namespace: Namespace, hashes: Sequence[BlockHash], *, parent_hash: BlockHash | None = None
    ) -> AbstractContextManager[ReservedSlots, Any]: ...
