"""Finds blocks in the store and brings them into the pool: straight from their slots, or through staging."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gpu_agent.arenas import ArenaRegistrar
from gpu_agent.below import Below, Incoming
from gpu_agent.core.layers import LayerGroup
from gpu_agent.device import Event
from gpu_agent.pool import Pool
from gpu_agent.rows import as_buffer
from gpu_agent.store import SlotView, Store
from kvstore.errors import KvstoreError
from kvstore.keys import BlockHash
from kvstore.messages import BlockState
from kvstore.slots import SlotId

Intact: TypeAlias = Callable[[], frozenset[BlockHash]]


class Found(Protocol):
    """Blocks that the store has found, verified. What is copied counts only once it was seen to be intact."""

    @property
    def states(self) -> Mapping[BlockHash, BlockState]: ...

    @property
    def error(self) -> KvstoreError | None:
        """What kept the store from answering."""

    def begin(self, slot_of: Mapping[BlockHash, SlotId], *, groups: Sequence[LayerGroup]) -> Arrival:
        """Queues copies of hits into the pool, one group of layers of all of them after the other."""

    def stage(self, hashes: Sequence[BlockHash]) -> Staged:
        """Copies hits to the host, those that were intact until then."""


class Staged(NamedTuple):
    """Blocks on the host, as the engine has them."""

    memory: Tensor
    row_of: Mapping[BlockHash, int]


class Arrival:
    """Blocks on their way into slots of the pool."""

    def __init__(self, incoming: Incoming, *, groups: Sequence[LayerGroup], intact: Intact) -> None:
        self.incoming = incoming
        self.groups = groups
        self.intact = intact
        """Says which are, once all has been waited for."""

    def event_of(self, layer: int) -> Event:
        """After it the bytes of this layer are in the pool, whether or not they turn out to be intact."""
        group = next(index for index, group in enumerate(self.groups) if layer < group.end_layer)
        return self.incoming.events[group]

    def finish(self) -> frozenset[BlockHash]:
        """Waits for all of it; returns the blocks that were intact until the copies had ended."""
        for event in (*self.incoming.before, *self.incoming.events):
            event.wait()
        return self.intact()


class Loader:
    """Finds blocks in the forms in which they may be stored, one after the other.

    For one thread at a time, and for one load at a time.
    """

    def __init__(
        self, *, pool: Pool, arenas: ArenaRegistrar, store: Store, belows: Sequence[Below], staging_count: int
    ) -> None:
        self.block_bytes = max(below.namespace.stored_bytes for below in belows)
        """Of a block on its way, at most."""
        self._forms = [
            _Form(pool=pool, arenas=arenas, store=store, below=below, staging_count=staging_count) for below in belows
        ]

    @contextmanager
    def find(self, hashes: Sequence[BlockHash]) -> Iterator[Found]:
        """What the store has of these blocks, which it keeps until the `with` block ends."""
        with ExitStack() as held:
            parts: list[Found] = []
            missing = list(hashes)
            for form in self._forms:
                part = held.enter_context(form.find(missing))
                parts.append(part)
                missing = [block_hash for block_hash in missing if part.states[block_hash] is BlockState.MISS]
                if not missing or part.error is not None:
                    break
            yield parts[0] if len(parts) == 1 else _InForms(parts)


class _Form:
    """Asks the store through one bounded staging buffer, which is all there is where no memory is shared."""

    def __init__(self, *, pool: Pool, arenas: ArenaRegistrar, store: Store, below: Below, staging_count: int) -> None:
        self._pool = pool
        self._arenas = arenas
        self._store = store
        self._below = below
        self._namespace = below.namespace
        self._staging = pool.device.allocate_staging(row_count=staging_count, block_bytes=below.namespace.stored_bytes)

    @contextmanager
    def find(self, hashes: Sequence[BlockHash]) -> Iterator[Found]:
        self._arenas.follow(self._store.arenas())
        if self._arenas.is_direct(is_written=False):
            with self._store.view(self._namespace, hashes) as views:
                states = dict(zip(hashes, views.states, strict=True))
                seen = {block_hash: view for block_hash, view in zip(hashes, views, strict=True) if view is not None}
                yield _InSlots(self._pool, self._below, self._staging, states=states, error=views.error, views=seen)
        else:
            rows = as_buffer(self._staging, start_row=0, end_row=len(hashes))
            result = self._store.get(self._namespace, hashes, rows)
            states = dict(zip(hashes, result.states, strict=True))
            yield _InStaging(self._pool, self._below, self._staging, states=states, error=result.error)


class _InForms:
    """Hits of several forms; each was asked for what those before it did not have."""

    def __init__(self, parts: Sequence[Found]) -> None:
        self.states = {block_hash: state for part in parts for block_hash, state in part.states.items()}
        self.error = next((part.error for part in parts if part.error is not None), None)
        self._parts = parts

    def begin(self, slot_of: Mapping[BlockHash, SlotId], *, groups: Sequence[LayerGroup]) -> Arrival:
        arrivals = [
            part.begin({one: slot for one, slot in slot_of.items() if _is_hit(part, one)}, groups=groups)
            for part in self._parts
            if any(_is_hit(part, one) for one in slot_of)
        ]
        return _joined(arrivals, groups=groups)

    def stage(self, hashes: Sequence[BlockHash]) -> Staged:
        rows: list[Tensor] = []
        row_of: dict[BlockHash, int] = {}
        for part in self._parts:
            staged = part.stage([one for one in hashes if _is_hit(part, one)])
            row_of |= {block_hash: len(row_of) + place for place, block_hash in enumerate(staged.row_of)}
            rows.append(staged.memory[list(staged.row_of.values())])
        return Staged(torch.cat(rows), row_of)


class _InStaging:
    """Hits lie in the rows of their places among the hashes."""

    def __init__(
        self,
        pool: Pool,
        below: Below,
        staging: Tensor,
        *,
        states: Mapping[BlockHash, BlockState],
        error: KvstoreError | None,
    ) -> None:
        self.states = states
        self.error = error
        self._pool = pool
        self._below = below
        self._staging = staging
        self._row_of = {block_hash: row for row, block_hash in enumerate(states)}

    def begin(self, slot_of: Mapping[BlockHash, SlotId], *, groups: Sequence[LayerGroup]) -> Arrival:
        rows = [self._row_of[block_hash] for block_hash in slot_of]
        _count(self._pool, self._below, len(rows))
        return _load_staged(self._below, self._staging, rows, slot_of, groups=groups)

    def stage(self, hashes: Sequence[BlockHash]) -> Staged:
        _count(self._pool, self._below, len(hashes))
        return _restored(self._below, self._staging, {block_hash: self._row_of[block_hash] for block_hash in hashes})


class _InSlots:
    """Hits lie in slots of the store, under a lease. The lease may expire: so each slot is looked at after the copy."""

    def __init__(
        self,
        pool: Pool,
        below: Below,
        staging: Tensor,
        *,
        states: Mapping[BlockHash, BlockState],
        error: KvstoreError | None,
        views: Mapping[BlockHash, SlotView],
    ) -> None:
        self.states = states
        self.error = error
        self._pool = pool
        self._below = below
        self._staging = staging
        self._views = views

    def begin(self, slot_of: Mapping[BlockHash, SlotId], *, groups: Sequence[LayerGroup]) -> Arrival:
        _count(self._pool, self._below, len(slot_of))
        payloads = [self._views[block_hash].payload for block_hash in slot_of]
        incoming = self._below.bring_from_slots(payloads, list(slot_of.values()), groups=groups)
        if incoming is not None:
            with self._pool.changed:
                self._pool.counters.direct_loaded_bytes += sum(map(len, payloads))
            return Arrival(incoming, groups=groups, intact=partial(self._intact, list(slot_of)))
        rows = self._copy_out(list(slot_of))
        staged = {block_hash: slot_of[block_hash] for block_hash in rows}
        return _load_staged(self._below, self._staging, list(rows.values()), staged, groups=groups)

    def _intact(self, hashes: Sequence[BlockHash]) -> frozenset[BlockHash]:
        return frozenset(block_hash for block_hash in hashes if self._views[block_hash].is_valid())

    def stage(self, hashes: Sequence[BlockHash]) -> Staged:
        _count(self._pool, self._below, len(hashes))
        return _restored(self._below, self._staging, self._copy_out(hashes))

    def _copy_out(self, hashes: Sequence[BlockHash]) -> Mapping[BlockHash, int]:
        for row, block_hash in enumerate(hashes):
            np.copyto(self._staging[row].numpy(), np.frombuffer(self._views[block_hash].payload, np.uint8))
        intact = self._intact(hashes)
        return {block_hash: row for row, block_hash in enumerate(hashes) if block_hash in intact}


def _load_staged(
    below: Below,
    staging: Tensor,
    rows: Sequence[int],
    slot_of: Mapping[BlockHash, SlotId],
    *,
    groups: Sequence[LayerGroup],
) -> Arrival:
    """Staging holds still until the arrival is finished."""
    incoming = below.bring_from_staging(staging, rows, list(slot_of.values()), groups=groups)
    return Arrival(incoming, groups=groups, intact=partial(frozenset[BlockHash], slot_of))


def _is_hit(part: Found, block_hash: BlockHash) -> bool:
    return part.states.get(block_hash) is BlockState.HIT


def _joined(arrivals: Sequence[Arrival], *, groups: Sequence[LayerGroup]) -> Arrival:
    """They were queued in this order, so what the last one waits for comes after all others."""
    before = [event for one in arrivals for event in (*one.incoming.before, *one.incoming.events)]
    return Arrival(
        Incoming(arrivals[-1].incoming.events, before),
        groups=groups,
        intact=lambda: frozenset(block_hash for one in arrivals for block_hash in one.intact()),
    )


def _count(pool: Pool, below: Below, block_count: int) -> None:
    with pool.changed:
        pool.counters.loaded_bytes += block_count * below.namespace.stored_bytes


def _restored(below: Below, staging: Tensor, row_of: Mapping[BlockHash, int]) -> Staged:
    memory, rows = below.restore(staging, list(row_of.values()))
    return Staged(memory, dict(zip(row_of, rows, strict=True)))
