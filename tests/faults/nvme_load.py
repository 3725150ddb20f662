"""Daemons with an NVMe tier that are killed and started again, and clients that keep them busy all the while."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import yaml

from kvstore import messages as m
from kvstore import wire
from kvstore.keys import BlockHash, pack_hashes
from kvstore.messages import BlockState, NvmeStats, StoreStats, Tier
from kvstore.namespace import Namespace
from kvstore.wire import Method
from kvstore_client import Client, ClientConfig

from . import blocks

SMALL = blocks.SMALL
"""32 KiB a block."""
MEDIUM = blocks.namespace("medium", head_dim=128)
"""256 KiB a block: a batch of 16 takes several reads and writes at once."""
SPACES = (SMALL, MEDIUM)

QUICK = {"breaker_cooldown_initial_s": 0.02, "breaker_cooldown_max_s": 0.05}
"""For clients that are to be at work again as soon as a daemon is back."""
_WAIT_S_MAX = 30.0
_CALL_S_MAX = 20.0


class Zygote:
    """Forks daemons that are ready to run; see zygote.py. What they log is in `log_path`."""

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path
        self._pids: set[int] = set()
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("zygote.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")},
            )

    def start(self, arguments: Sequence[str], *, crash_at: str) -> int:
        pid = self._ask(run="daemon", arguments=list(arguments), crash_at=crash_at)["pid"]
        self._pids.add(pid)
        return pid

    def wait(self, pid: int) -> int:
        """The exit code, once it has ended."""
        code = self._ask(wait=pid)["code"]
        self._pids.discard(pid)
        return code

    def close(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        self._process.communicate()

    def _ask(self, **command: Any) -> dict[str, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer: dict[str, int] = json.loads(self._process.stdout.readline())
        return answer


class NvmeDaemon:
    """32 MiB of memory above a folder of the NVMe tier, of which each start finds what the one before it has left."""

    def __init__(self, zygote: Zygote, folder: Path, *, nvme: dict[str, str]) -> None:
        self.tier_folder = folder / "tier"
        self.tier_folder.mkdir()
        self.unix_address = f"unix:{folder / 's.sock'}"
        self._zygote = zygote
        self._ready = folder / "ready.json"
        config = folder / "kvstore.yaml"
        sections = {
            "memory": {"capacity": "32MiB", "slab_size": "4MiB"},
            "nvme": {"path": str(self.tier_folder), "free_reserve": "0", **nvme},
            "grpc": {"port": 0, "socket_path": str(folder / "s.sock")},
            "metrics": {"port": 0},
        }
        config.write_text(yaml.safe_dump(sections))
        self._arguments = ["--config", str(config), "--ready-file", str(self._ready), "--log-level", "info"]
        self._pid: int | None = None

    @property
    def is_started(self) -> bool:
        return self._pid is not None

    def begin(self, *, crash_at: str = "") -> None:
        """Starts it and does not wait; `crash_at` is as in kvstore_server/nvme/crash.py."""
        assert self._pid is None, "the daemon is running already"
        self._ready.unlink(missing_ok=True)
        self._pid = self._zygote.start(self._arguments, crash_at=crash_at)

    def start(self, *, crash_at: str = "") -> None:
        """Returns once it serves, or was killed where it was to be."""
        self.begin(crash_at=crash_at)
        deadline_s = time.monotonic() + _WAIT_S_MAX
        while not self._ready.exists():
            if self.has_ended():
                assert crash_at, f"the daemon did not start:\n{self.log()}"
                return
            assert time.monotonic() < deadline_s, f"the daemon does not start:\n{self.log()}"
            time.sleep(0.002)

    def has_ended(self, *, within_s: float = 0.0) -> bool:
        assert self._pid is not None, "the daemon is not running"
        descriptor = os.pidfd_open(self._pid)
        try:
            return bool(select.select([descriptor], [], [], within_s)[0])
        finally:
            os.close(descriptor)

    def kill(self) -> None:
        """SIGKILL; fails if the daemon has ended in any other way before."""
        self._end(signal.SIGKILL, code=-signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM; fails unless it ends well."""
        self._end(signal.SIGTERM, code=0)

    def log(self) -> str:
        return self._zygote.log_path.read_text()[-4000:]

    def _end(self, number: signal.Signals, *, code: int) -> None:
        assert self._pid is not None, "the daemon is not running"
        os.kill(self._pid, number)
        found = self._zygote.wait(self._pid)
        self._pid = None
        assert found == code, f"the daemon ended with {found}, not {code}:\n{self.log()}"


class Seen(NamedTuple):
    """What one lookup said of blocks of one namespace."""

    hashes: list[BlockHash]
    states: bytes
    tiers: bytes
    matched_count: int

    @property
    def hits(self) -> set[BlockHash]:
        hit = int(BlockState.HIT)
        return {one for one, state in zip(self.hashes, self.states, strict=True) if state == hit}

    @property
    def durable(self) -> set[BlockHash]:
        """Those that memory has not, and the disk has: whoever hears so may rely on it."""
        nvme = int(Tier.NVME)
        return {one for one, tier in zip(self.hashes, self.tiers, strict=True) if tier == nvme}


class Observer:
    """Asks one daemon what it has, and where, which clients are not told."""

    def __init__(self, unix_address: str) -> None:
        self._channel = grpc.insecure_channel(unix_address)
        for space in SPACES:
            size_bytes = space.block_layout.payload_bytes
            self._call(wire.OPEN_NAMESPACE, m.OpenNamespaceRequest(namespace=space, payload_bytes=size_bytes))

    def look(self, space: Namespace, hashes: list[BlockHash]) -> Seen:
        request = m.LookupBlocksRequest(namespace_id=space.id, block_hashes=pack_hashes(hashes))
        answer = self._call(wire.LOOKUP_BLOCKS, request)
        return Seen(hashes, answer.block_states, answer.tiers, answer.matched_count)

    def stats(self) -> StoreStats:
        stats: StoreStats = self._call(wire.GET_STORE_STATS, m.GetStoreStatsRequest())
        return stats

    def nvme(self) -> NvmeStats:
        nvme = self.stats().nvme
        assert nvme is not None, "there is no NVMe tier"
        return nvme

    def wait_until_quiet(self) -> NvmeStats:
        """Returns once nothing is on its way to the disk or back any more."""
        deadline_s = time.monotonic() + _WAIT_S_MAX
        before = self.nvme()
        while True:
            time.sleep(0.5)  # two sweeps
            now = self.nvme()
            if now == before:
                return now
            assert time.monotonic() < deadline_s, f"it does not come to rest: {now}"
            before = now

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: Method[Any, Any], request: Any) -> Any:
        call = self._channel.unary_unary(method.path)
        return method.decode_response(call(method.encode_request(request), timeout=_CALL_S_MAX))


class Load:
    """Clients in threads that put new chains and read those that were put, until `close`.

    They work on, however often the daemon goes away. Every hit is compared with what was put; `wrong` names those
    that differed, and whatever else went wrong.
    """

    def __init__(
        self,
        unix_address: str,
        *,
        transports: Sequence[str],
        seed: int,
        bytes_max: int,
        bytes_per_s_max: float = float("inf"),
        spaces: Sequence[Namespace] = SPACES,
    ) -> None:
        """`bytes_max` bytes are put and no more, all clients together at `bytes_per_s_max`: above what the disk takes,
        memory drops most of it."""
        self.wrong: list[str] = []
        self.read_count = 0
        self.put_bytes = 0
        self._bytes_max = bytes_max
        self._spaces = spaces
        self._pause_s_per_byte = len(transports) / bytes_per_s_max
        self._address = unix_address
        self._lock = threading.Lock()
        self._chain_counts = {space.id: 0 for space in SPACES}
        self._may_run = threading.Event()
        self._is_closing = threading.Event()
        self._busy = [threading.Lock() for _ in transports]
        self._threads = [
            threading.Thread(target=self._work, args=(transport, seed * 100 + number, self._busy[number]))
            for number, transport in enumerate(transports)
        ]
        for thread in self._threads:
            thread.start()

    def chain_count(self, space: Namespace) -> int:
        """How many chains of this namespace were begun to be put: numbers 0, 1 and so on."""
        return self._chain_counts[space.id]

    def hashes(self, space: Namespace) -> list[BlockHash]:
        return [one for number in range(self.chain_count(space)) for one in blocks.chain(number)]

    def resume(self) -> None:
        self._may_run.set()

    def pause(self) -> None:
        """Returns once no call is under way."""
        self._may_run.clear()
        for busy in self._busy:
            with busy:
                pass

    def close(self) -> None:
        self._is_closing.set()
        for thread in self._threads:
            thread.join()

    def _work(self, transport: str, seed: int, busy: threading.Lock) -> None:
        rng = random.Random(seed)
        with Client(self._address, config=ClientConfig(transport=transport, **QUICK)) as client:
            while not self._is_closing.is_set():
                if not self._may_run.wait(0.05):
                    continue
                with busy:
                    if not self._may_run.is_set():
                        continue
                    try:
                        self._step(client, rng)
                    except Exception as error:  # noqa: BLE001  (a thread that dies is to fail the test)
                        self.wrong.append(f"{transport}: {error!r}")
                        return

    def _step(self, client: Client, rng: random.Random) -> None:
        space = rng.choice(self._spaces)
        match rng.choices(("put", "get", "lookup"), weights=(5, 4, 1))[0]:
            case "put":
                self._put(client, space)
            case "get":
                self._read(client, space, rng)
            case "lookup":
                client.lookup(space, blocks.chain(rng.randrange(self.chain_count(space) + 1)))

    def _put(self, client: Client, space: Namespace) -> None:
        with self._lock:
            if self.put_bytes >= self._bytes_max:
                return
            number = self._chain_counts[space.id]
            self._chain_counts[space.id] += 1
            size_bytes = blocks.CHAIN_BLOCKS * space.block_layout.payload_bytes
            self.put_bytes += size_bytes
        hashes = blocks.chain(number)
        client.put(space, hashes, [blocks.right_bytes(space, one) for one in hashes])
        self._is_closing.wait(size_bytes * self._pause_s_per_byte)

    def _read(self, client: Client, space: Namespace, rng: random.Random) -> None:
        hashes = blocks.chain(rng.randrange(self.chain_count(space) + 1))
        states = self.compare(client, space, hashes)
        with self._lock:
            self.read_count += states.count(BlockState.HIT)

    def compare(self, client: Client, space: Namespace, hashes: list[BlockHash]) -> tuple[BlockState, ...]:
        """Gets blocks; notes hits that are wrong."""
        into = np.zeros((len(hashes), space.block_layout.payload_bytes), dtype=np.uint8)
        states = client.get(space, hashes, into).states
        for block_hash, row, state in zip(hashes, into, states, strict=True):
            if state is BlockState.HIT and not np.array_equal(row, blocks.right_bytes(space, block_hash)):
                self.wrong.append(f"{space.model} {block_hash.hex()}")
        return states


def wait_for_death(daemon: NvmeDaemon, *, busy_with: Iterator[object]) -> None:
    """Waits until the daemon has ended, doing something meanwhile; what fails because it did is no matter."""
    deadline_s = time.monotonic() + _WAIT_S_MAX
    with contextlib.suppress(grpc.RpcError):
        for _ in busy_with:
            if daemon.has_ended(within_s=0.02):
                return
            assert time.monotonic() < deadline_s, "nothing has killed the daemon"
    assert daemon.has_ended(within_s=_WAIT_S_MAX), f"the daemon does not answer and lives:\n{daemon.log()}"


class FolderSampler:
    """Counts what a folder takes on disk every 50 ms, as `du` does, while files come and go."""

    def __init__(self, folder: Path) -> None:
        self.samples: list[int] = []
        self._folder = folder
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closing.wait(0.05):
            self.samples.append(disk_bytes(self._folder))


def disk_bytes(folder: Path) -> int:
    """Of all that is in it and of itself; what vanishes while it is looked at counts nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for path in (Path(parent), *(Path(parent, name) for name in names)):
            with contextlib.suppress(FileNotFoundError):
                total += path.lstat().st_blocks * 512
    return total
