"""The client for threads. Decisions are in `flows`; a `Carrier` carries their steps out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar, cast

from kvstore.errors import InvalidArgumentError, KvstoreError
from kvstore.keys import BlockHash
from kvstore.messages import DescribeNamespacesResponse, StoreInfo, StoreStats, TakeAccessesResponse
from kvstore.namespace import Namespace
from kvstore_client.address import find_address
from kvstore_client.buffers import Buffers, block_views
from kvstore_client.carrier import Carrier
from kvstore_client.checks import (
    check_blocks,
    check_budget_bytes,
    check_lease_s,
    check_parent_hash,
    check_recompute_s,
    check_wait_s,
)
from kvstore_client.config import ClientConfig
from kvstore_client.flows import attach, fill, hints, load, look, prefetch, prefix, store
from kvstore_client.flows.attach import Attachment, Scope
from kvstore_client.flows.fill import Filling
from kvstore_client.flows.prefix import Acquired, HeldPrefix
from kvstore_client.flows.steps import Flow
from kvstore_client.hints import Hint, check_hint, hint_message
from kvstore_client.ids import new_owner_id
from kvstore_client.paths.slab import Arena
from kvstore_client.reserved import Reserved
from kvstore_client.results import GetResult, LookupResult, PrefetchResult, PutResult
from kvstore_client.views import Views

_Result = TypeVar("_Result")


class Client:
    """A store of KV blocks, as one daemon offers it.

    Many threads may share a client. Every call ends by its deadline. `lookup`, `acquire`, `prefetch`, `get` and `put`
    raise `InvalidArgumentError` for wrong input and nothing else: whatever happens to the daemon reads as misses,
    with the reason in the result's `error`. After a restart of the daemon the client goes on by itself. It connects
    at the first call: on the daemon's node to its slab socket, so that blocks are copied from memory to memory, else
    over gRPC. gRPC does not survive a fork in mid-use, so a process that forks makes its clients after.
    """

    def __init__(self, address: str | None = None, *, config: ClientConfig = ClientConfig()) -> None:  # noqa: B008
        self.address = find_address(address)
        self._config = config
        self._scope = Scope(config=config, attachment=Attachment())
        self._carrier = Carrier(self.address, config=config)

    def info(self) -> StoreInfo:
        """Who the daemon is; raises `KvstoreError` when it cannot answer."""
        return self._run(attach.info(self._scope))

    def stats(self) -> StoreStats:
        """Occupancy and counters; raises `KvstoreError` when the daemon cannot answer."""
        return self._run(attach.stats(self._scope))

    def namespaces(self) -> DescribeNamespacesResponse:
        """The namespaces that the daemon knows, in full; raises `KvstoreError` when it cannot answer."""
        return self._run(attach.namespaces(self._scope))

    def accesses(self, namespace: Namespace, *, after_number: int = 0) -> TakeAccessesResponse:
        """What anybody asked of a namespace since the answer with that `last_number`; 0: begin now.

        The daemon remembers some, and only for who comes back within half a minute. Raises `KvstoreError` when it
        cannot answer.
        """
        return self._run(attach.accesses(self._scope, namespace, after_number=after_number))

    def lookup(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        wait_s: float = 0.0,
        recompute_s_per_block: float | None = None,
        hint: Hint | None = None,
    ) -> LookupResult:
        """What the store has of a prefix; waits up to `wait_s` while somebody is writing its next block.

        Where `recompute_s_per_block` says what computing a block takes the caller, hits that would be there later than
        that are left out of the matched prefix.
        """
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
        return self._run(flow)

    def prefetch(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        budget_bytes: int | None = None,
        hint: Hint | None = None,
    ) -> PrefetchResult:
        """Begins to bring blocks of a prefix from slower tiers into memory, head first, and waits for none of them.

        For what will be read soon, such as the prompt of a queued request. At most `budget_bytes` of blocks (None: as
        many as the daemon allows). Like a lookup it raises for wrong input alone.
        """
        check_blocks(namespace, hashes)
        check_budget_bytes(budget_bytes)
        flow = prefetch.prefetch(
            self._scope,
            namespace=namespace,
            hashes=hashes,
            budget_bytes=budget_bytes,
            hint=hint_message(hint, namespace),
        )
        return self._run(flow)

    def acquire(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        lease_s: float | None = None,
        wait_s: float = 0.0,
        recompute_s_per_block: float | None = None,
        hint: Hint | None = None,
    ) -> Lease:
        """A lookup whose matched prefix is held until released, or for `lease_s` (None: the config's).

        What `recompute_s_per_block` leaves out is not held.
        """
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
        return Lease(self._run(flow), lease_s=lease_s, scope=self._scope, run=self._run)

    def get(
        self, namespace: Namespace, hashes: Sequence[BlockHash], into: Buffers, *, hint: Hint | None = None
    ) -> GetResult:
        """Loads blocks into the caller's memory: one buffer for all, or one per block.

        A block that is a HIT was verified and is wholly there. The memory of a MISS is untouched, unless the block
        left the store, or its transfer broke, on the way; what that, or a block that is CORRUPT, leaves is of no use.
        """
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
        return self._run(flow)

    def view(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        lease_s: float | None = None,
        hint: Hint | None = None,
    ) -> Views:
        """Blocks where they lie, without a copy: held until released, or for `lease_s` (None: the config's).

        On the daemon's node they are looked at in the daemon's own memory. Elsewhere each is a private copy
        (`is_copy`), so that the same code works everywhere.
        """
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
        return Views(self._run(flow), lease_s=lease_s, scope=self._scope, run=self._run)

    def put(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        blocks: Buffers,
        *,
        parent_hash: BlockHash | None = None,
        hint: Hint | None = None,
    ) -> PutResult:
        """Stores blocks that follow each other in one chain; `parent_hash` is the block before the first one.

        The caller may reuse its memory as soon as this returns, and must leave it alone until then. A change after a
        block's checksum was taken costs the block: it is not stored, or is found out by the first who reads it. A
        change before that cannot be told from what should have been there, and is stored. The checksums are taken
        before the first block leaves when they go over streams, else block by block.
        """
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
        return self._run(flow)

    def reserve(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        parent_hash: BlockHash | None = None,
        hint: Hint | None = None,
    ) -> Reserved:
        """Room for blocks that follow each other in one chain, to be filled in place and committed; see `Reserved`.

        On the daemon's node the slots are the daemon's own memory. Elsewhere they are private (`is_copy`), and sent
        when they are committed, so that the same code works everywhere. They are held for the config's
        `reservation_s`: what is committed later than that is dropped.
        """
        check_blocks(namespace, hashes, is_distinct=True)
        check_parent_hash(parent_hash)
        if len(hashes) > self._config.batch_count_max:
            raise InvalidArgumentError.of("hashes", f"{len(hashes)} blocks", f"up to {self._config.batch_count_max}")
        filling: Filling = self._run(
            fill.begin(
                self._scope,
                namespace=namespace,
                hashes=hashes,
                parent_hash=parent_hash,
                owner_id=new_owner_id(),
                hint=hint_message(hint, namespace),
            )
        )
        return Reserved(
            filling,
            session=self._carrier.session(filling.reservations.owner_id),
            put=lambda blocks: self.put(namespace, hashes, blocks, parent_hash=parent_hash, hint=hint),
            scope=self._scope,
            run=self._run,
        )

    def hint(self, namespace: Namespace, hashes: Sequence[BlockHash], hint: Hint) -> None:
        """Tells what became known of blocks, given in chain order, after they were used; waits for nothing.

        How their request ended, say, that their session is over, or when it is expected back. This is no use of them,
        and of blocks that are not stored nothing is remembered. Nobody is told when the daemon does not hear it.
        """
        check_blocks(namespace, hashes)
        check_hint(hint)
        self._run(hints.tell(self._scope, namespace=namespace, hashes=hashes, hint=hint.message(namespace)))

    def arenas(self) -> tuple[Arena, ...]:
        """The daemon's memory as far as this client has mapped it, for who registers it with a device; asks nobody.

        There is none before blocks were first moved, and none where no memory is shared. What is mapped stays so for
        as long as anything refers to it.
        """
        return self._carrier.arenas()

    @property
    def transport(self) -> str | None:
        """The way that blocks travel now: "slab", "bulk", "grpc" or "nixl"; asks nobody.

        None before the daemon has answered anything, and while the transport that was insisted on is not there.
        """
        return self._carrier.transport()

    def close(self) -> None:
        """Ends calls under way in other threads as misses; later ones are misses at once."""
        self._carrier.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, flow: Flow[_Result]) -> _Result:
        try:
            step = next(flow)
            while True:
                try:
                    outcome = self._carrier.carry_out(step)
                except KvstoreError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(outcome)
        except StopIteration as end:
            return cast("_Result", end.value)


class Lease(HeldPrefix):
    """Holds the matched prefix of an `acquire`. Leaving its `with` block releases it."""

    def __init__(self, acquired: Acquired, *, lease_s: float, scope: Scope, run: Callable[[Flow[Any]], Any]) -> None:
        super().__init__(acquired)
        self._lease_s = lease_s
        self._scope = scope
        self._run = run

    def renew(self, *, lease_s: float | None = None) -> bool:
        """Holds on for `lease_s` from now (None: as long as at first); False when the hold had ended already."""
        lease_s = self._lease_s if lease_s is None else lease_s
        check_lease_s(lease_s)
        return bool(self._run(prefix.renew(self._scope, self._acquired, lease_s=lease_s)))

    def release(self) -> None:
        """Gives the prefix back; doing so twice changes nothing."""
        self._run(prefix.release(self._scope, self._acquired))

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
