"""Where the pool's bytes lie and how they move: one interface, a CUDA device and a CPU device."""

from __future__ import annotations

from gpu_agent.device.base import CallerRows, Device, Event, Registration
from gpu_agent.device.memory import HostSlots
from gpu_agent.device.paged import PagedBlocks, PagedCache
from kvstore.errors import InvalidArgumentError

__all__ = [
    "CallerRows",
    "Device",
    "Event",
    "HostSlots",
    "PagedBlocks",
    "PagedCache",
    "Registration",
    "open_device",
]


def open_device(name: str) -> Device:
    """The device called `cpu` or `cuda:N`; raises `InvalidArgumentError` when this machine has none such."""
    kind, _, index = name.partition(":")
    if name == "cpu":
        from gpu_agent.device.cpu import CpuDevice

        return CpuDevice()
    if kind == "cuda" and (index.isdigit() or not index):
        from gpu_agent.device.cuda import CudaDevice

        return CudaDevice(index=int(index or 0))
    raise InvalidArgumentError.of("device", name, "cpu, cuda, cuda:N")
