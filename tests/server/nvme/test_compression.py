from __future__ import annotations

import struct
import threading
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import CorruptBlockError, InvalidArgumentError
from kvstore_server.nvme import compression
from kvstore_server.nvme.compression import available, compress, decompress_into
from kvstore_server.nvme.format import PAGE_BYTES, StoredCodec

CODECS = (StoredCodec.ZSTD, StoredCodec.LZ4)
MIB = 1 << 20


def bfloat16(size_bytes: int, *, seed: int = 1) -> bytes:
    """As keys and values are: normal, each channel with a scale of its own."""
    random = np.random.default_rng(seed)
    count = -(-size_bytes // 2)
    scales = np.exp(random.standard_normal(128)).astype(np.float32)
    values = random.standard_normal(count).astype(np.float32) * np.resize(scales, count)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()[:size_bytes]


def compressed(
    payload: bytes, *, codec: StoredCodec = StoredCodec.ZSTD, element_bytes: int = 2, level: int = 1
) -> bytes:
    stored = compress(memoryview(payload), codec=codec, element_bytes=element_bytes, level=level)
    assert stored is not None
    return stored


def decompressed(stored: bytes, size_bytes: int, *, codec: StoredCodec, element_bytes: int = 2) -> bytes:
    target = bytearray(b"\xa5" * size_bytes)
    decompress_into(memoryview(stored), memoryview(target), codec=codec, element_bytes=element_bytes)
    return bytes(target)


@st.composite
def payloads(draw: st.DrawFn) -> bytes:
    """Of any length, with enough structure that it is often worth storing compressed."""
    pattern = draw(st.binary(min_size=1, max_size=40))
    repeats = draw(st.integers(0, 12_000 // len(pattern)))
    noise = draw(st.binary(max_size=600))
    return pattern * repeats + noise + draw(st.sampled_from((b"", b"\x00", bytes(5000))))


@given(payload=payloads(), codec=st.sampled_from(CODECS), element_bytes=st.sampled_from((1, 2, 4)))
@settings(deadline=None)
def test_what_is_stored_compressed_comes_back_bit_for_bit_and_a_page_was_saved(
    payload: bytes, codec: StoredCodec, element_bytes: int
) -> None:
    stored = compress(memoryview(payload), codec=codec, element_bytes=element_bytes)
    if stored is not None:
        assert len(stored) < len(payload) - PAGE_BYTES
        assert decompressed(stored, len(payload), codec=codec, element_bytes=element_bytes) == payload


@pytest.mark.parametrize("size_bytes", [64 * 1024, 300_001, 2 * MIB, 2 * MIB - 1])
def test_blocks_of_bfloat16_take_three_quarters_of_their_bytes_or_less(size_bytes: int) -> None:
    payload = bfloat16(size_bytes)
    stored = compressed(payload)
    assert len(stored) <= 0.75 * len(payload)
    assert decompressed(stored, size_bytes, codec=StoredCodec.ZSTD) == payload


def test_higher_levels_find_what_repeats() -> None:
    payload = bfloat16(256 * 1024) * 4
    stored = compressed(payload, level=3)
    assert len(stored) <= 0.5 * len(compressed(payload))
    assert decompressed(stored, len(payload), codec=StoredCodec.ZSTD) == payload


def test_bytes_of_equal_weight_are_apart_without_which_nothing_is_saved() -> None:
    payload = bfloat16(256 * 1024)
    assert len(compressed(payload, element_bytes=2)) < 0.95 * len(compressed(payload, element_bytes=1))


@pytest.mark.parametrize("element_bytes", [1, 2, 4])
def test_the_order_of_shuffled_bytes_is_part_of_the_format(element_bytes: int) -> None:
    payload = bytes(range(250)) * 41  # 10,250: an element is left over for 4, none for 2
    whole_bytes = len(payload) // element_bytes * element_bytes
    planes = [payload[index:whole_bytes:element_bytes] for index in range(element_bytes)]
    shuffled = b"".join(planes) + payload[whole_bytes:]
    stored = compressed(payload, element_bytes=element_bytes)
    assert zstandard.ZstdDecompressor().decompress(stored) == shuffled
    foreign = zstandard.ZstdCompressor(level=9).compress(shuffled)
    assert decompressed(foreign, len(payload), codec=StoredCodec.ZSTD, element_bytes=element_bytes) == payload


@pytest.mark.parametrize("codec", CODECS)
def test_noise_and_what_is_within_a_page_are_stored_raw(codec: StoredCodec) -> None:
    noise = np.random.default_rng(1).bytes(MIB)
    for payload in (noise, bytes(PAGE_BYTES), b""):
        assert compress(memoryview(payload), codec=codec, element_bytes=2) is None


def test_a_payload_of_which_less_than_a_page_is_saved_is_stored_raw() -> None:
    noise = np.random.default_rng(1).bytes(MIB)
    assert compress(memoryview(noise + bytes(PAGE_BYTES)), codec=StoredCodec.ZSTD, element_bytes=1) is None
    stored = compress(memoryview(noise + bytes(2 * PAGE_BYTES)), codec=StoredCodec.ZSTD, element_bytes=1)
    assert stored is not None


def test_raw_is_a_copy_of_exactly_the_payload() -> None:
    payload = bfloat16(9000)
    assert compress(memoryview(payload), codec=StoredCodec.RAW, element_bytes=2) is None
    assert decompressed(payload, 9000, codec=StoredCodec.RAW) == payload
    for size_bytes in (8999, 9001):
        with pytest.raises(CorruptBlockError, match=f"RAW gives 9000 bytes of a payload of {size_bytes}"):
            decompressed(payload, size_bytes, codec=StoredCodec.RAW)


def test_payloads_at_odd_addresses_are_served() -> None:
    payload = bfloat16(64 * 1024)
    stored = compress(memoryview(b"x" + payload)[1:], codec=StoredCodec.ZSTD, element_bytes=2)
    assert stored is not None
    room = bytearray(len(payload) + 2)
    decompress_into(memoryview(b"x" + stored)[1:], memoryview(room)[1:-1], codec=StoredCodec.ZSTD, element_bytes=2)
    assert bytes(room) == b"\x00" + payload + b"\x00"


@pytest.mark.parametrize("codec", CODECS)
def test_a_stored_payload_that_is_cut_off_extended_or_of_another_size_is_corrupt_and_leaves_the_target_alone(
    codec: StoredCodec,
) -> None:
    payload = bytes(range(256)) * 64
    stored = compressed(payload, codec=codec, element_bytes=1)
    wrong = [
        (b"", len(payload)),
        (stored[:3], len(payload)),
        (stored[:-1], len(payload)),
        (stored[: len(stored) // 2], len(payload)),
        (stored + b"\x00", len(payload)),
        (stored + stored, len(payload)),
        (stored, len(payload) - 1),
        (stored, len(payload) + 1),
        (stored, 0),
    ]
    for data, size_bytes in wrong:
        target = bytearray(b"\xa5" * size_bytes)
        with pytest.raises(CorruptBlockError):
            decompress_into(memoryview(data), memoryview(target), codec=codec, element_bytes=1)
        assert bytes(target) == b"\xa5" * size_bytes


@given(data=st.data(), codec=st.sampled_from(CODECS))
@settings(deadline=None)
def test_a_changed_byte_gives_an_error_or_a_payload_for_the_checksum_to_judge_but_never_another_failure(
    data: st.DataObject, codec: StoredCodec
) -> None:
    stored = bytearray(compressed(bfloat16(16 * 1024, seed=3) + bytes(16 * 1024), codec=codec))
    for _ in range(data.draw(st.integers(1, 4))):
        stored[data.draw(st.integers(0, len(stored) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = decompressed(bytes(stored), 32 * 1024, codec=codec)
    except CorruptBlockError:
        return
    assert len(found) == 32 * 1024


@given(stored=st.binary(max_size=200), size_bytes=st.integers(0, 300), codec=st.sampled_from(CODECS))
@settings(deadline=None)
def test_arbitrary_bytes_are_corrupt_or_fill_the_target(stored: bytes, size_bytes: int, codec: StoredCodec) -> None:
    try:
        found = decompressed(stored, size_bytes, codec=codec)
    except CorruptBlockError:
        return
    assert len(found) == size_bytes


def _frame_that_claims(size_bytes: int) -> bytes:
    """A zstd frame of a single segment, with the first of its blocks: 128 KiB of zeros, more to follow."""
    run = (128 * 1024 << 3 | 1 << 1).to_bytes(3, "little") + b"\x00"
    return struct.pack("<IBQ", 0xFD2FB528, 0b1110_0000, size_bytes) + run


@pytest.mark.parametrize(
    "bomb",
    [
        zstandard.ZstdCompressor().compress(bytes(64 * MIB)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 * MIB)),
        _frame_that_claims(1 << 40),
        _frame_that_claims(8192) + b"\x01\x00\x00",
        b"".join([_frame_that_claims(8192)[:-4], *[_frame_that_claims(0)[-4:]] * 10_000]),
        struct.pack("<II", 0x184D2A50, 8192) + bytes(8192),
    ],
    ids=["truthful", "silent", "claims a tebibyte", "holds more than it claims", "never ends", "skippable"],
)
def test_a_bomb_is_corrupt_and_takes_no_more_memory_than_the_target(bomb: bytes) -> None:
    target = memoryview(bytearray(8192))
    with pytest.raises(CorruptBlockError):  # once before, for what is made at first use
        decompress_into(memoryview(bomb), target, codec=StoredCodec.ZSTD, element_bytes=2)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptBlockError):
            decompress_into(memoryview(bomb), target, codec=StoredCodec.ZSTD, element_bytes=2)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 64 * 1024


def test_an_lz4_bomb_is_corrupt() -> None:
    bomb = compressed(bytes(64 * MIB), codec=StoredCodec.LZ4)
    with pytest.raises(CorruptBlockError, match="lz4"):
        decompressed(bomb, 8192, codec=StoredCodec.LZ4)


def test_threads_do_not_disturb_each_other() -> None:
    blocks = [bfloat16(300_000 + 2 * number, seed=number) for number in range(4)]
    wrong: list[int] = []

    def turn(number: int) -> None:
        for _ in range(20):
            stored = compress(memoryview(blocks[number]), codec=StoredCodec.ZSTD, element_bytes=2)
            target = bytearray(len(blocks[number]))
            if stored is not None:
                decompress_into(memoryview(stored), memoryview(target), codec=StoredCodec.ZSTD, element_bytes=2)
            if target != blocks[number]:
                wrong.append(number)

    threads = [threading.Thread(target=turn, args=(number,)) for number in range(len(blocks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_without_lz4_it_is_not_available_and_its_blocks_read_as_corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available() == frozenset(StoredCodec)
    stored = compressed(bytes(16 * 1024), codec=StoredCodec.LZ4)
    monkeypatch.setattr(compression, "lz4_block", None)  # as after an ImportError
    assert available() == {StoredCodec.RAW, StoredCodec.ZSTD}
    with pytest.raises(CorruptBlockError, match="needs the extra `compression`"):
        decompressed(stored, 16 * 1024, codec=StoredCodec.LZ4)
    with pytest.raises(InvalidArgumentError, match="codec is 'LZ4'; allowed: RAW, ZSTD; LZ4 needs the extra"):
        compress(memoryview(bytes(16 * 1024)), codec=StoredCodec.LZ4, element_bytes=2)


def test_arguments_out_of_range_are_named() -> None:
    payload = memoryview(bytes(16 * 1024))
    with pytest.raises(InvalidArgumentError, match="element_bytes is 3; allowed: 1, 2 or 4"):
        compress(payload, codec=StoredCodec.ZSTD, element_bytes=3)
    with pytest.raises(InvalidArgumentError, match="element_bytes is 8; allowed: 1, 2 or 4"):
        decompressed(b"", 0, codec=StoredCodec.RAW, element_bytes=8)
    for level in (0, 23):
        with pytest.raises(InvalidArgumentError, match=f"level is {level}; allowed: 1 to 22"):
            compress(payload, codec=StoredCodec.ZSTD, element_bytes=2, level=level)
