"""Ids that clients choose."""

from __future__ import annotations

import secrets

from kvstore.messages import OWNER_ID_BYTES, OwnerId


def new_owner_id() -> OwnerId:
    """Unguessable, and used for one acquisition, one put or one session only: see `Acquired`."""
    return OwnerId(secrets.token_bytes(OWNER_ID_BYTES))
