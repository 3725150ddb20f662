"""Which blocks leave first: the one policy for VRAM, memory and NVMe. Pure; time and order are arguments."""

from __future__ import annotations

from kvstore.eviction.leaf_lru import LeafLru
from kvstore.eviction.watermarks import Watermarks

__all__ = ["LeafLru", "Watermarks"]
