"""What is asked of the store, remembered for who records it: salted, bounded, and only while somebody does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from blake3 import blake3

from kvstore.keys import BlockHash
from kvstore.messages import ACCESS_BLOCKS_MAX, ACCESS_NUMBER_BYTES, Access, AccessKind, Hint
from kvstore_server.core.tenants import ScopedId, tenant_of

SECRET_BYTES = 32
WATCH_S = 30.0
"""So long a namespace is watched after somebody has taken what there was."""
_WATCHES_MAX = 16
"""At once, and of each tenant its share, but one in any case: nobody ends another tenant's recording."""
_BLOCKS_MAX = 1 << 18
"""Remembered of a namespace: 2 MiB, and a second of prompts of 16k tokens at 256 a second."""


_BLOCKS_PER_ACCESS_MIN = 8
"""That each counts for in an answer: what else it tells takes as much room."""
_ACCESSES_MAX = 1 << 15
"""Likewise, however few blocks they have: some 10 MiB."""


class Taken(NamedTuple):
    accesses: tuple[Access, ...]
    last_number: int
    dropped_count: int


@dataclass(slots=True)
class _Watch:
    until_s: float
    last_number: int
    accesses: deque[Access] = field(default_factory=deque)
    """Up to `last_number`."""
    block_count: int = 0


class AccessLog:
    """The latest accesses of each namespace that is watched, numbered from 1 on.

    What a reader is too slow for is dropped, oldest first, and counted. Whoever asks with a number that is not
    remembered any more begins anew. Numbers of blocks tell nobody their hashes: these are keyed with a secret.
    """

    def __init__(self, *, secret: bytes, tenant_count: int = 1) -> None:
        self._secret = secret
        self._watches_per_tenant_max = max(_WATCHES_MAX // tenant_count, 1)
        self._watches: dict[ScopedId, _Watch] = {}

    def is_watched(self, namespace_id: ScopedId) -> bool:
        return namespace_id in self._watches

    def note(
        self,
        namespace_id: ScopedId,
        kind: AccessKind,
        hashes: Sequence[BlockHash],
        *,
        matched_count: int,
        hint: Hint | None,
        uptime_s: float,
    ) -> None:
        """Of a namespace that nobody watches nothing is noted."""
        watch = self._watches.get(namespace_id)
        if watch is None:
            return
        if uptime_s > watch.until_s:
            del self._watches[namespace_id]
            return
        watch.accesses.append(
            Access(
                kind=kind,
                uptime_s=uptime_s,
                block_numbers=self._numbers(hashes),
                matched_count=matched_count,
                hint=hint,
            )
        )
        watch.last_number += 1
        watch.block_count += len(hashes)
        accesses = watch.accesses
        while (watch.block_count > _BLOCKS_MAX or len(accesses) > _ACCESSES_MAX) and len(accesses) > 1:
            watch.block_count -= _block_count(accesses.popleft())

    def take(self, namespace_id: ScopedId, *, after_number: int, uptime_s: float) -> Taken:
        """What has come behind a number, and may be forgotten then; 0: from now on."""
        watch = self._watches.get(namespace_id)
        if watch is None or uptime_s > watch.until_s or not 0 < after_number <= watch.last_number:
            watch = self._begin(namespace_id, uptime_s=uptime_s)
            return Taken((), watch.last_number, int(after_number > 0))
        watch.until_s = uptime_s + WATCH_S
        first_number = watch.last_number - len(watch.accesses) + 1
        skipped_count = max(after_number + 1 - first_number, 0)
        accesses = tuple(_bounded(islice(watch.accesses, skipped_count, None)))
        dropped_count = max(first_number - after_number - 1, 0)
        return Taken(accesses, max(after_number, first_number - 1) + len(accesses), dropped_count)

    def _begin(self, namespace_id: ScopedId, *, uptime_s: float) -> _Watch:
        watch = self._watches.get(namespace_id)
        if watch is None or uptime_s > watch.until_s:
            own = [one for one in self._watches if tenant_of(one) == tenant_of(namespace_id)]
            if watch is None and len(own) >= self._watches_per_tenant_max:
                del self._watches[min(own, key=lambda one: self._watches[one].until_s)]
            watch = self._watches[namespace_id] = _Watch(until_s=uptime_s, last_number=1)
        watch.until_s = uptime_s + WATCH_S
        return watch

    def _numbers(self, hashes: Sequence[BlockHash]) -> bytes:
        secret = self._secret
        return b"".join(blake3(one, key=secret).digest(length=ACCESS_NUMBER_BYTES) for one in hashes)


def _bounded(accesses: Iterable[Access]) -> Iterable[Access]:
    """As many from the start as fit into an answer; one in any case."""
    room = ACCESS_BLOCKS_MAX
    for index, access in enumerate(accesses):
        room -= max(_block_count(access), _BLOCKS_PER_ACCESS_MIN)
        if room < 0 and index:
            return
        yield access


def _block_count(access: Access) -> int:
    return len(access.block_numbers) // ACCESS_NUMBER_BYTES
