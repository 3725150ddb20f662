"""What is stored below the pool: its blocks as they are, or in fewer bits; and how blocks get from one to the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from gpu_agent.core.layers import LayerGroup, layer_groups
from gpu_agent.core.scratch import ScratchPlan
from gpu_agent.device import Event, HostSlots
from gpu_agent.pool import Pool
from gpu_agent.precision.tier import BlockCodec
from kvstore.namespace import Namespace
from kvstore.slots import SlotId


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Blocks as they are to be stored, in rows on the device."""

    memory: Tensor
    rows: Sequence[int]
    refused: frozenset[int]
    """Positions of those that cannot be stored so; what is in their rows means nothing."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """Copies into the pool that are queued."""

    events: Sequence[Event]
    """One per group of layers."""
    before: Sequence[Event] = ()
    """Of what those came from: all must have gone well."""


class Below(Protocol):
    """How blocks are stored below the pool. For one thread that sends and several that load."""

    @property
    def namespace(self) -> Namespace:
        """Where they are stored; its `stored_bytes` is what crosses the link."""

    def take_out(self, slots: Sequence[SlotId]) -> Outgoing:
        """Blocks of the pool in their stored form, until the next call."""

    def bring_from_slots(
        self, payloads: Sequence[memoryview], pool_slots: Sequence[SlotId], *, groups: Sequence[LayerGroup]
    ) -> Incoming | None:
        """Queues copies of stored blocks into the pool; None when the device does not reach all of them."""

    def bring_from_staging(
        self, staging: Tensor, rows: Sequence[int], pool_slots: Sequence[SlotId], *, groups: Sequence[LayerGroup]
    ) -> Incoming: ...

    def restore(self, staging: Tensor, rows: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """Stored blocks on the host as the engine has them, there."""


class ExactBelow:
    """The same bytes, so blocks move from place to place."""

    def __init__(self, pool: Pool, namespace: Namespace) -> None:
        self._pool = pool
        self.namespace = namespace

    def take_out(self, slots: Sequence[SlotId]) -> Outgoing:
        return Outgoing(self._pool.memory, slots, frozenset())

    def bring_from_slots(
        self, payloads: Sequence[memoryview], pool_slots: Sequence[SlotId], *, groups: Sequence[LayerGroup]
    ) -> Incoming | None:
        events = self._pool.device.load_layers_from_slots(
            HostSlots(payloads), range(len(payloads)), pool=self._pool.memory, pool_rows=pool_slots, groups=groups
        )
        return None if events is None else Incoming(events)

    def bring_from_staging(
        self, staging: Tensor, rows: Sequence[int], pool_slots: Sequence[SlotId], *, groups: Sequence[LayerGroup]
    ) -> Incoming:
        events = self._pool.device.copy_layers(
            source=staging, source_rows=rows, target=self._pool.memory, target_rows=pool_slots, groups=groups
        )
        return Incoming(events)

    def restore(self, staging: Tensor, rows: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        return staging, rows


_Copy: TypeAlias = Callable[[range, LayerGroup], Sequence[Event] | None]


class EncodedBelow:
    """Fewer bits: blocks are encoded before they leave the device and decoded when they are on it again.

    Between that they are in scratch, one part of it for each direction. All of it happens on the copy stream, in
    order, so a part may be filled again as soon as what empties it is queued.
    """

    def __init__(self, pool: Pool, namespace: Namespace, *, offload_count: int, load_count: int) -> None:
        device, stored_bytes = pool.device, namespace.stored_bytes
        self._pool = pool
        self.namespace = namespace
        self._codec = BlockCodec(namespace, device=pool.memory.device)
        self._going = device.allocate_scratch(row_count=offload_count, block_bytes=stored_bytes)
        self._coming = device.allocate_scratch(row_count=load_count, block_bytes=stored_bytes)
        self._kept = device.allocate_scratch(row_count=1, block_bytes=offload_count)[0]
        self._kept_on_host = device.allocate_staging(row_count=1, block_bytes=offload_count)[0]
        self._queueing = threading.Lock()
        """Held while filling and emptying `_coming` is queued, so that nobody fills it in between."""

    def take_out(self, slots: Sequence[SlotId]) -> Outgoing:
        self._pool.device.compute(partial(self._encode, list(slots))).wait()
        kept = self._kept_on_host[: len(slots)].tolist()
        refused = frozenset(position for position, is_kept in enumerate(kept) if not is_kept)
        return Outgoing(self._going, range(len(slots)), refused)

    def bring_from_slots(
        self, payloads: Sequence[memoryview], pool_slots: Sequence[SlotId], *, groups: Sequence[LayerGroup]
    ) -> Incoming | None:
        slots, device = HostSlots(payloads), self._pool.device

        def copy(part: range, group: LayerGroup) -> Sequence[Event] | None:
            return device.load_layers_from_slots(
                slots, part, pool=self._coming, pool_rows=range(len(part)), groups=[group]
            )

        return self._bring(copy, pool_slots, groups=groups)

    def bring_from_staging(
        self, staging: Tensor, rows: Sequence[int], pool_slots: Sequence[SlotId], *, groups: Sequence[LayerGroup]
    ) -> Incoming:
        device = self._pool.device

        def copy(part: range, group: LayerGroup) -> Sequence[Event]:
            source_rows = rows[part.start : part.stop]
            return device.copy_layers(
                source=staging,
                source_rows=source_rows,
                target=self._coming,
                target_rows=range(len(part)),
                groups=[group],
            )

        incoming = self._bring(copy, pool_slots, groups=groups)
        assert incoming is not None, "staging is always within reach"
        return incoming

    def restore(self, staging: Tensor, rows: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        blocks = torch.empty((len(rows), self._pool.block_bytes), dtype=torch.uint8)
        places = range(len(rows))
        BlockCodec(self.namespace, device=blocks.device).decode_rows(staging[list(rows)], pool=blocks, rows=places)
        return blocks, places

    def _encode(self, slots: Sequence[SlotId]) -> None:
        self._codec.encode_rows(self._pool.memory, slots, out=self._going, kept=self._kept)
        self._kept_on_host.copy_(self._kept, non_blocking=True)

    def _bring(self, copy: _Copy, pool_slots: Sequence[SlotId], *, groups: Sequence[LayerGroup]) -> Incoming | None:
        """One group of layers of all blocks after the other, as many blocks at a time as fit into scratch."""
        stored_groups = layer_groups(self.namespace.block_layout, len(groups), stored=self.namespace.encoded_layout)
        events, before = list[Event](), list[Event]()
        count_max = len(self._coming)
        for group, stored_group in zip(groups, stored_groups, strict=True):
            layers = range(group.first_layer, group.end_layer)
            for start in range(0, max(1, len(pool_slots)), count_max):
                part = range(start, min(start + count_max, len(pool_slots)))
                targets = pool_slots[part.start : part.stop]
                with self._queueing:
                    copied = copy(part, stored_group)
                    if copied is None:
                        return None
                    before += copied
                    before.append(self._pool.device.compute(partial(self._decode, targets, layers)))
            events.append(before[-1])
        return Incoming(events, before)

    def _decode(self, pool_slots: Sequence[SlotId], layers: range) -> None:
        self._codec.decode_rows(self._coming, pool=self._pool.memory, rows=pool_slots, layers=layers)


def open_below(pool: Pool, namespace: Namespace, scratch: ScratchPlan) -> Below:
    """For blocks that are stored in this namespace."""
    if namespace.encoded_layout.is_exact:
        return ExactBelow(pool, namespace)
    return EncodedBelow(pool, namespace, offload_count=scratch.offload_count, load_count=scratch.load_count)
