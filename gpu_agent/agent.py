"""The VRAM tier as a library: blocks in, blocks out, and the store below."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType

from gpu_agent.arenas import ArenaRegistrar
from gpu_agent.config import AgentConfig
from gpu_agent.core.pause import Pause
from gpu_agent.core.planner import plan_copies
from gpu_agent.core.table import Place
from gpu_agent.device import CallerRows, Device, open_device
from gpu_agent.load import Loader
from gpu_agent.metrics import AgentSnapshot
from gpu_agent.migration import Migrator
from gpu_agent.offload import Offloader
from gpu_agent.pool import Pool
from gpu_agent.reload import Reloader
from gpu_agent.room import RoomMaker
from gpu_agent.rows import as_caller_rows, chain_parents, check_hashes, check_parent_hash, check_targets
from gpu_agent.store import Store
from kvstore import __version__
from kvstore.errors import DeadlineExceededError, KvstoreError, UnavailableError
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
        self, namespace: Namespace, client: Store, *, config: AgentConfig, device: Device | None = None
    ) -> None:
        """The caller keeps the client; a given device, for tests, is closed with the agent."""
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
        self._pool = Pool(
            device=self._device,
            block_bytes=block_bytes,
            capacity_bytes=config.vram_capacity_bytes,
            window_steps=config.window_steps,
            offloaded_count_max=config.offloaded_count_max,
        )
        half_count = max(1, self._pool.slot_count // 2)
        staging_count = max(1, config.staging_capacity_bytes // block_bytes)
        self._batch_count_max = min(config.batch_count_max, half_count)
        self._load_count_max = min(staging_count, half_count)
        self._arenas = ArenaRegistrar(self._device)
        offload_count_max = min(staging_count, self._batch_count_max)
        self._migrator = Migrator(
            pool=self._pool,
            store=client,
            namespace=namespace,
            offloader=Offloader(
                pool=self._pool,
                arenas=self._arenas,
                store=client,
                namespace=namespace,
                staging_count=offload_count_max,
            ),
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
            loader=Loader(
                pool=self._pool,
                arenas=self._arenas,
                store=client,
                namespace=namespace,
                staging_count=self._load_count_max,
            ),
            cooldown_steps=config.cooldown_steps,
        )
        self._arenas.start()
        self._migrator.start()

    @property
    def namespace(self) -> Namespace:
        return self._namespace

    @property
    def slot_count(self) -> int:
        return self._pool.slot_count

    @property
    def failure(self) -> str | None:
        """Why the background thread is dead; None while it lives."""
        with self._pool.changed:
            return self._migrator.failure

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
            self._pool.touch(hashes)

    def step(self, step_count: int = 1) -> int:
        """Engine steps have passed; starts migration above the high watermark. Returns the step. Never waits."""
        with self._pool.changed:
            self._pool.step += step_count
            self._room.relieve()
            return self._pool.step

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
            )

    def close(self) -> None:
        """Stops; what is in the pool is gone. `flush` first to keep it. Closing twice changes nothing."""
        with self._pool.changed:
            if self._is_closed:
                return
            self._is_closed = True
        self._migrator.stop(timeout_s=self._config.close_wait_s)
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
                if self._is_closed:
                    raise UnavailableError("this agent is closed")
            yield

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
            slot_of = {block_hash: pool.table.hold(block_hash) for block_hash in hashes}
            held = [slot for slot in slot_of.values() if slot is not None]
            parents = chain_parents(hashes, parent_hash=parent_hash)
            new = [block_hash for block_hash, slot in slot_of.items() if slot is None]
            count = 0 if is_refused else self._room.make_room(len(new), deadline_s=deadline_s)
            slots = pool.take_slots(new, parents=[parents[block_hash] for block_hash in new], count=count)
            for slot in held:
                pool.table.release(slot)
        taken, refused = new[:count], frozenset(new[count:])
        row_of = {block_hash: row for row, block_hash in enumerate(hashes)}
        self._land(taken, rows=rows, source_rows=[row_of[block_hash] for block_hash in taken], slots=slots)
        with pool.changed:
            pool.touch(hashes)
            pool.counters.stored_count += len(taken)
            pool.counters.refused_count += len(refused)
        return [block_hash not in refused for block_hash in hashes]

    def _land(
        self, taken: Sequence[BlockHash], *, rows: CallerRows, source_rows: list[int], slots: list[SlotId]
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
                    for block_hash in taken:
                        pool.table.finish_load(block_hash, has_lower_copy=False)
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
            for row, block_hash in enumerate(hashes):
                slot = pool.table.hold(block_hash)
                if slot is None:
                    missing.setdefault(block_hash, []).append(row)
                else:
                    held[row] = slot
            pool.touch(hashes)
            pool.counters.hit_count += len(held)
        try:
            if held:
                self._device.copy_rows_for_caller(
                    source=pool.memory, source_rows=list(held.values()), target=rows, target_rows=list(held)
                )
        finally:
            with pool.changed:
                for slot in held.values():
                    pool.table.release(slot)
                pool.changed.notify_all()
        states = [BlockState.HIT if row in held else BlockState.MISS for row in range(len(hashes))]
        if not missing or not asks_store:
            return states, None
        parents = chain_parents(hashes, parent_hash=parent_hash)
        reloaded, error = self._reloader.reload(missing, parents=parents, rows=rows, deadline_s=deadline_s)
        for block_hash, state in reloaded.items():
            for row in missing[block_hash]:
                states[row] = state
        return states, error

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
