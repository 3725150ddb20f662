"""Our paths beside Redis, memcached, LMCache's server and Mooncake Store: the same blocks, in one run, in turn.

    make bench-peers                      everything, into bench/results/peers.json and docs/peers.svg
    .venv-peers/bin/python bench/peers/run.py --rounds 5 --out /tmp/peers.json

Each side has a client process and, but for memcpy and tcp, its own server or store. Every round measures one put and
one get of a batch on every side. A side that cannot be measured is null, with its reason.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from peer import PeerSpec

from kvstore import __version__
from kvstore.errors import KvstoreError
from kvstore_client.bench import blocks
from kvstore_client.bench.batches import Batches, cold_batch_count
from kvstore_client.bench.client_subject import ClientSpec
from kvstore_client.bench.figures import gb_per_s, rounded
from kvstore_client.bench.processes import Worker, ended_by_signals, private_daemon
from kvstore_client.bench.tcp import TcpSpec

ACTIONS = ("get", "put")
OURS = ("slab", "bulk", "grpc")
# Name of the side: peer, and the network it is reached by. What has a unix socket is measured over both.
PEERS = {
    "redis_raw_unix": ("redis_raw", "unix"),
    "redis_py_unix": ("redis_py", "unix"),
    "memcached_unix": ("memcached", "unix"),
    "redis_raw_tcp": ("redis_raw", "tcp"),
    "redis_py_tcp": ("redis_py", "tcp"),
    "memcached_tcp": ("memcached", "tcp"),
    "lmcache_tcp": ("lmcache", "tcp"),
    "mooncake_tcp": ("mooncake", "tcp"),
}
OVER_TCP = tuple(side for side, (_, network) in PEERS.items() if network == "tcp")


def commands(*, tcp: str, unix: str, block_count: int, block_bytes: int, batch_count: int) -> dict[str, list[str]]:
    revision = blocks.new_revision()
    size = {"block_count": block_count, "block_bytes": block_bytes, "batch_count": batch_count}
    found = {"tcp": TcpSpec(**size, seed=0).command()}
    for seed, transport in enumerate(OURS, start=1):
        address = unix if transport == "slab" else tcp
        spec = ClientSpec(**size, address=address, transport=transport, seed=seed, revision=revision)
        found[transport] = spec.command()
    for seed, (side, (peer, network)) in enumerate(PEERS.items(), start=10):
        found[side] = PeerSpec(**size, peer=peer, network=network, seed=seed).command()
    return found


def measure(*, block_count: int, block_bytes: int, round_count: int) -> dict[str, object]:
    batch_bytes = block_count * block_bytes
    batch_count = cold_batch_count(batch_bytes)
    memory = Batches(batch_count=batch_count, block_count=block_count, block_bytes=block_bytes, seed=99)
    reasons: dict[str, str] = {}
    workers: dict[str, Worker] = {}
    with ExitStack() as stack:
        kept_count = len(OURS) * batch_count * block_count
        daemon = stack.enter_context(
            private_daemon(
                capacity_bytes=blocks.capacity_bytes(block_count=kept_count, block_bytes=block_bytes),
                slab_bytes=blocks.slab_bytes(block_bytes),
            )
        )
        sides = commands(
            tcp=daemon.tcp, unix=daemon.unix, block_count=block_count, block_bytes=block_bytes, batch_count=batch_count
        )
        for side, command in sides.items():
            worker = stack.enter_context(Worker(command, name=side))
            try:
                worker.wait_ready()
            except KvstoreError as error:
                reasons[side] = str(error)
                say(f"{side}: not measured: {error}")
            else:
                workers[side] = worker
        limit = _Memcpy(memory)
        times_s: dict[tuple[str, str], list[float]] = {(side, action): [] for side in workers for action in ACTIONS}
        memcpy_times_s: list[float] = []
        for number in range(round_count):
            say(f"round {number + 1} of {round_count}")
            memcpy_times_s.append(limit.measure(number % batch_count))
            for position, (side, action) in enumerate(list(times_s)):
                if side in reasons:
                    continue
                batch = (number + position) % batch_count
                try:
                    times_s[side, action] += workers[side].measure(action, [batch]).times_s
                except KvstoreError as error:
                    reasons[side] = str(error)
                    say(f"{side}: given up: {error}")
        for side, worker in workers.items():
            if side not in reasons:
                try:
                    worker.check()
                except KvstoreError as error:
                    reasons[side] = str(error)
    speeds = {
        (side, action): gb_per_s(batch_bytes, samples)
        for (side, action), samples in times_s.items()
        if side not in reasons
    }
    measured: dict[str, object] = {}
    for side in sides:
        measured[side] = {f"{action}_gb_per_s": rounded_or_none(speeds.get((side, action))) for action in ACTIONS} | (
            {"reason": reasons[side]} if side in reasons else {}
        )
    about = {
        "machine": f"{len(os.sched_getaffinity(0))} cores, {memory_gib()} GiB, {platform.machine()}, no GPU",
        "block_count": block_count,
        "block_bytes": block_bytes,
        "rounds": round_count,
        "versions": versions(),
        "memcpy_gb_per_s": rounded(gb_per_s(batch_bytes, memcpy_times_s)),
    }
    return about | ratios(speeds) | {"sides": measured}


def ratios(speeds: Mapping[tuple[str, str], float]) -> dict[str, float | None]:
    """Shared memory against the best peer on the same node; the network paths against the best one over TCP."""
    found: dict[str, float | None] = {}
    for action in ACTIONS:
        for ours, name, peers in (
            ("slab", "slab_vs_best_peer", tuple(PEERS)),
            ("bulk", "bulk_vs_best_peer", OVER_TCP),
            ("grpc", "grpc_vs_mooncake", ("mooncake_tcp",)),
        ):
            best = max((speeds[peer, action] for peer in peers if (peer, action) in speeds), default=None)
            is_there = best is not None and (ours, action) in speeds
            found[f"{name}_{action}"] = rounded(speeds[ours, action] / best) if is_there and best else None
    return found


class _Memcpy:
    """The limit of everything that moves bytes within a node, measured in this process."""

    def __init__(self, memory: Batches) -> None:
        self._memory = memory

    def measure(self, batch: int) -> float:

        started_s = time.monotonic()
        self._memory.copy(batch)
        return time.monotonic() - started_s


def rounded_or_none(value: float | None) -> float | None:
    return None if value is None else rounded(value)


def memory_gib() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30))


def versions() -> dict[str, str]:
    found = {"kvstore": __version__, "python": platform.python_version()}
    for package in ("redis", "lmcache", "mooncake-transfer-engine-non-cuda", "grpcio"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    for program in ("redis-server", "memcached"):
        path = shutil.which(program)
        if path is not None:
            text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
            found[program] = next(
                word.removeprefix("v=") for word in text.split() if word.removeprefix("v=")[:1].isdigit()
            )
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=16, help="blocks in one call")
    parser.add_argument("--block-bytes", type=int, default=2 << 20)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, help="file for the JSON object; stdout when not given")
    arguments = parser.parse_args()
    with ended_by_signals():
        result = measure(block_count=arguments.blocks, block_bytes=arguments.block_bytes, round_count=arguments.rounds)
    text = json.dumps(result, indent=2)
    if arguments.out is None:
        print(text)
        return 0
    arguments.out.write_text(text + "\n")
    for name, value in result.items():
        if "_vs_" in name:
            print(f"{name:26} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
