"""Where a worker's pool meets the scheduler.

The engine makes both in one process and gives them nothing in common but its arguments; only the worker is shown the
pool, and only the scheduler is asked what is stored for it. So they meet here, by what they know alike.
"""

from __future__ import annotations

from kvstore_client.integrations.tensorrt_llm.model import PoolShape

_registered: dict[str, PoolShape] = {}


def register(key: str, pool: PoolShape) -> None:
    _registered[key] = pool


def registered(key: str) -> PoolShape | None:
    return _registered.get(key)
