"""The slab socket spoken by hand, as a client that means no good could."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kvstore import messages as m
from kvstore import wire
from kvstore.errors import error_from_status
from kvstore.keys import BlockHash, pack_hashes
from kvstore.namespace import Namespace
from kvstore.slab import (
    ARENA_REPLY_BYTES,
    CALL_HEADER_BYTES,
    SLOT_HEADER_BYTES,
    WELCOME_BYTES,
    Access,
    ArenaReply,
    CallHeader,
    ConnectionKind,
    Hello,
    SlotRecord,
    Welcome,
    decode_slot_records,
    encode_arena_request,
)
from kvstore.wire import Method

TIMEOUT_S = 20.0


class RefusedError(Exception):
    """The daemon's refusal, in its words."""


def new_session_id() -> m.OwnerId:
    return m.OwnerId(secrets.token_bytes(m.OWNER_ID_BYTES))


def connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))  # without a timeout, which would not wait for a place in the queue
    except OSError:
        connection.close()
        raise
    connection.settimeout(TIMEOUT_S)
    return connection


def receive(connection: socket.socket, size_bytes: int) -> bytes:
    """As much as comes, when the connection ends before."""
    data = b""
    while len(data) < size_bytes and (more := connection.recv(size_bytes - len(data))):
        data += more
    return data


def attach(path: Path, kind: ConnectionKind, session_id: m.OwnerId, access: Access) -> tuple[socket.socket, Welcome]:
    connection = connect(path)
    with contextlib.suppress(BrokenPipeError):  # refused already
        connection.sendall(Hello(kind=kind, access=access, session_id=session_id).encode())
    welcome = Welcome.decode(receive(connection, WELCOME_BYTES))
    if welcome.refusal_bytes:
        reason = receive(connection, welcome.refusal_bytes).decode()
        connection.close()
        raise RefusedError(reason)
    return connection, welcome


def is_closed(connection: socket.socket) -> bool:
    """Waits for the other end to close."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


class RawCalls:
    def __init__(self, path: Path, session_id: m.OwnerId) -> None:
        self.connection, self.welcome = attach(path, ConnectionKind.CALLS, session_id, Access.READ)
        self._number = 0

    def send(self, method: Method[Any, Any], request: Any, *, is_one_way: bool = False) -> None:
        self._number += 1
        code = 1 + wire.UNARY_STORE_METHODS.index(method)
        body = method.encode_request(request)
        self.connection.sendall(CallHeader(len(body), code, is_one_way, self._number).encode() + body)

    def receive(self, method: Method[Any, Any]) -> Any:
        header = CallHeader.decode(receive(self.connection, CALL_HEADER_BYTES))
        assert header.call_number == self._number
        body = receive(self.connection, header.body_bytes)
        if header.code:
            reason, _, message = body.decode().partition("\n")
            raise error_from_status(status="INTERNAL", reason=reason, message=message)
        return method.decode_response(body)

    def call(self, method: Method[Any, Any], request: Any) -> Any:
        self.send(method, request)
        return self.receive(method)

    def stats(self) -> m.StoreStats:
        stats: m.StoreStats = self.call(wire.GET_STORE_STATS, m.GetStoreStatsRequest())
        return stats

    def open(self, namespace: Namespace) -> None:
        size = namespace.block_layout.payload_bytes
        self.call(wire.OPEN_NAMESPACE, m.OpenNamespaceRequest(namespace=namespace, payload_bytes=size))

    def lease(
        self, namespace: Namespace, hashes: Sequence[BlockHash], *, owner_id: m.OwnerId, lease_s: float = 60.0
    ) -> tuple[m.LeaseBlocksResponse, list[SlotRecord]]:
        request = m.LeaseBlocksRequest(
            namespace_id=namespace.id,
            owner_id=owner_id,
            block_hashes=pack_hashes(hashes),
            lease_s=lease_s,
            path=m.TransferPath.SLAB,
        )
        response = self.call(wire.LEASE_BLOCKS, request)
        return response, decode_slot_records(response.slots)

    def reserve(
        self, namespace: Namespace, hashes: Sequence[BlockHash], *, owner_id: m.OwnerId, reservation_s: float = 60.0
    ) -> tuple[m.ReserveBlocksResponse, list[SlotRecord]]:
        request = m.ReserveBlocksRequest(
            namespace_id=namespace.id,
            owner_id=owner_id,
            parent_hash=b"",
            block_hashes=pack_hashes(hashes),
            reservation_s=reservation_s,
            path=m.TransferPath.SLAB,
        )
        response = self.call(wire.RESERVE_BLOCKS, request)
        return response, decode_slot_records(response.slots)

    def commit(self, reservation_ids: Sequence[m.ReservationId | None], *, owner_id: m.OwnerId) -> list[m.CommitState]:
        request = m.CommitBlocksRequest(
            owner_id=owner_id, reservation_ids=tuple(one for one in reservation_ids if one is not None), in_slots=True
        )
        return [m.CommitState(state) for state in self.call(wire.COMMIT_BLOCKS, request).commit_states]


class RawSession:
    """A session with one CALLS connection, and whatever arenas were asked for."""

    def __init__(self, path: Path, *, access: Access = Access.WRITE, session_id: m.OwnerId | None = None) -> None:
        self.path = path
        self.id = session_id or new_session_id()
        self.connection, self.welcome = attach(path, ConnectionKind.SESSION, self.id, access)
        self.calls = RawCalls(path, self.id)
        self._maps: dict[int, mmap.mmap] = {}

    def __enter__(self) -> RawSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.calls.connection.close()
        self.connection.close()

    def arena(self, index: int) -> tuple[ArenaReply, int | None]:
        """The reply, and the descriptor if one came, which is the caller's."""
        self.connection.sendall(encode_arena_request(index))
        data, descriptors, _, _ = socket.recv_fds(self.connection, ARENA_REPLY_BYTES, 4)
        assert len(descriptors) <= 1
        return ArenaReply.decode(data), descriptors[0] if descriptors else None

    def arena_map(self, index: int) -> mmap.mmap:
        if index not in self._maps:
            reply, descriptor = self.arena(index)
            assert descriptor is not None, f"arena {index} was not granted"
            is_writable = self.welcome.access is Access.WRITE
            protection = mmap.PROT_READ | mmap.PROT_WRITE if is_writable else mmap.PROT_READ
            self._maps[index] = mmap.mmap(descriptor, reply.size_bytes, prot=protection)
            os.close(descriptor)
        return self._maps[index]

    def read(self, slot: SlotRecord) -> bytes:
        """Envelope and payload."""
        index, start = divmod(slot.place, self.welcome.arena_bytes)
        start += SLOT_HEADER_BYTES
        return self.arena_map(index)[start : start + slot.size_bytes]

    def header(self, slot: SlotRecord) -> bytes:
        index, start = divmod(slot.place, self.welcome.arena_bytes)
        return self.arena_map(index)[start : start + SLOT_HEADER_BYTES]

    def write(self, slot: SlotRecord, block: bytes) -> None:
        """Envelope and payload."""
        index, start = divmod(slot.place, self.welcome.arena_bytes)
        start += SLOT_HEADER_BYTES
        self.arena_map(index)[start : start + len(block)] = block

    def put(self, namespace: Namespace, blocks: dict[BlockHash, bytes]) -> list[m.CommitState]:
        """Stores enveloped blocks, all of which must find room."""
        self.calls.open(namespace)
        response, slots = self.calls.reserve(namespace, list(blocks), owner_id=self.id)
        assert len(slots) == len(blocks), bytes(response.reserve_states)
        for slot, block in zip(slots, blocks.values(), strict=True):
            self.write(slot, block)
        return self.calls.commit(response.reservation_ids, owner_id=self.id)

    def get(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> list[bytes]:
        """What of these blocks is here, enveloped; the lease stays."""
        _, slots = self.calls.lease(namespace, hashes, owner_id=self.id)
        return [self.read(slot) for slot in slots]
