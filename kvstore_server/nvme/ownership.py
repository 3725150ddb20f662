"""One daemon owns a folder of the NVMe tier: two would write over each other's blocks and pass the cap together."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from kvstore.errors import InvalidArgumentError, UnavailableError

LOCK_NAME = "owner.lock"
_RECORD_BYTES_MAX = 4096
# Whoever asks who owns a folder holds the lock for microseconds: that must not turn a daemon away.
_TRIES = 5
_TRY_AGAIN_S = 0.02


class FolderOwnedError(UnavailableError):
    """Another process owns the folder; the message says which."""


class Owner(NamedTuple):
    """What the last owner wrote down."""

    pid: int
    epoch_hex: str
    host: str
    started: str
    """ISO 8601, UTC."""
    is_running: bool
    """Whether the lock is held; it goes with the process that took it, however that ends."""


class Ownership:
    """A folder that is ours until `release`, or until this process ends.

    A child that is started by `exec` does not inherit the lock.
    """

    def __init__(self, fds: Sequence[int]) -> None:
        self._fds = list(fds)

    @classmethod
    def take(cls, folder: Path, *, epoch_hex: str) -> Ownership:
        """Raises `FolderOwnedError`, `InvalidArgumentError` where there is no folder, or `UnavailableError`."""
        if not folder.is_dir():
            raise InvalidArgumentError.of(
                "nvme.path", str(folder), "an existing folder that the daemon may write to; create or mount it"
            )
        path = folder / LOCK_NAME
        with contextlib.ExitStack() as undo:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                undo.callback(os.close, fd)
                # The folder, too: somebody may delete the file, which would then be another one for the next to come.
                folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                undo.callback(os.close, folder_fd)
                if _lock(fd) and _lock(folder_fd):
                    _write_record(fd, epoch_hex)
                    _sync_folder(folder)
                    undo.pop_all()
                    return cls((fd, folder_fd))
                owner = _read_record(fd)
            except OSError as error:
                raise _cannot_own(path, error) from error
            raise FolderOwnedError(_describe_owner(folder, owner))

    def release(self) -> None:
        """Lets the next one in; may be called again."""
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> Ownership:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def read_owner(folder: Path) -> Owner | None:
    """Who owns a folder, or did last; None: nobody ever, or the record cannot be read as one. Raises `OSError`."""
    try:
        fd = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        record = _read_record(fd)
        if record is None:
            return None
        return record._replace(is_running=not _lock_nowait(fd, fcntl.LOCK_SH))
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_TRY_AGAIN_S)
        if _lock_nowait(fd, fcntl.LOCK_EX):
            return True
    return False


def _lock_nowait(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_record(fd: int, epoch_hex: str) -> None:
    record = {
        "pid": os.getpid(),
        "epoch": epoch_hex,
        "host": socket.gethostname(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    line = json.dumps(record).encode() + b"\n"
    if os.pwrite(fd, line, 0) != len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(fd, len(line))
    os.fsync(fd)


def _read_record(fd: int) -> Owner | None:
    """None also while it is being written."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        record = json.loads(os.pread(fd, _RECORD_BYTES_MAX, 0))
        return Owner(
            pid=int(record["pid"]),
            epoch_hex=str(record["epoch"]),
            host=str(record["host"]),
            started=str(record["started"]),
            is_running=True,
        )
    return None


def _describe_owner(folder: Path, owner: Owner | None) -> str:
    who = (
        "a process that has not written down its name yet"
        if owner is None
        else f"process {owner.pid} on {owner.host}, epoch {owner.epoch_hex}, since {owner.started}"
    )
    return (
        f"nvme.path {folder} is owned by {who}; stop that daemon first, or name another folder "
        f"({LOCK_NAME} need not be deleted: the lock ends with its process)"
    )


def _cannot_own(path: Path, error: OSError) -> UnavailableError:
    hint = {
        errno.EROFS: "mount the file system writable",
        errno.EACCES: "give the folder to the user that the daemon runs as",
        errno.EPERM: "give the folder to the user that the daemon runs as",
        errno.ENOSPC: "free some space on its file system",
        errno.EDQUOT: "raise the quota, or free some space",
        errno.EISDIR: f"{LOCK_NAME} must be a file",
        errno.ELOOP: f"{LOCK_NAME} must be a file, not a link",
    }.get(error.errno or 0, "check the device and its file system")
    return UnavailableError(f"nvme.path cannot be owned: {path}: {error.strerror}; {hint}")


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
