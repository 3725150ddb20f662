"""Local clients that mean no good, or have gone bad, against a real daemon.

Kinds of fault (users' reports): "one owner releases another's lease", "time to first token reveals other tenants'
prompts", "lookup pins of requests that never load stay", "one stopped peer stalls everybody".
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvstore import messages as m
from kvstore import wire
from kvstore.errors import InvalidArgumentError
from kvstore.keys import pack_hashes
from kvstore.messages import CommitState, StoreStats
from kvstore.wire import Method
from kvstore_client import Client
from kvstore_client.flows.steps import Call
from kvstore_client.grpc_transport import GrpcTransport
from tests.conftest import DaemonProcess
from tests.faults import blocks
from tests.faults.raw_slab import RawSession

ROOT = Path(__file__).resolve().parents[2]
ALICE, BOB, READER, NOBODY = 20_001, 20_002, 20_003, 20_004
"""User ids that nothing else on the machine uses."""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run clients as other users")


class PuppetError(Exception):
    """What the puppet's client raised."""


class Puppet:
    """See puppet.py."""

    def __init__(self, uid: int | None = None, *, wrapper: tuple[str, ...] = ()) -> None:
        who = "-" if uid is None else str(uid)
        self.process = subprocess.Popen(
            [*wrapper, sys.executable, "-m", "tests.faults.puppet", who],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        self._read()

    def ask(self, do: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the puppet has died"
        answer = json.loads(line)
        if "error" in answer:
            raise PuppetError(answer["error"])
        return answer["ok"]


Play = Callable[..., Puppet]


@pytest.fixture
def play() -> Iterator[Play]:
    puppets: list[Puppet] = []

    def start(uid: int | None = None, *, path: Path | None = None, access: str = "WRITE") -> Puppet:
        """A puppet, attached if there is a path."""
        puppet = Puppet(uid)
        puppets.append(puppet)
        if path is not None:
            puppet.ask("attach", path=str(path), access=access)
        return puppet

    yield start
    for puppet in puppets:
        puppet.close()


@pytest.fixture(scope="module")
def tenants(start_daemon: Callable[..., DaemonProcess]) -> Iterator[tuple[DaemonProcess, Path]]:
    """A daemon of two tenants that may write and one that may only read, and its slab socket, which all can reach."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    path = folder / "s.slab"
    config = folder / "kvstore.yaml"
    config.write_text(
        f"slab: {{socket_path: {path}}}\n"
        "memory: {slab_size: 2MiB, pages: plain}\n"
        "tenants:\n"
        f"  - {{name: alice, uids: [{ALICE}]}}\n"
        f"  - {{name: bob, uids: [{BOB}]}}\n"
        f"  - {{name: reader, uids: [{READER}], access: read}}\n"
    )
    yield start_daemon("--config", str(config)), path
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def shared(start_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    """For tests that leave nothing in it but blocks."""
    return start_daemon()


def wait_for_stats(daemon: DaemonProcess, condition: Callable[[StoreStats], bool]) -> StoreStats:
    deadline_s = time.monotonic() + 20
    with Client(daemon.address) as client:
        while not condition(stats := client.stats()):
            assert time.monotonic() < deadline_s, f"it does not come to that: {stats}"
            time.sleep(0.01)
    return stats


# --- tenants


@as_root
def test_a_tenant_finds_nothing_of_anothers(tenants: tuple[DaemonProcess, Path], play: Play) -> None:
    _, path = tenants
    alice, bob = play(ALICE, path=path), play(BOB, path=path)
    assert set(alice.ask("put", chain=1)) == {"COMMITTED"}
    bob.ask("open")
    assert set(bob.ask("lookup", chain=1)) == {"MISS"} == set(bob.ask("lookup", chain=2))
    assert bob.ask("get", chain=1) == []
    assert set(bob.ask("put", chain=1)) == {"COMMITTED"}
    theirs, ours = alice.ask("arenas"), bob.ask("arenas")
    assert theirs
    assert ours
    assert not set(theirs) & set(ours)
    assert alice.ask("get", chain=1) == bob.ask("get", chain=1) == [True] * blocks.CHAIN_BLOCKS


@as_root
def test_a_session_is_of_no_use_to_another_user(tenants: tuple[DaemonProcess, Path], play: Play) -> None:
    _, path = tenants
    alice, bob = play(ALICE), play(BOB, path=path)
    session_id = alice.ask("attach", path=str(path), access="WRITE")
    with pytest.raises(PuppetError, match="no such session of this user"):
        bob.ask("join", path=str(path), session_id=session_id)
    alice.ask("join", path=str(path), session_id=session_id)


@as_root
def test_who_is_in_no_tenant_is_turned_away(tenants: tuple[DaemonProcess, Path], play: Play) -> None:
    with pytest.raises(PuppetError, match=f"user {NOBODY} may not use this store"):
        play(NOBODY, path=tenants[1])


@as_root
def test_without_tenants_no_other_user_gets_to_the_socket(shared: DaemonProcess, play: Play) -> None:
    shared.slab_path.parent.chmod(0o755)
    with pytest.raises(PuppetError, match="PermissionError"):
        play(ALICE, path=shared.slab_path)


@as_root
def test_a_reader_can_change_nothing_of_an_arena(tenants: tuple[DaemonProcess, Path], play: Play) -> None:
    reader = play(READER, path=tenants[1])
    assert reader.ask("granted") == "READ"
    reader.ask("open")
    with pytest.raises(PuppetError, match="access WRITE"):
        reader.ask("reserve", chain=3)
    reader.ask("reserve", chain=3, path="STREAM")  # so that an arena is this tenant's
    (arena,) = reader.ask("arenas")
    assert reader.ask("break_into", index=arena) == {
        "write": "Bad file descriptor",
        "map writable": "Permission denied",
        "make mapping writable": "Permission denied",
        "reopen writable": "Permission denied",
        "chmod": "Operation not permitted",
        "shrink": "Invalid argument",
        "grow": "Invalid argument",
    }


@as_root
def test_a_writer_cannot_take_the_memory_away(tenants: tuple[DaemonProcess, Path], play: Play) -> None:
    alice = play(ALICE, path=tenants[1])
    alice.ask("put", chain=4)
    for arena in alice.ask("arenas"):
        outcomes = alice.ask("break_into", index=arena)
        assert outcomes["shrink"] == outcomes["grow"] == outcomes["chmod"] == "Operation not permitted"
        assert outcomes["reopen writable"] == "Permission denied"
    assert alice.ask("get", chain=4) == [True] * blocks.CHAIN_BLOCKS


@as_root
def test_a_user_that_takes_all_its_connections_keeps_nobody_else_out(
    tenants: tuple[DaemonProcess, Path], play: Play
) -> None:
    _, path = tenants
    hog = play(BOB)
    hog.ask("connect", path=str(path), count=300)
    with pytest.raises(PuppetError, match="allowed: 256"):
        hog.ask("attach", path=str(path), access="READ")
    assert set(play(ALICE, path=path).ask("put", chain=5)) == {"COMMITTED"}


# --- sessions of one user


def test_no_session_touches_what_another_holds(shared: DaemonProcess) -> None:
    """Ids of leases and reservations can be guessed; the session id that they belong to cannot."""
    with RawSession(shared.slab_path) as victim, RawSession(shared.slab_path) as thief:
        stored = {one: blocks.enveloped(blocks.SMALL, one) for one in blocks.chain(1)}
        victim.put(blocks.SMALL, stored)
        leased, _ = victim.calls.lease(blocks.SMALL, blocks.chain(1), owner_id=victim.id)
        reserved, _ = victim.calls.reserve(blocks.SMALL, blocks.chain(2), owner_id=victim.id)
        lease_id, reservation_ids = leased.lease_id, tuple(one for one in reserved.reservation_ids if one is not None)
        assert lease_id is not None
        before = thief.calls.stats()

        release = m.ReleaseLeasesRequest(owner_id=thief.id, lease_ids=(lease_id,))
        assert thief.calls.call(wire.RELEASE_LEASES, release).released == (False,)
        renew = m.RenewLeasesRequest(owner_id=thief.id, lease_ids=(lease_id,), lease_s=600.0)
        assert thief.calls.call(wire.RENEW_LEASES, renew).renewed == (False,)
        assert set(thief.calls.commit(reservation_ids, owner_id=thief.id)) == {CommitState.EXPIRED}
        abort = m.AbortReservationsRequest(owner_id=thief.id, reservation_ids=reservation_ids)
        assert thief.calls.call(wire.ABORT_RESERVATIONS, abort).aborted_count == 0
        for take in (thief.calls.lease, thief.calls.reserve):
            with pytest.raises(InvalidArgumentError, match="owner_id"):
                take(blocks.SMALL, blocks.chain(3), owner_id=victim.id)

        after = thief.calls.stats()
        assert (after.lease_count, after.reservation_count) == (before.lease_count, before.reservation_count)
        assert before.reservation_count == len(reservation_ids) > 0
        assert before.lease_count == 1


@pytest.mark.parametrize(("way", "chain"), [("gRPC", 11), ("another session", 12)])
def test_a_sessions_id_that_got_known_opens_nothing_of_it(shared: DaemonProcess, way: str, chain: int) -> None:
    with RawSession(shared.slab_path) as victim, RawSession(shared.slab_path) as thief, ExitStack() as stack:
        grpc = stack.enter_context(contextlib.closing(GrpcTransport(shared.address)))

        def ask(method: Method[Any, Any], request: Any) -> Any:
            if way == "gRPC":
                return grpc.carry_out(Call(method=method, request=request, timeout_s=20.0))
            return thief.calls.call(method, request)

        victim.calls.open(blocks.SMALL)
        reserved, _ = victim.calls.reserve(blocks.SMALL, blocks.chain(13), owner_id=victim.id)
        reservation_ids = tuple(one for one in reserved.reservation_ids if one is not None)
        stored = {one: blocks.enveloped(blocks.SMALL, one) for one in blocks.chain(chain)}
        victim.put(blocks.SMALL, stored)
        leased, _ = victim.calls.lease(blocks.SMALL, list(stored), owner_id=victim.id)
        assert leased.lease_id is not None
        before = victim.calls.stats()

        release = m.ReleaseLeasesRequest(owner_id=victim.id, lease_ids=(leased.lease_id,))
        assert ask(wire.RELEASE_LEASES, release).released == (False,)
        renew = m.RenewLeasesRequest(owner_id=victim.id, lease_ids=(leased.lease_id,), lease_s=600.0)
        assert ask(wire.RENEW_LEASES, renew).renewed == (False,)
        commit = m.CommitBlocksRequest(owner_id=victim.id, reservation_ids=reservation_ids, in_slots=True)
        assert set(ask(wire.COMMIT_BLOCKS, commit).commit_states) == {CommitState.EXPIRED}
        abort = m.AbortReservationsRequest(owner_id=victim.id, reservation_ids=reservation_ids)
        assert ask(wire.ABORT_RESERVATIONS, abort).aborted_count == 0
        named = {"namespace_id": blocks.SMALL.id, "owner_id": victim.id, "block_hashes": pack_hashes(blocks.chain(14))}
        for method, request in (
            (wire.LEASE_BLOCKS, m.LeaseBlocksRequest(**named, lease_s=60.0, path=m.TransferPath.BULK)),
            (wire.RESERVE_BLOCKS, m.ReserveBlocksRequest(**named, reservation_s=60.0)),
            (wire.ACQUIRE_PREFIX, m.AcquirePrefixRequest(**named, lease_s=60.0)),
        ):
            with pytest.raises(InvalidArgumentError, match=r"^owner_id .* no other session's"):
                ask(method, request)

        after = victim.calls.stats()
        assert (after.lease_count, after.reservation_count) == (before.lease_count, before.reservation_count)
        assert before.reservation_count == len(reservation_ids) > 0
        assert set(victim.calls.call(wire.RELEASE_LEASES, release).released) == {True}
        assert victim.calls.call(wire.ABORT_RESERVATIONS, abort).aborted_count == len(reservation_ids)


def test_a_killed_client_leaves_nothing_behind(daemon: DaemonProcess, play: Play) -> None:
    client = play(path=daemon.slab_path)
    client.ask("put", chain=1)
    client.ask("get", chain=1)
    client.ask("reserve", chain=2)
    client.ask("wait", chain=2, wait_s=60.0)
    held = wait_for_stats(daemon, lambda stats: True)
    assert (held.lease_count, held.reservation_count) == (1, blocks.CHAIN_BLOCKS)
    client.process.kill()
    left = wait_for_stats(daemon, lambda stats: not stats.lease_count and not stats.reservation_count)
    assert left.block_count == blocks.CHAIN_BLOCKS
    assert left.used_bytes == held.used_bytes // 2


def test_a_stopped_client_that_reads_nothing_costs_nobody_else_anything(daemon: DaemonProcess, play: Play) -> None:
    stopped, other = play(path=daemon.slab_path), play(path=daemon.slab_path)
    stopped.ask("put", chain=1)
    stopped.ask("get", chain=1)
    assert stopped.ask("flood") > 10_000
    os.kill(stopped.process.pid, signal.SIGSTOP)
    for chain in range(2, 22):
        assert set(other.ask("put", chain=chain)) == {"COMMITTED"}
        assert other.ask("get", chain=chain) == [True] * blocks.CHAIN_BLOCKS
    assert wait_for_stats(daemon, lambda stats: True).lease_count == 21  # its lease is its own until it ends
    stopped.process.kill()
    wait_for_stats(daemon, lambda stats: stats.lease_count == 20)


def test_a_writer_that_wakes_up_late_spoils_nobodys_block(
    start_daemon: Callable[..., DaemonProcess], play: Play
) -> None:
    """Others have filled the store twice since; what it writes goes into slots that nobody else was given."""
    daemon = start_daemon("--memory-capacity", "8MiB")
    late, other = play(path=daemon.slab_path), play(path=daemon.slab_path)
    late.ask("open")
    reservation_ids = late.ask("reserve", chain=1, reservation_s=0.5)
    os.kill(late.process.pid, signal.SIGSTOP)
    wait_for_stats(daemon, lambda stats: not stats.reservation_count)
    for chain in range(1, 80):
        assert set(other.ask("put", chain=chain)) == {"COMMITTED"}
    assert wait_for_stats(daemon, lambda stats: True).evicted_count > 200
    os.kill(late.process.pid, signal.SIGCONT)
    late.ask("scribble")
    assert late.ask("commit", reservation_ids=reservation_ids) == ["EXPIRED"] * blocks.CHAIN_BLOCKS
    found = [right for chain in range(1, 80) for right in other.ask("get", chain=chain)]
    assert len(found) > 150
    assert all(found)


def test_flooding_with_calls_holds_up_nobody(shared: DaemonProcess, play: Play) -> None:
    flooding = [play(path=shared.slab_path) for _ in range(2)]
    for puppet in flooding:
        puppet.ask("open")
        puppet.ask("flood")
    with RawSession(shared.slab_path) as session:
        stored = {one: blocks.enveloped(blocks.SMALL, one) for one in blocks.chain(9)}
        assert set(session.put(blocks.SMALL, stored)) == {CommitState.COMMITTED}
        assert session.get(blocks.SMALL, blocks.chain(9)) == list(stored.values())
