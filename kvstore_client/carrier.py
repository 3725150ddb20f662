"""Carries out the steps of flows, for threads: which transport and which path each one takes."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore.envelope import checksum
from kvstore.errors import KvstoreError, UnavailableError
from kvstore.messages import OwnerId, StoreInfo, TransferPath
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
from kvstore_client.forks import mend_after_fork
from kvstore_client.guard import Guard
from kvstore_client.paths.slab import Arena, SlabSession
from kvstore_client.paths.slab_calls import IDEMPOTENT, AttachRefusedError, SessionLostError
from kvstore_client.paths.ways import Ways
from kvstore_client.unseen import UnseenHits

if TYPE_CHECKING:
    from kvstore_client.grpc_transport import GrpcTransport


class Carrier:
    """Calls go over the slab socket where the client is attached to one, else over gRPC. Threads may share it."""

    def __init__(self, address: str, *, config: ClientConfig) -> None:
        self._address = address
        self._post_timeout_s = config.control_timeout_s
        self._guard = Guard(address=address, config=config)
        self._ways = Ways(address, config=config)
        self._unseen = UnseenHits()
        self._lock = threading.Lock()
        self._grpc: GrpcTransport | None = None
        self._is_closed = False
        mend_after_fork(self)

    def after_fork(self) -> None:
        """Another thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    def carry_out(self, step: Step) -> object:
        match step:
            case Call(is_guarded=False):
                return self._call(step)
            case Call():
                with self._guard.watching():
                    return self._call(step)
            case ChoosePath(is_write=is_write):
                return self._choose(is_write=is_write)
            case Recall():
                return self._ways.slab_mover.recall(step)
            case Glance():
                return self._glance(step)
            case Fetch() | Send():
                return self._move(step)
            case View():
                return self._ways.slab_mover.view(step)
            case Post():
                self._post(step)
                return None
            case Read() | Write():
                with self._guard.watching():
                    outcome = self._over_grpc().carry_out(step)
                self._ways.note_moved(TransferPath.STREAM, is_write=isinstance(step, Write))
                return outcome
            case HashAhead(blocks=blocks):
                return self._ways.hash_threads.begin(blocks)
            case Checksum(blocks=blocks):
                return [checksum(block) for block in blocks]

    def session(self, owner_id: OwnerId) -> SlabSession | None:
        """The session that holds what is reserved in this name, while it lives."""
        return self._ways.session(owner_id)

    def arenas(self) -> tuple[Arena, ...]:
        """The daemon's memory as far as it is mapped now."""
        return self._ways.arenas()

    def transport(self) -> str | None:
        """See `Ways.transport`."""
        return self._ways.transport()

    def close(self) -> None:
        self._tell_unseen()
        with self._lock:
            self._is_closed = True
            grpc = self._grpc
        self._ways.close()
        if grpc is not None:
            grpc.close()

    def _call(self, step: Call) -> object:
        response = self._answer(step)
        if isinstance(response, StoreInfo):
            self._ways.note_info(response)
        return response

    def _answer(self, step: Call) -> object:
        session = self._ways.session_of(step)
        if session is None and self._ways.may_attach(Access.READ):
            session = self._attach(Access.READ)
        if session is not None:
            try:
                return session.calls.call(step.method, step.request, timeout_s=step.timeout_s)
            except (AttachRefusedError, SessionLostError) as error:
                # A daemon that was started anew refuses connections for a session that it has never heard of.
                if isinstance(error, AttachRefusedError) and session.is_alive():
                    raise
                self._ways.lost(session)
                if step.method.name not in IDEMPOTENT:
                    raise
                # The daemon was restarted, perhaps, and is back.
                session = self._attach(Access.READ) if self._ways.may_attach(Access.READ) else None
            if session is not None:
                return session.calls.call(step.method, step.request, timeout_s=step.timeout_s)
        self._ways.check_grpc(step)
        try:
            return self._over_grpc().carry_out(step)
        except UnavailableError as error:
            self._ways.explain(error)
            raise

    def _attach(self, access: Access) -> SlabSession | None:
        session = self._ways.attach(access)
        if session is None and self._ways.is_outdated:
            self._ways.note_info(self._over_grpc().carry_out(self._ways.introduction))
            session = self._ways.attach(access)
        return session

    def _post(self, step: Post) -> None:
        session = self._ways.session_of(step)
        if session is not None:
            session.calls.post(step.method, step.request)
            return
        try:
            self._over_grpc().post(step, timeout_s=self._post_timeout_s)
        except UnavailableError:
            return  # the client is closed

    def _glance(self, step: Glance) -> bool:
        is_there = self._ways.glance(step)
        report = self._unseen.add(len(step.hashes), step.namespace, now_s=time.monotonic()) if is_there else None
        if report is not None:
            self._post(report)
        return is_there

    def _choose(self, *, is_write: bool) -> Route:
        access = self._ways.needs_attaching(is_write=is_write)
        if access is not None:
            with suppress(KvstoreError):  # the next call finds out in its own time
                self._attach(access)
        return self._ways.route(is_write=is_write)

    def _move(self, step: Fetch | Send) -> object:
        mover = self._ways.mover(step)
        try:
            outcome = mover.fetch(step) if isinstance(step, Fetch) else mover.send(step)
        except KvstoreError as error:
            self._ways.note_failure(step, error)
            raise
        self._ways.note_moved(step.path, is_write=isinstance(step, Send))
        return outcome

    def _tell_unseen(self) -> None:
        report = self._unseen.last()
        if report is not None:
            self._post(report)

    def _over_grpc(self) -> GrpcTransport:
        """Imported when it is needed: a client that is attached to the slab socket never loads gRPC."""
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the client is closed")
            if self._grpc is None:
                try:
                    from kvstore_client.grpc_transport import GrpcTransport
                except OSError as error:  # no descriptors left, say: a miss now, and another try with the next call
                    raise UnavailableError(f"gRPC cannot be loaded: {error.strerror}") from error
                self._grpc = GrpcTransport(self._address)
            return self._grpc
