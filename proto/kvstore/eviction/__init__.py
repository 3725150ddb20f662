"""Which blocks leave first: the one policy for VRAM, memory and NVMe. Pure; time and order are arguments."""

from __future__ import annotations

from kvstore.eviction.evictor import DEMOTED_GAIN_MIN, NEW_GAIN_MIN, POLICIES, Evictor, PolicyFigures
from kvstore.eviction.use import NO_HINT, PRIORITY_MAX, Finish, Request, Use
from kvstore.eviction.watermarks import Watermarks

__all__ = [
    "DEMOTED_GAIN_MIN",
    "NEW_GAIN_MIN",
    "NO_HINT",
    "POLICIES",
    "PRIORITY_MAX",
    "Evictor",
    "Finish",
    "PolicyFigures",
    "Request",
    "Use",
    "Watermarks",
]
