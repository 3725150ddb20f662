"""Which blocks leave first, in whichever tier: the one engine around all policies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count as count_from
from typing import Generic

from kvstore.errors import InvalidArgumentError
from kvstore.eviction.arc import Arc
from kvstore.eviction.candidates import Candidates
from kvstore.eviction.lru import Lru
from kvstore.eviction.ranking import Ranking
from kvstore.eviction.run import Run
from kvstore.eviction.s3fifo import S3Fifo
from kvstore.eviction.tree import PrefixTree
from kvstore.eviction.use import NO_HINT, PRIORITY_MAX, Key, Request, Use
from kvstore.eviction.window_lfu import WindowLfu

POLICIES = ("phix", "lru", "arc", "s3fifo", "window-lfu")
"""What `Evictor` can be told to do."""
NEW_GAIN_MIN = 1.25
"""For new blocks: a write must buy something."""
DEMOTED_GAIN_MIN = 4.0
"""For blocks from the tier above, which a disk writes: on public traces less than a point of hit rate lies between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFigures:
    """What happened since the start, and what the policy tells of itself, by name."""

    policy: str
    block_count: int
    evicted_count: int
    """Blocks that left for want of room."""
    expired_count: int
    """Blocks that left as they were not used for the time that their client gave."""
    bypassed_count: int
    """Times that a caller was told to keep what is here rather than take in more."""
    of_policy: Mapping[str, float]


class Evictor(Generic[Key]):
    """Blocks of a prefix tree, and which of them leave first.

    A block is a candidate while none of its children is here and nobody holds it, so no chain ever has a hole. Of the
    candidates the policy names the coldest; hints go before it (`Candidates`): blocks of sessions that are over leave
    first, and those of a higher priority after all of a lower one. Blocks of one use leave tail first. Nothing depends
    on chance, hash seeds or a clock: the same calls give the same victims. Times that go back count as the latest.
    """

    def __init__(self, policy: str = "lru", *, capacity_blocks: int, refusal_count_max: int | None = None) -> None:
        """A search ends after so many refusals, so that a tier full of refused blocks costs no more than that."""
        if capacity_blocks < 1:
            raise InvalidArgumentError.of("capacity_blocks", capacity_blocks, "1 or more")
        self.policy = policy
        self._start(capacity_blocks)
        self._refusal_count_max = refusal_count_max
        self._now_s = float("-inf")
        self._use_number = 0
        self._evicted_count = 0
        self._expired_count = 0
        self._bypassed_count = 0

    def _start(self, capacity_blocks: int) -> None:
        self._maker = object()
        self._ranking: Ranking[Key] = _ranking(self.policy, capacity_blocks)
        self._candidates: Candidates[Key] = Candidates(self._ranking)
        self._tree: PrefixTree[Key] = PrefixTree(self._candidates)

    def __len__(self) -> int:
        return len(self._tree)

    def __contains__(self, key: Key) -> bool:
        return key in self._tree

    @property
    def capacity_blocks(self) -> int:
        """What the policy reckons with; who counts in bytes says so when it knows better.

        A policy makes its tables for it once: it has to be told before there are blocks.
        """
        return self._ranking.capacity_blocks

    @capacity_blocks.setter
    def capacity_blocks(self, count: int) -> None:
        if self._tree or max(count, 1) == self.capacity_blocks:
            self._ranking.capacity_blocks = max(count, 1)
        else:
            self._start(max(count, 1))

    # --- use

    def begin(self, request: Request, *, now_s: float, chain_blocks: int, matched_blocks: int) -> Use:
        """A request, of whose chain so many blocks are here; what it uses or brings is of this use."""
        if request is not NO_HINT:
            _check(request)
        self._now_s = self._candidates.now_s = max(self._now_s, now_s)
        self._use_number += 1
        use = Use(
            self._use_number,
            request,
            now_s=self._now_s,
            chain_blocks=chain_blocks,
            matched_blocks=matched_blocks,
            maker=self._maker,
        )
        self._ranking.begin(use)
        return use

    def made(self, use: Use) -> bool:
        """Whether a use is of this evictor, and means something to its policy."""
        return use.maker is self._maker

    def touch_chain(self, chain: Iterable[Key], *, use: Use) -> None:
        """Counts one use of blocks given head first; blocks that are not here are passed over.

        Blocks that this same use has brought or touched are counted again, but are no more recent for it.
        """
        runs = self._tree.parts_of(chain if isinstance(chain, list) else list(chain))
        for run in runs:
            run.use_base += 1
            if run.use is not use:
                self._candidates.withdraw(run)
                self._ranking.reused(run, use=use)
                run.use = use
        # Tail first, even of blocks that claim no parents: of equals, what is offered first leaves first.
        for run in reversed(runs):
            if not run.child_count:
                self._candidates.offer(run)
        self._tree.join_all(runs)

    def describe(self, chain: Sequence[Key], request: Request, *, now_s: float) -> list[Use]:
        """More is known of the request that used this chain last: what `request` says replaces what it said before.

        It holds for blocks that nobody has used since, and counts as no use. Where it names a session, it holds for the
        blocks that this session's same turn was the last to use, in however many uses, and for no other session's; else
        for those of the use that used the end of the chain. A time to live is counted from now. Returns these uses as
        they are known now.
        """
        _check(request)
        self._now_s = self._candidates.now_s = max(self._now_s, now_s)
        found = list(filter(None, map(self._tree.find, chain)))
        last_use = found[-1].use if found else None
        runs = list(dict.fromkeys(found))
        told = {one.name: getattr(request, one.name) for one in fields(request)}
        known = {name: value for name, value in told.items() if value != getattr(NO_HINT, name)}
        later: dict[Use, Use] = {}
        for was in dict.fromkeys(run.use for run in runs):
            if not _is_of(was, request, is_last=was is last_use):
                continue
            if request.ttl_s is not None:
                known["ttl_s"] = request.ttl_s + self._now_s - was.now_s
            later[was] = self.retell(was, replace(was.request, **known))
        for run in runs:
            use_now = later.get(run.use)
            if use_now is None:
                continue
            is_candidate = run.level is not None
            self._candidates.withdraw(run)
            self._ranking.described(run, use=use_now)
            run.use = use_now
            if is_candidate:
                self._candidates.offer(run)
        return list(later.values())

    def retell(self, was: Use, request: Request) -> Use:
        """The same use where this is known of its request, for blocks that are yet to come with it."""
        use = Use(
            was.number,
            request,
            now_s=was.now_s,
            chain_blocks=was.chain_blocks,
            matched_blocks=was.matched_blocks,
            mark=was.mark,
            maker=self._maker,
            below=was.below,
        )
        self._ranking.describe(use, was=was)
        return use

    # --- coming

    def insert(self, key: Key, *, parent: Key | None, use: Use, use_count: int = 0) -> None:
        """Adds a block, which was used so often before it came; its parent may come later, or never.

        Parents are what callers claim. One that would make the block its own ancestor, or for all that a bounded
        walk can tell might, is ignored: in a ring nothing is ever a leaf, so nothing could ever leave.
        """
        tree = self._tree
        parent = tree.claimable(key, parent)
        tail = tree.end_at(parent)
        ((_, mark),) = self._ranking.admit((key,), parent=tail, use=use)
        tree.add(key, parent=parent, tail=tail, use=use, mark=mark, use_count=use_count)

    def insert_chain(self, keys: Sequence[Key], *, parent: Key | None, use: Use) -> None:
        """`insert` of each, as the child of the one before."""
        if not keys:
            return
        if self._tree.is_simple(keys, parent=parent):
            tail = self._tree.end_at(parent)
            parts = self._ranking.admit(keys, parent=tail, use=use)
            self._tree.grow(keys, parent=parent, tail=tail, use=use, parts=parts)
            return
        for key in keys:
            self.insert(key, parent=parent, use=use)
            parent = key

    def admits(self, use: Use, *, keys: Sequence[Key] = (), gain_min: float = NEW_GAIN_MIN) -> bool:
        """False: a block of this use is not worth `gain_min` times what would leave to make room for it.

        For who may bypass the tier: without room for the rest of a chain, the rest is better not taken in, and
        `bypassed`. `keys` are the next ones that would be put in: of a few it may be known that they were here before.
        """
        admits = self._candidates.admits(use, keys=keys, gain_min=gain_min)
        self._bypassed_count += not admits
        return admits

    def bypassed(self, keys: Sequence[Key], *, use: Use) -> None:
        """The rest of a chain was not taken in; a policy learns from whether it is asked for again."""
        self._ranking.passed_over([key for key in keys if key not in self._tree], use=use)

    def restore(self, keys: Sequence[Key], parents: Sequence[Key | None], *, now_s: float) -> None:
        """`insert` of each block with its parent, the most recent one last, into nothing; several times as fast.

        Of each ring the claim of one block is ignored.
        """
        first = self.begin(NO_HINT, now_s=now_s, chain_blocks=len(keys), matched_blocks=0)
        uses = (
            Use(
                number, NO_HINT, now_s=first.now_s, chain_blocks=0, matched_blocks=0, mark=first.mark, maker=self._maker
            )
            for number in count_from(first.number)
        )
        runs = self._tree.restore(keys, parents, uses)
        self._use_number += len(runs)
        for run in runs:
            rest, keys = run, run.keys
            for count, mark in list(self._ranking.admit(list(keys), parent=self._tree.find(run.parent), use=run.use)):
                rest.mark = mark
                if count < len(rest.keys):
                    rest = self._tree.cut(rest, count)[1]
        for run in self._tree.runs():
            if not run.child_count:
                self._candidates.offer(run)

    # --- asking

    def matched_count(self, chain: list[Key]) -> int:
        """How many blocks of a chain, given head first, are here before the first that is not."""
        return self._tree.matched_count(chain)

    def parent_of(self, key: Key) -> Key | None:
        """As it was claimed, whether or not that one is here; None: none, or one that was ignored."""
        return self._tree.parent_of(key)

    def ancestors(self, key: Key) -> Iterator[Key]:
        """Those that are here, the nearest first, up to one that is not; nothing may change meanwhile."""
        return self._tree.ancestors(key)

    def is_parent(self, key: Key) -> bool:
        """Whether some block here has claimed this one as its parent, which need not be here."""
        return self._tree.is_parent(key)

    def last_use(self, key: Key) -> Use:
        """For which it came, or was touched last."""
        return self._tree.run_of(key).use

    def use_count(self, key: Key) -> int:
        """How often a block was touched, and what it came with."""
        run = self._tree.run_of(key)
        return run.use_count(run.index_of(key))

    def figures(self) -> PolicyFigures:
        return PolicyFigures(
            policy=self.policy,
            block_count=len(self._tree),
            evicted_count=self._evicted_count,
            expired_count=self._expired_count,
            bypassed_count=self._bypassed_count,
            of_policy=self._ranking.figures(),
        )

    @property
    def policy_in_force(self) -> str:
        """By which blocks leave now: `phix` follows `lru` as long as that does better."""
        return "lru" if self._ranking.figures().get("guard_follows_lru") else self.policy

    # --- holds

    def hold(self, keys: Sequence[Key]) -> None:
        """Keeps each of these blocks from being a candidate, once more, until as many `unhold`s."""
        self._candidates.hold(keys)

    def unhold(self, keys: Iterable[Key]) -> None:
        for key in self._candidates.unhold(keys):
            run = self._tree.run_of(key)
            if not run.child_count and run.keys[-1] == key:
                self._candidates.offer(run)

    def is_held(self, key: Key) -> bool:
        return self._candidates.is_held(key)

    # --- leaving

    def remove(self, key: Key) -> None:
        """Takes a block out, whoever asked, even from the middle of a chain."""
        run = self._tree.remove(key)
        self._candidates.forget(key)
        self._ranking.removed(key, run)

    def pop_coldest(
        self,
        *,
        goal_bytes: int,
        size_bytes_of: Callable[[Key], int],
        now_s: float,
        may_evict: Callable[[Key], bool | None] = lambda _: True,
        count_max: int | None = None,
    ) -> list[Key]:
        """Removes and returns the coldest leaves until they add up to `goal_bytes`, are `count_max`, or none is left.

        A parent becomes a candidate in the same call once its last child has gone. `may_evict` is asked of each while
        it is still here; blocks that it refuses keep their place, and where it says None the search ends, too.
        """
        self._now_s = max(self._now_s, now_s)
        victims: list[Key] = []
        refused: list[Run[Key]] = []
        freed_bytes = 0
        while freed_bytes < goal_bytes and (count_max is None or len(victims) < count_max):
            run = self._search(refused, may_evict)
            if run is None:
                break
            start = len(victims)
            while True:
                key = self._tree.trim(run)
                victims.append(key)
                freed_bytes += size_bytes_of(key)
                if (
                    not run.keys
                    or not self._ranking.is_steady
                    or freed_bytes >= goal_bytes
                    or (count_max is not None and len(victims) >= count_max)
                    or self._candidates.is_held(run.keys[-1])
                    or not may_evict(run.keys[-1])
                ):
                    break
            self._ranking.evicted(victims[start:], run, now_s=self._now_s)
        for run in refused:
            self._candidates.offer(run)
        self._evicted_count += len(victims)
        return victims

    def peek_coldest(self, *, now_s: float, may_evict: Callable[[Key], bool | None] = lambda _: True) -> Key | None:
        """The block that `pop_coldest` would take first."""
        self._now_s = max(self._now_s, now_s)
        refused: list[Run[Key]] = []
        run = self._search(refused, may_evict)
        for one in refused:
            self._candidates.offer(one)
        return None if run is None else run.keys[-1]

    def expired(self, *, now_s: float, count_max: int) -> list[Key]:
        """Removes and returns leaves that were not used for the time that their client gave, tails first."""
        self._now_s = max(self._now_s, now_s)
        gone: list[Key] = []
        while len(gone) < count_max and (run := self._candidates.first_expired(now_s=self._now_s)) is not None:
            key = self._tree.trim(run)
            self._ranking.removed(key, run)
            gone.append(key)
        self._expired_count += len(gone)
        return gone

    def check_invariants(self) -> None:
        self._tree.check_invariants()
        self._candidates.check_invariants(run for run in self._tree.runs() if not run.child_count)
        assert all(run.level is None for run in self._tree.runs() if run.child_count), "a parent is a candidate"

    # --- inside

    def _search(self, refused: list[Run[Key]], may_evict: Callable[[Key], bool | None]) -> Run[Key] | None:
        """The coldest candidate that may leave; what `may_evict` refuses is no candidate any more."""
        while self._refusal_count_max is None or len(refused) < self._refusal_count_max:
            run = self._candidates.coldest(now_s=self._now_s)
            if run is None:
                return None
            verdict = may_evict(run.keys[-1])
            if verdict:
                return run
            self._candidates.withdraw(run)
            refused.append(run)
            if verdict is None:
                return None
        return None


def _ranking(policy: str, capacity_blocks: int) -> Ranking[Key]:
    match policy:
        case "lru":
            return Lru(capacity_blocks=capacity_blocks)
        case "arc":
            return Arc(capacity_blocks=capacity_blocks)
        case "s3fifo":
            return S3Fifo(capacity_blocks=capacity_blocks)
        case "window-lfu":
            return WindowLfu(capacity_blocks=capacity_blocks)
        case "phix":
            from kvstore.eviction.phix import Phix  # numpy only where it is needed

            return Phix(capacity_blocks=capacity_blocks, make_lru=lambda count: Evictor("lru", capacity_blocks=count))
        case _:
            raise InvalidArgumentError.of("policy", policy, ", ".join(POLICIES))


def _is_of(use: Use, request: Request, *, is_last: bool) -> bool:
    """Whether what a request tells is of this use."""
    if request.session_id is None or use.request.session_id is None:
        return is_last
    is_same_turn = request.turn is None or use.request.turn is None or request.turn == use.request.turn
    return request.session_id == use.request.session_id and is_same_turn


def _check(request: Request) -> None:
    if not -PRIORITY_MAX <= request.priority <= PRIORITY_MAX:
        raise InvalidArgumentError.of("priority", request.priority, f"{-PRIORITY_MAX} to {PRIORITY_MAX}")
    for name in ("ttl_s", "expected_return_s"):
        value_s = getattr(request, name)
        if value_s is not None and not 0 <= value_s < float("inf"):
            raise InvalidArgumentError.of(name, value_s, "0 or more seconds")
