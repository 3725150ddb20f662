"""An engine beside a sidecar, as a process to be killed or stopped: ADDRESS NAMESPACE ACT HASH…

It says where it is, one word a line, and goes on when it is told to, one line on stdin each. Without torch, so that it
starts at once.
"""

from __future__ import annotations

import sys

import numpy as np

from kvstore.keys import BlockHash
from kvstore.namespace import Namespace
from kvstore_client.agent.client import AgentClient


def say(place: str) -> None:
    """And wait to be told to go on."""
    print(place, flush=True)
    sys.stdin.readline()


def content(block_hash: BlockHash, size_bytes: int) -> bytes:
    """As `tests.agent.fakes` has it."""
    return np.random.default_rng(np.frombuffer(block_hash, dtype=np.uint64)).bytes(size_bytes)


def store(client: AgentClient, namespace: Namespace, hashes: list[BlockHash]) -> None:
    with client.reserve(namespace, hashes) as reserved:
        say("reserved")
        slots = [slot for slot in reserved.slots if slot is not None]
        blocks = [content(block_hash, len(slots[0])) for block_hash in hashes]
        for slot, block in zip(slots, blocks, strict=True):
            slot[: len(slot) // 2] = block[: len(slot) // 2]
        say("half-copied")
        for slot, block in zip(slots, blocks, strict=True):
            slot[:] = block
        say("copied")
        stored = reserved.commit()
    say("committed" if all(stored) else "refused")


def load(client: AgentClient, namespace: Namespace, hashes: list[BlockHash]) -> None:
    with client.acquire(namespace, hashes) as acquired:
        say("acquired" if None not in acquired.places else "missed")
        copies = [bytes(slot) for slot in acquired.slots if slot is not None]
        is_valid = acquired.is_valid()
    is_right = copies == [content(block_hash, len(copies[0])) for block_hash in hashes]
    say(f"{'right' if is_right else 'wrong'} and {'valid' if is_valid else 'expired'}")


if __name__ == "__main__":
    address, encoded, act, *hashes = sys.argv[1:]
    {"store": store, "load": load}[act](
        AgentClient(address),
        Namespace.decode(bytes.fromhex(encoded)),
        [BlockHash(bytes.fromhex(block_hash)) for block_hash in hashes],
    )
