from __future__ import annotations

from enum import IntEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_server.core.compress_choice import (
    CompressionChoice,
    CompressionLimits,
    CompressionSample,
    DeviceRates,
)


class Codec(IntEnum):
    ZSTD = 1
    LZ4 = 2


LIMITS = CompressionLimits(samples_count=4, blocks_between_samples=10)
RAW_BYTES = 1_000_000
SLOW_DISK = DeviceRates(write_bytes_per_s=0.25e9, read_bytes_per_s=0.25e9)
"""A raw block takes 4 ms either way."""


def sample(
    *, stored_bytes: int = 670_000, compress_s: float = 0.001, decompress_s: float = 0.0005
) -> CompressionSample:
    """On the slow disk, with what is not said: 0.92 of the time to write, 0.795 of that to read."""
    return CompressionSample(RAW_BYTES, stored_bytes, compress_s, decompress_s)


def choice_of(
    samples: dict[Codec, CompressionSample],
    rates: DeviceRates | None = SLOW_DISK,
    *,
    limits: CompressionLimits = LIMITS,
) -> CompressionChoice[Codec]:
    choice = CompressionChoice(list(samples), limits=limits)
    if rates is not None:
        choice.set_rates(rates)
    feed(choice, samples)
    return choice


def feed(choice: CompressionChoice[Codec], samples: dict[Codec, CompressionSample]) -> None:
    """As many of each as count."""
    for codec, one in samples.items():
        for _ in range(LIMITS.samples_count):
            choice.add_sample(codec, one)


def test_compression_pays_when_it_saves_more_time_than_it_takes() -> None:
    choice = choice_of({Codec.ZSTD: sample()})
    assert choice.codec is Codec.ZSTD
    assert (
        choice.reason == "zstd: 0.67 of the bytes of raw blocks, 0.92 of the time to write them and 0.80 to read them"
    )


def test_on_a_disk_faster_than_the_codec_blocks_are_stored_raw() -> None:
    # 0.67 + 1 ms * 2 GB/s / 1 MB = 2.67
    choice = choice_of({Codec.ZSTD: sample()}, DeviceRates(write_bytes_per_s=2e9, read_bytes_per_s=2e9))
    assert choice.codec is None
    assert choice.reason == "raw: zstd takes 2.67 of the time to write raw blocks; worth it: 0.95"


def test_reads_must_not_become_slower_however_much_writes_gain_and_however_many_cores_are_idle() -> None:
    # 0.67 + 0.5 ms * 1 GB/s / 1 MB = 1.17
    rates = DeviceRates(write_bytes_per_s=0.25e9, read_bytes_per_s=1e9, idle_cores=64.0)
    choice = choice_of({Codec.ZSTD: sample()}, rates)
    assert choice.codec is None
    assert choice.reason == "raw: zstd takes 1.17 of the time to read raw blocks; worth it: 0.95"


@pytest.mark.parametrize(("stored_bytes", "pays"), [(840_000, True), (860_000, False), (RAW_BYTES, False)])
def test_less_than_a_tenth_and_the_margin_saved_does_not_pay_even_when_cpu_time_is_free(
    stored_bytes: int, pays: bool
) -> None:
    choice = choice_of({Codec.ZSTD: sample(stored_bytes=stored_bytes, compress_s=0.0, decompress_s=0.0)})
    assert (choice.codec is Codec.ZSTD) == pays
    if not pays:
        assert (
            choice.reason
            == f"raw: zstd needs {stored_bytes / RAW_BYTES:.2f} of the bytes of raw blocks; worth it: 0.85"
        )


@pytest.mark.parametrize(("idle_cores", "pays"), [(4.0, True), (1.0, True), (0.5, False), (0.0, False)])
def test_compression_takes_longer_the_fewer_cores_are_idle(idle_cores: float, pays: bool) -> None:
    # 0.67 + 0.25 / idle cores
    rates = DeviceRates(write_bytes_per_s=0.25e9, read_bytes_per_s=0.25e9, idle_cores=idle_cores)
    assert (choice_of({Codec.ZSTD: sample()}, rates).codec is Codec.ZSTD) == pays


def test_blocks_are_raw_until_disk_and_codec_have_been_measured() -> None:
    choice = CompressionChoice([Codec.ZSTD], limits=LIMITS)
    assert (choice.codec, choice.reason) == (None, "raw: the disk has not been measured yet")
    choice.set_rates(SLOW_DISK)
    for count in range(LIMITS.samples_count):
        assert (choice.codec, choice.reason) == (None, f"raw: {count} of 4 blocks tried with zstd")
        choice.add_sample(Codec.ZSTD, sample())
    assert choice.codec is Codec.ZSTD


def test_without_a_codec_blocks_are_raw_and_nothing_is_tried() -> None:
    choice: CompressionChoice[Codec] = CompressionChoice([], limits=LIMITS)
    choice.set_rates(SLOW_DISK)
    assert (choice.codec, choice.reason) == (None, "raw: no codec is available")
    assert [choice.next_trial() for _ in range(50)] == [None] * 50


def test_the_first_blocks_are_tried_with_each_codec_and_then_one_each_per_so_many_blocks() -> None:
    choice = CompressionChoice([Codec.ZSTD, Codec.LZ4], limits=LIMITS)
    assert [choice.next_trial() for _ in range(8)] == [Codec.ZSTD, Codec.LZ4] * 4
    for _ in range(3):
        assert [choice.next_trial() for _ in range(12)] == [None] * 10 + [Codec.ZSTD, Codec.LZ4]


def test_a_codec_on_the_line_stays_as_it_is() -> None:
    inside, between, outside = (sample(compress_s=seconds) for seconds in (0.001, 0.00125, 0.0014))  # 0.92, 0.98, 1.02
    choice = choice_of({Codec.ZSTD: between})
    assert choice.codec is None
    feed(choice, {Codec.ZSTD: inside})
    assert choice.codec is Codec.ZSTD
    feed(choice, {Codec.ZSTD: between})
    assert choice.codec is Codec.ZSTD
    feed(choice, {Codec.ZSTD: outside})
    assert choice.codec is None
    feed(choice, {Codec.ZSTD: between})
    assert choice.codec is None


def test_the_better_of_two_codecs_is_used_and_leaves_only_to_one_better_by_the_margin() -> None:
    zstd = sample()  # writes 0.92, reads 0.795
    choice = choice_of({Codec.ZSTD: zstd, Codec.LZ4: sample(compress_s=0.0005)})  # writes 0.795
    assert choice.codec is Codec.LZ4
    choice = choice_of({Codec.ZSTD: zstd})
    other = CompressionChoice([Codec.ZSTD, Codec.LZ4], limits=LIMITS)
    other.set_rates(SLOW_DISK)
    feed(other, {Codec.ZSTD: zstd, Codec.LZ4: sample(compress_s=0.0007)})  # better by 0.0375, in the mean
    assert other.codec is choice.codec is Codec.ZSTD
    feed(other, {Codec.LZ4: sample(compress_s=0.0005)})  # better by 0.0625
    assert other.codec is Codec.LZ4


def test_one_codec_that_does_not_pay_hides_no_other() -> None:
    choice = choice_of({Codec.ZSTD: sample(stored_bytes=RAW_BYTES), Codec.LZ4: sample()})
    assert choice.codec is Codec.LZ4
    choice = choice_of({Codec.ZSTD: sample(stored_bytes=RAW_BYTES), Codec.LZ4: sample(compress_s=1.0)})
    assert choice.codec is None
    assert "zstd needs 1.00 of the bytes" in choice.reason
    assert "lz4 takes 250.67 of the time to write" in choice.reason


def test_one_stalled_sample_does_not_decide() -> None:
    choice = choice_of({Codec.ZSTD: sample()})
    choice.add_sample(Codec.ZSTD, sample(compress_s=10.0, decompress_s=10.0))
    assert choice.codec is Codec.ZSTD


def test_the_choice_follows_the_disk() -> None:
    choice = choice_of({Codec.ZSTD: sample()})
    choice.set_rates(DeviceRates(write_bytes_per_s=2e9, read_bytes_per_s=2e9))
    assert choice.codec is None
    choice.set_rates(SLOW_DISK)
    assert choice.codec is Codec.ZSTD


@given(
    stored_bytes=st.integers(1, RAW_BYTES),
    compress_s=st.floats(0, 0.01),
    decompress_s=st.floats(0, 0.01),
    write_rate=st.floats(1e6, 1e10),
    read_rate=st.floats(1e6, 1e10),
    idle_cores=st.floats(0.01, 64),
)
def test_a_codec_in_use_always_saves_space_and_time(
    stored_bytes: int,
    compress_s: float,
    decompress_s: float,
    write_rate: float,
    read_rate: float,
    idle_cores: float,
) -> None:
    rates = DeviceRates(write_bytes_per_s=write_rate, read_bytes_per_s=read_rate, idle_cores=idle_cores)
    one = sample(stored_bytes=stored_bytes, compress_s=compress_s, decompress_s=decompress_s)
    choice = choice_of({Codec.ZSTD: one}, rates)
    if choice.codec is not None:
        assert stored_bytes <= 0.9 * RAW_BYTES
        assert RAW_BYTES / write_rate > stored_bytes / write_rate + compress_s / idle_cores
        assert RAW_BYTES / read_rate >= stored_bytes / read_rate + decompress_s
