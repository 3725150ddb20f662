"""Asks the store what it has of a prompt, once for all ranks, in threads: the scheduler never waits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Protocol

from kvstore.errors import InternalError, KvstoreError
from kvstore.keys import BlockHash
from kvstore.messages import RECOMPUTE_S_MAX, BlockState
from kvstore.namespace import Namespace
from kvstore_client.hints import Hint
from kvstore_client.integrations.vllm.identities import Identity
from kvstore_client.integrations.vllm.matching import GroupShape
from kvstore_client.results import LookupResult

_LOG = logging.getLogger("vllm.kvstore")  # below vLLM's own logger, so that its handlers show it


class LooksUp(Protocol):
    """What this needs of a `kvstore_client.Client`."""

    def lookup(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        wait_s: float = 0.0,
        recompute_s_per_block: float | None = None,
        hint: Hint | None = None,
    ) -> LookupResult: ...

    def hint(self, namespace: Namespace, hashes: Sequence[BlockHash], hint: Hint) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Per group, which of its blocks every rank's shard is held of."""

    hits: tuple[tuple[bool, ...], ...]
    left_out_count: int = 0
    """Hits that would have come later than computing them takes."""
    error: KvstoreError | None = None


class Lookup:
    """One question under way. `began_s` is when it was asked."""

    def __init__(self, future: Future[Found], *, began_s: float) -> None:
        self._future = future
        self.began_s = began_s

    def found(self) -> Found | None:
        """None until it is answered."""
        return self._future.result() if self._future.done() else None


class Lookups:
    """Begins lookups. Layers that look back at everything are asked first: what they lack, nobody needs."""

    def __init__(
        self,
        client: LooksUp,
        groups: Sequence[GroupShape | None],
        *,
        executor: Executor,
        clock: Callable[[], float],
        wait_s: float,
    ) -> None:
        self._client = client
        self._groups = groups
        self._executor = executor
        self._clock = clock
        self._wait_s = wait_s

    def begin(
        self,
        identity: Identity,
        hashes: Sequence[Sequence[BlockHash]],
        *,
        recompute_s_per_token: float | None,
        hint: Hint | None = None,
    ) -> Lookup:
        future = self._executor.submit(self._ask, identity, hashes, recompute_s_per_token, hint)
        return Lookup(future, began_s=self._clock())

    def tell(self, identity: Identity, hashes: Sequence[Sequence[BlockHash]], hint: Hint) -> None:
        """What became known of a request's blocks, when it had ended."""
        self._executor.submit(self._tell, identity, hashes, hint)

    def _tell(self, identity: Identity, hashes: Sequence[Sequence[BlockHash]], hint: Hint) -> None:
        try:
            for namespaces in identity.shards():
                for namespace, group_hashes in zip(namespaces, hashes, strict=True):
                    if namespace is not None and group_hashes:
                        self._client.hint(namespace, group_hashes, hint)
        except Exception:
            _LOG.exception("a hint was not told")
            raise

    def _ask(
        self,
        identity: Identity,
        hashes: Sequence[Sequence[BlockHash]],
        recompute_s_per_token: float | None,
        hint: Hint | None,
    ) -> Found:
        try:
            return self._find(identity, hashes, recompute_s_per_token, hint)
        except Exception as error:  # noqa: BLE001  (a bug here must cost a computation, never the engine)
            _LOG.exception("a lookup broke off; its prompt is computed")
            return _nothing(hashes, InternalError(f"{type(error).__name__}: {error}"))

    def _find(
        self,
        identity: Identity,
        hashes: Sequence[Sequence[BlockHash]],
        recompute_s_per_token: float | None,
        hint: Hint | None,
    ) -> Found:
        order = sorted(
            (group for group, shape in enumerate(self._groups) if shape is not None),
            key=lambda group: _shape(self._groups, group).kind != "full",
        )
        hits: list[list[bool]] = [[False] * len(group_hashes) for group_hashes in hashes]
        reach_tokens: int | None = None
        left_out_count = 0
        for group in order:
            shape = _shape(self._groups, group)
            wanted = hashes[group]
            if reach_tokens is not None:
                wanted = wanted[: reach_tokens // shape.block_tokens]
            states = [True] * len(wanted)
            for namespaces in identity.shards():
                namespace = namespaces[group]
                if namespace is None:
                    continue  # this part of the pipeline has none of its layers
                result = self._client.lookup(
                    namespace,
                    wanted,
                    wait_s=self._wait_s if shape.kind == "full" else 0.0,
                    # All groups are loaded, so that each may take its part of what computing takes.
                    recompute_s_per_block=recompute_s_per_token
                    and min(recompute_s_per_token * shape.block_tokens / len(order), RECOMPUTE_S_MAX),
                    hint=hint,
                )
                if result.error is not None:
                    return _nothing(hashes, result.error)
                left_out_count += result.left_out_count
                states = [hit and found for hit, found in zip(states, _hits(shape, result), strict=True)]
            hits[group][: len(states)] = states
            if shape.kind == "full":
                run = (states.index(False) if False in states else len(states)) * shape.block_tokens
                reach_tokens = run if reach_tokens is None else min(run, reach_tokens)
                if not run:
                    break
        return Found(hits=tuple(map(tuple, hits)), left_out_count=left_out_count)


def _nothing(hashes: Sequence[Sequence[BlockHash]], error: KvstoreError) -> Found:
    return Found(hits=tuple((False,) * len(group_hashes) for group_hashes in hashes), error=error)


def _shape(groups: Sequence[GroupShape | None], group: int) -> GroupShape:
    shape = groups[group]
    assert shape is not None, group
    return shape


def _hits(shape: GroupShape, result: LookupResult) -> list[bool]:
    if shape.kind == "full":
        return [index < result.matched_count for index in range(len(result.states))]
    cut_count = result.matched_count + result.left_out_count if result.left_out_count else 0
    return [
        state is BlockState.HIT and not result.matched_count <= index < cut_count
        for index, state in enumerate(result.states)
    ]
