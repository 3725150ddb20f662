"""How many blocks go into one request."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.envelope import ENVELOPE_BYTES
from kvstore.namespace import Namespace
from kvstore_client.config import ClientConfig

_DATA_COUNT_MAX = 1024
"""Blocks of one transfer, however small: reserving and committing so many takes the daemon some 20 ms, in which it
answers nobody else."""


def hash_batches(config: ClientConfig, *, block_count: int) -> Iterator[slice]:
    """Batches of requests that carry hashes alone."""
    return _split(block_count, step=config.batch_count_max)


def data_batches(config: ClientConfig, namespace: Namespace, *, block_count: int) -> Iterator[slice]:
    """Batches of transfers; one block always fits, however large."""
    block_bytes = ENVELOPE_BYTES + namespace.stored_bytes
    count_max = min(config.batch_count_max, _DATA_COUNT_MAX)
    return _split(block_count, step=max(1, min(count_max, config.batch_bytes_max // block_bytes)))


def _split(block_count: int, *, step: int) -> Iterator[slice]:
    for start in range(0, block_count, step):
        yield slice(start, min(start + step, block_count))
