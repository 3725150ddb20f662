"""A shadow of plain LRU on a sample of requests: a policy that falls behind it gives way for a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Generic, Protocol

from kvstore.eviction.use import NO_HINT, Key, Request, Use

_SHADOW_BLOCKS = 512
SAMPLE_MIN, SAMPLE_MAX = 4, 16
"""One request in so many has a shadow: fewer where the tier is large, so that the shadow has some 512 blocks."""
_SHADOW_BLOCKS_MIN = 64
"""A tier whose shadow would be smaller has none: a few chains would fill it, and tell nothing."""
_MEMORY = 1 / 200
"""Weight of one sampled request in the running means."""
_SAMPLES_MIN = 100
_LEAD_MIN = 0.01
_ERRORS_MIN = 3.0
"""LRU has to be ahead by a point, and by three standard errors."""
_RESPITE_REQUESTS = 1000
_RESPITE_REQUESTS_MAX = 64_000


class Shadow(Protocol[Key]):
    """An evictor, of which only this is needed."""

    def __len__(self) -> int: ...

    def __contains__(self, key: Key) -> bool: ...

    def begin(self, request: Request, *, now_s: float, chain_blocks: int, matched_blocks: int) -> Use: ...

    def touch_chain(self, chain: list[Key], *, use: Use) -> None: ...

    def insert_chain(self, keys: Sequence[Key], *, parent: Key | None, use: Use) -> None: ...

    def pop_coldest(
        self, *, goal_bytes: int, size_bytes_of: Callable[[Key], int], now_s: float, may_evict: Callable[[Key], bool]
    ) -> list[Key]: ...


class Guard(Generic[Key]):
    """Compares the hits that sampled requests had with those that they would have had under LRU.

    When LRU is ahead beyond doubt, the policy is to follow it for some requests, and then to try again; twice as long
    each time.
    """

    def __init__(self, make_lru: Callable[[int], Shadow[Key]], *, capacity_blocks: int) -> None:
        self.sample = min(max(capacity_blocks // _SHADOW_BLOCKS, SAMPLE_MIN), SAMPLE_MAX)
        self._shadow_blocks = capacity_blocks // self.sample
        self.is_watching = self._shadow_blocks >= _SHADOW_BLOCKS_MIN
        self._shadow = make_lru(max(self._shadow_blocks, 1))
        self._respite = _RESPITE_REQUESTS
        self._respite_left = 0
        self.trip_count = 0
        self._sample_count = 0
        self._lead = 0.0
        self._variance = 0.0

    @property
    def follows_lru(self) -> bool:
        return self._respite_left > 0

    def note_request(self) -> bool:
        """One more of all requests; True: from now on the policy goes its own way again."""
        if not self._respite_left:
            return False
        self._respite_left -= 1
        if not self._respite_left:
            self._forget()
        return not self._respite_left

    def note_sampled(self, chain: list[Key], *, hit_blocks: int, now_s: float) -> bool:
        """A sampled request, and how much of its chain was here; True: from now on the policy has to follow LRU."""
        lead = (self._use_shadow(chain, now_s=now_s) - hit_blocks) / max(len(chain), 1)
        if self._respite_left:
            return False
        self._sample_count += 1
        weight = max(_MEMORY, 1 / self._sample_count)
        deviation = lead - self._lead
        self._lead += weight * deviation
        self._variance = (1 - weight) * (self._variance + weight * deviation * deviation)
        error = sqrt(self._variance * weight)
        if self._sample_count < _SAMPLES_MIN or self._lead < max(_LEAD_MIN, _ERRORS_MIN * error):
            return False
        self._respite_left = self._respite
        self._respite = min(2 * self._respite, _RESPITE_REQUESTS_MAX)
        self.trip_count += 1
        return True

    @property
    def lead(self) -> float:
        """Of LRU, as a share of the blocks that were asked for."""
        return self._lead

    def _forget(self) -> None:
        self._sample_count = 0
        self._lead = 0.0
        self._variance = 0.0

    def _use_shadow(self, chain: list[Key], *, now_s: float) -> int:
        """Returns the hits."""
        shadow = self._shadow
        matched = 0
        while matched < len(chain) and chain[matched] in shadow:
            matched += 1
        use = shadow.begin(NO_HINT, now_s=now_s, chain_blocks=len(chain), matched_blocks=matched)
        shadow.touch_chain(chain, use=use)
        # Callers may name parts of chains, so some of what follows a gap may be there.
        new = [key for key in chain[matched:] if key not in shadow]
        parent = chain[matched - 1] if matched else None
        excess = len(shadow) + len(new) - self._shadow_blocks
        if excess > 0:
            shadow.pop_coldest(
                goal_bytes=excess, size_bytes_of=lambda _: 1, now_s=now_s, may_evict=lambda key: key != parent
            )
        room = max(self._shadow_blocks - len(shadow), 0)
        shadow.insert_chain(new[:room], parent=parent, use=use)
        return matched
