"""Slots of an agent's pool that were granted: to be filled, or to be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType

from kvstore.errors import KvstoreError, UnavailableError
from kvstore.messages import AcquireSlotsResponse, BlockState, ReserveSlotsResponse, SlotGrant
from kvstore_client.agent.session import AgentSession


class _Granted:
    """Keeps the session open until the `with` block ends."""

    session: AgentSession | None
    error: KvstoreError | None

    def __init__(self, session: AgentSession | None, *, error: KvstoreError | None) -> None:
        self.session = session
        self.error = error
        """What kept the agent from granting anything."""
        self._used = ExitStack()
        if session is not None:
            try:
                self._used.enter_context(session.used())
            except UnavailableError as closed:
                self.session, self.error = None, closed


class ReservedSlots(_Granted):
    """Room for blocks of one chain: fill, then `commit`; leaving the `with` block gives back what was not.

    `grants` says of each block whether it has a slot, is in the pool already, or is refused, and `places` which slot it
    has. Nothing may write to a slot after `commit`, or after the `with` block: a device that copies must have finished.
    """

    def __init__(
        self,
        session: AgentSession | None,
        response: ReserveSlotsResponse | None,
        *,
        block_count: int,
        commit: Callable[[int, bytes], bytes],
        error: KvstoreError | None = None,
    ) -> None:
        super().__init__(session, error=error)
        self.grants = (SlotGrant.REFUSED,) * block_count
        self._number = 0
        slots: Sequence[int] = ()
        if response is not None and self.session is not None:
            self.grants = tuple(map(SlotGrant, response.slot_grants))
            self._number, slots = response.reservation_number, response.slots
        left = iter(slots)
        self.places: tuple[int | None, ...] = tuple(
            next(left) if grant is SlotGrant.RESERVED else None for grant in self.grants
        )
        self._commit = commit
        self._is_over = not self._number

    @property
    def slots(self) -> tuple[memoryview | None, ...]:
        """Where the pool is host memory: a view per place."""
        session = self.session
        return tuple(None if place is None or session is None else session.slot(place) for place in self.places)

    def commit(self, written: Sequence[bool] | None = None) -> tuple[bool, ...]:
        """Says per block whether it is in the pool; `written`, one per block, leaves out those that were not filled.

        To be called once. All False when the agent has gone, or too much time has passed.
        """
        here = [grant is SlotGrant.PRESENT for grant in self.grants]
        if not self._is_over:
            self._is_over = True
            reserved = [index for index, place in enumerate(self.places) if place is not None]
            flags = bytes(written is None or written[index] for index in reserved)
            for index, stored in zip(reserved, self._commit(self._number, flags), strict=False):
                here[index] = bool(stored)
        return tuple(here)

    def __enter__(self) -> ReservedSlots:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._used:
            if not self._is_over:
                self.commit([False] * len(self.grants))


class AcquiredSlots(_Granted):
    """Blocks to be read where they are; leaving the `with` block lets them go.

    What was copied from them is right if `is_valid` says so afterwards: a device that copies must have finished.
    """

    def __init__(
        self,
        session: AgentSession | None,
        response: AcquireSlotsResponse | None,
        *,
        block_count: int,
        release: Callable[[int], None],
        error: KvstoreError | None = None,
    ) -> None:
        super().__init__(session, error=error)
        self.states = (BlockState.MISS,) * block_count
        self._number = 0
        slots: Sequence[int] = ()
        if response is not None and self.session is not None:
            self.states = tuple(map(BlockState, response.block_states))
            self._number, slots = response.lease_number, response.slots
        left = iter(slots)
        self.places: tuple[int | None, ...] = tuple(
            next(left) if state is BlockState.HIT else None for state in self.states
        )
        self._release = release

    @property
    def slots(self) -> tuple[memoryview | None, ...]:
        """Where the pool is host memory: a view per place."""
        session = self.session
        return tuple(None if place is None or session is None else session.slot(place) for place in self.places)

    def is_valid(self) -> bool:
        """False once the agent has taken the slots back, or has ended."""
        return self.session is not None and self.session.is_good(self._number)

    def __enter__(self) -> AcquiredSlots:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._used:
            if self._number:
                self._release(self._number)
                self._number = 0
