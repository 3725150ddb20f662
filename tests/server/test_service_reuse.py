"""What the daemon says of its hit rate: the ceiling beside it, and the causes, from what really happened to blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvstore import messages as m
from kvstore.errors import InvalidArgumentError, NamespaceUnknownError
from kvstore.keys import NamespaceId
from kvstore.messages import BlockState, Hint, ReserveState, ReuseStats
from kvstore_server.core.hints import request_of
from kvstore_server.core.tenants import DEFAULT_TENANT, Tenant, scoped
from kvstore_server.rpc.caller import LOOPBACK
from tests.server.builders import ALICE, LARGE, SMALL, enveloped, packed
from tests.server.test_reuse import gap
from tests.server.test_service import Store

LARGE_COUNT_MAX = 2 * ((8 << 20) // ((256 << 10) + 8192))
"""Large blocks that fit into the two slabs."""


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.close()
    store.core.check_invariants()


async def reuse(store: Store) -> ReuseStats:
    stats = await store.service.get_store_stats(m.GetStoreStatsRequest(), LOOPBACK)
    assert stats.reuse is not None
    assert stats.recent_reuse is not None
    assert replace(stats.reuse, window_s=0.0) == replace(stats.recent_reuse, window_s=0.0)
    return stats.reuse


async def test_hits_and_new_blocks_are_the_whole_of_a_store_that_loses_nothing(store: Store) -> None:
    for _ in range(4):
        await store.lookup(1, 2, 3)
        await store.put(1, 2, 3) if not store.core.block_count else None
    found = await reuse(store)
    assert (found.hit_count, gap(found)) == (9, {"new": 3})
    assert found.hit_ratio == found.ceiling_ratio == pytest.approx(0.75)


async def test_blocks_that_made_room_are_missed_for_want_of_capacity(store: Store) -> None:
    numbers = range(1, LARGE_COUNT_MAX + 11)
    for number in numbers:
        await store.put(number, namespace=LARGE)
    await store.lookup(*numbers[:5], namespace=LARGE)
    assert gap(await reuse(store)) == {"capacity": 5}


async def test_what_was_refused_is_missed_because_of_admission(store: Store) -> None:
    store.core.is_draining = True
    request = m.ReserveBlocksRequest(
        namespace_id=SMALL.id, owner_id=ALICE, block_hashes=packed(1, 2), reservation_s=30.0
    )
    answer = await store.service.reserve_blocks(request, LOOPBACK)
    assert set(answer.reserve_states) == {ReserveState.DRAINING}
    await store.lookup(1, 2, 3)
    assert gap(await reuse(store)) == {"admission": 2, "new": 1}


async def test_what_was_never_finished_or_was_damaged_is_missed_because_of_failures(store: Store) -> None:
    [aborted, damaged] = await store.reserve(1), await store.reserve(2)
    await store.service.abort_reservations(
        m.AbortReservationsRequest(owner_id=ALICE, reservation_ids=tuple(aborted)), LOOPBACK
    )
    await store.write((damaged[0], enveloped(3)))
    await store.commit(*damaged)
    await store.reserve(4, reservation_s=1.0)
    store.now_s += 2.0
    store.service.sweep()
    await store.put(5)
    block = store.core.begin_read(scoped(DEFAULT_TENANT, SMALL.id), packed(5))  # type: ignore[arg-type]
    assert block is not None
    store.core.quarantine(scoped(DEFAULT_TENANT, SMALL.id), packed(5), block)  # type: ignore[arg-type]
    store.core.end_read(block, sent_bytes=0)
    await store.lookup(1, 2, 4, 5, 6)
    assert gap(await reuse(store)) == {"failure": 4, "new": 1}


async def test_what_another_namespace_of_the_model_has_is_missed_because_of_identity(store: Store) -> None:
    other = replace(SMALL, dtype="bfloat16")
    await store.put(1, 2, 3)
    opening = m.OpenNamespaceRequest(namespace=other, payload_bytes=other.block_layout.payload_bytes)
    await store.service.open_namespace(opening, LOOPBACK)
    await store.lookup(1, 2, 9, namespace=other)
    found = await reuse(store)
    assert gap(found) == {"identity": 2, "new": 1}
    assert found.gap_ratios()["identity"] == pytest.approx(2 / 3)


async def test_another_tenants_blocks_are_nobodys_gap(store: Store) -> None:
    other = replace(SMALL, dtype="bfloat16")
    await store.put(1, 2, 3)
    stranger = replace(LOOPBACK, tenant=Tenant("stranger"))
    opening = m.OpenNamespaceRequest(namespace=other, payload_bytes=other.block_layout.payload_bytes)
    await store.service.open_namespace(opening, stranger)
    request = m.LookupBlocksRequest(namespace_id=other.id, block_hashes=packed(1, 2, 3))
    await store.service.lookup_blocks(request, stranger)
    assert gap(await reuse(store)) == {"new": 3}


async def test_what_is_asked_for_and_never_offered_is_told_apart(store: Store) -> None:
    for _ in range(3):
        await store.lookup(1, 2)
    assert gap(await reuse(store)) == {"new": 2, "unoffered": 4}


# --- hints at the daemon's door


async def fill(store: Store) -> None:
    """Memory with large blocks, each a prompt of its own, the first one coldest."""
    for number in range(1, LARGE_COUNT_MAX + 1):
        await store.put(number, namespace=LARGE)
    assert await missing(store) == []


async def missing(store: Store) -> list[int]:
    states = await store.lookup(*range(1, LARGE_COUNT_MAX + 1), namespace=LARGE)
    return [number for number, state in enumerate(states, start=1) if state is not BlockState.HIT]


async def tell(store: Store, *numbers: int, hint: Hint) -> None:
    request = m.HintBlocksRequest(namespace_id=LARGE.id, block_hashes=packed(*numbers), hint=hint)
    await store.service.hint_blocks(request, LOOPBACK)


@pytest.mark.parametrize("hint", [Hint(is_done=True), Hint(priority=-1), Hint(session_hash=7, turn=2, is_done=True)])
async def test_what_a_hint_calls_less_worth_leaves_before_colder_blocks(store: Store, hint: Hint) -> None:
    await fill(store)
    await tell(store, LARGE_COUNT_MAX, hint=hint)
    await store.put(1000, namespace=LARGE)
    assert await missing(store) == [LARGE_COUNT_MAX]
    await store.put(1001, namespace=LARGE)
    assert await missing(store) == [1, LARGE_COUNT_MAX]


async def test_what_a_hint_gives_priority_stays_though_it_is_the_coldest(store: Store) -> None:
    await fill(store)
    await tell(store, 1, hint=Hint(priority=2))
    await store.put(1000, namespace=LARGE)
    assert await missing(store) == [2]


async def test_what_a_lookup_or_a_lease_says_counts_like_a_hint(store: Store) -> None:
    await fill(store)
    look = m.LookupBlocksRequest(namespace_id=LARGE.id, block_hashes=packed(7), hint=Hint(is_done=True))
    await store.service.lookup_blocks(look, LOOPBACK)
    acquire = m.AcquirePrefixRequest(
        namespace_id=LARGE.id, owner_id=ALICE, block_hashes=packed(9), lease_s=9.0, hint=Hint(priority=-2)
    )
    leased = await store.service.acquire_prefix(acquire, LOOPBACK)
    assert leased.lease_id is not None
    release = m.ReleaseLeasesRequest(owner_id=ALICE, lease_ids=(leased.lease_id,))
    await store.service.release_leases(release, LOOPBACK)
    for number in (1000, 1001, 1002):
        await store.put(number, namespace=LARGE)
    assert await missing(store) == [1, 7, 9]


async def test_a_hint_that_comes_with_a_store_holds_for_what_was_stored(store: Store) -> None:
    request = m.ReserveBlocksRequest(
        namespace_id=LARGE.id, owner_id=ALICE, block_hashes=packed(500), reservation_s=9.0, hint=Hint(priority=2)
    )
    [reservation] = (await store.service.reserve_blocks(request, LOOPBACK)).reservation_ids
    assert reservation is not None
    await store.write((reservation, enveloped(500, LARGE)))
    await store.commit(reservation)
    for number in range(1, LARGE_COUNT_MAX + 5):
        await store.put(number, namespace=LARGE)
    assert await store.lookup(500, namespace=LARGE) == [BlockState.HIT]


async def test_blocks_leave_when_the_time_that_a_hint_gave_them_has_passed_unused(store: Store) -> None:
    await store.put(1, 2, 3, namespace=LARGE)
    await store.put(10, 11, namespace=LARGE)
    await tell(store, 1, 2, 3, hint=Hint(ttl_s=60.0))
    store.now_s += 59.0
    store.service.sweep()
    assert await store.lookup(1, 2, 3, namespace=LARGE) == [BlockState.HIT] * 3
    store.now_s += 2.0
    store.service.sweep()
    assert await store.lookup(1, 2, 3, namespace=LARGE) == [BlockState.MISS] * 3
    assert await store.lookup(10, 11, namespace=LARGE) == [BlockState.HIT] * 2
    assert store.core.counters.expired_block_count == 3


async def test_a_hint_of_an_unknown_namespace_is_an_error(store: Store) -> None:
    request = m.HintBlocksRequest(namespace_id=NamespaceId(b"n" * 32), block_hashes=packed(1), hint=Hint())
    with pytest.raises(NamespaceUnknownError):
        await store.service.hint_blocks(request, LOOPBACK)


@pytest.mark.parametrize(
    ("hint", "field"),
    [
        (Hint(priority=3), "hint.priority"),
        (Hint(priority=-(1 << 31)), "hint.priority"),
        (Hint(ttl_s=0.0), "hint.ttl_duration"),
        (Hint(ttl_s=-1.0), "hint.ttl_duration"),
        (Hint(expected_return_s=31 * 86400.0), "hint.expected_return_duration"),
    ],
)
async def test_a_hint_that_says_what_it_must_not_is_refused_by_the_name_of_its_field(
    store: Store, hint: Hint, field: str
) -> None:
    for call, request in (
        (
            store.service.hint_blocks,
            m.HintBlocksRequest(namespace_id=SMALL.id, block_hashes=packed(1), hint=hint),
        ),
        (
            store.service.lookup_blocks,
            m.LookupBlocksRequest(namespace_id=SMALL.id, block_hashes=packed(1), hint=hint),
        ),
        (
            store.service.reserve_blocks,
            m.ReserveBlocksRequest(
                namespace_id=SMALL.id, owner_id=ALICE, block_hashes=packed(1), reservation_s=1.0, hint=hint
            ),
        ),
    ):
        with pytest.raises(InvalidArgumentError, match=f"^{field} "):
            await call(request, LOOPBACK)  # type: ignore[operator]
    assert store.core.reservation_count == 0


def test_a_session_is_another_one_for_every_tenant_and_every_start() -> None:
    hint, secret = Hint(session_hash=7, turn=2, input_tokens=5), bytes(32)
    own, other = scoped(DEFAULT_TENANT, SMALL.id), scoped(Tenant("other"), SMALL.id)
    request = request_of(hint, namespace_id=own, secret=secret)
    assert request == request_of(hint, namespace_id=own, secret=secret)
    assert (request.turn, request.input_tokens, request.output_tokens) == (2, 5, None)
    ids = {
        request.session_id,
        request_of(hint, namespace_id=other, secret=secret).session_id,
        request_of(hint, namespace_id=own, secret=b"\1" * 32).session_id,
        request_of(Hint(session_hash=8), namespace_id=own, secret=secret).session_id,
        7,
    }
    assert len(ids) == 5
    assert request_of(Hint(), namespace_id=own, secret=secret).session_id is None
