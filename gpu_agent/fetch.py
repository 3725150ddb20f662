"""Brings blocks into the pool: what engines wait for, and ahead of that what they will need."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil, inf

import structlog

from gpu_agent.config import AgentConfig
from gpu_agent.core.average import Average
from gpu_agent.core.layers import LayerGroup
from gpu_agent.core.link import LinkDecision
from gpu_agent.core.pause import Pause
from gpu_agent.load import Arrival, Found, Loader
from gpu_agent.pins import Pinned
from gpu_agent.pool import Pool
from gpu_agent.room import RoomMaker
from kvstore.eviction import Use
from kvstore.keys import BlockHash
from kvstore.messages import BlockState
from kvstore.slots import SlotId

_LEAD_MARGIN = 3.0
"""Engines know only roughly when a sequence comes, and how long blocks take is known only roughly, too."""
_LEAD_STEPS_MIN = 2

_log = structlog.get_logger("kvstore.agent")


@dataclass(frozen=True, slots=True)
class _Fetch:
    """Blocks to bring in together, each with its parent."""

    parents: Mapping[BlockHash, BlockHash | None]
    needed_at: int | None
    """The step for which they are brought ahead; None: they are waited for."""

    @property
    def is_prefetch(self) -> bool:
        return self.needed_at is not None


class Fetcher:
    """One thread, so that a block is fetched once, whoever needs it; what is waited for comes first.

    Blocks are brought ahead when it is time: as many steps before they are needed as moving them, and all that is
    needed before them, takes by what was measured, three times over. They take free slots below the high
    watermark, and slots of blocks that no sequence needs before; never of others.

    Methods marked *locked* want `pool.changed` held; none of them blocks.
    """

    def __init__(
        self,
        *,
        pool: Pool,
        room: RoomMaker,
        loader: Loader,
        groups: Sequence[LayerGroup],
        config: AgentConfig,
        batch_count_max: int,
        count_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`count_max` blocks go through at a time for those who wait; what is brought ahead gives way sooner."""
        self._pool = pool
        self._room = room
        self._loader = loader
        self._config = config
        self._groups = groups
        self._batch_count_max = batch_count_max
        self._count_max = count_max
        self._clock = clock
        self._pause = Pause(min_s=config.retry_pause_initial_s, max_s=config.retry_pause_max_s)
        self._pins: dict[Pinned, bool] = {}  # and whether it takes blocks layer by layer
        self._arriving: list[tuple[Mapping[BlockHash, SlotId], Arrival]] = []
        self._absent: set[BlockHash] = set()
        self._ahead: frozenset[BlockHash] = frozenset()
        self._budget_bytes: int | None = None
        self._ahead_bytes = 0  # since the last step
        self._block_s = Average()
        self._step_s: float | None = None
        self._is_stopping = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="kvstore-agent-fetcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why the thread is dead, if it is. Locked."""
        return self._failure

    @property
    def is_alive(self) -> bool:
        """Locked."""
        return self._failure is None and not self._is_stopping

    def is_ahead(self, block_hash: BlockHash) -> bool:
        """Whether this block is being brought in before anybody asked. Locked."""
        return block_hash in self._ahead

    def ask_again(self, hashes: Iterable[BlockHash]) -> None:
        """What the store did not have of these it may have now. Locked."""
        self._absent.difference_update(hashes)

    def follow(self, decision: LinkDecision, *, step_s: float | None) -> None:
        """What the link allows in the step that begins now, and what a step takes, if that is known. Locked."""
        self._budget_bytes = decision.prefetch_budget_bytes
        self._ahead_bytes = 0
        self._step_s = step_s

    def wait(self, pinned: Pinned, *, deadline_s: float, by_layer: bool) -> None:
        """Until all that a pin wants is here, or on its way, or will not come. Locked; lets go of it while it waits."""
        if by_layer:
            for slot_of, arrival in self._arriving:
                pinned.expect(slot_of, arrival)
        self._pins[pinned] = by_layer
        self._pool.waiters.append(pinned)
        self._pool.changed.notify_all()
        try:
            while pinned.wanted and self.is_alive:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                self._pool.changed.wait(left_s)
        finally:
            del self._pins[pinned]
            pinned.give_up(pinned.wanted)
            if not pinned.is_coming:
                self._pool.waiters.remove(pinned)

    def stop(self, *, timeout_s: float) -> bool:
        """Ends after the fetch under way; False when that took too long. The thread never keeps a process alive."""
        with self._pool.changed:
            self._is_stopping = True
            self._pool.changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- on the thread

    def _run(self) -> None:
        try:
            while (fetch := self._next()) is not None:
                self._fetch(fetch)
        except BaseException as error:
            with self._pool.changed:
                self._failure = f"{type(error).__name__}: {error}"
                self._pool.changed.notify_all()
            _log.critical("fetcher_died", error=self._failure)
            raise

    def _next(self) -> _Fetch | None:
        with self._pool.changed:
            self._ahead = frozenset()
            while not self._is_stopping:
                fetch = self._waited_for() or self._needed_soon()
                if fetch is not None:
                    self._ahead = frozenset(fetch.parents if fetch.is_prefetch else ())
                    return fetch
                self._pool.changed.wait(self._pause.left_s(now_s=time.monotonic()))
            return None

    def _fetch(self, fetch: _Fetch) -> None:
        pool, hashes = self._pool, list(fetch.parents)
        started_s = self._clock()
        taken: dict[BlockHash, SlotId] = {}
        landed: frozenset[BlockHash] = frozenset()
        with self._loader.find(hashes) as found:
            hits = [block_hash for block_hash in hashes if found.states[block_hash] is BlockState.HIT]
            with pool.changed:
                use = pool.use(hashes)
                taken = self._take_slots(hits, fetch)
            try:
                if taken:
                    arrival = found.begin(taken, groups=self._groups)
                    self._announce(taken, arrival)
                    landed = arrival.finish()
            finally:
                with pool.changed:
                    self._arriving.clear()
                    self._land([block_hash for block_hash in taken if block_hash in landed], fetch, use=use)
                    pool.abandon(block_hash for block_hash in taken if block_hash not in landed)
        with pool.changed:
            if landed:
                self._block_s.note((self._clock() - started_s) / len(landed))
            self._settle(fetch, found, landed=landed, no_room=[one for one in hits if one not in taken])

    def _announce(self, slot_of: Mapping[BlockHash, SlotId], arrival: Arrival) -> None:
        with self._pool.changed:
            self._arriving.append((slot_of, arrival))
            for pinned, by_layer in self._pins.items():
                if by_layer:
                    pinned.expect(slot_of, arrival)
            self._pool.changed.notify_all()

    # --- locked

    def _waited_for(self) -> _Fetch | None:
        pool = self._pool
        for pinned in self._pins:
            away = {one: parent for one, parent in pinned.wanted.items() if pool.is_away(one)}
            if away:
                return _Fetch(dict(islice(away.items(), self._count_max)), needed_at=None)
        return None

    def _needed_soon(self) -> _Fetch | None:
        pool = self._pool
        if not self._pause.is_over(now_s=time.monotonic()):
            return None
        missing_count = 0
        for need in pool.sequences.needs():
            away = {
                block_hash: parent_hash
                for block_hash, parent_hash in pool.sequences.parents_of(need.sequence).items()
                if block_hash not in self._absent and pool.is_away(block_hash)
            }
            missing_count += len(away)
            if need.at - pool.step > self._lead_steps(missing_count):
                return None
            if away:
                # Room for all of it, so that the next batch finds some when this one has come.
                room_count = self._room.make_room_ahead(len(away), at=need.at)
                count = min(room_count, self._batch_count_max, self._budget_count())
                self._ahead_bytes += count * self._loader.block_bytes
                return _Fetch(dict(islice(away.items(), count)), needed_at=need.at) if count else None
        return None

    def _budget_count(self) -> int:
        """Blocks that may still be brought ahead before the next step."""
        if self._budget_bytes is None:
            return self._batch_count_max
        return max(0, self._budget_bytes - self._ahead_bytes) // self._loader.block_bytes

    def _lead_steps(self, block_count: int) -> float:
        block_s, step_s = self._block_s.value, self._step_s
        if block_s is None or not step_s:
            return inf
        return ceil(_LEAD_MARGIN * block_count * block_s / step_s) + _LEAD_STEPS_MIN

    def _take_slots(self, hits: Sequence[BlockHash], fetch: _Fetch) -> dict[BlockHash, SlotId]:
        """Slots for those that nobody else has brought in meanwhile, as far as there is room."""
        pool = self._pool
        count = sum(map(pool.is_away, hits))
        if not fetch.is_prefetch and count:
            self._room.make_room(count, deadline_s=self._room.deadline_s(block_count=count))
        away = list(islice(filter(pool.is_away, hits), pool.table.free_count))
        slots = pool.take_slots(away, parents=[fetch.parents[one] for one in away], count=len(away))
        return dict(zip(away, slots, strict=True))

    def _land(self, came: Sequence[BlockHash], fetch: _Fetch, *, use: Use) -> None:
        pool = self._pool
        pool.land(
            came,
            use=use,
            has_lower_copy=True,
            cool_until_step=pool.step + self._config.cooldown_steps,
            is_prefetched=fetch.is_prefetch,
        )
        pool.counters.reloaded_count += len(came)

    def _settle(
        self, fetch: _Fetch, found: Found, *, landed: Container[BlockHash], no_room: Sequence[BlockHash]
    ) -> None:
        """Tells those who wait, and remembers what the store does not have."""
        pool = self._pool
        gone = [one for one in fetch.parents if one not in landed and one not in no_room]
        pool.counters.missed_count += len(gone)
        pool.counters.corrupt_count += sum(state is BlockState.CORRUPT for state in found.states.values())
        if found.error is not None:
            pool.counters.daemon_error_count += 1
            self._pause.fail(now_s=time.monotonic())
        else:
            self._pause.succeed()
            pool.forget_lower(gone)
            if fetch.is_prefetch:
                self._absent.update(gone)
        for pinned in self._pins:
            # Of what had no room some may be on its way for others by now.
            pinned.give_up(gone if fetch.is_prefetch else filter(pool.is_away, fetch.parents))
        pool.changed.notify_all()
