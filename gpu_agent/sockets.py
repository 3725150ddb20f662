"""Where a sidecar is found: on its own machine only."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore_client.address import default_socket_path, is_trusted_socket, parse_address, socket_candidates

DEFAULT_GRPC_PORT = 7452
DEFAULT_METRICS_PORT = 7453
ADDRESS_VARIABLE = "KVSTORE_AGENT_ADDRESS"
_SOCKET_NAME = "kvstore-agent.sock"


def default_agent_socket_path() -> Path | None:
    """Beside the daemon's socket; None when no such folder is writable."""
    path = default_socket_path()
    return None if path is None else path.with_name(_SOCKET_NAME)


def find_agent(address: str | None) -> str:
    """What the caller says, `$KVSTORE_AGENT_ADDRESS`, the node's own socket, `127.0.0.1:7452`."""
    if address is not None:
        return parse_address(address, field="--address")
    if from_environment := os.environ.get(ADDRESS_VARIABLE):
        return parse_address(from_environment, field=f"${ADDRESS_VARIABLE}")
    for candidate in socket_candidates():
        path = candidate.with_name(_SOCKET_NAME)
        if is_trusted_socket(path):
            return f"unix:{path}"
    return f"127.0.0.1:{DEFAULT_GRPC_PORT}"
