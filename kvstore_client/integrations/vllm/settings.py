"""What `kv_connector_extra_config` may say."""

from __future__ import annotations

from pydantic import Field

from kvstore_client.integrations._blocks import StoreSettings


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
