"""Serves the arenas to NIXL from a process of their own, and starts that anew when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Sequence

import structlog

from kvstore.errors import UnavailableError
from kvstore_client.paths.nixl import check_installed
from kvstore_server.rpc.nixl_worker import LENGTH_BYTES

_START_S_MAX = 60.0
"""Registering pins all memory where there is RDMA, at some GiB per second."""
_RESTART_S_MIN = 0.1
_RESTART_S_MAX = 10.0

_log = structlog.get_logger("kvstore.nixl")


class NixlEndpoint:
    """One-sided access to all arenas, for whoever knows the metadata.

    In another process, because the library below NIXL ends the process that serves when a client vanishes at a bad
    moment. The daemon then loses this path for a moment, and no block.
    """

    def __init__(
        self,
        descriptors: Sequence[int],
        *,
        arena_bytes: int,
        on_metadata: Callable[[bytes], None],
        on_fenced: Callable[[], None],
    ) -> None:
        """Takes writable descriptors of all arenas, in order. Raises `UnavailableError` when NIXL is not installed.

        `on_metadata` is told what `StoreInfo` shall tell: the metadata of who serves now, or nothing. `on_fenced` is
        called while that is nothing, when nobody is left who could write what clients have put on their way.
        """
        check_installed()
        self._descriptors = tuple(descriptors)
        self._arena_bytes = arena_bytes
        self._tell = on_metadata
        self._on_fenced = on_fenced
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Serves until cancelled. To be started once all arenas are faulted in, for it faults in what is not."""
        pause_s = _RESTART_S_MIN
        while True:
            try:
                async with asyncio.timeout(_START_S_MAX):
                    process, metadata = await self._start()
            except (UnavailableError, TimeoutError) as error:
                _log.warning("nixl_not_started", error=str(error) or "it took too long", next_try_s=pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _RESTART_S_MAX)
                continue
            pause_s = _RESTART_S_MIN
            _log.info("nixl_serving", pid=process.pid)
            self._tell(metadata)
            try:
                code = await process.wait()
            finally:
                await self.fence()
            _log.warning("nixl_ended", code=code)

    async def fence(self) -> None:
        """Returns when nothing that a client has put on its way can reach an arena any more.

        It costs every client its connection, so it is for what a broken write may have left behind.
        """
        self._tell(b"")
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if self._process is process:
            self._process = None
            self._on_fenced()

    def close(self) -> None:
        """Gives the descriptors back, once `run` has ended."""
        for descriptor in self._descriptors:
            os.close(descriptor)

    async def _start(self) -> tuple[asyncio.subprocess.Process, bytes]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kvstore_server.rpc.nixl_worker",
            str(self._arena_bytes),
            *[str(descriptor) for descriptor in self._descriptors],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=self._descriptors,
        )
        self._process = process
        assert process.stdout is not None, "stdout is a pipe"
        try:
            length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "little")
            metadata = await process.stdout.readexactly(length)
        except asyncio.IncompleteReadError as error:
            await self.fence()
            raise UnavailableError("the NIXL process ended before it served; its own words are in the log") from error
        except BaseException:
            await self.fence()
            raise
        return process, metadata
