"""A node's agent as engines use it: blocks in VRAM, which the engine's own process copies in and out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvstore import messages as m
from kvstore import wire
from kvstore.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    KvstoreError,
    ProtocolError,
    UnavailableError,
)
from kvstore.keys import BlockHash, NamespaceId, pack_hashes
from kvstore.messages import BlockState
from kvstore.namespace import Namespace
from kvstore.wire import Method
from kvstore_client.agent.address import named_agent, present_agent
from kvstore_client.agent.calls import AgentCalls
from kvstore_client.agent.grants import AcquiredSlots, ReservedSlots
from kvstore_client.agent.session import AgentSession
from kvstore_client.breaker import Admission, Breaker

_LOG = logging.getLogger("kvstore.agent")

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentClientConfig:
    """Settings of an engine's side of an agent; the defaults need no change."""

    quota_bytes: int = 0
    """Bytes of the pool of each namespace; 0: what the agent's operator has said, else what is left."""
    namespace_count: int = 1
    """Namespaces that this engine opens: with `quota_bytes` 0 they share what is left evenly."""
    control_timeout_s: float = 1.0
    """Seconds for a call that waits for nothing, opening a namespace included."""
    rate_min_bytes_per_s: int = 32 << 20
    """Bytes per second below which room for blocks is no longer waited for; that of `ClientConfig`."""
    refused_pause_s: float = 10.0
    """Seconds after which a namespace that found no room is tried again."""
    cooldown_initial_s: float = 0.25
    """Seconds without calls after the agent did not answer; doubles with each time that follows soon."""
    cooldown_max_s: float = 5.0
    """Seconds that this grows to, so also the longest time to notice that the agent is back."""

    def __post_init__(self) -> None:
        for name in ("control_timeout_s", "rate_min_bytes_per_s", "cooldown_initial_s", "cooldown_max_s"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise InvalidArgumentError.of(name, value, "a finite number above 0")
        if not 1 <= self.namespace_count <= 1024:
            raise InvalidArgumentError.of("namespace_count", self.namespace_count, "1 to 1024")
        if not 0 <= self.quota_bytes < 1 << 63:
            raise InvalidArgumentError.of("quota_bytes", self.quota_bytes, "bytes, or 0 for what is left")


class AgentClient:
    """Grants of slots from the agent of this node. For many threads.

    Every call ends by its deadline, and whatever happens to the agent reads as blocks that are not there and as slots
    that are not to be had. It attaches at the first call for a namespace, and by itself again after the agent was
    restarted; that an agent does not serve, and that it does again, is logged once each.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        config: AgentClientConfig = AgentClientConfig(),
        log: logging.Logger = _LOG,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`address` None: `$KVSTORE_AGENT_ADDRESS`, else the node's own socket as soon as there is one."""
        self._named_address = named_agent(address, field="address")
        self._config = config
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: tuple[str, AgentCalls] | None = None
        self._sessions: dict[NamespaceId, AgentSession] = {}
        self._refused_until_s: dict[NamespaceId, float] = {}
        self._breaker = Breaker(
            failure_count_max=1, cooldown_initial_s=config.cooldown_initial_s, cooldown_max_s=config.cooldown_max_s
        )
        self._has_served = False
        self._is_in_trouble = False
        self._is_closed = False

    def find(self, namespace: Namespace, hashes: Sequence[BlockHash]) -> tuple[bool, ...]:
        """Which blocks are in the pool now. Attaches to nothing."""
        states = b""
        try:
            for start in range(0, len(hashes), m.BATCH_COUNT_MAX):
                packed = pack_hashes(hashes[start : start + m.BATCH_COUNT_MAX])
                request = m.FindBlocksRequest(namespace_id=namespace.id, block_hashes=packed)
                states += self._call(wire.FIND_BLOCKS, request).block_states
        except KvstoreError:
            pass  # what is known until then
        return tuple(state == BlockState.HIT for state in states.ljust(len(hashes), b"\0"))

    def touch(self, namespace: Namespace, hashes: Sequence[BlockHash], *, step_count: int = 0) -> int | None:
        """Counts a use of blocks, and engine steps; the step, or None when the agent does not say."""
        request = m.TouchBlocksRequest(
            block_hashes=pack_hashes(hashes), step_count=step_count, namespace_id=namespace.id
        )
        try:
            return self._call(wire.TOUCH_BLOCKS, request).step
        except KvstoreError:
            return None

    def tell_steps(self, namespace: Namespace, step_count: int) -> None:
        """Engine steps have passed; never waits."""
        calls = self._calls
        if calls is not None and namespace.id in self._sessions:
            request = m.TouchBlocksRequest(block_hashes=b"", step_count=step_count, namespace_id=namespace.id)
            calls[1].post(wire.TOUCH_BLOCKS, request, timeout_s=self._config.control_timeout_s)

    def batch_count_max(self, namespace: Namespace) -> int:
        """Most blocks of one `reserve` or `acquire`; 0: nobody is attached."""
        session = self._find_session(namespace)
        return 0 if session is None else session.opened.batch_count_max

    def reserve(
        self, namespace: Namespace, hashes: Sequence[BlockHash], *, parent_hash: BlockHash | None = None
    ) -> ReservedSlots:
        """Slots for blocks of one chain, distinct ones, in order."""
        session, response, error = self._find_session(namespace), None, None
        if session is not None:
            request = m.ReserveSlotsRequest(
                session_id=session.id,
                block_hashes=pack_hashes(hashes[: session.opened.batch_count_max]),
                parent_hash=parent_hash or b"",
            )
            size_bytes = len(hashes) * session.opened.block_bytes
            timeout_s = 2 * self._config.control_timeout_s + size_bytes / self._config.rate_min_bytes_per_s
            try:
                response = self._call(wire.RESERVE_SLOTS, request, timeout_s=timeout_s, session=session)
            except KvstoreError as failure:
                session, error = None, failure
            else:
                _check_count(response.slot_grants, len(hashes), session)
                grants = response.slot_grants.ljust(len(hashes), bytes([m.SlotGrant.REFUSED]))
                response = m.ReserveSlotsResponse(
                    slot_grants=grants, slots=response.slots, reservation_number=response.reservation_number
                )
        return ReservedSlots(
            session, response, block_count=len(hashes), commit=partial(self._commit, session), error=error
        )

    def acquire(
        self,
        namespace: Namespace,
        hashes: Sequence[BlockHash],
        *,
        parent_hash: BlockHash | None = None,
        wait_s: float = 0.0,
    ) -> AcquiredSlots:
        """Blocks of one chain, distinct ones, in order, in their slots; waits so long for those the agent must load."""
        session, response, error = self._find_session(namespace), None, None
        if session is not None:
            request = m.AcquireSlotsRequest(
                session_id=session.id,
                block_hashes=pack_hashes(hashes[: session.opened.batch_count_max]),
                parent_hash=parent_hash or b"",
                wait_s=wait_s,
                released_lease_numbers=tuple(session.released),
            )
            timeout_s = wait_s + self._config.control_timeout_s
            try:
                response = self._call(wire.ACQUIRE_SLOTS, request, timeout_s=timeout_s, session=session)
            except KvstoreError as failure:
                session, error = None, failure
            else:
                _check_count(response.block_states, len(hashes), session)
                response = m.AcquireSlotsResponse(
                    block_states=response.block_states.ljust(len(hashes), bytes([BlockState.MISS])),
                    slots=response.slots,
                    lease_number=response.lease_number,
                )
        return AcquiredSlots(
            session, response, block_count=len(hashes), release=partial(self._release, session), error=error
        )

    def give_up(self, session: AgentSession, error: KvstoreError) -> None:
        """The caller cannot use the pool that it is attached to; the agent is asked again after a while."""
        self._drop(session)
        with self._lock:
            self._note_refusal(session.namespace, error)

    def status(self) -> m.AgentStatus:
        """Raises `KvstoreError` when no agent answers in time."""
        return self._call(wire.GET_AGENT_STATUS, m.GetAgentStatusRequest())

    def close(self) -> None:
        """Gives back all that is held, once no copy is under way. Closing twice changes nothing."""
        with self._lock:
            self._is_closed = True
            sessions, self._sessions = self._sessions, {}
            calls, self._calls = self._calls, None
        for session in sessions.values():
            session.close()
        if calls is not None:
            calls[1].close()

    # --- sessions

    def _find_session(self, namespace: Namespace) -> AgentSession | None:
        """The living session of a namespace, attached if need be; None where there is none to be had now."""
        with self._lock:
            session = self._sessions.get(namespace.id)
            if session is not None and session.is_alive():
                return session
            if session is not None:
                del self._sessions[namespace.id]
                session.close()
            if self._is_closed or self._clock() < self._refused_until_s.get(namespace.id, 0.0):
                return None
            try:
                session = self._attach(namespace)
            except KvstoreError as error:
                self._note_refusal(namespace, error)
                return None
            self._sessions[namespace.id] = session
            return session

    def _attach(self, namespace: Namespace) -> AgentSession:
        further_count = max(0, self._config.namespace_count - len(self._sessions) - 1)
        opened: m.OpenAgentNamespaceResponse = self._ask(
            wire.OPEN_AGENT_NAMESPACE,
            m.OpenAgentNamespaceRequest(
                namespace=namespace, quota_bytes=self._config.quota_bytes, further_count=further_count
            ),
            # The pool is allocated now, and its pages taken: about a second per GiB.
            timeout_s=10 * self._config.control_timeout_s,
        )
        if not opened.attach_socket:
            raise ProtocolError("this agent hands out no memory: it has no socket (--socket-path)")
        if opened.block_bytes != namespace.block_layout.payload_bytes:
            raise ProtocolError(
                f"the agent has slots of {opened.block_bytes} bytes; blocks have {namespace.block_layout.payload_bytes}"
            )
        return AgentSession(namespace, opened, timeout_s=self._config.control_timeout_s)

    def _note_refusal(self, namespace: Namespace, error: KvstoreError) -> None:
        if isinstance(error, (UnavailableError, DeadlineExceededError)):
            return  # the breaker's
        is_new = namespace.id not in self._refused_until_s
        self._refused_until_s[namespace.id] = self._clock() + self._config.refused_pause_s
        if is_new:
            self._log.warning("the agent keeps no blocks of %s in VRAM: %s", namespace.model, error)

    def _drop(self, session: AgentSession) -> None:
        with self._lock:
            if self._sessions.get(session.namespace.id) is session:
                del self._sessions[session.namespace.id]
        session.close()

    def _commit(self, session: AgentSession | None, number: int, written: bytes) -> bytes:
        if session is None:
            return b""
        request = m.CommitSlotsRequest(session_id=session.id, reservation_number=number, written=written)
        try:
            return self._call(wire.COMMIT_SLOTS, request, session=session).stored
        except KvstoreError:
            # The agent may not have heard of it: what is reserved goes back with the session.
            self._drop(session)
            return b""

    def _release(self, session: AgentSession | None, number: int) -> None:
        """Never waits; the next call that wants slots tells it again, in case it is the first to arrive."""
        calls = self._calls
        if session is not None and calls is not None:
            session.released.append(number)
            request = m.ReleaseSlotsRequest(session_id=session.id, lease_numbers=(number,))
            calls[1].post(wire.RELEASE_SLOTS, request, timeout_s=self._config.control_timeout_s)

    # --- calls

    def _call(
        self,
        method: Method[_Request, _Response],
        request: _Request,
        *,
        timeout_s: float | None = None,
        session: AgentSession | None = None,
    ) -> _Response:
        try:
            return self._ask(method, request, timeout_s=timeout_s or self._config.control_timeout_s)
        except (UnavailableError, DeadlineExceededError):
            if session is not None:
                self._drop(session)
            raise

    def _ask(self, method: Method[_Request, _Response], request: _Request, *, timeout_s: float) -> _Response:
        admission = self._breaker.admit(now_s=self._clock())
        if admission is Admission.REFUSED:
            raise UnavailableError("the agent did not answer a moment ago")
        try:
            response = self._open_calls().call(method, request, timeout_s=timeout_s)
        except (UnavailableError, DeadlineExceededError) as error:
            is_timeout = isinstance(error, DeadlineExceededError)
            self._breaker.record_failure(admission, now_s=self._clock(), is_timeout=is_timeout)
            self._note_trouble(error)
            raise
        except KvstoreError:
            self._breaker.record_success()
            raise
        self._breaker.record_success()
        self._note_service()
        return response

    def _open_calls(self) -> AgentCalls:
        known = self._calls
        address = self._named_address or (known[0] if known is not None else present_agent())
        if address is None:
            raise UnavailableError("no agent has its socket on this node")
        if known is None:
            if self._is_closed:
                raise UnavailableError("the client is closed")
            known = self._calls = (address, AgentCalls(address))
        return known[1]

    def _note_trouble(self, error: KvstoreError) -> None:
        """That there never was an agent is no trouble."""
        if not self._is_in_trouble and (self._has_served or self._named_address is not None):
            self._is_in_trouble = True
            self._log.warning(
                "the agent does not serve this engine, which goes on without it and asks again: %s", error
            )

    def _note_service(self) -> None:
        self._has_served = True
        if self._is_in_trouble:
            self._is_in_trouble = False
            self._log.info("the agent serves this engine again")


def _check_count(found: bytes, count: int, session: AgentSession) -> None:
    expected_count = min(count, session.opened.batch_count_max)
    if len(found) != expected_count:
        raise ProtocolError(f"the agent has answered for {len(found)} blocks of {expected_count}")
