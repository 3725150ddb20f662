"""What hashing a prompt costs: block hashes of a list of ids, and of an array, beside BLAKE3 of the same bytes.

Medians of one core's time; waiting for the core is not counted. `--json` prints one object. The exit status is 1 when
the list takes longer than `--limit-ms`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from blake3 import blake3

from kvstore.keys import hash_blocks

# 128k tokens at 16 tokens per block = 8,192 blocks; BLAKE3 alone needs 4 ms for them.
DEFAULT_LIMIT_MS = 12.0
# Qwen and Gemma vocabularies: larger ids than these are not met.
VOCABULARY_COUNT = 262_144


def median_ms(run: Callable[[], object], *, round_count: int) -> float:
    times_s = []
    for _ in range(round_count):
        start_s = time.thread_time()
        run()
        times_s.append(time.thread_time() - start_s)
    return statistics.median(times_s) * 1e3


def measure(*, token_count: int, tokens_per_block: int, round_count: int) -> dict[str, float | int]:
    array = np.random.default_rng(0).integers(0, VOCABULARY_COUNT, token_count, dtype=np.int64)
    tokens = [int(token) for token in array]
    packed = array.astype("<u4").tobytes()
    step = tokens_per_block * 4
    blocks = [bytes(32) + packed[start : start + step] for start in range(0, len(packed), step)]

    def blake3_alone() -> None:
        hasher = blake3()
        for block in blocks:
            hasher.update(block)
            hasher.digest()
            hasher.reset()

    return {
        "token_count": token_count,
        "tokens_per_block": tokens_per_block,
        "block_count": token_count // tokens_per_block,
        "list_ms": median_ms(lambda: hash_blocks(tokens, tokens_per_block=tokens_per_block), round_count=round_count),
        "array_ms": median_ms(lambda: hash_blocks(array, tokens_per_block=tokens_per_block), round_count=round_count),
        "blake3_per_block_ms": median_ms(blake3_alone, round_count=round_count),
        "blake3_at_once_ms": median_ms(lambda: blake3(packed).digest(), round_count=round_count),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--tokens-per-block", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--limit-ms", type=float, default=DEFAULT_LIMIT_MS)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    figures = measure(token_count=options.tokens, tokens_per_block=options.tokens_per_block, round_count=options.rounds)
    figures["limit_ms"] = options.limit_ms
    if options.json:
        print(json.dumps({name: round(value, 3) for name, value in figures.items()}))
    else:
        for name, value in figures.items():
            print(f"{name:20} {value:,.2f}" if isinstance(value, float) else f"{name:20} {value:,}")
    return 0 if figures["list_ms"] <= options.limit_ms else 1


if __name__ == "__main__":
    sys.exit(main())
