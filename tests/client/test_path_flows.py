"""What a client decides where blocks do not travel in streams: lease, fetch, release; reserve, send, commit."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore import messages as m
from kvstore.errors import DeadlineExceededError, KvstoreError, ProtocolError, UnavailableError
from kvstore.keys import pack_hashes, split_hashes
from kvstore.messages import (
    BlockState,
    CommitState,
    Epoch,
    LeaseId,
    OwnerId,
    ReservationId,
    ReserveState,
    TransferPath,
)
from kvstore.slab import Generation, SlotRecord, encode_slot_records
from kvstore_client import ClientConfig, PutState
from kvstore_client.flows import load, look, store
from kvstore_client.flows.attach import Attachment, Scope
from kvstore_client.flows.steps import Post, Route, SeenBlock
from tests.client.builders import chain, namespace, payloads
from tests.client.scripted import names, run

EPOCH = Epoch(b"1" * 16)
OWNER, SESSION = OwnerId(b"o" * 16), OwnerId(b"s" * 16)
HIT, MISS, CORRUPT = BlockState.HIT, BlockState.MISS, BlockState.CORRUPT
RESERVED, STORED, DONE = ReserveState.RESERVED, ReserveState.STORED, CommitState.COMMITTED
SPACE = namespace(model="path flows")
SLAB = Route(path=TransferPath.SLAB, owner_id=SESSION)
BULK = Route(path=TransferPath.BULK)
NIXL = Route(path=TransferPath.NIXL)
TICKET = bytes(range(16))
DOWN = UnavailableError("down")
VERIFIED = m.VerifyBlocksResponse(block_states=b"")
ABORTED = m.AbortReservationsResponse(aborted_count=0)


def scope(**settings: Any) -> Scope:
    return Scope(config=ClientConfig(**settings), attachment=Attachment(epoch=EPOCH))


def records(count: int) -> bytes:
    return encode_slot_records([SlotRecord(4096 * index, Generation(index + 1), 384) for index in range(count)])


def leased(*states: int, lease: int | None = 7, **fields: Any) -> m.LeaseBlocksResponse:
    return m.LeaseBlocksResponse(
        block_states=bytes(states), epoch=EPOCH, lease_id=None if lease is None else LeaseId(lease), **fields
    )


def get_flow(shared: Scope, count: int) -> Any:
    targets = [memoryview(bytearray(256)) for _ in range(count)]
    return load.get(shared, namespace=SPACE, hashes=chain(count), targets=targets, owner_id=OWNER)


def put_flow(shared: Scope, count: int) -> Any:
    blocks = [memoryview(block) for block in payloads(SPACE, count)]
    return store.put(shared, namespace=SPACE, hashes=chain(count), blocks=blocks, parent_hash=None, owner_id=OWNER)


def view_flow(shared: Scope, count: int) -> Any:
    return look.view(shared, namespace=SPACE, hashes=chain(count), owner_id=OWNER, lease_s=5.0)


def reserved(*states: int, **fields: Any) -> m.ReserveBlocksResponse:
    ids = tuple(ReservationId(10 + index) if state == RESERVED else None for index, state in enumerate(states))
    return m.ReserveBlocksResponse(reserve_states=bytes(states), reservation_ids=ids, epoch=EPOCH, **fields)


# --- get


@pytest.mark.parametrize("route", [SLAB, NIXL], ids=["slab", "nixl"])
def test_what_is_there_is_leased_fetched_and_released_without_waiting(route: Route) -> None:
    owner = route.owner_id or OWNER
    result, steps = run(get_flow(scope(), 3), leased(HIT, MISS, HIT, slots=records(2)), [HIT, HIT], None, route=route)
    assert names(steps) == ["LeaseBlocks", "Fetch", "ReleaseLeases"]
    lease, fetch, post = steps
    assert (lease.request.owner_id, lease.request.path, lease.is_owed) == (owner, route.path, True)
    assert lease.request.lease_s == fetch.timeout_s
    assert (fetch.hashes, fetch.slots, fetch.owner_id) == ([chain(3)[0], chain(3)[2]], records(2), owner)
    assert isinstance(post, Post)
    assert (post.request.owner_id, post.request.lease_ids) == (owner, (7,))
    assert (result.states, result.matched_count, result.error) == ((HIT, MISS, HIT), 1, None)


def test_blocks_whose_places_are_known_are_copied_without_asking_and_counted_as_read() -> None:
    result, steps = run(get_flow(scope(), 2), [BlockState.HIT] * 2, None, route=SLAB, known=records(2))
    assert names(steps) == ["Fetch", "CountReads"]
    assert steps[0].slots == records(2)
    assert steps[1].request.block_hashes == pack_hashes(chain(2))
    assert result.states == (BlockState.HIT,) * 2


@pytest.mark.parametrize("state", [BlockState.MISS, BlockState.CORRUPT])
def test_a_known_place_that_holds_something_else_by_now_costs_a_question(state: BlockState) -> None:
    result, steps = run(
        get_flow(scope(), 2),
        [BlockState.HIT, state],
        leased(BlockState.HIT, BlockState.HIT, slots=records(2)),
        [BlockState.HIT] * 2,
        None,
        route=SLAB,
        known=records(2),
    )
    assert names(steps) == ["Fetch", "LeaseBlocks", "Fetch", "ReleaseLeases"]
    assert result.states == (BlockState.HIT,) * 2
    assert result.error is None


def test_a_lease_for_the_data_port_ends_with_its_transfer() -> None:
    result, steps = run(get_flow(scope(), 2), leased(HIT, HIT, ticket=TICKET), [HIT, HIT], route=BULK)
    assert names(steps) == ["LeaseBlocks", "Fetch"]
    assert (steps[0].request.owner_id, steps[1].ticket) == (OWNER, TICKET)
    assert result.matched_count == 2


@pytest.mark.parametrize("route", [SLAB, BULK], ids=["slab", "bulk"])
def test_where_nothing_is_there_nothing_is_fetched(route: Route) -> None:
    result, steps = run(get_flow(scope(), 2), leased(MISS, MISS, lease=None), route=route)
    assert names(steps) == ["LeaseBlocks"]
    assert (result.states, result.error) == ((MISS, MISS), None)


def test_blocks_that_went_or_did_not_verify_cost_only_themselves_and_are_reported() -> None:
    result, steps = run(
        get_flow(scope(), 3), leased(HIT, HIT, HIT, slots=records(3)), [MISS, CORRUPT, HIT], None, VERIFIED, route=SLAB
    )
    assert names(steps) == ["LeaseBlocks", "Fetch", "ReleaseLeases", "VerifyBlocks"]
    assert split_hashes(steps[3].request.block_hashes) == [chain(3)[1]]
    assert result.states == (MISS, CORRUPT, HIT)
    assert "does not match its envelope" in str(result.error)


@pytest.mark.parametrize("error", [DOWN, DeadlineExceededError("late"), ProtocolError("lies")])
def test_a_failed_transfer_ends_the_load_and_keeps_what_was_there_before(error: KvstoreError) -> None:
    shared = scope(batch_count_max=1)
    result, steps = run(
        get_flow(shared, 3),
        *(leased(HIT, slots=records(1)), [HIT], None),
        *(leased(HIT, slots=records(1)), error, None),
        route=SLAB,
    )
    assert names(steps)[3:] == ["LeaseBlocks", "Fetch", "ReleaseLeases"]
    assert (result.states, result.error) == ((HIT, MISS, MISS), error)
    assert (shared.attachment.epoch is None) == (not isinstance(error, ProtocolError))


@pytest.mark.parametrize(
    ("route", "answer"),
    [
        (SLAB, leased(HIT, HIT, slots=records(1))),
        (SLAB, leased(HIT, MISS, slots=records(2))),
        (SLAB, leased(HIT, HIT, slots=records(2)[:-1])),
        (SLAB, leased(HIT, HIT, lease=None, slots=records(2))),
        (SLAB, leased(MISS, MISS)),
        (NIXL, leased(HIT, HIT)),
        (BULK, leased(HIT, HIT)),
        (BULK, leased(HIT, HIT, ticket=TICKET[:-1])),
        (BULK, leased(MISS, MISS, lease=None, ticket=TICKET)),
    ],
)
def test_a_lease_that_contradicts_itself_is_not_believed_and_given_back(
    route: Route, answer: m.LeaseBlocksResponse
) -> None:
    is_held = answer.lease_id is not None and route is not BULK
    result, steps = run(get_flow(scope(), 2), answer, *([None] if is_held else []), route=route)
    assert names(steps) == ["LeaseBlocks", *(["ReleaseLeases"] if is_held else [])]
    assert result.states == (MISS, MISS)
    assert isinstance(result.error, ProtocolError)


# --- put


@pytest.mark.parametrize("route", [SLAB, NIXL], ids=["slab", "nixl"])
def test_what_is_reserved_is_sent_and_then_committed_in_place(route: Route) -> None:
    owner = route.owner_id or OWNER
    result, steps = run(
        put_flow(scope(), 3),
        reserved(STORED, RESERVED, RESERVED, slots=records(2)),
        None,
        m.CommitBlocksResponse(commit_states=bytes([DONE, CommitState.EXPIRED])),
        route=route,
    )
    assert names(steps) == ["ReserveBlocks", "Send", "CommitBlocks"]
    reserve, sent, commit = steps
    assert (reserve.request.owner_id, reserve.request.path) == (owner, route.path)
    assert (sent.hashes, sent.slots, sent.owner_id) == (chain(3)[1:], records(2), owner)
    assert sent.blocks == payloads(SPACE, 3)[1:]
    assert (commit.request.in_slots, commit.request.owner_id, commit.request.reservation_ids) == (True, owner, (11, 12))
    assert result.states == (PutState.ALREADY_STORED, PutState.STORED, PutState.DROPPED)


def test_what_the_data_port_took_is_committed_already() -> None:
    result, steps = run(
        put_flow(scope(), 2), reserved(RESERVED, RESERVED, ticket=TICKET), [DONE, CommitState.CORRUPT], route=BULK
    )
    assert names(steps) == ["ReserveBlocks", "Send"]
    assert steps[1].ticket == TICKET
    assert result.states == (PutState.STORED, PutState.DROPPED)


@pytest.mark.parametrize("route", [SLAB, BULK], ids=["slab", "bulk"])
def test_a_put_whose_transfer_fails_gives_its_reservations_up(route: Route) -> None:
    result, steps = run(put_flow(scope(), 2), reserved(RESERVED, RESERVED), DOWN, ABORTED, route=route)
    assert names(steps) == ["ReserveBlocks", "Send", "AbortReservations"]
    assert steps[2].request.owner_id == (route.owner_id or OWNER)
    assert (result.states, result.error) == ((PutState.DROPPED,) * 2, DOWN)


# --- view


def seen(index: int) -> SeenBlock:
    slot = memoryview(payloads(SPACE, 3)[index])
    return SeenBlock(arena=slot, start=0, size_bytes=len(slot), generation=Generation(index + 1))


def test_a_view_holds_what_is_there_until_it_is_released() -> None:
    viewed, steps = run(
        view_flow(scope(), 4),
        leased(HIT, HIT, MISS, HIT, slots=records(3)),
        [seen(0), CORRUPT, seen(2)],
        VERIFIED,
        route=SLAB,
    )
    assert names(steps) == ["LeaseBlocks", "View", "VerifyBlocks"]
    assert (steps[0].request.lease_s, steps[1].hashes) == (5.0, [chain(4)[0], chain(4)[1], chain(4)[3]])
    assert (viewed.states, viewed.matched_count) == ((HIT, CORRUPT, MISS, HIT), 1)
    assert viewed.blocks == (seen(0), None, None, seen(2))
    assert run(look.renew(scope(), viewed, lease_s=9.0), m.RenewLeasesResponse(renewed=(True,)))[0] is True
    assert run(look.renew(scope(), viewed, lease_s=9.0), m.RenewLeasesResponse(renewed=(False,)))[0] is False
    assert run(look.renew(scope(), viewed, lease_s=9.0), DOWN)[0] is False
    assert names(run(look.release(viewed), None)[1]) == ["ReleaseLeases"]


def test_a_view_that_breaks_off_keeps_what_it_has_and_can_release_all_of_it() -> None:
    viewed, _ = run(
        view_flow(scope(batch_count_max=1), 3),
        *(leased(HIT, slots=records(1)), [seen(0)]),
        *(leased(HIT, lease=8, slots=records(1)), DOWN),
        route=SLAB,
    )
    assert (viewed.states, viewed.blocks, viewed.error) == ((HIT, MISS, MISS), (seen(0), None, None), DOWN)
    _, steps = run(look.release(viewed), None, None)
    assert [step.request.lease_ids for step in steps] == [(7,), (8,)]


def test_without_shared_memory_a_view_is_a_private_copy() -> None:
    def fill(step: Any) -> list[BlockState]:
        step.targets[0][:] = payloads(SPACE, 1)[0]
        return [HIT]

    viewed, steps = run(view_flow(scope(), 2), leased(HIT, MISS, ticket=TICKET), fill, route=BULK)
    assert names(steps) == ["LeaseBlocks", "Fetch"]
    assert (viewed.states, viewed.leases) == ((HIT, MISS), ())
    assert viewed.blocks == [payloads(SPACE, 1)[0], None]
    assert viewed.blocks[0].readonly
    assert run(look.release(viewed))[1] == []
