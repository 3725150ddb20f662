"""Who is attached to the slab socket, and how much of it one user may take."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.messages import OwnerId


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Small enough that a user who takes all of it leaves the daemon descriptors and memory for the others."""

    connections_max: int = 512
    """Half of the 1,024 descriptors that a process is allowed by default."""
    connections_per_user_max: int = 256
    sessions_per_user_max: int = 128
    """The kernel stops handing descriptors over when about 1,024 of them wait unread; a session holds five at most."""
    calls_per_session_max: int = 16
    buffered_bytes_per_user_max: int = 32 << 20
    """Requests that are not whole yet and responses that are not read yet; 15 of the largest."""


@dataclass(slots=True)
class _User:
    connection_count: int = 0
    session_count: int = 0
    buffered_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class _Session:
    uid: int
    calls_count: int = field(default=0)


class SessionTable:
    """Counts what is attached. Knows neither sockets nor what a session holds.

    A session belongs to the user that opened it, and no connection of another user finds it. A refusal is a text
    that says why; it tells nobody what another user has.
    """

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._users: dict[int, _User] = {}
        self._sessions: dict[OwnerId, _Session] = {}
        self._connection_count = 0

    @property
    def session_count(self) -> int:
        return len(self._sessions)

    @property
    def connection_count(self) -> int:
        return self._connection_count

    def connect(self, uid: int) -> str | None:
        """Counts a connection; returns why it is refused and not counted, if it is."""
        if self._connection_count >= self._limits.connections_max:
            return "the daemon has no room for more connections"
        user = self._users.setdefault(uid, _User())
        if user.connection_count >= self._limits.connections_per_user_max:
            return f"user {uid} has {user.connection_count} connections; allowed: {user.connection_count}"
        user.connection_count += 1
        self._connection_count += 1
        return None

    def disconnect(self, uid: int) -> None:
        user = self._users[uid]
        assert user.connection_count > 0, f"user {uid} has no connection"
        user.connection_count -= 1
        self._connection_count -= 1
        if not user.connection_count:
            assert user == _User(), f"user {uid} left something behind: {user}"
            del self._users[uid]

    def open_session(self, session_id: OwnerId, *, uid: int) -> str | None:
        user = self._users[uid]
        if session_id in self._sessions:
            return "the session id is in use; choose 16 random bytes"
        if user.session_count >= self._limits.sessions_per_user_max:
            return f"user {uid} has {user.session_count} sessions; allowed: {user.session_count}"
        user.session_count += 1
        self._sessions[session_id] = _Session(uid=uid)
        return None

    def close_session(self, session_id: OwnerId) -> None:
        """Whoever closes a session has all of its CALLS connections leave first."""
        session = self._sessions.pop(session_id)
        assert not session.calls_count, f"{session.calls_count} connections are in the session that closes"
        self._users[session.uid].session_count -= 1

    def join_session(self, session_id: OwnerId, *, uid: int) -> str | None:
        session = self._sessions.get(session_id)
        if session is None or session.uid != uid:
            return "there is no such session of this user; open its SESSION connection first"
        if session.calls_count >= self._limits.calls_per_session_max:
            return f"the session has {session.calls_count} CALLS connections; allowed: {session.calls_count}"
        session.calls_count += 1
        return None

    def leave_session(self, session_id: OwnerId) -> None:
        session = self._sessions[session_id]
        assert session.calls_count > 0, "no connection has joined the session"
        session.calls_count -= 1

    def resize_buffer(self, uid: int, *, from_bytes: int, to_bytes: int) -> bool:
        """Counts what a connection keeps in memory now; False, and nothing is counted, when its user has too much."""
        user = self._users[uid]
        buffered_bytes = user.buffered_bytes - from_bytes + to_bytes
        assert buffered_bytes >= 0, f"user {uid} gives back more than {user.buffered_bytes} bytes"
        if to_bytes > from_bytes and buffered_bytes > self._limits.buffered_bytes_per_user_max:
            return False
        user.buffered_bytes = buffered_bytes
        return True

    def check_invariants(self) -> None:
        assert self._connection_count == sum(user.connection_count for user in self._users.values())
        for uid, user in self._users.items():
            sessions = [session for session in self._sessions.values() if session.uid == uid]
            assert user.session_count == len(sessions)
            assert user.connection_count >= len(sessions) + sum(session.calls_count for session in sessions)
        assert all(session.uid in self._users for session in self._sessions.values())
