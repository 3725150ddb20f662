"""Both clients behind one face, so that one suite can hold them to the same contract."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvstore.errors import KvstoreError
from kvstore.keys import BlockHash
from kvstore.messages import BlockState, CutReason, StoreInfo, StoreStats
from kvstore.namespace import Namespace
from kvstore_client import (
    AsyncClient,
    AsyncLease,
    AsyncViews,
    BlockView,
    Client,
    ClientConfig,
    GetResult,
    Hint,
    LookupResult,
    PutResult,
)
from kvstore_client.results import PrefetchResult


class AnyLease(Protocol):
    @property
    def states(self) -> tuple[BlockState, ...]: ...

    @property
    def matched_count(self) -> int: ...

    @property
    def left_out_count(self) -> int: ...

    @property
    def cut_reason(self) -> CutReason: ...

    @property
    def error(self) -> KvstoreError | None: ...

    def renew(self, *, lease_s: float | None = None) -> bool: ...

    def release(self) -> None: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> None: ...


class AnyViews(Protocol):
    @property
    def states(self) -> tuple[BlockState, ...]: ...

    @property
    def matched_count(self) -> int: ...

    @property
    def error(self) -> KvstoreError | None: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> BlockView | None: ...

    def renew(self, *, lease_s: float | None = None) -> bool: ...

    def release(self) -> None: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> None: ...


class AnyClient(Protocol):
    address: str

    @property
    def transport(self) -> str | None: ...

    def info(self) -> StoreInfo: ...

    def stats(self) -> StoreStats: ...

    def lookup(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        wait_s: float = 0.0,
        recompute_s_per_block: float | None = None,
        hint: Hint | None = None,
    ) -> LookupResult: ...

    def prefetch(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        budget_bytes: int | None = None,
        hint: Hint | None = None,
    ) -> PrefetchResult: ...

    def acquire(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        lease_s: float | None = None,
        wait_s: float = 0.0,
        recompute_s_per_block: float | None = None,
        hint: Hint | None = None,
    ) -> AnyLease: ...

    def get(
        self, namespace: Namespace, hashes: Sequence[BlockHash], into: Any, *, hint: Hint | None = None
    ) -> GetResult: ...

    def view(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        lease_s: float | None = None,
        hint: Hint | None = None,
    ) -> AnyViews: ...

    def put(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        blocks: Any,
        *,
        parent_hash: BlockHash | None = None,
        hint: Hint | None = None,
    ) -> PutResult: ...

    def hint(self, namespace: Namespace, hashes: Sequence[BlockHash], hint: Hint) -> None: ...

    def close(self) -> None: ...


class BlockingAsyncClient:
    """An `AsyncClient` with an event loop of its own."""

    def __init__(self, address: str | None = None, *, config: ClientConfig) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncClient(address, config=config)
        self.address = self._client.address

    @property
    def transport(self) -> str | None:
        return self._client.transport

    def info(self) -> StoreInfo:
        return self._runner.run(self._client.info())

    def stats(self) -> StoreStats:
        return self._runner.run(self._client.stats())

    def lookup(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        wait_s: float = 0.0,
        recompute_s_per_block: float | None = None,
        hint: Hint | None = None,
    ) -> LookupResult:
        return self._runner.run(
            self._client.lookup(
                namespace, hashes, wait_s=wait_s, recompute_s_per_block=recompute_s_per_block, hint=hint
            )
        )

    def prefetch(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        budget_bytes: int | None = None,
        hint: Hint | None = None,
    ) -> PrefetchResult:
        return self._runner.run(self._client.prefetch(namespace, hashes, budget_bytes=budget_bytes, hint=hint))

    def acquire(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        lease_s: float | None = None,
        wait_s: float = 0.0,
        recompute_s_per_block: float | None = None,
        hint: Hint | None = None,
    ) -> _BlockingLease:
        flow = self._client.acquire(
            namespace, hashes, lease_s=lease_s, wait_s=wait_s, recompute_s_per_block=recompute_s_per_block, hint=hint
        )
        return _BlockingLease(self._runner.run(flow), runner=self._runner)

    def get(
        self, namespace: Namespace, hashes: Sequence[BlockHash], into: Any, *, hint: Hint | None = None
    ) -> GetResult:
        return self._runner.run(self._client.get(namespace, hashes, into, hint=hint))

    def put(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        blocks: Any,
        *,
        parent_hash: BlockHash | None = None,
        hint: Hint | None = None,
    ) -> PutResult:
        return self._runner.run(self._client.put(namespace, hashes, blocks, parent_hash=parent_hash, hint=hint))

    def view(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        lease_s: float | None = None,
        hint: Hint | None = None,
    ) -> _BlockingViews:
        views = self._runner.run(self._client.view(namespace, hashes, lease_s=lease_s, hint=hint))
        return _BlockingViews(views, runner=self._runner)

    def hint(self, namespace: Namespace, hashes: Sequence[BlockHash], hint: Hint) -> None:
        self._runner.run(self._client.hint(namespace, hashes, hint))

    def close(self) -> None:
        """Keeps the loop: a client may still be called after it was closed."""
        self._runner.run(self._client.aclose())

    def close_loop(self) -> None:
        self._runner.close()


class _BlockingLease:
    def __init__(self, lease: AsyncLease, *, runner: asyncio.Runner) -> None:
        self._lease = lease
        self._runner = runner

    @property
    def states(self) -> tuple[BlockState, ...]:
        return self._lease.states

    @property
    def matched_count(self) -> int:
        return self._lease.matched_count

    @property
    def left_out_count(self) -> int:
        return self._lease.left_out_count

    @property
    def cut_reason(self) -> CutReason:
        return self._lease.cut_reason

    @property
    def error(self) -> KvstoreError | None:
        return self._lease.error

    def renew(self, *, lease_s: float | None = None) -> bool:
        return self._runner.run(self._lease.renew(lease_s=lease_s))

    def release(self) -> None:
        self._runner.run(self._lease.release())

    def __enter__(self) -> _BlockingLease:
        self._runner.run(_enter(self._lease))
        return self

    def __exit__(self, *error: Any) -> None:
        self._runner.run(_exit(self._lease))


class _BlockingViews:
    def __init__(self, views: AsyncViews, *, runner: asyncio.Runner) -> None:
        self._views = views
        self._runner = runner

    @property
    def states(self) -> tuple[BlockState, ...]:
        return self._views.states

    @property
    def matched_count(self) -> int:
        return self._views.matched_count

    @property
    def error(self) -> KvstoreError | None:
        return self._views.error

    def __len__(self) -> int:
        return len(self._views)

    def __getitem__(self, index: int) -> BlockView | None:
        return self._views[index]

    def renew(self, *, lease_s: float | None = None) -> bool:
        return self._runner.run(self._views.renew(lease_s=lease_s))

    def release(self) -> None:
        self._runner.run(self._views.release())

    def __enter__(self) -> _BlockingViews:
        self._runner.run(_enter(self._views))
        return self

    def __exit__(self, *error: Any) -> None:
        self._runner.run(_exit(self._views))


async def _enter(held: AsyncLease | AsyncViews) -> None:
    await held.__aenter__()


async def _exit(held: AsyncLease | AsyncViews) -> None:
    await held.__aexit__(None, None, None)


CLIENTS: dict[str, Callable[..., AnyClient]] = {"Client": Client, "AsyncClient": BlockingAsyncClient}
