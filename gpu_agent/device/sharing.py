"""Pools that other processes of this node reach: what tells them where the memory is, and how they open it."""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpu_agent.device.cudart import Cudart
from kvstore.errors import CapacityError, InvalidArgumentError
from kvstore_client.agent.cuda import open_cuda_pool, tensor_at


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHandle:
    """Where a shared pool is; every process that has it may read and write the pool."""

    slot_count: int
    block_bytes: int
    descriptor: int | None = None
    """Of a pool in host memory: the device's own, to be handed over a unix socket while the device is open."""
    device_uuid: str = ""
    """Of a pool on a GPU: which one, as numbers of devices differ between processes."""
    ipc_handle: bytes = b""
    """Of a pool on a GPU: what CUDA opens it with."""


class HostPool:
    """Memory with a descriptor, of a size that nobody can change."""

    def __init__(self, *, slot_count: int, block_bytes: int, memory_bytes: int) -> None:
        """Pages come when they are touched, of a machine with so much memory; raises `CapacityError`."""
        size_bytes = slot_count * block_bytes
        if size_bytes > memory_bytes:
            raise CapacityError(f"no {size_bytes} bytes of shared memory: the machine has {memory_bytes}")
        self.descriptor = os.memfd_create("kvstore-agent-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self.descriptor, 0o600)
            os.ftruncate(self.descriptor, size_bytes)
            # A process that cuts it off would kill the others.
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            self.memory = _map(self.descriptor, slot_count=slot_count, block_bytes=block_bytes)
        except OSError as error:
            os.close(self.descriptor)
            raise CapacityError(f"no {size_bytes} bytes of shared memory: {error}") from error

    def close(self) -> None:
        """The mapping goes with the last tensor of it."""
        os.close(self.descriptor)


def allocate_on(cudart: Cudart | None, device: torch.device, *, slot_count: int, block_bytes: int) -> Tensor:
    """An allocation of its own, since what CUDA shares are whole allocations; raises `CapacityError`."""
    if cudart is None:
        raise CapacityError("no CUDA runtime library was found beside torch, so no pool can be shared")
    with torch.cuda.device(device):
        address = cudart.allocate(slot_count * block_bytes)
    free = partial(cudart.free, address)
    return tensor_at(address, device, slot_count=slot_count, block_bytes=block_bytes, give_back=free)


def open_pool(handle: PoolHandle) -> Tensor:
    """A pool of another process, [slot_count, block_bytes]; it lasts while the tensor, or any view of it, does.

    A descriptor in the handle is the caller's, who may close it at once. Raises `InvalidArgumentError` when the handle
    says nothing of use, and `CapacityError` when this process does not reach the pool.
    """
    if handle.descriptor is not None:
        size_bytes = os.fstat(handle.descriptor).st_size
        if size_bytes != handle.slot_count * handle.block_bytes:
            allowed = (
                f"{size_bytes // handle.block_bytes} of {handle.block_bytes} bytes, as the descriptor's memory has"
            )
            raise InvalidArgumentError.of("slot_count", handle.slot_count, allowed)
        try:
            return _map(handle.descriptor, slot_count=handle.slot_count, block_bytes=handle.block_bytes)
        except OSError as error:
            raise CapacityError(f"the agent's pool cannot be mapped: {error}") from error
    return open_cuda_pool(
        handle.ipc_handle,
        device_uuid=handle.device_uuid,
        slot_count=handle.slot_count,
        block_bytes=handle.block_bytes,
    )


def _map(descriptor: int, *, slot_count: int, block_bytes: int) -> Tensor:
    mapping = mmap.mmap(descriptor, slot_count * block_bytes)
    return torch.frombuffer(mapping, dtype=torch.uint8).view(slot_count, block_bytes)
