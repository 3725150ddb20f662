"""Which way blocks travel, decided from what is known; knows no sockets and no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.errors import InvalidArgumentError
from kvstore.messages import Epoch, StoreInfo, TransferPath
from kvstore.slab import SLAB_SOCKET_SUFFIX
from kvstore_client.config import TRANSPORTS

TRANSPORT_VARIABLE = "KVSTORE_TRANSPORT"
RETRY_S = 5.0
"""Seconds until a path that failed is tried again; meanwhile another one is taken."""

_UNIX = "unix:"
_LOOPBACK = ("localhost", "[::1]")
_FORCED = {
    "slab": TransferPath.SLAB,
    "bulk": TransferPath.BULK,
    "grpc": TransferPath.STREAM,
    "nixl": TransferPath.NIXL,
}
PATH_NAMES = {path: name for name, path in _FORCED.items()}
"""What people call the paths: as in `ClientConfig.transport`."""


def transport_in_force(configured: str, environ: Mapping[str, str]) -> str:
    """What the configuration says, or the environment where it leaves the choice."""
    from_environment = environ.get(TRANSPORT_VARIABLE, "")
    if configured != "auto" or not from_environment:
        return configured
    if from_environment not in TRANSPORTS:
        raise InvalidArgumentError.of(f"${TRANSPORT_VARIABLE}", from_environment, ", ".join(TRANSPORTS))
    return from_environment


@dataclass(slots=True, kw_only=True)
class Choice:
    """What one client knows of the ways to its daemon. Time is an argument."""

    transport: str
    address: str
    offers: StoreInfo | None = None
    """What the daemon last said of itself."""
    _closed_until_s: dict[TransferPath, float] = field(default_factory=dict)

    @property
    def is_same_node(self) -> bool:
        host = self.address.rpartition(":")[0]
        is_loopback = host in _LOOPBACK or (host.startswith("127.") and host.replace(".", "").isdigit())
        return self.address.startswith(_UNIX) or is_loopback

    @property
    def slab_socket(self) -> str | None:
        """Where this client may find the slab socket, as far as it is known by now."""
        if self.transport not in ("auto", "slab") or not self.is_same_node:
            return None
        if self.address.startswith(_UNIX):
            return self.address.removeprefix(_UNIX) + SLAB_SOCKET_SUFFIX
        return (self.offers.slab_socket or None) if self.offers is not None else None

    @property
    def slab_epoch(self) -> Epoch | None:
        """The epoch that must be found at the slab socket; None: whoever is beside the gRPC socket is right."""
        return None if self.address.startswith(_UNIX) or self.offers is None else self.offers.epoch

    @property
    def bulk_endpoint(self) -> tuple[str, int] | None:
        """Host and port of the data port; it is on the host that gRPC reaches."""
        if self.offers is None or not self.offers.bulk_port:
            return None
        host = "127.0.0.1" if self.address.startswith(_UNIX) else self.address.rpartition(":")[0].strip("[]")
        return host, self.offers.bulk_port

    def note_failure(self, path: TransferPath, *, now_s: float) -> None:
        self._closed_until_s[path] = now_s + RETRY_S

    def note_info(self, info: StoreInfo) -> None:
        """Another start of the daemon has other ways, none of which has failed yet."""
        if self.offers is None or self.offers.epoch != info.epoch:
            self._closed_until_s.clear()
        self.offers = info

    def may_try(self, path: TransferPath, *, now_s: float) -> bool:
        return now_s >= self._closed_until_s.get(path, 0.0)

    def path(self, *, has_slab: bool, now_s: float) -> TransferPath:
        """The path to take now. A transport that is insisted on is taken whether it is there or not."""
        if self.transport != "auto":
            return _FORCED[self.transport]
        if has_slab:
            return TransferPath.SLAB
        if self.bulk_endpoint is not None and self.may_try(TransferPath.BULK, now_s=now_s):
            return TransferPath.BULK
        return TransferPath.STREAM
