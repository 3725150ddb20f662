"""What the processes that serve one machine, daemon and agent, do alike: listen, yield to each other, be found."""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import socket
import stat
import sys
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from kvstore.errors import UnavailableError
from kvstore_client.address import parse_address

LOOPBACK_ALLOWED = (
    "a loopback address (127.0.0.1, ::1, localhost): there is no authentication yet, so it serves its own machine only"
)
_PROBE_TIMEOUT_S = 2.0
"""How long another process may take to accept a connection on its socket; the kernel does it at once."""

_log = structlog.get_logger("kvstore.hosting")

Parts = ExitStack | AsyncExitStack
"""What a process takes down when it stops, last in first out."""
Bind = Callable[[str], int]
"""Makes a server listen on a gRPC address and returns the port; raises `OSError` when that cannot be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """How messages speak of a kind of process and of what its operator can do."""

    name: str
    asked_with: str
    """The command that tells whether one answers."""
    port_setting: str
    socket_setting: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where a running process is found; written to the ready file."""

    grpc_address: str
    unix_address: str | None
    metrics_address: str
    pid: int
    slab_address: str | None = None
    """Of the daemon alone, as is the next one."""
    bulk_address: str | None = None


def open_standard_files() -> None:
    """Puts /dev/null where stdin, stdout or stderr is closed, or the next socket gets that number and their text.

    To be called before the process opens anything.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen_tcp(bind: Bind, *, host: str, port: int, role: Role) -> str:
    """Listens on a port, 0 for any free one, and returns the address; raises `UnavailableError`."""
    shown_host = f"[{host}]" if ":" in host else host
    try:
        _check_bindable(host, port)
        return f"{shown_host}:{bind(f'{shown_host}:{port}')}"
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            reason = f"it is in use, perhaps by another {role.name} (`{role.asked_with}` tells)"
        raise UnavailableError(
            f"cannot listen on {shown_host}:{port}: {reason}; free it, or set {role.port_setting} (0: any free port)"
        ) from error


def listen_unix(bind: Bind, path: Path, *, role: Role, parts: Parts) -> str:
    """Listens on a socket for this user alone, until the process stops; returns its address.

    Takes over what a dead process left. Raises `UnavailableError` when a live one serves there, when something
    that is no socket is in the way, or when no socket can be there.
    """
    path = path.absolute()
    address = parse_address(f"unix:{path}", field=role.socket_setting)
    try:
        _claim_socket(path, role=role)
        bind(address)
        path.chmod(0o600)  # nobody but this user, until there is authentication
    except OSError as error:
        reason = error.strerror or str(error)
        raise UnavailableError(f"cannot listen on {path}: {reason}; set {role.socket_setting}") from error
    remove_at_exit(path, parts)
    return address


def announce(addresses: Addresses, ready_file: Path | None, parts: Parts) -> None:
    """The ready file, which appears whole or not at all, and then the same on stdout as one line.

    A stdout that cannot be written stops nothing: the process serves, and the log says so.
    """
    line = json.dumps(asdict(addresses))
    if ready_file is not None:
        try:
            _write_whole(ready_file, line + "\n")
        except OSError as error:
            raise UnavailableError(f"cannot write the ready file {ready_file}: {error.strerror}") from error
        remove_at_exit(ready_file, parts)
    try:
        print(line, flush=True)  # noqa: T201  (this is the command's output)
    except OSError as error:
        _log.warning(
            "stdout_unwritable", reason=error.strerror, ready_file=None if ready_file is None else str(ready_file)
        )
        _give_up_stdout()


def remove_at_exit(path: Path, parts: Parts) -> None:
    """Removes a file of ours when we stop, but not what a successor has put in its place while we drained."""

    def identity() -> tuple[int, ...] | None:
        try:
            entry = path.lstat()
        except FileNotFoundError:
            return None
        return entry.st_dev, entry.st_ino, entry.st_mtime_ns

    ours = identity()

    def remove() -> None:
        if ours is not None and identity() == ours:
            path.unlink(missing_ok=True)

    parts.callback(remove)


def _give_up_stdout() -> None:
    """What could not be written stays in its buffer, and would fail again, as the exit code, when the process ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _check_bindable(host: str, port: int) -> None:
    """Raises the system's own `OSError`: gRPC's says less, and gRPC writes to stderr by itself when it fails."""
    failure: OSError | None = None
    is_bound = False
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                # As gRPC does: connections of a predecessor that still close are not in the way, a listener is.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                is_bound = True
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            failure = error  # such as ::1 for `localhost` on a machine without IPv6
    if failure is not None and not is_bound:
        raise failure


def _claim_socket(path: Path, *, role: Role) -> None:
    """Leaves the path free and its folder such that a socket can be made there."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise UnavailableError(f"{path} is in the way and is not a socket; remove it, or set {role.socket_setting}")
        if _is_answered(path):
            raise UnavailableError(
                f"another {role.name} serves {path} (`{role.asked_with} --address unix:{path}`); "
                f"stop it, or set {role.socket_setting}"
            )
        path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.bind(str(path))
    path.unlink()


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except (TimeoutError, BlockingIOError):
            return True  # its queue is full, so somebody has it
    return True


def _write_whole(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    try:
        Path(file.name).replace(path)
    except OSError:
        Path(file.name).unlink()
        raise
