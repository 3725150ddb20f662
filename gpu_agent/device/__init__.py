"""Where the pool's bytes lie and how they move: one interface, a CUDA device and a CPU device."""

from __future__ import annotations

from gpu_agent.device.base import CallerRows, Device, Event, Registration
from gpu_agent.device.memory import HostSlots
from gpu_agent.device.paged import PagedBlocks, PagedCache
from gpu_agent.device.sharing import PoolHandle, open_pool
from kvstore.errors import InvalidArgumentError

__all__ = [
    "CallerRows",
    "Device",
    "Event",
    "HostSlots",
    "PagedBlocks",
    "PagedCache",
    "PoolHandle",
    "Registration",
    "open_device",
    "open_pool",
]


def open_device(name: str, *, shares_pools: bool = False) -> Device:
    """The device called `cpu` or `cuda:N`; raises `InvalidArgumentError` when this machine has none such.

    With `shares_pools`, its pools are such that other processes of this node can open them.
    """
    kind, _, index = name.partition(":")
    if name == "cpu":
        from gpu_agent.device.cpu import CpuDevice

        return CpuDevice(shares_pools=shares_pools)
    if kind == "cuda" and (index.isdigit() or not index):
        from gpu_agent.device.cuda import CudaDevice

        return CudaDevice(index=int(index or 0), shares_pools=shares_pools)
    raise InvalidArgumentError.of("device", name, "cpu, cuda, cuda:N")
