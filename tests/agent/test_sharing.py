"""A pool that other processes reach: the same bytes, a size that nobody changes, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpu_agent.device import PoolHandle, open_device, open_pool
from gpu_agent.device.cpu import CpuDevice
from kvstore.errors import CapacityError, InvalidArgumentError

BLOCK_BYTES = 4096

_OTHER_PROCESS = """
import sys
from gpu_agent.device import PoolHandle, open_pool
pool = open_pool(PoolHandle(slot_count=4, block_bytes=4096, descriptor=int(sys.argv[1])))
assert bool((pool[1] == 7).all())
pool[2] = 9
"""


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(shares_pools=True)
    yield device
    device.close()


def test_another_process_reads_and_writes_the_pool(device: CpuDevice) -> None:
    pool = device.allocate_pool(slot_count=4, block_bytes=BLOCK_BYTES)
    pool[1] = 7
    descriptor = device.share_pool(pool).descriptor
    assert descriptor is not None
    subprocess.run(
        [sys.executable, "-c", _OTHER_PROCESS, str(descriptor)],
        pass_fds=(descriptor,),
        check=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert bool((pool[2] == 9).all())
    assert not bool(pool[3].any())


def test_copies_of_the_device_go_through_a_shared_pool_as_through_any(device: CpuDevice) -> None:
    pool = device.allocate_pool(slot_count=2, block_bytes=BLOCK_BYTES)
    staging = device.allocate_staging(row_count=2, block_bytes=BLOCK_BYTES)
    staging.fill_(3)
    device.copy_rows(source=staging, source_rows=[0], target=pool, target_rows=[1]).wait()
    opened = open_pool(device.share_pool(pool))
    assert bool((opened[1] == 3).all())
    assert device.link().h2d.moved_bytes == BLOCK_BYTES


def test_nobody_can_cut_the_pool_off_under_the_others(device: CpuDevice) -> None:
    pool = device.allocate_pool(slot_count=2, block_bytes=BLOCK_BYTES)
    descriptor = device.share_pool(pool).descriptor
    assert descriptor is not None
    for size_bytes in (0, 3 * BLOCK_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size_bytes)


def test_the_memory_outlasts_the_device_for_those_who_have_opened_it(device: CpuDevice) -> None:
    pool = device.allocate_pool(slot_count=2, block_bytes=BLOCK_BYTES)
    pool.fill_(5)
    handle = device.share_pool(pool)
    opened = open_pool(handle)
    device.close()
    del pool
    assert bool((opened == 5).all())
    assert handle.descriptor is not None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle.descriptor)


def test_a_handle_that_does_not_fit_is_refused_by_name(device: CpuDevice) -> None:
    pool = device.allocate_pool(slot_count=2, block_bytes=BLOCK_BYTES)
    descriptor = device.share_pool(pool).descriptor
    with pytest.raises(InvalidArgumentError, match="slot_count is 3; allowed: 2 of 4096 bytes"):
        open_pool(PoolHandle(slot_count=3, block_bytes=BLOCK_BYTES, descriptor=descriptor))
    with pytest.raises(InvalidArgumentError, match="ipc_handle is b'abc'; allowed: 64 bytes"):
        open_pool(PoolHandle(slot_count=3, block_bytes=BLOCK_BYTES, ipc_handle=b"abc"))


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a CUDA runtime beside it")
def test_a_pool_on_a_gpu_is_not_opened_without_a_runtime() -> None:
    with pytest.raises(CapacityError, match="no CUDA runtime"):
        open_pool(PoolHandle(slot_count=1, block_bytes=BLOCK_BYTES, ipc_handle=bytes(64)))


def test_a_device_that_shares_is_opened_by_its_name() -> None:
    device = open_device("cpu", shares_pools=True)
    pool = device.allocate_pool(slot_count=1, block_bytes=BLOCK_BYTES)
    assert device.share_pool(pool).slot_count == 1
    device.close()


def test_more_shared_memory_than_there_is_cannot_be_allocated(device: CpuDevice) -> None:
    with pytest.raises(CapacityError, match="shared memory"):
        device.allocate_pool(slot_count=1 << 45, block_bytes=1 << 20)
