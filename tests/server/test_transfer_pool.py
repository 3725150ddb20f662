"""Transfer workers: real processes that serve the data port beside the daemon."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvstore.bulk import REPLY_BYTES, Direction, TransferRequest
from kvstore.keys import BlockHash, NamespaceId
from kvstore.messages import BlockState, CommitState, Ticket
from kvstore_client.paths.bulk import BulkMover
from kvstore_server.core.space import Place, SlabId
from kvstore_server.core.tenants import DEFAULT_TENANT, scoped
from kvstore_server.rpc.transfer_messages import (
    Kind,
    Message,
    MessageReader,
    decode_finish_write,
    decode_transfer,
    encode_finish_write,
    encode_transfer,
)
from kvstore_server.rpc.transfer_pool import worker_count
from kvstore_server.rpc.transfers import GrantedBlock, Landing, Transfer, TransferId
from tests.client.test_bulk import fetch_step, send_step
from tests.server.builders import HUGE, LARGE, SMALL, hashes, payload_of
from tests.server.bulk_port import LONG_S, BulkPort, read_all, read_to_end, write_stream


@pytest.fixture
def port() -> Iterator[BulkPort]:
    made = BulkPort(worker_count=2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared_port() -> Iterator[BulkPort]:
    """For tests that end no worker and use blocks of their own."""
    made = BulkPort(worker_count=2)
    yield made
    made.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.005)


def check_sent_comes_back(port: BulkPort, mover: BulkMover, *numbers: int) -> None:
    for space in (SMALL, LARGE, HUGE):
        keys = hashes(*numbers)
        assert mover.send(send_step(port.reserve(keys, space), numbers, space)) == [CommitState.COMMITTED] * len(keys)
        step, targets = fetch_step(port.lease(keys, space), keys, space)
        assert mover.fetch(step) == [BlockState.HIT] * len(keys)
        assert [bytes(target) for target in targets] == [payload_of(number, space) for number in numbers]


def test_what_is_sent_to_one_worker_comes_back_from_any(shared_port: BulkPort) -> None:
    port = shared_port
    keys = hashes(1, 2, 3)
    with contextlib.closing(BulkMover("127.0.0.1", port.port)) as mover:
        check_sent_comes_back(port, mover, 1, 2, 3)
    for _ in range(6):  # a connection each, so that both workers have some
        with contextlib.closing(BulkMover("127.0.0.1", port.port)) as mover:
            step, targets = fetch_step(port.lease(keys, HUGE), keys, HUGE)
            assert mover.fetch(step) == [BlockState.HIT] * 3
            assert bytes(targets[2]) == payload_of(3, HUGE)
    port.wait_until_nothing_is_held()


def test_corrupt_blocks_are_found_and_forged_tickets_refused_by_workers(shared_port: BulkPort) -> None:
    port = shared_port
    keys = hashes(11, 12)
    stream = bytearray(write_stream(port.reserve(keys, LARGE), (11, 12), LARGE))
    stream[-1] ^= 1
    with contextlib.closing(port.connect()) as sock:
        sock.sendall(stream)
        assert list(read_all(sock, REPLY_BYTES + 2)[REPLY_BYTES:]) == [CommitState.COMMITTED, CommitState.CORRUPT]
        sock.sendall(TransferRequest(direction=Direction.READ, ticket=Ticket(bytes(16)), block_count=1).encode())
        assert b"no such ticket" in read_to_end(sock)
    assert port.states(keys, LARGE) == [BlockState.HIT, BlockState.MISS]
    port.wait_until_nothing_is_held()


def test_an_arena_with_new_memory_is_mapped_anew(shared_port: BulkPort) -> None:
    port = shared_port
    with contextlib.closing(BulkMover("127.0.0.1", port.port)) as mover:
        check_sent_comes_back(port, mover, 21)

        def give_to_others() -> None:
            """All that is there goes, and with it the memory of all arenas."""
            for space, key in itertools.product((SMALL, LARGE, HUGE), hashes(*range(30))):
                scope = scoped(DEFAULT_TENANT, space.id)
                block = port.core.begin_read(scope, key)
                if block is not None:
                    port.core.quarantine(scope, key, block)
                    port.core.end_read(block, sent_bytes=0)
            assert not port.core.block_count
            for index in range(port.arenas.arena_count):
                port.arenas.replace(index)
                port.arenas.prefault(SlabId(index))

        port.on_loop(give_to_others)
        check_sent_comes_back(port, mover, 21)
    port.wait_until_nothing_is_held()


def test_a_killed_worker_is_replaced_and_its_transfers_hold_and_show_nothing(port: BulkPort) -> None:
    kept = port.put(100)
    before = port.on_loop(lambda: port.pool.pids)
    keys = hashes(1)
    with contextlib.closing(port.connect()) as cut:
        cut.sendall(write_stream(port.reserve(keys), (1,))[:-1])
        wait_until(lambda: port.on_loop(lambda: port.transfers.running_count) == 1)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        assert read_to_end(cut) == b""
    port.wait_until_nothing_is_held()
    assert port.states([*keys, *kept]) == [BlockState.MISS, BlockState.HIT]
    wait_until(lambda: len(set(port.on_loop(lambda: port.pool.pids)) - set(before)) == 2)
    with contextlib.closing(BulkMover("127.0.0.1", port.port)) as mover:
        check_sent_comes_back(port, mover, 1, 2)
    port.wait_until_nothing_is_held()


def test_a_worker_that_hangs_in_a_transfer_is_ended() -> None:
    port = BulkPort(worker_count=1, transfer_s_max=0.2, stall_s=0.1)
    try:
        (pid,) = port.on_loop(lambda: port.pool.pids)
        with contextlib.closing(port.connect()) as cut:
            cut.sendall(write_stream(port.reserve(hashes(1)), (1,))[:-1])
            wait_until(lambda: port.on_loop(lambda: port.transfers.running_count) == 1)
            os.kill(pid, signal.SIGSTOP)

            def is_ended() -> bool:
                port.on_loop(port.pool.sweep)
                return pid not in port.on_loop(lambda: port.pool.pids)

            wait_until(is_ended)
            port.wait_until_nothing_is_held()
    finally:
        port.close()


def test_stopping_lets_a_workers_transfer_finish(port: BulkPort) -> None:
    keys = hashes(1)
    stream = write_stream(port.reserve(keys), (1,))
    with contextlib.closing(port.connect()) as busy:
        busy.sendall(stream[:-1])
        wait_until(lambda: port.on_loop(lambda: port.transfers.running_count) == 1)
        stopping = threading.Thread(target=lambda: port.stop(grace_s=LONG_S))
        stopping.start()
        busy.sendall(stream[-1:])
        assert read_all(busy, REPLY_BYTES + 1)[REPLY_BYTES] == CommitState.COMMITTED
        stopping.join(LONG_S)
        assert not stopping.is_alive()
    assert port.states(keys) == [BlockState.HIT]


@pytest.mark.parametrize(
    ("setting", "cores", "expected"),
    [(None, 2, 0), (None, 5, 0), (None, 6, 2), (None, 8, 2), (None, 64, 4), (0, 64, 0), (3, 2, 3)],
)
def test_workers_are_as_many_as_told_or_as_the_cores_carry(setting: int | None, cores: int, expected: int) -> None:
    assert worker_count(setting, cores=cores) == expected


@pytest.mark.parametrize("piece_bytes", [1, 7, 1000])
def test_messages_come_whole_out_of_any_pieces(piece_bytes: int) -> None:
    sent = [Message(Kind.REDEEM, 1, b"r" * 40), Message(Kind.STOP, 2, b""), Message(Kind.STATES, 2**40, bytes(5000))]
    stream = b"".join(message.encode() for message in sent)
    reader = MessageReader()
    pieces = [stream[at : at + piece_bytes] for at in range(0, len(stream), piece_bytes)]
    assert [message for piece in pieces for message in reader.feed(piece)] == sent


def test_transfers_and_landings_come_back_as_they_were() -> None:
    transfer = Transfer(
        transfer_id=TransferId(7),
        namespace_id=NamespaceId(b"n" * 32),
        payload_bytes=1024,
        blocks=[GrantedBlock(BlockHash(bytes([index] * 32)), Place(index << 40), index) for index in range(3)],
    )
    assert decode_transfer(encode_transfer(transfer, {0: 1, 9: 4})) == (transfer, {0: 1, 9: 4})
    landings = [Landing(1152, CommitState.COMMITTED), Landing(0, CommitState.INCOMPLETE)]
    assert decode_finish_write(encode_finish_write(TransferId(7), landings)) == (7, landings)
    assert decode_finish_write(encode_finish_write(TransferId(7), None)) == (7, None)
