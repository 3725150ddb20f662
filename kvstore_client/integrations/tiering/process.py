"""Starts a mover, talks to it, and ends it. Nothing here waits for it but `kill`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import InvalidArgumentError
from kvstore_client.integrations.tiering.messages import (
    DATAGRAM_BYTES_MAX,
    Answer,
    Identity,
    Task,
    decode_answer,
)
from kvstore_client.integrations.tiering.mover import MoverSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """Memory of this process that is a file's, so that another process can map it, too."""

    path: str
    offset_bytes: int
    size_bytes: int
    device: tuple[int, int]
    inode: int

    @classmethod
    def find(cls, address: int, size_bytes: int) -> SharedMemory:
        """The file that is mapped here; raises `InvalidArgumentError` where none is."""
        found: SharedMemory | None = None
        reached = address
        for line in Path("/proc/self/maps").read_text().splitlines():
            bounds, access, offset, device, inode, *path = line.split(maxsplit=5)
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            if not start <= reached < end or not access.endswith("s") or not path:
                continue
            major, minor = (int(number, 16) for number in device.split(":"))
            part = cls(
                path=path[0],
                offset_bytes=int(offset, 16) + address - start,
                size_bytes=size_bytes,
                device=(major, minor),
                inode=int(inode),
            )
            # Advice about some of its pages makes several lines of one mapping.
            if found is not None and part != found:
                break
            found, reached = part, end
            if address + size_bytes <= end:
                return found
        raise InvalidArgumentError.of("primary_kv_view", f"{size_bytes} bytes of private memory", "a shared file")

    def open(self) -> int:
        """A descriptor of the very file that is mapped; raises `OSError` when it has gone from its folder."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        found = os.fstat(descriptor)
        if (os.major(found.st_dev), os.minor(found.st_dev), found.st_ino) != (*self.device, self.inode):
            os.close(descriptor)
            raise FileNotFoundError(f"{self.path} is another file by now")
        return descriptor


class MoverProcess:
    """A mover and the channel to it. What it does not take now is kept until it does."""

    def __init__(
        self,
        memory: SharedMemory,
        *,
        memory_fd: int,
        row_bytes: int,
        address: str | None,
        transport: str,
        recompute_s_per_block: float | None,
    ) -> None:
        """`memory_fd` is what `memory.open` gave, and stays the caller's. Raises `OSError` if none can be started."""
        self._waiting: deque[bytes] = deque()
        self._is_gone = False
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            setup = MoverSetup(
                channel_fd=theirs.fileno(),
                memory_fd=memory_fd,
                memory_offset_bytes=memory.offset_bytes,
                memory_bytes=memory.size_bytes,
                row_bytes=row_bytes,
                address=address,
                transport=transport,
                recompute_s_per_block=recompute_s_per_block,
            )
            # -P: the engine's working directory is no place to import from.
            command = [sys.executable, "-P", "-m", "kvstore_client.integrations.tiering.mover"]
            try:
                self._process = subprocess.Popen(
                    [*command, setup.model_dump_json()],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), memory_fd),
                    # A Ctrl-C is the engine's to handle, which may have blocks to store.
                    start_new_session=True,
                )
            except OSError:
                self._channel.close()
                raise
        self._channel.setblocking(False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Readable once there are answers, or it is gone."""
        return self._channel.fileno()

    @property
    def is_gone(self) -> bool:
        return self._is_gone

    def tell(self, message: Identity | Task) -> None:
        self._waiting.append(message.encode())
        self.flush()

    def flush(self) -> None:
        try:
            while self._waiting and not self._is_gone:
                self._channel.send(self._waiting[0])
                self._waiting.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._is_gone = True

    def answers(self) -> Iterable[Answer]:
        """What it has answered since the last time."""
        while True:
            try:
                data = self._channel.recv(DATAGRAM_BYTES_MAX)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._is_gone = True
                return
            yield decode_answer(data)

    def kill(self) -> None:
        """Ends it at once. When this returns, it touches no memory any more."""
        self._is_gone = True
        self._process.kill()
        self._process.wait()
        self._channel.close()
