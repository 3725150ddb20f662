"""A client of the slab socket in a process of its own, as any user, led by hand.

Reads one JSON command a line on stdin and answers each with one on stdout: {"ok": result} or {"error": text}.
The first argument is the user id to become, or "-" to stay who we are. Everything is imported before that: another
user may have no access to the interpreter.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore import messages as m
from kvstore import wire
from kvstore.errors import KvstoreError
from kvstore.keys import pack_hashes
from kvstore.slab import Access, CallHeader, SlotRecord, decode_slot_records, encode_arena_request
from tests.faults import blocks
from tests.faults.raw_slab import RawCalls, RawSession, RefusedError, connect

_PR_SET_DUMPABLE = 4
_libc = ctypes.CDLL(None, use_errno=True)


class Puppet:
    def __init__(self) -> None:
        self.session: RawSession | None = None
        self.idle: list[Any] = []
        self.slots: list[SlotRecord] = []

    @property
    def attached(self) -> RawSession:
        assert self.session is not None, "not attached"
        return self.session

    def attach(self, path: str, access: str) -> str:
        self.session = RawSession(Path(path), access=Access[access])
        return self.session.id.hex()

    def granted(self) -> str:
        return self.attached.welcome.access.name

    def join(self, path: str, session_id: str) -> None:
        self.idle.append(RawCalls(Path(path), m.OwnerId(bytes.fromhex(session_id))))

    def connect(self, path: str, count: int) -> None:
        """Connections that say nothing."""
        self.idle += [connect(Path(path)) for _ in range(count)]

    def put(self, chain: int) -> list[str]:
        stored = {one: blocks.enveloped(blocks.SMALL, one) for one in blocks.chain(chain)}
        return [state.name for state in self.attached.put(blocks.SMALL, stored)]

    def get(self, chain: int) -> list[bool]:
        """For each block that is there, whether it is right."""
        hashes = blocks.chain(chain)
        found = self.attached.get(blocks.SMALL, hashes)
        return [data == blocks.enveloped(blocks.SMALL, one) for one, data in zip(hashes, found, strict=False)]

    def open(self) -> None:
        self.attached.calls.open(blocks.SMALL)

    def lookup(self, chain: int, wait_s: float = 0.0) -> list[str]:
        request = m.LookupBlocksRequest(
            namespace_id=blocks.SMALL.id, block_hashes=pack_hashes(blocks.chain(chain)), wait_s=wait_s
        )
        states = self.attached.calls.call(wire.LOOKUP_BLOCKS, request).block_states
        return [m.BlockState(state).name for state in states]

    def wait(self, chain: int, wait_s: float) -> None:
        """Sends a lookup that waits, and does not read its answer."""
        hashes = pack_hashes(blocks.chain(chain))
        request = m.LookupBlocksRequest(namespace_id=blocks.SMALL.id, block_hashes=hashes, wait_s=wait_s)
        self.attached.calls.send(wire.LOOKUP_BLOCKS, request)

    def reserve(self, chain: int, path: str = "SLAB", reservation_s: float = 300.0) -> list[int | None]:
        request = m.ReserveBlocksRequest(
            namespace_id=blocks.SMALL.id,
            owner_id=self.attached.id,
            parent_hash=b"",
            block_hashes=pack_hashes(blocks.chain(chain)),
            reservation_s=reservation_s,
            path=m.TransferPath[path],
        )
        response = self.attached.calls.call(wire.RESERVE_BLOCKS, request)
        self.slots = decode_slot_records(response.slots)
        return list(response.reservation_ids)

    def scribble(self) -> None:
        """Writes over all of the slots that were reserved last, whatever has become of them."""
        for slot in self.slots:
            self.attached.write(slot, b"\xff" * slot.size_bytes)

    def commit(self, reservation_ids: list[int]) -> list[str]:
        numbers = [m.ReservationId(number) for number in reservation_ids]
        return [state.name for state in self.attached.calls.commit(numbers, owner_id=self.attached.id)]

    def flood(self) -> int:
        """Asks for arenas and statistics and never reads; returns how many bytes the kernel took."""
        sent_bytes = 0
        statistics = CallHeader(0, 1 + wire.UNARY_STORE_METHODS.index(wire.GET_STORE_STATS), False, 1).encode()
        requests = {self.attached.connection: encode_arena_request(0), self.attached.calls.connection: statistics}
        for connection, request in requests.items():
            connection.settimeout(0.2)
            try:
                while True:
                    connection.sendall(request * 1000)
                    sent_bytes += len(request) * 1000
            except TimeoutError:
                continue
        return sent_bytes

    def arenas(self) -> list[int]:
        """Which ones are granted."""
        return [
            index for index in range(self.attached.welcome.arena_count) if self.attached.arena(index)[1] is not None
        ]

    def break_into(self, index: int) -> dict[str, str]:
        """What each attempt to change an arena ends with."""
        reply, descriptor = self.attached.arena(index)
        assert descriptor is not None, f"arena {index} was not granted"
        size_bytes, page_bytes = os.fstat(descriptor).st_size, reply.page_bytes

        def make_mapping_writable() -> None:
            page = ctypes.c_void_p(_map_readable(descriptor, page_bytes)), ctypes.c_size_t(page_bytes)
            if _libc.mprotect(*page, mmap.PROT_READ | mmap.PROT_WRITE):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

        def reopen_writable() -> None:
            os.close(os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR))

        attempts: dict[str, Callable[[], object]] = {
            "write": lambda: os.pwrite(descriptor, b"x", 0),
            "map writable": lambda: mmap.mmap(descriptor, page_bytes).close(),
            "make mapping writable": make_mapping_writable,
            "reopen writable": reopen_writable,
            "chmod": lambda: os.fchmod(descriptor, 0o666),
            "shrink": lambda: os.ftruncate(descriptor, 0),
            "grow": lambda: os.ftruncate(descriptor, size_bytes + (2 << 20)),
        }
        outcomes = {}
        for name, attempt in attempts.items():
            try:
                attempt()
            except OSError as error:
                outcomes[name] = error.strerror or "refused"
            else:
                outcomes[name] = "done"
        assert os.fstat(descriptor).st_size == size_bytes
        return outcomes


def _map_readable(descriptor: int, size_bytes: int) -> int:
    """Maps the first page for reading, by hand: Python's own mapping tells its address only when it may be written."""
    _libc.mmap.restype = ctypes.c_void_p
    protection, flags = mmap.PROT_READ, mmap.MAP_SHARED
    address = _libc.mmap(None, ctypes.c_size_t(size_bytes), protection, flags, descriptor, ctypes.c_long(0))
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(address)


def become(uid: int) -> None:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    # Or /proc/self would be root's, and not even a file of our own could be opened anew through it.
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def main() -> None:
    if sys.argv[1] != "-":
        become(int(sys.argv[1]))
    puppet = Puppet()
    print(json.dumps({"ok": None}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"ok": getattr(puppet, command.pop("do"))(**command)}
        except (RefusedError, KvstoreError, OSError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
