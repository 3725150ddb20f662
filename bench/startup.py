"""How long `kvstore serve` takes until it serves, and what it needs beside its arena.

    python bench/startup.py --json

Prints medians of several starts with a small arena; the limit beside them is the start of a bare interpreter that
imports grpc, measured in turn with each start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

IDLE_S = 1.0


def start_daemon(folder: Path) -> tuple[float, int]:
    """Seconds until the daemon serves, and its own resident bytes once it has been idle for a while."""
    ready = folder / "ready.json"
    command = [str(Path(sys.executable).with_name("kvstore")), "serve", "--memory-capacity", "64MiB"]
    command += ["--grpc-port", "0", "--metrics-port", "0", "--socket-path", str(folder / "s.sock")]
    command += ["--ready-file", str(ready), "--log-level", "error"]
    started_s = time.perf_counter()
    daemon = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not ready.exists():
            if daemon.poll() is not None:
                raise SystemExit(f"the daemon ended with {daemon.returncode}")
            time.sleep(0.002)
        took_s = time.perf_counter() - started_s
        time.sleep(IDLE_S)
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines())
        return took_s, sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))
    finally:
        daemon.terminate()
        daemon.wait()


def start_interpreter() -> float:
    started_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import grpc.aio"], check=True)
    return time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    starts, sizes, limits = [], [], []
    for _ in range(arguments.runs):
        limits.append(start_interpreter())
        with tempfile.TemporaryDirectory() as folder:
            took_s, own_bytes = start_daemon(Path(folder))
        starts.append(took_s)
        sizes.append(own_bytes)
    result = {
        "runs": arguments.runs,
        "start_s_p50": round(statistics.median(starts), 3),
        "start_s_max": round(max(starts), 3),
        "import_grpc_s_p50": round(statistics.median(limits), 3),
        "start_vs_import_grpc": round(statistics.median(starts) / statistics.median(limits), 2),
        "rss_beside_arena_mib": round(max(sizes) / (1 << 20), 1),
    }
    print(json.dumps(result, indent=2) if arguments.json else "\n".join(f"{k:24} {v}" for k, v in result.items()))


if __name__ == "__main__":
    main()
