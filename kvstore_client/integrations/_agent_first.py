"""The node's agent and the daemon behind it, as one store: blocks go to the agent's VRAM first, and are sought there
first.

What an engine's connector uses of a `Client`; the agent moves to the daemon what it has no room for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TypeAlias

from torch import Tensor

from kvstore.errors import KvstoreError
from kvstore.keys import BlockHash
from kvstore.messages import BlockState, SlotGrant, StoreInfo
from kvstore.namespace import Namespace
from kvstore_client.agent.client import AgentClient
from kvstore_client.agent.cuda import open_cuda_pool
from kvstore_client.agent.grants import AcquiredSlots, ReservedSlots
from kvstore_client.agent.session import AgentSession
from kvstore_client.client import Client
from kvstore_client.hints import Hint
from kvstore_client.integrations._store import BlockInPlace, Room
from kvstore_client.results import LookupResult, PutResult, PutState, lookup_result, put_result

_LOAD_WAIT_S = 1.0
"""How long the agent may take to bring in what it lacks, before the daemon is asked."""

PoolOf: TypeAlias = Callable[[AgentSession], Tensor | None]
"""An agent's pool on a GPU, where this process reaches it."""


class AgentFirst:
    """See the module. As with a `Client`, whatever happens reads as misses and drops, and calls end by deadlines."""

    def __init__(self, agent: AgentClient, client: Client) -> None:
        """Both are closed with this."""
        self._agent = agent
        self._client = client
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        return self._client.address

    def info(self) -> StoreInfo:
        return self._client.info()

    def hint(self, namespace: Namespace, hashes: Sequence[BlockHash], hint: Hint) -> None:
        self._client.hint(namespace, hashes, hint)

    def lookup(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        wait_s: float = 0.0,
        recompute_s_per_block: float | None = None,
        hint: Hint | None = None,
    ) -> LookupResult:
        """As `Client.lookup`. What the agent has is a hit, also when the daemon is gone."""
        here = self._agent.find(namespace, hashes)
        count = here.index(False) if False in here else len(here)
        if count == len(hashes):
            return lookup_result([BlockState.HIT] * count, error=None)
        below = self._client.lookup(
            namespace, hashes[count:], wait_s=wait_s, recompute_s_per_block=recompute_s_per_block, hint=hint
        )
        return merged_lookup(here, below)

    def view(self, namespace: Namespace, hashes: Sequence[BlockHash], *, hint: Hint | None = None) -> Views:
        return Views(self._agent, self._client, self.pool_of, namespace=namespace, hashes=hashes, hint=hint)

    def reserve(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        parent_hash: BlockHash | None = None,
        hint: Hint | None = None,
    ) -> Reserved:
        granted = self._agent.reserve(namespace, hashes, parent_hash=parent_hash)
        return Reserved(
            granted, self._client, self.pool_of, namespace=namespace, hashes=hashes, parent_hash=parent_hash, hint=hint
        )

    def close(self) -> None:
        self._agent.close()
        self._client.close()

    def pool_of(self, session: AgentSession) -> Tensor | None:
        """An agent's pool on a GPU; None where this process does not reach it."""
        opened = session.opened
        with self._lock:
            if session.tensor is None:
                try:
                    session.tensor = open_cuda_pool(
                        opened.cuda_ipc_handle,
                        device_uuid=opened.device_uuid,
                        slot_count=opened.slot_count,
                        block_bytes=opened.block_bytes,
                    )
                except KvstoreError as error:
                    self._agent.give_up(session, error)
            pool: Tensor | None = session.tensor
            return pool


def merged_lookup(here: Sequence[bool], below: LookupResult) -> LookupResult:
    """What the agent has, and the daemon behind the head that the agent has without a gap; what would come too late
    from the daemon is left out as before."""
    head_count = len(here) - len(below.states)
    tail = here[head_count:]
    late = range(below.matched_count, below.matched_count + below.left_out_count)
    states = [BlockState.HIT if is_here else state for is_here, state in zip(tail, below.states, strict=True)]
    is_late = [index in late and not tail[index] for index in range(len(states))]
    is_usable = [state is BlockState.HIT and not late_ for state, late_ in zip(states, is_late, strict=True)]
    matched_count = is_usable.index(False) if False in is_usable else len(is_usable)
    behind = is_late[matched_count:]
    return LookupResult(
        states=(*[BlockState.HIT] * head_count, *states),
        matched_count=head_count + matched_count,
        error=None if any(here) else below.error,
        left_out_count=behind.index(False) if False in behind else len(behind),
        cut_reason=below.cut_reason,
    )


class _PooledBlock:
    """One that is in the agent's pool."""

    def __init__(self, payload: Room, acquired: AcquiredSlots) -> None:
        self.payload = payload
        self._acquired = acquired

    def is_valid(self) -> bool:
        return self._acquired.is_valid()


class Views:
    """Blocks in the agent's pool, and of those that are not there, in the daemon's memory."""

    def __init__(
        self,
        agent: AgentClient,
        client: Client,
        pool_of: PoolOf,
        *,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        hint: Hint | None,
    ) -> None:
        self.error: KvstoreError | None = None
        self._blocks: list[BlockInPlace | None] = [None] * len(hashes)
        self._held = ExitStack()
        with ExitStack() as undo:
            acquired = undo.enter_context(agent.acquire(namespace, hashes, wait_s=_LOAD_WAIT_S))
            for index, room in enumerate(_rooms(acquired, pool_of)):
                self._blocks[index] = None if room is None else _PooledBlock(room, acquired)
            missing = [index for index, block in enumerate(self._blocks) if block is None]
            if missing:
                views = undo.enter_context(client.view(namespace, [hashes[index] for index in missing], hint=hint))
                self.error = views.error
                for index, view in zip(missing, views, strict=True):
                    self._blocks[index] = view
            self._held = undo.pop_all()

    def __iter__(self) -> Iterator[BlockInPlace | None]:
        return iter(self._blocks)

    def __enter__(self) -> Views:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()


class Reserved:
    """Slots of the agent's pool, and for what it has no room, of the daemon's memory."""

    def __init__(
        self,
        granted: ReservedSlots,
        client: Client,
        pool_of: PoolOf,
        *,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        parent_hash: BlockHash | None,
        hint: Hint | None,
    ) -> None:
        self._granted = granted
        self._held = ExitStack()
        with ExitStack() as undo:
            undo.enter_context(granted)
            self._rooms: list[Room | None] = list(_rooms(granted, pool_of))
            self._is_pooled = [room is not None for room in self._rooms]
            refused = [
                index
                for index, (grant, room) in enumerate(zip(granted.grants, self._rooms, strict=True))
                if room is None and grant is not SlotGrant.PRESENT
            ]
            # The first that the agent refuses, and all behind it: what it has of these already is few, and known.
            self._first_below = refused[0] if refused else len(hashes)
            self._below = None
            if refused:
                first = self._first_below
                self._below = undo.enter_context(
                    client.reserve(
                        namespace, hashes[first:], parent_hash=hashes[first - 1] if first else parent_hash, hint=hint
                    )
                )
                self._rooms[first:] = [
                    slot if room is None else room
                    for room, slot in zip(self._rooms[first:], self._below.slots, strict=True)
                ]
            self._held = undo.pop_all()

    @property
    def slots(self) -> Sequence[Room | None]:
        return tuple(self._rooms)

    def commit(self) -> PutResult:
        here = self._granted.commit(self._is_pooled)
        states = [
            (PutState.STORED if grant is SlotGrant.RESERVED else PutState.ALREADY_STORED)
            if is_here
            else PutState.DROPPED
            for grant, is_here in zip(self._granted.grants, here, strict=True)
        ]
        below = None if self._below is None else self._below.commit()
        if below is None:
            return put_result(states, error=self._granted.error)
        for index, state in enumerate(below.states, start=self._first_below):
            if not here[index]:
                states[index] = state
        return put_result(states, error=below.error, refusal=below.refusal)

    def __enter__(self) -> Reserved:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()


def _rooms(granted: AcquiredSlots | ReservedSlots, pool_of: PoolOf) -> Sequence[Room | None]:
    """One per place; None, too, where this process does not reach the pool."""
    session = granted.session
    if session is None or session.memory is not None:
        return granted.slots
    is_any = any(place is not None for place in granted.places)
    pool = pool_of(session) if is_any else None
    return [None if place is None or pool is None else pool[place] for place in granted.places]
