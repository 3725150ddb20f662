"""Checksums taken ahead: the right ones, in any order, and no thread looks at a block once they are closed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from kvstore.envelope import checksum
from kvstore_client.paths.hashing import Hashing, HashThreads

MIB = 1 << 20


def some_blocks(*sizes: int) -> list[memoryview]:
    random = Random(7)
    return [memoryview(random.randbytes(size)) for size in sizes]


@pytest.mark.parametrize(
    "sizes",
    [
        (),
        (4096,) * 3,
        (2 * MIB,) * 3,
        (64 << 10,) * 50,
        (1, 3 * MIB, 5, 0, 600_000, 700_000, 2),
    ],
    ids=["none", "too-small-for-a-thread", "large", "many-small", "mixed"],
)
def test_each_block_has_its_own_checksum_whatever_the_order(sizes: Sequence[int]) -> None:
    blocks = some_blocks(*sizes)
    hashing = HashThreads().begin(blocks)
    order = list(range(len(blocks)))
    Random(3).shuffle(order)
    assert {index: hashing.take(index) for index in order} == dict(enumerate(map(checksum, blocks)))
    hashing.close()


def test_whoever_needs_one_does_not_wait_for_threads_that_are_busy_with_something_else() -> None:
    blocks = some_blocks(2 * MIB, 2 * MIB)
    go_on = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        executor.submit(go_on.wait)
        hashing = Hashing(blocks, executor)
        assert [hashing.take(1), hashing.take(0)] == [checksum(blocks[1]), checksum(blocks[0])]
        hashing.close()
        go_on.set()


def test_after_closing_the_memory_is_the_callers_alone() -> None:
    for _ in range(20):
        memory = bytearray(4 * MIB)
        hashing = HashThreads().begin([memoryview(memory)[start : start + MIB] for start in range(0, 4 * MIB, MIB)])
        hashing.close()
        del hashing
        memory.clear()  # fails while anybody has a buffer of it
