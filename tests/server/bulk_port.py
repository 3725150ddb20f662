"""A data port in this process, with a real core and real arenas behind it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore.bulk import BLOCK_HEADER_BYTES, BlockHeader, Direction, TransferRequest
from kvstore.keys import BlockHash
from kvstore.messages import BlockState, OwnerId, ReservationId, ReserveState, Ticket, TransferPath
from kvstore.namespace import Namespace
from kvstore_server.core.in_flight import InFlight
from kvstore_server.core.tenants import DEFAULT_TENANT, scoped
from kvstore_server.rpc.bulk_server import BulkServer, listen
from kvstore_server.rpc.transfer_pool import PoolSettings, TransferPool
from kvstore_server.rpc.transfers import LoopDesk, Transfers
from kvstore_server.rpc.turns import Turns
from kvstore_server.shm.arenas import Arenas
from kvstore_server.shm.memory import MemorySource, PageKind
from tests.server.builders import ALICE, HUGE, LARGE, SMALL, block_hash, enveloped, make_core

LONG_S = 20.0  # what a test waits at most for something that is about to happen
SLAB_BYTES = 8 << 20

_Result = TypeVar("_Result")


class BulkPort:
    """What the daemon has around its data port, on a loop of its own. Callers are threads, as clients are."""

    def __init__(
        self,
        *,
        slab_count: int = 4,
        stall_s: float = LONG_S,
        idle_s: float = LONG_S,
        transfer_s_max: float = LONG_S,
        connection_count_max: int = 8,
        in_flight_bytes_max: int = 1 << 30,
        ssl_context: ssl.SSLContext | None = None,
        worker_count: int = 0,
    ) -> None:
        """With workers each slab is an arena of its own."""
        self.bugs: list[AssertionError] = []
        self.arenas = Arenas(
            sources=[MemorySource(kind=PageKind.PLAIN)],
            arena_count=slab_count if worker_count else 1,
            arena_bytes=SLAB_BYTES if worker_count else slab_count * SLAB_BYTES,
            slab_bytes=SLAB_BYTES,
        )
        self.core = make_core(
            slab_count=slab_count, slab_bytes=SLAB_BYTES, namespaces=[SMALL, LARGE, HUGE], headers=self.arenas
        )
        self.in_flight = InFlight(bytes_max=in_flight_bytes_max, bytes_per_client_max=in_flight_bytes_max)
        self.transfers = Transfers(
            core=self.core, turns=Turns(self.in_flight), clock=time.monotonic, on_settled=lambda: None
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.server: BulkServer | TransferPool
        if worker_count:
            self.server = self.pool = self.on_loop(
                lambda: TransferPool(
                    listen("127.0.0.1", 0),
                    transfers=self.transfers,
                    arenas=self.arenas,
                    settings=PoolSettings(
                        worker_count=worker_count,
                        transfer_s_max=transfer_s_max,
                        stall_s=stall_s,
                        log_level="warning",
                        log_format="auto",
                    ),
                    on_bug=self.bugs.append,
                )
            )
            self.on_loop(self.pool.start)
            asyncio.run_coroutine_threadsafe(self.pool.wait_until_serving(), self._loop).result(LONG_S)
            self.port = self.pool.port
            return
        self.server = BulkServer(
            listen("127.0.0.1", 0),
            desk=LoopDesk(self.transfers, loop=self._loop, on_bug=self.bugs.append),
            view=self.arenas.view,
            transfer_s_max=transfer_s_max,
            stall_s=stall_s,
            idle_s=idle_s,
            connection_count_max=connection_count_max,
            ssl_context=ssl_context,
        )
        self.server.start()
        self.port = self.server.port

    def stop(self, *, grace_s: float) -> None:
        """What the daemon does when it stops."""
        if isinstance(self.server, BulkServer):
            self.server.stop(grace_s=grace_s)
        else:
            asyncio.run_coroutine_threadsafe(self.server.stop(grace_s=grace_s), self._loop).result(LONG_S + grace_s)

    def close(self) -> None:
        self.stop(grace_s=0.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.arenas.close()
        assert not self.bugs, self.bugs

    def on_loop(self, work: Callable[[], _Result]) -> _Result:
        async def run() -> _Result:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(LONG_S)

    # --- what gRPC is for

    def lease(self, hashes: Sequence[BlockHash], namespace: Namespace = SMALL, *, owner_id: OwnerId = ALICE) -> Ticket:
        def lease() -> Ticket:
            scope = scoped(DEFAULT_TENANT, namespace.id)
            leased = self.core.lease_stored(scope, hashes, owner_id=owner_id, now_s=time.monotonic(), duration_s=30.0)
            assert leased.lease_id is not None
            assert set(leased.states) == {BlockState.HIT}
            return self.transfers.issue_read(
                lease_id=leased.lease_id, owner_id=owner_id, namespace_id=scope, hashes=hashes
            )

        return self.on_loop(lease)

    def reserve(self, hashes: Sequence[BlockHash], namespace: Namespace = SMALL) -> Ticket:
        def reserve() -> Ticket:
            states, holds = self.core.reserve(
                scoped(DEFAULT_TENANT, namespace.id),
                hashes,
                parent_hash=None,
                owner_id=ALICE,
                now_s=time.monotonic(),
                duration_s=30.0,
                path=TransferPath.BULK,
            )
            assert set(states) == {ReserveState.RESERVED}, states
            ids: list[ReservationId] = [hold.id for hold in holds if hold is not None]
            return self.transfers.issue_write(owner_id=ALICE, reservation_ids=ids)

        return self.on_loop(reserve)

    def states(self, hashes: Sequence[BlockHash], namespace: Namespace = SMALL) -> list[BlockState]:
        found = self.on_loop(lambda: self.core.lookup(scoped(DEFAULT_TENANT, namespace.id), hashes))
        return [BlockState(state) for state in found.states]

    # --- what must hold in the end

    def wait_until_nothing_is_held(self) -> None:
        """Holds end when the daemon has noticed what became of a connection; then every block can be evicted."""
        deadline_s = time.monotonic() + LONG_S
        while held := self.on_loop(self._held):
            assert time.monotonic() < deadline_s, f"held: {held}"
            time.sleep(0.001)
        self.on_loop(self.core.check_invariants)
        self.on_loop(self.in_flight.check_invariants)

    def wait_until_idle_count(self, count: int) -> None:
        """So many connections, all of which wait for a request."""
        assert isinstance(self.server, BulkServer)
        deadline_s = time.monotonic() + LONG_S
        while not len(self.server._connections) == len(self.server._idle) == count:
            assert time.monotonic() < deadline_s, f"{self.server._connections}, of which idle: {self.server._idle}"
            time.sleep(0.001)

    def _held(self) -> dict[str, int]:
        counts = {
            "leases": self.core.lease_count,
            "reservations": self.core.reservation_count,
            "tickets": self.transfers.ticket_count,
            "transfers": self.transfers.running_count,
            "bytes": self.in_flight.total_bytes,
        }
        return {name: count for name, count in counts.items() if count}

    # --- a client in slow motion

    def connect(self, *, receive_buffer_bytes: int | None = None) -> socket.socket:
        sock = socket.socket()
        if receive_buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        sock.settimeout(LONG_S)
        try:
            sock.connect(("127.0.0.1", self.port))
        except OSError:
            sock.close()
            raise
        return sock

    def put(self, *numbers: int, namespace: Namespace = SMALL) -> list[BlockHash]:
        hashes = [block_hash(number) for number in numbers]
        with contextlib.closing(self.connect()) as sock:
            sock.sendall(write_stream(self.reserve(hashes, namespace), numbers, namespace))
            assert read_all(sock, 24 + len(hashes))[24:] == bytes([1]) * len(hashes)
        return hashes


def write_stream(ticket: Ticket, numbers: Sequence[int], namespace: Namespace = SMALL) -> bytes:
    """All that a client sends for a write."""
    blocks = [enveloped(number, namespace) for number in numbers]
    request = TransferRequest(
        direction=Direction.WRITE,
        ticket=ticket,
        block_count=len(blocks),
        following_bytes=sum(BLOCK_HEADER_BYTES + len(block) for block in blocks),
    )
    return request.encode() + b"".join(
        BlockHeader(index, len(block)).encode() + block for index, block in enumerate(blocks)
    )


def read_request(ticket: Ticket, block_count: int) -> bytes:
    return TransferRequest(direction=Direction.READ, ticket=ticket, block_count=block_count).encode()


def read_all(sock: socket.socket, size_bytes: int) -> bytes:
    """Exactly so many bytes, or what had come when the connection ended."""
    data = b""
    while len(data) < size_bytes and (piece := sock.recv(size_bytes - len(data))):
        data += piece
    return data


def read_to_end(sock: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            data += piece
    return data
