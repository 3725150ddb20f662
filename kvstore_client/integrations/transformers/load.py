"""Loading the matched prefixes of prompts into host memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvstore.errors import KvstoreError
from kvstore.keys import BlockHash
from kvstore.messages import BlockState
from kvstore.namespace import Namespace
from kvstore_client.hints import Hint
from kvstore_client.integrations.transformers.results import BlockStore
from kvstore_client.results import LookupResult, count_leading_hits, get_result, lookup_result


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRow:
    """One prompt's matched prefix: which blocks of the buffer it is, in order."""

    blocks: tuple[int, ...]
    states: tuple[BlockState, ...]
    error: KvstoreError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Blocks of several prompts, each once, in a buffer [blocks, payload_bytes]."""

    buffer: torch.Tensor
    rows: tuple[LoadedRow, ...]

    @property
    def error(self) -> KvstoreError | None:
        return next((row.error for row in self.rows if row.error is not None), None)


def nothing_loaded(
    chains: Sequence[Sequence[BlockHash]], *, payload_bytes: int, error: KvstoreError | None = None
) -> Loaded:
    return Loaded(
        buffer=torch.empty((0, payload_bytes), dtype=torch.uint8),
        rows=tuple(LoadedRow(blocks=(), states=(BlockState.MISS,) * len(chain), error=error) for chain in chains),
    )


def load_prefixes(
    client: BlockStore,
    namespace: Namespace,
    chains: Sequence[Sequence[BlockHash]],
    *,
    wait_s: float,
    hint: Hint | None = None,
) -> Loaded:
    """The longest stored prefix of each chain; whatever goes wrong is a miss, with its reason.

    `wait_s` is for all chains together. Once the store has failed, it is asked no more.
    """
    payload_bytes = namespace.block_layout.payload_bytes
    try:
        looked_up = _look_up(client, namespace, chains, wait_s=wait_s, hint=hint)
        matched = [chain[: found.matched_count] for chain, found in zip(chains, looked_up, strict=True)]
        wanted = list(dict.fromkeys(block for chain in matched for block in chain))
        buffer = torch.empty((len(wanted), payload_bytes), dtype=torch.uint8)
        loaded = client.get(namespace, wanted, buffer, hint=hint) if wanted else get_result([], error=None)
    except KvstoreError as failure:
        return nothing_loaded(chains, payload_bytes=payload_bytes, error=failure)
    position_of = {block: position for position, block in enumerate(wanted)}
    rows = []
    for chain, found in zip(matched, looked_up, strict=True):
        positions = [position_of[block] for block in chain]
        states = [loaded.states[position] for position in positions]
        rows.append(
            LoadedRow(
                blocks=tuple(positions[: count_leading_hits(states)]),
                states=(*states, *found.states[found.matched_count :]),
                error=loaded.error or found.error,
            )
        )
    return Loaded(buffer=buffer, rows=tuple(rows))


def _look_up(
    client: BlockStore,
    namespace: Namespace,
    chains: Sequence[Sequence[BlockHash]],
    *,
    wait_s: float,
    hint: Hint | None,
) -> list[LookupResult]:
    ends_s = time.monotonic() + wait_s
    error: KvstoreError | None = None
    answers = []
    for chain in chains:
        if chain and error is None:
            answer = client.lookup(namespace, chain, wait_s=max(0.0, ends_s - time.monotonic()), hint=hint)
            error = answer.error
        else:
            answer = lookup_result([BlockState.MISS] * len(chain), error=error)
        answers.append(answer)
    return answers
