"""What a store without limits would have had of what was asked for, and why this one had it not. Pure.

A block that is asked for is a hit, or is missing: because it is new, or although it was asked for or stored before. The
latter are the gap between the hit rate and its ceiling, and each has a cause: what became of the block, if it was here;
another namespace that has it; or that nobody offered it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from math import inf, isnan

import numpy as np
from blake3 import blake3

from kvstore.keys import HASH_BYTES
from kvstore.messages import BlockState, ReuseStats
from kvstore_server.core.distinct import Keys, RecentDistinct
from kvstore_server.core.fates import Fate, Fates
from kvstore_server.core.shadow import ShadowLru
from kvstore_server.core.tenants import ScopedId

WINDOW_S = 3600.0
"""What is called recent is the last one to two of these."""
_WAITING_COUNT_MAX = 4096
"""Blocks that wait to be looked at together, which is cheaper by far: 128 KiB of hashes."""
_WORDS = HASH_BYTES // 8
_SALTS_MAX = 8192
_EVIDENCE_MAX = 4096
"""Returns of evicted blocks by which those that are not in the sample are judged."""


@dataclass(slots=True)
class _Counts:
    """Of blocks, some of them estimates."""

    hit: float = 0.0
    miss: float = 0.0
    new: float = 0.0
    capacity: float = 0.0
    policy: float = 0.0
    admission: float = 0.0
    identity: float = 0.0
    failure: float = 0.0


@dataclass(slots=True)
class _Mark:
    """What had been counted at a time."""

    at_s: float
    counts: _Counts


class Reuse:
    """Counts what was asked for by what it was, since the start and of late. Bounded, whatever is asked for.

    Blocks are known by 64 bits of their hashes, which look random, mixed with their namespace: so equal hashes of two
    namespaces, or tenants, are different blocks.
    """

    def __init__(self, *, used_bytes: Callable[[], int], window_s: float = WINDOW_S) -> None:
        self.used_bytes = used_bytes
        """How much room blocks take now, in all tiers."""
        self._window_s = window_s
        self._seen = RecentDistinct()
        self._fates = Fates()
        self._shadow = ShadowLru()
        self._salts: dict[ScopedId, np.uint64] = {}
        self._total = _Counts()
        self._start_s = self._now_s = inf
        self._older = self._newer = _Mark(inf, _Counts())
        # What waits to be looked at together: uses, and blocks that were missing of which nothing was known.
        self._uses: list[tuple[ScopedId, int, bytes]] = []
        self._strange: list[Keys] = []
        self._used_count = self._strange_count = 0
        # Of evicted blocks that were asked for again: those in the sample, and those of them that LRU would have.
        self._evidence = 0.0
        self._kept_by_lru = 0.0

    # --- what happens

    def looked_up(
        self,
        namespace_id: ScopedId,
        packed: bytes,
        states: bytes,
        *,
        block_bytes: int,
        now_s: float,
        elsewhere_count: int = 0,
        unreadable_count: int = 0,
    ) -> None:
        """An answered lookup: its hashes, and a state each; what is PENDING counts as neither hit nor miss.

        Of the first so many missing ones another namespace has `elsewhere_count`, and of all of them a tier has
        `unreadable_count` that cannot be read at present.
        """
        self._pass_to(now_s)
        total = self._total
        hit_count, miss_count = states.count(BlockState.HIT), states.count(BlockState.MISS)
        total.hit += hit_count
        total.miss += miss_count
        if hit_count:
            self.used(namespace_id, _chosen(packed, states, BlockState.HIT, hit_count), block_bytes=block_bytes)
        if not miss_count:
            return
        keys = self._keys(namespace_id, _chosen(packed, states, BlockState.MISS, miss_count))
        fates = self._fates.find(keys)
        if fates is not None:
            counts = np.bincount(fates, minlength=len(Fate) + 1).tolist()
            total.admission += counts[Fate.REFUSED]
            total.failure += counts[Fate.FAILED]
            if counts[Fate.EVICTED]:
                self._judge(keys[fates == Fate.EVICTED])
            elsewhere_count -= int(np.count_nonzero(fates[:elsewhere_count]))
            keys = keys[fates == 0]
        total.identity += elsewhere_count
        failure_count = min(unreadable_count, keys.size - elsewhere_count)
        total.failure += failure_count
        keys = keys[elsewhere_count + failure_count :]
        if keys.size:
            self._strange.append(keys)
            self._strange_count += keys.size
            self._catch_up_at_times()

    def found_unseen(self, hit_count: int) -> None:
        """Hits that clients have found by themselves."""
        self._total.hit += hit_count

    def used(self, namespace_id: ScopedId, packed: bytes, *, block_bytes: int) -> None:
        """Blocks were used, or came, given head first."""
        self._uses.append((namespace_id, block_bytes, packed))
        self._used_count += len(packed) // HASH_BYTES
        self._catch_up_at_times()

    def left(self, namespace_id: ScopedId, packed: bytes, fate: Fate) -> None:
        """Blocks are in no tier any more, or have not come."""
        if packed:
            self._fates.note(self._keys(namespace_id, packed), fate)

    # --- figures

    def tick(self, *, now_s: float) -> None:
        """Looks at what still waits for that; to be called every so often, and before figures that are to be new."""
        self._pass_to(now_s)
        self._catch_up()

    @property
    def total(self) -> ReuseStats:
        """Since the start. Changes nothing, like `recent`, so that other threads may ask."""
        return _stats(self._total, _Counts(), waiting_count=self._strange_count, window_s=self._now_s - self._start_s)

    @property
    def recent(self) -> ReuseStats:
        """Of the last one to two windows, or since the start while that is less."""
        older = self._older
        return _stats(self._total, older.counts, waiting_count=self._strange_count, window_s=self._now_s - older.at_s)

    # --- inside

    def _pass_to(self, now_s: float) -> None:
        """To be called before anything is counted."""
        if self._start_s == inf:
            self._start_s = self._now_s = now_s
            self._older = self._newer = _Mark(now_s, _Counts())
        self._now_s = max(self._now_s, now_s)
        # Twice where nothing was asked for so long that what the newer window has is not recent either.
        for _ in range(min(int((now_s - self._newer.at_s) // self._window_s), 2)):
            self._catch_up()
            self._older, self._newer = self._newer, _Mark(now_s, _Counts(*astuple(self._total)))
            self._seen.rotate()

    def _keys(self, namespace_id: ScopedId, packed: bytes) -> Keys:
        salt = self._salts.get(namespace_id)
        if salt is None:
            if len(self._salts) >= _SALTS_MAX:
                self._salts.clear()
            salt = np.uint64(int.from_bytes(blake3(namespace_id).digest(length=8), "little"))
            self._salts[namespace_id] = salt
        keys: Keys = np.frombuffer(packed, dtype="<u8")[_WORDS - 1 :: _WORDS] ^ salt
        return keys

    def _judge(self, evicted: Keys) -> None:
        """Evicted blocks are asked for again: would LRU still have them?"""
        self._catch_up()
        sampled = self._shadow.sampled(evicted)
        kept_count = sum(key in self._shadow for key in sampled)
        self._evidence += len(sampled)
        self._kept_by_lru += kept_count
        if self._evidence > _EVIDENCE_MAX:
            self._evidence /= 2
            self._kept_by_lru /= 2
        unsampled_count = evicted.size - len(sampled)
        policy = kept_count + unsampled_count * (self._kept_by_lru / self._evidence if self._evidence else 0.0)
        self._total.policy += policy
        self._total.capacity += evicted.size - policy

    def _catch_up_at_times(self) -> None:
        if self._used_count + self._strange_count >= _WAITING_COUNT_MAX:
            self._catch_up()

    def _catch_up(self) -> None:
        """Has the shadow see what was used: runs of one namespace at a time, tails before heads, as the store does."""
        if self._strange:
            self._total.new += self._seen.add(np.concatenate(self._strange))
            self._strange, self._strange_count = [], 0
        uses, self._uses, self._used_count = self._uses, [], 0
        run: list[bytes] = []
        for index, (namespace_id, block_bytes, packed) in enumerate(uses):
            run.append(_reversed(packed))
            if index + 1 == len(uses) or uses[index + 1][:2] != (namespace_id, block_bytes):
                keys = self._keys(namespace_id, b"".join(run))
                self._shadow.use(keys, block_bytes=block_bytes, room_bytes=self.used_bytes())
                run = []


def _chosen(packed: bytes, states: bytes, state: BlockState, count: int) -> bytes:
    """The hashes of the blocks in this state, `count` in number."""
    if count == len(states):
        return packed
    rows = np.frombuffer(packed, dtype=f"V{HASH_BYTES}")
    chosen: bytes = rows[np.frombuffer(states, dtype=np.uint8) == state].tobytes()
    return chosen


def _reversed(packed: bytes) -> bytes:
    rows = np.frombuffer(packed, dtype=f"V{HASH_BYTES}")
    backwards: bytes = rows[::-1].tobytes()
    return backwards


def _stats(now: _Counts, before: _Counts, *, waiting_count: int, window_s: float) -> ReuseStats:
    spent = _Counts(*(here - there for here, there in zip(astuple(now), astuple(before), strict=True)))
    miss_count = round(spent.miss) - waiting_count  # of these it is not known yet whether they are new
    policy_count = round(spent.policy)
    capacity_count = round(spent.capacity + spent.policy) - policy_count
    others = [capacity_count, policy_count, *map(round, (spent.admission, spent.identity, spent.failure))]
    # An estimate of what is new that is too high leaves nothing else, and never less than that.
    new_count = min(round(spent.new), miss_count - sum(others))
    return ReuseStats(
        window_s=0.0 if isnan(window_s) else window_s,  # nothing has happened yet
        hit_count=round(spent.hit),
        miss_count=miss_count,
        new_count=new_count,
        capacity_count=capacity_count,
        policy_count=policy_count,
        admission_count=others[2],
        identity_count=others[3],
        failure_count=others[4],
        unoffered_count=miss_count - new_count - sum(others),
    )
