"""Puts and gets blocks for a long time and watches the daemon's memory.

    python bench/soak.py                      100,000 cycles, about six minutes
    python bench/soak.py --cycles 5000 --json

One cycle puts one new block and gets it back, each by a call of its own, so that every cycle takes a
reservation, a slot, a stream and an eviction. Exits 1 when the daemon's own memory grew by more than 5 MiB
after warm-up, when a byte was wrong, or when a lease or reservation was left over.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.progress import track

from kvstore.keys import hash_blocks
from kvstore.namespace import NONE, Namespace
from kvstore_client import Client

GROWTH_BYTES_MAX = 5 << 20
WARM_UP_SHARE = 0.2

NAMESPACE = Namespace(
    model="soak",
    weights_revision="1",
    tokenizer="none: token ids only",
    rope=NONE,
    dtype="float16",
    num_layers=4,
    num_kv_heads=2,
    head_dim=64,
    v_head_dim=64,
    tokens_per_block=16,
    layout="HND",
    shard=None,
    lora=NONE,
    tenant_salt=b"",
    k_precision="exact",
    v_precision="exact",
)


def own_bytes(pid: int) -> int:
    """Resident bytes of a process without the arena, which is shared memory."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))


def run(*, cycle_count: int, is_quiet: bool) -> dict[str, object]:
    payload_bytes = NAMESPACE.block_layout.payload_bytes
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        command = [sys.executable, "-m", "kvstore_client.cli", "serve", "--memory-capacity", "32MiB"]
        command += ["--grpc-port", "0", "--metrics-port", "0", "--socket-path", f"{folder}/s.sock"]
        command += ["--ready-file", str(ready), "--log-level", "error"]
        daemon = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while not ready.exists():
                assert daemon.poll() is None, "the daemon did not start"
                time.sleep(0.02)
            with Client(json.loads(ready.read_text())["unix_address"]) as client:
                wrong_count = miss_count = 0
                samples: list[int] = []
                into = np.empty(payload_bytes, dtype=np.uint8)
                started_s = time.monotonic()
                for cycle in track(range(cycle_count), "put and get", disable=is_quiet):
                    (block_hash,) = hash_blocks([cycle] * 16, tokens_per_block=16)
                    block = np.full(payload_bytes, cycle % 251, dtype=np.uint8)
                    client.put(NAMESPACE, [block_hash], [block])
                    if client.get(NAMESPACE, [block_hash], [into]).matched_count != 1:
                        miss_count += 1
                    elif not np.array_equal(into, block):
                        wrong_count += 1
                    if cycle % 200 == 0:
                        with client.acquire(NAMESPACE, [block_hash]):
                            samples.append(own_bytes(daemon.pid))
                took_s = time.monotonic() - started_s
                samples.append(own_bytes(daemon.pid))
                stats = client.stats()
        finally:
            daemon.terminate()
            daemon.wait()
    warm = samples[int(len(samples) * WARM_UP_SHARE) :]
    return {
        "cycles": cycle_count,
        "cycles_per_s": round(cycle_count / took_s, 1),
        "rss_after_warm_up_bytes": warm[0],
        "rss_at_end_bytes": warm[-1],
        "rss_growth_bytes": max(warm) - warm[0],
        "wrong_blocks": wrong_count,
        "missed_blocks": miss_count,
        "evicted_blocks": stats.evicted_count,
        "leases_left": stats.lease_count,
        "reservations_left": stats.reservation_count,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=100_000)
    parser.add_argument("--json", action="store_true", help="one JSON object, no progress bar")
    arguments = parser.parse_args()
    result = run(cycle_count=arguments.cycles, is_quiet=arguments.json)
    print(json.dumps(result, indent=2))
    is_good = (
        int(str(result["rss_growth_bytes"])) <= GROWTH_BYTES_MAX
        and not result["wrong_blocks"]
        and not result["leases_left"]
        and not result["reservations_left"]
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
