"""How many bytes may be on their way at once, and whose turn it is."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, NewType

ClientId = NewType("ClientId", str)
LoadId = NewType("LoadId", int)


class _Load(NamedTuple):
    client_id: ClientId
    size_bytes: int


class InFlight:
    """Grants loads in turn and says when stores are too many.

    A load waits while it would pass a limit, but never for ever: each client's loads come in order, and clients take
    turns. One that is larger than a limit goes alone. A store is admitted while there is room and no load waits;
    one that has been admitted is counted, whatever it adds up to.
    """

    def __init__(self, *, bytes_max: int, bytes_per_client_max: int) -> None:
        self.total_bytes = 0
        self._bytes_max = bytes_max
        self._bytes_per_client_max = bytes_per_client_max
        self._bytes_of: dict[ClientId, int] = {}
        self._moving: dict[LoadId, _Load] = {}
        self._waiting: dict[LoadId, _Load] = {}
        self._queues: dict[ClientId, deque[LoadId]] = {}
        # Those with a queue, whose turn it is first; who was served goes to the end.
        self._turns: deque[ClientId] = deque()
        self._last_id = 0

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    def admits_store(self, client_id: ClientId | None) -> bool:
        """None: a client that is not known, for whom only the whole counts."""
        own_bytes = 0 if client_id is None else self._bytes_of.get(client_id, 0)
        return not self._waiting and self.total_bytes < self._bytes_max and own_bytes < self._bytes_per_client_max

    def begin_store(self, client_id: ClientId, size_bytes: int) -> None:
        """Counts bytes that arrive; owes one `end_store` of as many."""
        self._add(client_id, size_bytes)

    def end_store(self, client_id: ClientId, size_bytes: int) -> list[LoadId]:
        """Returns the loads whose turn has come."""
        self._subtract(client_id, size_bytes)
        return self._grant()

    def ask_load(self, client_id: ClientId, size_bytes: int) -> LoadId:
        """Queues a load, which moves at once if `is_granted` now says so; owes one `end_load` in any case."""
        self._last_id += 1
        load_id = LoadId(self._last_id)
        self._waiting[load_id] = _Load(client_id, size_bytes)
        queue = self._queues.get(client_id)
        if queue is None:
            queue = self._queues[client_id] = deque()
            self._turns.append(client_id)
        queue.append(load_id)
        self._grant()
        return load_id

    def is_granted(self, load_id: LoadId) -> bool:
        return load_id in self._moving

    def end_load(self, load_id: LoadId) -> list[LoadId]:
        """Ends a load, or takes one back that has not begun; returns those whose turn has come."""
        load = self._moving.pop(load_id, None)
        if load is not None:
            self._subtract(load.client_id, load.size_bytes)
        else:
            client_id = self._waiting.pop(load_id).client_id
            queue = self._queues[client_id]
            queue.remove(load_id)
            if not queue:
                self._leave(client_id)
        return self._grant()

    def check_invariants(self) -> None:
        assert self.total_bytes == sum(self._bytes_of.values()), f"{self.total_bytes} bytes in total"
        assert all(size_bytes > 0 for size_bytes in self._bytes_of.values()), "a client with nothing is remembered"
        queued = [load_id for queue in self._queues.values() for load_id in queue]
        assert sorted(queued) == sorted(self._waiting), "queues and waiting loads disagree"
        assert sorted(self._turns) == sorted(self._queues), "turns and queues disagree"
        assert all(self._queues.values()), "an empty queue has a turn"
        assert self._next() is None, f"{self._next()} waits for nothing"

    def _grant(self) -> list[LoadId]:
        granted: list[LoadId] = []
        while (client_id := self._next()) is not None:
            queue = self._queues[client_id]
            load_id = queue.popleft()
            load = self._moving[load_id] = self._waiting.pop(load_id)
            self._add(client_id, load.size_bytes)
            granted.append(load_id)
            self._leave(client_id)
            if queue:
                self._queues[client_id] = queue
                self._turns.append(client_id)
        return granted

    def _next(self) -> ClientId | None:
        """Whose load may go now: the first client's that is below its own limit, and nobody's before that one."""
        for client_id in self._turns:
            size_bytes = self._waiting[self._queues[client_id][0]].size_bytes
            own_bytes = self._bytes_of.get(client_id, 0)
            if own_bytes and own_bytes + size_bytes > self._bytes_per_client_max:
                continue
            is_room = not self.total_bytes or self.total_bytes + size_bytes <= self._bytes_max
            return client_id if is_room else None
        return None

    def _leave(self, client_id: ClientId) -> None:
        self._turns.remove(client_id)
        del self._queues[client_id]

    def _add(self, client_id: ClientId, size_bytes: int) -> None:
        self.total_bytes += size_bytes
        self._bytes_of[client_id] = self._bytes_of.get(client_id, 0) + size_bytes

    def _subtract(self, client_id: ClientId, size_bytes: int) -> None:
        left_bytes = self._bytes_of[client_id] - size_bytes
        assert left_bytes >= 0, f"{client_id!r} gives back {size_bytes} bytes too many"
        self.total_bytes -= size_bytes
        if left_bytes:
            self._bytes_of[client_id] = left_bytes
        else:
            del self._bytes_of[client_id]
