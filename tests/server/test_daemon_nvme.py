"""A daemon with a disk below its memory, as its clients see it: over every path, and over its end and start."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import lmdb
import numpy as np
import pytest

from kvstore.keys import BlockHash, hash_blocks
from kvstore.messages import BlockState, CutReason, NvmeState, StoreStats
from kvstore_client import Client, ClientConfig
from kvstore_client.results import PutState
from kvstore_server.nvme.index import Index
from tests.conftest import DaemonProcess
from tests.faults import blocks
from tests.server.test_daemon import ENVIRONMENT, FREE_PORTS, LONG_S, wait_until

SPACE = blocks.namespace("middle", head_dim=128)
"""256 KiB a block: memory of 64 MiB has room for 240, of which 24 are free after an eviction."""
BLOCK_BYTES = SPACE.block_layout.payload_bytes
CHAIN_BLOCKS = 8
CHAIN_COUNT = 80
MEMORY_BLOCKS = 240
TRANSPORTS = ("slab", "bulk", "grpc")


def chain(number: int) -> list[BlockHash]:
    return hash_blocks([1000 + number] * (CHAIN_BLOCKS * 16), tokens_per_block=16)


def put_chain(client: Client, number: int) -> None:
    """Stores it, and waits until memory has let go of what it has no room for."""
    hashes = chain(number)
    stored = client.put(SPACE, hashes, [blocks.right_bytes(SPACE, block_hash) for block_hash in hashes])
    assert set(stored.states) == {PutState.STORED}, stored
    wait_until(lambda: is_at_rest(client))


def is_at_rest(client: Client) -> bool:
    """Whether there is room in memory for the next chain: else blocks would be lost that are not on the disk yet."""
    stats = client.stats()
    return stats.used_bytes <= 0.95 * stats.capacity_bytes


def get(client: Client, hashes: Sequence[BlockHash]) -> list[BlockState]:
    """What it gives, every byte of which is checked."""
    targets = [np.empty(BLOCK_BYTES, np.uint8) for _ in hashes]
    got = client.get(SPACE, hashes, targets)
    for block_hash, target, state in zip(hashes, targets, got.states, strict=True):
        assert state is not BlockState.HIT or np.array_equal(target, blocks.right_bytes(SPACE, block_hash))
    return list(got.states)


def nvme_of(stats: StoreStats) -> dict[str, int]:
    assert stats.nvme is not None, "the daemon has no such tier"
    assert stats.nvme.state is NvmeState.OK, stats.nvme.reason
    return {"demoted": stats.nvme.demoted_count, "promoted": stats.nvme.promoted_count, "has": stats.nvme.block_count}


def connect(daemon: DaemonProcess, transport: str = "slab") -> Client:
    address = daemon.unix_address if transport == "slab" else daemon.address
    return Client(address, config=ClientConfig(transport=transport))


@pytest.fixture(scope="module")
def tiered(
    start_daemon: Callable[..., DaemonProcess], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DaemonProcess]:
    """A daemon that has more than twice as many blocks as its memory has room for."""
    folder = tmp_path_factory.mktemp("nvme")
    daemon = start_daemon("--nvme-path", str(folder), "--nvme-capacity", "320MiB")
    with connect(daemon) as client:
        for number in range(CHAIN_COUNT):
            put_chain(client, number)
    yield daemon
    daemon.kill()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_more_than_twice_the_memory_is_found_and_read_over_every_path(
    tiered: DaemonProcess, transport: str
) -> None:
    with connect(tiered, transport) as client:
        before = nvme_of(client.stats())["promoted"]
        for number in range(CHAIN_COUNT):
            assert client.lookup(SPACE, chain(number)).matched_count == CHAIN_BLOCKS
        assert nvme_of(client.stats())["promoted"] == before, "a lookup brought blocks"
        for number in range(CHAIN_COUNT):
            assert get(client, chain(number)) == [BlockState.HIT] * CHAIN_BLOCKS
        assert nvme_of(client.stats())["promoted"] > before


def test_a_lease_holds_what_it_has_brought_from_the_disk(tiered: DaemonProcess) -> None:
    with connect(tiered) as client:
        for number in range(CHAIN_COUNT):
            with client.acquire(SPACE, chain(number)) as lease:
                assert (lease.matched_count, lease.cut_reason) == (CHAIN_BLOCKS, CutReason.NONE)
                assert get(client, chain(number)) == [BlockState.HIT] * CHAIN_BLOCKS
        assert client.stats().lease_count == 0


def test_a_prefetch_brings_blocks_that_are_then_read_without_the_disk(tiered: DaemonProcess) -> None:
    with connect(tiered) as client:
        for number in range(CHAIN_COUNT):
            get(client, chain(number))  # what was used first is not in memory any more
        begun = client.prefetch(SPACE, chain(0))
        assert begun.error is None
        assert (begun.started_count, begun.refused_count, begun.missing_count) == (CHAIN_BLOCKS, 0, 0)
        wait_until(lambda: client.prefetch(SPACE, chain(0)).in_memory_count == CHAIN_BLOCKS)
        before = nvme_of(client.stats())["promoted"]
        assert get(client, chain(0)) == [BlockState.HIT] * CHAIN_BLOCKS
        assert nvme_of(client.stats())["promoted"] == before


def test_who_recomputes_at_once_is_offered_what_is_in_memory_alone(tiered: DaemonProcess) -> None:
    with connect(tiered) as client:
        for number in range(CHAIN_COUNT):
            get(client, chain(number))
        on_disk = client.lookup(SPACE, chain(0), recompute_s_per_block=1e-6)
        assert (on_disk.matched_count, on_disk.left_out_count) == (0, CHAIN_BLOCKS)
        assert on_disk.cut_reason is CutReason.TOO_SLOW
        in_memory = client.lookup(SPACE, chain(CHAIN_COUNT - 1), recompute_s_per_block=1e-6)
        assert (in_memory.matched_count, in_memory.left_out_count) == (CHAIN_BLOCKS, 0)


def test_the_metrics_of_the_tier_are_there(tiered: DaemonProcess) -> None:
    with urllib.request.urlopen(f"http://{tiered.metrics_address}/metrics", timeout=LONG_S) as response:
        text = response.read().decode()
    assert 'kvstore_nvme_state{state="ok"} 1.0' in text


def test_a_second_daemon_on_the_same_folder_does_not_start_and_says_who_has_it(
    tiered: DaemonProcess, tmp_path: Path
) -> None:
    folder = tiered._arguments[tiered._arguments.index("--nvme-path") + 1]
    command = [sys.executable, "-c", "from kvstore_client.cli import main; main()", "serve", *FREE_PORTS]
    command += ["--socket-path", str(tmp_path / "other.sock"), "--nvme-path", folder, "--nvme-capacity", "320MiB"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, env=ENVIRONMENT, check=False)
    assert second.returncode not in (0, -9)
    assert str(tiered.pid) in second.stderr
    assert "Traceback" not in second.stderr


def test_a_daemon_that_is_told_to_end_leaves_all_of_memory_on_the_disk_for_the_next(
    start_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    daemon = start_daemon("--nvme-path", str(tmp_path), "--nvme-capacity", "320MiB")
    with connect(daemon) as client:
        for number in range(3):
            put_chain(client, number)
        assert nvme_of(client.stats())["has"] == 0, "all of it is in memory"
    assert daemon.stop() == 0
    daemon.start()
    with connect(daemon) as client:
        assert get(client, chain(9)) == [BlockState.MISS] * CHAIN_BLOCKS
        assert nvme_of(client.stats()) == {"demoted": 0, "promoted": 0, "has": 3 * CHAIN_BLOCKS}
        for number in range(3):
            assert client.lookup(SPACE, chain(number)).matched_count == CHAIN_BLOCKS
            assert get(client, chain(number)) == [BlockState.HIT] * CHAIN_BLOCKS
    daemon.kill()


def test_a_daemon_that_was_killed_has_all_that_was_on_the_disk(
    start_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    daemon = start_daemon("--nvme-path", str(tmp_path), "--nvme-capacity", "320MiB")
    with connect(daemon) as client:
        for number in range(CHAIN_COUNT):
            put_chain(client, number)
        wait_until(lambda: nvme_of(client.stats())["has"] >= CHAIN_COUNT * CHAIN_BLOCKS - MEMORY_BLOCKS)
        kept_count = nvme_of(client.stats())["has"]
    daemon.restart()
    with connect(daemon) as client:
        found = [client.lookup(SPACE, chain(number)).states.count(BlockState.HIT) for number in range(CHAIN_COUNT)]
        assert sum(found) >= kept_count
        states = [state for number in range(CHAIN_COUNT) for state in get(client, chain(number))]
        assert states.count(BlockState.HIT) >= kept_count
    daemon.kill()


LONG_CHAIN = hash_blocks([7] * (3 * MEMORY_BLOCKS * 16), tokens_per_block=16)


def put_long_chain(client: Client) -> None:
    """As a client does that is told to come again."""
    done = 0
    while done < len(LONG_CHAIN):
        some = LONG_CHAIN[done : done + 64]
        payloads = [blocks.right_bytes(SPACE, block_hash) for block_hash in some]
        stored = client.put(SPACE, some, payloads, parent_hash=LONG_CHAIN[done - 1] if done else None)
        assert stored.error is None
        done += len(some) - stored.states.count(PutState.DROPPED)


def test_a_chain_three_times_as_long_as_memory_is_stored_and_read_whole_and_after_a_kill_no_head_is_missing(
    start_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    daemon = start_daemon("--nvme-path", str(tmp_path), "--nvme-capacity", "320MiB")
    with connect(daemon) as client:
        put_long_chain(client)
        assert client.lookup(SPACE, LONG_CHAIN).matched_count == len(LONG_CHAIN)
        figures = nvme_of(client.stats())
        assert figures["demoted"] == figures["has"], "something was written twice"
    daemon.restart()
    with connect(daemon) as client:
        found = client.lookup(SPACE, LONG_CHAIN)
        assert found.matched_count == found.states.count(BlockState.HIT) >= len(LONG_CHAIN) - MEMORY_BLOCKS
        put_long_chain(client)
        for start in range(0, len(LONG_CHAIN), 36):
            assert get(client, LONG_CHAIN[start : start + 36]) == [BlockState.HIT] * 36
    daemon.kill()


def test_a_folder_that_cannot_be_opened_is_said_and_tried_again_while_memory_serves(
    start_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    """Here since another version wrote its index."""
    Index(tmp_path / "index", map_bytes=4 << 20).close()
    with lmdb.open(str(tmp_path / "index"), max_dbs=2) as env, env.begin(write=True, db=env.open_db(b"meta")) as txn:
        stored = bytearray(txn.get(b"store") or b"")
        stored[4] = 7
        txn.put(b"store", bytes(stored))
    daemon = start_daemon("--nvme-path", str(tmp_path), "--nvme-capacity", "320MiB")
    with connect(daemon) as client:
        put_chain(client, 0)
        assert get(client, chain(0)) == [BlockState.HIT] * CHAIN_BLOCKS
        closed = client.stats().nvme
        assert closed is not None
        assert closed.state is NvmeState.DEGRADED
        assert "format version 7" in closed.reason
        with urllib.request.urlopen(f"http://{daemon.metrics_address}/metrics", timeout=LONG_S) as response:
            assert 'kvstore_nvme_state{state="degraded"} 1.0' in response.read().decode()
        shutil.rmtree(tmp_path / "index")
        wait_until(lambda: getattr(client.stats().nvme, "state", None) is NvmeState.OK)
    assert daemon.stop() == 0
    assert "nvme_closed" in daemon.log_path.read_text()
    daemon.start()
    with connect(daemon) as client:
        assert get(client, chain(0)) == [BlockState.HIT] * CHAIN_BLOCKS
    daemon.kill()


def test_without_a_path_there_is_no_such_tier_and_a_prefetch_finds_only_memory(daemon: DaemonProcess) -> None:
    with connect(daemon) as client:
        put_chain(client, 0)
        assert client.stats().nvme is None
        begun = client.prefetch(SPACE, [*chain(0), *chain(1)])
        assert begun.error is None
        assert (begun.in_memory_count, begun.started_count, begun.refused_count) == (CHAIN_BLOCKS, 0, 0)
        assert begun.missing_count == CHAIN_BLOCKS


def test_log_metrics_and_stats_name_the_policy_of_each_tier(
    start_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    config = tmp_path / "kvstore.yaml"
    config.write_text("memory: {policy: s3fifo}\nnvme: {policy: arc}\n", encoding="utf-8")
    (tmp_path / "blocks").mkdir()
    folder = ("--nvme-path", str(tmp_path / "blocks"), "--nvme-capacity", "320MiB")
    daemon = start_daemon("--config", str(config), "--log-format", "json", *folder)
    with connect(daemon) as client:
        wait_until(lambda: client.stats().nvme is not None)
        found = client.stats()
    assert found.nvme is not None
    assert (found.policy, found.nvme.policy, found.nvme.admission) == ("s3fifo", "arc", "worth")
    with urllib.request.urlopen(f"http://{daemon.metrics_address}/metrics", timeout=LONG_S) as response:
        shown = response.read().decode()
    for tier, policy in (("memory", "s3fifo"), ("nvme", "arc")):
        labels = f'configured="{policy}",in_force="{policy}",tier="{tier}"'
        assert f"kvstore_store_policy{{{labels}}} 1.0" in shown
    lines = [json.loads(line) for line in daemon.log_path.read_text().splitlines() if '"event"' in line]
    said = {line["event"]: line for line in lines}
    assert said["serving"]["memory_policy"] == "s3fifo"
    assert (said["nvme_open"]["nvme_policy"], said["nvme_open"]["admission"]) == ("arc", "worth")
