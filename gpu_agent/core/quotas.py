"""How much of one device's memory each namespace gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstore.errors import CapacityError, InvalidArgumentError
from kvstore.keys import NamespaceId
from kvstore.namespace import Namespace
from kvstore_client.sizes import format_size

_ID_DIGITS_MIN = 8
"""Hexadecimal digits of a namespace's id that name it."""


class Quotas:
    """Gives out shares of a capacity. Knows nothing of pools.

    What is given never adds up to more than `capacity_bytes`. What is promised to a name is given to the namespaces of
    that model, or to the namespace whose id begins with it, and to no others, whether they are open or not.
    """

    def __init__(self, *, capacity_bytes: int, promised: Mapping[str, int]) -> None:
        promised_bytes = sum(promised.values())
        if promised_bytes > capacity_bytes:
            given = f"{format_size(promised_bytes)} for {', '.join(promised)}"
            raise InvalidArgumentError.of("--quota", given, f"up to {format_size(capacity_bytes)} in all")
        self._capacity_bytes = capacity_bytes
        self._promised = dict(promised)
        self._given: dict[NamespaceId, tuple[str | None, int]] = {}

    @property
    def given_bytes(self) -> int:
        return sum(size_bytes for _, size_bytes in self._given.values())

    def given_to(self, namespace_id: NamespaceId) -> int:
        return self._given[namespace_id][1]

    def left_bytes(self, namespace: Namespace) -> int:
        """What this namespace could get."""
        return self._left_bytes(self._name_of(namespace))

    def rivals(self, namespace: Namespace) -> Sequence[NamespaceId]:
        """Open namespaces whose memory this one would get if they were not."""
        name = self._name_of(namespace)
        return [namespace_id for namespace_id, (given_name, _) in self._given.items() if given_name == name]

    def share_bytes(self, namespace: Namespace, *, quota_bytes: int, further_count: int, block_bytes: int) -> int:
        """What it gets: so much as it asks for, or its even share of what is left; 0: there is not so much."""
        left_bytes = self.left_bytes(namespace)
        share_bytes = quota_bytes or left_bytes // (1 + further_count)
        return share_bytes if block_bytes <= share_bytes <= left_bytes else 0

    def give(self, namespace: Namespace, size_bytes: int) -> None:
        assert namespace.id not in self._given, f"{namespace.id.hex()[:16]} has a quota"
        left_bytes = self.left_bytes(namespace)
        assert size_bytes <= left_bytes, f"{size_bytes} bytes of {left_bytes}"
        self._given[namespace.id] = self._name_of(namespace), size_bytes

    def take_back(self, namespace_id: NamespaceId) -> None:
        del self._given[namespace_id]

    def refusal(self, namespace: Namespace, *, quota_bytes: int, block_bytes: int) -> CapacityError:
        """Why it gets nothing, and what can be done."""
        name, left_bytes = self._name_of(namespace), self.left_bytes(namespace)
        total_bytes = self._capacity_bytes if name is None else self._promised[name]
        whose = "the agent" if name is None else f"--quota {name}"
        wanted = format_size(quota_bytes) if quota_bytes else f"a block of {format_size(block_bytes)} at least"
        return CapacityError(
            f"namespace {namespace.id.hex()[:16]} of model {namespace.model} asks for {wanted}, and "
            f"{format_size(left_bytes)} of {format_size(total_bytes)} of {whose} are neither in use nor promised; "
            "`kvstore agent status` shows who has them: raise --vram-capacity, or give each its part with "
            "--quota MODEL=SIZE"
        )

    def check_invariants(self) -> None:
        assert self.given_bytes <= self._capacity_bytes, f"{self.given_bytes} given of {self._capacity_bytes}"
        for name in {None, *self._promised}:
            assert self._left_bytes(name) >= 0, f"{name} has {self._left_bytes(name)} bytes left"

    def _name_of(self, namespace: Namespace) -> str | None:
        """The promise that is meant for it."""
        digits = namespace.id.hex()
        for name in self._promised:
            if name == namespace.model or (len(name) >= _ID_DIGITS_MIN and digits.startswith(name.lower())):
                return name
        return None

    def _left_bytes(self, name: str | None) -> int:
        total_bytes = self._capacity_bytes - sum(self._promised.values()) if name is None else self._promised[name]
        return total_bytes - sum(size_bytes for given_name, size_bytes in self._given.values() if given_name == name)
