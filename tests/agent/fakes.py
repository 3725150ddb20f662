"""A store in a dictionary that can refuse, hang, fail, lose blocks and come back; and a namespace to fill it."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvstore.errors import DeadlineExceededError, KvstoreError, UnavailableError
from kvstore.keys import BlockHash, hash_blocks
from kvstore.messages import BlockState
from kvstore.namespace import Namespace
from kvstore_client.buffers import Buffers, block_views
from kvstore_client.results import (
    GetResult,
    LookupResult,
    PutResult,
    PutState,
    get_result,
    lookup_result,
    put_result,
)

TOKENS_PER_BLOCK = 16


def make_namespace(*, head_dim: int = 32) -> Namespace:
    """Blocks of 16 tokens, 2 layers, 1 head, float32, K and V: 256 * head_dim bytes each."""
    return Namespace(
        model="tiny",
        weights_revision="r1",
        tokenizer="t1",
        rope="none",
        dtype="float32",
        num_layers=2,
        num_kv_heads=1,
        head_dim=head_dim,
        v_head_dim=head_dim,
        tokens_per_block=TOKENS_PER_BLOCK,
        layout="HND",
        shard=None,
        lora="none",
        tenant_salt=b"",
        k_precision="exact",
        v_precision="exact",
    )


NAMESPACE = make_namespace()
BLOCK_BYTES = NAMESPACE.block_layout.payload_bytes


def chain(count: int, *, seed: int = 0) -> list[BlockHash]:
    """The block hashes of a prompt of its own."""
    tokens = np.random.default_rng(seed).integers(0, 1 << 31, size=count * TOKENS_PER_BLOCK)
    return hash_blocks(tokens, tokens_per_block=TOKENS_PER_BLOCK)


def content(hashes: Sequence[BlockHash], *, block_bytes: int = BLOCK_BYTES) -> Tensor:
    """The bytes that belong to these blocks, derived from their hashes: what a right answer must equal."""
    rows = torch.empty((len(hashes), block_bytes), dtype=torch.uint8)
    for row, block_hash in enumerate(hashes):
        noise = np.random.default_rng(np.frombuffer(block_hash, dtype=np.uint64)).bytes(block_bytes)
        rows[row] = torch.from_numpy(np.frombuffer(noise, dtype=np.uint8).copy())
    return rows


ARENA_SLOT_COUNT = 64
SLOT_PITCH_BYTES = 4096 * (-(-(192 + BLOCK_BYTES) // 4096))


@dataclass(frozen=True, eq=False)
class FakeArena:
    """Memory that a store shares with an agent; slots are as far apart, and payloads as far into them, as real ones."""

    memory: memoryview = field(default_factory=lambda: memoryview(mmap.mmap(-1, ARENA_SLOT_COUNT * SLOT_PITCH_BYTES)))
    is_read_only: bool = False

    def slot(self, index: int) -> memoryview:
        start = index * SLOT_PITCH_BYTES + 192
        return self.memory[start : start + BLOCK_BYTES]


@dataclass
class FakeView:
    payload: memoryview
    is_gone: Callable[[], bool]

    def is_valid(self) -> bool:
        return not self.is_gone()


@dataclass
class FakeViews:
    states: list[BlockState]
    views: list[FakeView | None]
    error: KvstoreError | None

    def __iter__(self) -> Iterator[FakeView | None]:
        return iter(self.views)


@dataclass
class FakeReserved:
    slots: list[memoryview | None]
    commit: Callable[[], PutResult]


@dataclass
class FakeStore:
    """What a daemon and its client are to an agent. Every field may be changed while an agent runs."""

    capacity_count: int = 1 << 30
    """Puts beyond this are dropped."""
    error: KvstoreError | None = None
    """Every call fails with it, at once."""
    hang_s: float = 0.0
    """Every call takes this long and then fails, like a hung daemon at the client's deadline; `revive` ends it."""
    put_latency_s: float = 0.0
    is_put_pending: bool = False
    corrupt: set[BlockHash] = field(default_factory=set)
    """Blocks that did not verify."""
    on_put: Callable[[], None] = lambda: None
    blocks: dict[BlockHash, bytes] = field(default_factory=dict)
    parents: dict[BlockHash, BlockHash | None] = field(default_factory=dict)
    put_calls: list[tuple[BlockHash, ...]] = field(default_factory=list)
    get_calls: list[tuple[BlockHash, ...]] = field(default_factory=list)
    lookup_calls: list[tuple[BlockHash, ...]] = field(default_factory=list)
    shared: tuple[FakeArena, ...] = ()
    """What this store has mapped for its agent."""
    rewritten: set[BlockHash] = field(default_factory=set)
    """Blocks whose slot is given to others while they are in view, as after a lease that expired."""
    on_view: Callable[[], None] = lambda: None
    view_calls: list[tuple[BlockHash, ...]] = field(default_factory=list)
    reserve_calls: list[tuple[BlockHash, ...]] = field(default_factory=list)
    free_slots: list[int] = field(default_factory=lambda: list(range(ARENA_SLOT_COUNT)))
    """Places in the first arena that hold no reservation and no view."""
    _revived: threading.Event = field(default_factory=threading.Event)

    def revive(self) -> None:
        self.error, self.hang_s = None, 0.0
        self._revived.set()

    def lookup(self, namespace: Namespace, hashes: Sequence[BlockHash], *, wait_s: float = 0.0) -> LookupResult:
        self.lookup_calls.append(tuple(hashes))
        error = self._fail()
        if error is not None:
            return lookup_result([BlockState.MISS] * len(hashes), error=error)
        return lookup_result([self._state(namespace, block_hash) for block_hash in hashes], error=None)

    def get(self, namespace: Namespace, hashes: Sequence[BlockHash], into: Buffers) -> GetResult:
        self.get_calls.append(tuple(hashes))
        views = _views(namespace, hashes, into, is_writable=True)
        error = self._fail()
        if error is not None:
            return get_result([BlockState.MISS] * len(hashes), error=error)
        states = [self._state(namespace, block_hash) for block_hash in hashes]
        for view, block_hash, state in zip(views, hashes, states, strict=True):
            if state is BlockState.HIT:
                view[:] = self.blocks[block_hash]
        return get_result(states, error=None)

    def put(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        blocks: Buffers,
        *,
        parent_hash: BlockHash | None = None,
    ) -> PutResult:
        assert len(set(hashes)) == len(hashes), "a put with the same block twice"
        self.put_calls.append(tuple(hashes))
        views = _views(namespace, hashes, blocks, is_writable=False)
        self.on_put()
        error = self._fail()
        if error is not None:
            return put_result([PutState.DROPPED] * len(hashes), error=error)
        if self.put_latency_s:
            self._revived.wait(self.put_latency_s)
        states = []
        parent = parent_hash
        for view, block_hash in zip(views, hashes, strict=True):
            states.append(self._put(block_hash, view, parent=parent))
            parent = block_hash
        return put_result(states, error=None)

    def arenas(self) -> tuple[FakeArena, ...]:
        return self.shared

    @contextmanager
    def view(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> Iterator[FakeViews]:
        self.view_calls.append(tuple(hashes))
        error = self._fail()
        states = [BlockState.MISS if error else self._state(namespace, block_hash) for block_hash in hashes]
        with self._taken(len(hashes), size_bytes=namespace.stored_bytes) as taken:
            views: list[FakeView | None] = []
            for block_hash, state, slot in zip(hashes, states, taken, strict=True):
                views.append(None)
                if state is BlockState.HIT:
                    slot[:] = bytes(len(slot)) if block_hash in self.rewritten else self.blocks[block_hash]
                    views[-1] = FakeView(slot.toreadonly(), partial(self.rewritten.__contains__, block_hash))
            self.on_view()
            yield FakeViews(states, views, error)

    @contextmanager
    def reserve(
        self, namespace: Namespace, hashes: Sequence[BlockHash], *, parent_hash: BlockHash | None = None
    ) -> Iterator[FakeReserved]:
        assert len(set(hashes)) == len(hashes), "the same block twice"
        self.reserve_calls.append(tuple(hashes))
        error = self._fail()
        with self._taken(len(hashes), size_bytes=namespace.stored_bytes) as taken:
            wanted = [not error and block_hash not in self.blocks for block_hash in hashes]

            def commit() -> PutResult:
                self.on_put()
                late_error = error or self._fail()
                if late_error is not None:
                    return put_result([PutState.DROPPED] * len(hashes), error=late_error)
                states, parent = [], parent_hash
                for block_hash, slot in zip(hashes, taken, strict=True):
                    states.append(self._put(block_hash, slot, parent=parent))
                    parent = block_hash
                return put_result(states, error=None)

            yield FakeReserved(
                [slot if is_wanted else None for slot, is_wanted in zip(taken, wanted, strict=True)], commit
            )

    @contextmanager
    def _taken(self, count: int, *, size_bytes: int) -> Iterator[list[memoryview]]:
        """Slots that belong to nobody else until the end; then they are spoiled at once, as by their next owner."""
        indices = [self.free_slots.pop(0) for _ in range(count)]
        slots = [self.shared[0].slot(index)[:size_bytes] for index in indices]
        try:
            yield slots
        finally:
            for slot in slots:
                slot[:] = b"\xee" * size_bytes
            self.free_slots += indices

    def _put(self, block_hash: BlockHash, view: memoryview, *, parent: BlockHash | None) -> PutState:
        if block_hash in self.blocks:
            return PutState.ALREADY_STORED
        if self.is_put_pending:
            return PutState.PENDING
        if len(self.blocks) >= self.capacity_count:
            return PutState.DROPPED
        self.blocks[block_hash] = bytes(view)
        self.parents[block_hash] = parent
        return PutState.STORED

    def _fail(self) -> KvstoreError | None:
        if self.hang_s:
            self._revived.wait(self.hang_s)
            return DeadlineExceededError("the daemon did not answer in time")
        return self.error

    def _state(self, namespace: Namespace, block_hash: BlockHash) -> BlockState:
        """Of namespaces that differ in their precision each finds its own, which are all of one size."""
        if block_hash in self.corrupt:
            return BlockState.CORRUPT
        found = self.blocks.get(block_hash)
        return BlockState.HIT if found is not None and len(found) == namespace.stored_bytes else BlockState.MISS


GONE = UnavailableError("connection refused")


def _views(
    namespace: Namespace, hashes: Sequence[BlockHash], buffers: Buffers, *, is_writable: bool
) -> list[memoryview]:
    return block_views(
        buffers,
        block_count=len(hashes),
        block_bytes=namespace.stored_bytes,
        field="buffers",
        is_writable=is_writable,
    )
