"""Engines beside a sidecar: what the sidecar grants them, and what they do with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_agent.attach.agent import AttachedAgent

__all__ = ["AttachedAgent"]


def __getattr__(name: str) -> object:
    if name == "AttachedAgent":
        from gpu_agent.attach.agent import AttachedAgent

        return AttachedAgent
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
