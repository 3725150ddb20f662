"""The slab server in this process, with the store behind it, and clients that speak by hand."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import uvloop

from kvstore import messages as m
from kvstore import wire
from kvstore.errors import InvalidArgumentError
from kvstore.keys import pack_hashes
from kvstore.messages import BlockState, CommitState, Epoch
from kvstore.slab import (
    HELLO_BYTES,
    WELCOME_BYTES,
    Access,
    ConnectionKind,
    Hello,
    SlotState,
    Welcome,
    encode_arena_request,
    slot_state,
)
from kvstore_server.core.sessions import SessionLimits
from kvstore_server.core.tenants import DEFAULT_TENANT, Membership, Tenant
from kvstore_server.rpc.service import StoreService
from kvstore_server.rpc.slab_server import SlabServer
from tests.faults import raw_slab
from tests.faults.raw_slab import RawCalls, RawSession, RefusedError
from tests.server.builders import SMALL, block_hash, enveloped, hashes, make_arenas, make_core, make_in_flight

EPOCH = Epoch(b"e" * 16)
SLABS, SLAB_BYTES = 4, 4 * 4096
_Result = TypeVar("_Result")


class Served:
    """A slab server on a loop in a thread, so that clients may block."""

    def __init__(self, path: Path, *, limits: SessionLimits, patience_s: float) -> None:
        self.path = path
        self.member: Membership | None = Membership(DEFAULT_TENANT, may_write=True)
        self.owner: Tenant | None = DEFAULT_TENANT
        self.bugs: list[AssertionError] = []
        self._pool = ThreadPoolExecutor(1)
        arenas = make_arenas(slab_count=SLABS, slab_bytes=SLAB_BYTES)
        self.core = make_core(slab_count=SLABS, slab_bytes=SLAB_BYTES, headers=arenas)
        service = StoreService(
            core=self.core,
            arenas=arenas,
            epoch=EPOCH,
            copy_pool=self._pool,
            clock=time.monotonic,
            in_flight=make_in_flight(),
        )
        self.server = SlabServer(
            service,
            arenas=arenas,
            arena_owner=lambda _: self.owner,
            find_member=lambda _: self.member,
            epoch=EPOCH,
            on_bug=self.bugs.append,
            limits=limits,
            patience_s=patience_s,
        )
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.server.listen(f"unix:{path}")
        self.on_loop(self.server.start)

    def on_loop(self, work: Callable[[], _Result]) -> _Result:
        async def run() -> _Result:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(20)

    def stop(self, *, grace_s: float) -> None:
        asyncio.run_coroutine_threadsafe(self.server.stop(grace_s=grace_s), self._loop).result(20)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 20
        while not self.on_loop(condition):
            assert time.monotonic() < deadline_s, "it does not come to that"
            time.sleep(0.002)

    def close(self) -> None:
        self.stop(grace_s=0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._pool.shutdown()
        assert not self.bugs
        assert self.server.session_count == self.server.connection_count == 0
        self.core.check_invariants()


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    served: list[Served] = []

    def start(*, patience_s: float = 20.0, **limits: int) -> Served:
        one = Served(tmp_path / f"{len(served)}.slab", limits=SessionLimits(**limits), patience_s=patience_s)
        served.append(one)
        return one

    yield start
    for one in served:
        one.close()


def lookup(*numbers: int, wait_s: float = 0.0) -> m.LookupBlocksRequest:
    return m.LookupBlocksRequest(namespace_id=SMALL.id, block_hashes=pack_hashes(hashes(*numbers)), wait_s=wait_s)


def acquire(owner_id: m.OwnerId, *numbers: int, wait_s: float) -> m.AcquirePrefixRequest:
    return m.AcquirePrefixRequest(
        namespace_id=SMALL.id,
        owner_id=owner_id,
        block_hashes=pack_hashes(hashes(*numbers)),
        wait_s=wait_s,
        lease_s=60.0,
    )


def test_a_session_stores_and_reads_blocks_in_the_arena(serve: Serve) -> None:
    served = serve()
    blocks = {block_hash(number): enveloped(number) for number in range(3)}
    with RawSession(served.path) as writer, RawSession(served.path, access=Access.READ) as reader:
        assert writer.welcome == Welcome(
            epoch=EPOCH, arena_count=1, arena_bytes=SLABS * SLAB_BYTES, access=Access.WRITE
        )
        assert reader.welcome.access is Access.READ
        assert writer.put(SMALL, blocks) == [CommitState.COMMITTED] * 3
        response, slots = reader.calls.lease(SMALL, hashes(0, 9, 2), owner_id=reader.id)
        assert list(response.block_states) == [BlockState.HIT, BlockState.MISS, BlockState.HIT]
        assert [reader.read(slot) for slot in slots] == [enveloped(0), enveloped(2)]
        assert slot_state(reader.header(slots[0]), slots[0].generation) is SlotState.READABLE


def test_the_socket_is_for_its_user_alone_from_the_start(serve: Serve) -> None:
    assert stat.S_IMODE(serve().path.stat().st_mode) == 0o600


def test_all_that_a_session_held_is_free_when_it_ends(serve: Serve) -> None:
    served = serve()
    with RawSession(served.path) as other:
        session = RawSession(served.path)
        session.put(SMALL, {block_hash(1): enveloped(1)})
        session.get(SMALL, hashes(1))
        session.calls.reserve(SMALL, hashes(2, 3), owner_id=session.id)
        other.get(SMALL, hashes(1))
        assert (served.core.lease_count, served.core.reservation_count) == (2, 2)
        session.connection.close()  # its calls stay open
        assert raw_slab.is_closed(session.calls.connection)
        served.wait_until(lambda: served.server.session_count == 1)
        assert (served.core.lease_count, served.core.reservation_count) == (1, 0)
        assert other.get(SMALL, hashes(1)) == [enveloped(1)]
        session.close()


def test_what_a_session_waits_for_does_not_outlive_it(serve: Serve) -> None:
    """Or the lease that it waits for would be given to nobody."""
    served = serve()
    with RawSession(served.path) as writer:
        reservation, slots = writer.calls.reserve(SMALL, hashes(1), owner_id=writer.id)
        waiting = RawSession(served.path)
        waiting.calls.send(wire.ACQUIRE_PREFIX, acquire(waiting.id, 1, wait_s=20.0))
        waiting.calls.send(wire.LOOKUP_BLOCKS, lookup(1))
        served.wait_until(lambda: served.server.connection_count == 4)
        waiting.close()
        served.wait_until(lambda: served.server.connection_count == 2)
        writer.write(slots[0], enveloped(1))
        assert writer.calls.commit(reservation.reservation_ids, owner_id=writer.id) == [CommitState.COMMITTED]
        assert writer.calls.stats().lease_count == 0


def test_a_waiting_call_is_answered_when_the_block_comes(serve: Serve) -> None:
    served = serve()
    with RawSession(served.path) as writer, RawSession(served.path) as reader:
        reservation, slots = writer.calls.reserve(SMALL, hashes(1), owner_id=writer.id)
        reader.calls.send(wire.LOOKUP_BLOCKS, lookup(1, wait_s=20.0))
        writer.write(slots[0], enveloped(1))
        writer.calls.commit(reservation.reservation_ids, owner_id=writer.id)
        assert reader.calls.receive(wire.LOOKUP_BLOCKS).matched_count == 1
        late = reader.calls.call(wire.LOOKUP_BLOCKS, lookup(1, 2, wait_s=0.01))
        assert late.matched_count == 1


def test_a_reader_may_not_reserve_and_its_descriptor_is_read_only(serve: Serve) -> None:
    served = serve()
    served.member = Membership(DEFAULT_TENANT, may_write=False)
    with RawSession(served.path, access=Access.WRITE) as session:
        assert session.welcome.access is Access.READ
        with pytest.raises(InvalidArgumentError, match="access WRITE"):
            session.calls.reserve(SMALL, hashes(1), owner_id=session.id)
        _, descriptor = session.arena(0)
        assert descriptor is not None
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(descriptor, b"x", 0)
        os.close(descriptor)


def test_an_arena_is_handed_over_only_while_it_is_the_tenants(serve: Serve) -> None:
    served = serve()
    served.member = Membership(Tenant("mine"), may_write=True)
    with RawSession(served.path) as session:
        for owner, is_granted in ((DEFAULT_TENANT, False), (None, False), (Tenant("mine"), True)):
            served.owner = owner
            reply, descriptor = session.arena(0)
            assert reply.is_granted == is_granted == (descriptor is not None)
            if descriptor is not None:
                assert reply.size_bytes == os.fstat(descriptor).st_size == SLABS * SLAB_BYTES
                os.close(descriptor)
        for index in (1, 2**32 - 1):
            reply, descriptor = session.arena(index)
            assert (reply.index, reply.is_granted, descriptor) == (index, False, None)


def test_who_is_nobody_here_is_told_so(serve: Serve) -> None:
    served = serve()
    served.member = None
    with pytest.raises(RefusedError, match=f"user {os.getuid()} may not use this store"):
        RawSession(served.path)


@pytest.mark.parametrize("kind", ConnectionKind)
def test_a_hello_may_come_byte_by_byte(serve: Serve, kind: ConnectionKind) -> None:
    served = serve()
    with RawSession(served.path) as session, raw_slab.connect(served.path) as connection:
        other_id = raw_slab.new_session_id() if kind is ConnectionKind.SESSION else session.id
        for byte in Hello(kind=kind, access=Access.READ, session_id=other_id).encode():
            connection.sendall(bytes([byte]))
        assert Welcome.decode(raw_slab.receive(connection, WELCOME_BYTES)).refusal_bytes == 0


def test_arena_requests_may_come_byte_by_byte_or_all_at_once(serve: Serve) -> None:
    served = serve()
    with RawSession(served.path) as session:
        for byte in encode_arena_request(0)[:-1]:
            session.connection.sendall(bytes([byte]))
        session.connection.sendall(encode_arena_request(0)[-1:] + encode_arena_request(5) * 200)
        seen = []
        for _ in range(201):
            _, descriptors, _, _ = socket.recv_fds(session.connection, 32, 4)
            seen.append(len(descriptors))
            for descriptor in descriptors:
                os.close(descriptor)
        assert seen == [1] + [0] * 200


def refusal(connection: socket.socket) -> str:
    welcome = Welcome.decode(raw_slab.receive(connection, WELCOME_BYTES))
    text = raw_slab.receive(connection, welcome.refusal_bytes).decode()
    assert raw_slab.is_closed(connection)
    return text


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", bytes(HELLO_BYTES), b"KVSH\x02" + bytes(HELLO_BYTES)]
)
def test_garbage_instead_of_a_hello_is_refused_by_name(serve: Serve, garbage: bytes) -> None:
    with raw_slab.connect(serve().path) as connection:
        connection.sendall(garbage)
        assert "not a version 1 slab hello" in refusal(connection)


def test_a_client_that_says_nothing_is_cut_off(serve: Serve) -> None:
    served = serve(patience_s=0.05)
    with raw_slab.connect(served.path) as silent, raw_slab.connect(served.path) as slow:
        slow.sendall(b"KVSH")
        assert refusal(silent) == refusal(slow) == "no hello in 0.05 s"
    served.wait_until(lambda: served.server.connection_count == 0)


def test_garbage_on_a_session_ends_it_and_what_it_held(serve: Serve) -> None:
    served = serve()
    session = RawSession(served.path)
    session.calls.reserve(SMALL, hashes(1), owner_id=session.id)
    session.connection.sendall(b"garbage!")
    assert raw_slab.is_closed(session.connection)
    assert raw_slab.is_closed(session.calls.connection)
    served.wait_until(lambda: served.core.reservation_count == 0)
    session.close()


def test_an_idle_session_is_kept_and_so_is_one_that_does_not_read(serve: Serve) -> None:
    """What has stopped may wake up and go on writing into its slots."""
    served = serve(patience_s=0.02)
    with RawSession(served.path) as stopped, RawSession(served.path) as other:
        stopped.connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            stopped.connection.sendall(encode_arena_request(0) * 100_000)
        assert other.calls.stats().capacity_bytes == SLABS * SLAB_BYTES
        assert served.server.session_count == 2


def test_calls_need_a_live_session(serve: Serve) -> None:
    served = serve()
    with RawSession(served.path) as session:
        with pytest.raises(RefusedError, match="no such session of this user"):
            RawCalls(served.path, raw_slab.new_session_id())
        with pytest.raises(RefusedError, match="the session id is in use"):
            RawSession(served.path, session_id=session.id)
        RawCalls(served.path, session.id).connection.close()
    served.wait_until(lambda: served.server.session_count == 0)
    with pytest.raises(RefusedError, match="no such session of this user"):
        RawCalls(served.path, session.id)


def test_whoever_takes_all_connections_gets_no_more_until_some_close(serve: Serve) -> None:
    served = serve(connections_per_user_max=4, sessions_per_user_max=2, calls_per_session_max=2)
    with RawSession(served.path) as session:
        more = RawCalls(served.path, session.id)
        with pytest.raises(RefusedError, match="the session has 2 CALLS connections; allowed: 2"):
            RawCalls(served.path, session.id)
        with raw_slab.connect(served.path), pytest.raises(RefusedError, match="has 4 connections; allowed: 4"):
            RawSession(served.path)
        more.connection.close()
        served.wait_until(lambda: served.server.connection_count == 2)
        RawSession(served.path).close()


def test_a_stopping_server_answers_its_sessions_and_takes_no_new_ones(serve: Serve) -> None:
    served = serve()
    with RawSession(served.path) as session:
        served.on_loop(served.server.admit_no_more_sessions)
        with pytest.raises(RefusedError, match="the daemon is stopping"):
            RawSession(served.path)
        RawCalls(served.path, session.id).connection.close()
        assert session.put(SMALL, {block_hash(1): enveloped(1)}) == [CommitState.COMMITTED]


@pytest.mark.parametrize("grace_s", [20.0, 0.0])
def test_stopping_waits_for_running_calls_as_long_as_it_may(serve: Serve, grace_s: float) -> None:
    served = serve()
    with RawSession(served.path) as session:
        session.calls.reserve(SMALL, hashes(1), owner_id=session.id)
        session.calls.send(wire.LOOKUP_BLOCKS, lookup(1, wait_s=0.3))
        with RawSession(served.path) as other:
            other.calls.stats()  # by now the other call has been read, too
        served.stop(grace_s=grace_s)
        if grace_s:
            assert session.calls.receive(wire.LOOKUP_BLOCKS).matched_count == 0
        assert raw_slab.is_closed(session.calls.connection)
        assert raw_slab.is_closed(session.connection)
        assert served.core.reservation_count == 0
        with pytest.raises(ConnectionRefusedError):
            raw_slab.connect(served.path)


def test_clients_that_come_and_go_at_any_moment_leave_nothing(serve: Serve) -> None:
    served = serve()

    def come_and_go(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(40):
            session = RawSession(served.path)
            others = [raw_slab.connect(served.path) for _ in range(rng.randrange(3))]
            for other in others:
                hello = Hello(kind=ConnectionKind.CALLS, access=Access.READ, session_id=session.id).encode()
                other.sendall(hello[: rng.choice([0, 5, HELLO_BYTES, HELLO_BYTES])])
            session.calls.send(wire.LOOKUP_BLOCKS, lookup(1, wait_s=rng.choice([0.0, 5.0])))
            if rng.random() < 0.5:
                session.calls.send(wire.ACQUIRE_PREFIX, acquire(session.id, 1, wait_s=5.0))
            for connection in rng.sample([session.connection, session.calls.connection, *others], 2 + len(others)):
                connection.close()

    with RawSession(served.path) as writer:
        writer.calls.reserve(SMALL, hashes(1), owner_id=writer.id)  # so that lookups wait
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(come_and_go, range(4)))
        served.wait_until(lambda: served.server.connection_count == 2)
        assert writer.calls.stats().lease_count == 0
