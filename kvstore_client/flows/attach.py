"""Getting to know a daemon: its version, its epoch, and making a namespace known to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kvstore import PROTOCOL_VERSION, wire
from kvstore import messages as m
from kvstore.errors import (
    DeadlineExceededError,
    KvstoreError,
    NamespaceUnknownError,
    ProtocolError,
    UnavailableError,
)
from kvstore.messages import Epoch
from kvstore.namespace import Namespace
from kvstore_client.config import ClientConfig
from kvstore_client.flows.steps import ChoosePath, Flow, Route, call

_Result = TypeVar("_Result")


@dataclass(slots=True, kw_only=True)
class Attachment:
    """Which start of the daemon this client has met; None when it must introduce itself (again)."""

    epoch: Epoch | None = None

    def note(self, epoch: Epoch) -> None:
        """Another epoch means another daemon process, which may be another version: introduce again."""
        if epoch != self.epoch:
            self.epoch = None

    def doubt(self, error: KvstoreError) -> None:
        """After a lost daemon, whoever answers next may be another process, and is asked something cheap first."""
        if isinstance(error, (UnavailableError, DeadlineExceededError)):
            self.epoch = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What all flows of one client are given."""

    config: ClientConfig
    attachment: Attachment


def info(scope: Scope) -> Flow[m.StoreInfo]:
    return call(
        wire.GET_STORE_INFO, m.GetStoreInfoRequest(), timeout_s=scope.config.control_timeout_s, is_guarded=False
    )


def stats(scope: Scope) -> Flow[m.StoreStats]:
    return call(
        wire.GET_STORE_STATS, m.GetStoreStatsRequest(), timeout_s=scope.config.control_timeout_s, is_guarded=False
    )


def namespaces(scope: Scope) -> Flow[m.DescribeNamespacesResponse]:
    return call(
        wire.DESCRIBE_NAMESPACES,
        m.DescribeNamespacesRequest(),
        timeout_s=scope.config.control_timeout_s,
        is_guarded=False,
    )


def accesses(scope: Scope, namespace: Namespace, *, after_number: int) -> Flow[m.TakeAccessesResponse]:
    return call(
        wire.TAKE_ACCESSES,
        m.TakeAccessesRequest(namespace_id=namespace.id, after_number=after_number),
        timeout_s=scope.config.control_timeout_s,
        is_guarded=False,
    )


def introduced(scope: Scope) -> Flow[None]:
    """Introduces the client to the daemon if need be."""
    attachment = scope.attachment
    if attachment.epoch is not None:
        return
    found = yield from call(wire.GET_STORE_INFO, m.GetStoreInfoRequest(), timeout_s=scope.config.attach_timeout_s)
    if found.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the daemon (version {found.version}) speaks protocol {found.protocol_version}, "
            f"this client {PROTOCOL_VERSION}: run the same version of kvstore on both sides"
        )
    attachment.epoch = found.epoch


def attached(scope: Scope, namespace: Namespace, attempt: Callable[[], Flow[_Result]]) -> Flow[_Result]:
    """Introduces the client first if need be, and the namespace when the daemon does not know it (any more)."""
    if scope.attachment.epoch is None:
        yield from introduced(scope)
    try:
        return (yield from attempt())
    except NamespaceUnknownError:
        yield from _open_namespace(scope, namespace)
        return (yield from attempt())
    except KvstoreError as error:
        scope.attachment.doubt(error)
        raise


def _open_namespace(scope: Scope, namespace: Namespace) -> Flow[None]:
    request = m.OpenNamespaceRequest(namespace=namespace, payload_bytes=namespace.stored_bytes)
    response = yield from call(wire.OPEN_NAMESPACE, request, timeout_s=scope.config.control_timeout_s)
    if response.namespace_id != namespace.id:
        raise ProtocolError(
            f"opened namespace {namespace.id.hex()[:16]}, the daemon answers {response.namespace_id.hex()[:16]}"
        )


def chosen_route(scope: Scope, *, is_write: bool) -> Flow[Route]:
    """The way that blocks travel now; the daemon tells what it offers when the client is introduced to it."""
    if scope.attachment.epoch is None:
        yield from introduced(scope)
    try:
        route: Route = yield ChoosePath(is_write=is_write)
    except KvstoreError as error:
        scope.attachment.doubt(error)  # it may offer more when it is asked again
        raise
    return route


def best_effort(attempt: Flow[Any]) -> Flow[None]:
    """Cleaning up after a failure must not become one; the daemon expires what is left."""
    try:
        yield from attempt
    except KvstoreError:
        return
