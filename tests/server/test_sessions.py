from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.messages import OwnerId
from kvstore_server.core.sessions import SessionLimits, SessionTable

LIMITS = SessionLimits(
    connections_max=8,
    connections_per_user_max=5,
    sessions_per_user_max=2,
    calls_per_session_max=2,
    buffered_bytes_per_user_max=100,
)
UIDS = (1, 2)
IDS = tuple(OwnerId(bytes([number]) * 16) for number in range(3))


def test_a_user_has_its_limits_and_leaves_room_for_others() -> None:
    table = SessionTable(LIMITS)
    assert [table.connect(1) for _ in range(5)] == [None] * 5
    assert table.connect(1) == "user 1 has 5 connections; allowed: 5"
    assert [table.connect(2) for _ in range(3)] == [None] * 3
    assert table.connect(2) == "the daemon has no room for more connections"
    assert table.open_session(IDS[0], uid=1) is None
    assert table.open_session(IDS[1], uid=1) is None
    assert table.open_session(IDS[2], uid=1) == "user 1 has 2 sessions; allowed: 2"
    assert table.open_session(IDS[2], uid=2) is None
    assert [table.join_session(IDS[0], uid=1) for _ in range(2)] == [None, None]
    assert table.join_session(IDS[0], uid=1) == "the session has 2 CALLS connections; allowed: 2"


def test_a_session_is_found_by_its_own_user_only_and_nobody_else_learns_of_it() -> None:
    table = SessionTable(LIMITS)
    for uid in UIDS:
        table.connect(uid)
    assert table.open_session(IDS[0], uid=1) is None
    assert table.join_session(IDS[0], uid=2) == table.join_session(IDS[1], uid=2)
    assert "no such session" in str(table.join_session(IDS[0], uid=2))
    assert "in use" in str(table.open_session(IDS[0], uid=2))


def test_what_is_buffered_counts_for_the_user() -> None:
    table = SessionTable(LIMITS)
    for uid in UIDS:
        table.connect(uid)
    assert table.resize_buffer(1, from_bytes=0, to_bytes=60)
    assert not table.resize_buffer(1, from_bytes=0, to_bytes=41)
    assert table.resize_buffer(2, from_bytes=0, to_bytes=100)
    assert table.resize_buffer(1, from_bytes=60, to_bytes=20)
    assert table.resize_buffer(1, from_bytes=0, to_bytes=80)


class Attached(RuleBasedStateMachine):
    """The table against lists of who is there."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SessionTable(LIMITS)
        self.idle: list[int] = []
        self.sessions: dict[OwnerId, int] = {}
        self.calls: list[OwnerId] = []

    def count(self, uid: int) -> int:
        theirs = [owner for owner in self.sessions.values() if owner == uid]
        joined = [session for session in self.calls if self.sessions[session] == uid]
        return self.idle.count(uid) + len(theirs) + len(joined)

    @rule(uid=st.sampled_from(UIDS))
    def connect(self, uid: int) -> None:
        has_room = self.count(uid) < 5 and sum(self.count(each) for each in UIDS) < 8
        assert (self.table.connect(uid) is None) == has_room
        if has_room:
            self.idle.append(uid)

    @rule(uid=st.sampled_from(UIDS))
    def leave_before_a_hello(self, uid: int) -> None:
        if uid in self.idle:
            self.idle.remove(uid)
            self.table.disconnect(uid)

    @rule(uid=st.sampled_from(UIDS), session=st.sampled_from(IDS))
    def open(self, uid: int, session: OwnerId) -> None:
        if uid not in self.idle:
            return
        may = session not in self.sessions and list(self.sessions.values()).count(uid) < 2
        assert (self.table.open_session(session, uid=uid) is None) == may
        if may:
            self.idle.remove(uid)
            self.sessions[session] = uid

    @rule(uid=st.sampled_from(UIDS), session=st.sampled_from(IDS))
    def join(self, uid: int, session: OwnerId) -> None:
        if uid not in self.idle:
            return
        may = self.sessions.get(session) == uid and self.calls.count(session) < 2
        assert (self.table.join_session(session, uid=uid) is None) == may
        if may:
            self.idle.remove(uid)
            self.calls.append(session)

    @rule(session=st.sampled_from(IDS))
    def leave(self, session: OwnerId) -> None:
        if session in self.calls:
            self.calls.remove(session)
            self.table.leave_session(session)
            self.table.disconnect(self.sessions[session])

    @rule(session=st.sampled_from(IDS))
    def close(self, session: OwnerId) -> None:
        if session in self.sessions:
            while session in self.calls:
                self.leave(session)
            uid = self.sessions.pop(session)
            self.table.close_session(session)
            self.table.disconnect(uid)

    @invariant()
    def agrees(self) -> None:
        self.table.check_invariants()
        assert self.table.session_count == len(self.sessions)
        assert self.table.connection_count == sum(self.count(uid) for uid in UIDS)


TestAttached = Attached.TestCase
