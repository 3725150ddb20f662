"""How the blocks of each namespace are stored: as compression was found to pay, or as the operator wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore_server.core.compress_choice import CompressionChoice, CompressionSample, DeviceRates
from kvstore_server.core.tenants import ScopedId
from kvstore_server.nvme.format import StoredCodec

_WEIGHT = 0.2
"""Of the newest batch in what writing is taken to cost."""


class Coding(NamedTuple):
    """How one block is to be stored."""

    codec: StoredCodec
    element_bytes: int
    """Of the payload's elements, whose bytes are sorted by weight before they are compressed."""
    is_trial: bool = False
    """Whether to measure what it costs."""


class Codings:
    """Used on the loop only."""

    def __init__(
        self,
        element_bytes_of: Callable[[ScopedId], int],
        *,
        candidates: Sequence[StoredCodec],
        forced: StoredCodec | None = None,
    ) -> None:
        """`candidates` are tried, and used where they pay; `forced` is used whatever it costs."""
        self._element_bytes_of = element_bytes_of
        self._candidates = candidates
        self._forced = forced
        self._choices: dict[ScopedId, CompressionChoice[StoredCodec]] = {}
        self._rates: DeviceRates | None = None

    def element_bytes(self, namespace_id: ScopedId) -> int:
        return self._element_bytes_of(namespace_id)

    def next(self, namespace_id: ScopedId) -> Coding:
        """For the next block that is written."""
        element_bytes = self._element_bytes_of(namespace_id)
        if self._forced is not None:
            return Coding(self._forced, element_bytes)
        if not self._candidates:
            return Coding(StoredCodec.RAW, element_bytes)
        choice = self._choice(namespace_id)
        trial = choice.next_trial()
        if trial is not None:
            return Coding(trial, element_bytes, is_trial=True)
        return Coding(choice.codec or StoredCodec.RAW, element_bytes)

    def note_sample(self, namespace_id: ScopedId, codec: StoredCodec, sample: CompressionSample) -> None:
        self._choice(namespace_id).add_sample(codec, sample)

    def note_written(self, *, size_bytes: int, elapsed_s: float, read_bytes_per_s: float) -> None:
        """One batch, as it was stored, and what reading costs at present."""
        rate = size_bytes / max(elapsed_s, 1e-6)
        if self._rates is not None:
            rate = (1 - _WEIGHT) * self._rates.write_bytes_per_s + _WEIGHT * rate
        self._rates = DeviceRates(write_bytes_per_s=rate, read_bytes_per_s=read_bytes_per_s)
        for choice in self._choices.values():
            choice.set_rates(self._rates)

    def reasons(self) -> dict[ScopedId, str]:
        """Why each namespace is stored as it is."""
        return {namespace_id: choice.reason for namespace_id, choice in self._choices.items()}

    def _choice(self, namespace_id: ScopedId) -> CompressionChoice[StoredCodec]:
        choice = self._choices.get(namespace_id)
        if choice is None:
            choice = self._choices[namespace_id] = CompressionChoice(self._candidates)
            if self._rates is not None:
                choice.set_rates(self._rates)
        return choice
