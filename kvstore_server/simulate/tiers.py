"""The daemon's rules for tiers, on block numbers instead of bytes. Pure.

A request uses the longest prefix that the tiers have between them, and then brings the rest of its chain. What is used
is promoted to the top, never on a mere lookup. What has no room any more is demoted, tails first; before a block goes
down, those before it that are not there yet are copied, so that no chain in a lower tier lacks its head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kvstore.errors import InvalidArgumentError
from kvstore.eviction import DEMOTED_GAIN_MIN, NEW_GAIN_MIN, Evictor, Watermarks
from kvstore.eviction.use import Request, Use
from kvstore_server.simulate.trace import Span

COOL_DOWN_REQUESTS = 100
_ADMITTED_AT_ONCE = 8
"""Blocks that a tier with a choice takes before it is asked again."""


class Keep(StrEnum):
    """What becomes of the lower copy of a block that is promoted."""

    RETAIN = "retain"
    """It stays, so that the block costs no write when it is demoted again."""
    EXCLUSIVE = "exclusive"
    """It goes: a block is in one tier at a time."""
    INCLUSIVE = "inclusive"
    """Blocks are written to all tiers as they come, and nothing is ever demoted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """One tier: its size, and who leaves it."""

    name: str
    capacity_blocks: int
    policy: str
    is_choosy: bool = False
    """Whether it may refuse a block that it values no more than what would have to leave for it."""
    watermarks: Watermarks | None = None
    """None: it is filled to the last block, and what leaves makes room for what comes."""

    def __post_init__(self) -> None:
        if self.capacity_blocks < 1:
            raise InvalidArgumentError.of(f"{self.name} capacity", f"{self.capacity_blocks} blocks", "1 block or more")


@dataclass(slots=True, kw_only=True)
class TierCounts:
    """What happened in one tier."""

    hit_blocks: int = 0
    """Used there: no tier above had them."""
    stored_blocks: int = 0
    """New ones."""
    promoted_blocks: int = 0
    """From below."""
    demoted_blocks: int = 0
    """From above, with the copies of blocks before them."""
    evicted_blocks: int = 0
    expired_blocks: int = 0
    refused_blocks: int = 0
    """Not worth what would have had to leave for them."""
    roomless_blocks: int = 0
    """Of a chain that is longer than the tier."""
    returned_blocks: int = 0
    """Evicted ones that were used again within the cool-down."""

    @property
    def written_blocks(self) -> int:
        return self.stored_blocks + self.promoted_blocks + self.demoted_blocks

    @property
    def thrash_index(self) -> float:
        return self.returned_blocks / self.evicted_blocks if self.evicted_blocks else 0.0


class _Room(NamedTuple):
    block_count: int
    """Blocks that have a place now."""
    is_refused: bool
    """Whether the tier rather keeps what it has than take in more."""


@dataclass(slots=True)
class _Tier:
    plan: TierPlan
    evictor: Evictor[int]
    counts: TierCounts = field(default_factory=TierCounts)
    uses: list[Use] = field(default_factory=list)
    """One per request, in this tier's own terms."""
    evicted_at: dict[int, int] = field(default_factory=dict)
    """The request for which a block left, until it comes back."""


class Tiers:
    """Tiers from the top down, and what they hold: each whole prefixes.

    With `exclusive` they hold these together, save for tails that have outlived their heads and are of no use.
    """

    def __init__(
        self,
        plans: Sequence[TierPlan],
        *,
        parents: Sequence[int],
        keep: Keep = Keep.RETAIN,
        cool_down_requests: int = COOL_DOWN_REQUESTS,
    ) -> None:
        """`parents`: of each block that will ever come, by its number; below 0 for the first of a chain."""
        assert plans, "a store has a tier"
        # More room than there are blocks changes nothing, and a policy makes tables for all the room it is told of.
        block_count = max(len(parents), 1)
        self._tiers = [
            _Tier(plan, Evictor(plan.policy, capacity_blocks=min(plan.capacity_blocks, block_count))) for plan in plans
        ]
        self._parents = parents
        self._keep = keep
        self._cool_down = cool_down_requests
        self._last_used = [0] * len(parents)
        self._now = 0
        self._now_s = 0.0
        self._is_anything_mortal = False

    @property
    def counts(self) -> list[TierCounts]:
        return [tier.counts for tier in self._tiers]

    def use(self, chain: list[int], spans: Sequence[Span], request: Request, *, now_s: float) -> list[int]:
        """One request, all at once. Returns where the part of its chain ends that each tier had, from the top down."""
        self._now_s = now_s
        self._expire(request)
        own_ends: list[int] = []
        ends: list[int] = []
        matched = 0
        for tier in self._tiers:
            if self._keep is Keep.EXCLUSIVE:
                own_end = _end_of_run(chain, tier.evictor, start=matched)
            else:
                own_end = tier.evictor.matched_count(chain)
            tier.counts.hit_blocks += max(own_end - matched, 0)
            matched = max(own_end, matched)
            own_ends.append(own_end)
            ends.append(matched)
            self._note_returns(tier, chain[matched:])
        for tier in self._tiers:
            tier.uses.append(tier.evictor.begin(request, now_s=now_s, chain_blocks=len(chain), matched_blocks=matched))
        for first, count in spans:
            self._last_used[first : first + count] = [self._now] * count
        if self._keep is Keep.EXCLUSIVE:
            self._place_exclusively(chain, ends)
        else:
            self._place(chain, ends, own_ends)
        for index in range(len(self._tiers)):
            self._sink_to_low_watermark(index)
        self._now += 1
        return ends

    def check_invariants(self) -> None:
        for tier in self._tiers:
            tier.evictor.check_invariants()
            assert len(tier.evictor) <= tier.plan.capacity_blocks, f"{tier.plan.name} holds {len(tier.evictor)}"

    # --- what a request does

    def _place(self, chain: Sequence[int], ends: Sequence[int], own_ends: Sequence[int]) -> None:
        """Touches what each tier has, lifts what is lower, and stores what is new."""
        matched = ends[-1]
        for tier, own_end in zip(self._tiers, own_ends, strict=True):
            tier.evictor.touch_chain(chain[:own_end], use=tier.uses[-1])
            # Room for a chain is not to be made at the cost of its own head.
            tier.evictor.hold(chain[own_end - 1 : own_end])
        # From the bottom, as blocks pass through every tier on their way up.
        for index in range(len(self._tiers) - 1, -1, -1):
            own_end, end = own_ends[index], ends[index]
            if matched > end:
                self._lift(index, chain, start=own_end, end=matched)
            if index == 0 or self._keep is Keep.INCLUSIVE:
                self._store(index, chain, start=matched)
        for tier, own_end in zip(self._tiers, own_ends, strict=True):
            tier.evictor.unhold(chain[own_end - 1 : own_end])

    def _place_exclusively(self, chain: Sequence[int], ends: Sequence[int]) -> None:
        top = self._tiers[0].evictor
        top.touch_chain(chain[: ends[0]], use=self._tiers[0].uses[-1])
        top.hold(chain[ends[0] - 1 : ends[0]])
        for tier, start, end in zip(self._tiers[1:], ends, ends[1:], strict=False):
            for key in chain[start:end]:
                tier.evictor.remove(key)
        lifted_end = self._lift(0, chain, start=ends[0], end=ends[-1])
        if lifted_end < ends[-1] and len(self._tiers) > 1:
            self._demote(1, chain[lifted_end : ends[-1]])
        self._store(0, chain, start=ends[-1])
        top.unhold(chain[ends[0] - 1 : ends[0]])

    def _lift(self, index: int, chain: Sequence[int], *, start: int, end: int) -> int:
        """Promotes blocks, head first, as far as there is room; returns where that ended."""
        lifted_end = self._put(index, chain, start=start, end=end)
        self._tiers[index].counts.promoted_blocks += lifted_end - start
        return lifted_end

    def _store(self, index: int, chain: Sequence[int], *, start: int) -> None:
        """New blocks. What follows a chain that fills the tier by itself goes down at once."""
        tier = self._tiers[index]
        is_reached = start == 0 or chain[start - 1] in tier.evictor
        refused_count = tier.counts.refused_blocks
        end = self._put(index, chain, start=start, end=len(chain)) if is_reached else start
        tier.counts.stored_blocks += end - start
        is_refused = tier.counts.refused_blocks > refused_count
        if end < len(chain) and not is_refused and self._keep is not Keep.INCLUSIVE and index + 1 < len(self._tiers):
            self._demote(index + 1, chain[end:])

    def _put(self, index: int, chain: Sequence[int], *, start: int, end: int) -> int:
        """Inserts blocks of the present request, head first, as far as there is room; returns where that ended."""
        if start >= end:
            return start
        tier = self._tiers[index]
        use = tier.uses[-1]
        # What was promoted for this very request may be the coldest of all.
        tier.evictor.hold(chain[start - 1 : start])
        room = self._make_room(index, chain[start:end], use=use, is_choosy=tier.plan.is_choosy)
        tier.evictor.unhold(chain[start - 1 : start])
        put_end = start + room.block_count
        parent = chain[start - 1] if start else None
        tier.evictor.insert_chain(chain[start:put_end], parent=parent, use=use)
        if room.is_refused:
            tier.evictor.bypassed(chain[put_end:end], use=use)
        return put_end

    # --- who leaves

    def _make_room(
        self, index: int, keys: Sequence[int], *, use: Use, is_choosy: bool, gain_min: float = NEW_GAIN_MIN
    ) -> _Room:
        """Lets colder blocks leave for these, which are a chain."""
        tier, count = self._tiers[index], len(keys)
        room = tier.plan.capacity_blocks - len(tier.evictor)
        while room < count:
            goal = count - room
            if is_choosy:
                goal = min(goal, _ADMITTED_AT_ONCE)
                if not tier.evictor.admits(use, keys=keys[room : room + goal], gain_min=gain_min):
                    tier.counts.refused_blocks += count - room
                    return _Room(room, is_refused=True)
            gone_count = self._evict(index, goal)
            room += gone_count
            if gone_count < goal:
                tier.counts.roomless_blocks += max(count - room, 0)
                break
        return _Room(min(room, count), is_refused=False)

    def _evict(self, index: int, goal: int) -> int:
        """Lets the coldest blocks leave for the tier below; returns how many."""
        tier = self._tiers[index]
        victims = tier.evictor.pop_coldest(goal_bytes=goal, size_bytes_of=_one, now_s=self._now_s)
        tier.counts.evicted_blocks += len(victims)
        tier.evicted_at.update(dict.fromkeys(victims, self._now))
        if self._keep is not Keep.INCLUSIVE and index + 1 < len(self._tiers):
            self._demote(index + 1, victims[::-1])
        return len(victims)

    def _sink_to_low_watermark(self, index: int) -> None:
        tier = self._tiers[index]
        if tier.plan.watermarks is not None:
            excess = tier.plan.watermarks.excess_bytes(
                used_bytes=len(tier.evictor), capacity_bytes=tier.plan.capacity_blocks
            )
            if excess:
                self._evict(index, excess)

    def _demote(self, index: int, keys: Sequence[int]) -> None:
        """Takes blocks from above, parents before their children; those that are here already cost nothing."""
        evictor, parents, last_used = self._tiers[index].evictor, self._parents, self._last_used
        part: list[int] = []
        for key in keys:
            if key in evictor:
                continue
            if part and (parents[key] != part[-1] or last_used[key] != last_used[part[-1]]):
                self._demote_part(index, part)
                part = []
            part.append(key)
        if part:
            self._demote_part(index, part)

    def _demote_part(self, index: int, part: list[int]) -> None:
        """Blocks of one chain that were last used together, and those before them that are not here.

        They are dropped if one before them is nowhere any more: it made room for others that go down.
        """
        tier = self._tiers[index]
        evictor, parents = tier.evictor, self._parents
        above: list[int] = []
        parent = parents[part[0]]
        if self._keep is Keep.EXCLUSIVE and parent >= 0 and not self._is_anywhere(parent, self._tiers):
            return
        while self._keep is Keep.RETAIN and parent >= 0 and parent not in evictor:
            if not self._is_anywhere(parent, self._tiers[:index]):
                return
            above.append(parent)
            parent = parents[parent]
        keys = [*reversed(above), *part]
        use = tier.uses[self._last_used[part[0]]]
        # Without these, what follows them here would be of no use to anybody.
        is_needed = any(map(evictor.is_parent, part if self._keep is Keep.EXCLUSIVE else part[-1:]))
        held = (parent,) if parent in evictor else ()
        evictor.hold(held)
        room = self._make_room(
            index,
            keys,
            use=use,
            is_choosy=tier.plan.is_choosy and not is_needed,
            gain_min=DEMOTED_GAIN_MIN,
        )
        evictor.unhold(held)
        count = room.block_count
        at = 0
        while at < count:
            end = at + 1
            used = self._last_used[keys[at]]
            while end < count and self._last_used[keys[end]] == used:
                end += 1
            before = parents[keys[at]]
            evictor.insert_chain(keys[at:end], parent=before if before >= 0 else None, use=tier.uses[used])
            at = end
        tier.counts.demoted_blocks += count
        if room.is_refused:
            evictor.bypassed(keys[count:], use=use)

    @staticmethod
    def _is_anywhere(key: int, tiers: Sequence[_Tier]) -> bool:
        return any(key in tier.evictor for tier in tiers)

    def _expire(self, request: Request) -> None:
        self._is_anything_mortal |= request.ttl_s is not None
        if self._is_anything_mortal:
            for tier in self._tiers:
                expired = tier.evictor.expired(now_s=self._now_s, count_max=tier.plan.capacity_blocks)
                tier.counts.expired_blocks += len(expired)

    def _note_returns(self, tier: _Tier, missing: Sequence[int]) -> None:
        """Blocks that are used and that neither this tier nor one above has."""
        evicted_at = tier.evicted_at
        for key in missing:
            left_at = evicted_at.pop(key, None)
            if left_at is not None and self._now - left_at <= self._cool_down:
                tier.counts.returned_blocks += 1


def _end_of_run(chain: Sequence[int], evictor: Evictor[int], *, start: int) -> int:
    """Where the blocks end that are there from `start` on."""
    return next((at for at in range(start, len(chain)) if chain[at] not in evictor), len(chain))


def _one(_: int) -> int:
    return 1
