"""What the store does for an engine, in a terminal: read from /metrics of vLLM and of the daemon every two seconds.

python examples/vllm/dashboard.py [http://127.0.0.1:8000 [http://127.0.0.1:7451]]
python examples/vllm/dashboard.py --once
"""

from __future__ import annotations

import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress

ENGINE, DAEMON = "http://127.0.0.1:8000", "http://127.0.0.1:7451"
PERIOD_S = 2.0
CLEAR = "\x1b[2J\x1b[H"


def read(address: str) -> dict[str, float]:
    """Sums over labels, by name; those of the daemon's tiers also by `NAME{tier}`."""
    sums: dict[str, float] = defaultdict(float)
    with urllib.request.urlopen(f"{address}/metrics", timeout=5) as response:
        for line in response.read().decode().splitlines():
            if line.startswith("#") or not line:
                continue
            name, _, value = line.rpartition(" ")
            plain, _, labels = name.partition("{")
            sums[plain] += float(value)
            for label in labels.rstrip("}").split(","):
                if label.startswith("tier="):
                    sums[f"{plain}{{{label[6:-1]}}}"] += float(value)
    return sums


def share(part: float, whole: float) -> str:
    return f"{part / whole:6.1%}" if whole else "     -"


def size(count_bytes: float) -> str:
    return f"{count_bytes / (1 << 30):.2f} GiB"


def page(engine: Mapping[str, float], daemon: Mapping[str, float], rates: Mapping[str, float]) -> str:
    prompt, local = engine["vllm:prompt_tokens_total"], engine["vllm:prefix_cache_hits_total"]
    loaded = engine["vllm:kvstore_load_tokens_total"]
    failed, stored = engine["vllm:kvstore_load_failed_blocks_total"], engine["vllm:kvstore_store_blocks_total"]
    dropped = engine["vllm:kvstore_store_dropped_blocks_total"] + engine["vllm:kvstore_store_skipped_blocks_total"]
    saved_s, load_s = engine["vllm:kvstore_saved_seconds_total"], engine["vllm:kvstore_load_seconds_total"]
    given_up = engine["vllm:kvstore_lookup_timeouts_total"] + engine["vllm:kvstore_lookup_errors_total"]
    lines = [
        f"prompt tokens          {prompt:14,.0f}   {rates['vllm:prompt_tokens_total']:10,.0f} /s",
        f"  the engine's own     {local:14,.0f}   {share(local, prompt)}",
        f"  from the store       {loaded:14,.0f}   {share(loaded, prompt)}",
        f"seconds saved          {saved_s:14,.1f}   of computing, at this engine's pace",
        f"seconds of loading     {load_s:14,.3f}   beside the engine's steps",
        f"blocks that failed     {failed:14,.0f}   computed instead",
        f"blocks stored          {stored:14,.0f}   {dropped:,.0f} dropped",
        f"requests not waited for{given_up:14,.0f}   the store was silent or away",
        "",
    ]
    for tier in ("memory", "nvme"):
        capacity = daemon[f"kvstore_store_capacity_bytes{{{tier}}}"]
        if capacity:
            used, blocks = daemon[f"kvstore_store_used_bytes{{{tier}}}"], daemon[f"kvstore_store_blocks{{{tier}}}"]
            lines.append(f"{tier:8} {size(used)} of {size(capacity)} {share(used, capacity)}, {blocks:,.0f} blocks")
    return "\n".join(lines)


def main() -> None:
    arguments = [argument for argument in sys.argv[1:] if argument != "--once"]
    engine_address, daemon_address = (*arguments, *(ENGINE, DAEMON)[len(arguments) :])
    before: Mapping[str, float] = {}
    while True:
        try:
            engine, daemon = read(engine_address), read(daemon_address)
        except OSError as error:
            print(f"{error}; the engine is asked at {engine_address}, the daemon at {daemon_address}")
            if "--once" in sys.argv:
                sys.exit(1)
            time.sleep(PERIOD_S)
            continue
        rates = defaultdict(
            float, {name: (value - before.get(name, value)) / PERIOD_S for name, value in engine.items()}
        )
        if "--once" in sys.argv:
            print(page(engine, daemon, rates))
            return
        print(CLEAR + page(engine, daemon, rates), flush=True)
        before = engine
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
