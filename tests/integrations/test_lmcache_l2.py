# ruff: noqa: E402  (what is imported late is what may be missing)
"""The L2 adapter below LMCache's own storage manager, over a real daemon.

Needs LMCache 0.5.6 and runs in an environment that has it: `.venv-peers/bin/python -m pytest tests/integrations`.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache", reason="LMCache is not installed")
pytest.importorskip("lmcache.v1.distributed.storage_manager", reason="LMCache lacks its dependencies")

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from kvstore.errors import InvalidArgumentError
from kvstore_client import Client
from kvstore_client.integrations.lmcache.l2 import KVStoreL2Adapter, Locks
from tests.conftest import DaemonProcess

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SHAPE = torch.Size([2, 4, 32, 64])
LAYOUT = MemoryLayoutDesc([SHAPE], [torch.bfloat16])
WAIT_S = 30.0
KV_RANK = ObjectKey.ComputeKVRank(1, 0, 1, 0)


def key(number: int, **fields: Any) -> ObjectKey:
    fields = {"model_name": "org/model", "kv_rank": KV_RANK, **fields}
    return ObjectKey(chunk_hash=number.to_bytes(32, "big"), **fields)


def memory_object(seed: int, *, shape: Any = SHAPE, dtype: Any = torch.bfloat16) -> TensorMemoryObj:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 255, (shape.numel() * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    metadata = MemoryObjMetadata(
        shape=shape,
        dtype=dtype,
        address=0,
        phy_size=len(raw),
        ref_count=1,
        fmt=MemoryFormat.KV_2LTD,
        shapes=[shape],
        dtypes=[dtype],
    )
    return TensorMemoryObj(raw, metadata, None)


def plugin(address: str, **params: Any) -> dict[str, Any]:
    return {
        "type": "plugin",
        "module_path": "kvstore_client.integrations.lmcache.l2",
        "class_name": "KVStoreL2Adapter",
        "adapter_params": {"address": address, **params},
    }


class Driver:
    """Waits for an adapter's events as LMCache's controllers do."""

    def __init__(self, adapter: KVStoreL2Adapter) -> None:
        self.adapter = adapter

    def store(self, keys: list[ObjectKey], objects: list[TensorMemoryObj]) -> bool:
        task_id = self.adapter.submit_store_task(keys, objects)
        results = self._wait(self.adapter.get_store_event_fd(), self.adapter.pop_completed_store_tasks)
        return bool(results[task_id].is_successful())

    def lookup(self, keys: list[ObjectKey], layouts: dict[int, MemoryLayoutDesc] | None = None) -> list[int]:
        task_id = self.adapter.submit_lookup_and_lock_task(keys, layouts or {0: LAYOUT})
        event_fd = self.adapter.get_lookup_and_lock_event_fd()
        return ones(self._wait(event_fd, lambda: self.adapter.query_lookup_and_lock_result(task_id)))

    def load(self, keys: list[ObjectKey], objects: list[TensorMemoryObj]) -> list[int]:
        task_id = self.adapter.submit_load_task(keys, objects)
        return ones(self._wait(self.adapter.get_load_event_fd(), lambda: self.adapter.query_load_result(task_id)))

    def _wait(self, event_fd: int, query: Callable[[], Any]) -> Any:
        poller = select.poll()
        poller.register(event_fd, select.POLLIN)
        assert poller.poll(WAIT_S * 1000), "no event"
        consume_fd(event_fd)
        result = query()
        assert result is not None, "an event, but no result"
        return result


def ones(bitmap: Bitmap) -> list[int]:
    return [at for at in range(bitmap.size()) if bitmap.test(at)]


@pytest.fixture(scope="module")
def shared_daemon(start_daemon: Callable[..., DaemonProcess]) -> Iterator[DaemonProcess]:
    """For tests that leave it as it is."""
    process = start_daemon()
    yield process
    process.kill()


@pytest.fixture
def make_driver(request: pytest.FixtureRequest) -> Iterator[Callable[..., Driver]]:
    """Adapters of the test's own daemon if it has one, else of the shared one; each test has weights of its own."""
    name = "daemon" if "daemon" in request.fixturenames else "shared_daemon"
    address = request.getfixturevalue(name).unix_address
    made: list[KVStoreL2Adapter] = []

    def make(**params: Any) -> Driver:
        params = {"weights_revision": request.node.name, **params}
        config = PluginL2AdapterConfig.from_dict(plugin(address, **params))
        adapter = create_l2_adapter(config, None)
        made.append(adapter)
        return Driver(adapter)

    yield make
    for adapter in made:
        adapter.close()


def test_another_process_loads_what_was_stored_bit_by_bit(make_driver: Callable[..., Driver]) -> None:
    keys = [key(number) for number in range(5)]
    stored = [memory_object(number) for number in range(5)]
    assert make_driver().store(keys, stored)

    other = make_driver()
    assert other.lookup([*keys, key(99)]) == [0, 1, 2, 3, 4]
    targets = [memory_object(100 + number) for number in range(5)]
    assert other.load(keys, targets) == [0, 1, 2, 3, 4]
    assert all(torch.equal(a.raw_data, b.raw_data) for a, b in zip(stored, targets, strict=True))


def test_an_object_of_several_blocks_comes_back_whole(make_driver: Callable[..., Driver]) -> None:
    shape = torch.Size([2, 4, 256, 1024])
    driver, layouts = make_driver(), {0: MemoryLayoutDesc([shape], [torch.bfloat16])}
    keys, stored = [key(1), key(2)], [memory_object(number, shape=shape) for number in (1, 2)]
    assert driver.store(keys, stored)
    assert driver.lookup([*keys, key(3)], layouts) == [0, 1]
    targets = [memory_object(number, shape=shape) for number in (3, 4)]
    assert driver.load(keys, targets) == [0, 1]
    assert all(torch.equal(a.raw_data, b.raw_data) for a, b in zip(stored, targets, strict=True))


def test_an_object_behind_a_gap_is_found_too_as_sliding_windows_ask_for_it(
    make_driver: Callable[..., Driver],
) -> None:
    driver = make_driver()
    assert driver.store([key(0), key(3)], [memory_object(0), memory_object(3)])
    assert driver.lookup([key(number) for number in range(4)]) == [0, 3]


@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "org/other"},
        {"kv_rank": ObjectKey.ComputeKVRank(2, 1, 2, 1)},
        {"object_group_id": 1},
        {"cache_salt": "user-7"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_differs_in_one_field_of_the_key_is_another_object(
    make_driver: Callable[..., Driver], other: dict[str, Any]
) -> None:
    driver = make_driver()
    assert driver.store([key(1)], [memory_object(1)])
    layouts = {0: LAYOUT, 1: LAYOUT}
    assert driver.lookup([key(1)], layouts) == [0]
    assert driver.lookup([key(1, **other)], layouts) == []
    assert driver.load([key(1, **other)], [memory_object(2)]) == []


@pytest.mark.parametrize(
    "layout",
    [
        MemoryLayoutDesc([SHAPE], [torch.float16]),
        MemoryLayoutDesc([torch.Size([2, 4, 16, 128])], [torch.bfloat16]),
        MemoryLayoutDesc([torch.Size([1, 4, 32, 64]), torch.Size([1, 4, 32, 64])], [torch.bfloat16] * 2),
    ],
    ids=["dtype", "chunk size", "tensors"],
)
def test_a_layout_of_the_same_bytes_is_another_layout(
    make_driver: Callable[..., Driver], layout: MemoryLayoutDesc
) -> None:
    driver = make_driver()
    assert driver.store([key(1)], [memory_object(1)])
    assert driver.lookup([key(1)], {0: layout}) == []


@pytest.mark.parametrize(
    "params", [{"tenant_salt": "b"}, {"weights_revision": "2"}], ids=lambda params: next(iter(params))
)
def test_another_tenant_or_other_weights_find_nothing(
    make_driver: Callable[..., Driver], params: dict[str, Any]
) -> None:
    assert make_driver().store([key(1)], [memory_object(1)])
    assert make_driver(**params).lookup([key(1)]) == []


def test_weights_that_nobody_names_are_neither_stored_nor_found(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver(weights_revision=None)
    assert not driver.store([key(1)], [memory_object(1)])
    assert driver.lookup([key(1)]) == []


def test_a_compressed_object_is_not_stored(make_driver: Callable[..., Driver]) -> None:
    driver, compressed = make_driver(), memory_object(1)
    compressed.set_used_size(100)
    assert not driver.store([key(1)], [compressed])
    assert driver.lookup([key(1)]) == []


def test_what_a_lookup_found_is_held_until_it_is_unlocked(
    make_driver: Callable[..., Driver], shared_daemon: DaemonProcess
) -> None:
    driver = make_driver()
    keys = [key(1), key(2)]
    assert driver.store(keys, [memory_object(1), memory_object(2)])
    assert driver.lookup(keys) == [0, 1]
    with Client(shared_daemon.unix_address) as client:
        assert client.stats().lease_count == 1
        driver.adapter.submit_unlock(keys[:1])
        driver.adapter.submit_unlock(keys[1:])
        while client.stats().lease_count:
            pass  # ends with the test's time limit


def test_a_key_that_two_requests_hold_is_held_until_both_unlock_it() -> None:
    locks, leases = Locks(), [Lease(), Lease()]
    for lease in leases:
        locks.add(lease, ["a"], now_s=0.0)
    assert locks.unlock(["a"]) == leases[:1]
    assert locks.unlock(["a", "b"]) == leases[1:]
    assert locks.unlock(["a"]) == []


def test_what_nobody_unlocks_is_forgotten_once_its_lease_has_expired() -> None:
    locks = Locks()
    locks.add(Lease(), ["a", "b"], now_s=0.0)
    locks.add(Lease(), ["b"], now_s=31.0)
    assert locks.held_count == 1
    assert locks.unlock(["a"]) == []


class Lease:
    """Stands for one of the client's; only its identity counts here."""


def test_without_a_daemon_every_task_ends_and_nothing_is_found(
    make_driver: Callable[..., Driver], daemon: DaemonProcess
) -> None:
    driver = make_driver()
    assert driver.store([key(1)], [memory_object(1)])
    daemon.kill()
    target = memory_object(2)
    before = target.raw_data.clone()
    assert not driver.store([key(2)], [memory_object(2)])
    assert driver.lookup([key(1)]) == []
    assert driver.load([key(1)], [target]) == []
    assert torch.equal(target.raw_data, before)
    assert driver.adapter.report_status()["last_error"]


def test_a_daemon_that_hangs_costs_misses_and_no_task_stays_open(
    make_driver: Callable[..., Driver], daemon: DaemonProcess
) -> None:
    driver = make_driver()
    assert driver.store([key(1)], [memory_object(1)])
    daemon.pause()
    try:
        assert not driver.store([key(2)], [memory_object(2)])
        assert driver.lookup([key(2)]) == []
    finally:
        daemon.resume()


def test_the_adapter_goes_on_by_itself_when_the_daemon_is_back(
    make_driver: Callable[..., Driver], daemon: DaemonProcess
) -> None:
    driver = make_driver()
    assert driver.store([key(1)], [memory_object(1)])
    daemon.restart()
    assert driver.lookup([key(1)]) == []  # memory only: it is empty
    while not driver.store([key(1)], [memory_object(1)]):
        pass  # ends: the client asks again within seconds
    assert driver.lookup([key(1)]) == [0]


def test_a_wrong_parameter_is_named_with_what_is_allowed() -> None:
    with pytest.raises(InvalidArgumentError, match=r"adapter_params\.adress.*allowed: one of address"):
        KVStoreL2Adapter({"adress": "127.0.0.1:1"})


def storage_manager(address: str) -> StorageManager:
    memory = L1MemoryManagerConfig(size_in_bytes=16 << 20, use_lazy=False, shm_name="")
    return StorageManager(
        StorageManagerConfig(
            l1_manager_config=L1ManagerConfig(memory_config=memory),
            eviction_config=EvictionConfig(eviction_policy="LRU"),
            l2_adapter_config=L2AdaptersConfig(
                [PluginL2AdapterConfig.from_dict(plugin(address, weights_revision="1"))]
            ),
        )
    )


def prefetch(manager: StorageManager, keys: list[ObjectKey]) -> Any:
    group = GroupedObjectKeys(keys=keys, object_group_id=0, layout_desc=LAYOUT, sliding_window_size=-1)
    handle = manager.submit_prefetch_task(PrefetchTaskSpec(key_groups=[group]))
    assert manager.wait_prefetch_status(handle, WAIT_S), "the prefetch did not end"
    return manager.query_prefetch_status(handle)


def test_lmcaches_own_storage_manager_writes_through_and_a_second_one_prefetches_it(daemon: DaemonProcess) -> None:
    keys = [key(number) for number in range(4)]
    first = storage_manager(daemon.unix_address)
    try:
        written = first.reserve_write(keys, LAYOUT)
        assert len(written) == 4
        for number, at in enumerate(keys):
            written[at].tensor.fill_(number + 1)
        first.finish_write(keys)
        with Client(daemon.unix_address) as client:
            while client.stats().block_count < 4:
                pass  # ends with the test's time limit
    finally:
        first.close()
    second = storage_manager(daemon.unix_address)
    try:
        result = prefetch(second, [*keys, key(99)])
        assert ones(result.l2_hit_cells[0]) == [0, 1, 2, 3]
        with second.read_prefetched_results(keys) as objects:
            assert objects is not None
            assert [float(each.tensor.float().mean()) for each in objects] == [1.0, 2.0, 3.0, 4.0]
        second.finish_read_prefetched(keys)
        daemon.kill()
        assert ones(prefetch(second, [key(50), key(51)]).hit_cells[0]) == []
    finally:
        second.close()
