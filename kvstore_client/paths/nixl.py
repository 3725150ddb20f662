"""Blocks one-sided over NIXL, straight between registered memory of two machines. Format: docs/formats/nixl.md.

The one module that knows the vendor: github.com/ai-dynamo/nixl, with UCX below it. What it relies on was read in
their sources and measured with 1.5.1; docs/formats/nixl.md says what that is.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvstore.envelope import ENVELOPE_BYTES, checksum
from kvstore.errors import DeadlineExceededError, ProtocolError, UnavailableError
from kvstore.messages import BlockState
from kvstore.slab import (
    PAYLOAD_OFFSET_BYTES,
    SLOT_HEADER_BYTES,
    SlotRecord,
    SlotState,
    decode_slot_records,
    slot_state,
)
from kvstore_client.envelopes import enveloped_state
from kvstore_client.flows.steps import Fetch, Send

_PACKAGE = "nixl_cu12"
_MAGIC = b"KVNX"
_VERSION = 1
_HEAD = struct.Struct("<4sHHIQ")
_ADDRESS = struct.Struct("<Q")
_ARENA_COUNT_MAX = 65_536

_IDLE_COUNT_MAX = 8
"""Connections that are kept for later; more threads than that connect anew each time."""
_TRANSFER_BYTES = 4 << 20
"""Of blocks in one transfer; while one is verified the next are on their way. Measured over TCP: from 4 to 32 MiB there
is no difference, below 4 MiB writes become slower."""
_TRANSFER_COUNT_MAX = 512
"""Blocks in one transfer, when they are small."""
_POLL_S = 100e-6
"""Between looks at a transfer. Looking is what moves it where the network needs a processor (TCP): measured as fast as
without a pause, for the socket's buffers hold more than comes meanwhile."""
_SERVING_POLL_US = 10_000
"""How late the serving side notices what the kernel has not told it of. 0, which NIXL's own interface always takes,
keeps a core busy; this costs 0.7 % of one."""

_FABRICS = Path("/sys/class/infiniband")
_ENVIRONMENT = {
    # What fails is raised; and a connection that is given up would be worth 30 lines on stdout.
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "error",
}
_WITHOUT_FABRIC = {
    # UCX's drivers for RDMA bring a second copy of libraries that the system may have, and then a process ends with a
    # segmentation fault. Where there is no such device they are of no use.
    "UCX_MODULES": "^ib",
}


class _Range(NamedTuple):
    """Of addresses, from the first to the one after the last."""

    start: int
    end: int


def check_installed() -> None:
    """Raises `UnavailableError` when NIXL is not; loads nothing."""
    if importlib.util.find_spec(_PACKAGE) is None:
        raise UnavailableError("NIXL is not installed; pip install 'kvstore[nixl]'")


def _load() -> Any:
    check_installed()
    settings = _ENVIRONMENT
    if not _FABRICS.is_dir() or not any(_FABRICS.iterdir()):
        settings = settings | _WITHOUT_FABRIC
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    try:
        # Below the public interface, which cannot be told how often the serving side wakes up. On demand only, for it
        # takes 0.3 s and puts hooks into the process.
        import nixl_cu12._bindings as bindings
    except ImportError as error:
        raise UnavailableError(f"NIXL cannot be loaded: {error}") from error
    return bindings


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlMetadata:
    """What one needs to know to reach all arenas of a daemon, to read and to write: whoever has it has them."""

    arena_bytes: int
    addresses: tuple[int, ...]
    """Where each arena starts in the serving process."""
    agent: bytes
    """NIXL's own description of the serving process."""

    def encode(self) -> bytes:
        head = _HEAD.pack(_MAGIC, _VERSION, 0, len(self.addresses), self.arena_bytes)
        return head + b"".join([_ADDRESS.pack(address) for address in self.addresses]) + self.agent

    @classmethod
    def decode(cls, data: bytes) -> NixlMetadata:
        if len(data) < _HEAD.size:
            raise ProtocolError(f"{len(data)} bytes of NIXL metadata; at least {_HEAD.size} are needed")
        magic, version, zero, arena_count, arena_bytes = _HEAD.unpack_from(data)
        if magic != _MAGIC or version != _VERSION or zero:
            raise ProtocolError(f"not version {_VERSION} NIXL metadata: magic {magic!r}, version {version}")
        agent_at = _HEAD.size + arena_count * _ADDRESS.size
        if not 0 < arena_count <= _ARENA_COUNT_MAX or not arena_bytes or agent_at >= len(data):
            raise ProtocolError(f"{arena_count} arenas of {arena_bytes} bytes in {len(data)} bytes of NIXL metadata")
        addresses = tuple(address for (address,) in _ADDRESS.iter_unpack(data[_HEAD.size : agent_at]))
        return cls(arena_bytes=arena_bytes, addresses=addresses, agent=data[agent_at:])

    def address_of(self, slot: SlotRecord) -> int:
        """Where a slot starts in the serving process; raises `ProtocolError` when it is not all within one arena."""
        index, start = divmod(slot.place, self.arena_bytes)
        if index >= len(self.addresses) or start + SLOT_HEADER_BYTES + slot.size_bytes > self.arena_bytes:
            raise ProtocolError(f"a slot of {slot.size_bytes} bytes at {slot.place} is not within the arenas")
        return self.addresses[index] + start


class ServedMemory:
    """Arenas registered with NIXL, for others to read and write; needs nobody's attention afterwards."""

    def __init__(self, addresses: Sequence[int], *, arena_bytes: int) -> None:
        """Raises `UnavailableError` when they cannot be registered."""
        self._agent = _Agent(is_serving=True)
        self._agent.register([_Range(address, address + arena_bytes) for address in addresses])
        self.metadata = NixlMetadata(
            arena_bytes=arena_bytes, addresses=tuple(addresses), agent=self._agent.describe()
        ).encode()


class NixlMover:
    """A `Mover` over NIXL, one connection per thread that moves blocks at the same time.

    A transfer that is given up must not write afterwards, neither into the caller's memory nor into a slot, and NIXL
    cannot cancel one. So its connection goes, with all that it has registered. What a broken `send` has put on its way
    may still arrive: the daemon gives the slot of a reservation that was not committed to nobody before that is over.
    """

    def __init__(self, metadata: bytes) -> None:
        """Connects to nothing yet; raises `UnavailableError` when NIXL is not installed, and `ProtocolError`."""
        check_installed()
        self._metadata = NixlMetadata.decode(metadata)
        self._lock = threading.Lock()
        self._idle: list[_Agent] = []
        self._strays: list[_Agent] = []
        self._pid = os.getpid()
        self._is_closed = False

    def fetch(self, step: Fetch) -> list[BlockState]:
        payload_bytes = step.namespace.stored_bytes
        slots = self._slots(step.slots, block_count=len(step.hashes))
        for _, slot in slots:
            if slot.size_bytes != ENVELOPE_BYTES + payload_bytes:
                raise ProtocolError(
                    f"a block of {slot.size_bytes} bytes; the namespace gives {payload_bytes} and envelope"
                )
        if not slots:
            return []
        heads = _Rows(len(slots), row_bytes=PAYLOAD_OFFSET_BYTES)
        checksums: list[int] = []
        with self._transfers(step.timeout_s, [*step.targets, heads.view]) as transfers:
            groups = _groups(step.targets)
            for group in groups:
                transfers.read([_payload_piece(slots[index], step.targets[index]) for index in group])
            for group in groups:
                transfers.wait_next()
                if group is groups[-1]:
                    # Once and afterwards: a generation never comes back, and it was there when the daemon named it.
                    transfers.read([_Piece(heads[index], address) for index, (address, _) in enumerate(slots)])
                checksums += [checksum(step.targets[index]) for index in group]
            transfers.wait_next()
        return [
            BlockState.MISS
            if slot_state(heads[index][:SLOT_HEADER_BYTES], slot.generation) is SlotState.GONE
            else enveloped_state(
                heads[index][SLOT_HEADER_BYTES:],
                namespace=step.namespace,
                block_hash=step.hashes[index],
                payload_bytes=payload_bytes,
                payload_checksum=checksums[index],
            )
            for index, (_, slot) in enumerate(slots)
        ]

    def send(self, step: Send) -> None:
        """Returns once the blocks are in their slots; `CommitBlocks` follows, for which the daemon hashes them."""
        slots = self._slots(step.slots, block_count=len(step.hashes))
        for (_, slot), block in zip(slots, step.blocks, strict=True):
            if slot.size_bytes < ENVELOPE_BYTES + len(block):
                raise ProtocolError(f"reserved {slot.size_bytes} bytes for a block of {len(block)} and its envelope")
        if not slots:
            return
        envelopes = _Rows(len(slots), row_bytes=ENVELOPE_BYTES)
        checksum_of = step.checksum_of
        with self._transfers(step.timeout_s, [*step.blocks, envelopes.view]) as transfers:
            groups = _groups(step.blocks)
            for group in groups:
                transfers.write([_payload_piece(slots[index], step.blocks[index]) for index in group])
            for group in groups:
                # Those that nobody has taken ahead are taken here, while the blocks are on their way.
                for index in group:
                    payload_checksum = checksum(step.blocks[index]) if checksum_of is None else checksum_of(index)
                    envelopes[index][:] = step.namespace.envelopes.encode(
                        step.hashes[index], payload_checksum=payload_checksum
                    )
                transfers.wait_next()
            transfers.write(
                [_Piece(envelopes[index], address + SLOT_HEADER_BYTES) for index, (address, _) in enumerate(slots)]
            )
            transfers.wait_next()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for agent in idle:
            agent.close()

    def _slots(self, packed: bytes, *, block_count: int) -> list[tuple[int, SlotRecord]]:
        slots = decode_slot_records(packed)
        if len(slots) != block_count:
            raise ProtocolError(f"{len(slots)} slot records for {block_count} blocks")
        return [(self._metadata.address_of(slot), slot) for slot in slots]

    @contextlib.contextmanager
    def _transfers(self, timeout_s: float, buffers: Sequence[memoryview]) -> Iterator[_Transfers]:
        """A connection with these registered, kept for later only when all went well."""
        deadline_s = time.monotonic() + timeout_s
        agent = self._take()
        try:
            registration = agent.register(_ranges(buffers))
            yield _Transfers(agent, deadline_s=deadline_s, is_given_up=lambda: self._is_closed)
            agent.deregister(registration)
        except BaseException:
            agent.close()
            raise
        with self._lock:
            if not self._is_closed and len(self._idle) < _IDLE_COUNT_MAX:
                self._idle.append(agent)
                return
        agent.close()

    def _take(self) -> _Agent:
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the client is closed")
            if self._pid != os.getpid():
                # The parent's connections. They are of no use here, and closing them could end those of the parent.
                self._idle, self._strays, self._pid = [], self._idle, os.getpid()
            if self._idle:
                return self._idle.pop()
        agent = _Agent()
        agent.connect(self._metadata.agent)
        return agent


class BareTransfer:
    """The same bytes by NIXL alone, for benchmarks: all is registered before, and nothing is verified.

    `places` are of payloads, in the numbering of places, and each buffer has the size of one.
    """

    def __init__(self, metadata: bytes, *, places: Sequence[int], buffers: Sequence[memoryview]) -> None:
        known = NixlMetadata.decode(metadata)
        arenas = [divmod(place, known.arena_bytes) for place in places]
        self._pieces = [
            _Piece(buffer, known.addresses[index] + start)
            for buffer, (index, start) in zip(buffers, arenas, strict=True)
        ]
        self._agent = _Agent()
        self._agent.connect(known.agent)
        self._agent.register(_ranges(buffers))

    def read(self, *, timeout_s: float) -> None:
        transfers = self._start(timeout_s)
        transfers.read(self._pieces)
        transfers.wait_next()

    def write(self, *, timeout_s: float) -> None:
        transfers = self._start(timeout_s)
        transfers.write(self._pieces)
        transfers.wait_next()

    def close(self) -> None:
        self._agent.close()

    def _start(self, timeout_s: float) -> _Transfers:
        return _Transfers(self._agent, deadline_s=time.monotonic() + timeout_s, is_given_up=lambda: False)


class _Rows:
    """Rows of bytes in one buffer."""

    def __init__(self, count: int, *, row_bytes: int) -> None:
        self.view = memoryview(bytearray(count * row_bytes))
        self._row_bytes = row_bytes

    def __getitem__(self, index: int) -> memoryview:
        return self.view[index * self._row_bytes : (index + 1) * self._row_bytes]


class _Piece(NamedTuple):
    """Some bytes here and where they are, or belong, in the serving process."""

    local: memoryview
    remote_address: int


def _payload_piece(slot: tuple[int, SlotRecord], payload: memoryview) -> _Piece:
    return _Piece(payload, slot[0] + PAYLOAD_OFFSET_BYTES)


def _groups(blocks: Sequence[memoryview]) -> list[list[int]]:
    """Positions of blocks that travel in one transfer, in order."""
    groups: list[list[int]] = []
    group_bytes = 0
    for index, block in enumerate(blocks):
        if not groups or group_bytes >= _TRANSFER_BYTES or len(groups[-1]) >= _TRANSFER_COUNT_MAX:
            groups.append([])
            group_bytes = 0
        groups[-1].append(index)
        group_bytes += len(block)
    return groups


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def _ranges(buffers: Sequence[memoryview]) -> list[_Range]:
    """The memory of these, each byte in one range."""
    ranges: list[_Range] = []
    for start, end in sorted((address := _address(buffer), address + len(buffer)) for buffer in buffers):
        if ranges and start <= ranges[-1].end:
            ranges[-1] = _Range(ranges[-1].start, max(end, ranges[-1].end))
        else:
            ranges.append(_Range(start, end))
    return ranges


class _Transfers:
    """Transfers under way on one connection, the oldest first; what goes wrong with one is the end of all."""

    def __init__(self, agent: _Agent, *, deadline_s: float, is_given_up: Callable[[], bool]) -> None:
        self._agent = agent
        self._deadline_s = deadline_s
        self._is_given_up = is_given_up
        self._handles: deque[int] = deque()

    def read(self, pieces: Sequence[_Piece]) -> None:
        self._handles.append(self._agent.start(pieces, is_write=False))

    def write(self, pieces: Sequence[_Piece]) -> None:
        self._handles.append(self._agent.start(pieces, is_write=True))

    def wait_next(self) -> None:
        """Waits for the oldest; raises `DeadlineExceededError`, or `UnavailableError` when the mover is closed."""
        while not self._agent.is_done(self._handles[0]):
            if self._is_given_up():
                raise UnavailableError("the client is closed")
            if time.monotonic() > self._deadline_s:
                raise DeadlineExceededError("NIXL has not moved the blocks in time")
            time.sleep(_POLL_S)
        self._agent.release(self._handles.popleft())


class _Agent:
    """NIXL's agent, for one thread at a time; its errors become `UnavailableError`.

    Once it is closed nothing is written by it any more, whatever was under way.
    """

    def __init__(self, *, is_serving: bool = False) -> None:
        self._vendor = vendor = _load()
        self._errors: tuple[type[Exception], ...] = tuple(
            getattr(vendor, name) for name in dir(vendor) if name.startswith("nixl") and name.endswith("Error")
        )
        config = vendor.nixlAgentConfig()
        # Who asks for transfers also moves them while it waits, which over TCP is 1.7 times as fast as a thread for it.
        config.useProgThread = is_serving
        config.pthrDelay = _SERVING_POLL_US
        config.useListenThread = False
        config.captureTelemetry = False
        config.syncMode = vendor.NIXL_THREAD_SYNC_RW  # one thread at a time, but not always the same
        self._remote_name = ""
        with self._translated("cannot start"):
            self._nixl = vendor.nixlAgent(f"kvstore-{secrets.token_hex(8)}", config)
            self._backend = self._nixl.createBackend("UCX", {})

    def describe(self) -> bytes:
        with self._translated("cannot describe itself"):
            return bytes(self._nixl.getLocalMD())

    def connect(self, description: bytes) -> None:
        with self._translated("cannot connect"):
            self._remote_name = bytes(self._nixl.loadRemoteMD(description)).decode()

    def register(self, ranges: Sequence[_Range]) -> Any:
        segments = self._vendor.nixlRegDList(
            self._vendor.DRAM_SEG, [(start, end - start, 0, "") for start, end in ranges]
        )
        with self._translated("cannot register memory"):
            self._nixl.registerMem(segments, [self._backend])
        return segments

    def deregister(self, registration: Any) -> None:
        with self._translated("cannot give registered memory back"):
            self._nixl.deregisterMem(registration, [self._backend])

    def start(self, pieces: Sequence[_Piece], *, is_write: bool) -> int:
        vendor = self._vendor
        local = vendor.nixlXferDList(
            vendor.DRAM_SEG, [(_address(piece.local), len(piece.local), 0) for piece in pieces]
        )
        remote = vendor.nixlXferDList(
            vendor.DRAM_SEG, [(piece.remote_address, len(piece.local), 0) for piece in pieces]
        )
        operation = vendor.NIXL_WRITE if is_write else vendor.NIXL_READ
        with self._translated("cannot start a transfer"):
            handle = int(self._nixl.createXferReq(operation, local, remote, self._remote_name, "", [self._backend]))
            self._nixl.postXferReq(handle)
        return handle

    def is_done(self, handle: int) -> bool:
        """Also moves what is under way."""
        with self._translated("has lost the connection"):
            return bool(self._nixl.getXferStatus(handle) == self._vendor.NIXL_SUCCESS)

    def release(self, handle: int) -> None:
        with self._translated("cannot end a transfer"):
            self._nixl.releaseXferReq(handle)

    def close(self) -> None:
        # The last reference: the connection is gone when this returns. Nothing is released or deregistered before,
        # for a transfer that is under way still points to it.
        self._nixl = None

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise UnavailableError(f"NIXL {what}: {error}") from error
