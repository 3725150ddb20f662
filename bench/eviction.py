"""What choosing victims costs: time per use of a block and memory per block, by policy, beside a bare dict.

Sessions of chats and agents over shared heads, made from a seed, in a tier that holds a fifth of what they use. A use
is a block of a request's chain: found and touched, or put in for the price of another. Medians of one core's time;
waiting for the core is not counted. Memory is all that the engine holds once the tier is full, ghosts and what it
learned included; keys are the caller's. `--json` prints one object. The exit status is 1 when the
default policy needs more than `--limit-us` or `--limit-bytes`.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
import tracemalloc
from dataclasses import dataclass

from kvstore.eviction import NO_HINT, POLICIES, Evictor, Finish, Request

LIMIT_US = 3.0
LIMIT_BYTES = 150.0
HEAD_COUNT = 40
HEAD_BLOCKS_MAX = 40
SESSIONS_AT_ONCE = 120
NEW_BLOCKS_MAX = 40
"""Per request: their mean is that of public traces, 8 to 20 blocks of 512 tokens."""
BATCH_BLOCKS = 64
"""What makes room at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    time_s: float
    chain: list[int]
    request: Request


def workload(*, request_count: int, seed: int, with_hints: bool) -> list[Arrival]:
    rng = random.Random(seed)
    next_key = HEAD_COUNT * HEAD_BLOCKS_MAX
    sessions: list[tuple[int, bool, list[int]]] = []
    turns: dict[int, int] = {}
    arrivals = []
    time_s = 0.0
    for number in range(request_count):
        time_s += rng.expovariate(3.0)
        if len(sessions) < SESSIONS_AT_ONCE or rng.random() < 0.15:
            head = min(int(rng.paretovariate(0.8)), HEAD_COUNT) - 1
            chain = list(range(head * HEAD_BLOCKS_MAX, head * HEAD_BLOCKS_MAX + rng.randint(1, HEAD_BLOCKS_MAX)))
            sessions.append((number, rng.random() < 0.5, chain))
        # Those that came lately are the ones that come back.
        session_id, is_agent, chain = sessions[
            -1 - min(int(rng.expovariate(0.05)), SESSIONS_AT_ONCE - 1, len(sessions) - 1)
        ]
        new_count = rng.randint(1, NEW_BLOCKS_MAX // 4 if is_agent else NEW_BLOCKS_MAX)
        chain += range(next_key, next_key + new_count)
        next_key += new_count
        turns[session_id] = turns.get(session_id, 0) + 1
        request = Request(
            session_id=session_id,
            turn=turns[session_id],
            input_tokens=512 * len(chain),
            output_tokens=rng.randint(20, 800),
            finish=Finish.TOOL_USE if is_agent else Finish.END_TURN,
        )
        arrivals.append(Arrival(time_s=time_s, chain=list(chain), request=request if with_hints else NO_HINT))
    return arrivals


def one(_: int) -> int:
    return 1


def serve(evictor: Evictor[int], arrivals: list[Arrival]) -> float:
    """Returns the share of blocks that were found."""
    found_count = use_count = 0
    for arrival in arrivals:
        chain, now_s = arrival.chain, arrival.time_s
        matched_count = evictor.matched_count(chain)
        use = evictor.begin(arrival.request, now_s=now_s, chain_blocks=len(chain), matched_blocks=matched_count)
        evictor.touch_chain(chain[:matched_count], use=use)
        parent = chain[matched_count - 1] if matched_count else None
        held = chain[:matched_count][-1:]
        evictor.hold(held)
        for start in range(matched_count, len(chain), BATCH_BLOCKS):
            batch = chain[start : start + BATCH_BLOCKS]
            excess_count = len(evictor) + len(batch) - evictor.capacity_blocks
            if excess_count > 0:
                evictor.pop_coldest(goal_bytes=excess_count, size_bytes_of=one, now_s=now_s)
            evictor.insert_chain(batch, parent=parent, use=use)
            parent = batch[-1]
        evictor.unhold(held)
        found_count += matched_count
        use_count += len(chain)
    return found_count / use_count


def measure(
    arrivals: list[Arrival], *, policies: list[str], round_count: int
) -> dict[str, float | int | dict[str, dict[str, float]]]:
    block_count = len({key for arrival in arrivals for key in arrival.chain})
    use_count = sum(len(arrival.chain) for arrival in arrivals)
    capacity_blocks = block_count // 5
    times_us: dict[str, list[float]] = {name: [] for name in ("dict", *policies)}
    hit_rates: dict[str, float] = {}
    bare = dict.fromkeys(key for arrival in arrivals for key in arrival.chain)
    for _ in range(round_count):  # interleaved, as the machine's speed changes
        start_s = time.thread_time()
        for arrival in arrivals:
            for key in arrival.chain:
                bare[key]
        times_us["dict"].append((time.thread_time() - start_s) / use_count * 1e6)
        for policy in policies:
            evictor: Evictor[int] = Evictor(policy, capacity_blocks=capacity_blocks)
            start_s = time.thread_time()
            hit_rates[policy] = serve(evictor, arrivals)
            times_us[policy].append((time.thread_time() - start_s) / use_count * 1e6)
    return {
        "request_count": len(arrivals),
        "use_count": use_count,
        "block_count": block_count,
        "capacity_blocks": capacity_blocks,
        "dict_us_per_access": statistics.median(times_us["dict"]),
        "policies": {
            policy: {
                "us_per_access": statistics.median(times_us[policy]),
                "bytes_per_block": bytes_per_block(policy, arrivals, capacity_blocks=capacity_blocks),
                "hit_rate": hit_rates[policy],
            }
            for policy in policies
        },
    }


def bytes_per_block(policy: str, arrivals: list[Arrival], *, capacity_blocks: int) -> float:
    tracemalloc.start()
    evictor: Evictor[int] = Evictor(policy, capacity_blocks=capacity_blocks)
    serve(evictor, arrivals)
    gc.collect()
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held_bytes / len(evictor)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--policy", action="append", choices=POLICIES, help="one of them; may be given again")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-hints", action="store_true", help="clients tell nothing of their requests")
    parser.add_argument("--limit-us", type=float, default=LIMIT_US)
    parser.add_argument("--limit-bytes", type=float, default=LIMIT_BYTES)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    arrivals = workload(request_count=arguments.requests, seed=arguments.seed, with_hints=not arguments.no_hints)
    figures = measure(arrivals, policies=arguments.policy or list(POLICIES), round_count=arguments.rounds)
    by_policy = figures["policies"]
    assert isinstance(by_policy, dict)
    if arguments.json:
        print(json.dumps(figures, indent=2))
    else:
        counts = (figures[name] for name in ("use_count", "block_count", "capacity_blocks"))
        print("{:,} uses of {:,} blocks, {:,} at once".format(*counts))
        print(f"{'bare dict':12} {figures['dict_us_per_access']:6.2f} us per use")
        for policy, cost in by_policy.items():
            print(
                f"{policy:12} {cost['us_per_access']:6.2f} us per use {cost['bytes_per_block']:6.0f} bytes per block"
                f" {cost['hit_rate']:7.1%} found"
            )
    judged = by_policy.get(POLICIES[0])  # the default; the others are there to compare it with
    is_within = judged is None or (
        judged["us_per_access"] <= arguments.limit_us and judged["bytes_per_block"] <= arguments.limit_bytes
    )
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
