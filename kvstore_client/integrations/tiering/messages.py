"""What a tier and its mover tell each other, a datagram each. Both ends are one installation: no version."""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from enum import IntEnum
from typing import NewType

from kvstore.errors import ProtocolError
from kvstore.keys import HASH_BYTES, BlockHash

PartId = NewType("PartId", int)

PART_BLOCKS_MAX = 1024
"""Blocks in one part of a job: 1,024 x (32 + 4) bytes = 36 KiB, of the 208 KiB that a socket takes by default."""
PART_BYTES_MAX = 64 << 20
"""Bytes of blocks in one part of a job, so that its answer comes within seconds: the client's own batch."""
DATAGRAM_BYTES_MAX = 128 << 10

_IDENTITY = 0
_TASK = struct.Struct("<BBIQI")  # kind, whether there is a parent hash, group, part, block count
_ANSWER = struct.Struct("<BQd")  # kind, part, seconds


class Kind(IntEnum):
    LOOKUP = 1
    LOAD = 2
    STORE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """From now on, the blocks of this group are those of this namespace."""

    group: int
    namespace: bytes

    def encode(self) -> bytes:
        return struct.pack("<BI", _IDENTITY, self.group) + self.namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One part of a job, all blocks of one group; `rows` say where in the host tier they are, or are to be."""

    kind: Kind
    part: PartId
    group: int
    hashes: tuple[BlockHash, ...]
    rows: tuple[int, ...] = ()
    parent_hash: BlockHash | None = None
    """Of the block before the first one, where it is known: of stores only."""

    def encode(self) -> bytes:
        header = _TASK.pack(self.kind, self.parent_hash is not None, self.group, self.part, len(self.hashes))
        return b"".join((header, self.parent_hash or b"", *self.hashes, array("I", self.rows).tobytes()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of one task: per block its state. Of stores, HIT is what the store holds, MISS what it dropped."""

    kind: Kind
    part: PartId
    states: bytes
    took_s: float
    error: str = ""

    def encode(self) -> bytes:
        size = struct.pack("<I", len(self.states))
        return _ANSWER.pack(self.kind, self.part, self.took_s) + size + self.states + self.error.encode()[:1000]


def decode_for_mover(data: bytes) -> Identity | Task:
    if data[0] == _IDENTITY:
        (group,) = struct.unpack_from("<I", data, 1)
        return Identity(group=group, namespace=data[5:])
    kind, has_parent, group, part, block_count = _TASK.unpack_from(data)
    start = _TASK.size + has_parent * HASH_BYTES
    end = start + block_count * HASH_BYTES
    rows = array("I", data[end:])
    if len(rows) != (0 if kind == Kind.LOOKUP else block_count):
        raise ProtocolError(f"{len(rows)} rows for {block_count} blocks")
    return Task(
        kind=Kind(kind),
        part=PartId(part),
        group=group,
        hashes=tuple(BlockHash(data[at : at + HASH_BYTES]) for at in range(start, end, HASH_BYTES)),
        rows=tuple(rows),
        parent_hash=BlockHash(data[_TASK.size : start]) if has_parent else None,
    )


def decode_answer(data: bytes) -> Answer:
    kind, part, took_s = _ANSWER.unpack_from(data)
    (state_count,) = struct.unpack_from("<I", data, _ANSWER.size)
    start = _ANSWER.size + 4
    states = data[start : start + state_count]
    return Answer(
        kind=Kind(kind),
        part=PartId(part),
        states=states,
        took_s=took_s,
        error=data[start + state_count :].decode(errors="replace"),
    )
