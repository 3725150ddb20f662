"""What daemon and client share on one node: slots in mapped memory, and the socket that hands it out.

Format: docs/formats/slab.md. All integers are little-endian.

A slot in an arena, at a multiple of 4096 bytes:

    0   u64 sequence: generation << 1 | 1 when readable, generation << 1 while it is being written, 0 when empty
    8   u64 verified: the sequence with all bits flipped once the daemon has hashed the payload itself, else 0
    16  zero, 48 bytes
    64  envelope, 128 bytes
    192 payload

The sequence is a sequence lock (Documentation/locking/seqlock.rst in the Linux kernel): a generation is given
out once in the life of a daemon, so a reader that finds the sequence it was told, before and after it has
copied, has copied what it was told of. The daemon alone writes the first 64 bytes.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import NamedTuple, NewType

from kvstore.envelope import ENVELOPE_BYTES, Buffer
from kvstore.errors import ProtocolError
from kvstore.messages import Epoch, OwnerId

Generation = NewType("Generation", int)
"""Which use of a slot this is; above 0, never given out twice by one daemon."""

SLOT_HEADER_BYTES = 64
PAYLOAD_OFFSET_BYTES = SLOT_HEADER_BYTES + ENVELOPE_BYTES
"""Where the payload starts in a slot."""

_U64_MAX = (1 << 64) - 1
_SLOT_HEADER = struct.Struct("<QQ48x")
_WHOLE_SLOT_HEADER = struct.Struct("<QQ48s")
_SLOT_HEADER_REST = bytes(48)
_SLOT_RECORD = struct.Struct("<QQQ")

SLOT_RECORD_BYTES = _SLOT_RECORD.size


class SlotState(IntEnum):
    """What a slot's header says to somebody who was told of a generation."""

    GONE = 0
    """It is not, or no longer, readable as that generation."""
    READABLE = 1
    VERIFIED = 2
    """Readable, and its payload has matched its checksum since it was written."""


class SlotRecord(NamedTuple):
    """One slot as LeaseBlocks and ReserveBlocks name it."""

    place: int
    """Bytes from the start of arena 0; arenas follow each other without gaps."""
    generation: Generation
    size_bytes: int
    """Envelope and payload: of the stored block, or the most that fits."""


_slot_record: Callable[[tuple[int, ...]], SlotRecord] = functools.partial(tuple.__new__, SlotRecord)
"""A record from a tuple that is known to be one; a third of what the constructor costs."""


def encode_slot_header(generation: Generation, *, is_readable: bool, is_verified: bool) -> bytes:
    sequence = generation << 1 | is_readable
    return _SLOT_HEADER.pack(sequence, sequence ^ _U64_MAX if is_verified else 0)


EMPTY_SLOT_HEADER = bytes(SLOT_HEADER_BYTES)


def slot_state(header: Buffer, generation: Generation) -> SlotState:
    """What the 64 bytes at a slot's start say of this generation; any byte that is not as it must be reads as GONE."""
    # Copied out first: what is taken apart must not change meanwhile.
    sequence, verified, rest = _WHOLE_SLOT_HEADER.unpack(bytes(header))
    if sequence != generation << 1 | 1 or rest != _SLOT_HEADER_REST:
        return SlotState.GONE
    if not verified:
        return SlotState.READABLE
    return SlotState.VERIFIED if verified == sequence ^ _U64_MAX else SlotState.GONE


def encode_slot_records(slots: Sequence[tuple[int, int, int]]) -> bytes:
    """Of `SlotRecord`s, or plain tuples like them."""
    return struct.pack(f"<{3 * len(slots)}Q", *chain.from_iterable(slots))


def decode_slot_records(packed: bytes) -> list[SlotRecord]:
    if len(packed) % SLOT_RECORD_BYTES:
        raise ProtocolError(f"{len(packed)} bytes of slot records; one has {SLOT_RECORD_BYTES}")
    return list(map(_slot_record, _SLOT_RECORD.iter_unpack(packed)))


# --- the slab socket

SLAB_SOCKET_SUFFIX = ".slab"
"""The slab socket is beside the gRPC socket: its path and this."""
SLAB_VERSION = 1
CALL_BODY_BYTES_MAX = (2 << 20) + (64 << 10)
"""65,536 hashes with what goes with them."""

_HELLO_MAGIC = b"KVSH"
_ARENA_MAGIC = b"KVSA"
_HELLO = struct.Struct("<4sHBB16s8x")
_WELCOME = struct.Struct("<4sHHIIQ16sB7x")
_ARENA_REQUEST = struct.Struct("<4sI")
_ARENA_REPLY = struct.Struct("<4sIIIQQ")
_CALL = struct.Struct("<IHHQ")

HELLO_BYTES = _HELLO.size
WELCOME_BYTES = _WELCOME.size
ARENA_REQUEST_BYTES = _ARENA_REQUEST.size
ARENA_REPLY_BYTES = _ARENA_REPLY.size
CALL_HEADER_BYTES = _CALL.size


class ConnectionKind(IntEnum):
    SESSION = 1
    """One per client: hands out arenas; when it closes, all that the session holds is given back."""
    CALLS = 2
    """Any number per client: carries RPCs of the session."""


class Access(IntEnum):
    READ = 1
    WRITE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First bytes of a connection. `session_id` is the owner id of all slab leases and reservations of the session."""

    kind: ConnectionKind
    access: Access
    session_id: OwnerId

    def encode(self) -> bytes:
        return _HELLO.pack(_HELLO_MAGIC, SLAB_VERSION, self.kind, self.access, self.session_id)

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        magic, version, kind, access, session_id = _HELLO.unpack(data)
        if magic != _HELLO_MAGIC or version != SLAB_VERSION:
            raise ProtocolError(f"not a version {SLAB_VERSION} slab hello: magic {magic!r}, version {version}")
        try:
            return cls(kind=ConnectionKind(kind), access=Access(access), session_id=OwnerId(session_id))
        except ValueError as error:
            raise ProtocolError(f"slab hello: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The daemon's answer to a hello; followed by `refusal_bytes` of UTF-8 that say why when it is a refusal."""

    epoch: Epoch
    arena_count: int
    arena_bytes: int
    access: Access
    """What was granted, which may be less than was asked for."""
    refusal_bytes: int = 0

    def encode(self) -> bytes:
        return _WELCOME.pack(
            _HELLO_MAGIC,
            SLAB_VERSION,
            self.refusal_bytes,
            self.arena_count,
            0,
            self.arena_bytes,
            self.epoch,
            self.access,
        )

    @classmethod
    def decode(cls, data: bytes) -> Welcome:
        magic, version, refusal_bytes, arena_count, _, arena_bytes, epoch, access = _WELCOME.unpack(data)
        if magic != _HELLO_MAGIC or version != SLAB_VERSION:
            raise ProtocolError(f"not a version {SLAB_VERSION} slab welcome: magic {magic!r}, version {version}")
        try:
            granted = Access(access)
        except ValueError as error:
            raise ProtocolError(f"slab welcome: {error}") from error
        return cls(
            epoch=Epoch(epoch),
            arena_count=arena_count,
            arena_bytes=arena_bytes,
            access=granted,
            refusal_bytes=refusal_bytes,
        )


def encode_arena_request(index: int) -> bytes:
    return _ARENA_REQUEST.pack(_ARENA_MAGIC, index)


def decode_arena_request(data: bytes) -> int:
    magic, index = _ARENA_REQUEST.unpack(data)
    if magic != _ARENA_MAGIC:
        raise ProtocolError(f"not an arena request: magic {magic!r}")
    return int(index)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaReply:
    """One arena; its descriptor comes with these bytes (SCM_RIGHTS), unless `is_granted` is False."""

    index: int
    is_granted: bool
    incarnation: int = 0
    """Changes when the arena's memory is replaced because it went to another tenant."""
    size_bytes: int = 0
    page_bytes: int = 0

    def encode(self) -> bytes:
        return _ARENA_REPLY.pack(
            _ARENA_MAGIC, self.index, self.is_granted, self.incarnation, self.size_bytes, self.page_bytes
        )

    @classmethod
    def decode(cls, data: bytes) -> ArenaReply:
        magic, index, is_granted, incarnation, size_bytes, page_bytes = _ARENA_REPLY.unpack(data)
        if magic != _ARENA_MAGIC:
            raise ProtocolError(f"not an arena reply: magic {magic!r}")
        return cls(
            index=index,
            is_granted=bool(is_granted),
            incarnation=incarnation,
            size_bytes=size_bytes,
            page_bytes=page_bytes,
        )


class CallHeader(NamedTuple):
    """In front of each request and each response on a CALLS connection.

    `code` is 1 + the method's place in `wire.UNARY_STORE_METHODS` in a request, and 0 in a response that worked; in
    one that failed it is 1, and the body is the error's reason, a line feed, and its message.
    """

    body_bytes: int
    code: int
    is_one_way: bool
    """In a request: no response is wanted, whatever happens."""
    call_number: int
    """Chosen by the client; the response repeats it. Responses come in the order of requests."""

    def encode(self) -> bytes:
        return _CALL.pack(self.body_bytes, self.code, self.is_one_way, self.call_number)

    @classmethod
    def decode(cls, data: Buffer) -> CallHeader:
        body_bytes, code, flags, call_number = _CALL.unpack(data)
        if body_bytes > CALL_BODY_BYTES_MAX:
            raise ProtocolError(f"a call of {body_bytes} bytes; allowed: {CALL_BODY_BYTES_MAX}")
        return cls(body_bytes, code, bool(flags & 1), call_number)
