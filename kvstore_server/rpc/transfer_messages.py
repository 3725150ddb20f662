"""What the daemon and its transfer workers say to each other over a socket pair.

Both are always of the same version. A message is a head of its body's size, its kind and a number, and its body; an
answer repeats the number. All integers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from kvstore.keys import BlockHash, NamespaceId
from kvstore.messages import CommitState
from kvstore_server.core.space import Place
from kvstore_server.rpc.transfers import GrantedBlock, Landing, Transfer, TransferId

_HEAD = struct.Struct("<IIQ")
_TRANSFER = struct.Struct("<QQII32s")
_BLOCK = struct.Struct("<QQ32s")
_ARENA = struct.Struct("<II")
_FINISH = struct.Struct("<QI")
_LANDING = struct.Struct("<QB")
_COUNT_IF_BROKEN = 0xFFFFFFFF


class Kind(IntEnum):
    REDEEM = 1
    """A `TransferRequest`; answered by TRANSFER or REFUSED."""
    FINISH_READ = 2
    """Has no answer."""
    FINISH_WRITE = 3
    """Answered by STATES or REFUSED."""
    ARENA = 4
    """An arena's index; answered by MAPPED, with its descriptor."""
    TRANSFER = 5
    REFUSED = 6
    """Text that says why."""
    STATES = 7
    MAPPED = 8
    READY = 9
    """From a worker, once: it accepts connections."""
    STOP = 10
    """From the daemon: finish what is running within so many milliseconds, and end."""


class Message(NamedTuple):
    kind: Kind
    number: int
    body: bytes

    def encode(self) -> bytes:
        return _HEAD.pack(len(self.body), self.kind, self.number) + self.body


class MessageReader:
    """Puts messages together again."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole now."""
        self._data += data
        whole: list[Message] = []
        start = 0
        while len(self._data) - start >= _HEAD.size:
            size_bytes, kind, number = _HEAD.unpack_from(self._data, start)
            end = start + _HEAD.size + size_bytes
            if len(self._data) < end:
                break
            whole.append(Message(Kind(kind), number, bytes(self._data[start + _HEAD.size : end])))
            start = end
        del self._data[:start]
        return whole


Incarnations = Mapping[int, int]
"""Which memory each arena that a transfer touches has at present."""


def encode_transfer(transfer: Transfer, incarnations: Incarnations) -> bytes:
    head = _TRANSFER.pack(
        transfer.transfer_id,
        transfer.payload_bytes,
        len(transfer.blocks),
        len(incarnations),
        transfer.namespace_id,
    )
    blocks = [_BLOCK.pack(block.place, block.size_bytes, block.block_hash) for block in transfer.blocks]
    return b"".join([head, *blocks, *(_ARENA.pack(*arena) for arena in incarnations.items())])


def decode_transfer(body: bytes) -> tuple[Transfer, Incarnations]:
    transfer_id, payload_bytes, block_count, arena_count, namespace_id = _TRANSFER.unpack_from(body)
    arenas_start = _TRANSFER.size + block_count * _BLOCK.size
    blocks = body[_TRANSFER.size : arenas_start]
    arenas = body[arenas_start : arenas_start + arena_count * _ARENA.size]
    transfer = Transfer(
        transfer_id=TransferId(transfer_id),
        namespace_id=NamespaceId(namespace_id),
        payload_bytes=payload_bytes,
        blocks=[
            GrantedBlock(BlockHash(block_hash), Place(place), size_bytes)
            for place, size_bytes, block_hash in _BLOCK.iter_unpack(blocks)
        ],
    )
    return transfer, dict(_ARENA.iter_unpack(arenas))


def encode_finish_read(transfer_id: TransferId, *, sent_count: int) -> bytes:
    return _FINISH.pack(transfer_id, sent_count)


def decode_finish_read(body: bytes) -> tuple[TransferId, int]:
    transfer_id, sent_count = _FINISH.unpack(body)
    return TransferId(transfer_id), sent_count


def encode_finish_write(transfer_id: TransferId, landings: Sequence[Landing] | None) -> bytes:
    head = _FINISH.pack(transfer_id, _COUNT_IF_BROKEN if landings is None else len(landings))
    return head + b"".join([_LANDING.pack(*landing) for landing in landings or ()])


def decode_finish_write(body: bytes) -> tuple[TransferId, list[Landing] | None]:
    transfer_id, count = _FINISH.unpack_from(body)
    if count == _COUNT_IF_BROKEN:
        return TransferId(transfer_id), None
    landings = [Landing(size, CommitState(state)) for size, state in _LANDING.iter_unpack(body[_FINISH.size :])]
    assert len(landings) == count, f"{len(landings)} landings, {count} were announced"
    return TransferId(transfer_id), landings


def encode_number(number: int) -> bytes:
    """An arena's index, or milliseconds."""
    return number.to_bytes(8, "little")


def decode_number(body: bytes) -> int:
    return int.from_bytes(body, "little")
