"""A process that puts, gets, leases and views blocks without end, and says so when it finds a wrong byte.

    python -m tests.client.slab_worker ADDRESS LEASE_S

Prints one line per round: what it found, or `wrong`.
"""

from __future__ import annotations

import sys

import numpy as np

from kvstore.keys import BlockHash
from kvstore.messages import BlockState
from kvstore_client import Client, ClientConfig
from tests.client.builders import chain, namespace

BLOCK_BYTES = 1 << 20
BLOCK_COUNT = 16


def block_of(block_hash: BlockHash) -> bytes:
    """Every block's content follows from its hash."""
    return block_hash * (BLOCK_BYTES // len(block_hash))


def main() -> None:
    lease_s = float(sys.argv[2])
    config = ClientConfig(
        transport="slab",
        data_timeout_base_s=lease_s,  # leases of transfers last as long as those may take
        data_rate_min_bytes_per_s=1 << 40,
        lease_s=lease_s,
        breaker_cooldown_initial_s=0.01,
        breaker_cooldown_max_s=0.02,
    )
    space, hashes = namespace(model="worker", payload_bytes=BLOCK_BYTES), chain(BLOCK_COUNT, seed=7)
    blocks = [np.frombuffer(block_of(block_hash), np.uint8) for block_hash in hashes]
    memory = np.empty((BLOCK_COUNT, BLOCK_BYTES), np.uint8)
    with Client(sys.argv[1], config=config) as client:
        while True:
            stored = client.put(space, hashes, blocks)
            hit_count = wrong_count = 0
            for _ in range(8):
                memory[:] = 0
                loaded = client.get(space, hashes, memory)
                for index, state in enumerate(loaded.states):
                    hit_count += state is BlockState.HIT
                    wrong_count += state is BlockState.HIT and not np.array_equal(memory[index], blocks[index])
            lease, views = client.acquire(space, hashes), client.view(space, hashes)
            lease.release()
            views.release()
            print("wrong" if wrong_count else f"{stored.stored_count} stored, {hit_count} hits", flush=True)


if __name__ == "__main__":
    main()
