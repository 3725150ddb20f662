"""What a client remembers of where blocks are, and that it believes none of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvstore.keys import BlockHash
from kvstore.messages import BlockState
from kvstore.namespace import Namespace
from kvstore.slab import Generation, SlotRecord, decode_slot_records
from kvstore_client import Client, ClientConfig
from kvstore_client.paths.slab_places import PLACE_COUNT_MAX, KnownPlaces, pack
from kvstore_client.unseen import REPORT_EVERY_S
from tests.client.builders import chain, namespace, payloads
from tests.conftest import DaemonProcess

SPACE = namespace()
SLAB = ClientConfig(transport="slab")


def record(number: int) -> SlotRecord:
    return SlotRecord(place=number * 4096, generation=Generation(number + 1), size_bytes=4000)


def found(places: KnownPlaces, *hashes: BlockHash, space: Namespace = SPACE) -> list[SlotRecord] | None:
    records = places.find(space.id, hashes)
    return None if records is None else decode_slot_records(records.tobytes())


def test_places_are_known_only_when_all_of_them_are() -> None:
    places, (first, second, third) = KnownPlaces(), chain(3)
    places.note(SPACE.id, [first, second], pack([record(1), record(2)]))
    assert found(places, second, first) == [record(2), record(1)]
    assert found(places, first, third) is None
    assert found(places, first, space=namespace(model="other")) is None
    places.clear()
    assert found(places, first) is None


def test_a_block_that_is_met_elsewhere_is_known_to_be_there_and_no_other_is_changed() -> None:
    places, (first, second, third) = KnownPlaces(), chain(3)
    places.note(SPACE.id, [first, second], pack([record(1), record(2)]))
    places.note(SPACE.id, [third, first], pack([record(3), record(4)]))
    assert found(places, first, second, third) == [record(4), record(2), record(3)]


def test_what_is_remembered_is_bounded() -> None:
    places = KnownPlaces()
    hashes = [BlockHash(number.to_bytes(32, "big")) for number in range(PLACE_COUNT_MAX + 1)]
    for start in range(0, len(hashes), 1024):
        part = hashes[start : start + 1024]
        places.note(SPACE.id, part, pack([record(start + index) for index in range(len(part))]))
    assert found(places, hashes[0]) is None
    assert found(places, hashes[-1]) == [record(PLACE_COUNT_MAX)]


def test_threads_that_note_and_find_at_once_never_find_another_blocks_place() -> None:
    places = KnownPlaces()
    hashes = chain(512)
    records = [record(number) for number in range(512)]
    stop = threading.Event()
    wrong: list[int] = []

    def note(first: int) -> None:
        while not stop.is_set():
            for number in range(first, 512, 2):
                places.note(SPACE.id, [hashes[number]], pack([records[number]]))
            places.clear()

    def find() -> None:
        while not stop.is_set():
            wrong.extend(
                number for number in range(512) if found(places, hashes[number]) not in (None, [records[number]])
            )

    threads = [threading.Thread(target=note, args=(first,)) for first in (0, 1)]
    threads += [threading.Thread(target=find) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_prompt_whose_places_are_known_is_looked_up_without_a_call_and_its_hits_are_counted(
    daemon: DaemonProcess,
) -> None:
    space, hashes = namespace(payload_bytes=4096), chain(4)
    with Client(daemon.unix_address, config=SLAB) as observer, Client(daemon.unix_address, config=SLAB) as client:
        assert client.put(space, hashes, payloads(space, 4)).stored_count == 4
        before = observer.stats()
        daemon.pause()  # whoever asks it now waits
        for _ in range(5):
            assert client.lookup(space, hashes).matched_count == 4
        time.sleep(REPORT_EVERY_S)
        assert client.lookup(space, hashes).matched_count == 4  # and tells of those before
        daemon.resume()
        deadline_s = time.monotonic() + 10
        while observer.stats().hit_count < before.hit_count + 6 * 4:
            assert time.monotonic() < deadline_s, f"{observer.stats().hit_count - before.hit_count} hits were counted"
            time.sleep(0.01)
        assert observer.stats().hit_count == before.hit_count + 6 * 4
        assert observer.stats().miss_count == before.miss_count


def test_a_prompt_with_a_block_that_has_left_is_asked_for(start_daemon: Callable[..., DaemonProcess]) -> None:
    """Other blocks drive it out behind the client's back; a lookup says what the daemon would."""
    daemon = start_daemon("--memory-capacity", "4MiB")
    space = namespace(payload_bytes=64 << 10)
    hashes = chain(4)
    with Client(daemon.unix_address, config=SLAB) as client, Client(daemon.unix_address, config=SLAB) as other:
        assert client.put(space, hashes, payloads(space, 4)).stored_count == 4
        counts = []
        for turn in range(1, 20):
            other.put(space, chain(8, seed=turn), payloads(space, 8, seed=turn))
            before = other.lookup(space, hashes).matched_count
            counts.append(client.lookup(space, hashes).matched_count)
            after = other.lookup(space, hashes).matched_count
            assert after <= counts[-1] <= before  # blocks may leave in between
        assert counts[0] == 4
        assert counts[-1] == 0


def test_a_dead_daemons_memory_is_not_taken_for_what_it_has(daemon: DaemonProcess) -> None:
    space, hashes = namespace(payload_bytes=4096), chain(2)
    with Client(daemon.unix_address, config=SLAB) as client:
        assert client.put(space, hashes, payloads(space, 2)).stored_count == 2
        assert client.lookup(space, hashes).matched_count == 2
        daemon.kill()
        result = client.lookup(space, hashes)
        assert result.matched_count == 0
        assert result.error is not None


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
