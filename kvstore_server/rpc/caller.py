"""Who a request comes from, as its transport has found out."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.messages import OwnerId
from kvstore_server.core.in_flight import ClientId
from kvstore_server.core.tenants import DEFAULT_TENANT, Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    tenant: Tenant
    client_id: ClientId | None = None
    """Who shares one budget of bytes in flight: one connection or one session. None: nobody is counted."""
    session_id: OwnerId | None = None
    """On the slab socket: the session, which is the owner of all slab leases and reservations made through it."""
    may_write: bool = True


def client_of(owner_id: OwnerId) -> ClientId:
    """Over the data port, whose tickets tell who leased or reserved, whichever connection the bytes take."""
    return ClientId(owner_id.hex())


LOOPBACK = Caller(tenant=DEFAULT_TENANT)
"""Whoever reaches gRPC: only this machine does, and there is no authentication there yet."""
