"""PHIX: a Gittins index over learned hazards of prefix reuse (docs/policy.md)."""

from __future__ import annotations

from kvstore.eviction.phix.ranking import Phix

__all__ = ["Phix"]
