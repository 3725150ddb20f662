"""The fake daemon with a slab socket: an arena that tests can rewrite, sessions that they can end."""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kvstore import messages as m
from kvstore import wire
from kvstore.envelope import ENVELOPE_BYTES, verify_block
from kvstore.errors import CorruptBlockError, InvalidArgumentError, KvstoreError
from kvstore.keys import BlockHash, NamespaceId, split_hashes
from kvstore.messages import BlockState, CommitState, LeaseId, OwnerId, ReservationId, TransferPath
from kvstore.slab import (
    ARENA_REQUEST_BYTES,
    CALL_HEADER_BYTES,
    EMPTY_SLOT_HEADER,
    HELLO_BYTES,
    PAYLOAD_OFFSET_BYTES,
    SLOT_HEADER_BYTES,
    Access,
    ArenaReply,
    CallHeader,
    ConnectionKind,
    Generation,
    Hello,
    SlotRecord,
    Welcome,
    decode_arena_request,
    encode_slot_header,
    encode_slot_records,
)
from tests.client.fake_daemon import FakeDaemon, same

_SLOT_ALIGNMENT = 4096
Key = tuple[NamespaceId, BlockHash]


class FakeSlabDaemon(FakeDaemon):
    """One arena; a slot is used once, so nothing is ever rewritten but by a test.

    `granted` is the most that a session gets, `refusal` what it is told instead of a welcome.
    """

    def __init__(self, *, arena_bytes: int = 64 << 20) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kvstore-fake-"))
        self.slab_socket = self._folder / "kvstore.sock.slab"
        self.granted = Access.WRITE
        self.refusal = ""
        self.arena_bytes = arena_bytes
        self.records: dict[Key, SlotRecord] = {}
        self.is_verified = False
        self.session_count = 0
        self.arena_requests: list[int] = []
        self._reserved_slots: dict[ReservationId, SlotRecord] = {}
        self._connections: dict[socket.socket, OwnerId] = {}
        self._lock = threading.RLock()
        self._new_arena()
        super().__init__()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.slab_socket))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.end_sessions()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        super().close()
        os.close(self._fd)
        shutil.rmtree(self._folder)

    def restart(self) -> None:
        self.end_sessions()
        with self._lock:
            super().restart()
            os.close(self._fd)
            self._new_arena()
            self.records.clear()
            self._reserved_slots.clear()

    def end_sessions(self) -> None:
        """Closes every connection of the slab socket."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def wait_until(self, condition: Callable[[], bool], *, within_s: float = 10.0) -> bool:
        """For what happens in other threads or processes after a call has returned."""
        deadline_s = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.001)
        return True

    # --- slots

    def slot(self, record: SlotRecord) -> memoryview:
        return self.arena[record.place : record.place + SLOT_HEADER_BYTES + record.size_bytes]

    def set_header(self, record: SlotRecord, header: bytes) -> None:
        self.slot(record)[:SLOT_HEADER_BYTES] = header

    def rewrite(self, record: SlotRecord, enveloped: bytes) -> SlotRecord:
        """Gives the slot to another block, as eviction and a new put would, and says what it is now."""
        generation = Generation(next(self._generations))
        self.set_header(record, EMPTY_SLOT_HEADER)
        self.set_header(record, encode_slot_header(generation, is_readable=False, is_verified=False))
        self.slot(record)[SLOT_HEADER_BYTES : SLOT_HEADER_BYTES + len(enveloped)] = enveloped
        self.set_header(record, encode_slot_header(generation, is_readable=True, is_verified=False))
        return SlotRecord(record.place, generation, len(enveloped))

    def _new_arena(self) -> None:
        self._fd = os.memfd_create("fake-arena")
        os.ftruncate(self._fd, self.arena_bytes)
        self.arena = memoryview(mmap.mmap(self._fd, self.arena_bytes))
        self._next_place = 0
        self._generations = iter(range(1, 1 << 62))

    def _new_slot(self, size_bytes: int) -> SlotRecord:
        record = SlotRecord(self._next_place, Generation(next(self._generations)), size_bytes)
        self._next_place += -(-(SLOT_HEADER_BYTES + size_bytes) // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        assert self._next_place <= self.arena_bytes, "the fake arena is too small for this test"
        return record

    # --- the socket

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, EOFError):
            hello = Hello.decode(_receive(connection, HELLO_BYTES))
            with self._lock:
                self._connections[connection] = hello.session_id
            try:
                self._welcome(connection, hello)
                if hello.kind is ConnectionKind.SESSION:
                    self._serve_session(connection, hello)
                else:
                    self._serve_calls(connection, hello)
            finally:
                with self._lock:
                    del self._connections[connection]
                    if hello.kind is ConnectionKind.SESSION:
                        self._end_session(hello.session_id)

    def _welcome(self, connection: socket.socket, hello: Hello) -> None:
        refusal = self.refusal.encode()
        welcome = Welcome(
            epoch=self.epoch,
            arena_count=1,
            arena_bytes=self.arena_bytes,
            access=min(hello.access, self.granted),
            refusal_bytes=len(refusal),
        )
        connection.sendall(welcome.encode() + refusal)
        if refusal:
            raise EOFError

    def _serve_session(self, connection: socket.socket, hello: Hello) -> None:
        with self._lock:
            self.session_count += 1
        while True:
            index = decode_arena_request(_receive(connection, ARENA_REQUEST_BYTES))
            self.arena_requests.append(index)
            reply = ArenaReply(
                index=index, is_granted=True, incarnation=1, size_bytes=self.arena_bytes, page_bytes=4096
            )
            access = os.O_RDWR if hello.access is Access.WRITE else os.O_RDONLY
            fd = os.open(f"/proc/self/fd/{self._fd}", access)
            try:
                socket.send_fds(connection, [reply.encode()], [fd])
            finally:
                os.close(fd)

    def _end_session(self, session_id: OwnerId) -> None:
        self.session_count -= 1
        self.leases = {lease: owner for lease, owner in self.leases.items() if owner != session_id}
        for number in [key for key, item in self.reservations.items() if item.owner_id == session_id]:
            del self.reservations[number]

    def _serve_calls(self, connection: socket.socket, hello: Hello) -> None:
        while True:
            header = CallHeader.decode(_receive(connection, CALL_HEADER_BYTES))
            body = _receive(connection, header.body_bytes)
            method = wire.UNARY_STORE_METHODS[header.code - 1]
            try:
                self.note_arrival(method)
                with self._lock:
                    request = method.decode_request(body)
                    self.note_hint(method, request)
                    response = getattr(self, f"_{method.name}")(request)
                code, answer = 0, method.encode_response(self.rewrites.get(method.name, same)(response))
            except KvstoreError as error:
                code, answer = 1, f"{error.reason}\n{error}".encode()
            if not header.is_one_way:
                connection.sendall(CallHeader(len(answer), code, False, header.call_number).encode() + answer)

    # --- the store

    def _GetStoreInfo(self, request: m.GetStoreInfoRequest) -> m.StoreInfo:  # noqa: N802
        return replace(super()._GetStoreInfo(request), slab_socket=str(self.slab_socket))

    def _LeaseBlocks(self, request: m.LeaseBlocksRequest) -> m.LeaseBlocksResponse:  # noqa: N802
        self._check_session(request.owner_id, path=request.path)
        states = self._states(request.namespace_id, request.block_hashes)
        records = [
            self.records[request.namespace_id, block_hash]
            for block_hash, state in zip(split_hashes(request.block_hashes), states, strict=True)
            if state is BlockState.HIT
        ]
        lease_id = LeaseId(next(self._ids)) if records else None
        if lease_id is not None:
            self.leases[lease_id] = request.owner_id
        return m.LeaseBlocksResponse(
            block_states=bytes(states), epoch=self.epoch, lease_id=lease_id, slots=encode_slot_records(records)
        )

    def _ReserveBlocks(self, request: m.ReserveBlocksRequest) -> m.ReserveBlocksResponse:  # noqa: N802
        if request.path is not TransferPath.STREAM:
            self._check_session(request.owner_id, path=request.path)
        response = super()._ReserveBlocks(request)
        if request.path is TransferPath.STREAM:
            return response
        records = []
        for number in response.reservation_ids:
            if number is not None:
                record = self._new_slot(ENVELOPE_BYTES + self._payload_bytes[request.namespace_id])
                self.set_header(record, encode_slot_header(record.generation, is_readable=False, is_verified=False))
                self._reserved_slots[number] = record
                records.append(record)
        return replace(response, slots=encode_slot_records(records))

    def _CommitBlocks(self, request: m.CommitBlocksRequest) -> m.CommitBlocksResponse:  # noqa: N802
        if not request.in_slots:
            before = set(self.blocks)
            response = super()._CommitBlocks(request)
            for key in set(self.blocks) - before:  # what came by stream is readable in place, too
                self.publish(key, self.blocks[key])
            return response
        states = []
        for number in request.reservation_ids:
            reservation = self.reservations.pop(number, None)
            if reservation is None or reservation.owner_id != request.owner_id:
                states.append(CommitState.EXPIRED)
                continue
            record = self._reserved_slots.pop(number)
            block = bytes(self.slot(record)[SLOT_HEADER_BYTES:])
            namespace_id, block_hash = reservation.key
            try:
                verify_block(
                    block,
                    namespace_id=namespace_id,
                    block_hash=block_hash,
                    payload_bytes=self._payload_bytes[namespace_id],
                )
            except CorruptBlockError:
                states.append(CommitState.CORRUPT)
                continue
            self.blocks[reservation.key] = block
            self.records[reservation.key] = record
            self._publish(record)
            states.append(CommitState.COMMITTED)
        return m.CommitBlocksResponse(commit_states=bytes(states))

    def publish(self, key: Key, block: bytes) -> None:
        """Puts a block, right or wrong, into a slot of its own and makes it readable."""
        record = self._new_slot(len(block))
        self.slot(record)[SLOT_HEADER_BYTES:] = block
        self.blocks[key] = block
        self.records[key] = record
        self._publish(record)

    def _publish(self, record: SlotRecord) -> None:
        header = encode_slot_header(record.generation, is_readable=True, is_verified=self.is_verified)
        self.set_header(record, header)

    def _check_session(self, owner_id: OwnerId, *, path: TransferPath) -> None:
        if path is not TransferPath.SLAB or owner_id not in self._connections.values():
            raise InvalidArgumentError.of("path", path.name, "SLAB, by a session")


def payload_of(slot: memoryview) -> memoryview:
    return slot[PAYLOAD_OFFSET_BYTES:]


def _receive(connection: socket.socket, size_bytes: int) -> bytes:
    data = b""
    while len(data) < size_bytes:
        more = connection.recv(size_bytes - len(data))
        if not more:
            raise EOFError
        data += more
    return data
