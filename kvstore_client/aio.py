"""The client for asyncio. Decisions are in `flows`; an `AsyncCarrier` carries their steps out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar, cast

from kvstore.errors import KvstoreError
from kvstore.keys import BlockHash
from kvstore.messages import DescribeNamespacesResponse, StoreInfo, StoreStats, TakeAccessesResponse
from kvstore.namespace import Namespace
from kvstore_client.address import find_address
from kvstore_client.aio_carrier import AsyncCarrier
from kvstore_client.buffers import Buffers, block_views
from kvstore_client.checks import (
    check_blocks,
    check_budget_bytes,
    check_lease_s,
    check_parent_hash,
    check_recompute_s,
    check_wait_s,
)
from kvstore_client.config import ClientConfig
from kvstore_client.flows import attach, hints, load, look, prefetch, prefix, store
from kvstore_client.flows.attach import Attachment, Scope
from kvstore_client.flows.prefix import Acquired, HeldPrefix
from kvstore_client.flows.steps import Call, Flow, Step
from kvstore_client.hints import Hint, check_hint, hint_message
from kvstore_client.ids import new_owner_id
from kvstore_client.results import GetResult, LookupResult, PrefetchResult, PutResult
from kvstore_client.views import AsyncViews

_Result = TypeVar("_Result")

_CLEAN_UP_S = 2.0
"""Seconds that giving reservations back may take after a put was cancelled; later they expire by themselves."""


class AsyncClient:
    """`Client` for asyncio, with the same promises, for many tasks of one event loop.

    It may be made anywhere and connects in the loop that first uses it; used in another loop later, it connects
    anew there. What takes longer than a millisecond or so, such as copying more than 2 MiB between memories, happens
    in threads. A cancelled call ends once nothing touches the caller's memory any more: at once over streams, within a
    block's copying on the daemon's node, with its transfer over the data port. It is cancelled at the daemon, too:
    what a cancelled put has reserved there is given back in the background; what a cancelled acquire or view may
    have leased expires, or goes with the client.
    """

    def __init__(self, address: str | None = None, *, config: ClientConfig = ClientConfig()) -> None:  # noqa: B008
        self.address = find_address(address)
        self._config = config
        self._scope = Scope(config=config, attachment=Attachment())
        self._carrier = AsyncCarrier(self.address, config=config)
        self._clean_ups: set[asyncio.Task[None]] = set()

    async def info(self) -> StoreInfo:
        """See `Client.info`."""
        return await self._run(attach.info(self._scope))

    async def stats(self) -> StoreStats:
        """See `Client.stats`."""
        return await self._run(attach.stats(self._scope))

    async def namespaces(self) -> DescribeNamespacesResponse:
        """See `Client.namespaces`."""
        return await self._run(attach.namespaces(self._scope))

    async def accesses(self, namespace: Namespace, *, after_number: int = 0) -> TakeAccessesResponse:
        """See `Client.accesses`."""
        return await self._run(attach.accesses(self._scope, namespace, after_number=after_number))

    async def lookup(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        wait_s: float = 0.0,
        recompute_s_per_block: float | None = None,
        hint: Hint | None = None,
    ) -> LookupResult:
        """See `Client.lookup`."""
        check_blocks(namespace, hashes)
        check_wait_s(wait_s)
        check_recompute_s(recompute_s_per_block)
        flow = prefix.lookup(
            self._scope,
            namespace=namespace,
            hashes=hashes,
            wait_s=wait_s,
            recompute_s_per_block=recompute_s_per_block,
            hint=hint_message(hint, namespace),
        )
        return await self._run(flow)

    async def prefetch(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        budget_bytes: int | None = None,
        hint: Hint | None = None,
    ) -> PrefetchResult:
        """See `Client.prefetch`."""
        check_blocks(namespace, hashes)
        check_budget_bytes(budget_bytes)
        flow = prefetch.prefetch(
            self._scope,
            namespace=namespace,
            hashes=hashes,
            budget_bytes=budget_bytes,
            hint=hint_message(hint, namespace),
        )
        return await self._run(flow)

    async def acquire(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        lease_s: float | None = None,
        wait_s: float = 0.0,
        recompute_s_per_block: float | None = None,
        hint: Hint | None = None,
    ) -> AsyncLease:
        """See `Client.acquire`."""
        check_blocks(namespace, hashes)
        check_wait_s(wait_s)
        check_recompute_s(recompute_s_per_block)
        lease_s = self._config.lease_s if lease_s is None else lease_s
        check_lease_s(lease_s)
        flow = prefix.acquire(
            self._scope,
            namespace=namespace,
            hashes=hashes,
            owner_id=new_owner_id(),
            lease_s=lease_s,
            wait_s=wait_s,
            recompute_s_per_block=recompute_s_per_block,
            hint=hint_message(hint, namespace),
        )
        return AsyncLease(await self._run(flow), lease_s=lease_s, scope=self._scope, run=self._run)

    async def get(
        self, namespace: Namespace, hashes: Sequence[BlockHash], into: Buffers, *, hint: Hint | None = None
    ) -> GetResult:
        """See `Client.get`."""
        check_blocks(namespace, hashes)
        targets = block_views(
            into,
            block_count=len(hashes),
            block_bytes=namespace.stored_bytes,
            field="into",
            is_writable=True,
        )
        flow = load.get(
            self._scope,
            namespace=namespace,
            hashes=hashes,
            targets=targets,
            owner_id=new_owner_id(),
            hint=hint_message(hint, namespace),
        )
        return await self._run(flow)

    async def view(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        lease_s: float | None = None,
        hint: Hint | None = None,
    ) -> AsyncViews:
        """See `Client.view`."""
        check_blocks(namespace, hashes)
        lease_s = self._config.lease_s if lease_s is None else lease_s
        check_lease_s(lease_s)
        flow = look.view(
            self._scope,
            namespace=namespace,
            hashes=hashes,
            owner_id=new_owner_id(),
            lease_s=lease_s,
            hint=hint_message(hint, namespace),
        )
        return AsyncViews(await self._run(flow), lease_s=lease_s, scope=self._scope, run=self._run)

    async def put(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        blocks: Buffers,
        *,
        parent_hash: BlockHash | None = None,
        hint: Hint | None = None,
    ) -> PutResult:
        """See `Client.put`: the memory must be left alone from the call on until its end, cancelled or not."""
        check_blocks(namespace, hashes, is_distinct=True)
        check_parent_hash(parent_hash)
        views = block_views(
            blocks,
            block_count=len(hashes),
            block_bytes=namespace.stored_bytes,
            field="blocks",
            is_writable=False,
        )
        flow = store.put(
            self._scope,
            namespace=namespace,
            hashes=hashes,
            blocks=views,
            parent_hash=parent_hash,
            owner_id=new_owner_id(),
            hint=hint_message(hint, namespace),
        )
        return await self._run(flow)

    async def hint(self, namespace: Namespace, hashes: Sequence[BlockHash], hint: Hint) -> None:
        """See `Client.hint`."""
        check_blocks(namespace, hashes)
        check_hint(hint)
        await self._run(hints.tell(self._scope, namespace=namespace, hashes=hashes, hint=hint.message(namespace)))

    @property
    def transport(self) -> str | None:
        """See `Client.transport`."""
        return self._carrier.transport()

    async def aclose(self) -> None:
        """Ends calls under way in other tasks as misses; later ones are misses at once.

        First it waits, for 2 seconds at most, until cancelled puts have given their reservations back.
        """
        loop = asyncio.get_running_loop()
        clean_ups = [task for task in self._clean_ups if task.get_loop() is loop]
        if clean_ups:
            await asyncio.wait(clean_ups, timeout=_CLEAN_UP_S)
        await self._carrier.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _run(self, flow: Flow[_Result]) -> _Result:
        owed: asyncio.Task[object] | None = None
        try:
            step = next(flow)
            while True:
                if isinstance(step, Call) and step.is_owed:
                    owed = asyncio.create_task(self._attempt(step))
                    outcome = await asyncio.shield(owed)
                    owed = None
                else:
                    outcome = await self._attempt(step)
                step = _resume(flow, outcome)
        except StopIteration as end:
            return cast("_Result", end.value)
        except asyncio.CancelledError:
            task = asyncio.create_task(self._clean_up(flow, owed=owed))
            self._clean_ups.add(task)
            task.add_done_callback(self._clean_ups.discard)
            raise

    async def _attempt(self, step: Step) -> object:
        """The step's outcome, or its error."""
        try:
            return await self._carrier.carry_out(step)
        except KvstoreError as error:
            return error

    async def _clean_up(self, flow: Flow[Any], *, owed: asyncio.Task[object] | None) -> None:
        """Ends a cancelled flow as if the step it had reached had failed; what it does then is cleaning up."""
        try:
            async with asyncio.timeout(_CLEAN_UP_S):
                if owed is not None:
                    _resume(flow, await owed)
                step = _resume(flow, KvstoreError("the call was cancelled"))
                while True:
                    step = _resume(flow, await self._attempt(step))
        except (StopIteration, KvstoreError, TimeoutError):
            return


class AsyncLease(HeldPrefix):
    """`Lease` for asyncio; leaving its `async with` block releases it."""

    def __init__(
        self, acquired: Acquired, *, lease_s: float, scope: Scope, run: Callable[[Flow[Any]], Awaitable[Any]]
    ) -> None:
        super().__init__(acquired)
        self._lease_s = lease_s
        self._scope = scope
        self._run = run

    async def renew(self, *, lease_s: float | None = None) -> bool:
        """See `Lease.renew`."""
        lease_s = self._lease_s if lease_s is None else lease_s
        check_lease_s(lease_s)
        return bool(await self._run(prefix.renew(self._scope, self._acquired, lease_s=lease_s)))

    async def release(self) -> None:
        """See `Lease.release`."""
        await self._run(prefix.release(self._scope, self._acquired))

    async def __aenter__(self) -> AsyncLease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()


def _resume(flow: Flow[Any], outcome: object) -> Step:
    return flow.throw(outcome) if isinstance(outcome, KvstoreError) else flow.send(outcome)
