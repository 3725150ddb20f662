"""No damage, no lie and no mix-up on the way turns into a hit."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ProtocolError
from kvstore.frames import ReadFrame, decode_read_frame, encode_read_frame
from kvstore.messages import BlockState
from kvstore_client.flows.assembly import BlockAssembler
from tests.client.builders import chain, enveloped, namespace, payloads

SPACE = namespace(model="assembly", payload_bytes=64)
OTHER = namespace(model="assembly", payload_bytes=64, layout="NHD")
PAYLOAD_BYTES = 64
HASHES = chain(4)
PAYLOADS = payloads(SPACE, 4)
BLOCKS = [enveloped(SPACE, block_hash, payload) for block_hash, payload in zip(HASHES, PAYLOADS, strict=True)]
BLANK = b"\x55" * PAYLOAD_BYTES
HIT, MISS, CORRUPT = BlockState.HIT, BlockState.MISS, BlockState.CORRUPT


class Reader:
    def __init__(self, block_count: int = 4) -> None:
        self.memory = bytearray(BLANK * block_count)
        view = memoryview(self.memory)
        self.assembler = BlockAssembler(
            namespace_id=SPACE.id,
            hashes=HASHES[:block_count],
            targets=[view[start : start + PAYLOAD_BYTES] for start in range(0, len(view), PAYLOAD_BYTES)],
            payload_bytes=PAYLOAD_BYTES,
        )

    def take(self, *frames: ReadFrame) -> bool:
        """Feeds frames as a driver does; False when the stream was given up."""
        try:
            for frame in frames:
                self.assembler.accept(frame)
        except ProtocolError:
            return False
        return True

    def check(self) -> list[BlockState]:
        """A hit is right, everything else untouched."""
        for index, state in enumerate(self.assembler.states):
            found = self.memory[index * PAYLOAD_BYTES : (index + 1) * PAYLOAD_BYTES]
            assert found == (PAYLOADS[index] if state is HIT else BLANK), f"block {index} is {state.name}"
        return self.assembler.states


def whole(index: int, block: bytes | None = None, *, size_bytes: int | None = None, offset_bytes: int = 0) -> ReadFrame:
    block = BLOCKS[index] if block is None else block
    return ReadFrame(
        block_index=index,
        block_state=HIT,
        offset_bytes=offset_bytes,
        size_bytes=len(block) if size_bytes is None else size_bytes,
        data=memoryview(block),
    )


def without(index: int, state: BlockState = MISS) -> ReadFrame:
    return ReadFrame(block_index=index, block_state=state)


def pieces(index: int, cuts: list[int]) -> list[ReadFrame]:
    edges = [0, *sorted(set(cuts)), len(BLOCKS[index])]
    return [
        ReadFrame(
            block_index=index,
            block_state=HIT,
            offset_bytes=start,
            size_bytes=len(BLOCKS[index]),
            data=memoryview(BLOCKS[index])[start:end],
        )
        for start, end in itertools.pairwise(edges)
    ]


def test_blocks_in_one_frame_and_blocks_without_data() -> None:
    reader = Reader()
    assert reader.take(whole(0), without(1), whole(2), without(3, BlockState.PENDING))
    assert reader.check() == [HIT, MISS, HIT, BlockState.PENDING]


def test_a_block_that_is_skipped_is_a_miss() -> None:
    reader = Reader()
    assert reader.take(whole(1), whole(3))
    assert reader.check() == [MISS, HIT, MISS, HIT]


@given(st.lists(st.lists(st.integers(1, len(BLOCKS[0]) - 1), max_size=5), min_size=4, max_size=4))
def test_a_block_may_come_in_any_number_of_frames(cuts: list[list[int]]) -> None:
    reader = Reader()
    for index in range(4):
        assert reader.take(*pieces(index, cuts[index]))
    assert reader.check() == [HIT] * 4


def test_a_block_whose_daemon_gives_up_half_way_is_what_it_says() -> None:
    reader = Reader(2)
    assert reader.take(pieces(0, [100])[0], without(0, CORRUPT), *pieces(1, [5, 100]))
    assert reader.check() == [CORRUPT, HIT]
    assert list(reader.assembler.unverified) == []


def test_a_stream_that_ends_early_leaves_a_miss() -> None:
    reader = Reader(1)
    assert reader.take(*pieces(0, [10, 100])[:2])
    assert reader.check() == [MISS]


def test_any_flipped_bit_of_a_message_is_never_a_wrong_hit() -> None:
    message = encode_read_frame(whole(1))
    for position in range(len(message)):
        for bit in range(8):
            damaged = bytearray(message)
            damaged[position] ^= 1 << bit
            reader = Reader(2)
            try:
                frame = decode_read_frame(bytes(damaged))
            except ProtocolError:
                continue
            reader.take(frame)
            reader.check()


def test_any_flipped_bit_of_a_block_is_a_miss_and_noticed() -> None:
    for position in range(len(BLOCKS[0])):
        damaged = bytearray(BLOCKS[0])
        damaged[position] ^= 1 << position % 8
        reader = Reader(1)
        assert reader.take(whole(0, bytes(damaged)))
        assert reader.check() == [CORRUPT]
        assert list(reader.assembler.unverified) == [HASHES[0]]
        assert reader.assembler.first_fault is not None


@pytest.mark.parametrize(
    "lie",
    [
        enveloped(SPACE, HASHES[1], PAYLOADS[0]),
        enveloped(OTHER, HASHES[0], PAYLOADS[0]),
        BLOCKS[1],
        BLOCKS[0][:128] + PAYLOADS[1],
        bytes(len(BLOCKS[0])),
    ],
    ids=["key of another block", "other layout's namespace", "another block", "another payload", "zeros"],
)
def test_a_sound_block_that_was_not_asked_for_is_corrupt(lie: bytes) -> None:
    reader = Reader(2)
    assert reader.take(whole(0, lie), whole(1))
    assert reader.check() == [CORRUPT, HIT]


@pytest.mark.parametrize(
    "frames",
    [
        [whole(2)],
        [whole(1), whole(0)],
        [whole(0), whole(0)],
        [without(0), whole(0)],
        [whole(0, BLOCKS[0][:-1])],
        [whole(0, BLOCKS[0] + b"\0")],
        [whole(0, b"")],
        [whole(0, size_bytes=1 << 40)],
        [whole(0, size_bytes=0)],
        [whole(0, offset_bytes=1)],
        [whole(0, BLOCKS[0][:10], size_bytes=len(BLOCKS[0]), offset_bytes=len(BLOCKS[0]) - 10)],
        [pieces(0, [10, 20])[0], pieces(0, [10, 20])[2]],
        [pieces(0, [10, 20])[0], pieces(0, [10, 20])[0]],
        [pieces(0, [10])[0], whole(0)],
        [pieces(0, [10])[0], whole(1)],
        [pieces(0, [10])[0], without(1)],
        [pieces(0, [10])[0], whole(0, BLOCKS[0], size_bytes=len(BLOCKS[0]), offset_bytes=10)],
        [whole(0, enveloped(namespace(payload_bytes=128), HASHES[0], bytes(128)))],
    ],
)
def test_a_stream_that_breaks_the_contract_is_given_up(frames: list[ReadFrame]) -> None:
    reader = Reader(2)
    assert not reader.take(*frames)
    reader.check()


@given(st.integers(0, 1 << 64), st.integers(0, 20))
def test_however_frames_are_shuffled_cut_and_mixed_a_hit_is_right(seed: int, frame_count: int) -> None:
    rng = random.Random(seed)
    reader = Reader()
    for _ in range(frame_count):
        start, end = sorted(rng.choices(range(len(BLOCKS[0]) + 1), k=2))
        source = rng.choice(BLOCKS)
        frame = ReadFrame(
            block_index=rng.randrange(6),
            block_state=rng.choice([HIT, HIT, HIT, MISS, CORRUPT]),
            offset_bytes=rng.choice([0, start]),
            size_bytes=rng.choice([len(source), len(source), end]),
            data=memoryview(source)[rng.choice([0, start]) : rng.choice([len(source), end])],
        )
        reader.take(frame)
        reader.check()
