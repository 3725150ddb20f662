"""Draws what run.py has measured: `python bench/peers/plot.py bench/results/peers.json docs/peers.svg`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

LABELS = {
    "slab": "kvstore, shared slab",
    "bulk": "kvstore, bulk port",
    "grpc": "kvstore, gRPC stream",
    "redis_raw_unix": "Redis, raw client, unix socket",
    "redis_py_unix": "Redis, redis-py, unix socket",
    "memcached_unix": "memcached, raw client, unix socket",
    "redis_raw_tcp": "Redis, raw client, TCP",
    "redis_py_tcp": "Redis, redis-py, TCP",
    "memcached_tcp": "memcached, raw client, TCP",
    "lmcache_tcp": "LMCache server, raw client, TCP",
    "mooncake_tcp": "Mooncake Store, TCP",
    "tcp": "limit: one raw TCP connection",
}
COLORS = {"get": "#1f6f8b", "put": "#e08e45"}
BAR_HEIGHT = 0.38


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    result = json.loads(source.read_text())
    sides = [side for side in LABELS if side in result["sides"]]
    # Text stays text, and ids do not change from one drawing to the next.
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "peers", "font.size": 9}
    figure, axes = plt.subplots(figsize=(8, 0.45 * len(sides) + 1.2), layout="constrained")
    for offset, action in ((-BAR_HEIGHT / 2, "get"), (BAR_HEIGHT / 2, "put")):
        speeds = [result["sides"][side][f"{action}_gb_per_s"] or 0.0 for side in sides]
        rows = [row + offset for row in range(len(sides))]
        bars = axes.barh(rows, speeds, BAR_HEIGHT, label=action, color=COLORS[action])
        axes.bar_label(bars, [f"{speed:.2f}" if speed else "not measured" for speed in speeds], padding=3, fontsize=7)
    limit = result["memcpy_gb_per_s"]
    axes.axvline(limit, color="#555555", linestyle="--", linewidth=1, label=f"limit: memcpy, {limit:.1f}")
    axes.set_yticks(range(len(sides)), [LABELS[side] for side in sides])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(
        f"GB/s, one client, {result['block_count']} blocks of {result['block_bytes'] / (1 << 20):g} MiB in a call; "
        f"{result['machine']}"
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(target, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
