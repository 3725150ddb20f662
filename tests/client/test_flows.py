"""The decisions of a client, step by step, without a daemon."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from kvstore import PROTOCOL_VERSION
from kvstore import messages as m
from kvstore.envelope import ENVELOPE_BYTES, verify_block
from kvstore.errors import (
    CapacityError,
    CorruptBlockError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    KvstoreError,
    LayoutMismatchError,
    NamespaceUnknownError,
    ProtocolError,
    UnavailableError,
)
from kvstore.frames import ReadFrame, decode_write_frame, encode_write_frame
from kvstore.keys import split_hashes
from kvstore.messages import (
    BlockState,
    CommitState,
    CutReason,
    Epoch,
    LeaseId,
    OwnerId,
    ReservationId,
    ReserveState,
)
from kvstore_client import ClientConfig, PutState
from kvstore_client.flows import load, prefetch, prefix, store
from kvstore_client.flows.attach import Attachment, Scope
from kvstore_client.flows.steps import Read, Write
from tests.client.builders import chain, enveloped, namespace, payloads
from tests.client.scripted import names, run

EPOCH, NEXT_EPOCH = Epoch(b"1" * 16), Epoch(b"2" * 16)
OWNER = OwnerId(b"o" * 16)
HIT, PENDING, MISS, CORRUPT = BlockState.HIT, BlockState.PENDING, BlockState.MISS, BlockState.CORRUPT
SPACE = namespace(model="flows")
DOWN = UnavailableError("down")


def scope(*, epoch: Epoch | None = EPOCH, **settings: Any) -> Scope:
    return Scope(config=ClientConfig(**settings), attachment=Attachment(epoch=epoch))


def info(*, protocol_version: int = PROTOCOL_VERSION, epoch: Epoch = EPOCH) -> m.StoreInfo:
    return m.StoreInfo(
        version="9.9",
        protocol_version=protocol_version,
        epoch=epoch,
        uptime_s=0.0,
        draining=False,
        batch_count_max=1,
        frame_data_bytes_max=1,
    )


def opened(space: Any = SPACE) -> m.OpenNamespaceResponse:
    return m.OpenNamespaceResponse(namespace_id=space.id, epoch=EPOCH, slot_bytes=1)


def looked_up(*states: int, epoch: Epoch = EPOCH) -> m.LookupBlocksResponse:
    return m.LookupBlocksResponse(matched_count=0, block_states=bytes(states), tiers=b"", epoch=epoch)


def acquired(*states: int, lease: int | None, epoch: Epoch = EPOCH) -> m.AcquirePrefixResponse:
    return m.AcquirePrefixResponse(
        matched_count=0,
        block_states=bytes(states),
        tiers=b"",
        epoch=epoch,
        lease_id=None if lease is None else LeaseId(lease),
    )


def reserved(*states: int, ids: list[int | None] | None = None) -> m.ReserveBlocksResponse:
    if ids is None:
        ids = [10 + index if state == ReserveState.RESERVED else None for index, state in enumerate(states)]
    return m.ReserveBlocksResponse(
        reserve_states=bytes(states),
        reservation_ids=tuple(None if number is None else ReservationId(number) for number in ids),
        epoch=EPOCH,
    )


def committed(*states: int) -> m.CommitBlocksResponse:
    return m.CommitBlocksResponse(commit_states=bytes(states))


WRITTEN = m.WriteBlocksResponse(landed_bytes=0)
ABORTED = m.AbortReservationsResponse(aborted_count=0)
VERIFIED = m.VerifyBlocksResponse(block_states=b"")
RESERVED, DONE = ReserveState.RESERVED, CommitState.COMMITTED


def send(*frames: ReadFrame, then: KvstoreError | None = None) -> Callable[[Any], KvstoreError | None]:
    """A daemon that sends these frames; an error of the reader ends the stream, as in the drivers."""

    def act(step: Any) -> KvstoreError | None:
        assert isinstance(step, Read)
        for frame in frames:
            try:
                step.on_frame(frame)
            except KvstoreError as error:
                return error
        return then

    return act


def frame(index: int, payload: bytes, *, block_hash: Any) -> ReadFrame:
    block = enveloped(SPACE, block_hash, payload)
    return ReadFrame(block_index=index, block_state=HIT, size_bytes=len(block), data=memoryview(block))


def lookup_flow(shared: Scope, block_count: int = 2, *, wait_s: float = 0.0) -> Any:
    return prefix.lookup(shared, namespace=SPACE, hashes=chain(block_count), wait_s=wait_s)


def acquire_flow(shared: Scope, block_count: int) -> Any:
    return prefix.acquire(shared, namespace=SPACE, hashes=chain(block_count), owner_id=OWNER, lease_s=5.0, wait_s=0.0)


def put_flow(shared: Scope, block_count: int, *, memory: bytearray | None = None) -> Any:
    view = memoryview(b"".join(payloads(SPACE, block_count)) if memory is None else memory)
    blocks = [view[start : start + 256] for start in range(0, len(view), 256)]
    return store.put(
        shared,
        namespace=SPACE,
        hashes=chain(block_count),
        blocks=blocks,
        parent_hash=None,
        owner_id=OWNER,
    )


# --- attaching


def test_the_first_call_introduces_the_client() -> None:
    shared = scope(epoch=None)
    result, steps = run(lookup_flow(shared), info(), looked_up(HIT, MISS))
    assert names(steps) == ["GetStoreInfo", "LookupBlocks"]
    assert (result.matched_count, shared.attachment.epoch) == (1, EPOCH)


def test_a_prompt_that_is_seen_to_be_there_is_not_asked_for() -> None:
    result, steps = run(lookup_flow(scope(), 3), is_there=True)
    assert steps == []
    assert (result.states, result.matched_count, result.error) == ((HIT,) * 3, 3, None)


def test_nothing_is_believed_to_be_there_before_the_daemon_has_introduced_itself() -> None:
    _, steps = run(lookup_flow(scope(epoch=None)), info(), looked_up(MISS, MISS), is_there=True)
    assert names(steps) == ["GetStoreInfo", "LookupBlocks"]


def test_a_daemon_of_another_protocol_is_refused_with_what_to_do() -> None:
    shared = scope(epoch=None)
    result, steps = run(lookup_flow(shared), info(protocol_version=PROTOCOL_VERSION + 1))
    assert names(steps) == ["GetStoreInfo"]
    assert result.states == (MISS, MISS)
    assert isinstance(result.error, ProtocolError)
    assert "same version of kvstore" in str(result.error)


def test_an_unknown_namespace_is_opened_and_the_call_repeated_once() -> None:
    unknown = NamespaceUnknownError("who?")
    result, steps = run(lookup_flow(scope()), unknown, opened(), looked_up(HIT, HIT))
    assert names(steps) == ["LookupBlocks", "OpenNamespace", "LookupBlocks"]
    assert result.matched_count == 2
    result, steps = run(lookup_flow(scope()), unknown, opened(), unknown)
    assert (result.states, result.error) == ((MISS, MISS), unknown)


@pytest.mark.parametrize("refusal", [LayoutMismatchError("layout"), CapacityError("too large"), DOWN])
def test_a_namespace_that_is_refused_makes_misses_with_the_reason(refusal: KvstoreError) -> None:
    unknown = NamespaceUnknownError("who?")
    for flow, nothing in (
        (lookup_flow(scope()), (MISS, MISS)),
        (put_flow(scope(), 2), (PutState.DROPPED, PutState.DROPPED)),
    ):
        result, _ = run(flow, unknown, refusal)
        assert (result.states, result.error) == (nothing, refusal)


def test_a_daemon_that_opened_another_namespace_is_not_believed() -> None:
    result, _ = run(lookup_flow(scope()), NamespaceUnknownError("who?"), opened(namespace(model="other")))
    assert isinstance(result.error, ProtocolError)


@pytest.mark.parametrize("error", [DOWN, DeadlineExceededError("late")])
def test_after_a_lost_daemon_the_client_introduces_itself_again(error: KvstoreError) -> None:
    shared = scope()
    result, _ = run(lookup_flow(shared), error)
    assert (result.states, result.error) == ((MISS, MISS), error)
    _, steps = run(lookup_flow(shared), info(epoch=NEXT_EPOCH), looked_up(MISS, MISS, epoch=NEXT_EPOCH))
    assert names(steps) == ["GetStoreInfo", "LookupBlocks"]
    shared = scope()
    run(put_flow(shared, 1), reserved(RESERVED), error, ABORTED)
    assert shared.attachment.epoch is None


def test_a_restart_between_two_calls_is_noticed_by_its_epoch() -> None:
    shared = scope()
    run(lookup_flow(shared), looked_up(MISS, MISS, epoch=NEXT_EPOCH))
    assert shared.attachment.epoch is None


# --- lookup


def test_only_the_matched_prefix_is_waited_for() -> None:
    _, steps = run(
        lookup_flow(scope(batch_count_max=2), 6, wait_s=3.0),
        looked_up(HIT, HIT),
        looked_up(HIT, MISS),
        looked_up(HIT, HIT),
    )
    assert [step.request.wait_s for step in steps] == [3.0, 3.0, 0.0]
    assert [step.timeout_s for step in steps] == [5.0, 5.0, 2.0]


def test_a_lookup_that_breaks_off_keeps_what_it_learned() -> None:
    result, _ = run(lookup_flow(scope(batch_count_max=2), 4), looked_up(HIT, HIT), DOWN)
    assert (result.states, result.matched_count, result.error) == ((HIT, HIT, MISS, MISS), 2, DOWN)


@pytest.mark.parametrize("states", [(), (HIT,), (HIT, HIT, HIT), (HIT, 0), (HIT, 9), (CORRUPT, HIT)])
def test_an_answer_about_other_blocks_or_in_unknown_terms_is_all_misses(states: tuple[int, ...]) -> None:
    result, _ = run(lookup_flow(scope()), looked_up(*states))
    assert result.states == (MISS, MISS)
    assert isinstance(result.error, ProtocolError)


def test_a_daemon_that_finds_fault_with_a_request_makes_misses_not_exceptions() -> None:
    error = InvalidArgumentError("block_hashes: too many for this version")
    result, _ = run(lookup_flow(scope()), error)
    assert (result.states, result.error) == ((MISS, MISS), error)


def cut(*, matched: int, left_out: int, states: tuple[int, ...]) -> m.LookupBlocksResponse:
    return m.LookupBlocksResponse(
        matched_count=matched,
        block_states=bytes(states),
        tiers=b"",
        epoch=EPOCH,
        left_out_count=left_out,
        cut_reason=CutReason.TOO_SLOW,
    )


def test_a_matched_prefix_that_the_daemon_cuts_ends_there() -> None:
    flow = prefix.lookup(scope(), namespace=SPACE, hashes=chain(4), wait_s=0.0, recompute_s_per_block=0.25)
    result, steps = run(flow, cut(matched=1, left_out=2, states=(HIT, HIT, HIT, MISS)))
    assert steps[0].request.recompute_s_per_block == 0.25
    assert result.states == (HIT, HIT, HIT, MISS)
    assert (result.matched_count, result.left_out_count, result.cut_reason) == (1, 2, CutReason.TOO_SLOW)


def test_behind_a_cut_nothing_is_matched_waited_for_or_compared() -> None:
    flow = prefix.lookup(
        scope(batch_count_max=2), namespace=SPACE, hashes=chain(6), wait_s=3.0, recompute_s_per_block=0.25
    )
    result, steps = run(
        flow, cut(matched=1, left_out=1, states=(HIT, HIT)), looked_up(HIT, PENDING), looked_up(HIT, HIT)
    )
    assert [step.request.wait_s for step in steps] == [3.0, 0.0, 0.0]
    assert [step.request.recompute_s_per_block for step in steps] == [0.25, 0.0, 0.0]
    assert (result.matched_count, result.left_out_count, result.cut_reason) == (1, 2, CutReason.TOO_SLOW)


def test_a_cut_outlives_a_failure_behind_it() -> None:
    flow = prefix.lookup(
        scope(batch_count_max=2), namespace=SPACE, hashes=chain(4), wait_s=0.0, recompute_s_per_block=0.25
    )
    result, _ = run(flow, cut(matched=1, left_out=1, states=(HIT, HIT)), DOWN)
    assert (result.states, result.matched_count, result.error) == ((HIT, HIT, MISS, MISS), 1, DOWN)
    assert (result.left_out_count, result.cut_reason) == (1, CutReason.TOO_SLOW)


def test_a_daemon_that_matches_more_than_it_has_is_not_believed() -> None:
    result, _ = run(lookup_flow(scope(), 3), cut(matched=2, left_out=1, states=(HIT, MISS, MISS)))
    assert (result.states, result.matched_count) == ((MISS,) * 3, 0)
    assert isinstance(result.error, ProtocolError)


# --- prefetches


def prefetched(in_memory: int, started: int, refused: int, missing: int) -> m.PrefetchBlocksResponse:
    return m.PrefetchBlocksResponse(
        in_memory_count=in_memory, started_count=started, refused_count=refused, missing_count=missing, epoch=EPOCH
    )


def prefetch_flow(shared: Scope, block_count: int, *, budget_bytes: int | None = None) -> Any:
    return prefetch.prefetch(shared, namespace=SPACE, hashes=chain(block_count), budget_bytes=budget_bytes)


def test_one_budget_holds_for_all_batches_of_a_prefetch() -> None:
    budget_bytes = 3 * (256 + ENVELOPE_BYTES)
    result, steps = run(
        prefetch_flow(scope(batch_count_max=2), 6, budget_bytes=budget_bytes),
        prefetched(0, 2, 0, 0),
        prefetched(1, 1, 0, 0),
    )
    assert [step.request.budget_bytes for step in steps] == [budget_bytes, 256 + ENVELOPE_BYTES]
    assert (result.in_memory_count, result.started_count, result.refused_count, result.missing_count) == (1, 3, 2, 0)


def test_what_follows_on_a_refused_block_is_refused_unasked() -> None:
    result, steps = run(prefetch_flow(scope(batch_count_max=2), 5), prefetched(0, 1, 1, 0))
    assert [step.request.budget_bytes for step in steps] == [0]
    assert (result.started_count, result.refused_count) == (1, 4)


def test_a_prefetch_that_breaks_off_keeps_what_it_began() -> None:
    result, _ = run(prefetch_flow(scope(batch_count_max=2), 4), prefetched(1, 1, 0, 0), DOWN)
    assert (result.in_memory_count, result.started_count, result.missing_count, result.error) == (1, 1, 2, DOWN)


# --- leases


def test_what_the_daemon_leaves_out_is_not_held_and_not_asked_beyond() -> None:
    flow = prefix.acquire(
        scope(batch_count_max=3),
        namespace=SPACE,
        hashes=chain(6),
        owner_id=OWNER,
        lease_s=5.0,
        wait_s=0.0,
        recompute_s_per_block=0.25,
    )
    answer = dataclasses.replace(
        acquired(HIT, HIT, HIT, lease=1), matched_count=2, left_out_count=1, cut_reason=CutReason.TOO_SLOW
    )
    lease, steps = run(flow, answer)
    assert [step.request.recompute_s_per_block for step in steps] == [0.25]
    assert lease.states == (HIT, HIT, HIT, MISS, MISS, MISS)
    assert (lease.lease_ids, lease.matched_count, lease.left_out_count) == ((1,), 2, 1)


def test_where_all_is_left_out_nothing_need_be_leased() -> None:
    answer = dataclasses.replace(acquired(HIT, HIT, lease=None), left_out_count=2, cut_reason=CutReason.TOO_SLOW)
    lease, _ = run(acquire_flow(scope(), 2), answer)
    assert (lease.matched_count, lease.left_out_count, lease.cut_reason) == (0, 2, CutReason.TOO_SLOW)
    assert lease.error is None


def test_leases_go_no_further_than_the_matched_prefix() -> None:
    lease, steps = run(
        acquire_flow(scope(batch_count_max=2), 6), acquired(HIT, HIT, lease=1), acquired(HIT, PENDING, lease=2)
    )
    assert len(steps) == 2
    assert (lease.lease_ids, lease.matched_count) == ((1, 2), 3)
    assert lease.states == (HIT, HIT, HIT, PENDING, MISS, MISS)


def test_a_failure_keeps_the_leases_before_it() -> None:
    lease, _ = run(acquire_flow(scope(batch_count_max=2), 4), acquired(HIT, HIT, lease=1), DOWN)
    assert (lease.lease_ids, lease.matched_count, lease.error) == ((1,), 2, DOWN)


def test_a_restart_in_the_middle_of_leasing_voids_what_came_before() -> None:
    lease, _ = run(
        acquire_flow(scope(batch_count_max=2), 4),
        acquired(HIT, HIT, lease=1),
        acquired(HIT, HIT, lease=1, epoch=NEXT_EPOCH),
    )
    assert lease.matched_count == 0
    assert lease.lease_ids == (1,)
    assert isinstance(lease.error, UnavailableError)


def test_hits_without_a_lease_are_not_believed() -> None:
    lease, _ = run(acquire_flow(scope(), 2), acquired(HIT, MISS, lease=None))
    assert (lease.matched_count, lease.states) == (0, (MISS, MISS))
    assert isinstance(lease.error, ProtocolError)


@pytest.mark.parametrize(
    "answer",
    [
        DOWN,
        m.RenewLeasesResponse(renewed=()),
        m.RenewLeasesResponse(renewed=(True,)),
        m.RenewLeasesResponse(renewed=(True, False)),
    ],
)
def test_a_lease_is_renewed_wholly_or_not(answer: object) -> None:
    lease, _ = run(acquire_flow(scope(batch_count_max=1), 2), acquired(HIT, lease=1), acquired(HIT, lease=2))
    assert run(prefix.renew(scope(), lease, lease_s=5.0), answer)[0] is False
    assert run(prefix.renew(scope(), lease, lease_s=5.0), m.RenewLeasesResponse(renewed=(True, True)))[0] is True


def test_a_release_that_fails_is_nobodys_problem() -> None:
    lease, _ = run(acquire_flow(scope(), 1), acquired(HIT, lease=1))
    run(prefix.release(scope(), lease), DOWN)


# --- load


def get_flow(shared: Scope, into: bytearray) -> Any:
    view = memoryview(into)
    targets = [view[start : start + 256] for start in range(0, len(into), 256)]
    return load.get(shared, namespace=SPACE, hashes=chain(len(targets)), targets=targets, owner_id=OWNER)


def test_a_broken_stream_keeps_the_blocks_that_came_whole() -> None:
    hashes, blocks, into = chain(3), payloads(SPACE, 3), bytearray(b"\x55" * 768)
    result, steps = run(get_flow(scope(), into), send(frame(0, blocks[0], block_hash=hashes[0]), then=DOWN))
    assert (result.states, result.matched_count, result.error) == ((HIT, MISS, MISS), 1, DOWN)
    assert into == blocks[0] + b"\x55" * 512
    assert names(steps) == ["ReadBlocks"]


def test_a_failed_batch_is_the_last_one() -> None:
    into = bytearray(1024)
    result, steps = run(get_flow(scope(batch_bytes_max=900), into), send(then=DeadlineExceededError("late")))
    assert len(steps) == 1
    assert result.states == (MISS,) * 4


def test_a_block_that_does_not_verify_is_reported_and_costs_only_itself() -> None:
    hashes, blocks, into = chain(3), payloads(SPACE, 3), bytearray(b"\x55" * 768)
    frames = [frame(index, blocks[index], block_hash=hashes[index]) for index in range(3)]
    damaged = bytearray(frames[1].data)
    damaged[-1] ^= 1
    frames[1] = ReadFrame(block_index=1, block_state=HIT, size_bytes=len(damaged), data=memoryview(damaged))
    for verdict in (VERIFIED, DOWN):
        result, steps = run(get_flow(scope(), into), send(*frames), verdict)
        assert names(steps) == ["ReadBlocks", "VerifyBlocks"]
        assert split_hashes(steps[1].request.block_hashes) == [hashes[1]]
        assert (result.states, result.matched_count) == ((HIT, CORRUPT, HIT), 1)
        assert "payload checksum" in str(result.error)
        assert into == blocks[0] + b"\x55" * 256 + blocks[2]


def test_deadlines_grow_with_the_bytes() -> None:
    config = ClientConfig(data_timeout_base_s=1.0, data_rate_min_bytes_per_s=256)
    shared = Scope(config=config, attachment=Attachment(epoch=EPOCH))
    _, steps = run(get_flow(shared, bytearray(1024)), send())
    assert steps[0].timeout_s == 1.0 + 4


# --- store


def test_what_is_sent_is_what_the_daemon_will_verify() -> None:
    sent: dict[int, bytearray] = {}

    def take(step: Any) -> m.WriteBlocksResponse:
        assert isinstance(step, Write)
        for position, given in enumerate(step.frames):
            got = decode_write_frame(encode_write_frame(given))
            assert got.owner_id == (OWNER if position == 0 else None)
            sent.setdefault(got.reservation_id, bytearray()).extend(got.data)
        return WRITTEN

    result, steps = run(put_flow(scope(), 3), reserved(RESERVED, RESERVED, RESERVED), take, committed(DONE, DONE, DONE))
    assert names(steps) == ["ReserveBlocks", "WriteBlocks", "CommitBlocks"]
    assert result.states == (PutState.STORED,) * 3
    for number, block_hash, payload in zip((10, 11, 12), chain(3), payloads(SPACE, 3), strict=True):
        assert len(sent[number]) == ENVELOPE_BYTES + 256
        found = verify_block(sent[number], namespace_id=SPACE.id, block_hash=block_hash, payload_bytes=256)
        assert found == payload


def test_memory_that_changes_during_a_put_never_matches_its_checksum() -> None:
    """Taken as a block is sent, a checksum would vouch for whatever the memory holds by then."""
    memory = bytearray(b"".join(payloads(SPACE, 2)))
    sent: list[bytes] = []

    def overwrite(_: Any) -> m.CommitBlocksResponse:
        memory[256:] = bytes(256)
        return committed(DONE)

    def take(step: Any) -> m.WriteBlocksResponse:
        sent.extend(bytes(given.envelope) + bytes(given.data) for given in step.frames)
        return WRITTEN

    run(
        put_flow(scope(batch_count_max=1), 2, memory=memory),
        *(reserved(RESERVED), take, overwrite),
        *(reserved(RESERVED), take, committed(CommitState.CORRUPT)),
    )
    verify_block(sent[0], namespace_id=SPACE.id, block_hash=chain(2)[0], payload_bytes=256)
    with pytest.raises(CorruptBlockError, match="payload checksum"):
        verify_block(sent[1], namespace_id=SPACE.id, block_hash=chain(2)[1], payload_bytes=256)


def test_only_reserved_blocks_are_written() -> None:
    states = (ReserveState.STORED, RESERVED, ReserveState.PENDING, RESERVED)
    result, steps = run(put_flow(scope(), 4), reserved(*states), WRITTEN, committed(DONE, CommitState.CORRUPT))
    assert steps[2].request.reservation_ids == (11, 13)
    assert result.states == (PutState.ALREADY_STORED, PutState.STORED, PutState.PENDING, PutState.DROPPED)
    assert (result.stored_count, result.error) == (2, None)


def test_with_nothing_reserved_nothing_is_sent() -> None:
    _, steps = run(put_flow(scope(), 2), reserved(ReserveState.STORED, ReserveState.PENDING))
    assert names(steps) == ["ReserveBlocks"]


@pytest.mark.parametrize(
    "state", [ReserveState.FULL, ReserveState.DRAINING, ReserveState.OVERLOADED, ReserveState.ORPHAN]
)
def test_a_put_stops_where_its_chain_ends(state: ReserveState) -> None:
    result, steps = run(put_flow(scope(batch_count_max=2), 6), reserved(RESERVED, state), WRITTEN, committed(DONE))
    assert names(steps) == ["ReserveBlocks", "WriteBlocks", "CommitBlocks"]
    assert result.states == (PutState.STORED, *[PutState.DROPPED] * 5)
    assert result.error is None
    assert result.refusal == (None if state is ReserveState.ORPHAN else state)


def test_each_batch_names_the_block_before_it() -> None:
    hashes = chain(4)
    stored = (ReserveState.STORED, ReserveState.STORED)
    _, steps = run(put_flow(scope(batch_count_max=2), 4), reserved(*stored), reserved(*stored))
    assert [step.request.parent_hash for step in steps] == [b"", hashes[1]]


@pytest.mark.parametrize("at", ["WriteBlocks", "CommitBlocks"])
@pytest.mark.parametrize("cleanup", [ABORTED, DOWN])
def test_a_failed_put_gives_its_reservations_up(at: str, cleanup: object) -> None:
    failure = InternalError("boom")
    before = [reserved(RESERVED, RESERVED)] + ([WRITTEN] if at == "CommitBlocks" else [])
    result, steps = run(put_flow(scope(batch_count_max=2), 4), *before, failure, cleanup)
    assert names(steps)[-2:] == [at, "AbortReservations"]
    assert steps[-1].request.reservation_ids == (10, 11)
    assert (result.states, result.error) == ((PutState.DROPPED,) * 4, failure)


@pytest.mark.parametrize(
    "answer",
    [
        reserved(RESERVED, ids=[10]),
        reserved(RESERVED, RESERVED, ids=[10, None]),
        reserved(RESERVED, ReserveState.STORED, ids=[10, 11]),
        reserved(RESERVED, RESERVED, RESERVED, ids=[10, 11, 12]),
    ],
)
def test_a_reservation_that_contradicts_itself_is_aborted(answer: m.ReserveBlocksResponse) -> None:
    result, steps = run(put_flow(scope(), 2), answer, ABORTED)
    assert names(steps) == ["ReserveBlocks", "AbortReservations"]
    assert result.states == (PutState.DROPPED, PutState.DROPPED)
    assert isinstance(result.error, ProtocolError)


def test_an_unanswerable_commit_is_not_called_stored() -> None:
    result, _ = run(put_flow(scope(), 2), reserved(RESERVED, RESERVED), WRITTEN, committed(DONE), ABORTED)
    assert result.states == (PutState.DROPPED, PutState.DROPPED)
    assert isinstance(result.error, ProtocolError)


def test_a_block_without_a_v_plane_says_so_in_its_envelope() -> None:
    space = dataclasses.replace(SPACE, v_head_dim=0)
    block = bytes(space.block_layout.payload_bytes)
    blocks = [memoryview(block)]
    flow = store.put(
        scope(),
        namespace=space,
        hashes=chain(1),
        blocks=blocks,
        parent_hash=None,
        owner_id=OWNER,
    )
    sent: list[bytes] = []

    def take(step: Any) -> m.WriteBlocksResponse:
        sent.extend(bytes(decode_write_frame(encode_write_frame(given)).data) for given in step.frames)
        return WRITTEN

    run(flow, reserved(RESERVED), take, committed(DONE))
    verify_block(sent[0], namespace_id=space.id, block_hash=chain(1)[0], payload_bytes=len(block))
