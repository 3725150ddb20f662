"""What the holder of a ticket may do once."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from kvstore.messages import Ticket

Grant = TypeVar("Grant")


class TicketTable(Generic[Grant]):
    """Grants under unguessable names, all good for the same time.

    A grant leaves the table exactly once: whoever gets it, by `redeem` or `expire`, answers for what it stands for.
    """

    def __init__(self, *, lifetime_s: float) -> None:
        self._lifetime_s = lifetime_s
        self._grants: dict[Ticket, Grant] = {}
        # In the order of issue, which is that of the deadlines; tickets that were redeemed stay until theirs.
        self._deadlines: deque[tuple[float, Ticket]] = deque()

    def __len__(self) -> int:
        return len(self._grants)

    def issue(self, ticket: Ticket, grant: Grant, *, now_s: float) -> None:
        assert ticket not in self._grants, f"ticket {ticket.hex()} was issued twice"
        self._grants[ticket] = grant
        self._deadlines.append((now_s + self._lifetime_s, ticket))

    def redeem(self, ticket: Ticket) -> Grant | None:
        """The grant, for this one time; None when there is no such ticket any more, or never was."""
        return self._grants.pop(ticket, None)

    def expire(self, *, now_s: float) -> list[Grant]:
        """Ends the tickets whose time is up and returns what they stood for; to be called before each `redeem`."""
        ended: list[Grant] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, ticket = self._deadlines.popleft()
            grant = self._grants.pop(ticket, None)
            if grant is not None:
                ended.append(grant)
        return ended

    def check_invariants(self) -> None:
        deadlines = [deadline_s for deadline_s, _ in self._deadlines]
        assert deadlines == sorted(deadlines), "deadlines are out of order"
        missing = self._grants.keys() - {ticket for _, ticket in self._deadlines}
        assert not missing, f"tickets {[ticket.hex() for ticket in missing]} never expire"
