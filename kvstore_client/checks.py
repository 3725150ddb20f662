"""What callers may pass, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import InvalidArgumentError
from kvstore.keys import HASH_BYTES, BlockHash
from kvstore.messages import LEASE_S_MAX, RECOMPUTE_S_MAX, WAIT_S_MAX
from kvstore.namespace import Namespace

_BUDGET_BYTES_MAX = (1 << 63) - 1


def check_blocks(namespace: Namespace, hashes: Sequence[BlockHash], *, is_distinct: bool = False) -> None:
    if not isinstance(namespace, Namespace):
        raise InvalidArgumentError.of("namespace", namespace, "a kvstore Namespace")
    # Counted rather than looked at one by one: there may be thousands.
    count = len(hashes)
    if list(map(type, hashes)).count(bytes) != count or list(map(len, hashes)).count(HASH_BYTES) != count:
        wrong = next(item for item in hashes if type(item) is not bytes or len(item) != HASH_BYTES)
        raise InvalidArgumentError.of("hashes", wrong, f"block hashes, each {HASH_BYTES} bytes")
    if is_distinct and len(set(hashes)) != len(hashes):
        raise InvalidArgumentError.of("hashes", "the same block twice", "each block once")


def check_parent_hash(parent_hash: BlockHash | None) -> None:
    if parent_hash is not None and (type(parent_hash) is not bytes or len(parent_hash) != HASH_BYTES):
        raise InvalidArgumentError.of("parent_hash", parent_hash, f"{HASH_BYTES} bytes, or None for a prompt's start")


def check_wait_s(wait_s: float) -> None:
    if not 0.0 <= wait_s <= WAIT_S_MAX:
        raise InvalidArgumentError.of("wait_s", wait_s, f"0 to {WAIT_S_MAX:g} seconds")


def check_recompute_s(recompute_s_per_block: float | None) -> None:
    if recompute_s_per_block is not None and not 0.0 < recompute_s_per_block <= RECOMPUTE_S_MAX:
        raise InvalidArgumentError.of(
            "recompute_s_per_block", recompute_s_per_block, f"above 0, up to {RECOMPUTE_S_MAX:g} seconds, or None"
        )


def check_budget_bytes(budget_bytes: int | None) -> None:
    if budget_bytes is not None and (not isinstance(budget_bytes, int) or not 0 < budget_bytes <= _BUDGET_BYTES_MAX):
        raise InvalidArgumentError.of(
            "budget_bytes",
            budget_bytes,
            f"a whole number from 1 to {_BUDGET_BYTES_MAX}, or None for the daemon's limit",
        )


def check_lease_s(lease_s: float) -> None:
    if not 0.0 < lease_s <= LEASE_S_MAX:
        raise InvalidArgumentError.of("lease_s", lease_s, f"above 0, up to {LEASE_S_MAX:g} seconds")
