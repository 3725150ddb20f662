"""The table of tickets against an obvious model: a dict of deadlines."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.messages import Ticket
from kvstore_server.core.tickets import TicketTable

LIFETIME_S = 10.0


class TicketTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table: TicketTable[str] = TicketTable(lifetime_s=LIFETIME_S)
        self.model: dict[Ticket, tuple[float, str]] = {}
        self.tickets = [Ticket(bytes(16))]  # all there ever were, and one that was not
        self.left: list[str] = []
        self.now_s = 0.0

    @rule()
    def issue(self) -> None:
        ticket = Ticket(len(self.tickets).to_bytes(16, "big"))
        grant = f"grant {len(self.tickets)}"
        self.tickets.append(ticket)
        self.table.issue(ticket, grant, now_s=self.now_s)
        self.model[ticket] = (self.now_s + LIFETIME_S, grant)

    @rule(data=st.data())
    def redeem(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        expected = self.model.pop(ticket, None)
        assert self.table.redeem(ticket) == (expected[1] if expected else None)
        if expected:
            self.left.append(expected[1])

    @rule(step_s=st.integers(0, 12))
    def let_time_pass(self, step_s: int) -> None:
        self.now_s += step_s

    @rule()
    def expire(self) -> None:
        due = [ticket for ticket, (deadline_s, _) in self.model.items() if deadline_s <= self.now_s]
        ended = self.table.expire(now_s=self.now_s)
        assert ended == [self.model.pop(ticket)[1] for ticket in due]
        self.left += ended

    @invariant()
    def every_grant_leaves_at_most_once(self) -> None:
        self.table.check_invariants()
        assert len(self.table) == len(self.model)
        assert len(set(self.left)) == len(self.left)


TestTicketTable = TicketTableMachine.TestCase


def test_a_ticket_is_good_until_its_deadline_and_not_at_it() -> None:
    table: TicketTable[str] = TicketTable(lifetime_s=LIFETIME_S)
    table.issue(Ticket(b"a" * 16), "grant", now_s=0.0)
    assert table.expire(now_s=LIFETIME_S - 0.001) == []
    assert table.expire(now_s=LIFETIME_S) == ["grant"]
    assert table.redeem(Ticket(b"a" * 16)) is None


def test_a_ticket_is_good_once() -> None:
    table: TicketTable[str] = TicketTable(lifetime_s=LIFETIME_S)
    table.issue(Ticket(b"a" * 16), "grant", now_s=0.0)
    assert table.redeem(Ticket(b"a" * 16)) == "grant"
    assert table.redeem(Ticket(b"a" * 16)) is None
    assert table.expire(now_s=LIFETIME_S) == []
