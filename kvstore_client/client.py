"""The client for threads. Decisions are in `flows`; here their steps are carried out over gRPC."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar, cast

import grpc

from kvstore.errors import KvstoreError, UnavailableError
from kvstore.keys import BlockHash
from kvstore.messages import StoreInfo, StoreStats
from kvstore.namespace import Namespace
from kvstore.wire import Method
from kvstore_client.address import find_address
from kvstore_client.buffers import Buffers, block_views
from kvstore_client.channel import CHANNEL_OPTIONS, FailedCall, encode_frames, new_owner_id, translate
from kvstore_client.checks import check_blocks, check_lease_s, check_parent_hash, check_wait_s
from kvstore_client.config import ClientConfig
from kvstore_client.flows import attach, load, prefix, store
from kvstore_client.flows.attach import Attachment, Scope
from kvstore_client.flows.prefix import Acquired, HeldPrefix
from kvstore_client.flows.steps import Call, Flow, Read, Step, Write
from kvstore_client.guard import Guard
from kvstore_client.results import GetResult, LookupResult, PutResult

_Result = TypeVar("_Result")


class Client:
    """A store of KV blocks, as one daemon offers it.

    Many threads may share a client. Every call ends by its deadline. `lookup`, `acquire`, `get` and `put` raise
    `InvalidArgumentError` for wrong input and nothing else: whatever happens to the daemon reads as misses, with
    the reason in the result's `error`. After a restart of the daemon the client goes on by itself. It connects
    at the first call; gRPC does not survive a fork in mid-use, so a process that forks makes its clients after.
    """

    def __init__(self, address: str | None = None, *, config: ClientConfig = ClientConfig()) -> None:  # noqa: B008
        self.address = find_address(address)
        self._config = config
        self._scope = Scope(config=config, attachment=Attachment())
        self._transport = _Transport(self.address, config=config)

    def info(self) -> StoreInfo:
        """Who the daemon is; raises `KvstoreError` when it cannot answer."""
        return self._run(attach.info(self._scope))

    def stats(self) -> StoreStats:
        """Occupancy and counters; raises `KvstoreError` when the daemon cannot answer."""
        return self._run(attach.stats(self._scope))

    def lookup(self, namespace: Namespace, hashes: Sequence[BlockHash], *, wait_s: float = 0.0) -> LookupResult:
        """What the store has of a prefix; waits up to `wait_s` while somebody is writing its next block."""
        check_blocks(namespace, hashes)
        check_wait_s(wait_s)
        return self._run(prefix.lookup(self._scope, namespace=namespace, hashes=hashes, wait_s=wait_s))

    def acquire(
        self, namespace: Namespace, hashes: Sequence[BlockHash], *, lease_s: float | None = None, wait_s: float = 0.0
    ) -> Lease:
        """A lookup whose matched prefix is held until released, or for `lease_s` (None: the config's)."""
        check_blocks(namespace, hashes)
        check_wait_s(wait_s)
        lease_s = self._config.lease_s if lease_s is None else lease_s
        check_lease_s(lease_s)
        flow = prefix.acquire(
            self._scope, namespace=namespace, hashes=hashes, owner_id=new_owner_id(), lease_s=lease_s, wait_s=wait_s
        )
        return Lease(self._run(flow), lease_s=lease_s, scope=self._scope, run=self._run)

    def get(self, namespace: Namespace, hashes: Sequence[BlockHash], into: Buffers) -> GetResult:
        """Loads blocks into the caller's memory: one buffer for all, or one per block.

        A block that is a HIT was verified and is wholly there; the memory of every other block is untouched.
        """
        check_blocks(namespace, hashes)
        targets = block_views(
            into,
            block_count=len(hashes),
            block_bytes=namespace.block_layout.payload_bytes,
            field="into",
            is_writable=True,
        )
        return self._run(load.get(self._scope, namespace=namespace, hashes=hashes, targets=targets))

    def put(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        blocks: Buffers,
        *,
        parent_hash: BlockHash | None = None,
    ) -> PutResult:
        """Stores blocks that follow each other in one chain; `parent_hash` is the block before the first one.

        The caller may reuse its memory as soon as this returns, and must leave it alone until then. The checksums of
        all blocks are taken first, at several GB/s. A change after that costs the block: the daemon commits none
        whose checksum does not match. A change before that cannot be told from what should have been there: a block
        that is being changed while its checksum has yet to be taken may be stored with the wrong bytes.
        """
        check_blocks(namespace, hashes, is_distinct=True)
        check_parent_hash(parent_hash)
        views = block_views(
            blocks,
            block_count=len(hashes),
            block_bytes=namespace.block_layout.payload_bytes,
            field="blocks",
            is_writable=False,
        )
        flow = store.put(
            self._scope,
            namespace=namespace,
            hashes=hashes,
            blocks=views,
            checksums=store.checksum_blocks(views),
            parent_hash=parent_hash,
            owner_id=new_owner_id(),
        )
        return self._run(flow)

    def close(self) -> None:
        """Ends calls under way in other threads as misses; later ones are misses at once."""
        self._transport.close()

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
                    outcome = self._transport.carry_out(step)
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


class _Transport:
    """Carries out steps on a channel that is opened by the first of them."""

    def __init__(self, address: str, *, config: ClientConfig) -> None:
        self._address = address
        self._guard = Guard(address=address, config=config)
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._is_closed = False
        self._callables: dict[str, Any] = {}

    def carry_out(self, step: Step) -> object:
        if isinstance(step, Call) and not step.is_guarded:
            return self._perform(step)
        with self._guard.watching():
            return self._perform(step)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            channel, self._channel = self._channel, None
            self._callables.clear()
        if channel is not None:
            channel.close()

    def _perform(self, step: Step) -> object:
        try:
            match step:
                case Call(method=method):
                    data = self._callable(method)(method.encode_request(step.request), timeout=step.timeout_s)
                    return method.decode_response(data)
                case Read():
                    self._read(step)
                    return None
                case Write(method=method):
                    data = self._callable(method)(encode_frames(step.frames), timeout=step.timeout_s)
                    return method.decode_response(data)
        except grpc.RpcError as error:
            raise translate(cast("FailedCall", error), method_name=step.method.name) from error
        except ValueError as error:
            if self._is_closed:  # gRPC's answer to a call on a channel that another thread has just closed
                raise UnavailableError("the client is closed") from error
            raise

    def _read(self, step: Read) -> None:
        stream = self._callable(step.method)(step.method.encode_request(step.request), timeout=step.timeout_s)
        try:
            for data in stream:
                step.on_frame(step.method.decode_response(data))
        finally:
            stream.cancel()

    def _callable(self, method: Method[Any, Any]) -> Any:
        """Bytes in, bytes out: gRPC would turn an error of ours while decoding into one without its reason."""
        found = self._callables.get(method.path)
        if found is not None:
            return found
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the client is closed")
            if self._channel is None:
                self._channel = grpc.insecure_channel(self._address, options=CHANNEL_OPTIONS)
            found = getattr(self._channel, method.streams.value)(method.path)
            self._callables[method.path] = found
            return found
