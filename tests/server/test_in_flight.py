"""Who may move bytes, against the promises: loads come in turn and are never refused, stores give way."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore_server.core.in_flight import ClientId, InFlight, LoadId

TOTAL, OWN = 100, 40
ANN, BEN, CAT = (ClientId(name) for name in ("ann", "ben", "cat"))
clients = st.sampled_from([ANN, BEN, CAT])
sizes = st.integers(1, 120)


class InFlightMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.budget = InFlight(bytes_max=TOTAL, bytes_per_client_max=OWN)
        self.loads: dict[LoadId, tuple[ClientId, int]] = {}
        self.stores: list[tuple[ClientId, int]] = []
        self.order: dict[ClientId, list[LoadId]] = {client: [] for client in (ANN, BEN, CAT)}

    def moving(self, client: ClientId | None = None) -> int:
        loads = [load for number, load in self.loads.items() if self.budget.is_granted(number)]
        return sum(size for other, size in [*loads, *self.stores] if client in (None, other))

    @rule(client=clients, size=sizes)
    def ask(self, client: ClientId, size: int) -> None:
        number = self.budget.ask_load(client, size)
        self.loads[number] = client, size
        self.order[client].append(number)

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.loads)))
        before = {other for other in self.loads if self.budget.is_granted(other)}
        granted = self.budget.end_load(number)
        client, _ = self.loads.pop(number)
        self.order[client].remove(number)
        assert set(granted) == {other for other in self.loads if self.budget.is_granted(other)} - before

    @rule(client=clients, size=sizes)
    def store_if_admitted(self, client: ClientId, size: int) -> None:
        has_room = self.moving() < TOTAL and self.moving(client) < OWN
        assert self.budget.admits_store(client) == (has_room and not self.budget.waiting_count)
        if self.budget.admits_store(client):
            self.budget.begin_store(client, size)
            self.stores.append((client, size))

    @precondition(lambda self: self.stores)
    @rule(data=st.data())
    def end_store(self, data: st.DataObject) -> None:
        self.budget.end_store(*self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1))))

    @invariant()
    def limits_hold_and_each_client_is_served_in_order(self) -> None:
        self.budget.check_invariants()
        assert self.budget.total_bytes == self.moving()
        for client, numbers in self.order.items():
            granted = [self.budget.is_granted(number) for number in numbers]
            assert granted == sorted(granted, reverse=True), f"{client} was not served in order"
        loads = [size for number, (_, size) in self.loads.items() if self.budget.is_granted(number)]
        assert len(loads) == 1 or sum(loads) <= TOTAL

    def teardown(self) -> None:
        """However many wait, all are served once others end."""
        for client, size in self.stores:
            self.budget.end_store(client, size)
        while self.loads:
            number = next(number for number in self.loads if self.budget.is_granted(number))
            del self.loads[number]
            self.budget.end_load(number)
        assert self.budget.total_bytes == self.budget.waiting_count == 0
        self.budget.check_invariants()


InFlightMachine.TestCase.settings = settings(max_examples=50, deadline=None)
TestInFlight = InFlightMachine.TestCase


def test_a_client_that_has_stopped_reading_leaves_the_others_their_room() -> None:
    budget = InFlight(bytes_max=TOTAL, bytes_per_client_max=OWN)
    stopped = [budget.ask_load(ANN, 20) for _ in range(10)]
    assert [budget.is_granted(load) for load in stopped] == [True, True] + [False] * 8
    assert budget.is_granted(budget.ask_load(BEN, OWN))


def test_clients_take_turns_however_much_one_has_asked_for() -> None:
    budget = InFlight(bytes_max=40, bytes_per_client_max=40)
    anns = [budget.ask_load(ANN, 40) for _ in range(3)]
    ben = budget.ask_load(BEN, 40)
    assert budget.end_load(anns[0]) == [anns[1]]  # ann was waiting first
    assert budget.end_load(anns[1]) == [ben]
    assert budget.end_load(ben) == [anns[2]]


def test_a_load_larger_than_the_limits_goes_alone() -> None:
    budget = InFlight(bytes_max=TOTAL, bytes_per_client_max=OWN)
    small, large, after = budget.ask_load(ANN, 1), budget.ask_load(BEN, 500), budget.ask_load(CAT, 1)
    assert [budget.is_granted(load) for load in (small, large, after)] == [True, False, False]
    assert budget.end_load(small) == [large]
    assert budget.end_load(large) == [after]


def test_stores_are_refused_before_any_load_is() -> None:
    budget = InFlight(bytes_max=TOTAL, bytes_per_client_max=TOTAL)
    budget.begin_store(ANN, TOTAL)
    assert not budget.admits_store(BEN)
    load = budget.ask_load(BEN, 10)
    assert not budget.admits_store(None)
    assert budget.end_store(ANN, TOTAL) == [load]
    assert budget.admits_store(BEN)
