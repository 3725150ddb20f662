"""The VRAM tier as a library: blocks in, blocks out, and the store below."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from types import TracebackType

from torch import Tensor

from gpu_agent.arenas import ArenaRegistrar
from gpu_agent.below import open_below
from gpu_agent.config import AgentConfig
from gpu_agent.core.layers import layer_groups
from gpu_agent.core.link import LinkController
from gpu_agent.core.pause import Pause
from gpu_agent.core.planner import plan_copies
from gpu_agent.core.scratch import plan_scratch
from gpu_agent.core.table import Place
from gpu_agent.device import CallerRows, Device, open_device
from gpu_agent.fetch import Fetcher
from gpu_agent.load import Loader
from gpu_agent.metrics import AgentSnapshot, LinkFigures
from gpu_agent.migration import Migrator
from gpu_agent.offload import Offloader
from gpu_agent.pins import Pinned
from gpu_agent.pool import Pool
from gpu_agent.precision.tier import stored_namespaces
from gpu_agent.reload import Reloader
from gpu_agent.room import RoomMaker
from gpu_agent.rows import as_caller_rows, chain_parents, check_hashes, check_parent_hash, check_targets
from gpu_agent.store import Store
from kvstore import __version__
from kvstore.errors import DeadlineExceededError, InvalidArgumentError, KvstoreError, UnavailableError
from kvstore.eviction import Use
from kvstore.keys import BlockHash
from kvstore.messages import AgentStatus, BlockState
from kvstore.namespace import Namespace
from kvstore.slots import SlotId


class GpuAgent:
    """A pool of blocks on a device, with the store behind it.

    The pool never holds more than `vram_capacity_bytes`: it is allocated once. A block that `load` calls a HIT
    has the bytes that were stored under its hash, from the pool or verified from the store; everything else
    is a miss and leaves its rows alone. The store may be gone, hang, refuse or lose blocks at any moment:
    then blocks stay in the pool, and under pressure the coldest are dropped. No call waits longer than the
    client's deadlines plus the configured waits, and nothing but wrong input, a broken device and a closed
    agent raises.

    `store`, `load` and `flush` may come from any thread and take turns; the other methods never wait for the
    store. If the background thread dies of a bug the agent serves on as a pool without a store for what leaves
    it, and says so: in `failure`, in its metrics, in the health of the sidecar, and in the log.

    `hashes` are always given in chain order: each block is the parent of the next.
    """

    def __init__(
        self,
        namespace: Namespace,
        client: Store,
        *,
        config: AgentConfig,
        device: Device | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The caller keeps the client; a given device is closed with the agent.

        By `clock`, in seconds, the policy and prefetch tell how long things take; waits end by the real one.
        """
        self._clock = clock
        self._config = config
        self._namespace = namespace
        self._started_s = time.monotonic()
        self._device = open_device(config.device) if device is None else device
        self._turn = threading.Lock()
        self._is_closed = False
        with ExitStack() as undo:
            undo.callback(self._device.close)
            self._build(client)
            undo.pop_all()

    def _build(self, client: Store) -> None:
        config, namespace = self._config, self._namespace
        block_bytes = namespace.block_layout.payload_bytes
        stored = stored_namespaces(namespace, config.precision, under_pressure=config.precision_under_pressure)
        staging_count = max(1, config.staging_capacity_bytes // stored[0].stored_bytes)
        scratch = plan_scratch(
            capacity_bytes=config.vram_capacity_bytes,
            block_bytes=block_bytes,
            encoded=[one.stored_bytes for one in stored if one != namespace],
            count_max=min(config.batch_count_max, staging_count),
        )
        self._pool = Pool(
            device=self._device,
            block_bytes=block_bytes,
            capacity_bytes=scratch.pool_bytes,
            policy=config.policy,
            clock=self._clock,
            offloaded_count_max=config.offloaded_count_max,
        )
        half_count = max(1, self._pool.slot_count // 2)
        self._belows = [open_below(self._pool, one, scratch) for one in stored]
        self._batch_count_max = min(config.batch_count_max, half_count)
        self._load_count_max = min(staging_count, half_count)
        self._arenas = ArenaRegistrar(self._device)
        offload_count_max = min(scratch.offload_count, self._batch_count_max)
        self._migrator = Migrator(
            pool=self._pool,
            store=client,
            offloaders=[
                Offloader(
                    pool=self._pool,
                    arenas=self._arenas,
                    store=client,
                    below=below,
                    staging_count=offload_count_max,
                )
                for below in self._belows
            ],
            part_count_max=offload_count_max,
            cooldown_steps=config.cooldown_steps,
            pause=Pause(min_s=config.retry_pause_initial_s, max_s=config.retry_pause_max_s),
        )
        self._room = RoomMaker(
            pool=self._pool, migrator=self._migrator, config=config, batch_count_max=self._batch_count_max
        )
        self._reloader = Reloader(
            pool=self._pool,
            room=self._room,
            loader=self._loader(client, staging_count=self._load_count_max),
            whole=layer_groups(namespace.block_layout, 1),
            cooldown_steps=config.cooldown_steps,
        )
        self._fetcher = Fetcher(
            pool=self._pool,
            room=self._room,
            loader=self._loader(client, staging_count=self._load_count_max),
            groups=layer_groups(namespace.block_layout, config.layer_group_count),
            config=config,
            batch_count_max=min(self._load_count_max, self._batch_count_max),
            count_max=self._load_count_max,
            clock=self._clock,
        )
        self._link = LinkController(
            block_bytes=stored[0].stored_bytes,
            batch_count_max=self._batch_count_max,
            may_lower_precision=len(stored) > 1,
        )
        self._stepped_s: float | None = None
        self._arenas.start()
        self._migrator.start()
        self._fetcher.start()

    def _loader(self, client: Store, *, staging_count: int) -> Loader:
        return Loader(
            pool=self._pool,
            arenas=self._arenas,
            store=client,
            belows=self._belows,
            staging_count=staging_count,
        )

    @property
    def namespace(self) -> Namespace:
        return self._namespace

    @property
    def slot_count(self) -> int:
        return self._pool.slot_count

    @property
    def failure(self) -> str | None:
        """Why a background thread is dead; None while both live."""
        with self._pool.changed:
            return self._migrator.failure or self._fetcher.failure

    @property
    def memory(self) -> Tensor:
        """The pool, [slot_count, block_bytes] of uint8 on the device; what a slot holds is `namespace.block_layout`.

        To be read in slots that are pinned, and written in slots that are reserved.
        """
        return self._pool.memory

    def store(
        self, hashes: Sequence[BlockHash], blocks: CallerRows, *, parent_hash: BlockHash | None = None
    ) -> tuple[bool, ...]:
        """Puts blocks into the pool, making room in batches; says per block whether it is there.

        `blocks` holds one block per row, on the host or the agent's device, any dtype; or it is pages of the engine's
        cache, which are gathered. When this returns the caller may overwrite it: on the host at once, on the device by
        anything queued on the current stream.
        A block without room, and so every later one of the chain, is False. Blocks already there are kept.
        """
        check_hashes(hashes, field="hashes")
        check_parent_hash(parent_hash)
        rows = self._rows(blocks, row_count=len(hashes), field="blocks")
        with self._take_turn():
            deadline_s = self._room.deadline_s(block_count=len(hashes))
            stored: list[bool] = []
            for start in range(0, len(hashes), self._batch_count_max):
                stored += self._store_part(
                    hashes[start : start + self._batch_count_max],
                    rows[start : start + self._batch_count_max],
                    parent_hash=hashes[start - 1] if start else parent_hash,
                    deadline_s=deadline_s,
                    is_refused=False in stored,
                )
            with self._pool.changed:
                self._room.relieve()
        return tuple(stored)

    def load(
        self, hashes: Sequence[BlockHash], into: CallerRows, *, parent_hash: BlockHash | None = None
    ) -> tuple[BlockState, ...]:
        """Fills one row of `into` per HIT, from the pool or through it from the store; works in parts of any size.

        `into` is on the host or on the agent's device: rows, or pages of the engine's cache. What the caller does with
        it after the return, on the host or queued on the current stream, sees the bytes. Rows of other blocks are as
        they were. `parent_hash` matters only for blocks that this agent has not seen before: it is what they follow
        in their chain.
        """
        check_hashes(hashes, field="hashes")
        check_parent_hash(parent_hash)
        rows = self._rows(into, row_count=len(hashes), field="into")
        check_targets(rows, field="into")
        states: list[BlockState] = []
        asks_store = True
        with self._take_turn():
            deadline_s = self._room.deadline_s(block_count=len(hashes))
            for start in range(0, len(hashes), self._load_count_max):
                part_states, error = self._load_part(
                    hashes[start : start + self._load_count_max],
                    rows[start : start + self._load_count_max],
                    parent_hash=hashes[start - 1] if start else parent_hash,
                    deadline_s=deadline_s,
                    asks_store=asks_store,
                )
                states += part_states
                # A store that did not answer is asked once per call, not once per part: each may cost a deadline.
                asks_store = asks_store and not isinstance(error, (UnavailableError, DeadlineExceededError))
            with self._pool.changed:
                self._room.relieve()
        return tuple(states)

    def contains(self, hashes: Sequence[BlockHash]) -> tuple[bool, ...]:
        """Which blocks are in VRAM now, so that loading them needs no store."""
        check_hashes(hashes, field="hashes")
        with self._pool.changed:
            places = [self._pool.table.place_of(block_hash) for block_hash in hashes]
        return tuple(place in (Place.RESIDENT, Place.MIGRATING) for place in places)

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """Counts a use at this step of those blocks that are in the pool."""
        check_hashes(hashes, field="hashes")
        with self._pool.changed:
            self._pool.use(hashes)

    def step(self, step_count: int = 1) -> int:
        """Engine steps have passed; starts migration above the high watermark, and prefetch. Returns the step.

        Never waits.
        """
        if type(step_count) is not int or step_count < 0:
            raise InvalidArgumentError.of("step_count", step_count, "a whole number, 0 or more")
        pool, now_s = self._pool, self._clock()
        with pool.changed:
            pool.step += step_count
            if step_count and self._stepped_s is not None:
                self._link.note_step((now_s - self._stepped_s) / step_count)
            self._stepped_s = now_s
            self._link.note(self._device.link(), now_s=now_s)
            decision = self._link.decide()
            self._room.follow(decision)
            self._migrator.follow(decision)
            if step_count:
                self._fetcher.follow(decision, step_s=self._link.step_s)
            pool.forget_overdue(before=pool.step - self._config.cooldown_steps)
            self._room.relieve()
            pool.changed.notify_all()
            return pool.step

    # --- sequences

    def bind(self, sequence: str, hashes: Sequence[BlockHash], *, parent_hash: BlockHash | None = None) -> None:
        """Says which blocks a sequence has, in chain order; what was said before of the same name is replaced.

        `parent_hash` is the block that the first one follows.
        """
        check_hashes(hashes, field="hashes")
        check_parent_hash(parent_hash)
        if not isinstance(sequence, str):
            raise InvalidArgumentError.of("sequence", sequence, "a string")
        with self._pool.changed:
            if sequence in self._pool.sequences:
                self._fetcher.ask_again(self._pool.sequences.hashes_of(sequence))
            self._pool.bind(sequence, hashes, parent_hash=parent_hash)
            self._fetcher.ask_again(hashes)

    def hint(self, sequence: str, at: int | None) -> None:
        """Says that all blocks of a sequence are needed at engine step `at`, counted as `step` does; None: no more.

        Until then they stay in the pool before all that is needed later, or at no known step; and those that are not in
        it are fetched in time, which `pin` then need not wait for. A need that passes is forgotten after a cool-down.
        """
        if at is not None and (type(at) is not int or at < 0):
            raise InvalidArgumentError.of("at", at, "an engine step, a whole number of 0 or more, or None")
        with self._pool.changed:
            self._check_bound(sequence)
            self._pool.hint(sequence, at)
            self._fetcher.ask_again(self._pool.sequences.hashes_of(sequence))
            self._pool.changed.notify_all()

    def unbind(self, sequence: str) -> None:
        """A sequence is over; its blocks stay in the pool like others. One that is not bound is no error."""
        with self._pool.changed:
            if sequence in self._pool.sequences:
                self._fetcher.ask_again(self._pool.sequences.hashes_of(sequence))
                self._pool.unbind(sequence)

    def pin(self, sequence: str, *, timeout_s: float | None = None, by_layer: bool = False) -> Pinned:
        """Brings all blocks of a sequence into the pool and keeps them in their slots until the `with` block ends.

        Waits for those that are on their way, and has the others fetched; by default as long as their bytes take at
        `offload_rate_min_bytes_per_s`, and `room_wait_s` more. Whatever is not there by then is missing. The hint of
        the sequence is used up. With `by_layer` it returns as soon as all is on its way: before it reads a layer the
        engine calls `wait_layer`, and before it uses what it computed, `wait`.
        """
        if timeout_s is not None and not 0 <= timeout_s <= threading.TIMEOUT_MAX:
            raise InvalidArgumentError.of("timeout_s", timeout_s, "0 seconds or more, or None")
        pool = self._pool
        with pool.changed:
            self._check_open()
            self._check_bound(sequence)
            parents = pool.sequences.parents_of(sequence)
            pool.use(list(parents))
            pinned = Pinned(pool, parents)
            with ExitStack() as undo:
                undo.callback(pinned.release)
                pinned.begin()
                pool.counters.hit_count += len(pinned.held)
                pool.hint(sequence, None)
                if pinned.wanted:
                    self._wait_for(pinned, timeout_s=timeout_s, by_layer=by_layer)
                undo.pop_all()
        return pinned

    def _wait_for(self, pinned: Pinned, *, timeout_s: float | None, by_layer: bool) -> None:
        """Wants the lock held."""
        counters, started_s = self._pool.counters, time.monotonic()
        late_count = sum(map(self._fetcher.is_ahead, pinned.wanted))
        counters.prefetch_late_count += late_count
        counters.fetched_on_demand_count += len(pinned.wanted) - late_count
        counters.pin_stall_count += 1
        if timeout_s is None:
            deadline_s = self._room.deadline_s(block_count=len(pinned.wanted))
        else:
            deadline_s = started_s + timeout_s
        self._fetcher.wait(pinned, deadline_s=deadline_s, by_layer=by_layer)
        counters.pin_stall_s += time.monotonic() - started_s

    def reserve(self, count: int) -> list[SlotId]:
        """Slots of `memory` for the caller to write blocks into that are not full yet; fewer when there is no room.

        They count as used, and never move, until `seal` or `discard`. Waits for room as `store` does.
        """
        with self._pool.changed:
            self._check_open()
            count = min(count, self._pool.slot_count)
            self._room.make_room(count, deadline_s=self._room.deadline_s(block_count=count))
            return self._pool.reserve(count)

    def seal(self, slot: SlotId, block_hash: BlockHash, *, parent_hash: BlockHash | None) -> bool:
        """`seal_all` of one block."""
        (is_new,) = self.seal_all([slot], [block_hash], parent_hash=parent_hash)
        return is_new

    def seal_all(
        self, slots: Sequence[SlotId], hashes: Sequence[BlockHash], *, parent_hash: BlockHash | None
    ) -> tuple[bool, ...]:
        """What is written in reserved slots are these blocks, in chain order: they may be migrated, and be found.

        What writes them is over, or queued on the caller's current stream. False: the block is in the pool already, and
        the slot free again.
        """
        check_hashes(hashes, field="hashes")
        check_parent_hash(parent_hash)
        if len(slots) != len(hashes):
            raise InvalidArgumentError.of("slots", f"{len(slots)} slots", f"{len(hashes)}, one per block")
        with self._pool.changed:
            self._check_reserved(slots)
            self._device.follow_caller()
            return tuple(self._pool.seal(slots, hashes, parent_hash=parent_hash))

    def hold(self, hashes: Sequence[BlockHash]) -> list[SlotId | None]:
        """The slots of those blocks that are in the pool now, which stay until `unhold`; counts their use."""
        check_hashes(hashes, field="hashes")
        with self._pool.changed:
            self._check_open()
            self._pool.use(hashes)
            slots = [self._pool.ask_for(block_hash) for block_hash in hashes]
            self._pool.counters.hit_count += sum(slot is not None for slot in slots)
            return slots

    def unhold(self, slots: Sequence[SlotId]) -> None:
        """Each once for every `hold`; all that the caller's current stream has queued may still read them."""
        with self._pool.changed:
            for slot, count in Counter(slots).items():
                if self._pool.table.reader_count(slot) < count:
                    raise InvalidArgumentError.of("slot", slot, "one that `hold` gave, once for each time")
            self._device.follow_caller()
            for slot in slots:
                self._pool.release(slot)
            self._pool.changed.notify_all()

    def discard(self, slots: Sequence[SlotId]) -> None:
        """Gives reserved slots back; what is in them is of no use."""
        with self._pool.changed:
            self._check_reserved(slots)
            for slot in slots:
                self._pool.table.discard(slot)
            self._pool.changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Gives the store a copy of everything in the pool, heads of chains first; True when it has all of it.

        Tries again until the time is over while the store is away, but not what it refused.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._take_turn(), self._pool.changed:
            while self._wait_accepting(deadline_s):
                batches = plan_copies(self._pool.table.residents(), batch_count_max=self._batch_count_max)
                self._migrator.submit(batches)
                self._wait_idle(deadline_s)
                table = self._pool.table
                if not table.migrating_count and all(table.has_lower_copy(r.block_hash) for r in table.residents()):
                    return True
                if self._migrator.is_accepting():
                    return False
            return False

    def status(self) -> AgentStatus:
        return self.snapshot().status

    def snapshot(self) -> AgentSnapshot:
        """Status and counters as of one moment."""
        pool = self._pool
        with pool.changed:
            counters = dataclasses.replace(pool.counters)
            status = AgentStatus(
                version=__version__,
                device=self._device.name,
                capacity_bytes=self._config.vram_capacity_bytes,
                used_bytes=pool.used_count * pool.block_bytes,
                peak_bytes=pool.peak_count * pool.block_bytes,
                resident_count=pool.table.pool_count,
                migrated_count=counters.migrated_count,
                migration_batch_count=counters.migration_batch_count,
                reloaded_count=counters.reloaded_count,
                lost_count=counters.lost_count,
                step=pool.step,
                uptime_s=time.monotonic() - self._started_s,
            )
            return AgentSnapshot(
                status=status,
                counters=counters,
                migrating_count=pool.table.migrating_count,
                is_migrator_alive=self._migrator.is_alive,
                link=LinkFigures.of(self._link),
            )

    def close(self) -> None:
        """Stops; what is in the pool is gone. `flush` first to keep it. Closing twice changes nothing."""
        with self._pool.changed:
            if self._is_closed:
                return
            self._is_closed = True
        self._fetcher.stop(timeout_s=self._config.close_wait_s)
        self._migrator.stop(timeout_s=self._config.close_wait_s)
        with self._pool.changed:
            self._pool.count_rest_as_lost()
        with self._turn:
            self._arenas.close(timeout_s=self._config.close_wait_s)
            self._device.close()

    def __enter__(self) -> GpuAgent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def check_invariants(self) -> None:
        """For tests: raises `AssertionError` when slots, blocks or readers do not add up."""
        with self._pool.changed:
            self._pool.check_invariants()

    @contextmanager
    def _take_turn(self) -> Iterator[None]:
        with self._turn:
            with self._pool.changed:
                self._check_open()
            yield

    def _check_open(self) -> None:
        if self._is_closed:
            raise UnavailableError("this agent is closed")

    def _check_bound(self, sequence: str) -> None:
        if sequence not in self._pool.sequences:
            raise InvalidArgumentError.of("sequence", sequence, "one that `bind` has named, and `unbind` not since")

    def _check_reserved(self, slots: Sequence[SlotId]) -> None:
        for slot, count in Counter(slots).items():
            if count > 1 or not self._pool.table.is_private(slot):
                raise InvalidArgumentError.of("slot", slot, "one that `reserve` gave, neither sealed nor discarded")

    def _rows(self, blocks: CallerRows, *, row_count: int, field: str) -> CallerRows:
        layout = self._namespace.block_layout
        return as_caller_rows(blocks, row_count=row_count, layout=layout, device_name=self._device.name, field=field)

    def _store_part(
        self,
        hashes: Sequence[BlockHash],
        rows: CallerRows,
        *,
        parent_hash: BlockHash | None,
        deadline_s: float,
        is_refused: bool,
    ) -> list[bool]:
        pool = self._pool
        with pool.changed:
            # Held, so that making room for the others does not throw these out.
            slot_of = {block_hash: pool.hold(block_hash) for block_hash in hashes}
            held = [slot for slot in slot_of.values() if slot is not None]
            parents = chain_parents(hashes, parent_hash=parent_hash)
            new = [block_hash for block_hash, slot in slot_of.items() if slot is None]
            use = pool.use(hashes)
            count = 0 if is_refused else self._room.make_room(len(new), deadline_s=deadline_s)
            # The fetcher may be bringing some of them in, or have done so.
            self._wait_landed(new, deadline_s=deadline_s)
            new = [block_hash for block_hash in new if pool.is_away(block_hash) or pool.is_loading(block_hash)]
            taken = list(takewhile(pool.is_away, new[: min(count, pool.table.free_count)]))
            refused = frozenset(new[len(taken) :])
            slots = pool.take_slots(taken, parents=[parents[block_hash] for block_hash in taken], count=len(taken))
            for slot in held:
                pool.release(slot)
        row_of = {block_hash: row for row, block_hash in enumerate(hashes)}
        self._land(taken, rows=rows, source_rows=[row_of[block_hash] for block_hash in taken], slots=slots, use=use)
        with pool.changed:
            pool.counters.stored_count += len(taken)
            pool.counters.refused_count += len(refused)
        return [block_hash not in refused for block_hash in hashes]

    def _land(
        self, taken: Sequence[BlockHash], *, rows: CallerRows, source_rows: list[int], slots: list[SlotId], use: Use
    ) -> None:
        pool = self._pool
        landed = False
        try:
            if taken:
                self._device.copy_rows_for_caller(
                    source=rows, source_rows=source_rows, target=pool.memory, target_rows=slots
                )
            landed = True
        finally:
            with pool.changed:
                if landed:
                    pool.land(taken, use=use, has_lower_copy=False)
                else:
                    pool.abandon(taken)

    def _load_part(
        self,
        hashes: Sequence[BlockHash],
        rows: CallerRows,
        *,
        parent_hash: BlockHash | None,
        deadline_s: float,
        asks_store: bool,
    ) -> tuple[list[BlockState], KvstoreError | None]:
        pool = self._pool
        held: dict[int, SlotId] = {}
        missing: dict[BlockHash, list[int]] = {}
        with pool.changed:
            self._wait_landed(hashes, deadline_s=deadline_s)
            for row, block_hash in enumerate(hashes):
                slot = pool.ask_for(block_hash)
                if slot is None:
                    missing.setdefault(block_hash, []).append(row)
                else:
                    held[row] = slot
            use = pool.use(hashes)
            pool.counters.hit_count += len(held)
        try:
            if held:
                self._device.copy_rows_for_caller(
                    source=pool.memory, source_rows=list(held.values()), target=rows, target_rows=list(held)
                )
        finally:
            with pool.changed:
                for slot in held.values():
                    pool.release(slot)
                pool.changed.notify_all()
        states = [BlockState.HIT if row in held else BlockState.MISS for row in range(len(hashes))]
        if not missing or not asks_store:
            return states, None
        parents = chain_parents(hashes, parent_hash=parent_hash)
        reloaded, error = self._reloader.reload(missing, parents=parents, rows=rows, use=use, deadline_s=deadline_s)
        for block_hash, state in reloaded.items():
            for row in missing[block_hash]:
                states[row] = state
        return states, error

    def _wait_landed(self, hashes: Sequence[BlockHash], *, deadline_s: float) -> None:
        """Until the fetcher brings in none of these blocks, or time is over. Wants the lock held."""
        while self._fetcher.is_alive and any(map(self._pool.is_loading, hashes)):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            self._pool.changed.wait(left_s)

    def _wait_accepting(self, deadline_s: float) -> bool:
        """Waits out a pause after a failure; False when the time is over or the migrator dead."""
        while self._migrator.is_alive:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            if self._migrator.is_accepting():
                return True
            self._pool.changed.wait(min(left_s, self._config.retry_pause_initial_s))
        return False

    def _wait_idle(self, deadline_s: float) -> None:
        """Waits for all batches; those that had no turn by the deadline are called off."""
        while not self._migrator.is_idle:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                self._migrator.cancel_queued()
                return
            self._pool.changed.wait(left_s)
