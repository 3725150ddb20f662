"""SGLang's host pools as blocks: where the bytes of a page lie, and how they get from there to a block and back.

It takes SGLang's objects and calls only what it names in the protocol here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidArgumentError
from kvstore.layout import DTYPE_BYTES
from kvstore_client.integrations._blocks import BlockShape

Bytes = npt.NDArray[np.uint8]

_AXIS_MAX = 1 << 20
"""The longest axis of a block."""

_PLANAR_LAYOUTS = ("layer_first", "page_first_direct")
"""Those in which a page is K of all layers and then V, as in `NHD`."""

_IDENTITY = (
    # What a pool may have that says what its bytes are; one that has it and one that has not never share.
    *("dtype", "head_num", "head_dim", "v_head_dim", "layer_num", "target_layer_num", "start_layer", "end_layer"),
    *("kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "item_bytes", "slot_page_size", "state_page_bytes"),
    *("indexer_dtype", "indexer_page_stride_size", "index_head_dim", "dsa_kv_cache_store_fp8", "quant_block_size"),
    *("conv_dtype", "conv_state_shapes", "temporal_dtype", "temporal_state_shape", "num_mamba_layers"),
    *("swa_page_size", "dcp_size", "storage_format_tag", "stores_page_envelope"),
)


class HostPool(Protocol):
    """What is asked of a pool. `indices` are of slots, `page_size` of them for each page."""

    layout: str
    page_size: int

    def get_page_buffer_meta(self, indices: Any) -> tuple[Sequence[int], Sequence[int]] | None:
        """Address and size of the pieces of pages, page by page; raises where a layout has no such pieces."""

    def get_data_page(self, index: int, flat: bool = True) -> Any: ...
    def set_from_flat_data_page(self, index: int, data_page: Any) -> None: ...


class Page(Protocol):
    """The bytes of one page where the engine holds them, in the block's order."""

    def read(self, into: Bytes) -> None: ...
    def write(self, payload: Bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class PiecesPage:
    """A page that lies in the pool's memory in pieces: one copy, which leaves the interpreter to others."""

    pieces: tuple[Bytes, ...]
    """Each of one dimension, or of two with rows that lie apart."""

    def read(self, into: Bytes) -> None:
        start = 0
        for piece in self.pieces:
            np.copyto(into[start : start + piece.size].reshape(piece.shape), piece)
            start += piece.size

    def write(self, payload: Bytes) -> None:
        start = 0
        for piece in self.pieces:
            np.copyto(piece, payload[start : start + piece.size].reshape(piece.shape))
            start += piece.size


@dataclass(frozen=True, slots=True)
class FlatPage:
    """A page of a pool that gives whole pages only, as copies."""

    pool: HostPool
    index: int

    def read(self, into: Bytes) -> None:
        np.copyto(into, tensor_bytes(self.pool.get_data_page(self.index)))

    def write(self, payload: Bytes) -> None:
        import torch

        page = torch.empty(payload.size, dtype=torch.uint8)
        np.copyto(page.numpy(), payload)
        dtype = self.pool.get_data_page(self.index).dtype
        self.pool.set_from_flat_data_page(self.index, page.view(dtype))


class PagePool:
    """Pages of one pool, each of which is a block of `shape`; `identity` is what else must be equal to share them.

    `is_logical` is of pools that hold indices and no bytes: there is nothing to store of them.
    """

    def __init__(self, pool: HostPool, *, name: str) -> None:
        import torch

        self._pool = pool
        self.name = name
        self.kind = type(pool).__name__
        self.page_size = int(getattr(pool, "page_size", 1) or 1)
        self._is_planar = False
        first = torch.arange(self.page_size, dtype=torch.int64)
        self._has_pieces, sizes = self._probe(first)
        self.is_logical = not sizes
        if not self.is_logical:
            self._is_planar = self.kind == "MHATokenToKVPoolHost" and pool.layout in (
                "layer_first",
                "page_first_direct",
            )
            self.shape = self._shape(sum(sizes))
            self.identity = self._identity(sizes)

    @property
    def page_bytes(self) -> int:
        return self.shape.payload_bytes

    def pages(self, host_indices: Any, *, page_count: int) -> Sequence[Page]:
        """Raises ValueError when there are not as many indices as these pages have slots."""
        if host_indices is None or len(host_indices) != page_count * self.page_size:
            given = 0 if host_indices is None else len(host_indices)
            raise ValueError(f"{given} indices of pool {self.name} for {page_count} pages of {self.page_size} slots")
        if not self._has_pieces:
            return [FlatPage(self._pool, int(index)) for index in host_indices[:: self.page_size].tolist()]
        addresses, sizes = self._pool.get_page_buffer_meta(host_indices) or ((), ())
        each = len(addresses) // page_count
        assert each * page_count == len(addresses) == len(sizes), f"{len(addresses)} pieces of {page_count} pages"
        spans = [(start, start + each) for start in range(0, len(addresses), each)]
        return [PiecesPage(self._pieces(addresses[start:end], sizes[start:end])) for start, end in spans]

    def _probe(self, first: Any) -> tuple[bool, Sequence[int]]:
        """Whether pages lie in pieces, and the sizes of what a page consists of."""
        try:
            pieces = self._pool.get_page_buffer_meta(first)
        except (ValueError, NotImplementedError):
            try:
                return False, [tensor_bytes(self._pool.get_data_page(0)).size]
            except NotImplementedError as error:
                allowed = f"a layout whose pages can be stored, which this one of pool {self.name} cannot: {error}"
                raise InvalidArgumentError.of("hicache_mem_layout", self._pool.layout, allowed) from error
        return True, list(pieces[1]) if pieces else []

    def _pieces(self, addresses: Sequence[int], sizes: Sequence[int]) -> tuple[Bytes, ...]:
        if self._is_planar:
            # SGLang tells K and V of each layer in turn; a block has all of K first.
            addresses, sizes = [*addresses[::2], *addresses[1::2]], [*sizes[::2], *sizes[1::2]]
        steps = {after - before for before, after in pairwise(addresses)}
        if len(steps) == 1 and len(set(sizes)) == 1:
            return (_memory(addresses[0], (len(sizes), sizes[0]), row_bytes=steps.pop()),)
        pieces = zip(addresses, sizes, strict=True)
        return tuple(_memory(address, (1, size), row_bytes=size) for address, size in pieces)

    def _shape(self, page_bytes: int) -> BlockShape:
        pool: Any = self._pool
        if self._is_planar:
            shape = BlockShape(
                layout="NHD",
                dtype=_dtype_name(pool.dtype),
                num_layers=pool.layer_num,
                num_kv_heads=pool.head_num,
                head_dim=pool.head_dim,
                v_head_dim=pool.head_dim,
                tokens_per_block=self.page_size,
            )
            if shape.dtype in DTYPE_BYTES and shape.payload_bytes == page_bytes:
                return shape
            self._is_planar = False
        return _bytes_shape(page_bytes, layout=f"opaque:sglang-{pool.layout}", row_count=self.page_size)

    def _identity(self, sizes: Sequence[int]) -> Mapping[str, object]:
        told: dict[str, object] = {
            name: str(value) for name in _IDENTITY if (value := getattr(self._pool, name, None)) is not None
        }
        told |= {"pool": self.name, "kind": self.kind, "page_size": self.page_size}
        if not self._is_planar:
            told |= {"layout": self._pool.layout, "pieces": list(sizes)}
        return told


def _bytes_shape(page_bytes: int, *, layout: str, row_count: int) -> BlockShape:
    """A block of bytes that only the engine can tell apart: as many rows as divide it, none longer than an axis."""
    row_count = row_count if page_bytes % row_count == 0 else 1
    row_bytes = page_bytes // row_count
    head_count = -(-row_bytes // _AXIS_MAX)
    while row_bytes % head_count:
        head_count += 1
    return BlockShape(
        layout=layout,
        dtype="int8",
        num_layers=1,
        num_kv_heads=head_count,
        head_dim=row_bytes // head_count,
        v_head_dim=0,
        tokens_per_block=row_count,
    )


def _memory(address: int, shape: tuple[int, int], *, row_bytes: int) -> Bytes:
    """Memory that somebody else owns, and keeps for as long as the pool is there."""
    told = {"data": (address, False), "shape": shape, "strides": (row_bytes, 1), "typestr": "|u1", "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=told))


def tensor_bytes(tensor: Any) -> Bytes:
    """The bytes of a CPU tensor; the tensor's own memory where that is contiguous."""
    import torch

    flat: Bytes = tensor.contiguous().view(torch.uint8).reshape(-1).numpy()
    return flat


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
