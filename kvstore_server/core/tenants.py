"""Whose blocks are whose."""

from __future__ import annotations

from typing import NewType

Tenant = NewType("Tenant", str)
"""Tenants never see, share or evict each other's bytes; arenas belong to one of them at a time."""

DEFAULT_TENANT = Tenant("")
"""Everybody, where no tenants are configured."""
