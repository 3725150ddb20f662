"""Forks daemons and clients that are ready to run, so that hundreds can be killed in a minute.

Reads one JSON command a line on stdin and answers each with one on stdout. Everything is imported here and
nothing of gRPC is started, so a fork is as good as a fresh process.

    {"run": "client", "address": "unix:/...", "seed": 7}    -> {"pid": 123}
    {"run": "daemon", "arguments": ["--memory-capacity", ...]} -> {"pid": 124}
    {"run": "daemon", "arguments": [...], "crash_at": "nvme.after_sync:2"} -> {"pid": 125}
    {"wait": 123}                                              -> {"code": -9}
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import traceback
from typing import Any, NoReturn

import blocks  # beside this script
import numpy as np
import structlog  # noqa: F401  (imported for the children)
import uvloop  # noqa: F401

import kvstore_server.daemon
import kvstore_server.obs.logs  # noqa: F401
from kvstore.messages import BlockState
from kvstore_client import Client, ClientConfig
from kvstore_server.cli import serve
from kvstore_server.nvme import crash

WRONG_BYTES = 3


def run_client(address: str, seed: int) -> NoReturn:
    """Puts, gets, leases and checks until it is killed; exits with `WRONG_BYTES` when a hit is wrong."""
    rng = random.Random(seed)
    # Short cool-downs: the point is to be at work whenever something is killed.
    config = ClientConfig(lease_s=1.0, reservation_s=1.0, breaker_cooldown_initial_s=0.02, breaker_cooldown_max_s=0.05)
    client = Client(address, config=config)
    while True:
        space = rng.choice(blocks.NAMESPACES)
        hashes = blocks.chain(rng.randrange(blocks.CHAIN_COUNT))[: rng.randint(1, blocks.CHAIN_BLOCKS)]
        payload_bytes = space.block_layout.payload_bytes
        into = np.zeros((len(hashes), payload_bytes), dtype=np.uint8)
        match rng.randrange(3):
            case 0:
                client.put(space, hashes, [blocks.right_bytes(space, block_hash) for block_hash in hashes])
            case 1:
                client.acquire(space, hashes, lease_s=1.0)  # and never released: its expiry must do
            case 2:
                result = client.get(space, hashes, into)
                for block_hash, row, state in zip(hashes, into, result.states, strict=True):
                    if state is BlockState.HIT and not np.array_equal(row, blocks.right_bytes(space, block_hash)):
                        os._exit(WRONG_BYTES)


def run_daemon(arguments: list[str], crash_at: str) -> NoReturn:
    if crash_at:
        os.environ[crash.CRASH_VARIABLE] = crash_at
        importlib.reload(crash)  # what is armed is read when a process starts, and this one did so long ago
    serve.main(arguments, standalone_mode=False)
    os._exit(0)


def start(command: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        # The parent's pipes are not the child's: a reader of them must see the parent's death.
        quiet = os.open(os.devnull, os.O_RDWR)
        os.dup2(quiet, 0)
        os.dup2(quiet, 1)
        if command["run"] == "client":
            run_client(command["address"], command["seed"])
        run_daemon(command["arguments"], command.get("crash_at", ""))
    except BaseException:  # noqa: BLE001  (whatever it was, a forked child must not run on as the parent)
        traceback.print_exc()
        os._exit(1)


def main() -> None:
    for line in sys.stdin:
        command = json.loads(line)
        if "wait" in command:
            _, status = os.waitpid(command["wait"], 0)
            answer = {"code": os.waitstatus_to_exitcode(status)}
        else:
            answer = {"pid": start(command)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
