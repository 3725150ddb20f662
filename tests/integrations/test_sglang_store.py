"""SGLang's pages over a real daemon, from the pools of engines that are none."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore_client import Client, Hint, LookupResult, Reserved, Views
from kvstore_client.config import ClientConfig
from kvstore_client.integrations._blocks import EngineModel, to_block_hash
from kvstore_client.integrations.sglang.identity import Identity, Place
from kvstore_client.integrations.sglang.store import PageStore, restorable
from tests.conftest import DaemonProcess

from .sglang_pools import LogicalHostPool, MambaPoolHost, MHATokenToKVPoolHost, page_of, slots

StartEngine = Callable[..., "Engine"]


class Engine:
    """One rank: a pool, and the store behind it."""

    def __init__(
        self, client: Client, *, model: EngineModel, pool: Any = None, place: Place | None = None, **more: Any
    ) -> None:
        self.pool = MHATokenToKVPoolHost() if pool is None else pool
        self.store = PageStore(client, identity=Identity(model=model, lora="none", place=place or Place()), **more)
        self.store.register(self.pool, name="kv")

    def save(self, keys: Sequence[str], *pages: int, prefix_keys: Sequence[str] | None = None) -> list[bool]:
        return self.store.store("kv", keys, slots(self.pool, *pages), prefix_keys=prefix_keys)

    def load(self, keys: Sequence[str], *pages: int) -> list[bool]:
        return self.store.load("kv", keys, slots(self.pool, *pages))

    def count_hits(self, keys: Sequence[str]) -> int:
        return self.store.count_hits("kv", keys)


@pytest.fixture(scope="module")
def shared_daemon(start_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    """For tests that leave it alone: each has a model of its own."""
    return start_daemon()


@pytest.fixture
def start_engine(request: pytest.FixtureRequest, shared_daemon: DaemonProcess) -> Iterator[StartEngine]:
    model = EngineModel(model=request.node.name, weights_revision="1")
    with ExitStack() as clients:

        def start(*, address: str | None = None, transport: str = "auto", **more: Any) -> Engine:
            config = ClientConfig(control_timeout_s=1.0, transport=transport)
            client = clients.enter_context(Client(address or shared_daemon.unix_address, config=config))
            return Engine(client, model=model, **more)

        yield start


def chain(count: int, *, seed: int = 0) -> list[str]:
    """Page hashes as SGLang's: 64 hexadecimal digits, each over the one before."""
    keys: list[str] = []
    for number in range(count):
        keys.append(hashlib.sha256(f"{seed} {number} {keys[-1:]}".encode()).hexdigest())
    return keys


@pytest.mark.parametrize("transport", ["slab", "grpc"])
def test_pages_that_one_engine_stored_another_one_loads(start_engine: StartEngine, transport: str) -> None:
    keys = chain(5)
    writer, reader = start_engine(transport=transport), start_engine(transport=transport)
    writer.pool.fill(seed=1)
    assert reader.count_hits(keys) == 0
    assert writer.save(keys[:3], 0, 1, 2) == [True] * 3
    assert writer.save(keys[3:4], 3, prefix_keys=keys[:3]) == [True]

    assert reader.count_hits(keys) == 4
    assert reader.load(keys[:4], 7, 5, 3, 1) == [True] * 4
    for page, place in enumerate((7, 5, 3, 1)):
        assert torch.equal(page_of(reader.pool, place), page_of(writer.pool, page))


def test_a_page_may_be_written_over_as_soon_as_it_is_stored(start_engine: StartEngine) -> None:
    writer, reader = start_engine(), start_engine()
    writer.pool.fill(seed=1)
    stored = page_of(writer.pool, 0)
    assert writer.save(chain(1), 0) == [True]
    writer.pool.fill(seed=2)

    assert reader.load(chain(1), 4) == [True]
    assert torch.equal(page_of(reader.pool, 4), stored)


def test_loading_ends_at_the_first_page_that_is_missing_and_leaves_the_others_alone(start_engine: StartEngine) -> None:
    engine, keys = start_engine(), chain(4)
    engine.pool.fill(seed=1)
    engine.save([keys[0]], 0)
    engine.save(keys[2:], 2, 3)
    before = [page_of(engine.pool, page) for page in range(8)]

    assert engine.count_hits(keys) == 1
    assert engine.load(keys, 4, 5, 6, 7) == [True, False, False, False]
    assert engine.store.find("kv", keys) == [True, False, True, True]
    for page in (5, 6, 7):
        assert torch.equal(page_of(engine.pool, page), before[page])


class Listening(Client):
    """Keeps the hints that it is given."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.hints: list[tuple[str, Hint | None]] = []

    def lookup(self, *arguments: Any, hint: Hint | None = None, **more: Any) -> LookupResult:
        self.hints.append(("lookup", hint))
        return super().lookup(*arguments, hint=hint, **more)

    def view(self, *arguments: Any, hint: Hint | None = None, **more: Any) -> Views:
        self.hints.append(("view", hint))
        return super().view(*arguments, hint=hint, **more)

    def reserve(self, *arguments: Any, hint: Hint | None = None, **more: Any) -> Reserved:
        self.hints.append(("reserve", hint))
        return super().reserve(*arguments, hint=hint, **more)


def test_the_session_of_a_call_goes_with_what_it_asks_loads_and_stores(shared_daemon: DaemonProcess) -> None:
    keys, hint = chain(2), Hint(session="a chat")
    with Listening(shared_daemon.unix_address) as client:
        engine = Engine(client, model=EngineModel(model="hinted", weights_revision="1"))
        pages = slots(engine.pool, 0, 1)
        assert engine.store.store("kv", keys, pages, hint=hint) == [True, True]
        assert engine.store.count_hits("kv", keys, hint=hint) == 2
        assert engine.store.load("kv", keys, pages, hint=hint) == [True, True]
        assert engine.count_hits(keys) == 2
    assert client.hints == [("reserve", hint), ("lookup", hint), ("view", hint), ("lookup", None)]


def test_pages_that_the_store_has_count_as_stored(start_engine: StartEngine) -> None:
    first, second = start_engine(), start_engine()
    assert first.save(chain(2), 0, 1) == [True, True]
    assert second.save(chain(3), 0, 1, 2) == [True, True, True]
    assert first.count_hits(chain(3)) == 3


def test_a_page_that_another_engine_is_storing_is_not_waited_for(
    start_engine: StartEngine, shared_daemon: DaemonProcess
) -> None:
    engine, keys = start_engine(), chain(2)
    namespace = engine.store.namespace("kv")
    with Client(shared_daemon.unix_address) as other, other.reserve(namespace, [to_block_hash(keys[0])]):
        assert engine.save(keys, 0, 1) == [True, True]
        assert engine.count_hits(keys) == 0
        assert engine.store.find("kv", keys) == [False, True]


def test_whole_pages_and_pieces_are_the_same_blocks(start_engine: StartEngine) -> None:
    """SGLang uses the one interface or the other, by its `interface_v1`."""
    writer, reader, keys = start_engine(), start_engine(), chain(2)
    writer.pool.fill(seed=1)
    tensors = [writer.pool.get_data_page(page * 4) for page in (0, 1)]
    assert writer.store.store_tensors("kv", keys, tensors) == [True, True]
    assert reader.load(keys, 3, 4) == [True, True]
    assert torch.equal(page_of(reader.pool, 4), page_of(writer.pool, 1))

    targets = [torch.zeros_like(tensor) for tensor in tensors]
    assert reader.store.load_tensors("kv", keys, targets) == [True, True]
    assert torch.equal(targets[1], tensors[1])


def test_other_pools_follow_the_kv_under_the_same_hashes(start_engine: StartEngine) -> None:
    engine, keys, states = start_engine(), chain(3), MambaPoolHost()
    engine.store.register(states, name="mamba")
    states.fill(seed=1)
    engine.save(keys, 0, 1, 2)
    assert engine.store.store("mamba", keys[-1:], slots(states, 5), prefix_keys=keys[:-1]) == [True]

    assert engine.store.find("mamba", keys) == [False, False, True]
    assert engine.store.load("mamba", keys[-1:], slots(states, 2)) == [True]
    assert torch.equal(page_of(states, 2), page_of(states, 5))


def test_a_pool_without_bytes_has_every_page_and_an_unknown_one_has_none(start_engine: StartEngine) -> None:
    engine, keys = start_engine(pool=LogicalHostPool()), chain(2)
    assert engine.count_hits(keys) == 2
    assert engine.save(keys, 0, 1) == engine.load(keys, 0, 1) == [True, True]
    assert engine.store.load("swa", keys, None) == [False, False]


def test_ranks_do_not_get_each_others_part(start_engine: StartEngine) -> None:
    ranks = [start_engine(place=Place(tp_rank=rank, tp_size=2)) for rank in (0, 1)]
    ranks[0].save(chain(2), 0, 1)
    assert [rank.count_hits(chain(2)) for rank in ranks] == [2, 0]


def test_a_rank_whose_store_fails_costs_hits_and_nothing_else(start_engine: StartEngine, daemon: DaemonProcess) -> None:
    """SGLang takes the least of what its ranks have, so each must answer, and say less rather than wait.

    Kind of fault: ranks disagree on a storage result and deadlock in a collective.
    """
    ranks = [start_engine(place=Place(tp_rank=rank, tp_size=2)) for rank in (0, 1)]
    keys = chain(3)
    for rank in ranks:
        rank.save(keys, 0, 1, 2)
    assert min(rank.count_hits(keys) for rank in ranks) == 3
    alone = start_engine(place=Place(tp_rank=1, tp_size=2), address="unix:/nobody/is/here.sock")

    assert alone.count_hits(keys) == 0
    assert alone.load(keys, 0, 1, 2) == alone.save(keys, 0, 1, 2) == [False] * 3
    assert ranks[0].load(keys, 0, 1, 2) == [True] * 3


@pytest.mark.parametrize("end", [DaemonProcess.kill, DaemonProcess.pause], ids=["dead", "hung"])
def test_without_a_daemon_everything_is_a_miss_and_once_it_is_back_hits_are(
    end: Callable[[DaemonProcess], None],
    start_engine: StartEngine,
    daemon: DaemonProcess,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvstore.sglang")
    engine, keys = start_engine(address=daemon.unix_address), chain(3)
    engine.pool.fill(seed=1)
    engine.save(keys, 0, 1, 2)
    end(daemon)

    for _ in range(3):
        assert engine.count_hits(keys) == 0
        assert engine.load(keys, 0, 1, 2) == [False] * 3
        assert engine.save(keys, 0, 1, 2) == [False] * 3
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "the store does not answer, so prompts are computed"
    ]

    if end is DaemonProcess.pause:
        daemon.resume()
    else:
        daemon.start()
    while not engine.save(keys, 0, 1, 2)[-1]:
        pass
    assert engine.count_hits(keys) == 3
    assert caplog.records[-1].message == "the store answers again"


def test_what_is_copied_while_the_daemon_dies_is_right_or_was_never_loaded(
    start_engine: StartEngine, daemon: DaemonProcess
) -> None:
    writer, keys = start_engine(address=daemon.unix_address, pool=MambaPoolHost(has_pieces=False)), chain(3)
    writer.pool.fill(seed=1)
    writer.save(keys, 0, 1, 2)

    class DyingPool(MambaPoolHost):
        def set_from_flat_data_page(self, index: int, data_page: Any) -> None:
            daemon.kill()
            super().set_from_flat_data_page(index, data_page)

    DyingPool.__name__ = MambaPoolHost.__name__
    reader = start_engine(address=daemon.unix_address, pool=DyingPool(has_pieces=False))
    loaded = reader.load(keys, 4, 5, 6)
    assert loaded[0], "the daemon died too early for this test"
    for page in range(loaded.index(False) if False in loaded else len(loaded)):
        assert torch.equal(page_of(reader.pool, 4 + page), page_of(writer.pool, page))
    assert reader.load(keys, 4, 5, 6) == [False] * 3


def test_weights_that_change_while_serving_end_it(start_engine: StartEngine, caplog: pytest.LogCaptureFixture) -> None:
    """Kind of fault: blocks of the old weights are served under the new ones."""
    weights = ["first"]
    engine, keys = start_engine(weights_now=lambda: weights[0]), chain(2)
    engine.save(keys, 0, 1)
    assert engine.count_hits(keys) == 2
    weights[0] = "second"

    assert engine.count_hits(keys) == 0
    assert engine.load(keys, 0, 1) == [False, False]
    assert engine.save(chain(2, seed=1), 0, 1) == [False, False]
    weights[0] = "first"  # nobody knows whether they are, or what was computed in between
    assert engine.count_hits(keys) == 0
    assert [record.message for record in caplog.records if "weights were changed" in record.message]
    assert start_engine().count_hits(chain(2, seed=1)) == 0


def test_what_was_cleared_is_not_found_by_this_engine_and_by_others_it_is(start_engine: StartEngine) -> None:
    ranks, other, keys = [start_engine(), start_engine()], start_engine(), chain(2)
    ranks[0].save(keys, 0, 1)
    for rank in ranks:
        rank.store.forget("2@17#1")
    assert [rank.count_hits(keys) for rank in ranks] == [0, 0]
    assert other.count_hits(keys) == 2
    ranks[0].save(keys, 0, 1)
    assert [rank.count_hits(keys) for rank in ranks] == [2, 2], "its ranks still agree"


def test_pages_and_speed_are_told_once(start_engine: StartEngine) -> None:
    engine = start_engine(is_metered=True)
    engine.save(chain(3), 0, 1, 2)
    engine.load(chain(2), 0, 1)
    page_counts, gb_per_s = engine.store.stores.take()
    assert (page_counts, len(gb_per_s)) == ([3], 1)
    assert engine.store.loads.take()[0] == [2]
    assert engine.store.loads.take() == ([], [])


@given(
    has_pages=st.lists(st.booleans(), max_size=12),
    trailing_count=st.none() | st.integers(min_value=1, max_value=5),
)
def test_prefixes_that_a_pool_can_serve_are_those_whose_pages_are_there(
    has_pages: list[bool], trailing_count: int | None
) -> None:
    kv_count = len(has_pages)
    expected = []
    for length in range(1, kv_count + 1):
        first = 0 if trailing_count is None else max(0, length - trailing_count)
        if all(has_pages[first:length]):
            expected.append(length)
    assert restorable(kv_count, has_pages, trailing_count=trailing_count) == expected
