"""Whether blocks of a namespace are worth compressing for the disk, and how."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import Generic, NamedTuple, TypeVar

Codec = TypeVar("Codec", bound=Enum)


class CompressionSample(NamedTuple):
    """One block, compressed and decompressed by one thread; `stored_bytes` is `raw_bytes` when nothing was saved."""

    raw_bytes: int
    stored_bytes: int
    compress_s: float
    decompress_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """What the disk does with bytes as they are stored, and the CPU time that is left for it."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    idle_cores: float = 1.0
    """Cores with nothing else to do. Blocks are compressed side by side: 2.0 halves the time, 0.5 doubles it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionLimits:
    samples_count: int = 8
    """Blocks per codec to try first, and the latest of which count. One stall among them changes no median."""
    blocks_between_samples: int = 1000
    """Then one block per codec is tried each time; that takes as long as writing 3 blocks or so: 0.3 %."""
    size_share_max: float = 0.9
    """Of a raw block's bytes: less than a tenth saved is not worth the CPU, whatever the disk."""
    margin: float = 0.05
    """Of a raw block's bytes and times: a codec that is not in use has to be better than it must be by this much."""


class _Shares(NamedTuple):
    """Of a raw block: its size, the time to write it and the time to read it."""

    size: float
    write: float
    read: float


class CompressionChoice(Generic[Codec]):
    """Learns from samples what compression costs and saves in one namespace. Neither compresses nor measures.

    A codec is chosen when it saves space, when writes with it are faster, and when reads are not slower: a read
    waits for its own decompression, so idle cores do not count there. The choice changes only by more than a
    margin, so that what lies on the line does not go to and fro.
    """

    def __init__(self, codecs: Sequence[Codec], *, limits: CompressionLimits | None = None) -> None:
        """`codecs` are those that are available, raw left out; in order of preference where it makes no difference."""
        self._limits = limits or CompressionLimits()
        self._samples: dict[Codec, deque[CompressionSample]] = {
            codec: deque(maxlen=self._limits.samples_count) for codec in codecs
        }
        self._rates: DeviceRates | None = None
        self._to_try: list[Codec] = list(codecs) * self._limits.samples_count
        self._blocks_count = 0
        self.codec: Codec | None = None
        """What to store blocks with; None: raw."""
        self.reason = ""
        """Why, for people."""
        self._choose()

    def next_trial(self) -> Codec | None:
        """Called once per block that is to be written: the codec to try on it, for a call of `add_sample`, or None."""
        if self._to_try:
            return self._to_try.pop(0)
        self._blocks_count += 1
        if self._blocks_count >= self._limits.blocks_between_samples:
            self._blocks_count = 0
            self._to_try = list(self._samples)
        return None

    def add_sample(self, codec: Codec, sample: CompressionSample) -> None:
        assert sample.raw_bytes > 0, f"a sample of {sample.raw_bytes} bytes"
        self._samples[codec].append(sample)
        self._choose()

    def set_rates(self, rates: DeviceRates) -> None:
        assert rates.write_bytes_per_s > 0, f"write_bytes_per_s is {rates.write_bytes_per_s}"
        assert rates.read_bytes_per_s > 0, f"read_bytes_per_s is {rates.read_bytes_per_s}"
        assert rates.idle_cores >= 0, f"idle_cores is {rates.idle_cores}"
        self._rates = rates
        self._choose()

    def _choose(self) -> None:
        if not self._samples:
            self._decide(None, "no codec is available")
            return
        if self._rates is None:
            self._decide(None, "the disk has not been measured yet")
            return
        best: tuple[float, Codec, _Shares] | None = None
        refusals: list[str] = []
        for codec, samples in self._samples.items():
            if len(samples) < self._limits.samples_count:
                refusals.append(f"{len(samples)} of {self._limits.samples_count} blocks tried with {_name(codec)}")
                continue
            shares = _shares(samples, self._rates)
            margin = 0.0 if codec is self.codec else self._limits.margin
            refusal = self._refusal(shares, margin=margin)
            if refusal is not None:
                refusals.append(f"{_name(codec)} {refusal}")
                continue
            # Mean of the times; whoever is not in use must be better than who is by the margin.
            cost = (shares.write + shares.read) / 2 + margin
            if best is None or cost < best[0]:
                best = (cost, codec, shares)
        if best is None:
            self._decide(None, "; ".join(refusals))
            return
        _, codec, shares = best
        self._decide(
            codec,
            f"{shares.size:.2f} of the bytes of raw blocks, {shares.write:.2f} of the time to write them and "
            f"{shares.read:.2f} to read them",
        )

    def _refusal(self, shares: _Shares, *, margin: float) -> str | None:
        """Why a codec does not pay, or None: it does."""
        size_max, time_max = self._limits.size_share_max - margin, 1.0 - margin
        if shares.size > size_max:
            return f"needs {shares.size:.2f} of the bytes of raw blocks; worth it: {size_max:.2f}"
        if shares.write > time_max:
            return f"takes {shares.write:.2f} of the time to write raw blocks; worth it: {time_max:.2f}"
        if shares.read > time_max:
            return f"takes {shares.read:.2f} of the time to read raw blocks; worth it: {time_max:.2f}"
        return None

    def _decide(self, codec: Codec | None, why: str) -> None:
        self.codec = codec
        self.reason = f"{'raw' if codec is None else _name(codec)}: {why}"


def _shares(samples: Collection[CompressionSample], rates: DeviceRates) -> _Shares:
    size = sum(sample.stored_bytes for sample in samples) / sum(sample.raw_bytes for sample in samples)
    compress_s = median(sample.compress_s / sample.raw_bytes for sample in samples)
    decompress_s = median(sample.decompress_s / sample.raw_bytes for sample in samples)
    # Per raw byte; raw, it takes 1 / rate. No idle core at all: compression would never end.
    compressed_s = compress_s / rates.idle_cores if rates.idle_cores else float("inf")
    return _Shares(
        size=size,
        write=size + compressed_s * rates.write_bytes_per_s,
        read=size + decompress_s * rates.read_bytes_per_s,
    )


def _name(codec: Enum) -> str:
    return codec.name.lower()
