"""Blocks that the caller writes into reserved slots itself, in front of a real daemon."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore.keys import BlockHash
from kvstore.messages import BlockState, ReserveState
from kvstore_client import Client, ClientConfig, PutState, Reserved
from tests.agent.fakes import BLOCK_BYTES, NAMESPACE, chain
from tests.conftest import DaemonProcess

STORED, ALREADY, PENDING, DROPPED = PutState.STORED, PutState.ALREADY_STORED, PutState.PENDING, PutState.DROPPED


@pytest.fixture(scope="module")
def shared_daemon(start_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    return start_daemon()


@pytest.fixture(params=["slab", "grpc"])
def client(shared_daemon: DaemonProcess, request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(shared_daemon.unix_address, config=ClientConfig(transport=request.param)) as client:
        yield client


@pytest.fixture
def slab_client(shared_daemon: DaemonProcess) -> Iterator[Client]:
    with Client(shared_daemon.unix_address, config=ClientConfig(transport="slab")) as client:
        yield client


def pattern(block_hash: BlockHash) -> bytes:
    return (block_hash * -(-BLOCK_BYTES // len(block_hash)))[:BLOCK_BYTES]


def fill(reserved: Reserved, hashes: Sequence[BlockHash]) -> None:
    for slot, block_hash in zip(reserved.slots, hashes, strict=True):
        if slot is not None:
            slot[:] = pattern(block_hash)


def read_back(client: Client, hashes: Sequence[BlockHash]) -> list[bytes | None]:
    into = np.zeros((len(hashes), BLOCK_BYTES), np.uint8)
    states = client.get(NAMESPACE, hashes, into).states
    return [row.tobytes() if state is BlockState.HIT else None for row, state in zip(into, states, strict=True)]


def test_what_was_written_into_the_slots_is_stored(client: Client) -> None:
    hashes = chain(5, seed=int(client._config.transport == "slab"))
    with client.reserve(NAMESPACE, hashes) as reserved:
        assert reserved.is_copy == (client._config.transport == "grpc")
        fill(reserved, hashes)
        result = reserved.commit()
        assert reserved.commit() is result
    assert result.states == (STORED,) * 5
    assert result.error is None
    assert read_back(client, hashes) == [pattern(block_hash) for block_hash in hashes]
    assert client.stats().reservation_count == 0


def test_what_is_not_committed_is_given_back_at_once(client: Client) -> None:
    hashes = chain(3, seed=10)
    with client.reserve(NAMESPACE, hashes) as reserved:
        fill(reserved, hashes)
    assert client.stats().reservation_count == 0
    assert read_back(client, hashes) == [None] * 3
    assert reserved.slots == ()
    assert reserved.commit().states == (DROPPED,) * 3


def test_an_error_in_the_with_block_gives_the_slots_back(slab_client: Client) -> None:
    def fail() -> None:
        with slab_client.reserve(NAMESPACE, chain(3, seed=11)):
            assert slab_client.stats().reservation_count == 3
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert slab_client.stats().reservation_count == 0


def test_there_is_no_slot_for_what_is_stored_or_being_written_already(slab_client: Client) -> None:
    hashes = chain(4, seed=12)
    with slab_client.reserve(NAMESPACE, hashes[:1]) as first:
        fill(first, hashes[:1])
        first.commit()
    with (
        slab_client.reserve(NAMESPACE, hashes[1:2], parent_hash=hashes[0]) as second,
        slab_client.reserve(NAMESPACE, hashes) as third,
    ):
        assert [slot is not None for slot in third.slots] == [False, False, True, True]
        fill(third, hashes)
        assert third.commit().states == (ALREADY, PENDING, STORED, STORED)
        fill(second, hashes[1:2])
        assert second.commit().states == (STORED,)
    assert read_back(slab_client, hashes) == [pattern(block_hash) for block_hash in hashes]


def test_a_full_daemon_reserves_nothing_and_says_so(start_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = start_daemon("--memory-capacity", "4MiB")
    with Client(daemon.unix_address, config=ClientConfig(transport="slab")) as client:
        hashes = chain(1000, seed=13)
        with client.reserve(NAMESPACE, hashes) as reserved:
            slots = [slot for slot in reserved.slots if slot is not None]
            assert 0 < len(slots) < 1000
            fill(reserved, hashes)
            result = reserved.commit()
        assert result.refusal is ReserveState.FULL
        assert result.stored_count == len(slots)
    daemon.kill()


def test_a_damaged_header_or_envelope_of_a_slot_costs_the_block(slab_client: Client) -> None:
    """Somebody else who may write has written where he should not have."""
    hashes = chain(2, seed=14)
    with slab_client.reserve(NAMESPACE, hashes) as reserved:
        fill(reserved, hashes)
        whole = reserved._whole[1]
        assert whole is not None
        whole[3] ^= 1
        result = reserved.commit()
    assert result.states == (STORED, DROPPED)
    assert read_back(slab_client, hashes) == [pattern(hashes[0]), None]


def test_what_is_committed_after_its_time_is_dropped_and_its_slot_was_nobody_elses(
    shared_daemon: DaemonProcess,
) -> None:
    config = ClientConfig(transport="slab", reservation_s=0.05)
    hashes, others = chain(1, seed=15), chain(1, seed=16)
    with Client(shared_daemon.unix_address, config=config) as client, Client(shared_daemon.unix_address) as other:
        with client.reserve(NAMESPACE, hashes) as reserved:
            while other.stats().reservation_count:  # until the daemon has given up waiting
                pass
            other.put(NAMESPACE, others, pattern(others[0]))
            fill(reserved, hashes)
            assert reserved.commit().states == (DROPPED,)
        assert read_back(other, [*hashes, *others]) == [None, pattern(others[0])]


def test_a_daemon_that_dies_costs_the_blocks_and_raises_nothing(start_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = start_daemon()
    with Client(daemon.unix_address, config=ClientConfig(transport="slab")) as client:
        hashes = chain(2, seed=17)
        with client.reserve(NAMESPACE, hashes) as reserved:
            daemon.kill()
            fill(reserved, hashes)
            result = reserved.commit()
        assert result.states == (DROPPED,) * 2
        assert isinstance(result.error, UnavailableError)
        with client.reserve(NAMESPACE, hashes) as reserved:
            assert reserved.slots == (None, None)
            assert isinstance(reserved.error, UnavailableError)
            assert reserved.commit().error is reserved.error


def test_slots_stay_the_callers_while_the_client_is_closed(shared_daemon: DaemonProcess) -> None:
    """What is being copied into must not be given to somebody else by another thread's `close`."""
    hashes = chain(2, seed=18)
    client = Client(shared_daemon.unix_address, config=ClientConfig(transport="slab"))
    with Client(shared_daemon.unix_address) as other:
        with client.reserve(NAMESPACE, hashes) as reserved:
            client.close()
            fill(reserved, hashes)
            assert other.stats().reservation_count == 2
            assert reserved.commit().states == (DROPPED,) * 2
        while other.stats().reservation_count:  # given back by the end of the session
            pass


def test_arenas_are_known_once_blocks_have_moved_and_stay_mapped_while_looked_at(shared_daemon: DaemonProcess) -> None:
    with Client(shared_daemon.unix_address, config=ClientConfig(transport="slab")) as client:
        assert client.arenas() == ()
        client.put(NAMESPACE, chain(1, seed=19), bytes(BLOCK_BYTES))
        client.get(NAMESPACE, chain(1, seed=19), bytearray(BLOCK_BYTES))
        assert {arena.is_read_only for arena in client.arenas()} == {True, False}
        memory = client.arenas()[0].memory
        assert len(memory) == client.stats().capacity_bytes
    assert client.arenas() == ()
    gc.collect()
    assert len(bytes(memory[-4096:])) == 4096
    with Client(shared_daemon.unix_address, config=ClientConfig(transport="grpc")) as client:
        client.put(NAMESPACE, chain(1, seed=20), bytes(BLOCK_BYTES))
        assert client.arenas() == ()


def test_wrong_input_is_refused_with_what_is_wrong(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="the same block twice"):
        client.reserve(NAMESPACE, chain(1) * 2)
    with pytest.raises(InvalidArgumentError, match="parent_hash"):
        client.reserve(NAMESPACE, chain(1), parent_hash=BlockHash(b"short"))
    with pytest.raises(InvalidArgumentError, match="65537 blocks"):
        client.reserve(NAMESPACE, [BlockHash(number.to_bytes(32)) for number in range(65_537)])
