"""What a flow may ask its driver to do. A step's outcome is sent into the flow, its error thrown into it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar

from kvstore.frames import ReadFrame, WriteFrame
from kvstore.keys import BlockHash
from kvstore.messages import OwnerId, ReadBlocksRequest, TransferPath, WriteBlocksResponse
from kvstore.namespace import Namespace
from kvstore.slab import Generation
from kvstore.wire import READ_BLOCKS, WRITE_BLOCKS, Method

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One unary RPC; its outcome is the response."""

    method: Method[Any, Any]
    request: Any
    timeout_s: float
    is_guarded: bool = True
    """False for calls that are made even when the circuit is open."""
    is_owed: bool = False
    """True when only the answer tells what must be given back: it is awaited even when the caller is cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """`ReadBlocks`: every frame goes to `on_frame`, whose errors end the stream; the outcome is None."""

    method: ClassVar[Method[ReadBlocksRequest, ReadFrame]] = READ_BLOCKS
    request: ReadBlocksRequest
    on_frame: Callable[[ReadFrame], None]
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """`WriteBlocks`: the frames are drawn as they are sent; the outcome is the response."""

    method: ClassVar[Method[WriteFrame, WriteBlocksResponse]] = WRITE_BLOCKS
    frames: Iterable[WriteFrame]
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """A unary RPC whose answer nobody needs, such as giving a lease back; it never fails and waits for nothing."""

    method: Method[Any, Any]
    request: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoosePath:
    """Which way blocks travel at present; the outcome is a `Route`. Fails only for want of what was insisted on."""

    is_write: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    path: TransferPath
    owner_id: OwnerId | None = None
    """Who must own what is held for transfers: the session (SLAB), or what stands for the connection to the process
    that serves (NIXL). None: any owner will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksum:
    """Takes the checksums of blocks, at several GB/s; the outcome is a list of them. Never fails."""

    blocks: Sequence[memoryview]


class Hashing(Protocol):
    """Checksums that are being taken."""

    def take(self, index: int) -> int:
        """That of one block; waits for it."""

    def close(self) -> None:
        """Owed once: until it returns, other threads look at the blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HashAhead:
    """Begins to take the checksums of blocks, in order; the outcome is a `Hashing`. Never fails."""

    blocks: Sequence[memoryview]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Brings blocks that `LeaseBlocks` has leased into `targets`, over any path but STREAM.

    The outcome is one `BlockState` per block: HIT when all of its bytes are there and verified, MISS when it has
    gone meanwhile, CORRUPT when it came and did not verify; then its target holds nothing of use.
    """

    path: TransferPath
    namespace: Namespace
    hashes: Sequence[BlockHash]
    targets: Sequence[memoryview]
    slots: bytes
    """SLAB, NIXL: one slot record per block."""
    ticket: bytes
    """BULK."""
    timeout_s: float
    owner_id: OwnerId | None = None
    """SLAB, NIXL: who holds the blocks, as the route said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Brings blocks into what `ReserveBlocks` has reserved for them, over any path but STREAM.

    The outcome is one `CommitState` per block where the path commits by itself (BULK), or None: the blocks are in
    their slots, and `CommitBlocks` with `in_slots` is still to come.
    """

    path: TransferPath
    namespace: Namespace
    hashes: Sequence[BlockHash]
    blocks: Sequence[memoryview]
    slots: bytes
    ticket: bytes
    timeout_s: float
    owner_id: OwnerId | None = None
    checksum_of: Callable[[int], int] | None = None
    """BULK, NIXL: gives the checksum of the block at a position, and may wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """Where these blocks lie, if this client has met all of them before and they still are there (SLAB).

    The outcome is one slot record per block, packed, or nothing. It is a hint: nobody holds the blocks, so only a
    reader that checks what it has copied may follow it. Never fails.
    """

    namespace: Namespace
    hashes: Sequence[BlockHash]
    owner_id: OwnerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """Whether the daemon has all of these blocks now, as far as can be seen without asking (SLAB). Never fails.

    True only while the daemon is there and each block lies where this client has met it before. What is true is
    counted as hits with the daemon, of many glances at a time.
    """

    namespace: Namespace
    hashes: Sequence[BlockHash]


class SeenBlock(NamedTuple):
    """A block in its slot, verified when it was first seen in this process."""

    arena: memoryview
    start: int
    """Of the slot in its arena."""
    size_bytes: int
    """Of header, envelope and payload."""
    generation: Generation

    @property
    def slot(self) -> memoryview:
        """Read-only."""
        return self.arena[self.start : self.start + self.size_bytes].toreadonly()


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Looks at leased blocks in place (SLAB).

    The outcome is one `SeenBlock` per block, or MISS when it has gone meanwhile, or CORRUPT when it does not verify.
    """

    namespace: Namespace
    hashes: Sequence[BlockHash]
    slots: bytes
    owner_id: OwnerId | None


RpcStep: TypeAlias = Call | Read | Write
Step: TypeAlias = RpcStep | Post | ChoosePath | Recall | Glance | Fetch | Send | View | Checksum | HashAhead
Flow: TypeAlias = Generator[Step, Any, _Result]


def call(
    method: Method[_Request, _Response],
    request: _Request,
    *,
    timeout_s: float,
    is_guarded: bool = True,
    is_owed: bool = False,
) -> Flow[_Response]:
    response: _Response = yield Call(
        method=method, request=request, timeout_s=timeout_s, is_guarded=is_guarded, is_owed=is_owed
    )
    return response


def read(request: ReadBlocksRequest, *, on_frame: Callable[[ReadFrame], None], timeout_s: float) -> Flow[None]:
    yield Read(request=request, on_frame=on_frame, timeout_s=timeout_s)


def write(frames: Iterable[WriteFrame], *, timeout_s: float) -> Flow[WriteBlocksResponse]:
    response: WriteBlocksResponse = yield Write(frames=frames, timeout_s=timeout_s)
    return response
