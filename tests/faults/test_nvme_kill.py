"""What is on the disk outlives the daemon, however that ends: kill -9 in the midst of any write, and SIGTERM.

Kinds of fault (users' reports): "index truncated at restart", "torn files served as hits", "right when warm, wrong
after a restart", "two processes wrote into one folder".
"""

from __future__ import annotations

import contextlib
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from kvstore.keys import BlockHash
from kvstore.messages import BlockState
from kvstore_client import Client
from kvstore_server.nvme.crash import CRASH_POINTS
from tests.conftest import DaemonProcess

from . import blocks
from .nvme_load import MEDIUM, SMALL, SPACES, Load, NvmeDaemon, Observer, Zygote, wait_for_death

KILLS_PER_FOLDER = 10
CHECKED_COUNT = 48
"""Blocks that are read after each start, of all that there are; after the last start it is all."""
CAPACITY_BYTES = 3 << 30
PUT_BYTES_MAX = 2 << 30
"""What is put into one folder: all of it has room there, so that nothing has to be evicted."""
WORN_BYTES = 1 << 30
"""Another folder is taken after so much, so that whatever is armed still comes to pass in this one."""
TRANSPORTS = ("slab", "slab", "grpc", "bulk")


class Round:
    """A folder, the daemons that own it one after the other, their load, and what they have said to be on the disk."""

    def __init__(self, zygote: Zygote, folder: Path, *, seed: int) -> None:
        folder.mkdir()
        self.daemon = NvmeDaemon(zygote, folder, nvme={"capacity": str(CAPACITY_BYTES), "segment_size": "16MiB"})
        self.load = Load(self.daemon.unix_address, transports=TRANSPORTS, seed=seed, bytes_max=PUT_BYTES_MAX)
        self.kill_count = 0
        self.worst_ratio = 1.0
        self.durable: dict[bytes, set[BlockHash]] = {space.id: set() for space in SPACES}
        self._rng = random.Random(seed)
        self._block_count = 0

    @property
    def is_worn(self) -> bool:
        return self.kill_count >= KILLS_PER_FOLDER or self.load.put_bytes > WORN_BYTES

    @property
    def durable_count(self) -> int:
        return sum(map(len, self.durable.values()))

    def die_at(self, crash_at: str) -> None:
        """Starts the daemon, checks it, and puts it under load until it kills itself."""
        self.daemon.start(crash_at=crash_at)
        if not self.daemon.has_ended():  # at a point that a start passes, too
            with self._serving() as observer:
                wait_for_death(self.daemon, busy_with=self._watch(observer))
        self._bury()

    def die_after(self, seconds: float, *, is_seen: bool) -> None:
        """`is_seen`: killed right after it has said what is on the disk."""
        self.daemon.start()
        with self._serving() as observer:
            deadline_s = time.monotonic() + seconds
            watch = self._watch(observer)
            while time.monotonic() < deadline_s:
                next(watch)
                time.sleep(0.02)
            if is_seen:
                next(watch)
            self._bury()

    def die_while_starting(self, seconds: float) -> None:
        self.daemon.begin()
        time.sleep(seconds)
        self._bury()

    def check_all(self) -> None:
        """Every block that was said to be on the disk can be read, and is right."""
        self.load.pause()
        self.daemon.start()
        with Observer(self.daemon.unix_address) as observer, Client(self.daemon.unix_address) as client:
            self._check_start(observer)
            hit_count = 0
            for space in SPACES:
                for number in range(self.load.chain_count(space)):
                    hashes = blocks.chain(number)
                    states = self.load.compare(client, space, hashes)
                    hits = {one for one, state in zip(hashes, states, strict=True) if state is BlockState.HIT}
                    lost = self.durable[space.id].intersection(hashes) - hits
                    assert not lost, f"{space.model} chain {number}: {len(lost)} blocks of the disk cannot be read"
                    hit_count += len(hits)
            assert hit_count >= self.durable_count
            assert observer.nvme().corrupt_count == 0
        self._check_load()

    def close(self) -> None:
        self.load.close()
        if self.daemon.is_started:
            self.daemon.kill()

    @contextlib.contextmanager
    def _serving(self) -> Iterator[Observer]:
        """A daemon that has been checked, under load."""
        self.load.pause()
        with Observer(self.daemon.unix_address) as observer:
            self._check_start(observer)
            self.load.resume()
            yield observer

    def _watch(self, observer: Observer) -> Iterator[None]:
        """Notes again and again what is said to be on the disk."""
        while True:
            with contextlib.suppress(grpc.RpcError):  # the rest is as at the time before
                for space in SPACES:
                    self.durable[space.id] |= observer.look(space, self.load.hashes(space)).durable
                nvme = observer.nvme()
                assert nvme.evicted_count == 0, "the folder is too small for this test"
                self._block_count = nvme.block_count
            yield

    def _bury(self) -> None:
        self.daemon.kill()
        self.kill_count += 1

    def _check_start(self, observer: Observer) -> None:
        after = observer.nvme().block_count
        if self._block_count:
            self.worst_ratio = min(self.worst_ratio, after / self._block_count)
        assert after >= 0.95 * self._block_count, f"{after} of {self._block_count} blocks are back"
        for space in SPACES:
            durable = self.durable[space.id]
            lost = durable - observer.look(space, self.load.hashes(space)).hits
            assert not lost, f"{len(lost)} of {len(durable)} blocks of {space.model} that were on the disk are gone"
        with Client(self.daemon.unix_address) as client:
            for space in SPACES:
                known = sorted(self.durable[space.id])
                some = self._rng.sample(known, min(CHECKED_COUNT, len(known)))
                states = self.load.compare(client, space, some)
                assert set(states) <= {BlockState.HIT}, f"{space.model}: {states.count(BlockState.HIT)} of {len(some)}"
        self._check_load()

    def _check_load(self) -> None:
        assert not self.load.wrong, self.load.wrong[:3]


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    zygote = Zygote(tmp_path_factory.mktemp("zygote") / "daemons.log")
    yield zygote
    zygote.close()


@pytest.fixture
def one_round(zygote: Zygote, tmp_path: Path) -> Iterator[Round]:
    one = Round(zygote, tmp_path / "round", seed=1)
    yield one
    one.close()


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_killed_in_the_midst_of_a_write_it_serves_no_wrong_byte_and_keeps_what_was_written(
    one_round: Round, point: str
) -> None:
    one_round.die_at(f"{point}:2")
    one_round.check_all()
    assert one_round.load.read_count > 0


@pytest.mark.parametrize("kill_count", [6, pytest.param(300, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_killed_at_any_moment_it_serves_no_wrong_byte_and_keeps_what_was_written(
    zygote: Zygote, tmp_path: Path, kill_count: int
) -> None:
    rng = random.Random(kill_count)
    figures = {"kills": 0, "durable": 0, "read": 0}
    worst_ratio = 1.0
    while figures["kills"] < kill_count:
        one = Round(zygote, tmp_path / f"round-{figures['kills']}", seed=figures["kills"])
        try:
            while not one.is_worn and figures["kills"] + one.kill_count < kill_count:
                kind = rng.random()
                if kind < 0.4:
                    one.die_at(f"{rng.choice(CRASH_POINTS)}:{rng.randint(1, 4)}")
                elif kind < 0.9:
                    one.die_after(rng.uniform(0.0, 1.0), is_seen=rng.random() < 0.5)
                else:
                    one.die_while_starting(rng.uniform(0.0, 0.2))
            one.check_all()
            figures["kills"] += one.kill_count
            figures["durable"] += one.durable_count
            figures["read"] += one.load.read_count
            worst_ratio = min(worst_ratio, one.worst_ratio)
        finally:
            one.close()
            subprocess.run(["rm", "-rf", str(one.daemon.tier_folder)], check=True)
    print(f"{figures}, at worst {worst_ratio:.3f} of the blocks on the disk were back")
    assert figures["durable"] > 0
    assert figures["read"] > 0


def serve(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A daemon that is expected not to start."""
    command = [sys.executable, "-c", "from kvstore_client.cli import main; main()", "serve"]
    command += ["--memory-capacity", "32MiB", "--grpc-port", "0", "--metrics-port", "0"]
    command += ["--socket-path", str(folder / "other.sock"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def start_on(tier_folder: Path, start_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    tier_folder.mkdir(exist_ok=True)
    return start_daemon(*("--memory-capacity", "32MiB", "--nvme-path", str(tier_folder), "--nvme-capacity", "1GiB"))


def put(client: Client, number: int) -> None:
    for space in SPACES:
        hashes = blocks.chain(number)
        client.put(space, hashes, [blocks.right_bytes(space, one) for one in hashes])


def hits_of(observer: Observer, chain_count: int) -> set[tuple[bytes, BlockHash]]:
    hashes = [one for number in range(chain_count) for one in blocks.chain(number)]
    return {(space.id, one) for space in SPACES for one in observer.look(space, hashes).hits}


@pytest.mark.parametrize("chain_count", [12, 150])
def test_after_sigterm_what_was_in_memory_and_on_the_disk_is_there_again(
    tmp_path: Path, start_daemon: Callable[..., DaemonProcess], chain_count: int
) -> None:
    """12 chains are 20 MiB, less than memory; 150 are 250 MiB, of which some depart when the signal comes."""
    daemon = start_on(tmp_path / "tier", start_daemon)
    try:
        with Client(daemon.unix_address) as client, Observer(daemon.unix_address) as observer:
            for number in range(chain_count):
                put(client, number)
            before = hits_of(observer, chain_count)
            assert daemon.stop() == 0
        assert before
        daemon.start()
        with Client(daemon.unix_address) as client, Observer(daemon.unix_address) as observer:
            kept = before & hits_of(observer, chain_count)
            assert len(kept) == len(before), f"{len(kept)} of {len(before)} blocks are there again"
            for number in range(chain_count):
                for space in SPACES:
                    hashes = blocks.chain(number)
                    into = np.zeros((len(hashes), space.block_layout.payload_bytes), dtype=np.uint8)
                    for one, row, state in zip(hashes, into, client.get(space, hashes, into).states, strict=True):
                        assert (state is BlockState.HIT) == ((space.id, one) in kept)
                        assert state is not BlockState.HIT or np.array_equal(row, blocks.right_bytes(space, one))
    finally:
        daemon.kill()


def test_a_second_daemon_on_the_folder_is_refused_and_the_first_one_named(
    tmp_path: Path, start_daemon: Callable[..., DaemonProcess]
) -> None:
    tier_folder = tmp_path / "tier"
    daemon = start_on(tier_folder, start_daemon)
    try:
        refused = serve(tmp_path, "--nvme-path", str(tier_folder), "--nvme-capacity", "1GiB")
        assert refused.returncode == 1, refused.stderr
        assert re.search(rf"nvme\.path .* is owned by process {daemon.pid}\b", refused.stderr), refused.stderr
        assert "Traceback" not in refused.stderr
        with Client(daemon.unix_address) as client:
            put(client, 1)
            assert client.lookup(SMALL, blocks.chain(1)).matched_count == blocks.CHAIN_BLOCKS
    finally:
        daemon.kill()


def test_a_folder_that_is_not_there_is_named_with_what_to_do(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    refused = serve(tmp_path, "--nvme-path", str(missing), "--nvme-capacity", "1GiB")
    assert refused.returncode == 2, refused.stderr
    assert f"nvme.path is '{missing}'" in refused.stderr, refused.stderr
    assert "create or mount it" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not missing.exists()


def test_without_a_folder_memory_is_all_there_is(start_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = start_daemon()
    try:
        with Client(daemon.unix_address) as client:
            put(client, 1)
            assert client.lookup(MEDIUM, blocks.chain(1)).matched_count == blocks.CHAIN_BLOCKS
            assert client.stats().nvme is None
    finally:
        daemon.kill()
