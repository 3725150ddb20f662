"""A device in host memory: the same asynchrony as a GPU's copy engine, on every machine."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvstore.errors import CapacityError, InternalError


@dataclass(slots=True)
class _CpuEvent:
    _retired: threading.Event = field(default_factory=threading.Event)
    _failure: str | None = None

    def wait(self) -> None:
        self._retired.wait()
        if self._failure is not None:
            raise InternalError(f"copy failed: {self._failure}")

    def retire(self, failure: str | None = None) -> None:
        self._failure = failure
        self._retired.set()


@dataclass(frozen=True, slots=True)
class _Copy:
    source: Tensor
    source_rows: Sequence[int]
    target: Tensor
    target_rows: Sequence[int]
    event: _CpuEvent


class CpuDevice:
    """A worker thread is the copy stream: copies happen later and in order, and read their source only then.

    `latency_s` before each submission's copies and `link_bytes_per_s` between its rows imitate a slow link,
    so that whoever does not wait for an event is caught reading too early or overwriting too soon.
    """

    def __init__(self, *, latency_s: float = 0.0, link_bytes_per_s: float | None = None) -> None:
        self._latency_s = latency_s
        self._link_bytes_per_s = link_bytes_per_s
        self._copies: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._run, name="kvstore-agent-copies", daemon=True)
        self._worker.start()

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def memory_bytes(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def allocate_pool(self, *, slot_count: int, block_bytes: int) -> Tensor:
        return _allocate(slot_count, block_bytes)

    def allocate_staging(self, *, row_count: int, block_bytes: int) -> Tensor:
        return _allocate(row_count, block_bytes)

    def copy_rows(
        self, *, source: Tensor, source_rows: Sequence[int], target: Tensor, target_rows: Sequence[int]
    ) -> _CpuEvent:
        assert len(source_rows) == len(target_rows), f"{len(source_rows)} rows into {len(target_rows)}"
        event = _CpuEvent()
        self._copies.put(_Copy(source, tuple(source_rows), target, tuple(target_rows), event))
        return event

    def copy_rows_for_caller(
        self, *, source: Tensor, source_rows: Sequence[int], target: Tensor, target_rows: Sequence[int]
    ) -> _CpuEvent:
        event = self.copy_rows(source=source, source_rows=source_rows, target=target, target_rows=target_rows)
        event.wait()
        return event

    def close(self) -> None:
        self._copies.put(None)
        self._worker.join()

    def _run(self) -> None:
        while (copy := self._copies.get()) is not None:
            try:
                self._copy(copy)
            except RuntimeError as error:  # what torch raises for tensors that do not fit each other
                copy.event.retire(str(error))
            else:
                copy.event.retire()

    def _copy(self, copy: _Copy) -> None:
        if self._latency_s:
            time.sleep(self._latency_s)
        for source_row, target_row in zip(copy.source_rows, copy.target_rows, strict=True):
            if self._link_bytes_per_s is not None:
                time.sleep(copy.source.shape[1] / self._link_bytes_per_s)
            copy.target[target_row].copy_(copy.source[source_row])


def _allocate(row_count: int, block_bytes: int) -> Tensor:
    try:
        return torch.empty((row_count, block_bytes), dtype=torch.uint8)
    except RuntimeError as error:
        raise CapacityError(f"no {row_count * block_bytes} bytes of host memory: {error}") from error
