"""Small namespaces, blocks and stores for the daemon's tests."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterable, Sequence

from kvstore import messages as m
from kvstore.envelope import ENVELOPE_BYTES, Codec, Envelope, checksum
from kvstore.eviction import Watermarks
from kvstore.frames import WriteFrame, cut
from kvstore.keys import BlockHash, pack_hashes
from kvstore.messages import OwnerId, ReservationId
from kvstore.namespace import Namespace
from kvstore.slab import Generation, SlotState
from kvstore_server.core.in_flight import InFlight
from kvstore_server.core.space import Place, SlabId, SlabSpace
from kvstore_server.core.store import SlotHeaders, StoreCore
from kvstore_server.core.tenants import DEFAULT_TENANT, Tenant, scoped
from kvstore_server.shm.arenas import Arenas
from kvstore_server.shm.memory import MemorySource, PageKind

ALICE = OwnerId(b"a" * 16)
BOB = OwnerId(b"b" * 16)

SMALL = Namespace(
    model="small",
    weights_revision="1",
    tokenizer="t",
    rope="none",
    dtype="float16",
    num_layers=1,
    num_kv_heads=1,
    head_dim=16,
    v_head_dim=16,
    tokens_per_block=16,
    layout="HND",
    shard=None,
    lora="none",
    tenant_salt=b"",
    k_precision="exact",
    v_precision="exact",
)
"""Blocks of 1 KiB: one page a slot."""

MIDDLE = dataclasses.replace(SMALL, model="middle", head_dim=64, v_head_dim=64, num_layers=2)
"""Blocks of 8 KiB: three pages a slot."""

LARGE = dataclasses.replace(SMALL, model="large", head_dim=128, v_head_dim=128, num_layers=8, num_kv_heads=4)
"""Blocks of 256 KiB: copied in a thread."""

HUGE = dataclasses.replace(SMALL, model="huge", head_dim=512, v_head_dim=512, num_layers=24, num_kv_heads=4)
"""Blocks of 3 MiB: two frames each."""


class FakeHeaders:
    """The headers of slots as a table; absent: empty."""

    def __init__(self) -> None:
        self.slots: dict[Place, tuple[Generation, SlotState]] = {}

    def begin_slot(self, place: Place, generation: Generation) -> None:
        assert place not in self.slots, f"{place} is reused without having been cleared"
        self.slots[place] = generation, SlotState.GONE

    def publish_slot(self, place: Place, generation: Generation, *, is_verified: bool) -> None:
        assert self.slots[place] == (generation, SlotState.GONE), f"{place} becomes readable as another's"
        self.slots[place] = generation, SlotState.VERIFIED if is_verified else SlotState.READABLE

    def clear_slot(self, place: Place) -> None:
        del self.slots[place]


def block_hash(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def hashes(*numbers: int) -> list[BlockHash]:
    return [block_hash(number) for number in numbers]


def packed(*numbers: int) -> bytes:
    return pack_hashes(hashes(*numbers))


def payload_of(number: int, namespace: Namespace = SMALL) -> bytes:
    """Bytes that no other block has."""
    size_bytes = namespace.block_layout.payload_bytes
    seed = number.to_bytes(8, "little") + namespace.id[:8]
    return (seed * (size_bytes // len(seed) + 1))[:size_bytes]


def envelope_of(number: int, namespace: Namespace = SMALL, *, payload: bytes | None = None) -> Envelope:
    payload = payload_of(number, namespace) if payload is None else payload
    plane_bytes = [plane.size_bytes for plane in namespace.block_layout.planes]
    return Envelope(
        namespace_id=namespace.id,
        block_hash=block_hash(number),
        k_codec=Codec.EXACT,
        v_codec=Codec.EXACT,
        tokens=namespace.tokens_per_block,
        k_bytes=plane_bytes[0],
        v_bytes=plane_bytes[1],
        decoded_bytes=namespace.block_layout.payload_bytes,
        payload_checksum=checksum(payload),
    )


def enveloped(number: int, namespace: Namespace = SMALL) -> bytes:
    """A whole, sound block as it travels."""
    return envelope_of(number, namespace).encode() + payload_of(number, namespace)


def enveloped_bytes(namespace: Namespace) -> int:
    return ENVELOPE_BYTES + namespace.block_layout.payload_bytes


def write_frames(
    blocks: Iterable[tuple[ReservationId | None, bytes]], *, owner_id: OwnerId = ALICE
) -> list[WriteFrame]:
    """The frames of a WriteBlocks stream; the owner only in the first."""
    frames = [
        WriteFrame(reservation_id=reservation, offset_bytes=offset, data=memoryview(data)[offset : offset + length])
        for reservation, data in blocks
        if reservation is not None
        for offset, length in cut(len(data))
    ]
    if frames:
        frames[0] = dataclasses.replace(frames[0], owner_id=owner_id)
    return frames


async def stream(frames: Sequence[WriteFrame]) -> AsyncIterator[WriteFrame]:
    for frame in frames:
        yield frame


def make_core(
    *,
    slab_count: int = 4,
    slab_bytes: int = 4 * 4096,
    high: float = 1.0,
    low: float = 1.0,
    namespaces: Sequence[Namespace] = (SMALL,),
    tenant_count: int = 1,
    headers: SlotHeaders | None = None,
) -> StoreCore:
    """A core whose slabs are all in service; 4 slabs of 4 small slots unless told otherwise."""
    core = StoreCore(
        space=SlabSpace(slab_count=slab_count, slab_bytes=slab_bytes, tenant_count=tenant_count),
        watermarks=Watermarks(high=high, low=low),
        headers=headers or FakeHeaders(),
    )
    for slab in range(slab_count):
        core.space.add_slab(SlabId(slab))
    for namespace in namespaces:
        core.open_namespace(namespace, payload_bytes=namespace.block_layout.payload_bytes)
    return core


def make_arenas(*, slab_count: int, slab_bytes: int) -> Arenas:
    """One arena of memory that every machine has."""
    return Arenas(
        sources=[MemorySource(kind=PageKind.PLAIN)],
        arena_count=1,
        arena_bytes=slab_count * slab_bytes,
        slab_bytes=slab_bytes,
    )


def make_in_flight() -> InFlight:
    return InFlight(bytes_max=64 << 20, bytes_per_client_max=32 << 20)


def reserve(
    core: StoreCore,
    *numbers: int,
    namespace: Namespace = SMALL,
    parent: int | None = None,
    now_s: float = 0.0,
    path: m.TransferPath = m.TransferPath.STREAM,
    tenant: Tenant = DEFAULT_TENANT,
    owner_id: OwnerId = ALICE,
) -> tuple[list[m.ReserveState], list[ReservationId | None]]:
    states, reservations = core.reserve(
        scoped(tenant, namespace.id),
        hashes(*numbers),
        parent_hash=None if parent is None else block_hash(parent),
        owner_id=owner_id,
        now_s=now_s,
        duration_s=30.0,
        path=path,
    )
    return [m.ReserveState(state) for state in states], [hold and hold.id for hold in reservations]


def commit(core: StoreCore, reservation_id: ReservationId | None, *, size_bytes: int = 1152) -> None:
    """Lands and commits one reservation in one go."""
    assert reservation_id is not None
    landing = core.begin_landing(reservation_id, owner_id=ALICE, offset_bytes=0, size_bytes=size_bytes)
    assert landing is not None
    core.end_landing(landing, size_bytes=size_bytes)
    hold = core.begin_commit(reservation_id, owner_id=ALICE)
    assert hold is not None
    core.end_commits([(hold, m.CommitState.COMMITTED)])
    core.evict_to_low_watermark()


def put(
    core: StoreCore,
    *numbers: int,
    namespace: Namespace = SMALL,
    parent: int | None = None,
    tenant: Tenant = DEFAULT_TENANT,
) -> None:
    """Stores a chain of blocks, all of which must find room."""
    states, reservations = reserve(core, *numbers, namespace=namespace, parent=parent, tenant=tenant)
    assert set(states) == {m.ReserveState.RESERVED}, states
    for reservation in reservations:
        commit(core, reservation, size_bytes=enveloped_bytes(namespace))


def states_of(
    core: StoreCore, *numbers: int, namespace: Namespace = SMALL, tenant: Tenant = DEFAULT_TENANT
) -> list[m.BlockState]:
    return [m.BlockState(state) for state in core.lookup(scoped(tenant, namespace.id), hashes(*numbers)).states]
