# ruff: noqa: E402  (what is imported late is what may be missing)
"""The remote storage plug-in below LMCache's own remote backend, over a real daemon.

Needs LMCache 0.5.6 and runs in an environment that has it: `.venv-peers/bin/python -m pytest tests/integrations`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache", reason="LMCache is not installed")
pytest.importorskip("lmcache.v1.storage_backend.remote_backend", reason="LMCache lacks its dependencies")

from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

from tests.conftest import DaemonProcess

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

KV_SHAPE = (4, 2, 32, 2, 32)  # layers, K and V, tokens, heads, head size
CHUNK_BYTES = 4 * 2 * 32 * 64 * 2
WAIT_S = 30.0


class Engine:
    """LMCache's backends as an engine's worker has them, with our plug-in."""

    def __init__(self, address: str, *, name: str, **changes: Any) -> None:
        prefix = "remote_storage_plugin.kvstore."
        params = {"address": address, "weights_revision": name, **changes.pop("params", {})}
        extra = {
            f"{prefix}module_path": "kvstore_client.integrations.lmcache.connector",
            f"{prefix}class_name": "KVStoreConnectorAdapter",
            **{f"{prefix}{key}": value for key, value in params.items()},
        }
        metadata = {
            "model_name": "org/model",
            "world_size": 1,
            "local_world_size": 1,
            "worker_id": 0,
            "local_worker_id": 0,
            "kv_dtype": torch.bfloat16,
            "kv_shape": KV_SHAPE,
            "chunk_size": 32,
        }
        metadata |= {key: changes.pop(key) for key in list(changes) if key in metadata}
        self.config = LMCacheEngineConfig.from_defaults(
            chunk_size=metadata["chunk_size"],
            local_cpu=False,
            max_local_cpu_size=changes.pop("max_local_cpu_size", 0.05),
            remote_storage_plugins=["kvstore"],
            extra_config=extra,
            **changes,
        )
        self.metadata = LMCacheMetadata(**metadata)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.memory = LocalCPUBackend(self.config, self.metadata, dst_device="cpu")
        self.backend = RemoteBackend(
            self.config, self.metadata, self.loop, self.memory, dst_device="cpu", plugin_name="kvstore"
        )

    def key(self, number: int, **changes: Any) -> CacheEngineKey:
        fields = {
            "model_name": self.metadata.model_name,
            "world_size": self.metadata.world_size,
            "worker_id": self.metadata.worker_id,
            "chunk_hash": number,
            "dtype": self.metadata.kv_dtype,
        }
        return CacheEngineKey(**{**fields, **changes})

    def chunk(self, seed: int, *, token_count: int = 32) -> MemoryObj:
        shape = self.metadata.get_shapes(token_count)[0]
        chunk = self.memory.allocate(shape, self.metadata.kv_dtype, MemoryFormat.KV_2LTD)
        chunk.tensor.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
        return chunk

    def store(self, keys: list[CacheEngineKey], chunks: list[MemoryObj]) -> None:
        """Returns once LMCache was told of every key that its write has ended."""
        ended = threading.Semaphore(0)
        self.backend.batched_submit_put_task(keys, chunks, on_complete_callback=lambda _: ended.release())
        for _ in keys:
            assert ended.acquire(timeout=WAIT_S), "a put did not end"

    def wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(WAIT_S)

    def close(self) -> None:
        self.backend.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        self.memory.close()


@pytest.fixture(scope="module")
def shared_daemon(start_daemon: Callable[..., DaemonProcess]) -> Iterator[DaemonProcess]:
    """For tests that leave it as it is."""
    process = start_daemon()
    yield process
    process.kill()


@pytest.fixture
def make_engine(request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    """Engines of the test's own daemon if it has one, else of the shared one; each test has weights of its own."""
    name = "daemon" if "daemon" in request.fixturenames else "shared_daemon"
    address = request.getfixturevalue(name).unix_address
    made: list[Engine] = []

    def make(**changes: Any) -> Engine:
        made.append(Engine(address, name=request.node.name, **changes))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def test_another_engine_gets_the_chunks_that_one_stored(make_engine: Callable[..., Engine]) -> None:
    first = make_engine()
    keys = [first.key(number) for number in range(4)]
    chunks = [first.chunk(number) for number in range(4)]
    first.store(keys, chunks)

    second = make_engine()
    assert second.backend.batched_contains([*keys, second.key(99)]) == 4
    assert [second.backend.contains(key) for key in (keys[3], second.key(99))] == [True, False]
    got = second.backend.batched_get_blocking([*keys, second.key(99)])
    assert got[4] is None
    for stored, loaded in zip(chunks, got, strict=False):
        assert torch.equal(stored.tensor, loaded.tensor)
        assert loaded.get_ref_count() == 1
    assert torch.equal(second.backend.get_blocking(keys[2]).tensor, chunks[2].tensor)


def test_the_non_blocking_way_gives_the_leading_chunks_and_frees_what_is_behind_a_gap(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine()
    engine.store([engine.key(0)], [engine.chunk(0)])
    engine.store([engine.key(2)], [engine.chunk(2)])
    keys = [engine.key(number) for number in range(3)]
    free_before = engine.memory.memory_allocator.pin_allocator.total_allocated_size
    assert engine.wait(engine.backend.batched_async_contains("a", keys)) == 1
    got = engine.wait(engine.backend.batched_get_non_blocking("a", keys))
    assert len(got) == 1
    got[0].ref_count_down()
    assert engine.memory.memory_allocator.pin_allocator.total_allocated_size == free_before


def test_stored_chunks_are_given_back_to_lmcaches_memory(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    chunk = engine.chunk(1)
    engine.store([engine.key(1)], [chunk])
    assert chunk.get_ref_count() == 1  # the test's own


@pytest.mark.parametrize(
    "changes",
    [
        {"model_name": "org/other"},
        {"world_size": 2, "worker_id": 1},
        {"kv_dtype": torch.float16},
        {"kv_shape": (4, 2, 32, 4, 16), "pre_caching_hash_algorithm": "sha256_cbor"},
        {"kv_shape": (2, 2, 32, 4, 32)},
        {"params": {"tenant_salt": "b"}},
        {"params": {"weights_revision": "2"}},
    ],
    ids=["model", "worker", "dtype", "hash algorithm", "layers", "tenant", "weights"],
)
def test_an_engine_that_differs_in_one_thing_finds_nothing(
    make_engine: Callable[..., Engine], changes: dict[str, Any]
) -> None:
    first = make_engine()
    first.store([first.key(1)], [first.chunk(1)])
    assert first.backend.batched_contains([first.key(1)]) == 1
    other = make_engine(**changes)
    assert other.backend.batched_contains([other.key(1)]) == 0
    assert other.backend.batched_get_blocking([other.key(1)]) == [None]


def test_tags_of_a_request_tell_its_chunks_apart(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    tagged = engine.key(1, request_configs={"lmcache.tag.user": "7"})
    engine.store([tagged], [engine.chunk(1)])
    assert engine.backend.batched_contains([tagged]) == 1
    assert engine.backend.batched_contains([engine.key(1)]) == 0


def test_a_chunk_that_is_not_full_stays_with_lmcache(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.store([engine.key(1), engine.key(2)], [engine.chunk(1), engine.chunk(2, token_count=5)])
    assert engine.backend.batched_contains([engine.key(1), engine.key(2)]) == 1


def test_where_memory_runs_out_the_rest_is_not_got_and_nothing_waits(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_local_cpu_size=0.0005)  # 512 KiB / 32 KiB = 16 chunks
    keys = [engine.key(number) for number in range(8)]
    for number, key in enumerate(keys):
        chunk = engine.chunk(number)
        engine.store([key], [chunk])
        chunk.ref_count_down()
    held = []
    while (
        chunk := engine.memory.allocate(engine.metadata.get_shapes()[0], torch.bfloat16, busy_loop=False)
    ) is not None:
        held.append(chunk)
    for chunk in held[:3]:
        chunk.ref_count_down()
    got = engine.backend.batched_get_blocking(keys)
    assert [each is not None for each in got] == [True] * 3 + [False] * 5
    for chunk in (*got[:3], *held[3:]):
        chunk.ref_count_down()


def test_without_a_daemon_everything_misses_and_every_put_ends(
    make_engine: Callable[..., Engine], daemon: DaemonProcess
) -> None:
    engine = make_engine()
    engine.store([engine.key(1)], [engine.chunk(1)])
    daemon.kill()
    chunk = engine.chunk(2)
    engine.store([engine.key(2)], [chunk])
    assert chunk.get_ref_count() == 1
    assert engine.backend.batched_contains([engine.key(1)]) == 0
    assert not engine.backend.contains(engine.key(1))
    assert engine.backend.get_blocking(engine.key(1)) is None
    daemon.start()
    while not engine.backend.contains(engine.key(1)):  # ends: the client asks again within seconds
        engine.store([engine.key(1)], [engine.chunk(1)])


def test_the_scheduler_which_has_no_memory_of_its_own_can_look_up(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.store([engine.key(1)], [engine.chunk(1)])
    backend = RemoteBackend(engine.config, engine.metadata, engine.loop, None, dst_device="cpu", plugin_name="kvstore")
    assert backend.batched_contains([engine.key(1), engine.key(2)]) == 1
    backend.close()


@pytest.mark.parametrize(
    "changes", [{"use_layerwise": True}, {"remote_serde": "kivi"}, {"params": {"adress": "x"}}], ids=str
)
def test_what_cannot_be_stored_is_refused_at_the_start(
    make_engine: Callable[..., Engine], changes: dict[str, Any]
) -> None:
    assert make_engine(**changes).backend.connection is None
