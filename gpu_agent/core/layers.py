"""A block's payload by layers, so that the first layers can be computed on while later ones still come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpu_agent.core.transfers import Part
from kvstore.layout import BlockLayout, OpaqueOrder
from kvstore.precision import EncodedLayout


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Neighbouring layers, and where the K and the V of all of them lie in a payload."""

    first_layer: int
    end_layer: int
    """After the last one."""
    parts: tuple[Part, ...]


def layer_groups(
    layout: BlockLayout, group_count: int, *, stored: EncodedLayout | None = None
) -> tuple[LayerGroup, ...]:
    """All layers in up to `group_count` groups, in order and as equal as possible; together they are the payload.

    That of `stored` where blocks come as they are stored. One group when only the engine knows what lies where: in an
    opaque layout.
    """
    assert group_count >= 1, f"{group_count} groups"
    if isinstance(layout.order, OpaqueOrder):
        group_count = 1
    if stored is None:
        planes = [(plane.offset_bytes, plane.strides_bytes[0], plane.size_bytes) for plane in layout.planes]
    else:
        planes = [(plane.offset_bytes, plane.layer_bytes, plane.size_bytes) for plane in stored.planes]
    return tuple(
        LayerGroup(
            first, end, tuple(_part(*plane, first, None if end == layout.num_layers else end) for plane in planes)
        )
        for first, end in _ranges(layout.num_layers, min(group_count, layout.num_layers))
    )


def _ranges(layer_count: int, group_count: int) -> Iterator[tuple[int, int]]:
    for group in range(group_count):
        yield group * layer_count // group_count, (group + 1) * layer_count // group_count


def _part(plane_offset_bytes: int, layer_bytes: int, plane_bytes: int, first_layer: int, end_layer: int | None) -> Part:
    """No end: with what fills the plane up behind its last layer."""
    start_bytes = first_layer * layer_bytes
    end_bytes = plane_bytes if end_layer is None else end_layer * layer_bytes
    return Part(plane_offset_bytes + start_bytes, end_bytes - start_bytes)
