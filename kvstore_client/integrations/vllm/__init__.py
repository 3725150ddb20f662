"""vLLM: one flag, and prompts that any engine on this store has seen are loaded instead of computed.

    vllm serve MODEL --kv-transfer-config '{"kv_connector":"KVStoreConnector",
        "kv_connector_module_path":"kvstore_client.integrations.vllm","kv_role":"kv_both",
        "kv_load_failure_policy":"recompute"}'

`scheduler` decides and `worker` moves; neither imports vLLM. `connector` is what vLLM loads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore_client.integrations.vllm.connector import KVStoreConnector

__all__ = ["KVStoreConnector", "register"]


def register() -> None:
    """Makes the connector known by its name alone; vLLM calls it, as it is the package's plug-in entry point."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KVStoreConnector" not in KVConnectorFactory._registry:  # noqa: SLF001  (vLLM offers no other way to ask)
        KVConnectorFactory.register_connector(
            "KVStoreConnector", "kvstore_client.integrations.vllm.connector", "KVStoreConnector"
        )


def __getattr__(name: str) -> Any:
    if name == "KVStoreConnector":
        from kvstore_client.integrations.vllm.connector import KVStoreConnector

        return KVStoreConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
