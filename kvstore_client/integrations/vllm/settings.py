"""What `kv_connector_extra_config` may say."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from kvstore_client.address import parse_address
from kvstore_client.integrations._blocks import StoreSettings
from kvstore_client.integrations._store import Store

_LOG = logging.getLogger("vllm.kvstore")  # below vLLM's own logger, so that its handlers show it


class ConnectorSettings(StoreSettings):
    """Settings of the connector; the defaults need no change where a daemon runs on the node."""

    lookup_timeout_s: float = Field(default=0.5, gt=0, le=60)
    """Seconds that a request waits at most to know what the store has; then it is computed."""
    pending_wait_s: float = Field(default=0.5, ge=0, le=60)
    """Seconds that it waits for a block that another engine is storing just now."""
    store_share_max: float = Field(default=0.25, gt=0, le=1)
    """Share of the engine's KV blocks that stores under way may hold; what is beyond is not stored."""
    tool_stop_token_ids: tuple[int, ...] = ()
    """Ids of the tokens by which the model ends an answer to call a tool, such as those of `<|eom_id|>` and `<|call|>`:
    then its session will be back soon."""
    agent: str = "off"
    """The node's agent, whose VRAM keeps what the engine has no room for: `auto` uses it while there is one, an address
    (`host:port` or `unix:/path`) names it."""

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any] | None, *, where: str) -> ConnectorSettings:
        found = super().parse(extra_config, where=where)
        if found.agent not in ("off", "auto"):
            parse_address(found.agent, field=f"{where}.agent")
        return found

    def open_store(self, *, namespace_count: int = 1) -> Store:
        """The daemon, with the agent before it where one is asked for; that many namespaces share the agent's memory.

        It connects at its first call, and asks again while there is nobody.
        """
        client = self.open_client()
        if self.agent == "off":
            return client
        # Here, since it needs gRPC, and a client on the daemon's node does not.
        from kvstore_client.agent.client import AgentClient, AgentClientConfig
        from kvstore_client.integrations._agent_first import AgentFirst

        config = AgentClientConfig(namespace_count=namespace_count)
        address = None if self.agent == "auto" else self.agent
        return AgentFirst(AgentClient(address, config=config, log=_LOG), client)
