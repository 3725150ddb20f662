"""Who is who, and that ids of one tenant's namespaces are nobody else's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import NamespaceUnknownError
from kvstore.keys import NamespaceId
from kvstore_server.core.tenants import (
    DEFAULT_TENANT,
    Membership,
    Tenant,
    TenantRule,
    Tenants,
    namespace_of,
    scoped,
    tenant_of,
)

ACME = Tenant("acme")
RULES = [
    TenantRule(tenant=ACME, uids=frozenset({1000, 1001}), may_write=True),
    TenantRule(tenant=Tenant("readers"), uids=frozenset({1002}), may_write=False),
]
tenants = st.from_regex(r"\A[a-z0-9-]{0,63}\Z").map(Tenant)
ids = st.binary(min_size=32, max_size=32).map(NamespaceId)


@given(tenants, ids, tenants, ids)
def test_ids_are_equal_only_for_one_namespace_of_one_tenant(
    tenant: Tenant, namespace_id: NamespaceId, other: Tenant, other_id: NamespaceId
) -> None:
    one = scoped(tenant, namespace_id)
    assert (tenant_of(one), namespace_of(one)) == (tenant, namespace_id)
    assert (one == scoped(other, other_id)) == ((tenant, namespace_id) == (other, other_id))


def test_an_id_that_would_spell_another_tenants_is_unknown() -> None:
    """A client without a tenant asks for the 36 bytes by which the store knows a namespace of acme."""
    for wrong in (NamespaceId(b"acme" + b"x" * 32), NamespaceId(b""), NamespaceId(b"x" * 31)):
        with pytest.raises(NamespaceUnknownError, match=f"namespace_id has {len(wrong)} bytes; allowed: 32"):
            scoped(DEFAULT_TENANT, wrong)


def test_without_rules_the_daemons_own_user_and_root_are_one_tenant_and_nobody_else_is() -> None:
    """Whatever the mode of the socket, which an operator may have opened for other reasons."""
    one = Tenants([], own_uid=7)
    assert one.count == 1
    assert one.find(7) == one.find(0) == Membership(DEFAULT_TENANT, may_write=True)
    assert one.find(1234) is None


def test_with_rules_who_is_in_none_is_nobody_but_for_the_daemons_own_user() -> None:
    several = Tenants(RULES, own_uid=7)
    assert several.count == 3
    assert several.find(1001) == Membership(ACME, may_write=True)
    assert several.find(1002) == Membership(Tenant("readers"), may_write=False)
    assert several.find(7) == Membership(DEFAULT_TENANT, may_write=True)
    assert several.find(0) is None


def test_a_rule_for_the_daemons_own_user_holds() -> None:
    assert Tenants(RULES, own_uid=1002).find(1002) == Membership(Tenant("readers"), may_write=False)
