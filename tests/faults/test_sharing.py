"""Who gets whose blocks: only those whose every field agrees, and always the right ones.

Kinds of fault (users' reports): "layout changed between writer and reader, cache hit anyway", "sessions answered with
other sessions' facts", "LoRA missing from the key", "time to first token reveals other tenants' prompts".
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvstore.messages import BlockState
from kvstore.namespace import Namespace, Shard
from kvstore_client import Client, ClientConfig
from kvstore_client.results import PutState
from tests.conftest import DaemonProcess

from . import blocks

OTHERS = {
    "model": "another",
    "weights_revision": "2",
    "tokenizer": "another",
    "rope": '{"theta":1000000.0}',
    "dtype": "bfloat16",  # as many bytes, other meaning
    "layout": "NHD",
    "shard": Shard(tp_rank=0, tp_size=2),
    "lora": "digest of an adapter",
    "tenant_salt": b"another tenant",
}
"""One other value for each field that leaves the bytes of a block the same, so that nothing else could refuse it."""


@pytest.mark.parametrize("field", OTHERS)
def test_a_reader_that_differs_in_any_field_misses(daemon: DaemonProcess, field: str) -> None:
    hashes = blocks.chain(1)
    reader = dataclasses.replace(blocks.SMALL, **{field: OTHERS[field]})
    into = np.zeros((len(hashes), blocks.SMALL.block_layout.payload_bytes), dtype=np.uint8)
    with Client(daemon.unix_address) as client:
        stored = client.put(blocks.SMALL, hashes, [blocks.right_bytes(blocks.SMALL, one) for one in hashes])
        assert set(stored.states) == {PutState.STORED}
        found = client.lookup(reader, hashes)
        assert set(found.states) == {BlockState.MISS}
        assert found.error is None
        assert client.get(reader, hashes, into).matched_count == 0
        assert not into.any()
        assert client.get(blocks.SMALL, hashes, into).matched_count == len(hashes)


def test_sessions_never_get_each_others_blocks_under_pressure(start_daemon: Callable[..., DaemonProcess]) -> None:
    """120 sessions, each with bytes of its own, in a store that holds a part, with short requests in between."""
    daemon = start_daemon("--memory-capacity", "16MiB")
    sessions = [dataclasses.replace(blocks.SMALL, tenant_salt=f"tenant {number}".encode()) for number in range(4)]

    def turn(seed: int) -> tuple[int, int]:
        rng = random.Random(seed)
        hit_count = wrong_count = 0
        with Client(daemon.unix_address, config=ClientConfig(control_timeout_s=20, data_timeout_base_s=20)) as client:
            for _ in range(80):
                space = rng.choice(sessions)
                hashes = blocks.chain(rng.randrange(30))[: rng.choice((1, 1, blocks.CHAIN_BLOCKS))]
                into = np.zeros((len(hashes), space.block_layout.payload_bytes), dtype=np.uint8)
                result = client.get(space, hashes, into)
                for block_hash, row, state in zip(hashes, into, result.states, strict=True):
                    hit_count += state is BlockState.HIT
                    wrong_count += state is BlockState.HIT and not np.array_equal(row, own_bytes(space, block_hash))
                rest = hashes[result.matched_count :]
                parent = hashes[result.matched_count - 1] if result.matched_count else None
                client.put(space, rest, [own_bytes(space, one) for one in rest], parent_hash=parent)
        return hit_count, wrong_count

    def own_bytes(space: Namespace, block_hash: bytes) -> np.ndarray:
        return blocks.right_bytes(space, block_hash) ^ np.uint8(space.id[0])

    with ThreadPoolExecutor(4) as threads:
        turns = list(threads.map(turn, range(8)))
    with Client(daemon.unix_address) as client:
        stats = client.stats()
    assert sum(wrong for _, wrong in turns) == 0
    assert sum(hits for hits, _ in turns) > 50
    assert stats.evicted_count > 100
    assert stats.used_bytes <= stats.capacity_bytes
    assert stats.corrupt_count == 0
    assert (stats.lease_count, stats.reservation_count) == (0, 0)
