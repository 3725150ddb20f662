"""Where the K and V of sequences are while an engine computes on them: three ways that the benchmark compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from gpu_agent.agent import GpuAgent
from gpu_agent.device import Device
from gpu_agent.pins import Pinned
from gpu_agent.rows import as_buffer
from kvstore.errors import CapacityError, UnavailableError
from kvstore.keys import BlockHash
from kvstore.namespace import Namespace
from kvstore.slots import SlotAllocator, SlotId
from kvstore_client.client import Client

_PUT_COUNT_MAX = 64
"""Blocks of one call of the naive pool, and of its staging."""

Queue = Sequence[tuple[str, int]]


class Pool(Protocol):
    """Slots of `memory` for blocks. A sequence's blocks stay in theirs from `start` to `stop`."""

    @property
    def memory(self) -> Tensor: ...

    @property
    def peak_count(self) -> int:
        """Slots that were in use at the same time, at most."""

    def step(self, queue: Queue) -> None:
        """A step begins; who waits behind it, and when it is expected to start."""

    def start(self, sequence: str, blocks: Sequence[BlockHash]) -> list[SlotId]:
        """Where the leading blocks are; those behind them are lost."""

    def reserve(self, count: int) -> list[SlotId]:
        """Slots for blocks that are being computed."""

    def seal(self, sequence: str, slots: Sequence[SlotId], blocks: Sequence[BlockHash]) -> list[SlotId]:
        """Reserved slots hold full blocks now; `blocks` are all of the sequence, the new ones last.

        Returns where the leading ones of all are.
        """

    def discard(self, slots: Sequence[SlotId]) -> None: ...

    def stop(self, sequence: str) -> None: ...

    def finish(self, sequence: str) -> None:
        """The sequence will not start again."""


class _Slots:
    """A pool's memory of its own, and how much of it is used."""

    def __init__(self, device: Device, *, slot_count: int, block_bytes: int) -> None:
        self.memory = device.allocate_pool(slot_count=slot_count, block_bytes=block_bytes)
        self.peak_count = 0
        self._allocator = SlotAllocator(slot_count=slot_count)

    def reserve(self, count: int) -> list[SlotId]:
        slots = [slot for slot in (self._allocator.allocate() for _ in range(count)) if slot is not None]
        if len(slots) < count:
            raise CapacityError(f"{self._allocator.slot_count} slots are too few for one step")
        self.peak_count = max(self.peak_count, self._allocator.slot_count - self._allocator.free_count)
        return slots

    def discard(self, slots: Sequence[SlotId]) -> None:
        for slot in slots:
            self._allocator.release(slot)


class WholePool(_Slots):
    """No tiering: there is room for all."""

    def __init__(self, device: Device, *, slot_count: int, block_bytes: int) -> None:
        super().__init__(device, slot_count=slot_count, block_bytes=block_bytes)
        self._slot_of: dict[BlockHash, SlotId] = {}

    def step(self, queue: Queue) -> None:
        """Nobody needs to know."""

    def start(self, sequence: str, blocks: Sequence[BlockHash]) -> list[SlotId]:
        return [self._slot_of[block] for block in blocks]

    def seal(self, sequence: str, slots: Sequence[SlotId], blocks: Sequence[BlockHash]) -> list[SlotId]:
        self._slot_of.update(zip(blocks[len(blocks) - len(slots) :], slots, strict=True))
        return self.start(sequence, blocks)

    def stop(self, sequence: str) -> None:
        """Its blocks stay."""

    def finish(self, sequence: str) -> None:
        """Its blocks stay: a prefix cache."""


class OffloadingPool(_Slots):
    """Naive full offload: all blocks of a sequence are fetched when it starts, and brought away when it stops."""

    def __init__(self, device: Device, client: Client, namespace: Namespace, *, slot_count: int) -> None:
        block_bytes = namespace.block_layout.payload_bytes
        super().__init__(device, slot_count=slot_count, block_bytes=block_bytes)
        self.moved_count = 0
        self._device = device
        self._client = client
        self._namespace = namespace
        self._staging = device.allocate_staging(row_count=_PUT_COUNT_MAX, block_bytes=block_bytes)
        self._slots_of: dict[str, list[SlotId]] = {}
        self._blocks_of: dict[str, list[BlockHash]] = {}

    def step(self, queue: Queue) -> None:
        """Nothing is done ahead."""

    def start(self, sequence: str, blocks: Sequence[BlockHash]) -> list[SlotId]:
        slots = self.reserve(len(blocks))
        for first in range(0, len(blocks), _PUT_COUNT_MAX):
            part, targets = blocks[first : first + _PUT_COUNT_MAX], slots[first : first + _PUT_COUNT_MAX]
            rows = as_buffer(self._staging, start_row=0, end_row=len(part))
            found = self._client.get(self._namespace, part, rows)
            if found.error is not None:
                raise UnavailableError(f"the daemon did not answer: {found.error}")
            self._copy(self._staging, range(len(part)), self.memory, targets)
        self._slots_of[sequence], self._blocks_of[sequence] = list(slots), list(blocks)
        return slots

    def seal(self, sequence: str, slots: Sequence[SlotId], blocks: Sequence[BlockHash]) -> list[SlotId]:
        self._slots_of[sequence] += slots
        self._blocks_of[sequence] = list(blocks)
        return list(self._slots_of[sequence])

    def stop(self, sequence: str) -> None:
        slots, blocks = self._slots_of.pop(sequence), self._blocks_of.pop(sequence)
        for first in range(0, len(blocks), _PUT_COUNT_MAX):
            part, sources = blocks[first : first + _PUT_COUNT_MAX], slots[first : first + _PUT_COUNT_MAX]
            self._copy(self.memory, sources, self._staging, range(len(part)))
            rows = as_buffer(self._staging, start_row=0, end_row=len(part))
            parent = blocks[first - 1] if first else None
            result = self._client.put(self._namespace, part, rows, parent_hash=parent)
            if result.error is not None:
                raise UnavailableError(f"the daemon did not answer: {result.error}")
        self.discard(slots)

    def finish(self, sequence: str) -> None:
        """The daemon has its blocks."""

    def _copy(self, source: Tensor, source_rows: Sequence[int], target: Tensor, target_rows: Sequence[int]) -> None:
        self._device.copy_rows(source=source, source_rows=source_rows, target=target, target_rows=target_rows).wait()
        self.moved_count += len(source_rows)


class AgentPool:
    """An agent that is told what the engine knows of its queue."""

    def __init__(self, agent: GpuAgent, *, settle: Callable[[], None] = lambda: None) -> None:
        """`settle` is called behind each step, for who wants to wait until all that it has started is over."""
        self._agent = agent
        self._settle = settle
        self._pins: dict[str, Pinned] = {}
        self._hints: dict[str, int] = {}
        self._bound: set[str] = set()

    @property
    def memory(self) -> Tensor:
        return self._agent.memory

    @property
    def peak_count(self) -> int:
        return self._agent.status().peak_bytes // self._agent.namespace.block_layout.payload_bytes

    def step(self, queue: Queue) -> None:
        self._agent.step()
        for sequence, at in queue:
            if sequence in self._bound and sequence not in self._pins and self._hints.get(sequence) != at:
                self._agent.hint(sequence, at)
        self._hints = dict(queue)
        self._settle()

    def start(self, sequence: str, blocks: Sequence[BlockHash]) -> list[SlotId]:
        self._agent.bind(sequence, blocks)
        self._bound.add(sequence)
        self._pins[sequence] = self._agent.pin(sequence)
        return self._pins[sequence].slots

    def reserve(self, count: int) -> list[SlotId]:
        slots = self._agent.reserve(count)
        if len(slots) < count:
            raise CapacityError(f"{self._agent.slot_count} slots are too few for one step")
        return slots

    def seal(self, sequence: str, slots: Sequence[SlotId], blocks: Sequence[BlockHash]) -> list[SlotId]:
        first = len(blocks) - len(slots)
        self._agent.seal_all(slots, blocks[first:], parent_hash=blocks[first - 1] if first else None)
        before = self._pins[sequence]
        slots_of_all = self.start(sequence, blocks)
        before.release()
        return slots_of_all

    def discard(self, slots: Sequence[SlotId]) -> None:
        self._agent.discard(slots)

    def stop(self, sequence: str) -> None:
        if sequence in self._hints:
            # It goes back into the queue.
            self._agent.hint(sequence, self._hints[sequence])
        self._pins.pop(sequence).release()

    def finish(self, sequence: str) -> None:
        self._agent.unbind(sequence)
        self._bound.remove(sequence)
