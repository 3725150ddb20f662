"""The ways to its daemon that one client has open; both drivers go through here."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

from kvstore import wire
from kvstore.errors import DeadlineExceededError, KvstoreError, UnavailableError
from kvstore.messages import GetStoreInfoRequest, OwnerId, StoreInfo, TransferPath
from kvstore.slab import Access
from kvstore_client.address import is_trusted_socket
from kvstore_client.config import ClientConfig
from kvstore_client.flows.steps import Call, Fetch, Glance, Post, Route, Send
from kvstore_client.forks import mend_after_fork
from kvstore_client.ids import new_owner_id
from kvstore_client.paths.choose import PATH_NAMES, Choice, transport_in_force
from kvstore_client.paths.hashing import HashThreads
from kvstore_client.paths.mover import Mover, TransferRefusedError
from kvstore_client.paths.slab import Arena, OtherEpochError, SlabLink, SlabMover, SlabSession
from kvstore_client.paths.slab_calls import AttachRefusedError

_log = logging.getLogger("kvstore.client")


class Ways:
    """Sessions, movers and what is known of paths. Only `attach` waits for anybody; threads may share it."""

    def __init__(self, address: str, *, config: ClientConfig) -> None:
        transport = transport_in_force(config.transport, os.environ)
        self._attach_timeout_s = config.attach_timeout_s
        self._choice = Choice(transport=transport, address=address)
        self.introduction = Call(
            method=wire.GET_STORE_INFO, request=GetStoreInfoRequest(), timeout_s=config.attach_timeout_s
        )
        self._link = SlabLink()
        self.slab_mover = SlabMover(self._link.find, copy_thread_count_max=config.copy_thread_count_max)
        self.hash_threads = HashThreads()
        self._lock = threading.Lock()
        # With an id each, under which NIXL's holds go: slots that one serving process named to us may be another's by
        # the time that the next one serves, and must not be written by way of that.
        self._movers: dict[TransferPath, tuple[OwnerId, Mover]] = {}
        self._attach_error: KvstoreError | None = None
        """Why the last attempt to attach failed; None when it did not."""
        self._told: set[str] = set()
        """What has been said to travel another way than through shared memory, until it does not any more."""
        self._may_write = True
        self._is_closed = False
        self.is_outdated = False
        """True when the daemon should be asked who it is, for it may have been started anew."""
        mend_after_fork(self)

    def after_fork(self) -> None:
        """Another thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    # --- control

    def session_of(self, step: Call | Post) -> SlabSession | None:
        """The session that a call belongs to or may travel with."""
        owner_id = getattr(step.request, "owner_id", None)
        link = self._link
        return (owner_id and link.find(owner_id)) or link.session(Access.READ) or link.session(Access.WRITE)

    def glance(self, step: Glance) -> bool:
        """See `Glance`."""
        living = [session for session in map(self._link.living, Access) if session is not None]
        return bool(living) and self.slab_mover.glance(step, living)

    def session(self, owner_id: OwnerId) -> SlabSession | None:
        """The session of this id, while it lives."""
        return self._link.find(owner_id)

    def arenas(self) -> tuple[Arena, ...]:
        return self._link.arenas()

    def transport(self) -> str | None:
        """The way that blocks travel now, as `ClientConfig.transport` names it; None while none is known to be open."""
        has_slab = any(self._link.living(access) is not None for access in Access)
        if self._is_closed or (self._choice.offers is None and not has_slab):
            return None
        path = self._choice.path(has_slab=has_slab, now_s=time.monotonic())
        return None if path is TransferPath.SLAB and not has_slab else PATH_NAMES[path]

    def may_attach(self, access: Access) -> bool:
        """Whether to `attach` now; costs nothing to ask before each call."""
        choice = self._choice
        if self._is_closed or choice.slab_socket is None or (access is Access.WRITE and not self._may_write):
            return False
        return choice.may_try(TransferPath.SLAB, now_s=time.monotonic())

    def attach(self, access: Access) -> SlabSession | None:
        """Opens a session; None, and a reason to tell, when there is none to be had. A hung daemon raises."""
        socket = self._choice.slab_socket
        if socket is None:
            return None
        try:
            self._check_trusted(Path(socket))
            session = self._link.attach(
                Path(socket), access=access, epoch=self._choice.slab_epoch, timeout_s=self._attach_timeout_s
            )
        except DeadlineExceededError as error:
            self._attach_error = error
            raise
        except KvstoreError as error:
            self.is_outdated = isinstance(error, OtherEpochError)
            self._attach_error = error
            self._choice.note_failure(TransferPath.SLAB, now_s=time.monotonic())
            return None
        self._attach_error = None
        self._may_write = access is Access.READ or session.access is Access.WRITE
        return session

    def lost(self, session: SlabSession) -> None:
        self._link.drop(session)

    def note_info(self, info: object) -> None:
        """The daemon has introduced itself; what an earlier start of it handed out is void."""
        assert isinstance(info, StoreInfo), f"{info!r} is no introduction"
        self.is_outdated = False
        before = self._choice.offers
        self._choice.note_info(info)
        self._link.drop_others(info.epoch)
        if before is not None and before.nixl_metadata != info.nixl_metadata:
            self._end_mover(TransferPath.NIXL)

    def check_grpc(self, step: Call) -> None:
        """Raises where gRPC would only hide that the transport that was insisted on is not there."""
        if self._is_closed:
            raise UnavailableError("the client is closed")
        # Who the daemon is may always be asked: the answer says where the slab socket is.
        if self._choice.transport == "slab" and step.is_guarded and step.method is not wire.GET_STORE_INFO:
            raise UnavailableError(f"transport is 'slab', but {self._missing(None)}")

    def explain(self, error: UnavailableError) -> None:
        """gRPC only knows that a socket cannot be used; raises where the daemon said why, at its slab socket."""
        if isinstance(self._attach_error, AttachRefusedError):
            raise AttachRefusedError(f"{self._attach_error}; gRPC: {error}") from error

    # --- blocks

    def needs_attaching(self, *, is_write: bool) -> Access | None:
        """What session to attach before `route` is asked."""
        access = Access.WRITE if is_write else Access.READ
        return access if self._link.living(access) is None and self.may_attach(access) else None

    def route(self, *, is_write: bool) -> Route:
        session = self._link.session(Access.WRITE if is_write else Access.READ)
        has_slab = session is not None and (session.access is Access.WRITE or not is_write)
        path = self._choice.path(has_slab=has_slab, now_s=time.monotonic())
        if path is TransferPath.SLAB:
            if session is None or not has_slab:
                raise UnavailableError(f"transport is 'slab', but {self._missing(session)}")
            self._tell_return(is_write=is_write)
            return Route(path=path, owner_id=session.id)
        # NIXL's mover is made before anything is reserved, which nobody would write if it could not be made.
        return Route(path=path, owner_id=self._mover(path)[0] if path is TransferPath.NIXL else None)

    def mover(self, step: Fetch | Send) -> Mover:
        """Raises `UnavailableError` when the path is not there, or not any more for what the step is about."""
        if step.path is TransferPath.SLAB:
            return self.slab_mover
        owner_id, mover = self._mover(step.path)
        if step.path is TransferPath.NIXL and step.owner_id != owner_id:
            raise UnavailableError("the daemon's NIXL has been restarted meanwhile")
        return mover

    def note_moved(self, path: TransferPath, *, is_write: bool) -> None:
        """Blocks have travelled this way; says so, once, when they should have gone through shared memory."""
        if path is TransferPath.SLAB or self._choice.transport != "auto" or not self._choice.is_same_node:
            return
        has_slab = any(self._link.living(access) is not None for access in Access)
        travelling = "puts" if is_write and has_slab else "blocks"
        if travelling in self._told:
            return
        self._told.add(travelling)
        reason = self._missing(self._link.session(Access.WRITE) if is_write else None)
        _log.warning("%s travel over %s, not through shared memory: %s", travelling, PATH_NAMES[path], reason)

    def note_failure(self, step: Fetch | Send, error: KvstoreError) -> None:
        """A path failed: others are taken for a while, and it is set up anew after that. A refusal is no failure."""
        if step.path is TransferPath.SLAB or isinstance(error, TransferRefusedError):
            return
        if not isinstance(error, (UnavailableError, DeadlineExceededError)):
            return
        _log.warning("the %s path failed and rests for a while: %s", PATH_NAMES[step.path], error)
        self._choice.note_failure(step.path, now_s=time.monotonic())
        self._end_mover(step.path, owner_id=step.owner_id if step.path is TransferPath.NIXL else None)

    def close(self) -> None:
        self._is_closed = True
        self._link.close()
        self.slab_mover.close()
        with self._lock:
            movers, self._movers = list(self._movers.values()), {}
        for _, mover in movers:
            mover.close()

    def _mover(self, path: TransferPath) -> tuple[OwnerId, Mover]:
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the client is closed")
            found = self._movers.get(path)
            if found is None:
                found = self._movers[path] = new_owner_id(), self._new_mover(path)
            return found

    def _end_mover(self, path: TransferPath, *, owner_id: OwnerId | None = None) -> None:
        """Ends that of this id alone, if one is given: there may be a newer one by now."""
        with self._lock:
            found = self._movers.get(path)
            if found is None or owner_id not in (None, found[0]):
                return
            del self._movers[path]
        found[1].close()

    def _new_mover(self, path: TransferPath) -> Mover:
        choice = self._choice
        if path is TransferPath.BULK:
            from kvstore_client.paths.bulk import BulkMover

            if choice.bulk_endpoint is None:
                raise UnavailableError("transport is 'bulk', but the daemon offers no data port")
            host, port = choice.bulk_endpoint
            return BulkMover(host, port)
        from kvstore_client.paths.nixl import NixlMover

        if choice.offers is None or not choice.offers.nixl_metadata:
            raise UnavailableError(
                "transport is 'nixl', but the daemon does not offer it: it is restarting NIXL, or see `nixl.enabled`"
            )
        return NixlMover(choice.offers.nixl_metadata)

    def _check_trusted(self, path: Path) -> None:
        if is_trusted_socket(path):
            return
        grpc_socket = path.parent / path.stem
        try:
            owner = path.lstat().st_uid
            if self._choice.address == f"unix:{grpc_socket}" and grpc_socket.lstat().st_uid == owner:
                return  # as good as the socket that the caller has named
        except OSError as error:
            raise UnavailableError(f"{path}: {error.strerror}") from error
        raise UnavailableError(f"{path} belongs to user {owner}, who is neither this process's user nor root")

    def _tell_return(self, *, is_write: bool) -> None:
        """That puts do not go through shared memory is not over when something is read there."""
        returning = self._told if is_write else self._told & {"blocks"}
        if returning:
            self._told = self._told - returning
            _log.info("%s travel through shared memory again", " and ".join(sorted(returning)))

    def _missing(self, session: SlabSession | None) -> str:
        if self._is_closed:
            return "the client is closed"
        if session is not None:
            return "the daemon grants this user reading only"
        offers = self._choice.offers
        is_refused = isinstance(self._attach_error, AttachRefusedError)
        if not is_refused and offers is not None and not offers.slab_socket:
            return "the daemon offers no slab socket"
        return str(self._attach_error or "the client is not attached to the slab socket")
