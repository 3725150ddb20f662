"""What the connector's halves meet, as far as they look: executors, a store's answers, an engine's pool, requests."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any

from kvstore.errors import KvstoreError
from kvstore.keys import BlockHash
from kvstore.messages import BlockState
from kvstore.namespace import Namespace, Shard
from kvstore_client.hints import Hint
from kvstore_client.integrations._blocks import BlockShape, EngineModel
from kvstore_client.integrations.vllm.matching import GroupShape
from kvstore_client.integrations.vllm.messages import RankKey, RankLayout
from kvstore_client.results import LookupResult, count_leading_hits

SHAPE = BlockShape(
    layout="opaque:test", dtype="float16", num_layers=2, num_kv_heads=1, head_dim=8, v_head_dim=8, tokens_per_block=4
)
MODEL = EngineModel(model="org/model", weights_revision="1", settings={"engine": "test"})


class InlineExecutor(Executor):
    """Does all work at once, in the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return _done(lambda: fn(*args, **kwargs), Future())


class HeldExecutor(Executor):
    """Does nothing until it is told to."""

    def __init__(self) -> None:
        self._held: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._held.append((future, lambda: fn(*args, **kwargs)))
        return future

    def run(self) -> None:
        held, self._held = self._held, []
        for future, work in held:
            _done(work, future)


def _done(work: Callable[[], Any], future: Future[Any]) -> Future[Any]:
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001  (as any executor does)
        future.set_exception(error)
    return future


class FakeStore:
    """Answers lookups from sets of hashes, and keeps what it was asked."""

    def __init__(self) -> None:
        self.held: dict[Namespace, set[BlockHash]] = {}
        self.pending: set[BlockHash] = set()
        self.left_out_behind: int | None = None
        """Hits behind so many leading ones come too late."""
        self.error: Exception | None = None
        self.asked: list[SimpleNamespace] = []
        self.told: list[tuple[Namespace, list[BlockHash], Hint]] = []

    def hold(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> None:
        self.held.setdefault(namespace, set()).update(hashes)

    def lookup(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        wait_s: float = 0.0,
        recompute_s_per_block: float | None = None,
        hint: Hint | None = None,
    ) -> LookupResult:
        self.asked.append(
            SimpleNamespace(
                namespace=namespace, hashes=list(hashes), wait_s=wait_s, recompute_s=recompute_s_per_block, hint=hint
            )
        )
        if isinstance(self.error, KvstoreError):
            return LookupResult(states=(BlockState.MISS,) * len(hashes), matched_count=0, error=self.error)
        if self.error is not None:
            raise self.error
        held = self.held.get(namespace, set())
        states = tuple(
            BlockState.PENDING if key in self.pending else BlockState.HIT if key in held else BlockState.MISS
            for key in hashes
        )
        matched_count = hit_count = count_leading_hits(states)
        if self.left_out_behind is not None:
            matched_count = min(hit_count, self.left_out_behind)
        return LookupResult(states=states, matched_count=matched_count, left_out_count=hit_count - matched_count)

    def hint(self, namespace: Namespace, hashes: Sequence[BlockHash], hint: Hint) -> None:
        self.told.append((namespace, list(hashes), hint))


class FakePool:
    """Reference counts of the engine's blocks, and where cached ones are."""

    def __init__(self) -> None:
        self.held: Counter[int] = Counter()
        self.cached: dict[tuple[bytes, int], int] = {}

    def hold(self, block_ids: Sequence[int]) -> None:
        assert 0 not in block_ids, "the null block"
        self.held.update(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            assert self.held[block_id] > 0, f"{block_id} is not held"
            self.held[block_id] -= 1
        self.held += Counter()

    def cached_block(self, block_hash: bytes, group: int) -> int | None:
        return self.cached.get((block_hash, group))


def chain(count: int, *, name: str = "a") -> list[BlockHash]:
    return [BlockHash(hashlib.sha256(f"{name}{number}".encode()).digest()) for number in range(count)]


def seen_tokens(group: GroupShape, position: int) -> range:
    """What the token at `position` looks back at, itself not included."""
    match group.kind:
        case "full":
            return range(position)
        case "window":
            return range(max(0, position - group.reach_tokens + 1), position)
        case "chunk":
            return range(position // group.reach_tokens * group.reach_tokens, position)


def make_request(request_id: str = "a", *, tokens: int, hash_tokens: int = 4, name: str = "a", **fields: Any) -> Any:
    """As vLLM shows one; nothing of it is computed."""
    return SimpleNamespace(
        **{
            "request_id": request_id,
            "num_tokens": tokens,
            "num_computed_tokens": 0,
            "num_in_flight_tokens": 0,
            "num_output_placeholders": 0,
            "skip_reading_prefix_cache": False,
            "lora_request": None,
            "num_prompt_tokens": tokens,
            "num_output_tokens": 0,
            "output_token_ids": [],
            "priority": 0,
            "session_id": None,
            "kv_transfer_params": None,
            "status": "RUNNING",
            "block_hashes": chain(tokens // hash_tokens, name=name),
            **fields,
        }
    )


def rank_layout(*, group_count: int = 1, tp_rank: int = 0, tp_size: int = 1, shape: BlockShape = SHAPE) -> RankLayout:
    layers = tuple((f"layer.{2 * group}", f"layer.{2 * group + 1}") for group in range(group_count))
    return RankLayout(shapes=(shape,) * group_count, layers=layers, shard=Shard(tp_rank=tp_rank, tp_size=tp_size))


def rank_layouts(*, rank_count: int = 1, group_count: int = 1) -> Mapping[RankKey, RankLayout]:
    return {
        (0, rank): rank_layout(group_count=group_count, tp_rank=rank, tp_size=rank_count) for rank in range(rank_count)
    }
