"""Tickets and what they hold, on a real core."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvstore.bulk import Direction, TransferRequest
from kvstore.errors import UnavailableError
from kvstore.messages import BlockState, CommitState, OwnerId, Ticket, TransferPath
from kvstore_server.core.in_flight import InFlight
from kvstore_server.core.tenants import DEFAULT_TENANT, scoped
from kvstore_server.rpc.transfers import TICKET_S, Landing, LoopDesk, Refusal, Transfer, TransferId, Transfers
from kvstore_server.rpc.turns import Turns
from tests.server.builders import ALICE, BOB, SMALL, enveloped_bytes, hashes, make_core, put, reserve, states_of

SCOPE = scoped(DEFAULT_TENANT, SMALL.id)
BLOCK_BYTES = enveloped_bytes(SMALL)


class Books:
    """Transfers with everything in reach, and a clock that stands still."""

    def __init__(self, *, bytes_max: int = 1 << 20) -> None:
        self.now_s = 100.0
        self.core = make_core()
        self.settled_count = 0
        self.in_flight = InFlight(bytes_max=bytes_max, bytes_per_client_max=bytes_max)
        self.transfers = Transfers(
            core=self.core, turns=Turns(self.in_flight), clock=lambda: self.now_s, on_settled=self.note_settled
        )

    def note_settled(self) -> None:
        self.settled_count += 1

    def lease(self, *numbers: int, owner_id: OwnerId = ALICE, lease_s: float = 30.0) -> Ticket:
        leased = self.core.lease_stored(
            SCOPE, hashes(*numbers), owner_id=owner_id, now_s=self.now_s, duration_s=lease_s
        )
        assert leased.lease_id is not None
        return self.transfers.issue_read(
            lease_id=leased.lease_id, owner_id=owner_id, namespace_id=SCOPE, hashes=hashes(*numbers)
        )

    def reserve(self, *numbers: int) -> Ticket:
        _, ids = reserve(self.core, *numbers, path=TransferPath.BULK, now_s=self.now_s)
        return self.transfers.issue_write(owner_id=ALICE, reservation_ids=[one for one in ids if one is not None])

    def redeem(self, ticket: Ticket, direction: Direction, block_count: int) -> Transfer | Refusal | None:
        """None: its turn has not come."""
        answers: list[Transfer | Refusal] = []
        request = TransferRequest(direction=direction, ticket=ticket, block_count=block_count)
        self.transfers.redeem(request, answers.append)
        return answers[0] if answers else None

    def begin(self, ticket: Ticket, direction: Direction, block_count: int) -> Transfer:
        transfer = self.redeem(ticket, direction, block_count)
        assert isinstance(transfer, Transfer), transfer
        return transfer

    def held(self) -> tuple[int, int, int, int]:
        return (
            self.core.lease_count,
            self.core.reservation_count,
            self.transfers.ticket_count + self.transfers.running_count,
            self.in_flight.total_bytes,
        )

    def check_nothing_is_held(self) -> None:
        self.core.check_invariants()
        self.in_flight.check_invariants()
        assert self.held() == (0, 0, 0, 0)


@pytest.fixture
def books() -> Books:
    return Books()


def test_a_read_sends_leased_blocks_in_order_and_ends_the_lease(books: Books) -> None:
    put(books.core, 1, 2)
    transfer = books.begin(books.lease(2, 1), Direction.READ, 2)
    assert [block.block_hash for block in transfer.blocks] == hashes(2, 1)
    assert [block.size_bytes for block in transfer.blocks] == [BLOCK_BYTES] * 2
    assert transfer.namespace_id == SMALL.id
    assert books.in_flight.total_bytes == 2 * BLOCK_BYTES
    books.transfers.finish_read(transfer.transfer_id, sent_count=2)
    assert books.core.counters.sent_count == 2
    assert books.core.counters.read_bytes == 2 * BLOCK_BYTES
    books.check_nothing_is_held()


def test_blocks_of_a_running_read_stay_whatever_their_owner_and_the_clock_do(books: Books) -> None:
    put(books.core, *range(16))  # all there is room for
    transfer = books.begin(books.lease(0), Direction.READ, 1)
    books.now_s += 1000.0
    books.core.expire(now_s=books.now_s)
    states, _ = reserve(books.core, *range(100, 116), now_s=books.now_s)
    assert states.count(states[0]) == 15, "all slots but the one that is being read"
    assert states_of(books.core, 0) == [BlockState.HIT]
    books.transfers.finish_read(transfer.transfer_id, sent_count=1)


def test_a_block_that_has_gone_before_its_transfer_is_told_as_gone(books: Books) -> None:
    put(books.core, 1, 2)
    ticket = books.lease(1, 2, lease_s=1.0)
    books.now_s += 2.0
    books.core.expire(now_s=books.now_s)
    block = books.core.begin_read(SCOPE, hashes(1)[0])
    assert block is not None
    books.core.quarantine(SCOPE, hashes(1)[0], block)
    books.core.end_read(block, sent_bytes=0)
    transfer = books.begin(ticket, Direction.READ, 2)
    assert [block.size_bytes for block in transfer.blocks] == [0, BLOCK_BYTES]
    books.transfers.finish_read(transfer.transfer_id, sent_count=2)
    assert (books.core.counters.sent_count, books.core.counters.unsent_count) == (1, 1)
    books.check_nothing_is_held()


def test_a_read_that_breaks_counts_only_what_was_sent(books: Books) -> None:
    put(books.core, 1, 2)
    transfer = books.begin(books.lease(1, 2), Direction.READ, 2)
    books.transfers.finish_read(transfer.transfer_id, sent_count=1)
    assert (books.core.counters.sent_count, books.core.counters.read_bytes) == (1, BLOCK_BYTES)
    books.check_nothing_is_held()


def test_a_write_makes_verified_blocks_readable_and_gives_up_the_others(books: Books) -> None:
    transfer = books.begin(books.reserve(1, 2, 3), Direction.WRITE, 3)
    landings = [
        Landing(BLOCK_BYTES, CommitState.COMMITTED),
        Landing(BLOCK_BYTES, CommitState.CORRUPT),
        Landing(0, CommitState.INCOMPLETE),
    ]
    states = books.transfers.finish_write(transfer.transfer_id, landings)
    assert list(states) == [CommitState.COMMITTED, CommitState.CORRUPT, CommitState.INCOMPLETE]
    assert states_of(books.core, 1, 2, 3) == [BlockState.HIT, BlockState.MISS, BlockState.MISS]
    assert books.core.counters.corrupt_on_commit_count == 1
    assert books.settled_count == 1
    books.check_nothing_is_held()


def test_slots_of_a_running_write_become_nobody_elses(books: Books) -> None:
    transfer = books.begin(books.reserve(*range(16)), Direction.WRITE, 16)
    books.now_s += 1000.0
    books.core.expire(now_s=books.now_s)
    states, _ = reserve(books.core, 100, now_s=books.now_s)
    assert [state.name for state in states] == ["FULL"]
    assert books.core.reservation_count == 16
    books.transfers.finish_write(transfer.transfer_id, None)
    assert states_of(books.core, 0) == [BlockState.MISS]
    books.check_nothing_is_held()


def test_a_ticket_is_good_once(books: Books) -> None:
    put(books.core, 1)
    ticket = books.lease(1)
    transfer = books.begin(ticket, Direction.READ, 1)
    assert isinstance(books.redeem(ticket, Direction.READ, 1), Refusal)
    books.transfers.finish_read(transfer.transfer_id, sent_count=1)
    books.check_nothing_is_held()


def test_a_forged_ticket_opens_nothing_and_ends_nothing(books: Books) -> None:
    put(books.core, 1)
    ticket = books.lease(1)
    assert isinstance(books.redeem(Ticket(bytes(16)), Direction.READ, 1), Refusal)
    books.transfers.finish_read(books.begin(ticket, Direction.READ, 1).transfer_id, sent_count=1)
    books.check_nothing_is_held()


@pytest.mark.parametrize(("direction", "block_count"), [(Direction.WRITE, 2), (Direction.READ, 1), (Direction.READ, 3)])
def test_a_read_ticket_used_for_something_else_is_void_and_holds_nothing(
    books: Books, direction: Direction, block_count: int
) -> None:
    put(books.core, 1, 2)
    ticket = books.lease(1, 2)
    refusal = books.redeem(ticket, direction, block_count)
    assert isinstance(refusal, Refusal)
    assert f"a READ of 2 blocks, not a {direction.name} of {block_count}" in refusal.reason
    assert isinstance(books.redeem(ticket, Direction.READ, 2), Refusal)
    books.check_nothing_is_held()


def test_a_write_ticket_used_for_reading_is_void_and_holds_nothing(books: Books) -> None:
    assert isinstance(books.redeem(books.reserve(1), Direction.READ, 1), Refusal)
    assert states_of(books.core, 1) == [BlockState.MISS]
    books.check_nothing_is_held()


def test_tickets_that_nobody_comes_for_hold_nothing_after_their_time(books: Books) -> None:
    put(books.core, 1)
    tickets = [books.lease(1), books.reserve(2)]
    books.now_s += TICKET_S
    books.transfers.sweep()
    assert states_of(books.core, 1, 2) == [BlockState.HIT, BlockState.MISS]
    assert isinstance(books.redeem(tickets[0], Direction.READ, 1), Refusal)
    assert isinstance(books.redeem(tickets[1], Direction.WRITE, 1), Refusal)
    books.check_nothing_is_held()


def test_an_expired_ticket_is_refused_even_before_the_sweep(books: Books) -> None:
    put(books.core, 1)
    ticket = books.lease(1)
    books.now_s += TICKET_S
    assert isinstance(books.redeem(ticket, Direction.READ, 1), Refusal)
    books.check_nothing_is_held()


def test_a_write_whose_reservations_have_ended_is_refused_as_a_whole(books: Books) -> None:
    _, ids = reserve(books.core, 1, 2, path=TransferPath.BULK, now_s=books.now_s)
    ticket = books.transfers.issue_write(owner_id=ALICE, reservation_ids=[one for one in ids if one is not None])
    assert ids[0] is not None
    books.core.abort(ids[0], owner_id=ALICE)
    refusal = books.redeem(ticket, Direction.WRITE, 2)
    assert refusal == Refusal(reason="1 of 2 reservations have ended")
    assert books.core.counters.corrupt_on_commit_count == 0
    books.check_nothing_is_held()


def test_loads_beyond_the_budget_wait_for_their_turn_and_stores_are_counted() -> None:
    books = Books(bytes_max=2 * BLOCK_BYTES)
    put(books.core, 1, 2)
    first = books.begin(books.lease(1, 2), Direction.READ, 2)
    answers: list[Transfer | Refusal] = []
    request = TransferRequest(direction=Direction.READ, ticket=books.lease(1, owner_id=BOB), block_count=1)
    books.transfers.redeem(request, answers.append)
    assert not answers
    books.transfers.finish_read(first.transfer_id, sent_count=0)
    (second,) = answers
    assert isinstance(second, Transfer)
    books.transfers.finish_read(second.transfer_id, sent_count=1)
    write = books.begin(books.reserve(3), Direction.WRITE, 1)
    assert books.in_flight.total_bytes > BLOCK_BYTES
    books.transfers.finish_write(write.transfer_id, None)
    books.check_nothing_is_held()


def test_an_abandoned_transfer_holds_nothing_and_shows_nothing(books: Books) -> None:
    put(books.core, 1)
    books.transfers.abandon(books.begin(books.lease(1), Direction.READ, 1).transfer_id)
    books.transfers.abandon(books.begin(books.reserve(2), Direction.WRITE, 1).transfer_id)
    assert books.core.counters.sent_count == 0
    assert states_of(books.core, 1, 2) == [BlockState.HIT, BlockState.MISS]
    books.check_nothing_is_held()


async def test_threads_reach_the_loop_through_their_desk(books: Books) -> None:
    put(books.core, 1)
    loop_thread = threading.get_ident()
    desk = LoopDesk(books.transfers, loop=asyncio.get_running_loop(), on_bug=lambda bug: pytest.fail(str(bug)))
    request = TransferRequest(direction=Direction.READ, ticket=books.lease(1), block_count=1)
    transfer = await asyncio.to_thread(desk.redeem, request)
    assert isinstance(transfer, Transfer)
    await asyncio.to_thread(desk.finish_read, transfer.transfer_id, sent_count=1)
    write = TransferRequest(direction=Direction.WRITE, ticket=books.reserve(2), block_count=1)
    transfer = await asyncio.to_thread(desk.redeem, write)
    assert isinstance(transfer, Transfer)
    landings = [Landing(BLOCK_BYTES, CommitState.COMMITTED)]
    assert await asyncio.to_thread(desk.finish_write, transfer.transfer_id, landings) == bytes([CommitState.COMMITTED])
    assert threading.get_ident() == loop_thread
    books.check_nothing_is_held()


async def test_a_bug_on_the_loop_reaches_the_daemon_and_the_waiting_thread(books: Books) -> None:
    bugs: list[AssertionError] = []

    class Broken(Transfers):
        def finish_read(self, transfer_id: object, *, sent_count: int) -> None:
            raise AssertionError(f"{transfer_id} of {sent_count}")

    broken = Broken(core=books.core, turns=Turns(books.in_flight), clock=lambda: 0.0, on_settled=lambda: None)
    desk = LoopDesk(broken, loop=asyncio.get_running_loop(), on_bug=bugs.append)
    with pytest.raises(UnavailableError, match="bug"):
        await asyncio.to_thread(desk.finish_read, TransferId(1), sent_count=7)
    assert [str(bug) for bug in bugs] == ["1 of 7"]


def test_a_desk_whose_loop_has_stopped_says_so(books: Books) -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    desk = LoopDesk(books.transfers, loop=loop, on_bug=lambda _: None)
    request = TransferRequest(direction=Direction.READ, ticket=Ticket(bytes(16)), block_count=1)
    with pytest.raises(UnavailableError, match="stopped"):
        desk.redeem(request)
