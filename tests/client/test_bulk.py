"""The client's side of the data port: against the real one, and against one that lies."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.bulk import (
    BLOCK_HEADER_BYTES,
    REPLY_BYTES,
    REQUEST_BYTES,
    BlockHeader,
    BulkStatus,
    TransferReply,
    TransferRequest,
)
from kvstore.envelope import ENVELOPE_BYTES
from kvstore.errors import DeadlineExceededError, KvstoreError, ProtocolError, UnavailableError
from kvstore.keys import BlockHash
from kvstore.messages import BlockState, CommitState, Ticket, TransferPath
from kvstore.namespace import Namespace
from kvstore_client.flows.steps import Fetch, Send
from kvstore_client.paths.bulk import BulkMover
from kvstore_client.paths.mover import TransferRefusedError
from tests.server.builders import HUGE, LARGE, SMALL, enveloped, enveloped_bytes, hashes, payload_of
from tests.server.bulk_port import LONG_S, BulkPort, read_all

HIT, MISS, CORRUPT = BlockState.HIT, BlockState.MISS, BlockState.CORRUPT


@pytest.fixture
def port() -> Iterator[BulkPort]:
    made = BulkPort()
    yield made
    made.close()


@pytest.fixture
def mover(port: BulkPort) -> Iterator[BulkMover]:
    made = BulkMover("127.0.0.1", port.port)
    yield made
    made.close()


def fetch_step(
    ticket: bytes, keys: Sequence[BlockHash], space: Namespace = SMALL, *, timeout_s: float = LONG_S
) -> tuple[Fetch, list[bytearray]]:
    targets = [bytearray(space.block_layout.payload_bytes) for _ in keys]
    views = [memoryview(target) for target in targets]
    step = Fetch(
        path=TransferPath.BULK,
        namespace=space,
        hashes=keys,
        targets=views,
        slots=b"",
        ticket=ticket,
        timeout_s=timeout_s,
    )
    return step, targets


def send_step(ticket: bytes, numbers: Sequence[int], space: Namespace = SMALL, *, timeout_s: float = LONG_S) -> Send:
    return Send(
        path=TransferPath.BULK,
        namespace=space,
        hashes=hashes(*numbers),
        blocks=[memoryview(payload_of(number, space)) for number in numbers],
        slots=b"",
        ticket=ticket,
        timeout_s=timeout_s,
    )


@pytest.mark.parametrize("space", [SMALL, LARGE, HUGE], ids=["SMALL", "LARGE", "HUGE"])
def test_what_is_sent_comes_back(port: BulkPort, mover: BulkMover, space: Namespace) -> None:
    numbers = (1, 2, 3, 4, 5)
    keys = hashes(*numbers)
    assert mover.send(send_step(port.reserve(keys, space), numbers, space)) == [CommitState.COMMITTED] * 5
    step, targets = fetch_step(port.lease(keys, space), keys, space)
    assert mover.fetch(step) == [HIT] * 5
    assert [bytes(target) for target in targets] == [payload_of(number, space) for number in numbers]
    port.wait_until_nothing_is_held()


def test_a_refused_ticket_is_told_in_the_daemons_words(port: BulkPort, mover: BulkMover) -> None:
    step, _ = fetch_step(bytes(16), hashes(1))
    with pytest.raises(TransferRefusedError, match="no such ticket"):
        mover.fetch(step)
    # More than fits into the sockets: the refusal comes while it is being sent.
    with pytest.raises(TransferRefusedError, match="no such ticket"):
        mover.send(send_step(bytes(16), range(8), HUGE))
    port.wait_until_nothing_is_held()


def test_a_port_that_can_move_nothing_at_present_is_told_from_a_ticket_that_is_no_good() -> None:
    answer = TransferReply(BulkStatus.BUSY, 0, 9).encode() + b"try again"
    with pytest.raises(UnavailableError, match="refuses: try again") as refused:
        fetch_from(answer, hashes(1))
    assert not isinstance(refused.value, TransferRefusedError)


def test_a_mover_goes_on_after_a_refusal_and_after_the_daemon_has_closed_its_connections(port: BulkPort) -> None:
    with contextlib.closing(BulkMover("127.0.0.1", port.port)) as mover:
        keys = port.put(1)
        for _ in range(2):
            with pytest.raises(UnavailableError):
                mover.fetch(fetch_step(bytes(16), keys)[0])
            assert mover.fetch(fetch_step(port.lease(keys), keys)[0]) == [HIT]
    idle = BulkPort(idle_s=0.01)
    try:
        keys = idle.put(1)
        with contextlib.closing(BulkMover("127.0.0.1", idle.port)) as mover:
            assert mover.fetch(fetch_step(idle.lease(keys), keys)[0]) == [HIT]
            wait_until_closed_by_peer(mover)
            assert mover.fetch(fetch_step(idle.lease(keys), keys)[0]) == [HIT]
    finally:
        idle.close()


def wait_until_closed_by_peer(mover: BulkMover) -> None:
    """Looks at the one idle connection, for there is nothing else to wait for."""
    (link,) = mover._idle
    while link.is_quiet():
        pass


def test_threads_have_a_connection_each(port: BulkPort, mover: BulkMover) -> None:
    keys = port.put(1, 2, 3, namespace=LARGE)
    failures: list[BaseException] = []

    def fetch_often() -> None:
        try:
            for _ in range(20):
                step, targets = fetch_step(port.lease(keys, LARGE), keys, LARGE)
                assert mover.fetch(step) == [HIT] * 3
                assert bytes(targets[2]) == payload_of(3, LARGE)
        except BaseException as failure:  # noqa: BLE001  (told below)
            failures.append(failure)

    threads = [threading.Thread(target=fetch_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    port.wait_until_nothing_is_held()


def test_a_forked_child_does_not_share_its_parents_connections(port: BulkPort) -> None:
    keys = port.put(1)
    tickets = [port.lease(keys).hex() for _ in range(5)]
    code = """
import os, sys
from kvstore.messages import BlockState
from kvstore_client.paths.bulk import BulkMover
from tests.client.test_bulk import fetch_step
from tests.server.builders import hashes

mover = BulkMover("127.0.0.1", int(sys.argv[1]))
tickets = [bytes.fromhex(ticket) for ticket in sys.argv[2:]]

def fetch(ticket):
    assert mover.fetch(fetch_step(ticket, hashes(1))[0]) == [BlockState.HIT]

fetch(tickets[0])
child = os.fork()
for ticket in tickets[1:3] if child else tickets[3:]:
    fetch(ticket)
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code, str(port.port), *tickets], check=True, timeout=LONG_S, cwd=root)
    port.wait_until_nothing_is_held()


def test_a_closed_mover_moves_nothing_and_ends_what_is_under_way(port: BulkPort) -> None:
    silent = SilentPort()
    mover = BulkMover("127.0.0.1", silent.port)
    failures: list[KvstoreError] = []

    def fetch() -> None:
        try:
            mover.fetch(fetch_step(bytes(16), hashes(1))[0])
        except KvstoreError as failure:
            failures.append(failure)

    thread = threading.Thread(target=fetch)
    thread.start()
    assert silent.has_request.wait(LONG_S)
    mover.close()
    thread.join(LONG_S)
    assert [type(failure) for failure in failures] == [UnavailableError]
    with pytest.raises(UnavailableError, match="closed"):
        mover.fetch(fetch_step(bytes(16), hashes(1))[0])
    silent.close()


def test_a_port_that_nobody_listens_on_is_unavailable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        mover = BulkMover("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(UnavailableError, match="refused"):
            mover.fetch(fetch_step(bytes(16), hashes(1))[0])


def test_a_daemon_that_hangs_costs_the_deadline() -> None:
    silent = SilentPort()
    with contextlib.closing(BulkMover("127.0.0.1", silent.port)) as mover:
        with pytest.raises(DeadlineExceededError):
            mover.fetch(fetch_step(bytes(16), hashes(1), timeout_s=0.1)[0])
        with pytest.raises(DeadlineExceededError):
            mover.send(send_step(bytes(16), range(8), HUGE, timeout_s=0.1))
    silent.close()


# --- a daemon that lies


class SilentPort:
    """Takes connections and requests, and says nothing; or what it was given to say, and closes."""

    def __init__(self, answer: bytes | None = None) -> None:
        self.has_request = threading.Event()
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._taken: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        self.port = self._listener.getsockname()[1]

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._taken.append(sock)
            sock.settimeout(LONG_S)
            TransferRequest.decode(read_all(sock, REQUEST_BYTES))
            self.has_request.set()
            if self._answer is not None:
                sock.sendall(self._answer)
                sock.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for sock in self._taken:
            sock.close()


def fetch_from(answer: bytes, keys: Sequence[BlockHash]) -> tuple[list[BlockState], list[bytearray]]:
    fake = SilentPort(answer)
    try:
        with contextlib.closing(BulkMover("127.0.0.1", fake.port)) as mover:
            step, targets = fetch_step(bytes(16), keys)
            return mover.fetch(step), targets
    finally:
        fake.close()


def answer_of(*blocks: bytes, block_count: int | None = None) -> bytes:
    stream = b"".join(BlockHeader(index, len(block)).encode() + block for index, block in enumerate(blocks))
    count = len(blocks) if block_count is None else block_count
    return TransferReply(BulkStatus.OK, count, len(stream)).encode() + stream


def test_a_block_that_has_gone_is_a_miss_and_its_target_is_untouched() -> None:
    states, targets = fetch_from(answer_of(enveloped(1), b"", enveloped(3)), hashes(1, 2, 3))
    assert states == [HIT, MISS, HIT]
    assert [bytes(target) for target in targets] == [payload_of(1), bytes(len(payload_of(2))), payload_of(3)]


def test_another_block_than_the_one_asked_for_is_corrupt() -> None:
    states, _ = fetch_from(answer_of(enveloped(2), enveloped(2)), hashes(1, 2))
    assert states == [CORRUPT, HIT]


def test_any_changed_byte_of_a_read_is_noticed() -> None:
    sound = answer_of(enveloped(1), enveloped(2))
    block_start = REPLY_BYTES + BLOCK_HEADER_BYTES
    second = block_start + enveloped_bytes(SMALL)
    flips = [*range(block_start + ENVELOPE_BYTES + 1), block_start + 700, second - 1]
    flips += range(second, second + BLOCK_HEADER_BYTES)
    for at in flips:
        answer = bytearray(sound)
        answer[at] ^= 0x40
        try:
            states, targets = fetch_from(bytes(answer), hashes(1, 2))
        except (ProtocolError, UnavailableError):
            continue
        assert block_start <= at < second, f"byte {at} went unnoticed"
        assert states == [CORRUPT, HIT], f"byte {at}"
        assert bytes(targets[1]) == payload_of(2)


@pytest.mark.parametrize("kept_bytes", [0, 1, REPLY_BYTES, REPLY_BYTES + 1, REPLY_BYTES + 16 + 128, -1])
def test_an_answer_cut_off_is_an_error(kept_bytes: int) -> None:
    with pytest.raises(UnavailableError):
        fetch_from(answer_of(enveloped(1))[:kept_bytes], hashes(1))


def test_an_answer_for_another_number_of_blocks_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="2 blocks; asked for 1"):
        fetch_from(answer_of(enveloped(1), enveloped(2)), hashes(1))


def test_a_commit_state_that_is_none_is_an_error() -> None:
    fake = SilentPort(TransferReply(BulkStatus.OK, 1, 1).encode() + b"\x09")
    with contextlib.closing(BulkMover("127.0.0.1", fake.port)) as mover, pytest.raises(ProtocolError):
        mover.send(send_step(bytes(16), [1]))
    fake.close()


# --- TLS


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for 127.0.0.1, signed with itself, in one file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl command to make a certificate with")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(path), "-out", str(path.with_suffix(".crt"))]
    subprocess.run(command, check=True, capture_output=True)
    path.write_text(path.read_text() + path.with_suffix(".crt").read_text())
    return path


@pytest.fixture
def secure_port(certificate: Path) -> Iterator[BulkPort]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    made = BulkPort(ssl_context=context, stall_s=1.0)
    yield made
    made.close()


def test_blocks_travel_over_tls(secure_port: BulkPort, certificate: Path) -> None:
    context = ssl.create_default_context(cafile=str(certificate.with_suffix(".crt")))
    with contextlib.closing(BulkMover("127.0.0.1", secure_port.port, ssl_context=context)) as mover:
        for space in (SMALL, HUGE):
            for numbers in ((1, 2), (3,)):
                keys = hashes(*numbers)
                sent = mover.send(send_step(secure_port.reserve(keys, space), numbers, space))
                assert sent == [CommitState.COMMITTED] * len(numbers)
                step, targets = fetch_step(secure_port.lease(keys, space), keys, space)
                assert mover.fetch(step) == [HIT] * len(numbers)
                assert [bytes(target) for target in targets] == [payload_of(number, space) for number in numbers]
        with pytest.raises(UnavailableError, match="no such ticket"):
            mover.fetch(fetch_step(bytes(16), hashes(1))[0])
    secure_port.wait_until_nothing_is_held()


def test_a_certificate_that_nobody_vouches_for_is_refused(secure_port: BulkPort) -> None:
    with (
        contextlib.closing(BulkMover("127.0.0.1", secure_port.port, ssl_context=ssl.create_default_context())) as mover,
        pytest.raises(UnavailableError, match="certificate verify failed"),
    ):
        mover.fetch(fetch_step(bytes(16), hashes(1))[0])


def test_who_speaks_no_tls_gets_nothing(secure_port: BulkPort) -> None:
    keys = hashes(1)
    ticket: Ticket = secure_port.reserve(keys)
    with contextlib.closing(BulkMover("127.0.0.1", secure_port.port)) as mover, pytest.raises(KvstoreError):
        mover.send(send_step(ticket, [1]))
    assert secure_port.states(keys) == [BlockState.PENDING]
