"""How long a data stream may live, when its turn comes, and when it is ended for the sake of others. Knows no gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvstore.errors import DeadlineExceededError
from kvstore_server.core.in_flight import ClientId, LoadId
from kvstore_server.rpc.turns import Turns

STALL_S_MAX = 1.0
"""Seconds without progress after which a stream is ended if others want the room that it takes. Loads of any size are
given 2 s and more, so that who waits still has his in time; and nobody else's pauses on a busy machine are as long."""


class Stream:
    """One data stream, from its first byte to its last."""

    def __init__(self, client_id: ClientId, *, turns: Turns, deadline: asyncio.Timeout, clock: Callable[[], float]):
        self._client_id = client_id
        self._turns = turns
        self._deadline = deadline
        self._clock = clock
        self._load_id: LoadId | None = None
        self._stored_bytes = 0
        self._moved_s: float | None = None
        self.is_stalled = False
        """Whether it was ended because it made no progress."""

    def note_progress(self) -> None:
        """To be called for each frame that was sent or has come."""
        self._moved_s = self._clock()

    async def wait_turn(self, size_bytes: int) -> None:
        """Before a load: waits until so many bytes may be on their way."""
        if size_bytes:
            turn = asyncio.Event()
            self._load_id = self._turns.ask_load(self._client_id, size_bytes, turn.set)
            await turn.wait()
        self.note_progress()

    def count_store(self, size_bytes: int) -> None:
        """Before a store: so many bytes are on their way."""
        if size_bytes:
            self._turns.begin_store(self._client_id, size_bytes)
            self._stored_bytes += size_bytes
        self.note_progress()

    def end_if_stalled(self, *, now_s: float, stall_s_max: float) -> None:
        """Has no effect on one that holds nothing, such as a load that waits for its turn."""
        if self._moved_s is not None and now_s - self._moved_s > stall_s_max and not self._deadline.expired():
            self.is_stalled = True
            self._deadline.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Gives back what it has taken, or waits for."""
        self._moved_s = None
        if self._load_id is not None:
            self._turns.end_load(self._load_id)
        if self._stored_bytes:
            self._turns.end_store(self._client_id, self._stored_bytes)


class OpenStreams:
    """All data streams of the daemon. One that stalls ends by its age, or sooner when others want its room."""

    def __init__(
        self, turns: Turns, *, stream_s_max: float, clock: Callable[[], float], stall_s_max: float = STALL_S_MAX
    ) -> None:
        self.stream_s_max = stream_s_max
        self._turns = turns
        self._clock = clock
        self._stall_s_max = stall_s_max
        self._open: set[Stream] = set()

    @asynccontextmanager
    async def open(self, client_id: ClientId) -> AsyncIterator[Stream]:
        """A stream of this client; raises `DeadlineExceededError` in its body when the stream must end."""
        try:
            async with asyncio.timeout(self.stream_s_max) as deadline:
                stream = Stream(client_id, turns=self._turns, deadline=deadline, clock=self._clock)
                self._open.add(stream)
                try:
                    yield stream
                finally:
                    self._open.discard(stream)
                    stream.close()
        except TimeoutError as late:
            raise DeadlineExceededError(
                f"the stream made no progress for {self._stall_s_max:g} s while others waited for their turn"
                if stream.is_stalled
                else f"the stream is older than {self.stream_s_max:g} s"
            ) from late

    def end_stalled(self) -> None:
        """Ends what makes no progress while others want its room; to be called every so often."""
        if self._turns.is_crowded:
            now_s = self._clock()
            for stream in tuple(self._open):
                stream.end_if_stalled(now_s=now_s, stall_s_max=self._stall_s_max)
