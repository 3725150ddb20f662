"""The daemon's memory as a whole: what kind it takes, what it says of it, and how it goes from tenant to tenant."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore.messages import BlockState, ReserveState
from kvstore_client import Client, ClientConfig
from kvstore_client.results import PutState
from tests.conftest import DaemonProcess
from tests.faults import blocks
from tests.server.test_daemon import serve, wait_until

SPACE = blocks.LARGE
BLOCK_BYTES = SPACE.block_layout.payload_bytes
SLAB_COUNT = 16
"""64 MiB in slabs of 4 MiB, each with room for one block of 3 MiB."""


def logged(daemon: DaemonProcess, event: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in daemon.log_path.read_text().splitlines()]
    return [line for line in lines if line.get("event") == event]


def test_small_pages_are_warned_about_and_told_to_whoever_watches(
    start_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    file = tmp_path / "kvstore.yaml"
    file.write_text("memory: {pages: plain}\n")
    daemon = start_daemon("--config", str(file))
    (ready,) = logged(daemon, "arena_ready")
    assert ready["pages"] == "plain"
    page_bytes = int(str(ready["page_bytes"]))
    reasons = [line["reasons"] for line in logged(daemon, "small_pages")]
    assert reasons == [["memory.pages is plain"]] * (page_bytes == 4096)
    with urllib.request.urlopen(f"http://{daemon.metrics_address}/metrics", timeout=20) as response:
        assert f'kvstore_memory_page_bytes{{kind="plain"}} {float(page_bytes)}' in response.read().decode()


def test_huge_pages_that_are_not_there_stop_the_start_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.yaml"
    file.write_text("memory: {pages: hugetlb, capacity: 4GiB}\n")
    free_bytes = int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text()) << 21
    if free_bytes >= 4 << 30:
        pytest.skip("this machine has set 4 GiB of huge pages aside")
    result = serve("--config", str(file), "--grpc-port", "0", "--metrics-port", "0", "--socket-path", "")
    assert result.returncode == 2
    assert "hugetlb: 4.0GiB are wanted" in result.stderr
    assert "set memory.pages to another kind or to auto" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("memory: {huge_mount: /proc}", "memory.huge_mount is '/proc'; allowed: a folder, "),
        ("memory: {huge_mount: /proc, pages: plain}", "memory.huge_mount is '/proc'; allowed: a folder, "),
        (
            "memory: {pages: huge-tmpfs}\ntenants: [{name: acme, uids: [4711]}]",
            "memory.pages is 'huge-tmpfs'; allowed: with tenants that may write: auto, hugetlb or plain",
        ),
    ],
)
def test_memory_that_cannot_be_had_as_set_is_a_wrong_setting(settings: str, message: str, tmp_path: Path) -> None:
    """systemd starts the daemon again after any other exit code than 2."""
    file = tmp_path / "kvstore.yaml"
    file.write_text(f"{settings}\n")
    result = serve("--config", str(file), "--grpc-port", "0", "--metrics-port", "0", "--socket-path", "")
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_nixl_that_is_not_installed_is_a_wrong_setting(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.yaml"
    file.write_text("nixl: {enabled: true}\nmemory: {capacity: 16MiB}\n")
    arguments = ("--config", str(file), "--grpc-port", "0", "--metrics-port", "0", "--socket-path", "")
    result = serve(*arguments, code="import sys\nsys.modules['nixl_cu12'] = None")
    assert result.returncode == 2
    assert "nixl.enabled is true; allowed here: false, as NIXL is not installed; pip install" in result.stderr


@pytest.fixture
def shared_by_two(start_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> DaemonProcess:
    """This user is the tenant acme on the slab socket, and the tenant of all strangers over gRPC."""
    file = tmp_path / "kvstore.yaml"
    file.write_text(f"tenants: [{{name: acme, uids: [{os.geteuid()}]}}]\n")
    return start_daemon("--config", str(file))


def put_one(client: Client, number: int) -> PutState:
    block_hash = blocks.chain(number)[0]
    return client.put(SPACE, [block_hash], [blocks.right_bytes(SPACE, block_hash)]).states[0]


def get_one(client: Client, number: int) -> BlockState:
    """A hit is the right bytes."""
    block_hash = blocks.chain(number)[0]
    into = np.zeros((1, BLOCK_BYTES), dtype=np.uint8)
    state = client.get(SPACE, [block_hash], into).states[0]
    assert (state is BlockState.HIT) == np.array_equal(into[0], blocks.right_bytes(SPACE, block_hash))
    return state


def test_memory_goes_to_a_tenant_that_needs_it_and_shows_it_nothing(shared_by_two: DaemonProcess) -> None:
    """faults.md, identity: "Cross-tenant probe must look like a cold miss"; and tenants cannot fill each other out."""
    over_grpc = Client(shared_by_two.address, config=ClientConfig(transport="grpc"))
    over_slab = Client(shared_by_two.unix_address, config=ClientConfig(transport="slab"))
    with over_grpc as stranger, over_slab as acme:
        for number in range(SLAB_COUNT):
            assert put_one(stranger, number) is PutState.STORED
        assert {get_one(acme, number) for number in range(SLAB_COUNT)} == {BlockState.MISS}

        refused = acme.put(SPACE, blocks.chain(1)[:1], [blocks.right_bytes(SPACE, blocks.chain(1)[0])])
        assert refused.refusal is ReserveState.FULL, "memory that a stranger still maps was handed on"
        for number in range(100, 100 + SLAB_COUNT // 2):
            wait_until(lambda number=number: put_one(acme, number) is not PutState.DROPPED)
        wait_until(lambda: acme.stats().ready_bytes == acme.stats().capacity_bytes)
        assert {get_one(stranger, number) for number in range(100, 108)} == {BlockState.MISS}
        kept = [get_one(stranger, number) for number in range(SLAB_COUNT)].count(BlockState.HIT)
        assert kept >= SLAB_COUNT // 2, "a tenant lost what is within its share"
        assert BlockState.HIT in {get_one(acme, number) for number in range(100, 108)}
        assert [one.model for one in acme.stats().namespaces] == [SPACE.model]
        assert acme.stats().namespaces[0].block_count <= SLAB_COUNT // 2
