"""What every client promises of every daemon: both clients, the fake daemon and the real one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from kvstore import PROTOCOL_VERSION
from kvstore.messages import BlockState, CutReason
from kvstore_client import AsyncClient, Client, ClientConfig, PutState
from tests.client.adapters import AnyClient
from tests.client.builders import FAST, chain, namespace, payloads, refuses
from tests.client.conftest import Connect
from tests.client.fake_daemon import FakeDaemon
from tests.client.fake_slab import FakeSlabDaemon

HIT, MISS, PENDING = BlockState.HIT, BlockState.MISS, BlockState.PENDING


@dataclass(frozen=True)
class Where:
    """A daemon, and how its clients reach its blocks."""

    address: str
    transport: str

    @property
    def config(self) -> ClientConfig:
        return replace(FAST, transport=self.transport)


@pytest.fixture(scope="module")
def real_address(start_daemon: Callable[..., Any]) -> str:
    """One daemon for the module; tests keep apart by their namespaces."""
    return str(start_daemon().address)


@pytest.fixture(params=["fake grpc", "fake slab", "real grpc", "real slab", "real bulk"])
def where(request: pytest.FixtureRequest) -> Iterator[Where]:
    kind, transport = request.param.split()
    if kind == "real":
        yield Where(request.getfixturevalue("real_address"), transport)
        return
    daemon = FakeSlabDaemon() if transport == "slab" else FakeDaemon()
    yield Where(daemon.address, transport)
    daemon.close()


@pytest.fixture
def client(connect: Connect, where: Where) -> AnyClient:
    return connect(where.address, config=where.config)


def test_the_daemon_says_who_it_is(client: AnyClient) -> None:
    info = client.info()
    assert info.protocol_version == PROTOCOL_VERSION
    assert len(info.epoch) == 16
    assert not info.draining


def test_what_was_never_stored_is_a_miss(client: AnyClient) -> None:
    space, hashes = namespace(), chain(3)
    found = client.lookup(space, hashes)
    assert (found.states, found.matched_count, found.error) == ((MISS,) * 3, 0, None)
    into = bytearray(b"\x55" * (3 * 256))
    loaded = client.get(space, hashes, into)
    assert (loaded.states, loaded.matched_count, loaded.error) == ((MISS,) * 3, 0, None)
    assert into == b"\x55" * (3 * 256)


def test_what_was_stored_comes_back_bit_for_bit(client: AnyClient) -> None:
    space, hashes = namespace(), chain(5)
    blocks = payloads(space, 5)
    stored = client.put(space, hashes, blocks)
    assert (stored.states, stored.stored_count, stored.error) == ((PutState.STORED,) * 5, 5, None)
    assert client.lookup(space, hashes).matched_count == 5
    into = bytearray(5 * 256)
    loaded = client.get(space, hashes, into)
    assert (loaded.states, loaded.matched_count, loaded.error) == ((HIT,) * 5, 5, None)
    assert into == b"".join(blocks)


@pytest.mark.parametrize("payload_bytes", [16, 2 << 20, (2 << 20) + 4096, 3 << 20])
def test_blocks_of_any_size_travel_in_one_frame_or_several(client: AnyClient, payload_bytes: int) -> None:
    space, hashes = namespace(payload_bytes=payload_bytes), chain(2)
    blocks = payloads(space, 2)
    assert client.put(space, hashes, blocks).stored_count == 2
    into = [bytearray(payload_bytes), bytearray(payload_bytes)]
    assert client.get(space, hashes, into).matched_count == 2
    assert into == blocks


def test_a_second_put_sends_nothing(client: AnyClient) -> None:
    space, hashes = namespace(), chain(3)
    blocks = payloads(space, 3)
    client.put(space, hashes[:2], blocks[:2])
    stored = client.put(space, hashes, blocks)
    assert stored.states == (PutState.ALREADY_STORED, PutState.ALREADY_STORED, PutState.STORED)
    assert stored.stored_count == 3


def test_a_chain_goes_on_behind_its_parent(client: AnyClient) -> None:
    space, hashes = namespace(), chain(4)
    blocks = payloads(space, 4)
    client.put(space, hashes[:2], blocks[:2])
    assert client.put(space, hashes[2:], blocks[2:], parent_hash=hashes[1]).stored_count == 2
    assert client.lookup(space, hashes).matched_count == 4


def test_a_gap_ends_the_matched_prefix_but_not_the_loading(client: AnyClient) -> None:
    space, hashes = namespace(), chain(4)
    blocks = payloads(space, 4)
    client.put(space, hashes[:1], blocks[:1])
    stray, other = chain(1, seed=9), payloads(space, 1, seed=9)
    client.put(space, stray, other)
    into = bytearray(b"\x55" * (3 * 256))
    loaded = client.get(space, [hashes[0], hashes[1], stray[0]], into)
    assert (loaded.states, loaded.matched_count) == ((HIT, MISS, HIT), 1)
    assert into == blocks[0] + b"\x55" * 256 + other[0]


def test_another_namespace_sees_nothing(client: AnyClient) -> None:
    hashes = chain(2)
    one, other_layout = namespace(model="m"), namespace(model="m", layout="NHD")
    client.put(one, hashes, payloads(one, 2))
    assert client.lookup(other_layout, hashes).matched_count == 0
    assert client.get(other_layout, hashes, bytearray(512)).matched_count == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda data: np.frombuffer(data, np.float16).copy(),
        lambda data: np.frombuffer(data, np.uint8).reshape(2, -1).copy(),
        lambda data: torch.frombuffer(bytearray(data), dtype=torch.bfloat16),
        lambda data: [torch.frombuffer(bytearray(data[:256]), dtype=torch.float32).reshape(4, 16), data[256:]],
        memoryview,
        lambda data: (data[:256], bytearray(data[256:])),
    ],
    ids=["numpy", "numpy-2d", "bfloat16", "mixed", "memoryview", "tuple"],
)
def test_blocks_are_taken_from_any_kind_of_memory(client: AnyClient, make: Callable[[bytes], Any]) -> None:
    space, hashes = namespace(), chain(2)
    data = b"".join(payloads(space, 2))
    assert client.put(space, hashes, make(data)).stored_count == 2
    into = bytearray(512)
    assert client.get(space, hashes, into).matched_count == 2
    assert into == data


def test_blocks_are_loaded_into_any_kind_of_memory(client: AnyClient) -> None:
    space, hashes = namespace(), chain(2)
    data = b"".join(payloads(space, 2))
    client.put(space, hashes, data)
    array = np.zeros((2, 128), np.float16)
    tensor = torch.zeros(2, 128, dtype=torch.bfloat16)
    first, second = torch.zeros(64), bytearray(256)
    for into in (array, tensor, [first, second]):
        assert client.get(space, hashes, into).matched_count == 2
    assert array.tobytes() == data
    assert tensor.view(torch.uint8).numpy().tobytes() == data
    assert first.numpy().tobytes() + bytes(second) == data


def test_large_puts_and_gets_go_in_batches(connect: Connect, where: Where) -> None:
    client = connect(where.address, config=replace(where.config, batch_bytes_max=1000, batch_count_max=3))
    space, hashes = namespace(), chain(10)
    data = b"".join(payloads(space, 10))
    assert client.put(space, hashes, data).states == (PutState.STORED,) * 10
    assert client.lookup(space, hashes).matched_count == 10
    into = bytearray(len(data))
    assert client.get(space, hashes, into).matched_count == 10
    assert into == data
    with client.acquire(space, hashes) as lease:
        assert lease.matched_count == 10
        assert client.stats().lease_count == 4
        assert lease.renew()
    assert client.stats().lease_count == 0


def test_a_lease_holds_the_matched_prefix_until_released(client: AnyClient) -> None:
    space, hashes = namespace(), chain(3)
    client.put(space, hashes[:2], payloads(space, 2))
    with client.acquire(space, hashes, lease_s=60.0) as lease:
        assert (lease.states, lease.matched_count, lease.error) == ((HIT, HIT, MISS), 2, None)
        assert client.stats().lease_count == 1
        assert lease.renew(lease_s=30.0)
    assert client.stats().lease_count == 0
    assert not lease.renew()
    lease.release()


def test_views_show_what_was_stored_and_nothing_stays_held(client: AnyClient, where: Where) -> None:
    space, hashes = namespace(), chain(4)
    blocks = payloads(space, 4)
    assert client.put(space, hashes[:3], blocks[:3]).stored_count == 3
    for _ in range(3):
        with client.view(space, hashes, lease_s=60.0) as views:
            assert (views.states, views.matched_count, views.error) == ((HIT, HIT, HIT, MISS), 3, None)
            assert (len(views), views[3]) == (4, None)
            for index in range(3):
                view = views[index]
                assert view is not None
                assert (view.payload, view.is_valid(), view.is_copy) == (blocks[index], True, where.transport != "slab")
                assert view.numpy(plane="v").tobytes() == blocks[index][128:]
            assert views.renew(lease_s=30.0)
            assert client.stats().lease_count == (1 if where.transport == "slab" else 0)
    assert client.stats().lease_count == 0
    assert client.view(space, []).states == ()


def test_nothing_matched_is_nothing_leased(client: AnyClient) -> None:
    with client.acquire(namespace(), chain(2)) as lease:
        assert (lease.matched_count, lease.error) == (0, None)
        assert not lease.renew()
        assert client.stats().lease_count == 0


def test_with_no_slow_tier_a_recompute_cost_changes_nothing(client: AnyClient) -> None:
    space, hashes = namespace(), chain(3)
    client.put(space, hashes[:2], payloads(space, 2))
    found = client.lookup(space, hashes, recompute_s_per_block=1e-6)
    assert (found.matched_count, found.left_out_count, found.cut_reason) == (2, 0, CutReason.NONE)
    with client.acquire(space, hashes, recompute_s_per_block=1e-6) as lease:
        assert (lease.matched_count, lease.left_out_count, lease.cut_reason) == (2, 0, CutReason.NONE)


def test_a_prefetch_says_what_is_in_memory_already_and_what_is_nowhere(client: AnyClient) -> None:
    space, hashes = namespace(), chain(3)
    client.put(space, hashes[:2], payloads(space, 2))
    told = client.prefetch(space, hashes)
    assert (told.in_memory_count, told.started_count, told.refused_count, told.missing_count) == (2, 0, 0, 1)
    assert told.error is None


def test_asking_for_nothing_asks_nobody(client: AnyClient) -> None:
    space = namespace()
    assert client.lookup(space, []).states == ()
    assert client.get(space, [], []).states == ()
    assert client.put(space, [], b"").states == ()
    assert client.acquire(space, []).matched_count == 0
    assert client.prefetch(space, []).missing_count == 0


def test_nothing_stays_reserved_or_leased_after_many_rounds(client: AnyClient) -> None:
    space = namespace()
    for seed in range(50):
        hashes = chain(2, seed=seed)
        client.put(space, hashes, payloads(space, 2, seed=seed))
        with client.acquire(space, hashes):
            client.get(space, hashes, bytearray(512))
    stats = client.stats()
    assert (stats.lease_count, stats.reservation_count) == (0, 0)


def test_wrong_input_is_refused_by_name_before_anything_is_sent(client: AnyClient) -> None:
    space, hashes = namespace(), chain(2)
    with refuses("hashes"):
        client.lookup(space, [hashes[0][:31]])  # type: ignore[list-item]
    with refuses("hashes"):
        client.put(space, [hashes[0], hashes[0]], bytes(512))
    with refuses("namespace"):
        client.lookup("model", hashes)  # type: ignore[arg-type]
    with refuses("wait_s"):
        client.lookup(space, hashes, wait_s=61.0)
    with refuses("wait_s"):
        client.acquire(space, hashes, wait_s=-1.0)
    for wrong in (0.0, -1.0, 60.1, float("nan")):
        with refuses("recompute_s_per_block"):
            client.lookup(space, hashes, recompute_s_per_block=wrong)
        with refuses("recompute_s_per_block"):
            client.acquire(space, hashes, recompute_s_per_block=wrong)
    with refuses("hashes"):
        client.prefetch(space, [hashes[0][:31]])  # type: ignore[list-item]
    for budget in (0, -1, 1 << 63, 1.5):
        with refuses("budget_bytes"):
            client.prefetch(space, hashes, budget_bytes=budget)  # type: ignore[arg-type]
    with refuses("lease_s"):
        client.acquire(space, hashes, lease_s=0.0)
    with refuses("lease_s"):
        client.acquire(space, hashes, lease_s=float("nan"))
    with refuses("into"):
        client.get(space, hashes, bytearray(511))
    with refuses("into"):
        client.get(space, hashes, bytes(512))
    with refuses("into"):
        client.get(space, hashes, [bytearray(256)])
    with refuses(r"blocks\[1\]"):
        client.put(space, hashes, [bytes(256), bytes(255)])
    with refuses("parent_hash"):
        client.put(space, hashes, bytes(512), parent_hash=b"short")  # type: ignore[arg-type]
    assert client.lookup(space, hashes).error is None  # and the client still works


@pytest.mark.parametrize("transport", ["grpc", "slab"])
def test_a_pending_block_can_be_waited_for(connect: Connect, real_address: str, transport: str) -> None:
    """Only the real daemon waits. Its writer is slow enough to be seen over a stream only."""
    client = connect(real_address, config=replace(FAST, transport=transport))
    writer = connect(real_address, config=replace(FAST, transport="grpc"))
    space, hashes = namespace(payload_bytes=3 << 20), chain(1)
    blocks = payloads(space, 1)
    assert client.lookup(space, hashes).states == (MISS,)
    results = []
    thread = threading.Thread(target=lambda: results.append(writer.put(space, hashes, blocks)))
    thread.start()
    deadline_s = time.monotonic() + 10
    while client.lookup(space, hashes).states == (MISS,):
        assert time.monotonic() < deadline_s
    assert client.lookup(space, hashes, wait_s=10.0).matched_count == 1
    thread.join()
    assert results[0].stored_count == 1


def test_a_closed_client_misses_at_once(client: AnyClient) -> None:
    space, hashes = namespace(), chain(1)
    assert client.put(space, hashes, bytes(256)).stored_count == 1
    client.close()
    found = client.lookup(space, hashes)
    assert found.states == (MISS,)
    assert "closed" in str(found.error)


@pytest.mark.parametrize("transport", ["grpc", "slab", "bulk"])
def test_many_threads_share_one_client(real_address: str, transport: str) -> None:
    space = namespace(payload_bytes=4096)
    wrong: list[str] = []
    with Client(real_address, config=replace(FAST, transport=transport)) as client:

        def work(seed: int) -> None:
            for turn in range(10):
                hashes = chain(3, seed=100 * seed + turn)
                blocks = payloads(space, 3, seed=100 * seed + turn)
                client.put(space, hashes, blocks)
                into = bytearray(3 * 4096)
                loaded = client.get(space, hashes, into)
                if loaded.matched_count != 3 or into != b"".join(blocks):
                    wrong.append(f"{seed}/{turn}: {loaded}")

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.mark.parametrize("transport", ["grpc", "slab", "bulk"])
def test_an_async_client_serves_many_tasks_and_more_than_one_loop(real_address: str, transport: str) -> None:
    space, client = namespace(), AsyncClient(real_address, config=replace(FAST, transport=transport))

    async def round_trip(seed: int) -> bool:
        hashes, blocks = chain(2, seed=seed), payloads(space, 2, seed=seed)
        await client.put(space, hashes, blocks)
        into = bytearray(512)
        return (await client.get(space, hashes, into)).matched_count == 2 and into == b"".join(blocks)

    async def many(start: int) -> list[bool]:
        return await asyncio.gather(*(round_trip(seed) for seed in range(start, start + 20)))

    assert all(asyncio.run(many(0)))

    async def last() -> None:
        assert all(await many(20))
        await client.aclose()

    asyncio.run(last())
