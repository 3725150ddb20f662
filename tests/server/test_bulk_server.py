"""The data port against clients that do it right, and all kinds that do not."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from kvstore.bulk import (
    BLOCK_HEADER_BYTES,
    REPLY_BYTES,
    REQUEST_BYTES,
    BlockHeader,
    BulkStatus,
    Direction,
    TransferReply,
    TransferRequest,
)
from kvstore.envelope import ENVELOPE_BYTES
from kvstore.messages import BlockState, CommitState, Ticket
from kvstore.namespace import Namespace
from tests.server.builders import BOB, HUGE, LARGE, SMALL, block_hash, enveloped, enveloped_bytes, hashes
from tests.server.bulk_port import (
    LONG_S,
    BulkPort,
    read_all,
    read_request,
    read_to_end,
    write_stream,
)


@pytest.fixture
def port() -> Iterator[BulkPort]:
    made = BulkPort()
    yield made
    made.close()


def refusal_of(data: bytes, *, status: BulkStatus = BulkStatus.REFUSED) -> str:
    reply = TransferReply.decode(data[:REPLY_BYTES])
    assert reply.status is status
    assert len(data) == REPLY_BYTES + reply.following_bytes
    return data[REPLY_BYTES:].decode()


def test_what_was_written_is_read_again_over_one_connection(port: BulkPort) -> None:
    with contextlib.closing(port.connect()) as sock:
        for numbers in ((1, 2, 3), (4,)):
            keys = hashes(*numbers)
            sock.sendall(write_stream(port.reserve(keys), numbers))
            written = read_all(sock, REPLY_BYTES + len(numbers))
            assert TransferReply.decode(written[:REPLY_BYTES]) == (BulkStatus.OK, len(numbers), len(numbers))
            assert written[REPLY_BYTES:] == bytes([CommitState.COMMITTED]) * len(numbers)
            sock.sendall(read_request(port.lease(keys), len(numbers)))
            following_bytes = len(numbers) * (BLOCK_HEADER_BYTES + enveloped_bytes(SMALL))
            read = read_all(sock, REPLY_BYTES + following_bytes)
            assert TransferReply.decode(read[:REPLY_BYTES]) == (BulkStatus.OK, len(numbers), following_bytes)
            assert read[REPLY_BYTES:] == b"".join(
                BlockHeader(index, enveloped_bytes(SMALL)).encode() + enveloped(number)
                for index, number in enumerate(numbers)
            )
            port.wait_until_nothing_is_held()


@pytest.mark.parametrize("space", [LARGE, HUGE], ids=["LARGE", "HUGE"])
def test_large_blocks_are_verified_beside_the_stream(port: BulkPort, space: Namespace) -> None:
    keys = hashes(1, 2, 3)
    stream = bytearray(write_stream(port.reserve(keys, space), (1, 2, 3), space))
    stream[-1] ^= 1
    with contextlib.closing(port.connect()) as sock:
        sock.sendall(stream)
        states = read_all(sock, REPLY_BYTES + 3)[REPLY_BYTES:]
    assert list(states) == [CommitState.COMMITTED, CommitState.COMMITTED, CommitState.CORRUPT]
    assert port.states(keys, space) == [BlockState.HIT, BlockState.HIT, BlockState.MISS]
    port.wait_until_nothing_is_held()


def test_a_ticket_that_was_forged_or_used_is_refused_with_a_reason(port: BulkPort) -> None:
    keys = port.put(1)
    used = port.lease(keys)
    with contextlib.closing(port.connect()) as sock:
        sock.sendall(read_request(used, 1))
        read_all(sock, REPLY_BYTES + BLOCK_HEADER_BYTES + enveloped_bytes(SMALL))
    for ticket in (used, Ticket(bytes(16))):
        with contextlib.closing(port.connect()) as sock:
            sock.sendall(read_request(ticket, 1))
            assert "no such ticket" in refusal_of(read_to_end(sock))
    port.wait_until_nothing_is_held()


def test_a_ticket_of_the_other_direction_is_refused_and_void(port: BulkPort) -> None:
    read_ticket, write_ticket = port.lease(port.put(1)), port.reserve(hashes(2))
    with contextlib.closing(port.connect()) as sock:
        sock.sendall(write_stream(read_ticket, (1,))[:REQUEST_BYTES])
        assert "for a READ of 1 blocks, not a WRITE of 1" in refusal_of(read_to_end(sock))
    with contextlib.closing(port.connect()) as sock:
        sock.sendall(read_request(write_ticket, 1))
        assert "for a WRITE of 1 blocks, not a READ of 1" in refusal_of(read_to_end(sock))
    assert port.states(hashes(1, 2)) == [BlockState.HIT, BlockState.MISS]
    port.wait_until_nothing_is_held()


def test_a_write_cut_anywhere_leaks_nothing_and_shows_nothing(port: BulkPort) -> None:
    keys = hashes(1, 2)
    whole_bytes = len(write_stream(Ticket(bytes(16)), (1, 2)))
    block_bytes = BLOCK_HEADER_BYTES + enveloped_bytes(SMALL)
    marks = [0, REQUEST_BYTES, REQUEST_BYTES + BLOCK_HEADER_BYTES, REQUEST_BYTES + BLOCK_HEADER_BYTES + ENVELOPE_BYTES]
    marks += [REQUEST_BYTES + block_bytes, REQUEST_BYTES + block_bytes + BLOCK_HEADER_BYTES, whole_bytes - 1]
    cuts = sorted({mark + offset for mark in marks for offset in (-1, 0, 1, 7)} & set(range(whole_bytes)))
    assert len(cuts) > 20
    for cut_bytes in cuts:
        ticket = port.reserve(keys)
        with contextlib.closing(port.connect()) as sock:
            sock.sendall(write_stream(ticket, (1, 2))[:cut_bytes])
        if cut_bytes < REQUEST_BYTES:
            # Nobody has come for the ticket; it is used here instead of waiting for its end.
            with contextlib.closing(port.connect()) as sock:
                sock.sendall(read_request(ticket, 2))
                read_to_end(sock)
        port.wait_until_nothing_is_held()
        assert port.states(keys) == [BlockState.MISS] * 2, f"cut after {cut_bytes} bytes"


def test_a_read_cut_anywhere_leaks_nothing(port: BulkPort) -> None:
    keys = port.put(1, 2, 3, 4, namespace=LARGE)
    block_bytes = BLOCK_HEADER_BYTES + enveloped_bytes(LARGE)
    for taken_bytes in (0, 1, REPLY_BYTES, REPLY_BYTES + 1, REPLY_BYTES + block_bytes, REPLY_BYTES + 3 * block_bytes):
        with contextlib.closing(port.connect(receive_buffer_bytes=4096)) as sock:
            sock.sendall(read_request(port.lease(keys, LARGE), 4))
            assert len(read_all(sock, taken_bytes)) == taken_bytes
        port.wait_until_nothing_is_held()


def test_any_changed_byte_of_a_write_is_noticed(port: BulkPort) -> None:
    """Each byte of request, block header and envelope, and some of the payload, is flipped in a write of its own."""
    block_bytes = BLOCK_HEADER_BYTES + enveloped_bytes(SMALL)
    head_bytes = REQUEST_BYTES + BLOCK_HEADER_BYTES + ENVELOPE_BYTES
    # Of the second block only the header: that what follows a damaged one is no longer believed, either.
    flips = [*range(head_bytes), head_bytes, head_bytes + 500, REQUEST_BYTES + block_bytes - 1]
    flips += range(REQUEST_BYTES + block_bytes, REQUEST_BYTES + block_bytes + BLOCK_HEADER_BYTES)
    for at in flips:
        numbers = (2 * at + 1, 2 * at + 2)
        keys = [block_hash(number) for number in numbers]
        ticket = port.reserve(keys)
        stream = bytearray(write_stream(ticket, numbers))
        stream[at] ^= 0x40
        with contextlib.closing(port.connect()) as sock:
            with contextlib.suppress(OSError):  # cut off already
                sock.sendall(stream)
                sock.shutdown(socket.SHUT_WR)
            answer = read_to_end(sock)
        states = port.states(keys)
        is_ticket_unused = at < REQUEST_BYTES
        if is_ticket_unused:
            with contextlib.closing(port.connect()) as sock:
                sock.sendall(read_request(ticket, 2))
                read_to_end(sock)
        port.wait_until_nothing_is_held()
        if REQUEST_BYTES + BLOCK_HEADER_BYTES <= at < REQUEST_BYTES + block_bytes:
            # A damaged block is its own misfortune.
            assert answer[-2] in (CommitState.CORRUPT, CommitState.INCOMPLETE), f"byte {at}: {answer!r}"
            assert states[0] is not BlockState.HIT, f"byte {at}"
        else:
            assert not answer or TransferReply.decode(answer[:REPLY_BYTES]).status is BulkStatus.REFUSED, f"byte {at}"
            assert BlockState.HIT not in states, f"byte {at}"


@pytest.mark.parametrize("size_bytes", [0, 1, ENVELOPE_BYTES, enveloped_bytes(SMALL) - 1, enveloped_bytes(SMALL) + 1])
def test_a_block_of_another_size_is_not_stored(port: BulkPort, size_bytes: int) -> None:
    keys = hashes(1)
    block = (enveloped(1) + b"x")[:size_bytes]
    request = TransferRequest(
        direction=Direction.WRITE,
        ticket=port.reserve(keys),
        block_count=1,
        following_bytes=BLOCK_HEADER_BYTES + size_bytes,
    )
    with contextlib.closing(port.connect()) as sock:
        sock.sendall(request.encode() + BlockHeader(0, size_bytes).encode() + block)
        state = read_all(sock, REPLY_BYTES + 1)[REPLY_BYTES]
    is_longer = size_bytes > enveloped_bytes(SMALL)
    assert state == (CommitState.CORRUPT if is_longer else CommitState.INCOMPLETE)
    assert port.states(keys) == [BlockState.MISS]
    port.wait_until_nothing_is_held()


def test_a_block_larger_than_its_slot_is_refused_before_it_can_touch_the_next(port: BulkPort) -> None:
    neighbour = port.put(1)
    request = TransferRequest(
        direction=Direction.WRITE, ticket=port.reserve(hashes(2)), block_count=1, following_bytes=16 + (1 << 20)
    )
    with contextlib.closing(port.connect()) as sock:
        sock.sendall(request.encode() + BlockHeader(0, 1 << 20).encode())
        assert "1048576 bytes; allowed: " in refusal_of(read_to_end(sock))
    with contextlib.closing(port.connect()) as sock:
        sock.sendall(read_request(port.lease(neighbour), 1))
        assert read_all(sock, REPLY_BYTES + 16 + enveloped_bytes(SMALL)).endswith(enveloped(1))
    port.wait_until_nothing_is_held()


def test_a_reader_that_has_stopped_is_cut_off_and_costs_others_nothing() -> None:
    port = BulkPort(slab_count=5, stall_s=0.2)
    try:
        keys = port.put(*range(8), namespace=HUGE)  # 24 MiB: more than both sockets take
        small = port.put(100)
        with contextlib.closing(port.connect(receive_buffer_bytes=4096)) as stopped:
            stopped.sendall(read_request(port.lease(keys, HUGE), 8))
            read_all(stopped, REPLY_BYTES)
            with contextlib.closing(port.connect()) as other:
                other.sendall(read_request(port.lease(small), 1))
                assert read_all(other, REPLY_BYTES + 16 + enveloped_bytes(SMALL)).endswith(enveloped(100))
            port.wait_until_nothing_is_held()
            assert len(read_to_end(stopped)) < 8 * enveloped_bytes(HUGE)
    finally:
        port.close()


def test_a_writer_that_has_stopped_is_cut_off_and_its_slots_are_free() -> None:
    port = BulkPort(stall_s=0.2)
    try:
        with contextlib.closing(port.connect()) as stopped:
            stopped.sendall(write_stream(port.reserve(hashes(1)), (1,))[:-1])
            port.wait_until_nothing_is_held()
            assert read_to_end(stopped) == b""
        assert port.states(hashes(1)) == [BlockState.MISS]
    finally:
        port.close()


def test_a_transfer_that_trickles_ends_with_its_time() -> None:
    port = BulkPort(transfer_s_max=0.3)
    try:
        stream = write_stream(port.reserve(hashes(1)), (1,))
        with contextlib.closing(port.connect()) as slow:
            sent_bytes = REQUEST_BYTES
            slow.sendall(stream[:sent_bytes])
            with contextlib.suppress(ConnectionError):
                while sent_bytes < len(stream) - 1:
                    slow.sendall(stream[sent_bytes : sent_bytes + 1])
                    sent_bytes += 1
                    port.on_loop(lambda: None)  # as slow as that
                read_to_end(slow)
            port.wait_until_nothing_is_held()
        assert port.states(hashes(1)) == [BlockState.MISS]
    finally:
        port.close()


def test_a_process_killed_in_the_middle_of_a_write_leaks_nothing(port: BulkPort) -> None:
    keys = hashes(1, 2)
    stream = write_stream(port.reserve(keys, LARGE), (1, 2), LARGE)
    code = "import os, signal, socket, sys\n"
    code += f"sock = socket.create_connection(('127.0.0.1', {port.port}))\n"
    code += "sock.sendall(sys.stdin.buffer.read())\n"
    code += "os.kill(os.getpid(), signal.SIGKILL)\n"
    process = subprocess.run(
        [sys.executable, "-c", code], input=stream[: len(stream) * 3 // 4], timeout=LONG_S, check=False
    )
    assert process.returncode == -9
    port.wait_until_nothing_is_held()
    assert port.states(keys, LARGE) == [BlockState.MISS] * 2


def test_garbage_is_refused(port: BulkPort) -> None:
    with contextlib.closing(port.connect()) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\n\r\n")
        assert "not a version 1 transfer request" in refusal_of(read_to_end(sock))


def test_an_idle_connection_gives_way_when_all_are_taken() -> None:
    port = BulkPort(connection_count_max=2)
    try:
        keys = port.put(1)
        port.wait_until_idle_count(0)
        idle = [port.connect() for _ in range(2)]
        for sock in idle:
            sock.sendall(read_request(port.lease(keys), 1))
            assert read_all(sock, REPLY_BYTES + 16 + enveloped_bytes(SMALL)).endswith(enveloped(1))
        port.wait_until_idle_count(2)
        with contextlib.closing(port.connect()) as third:
            third.sendall(read_request(port.lease(keys), 1))
            assert read_all(third, REPLY_BYTES + 16 + enveloped_bytes(SMALL)).endswith(enveloped(1))
        (ended,), _, _ = select.select(idle, [], [], LONG_S)
        assert ended.recv(1) == b""
        for sock in idle:
            sock.close()
        port.wait_until_nothing_is_held()
    finally:
        port.close()


def test_a_connection_too_many_is_told_so_when_all_are_busy() -> None:
    port = BulkPort(connection_count_max=1)
    try:
        with contextlib.closing(port.connect()) as busy:
            busy.sendall(write_stream(port.reserve(hashes(1)), (1,))[:-1])
            while not port.on_loop(lambda: port.transfers.running_count):
                pass
            with contextlib.closing(port.connect()) as refused:
                assert "1 transfers running" in refusal_of(read_to_end(refused), status=BulkStatus.BUSY)
        port.wait_until_nothing_is_held()
    finally:
        port.close()


def test_stopping_lets_a_running_transfer_finish_and_takes_no_new_one(port: BulkPort) -> None:
    keys = hashes(1)
    stream = write_stream(port.reserve(keys), (1,))
    with contextlib.closing(port.connect()) as idle, contextlib.closing(port.connect()) as busy:
        busy.sendall(stream[:-1])
        while not port.on_loop(lambda: port.transfers.running_count):
            pass
        stopping = threading.Thread(target=lambda: port.stop(grace_s=LONG_S))
        stopping.start()
        assert idle.recv(1) == b""
        busy.sendall(stream[-1:])
        assert read_all(busy, REPLY_BYTES + 1)[REPLY_BYTES] == CommitState.COMMITTED
        stopping.join(LONG_S)
        assert not stopping.is_alive()
    assert port.states(keys) == [BlockState.HIT]
    with pytest.raises(ConnectionRefusedError):
        port.connect()


def test_stopping_without_grace_cuts_transfers_off(port: BulkPort) -> None:
    keys = hashes(1)
    with contextlib.closing(port.connect()) as busy:
        busy.sendall(write_stream(port.reserve(keys), (1,))[:-1])
        while not port.on_loop(lambda: port.transfers.running_count):
            pass
        port.stop(grace_s=0.0)
        assert read_to_end(busy) == b""
    assert port.states(keys) == [BlockState.MISS]
    port.wait_until_nothing_is_held()


def test_a_load_that_waits_for_its_turn_gets_it() -> None:
    port = BulkPort(slab_count=5, in_flight_bytes_max=1 << 20)
    try:
        big = port.put(*range(8), namespace=HUGE)
        small = port.put(100)
        with contextlib.closing(port.connect(receive_buffer_bytes=4096)) as first:
            first.sendall(read_request(port.lease(big, HUGE), 8))
            read_all(first, REPLY_BYTES)
            with contextlib.closing(port.connect()) as second:
                second.sendall(read_request(port.lease(small, owner_id=BOB), 1))
                while not port.on_loop(lambda: port.in_flight.waiting_count):
                    pass
                first.close()
                assert read_all(second, REPLY_BYTES + 16 + enveloped_bytes(SMALL)).endswith(enveloped(100))
        port.wait_until_nothing_is_held()
    finally:
        port.close()
