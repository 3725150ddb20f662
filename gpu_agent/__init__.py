"""The VRAM tier of a node: a pool of blocks on a device, in front of the store.

`GpuAgent` and `PagedCache` need torch and load it on first use; the command line and `core` get by without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpu_agent.config import AgentConfig

if TYPE_CHECKING:
    from gpu_agent.agent import GpuAgent
    from gpu_agent.device.paged import PagedCache

__all__ = ["AgentConfig", "GpuAgent", "PagedCache"]


def __getattr__(name: str) -> object:
    if name == "GpuAgent":
        from gpu_agent.agent import GpuAgent

        return GpuAgent
    if name == "PagedCache":
        from gpu_agent.device.paged import PagedCache

        return PagedCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
