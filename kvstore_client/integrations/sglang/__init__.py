"""SGLang: one flag, and prompts that any engine on this store has seen are loaded instead of computed.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvstore",
        "module_path": "kvstore_client.integrations.sglang", "class_name": "KVStoreHiCache", "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": true}'

`hicache` is what SGLang loads, and the only module that imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore_client.integrations.sglang.hicache import KVStoreHiCache

__all__ = ["KVStoreHiCache"]


def __getattr__(name: str) -> Any:
    if name == "KVStoreHiCache":
        from kvstore_client.integrations.sglang.hicache import KVStoreHiCache

        return KVStoreHiCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
