"""An engine's paged cache: per layer a K and a V tensor of pages, which gather into blocks and scatter from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_agent.core.pieces import PagePlane, Piece, plan_piece
from kvstore.errors import InvalidArgumentError
from kvstore.layout import DTYPE_BYTES, BlockLayout, LayoutOrder, Plane

PageTable = npt.NDArray[np.int64]


class PagedCache:
    """Where an engine keeps its K and V: for every layer the tensors of its planes, pages first.

    A tensor is `[page, token, head, element]` when the blocks are NHD, and `[page, head, token, element]` when they are
    HND; the innermost two axes are contiguous, the others may have any stride. So separate tensors per layer, one
    with K and V side by side, and one with all layers inside a page are all described by views of them. Blocks are
    one page or several whole ones.
    """

    def __init__(self, layout: BlockLayout, layers: Sequence[Sequence[Tensor]]) -> None:
        """One sequence per layer: its K and V, or K alone where the layout has no V plane."""
        if len(layers) != layout.num_layers:
            raise InvalidArgumentError.of("layers", f"{len(layers)} layers", f"{layout.num_layers}, as in the layout")
        if not isinstance(layout.order, LayoutOrder):
            raise InvalidArgumentError.of("layout", layout.order, f"{', '.join(LayoutOrder)} for a paged cache")
        self.layout = layout
        self.order = layout.order
        self.layers = tuple(tuple(tensor.detach() for tensor in layer) for layer in layers)
        self._token_axis = 1 if self.order is LayoutOrder.NHD else 2
        first = self._planes(self.layers[0], 0)[0][1]
        tokens_per_page = first.shape[self._token_axis] if first.dim() == 4 else 0
        if tokens_per_page < 1 or layout.tokens_per_block % tokens_per_page:
            raise InvalidArgumentError.of(
                "layers[0][0]",
                f"shape {tuple(first.shape)}",
                f"4 axes; on axis {self._token_axis} the tokens of a page, a divisor of {layout.tokens_per_block}",
            )
        self.device, self.page_count = first.device, first.shape[0]
        self.pages_per_block = layout.tokens_per_block // tokens_per_page
        self.pieces = tuple(
            self._piece(plane, index, tensor, field=f"layers[{index}][{number}]")
            for index, layer in enumerate(self.layers)
            for number, (plane, tensor) in enumerate(self._planes(layer, index))
        )

    def blocks(self, pages: Sequence[Sequence[int]] | PageTable) -> PagedBlocks:
        """Blocks of this cache: for each one the numbers of its pages, in the order of their tokens."""
        table: Any = np.asarray(pages)
        if table.size == 0:
            table = np.empty((len(table), self.pages_per_block), dtype=np.int64)
        if table.ndim != 2 or table.shape[1] != self.pages_per_block or table.dtype.kind not in "iu":
            raise InvalidArgumentError.of(
                "pages", f"shape {table.shape} of {table.dtype}", f"whole numbers, {self.pages_per_block} per block"
            )
        if table.size and not 0 <= table.min() <= table.max() < self.page_count:
            raise InvalidArgumentError.of(
                "pages", f"{table.min()} to {table.max()}", f"0 to {self.page_count - 1}, the pages of this cache"
            )
        return PagedBlocks(self, table.astype(np.int64))

    def _planes(self, layer: Sequence[Tensor], index: int) -> list[tuple[Plane, Tensor]]:
        planes = self.layout.planes
        if len(layer) != len(planes):
            names = " and ".join(plane.name for plane in planes)
            raise InvalidArgumentError.of(f"layers[{index}]", f"{len(layer)} tensors", f"{len(planes)}: {names}")
        return list(zip(planes, layer, strict=True))

    def _piece(self, plane: Plane, layer: int, tensor: Tensor, *, field: str) -> Piece:
        shape = [self.page_count, *plane.shape[1:]]
        shape[self._token_axis] //= self.pages_per_block
        element_bytes = DTYPE_BYTES[self.layout.dtype]
        if list(tensor.shape) != shape or tensor.element_size() != element_bytes or tensor.device != self.device:
            raise InvalidArgumentError.of(
                field,
                f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}",
                f"{tuple(shape)} of {self.layout.dtype} on {self.device}",
            )
        if tensor.stride(3) != 1 or (shape[2] > 1 and tensor.stride(2) != shape[3]):
            raise InvalidArgumentError.of(field, f"strides {tensor.stride()}", "the innermost two axes contiguous")
        pages = PagePlane(
            address=tensor.data_ptr(),
            page_pitch_bytes=tensor.stride(0) * element_bytes,
            row_pitch_bytes=tensor.stride(1) * element_bytes,
            row_count=shape[1],
            row_bytes=shape[2] * shape[3] * element_bytes,
        )
        return plan_piece(
            plane,
            layer,
            pages,
            order=self.order,
            pages_per_block=self.pages_per_block,
        )


class PagedBlocks:
    """Some blocks of a paged cache, each with the numbers of its pages."""

    __slots__ = ("cache", "pages")

    def __init__(self, cache: PagedCache, pages: PageTable) -> None:
        self.cache = cache
        self.pages = pages

    def __len__(self) -> int:
        return len(self.pages)

    def __getitem__(self, part: slice) -> PagedBlocks:
        return PagedBlocks(self.cache, self.pages[part])


def move_pages(
    *,
    source: Tensor | PagedBlocks,
    source_rows: Sequence[int],
    target: Tensor | PagedBlocks,
    target_rows: Sequence[int],
) -> None:
    """Between pages and rows, in either direction, one copy per page, layer and plane; works on every device."""
    if isinstance(source, PagedBlocks):
        assert isinstance(target, Tensor), "pages into pages"
        gather(source, source_rows, target=target, target_rows=target_rows)
    else:
        assert isinstance(target, PagedBlocks), "neither end has pages"
        scatter(target, target_rows, source=source, source_rows=source_rows)


def gather(blocks: PagedBlocks, indices: Sequence[int], *, target: Tensor, target_rows: Sequence[int]) -> None:
    """Collects blocks from their pages into rows."""
    for index, row in zip(indices, target_rows, strict=True):
        for page, part in _parts(blocks, index, target[row]):
            part.copy_(page)


def scatter(blocks: PagedBlocks, indices: Sequence[int], *, source: Tensor, source_rows: Sequence[int]) -> None:
    """The opposite of `gather`."""
    for index, row in zip(indices, source_rows, strict=True):
        for page, part in _parts(blocks, index, source[row]):
            page.copy_(part)


def _parts(blocks: PagedBlocks, index: int, payload: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each page of a block in its cache, and the same elements in the block's payload, as bytes."""
    cache, parts = blocks.cache, []
    for number, plane in enumerate(cache.layout.planes):
        element_bytes = plane.strides_bytes[3]
        end_bytes = plane.offset_bytes + plane.size_bytes
        shape = (*plane.shape[:3], plane.shape[3] * element_bytes)
        whole = payload[plane.offset_bytes : end_bytes].view(shape)
        for layer, tensors in enumerate(cache.layers):
            pages = tensors[number].view(torch.uint8)
            tokens_axis = 0 if cache.order is LayoutOrder.NHD else 1
            for page, part in zip(
                blocks.pages[index].tolist(), whole[layer].chunk(cache.pages_per_block, dim=tokens_axis), strict=True
            ):
                parts.append((pages[page], part))
    return parts
