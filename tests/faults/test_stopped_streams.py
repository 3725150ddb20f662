"""Clients that are stopped (SIGSTOP) in the middle of a stream cost nobody else anything.

Kinds of fault (users' reports): "large retrieve hangs", "one dead replica slows everybody", "releasing back-pressure
flooded the queue".
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kvstore.keys import pack_hashes
from kvstore.messages import ReserveState
from kvstore_client import Client, ClientConfig
from kvstore_client.results import PutState
from tests.conftest import DaemonProcess

from . import blocks

STREAMS = ClientConfig(transport="grpc")

PEER = """
import sys
import grpc
from kvstore import messages as m, wire
from kvstore.errors import REASON_METADATA_KEY
from kvstore.frames import WriteFrame
from kvstore.keys import NamespaceId
from kvstore_client.ids import new_owner_id

address, kind, namespace_id, hashes = sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3]), bytes.fromhex(sys.argv[4])
channel = grpc.insecure_channel(address)

def stop_here():
    print("in mid-stream", flush=True)
    sys.stdin.readline()

def read():
    request = m.ReadBlocksRequest(namespace_id=NamespaceId(namespace_id), block_hashes=hashes)
    stream = channel.unary_stream(wire.READ_BLOCKS.path)(wire.READ_BLOCKS.encode_request(request))
    next(stream)
    stop_here()
    for _ in stream:
        pass

def write():
    owner_id = new_owner_id()
    request = m.ReserveBlocksRequest(
        namespace_id=NamespaceId(namespace_id), owner_id=owner_id, block_hashes=hashes, reservation_s=60.0
    )
    answer = channel.unary_unary(wire.RESERVE_BLOCKS.path)(wire.RESERVE_BLOCKS.encode_request(request))
    reserved = wire.RESERVE_BLOCKS.decode_response(answer)

    def frames():
        frame = WriteFrame(
            reservation_id=reserved.reservation_ids[0], owner_id=owner_id, data=memoryview(bytes(1 << 20))
        )
        yield wire.WRITE_BLOCKS.encode_request(frame)
        stop_here()

    channel.stream_unary(wire.WRITE_BLOCKS.path)(frames())

try:
    {"read": read, "write": write}[kind]()
except grpc.RpcError as error:
    print(dict(error.trailing_metadata())[REASON_METADATA_KEY], error.details(), flush=True)
else:
    print("finished", flush=True)
"""


class Stopped:
    """A process that is stopped in the middle of its stream."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def resume(self) -> str:
        """What it says at its end."""
        self._process.send_signal(signal.SIGCONT)
        said, _ = self._process.communicate("\n", timeout=30)
        return said.strip()


@contextmanager
def stopped(address: str, kind: str, hashes: bytes) -> Iterator[Stopped]:
    command = [sys.executable, "-c", PEER, address, kind, blocks.LARGE.id.hex(), hashes.hex()]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "in mid-stream"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        yield Stopped(process)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def tight(
    start_daemon: Callable[..., DaemonProcess], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DaemonProcess]:
    """A daemon with room for one large stream at a time."""
    config = tmp_path_factory.mktemp("config") / "kvstore.yaml"
    config.write_text("limits:\n  in_flight_bytes_max: 16MiB\n  in_flight_bytes_per_client_max: 16MiB\n")
    daemon = start_daemon("--config", str(config))
    yield daemon
    daemon.kill()


def put(client: Client, number: int) -> list[PutState]:
    hashes = blocks.chain(number)
    return list(client.put(blocks.LARGE, hashes, [blocks.right_bytes(blocks.LARGE, one) for one in hashes]).states)


def get_all(client: Client, *numbers: int) -> int:
    """How many of the chains' blocks were loaded and right."""
    count = 0
    for number in numbers:
        hashes = blocks.chain(number)
        into = np.zeros((len(hashes), blocks.LARGE.block_layout.payload_bytes), dtype=np.uint8)
        assert client.get(blocks.LARGE, hashes, into).matched_count == len(hashes)
        count += sum(
            bool((block == blocks.right_bytes(blocks.LARGE, one)).all())
            for one, block in zip(hashes, into, strict=True)
        )
    return count


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_loads_go_on_while_a_stopped_reader_holds_the_room(tight: DaemonProcess, transport: str) -> None:
    address = tight.address if transport == "tcp" else tight.unix_address
    with Client(address, config=STREAMS) as client:
        for number in (1, 2):
            assert set(put(client, number)) == {PutState.STORED}
        # 36 MiB, most of which the kernel's and gRPC's buffers cannot take.
        wanted = pack_hashes([*blocks.chain(1), *blocks.chain(2)])
        with stopped(address, "read", wanted) as reader:
            assert get_all(client, 1, 2) == 2 * blocks.CHAIN_BLOCKS
            assert set(put(client, 3)) == {PutState.STORED}
            assert "no progress" in reader.resume()


def test_a_stopped_reader_that_is_in_nobodys_way_finishes_later(daemon: DaemonProcess) -> None:
    with Client(daemon.address, config=STREAMS) as client:
        for number in (1, 2):
            put(client, number)
        with stopped(daemon.address, "read", pack_hashes([*blocks.chain(1), *blocks.chain(2)])) as reader:
            assert get_all(client, 1, 2) == 2 * blocks.CHAIN_BLOCKS
            assert reader.resume() == "finished"


def test_stores_are_refused_with_a_reason_only_until_stopped_writers_are_cut(tight: DaemonProcess) -> None:
    with Client(tight.address, config=STREAMS) as client:
        put(client, 1)
        hashes = blocks.chain(4)[:4], blocks.chain(5)[:4]
        with (
            stopped(tight.address, "write", pack_hashes(hashes[0])) as first,
            stopped(tight.address, "write", pack_hashes(hashes[1])) as second,
        ):
            refused = client.put(blocks.LARGE, blocks.chain(6), [bytes(blocks.LARGE.block_layout.payload_bytes)] * 6)
            assert refused.refusal is ReserveState.OVERLOADED
            assert refused.stored_count == 0
            assert get_all(client, 1) == blocks.CHAIN_BLOCKS, "stores are refused, loads are not"
            while put(client, 7)[0] is not PutState.STORED:
                pass
            assert "no progress" in first.resume()
            assert "no progress" in second.resume()
        stats = client.stats()
        assert stats.reservation_count == 0
        assert stats.refused_count > 0
