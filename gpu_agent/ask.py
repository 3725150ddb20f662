"""Asks a running sidecar, without torch."""

from __future__ import annotations

from contextlib import closing

from kvstore import wire
from kvstore.messages import AgentStatus, GetAgentStatusRequest
from kvstore_client.agent.calls import AgentCalls


def ask_status(address: str, *, timeout_s: float) -> AgentStatus:
    """Raises `KvstoreError` when no agent answers in time."""
    with closing(AgentCalls(address)) as calls:
        return calls.call(wire.GET_AGENT_STATUS, GetAgentStatusRequest(), timeout_s=timeout_s)
