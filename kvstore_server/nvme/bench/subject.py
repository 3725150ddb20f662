"""The daemon's own parts between memory and disk, in this process, with blocks that are made for the purpose."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from kvstore.envelope import ENVELOPE_BYTES, checksum
from kvstore.errors import CorruptBlockError, UnavailableError
from kvstore.eviction import Watermarks
from kvstore.keys import HASH_BYTES, BlockHash
from kvstore.messages import CommitState, OwnerId, TransferPath
from kvstore_client.bench import blocks
from kvstore_server.core.space import SlabId, SlabSpace
from kvstore_server.core.store import StoreCore
from kvstore_server.core.tenants import DEFAULT_TENANT, scoped
from kvstore_server.nvme.figures import NvmeFigures
from kvstore_server.nvme.opening import NvmeSettings, open_tier
from kvstore_server.nvme.tier import NvmeTier
from kvstore_server.shm.arenas import Arenas

_OWNER = OwnerId(b"kvstore bench   ")
_RESERVATION_S = 3600.0
_CLOSE_S = 60.0
# Memory is to be empty between two samples: what was put goes to the disk at once, and what was brought is dropped.
_NOTHING_STAYS = Watermarks(high=1e-9, low=1e-9)

Chain = tuple[BlockHash, ...]


class TierSubject:
    """Memory and tier, with all blocks in the tier and none in memory between two calls."""

    def __init__(
        self,
        *,
        store: StoreCore,
        arenas: Arenas,
        tier: NvmeTier,
        settled: asyncio.Event,
        block_bytes: int,
        batch_count: int,
    ) -> None:
        namespace = blocks.namespace(block_bytes, revision=blocks.new_revision())
        self._namespace_id = scoped(DEFAULT_TENANT, namespace.id)
        store.open_namespace(namespace, payload_bytes=block_bytes)
        tier.open(self._namespace_id)
        self._envelopes = store.envelopes(self._namespace_id)
        self._store = store
        self._arenas = arenas
        self._tier = tier
        self._settled = settled
        self._block_bytes = block_bytes
        self._chain_count_max = 2 * batch_count
        self._random = random.Random(0)
        words = np.random.default_rng(0).integers(0, 1 << 63, (batch_count, -(-block_bytes // 8)))
        self._payloads: npt.NDArray[np.uint8] = words.view(np.uint8)[:, :block_bytes]
        self._chains: list[Chain] = []

    def figures(self) -> NvmeFigures:
        return self._tier.figures()

    async def write(self, block_count: int) -> float:
        """Seconds from the eviction of so many new blocks until all of them can be found on the disk."""
        chains = self._put(block_count)
        store, settled = self._store, self._settled
        started_s = time.perf_counter()
        while store.evict_to_low_watermark():
            pass
        self._tier.wake()
        while store.demoting_bytes:
            settled.clear()
            await settled.wait()
        elapsed_s = time.perf_counter() - started_s
        on_disk = self._tier.stored(self._namespace_id)
        lost_count = sum(block_hash not in on_disk for chain in chains for block_hash in chain)
        if lost_count:
            raise UnavailableError(f"{lost_count} of {block_count} blocks did not reach the disk: {self._complaint()}")
        return elapsed_s

    async def read(self, block_count: int) -> float:
        """Seconds until so many blocks, chains at random, are in memory and verified there."""
        return await self._bring(self._choose(block_count))

    async def read_all(self, *, block_count: int, progress: Callable[[float], None]) -> None:
        """Brings every block once, so many at a time, in a random order of their chains."""
        hashes = self._choose(None)
        for start in range(0, len(hashes), block_count):
            await self._bring(hashes[start : start + block_count])
            progress((start + block_count) / len(hashes))

    # --- inside

    def _put(self, block_count: int) -> list[Chain]:
        """As clients on this node do: they write into slots, and whether that is right nobody has checked."""
        chains = []
        left = block_count
        while left:
            length = min(self._random.randint(1, self._chain_count_max), left)
            chain = tuple(BlockHash(self._random.randbytes(HASH_BYTES)) for _ in range(length))
            self._put_chain(chain)
            chains.append(chain)
            left -= length
        self._chains += chains
        return chains

    def _put_chain(self, chain: Chain) -> None:
        store = self._store
        _, reservations = store.reserve(
            self._namespace_id,
            chain,
            parent_hash=None,
            owner_id=_OWNER,
            now_s=time.monotonic(),
            duration_s=_RESERVATION_S,
            path=TransferPath.SLAB,
        )
        for block_hash, reservation in zip(chain, reservations, strict=True):
            assert reservation is not None, "memory has room for what is put at once"
            block = self._arenas.view(reservation.place, ENVELOPE_BYTES + self._block_bytes)
            target = np.frombuffer(block, np.uint8)[ENVELOPE_BYTES:]
            target[:] = self._source(block_hash)
            target[:HASH_BYTES] = np.frombuffer(block_hash, np.uint8)
            block[:ENVELOPE_BYTES] = self._envelopes.encode(
                block_hash, payload_checksum=checksum(block[ENVELOPE_BYTES:])
            )
            assert store.begin_commit(reservation.id, owner_id=_OWNER) is reservation, "nobody else ends it"
            store.land_in_slot(reservation, size_bytes=len(block))
        committed = [(reservation, CommitState.COMMITTED) for reservation in reservations if reservation is not None]
        store.end_commits(committed, is_verified=False)

    async def _bring(self, hashes: Sequence[BlockHash]) -> float:
        started_s = time.perf_counter()
        await self._tier.bring(self._namespace_id, hashes)
        elapsed_s = time.perf_counter() - started_s
        for block_hash in hashes:
            self._check(block_hash)
        while self._store.evict_to_low_watermark():
            pass
        assert not self._store.block_count, f"{self._store.block_count} blocks stayed in memory"
        return elapsed_s

    def _check(self, block_hash: BlockHash) -> None:
        block = self._store.stored(self._namespace_id).get(block_hash)
        if block is None:
            raise UnavailableError(f"block {block_hash.hex()[:16]} did not come from the disk: {self._complaint()}")
        view = self._arenas.view(block.place, ENVELOPE_BYTES + self._block_bytes)
        payload = np.frombuffer(view, np.uint8)[ENVELOPE_BYTES:]
        is_same = np.array_equal(payload[HASH_BYTES:], self._source(block_hash)[HASH_BYTES:])
        if not is_same or payload[:HASH_BYTES].tobytes() != block_hash:
            raise CorruptBlockError(f"block {block_hash.hex()[:16]} came back with other bytes")

    def _choose(self, block_count: int | None) -> list[BlockHash]:
        """Blocks on the disk, of chains at random, each chain from its head on; None: all."""
        on_disk = self._tier.stored(self._namespace_id)
        self._chains = [chain for chain in self._chains if chain[0] in on_disk]
        chosen: list[BlockHash] = []
        for chain in self._random.sample(self._chains, len(self._chains)):
            chosen += takewhile(on_disk.__contains__, chain)
            if block_count is not None and len(chosen) >= block_count:
                return chosen[:block_count]
        assert block_count is None, f"{len(chosen)} blocks are on the disk, {block_count} are to be read"
        return chosen

    def _source(self, block_hash: BlockHash) -> npt.NDArray[np.uint8]:
        payload: npt.NDArray[np.uint8] = self._payloads[block_hash[0] % len(self._payloads)]
        return payload

    def _complaint(self) -> str:
        figures = self._tier.figures()
        return figures.reason or f"{dict(figures.dropped_counts)}, {figures.corrupt_count} corrupt"


@asynccontextmanager
async def open_subject(
    settings: NvmeSettings, *, arenas: Arenas, slab_count: int, slab_bytes: int, block_bytes: int
) -> AsyncIterator[TierSubject]:
    """A tier in a folder of its own, below a memory of so many slabs."""
    space = SlabSpace(slab_count=slab_count, slab_bytes=slab_bytes)
    for number in range(slab_count):
        space.add_slab(SlabId(number))
    store = StoreCore(
        space=space, watermarks=_NOTHING_STAYS, headers=arenas, departing_bytes_max=slab_count * slab_bytes
    )
    loop = asyncio.get_running_loop()
    strays: list[BaseException] = []
    loop.set_exception_handler(lambda _, context: strays.append(context.get("exception") or RuntimeError(str(context))))
    settled = asyncio.Event()
    tier = await open_tier(settings, store=store, slot_view=arenas.slot, clock=time.monotonic, on_settled=settled.set)
    store.lower = tier
    running = loop.create_task(tier.run())
    try:
        yield TierSubject(
            store=store,
            arenas=arenas,
            tier=tier,
            settled=settled,
            block_bytes=block_bytes,
            batch_count=settings.batch_count,
        )
    finally:
        running.cancel()
        await tier.close(timeout_s=_CLOSE_S)
    if strays:
        raise strays[0]
