"""Where the daemon is: what the caller says, the environment says, or the node's own socket.

The order is part of the contract with operators: argument, `$KVSTORE_ADDRESS`, the first socket of
`socket_candidates()` that answers, `127.0.0.1:7450`.
"""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kvstore.errors import InvalidArgumentError

ADDRESS_VARIABLE = "KVSTORE_ADDRESS"
DEFAULT_PORT = 7450
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"
_SOCKET_NAME = "kvstore.sock"
_ALLOWED = "host:port (such as 127.0.0.1:7450 or [::1]:7450) or unix:/absolute/path"
_UNIX_PATH_MAX_BYTES = 107
"""Linux's `sun_path` without its closing zero."""


def find_address(address: str | None = None) -> str:
    """The checked address of the daemon to use; what is named is taken as it is, without a look."""
    if address is not None:
        return parse_address(address, field="address")
    from_environment = os.environ.get(ADDRESS_VARIABLE)
    if from_environment:
        return parse_address(from_environment, field=f"${ADDRESS_VARIABLE}")
    for path in socket_candidates():
        if is_trusted_socket(path) and _is_served(path):
            return f"unix:{path}"
    return DEFAULT_ADDRESS


def parse_address(text: str, *, field: str = "address") -> str:
    """The address in its one form, or `InvalidArgumentError` naming `field`."""
    if not isinstance(text, str):
        raise InvalidArgumentError.of(field, text, _ALLOWED)
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if path.startswith("//"):
            path = path.removeprefix("//")
        if not path.startswith("/") or path.endswith("/") or "\0" in path:
            raise InvalidArgumentError.of(field, text, _ALLOWED)
        if len(os.fsencode(path)) > _UNIX_PATH_MAX_BYTES:
            raise InvalidArgumentError.of(field, text, f"a socket path of up to {_UNIX_PATH_MAX_BYTES} bytes")
        return f"unix:{path}"
    host, colon, port = text.rpartition(":")
    if not colon or not _is_host(host) or not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise InvalidArgumentError.of(field, text, _ALLOWED)
    return f"{host}:{int(port)}"


def socket_candidates(
    *, environ: Mapping[str, str] | None = None, uid: int | None = None, temp_dir: str | None = None
) -> list[Path]:
    """Where a node's socket may be, most private first; what is not given is this process's own."""
    environ = os.environ if environ is None else environ
    uid = os.getuid() if uid is None else uid
    temp_dir = tempfile.gettempdir() if temp_dir is None else temp_dir
    runtime_dir = environ.get("XDG_RUNTIME_DIR", "")
    candidates = [Path("/run/kvstore", _SOCKET_NAME), Path(temp_dir, f"kvstore-{uid}", _SOCKET_NAME)]
    if runtime_dir.startswith("/"):
        candidates.insert(0, Path(runtime_dir, "kvstore", _SOCKET_NAME))
    return [path for path in candidates if len(os.fsencode(path)) <= _UNIX_PATH_MAX_BYTES]


def default_socket_path() -> Path | None:
    """Where a daemon should put its socket so that clients find it; None when no candidate's folder is writable.

    The folder may have to be made (mode 0700). Clients trust only sockets in folders of their own user or root.
    """
    for path in socket_candidates():
        folder = path.parent
        if folder.is_dir():
            if os.access(folder, os.W_OK | os.X_OK) and _is_trusted_owner(folder.lstat().st_uid):
                return path
        elif folder.parent.is_dir() and os.access(folder.parent, os.W_OK | os.X_OK):
            return path
    return None


def is_trusted_socket(path: Path) -> bool:
    """A socket that no other user can have put there, even below a world-writable folder."""
    try:
        entry, folder = path.lstat(), path.parent.lstat()
    except OSError:
        return False
    return stat.S_ISSOCK(entry.st_mode) and _is_trusted_owner(entry.st_uid) and _is_trusted_owner(folder.st_uid)


def _is_served(path: Path) -> bool:
    """Whether somebody listens whom this process may talk to; never waits."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True  # there, with more callers than it has taken yet
        except OSError:
            return False
    return True


def _is_host(host: str) -> bool:
    if host.startswith("[") and host.endswith("]"):
        return ":" in host and all(letter in "0123456789abcdefABCDEF:.%" for letter in host[1:-1])
    return bool(host) and all(letter.isalnum() or letter in "-._" for letter in host)


def _is_trusted_owner(uid: int) -> bool:
    return uid in (os.getuid(), 0)
