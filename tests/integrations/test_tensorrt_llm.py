# ruff: noqa: E402  (the stand-in comes first)
"""The TensorRT-LLM connector against its public interface: a stand-in engine, CPU tensors, the real client and daemon.

The engine itself needs a GPU and CUDA. What it promises and expects was read in its sources, see `SIGNATURES`.
"""

from __future__ import annotations

import inspect
import itertools
import json
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

sys.path.append(str(Path(__file__).parent / "stand_ins"))  # last: an installed TensorRT-LLM comes first

from kvstore.errors import InvalidArgumentError
from kvstore_client import Client
from kvstore_client.integrations.tensorrt_llm import KVStoreScheduler, KVStoreWorker
from kvstore_client.integrations.tensorrt_llm.interface import KvCacheConnectorScheduler, KvCacheConnectorWorker
from kvstore_client.integrations.tensorrt_llm.model import SETTINGS_VARIABLE
from kvstore_client.integrations.tensorrt_llm.plan import Progress
from tests.conftest import DaemonProcess

SIGNATURES = {
    # Read in NVIDIA/TensorRT-LLM: `tensorrt_llm/_torch/pyexecutor/kv_cache_connector.py` at 00fdcbff (1.2), and
    # `connectors/kv_cache_connector.py` beside it at 035ab91c with `docs/source/features/kv-cache-connector.md` at
    # 0972960b (1.4, release candidate). The last two are of the latter alone.
    (KVStoreWorker, "__init__"): ["llm_args"],
    (KVStoreWorker, "register_kv_caches"): ["kv_cache_tensor"],
    (KVStoreWorker, "start_load_kv"): ["stream"],
    (KVStoreWorker, "wait_for_layer_load"): ["layer_idx", "stream"],
    (KVStoreWorker, "save_kv_layer"): ["layer_idx", "stream"],
    (KVStoreWorker, "wait_for_save"): ["stream"],
    (KVStoreWorker, "get_finished"): ["finished_gen_req_ids", "started_loading_req_ids"],
    (KVStoreScheduler, "__init__"): ["llm_args"],
    (KVStoreScheduler, "build_connector_meta"): ["scheduler_output"],
    (KVStoreScheduler, "get_num_new_matched_tokens"): ["request", "num_computed_tokens"],
    (KVStoreScheduler, "request_finished"): ["request", "cache_block_ids"],
    (KVStoreScheduler, "update_state_after_alloc"): ["request", "block_ids"],
    (KVStoreScheduler, "request_reset"): ["request"],
    (KVStoreScheduler, "cancel_load"): ["request", "start", "end"],
}

TOKENS = 4
LAYERS, FLAT = 3, 2 * TOKENS * 8  # 2 heads of 8
BLOCK_COUNT = 64


class Request:
    """What connectors read of an `LlmRequest`."""

    def __init__(self, request_id: int, tokens: list[int], **more: Any) -> None:
        self.request_id = request_id
        self.tokens = tokens
        self.__dict__.update(more)

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self.tokens)


class Engine:
    """One engine of `tp_size` ranks: its calls, in its order. K and V of a token are a function of its whole prefix."""

    def __init__(
        self, *, tp_size: int = 1, chunk_tokens: int = 1000, environments: dict[int, str] | None = None, **args: Any
    ) -> None:
        self.args = SimpleNamespace(
            model="org/model",
            tensor_parallel_size=tp_size,
            kv_cache_config=SimpleNamespace(
                tokens_per_block=TOKENS, dtype=args.pop("kv_dtype", "auto"), max_attention_window=None
            ),
            **args,
        )
        self.chunk_tokens = chunk_tokens
        self.workers: list[KVStoreWorker] = []
        self.pools = []
        for rank in range(tp_size):
            with pytest.MonkeyPatch.context() as environment:
                environment.setenv("STAND_IN_RANK", str(rank))
                if rank in (environments or {}):
                    environment.setenv(SETTINGS_VARIABLE, environments[rank])
                self.workers.append(KVStoreWorker(self.args))
        self.scheduler = KVStoreScheduler(self.args)
        for worker in self.workers:
            self.pools.append(torch.zeros(BLOCK_COUNT, LAYERS, 2, FLAT, dtype=torch.bfloat16))
            worker.register_kv_caches(self.pools[-1])
        self.free = list(range(BLOCK_COUNT))
        self.waiting: dict[int, list[int]] = {}
        self.computed_tokens = 0

    def run(self, request: Request, *, new_token_count: int = 1, local_tokens: int = 0) -> list[int]:
        """Serves one request to its end; the blocks that it held. `computed_tokens` counts what it had to compute."""
        matched, is_async = self.scheduler.get_num_new_matched_tokens(request, local_tokens)
        assert not is_async
        assert matched + local_tokens < len(request.tokens), "nothing left to compute"
        block_count = -(-(len(request.tokens) + new_token_count) // TOKENS)
        block_ids = [self.free.pop() for _ in range(block_count)]
        self.scheduler.update_state_after_alloc(request, block_ids)
        position, seen_tokens, seen_blocks, is_new = local_tokens + matched, 0, 0, True
        prompt_count = len(request.tokens)
        for step in itertools.count():
            in_prompt = position < prompt_count
            scheduled = min(prompt_count - position, self.chunk_tokens) if in_prompt else 1
            data = SimpleNamespace(
                request_id=request.request_id,
                new_tokens=request.tokens[seen_tokens:],
                new_block_ids=block_ids[seen_blocks:],
                # The engine leaves out what connectors load, in the first output.
                computed_position=position - (matched if step == 0 else 0),
                num_scheduled_tokens=scheduled,
            )
            seen_tokens, seen_blocks = len(request.tokens), block_count
            output = SimpleNamespace(new_requests=[data] if is_new else [], cached_requests=[] if is_new else [data])
            is_new = False
            self.step(
                output, lambda position=position, count=scheduled: self._compute(request, block_ids, position, count)
            )
            position += scheduled
            if position == len(request.tokens):
                if len(request.tokens) == prompt_count + new_token_count:
                    break
                request.tokens.append(1000 + len(request.tokens))
        if self.scheduler.request_finished(request, block_ids):
            self.waiting[request.request_id] = block_ids
        else:
            self.free += block_ids
        return block_ids

    def step(self, output: Any, compute: Callable[[], None]) -> None:
        metadata = self.scheduler.build_connector_meta(output)
        for rank, worker in enumerate(self.workers):
            worker.bind_connector_meta(metadata if rank == 0 else pickle.loads(pickle.dumps(metadata)))
            worker.start_load_kv(None)
        compute()
        for worker in self.workers:
            worker.wait_for_layer_load(0, None)
            worker.save_kv_layer(0, None)
            worker.wait_for_save(None)

    def drain(self) -> None:
        """Polls until every rank has told that every request is saved; then its blocks are other requests'."""
        told: list[set[int]] = [set() for _ in self.workers]
        new = list(self.waiting)
        while any(len(ids) < len(self.waiting) for ids in told):
            for ids, worker in zip(told, self.workers, strict=True):
                ids.update(worker.get_finished(new, [])[0])
            new = []
        for request_id in list(self.waiting):
            block_ids = self.waiting.pop(request_id)
            for pool in self.pools:
                pool[block_ids] = -1
            self.free += block_ids

    def _compute(self, request: Request, block_ids: list[int], start: int, count: int) -> None:
        """Writes the K and V of these tokens, and checks that all before them are there: attention reads those."""
        self.computed_tokens += count
        for rank, pool in enumerate(self.pools):
            for at in range(start):
                assert torch.equal(slot(pool, block_ids, at), kv_of(request.tokens[: at + 1], rank)), f"token {at}"
            for at in range(start, start + count):
                slot(pool, block_ids, at).copy_(kv_of(request.tokens[: at + 1], rank))

    def close(self) -> None:
        self.scheduler.close()
        for worker in self.workers:
            worker.close()


def slot(pool: Any, block_ids: list[int], position: int) -> Any:
    block = pool[block_ids[position // TOKENS]].view(LAYERS, 2, 2, TOKENS, 8)
    return block[:, :, :, position % TOKENS]


def kv_of(prefix: list[int], rank: int) -> Any:
    generator = torch.Generator().manual_seed(hash((*prefix, rank)) & 0x7FFF_FFFF)
    return torch.randn(LAYERS, 2, 2, 8, generator=generator).bfloat16()


@pytest.fixture(scope="module")
def shared_daemon(start_daemon: Callable[..., DaemonProcess]) -> Iterator[DaemonProcess]:
    """For tests that leave it as it is."""
    process = start_daemon()
    yield process
    process.kill()


@pytest.fixture
def make_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Engines of the test's own daemon if it has one, else of the shared one; each test has weights of its own."""
    name = "daemon" if "daemon" in request.fixturenames else "shared_daemon"
    address = request.getfixturevalue(name).unix_address
    made: list[Engine] = []

    def make(*, settings: dict[str, Any] | None = None, **args: Any) -> Engine:
        settings = {"address": address, "weights_revision": request.node.name, **(settings or {})}
        monkeypatch.setenv(SETTINGS_VARIABLE, json.dumps(settings))
        made.append(Engine(**args))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def prompt(count: int, *, seed: int = 0) -> list[int]:
    return [seed * 100 + number for number in range(count)]


@pytest.mark.parametrize(("cls", "name"), SIGNATURES, ids=lambda value: getattr(value, "__name__", value))
def test_the_methods_are_those_of_the_public_interface(cls: type, name: str) -> None:
    assert list(inspect.signature(getattr(cls, name)).parameters)[1:] == SIGNATURES[cls, name]


def test_the_classes_can_be_made_wherever_the_engine_has_the_interface() -> None:
    assert issubclass(KVStoreScheduler, KvCacheConnectorScheduler)
    assert issubclass(KVStoreWorker, KvCacheConnectorWorker)
    assert not inspect.isabstract(KVStoreScheduler)
    assert not inspect.isabstract(KVStoreWorker)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(("tokens", "computed"), [(11, 3), (12, 4), (13, 1)], ids=["nB-1", "nB", "nB+1"])
def test_a_second_engine_computes_only_what_no_block_holds(
    make_engine: Callable[..., Engine], tp_size: int, tokens: int, computed: int
) -> None:
    first = make_engine(tp_size=tp_size)
    first.run(Request(1, prompt(tokens)), new_token_count=2)
    first.drain()
    assert first.computed_tokens == tokens + 2

    second = make_engine(tp_size=tp_size)
    second.run(Request(1, prompt(tokens)), new_token_count=2)
    assert second.computed_tokens == computed + 2


def test_what_was_generated_is_found_when_the_conversation_goes_on(make_engine: Callable[..., Engine]) -> None:
    first = make_engine()
    request = Request(1, prompt(10))
    first.run(request, new_token_count=7)
    first.drain()
    second = make_engine()
    second.run(Request(1, [*request.tokens, 1, 2, 3]), new_token_count=1)
    assert second.computed_tokens == 10 + 7 + 3 + 1 - 16


def test_a_prompt_in_chunks_is_saved_chunk_by_chunk_and_found_whole(make_engine: Callable[..., Engine]) -> None:
    first = make_engine(chunk_tokens=6)
    first.run(Request(1, prompt(21)))
    first.drain()
    second = make_engine(chunk_tokens=6)
    second.run(Request(1, prompt(21)))
    assert second.computed_tokens == 1 + 1


def test_blocks_that_the_engine_has_itself_are_not_loaded_again(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.run(Request(1, prompt(17)))
    engine.drain()
    assert engine.scheduler.get_num_new_matched_tokens(Request(2, prompt(17)), 8) == (8, False)
    assert engine.scheduler.get_num_new_matched_tokens(Request(3, prompt(17)), 16) == (0, False)
    # Of a block that was matched in part nobody may write the rest.
    assert engine.scheduler.get_num_new_matched_tokens(Request(4, prompt(17)), 9) == (0, False)


def test_blocks_stay_with_their_request_until_they_are_saved(
    make_engine: Callable[..., Engine], daemon: DaemonProcess
) -> None:
    engine = make_engine()
    engine.run(Request(1, prompt(9)))
    engine.drain()  # attached
    daemon.pause()
    engine.run(Request(2, prompt(9, seed=1)))
    assert engine.workers[0].get_finished([2], []) == ([], [])
    daemon.resume()
    engine.drain()
    again = make_engine()
    again.run(Request(1, prompt(9, seed=1)))
    assert again.computed_tokens in (2, 10)  # saved, or given up for its deadline: never in part


def test_salts_tell_requests_apart(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.run(Request(1, prompt(9), cache_salt="a"))
    engine.drain()
    found = engine.scheduler.get_num_new_matched_tokens
    assert found(Request(2, prompt(9), cache_salt="a"), 0) == (8, False)
    assert found(Request(3, prompt(9), cache_salt="b"), 0) == (0, False)
    assert found(Request(4, prompt(9)), 0) == (0, False)
    assert found(Request(5, prompt(9), cache_salt_id=7), 0) == (0, False)


@pytest.mark.parametrize("name", ["lora_task_id", "multimodal_hashes", "prompt_embedding_table"])
def test_what_tokens_do_not_tell_is_neither_saved_nor_found(
    make_engine: Callable[..., Engine], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    engine.run(Request(1, prompt(9), **{name: 1}))
    assert not engine.waiting
    engine.run(Request(2, prompt(9)))
    engine.drain()
    assert engine.scheduler.get_num_new_matched_tokens(Request(3, prompt(9), **{name: 1}), 0) == (0, False)
    assert name in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": {"weights_revision": "2"}},
        {"settings": {"tenant_salt": "b"}},
        {"kv_dtype": "fp8"},
        {"attn_backend": "FLASHINFER"},
        {"tp_size": 2},
    ],
    ids=["weights", "tenant", "dtype", "attention", "shards"],
)
def test_an_engine_that_differs_in_one_thing_finds_nothing(
    make_engine: Callable[..., Engine], changes: dict[str, Any]
) -> None:
    first = make_engine()
    first.run(Request(1, prompt(9)))
    first.drain()
    assert first.scheduler.get_num_new_matched_tokens(Request(2, prompt(9)), 0) == (8, False)
    other = make_engine(**changes)
    assert other.scheduler.get_num_new_matched_tokens(Request(1, prompt(9)), 0) == (0, False)


def test_a_rank_that_lacks_a_block_ends_the_prefix_for_all(make_engine: Callable[..., Engine]) -> None:
    elsewhere = json.dumps({"address": "unix:/nowhere", "weights_revision": "1"})
    first = make_engine(tp_size=2, environments={1: elsewhere})
    first.run(Request(1, prompt(9)))
    first.drain()
    second = make_engine(tp_size=2)
    second.run(Request(1, prompt(9)))
    assert second.computed_tokens == 10


def test_a_daemon_that_dies_between_the_answer_and_the_load_costs_nothing(
    make_engine: Callable[..., Engine], daemon: DaemonProcess
) -> None:
    """What was offered is in reach already: the engine could not be told that a load failed."""
    first = make_engine()
    first.run(Request(1, prompt(9)))
    first.drain()
    second = make_engine()
    answer = second.scheduler.update_state_after_alloc
    second.scheduler.update_state_after_alloc = lambda *args: (daemon.kill(), answer(*args))
    second.run(Request(1, prompt(9)))  # checks every byte that attention reads
    assert second.computed_tokens == 2
    second.drain()


def test_without_a_daemon_requests_run_and_end(make_engine: Callable[..., Engine], daemon: DaemonProcess) -> None:
    engine = make_engine()
    daemon.kill()
    for number in range(3):
        engine.run(Request(number, prompt(9)))
        engine.drain()
    assert engine.computed_tokens == 3 * 10
    daemon.start()
    number = 10
    while engine.scheduler.get_num_new_matched_tokens(Request(number, prompt(9)), 0) != (8, False):
        number += 2  # ends: the client asks again within seconds
        engine.run(Request(number + 1, prompt(9)))
        engine.drain()


def test_offers_that_come_to_nothing_are_given_back(
    make_engine: Callable[..., Engine], shared_daemon: DaemonProcess
) -> None:
    engine = make_engine()
    engine.run(Request(1, prompt(9)))
    engine.drain()
    scheduler = engine.scheduler
    with Client(shared_daemon.unix_address) as client:
        for end in (
            lambda request: scheduler.request_finished(request, []),
            scheduler.request_reset,
            lambda request: scheduler.cancel_load(request, 0, 8),
        ):
            request = Request(2, prompt(9))
            assert scheduler.get_num_new_matched_tokens(request, 0) == (8, False)
            assert client.stats().lease_count == 1
            end(request)
            while client.stats().lease_count:
                pass  # ends with the test's time limit
        engine.run(Request(3, prompt(9)))
        while client.stats().lease_count:
            pass


def test_a_block_outside_its_window_has_no_page_and_is_not_touched() -> None:
    progress = Progress(tokens_per_block=TOKENS, salt=None)
    data = SimpleNamespace(
        request_id=1, new_tokens=prompt(12), new_block_ids=[-1, 5, 6], computed_position=0, num_scheduled_tokens=12
    )
    progress.advance(data)
    save = progress.save(data)
    assert save is not None
    assert save.block_ids == (5, 6)
    assert save.parent_hash == progress.hashes[0]


def test_draft_tokens_that_may_be_rejected_complete_no_block() -> None:
    progress = Progress(tokens_per_block=TOKENS, salt=None)
    data = SimpleNamespace(
        request_id=1, new_tokens=prompt(7), new_block_ids=[4, 5], computed_position=6, num_scheduled_tokens=4
    )
    progress.advance(data)
    save = progress.save(data)
    assert save is not None
    assert save.block_ids == (4,)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kv_dtype": "nvfp4"}, "kv_cache_config.dtype"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"settings": {"adress": "x"}}, "adress.*allowed: one of address"),
    ],
    ids=["4-bit", "pipeline", "setting"],
)
def test_what_cannot_be_stored_is_refused_at_the_start(
    make_engine: Callable[..., Engine], changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        make_engine(**changes)
