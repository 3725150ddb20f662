"""The backend as SGLang's factory makes it, with SGLang's own types and a real daemon; the pools alone are ours."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import InvalidArgumentError
from tests.conftest import DaemonProcess

from .rig import FLAG, SHIMS

# SGLang warns of much at its import, and of GPUs that are not there.
pytestmark = pytest.mark.filterwarnings("ignore")

MakeBackend = Callable[..., Any]


@pytest.fixture(scope="module")
def sglang(models: dict[str, Path]) -> Any:
    """SGLang, as it is in a scheduler that serves a model."""
    spec = importlib.util.spec_from_file_location("sglang_shims", SHIMS / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    from sglang.srt.mem_cache import hicache_storage
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path=str(models["tiny-llama"]), device="cpu", attention_backend="torch_native")
    publish(arguments, role="scheduler")
    return hicache_storage


@pytest.fixture(scope="module")
def shared_daemon(start_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    return start_daemon()


@pytest.fixture
def make_backend(sglang: Any, shared_daemon: DaemonProcess, request: pytest.FixtureRequest) -> Iterator[MakeBackend]:
    """As SGLang attaches one: made by its factory, then told of the pools. Each test has its own tenant."""
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    made = []

    def make(*pools: tuple[str, Any], extra: dict[str, Any] | None = None, **place: Any) -> Any:
        known = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
        told = dict(FLAG) | {"address": shared_daemon.unix_address, "tenant_salt": request.node.name}
        told.pop("hicache_storage_pass_prefix_keys")  # SGLang takes it out
        config = sglang.HiCacheStorageConfig(
            **(known | {"is_mla_model": False} | place),
            enable_storage_metrics=True,
            is_page_first_layout=True,
            model_name="served-name",
            extra_config=told | (extra or {}),
        )
        backend = StorageBackendFactory.create_backend("dynamic", config, pools[0][1] if pools else None)
        made.append(backend)
        for number, (name, pool) in enumerate(pools):
            if number == 0:
                backend.register_mem_pool_host(pool)
            backend.register_mem_host_pool_v2(pool, sglang.PoolName(name))
        backend.on_host_pools_registered()
        return backend

    yield make
    for backend in made:
        backend.close()


def chain(count: int) -> list[str]:
    return [hashlib.sha256(str(number).encode()).hexdigest() for number in range(count)]


def test_pages_come_back_by_way_of_the_interface_without_copies(make_backend: MakeBackend, sglang: Any) -> None:
    import torch

    from tests.integrations.sglang_pools import MHATokenToKVPoolHost, page_of, slots

    keys, source, target = chain(3), MHATokenToKVPoolHost(), MHATokenToKVPoolHost()
    source.fill(seed=1)
    writer, reader = make_backend(("kv", source)), make_backend(("kv", target))
    told = sglang.HiCacheStorageExtraInfo(prefix_keys=keys[:1])

    assert writer.batch_set_v1(keys[:1], slots(source, 0), sglang.HiCacheStorageExtraInfo(prefix_keys=[])) == [True]
    assert writer.batch_set_v1(keys[1:], slots(source, 1, 2), told) == [True, True]
    assert reader.batch_exists([*keys, "f" * 64]) == 3
    assert reader.exists(keys[2])
    assert reader.batch_get_v1(keys, slots(target, 7, 6, 5)) == [True, True, True]
    for page, place in enumerate((7, 6, 5)):
        assert torch.equal(page_of(target, place), page_of(source, page))
    assert writer.get_stats().backup_pgs == [1, 2]
    assert reader.get_stats().prefetch_pgs == [3]
    flat = torch.zeros_like(source.get_data_page(0))
    assert reader.get(keys[0], flat) is flat
    assert torch.equal(flat, source.get_data_page(0))
    assert reader.get("f" * 64, flat) is None


def test_a_prefix_of_a_hybrid_model_counts_where_every_pool_has_what_it_needs(
    make_backend: MakeBackend, sglang: Any
) -> None:
    import torch

    from tests.integrations.sglang_pools import MambaPoolHost, MHATokenToKVPoolHost, page_of, slots

    policy, transfer = sglang.PoolHitPolicy, sglang.PoolTransfer
    keys = chain(6)
    kv, states, indexer = MHATokenToKVPoolHost(), MambaPoolHost(), MHATokenToKVPoolHost(head_num=1)
    states.fill(seed=1)
    backend = make_backend(("kv", kv), ("mamba", states), ("indexer", indexer))
    assert backend.batch_set_v1(keys, slots(kv, 0, 1, 2, 3, 4, 5)) == [True] * 6
    stored = backend.batch_set_v2(
        [
            transfer(name=sglang.PoolName.MAMBA, keys=[keys[1], keys[4]], host_indices=slots(states, 3, 2)),
            transfer(name=sglang.PoolName.INDEXER, keys=keys[:5], host_indices=slots(indexer, 0, 1, 2, 3, 4)),
        ],
        sglang.HiCacheStorageExtraInfo(prefix_keys=[]),
    )
    assert stored == {sglang.PoolName.MAMBA: [True] * 2, sglang.PoolName.INDEXER: [True] * 5}

    asked = [
        transfer(name=sglang.PoolName.MAMBA, keys=[keys[-1]], hit_policy=policy.TRAILING_PAGES),
        transfer(name=sglang.PoolName.INDEXER, hit_policy=policy.ALL_PAGES),
        transfer(name=sglang.PoolName.SWA, hit_policy=policy.BLOCK_GROUPS),
    ]
    found = backend.batch_exists_v2(keys, asked)
    assert found.restorable_prefix_pages == [2, 5], "a state is there after the second page, and after the fifth"
    assert found.kv_hit_pages == 5
    assert found.extra_pool_hit_pages == {
        sglang.PoolName.KV: 6,
        sglang.PoolName.MAMBA: 5,
        sglang.PoolName.INDEXER: 5,
    }

    before = page_of(states, 2)
    loaded = backend.batch_get_v2([transfer(name=sglang.PoolName.MAMBA, keys=[keys[4]], host_indices=slots(states, 7))])
    assert loaded == {sglang.PoolName.MAMBA: [True]}
    assert torch.equal(page_of(states, 7), before)


def test_of_a_model_whose_ranks_hold_the_same_one_stores_for_all(make_backend: MakeBackend) -> None:
    from tests.integrations.sglang_pools import MLATokenToKVPoolHost, slots

    pools = [MLATokenToKVPoolHost() for _ in range(2)]
    ranks = [make_backend(("kv", pool), tp_rank=rank, tp_size=2, is_mla_model=True) for rank, pool in enumerate(pools)]
    assert ranks[0].batch_set_v1(chain(2), slots(pools[0], 0, 1)) == [True, True]
    assert ranks[1].batch_exists(chain(2)) == 2
    assert make_backend(("kv", MLATokenToKVPoolHost()), is_mla_model=True).batch_exists(chain(2)) == 2


def test_a_cleared_engine_finds_nothing_and_stores_on(make_backend: MakeBackend) -> None:
    from tests.integrations.sglang_pools import MHATokenToKVPoolHost, slots

    pool = MHATokenToKVPoolHost()
    backend, other = make_backend(("kv", pool)), make_backend(("kv", pool))
    backend.batch_set_v1(chain(1), slots(pool, 0))
    backend.clear()
    assert [backend.exists(chain(1)[0]), other.exists(chain(1)[0])] == [False, True]
    backend.batch_set_v1(chain(1), slots(pool, 0))
    assert backend.exists(chain(1)[0])


def test_an_unknown_setting_ends_the_start_and_is_named(make_backend: MakeBackend) -> None:
    with pytest.raises(InvalidArgumentError, match=r"extra_config\.adress.*address"):
        make_backend(extra={"adress": "unix:/x"})


def test_this_version_has_everything_that_is_asked_of_it_by_name(sglang: Any) -> None:
    """A name that SGLang drops would silently leave the identity of blocks, or an update of weights unnoticed."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.server_args import ServerArgs

    from kvstore_client.integrations.sglang import hicache, identity

    missing = identity._COUNTED - set(ServerArgs.__struct_fields__)
    assert not missing
    assert {name for name in dir(WeightUpdater) if name in hicache._UPDATES} == set(hicache._UPDATES)
    assert not hicache.KVStoreHiCache.__abstractmethods__
