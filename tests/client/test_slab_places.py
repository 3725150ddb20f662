"""What a client remembers of where blocks are, and that it believes none of it."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.keys import BlockHash
from kvstore.messages import BlockState
from kvstore.slab import Generation, SlotRecord
from kvstore_client import Client, ClientConfig
from kvstore_client.paths.slab_places import PLACE_COUNT_MAX, KnownPlaces
from tests.client.builders import chain, namespace, payloads
from tests.conftest import DaemonProcess

SPACE = namespace()
SLAB = ClientConfig(transport="slab")


def record(number: int) -> SlotRecord:
    return SlotRecord(place=number * 4096, generation=Generation(number + 1), size_bytes=4000)


def test_places_are_known_only_when_all_of_them_are() -> None:
    places, (first, second) = KnownPlaces(), chain(2)
    places.note(SPACE.id, first, record(1))
    assert places.find(SPACE.id, [first]) == [record(1)]
    assert places.find(SPACE.id, [first, second]) is None
    assert places.find(namespace().id, [first]) is None
    places.clear()
    assert places.find(SPACE.id, [first]) is None


def test_what_is_remembered_is_bounded() -> None:
    places = KnownPlaces()
    for number in range(PLACE_COUNT_MAX + 1):
        places.note(SPACE.id, BlockHash(number.to_bytes(32, "big")), record(number))
    assert places.find(SPACE.id, [BlockHash(bytes(32))]) is None
    assert places.find(SPACE.id, [BlockHash(PLACE_COUNT_MAX.to_bytes(32, "big"))]) is not None


def test_a_block_that_was_met_before_is_read_without_a_lease_and_counted(daemon: DaemonProcess) -> None:
    space, hashes = namespace(payload_bytes=4096), chain(4)
    blocks = payloads(space, 4)
    with Client(daemon.unix_address, config=SLAB) as client:
        assert client.put(space, hashes, blocks).stored_count == 4
        for _ in range(3):
            target = bytearray(4 * 4096)
            before = client.stats()
            assert client.get(space, hashes, target).matched_count == 4
            assert bytes(target) == b"".join(blocks)
            assert client.stats().sent_count == before.sent_count + 4
        assert client.stats().lease_count == 0


def test_a_remembered_place_that_was_given_to_another_block_is_a_miss(
    start_daemon: Callable[..., DaemonProcess],
) -> None:
    """The store is filled over and over, so that every slot changes hands; whatever is still a hit is right."""
    daemon = start_daemon("--memory-capacity", "4MiB")
    space = namespace(payload_bytes=64 << 10)
    contents: dict[BlockHash, bytes] = {}
    hit_count = miss_count = 0
    with Client(daemon.unix_address, config=SLAB) as reader, Client(daemon.unix_address, config=SLAB) as writer:
        for turn in range(40):
            hashes, blocks = chain(8, seed=turn), payloads(space, 8, seed=turn)
            contents.update(zip(hashes, blocks, strict=True))
            writer.put(space, hashes, blocks)
            for block_hash, block in contents.items():
                target = bytearray(64 << 10)
                if reader.get(space, [block_hash], target).states == (BlockState.HIT,):
                    assert bytes(target) == block
                    hit_count += 1
                else:
                    miss_count += 1
    assert hit_count > 100
    assert miss_count > 100


def test_what_was_remembered_of_a_daemon_is_forgotten_with_it(daemon: DaemonProcess) -> None:
    """The next start gives the same places and generations to other blocks."""
    space = namespace(payload_bytes=4096)
    first, second = chain(2, seed=1), chain(2, seed=2)
    with Client(daemon.unix_address, config=SLAB) as client:
        assert client.put(space, first, payloads(space, 2, seed=1)).stored_count == 2
        assert client.get(space, first, bytearray(2 * 4096)).matched_count == 2
        daemon.kill()
        daemon.restart()
        with Client(daemon.unix_address, config=SLAB) as other:
            assert other.put(space, second, payloads(space, 2, seed=2)).stored_count == 2
        target = bytearray(2 * 4096)
        states = client.get(space, first, target).states
        if BlockState.HIT not in states:  # the first call may only find out that the daemon is another
            states = client.get(space, first, target).states
        assert states == (BlockState.MISS,) * 2
        assert client.get(space, second, target).matched_count == 2
        assert bytes(target) == b"".join(payloads(space, 2, seed=2))
