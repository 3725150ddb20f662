"""Waiting for one's turn to move bytes. Everything happens on the event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvstore_server.core.in_flight import ClientId, InFlight, LoadId


class Turns:
    """Whoever moves blocks over streams or the data port goes through here, so that nobody's turn is missed."""

    def __init__(self, in_flight: InFlight) -> None:
        self._in_flight = in_flight
        self._on_granted: dict[LoadId, Callable[[], None]] = {}

    @property
    def is_crowded(self) -> bool:
        """Whether somebody waits, or would be refused."""
        return self._in_flight.waiting_count > 0 or not self._in_flight.admits_store(None)

    def ask_load(self, client_id: ClientId, size_bytes: int, on_granted: Callable[[], None]) -> LoadId:
        """Calls back when the load may go, at once or later; owes one `end_load` in any case."""
        load_id = self._in_flight.ask_load(client_id, size_bytes)
        self._on_granted[load_id] = on_granted
        if self._in_flight.is_granted(load_id):
            self._call([load_id])
        return load_id

    def end_load(self, load_id: LoadId) -> None:
        self._on_granted.pop(load_id, None)
        self._call(self._in_flight.end_load(load_id))

    def begin_store(self, client_id: ClientId, size_bytes: int) -> None:
        """Counts bytes that arrive; owes one `end_store` of as many."""
        self._in_flight.begin_store(client_id, size_bytes)

    def end_store(self, client_id: ClientId, size_bytes: int) -> None:
        self._call(self._in_flight.end_store(client_id, size_bytes))

    def _call(self, granted: Iterable[LoadId]) -> None:
        for load_id in granted:
            self._on_granted.pop(load_id)()
