"""Turns, age and stalls of data streams: no transport, and time is what the test says."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.errors import DeadlineExceededError
from kvstore_server.core.in_flight import ClientId, InFlight
from kvstore_server.rpc.streams import OpenStreams, Stream
from kvstore_server.rpc.turns import Turns

ALICE, BOB = ClientId("alice"), ClientId("bob")
STALL_S_MAX = 3.0


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Served:
    """Streams that share room for 100 bytes, 60 of them for one client."""

    def __init__(self, *, stream_s_max: float = 60.0) -> None:
        self.clock = Clock()
        self.in_flight = InFlight(bytes_max=100, bytes_per_client_max=60)
        self.streams = OpenStreams(
            Turns(self.in_flight), stream_s_max=stream_s_max, clock=self.clock, stall_s_max=STALL_S_MAX
        )

    def start_load(self, client_id: ClientId, size_bytes: int) -> Peer:
        return Peer(self, client_id, load_bytes=size_bytes)

    def start_store(self, client_id: ClientId, size_bytes: int) -> Peer:
        return Peer(self, client_id, store_bytes=size_bytes)

    def pass_time(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.streams.end_stalled()


class Peer:
    """One stream whose other end does nothing unless told to."""

    def __init__(self, served: Served, client_id: ClientId, *, load_bytes: int = 0, store_bytes: int = 0) -> None:
        self.is_moving = False
        self._done = asyncio.Event()
        self.stream: Stream | None = None
        self.task = asyncio.create_task(self._live(served, client_id, load_bytes, store_bytes))

    async def _live(self, served: Served, client_id: ClientId, load_bytes: int, store_bytes: int) -> None:
        async with served.streams.open(client_id) as self.stream:
            if load_bytes:
                await self.stream.wait_turn(load_bytes)
            else:
                self.stream.count_store(store_bytes)
            self.is_moving = True
            await self._done.wait()

    def move(self) -> None:
        assert self.stream is not None
        self.stream.note_progress()

    async def finish(self) -> None:
        self._done.set()
        await self.task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_load_begins_at_once_where_there_is_room_and_gives_it_back() -> None:
    served = Served()
    load = served.start_load(ALICE, 50)
    await settle()
    assert load.is_moving
    assert served.in_flight.total_bytes == 50
    await load.finish()
    assert served.in_flight.total_bytes == 0


async def test_a_load_waits_for_its_turn_and_is_not_dropped() -> None:
    served = Served()
    first, second, third = served.start_load(ALICE, 60), served.start_load(BOB, 60), served.start_load(ALICE, 10)
    await settle()
    assert (first.is_moving, second.is_moving, third.is_moving) == (True, False, False)
    await first.finish()
    await settle()
    assert second.is_moving
    assert third.is_moving
    await second.finish()
    await third.finish()
    served.in_flight.check_invariants()


async def test_a_client_that_uses_its_share_keeps_nobody_else_waiting() -> None:
    served = Served()
    loads = [served.start_load(ALICE, 60), served.start_load(ALICE, 60), served.start_load(BOB, 40)]
    await settle()
    assert [load.is_moving for load in loads] == [True, False, True]
    for load in loads:
        await load.finish()
    served.in_flight.check_invariants()


async def test_a_stalled_stream_is_ended_when_another_waits_for_its_room() -> None:
    served = Served()
    stalled, waiting = served.start_load(ALICE, 60), served.start_load(BOB, 60)
    await settle()
    served.pass_time(STALL_S_MAX + 0.1)
    with pytest.raises(DeadlineExceededError, match="no progress for 3 s while others waited"):
        await stalled.task
    await settle()
    assert waiting.is_moving
    await waiting.finish()


async def test_a_stalled_stream_that_is_in_nobodys_way_goes_on() -> None:
    served = Served()
    stalled = served.start_load(ALICE, 60)
    await settle()
    served.pass_time(50.0)
    await settle()
    assert not stalled.task.done()
    await stalled.finish()


async def test_a_slow_stream_that_makes_progress_goes_on_while_others_wait() -> None:
    served = Served()
    slow, waiting = served.start_load(ALICE, 60), served.start_load(BOB, 60)
    await settle()
    for _ in range(10):
        served.pass_time(STALL_S_MAX - 0.1)
        slow.move()
    await settle()
    assert not slow.task.done()
    await slow.finish()
    await waiting.finish()


async def test_a_load_that_waits_for_its_turn_is_never_ended_as_stalled() -> None:
    served = Served()
    moving, waiting = served.start_load(ALICE, 60), served.start_load(BOB, 60)
    await settle()
    for _ in range(10):
        served.pass_time(STALL_S_MAX - 0.1)
        moving.move()
    assert not waiting.task.done()
    await moving.finish()
    await settle()
    assert waiting.is_moving
    await waiting.finish()


async def test_stalled_stores_that_leave_no_room_are_ended_before_anybody_waits() -> None:
    """Who would be refused does not wait, so being full is enough."""
    served = Served()
    stores = [served.start_store(ALICE, 50), served.start_store(BOB, 50)]
    await settle()
    assert not served.in_flight.admits_store(ClientId("carol"))
    served.pass_time(STALL_S_MAX + 0.1)
    for store in stores:
        with pytest.raises(DeadlineExceededError):
            await store.task
    assert served.in_flight.admits_store(ClientId("carol"))


async def test_a_stream_ends_by_its_age_even_while_it_waits_for_its_turn() -> None:
    served = Served(stream_s_max=0.05)
    moving, waiting = served.start_load(ALICE, 60), served.start_load(BOB, 60)
    for load in (moving, waiting):
        with pytest.raises(DeadlineExceededError, match=r"older than 0\.05 s"):
            await load.task
    assert served.in_flight.total_bytes == 0
    served.in_flight.check_invariants()


async def test_a_cancelled_stream_gives_back_what_it_held_or_waited_for() -> None:
    served = Served()
    peers = [served.start_load(ALICE, 60), served.start_load(BOB, 60), served.start_store(BOB, 10)]
    await settle()
    for peer in peers:
        peer.task.cancel()
    await asyncio.gather(*(peer.task for peer in peers), return_exceptions=True)
    assert served.in_flight.total_bytes == 0
    assert served.in_flight.waiting_count == 0
    served.in_flight.check_invariants()
