"""Where a sidecar listens and is found: on its own machine only."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from pathlib import Path

from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore_client.address import default_socket_path, parse_address, socket_candidates

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
        try:
            entry = path.lstat()
        except OSError:
            continue
        if stat.S_ISSOCK(entry.st_mode) and entry.st_uid in (os.getuid(), 0):
            return f"unix:{path}"
    return f"127.0.0.1:{DEFAULT_GRPC_PORT}"


def check_loopback(host: str) -> str:
    """The host as it goes into an address; raises `InvalidArgumentError` for any that others can reach."""
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise InvalidArgumentError.of(
            "--grpc-host",
            host,
            "a loopback address (127.0.0.1, ::1, localhost): there is no authentication yet, "
            "so the agent serves its own machine only",
        )
    return f"[{host}]" if ":" in host else host


def claim_socket(path: Path) -> None:
    """Removes a socket that a dead agent left; refuses to take a live one's, or anything that is no socket."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            return
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise UnavailableError(f"{path} is in the way and is not a socket; remove it, or choose --socket-path")
        if not _is_answered(path):
            path.unlink()
            return
    except OSError as error:
        raise UnavailableError(f"{path} cannot be used: {error.strerror}; choose --socket-path") from error
    raise UnavailableError(f"another agent serves {path}; stop it, or choose --socket-path")


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True
