"""What the NVMe tier may take on the disk, and what it throws out for that.

Kinds of fault (users' reports): "the cap was only declared", "every process takes the cap once more", "restarts leave
orphans behind", "eviction leaves holes in chains".
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore_client import Client

from . import blocks
from .nvme_load import MEDIUM, FolderSampler, Load, NvmeDaemon, Observer, Zygote, disk_bytes

CAP_BYTES = 256 << 20
CLIENTS = ("slab", "slab", "slab", "slab", "grpc", "grpc", "bulk", "bulk")
PUT_BYTES_PER_S = 160e6
LIVES = 3
LIFE_S_MAX = 60.0
EVICTED_COUNT = 300
"""Of some 800 blocks that the disk has room for."""


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    zygote = Zygote(tmp_path_factory.mktemp("zygote") / "daemons.log")
    yield zygote
    zygote.close()


@pytest.fixture
def daemon(zygote: Zygote, tmp_path: Path) -> Iterator[NvmeDaemon]:
    daemon = NvmeDaemon(zygote, tmp_path, nvme={"capacity": str(CAP_BYTES), "segment_size": "16MiB"})
    yield daemon
    if daemon.is_started:
        daemon.kill()


def write_to_disk(daemon: NvmeDaemon, load: Load, *, size_bytes: int) -> int:
    """Puts the daemon under load until so many bytes were written to its disk; returns how many."""
    deadline_s = time.monotonic() + LIFE_S_MAX
    with Observer(daemon.unix_address) as observer:
        load.resume()
        while (written_bytes := observer.nvme().written_bytes) < size_bytes:
            assert time.monotonic() < deadline_s, f"{written_bytes} bytes were written in {LIFE_S_MAX} s"
            assert not load.wrong, load.wrong[:3]
            time.sleep(0.05)
    return written_bytes


def test_three_times_the_cap_from_eight_clients_over_two_restarts_never_takes_more_than_the_cap(
    daemon: NvmeDaemon,
) -> None:
    load = Load(daemon.unix_address, transports=CLIENTS, seed=1, bytes_max=1 << 40, bytes_per_s_max=PUT_BYTES_PER_S)
    sampler = FolderSampler(daemon.tier_folder)
    try:
        written_bytes = 0
        for life in range(LIVES):
            daemon.start()
            written_bytes += write_to_disk(daemon, load, size_bytes=CAP_BYTES)
            if life == 0:
                daemon.stop()
            else:
                daemon.kill()
        daemon.start()
        with Observer(daemon.unix_address) as observer:
            nvme = observer.nvme()
    finally:
        sampler.close()
        load.close()
    assert not load.wrong, load.wrong[:3]
    assert load.read_count > 0
    assert written_bytes >= 3 * CAP_BYTES
    samples = [*sampler.samples, disk_bytes(daemon.tier_folder)]
    assert max(samples) <= CAP_BYTES, f"{max(samples)} bytes of {CAP_BYTES}"
    assert max(samples) > 0.8 * CAP_BYTES, "the cap was not put to the test"
    assert nvme.segment_count == len(list((daemon.tier_folder / "segments").iterdir())), "segments that nobody counts"


def test_a_chain_has_no_hole_when_the_disk_is_full(daemon: NvmeDaemon) -> None:
    """Chains are put, and now and then read again, until the disk has evicted a good part of what it holds."""
    rng = random.Random(1)
    chain_count = 0
    daemon.start()
    with Client(daemon.unix_address) as client, Observer(daemon.unix_address) as observer:
        deadline_s = time.monotonic() + LIFE_S_MAX
        while observer.nvme().evicted_count < EVICTED_COUNT:
            assert time.monotonic() < deadline_s, f"{observer.nvme()}"
            for _ in range(8):
                hashes = blocks.chain(chain_count)
                client.put(MEDIUM, hashes, [blocks.right_bytes(MEDIUM, one) for one in hashes])
                chain_count += 1
            with client.acquire(MEDIUM, blocks.chain(rng.randrange(chain_count))):
                pass
        observer.wait_until_quiet()
        check_prefixes(observer, chain_count)
    daemon.stop()
    daemon.start()
    with Observer(daemon.unix_address) as observer:
        check_prefixes(observer, chain_count)


def check_prefixes(observer: Observer, chain_count: int) -> None:
    holes = []
    hit_count = 0
    for number in range(chain_count):
        seen = observer.look(MEDIUM, blocks.chain(number))
        hit_count += len(seen.hits)
        if len(seen.hits) != seen.matched_count:
            holes.append((number, list(seen.states), list(seen.tiers)))
    assert hit_count > 0
    assert not holes, f"{len(holes)} of {chain_count} chains have holes, such as {holes[:3]}"
