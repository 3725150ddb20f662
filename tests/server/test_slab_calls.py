"""One CALLS connection with handlers of the test's own: order, waiting, bounds."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import CapacityError
from kvstore.slab import CALL_BODY_BYTES_MAX, CALL_HEADER_BYTES, CallHeader
from kvstore.wire import Method
from kvstore_server.rpc.caller import LOOPBACK, Caller
from kvstore_server.rpc.slab_calls import Answerer, CallsConnection

ECHO, FAIL, BREAK, BUG, WAIT, BRIEFLY, MANY = range(1, 8)


def method(name: str) -> Method[bytes, bytes]:
    return Method(
        service="test",
        name=name,
        encode_request=bytes,
        decode_request=bytes,
        encode_response=bytes,
        decode_response=bytes,
    )


@dataclass
class Handlers:
    """What the test's methods do; `gate` lets those go on that wait."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    began: list[bytes] = field(default_factory=list)
    cancelled: list[bytes] = field(default_factory=list)
    bugs: list[AssertionError] = field(default_factory=list)

    async def echo(self, request: bytes, caller: Caller) -> bytes:
        assert caller is LOOPBACK
        self.began.append(request)
        return request

    async def fail(self, request: bytes, _: Caller) -> bytes:
        raise CapacityError(request.decode())

    async def break_down(self, _: bytes, __: Caller) -> bytes:
        raise RuntimeError("not named")

    async def meet_a_bug(self, _: bytes, __: Caller) -> bytes:
        raise AssertionError("an invariant")

    async def wait(self, request: bytes, _: Caller) -> bytes:
        self.began.append(request)
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled.append(request)
            raise
        return request

    async def wait_briefly(self, request: bytes, _: Caller) -> bytes:
        """As a bounded wait does; with 0 the timeout comes before anybody could take the waiting over."""
        try:
            async with asyncio.timeout(float(request)):
                await self.gate.wait()
        except TimeoutError:
            return b"late"
        return b"in time"

    async def answer_much(self, request: bytes, _: Caller) -> bytes:
        self.began.append(request)
        return bytes(int(request))

    def answerers(self) -> list[Answerer]:
        handlers = (self.echo, self.fail, self.break_down, self.meet_a_bug)
        waiting = (self.wait, self.wait_briefly, self.answer_much)
        return [Answerer(method(handler.__name__), handler) for handler in (*handlers, *waiting)]


@dataclass
class Peer:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    connection: CallsConnection
    handlers: Handlers
    kept_bytes: list[int]

    def send(self, code: int, body: bytes = b"", *, number: int = 1, is_one_way: bool = False) -> None:
        self.writer.write(CallHeader(len(body), code, is_one_way, number).encode() + body)

    async def answer(self) -> tuple[int, int, bytes]:
        """Number, code and body of the next response."""
        header = CallHeader.decode(await self.reader.readexactly(CALL_HEADER_BYTES))
        return header.call_number, header.code, await self.reader.readexactly(header.body_bytes)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110  (what it looks at is the code's under test)
            await asyncio.sleep(0.001)


@asynccontextmanager
async def connected(*, patience_s: float = 30.0, kept_bytes_max: int = 1 << 30) -> AsyncIterator[Peer]:
    handlers, kept = Handlers(), [0]

    def resize(*, from_bytes: int, to_bytes: int) -> bool:
        if to_bytes > kept_bytes_max:
            return False
        kept[0] += to_bytes - from_bytes
        return True

    connection = CallsConnection(
        answerers=handlers.answerers(),
        caller=LOOPBACK,
        resize=resize,
        patience_s=patience_s,
        on_bug=handlers.bugs.append,
    )
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, ours)
    reader, writer = await asyncio.open_unix_connection(sock=theirs, limit=1 << 23)
    try:
        yield Peer(reader, writer, connection, handlers, kept)
    finally:
        writer.close()
        await connection.wait_closed()
        assert kept == [0]


Run = Callable[[Awaitable[None]], None]


@pytest.fixture(params=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a test to its end on either event loop."""

    def on_loop(test: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop if request.param == "uvloop" else None) as runner:
            runner.run(asyncio.wait_for(test, 60))

    return on_loop


def test_calls_are_answered_in_order_whatever_becomes_of_them(run: Run) -> None:
    async def test() -> None:
        async with connected() as peer:
            peer.send(ECHO, b"a", number=7)
            peer.send(FAIL, b"no room", number=8)
            peer.send(BREAK, number=9)
            peer.send(0, number=10)
            peer.send(99, number=11)
            peer.send(ECHO, b"b", number=2**64 - 1)
            assert await peer.answer() == (7, 0, b"a")
            assert await peer.answer() == (8, 1, b"CAPACITY\nno room")
            assert await peer.answer() == (9, 1, b"INTERNAL\nRuntimeError in break_down; see the daemon's log")
            assert await peer.answer() == (10, 1, b"PROTOCOL\nmethod 0 is not known; allowed: 1 to 7")
            assert await peer.answer() == (11, 1, b"PROTOCOL\nmethod 99 is not known; allowed: 1 to 7")
            assert await peer.answer() == (2**64 - 1, 0, b"b")

    run(test())


def test_a_call_that_waits_holds_up_its_connection_and_no_other(run: Run) -> None:
    async def test() -> None:
        async with connected() as peer, connected() as other:
            peer.send(WAIT, b"first", number=1)
            peer.send(ECHO, b"second", number=2)
            other.send(ECHO, b"other", number=3)
            assert await other.answer() == (3, 0, b"other")
            assert peer.handlers.began == [b"first"]
            peer.handlers.gate.set()
            assert await peer.answer() == (1, 0, b"first")
            assert await peer.answer() == (2, 0, b"second")

    run(test())


@pytest.mark.parametrize("wait_s", ["0", "0.001", "0.02"])
def test_a_bounded_wait_ends_in_time_and_the_connection_goes_on(run: Run, wait_s: str) -> None:
    async def test() -> None:
        async with connected() as peer:
            for number in range(5):
                peer.send(BRIEFLY, wait_s.encode(), number=number)
                peer.send(ECHO, b"on", number=number)
                assert await peer.answer() == (number, 0, b"late")
                assert await peer.answer() == (number, 0, b"on")
            peer.handlers.gate.set()
            peer.send(BRIEFLY, b"20", number=9)
            assert await peer.answer() == (9, 0, b"in time")

    run(test())


def test_a_one_way_call_is_run_and_never_answered(run: Run) -> None:
    async def test() -> None:
        async with connected() as peer:
            peer.handlers.gate.set()
            for code in (ECHO, FAIL, BREAK, WAIT, 99):
                peer.send(code, b"unanswered", is_one_way=True)
            peer.send(ECHO, b"answered")
            assert await peer.answer() == (1, 0, b"answered")
            assert peer.handlers.began == [b"unanswered", b"unanswered", b"answered"]

    run(test())


def test_a_bug_is_reported_to_the_daemon(run: Run) -> None:
    async def test() -> None:
        async with connected() as peer:
            peer.send(BUG)
            assert await peer.answer() == (
                1,
                1,
                b"INTERNAL\nthe daemon met a bug in meet_a_bug and stops: an invariant",
            )
            assert [str(bug) for bug in peer.handlers.bugs] == ["an invariant"]

    run(test())


def test_what_runs_for_a_client_that_leaves_is_cancelled(run: Run) -> None:
    async def test() -> None:
        async with connected() as peer:
            peer.send(WAIT, b"abandoned")
            await peer.wait_until(lambda: bool(peer.handlers.began))
            peer.writer.close()
            await peer.wait_until(lambda: bool(peer.handlers.cancelled))
        async with connected() as peer:
            peer.send(WAIT, b"cut off")
            await peer.wait_until(lambda: bool(peer.handlers.began))
            peer.connection.abort()
            await peer.wait_until(lambda: bool(peer.handlers.cancelled))
            assert await peer.reader.read() == b""

    run(test())


def test_an_ending_connection_finishes_what_runs_and_takes_nothing_more(run: Run) -> None:
    async def test() -> None:
        async with connected() as peer:
            peer.send(WAIT, b"running")
            peer.send(ECHO, b"too late")
            await peer.wait_until(lambda: bool(peer.handlers.began))
            peer.connection.close_when_idle()
            peer.handlers.gate.set()
            assert await peer.answer() == (1, 0, b"running")
            assert await peer.reader.read() == b""
            assert peer.handlers.began == [b"running"]

    run(test())


def test_a_request_beyond_the_limit_is_refused_by_name_and_ends_the_connection(run: Run) -> None:
    async def test() -> None:
        async with connected() as peer:
            peer.writer.write(CallHeader(CALL_BODY_BYTES_MAX + 1, ECHO, False, 5).encode())
            number, code, body = await peer.answer()
            assert (number, code) == (5, 1)
            assert body == b"PROTOCOL\na call of 2162689 bytes; allowed: 2162688"
            assert await peer.reader.read() == b""

    run(test())


def test_the_largest_request_and_response_pass(run: Run) -> None:
    async def test() -> None:
        async with connected() as peer:
            body = bytes(range(256)) * (CALL_BODY_BYTES_MAX // 256)
            peer.send(ECHO, body)
            assert await peer.answer() == (1, 0, body)

    run(test())


def test_a_request_left_unfinished_is_cut_off_even_while_it_drips(run: Run) -> None:
    async def test() -> None:
        async with connected(patience_s=0.05) as peer:
            peer.send(ECHO, b"whole")
            assert await peer.answer() == (1, 0, b"whole")
            whole = CallHeader(1000, ECHO, False, 1).encode() + bytes(1000)
            for at in range(len(whole) - 1):
                peer.writer.write(whole[at : at + 1])
                await asyncio.sleep(0.001)
                if peer.writer.is_closing():
                    break
            await peer.connection.wait_closed()
            assert peer.handlers.began == [b"whole"]

    run(test())


def test_an_idle_connection_is_kept(run: Run) -> None:
    async def test() -> None:
        async with connected(patience_s=0.01) as idle, connected(patience_s=0.01) as waiting:
            waiting.send(WAIT, b"long")
            idle.send(ECHO, b"before")
            assert await idle.answer() == (1, 0, b"before")
            await asyncio.sleep(0.05)  # it is this time that must change nothing
            idle.send(ECHO, b"after")
            assert await idle.answer() == (1, 0, b"after")
            waiting.handlers.gate.set()
            assert await waiting.answer() == (1, 0, b"long")

    run(test())


def test_a_client_that_does_not_read_gets_no_further_answers_and_is_cut_off(run: Run) -> None:
    async def test() -> None:
        async with connected(patience_s=0.2) as peer:
            peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
            for number in range(50):
                peer.send(MANY, b"1000000", number=number)
            await peer.wait_until(lambda: bool(peer.kept_bytes[0]))
            began_count = len(peer.handlers.began)
            await peer.connection.wait_closed()
            assert len(peer.handlers.began) == began_count < 5

    run(test())


def test_a_client_that_reads_slowly_gets_everything(run: Run) -> None:
    async def test() -> None:
        async with connected() as peer:
            for number in range(20):
                peer.send(MANY, b"300000", number=number)
            for number in range(20):
                assert await peer.answer() == (number, 0, bytes(300_000))
                await asyncio.sleep(0.001)

    run(test())


def test_a_user_that_keeps_too_much_waiting_is_cut_off(run: Run) -> None:
    async def test() -> None:
        async with connected(kept_bytes_max=100_000) as peer:
            peer.writer.write(CallHeader(200_000, ECHO, False, 1).encode() + bytes(150_000))
            assert await peer.reader.read() == b""
            assert not peer.handlers.began

    run(test())


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([ECHO, FAIL, WAIT, BRIEFLY]), st.booleans()), min_size=1, max_size=40),
    st.lists(st.integers(1, 60), min_size=1, max_size=20),
)
def test_however_the_bytes_are_cut_the_answers_are_the_same(calls: list[tuple[int, bool]], cuts: list[int]) -> None:
    bodies = {ECHO: b"echo", FAIL: b"fail", WAIT: b"wait", BRIEFLY: b"0"}
    answers = {ECHO: (0, b"echo"), FAIL: (1, b"CAPACITY\nfail"), WAIT: (0, b"wait"), BRIEFLY: (0, b"in time")}

    async def test() -> None:
        async with connected() as peer:
            peer.handlers.gate.set()
            stream = b"".join(
                CallHeader(len(bodies[code]), code, is_one_way, number).encode() + bodies[code]
                for number, (code, is_one_way) in enumerate(calls)
            )
            at = turn = 0
            while at < len(stream):
                size = cuts[turn % len(cuts)]
                peer.writer.write(stream[at : at + size])
                await asyncio.sleep(0)
                at, turn = at + size, turn + 1
            peer.send(ECHO, b"end", number=99)
            for number, (code, is_one_way) in enumerate(calls):
                if not is_one_way:
                    assert await peer.answer() == (number, *answers[code])
            assert await peer.answer() == (99, 0, b"end")

    asyncio.run(test())
