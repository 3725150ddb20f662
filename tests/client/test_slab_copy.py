"""A reader that is stopped anywhere while its slot goes to other blocks never takes wrong bytes for right ones."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable

import pytest

from kvstore.envelope import ENVELOPE_BYTES, Buffer, checksum
from kvstore.messages import BlockState
from kvstore.slab import (
    EMPTY_SLOT_HEADER,
    PAYLOAD_OFFSET_BYTES,
    SLOT_HEADER_BYTES,
    Generation,
    encode_slot_header,
)
from kvstore_client.paths.slab_copy import Crew, copy_and_hash, load_slot, store_slot
from tests.client.builders import chain, enveloped, namespace, payloads

SPACE = namespace(model="slots")
ENVELOPES = SPACE.envelopes
HASHES = chain(4)
BLOCKS = payloads(SPACE, 4)
HIT, MISS, CORRUPT = BlockState.HIT, BlockState.MISS, BlockState.CORRUPT
BLANK = b"\x55" * 256


class Slot:
    """One slot, and what the daemon does to it."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(PAYLOAD_OFFSET_BYTES + 256))
        self.generation = Generation(0)

    def reserve(self) -> None:
        self.view[:SLOT_HEADER_BYTES] = EMPTY_SLOT_HEADER
        self.generation = Generation(self.generation + 1)
        self.set_header(is_readable=False)

    def put(self, index: int, *, is_verified: bool = False) -> Generation:
        self.reserve()
        self.view[SLOT_HEADER_BYTES:] = enveloped(SPACE, HASHES[index], BLOCKS[index])
        self.set_header(is_readable=True, is_verified=is_verified)
        return self.generation

    def set_header(self, *, is_readable: bool, is_verified: bool = False) -> None:
        header = encode_slot_header(self.generation, is_readable=is_readable, is_verified=is_verified)
        self.view[:SLOT_HEADER_BYTES] = header

    def load(
        self,
        target: bytearray,
        *,
        index: int,
        generation: Generation,
        take: Callable[[Buffer, Buffer], int] = copy_and_hash,
    ) -> BlockState:
        return load_slot(
            self.view,
            memoryview(target),
            generation=generation,
            envelopes=ENVELOPES,
            block_hash=HASHES[index],
            take=take,
        )


def test_what_was_put_into_a_slot_is_read_from_it() -> None:
    slot, target = Slot(), bytearray(BLANK)
    slot.reserve()
    store_slot(slot.view, memoryview(BLOCKS[0]), envelopes=ENVELOPES, block_hash=HASHES[0])
    assert slot.load(target, index=0, generation=slot.generation) is MISS
    assert target == BLANK
    slot.set_header(is_readable=True)
    assert slot.load(target, index=0, generation=slot.generation) is HIT
    assert target == BLOCKS[0]


@pytest.mark.parametrize("payload_bytes", [16, 1 << 20, (1 << 20) + 16, 3 << 20])
def test_blocks_of_any_size_are_copied_whole(payload_bytes: int) -> None:
    space = namespace(payload_bytes=payload_bytes)
    (block,) = payloads(space, 1)
    slot = memoryview(bytearray(PAYLOAD_OFFSET_BYTES + payload_bytes))
    store_slot(slot, memoryview(block), envelopes=space.envelopes, block_hash=HASHES[0])
    assert slot[SLOT_HEADER_BYTES:] == enveloped(space, HASHES[0], block)
    slot[:SLOT_HEADER_BYTES] = encode_slot_header(Generation(1), is_readable=True, is_verified=False)
    target = memoryview(bytearray(payload_bytes))
    assert load_slot(slot, target, generation=Generation(1), envelopes=space.envelopes, block_hash=HASHES[0]) is HIT
    assert target == block


def test_a_writer_leaves_the_header_alone() -> None:
    slot = Slot()
    slot.view[:SLOT_HEADER_BYTES] = header = bytes(range(SLOT_HEADER_BYTES))
    store_slot(slot.view, memoryview(BLOCKS[0]), envelopes=ENVELOPES, block_hash=HASHES[0])
    assert slot.view[:SLOT_HEADER_BYTES] == header


@pytest.mark.parametrize("is_verified", [False, True])
def test_any_flipped_bit_of_a_slot_is_found(is_verified: bool) -> None:
    slot = Slot()
    generation = slot.put(0, is_verified=is_verified)
    for position, bit in itertools.product(range(len(slot.view)), range(8)):
        slot.view[position] ^= 1 << bit
        state = slot.load(bytearray(BLANK), index=0, generation=generation)
        # One bit of the verified word turns nothing readable into something else; it must be whole, too.
        assert state is (MISS if position < SLOT_HEADER_BYTES else CORRUPT), (position, bit)
        slot.view[position] ^= 1 << bit
    assert slot.load(bytearray(BLANK), index=0, generation=generation) is HIT


def test_another_block_in_a_slot_that_claims_the_same_generation_is_corrupt() -> None:
    slot = Slot()
    generation = slot.put(1)
    assert slot.load(bytearray(BLANK), index=0, generation=generation) is CORRUPT


def test_a_slot_that_changed_before_the_copy_leaves_the_target_alone() -> None:
    slot, target = Slot(), bytearray(BLANK)
    generation = slot.put(0)
    slot.put(0)
    assert slot.load(target, index=0, generation=generation) is MISS
    assert target == BLANK


def test_a_reader_stopped_at_any_point_never_returns_torn_bytes() -> None:
    """A thousand tries of an adversary that gives the slot away while the reader, its lease expired, is stopped."""
    rng = random.Random(3)
    stops: dict[str, int] = {}
    for _ in range(1000):
        slot, target = Slot(), bytearray(BLANK)
        wanted = rng.randrange(4)
        generation = slot.put(wanted)
        where = rng.choice(["before", "middle", "after", "never"])
        cut = rng.randrange(257)

        def rewrite(slot: Slot = slot, wanted: int = wanted) -> None:
            match rng.choice(["evicted", "reserved", "half written", "other", "same again", "many"]):
                case "evicted":
                    slot.view[:SLOT_HEADER_BYTES] = EMPTY_SLOT_HEADER
                case "reserved":
                    slot.reserve()
                case "half written":
                    slot.reserve()
                    other = enveloped(SPACE, HASHES[(wanted + 1) % 4], BLOCKS[(wanted + 1) % 4])
                    half = SLOT_HEADER_BYTES + rng.randrange(ENVELOPE_BYTES + 256)
                    slot.view[SLOT_HEADER_BYTES:half] = other[: half - SLOT_HEADER_BYTES]
                case "other":
                    slot.put((wanted + 1) % 4)
                case "same again":
                    slot.put(wanted)
                case "many":
                    for index in range(rng.randrange(1, 5)):
                        slot.put(index)

        def stopped(
            into: Buffer,
            source: Buffer,
            where: str = where,
            cut: int = cut,
            rewrite: Callable[[], None] = rewrite,
        ) -> int:
            if where == "before":
                rewrite()
            memoryview(into)[:cut] = memoryview(source)[:cut]
            if where == "middle":
                rewrite()
            memoryview(into)[cut:] = memoryview(source)[cut:]
            if where == "after":
                rewrite()
            return checksum(into)

        state = slot.load(target, index=wanted, generation=generation, take=stopped)
        stops[where] = stops.get(where, 0) + 1
        assert state is (HIT if where == "never" else MISS), where
        if state is HIT:
            assert target == BLOCKS[wanted]
    assert min(stops.values()) > 100


def test_readers_beside_a_daemon_that_rewrites_all_the_time_see_whole_blocks_or_none() -> None:
    slot = Slot()
    slot.put(0)
    stop = threading.Event()

    def rewrite() -> None:
        for index in itertools.cycle(range(4)):
            if stop.is_set():
                return
            slot.put(index)

    thread = threading.Thread(target=rewrite)
    thread.start()
    try:
        for turn in range(3000):
            index, target = turn % 4, bytearray(BLANK)
            if slot.load(target, index=index, generation=slot.generation) is HIT:
                assert target == BLOCKS[index]
    finally:
        stop.set()
        thread.join()


def test_a_block_that_changes_while_it_is_stored_does_not_verify() -> None:
    """The checksum is of what the block was before the copy."""
    slot, memory = Slot(), bytearray(BLOCKS[0])
    slot.reserve()
    store_slot(slot.view, memoryview(memory), envelopes=ENVELOPES, block_hash=HASHES[0])
    slot.view[PAYLOAD_OFFSET_BYTES] ^= 1
    slot.set_header(is_readable=True)
    assert slot.load(bytearray(BLANK), index=0, generation=slot.generation) is CORRUPT


# --- the crew


def run(crew: Crew, work: Callable[[int], None], *, count: int, is_stopped: Callable[[], bool] = lambda: False) -> None:
    crew.run(work, block_count=count, block_bytes=4 << 20, is_stopped=is_stopped)


@pytest.mark.parametrize("thread_count_max", [1, 2, 4])
def test_every_block_is_worked_on_once(thread_count_max: int) -> None:
    crew, done = Crew(thread_count_max=thread_count_max), []
    for _ in range(20):
        run(crew, done.append, count=16)
    assert sorted(done) == sorted(list(range(16)) * 20)
    crew.close()


def test_a_stopped_crew_leaves_the_rest() -> None:
    crew, done = Crew(thread_count_max=1), []
    run(crew, done.append, count=16, is_stopped=lambda: len(done) == 3)
    assert done == [0, 1, 2]


@pytest.mark.parametrize("thread_count_max", [1, 2])
def test_an_error_ends_the_work_and_comes_out(thread_count_max: int) -> None:
    crew = Crew(thread_count_max=thread_count_max)

    def fail(index: int) -> None:
        if index == 2:
            raise KeyError(index)

    for _ in range(10):
        with pytest.raises(KeyError):
            run(crew, fail, count=16)
    crew.close()
