"""Where this node's agent is found: on its own machine only."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore_client.address import default_socket_path, is_trusted_socket, parse_address, socket_candidates

AGENT_ADDRESS_VARIABLE = "KVSTORE_AGENT_ADDRESS"
DEFAULT_AGENT_PORT = 7452
_SOCKET_NAME = "kvstore-agent.sock"


def default_agent_socket_path() -> Path | None:
    """Beside the daemon's socket; None when no such folder is writable."""
    path = default_socket_path()
    return None if path is None else path.with_name(_SOCKET_NAME)


def find_agent(address: str | None, *, field: str = "--address") -> str:
    """What the caller says, `$KVSTORE_AGENT_ADDRESS`, the node's own socket, `127.0.0.1:7452`."""
    return named_agent(address, field=field) or present_agent() or f"127.0.0.1:{DEFAULT_AGENT_PORT}"


def named_agent(address: str | None, *, field: str) -> str | None:
    """What the caller or `$KVSTORE_AGENT_ADDRESS` says."""
    if address is not None:
        return parse_address(address, field=field)
    if from_environment := os.environ.get(AGENT_ADDRESS_VARIABLE):
        return parse_address(from_environment, field=f"${AGENT_ADDRESS_VARIABLE}")
    return None


def present_agent() -> str | None:
    """The socket where an agent of this node serves, or has served."""
    for candidate in socket_candidates():
        path = candidate.with_name(_SOCKET_NAME)
        if is_trusted_socket(path):
            return f"unix:{path}"
    return None
