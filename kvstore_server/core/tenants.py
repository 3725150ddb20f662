"""Whose blocks are whose."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, NewType

from kvstore.errors import NamespaceUnknownError
from kvstore.keys import HASH_BYTES, NamespaceId

Tenant = NewType("Tenant", str)
"""Tenants never see, share or evict each other's bytes; arenas belong to one of them at a time."""

DEFAULT_TENANT = Tenant("")
"""Everybody, where no tenants are configured."""

ScopedId = NewType("ScopedId", bytes)
"""A namespace of one tenant: equal namespaces of two tenants have nothing in common but their layout."""


def scoped(tenant: Tenant, namespace_id: NamespaceId) -> ScopedId:
    """The name of the tenant, then the 32 bytes of the id: other lengths could be read as somebody else's."""
    if len(namespace_id) != HASH_BYTES:
        raise NamespaceUnknownError(f"namespace_id has {len(namespace_id)} bytes; allowed: {HASH_BYTES}")
    return ScopedId(tenant.encode() + namespace_id)


def tenant_of(scoped_id: ScopedId) -> Tenant:
    return Tenant(scoped_id[:-HASH_BYTES].decode())


def namespace_of(scoped_id: ScopedId) -> NamespaceId:
    """The id as clients know it, and as it stands in envelopes."""
    return NamespaceId(scoped_id[-HASH_BYTES:])


class Membership(NamedTuple):
    tenant: Tenant
    may_write: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRule:
    """Local users that are one tenant."""

    tenant: Tenant
    uids: frozenset[int]
    may_write: bool


_ROOT_UID = 0


class Tenants:
    """Which tenant a local user is.

    Without rules, that is `DEFAULT_TENANT` for the user that the daemon runs as, and for root, and nothing for anybody
    else. With rules, who is in none of them is nobody, except for the daemon's own user: who can stop the daemon has
    the default tenant, which is also that of everybody who comes without a name.
    """

    def __init__(self, rules: Iterable[TenantRule], *, own_uid: int) -> None:
        self._members = {uid: Membership(rule.tenant, rule.may_write) for rule in rules for uid in rule.uids}
        own_uids = {own_uid} if self._members else {own_uid, _ROOT_UID}
        for uid in own_uids:
            self._members.setdefault(uid, Membership(DEFAULT_TENANT, may_write=True))

    @property
    def all(self) -> frozenset[Tenant]:
        """All there can be, the default one included."""
        return frozenset({DEFAULT_TENANT, *(member.tenant for member in self._members.values())})

    @property
    def count(self) -> int:
        return len(self.all)

    def find(self, uid: int) -> Membership | None:
        """None: this user has no business here."""
        return self._members.get(uid)
