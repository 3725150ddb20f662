"""Carries out the steps of flows, for asyncio: which transport and which path each one takes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from kvstore.envelope import checksum
from kvstore.errors import KvstoreError, UnavailableError
from kvstore.messages import StoreInfo, TransferPath
from kvstore.slab import Access
from kvstore_client.config import ClientConfig
from kvstore_client.flows.steps import (
    Call,
    Checksum,
    ChoosePath,
    Fetch,
    Glance,
    HashAhead,
    Post,
    Read,
    Recall,
    Route,
    Send,
    Step,
    View,
    Write,
)
from kvstore_client.guard import Guard
from kvstore_client.paths.slab import SlabSession
from kvstore_client.paths.slab_calls import IDEMPOTENT, AttachRefusedError, SessionLostError
from kvstore_client.paths.slab_calls_aio import AsyncCalls
from kvstore_client.paths.ways import Ways
from kvstore_client.unseen import UnseenHits

if TYPE_CHECKING:
    from kvstore_client.grpc_aio_transport import AsyncGrpcTransport

_INLINE_BYTES_MAX = 2 << 20
"""Bytes that are hashed or copied on the loop, within a millisecond; a thread costs about a tenth of one."""

_Outcome = TypeVar("_Outcome")


class AsyncCarrier:
    """`Carrier` for the tasks of a loop. What may wait or takes longer than a millisecond happens in threads."""

    def __init__(self, address: str, *, config: ClientConfig) -> None:
        self._address = address
        self._post_timeout_s = config.control_timeout_s
        self._guard = Guard(address=address, config=config)
        self._ways = Ways(address, config=config)
        self._unseen = UnseenHits()
        self._calls = AsyncCalls()
        self._grpc: AsyncGrpcTransport | None = None
        self._is_closed = False

    async def carry_out(self, step: Step) -> object:
        match step:
            case Call(is_guarded=False):
                return await self._call(step)
            case Call():
                with self._guard.watching():
                    return await self._call(step)
            case ChoosePath(is_write=is_write):
                return await self._choose(is_write=is_write)
            case Recall():
                return self._ways.slab_mover.recall(step)
            case Glance():
                return self._glance(step)
            case Fetch() | Send():
                return await self._move(step)
            case View():
                return await self._view(step)
            case Post():
                self._post(step)
                return None
            case Read() | Write():
                with self._guard.watching():
                    outcome = await self._over_grpc().carry_out(step)
                self._ways.note_moved(TransferPath.STREAM, is_write=isinstance(step, Write))
                return outcome
            case HashAhead(blocks=blocks):
                return self._ways.hash_threads.begin(blocks)
            case Checksum(blocks=blocks):
                if sum(map(len, blocks)) > _INLINE_BYTES_MAX:
                    return await asyncio.to_thread(_checksums, blocks)
                return _checksums(blocks)

    def transport(self) -> str | None:
        """See `Ways.transport`."""
        return self._ways.transport()

    async def aclose(self) -> None:
        self._tell_unseen()
        self._is_closed = True
        self._calls.close()
        self._ways.close()
        if self._grpc is not None:
            await self._grpc.aclose()

    async def _call(self, step: Call) -> object:
        response = await self._answer(step)
        if isinstance(response, StoreInfo):
            self._ways.note_info(response)
        return response

    async def _answer(self, step: Call) -> object:
        session = self._ways.session_of(step)
        if session is None:
            session = await self._attach(Access.READ)
        if session is not None:
            try:
                return await self._over_slab(session, step)
            except (AttachRefusedError, SessionLostError) as error:
                # A daemon that was started anew refuses connections for a session that it has never heard of.
                if isinstance(error, AttachRefusedError) and session.is_alive():
                    raise
                self._ways.lost(session)
                self._calls.forget(session.id)
                if step.method.name not in IDEMPOTENT:
                    raise
                # The daemon was restarted, perhaps, and is back.
                session = await self._attach(Access.READ)
            if session is not None:
                return await self._over_slab(session, step)
        self._ways.check_grpc(step)
        try:
            return await self._over_grpc().carry_out(step)
        except UnavailableError as error:
            self._ways.explain(error)
            raise

    async def _over_slab(self, session: SlabSession, step: Call) -> object:
        return await self._calls.pool(session.path, session.id).call(
            step.method, step.request, timeout_s=step.timeout_s
        )

    async def _attach(self, access: Access) -> SlabSession | None:
        if not self._ways.may_attach(access):
            return None
        session = await asyncio.to_thread(self._ways.attach, access)
        if session is None and self._ways.is_outdated:
            self._ways.note_info(await self._over_grpc().carry_out(self._ways.introduction))
            session = await asyncio.to_thread(self._ways.attach, access)
        return session

    def _post(self, step: Post) -> None:
        session = self._ways.session_of(step)
        if session is not None:
            self._calls.pool(session.path, session.id).post(step.method, step.request)
            return
        with suppress(UnavailableError):  # the client is closed
            self._over_grpc().post(step, timeout_s=self._post_timeout_s)

    def _glance(self, step: Glance) -> bool:
        is_there = self._ways.glance(step)
        report = self._unseen.add(len(step.hashes), step.namespace, now_s=time.monotonic()) if is_there else None
        if report is not None:
            self._post(report)
        return is_there

    async def _choose(self, *, is_write: bool) -> Route:
        access = self._ways.needs_attaching(is_write=is_write)
        if access is not None:
            with suppress(KvstoreError):  # the next call finds out in its own time
                await self._attach(access)
        return self._ways.route(is_write=is_write)

    async def _move(self, step: Fetch | Send) -> object:
        mover = self._ways.mover(step)
        try:
            if step.path is TransferPath.SLAB:
                return await self._copy(step)
            outcome = await _in_thread(lambda _: mover.fetch(step) if isinstance(step, Fetch) else mover.send(step))
        except KvstoreError as error:
            self._ways.note_failure(step, error)
            raise
        self._ways.note_moved(step.path, is_write=isinstance(step, Send))
        return outcome

    async def _copy(self, step: Fetch | Send) -> object:
        mover = self._ways.slab_mover
        if self._is_quick(step):
            return mover.fetch(step) if isinstance(step, Fetch) else mover.send(step)
        if isinstance(step, Fetch):
            fetch = step
            return await _in_thread(lambda is_stopped: mover.fetch(fetch, is_stopped=is_stopped))
        send = step
        return await _in_thread(lambda is_stopped: mover.send(send, is_stopped=is_stopped))

    async def _view(self, step: View) -> object:
        mover = self._ways.slab_mover
        if self._is_quick(step) or mover.is_seen(step):
            return mover.view(step)
        return await _in_thread(lambda is_stopped: mover.view(step, is_stopped=is_stopped))

    def _is_quick(self, step: Fetch | Send | View) -> bool:
        size_bytes = len(step.hashes) * step.namespace.stored_bytes
        return size_bytes <= _INLINE_BYTES_MAX and self._ways.slab_mover.is_mapped(step)

    def _tell_unseen(self) -> None:
        report = self._unseen.last()
        if report is not None:
            self._post(report)

    def _over_grpc(self) -> AsyncGrpcTransport:
        """Imported when it is needed: a client that is attached to the slab socket never loads gRPC."""
        if self._is_closed:
            raise UnavailableError("the client is closed")
        if self._grpc is None:
            try:
                from kvstore_client.grpc_aio_transport import AsyncGrpcTransport
            except OSError as error:  # no descriptors left, say: a miss now, and another try with the next call
                raise UnavailableError(f"gRPC cannot be loaded: {error.strerror}") from error
            self._grpc = AsyncGrpcTransport(self._address)
        return self._grpc


def _checksums(blocks: object) -> list[int]:
    return [checksum(block) for block in blocks]  # type: ignore[attr-defined]


async def _in_thread(work: Callable[[Callable[[], bool]], _Outcome]) -> _Outcome:
    """Runs work on the caller's memory; a cancelled caller is let go only once nothing touches that any more."""
    stop = threading.Event()
    working = asyncio.get_running_loop().run_in_executor(None, work, stop.is_set)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        stop.set()
        while not working.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([working])
        working.exception()  # nobody else will ask
        raise
