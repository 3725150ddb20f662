"""Which namespaces would share blocks, but for a setting."""

from __future__ import annotations

from kvstore.namespace import Namespace, Shard


def are_siblings(own: Namespace, other: Namespace) -> bool:
    """Whether prompts have the same block hashes in both, and what keeps them apart may be a setting that somebody
    overlooked: not another model, adapter or salt, and not another part of the same blocks."""
    return (
        own.id != other.id
        and own.model == other.model
        and own.tokens_per_block == other.tokens_per_block
        and own.lora == other.lora
        and own.tenant_salt == other.tenant_salt
        and not _are_parts(own.shard, other.shard)
    )


def _are_parts(own: Shard | None, other: Shard | None) -> bool:
    """Whether two shards are different parts of one model."""
    if own is None or other is None or own == other:
        return False
    return (own.tp_size, own.pp_size, own.dcp_size) == (other.tp_size, other.pp_size, other.dcp_size)
