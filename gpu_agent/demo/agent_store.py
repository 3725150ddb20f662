"""The VRAM tier as the store of a prefix cache: blocks go to the agent, and whatever it moved away comes back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gpu_agent.agent import GpuAgent
from kvstore.keys import BlockHash
from kvstore.messages import BlockState
from kvstore.namespace import Namespace
from kvstore_client.client import Client
from kvstore_client.hints import Hint
from kvstore_client.results import (
    GetResult,
    LookupResult,
    PutResult,
    PutState,
    get_result,
    lookup_result,
    put_result,
)


class AgentStore:
    """An agent and the daemon behind it, seen as one store; implements `BlockStore`. The daemon alone takes hints."""

    def __init__(self, agent: GpuAgent, client: Client) -> None:
        self._agent = agent
        self._client = client

    def lookup(
        self, namespace: Namespace, hashes: Sequence[BlockHash], *, wait_s: float = 0.0, hint: Hint | None = None
    ) -> LookupResult:
        below = self._client.lookup(namespace, hashes, wait_s=wait_s, hint=hint)
        here = self._agent.contains(hashes)
        states = [BlockState.HIT if is_here else state for is_here, state in zip(here, below.states, strict=True)]
        return lookup_result(states, error=below.error)

    def get(
        self, namespace: Namespace, hashes: Sequence[BlockHash], into: Tensor, *, hint: Hint | None = None
    ) -> GetResult:
        assert namespace == self._agent.namespace, namespace
        return get_result(self._agent.load(hashes, into), error=None)

    def put(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        blocks: Tensor,
        *,
        parent_hash: BlockHash | None = None,
        hint: Hint | None = None,
    ) -> PutResult:
        assert namespace == self._agent.namespace, namespace
        stored = self._agent.store(hashes, blocks, parent_hash=parent_hash)
        states = [PutState.STORED if is_stored else PutState.DROPPED for is_stored in stored]
        return put_result(states, error=None)

    def hint(self, namespace: Namespace, hashes: Sequence[BlockHash], hint: Hint) -> None:
        self._client.hint(namespace, hashes, hint)
