"""The data port: blocks over a plain byte stream, authorised by a ticket. Format: docs/formats/bulk.md.

All integers are little-endian. A connection carries any number of transfers, one after the other:

    read   client: request            daemon: reply, then for each block of the ticket: block header, block
    write  client: request, then for each block of the ticket: block header, block
           daemon: reply, then one CommitState byte per block

A block is its envelope and its payload. A refused transfer ends with its reply, whose text says why, and the
connection closes after it. Requests and replies tell how many bytes follow them, so that a receiver may sleep until
many of them are there.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from kvstore.errors import ProtocolError
from kvstore.messages import Ticket

BULK_VERSION = 1
_MAGIC = b"KVBK"
_REQUEST = struct.Struct("<4sHH16sI4xQ")
_REPLY = struct.Struct("<4sHHI4xQ")
_BLOCK = struct.Struct("<IIQ")

REQUEST_BYTES = _REQUEST.size
REPLY_BYTES = _REPLY.size
BLOCK_HEADER_BYTES = _BLOCK.size


class Direction(IntEnum):
    READ = 1
    WRITE = 2


class BulkStatus(IntEnum):
    OK = 0
    REFUSED = 1
    """This transfer: unknown, used or expired ticket, or one for something else."""
    BUSY = 2
    """Any transfer, at present: too many connections, or the daemon is going down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRequest:
    direction: Direction
    ticket: Ticket
    block_count: int
    following_bytes: int = 0
    """Block headers and blocks of a write; a read has none."""

    def encode(self) -> bytes:
        return _REQUEST.pack(_MAGIC, BULK_VERSION, self.direction, self.ticket, self.block_count, self.following_bytes)

    @classmethod
    def decode(cls, data: bytes) -> TransferRequest:
        magic, version, direction, ticket, block_count, following_bytes = _REQUEST.unpack(data)
        if magic != _MAGIC or version != BULK_VERSION:
            raise ProtocolError(f"not a version {BULK_VERSION} transfer request: magic {magic!r}, version {version}")
        try:
            request = cls(
                direction=Direction(direction),
                ticket=Ticket(ticket),
                block_count=block_count,
                following_bytes=following_bytes,
            )
        except ValueError as error:
            raise ProtocolError(f"transfer request: {error}") from error
        if request.encode() != data:
            raise ProtocolError("transfer request has something where zeros must be")
        return request


class TransferReply(NamedTuple):
    status: BulkStatus
    block_count: int
    following_bytes: int
    """Block headers and blocks of a read; commit states of a write; UTF-8 that says why it is refused."""

    def encode(self) -> bytes:
        return _REPLY.pack(_MAGIC, BULK_VERSION, self.status, self.block_count, self.following_bytes)

    @classmethod
    def decode(cls, data: bytes) -> TransferReply:
        magic, version, status, block_count, following_bytes = _REPLY.unpack(data)
        if magic != _MAGIC or version != BULK_VERSION:
            raise ProtocolError(f"not a version {BULK_VERSION} transfer reply: magic {magic!r}, version {version}")
        try:
            reply = cls(BulkStatus(status), block_count, following_bytes)
        except ValueError as error:
            raise ProtocolError(f"transfer reply: {error}") from error
        if reply.encode() != data:
            raise ProtocolError("transfer reply has something where zeros must be")
        return reply


class BlockHeader(NamedTuple):
    """In front of each block; `size_bytes` 0: the block is not there after all, and nothing follows."""

    position: int
    """Of the block among those of the ticket."""
    size_bytes: int

    def encode(self) -> bytes:
        return _BLOCK.pack(self.position, 0, self.size_bytes)

    @classmethod
    def decode(cls, data: bytes) -> BlockHeader:
        position, zero, size_bytes = _BLOCK.unpack(data)
        if zero:
            raise ProtocolError(f"block header has {zero:#x} where zero must be")
        return cls(position, size_bytes)
