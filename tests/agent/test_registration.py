"""DMA goes to registered memory and nowhere else; and what is registered is not taken away under a copy."""

from __future__ import annotations

import mmap
import shutil
import subprocess
from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path

import pytest
import torch

from gpu_agent.core.transfers import Transfer
from gpu_agent.device.cpu import CpuDevice
from gpu_agent.device.cudart import Cudart
from gpu_agent.device.memory import HostSlots, address_of
from kvstore.errors import CapacityError, InternalError
from kvstore_client.agent.cuda import IPC_HANDLE_BYTES, close_ipc, open_ipc

BLOCK = 256
PITCH = 4096


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(latency_s=0.01, registered_bytes_max=1 << 20)
    yield device
    device.close()


@pytest.fixture
def arena() -> memoryview:
    return memoryview(mmap.mmap(-1, 16 * PITCH))


def slots_of(arena: memoryview, *indices: int) -> HostSlots:
    return HostSlots([arena[index * PITCH + 192 : index * PITCH + 192 + BLOCK] for index in indices])


def test_blocks_go_from_the_pool_into_registered_slots_and_back(device: CpuDevice, arena: memoryview) -> None:
    pool = torch.randint(0, 256, (8, BLOCK), dtype=torch.uint8)
    device.register_host(arena, is_read_only=False)
    offloaded = device.offload_to_slots(pool, [1, 2, 3, 7], slots=slots_of(arena, 4, 5, 6, 0))
    assert offloaded is not None
    offloaded.wait()
    other = torch.zeros_like(pool)
    loaded = device.load_from_slots(slots_of(arena, 4, 5, 6, 0), [0, 2, 3], pool=other, pool_rows=[5, 0, 1])
    assert loaded is not None
    loaded.wait()
    assert torch.equal(other[[5, 0, 1]], pool[[1, 3, 7]])
    assert not bool(other[[2, 3, 4, 6, 7]].any())


def test_slots_that_are_not_registered_are_not_copied(device: CpuDevice, arena: memoryview) -> None:
    pool = torch.ones((2, BLOCK), dtype=torch.uint8)
    assert device.offload_to_slots(pool, [0], slots=slots_of(arena, 0)) is None
    device.register_host(arena[: 2 * PITCH], is_read_only=False)
    assert device.offload_to_slots(pool, [0, 1], slots=slots_of(arena, 1, 2)) is None
    device.wait_idle()
    assert not any(arena)


def test_memory_that_is_registered_read_only_is_read_and_not_written(device: CpuDevice, arena: memoryview) -> None:
    pool = torch.ones((1, BLOCK), dtype=torch.uint8)
    device.register_host(arena.toreadonly(), is_read_only=True)
    assert device.offload_to_slots(pool, [0], slots=slots_of(arena, 0)) is None
    loaded = device.load_from_slots(slots_of(arena.toreadonly(), 0), [0], pool=pool, pool_rows=[0])
    assert loaded is not None
    loaded.wait()
    assert not bool(pool.any())


def test_unregistering_waits_for_the_copies_under_way_and_ends_dma(device: CpuDevice, arena: memoryview) -> None:
    pool = torch.ones((1, BLOCK), dtype=torch.uint8)
    registration = device.register_host(arena, is_read_only=False)
    assert device.offload_to_slots(pool, [0], slots=slots_of(arena, 3)) is not None
    registration.unregister()
    assert slots_of(arena, 3).views[0] == bytes([1]) * BLOCK
    assert device.offload_to_slots(pool, [0], slots=slots_of(arena, 3)) is None
    registration.unregister()
    arena.release()


def test_more_than_the_limit_and_the_same_memory_twice_are_refused(device: CpuDevice, arena: memoryview) -> None:
    with pytest.raises(CapacityError, match="limit is 1048576"):
        device.register_host(memoryview(bytearray((1 << 20) + 1)), is_read_only=False)
    device.register_host(arena, is_read_only=False)
    with pytest.raises(CapacityError, match="registered already"):
        device.register_host(arena[PITCH:], is_read_only=False)


# --- the CUDA runtime's calls, made to a library that does with the CPU what CUDA does with a GPU

_FAKE_CUDART = """
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
static int last_error;
static unsigned registered_flags;
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    if (kind != 4 || stream != (void *)77) return last_error = 1;
    memcpy(to, from, size);
    return 0;
}
int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                      int kind, void *stream) {
    if (kind != 4 || stream != (void *)77 || width > to_pitch || width > from_pitch) return last_error = 1;
    for (size_t row = 0; row < height; row++)
        memcpy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return 0;
}
int cudaHostRegister(void *address, size_t size, unsigned flags) {
    if (size > (1ul << 40)) return last_error = 801;
    if (size == 4096) return last_error = 712;
    registered_flags = flags;
    return 0;
}
int cudaHostUnregister(void *address) { return address ? 0 : (last_error = 713); }
int cudaMalloc(void **address, size_t size) {
    if (size > (1ul << 40)) return last_error = 2;
    *address = calloc(1, size);
    return 0;
}
int cudaFree(void *address) { free(address); return 0; }
typedef struct { char reserved[64]; } cudaIpcMemHandle_t;
int cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *address) {
    if (!address) return last_error = 801;
    memset(handle, 0x5a, sizeof *handle);
    memcpy(handle->reserved + 56, &address, 8);
    return 0;
}
int cudaIpcOpenMemHandle(void **address, cudaIpcMemHandle_t handle, unsigned flags) {
    if (flags != 1 || handle.reserved[0] != 0x5a) return last_error = 400;
    memcpy(address, handle.reserved + 56, 8);
    return 0;
}
int cudaIpcCloseMemHandle(void *address) { return address ? 0 : (last_error = 400); }
int cudaGetLastError(void) { int error = last_error; last_error = 0; return error; }
int flags(void) { return registered_flags; }
const char *cudaGetErrorString(int code) { return code == 801 ? "operation not supported" : "invalid"; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder: Path = tmp_path_factory.mktemp("cudart")
    (folder / "cudart.c").write_text(_FAKE_CUDART)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "cudart.so", folder / "cudart.c"], check=True)
    return CDLL(str(folder / "cudart.so"))


def test_the_runtime_is_called_with_what_the_plan_says(library: CDLL) -> None:
    cudart = Cudart(library)
    source, target = torch.arange(200, dtype=torch.uint8), torch.zeros(400, dtype=torch.uint8)
    cudart.copy(Transfer(source.data_ptr(), target.data_ptr() + 5, 30, 1, 30, 30, 10), stream=77)
    assert torch.equal(target[5:35], source[:30])
    cudart.copy(Transfer(source.data_ptr() + 3, target.data_ptr() + 100, 10, 4, 12, 50, 10), stream=77)
    for row in range(4):
        assert torch.equal(target[100 + 50 * row : 110 + 50 * row], source[3 + 12 * row : 13 + 12 * row])
    assert int((target != 0).sum()) == 29 + 40


def test_what_the_runtime_refuses_is_an_error_with_its_words_and_is_not_left_behind(library: CDLL) -> None:
    cudart, arena = Cudart(library), memoryview(bytearray(64))
    with pytest.raises(InternalError, match=r"copy failed: invalid \(1\)"):
        cudart.copy(Transfer(address_of(arena), address_of(arena), 8, 1, 8, 8, 8), stream=78)
    with pytest.raises(CapacityError, match=r"read-only memory: operation not supported \(801\)"):
        cudart.register(address_of(arena), 1 << 41, is_read_only=True)
    with pytest.raises(InternalError, match="does not unregister"):
        cudart.unregister(0)
    assert library.cudaGetLastError() == 0


@pytest.mark.parametrize(("is_read_only", "flags"), [(False, 1), (True, 9)])
def test_memory_is_registered_for_all_contexts_and_read_only_where_it_is_mapped_so(
    library: CDLL, is_read_only: bool, flags: int
) -> None:
    arena = memoryview(bytearray(64))
    assert Cudart(library).register(address_of(arena), len(arena), is_read_only=is_read_only)
    assert library.flags() == flags


def test_memory_that_the_engine_has_registered_is_reached_and_left_to_it(library: CDLL) -> None:
    assert not Cudart(library).register(address_of(memoryview(bytearray(4096))), 4096, is_read_only=False)
    assert library.cudaGetLastError() == 0


def test_an_allocation_is_opened_by_its_handle_where_another_process_would(library: CDLL) -> None:
    cudart = Cudart(library)
    address = cudart.allocate(4096)
    handle = cudart.ipc_handle(address)
    assert len(handle) == IPC_HANDLE_BYTES
    assert open_ipc(library, handle) == address
    close_ipc(library, address)
    cudart.free(address)
    assert library.cudaGetLastError() == 0


def test_what_cannot_be_allocated_or_shared_is_a_matter_of_capacity(library: CDLL) -> None:
    cudart = Cudart(library)
    with pytest.raises(CapacityError, match=r"does not allocate 2199023255552 bytes: invalid \(2\)"):
        cudart.allocate(1 << 41)
    with pytest.raises(CapacityError, match="operation not supported"):
        cudart.ipc_handle(0)
    with pytest.raises(CapacityError, match="does not open"):
        open_ipc(library, bytes(IPC_HANDLE_BYTES))
    close_ipc(library, 0)
    assert library.cudaGetLastError() == 0
