"""What clients tell of their requests: how it travels, what does not, and what is refused."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvstore import messages as m
from kvstore.keys import session_hash
from kvstore.wire import LEASE_BLOCKS, LOOKUP_BLOCKS
from kvstore_client import Client, FinishReason, Hint, PutState
from tests.client.adapters import AnyClient
from tests.client.builders import FAST, chain, namespace, payloads, refuses
from tests.client.conftest import Connect
from tests.client.fake_daemon import FakeDaemon
from tests.client.fake_slab import FakeSlabDaemon

SESSION = "the conversation of a customer with a name"
FULL = Hint(
    session=SESSION,
    turn=3,
    input_tokens=1200,
    output_tokens=80,
    finish=FinishReason.TOOL_USE,
    expected_return_s=12.5,
    is_done=True,
    priority=-1,
    ttl_s=3600.0,
)


@pytest.fixture(scope="module")
def real(start_daemon: Callable[..., Any]) -> Any:
    """One daemon for the module; tests keep apart by their namespaces."""
    return start_daemon()


@pytest.fixture(scope="module")
def plain(start_daemon: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One that learns nothing: without hints, what was used last stays."""
    config = tmp_path_factory.mktemp("config") / "kvstore.yaml"
    config.write_text("memory:\n  policy: lru\n", encoding="utf-8")
    return start_daemon("--config", str(config))


@pytest.fixture(params=["grpc", "slab"])
def fake(request: pytest.FixtureRequest) -> Iterator[FakeDaemon]:
    daemon = FakeSlabDaemon() if request.param == "slab" else FakeDaemon()
    yield daemon
    daemon.close()


@pytest.fixture
def client(connect: Connect, fake: FakeDaemon) -> AnyClient:
    transport = "slab" if isinstance(fake, FakeSlabDaemon) else "grpc"
    return connect(fake.address, config=replace(FAST, transport=transport))


def test_a_hint_goes_with_every_call_that_uses_blocks(client: AnyClient, fake: FakeDaemon) -> None:
    space, hashes = namespace(), chain(3)
    client.lookup(space, hashes, hint=FULL)
    client.acquire(space, hashes, hint=FULL).release()
    client.put(space, hashes, payloads(space, 3), hint=FULL)
    client.get(space, hashes, bytearray(3 * 256), hint=FULL)
    client.prefetch(space, hashes, hint=FULL)
    client.view(space, hashes, hint=FULL).release()
    client.hint(space, hashes, FULL)
    reading = {"LeaseBlocks"} if isinstance(fake, FakeSlabDaemon) else {"ReadBlocks"}
    expected = {"LookupBlocks", "AcquirePrefix", "ReserveBlocks", "PrefetchBlocks", "HintBlocks"} | reading
    for name in expected:
        assert fake.wait_for_hint(name) == FULL.message(space)
    assert {name for name, _ in fake.hints} == expected


def test_nothing_is_told_without_a_hint(client: AnyClient, fake: FakeDaemon) -> None:
    space, hashes = namespace(), chain(3)
    client.lookup(space, hashes)
    client.put(space, hashes, payloads(space, 3))
    client.get(space, hashes, bytearray(3 * 256))
    client.lookup(space, hashes)
    assert not fake.hints
    assert "HintBlocks" not in fake.calls


def test_what_the_client_answers_and_reads_by_itself_is_told_all_the_same() -> None:
    """A lookup by a look at the slots, and a read from where the blocks were met before, make no call of their own."""
    fake = FakeSlabDaemon()
    with Client(fake.address, config=replace(FAST, transport="slab")) as client:
        space, hashes = namespace(), chain(3)
        client.put(space, hashes, payloads(space, 3))
        client.get(space, hashes, bytearray(3 * 256))
        asked_count = fake.count(LOOKUP_BLOCKS), fake.count(LEASE_BLOCKS)
        assert client.lookup(space, hashes, hint=FULL).matched_count == 3
        assert fake.wait_for_hint("HintBlocks") == FULL.message(space)
        client.get(space, hashes, bytearray(3 * 256), hint=FULL)
        assert fake.wait_for_hint("CountReads") == FULL.message(space)
        assert (fake.count(LOOKUP_BLOCKS), fake.count(LEASE_BLOCKS)) == asked_count
    fake.close()


def test_what_is_reserved_in_place_brings_its_hint() -> None:
    fake = FakeSlabDaemon()
    with Client(fake.address, config=replace(FAST, transport="slab")) as client:
        space = namespace()
        with client.reserve(space, chain(2), hint=FULL):
            pass
        assert fake.wait_for_hint("ReserveBlocks") == FULL.message(space)
    fake.close()


def test_a_session_is_known_by_a_hash_that_means_nothing_in_another_namespace() -> None:
    one, other = namespace(), namespace()
    first, again, elsewhere = FULL.message(one), FULL.message(one), FULL.message(other)
    assert first.session_hash == again.session_hash == session_hash(one.id, SESSION)
    assert 0 < first.session_hash < 1 << 64
    assert elsewhere.session_hash != first.session_hash
    assert Hint(session="other").message(one).session_hash != first.session_hash
    assert Hint().message(one) == m.Hint()


def test_the_name_of_a_session_never_leaves_the_process(real: Any) -> None:
    """All bytes that a client sends over TCP, to a real daemon."""
    host, _, port = real.address.rpartition(":")
    sent = bytearray()

    def pump(source: socket.socket, target: socket.socket, log: bytearray | None) -> None:
        while data := source.recv(65536):
            if log is not None:
                log += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxied = f"127.0.0.1:{listener.getsockname()[1]}"
        with Client(proxied, config=replace(FAST, transport="grpc")) as client:
            threads: list[threading.Thread] = []
            sockets: list[socket.socket] = []

            def serve() -> None:
                inner, _ = listener.accept()
                outer = socket.create_connection((host, int(port)))
                sockets.extend((inner, outer))
                for arguments in ((inner, outer, sent), (outer, inner, None)):
                    threads.append(threading.Thread(target=pump, args=arguments, daemon=True))
                    threads[-1].start()

            accepting = threading.Thread(target=serve, daemon=True)
            accepting.start()
            space, hashes = namespace(), chain(3)
            stored = client.put(space, hashes, payloads(space, 3), hint=FULL)
            assert stored.states == (PutState.STORED,) * 3
            assert client.lookup(space, hashes, hint=FULL).matched_count == 3
            client.hint(space, hashes, FULL)
        accepting.join(20)
        for thread in threads:
            thread.join(20)
        for one in sockets:
            one.close()
    assert len(sent) > 3 * 256
    assert SESSION.encode() not in sent
    assert b"customer" not in sent
    assert FULL.message(space).session_hash.to_bytes(8, "little") in sent


@pytest.mark.parametrize("transport", ["grpc", "slab", "bulk"])
def test_a_real_daemon_takes_hints_on_every_path(real: Any, transport: str) -> None:
    with Client(real.address, config=replace(FAST, transport=transport)) as client:
        space, hashes = namespace(), chain(5)
        assert client.put(space, hashes, payloads(space, 5), hint=FULL).stored_count == 5
        for _ in range(2):
            assert client.lookup(space, hashes, hint=FULL).matched_count == 5
            assert client.get(space, hashes, bytearray(5 * 256), hint=FULL).error is None
        with client.acquire(space, hashes, hint=FULL) as lease:
            assert lease.matched_count == 5
        with client.view(space, hashes, hint=FULL) as views:
            assert views.matched_count == 5
        assert client.prefetch(space, hashes, hint=FULL).in_memory_count == 5
        client.hint(space, hashes, Hint(session=SESSION, is_done=True))
        assert client.lookup(space, hashes).matched_count == 5


@pytest.mark.parametrize("transport", ["grpc", "slab", "bulk"])
def test_a_hint_decides_what_a_real_daemon_keeps(plain: Any, transport: str) -> None:
    """Memory of 64 MiB, and prompts of one block of 1 MiB each."""
    space = namespace(payload_bytes=1 << 20)
    block = bytearray(1 << 20)
    with Client(plain.address, config=replace(FAST, transport=transport)) as client:

        def store(*prompts: int, hint: Hint | None = None) -> None:
            for prompt in prompts:
                assert client.put(space, chain(1, seed=prompt), block, hint=hint).stored_count == 1

        def is_there(prompt: int) -> bool:
            return client.lookup(space, chain(1, seed=prompt)).matched_count == 1

        store(1, hint=Hint(priority=2))
        store(2)
        store(3)
        assert client.get(space, chain(1, seed=3), block, hint=Hint(priority=1)).error is None
        store(*range(4, 100))
        assert [is_there(prompt) for prompt in (1, 2, 3, 99)] == [True, False, True, True]
        reuse = client.stats().reuse
        assert reuse is not None
        assert reuse.capacity_count + reuse.policy_count > 0


def test_a_hint_of_blocks_that_nobody_knows_changes_nothing(client: AnyClient, fake: FakeDaemon) -> None:
    client.hint(namespace(), chain(2), Hint(priority=2))
    assert fake.wait_for_hint("HintBlocks").priority == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("session", ""),
        ("session", "x" * 4097),
        ("session", 7),
        ("session", "\ud800"),
        ("turn", 0),
        ("turn", 1.5),
        ("turn", True),
        ("input_tokens", -1),
        ("output_tokens", 1 << 32),
        ("finish", "tool_use"),
        ("expected_return_s", -0.1),
        ("expected_return_s", float("nan")),
        ("expected_return_s", 31 * 86400),
        ("ttl_s", 0),
        ("ttl_s", float("inf")),
        ("priority", 3),
        ("priority", -3),
        ("priority", 0.5),
        ("is_done", "yes"),
    ],
)
def test_a_hint_that_cannot_be_is_refused_by_the_name_of_its_field(field: str, value: object) -> None:
    with refuses(field):
        Hint(**{field: value})  # type: ignore[arg-type]


def test_what_is_no_hint_is_refused_before_anything_is_sent(client: AnyClient, fake: FakeDaemon) -> None:
    space, hashes = namespace(), chain(1)
    wrong: Any = {"priority": 1}
    for call in (
        lambda: client.lookup(space, hashes, hint=wrong),
        lambda: client.acquire(space, hashes, hint=wrong),
        lambda: client.get(space, hashes, bytearray(256), hint=wrong),
        lambda: client.put(space, hashes, payloads(space, 1), hint=wrong),
        lambda: client.prefetch(space, hashes, hint=wrong),
        lambda: client.view(space, hashes, hint=wrong),
        lambda: client.hint(space, hashes, wrong),
    ):
        with refuses("hint"):
            call()
    assert fake.calls == []
