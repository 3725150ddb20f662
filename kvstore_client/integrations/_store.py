"""What an engine's connector uses of a store: a `Client`, or the node's agent before one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol, TypeAlias

from torch import Tensor

from kvstore.errors import KvstoreError
from kvstore.keys import BlockHash
from kvstore.messages import StoreInfo
from kvstore.namespace import Namespace
from kvstore_client.hints import Hint
from kvstore_client.results import LookupResult, PutResult

Room: TypeAlias = memoryview | Tensor
"""Where a block lies: host memory, or a row of an agent's pool on a GPU."""


class BlockInPlace(Protocol):
    """One block to be copied from."""

    @property
    def payload(self) -> Room: ...

    def is_valid(self) -> bool:
        """False: what was copied until now is not to be used."""


class BlocksInPlace(Protocol):
    """Blocks that stay where they are until the `with` block ends; None for what is no hit."""

    @property
    def error(self) -> KvstoreError | None: ...
    def __iter__(self) -> Iterator[BlockInPlace | None]: ...
    def __enter__(self) -> BlocksInPlace: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class BlocksToFill(Protocol):
    """Room that is given back when the `with` block ends, unless it was filled and committed."""

    @property
    def slots(self) -> Sequence[Room | None]: ...
    def commit(self) -> PutResult: ...
    def __enter__(self) -> BlocksToFill: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Store(Protocol):
    """See `Client`."""

    @property
    def address(self) -> str: ...
    def info(self) -> StoreInfo: ...
    def lookup(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        wait_s: float = 0.0,
        recompute_s_per_block: float | None = None,
        hint: Hint | None = None,
    ) -> LookupResult: ...
    def hint(self, namespace: Namespace, hashes: Sequence[BlockHash], hint: Hint) -> None: ...
    def view(self, namespace: Namespace, hashes: Sequence[BlockHash], *, hint: Hint | None = None) -> BlocksInPlace: ...
    def reserve(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        parent_hash: BlockHash | None = None,
        hint: Hint | None = None,
    ) -> BlocksToFill: ...
    def close(self) -> None: ...
