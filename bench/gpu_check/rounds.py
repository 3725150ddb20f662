"""Bytes that go round through the device and the agent come back as they were."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.gpu_check.rig import Result, Rig
from bench.gpu_check.whole_agent import round_trip
from gpu_agent.core.layers import layer_groups
from kvstore.layout import LayoutOrder

_LAYER_GROUP_COUNT = 8
_BUSY_CYCLES = 20_000_000


def check_rounds(rig: Rig) -> Iterator[Result]:
    for check in (_through_staging, _by_layers, _after_the_source_was_overwritten):
        yield Result(name=check.__name__.strip("_"), passed=check(rig))
    for order in LayoutOrder:
        yield Result(name=f"through_pages_{order.value.lower()}", passed=_through_pages(rig, order))


def _through_staging(rig: Rig) -> bool:
    """Caller, pool, host, other slots of the pool, caller."""
    count = rig.sizes.batch_count
    rows = rig.rows(2 * count)
    blocks, indices = rig.noise(count), range(count)
    back = torch.zeros_like(blocks)
    rig.copy_for_caller(blocks, indices, rig.pool, rows[:count])
    rig.device.copy_rows(source=rig.pool, source_rows=rows[:count], target=rig.staging, target_rows=indices)
    rig.device.copy_rows(source=rig.staging, source_rows=indices, target=rig.pool, target_rows=rows[count:]).wait()
    rig.copy_for_caller(rig.pool, rows[count:], back, indices)
    return torch.equal(back, blocks) and torch.equal(rig.staging, blocks.cpu())


def _by_layers(rig: Rig) -> bool:
    """The current stream reads each group of layers as soon as it may, while others still come."""
    count = rig.sizes.batch_count
    rows, groups = rig.rows(count), layer_groups(rig.sizes.layout, _LAYER_GROUP_COUNT)
    rig.staging.copy_(rig.noise(count))
    rig.synchronise()
    rig.pool[rows] = 0
    rig.device.follow_caller()
    events = rig.device.copy_layers(
        source=rig.staging, source_rows=range(count), target=rig.pool, target_rows=rows, groups=groups
    )
    seen: list[tuple[Tensor, Tensor]] = []
    for group, event in zip(groups, events, strict=True):
        rig.device.before_caller(event)
        for part in group.parts:
            end = part.offset_bytes + part.size_bytes
            seen.append((rig.pool[rows, part.offset_bytes : end], rig.staging[:, part.offset_bytes : end]))
    return all(torch.equal(found.cpu(), right) for found, right in seen)


def _after_the_source_was_overwritten(rig: Rig) -> bool:
    """What is stored is still being computed, and its place is used again at once."""
    count = rig.sizes.batch_count
    rows, right = rig.rows(count), rig.noise(count)
    blocks, back = torch.zeros_like(right), torch.zeros_like(right)
    rig.synchronise()
    if rig.is_cuda:
        torch.cuda._sleep(_BUSY_CYCLES)  # noqa: SLF001  # no other call keeps a stream waiting
    blocks.copy_(right)
    rig.copy_for_caller(blocks, range(count), rig.pool, rows)
    blocks.zero_()
    rig.copy_for_caller(rig.pool, rows, back, range(count))
    seen = back.clone()
    back.zero_()
    return torch.equal(seen, right) and not bool(back.any())


def _through_pages(rig: Rig, order: LayoutOrder) -> bool:
    """Pages into the pool, other pages from there; the payload is what the layout says."""
    count = rig.sizes.batch_count // 2
    cache, rows = rig.cache(order), rig.rows(count)
    pages = rig.pages(2 * count)
    source, target = cache.blocks(pages[:count]), cache.blocks(pages[count:])
    before = [[plane.clone() for plane in layer] for layer in cache.layers]
    rig.copy_for_caller(source, range(count), rig.pool, rows)
    rig.copy_for_caller(rig.pool, rows, target, range(count))
    sources, targets = ([page for (page,) in part] for part in (pages[:count], pages[count:]))
    others = [page for page in range(rig.sizes.page_count) if page not in targets]
    are_pages_right = all(
        torch.equal(now[targets], then[sources]) and torch.equal(now[others], then[others])
        for layer, layer_before in zip(cache.layers, before, strict=True)
        for now, then in zip(layer, layer_before, strict=True)
    )
    plane = cache.layout.planes[0]
    payload = rig.pool[rows[0], : plane.size_bytes].view(before[0][0].dtype).view(plane.shape)
    return are_pages_right and all(
        torch.equal(payload[layer], before[layer][0][sources[0]]) for layer in range(plane.shape[0])
    )


def check_agent(rig: Rig) -> Iterator[Result]:
    """A pool of fewer blocks than are stored: all of them come back, from the pool or from below."""
    for is_direct in (False, True):
        counts = round_trip(rig, is_direct=is_direct)
        name = f"agent_{'registered_slots' if is_direct else 'staging'}"
        yield Result(name=name, passed=counts is not None, figures=dict(counts or {}))
