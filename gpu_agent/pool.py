"""The state that the engine's threads, the migrator and the fetcher share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol

from torch import Tensor

from gpu_agent.core.sequences import Change, Sequences
from gpu_agent.core.table import BlockTable, Place, Resident
from gpu_agent.counters import Counters
from gpu_agent.device import Device
from kvstore.errors import CapacityError, InvalidArgumentError
from kvstore.eviction import NO_HINT, Evictor, Use
from kvstore.keys import BlockHash
from kvstore.slots import SlotId

SLOT_COUNT_MAX = 1 << 21
"""128 GiB of blocks of 64 KiB. A slot takes some 60 bytes of host memory before it holds anything."""


class Waiter(Protocol):
    """Somebody who waits for blocks to come."""

    def landed(self, block_hash: BlockHash) -> None:
        """A block has come, whether or not this one waits for it. Called with the lock held."""

    def lost(self, block_hash: BlockHash) -> None:
        """A block did not come that was on its way. Called with the lock held."""


class Pool:
    """The pool's memory on its device, what lies where, what is worth keeping, and the one lock around that.

    Every method except `__init__` wants the lock held. The lock is a condition that is notified whenever
    a slot, a block or a migration changes state; nothing ever holds it while bytes move or a daemon answers.

    Of two blocks the one that some sequence needs at a known step stays; of others the shared eviction policy says
    which leaves, tails of chains before heads.
    """

    def __init__(
        self,
        *,
        device: Device,
        block_bytes: int,
        capacity_bytes: int,
        policy: str,
        offloaded_count_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        slot_count = capacity_bytes // block_bytes
        if slot_count < 1:
            raise InvalidArgumentError.of("vram_capacity_bytes", capacity_bytes, f"at least one block, {block_bytes}")
        if slot_count > SLOT_COUNT_MAX:
            raise CapacityError(
                f"{capacity_bytes} bytes are {slot_count} blocks of {block_bytes}, and a pool has at most "
                f"{SLOT_COUNT_MAX}: give it less, or more tokens per block"
            )
        self.changed = threading.Condition()
        self.device = device
        self.block_bytes = block_bytes
        self.memory: Tensor = device.allocate_pool(slot_count=slot_count, block_bytes=block_bytes)
        self.table = BlockTable(slot_count=slot_count, offloaded_count_max=offloaded_count_max)
        self.sequences = Sequences()
        self.counters = Counters()
        self.step = 0
        self.peak_count = 0
        self._clock = clock
        # Of blocks that are resident, or are being copied while they stay so.
        self._evictor: Evictor[BlockHash] = Evictor(policy, capacity_blocks=slot_count)
        self._use_of_leaving: dict[BlockHash, Use] = {}
        self._given_up: set[BlockHash] = set()  # of those that leave: needed later, and sooner is room
        self._refused_until: dict[BlockHash, int] = {}  # steps, of blocks that the daemon did not take
        self._prefetched: set[BlockHash] = set()  # in the pool, and not asked for since
        self.waiters: list[Waiter] = []

    @property
    def slot_count(self) -> int:
        return self.table.slot_count

    @property
    def used_count(self) -> int:
        """Slots that hold a block, or are being read or written."""
        return self.table.slot_count - self.table.free_count

    # --- use

    def use(self, chain: Sequence[BlockHash]) -> Use:
        """A request uses these blocks: counts that of those that are here; what comes for it is to be of this use."""
        matched_count = self._evictor.matched_count(list(chain))
        use = self._evictor.begin(NO_HINT, now_s=self._clock(), chain_blocks=len(chain), matched_blocks=matched_count)
        self._evictor.touch_chain(list(chain), use=use)
        return use

    def ask_for(self, block_hash: BlockHash) -> SlotId | None:
        """The slot of a block that the engine needs now, held; None: it is not here yet, or not at all."""
        slot = self.hold(block_hash)
        if slot is not None and block_hash in self._prefetched:
            self._prefetched.remove(block_hash)
            self.counters.prefetch_hit_count += 1
        return slot

    def claim(self, block_hash: BlockHash) -> SlotId:
        """`hold` of a block that has just come for somebody who waited for it."""
        self._prefetched.discard(block_hash)
        slot = self.hold(block_hash)
        assert slot is not None, f"{block_hash.hex()[:16]} has landed nowhere"
        return slot

    def hold(self, block_hash: BlockHash) -> SlotId | None:
        """The slot of a readable block, which stays until `release`; None: no bytes here."""
        is_first = self.table.slot_of(block_hash) is not None and not self.table.is_held(block_hash)
        slot = self.table.hold(block_hash)
        if slot is not None and is_first and block_hash in self._evictor:
            self._evictor.hold([block_hash])
        return slot

    def release(self, slot: SlotId) -> None:
        block_hash = self.table.block_in(slot)
        is_last = self.table.release(slot)
        if is_last and block_hash is not None and block_hash in self._evictor:
            self._evictor.unhold([block_hash])

    # --- what sequences need

    def is_away(self, block_hash: BlockHash) -> bool:
        """It has no slot."""
        return self.table.slot_of(block_hash) is None

    def is_loading(self, block_hash: BlockHash) -> bool:
        return self.table.place_of(block_hash) is Place.LOADING

    def bind(self, sequence: str, hashes: Sequence[BlockHash], *, parent_hash: BlockHash | None = None) -> None:
        self._keep(self.sequences.bind(sequence, hashes, parent_hash=parent_hash))

    def hint(self, sequence: str, at: int | None) -> None:
        self._keep(self.sequences.hint(sequence, at))

    def unbind(self, sequence: str) -> None:
        self._keep(self.sequences.unbind(sequence))

    def forget_overdue(self, *, before: int) -> None:
        """Sequences that were to come before this step and did not are expected no more."""
        for sequence in self.sequences.overdue(before=before):
            self.hint(sequence, None)

    def _keep(self, change: Change) -> None:
        self._evictor.hold([block_hash for block_hash in change.added if block_hash in self._evictor])
        self._evictor.unhold([block_hash for block_hash in change.removed if block_hash in self._evictor])

    # --- blocks come

    def take_slots(
        self, hashes: Sequence[BlockHash], *, parents: Sequence[BlockHash | None], count: int
    ) -> list[SlotId]:
        """Slots for the first `count` of these blocks, which are LOADING from now on."""
        slots: list[SlotId] = []
        for block_hash, parent_hash in islice(zip(hashes, parents, strict=True), count):
            slot = self.table.begin_load(block_hash, parent_hash=parent_hash)
            assert slot is not None, f"{count} slots were free, got {len(slots)}"
            slots.append(slot)
        self.peak_count = max(self.peak_count, self.used_count)
        self.changed.notify_all()
        return slots

    def land(
        self,
        hashes: Sequence[BlockHash],
        *,
        use: Use,
        has_lower_copy: bool,
        cool_until_step: int = 0,
        is_prefetched: bool = False,
    ) -> None:
        """The bytes of blocks that were LOADING are here."""
        for block_hash in hashes:
            self.table.finish_load(block_hash, has_lower_copy=has_lower_copy, cool_until_step=cool_until_step)
            self._add(block_hash, use)
        if is_prefetched:
            self._prefetched.update(hashes)
        self._tell(hashes)

    def abandon(self, hashes: Iterable[BlockHash]) -> None:
        """Gives back the slots of blocks whose bytes did not land."""
        for block_hash in hashes:
            self.table.abandon_load(block_hash)
            for waiter in self.waiters:
                waiter.lost(block_hash)
        self.changed.notify_all()

    def forget_lower(self, hashes: Iterable[BlockHash]) -> None:
        """The store answered and does not have them."""
        for block_hash in hashes:
            if self.table.place_of(block_hash) is Place.OFFLOADED:
                self.table.forget_offloaded(block_hash)

    def reserve(self, count: int) -> list[SlotId]:
        """Private slots, as many of these as are free."""
        slots = [slot for slot in (self.table.reserve() for _ in range(count)) if slot is not None]
        self.peak_count = max(self.peak_count, self.used_count)
        return slots

    def seal(
        self, slots: Sequence[SlotId], hashes: Sequence[BlockHash], *, parent_hash: BlockHash | None
    ) -> list[bool]:
        """Private slots hold these blocks of one chain from now on; False: it has another slot, this one is free."""
        use = self.use(hashes)
        sealed = []
        for slot, block_hash in zip(slots, hashes, strict=True):
            is_new = self.table.seal(slot, block_hash, parent_hash=parent_hash)
            if is_new:
                self._add(block_hash, use)
            sealed.append(is_new)
            parent_hash = block_hash
        self.counters.stored_count += sum(sealed)
        self._tell([block_hash for block_hash, is_new in zip(hashes, sealed, strict=True) if is_new])
        return sealed

    # --- blocks leave

    def victims(self, *, goal_count: int, required_count: int = 0) -> list[Resident]:
        """Up to `goal_count` blocks to give up, in the order in which to do it; they are to migrate, or to be dropped.

        Blocks that are held, or that a sequence needs, or in their cool-down stay, unless fewer than `required_count`
        are found without. Then go those in their cool-down, those that are needed last, and, of what is not held,
        whatever there is.
        """
        victims = self._coldest(max(goal_count, required_count), is_cool_down_kept=True)
        if len(victims) < required_count:
            victims += self._coldest(required_count - len(victims), is_cool_down_kept=False)
        if len(victims) < required_count:
            victims += self._give_up(self.sequences.spare(after=-1), required_count - len(victims))
        if len(victims) < required_count:
            # Parents of what has to stay.
            rest = (resident.block_hash for resident in self.table.residents())
            victims += self._give_up(rest, required_count - len(victims))
        return victims

    def victims_for(self, count: int, *, at: int) -> list[Resident]:
        """Up to so many blocks to give up for others that are needed at a step: none that is needed before."""
        victims = self._coldest(count, is_cool_down_kept=True)
        if len(victims) < count:
            spare = self.sequences.spare(after=at)
            # What the daemon has just refused would only be refused again.
            victims += self._give_up((one for one in spare if not self._was_refused(one)), count - len(victims))
        return victims

    def migrated(self, block_hash: BlockHash) -> None:
        """The daemon has a block that was to leave: its place here is free, unless it is read or needed by now."""
        is_needed = self.sequences.is_due(block_hash) and block_hash not in self._given_up
        if is_needed or self.table.is_held(block_hash):
            self.stay(block_hash, has_lower_copy=True)
            return
        self.table.finish_migration(block_hash)
        self._has_left(block_hash)
        self.counters.migrated_count += 1

    def stay(self, block_hash: BlockHash, *, has_lower_copy: bool, cool_until_step: int = 0) -> None:
        """The migration of a block was called off, or refused, or only a copy was wanted."""
        self.table.stay_resident(block_hash, has_lower_copy=has_lower_copy, cool_until_step=cool_until_step)
        if cool_until_step > self.step:
            self._refused_until[block_hash] = cool_until_step
        if block_hash not in self._evictor:
            self._given_up.discard(block_hash)
            self._add(block_hash, self._use_of_leaving.pop(block_hash))

    def drop_coldest(self, count: int) -> None:
        """Frees up to `count` slots at once, whatever becomes of the blocks."""
        for victim in self.victims(goal_count=count, required_count=count):
            self._has_left(victim.block_hash)
            if self.table.drop(victim.block_hash):
                self.counters.lost_count += 1
        self.changed.notify_all()

    def count_rest_as_lost(self) -> None:
        """The pool ends: what is only here is gone."""
        table = self.table
        self.counters.lost_count += sum(not table.has_lower_copy(one.block_hash) for one in table.residents())

    def check_invariants(self) -> None:
        table, evictor = self.table, self._evictor
        table.check_invariants()
        evictor.check_invariants()
        residents = {resident.block_hash for resident in table.residents()}
        migrating = set(table.migrating())
        assert all(block_hash in evictor for block_hash in residents), "a resident block can never leave"
        leaving = {block_hash for block_hash in migrating if block_hash not in evictor}
        assert len(evictor) == len(residents) + len(migrating) - len(leaving), f"{len(evictor)} blocks in the policy"
        assert self._given_up <= leaving, "a block that was given up does not leave"
        assert leaving == self._use_of_leaving.keys(), f"{len(self._use_of_leaving)} uses of {len(leaving)} that leave"
        for block_hash in residents:
            is_kept = table.is_held(block_hash) or self.sequences.is_due(block_hash)
            assert evictor.is_held(block_hash) == is_kept, f"{block_hash.hex()[:16]}: kept is {is_kept}"
        assert self._refused_until.keys() <= residents | migrating, "a block that was refused is not here"
        assert self._prefetched <= residents | migrating, "a prefetched block is not here"

    # --- inside

    def _tell(self, hashes: Sequence[BlockHash]) -> None:
        """These are here now."""
        for waiter in list(self.waiters):
            for block_hash in hashes:
                waiter.landed(block_hash)
        self.changed.notify_all()

    def _add(self, block_hash: BlockHash, use: Use) -> None:
        self._evictor.insert(block_hash, parent=self.table.parent_of(block_hash), use=use)
        for is_kept in (self.table.is_held(block_hash), self.sequences.is_due(block_hash)):
            if is_kept:
                self._evictor.hold([block_hash])

    def _coldest(self, count: int, *, is_cool_down_kept: bool) -> list[Resident]:
        """What no sequence needs, by the policy."""
        if count <= 0:
            return []
        evictor, table, step = self._evictor, self.table, self.step
        uses: dict[BlockHash, Use] = {}

        def may_evict(block_hash: BlockHash) -> bool:
            if table.place_of(block_hash) is not Place.RESIDENT:
                return False
            if is_cool_down_kept and table.cools(block_hash, step=step):
                return False
            uses[block_hash] = evictor.last_use(block_hash)
            return True

        coldest = evictor.pop_coldest(
            goal_bytes=count, size_bytes_of=lambda _: 1, now_s=self._clock(), may_evict=may_evict
        )
        return [self._leave(block_hash, uses[block_hash]) for block_hash in coldest]

    def _was_refused(self, block_hash: BlockHash) -> bool:
        """By the daemon, a cool-down ago or less."""
        until_step = self._refused_until.get(block_hash)
        if until_step is not None and until_step <= self.step:
            del self._refused_until[block_hash]
            return False
        return until_step is not None

    def _give_up(self, block_hashes: Iterable[BlockHash], count: int) -> list[Resident]:
        """The first so many of these that are resident, and that nobody reads, whatever the policy says of them."""
        table = self.table
        victims: list[Resident] = []
        if count <= 0:
            return victims
        fit = (
            block_hash
            for block_hash in block_hashes
            if table.place_of(block_hash) is Place.RESIDENT
            and not table.is_held(block_hash)
            and block_hash in self._evictor
        )
        for block_hash in list(islice(fit, count)):
            use = self._evictor.last_use(block_hash)
            self._evictor.remove(block_hash)
            self._given_up.add(block_hash)
            victims.append(self._leave(block_hash, use))
        return victims

    def _leave(self, block_hash: BlockHash, use: Use) -> Resident:
        """The policy has given a block up; it may still be called back."""
        self._use_of_leaving[block_hash] = use
        if self.table.cools(block_hash, step=self.step):
            self.counters.remigrated_count += 1
        return Resident(block_hash, self.table.parent_of(block_hash))

    def _has_left(self, block_hash: BlockHash) -> None:
        del self._use_of_leaving[block_hash]
        self._refused_until.pop(block_hash, None)
        self._given_up.discard(block_hash)
        if block_hash in self._prefetched:
            self._prefetched.remove(block_hash)
            self.counters.prefetch_wasted_count += 1
